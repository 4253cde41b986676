// Concatenation of narrow pieces of bytes and pairs of them: so many rows of all arrays that they
// are whole packs are brought to shared memory, and gathered there.
//
// Which bytes of the sources a word of the destination is made of is the same in every tile, and a
// number of rows further on, in a pattern, but for a step. A block works it out once, as a table in
// shared memory, and stays for many tiles; while it gathers one, the next is under way.
#include <cuda_pipeline_primitives.h>

#include <algorithm>

#include "cuda/concatenate.h"
#include "cuda/concatenate_launches.h"
#include "cuda/launch.h"
#include "cuda/numeric.cuh"

namespace jaxops::concatenate::cuda {
namespace {

using jaxops::cuda::CeilDiv;
using jaxops::cuda::kPackBytes;
using jaxops::cuda::Launch;

constexpr int kThreads = 128;
constexpr int kBlocks = 6;  // of a multiprocessor: enough to keep it busy while some wait
constexpr int kMostPieces = 16;
constexpr int kWordBytes = 4;
constexpr int64_t kTileBytes = 8192;
constexpr int64_t kMostTileBytes = 12288;
constexpr int kFewTiles = 256;
constexpr int kTogether = 4;  // words of a thread

struct TilePiece {
  const unsigned char* source;
  uint32_t row_bytes;
  uint32_t begin;  // in a row of the destination
  uint32_t place;  // in a stage
};

struct Tiles {
  TilePiece pieces[kMostPieces];
  int count;
  unsigned char* to;
  uint32_t row_bytes;
  uint32_t rows;  // of a tile
  uint32_t pattern_rows;
  uint32_t pattern_words;
  int64_t tiles;
  int64_t all_rows;

  __host__ __device__ uint32_t stage_bytes() const { return rows * row_bytes; }

  __device__ __forceinline__ uint32_t RowsOf(int64_t tile) const {
    return static_cast<uint32_t>(min(int64_t{rows}, all_rows - tile * rows));
  }
};

// Begins to bring a tile to shared memory.
__device__ __forceinline__ void Fetch(const Tiles& table, int64_t tile, unsigned char* stage) {
  const uint32_t rows = table.RowsOf(tile);
  for (int p = 0; p < table.count; ++p) {
    const TilePiece& piece = table.pieces[p];
    const unsigned char* from = piece.source + tile * table.rows * piece.row_bytes;
    const uint32_t bytes = rows * piece.row_bytes;
    for (uint32_t at = threadIdx.x * kPackBytes; at < bytes; at += kThreads * kPackBytes) {
      const uint32_t there = min(bytes - at, kPackBytes);
      __pipeline_memcpy_async(stage + piece.place + at, from + at, kPackBytes, kPackBytes - there);
    }
  }
}

// Where in a stage an item is in the first pattern, and how much further in the next one.
struct ItemPlace {
  uint16_t offset;
  uint16_t step;
};

template <typename Item>
constexpr int kItems = kWordBytes / sizeof(Item);

template <typename Item>
__device__ __forceinline__ void FillTable(const Tiles& table, ItemPlace* places) {
  const uint32_t items = table.pattern_words * kItems<Item>;
  for (uint32_t i = threadIdx.x; i < items; i += kThreads) {
    const uint32_t row = i * sizeof(Item) / table.row_bytes;
    const uint32_t column = i * sizeof(Item) % table.row_bytes;
    int p = 0;
    while (p + 1 < table.count && table.pieces[p + 1].begin <= column) ++p;
    const TilePiece& piece = table.pieces[p];
    places[i] = {static_cast<uint16_t>(piece.place + row * piece.row_bytes + column - piece.begin),
                 static_cast<uint16_t>(piece.row_bytes * table.pattern_rows)};
  }
}

// Gathers one word after the other, of neighbouring patterns.
template <typename Item>
struct WordItems {
  const unsigned char* stage;
  uint32_t offsets[kItems<Item>];
  uint32_t steps[kItems<Item>];

  __device__ __forceinline__ WordItems(const unsigned char* from, const ItemPlace* places)
      : stage(from) {
#pragma unroll
    for (int i = 0; i < kItems<Item>; ++i) {
      offsets[i] = places[i].offset;
      steps[i] = places[i].step;
    }
  }

