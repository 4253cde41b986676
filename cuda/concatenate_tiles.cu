// Concatenation and splitting of narrow pieces of bytes and pairs of them: so many rows of all
// arrays that they are whole packs are brought to shared memory, and gathered there.
//
// Which bytes of the sources a word of the destinations is made of is the same in every tile, and a
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
constexpr int kBlocks = 4;  // of a multiprocessor: more have too many addresses under way
constexpr int kMostArrays = 16;
constexpr int kWordBytes = 4;
constexpr int64_t kTileBytes = 8192;
constexpr int64_t kMostTileBytes = 12288;
constexpr size_t kFewDestinations = 4;
constexpr int kFewTiles = 256;
constexpr int kTogether = 4;  // words of a thread

struct TileSource {
  const unsigned char* data;
  uint32_t row_bytes;
  uint32_t place;  // in a stage
};

struct TilePiece {
  uint32_t begin;  // in a row of the destination
  uint32_t source;
  uint32_t column;  // there
};

struct TileDestination {
  unsigned char* data;
  uint32_t row_bytes;
  uint32_t words;       // of a pattern
  uint32_t first_word;  // in the table
  int first_piece;
  int piece_count;
};

struct Tiles {
  TileSource sources[kMostArrays];
  TilePiece pieces[kMostArrays];
  TileDestination destinations[kMostArrays];
  int source_count;
  int destination_count;
  uint32_t rows;  // of a tile
  uint32_t pattern_rows;
  uint32_t stage_bytes;
  int64_t tiles;
  int64_t all_rows;

  __device__ __forceinline__ uint32_t RowsOf(int64_t tile) const {
    return static_cast<uint32_t>(min(int64_t{rows}, all_rows - tile * rows));
  }
};

