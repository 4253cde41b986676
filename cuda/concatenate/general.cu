// This kernel runs any job: a thread finds the piece of each 16 bytes, and shifts the bytes if
// source and destination have different alignment.
#include <cuda_runtime_api.h>

#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/common/numeric.cuh"
#include "cuda/concatenate/families.h"
#include "cuda/concatenate/launch.h"
#include "cuda/concatenate/table.cuh"

namespace jaxops::concatenate::cuda {
namespace {

using jaxops::cuda::CeilDiv;
using jaxops::cuda::kVectorBytes;
using jaxops::cuda::Launch;

// A thread has this number of vectors in flight if rows are long.
constexpr int kLongVectors = 4;

// LoadWord loads the aligned 4 bytes at `address`, without the bytes from `end` on.
__device__ __forceinline__ uint32_t LoadWord(const unsigned char* address,
                                             const unsigned char* end) {
  if (address + 4 <= end) return __ldca(reinterpret_cast<const uint32_t*>(address));
  uint32_t word = 0;
  for (int i = 0; address + i < end; ++i) word |= uint32_t{address[i]} << 8 * i;
  return word;
}

// LoadShifted loads the 16 bytes at any `address`; bytes outside [low, high) may not be read and
// are undefined.
__device__ __forceinline__ void LoadShifted(uint32_t (&words)[4], const unsigned char* address,
                                            int low, int high, const unsigned char* end) {
  const int misalignment = reinterpret_cast<uintptr_t>(address) % 4;
  const unsigned char* first = address - misalignment;
  uint32_t loaded[5];
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    const int begin = 4 * i - misalignment;
    loaded[i] = begin + 4 > low && begin < high ? LoadWord(first + 4 * i, end) : 0;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = __funnelshift_r(loaded[i], loaded[i + 1], 8 * misalignment);
  }
}

// ByteMask returns a mask of the bytes [low, high) in the 4 bytes with number `index` of a vector.
__device__ __forceinline__ uint32_t ByteMask(int low, int high, int index) {
  const int begin = min(max(low - 4 * index, 0), 4);
  const int end = min(max(high - 4 * index, 0), 4);
  return static_cast<uint32_t>((uint64_t{1} << 8 * end) - (uint64_t{1} << 8 * begin));
}

// Place is the position at which a vector of a destination begins.
struct Place {
  int64_t row, column;
  const PieceEntry* piece;

  __device__ __forceinline__ Place(uint64_t position, const DestinationEntry& destination,
                                   const PieceEntry* pieces) {
    column = destination.by_row.DivMod(position);
    row = position;
    Find(destination, pieces);
  }
  __device__ __forceinline__ void Find(const DestinationEntry& destination,
                                       const PieceEntry* pieces) {
    piece = pieces + FindLast(pieces, destination.piece_count, column,
                              [](const PieceEntry& entry) { return entry.begin; });
  }
  __device__ __forceinline__ int64_t offset() const { return column - piece->begin; }
};

// GatherVector gathers the first `bytes` bytes of a vector from any number of pieces.
template <typename Table>
__device__ __forceinline__ void GatherVector(uint32_t (&words)[4], Place place, int bytes,
                                             const Table& table,
                                             const DestinationEntry& destination,
                                             const PieceEntry* pieces) {
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = 0;
  for (int done = 0; done < bytes;) {
    const PieceEntry& piece = *place.piece;
    const int64_t offset = place.offset();
    const int here = static_cast<int>(min(piece.extent - offset, int64_t{bytes - done}));
    const int filled = static_cast<int>(min(max(piece.size - offset, int64_t{0}), int64_t{here}));
    if (filled > 0) {
      const int64_t row = table.SourceRow(place.row, piece.varies);
      uint32_t shifted[4];
      LoadShifted(shifted, piece.source + row * piece.stride + offset - done, done, done + filled,
                  piece.end);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t mask = ByteMask(done, done + filled, i);
        words[i] = (words[i] & ~mask) | (shifted[i] & mask);
      }
    }
    done += here;
    place.column += here;
    if (place.column == destination.row_bytes()) {
      place.column = 0;
      ++place.row;
    }
    place.Find(destination, pieces);
  }
}

