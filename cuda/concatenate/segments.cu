// Few and long segments are copies between addresses of any alignment: a thread shifts what it
// reads into the vectors it writes.
#include <cuda_runtime_api.h>

#include <vector>

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

constexpr int64_t kLongStretch = 32768;
// Packs of a thread of which each takes two loads.
constexpr int kStretchPacks = 2;

struct Stretch {
  const unsigned char* from;  // null for zeros
  unsigned char* to;
  int64_t bytes;
  uint32_t first_block;
};

// Copies of any lengths between any addresses, one after the other.
template <int kStretches>
struct Stretches {
  Stretch stretches[kStretches];
  int count;
  bool equal;
  FastDivider blocks;  // of each, where all have as many

  __device__ __forceinline__ int Find(uint32_t block) const {
    if (equal) return blocks.Quotient(block);
    int low = 0;
    for (int width = count; width > 1;) {
      const int half = width / 2;
      if (stretches[low + half].first_block <= block) low += half;
      width -= half;
    }
    return low;
  }
};

// The 16 bytes of `low` and `high`, one after the other, that begin at byte `first` of 16.
__device__ __forceinline__ uint4 Shift(uint4 low, uint4 high, uint32_t first) {
  uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) words[i] = first & 8 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) words[i] = first & 4 ? words[i + 1] : words[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = __funnelshift_r(words[i], words[i + 1], 8 * (first & 3));
  return {words[0], words[1], words[2], words[3]};
}

// A thread makes each pack of the two that its bytes are in. Of these the second is the next
// thread's first, and comes from the L1 cache. At the ends of a stretch, where not all of both is
// of it, a thread moves items.
template <typename Item, int kStretches>
__global__ void __launch_bounds__(kVectorThreads)
    MoveStretches(const __grid_constant__ Stretches<kStretches> table) {
  const Stretch& stretch = table.stretches[table.Find(blockIdx.x)];
  const int64_t bytes = stretch.bytes;
  const uint32_t head = reinterpret_cast<uintptr_t>(stretch.to) % kPackBytes;
  const int64_t first =
      int64_t{blockIdx.x - stretch.first_block} * (kVectorThreads * kPackBytes * kStretchPacks) +
      threadIdx.x * kPackBytes - head;
  const unsigned char* from = stretch.from + first;
  const auto shift = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from) % kPackBytes);
  uint4 low[kStretchPacks], high[kStretchPacks];
#pragma unroll
  for (int m = 0; m < kStretchPacks; ++m) {
    const int64_t at = first + m * kVectorThreads * kPackBytes;
    const int64_t read = at - shift;
    const bool whole = stretch.from != nullptr && read >= 0 && read + 2 * kPackBytes <= bytes;
    low[m] = whole ? Load<uint4>(stretch.from + read) : uint4{};
    high[m] = whole && shift != 0 ? Load<uint4>(stretch.from + read + kPackBytes) : uint4{};
  }
#pragma unroll
  for (int m = 0; m < kStretchPacks; ++m) {
    const int64_t at = first + m * kVectorThreads * kPackBytes;
    const int64_t read = at - shift;
    const bool zeros = stretch.from == nullptr;
    if (zeros ? at >= 0 && at + kPackBytes <= bytes : read >= 0 && read + 2 * kPackBytes <= bytes) {
      Store(stretch.to + at, Shift(low[m], high[m], shift));
      continue;
    }
    Item items[kItems<Item>];
#pragma unroll
    for (int i = 0; i < kItems<Item>; ++i) {
      const int64_t item = at + i * static_cast<int>(sizeof(Item));
      const bool there = item >= 0 && item < bytes;
      items[i] = there && !zeros ? *reinterpret_cast<const Item*>(stretch.from + item) : Item{};
    }
#pragma unroll
    for (int i = 0; i < kItems<Item>; ++i) {
      const int64_t item = at + i * static_cast<int>(sizeof(Item));
      if (item >= 0 && item < bytes) *reinterpret_cast<Item*>(stretch.to + item) = items[i];
    }
  }
}

template <typename Item, int kStretches>
cudaError_t LaunchStretchesOf(cudaStream_t stream, const std::vector<Stretch>& stretches) {
  Stretches<kStretches> table = {};
  int64_t blocks = 0, first = 0;
  table.equal = true;
  for (Stretch stretch : stretches) {
    // As many whatever the address.
    const int64_t of_it = CeilDiv(stretch.bytes + kPackBytes - 1,
                                  int64_t{kVectorThreads} * kPackBytes * kStretchPacks);
    if (table.count == 0) first = of_it;
    table.equal = table.equal && of_it == first;
    stretch.first_block = static_cast<uint32_t>(blocks);
    table.stretches[table.count++] = stretch;
    blocks += of_it;
  }
  table.blocks = FastDivider(first);
  return Launch(MoveStretches<Item, kStretches>, blocks, kVectorThreads, 0, stream, table);
}

template <typename Item>
cudaError_t LaunchStretches(cudaStream_t stream, const std::vector<Stretch>& stretches) {
  return stretches.size() <= 64 ? LaunchStretchesOf<Item, 64>(stream, stretches)
                                : LaunchStretchesOf<Item, kMaxDestinations>(stream, stretches);
}

// The rows of all pieces as stretches, if these are few and long; else none.
std::vector<Stretch> FindStretches(const Job& job) {
  std::vector<Stretch> stretches;
  int64_t row_bytes = 0, bytes = 0;
  for (const Destination& d : job.destinations) row_bytes += d.row_bytes;
  if (job.broadcasts || job.rows > kMaxDestinations || row_bytes < kLongStretch) return {};
  for (const Destination& destination : job.destinations) {
    auto* to = static_cast<unsigned char*>(destination.data);
    for (int64_t row = 0; row < job.rows; ++row) {
      for (int64_t p = 0; p < destination.piece_count; ++p) {
        const Piece& piece = job.pieces[destination.first_piece + p];
        if (piece.size > 0) {
          stretches.push_back({static_cast<const unsigned char*>(piece.source) + row * piece.stride,
                               to, piece.size, 0});
        }
        if (piece.size < piece.extent) {
          stretches.push_back({nullptr, to + piece.size, piece.extent - piece.size, 0});
        }
        to += piece.extent;
        bytes += piece.extent;
        if (static_cast<int64_t>(stretches.size()) > kMaxDestinations) return {};
      }
    }
  }
  if (bytes < kLongStretch * static_cast<int64_t>(stretches.size())) return {};
  return stretches;
}

}  // namespace

bool MovesAsStretches(const Job& job, int64_t unit) {
  return !IsWhole(job, unit) && !FindStretches(job).empty();
}

cudaError_t LaunchStretches(cudaStream_t stream, const Job& job, int64_t unit) {
  const std::vector<Stretch> stretches = FindStretches(job);
  switch (unit) {
    case 16:
    case 8:
      return LaunchStretches<uint2>(stream, stretches);
    case 4:
      return LaunchStretches<uint32_t>(stream, stretches);
    case 2:
      return LaunchStretches<uint16_t>(stream, stretches);
    default:
      return LaunchStretches<uint8_t>(stream, stretches);
  }
}

}  // namespace jaxops::concatenate::cuda
