// This kernel copies few and long segments between addresses of any alignment: a thread shifts the
// vectors that it reads into the vectors that it writes.
#include <cuda_runtime_api.h>

#include "common/fast_divide.h"
#include "cuda/common/launch.h"
#include "cuda/common/numeric.cuh"
#include "cuda/concatenate/families.h"
#include "cuda/concatenate/vectors.cuh"

namespace jaxops::concatenate::cuda {
namespace {

using jaxops::cuda::CeilDiv;
using jaxops::cuda::Launch;

// A thread writes this number of vectors, and each takes two loads.
constexpr int kVectors = 2;
constexpr int64_t kFewSegments = 64;
constexpr int64_t kMaxSegments = 480;

struct Segment {
  const unsigned char* from;  // null for zeros
  unsigned char* to;
  int64_t bytes;
  uint32_t first_block;
};

// SegmentTable lists copies of any lengths between any addresses.
template <int kSegments>
struct SegmentTable {
  Segment segments[kSegments];
  int count;
  bool equal;
  FastDivider blocks;  // blocks per segment, if all have the same number

  __device__ __forceinline__ int Find(uint32_t block) const {
    if (equal) return blocks.Quotient(block);
    int low = 0;
    for (int width = count; width > 1;) {
      const int half = width / 2;
      if (segments[low + half].first_block <= block) low += half;
      width -= half;
    }
    return low;
  }
};

// Shift returns 16 of the 32 bytes of `low` and `high`, from byte `first` on.
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

// A thread assembles each vector from the two vectors that contain its bytes. The second of the two
// is the next thread's first, and comes from the L1 cache. At the ends of a segment, which contains
// only parts of the two, a thread moves items.
template <typename Item, int kSegments>
__global__ void __launch_bounds__(kVectorThreads)
    MoveSegments(const __grid_constant__ SegmentTable<kSegments> table) {
  const Segment& segment = table.segments[table.Find(blockIdx.x)];
  const int64_t bytes = segment.bytes;
  const uint32_t head = reinterpret_cast<uintptr_t>(segment.to) % kVectorBytes;
  const int64_t first =
      int64_t{blockIdx.x - segment.first_block} * (kVectorThreads * kVectorBytes * kVectors) +
      threadIdx.x * kVectorBytes - head;
  const unsigned char* from = segment.from + first;
  const auto shift = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from) % kVectorBytes);
  uint4 low[kVectors], high[kVectors];
#pragma unroll
  for (int m = 0; m < kVectors; ++m) {
    const int64_t at = first + m * kVectorThreads * kVectorBytes;
    const int64_t read = at - shift;
    const bool whole = segment.from != nullptr && read >= 0 && read + 2 * kVectorBytes <= bytes;
    low[m] = whole ? Load<uint4>(segment.from + read) : uint4{};
    high[m] = whole && shift != 0 ? Load<uint4>(segment.from + read + kVectorBytes) : uint4{};
  }
#pragma unroll
  for (int m = 0; m < kVectors; ++m) {
    const int64_t at = first + m * kVectorThreads * kVectorBytes;
    const int64_t read = at - shift;
    const bool zeros = segment.from == nullptr;
    if (zeros ? at >= 0 && at + kVectorBytes <= bytes
              : read >= 0 && read + 2 * kVectorBytes <= bytes) {
      Store(segment.to + at, Shift(low[m], high[m], shift));
      continue;
    }
    Item items[kItems<Item>];
#pragma unroll
    for (int i = 0; i < kItems<Item>; ++i) {
      const int64_t item = at + i * static_cast<int>(sizeof(Item));
      const bool there = item >= 0 && item < bytes;
      items[i] = there && !zeros ? *reinterpret_cast<const Item*>(segment.from + item) : Item{};
    }
#pragma unroll
    for (int i = 0; i < kItems<Item>; ++i) {
      const int64_t item = at + i * static_cast<int>(sizeof(Item));
      if (item >= 0 && item < bytes) *reinterpret_cast<Item*>(segment.to + item) = items[i];
    }
  }
}

template <typename Item, int kSegments>
cudaError_t LaunchTable(cudaStream_t stream, const Job& job) {
  SegmentTable<kSegments> table = {};
  int64_t blocks = 0, first = 0;
  table.equal = true;
  const auto add = [&](const unsigned char* from, unsigned char* to, int64_t bytes) {
    if (bytes == 0) return;
    // The number of blocks does not depend on the address.
    const int64_t count =
        CeilDiv(bytes + kVectorBytes - 1, int64_t{kVectorThreads} * kVectorBytes * kVectors);
    if (table.count == 0) first = count;
    table.equal = table.equal && count == first;
    table.segments[table.count++] = {from, to, bytes, static_cast<uint32_t>(blocks)};
    blocks += count;
  };
  for (const Destination& destination : job.destinations) {
    auto* to = static_cast<unsigned char*>(destination.data);
    for (int64_t row = 0; row < job.rows; ++row) {
      for (int64_t p = 0; p < destination.piece_count; ++p) {
        const Piece& piece = job.pieces[destination.first_piece + p];
        add(static_cast<const unsigned char*>(piece.source) + row * piece.stride, to, piece.size);
        add(nullptr, to + piece.size, piece.extent - piece.size);
        to += piece.extent;
      }
    }
  }
  table.blocks = FastDivider(first);
  return Launch(MoveSegments<Item, kSegments>, blocks, kVectorThreads, 0, stream, table);
}

template <typename Item>
cudaError_t LaunchItems(cudaStream_t stream, const Call& call) {
  return call.job.rows * CountRowSegments(call) <= kFewSegments
             ? LaunchTable<Item, kFewSegments>(stream, call.job)
             : LaunchTable<Item, kMaxSegments>(stream, call.job);
}

}  // namespace

int64_t CountRowSegments(const Call& call) {
  int64_t count = 0;
  for (const Piece& piece : call.job.pieces) {
    count += (piece.size > 0) + (piece.size < piece.extent);
  }
  return count;
}

bool CanRunSegments(const Call& call, const Device&) {
  const Job& job = call.job;
  return !job.broadcasts && job.rows <= kMaxSegments &&
         job.rows * CountRowSegments(call) <= kMaxSegments;
}

cudaError_t LaunchSegments(cudaStream_t stream, const Call& call, const Device&) {
  switch (call.unit) {
    case 16:
    case 8:
      return LaunchItems<uint2>(stream, call);
    case 4:
      return LaunchItems<uint32_t>(stream, call);
    case 2:
      return LaunchItems<uint16_t>(stream, call);
    default:
      return LaunchItems<uint8_t>(stream, call);
  }
}

}  // namespace jaxops::concatenate::cuda