  __device__ __forceinline__ uint32_t Next() {
    uint32_t items[kItems<Item>];
#pragma unroll
    for (int i = 0; i < kItems<Item>; ++i) {
      items[i] = *reinterpret_cast<const Item*>(stage + offsets[i]);
      offsets[i] += steps[i];
    }
    if constexpr (sizeof(Item) == 2) {
      return __byte_perm(items[0], items[1], 0x5410);
    } else {
      return __byte_perm(__byte_perm(items[0], items[1], 0x0040),
                         __byte_perm(items[2], items[3], 0x0040), 0x5410);
    }
  }
};

template <typename Item>
__global__ void __launch_bounds__(kThreads) MoveTiles(const __grid_constant__ Tiles table) {
  extern __shared__ __align__(16) unsigned char shared[];
  const uint32_t stage_bytes = table.stage_bytes();
  auto* places = reinterpret_cast<ItemPlace*>(shared + 2 * stage_bytes);
  Fetch(table, blockIdx.x, shared);
  __pipeline_commit();
  FillTable<Item>(table, places);
  const uint32_t pattern = table.pattern_words;
  uint32_t place = 0;
  for (int64_t tile = blockIdx.x; tile < table.tiles; tile += gridDim.x) {
    const unsigned char* stage = shared + place;
    place = stage_bytes - place;
    if (tile + gridDim.x < table.tiles) Fetch(table, tile + gridDim.x, shared + place);
    __pipeline_commit();
    __pipeline_wait_prior(1);
    __syncthreads();
    unsigned char* to = table.to + tile * stage_bytes;
    const uint32_t bytes = table.RowsOf(tile) * table.row_bytes;
    const uint32_t words = bytes / kWordBytes;
    for (uint32_t w = threadIdx.x; w < pattern; w += kThreads) {
      WordItems<Item> items(stage, places + w * kItems<Item>);
      auto* to_words = reinterpret_cast<uint32_t*>(to);
      uint32_t word = w;
      for (; word + (kTogether - 1) * pattern < words; word += kTogether * pattern) {
        uint32_t gathered[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) gathered[i] = items.Next();
#pragma unroll
        for (int i = 0; i < kTogether; ++i) to_words[word + i * pattern] = gathered[i];
      }
      for (; word < words; word += pattern) to_words[word] = items.Next();
    }
    // What the last tile has of a word.
    const uint32_t rest = bytes % kWordBytes / sizeof(Item);
    if (threadIdx.x < rest) {
      const ItemPlace item = places[words % pattern * kItems<Item> + threadIdx.x];
      reinterpret_cast<Item*>(to)[words * kItems<Item> + threadIdx.x] =
          *reinterpret_cast<const Item*>(stage + item.offset + words / pattern * item.step);
    }
    __syncthreads();
  }
}

bool IsAligned(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// Fills in what does not depend on the items. False where the arrays are not made of whole rows.
bool Plan(Tiles& table, const Job& job, int64_t unit) {
  if (job.broadcasts || job.destinations.size() != 1 || job.pieces.size() > kMostPieces) {
    return false;
  }
  const Destination& destination = job.destinations[0];
  if (!IsAligned(destination.data, kWordBytes)) return false;
  // Rows that are whole packs of every array.
  const int64_t row_bytes = destination.row_bytes;
  int64_t rows = kPackBytes / unit;
  if (row_bytes > kMostTileBytes / rows) return false;
  while (2 * rows * row_bytes <= kTileBytes) rows *= 2;
  table.tiles = CeilDiv(job.rows, rows);
  if (table.tiles < kFewTiles) return false;
  table.to = static_cast<unsigned char*>(destination.data);
  table.row_bytes = static_cast<uint32_t>(row_bytes);
  table.rows = static_cast<uint32_t>(rows);
  table.all_rows = job.rows;

  table.count = 0;
  uint32_t begin = 0;
  for (const Piece& piece : job.pieces) {
    if (piece.size == 0 || piece.size != piece.extent || piece.size != piece.stride ||
        !IsAligned(piece.source, kPackBytes)) {
      return false;
    }
    const auto size = static_cast<uint32_t>(piece.size);
    table.pieces[table.count++] = {static_cast<const unsigned char*>(piece.source), size, begin,
                                   table.rows * begin};
    begin += size;
  }

  // Threads have a word of the pattern each, if they can.
  int64_t pattern_rows = kWordBytes / unit;
  while (2 * pattern_rows <= rows && row_bytes * pattern_rows < kThreads * kWordBytes) {
    pattern_rows *= 2;
  }
  table.pattern_rows = static_cast<uint32_t>(pattern_rows);
  table.pattern_words = static_cast<uint32_t>(row_bytes * pattern_rows / kWordBytes);
  return true;
}

template <typename Item>
cudaError_t LaunchItems(cudaStream_t stream, const Tiles& table) {
  const size_t bytes =
      2 * table.stage_bytes() + table.pattern_words * kItems<Item> * sizeof(ItemPlace);
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const int64_t blocks = std::min(table.tiles, int64_t{kBlocks} * processors);
  return Launch(MoveTiles<Item>, blocks, kThreads, bytes, stream, table);
}

}  // namespace

bool MovesAsTiles(const Job& job, int64_t unit) {
  Tiles table;
  return unit <= 2 && Plan(table, job, unit);
}

cudaError_t LaunchTiles(cudaStream_t stream, const Job& job, int64_t unit) {
  Tiles table;
  if (!Plan(table, job, unit)) return cudaErrorInvalidValue;
  return unit == 2 ? LaunchItems<uint16_t>(stream, table) : LaunchItems<uint8_t>(stream, table);
}

}  // namespace jaxops::concatenate::cuda
