// This header holds the table of pieces that MoveRows and MoveLong search.
#ifndef JAXOPS_CUDA_CONCATENATE_TABLE_CUH_
#define JAXOPS_CUDA_CONCATENATE_TABLE_CUH_

#include <cuda_runtime_api.h>

#include <algorithm>

#include "common/concatenate.h"
#include "common/fast_divide.h"
#include "cuda/common/numeric.cuh"
#include "cuda/concatenate/families.h"
#include "cuda/concatenate/launch.h"

namespace jaxops::concatenate::cuda {

using jaxops::cuda::kWarp;

inline constexpr int kTableThreads = 256;
// Threads get more work only if there are more blocks than this number, which keeps a device busy.
inline constexpr int kEnoughBlocks = 512;
inline constexpr int kListedPieces = 8;

struct PieceEntry {
  const unsigned char* source;
  const unsigned char* end;
  int64_t stride;
  int64_t size;
  int64_t begin;   // in the row of the destination
  int64_t extent;  // in the row of the destination
  uint32_t varies;
};

struct DestinationEntry {
  unsigned char* data;
  int64_t first_block;
  int first_piece;
  int piece_count;
  FastDivider64 by_row;  // bytes per row
  // These members are for MoveRows. A pattern has `pattern_rows` rows and `pattern_words` Words,
  // and there are `patterns` of them. `blocks_adjacent` blocks with `width` Words each share a
  // pattern, and `blocks_below` such groups share the patterns. A block handles `adjacent` patterns
  // side by side.
  int pattern_rows;
  int64_t patterns;
  int64_t pattern_words;
  FastDivider width;
  FastDivider blocks_adjacent;
  int blocks_below;
  int adjacent;

  JAXOPS_HOST_DEVICE int64_t row_bytes() const { return static_cast<int64_t>(by_row.divisor()); }
};

template <int kPieces, int kDestinations>
struct Table {
  static constexpr int kPieceCapacity = kPieces;
  static constexpr int kDestinationCapacity = kDestinations;

  PieceEntry pieces[kPieces];
  DestinationEntry destinations[kDestinations];
  int destination_count;
  int vectors;  // for MoveLong: vectors that a thread has in flight
  int tiles_per_block;
  bool broadcasts;
  int row_dims;
  int64_t rows;
  FastDivider64 row_sizes[kMaxRowDims];