// Begins to bring a tile to shared memory.
__device__ __forceinline__ void Fetch(const Tiles& table, int64_t tile, unsigned char* stage) {
  const uint32_t rows = table.RowsOf(tile);
  for (int s = 0; s < table.source_count; ++s) {
    const TileSource& source = table.sources[s];
    const unsigned char* from = source.data + tile * table.rows * source.row_bytes;
    const uint32_t bytes = rows * source.row_bytes;
    for (uint32_t at = threadIdx.x * kPackBytes; at < bytes; at += kThreads * kPackBytes) {
      const uint32_t there = min(bytes - at, kPackBytes);
      __pipeline_memcpy_async(stage + source.place + at, from + at, kPackBytes, kPackBytes - there);
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
  for (int d = 0; d < table.destination_count; ++d) {
    const TileDestination& destination = table.destinations[d];
    const uint32_t items = destination.words * kItems<Item>;
    for (uint32_t i = threadIdx.x; i < items; i += kThreads) {
      const uint32_t row = i * sizeof(Item) / destination.row_bytes;
      const uint32_t column = i * sizeof(Item) % destination.row_bytes;
      int p = destination.first_piece;
      const int last = p + destination.piece_count - 1;
      while (p < last && table.pieces[p + 1].begin <= column) ++p;
      const TilePiece& piece = table.pieces[p];
      const TileSource& source = table.sources[piece.source];
      const uint32_t offset =
          source.place + row * source.row_bytes + piece.column + column - piece.begin;
      places[destination.first_word * kItems<Item> + i] = {
          static_cast<uint16_t>(offset),
          static_cast<uint16_t>(source.row_bytes * table.pattern_rows)};
    }
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
  auto* places = reinterpret_cast<ItemPlace*>(shared + 2 * table.stage_bytes);
  Fetch(table, blockIdx.x, shared);
  __pipeline_commit();
  FillTable<Item>(table, places);
  uint32_t place = 0;
  for (int64_t tile = blockIdx.x; tile < table.tiles; tile += gridDim.x) {
    const unsigned char* stage = shared + place;
    place = table.stage_bytes - place;
    if (tile + gridDim.x < table.tiles) Fetch(table, tile + gridDim.x, shared + place);
    __pipeline_commit();
    __pipeline_wait_prior(1);
    __syncthreads();
    const uint32_t rows = table.RowsOf(tile);
    for (int d = 0; d < table.destination_count; ++d) {
      const TileDestination& destination = table.destinations[d];
      unsigned char* data = destination.data + tile * table.rows * destination.row_bytes;
      const ItemPlace* first = places + destination.first_word * kItems<Item>;
      const uint32_t pattern = destination.words;
      const uint32_t words = rows * destination.row_bytes / kWordBytes;
      for (uint32_t w = threadIdx.x; w < pattern; w += kThreads) {
        WordItems<Item> items(stage, first + w * kItems<Item>);
        auto* to = reinterpret_cast<uint32_t*>(data);
        uint32_t word = w;
        for (; word + (kTogether - 1) * pattern < words; word += kTogether * pattern) {
          uint32_t gathered[kTogether];
#pragma unroll
          for (int i = 0; i < kTogether; ++i) gathered[i] = items.Next();
#pragma unroll
          for (int i = 0; i < kTogether; ++i) to[word + i * pattern] = gathered[i];
        }
        for (; word < words; word += pattern) to[word] = items.Next();
      }
      // What the last tile has of a word.
      const uint32_t rest = rows * destination.row_bytes % kWordBytes / sizeof(Item);
      if (threadIdx.x < rest) {
        const ItemPlace item = first[words % pattern * kItems<Item> + threadIdx.x];
        reinterpret_cast<Item*>(data)[words * kItems<Item> + threadIdx.x] =
            *reinterpret_cast<const Item*>(stage + item.offset + words / pattern * item.step);
      }
    }
    __syncthreads();
  }
}

bool IsAligned(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// Fills in what does not depend on the items. False where the arrays are not made of whole rows.
bool Plan(Tiles& table, const Job& job, int64_t unit) {
  if (job.broadcasts || job.pieces.size() > kMostArrays) return false;
  const bool joins = job.destinations.size() == 1;
  int64_t row_bytes = 0, least = INT64_MAX;
  for (const Destination& d : job.destinations) {
    if ((!joins && d.piece_count != 1) || d.row_bytes == 0) return false;
    if (!IsAligned(d.data, kWordBytes)) return false;
    row_bytes += d.row_bytes;
    least = std::min(least, d.row_bytes);
  }
  // Rows that are whole packs of every array.
  int64_t rows = kPackBytes / unit;
  if (rows * row_bytes > kMostTileBytes) return false;
  while (2 * rows * row_bytes <= kTileBytes) rows *= 2;
  table.tiles = CeilDiv(job.rows, rows);
  if (table.tiles < kFewTiles) return false;
  table.rows = static_cast<uint32_t>(rows);
  table.all_rows = job.rows;

  // What a split cuts is one source, of which it leaves nothing out.
  const Piece& first = job.pieces[0];
  if (!joins && first.stride != row_bytes) return false;
  const auto* end = static_cast<const unsigned char*>(first.source);
  int64_t begin = 0, place = 0;
  table.source_count = 0;
  for (size_t p = 0; p < job.pieces.size(); ++p) {
    const Piece& piece = job.pieces[p];
    if (piece.size == 0 || piece.size != piece.extent) return false;
    if (joins || p == 0) {
      if (!IsAligned(piece.source, kPackBytes)) return false;
      if (joins && piece.stride != piece.size) return false;
      table.sources[table.source_count++] = {static_cast<const unsigned char*>(piece.source),
                                             static_cast<uint32_t>(piece.stride),
                                             static_cast<uint32_t>(place)};
      place += rows * piece.stride;
    } else if (piece.source != end || piece.stride != first.stride) {
      return false;
    }
    end = static_cast<const unsigned char*>(piece.source) + piece.size;
    table.pieces[p] = joins ? TilePiece{static_cast<uint32_t>(begin), static_cast<uint32_t>(p), 0}
                            : TilePiece{0, 0, static_cast<uint32_t>(begin)};
    begin += piece.size;
  }
  table.stage_bytes = static_cast<uint32_t>(place);

  // Threads have a word of the pattern each, if they can.
  int64_t pattern_rows = kWordBytes / unit;
  while (2 * pattern_rows <= rows && least * pattern_rows < kThreads * kWordBytes) {
    pattern_rows *= 2;
  }
  table.pattern_rows = static_cast<uint32_t>(pattern_rows);
  table.destination_count = 0;
  uint32_t words = 0;
  for (const Destination& d : job.destinations) {
    const auto pattern = static_cast<uint32_t>(d.row_bytes * pattern_rows / kWordBytes);
    table.destinations[table.destination_count++] = {
        static_cast<unsigned char*>(d.data), static_cast<uint32_t>(d.row_bytes), pattern, words,
        static_cast<int>(d.first_piece),     static_cast<int>(d.piece_count)};
    words += pattern;
  }
  return true;
}

template <typename Item>
cudaError_t LaunchItems(cudaStream_t stream, const Tiles& table) {
  const TileDestination& last = table.destinations[table.destination_count - 1];
  const size_t bytes =
      2 * table.stage_bytes + (last.first_word + last.words) * kItems<Item> * sizeof(ItemPlace);
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
  // Pairs of bytes for many destinations are too few words of each in a tile.
  if (unit > 2 || (unit == 2 && job.destinations.size() > kFewDestinations)) return false;
  return Plan(table, job, unit);
}

cudaError_t LaunchTiles(cudaStream_t stream, const Job& job, int64_t unit) {
  Tiles table;
  if (!Plan(table, job, unit)) return cudaErrorInvalidValue;
  return unit == 2 ? LaunchItems<uint16_t>(stream, table) : LaunchItems<uint8_t>(stream, table);
}

}  // namespace jaxops::concatenate::cuda
