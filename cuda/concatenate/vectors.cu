// This kernel moves whole vectors: threads follow the array that contains all pieces, so that no
// segment of that array is read or written twice.
//
// The order in which addresses reach memory limits the speed of a copy: it is fastest with one
// vector per thread, in blocks small enough that those which run at the same time cover a short
// segment of each array. More work per thread, persistent blocks, and bulk copies all cost a few
// percent, because they have more of each array in flight.
#include <cuda_runtime_api.h>

#include <algorithm>

#include "common/fast_divide.h"
#include "cuda/common/launch.h"
#include "cuda/common/numeric.cuh"
#include "cuda/concatenate/families.h"
#include "cuda/concatenate/job.h"
#include "cuda/concatenate/launch.h"
#include "cuda/concatenate/vectors.cuh"

namespace jaxops::concatenate::cuda {
namespace {

using jaxops::cuda::CeilDiv;
using jaxops::cuda::Launch;

// Up to this number of pieces, a thread compares positions with each.
constexpr int kFewPieces = 4;
constexpr int kComparedPieces = 16;

struct WholePiece {
  unsigned char* column0;  // address of column 0 if the piece began with the row
  uint32_t begin;          // in vectors, as is the end of the bytes that the source fills
  uint32_t filled;
  uint32_t stride;  // in bytes
};

// Whole describes pieces of the rows of one array, which is the destination of all or the source of
// all.
template <int kPieces>
struct Whole {
  WholePiece pieces[kPieces];  // missing pieces begin at kNowhere
  unsigned char* whole;
  uint64_t stride;  // in bytes
  FastDivider row_vectors;
  FastDivider piece_vectors;  // for more than kComparedPieces, which are equal
  uint32_t vectors;

  __device__ __forceinline__ WholePiece Find(uint32_t column) const {
    if constexpr (kPieces == 2) return column < pieces[1].begin ? pieces[0] : pieces[1];
    if constexpr (kPieces > kComparedPieces) return pieces[piece_vectors.Quotient(column)];
    // All comparisons are with constants of the launch, and none waits for another.
    int found = 0;
#pragma unroll
    for (int i = 1; i < kPieces; ++i) found += pieces[i].begin <= column;
    return pieces[found];
  }
};

template <bool kSplits, int kPieces>
__global__ void __launch_bounds__(kVectorThreads)
    MoveWhole(const __grid_constant__ Whole<kPieces> table) {
  const uint32_t index = blockIdx.x * kVectorThreads + threadIdx.x;
  if (index >= table.vectors) return;
  uint32_t row = index;
  const uint32_t column = table.row_vectors.DivMod(row);
  const WholePiece piece = table.Find(column);
  unsigned char* whole = table.whole + row * table.stride + uint64_t{column} * kVectorBytes;
  unsigned char* part =
      piece.column0 + uint64_t{row} * piece.stride + uint64_t{column} * kVectorBytes;
  if constexpr (kSplits) {
    Store(part, Load<uint4>(whole));
  } else {
    Store(whole, column < piece.filled ? Load<uint4>(part) : uint4{});
  }
}

template <bool kSplits, int kPieces>
cudaError_t LaunchWhole(cudaStream_t stream, const Job& job) {
  Whole<kPieces> table = {};
  for (WholePiece& piece : table.pieces) piece.begin = kNowhere;
  int64_t begin = 0;
  int count = 0;
  for (const Destination& destination : job.destinations) {
    for (int64_t p = 0; p < destination.piece_count; ++p) {
      const Piece& piece = job.pieces[destination.first_piece + p];
      if (piece.extent == 0) continue;
      const void* part = kSplits ? destination.data : piece.source;
      table.pieces[count++] = {
          const_cast<unsigned char*>(static_cast<const unsigned char*>(part)) - begin,
          kItemsOf<uint4>(begin), kItemsOf<uint4>(begin + piece.size),
          static_cast<uint32_t>(kSplits ? piece.extent : piece.stride)};
      begin += piece.extent;
    }
  }
  const void* whole = kSplits ? job.pieces[0].source : job.destinations[0].data;
  table.whole = const_cast<unsigned char*>(static_cast<const unsigned char*>(whole));
  table.stride = kSplits ? job.pieces[0].stride : begin;
  table.row_vectors = FastDivider(kItemsOf<uint4>(begin));
  table.piece_vectors = FastDivider(kItemsOf<uint4>(std::max<int64_t>(job.pieces[0].extent, 16)));
  table.vectors = kItemsOf<uint4>(job.rows * begin);
  return Launch(MoveWhole<kSplits, kPieces>, CeilDiv(table.vectors, kVectorThreads), kVectorThreads,
                0, stream, table);
}

template <bool kSplits>
cudaError_t LaunchWholeOf(cudaStream_t stream, const Job& job) {
  const size_t pieces = job.pieces.size();
  if (pieces <= 2) return LaunchWhole<kSplits, 2>(stream, job);
  if (pieces <= kFewPieces) return LaunchWhole<kSplits, kFewPieces>(stream, job);
  if (!HasEqualPieces(job)) return LaunchWhole<kSplits, kComparedPieces>(stream, job);
  return pieces <= 64 ? LaunchWhole<kSplits, 64>(stream, job)
                      : LaunchWhole<kSplits, kMaxPieces>(stream, job);
}

}  // namespace

bool HasWholeVectors(const Call& call) {
  const Job& job = call.job;
  return call.unit == kVectorBytes && call.items() <= kMaxItems &&
         (call.joins() || SplitsOneSource(job)) &&
         (call.piece_count() <= kComparedPieces ||
          (call.piece_count() <= kMaxPieces && HasEqualPieces(job)));
}

bool CanRunVectors(const Call& call, const Device&) {
  return !call.job.broadcasts && HasWholeVectors(call) && HasShortStrides(call.job);
}

cudaError_t LaunchVectors(cudaStream_t stream, const Call& call, const Device&) {
  return call.joins() ? LaunchWholeOf<false>(stream, call.job)
                      : LaunchWholeOf<true>(stream, call.job);
}

}  // namespace jaxops::concatenate::cuda