  // SourceRow returns the row of a source that belongs to a row of the destination.
  __device__ __forceinline__ int64_t SourceRow(int64_t row, uint32_t varies) const {
    if (!broadcasts) return row;
    uint64_t rest = row;
    int64_t source = 0;
    int64_t stride = 1;
#pragma unroll 1
    for (int d = row_dims - 1; d >= 0; --d) {
      const int64_t index = row_sizes[d].DivMod(rest);
      if (varies >> d & 1) {
        source += index * stride;
        stride *= row_sizes[d].divisor();
      }
    }
    return source;
  }
};

// FindLast returns the last of `count` entries whose `first` is at most `position`.
template <typename Entry, typename First>
__device__ __forceinline__ int FindLast(const Entry* entries, int count, int64_t position,
                                        First&& first) {
  int low = 0;
  for (int width = count; width > 1;) {
    const int half = width / 2;
    if (first(entries[low + half]) <= position) low += half;
    width -= half;
  }
  return low;
}

template <typename Table>
__device__ __forceinline__ const DestinationEntry& FindDestination(const Table& table) {
  // The choice at compile time saves small calls a chain of dependent constants.
  if constexpr (Table::kDestinationCapacity == 1) return table.destinations[0];
  const int found = FindLast(table.destinations, table.destination_count, blockIdx.x,
                             [](const DestinationEntry& d) { return d.first_block; });
  return table.destinations[found];
}

// PiecesOf returns the destination's pieces for threads that may read different pieces at once: few
// pieces from the parameters, and more from shared memory. The constant cache serves one address of
// a warp at a time, so a warp copies one piece after the other.
template <typename Table>
__device__ __forceinline__ const PieceEntry* PiecesOf(const DestinationEntry& destination,
                                                      const Table& table, unsigned char* shared) {
  const PieceEntry* listed = &table.pieces[destination.first_piece];
  if constexpr (Table::kPieceCapacity <= kListedPieces) {
    return listed;
  } else {
    auto* copied = reinterpret_cast<PieceEntry*>(shared);
    for (int i = threadIdx.x / kWarp; i < destination.piece_count; i += kTableThreads / kWarp) {
      const PieceEntry piece = listed[i];
      if (threadIdx.x % kWarp == 0) copied[i] = piece;
    }
    __syncthreads();
    return copied;
  }
}

// Fill fills in the members that both kernels need; `blocks(entry)` completes an entry and returns
// its number of blocks.
template <typename Table, typename Blocks>
int64_t Fill(Table& table, const Job& job, Blocks&& blocks) {
  table.broadcasts = job.broadcasts;
  table.row_dims = job.row_dims;
  table.rows = job.rows;
  for (int d = 0; d < job.row_dims; ++d) table.row_sizes[d] = FastDivider64(job.row_sizes[d]);
  int64_t all_blocks = 0;
  int pieces = 0;
  int count = 0;
  for (const Destination& destination : job.destinations) {
    if (destination.row_bytes == 0) continue;
    DestinationEntry& entry = table.destinations[count++];
    entry.data = static_cast<unsigned char*>(destination.data);
    entry.by_row = FastDivider64(destination.row_bytes);
    entry.first_block = all_blocks;
    entry.first_piece = pieces;
    int64_t begin = 0;
    for (int64_t p = 0; p < destination.piece_count; ++p) {
      const Piece& piece = job.pieces[destination.first_piece + p];
      // FindLast could not tell an empty piece from the next one, which begins at the same place.
      if (piece.extent > 0) {
        table.pieces[pieces++] = {static_cast<const unsigned char*>(piece.source),
                                  static_cast<const unsigned char*>(piece.end),
                                  piece.stride,
                                  piece.size,
                                  begin,
                                  piece.extent,
                                  piece.varies};
      }
      begin += piece.extent;
    }
    entry.piece_count = pieces - entry.first_piece;
    all_blocks += blocks(entry);
  }
  table.destination_count = count;
  return all_blocks;
}

// WithTable calls launch(table, bytes) with the smallest table that holds the job, and with the
// bytes of shared memory for the pieces of a block's destination.
template <int kPieces, int kDestinations, typename Function>
cudaError_t WithTableOf(const Job& job, Function&& launch) {
  Table<kPieces, kDestinations> table;
  static_assert(sizeof(table) <= 32764, "the parameters of a kernel");
  int64_t max_pieces = 0;
  for (const Destination& d : job.destinations) max_pieces = std::max(max_pieces, d.piece_count);
  return launch(table, kPieces <= kListedPieces ? 0 : max_pieces * sizeof(PieceEntry));
}

template <typename Function>
cudaError_t WithTable(const Job& job, Function&& launch) {
  const auto pieces = static_cast<int64_t>(job.pieces.size());
  const auto destinations = static_cast<int64_t>(job.destinations.size());
  if (pieces <= kListedPieces && destinations <= 8) {
    return WithTableOf<kListedPieces, 8>(job, launch);
  }
  if (destinations > 1) {
    return pieces <= kTableDestinations
               ? WithTableOf<kTableDestinations, kTableDestinations>(job, launch)
               : cudaErrorInvalidValue;
  }
  if (pieces <= 64) return WithTableOf<64, 1>(job, launch);
  return pieces <= kMaxPieces ? WithTableOf<kMaxPieces, 1>(job, launch) : cudaErrorInvalidValue;
}

}  // namespace jaxops::concatenate::cuda

#endif  // JAXOPS_CUDA_CONCATENATE_TABLE_CUH_
