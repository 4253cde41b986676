// This kernel writes destinations of one piece each: a thread gathers the items of its vectors one
// by one, and neighbouring items come from the L1 cache.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "common/fast_divide.h"
#include "cuda/common/launch.h"
#include "cuda/common/numeric.cuh"
#include "cuda/concatenate/families.h"
#include "cuda/concatenate/items.cuh"
#include "cuda/concatenate/job.h"
#include "cuda/concatenate/launch.h"

namespace jaxops::concatenate::cuda {
namespace {

using jaxops::cuda::CeilDiv;
using jaxops::cuda::Launch;

// A round over all destinations has at least this number of blocks.
constexpr int kRoundBlocks = 64;
constexpr int kRoundsPerPiece = 8;
constexpr int kManyPieces = 200;

struct CutPiece {
  const unsigned char* source;
  unsigned char* to;
  int64_t gap;      // bytes of the source from the end of a row of the piece to the next row
  uint32_t stride;  // in bytes
  FastDivider row_items;
  uint32_t filled;  // items of a row that the source has
  uint32_t items;
  uint32_t first_block;  // within a round
  uint32_t blocks;       // per round
};

// Blocks go round the destinations, so that blocks of neighbouring rows run at the same time.
template <int kPieces>
struct Cuts {
  CutPiece pieces[kPieces];
  int count;
  FastDivider round;  // blocks per round

  __device__ __forceinline__ int Find(uint32_t block) const {
    int low = 0;
    for (int width = count; width > 1;) {
      const int half = width / 2;
      if (pieces[low + half].first_block <= block) low += half;
      width -= half;
    }
    return low;
  }
};

template <typename Item>
struct CutItems {
  const CutPiece& piece;
  uint32_t row, column;
  const unsigned char* from;

  __device__ __forceinline__ CutItems(uint32_t index, const CutPiece& cut)
      : piece(cut),
        row(index),
        column(piece.row_items.DivMod(row)),
        from(piece.source + uint64_t{row} * piece.stride + uint64_t{column} * sizeof(Item)) {}

  __device__ __forceinline__ Item Next() const {
    return column < piece.filled ? Load<Item>(from) : Item{};
  }

  __device__ __forceinline__ void Advance() {
    from += sizeof(Item);
    if (++column < piece.row_items.divisor()) return;
    column = 0;
    from += piece.gap;
  }
};

template <typename Item, int kPieces>
__global__ void __launch_bounds__(kVectorThreads) Cut(const __grid_constant__ Cuts<kPieces> table) {
  uint32_t round = blockIdx.x;
  const uint32_t block = table.round.DivMod(round);
  const CutPiece& piece = table.pieces[table.Find(block)];
  const uint32_t own_block = round * piece.blocks + block - piece.first_block;
  const uint32_t first = (own_block * kVectorThreads + threadIdx.x) * kItems<Item>;
  StoreItems<Item>(piece.to, first, piece.items,
                   [&](uint32_t i) { return CutItems<Item>(i, piece); });
}

template <typename Item, int kPieces>
cudaError_t LaunchCut(cudaStream_t stream, const Job& job) {
  Cuts<kPieces> table;
  table.count = 0;
  int64_t common = 0, all = 0;
  for (const Piece& piece : job.pieces) {
    common = std::gcd(common, piece.extent);
    all += piece.extent;
  }
  // Blocks per round are proportional to the sizes of the destinations, so that all destinations
  // end together.
  const double most = std::max<double>(kRoundBlocks, kRoundsPerPiece * job.pieces.size());
  const double share = std::min(1.0 / common, most / all);
  int64_t round = 0, rounds = 0;
  for (const Destination& destination : job.destinations) {
    const Piece& piece = job.pieces[destination.first_piece];
    if (destination.row_bytes == 0) continue;
    const int64_t items = job.rows * piece.extent / sizeof(Item);
    const int64_t all_blocks = CeilDiv(items, kItems<Item> * kVectorThreads);
    // A single row has no neighbouring rows, and takes one destination after the other.
    const int64_t blocks =
        job.rows == 1 ? all_blocks : std::max<int64_t>(1, std::llround(piece.extent * share));
    table.pieces[table.count++] = {static_cast<const unsigned char*>(piece.source),
                                   static_cast<unsigned char*>(destination.data),
                                   piece.stride - piece.extent,
                                   static_cast<uint32_t>(piece.stride),
                                   FastDivider(kItemsOf<Item>(piece.extent)),
                                   kItemsOf<Item>(piece.size),
                                   static_cast<uint32_t>(items),
                                   static_cast<uint32_t>(round),
                                   static_cast<uint32_t>(blocks)};
    rounds = std::max(rounds, CeilDiv(all_blocks, blocks));
    round += blocks;
  }
  table.round = FastDivider(round);
  return Launch(Cut<Item, kPieces>, round * rounds, kVectorThreads, 0, stream, table);
}

template <typename Item>
cudaError_t LaunchItems(cudaStream_t stream, const Job& job) {
  const size_t pieces = job.pieces.size();
  if (pieces <= 2) return LaunchCut<Item, 2>(stream, job);
  if (pieces <= 16) return LaunchCut<Item, 16>(stream, job);
  if (pieces <= kManyPieces) return LaunchCut<Item, kManyPieces>(stream, job);
  return LaunchCut<Item, kMaxDestinations>(stream, job);
}

}  // namespace

bool CanRunSplit(const Call& call, const Device&) {
  const Job& job = call.job;
  if (job.broadcasts || call.destination_count() > kMaxDestinations || !HasShortStrides(job)) {
    return false;
  }
  return std::all_of(job.destinations.begin(), job.destinations.end(), [&](const Destination& d) {
    // The count of items has 32 bits, and rounds may extend beyond the last item.
    return d.piece_count == 1 && reinterpret_cast<uintptr_t>(d.data) % kVectorBytes == 0 &&
           job.rows * d.row_bytes / call.unit <= kMaxItems;
  });
}

cudaError_t LaunchSplit(cudaStream_t stream, const Call& call, const Device&) {
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
