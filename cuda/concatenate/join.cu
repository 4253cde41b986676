// This kernel writes one destination of few pieces: a thread gathers the items of its vectors one
// by one, and neighbouring items come from the L1 cache.
#include <cuda_runtime_api.h>

#include "common/fast_divide.h"
#include "cuda/common/launch.h"
#include "cuda/common/numeric.cuh"
#include "cuda/concatenate/families.h"
#include "cuda/concatenate/items.cuh"
#include "cuda/concatenate/job.h"

namespace jaxops::concatenate::cuda {
namespace {

using jaxops::cuda::CeilDiv;
using jaxops::cuda::Launch;

constexpr int kMaxJoined = 4;
// This bound applies to items of less than 4 bytes.
constexpr int kMaxSmallJoined = 2;

struct JoinedPiece {
  const unsigned char* column0;  // address of column 0 if the piece began with the row
  uint32_t begin;                // in items
  uint32_t stride;               // in bytes
};

template <int kPieces>
struct Joined {
  JoinedPiece pieces[kPieces];  // missing pieces begin at kNowhere
  unsigned char* to;
  FastDivider row_items;
  uint32_t filled;  // items of a row before zeros
  uint32_t items;
};

template <typename Item, int kPieces>
struct JoinedItems {
  const Joined<kPieces>& table;
  uint32_t row, column;
  const unsigned char* rows[kPieces];

  __device__ __forceinline__ JoinedItems(uint32_t index, const Joined<kPieces>& joined)
      : table(joined), row(index), column(table.row_items.DivMod(row)) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      rows[p] = table.pieces[p].column0 + uint64_t{row} * table.pieces[p].stride;
    }
  }

  __device__ __forceinline__ Item Next() const {
    const unsigned char* from = rows[0];
#pragma unroll
    for (int p = 1; p < kPieces; ++p) from = column < table.pieces[p].begin ? from : rows[p];
    return column < table.filled ? Load<Item>(from + uint64_t{column} * sizeof(Item)) : Item{};
  }

  __device__ __forceinline__ void Advance() {
    if (++column < table.row_items.divisor()) return;
    column = 0;
#pragma unroll
    for (int p = 0; p < kPieces; ++p) rows[p] += table.pieces[p].stride;
  }
};

template <typename Item, int kPieces>
__global__ void __launch_bounds__(kVectorThreads)
    Join(const __grid_constant__ Joined<kPieces> table) {
  const uint32_t first = (blockIdx.x * kVectorThreads + threadIdx.x) * kItems<Item>;
  StoreItems<Item>(table.to, first, table.items,
                   [&](uint32_t i) { return JoinedItems<Item, kPieces>(i, table); });
}

template <typename Item, int kPieces>
cudaError_t LaunchJoin(cudaStream_t stream, const Job& job) {
  const Destination& destination = job.destinations[0];
  Joined<kPieces> table = {};
  for (JoinedPiece& piece : table.pieces) piece.begin = kNowhere;
  table.to = static_cast<unsigned char*>(destination.data);
  table.row_items = FastDivider(kItemsOf<Item>(destination.row_bytes));
  table.items = kItemsOf<Item>(job.rows * destination.row_bytes);
  int64_t begin = 0;
  int count = 0;
  for (const Piece& piece : job.pieces) {
    if (piece.size == 0) continue;
    table.pieces[count++] = {static_cast<const unsigned char*>(piece.source) - begin,
                             kItemsOf<Item>(begin), static_cast<uint32_t>(piece.stride)};
    begin += piece.size;
  }
  table.filled = kItemsOf<Item>(begin);
  return Launch(Join<Item, kPieces>, CeilDiv(table.items, kItems<Item> * kVectorThreads),
                kVectorThreads, 0, stream, table);
}

template <typename Item>
cudaError_t LaunchItems(cudaStream_t stream, const Job& job) {
  if constexpr (sizeof(Item) >= 4) {
    if (CountFilledPieces(job) > 2) return LaunchJoin<Item, kMaxJoined>(stream, job);
  }
  return LaunchJoin<Item, kMaxSmallJoined>(stream, job);
}

}  // namespace

bool CanRunJoin(const Call& call, const Device&) {
  const Job& job = call.job;
  if (job.broadcasts || !call.joins() || call.items() > kMaxItems || !HasShortStrides(job) ||
      reinterpret_cast<uintptr_t>(job.destinations[0].data) % kVectorBytes != 0) {
    return false;
  }
  const int filled = CountFilledPieces(job);
  return filled >= 0 && filled <= (call.unit < 4 ? kMaxSmallJoined : kMaxJoined);
}

cudaError_t LaunchJoin(cudaStream_t stream, const Call& call, const Device&) {
  const Job& job = call.job;
  switch (call.unit) {
    case 16:
      return LaunchItems<uint4>(stream, job);
    case 8:
      return LaunchItems<uint2>(stream, job);
    case 4:
      return LaunchItems<uint32_t>(stream, job);
    case 2:
      return LaunchItems<uint16_t>(stream, job);
    default:
      return LaunchItems<uint8_t>(stream, job);
  }
}

}  // namespace jaxops::concatenate::cuda