// kAligned says that every size and address is a multiple of 16 bytes.
template <bool kAligned, typename Table>
__global__ void __launch_bounds__(kTableThreads) MoveLong(const __grid_constant__ Table table) {
  constexpr int kVectors = kLongVectors;
  extern __shared__ __align__(16) unsigned char shared[];
  const DestinationEntry& destination = FindDestination(table);
  const PieceEntry* pieces = PiecesOf(destination, table, shared);
  const int64_t total = table.rows * destination.row_bytes();
  const int64_t tile_bytes = int64_t{table.vectors} * kTableThreads * kVectorBytes;
  int64_t first = (blockIdx.x - destination.first_block) * table.tiles_per_block * tile_bytes;
#pragma unroll 1
  for (int tile = 0; tile < table.tiles_per_block && first < total; ++tile, first += tile_bytes) {
    uint32_t vectors[kVectors][4];
    uint32_t left = 0;  // bit i: vector i is not gathered yet
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int64_t position = first + (i * kTableThreads + threadIdx.x) * kVectorBytes;
      if (i >= table.vectors || position >= total) continue;
      const Place place(position, destination, pieces);
      const int64_t offset = place.offset();
      const int64_t row = table.SourceRow(place.row, place.piece->varies);
      const unsigned char* from = place.piece->source + row * place.piece->stride + offset;
      if constexpr (kAligned) {
        uint4 vector = {};
        if (offset < place.piece->size) vector = __ldca(reinterpret_cast<const uint4*>(from));
        vectors[i][0] = vector.x, vectors[i][1] = vector.y, vectors[i][2] = vector.z,
        vectors[i][3] = vector.w;
      } else if (offset + kVectorBytes <= place.piece->size) {
        LoadShifted(vectors[i], from, 0, kVectorBytes, place.piece->end);
      } else {
        left |= 1u << i;
      }
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int64_t position = first + (i * kTableThreads + threadIdx.x) * kVectorBytes;
      if (i >= table.vectors || position >= total) continue;
      const int bytes = static_cast<int>(min(total - position, int64_t{kVectorBytes}));
      if (left >> i & 1) {
        GatherVector(vectors[i], Place(position, destination, pieces), bytes, table, destination,
                     pieces);
      }
      unsigned char* to = destination.data + position;
      if (bytes == kVectorBytes && reinterpret_cast<uintptr_t>(to) % kVectorBytes == 0) {
        *reinterpret_cast<uint4*>(to) =
            uint4{vectors[i][0], vectors[i][1], vectors[i][2], vectors[i][3]};
      } else {
#pragma unroll
        for (int b = 0; b < kVectorBytes; ++b) {
          if (b < bytes) to[b] = static_cast<unsigned char>(vectors[i][b / 4] >> 8 * (b % 4));
        }
      }
    }
  }
}

template <bool kAligned, typename Table>
cudaError_t LaunchLong(cudaStream_t stream, const Job& job, Table& table, size_t table_bytes) {
  int64_t total = 0;
  for (const Destination& d : job.destinations) total += job.rows * d.row_bytes;
  const int64_t vector_row = int64_t{kTableThreads} * kVectorBytes;
  table.vectors =
      static_cast<int>(std::clamp<int64_t>(total / (vector_row * kEnoughBlocks), 1, kLongVectors));
  // Each block reads all pieces of its destination, so blocks have more tiles if pieces are many.
  table.tiles_per_block =
      static_cast<int>(std::clamp<int64_t>(job.pieces.size() / job.destinations.size() / 16, 1, 8));
  const int64_t blocks = Fill(table, job, [&](DestinationEntry& entry) {
    return CeilDiv(job.rows * entry.row_bytes(),
                   table.vectors * vector_row * table.tiles_per_block);
  });
  return Launch(MoveLong<kAligned, Table>, blocks, kTableThreads, table_bytes, stream, table);
}

}  // namespace

cudaError_t LaunchGeneral(cudaStream_t stream, const Call& call, const Device&) {
  return WithTable(call.job, [&](auto& table, size_t bytes) {
    return call.unit == kVectorBytes ? LaunchLong<true>(stream, call.job, table, bytes)
                                     : LaunchLong<false>(stream, call.job, table, bytes);
  });
}

}  // namespace jaxops::concatenate::cuda
