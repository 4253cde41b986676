// These kernels find the first step of every step's segment. The latency of a launch bounds them
// for all but very long or very many sequences.
//
// A block has a tile of a sequence, and needs the last step before the tile at which a segment
// begins. Blocks of short sequences read all ids before their tile. Long sequences have two
// launches: the first one writes a tile's last begin to its last step. A block of the second launch
// reads those of all tiles before its own. It does not matter whether another
// block has already replaced one by the start of that step, which is the last begin of that tile or
// of an earlier one.
#include <algorithm>
#include <cstdint>
#include <string>

#include "common/fast_divide.h"
#include "cuda/common/launch.h"
#include "cuda/common/refusal.h"
#include "cuda/segment_starts/launch.h"

namespace jaxops::segment_starts::cuda {
namespace {

using jaxops::cuda::CeilDiv;
using jaxops::cuda::kWarp;
using jaxops::cuda::Launch;

// Blocks of short sequences have fewer threads, so that a multiprocessor has more of them.
constexpr int kMaxThreads = 512;
constexpr int kMaxWarps = kMaxThreads / kWarp;
constexpr int kSteps = 4;  // of a thread at a time
constexpr int kChunk = kMaxThreads * kSteps;
// Sequences of up to this number of steps are short: one launch for 16384 steps took 6.0 us before
// (1,12288,16384,12288,4), two 4.2.
constexpr int64_t kShortTime = 4 * kChunk;
// A block reads the begins of this number of tiles at once.
constexpr int64_t kMaxTiles = kMaxThreads;

struct Params {
  const void* ids;
  int32_t* starts;
  int time, first;
  int tile_steps;
  FastDivider tiles;
  BatchMap<Call::kOperands> batch;
};

// Returns the maximum of the values of all threads of a block.
__device__ __forceinline__ int BlockMax(int value) {
  __shared__ int of_warps[kMaxWarps];
  value = __reduce_max_sync(0xffffffff, value);
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = __reduce_max_sync(0xffffffff, of_warps[threadIdx.x % (blockDim.x / kWarp)]);
  __syncthreads();
  return value;
}

// Replaces a thread's value by the maximum of `carried` and the values of the threads before it,
// and returns the maximum of all.
__device__ __forceinline__ int ExclusiveBlockMax(int& value, int carried) {
  __shared__ int of_warps[kMaxWarps];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int other = __shfl_up_sync(0xffffffff, value, distance);
    if (lane >= distance) value = max(value, other);
  }
  if (lane == kWarp - 1) of_warps[warp] = value;
  value = __shfl_up_sync(0xffffffff, value, 1);
  if (lane == 0) value = carried;
  __syncthreads();
  const int of_other = lane < blockDim.x / kWarp ? of_warps[lane] : carried;
  value = max(value, max(carried, __reduce_max_sync(0xffffffff, lane < warp ? of_other : carried)));
  const int all = max(carried, __reduce_max_sync(0xffffffff, of_other));
  __syncthreads();
  return all;
}

// Returns the last step in [begin, end) at which a segment begins, or `none`, for the steps of one
// thread of a block.
template <typename Id>
__device__ __forceinline__ int LastBegin(const Id* ids, int begin, int end, int none) {
  int last = none;
#pragma unroll 4
  for (int t = max(begin, 1) + threadIdx.x; t < end; t += blockDim.x) {
    if (ids[t] != ids[t - 1]) last = t;
  }
  return last;
}

struct Tile {
  int first, end;
  int64_t ids, starts;  // offsets of the sequence

  __device__ explicit Tile(const Params& p) {
    uint32_t block = blockIdx.x;
    first = p.tiles.DivMod(block) * p.tile_steps;
    end = min(first + p.tile_steps, p.time);
    const auto offsets = p.batch.AllOffsets(block);
    ids = offsets[Call::kIds];
    starts = offsets[Call::kStarts];
  }
};

template <typename Id>
__global__ void __launch_bounds__(kMaxThreads) TileBegins(const __grid_constant__ Params p) {
  const Tile tile(p);
  const Id* ids = static_cast<const Id*>(p.ids) + tile.ids;
  const int last = BlockMax(LastBegin(ids, tile.first, tile.end, p.first));
  if (threadIdx.x == 0) p.starts[tile.starts + tile.end - 1] = last;
}

template <typename Id, bool kIsShort>
__global__ void __launch_bounds__(kMaxThreads) SegmentStarts(const __grid_constant__ Params p) {
  const Tile tile(p);
  const Id* ids = static_cast<const Id*>(p.ids) + tile.ids;
  int32_t* starts = p.starts + tile.starts;
  int carried = p.first;
  if (tile.first > 0) {
    if constexpr (kIsShort) {
      carried = LastBegin(ids, 0, tile.first, p.first);
    } else if (const int end = (threadIdx.x + 1) * p.tile_steps; end <= tile.first) {
      carried = *static_cast<volatile int32_t*>(starts + end - 1);
    }
    carried = BlockMax(carried);
  }
#pragma unroll 1
  for (int first = tile.first; first < tile.end; first += blockDim.x * kSteps) {
    const int t = first + threadIdx.x * kSteps;
    int begins[kSteps], last = p.first;
    Id before = t > 0 && t < tile.end ? ids[t - 1] : Id{};
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (t + i < tile.end) {
        const Id own = ids[t + i];
        if (t + i > 0 && own != before) last = t + i;
        before = own;
      }
      begins[i] = last;
    }
    carried = ExclusiveBlockMax(last, carried);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (t + i < tile.end) starts[t + i] = max(begins[i], last);
    }
  }
}

}  // namespace

cudaError_t LaunchSegmentStarts(cudaStream_t stream, const Call& call) {
  if (call.batch.size() == 0 || call.time == 0) return cudaSuccess;
  const bool is_short = call.time <= kShortTime;
  const int64_t tile_steps =
      is_short ? kChunk : CeilDiv(CeilDiv(call.time, kMaxTiles), kChunk) * kChunk;
  const int64_t tiles = CeilDiv(call.time, tile_steps);
  const int64_t blocks = call.batch.size() * tiles;
  if (call.time > kMaxTime || blocks > INT32_MAX) {
    return jaxops::cuda::Refuse(cudaErrorInvalidValue,
                                "segment_starts: a GPU has up to " + std::to_string(kMaxTime) +
                                    " steps of up to " + std::to_string(INT32_MAX / tiles) +
                                    " sequences, got " + std::to_string(call.time) + " of " +
                                    std::to_string(call.batch.size()));
  }
  const int threads = static_cast<int>(
      std::min<int64_t>(kMaxThreads, CeilDiv(CeilDiv(call.time, kSteps), kWarp) * kWarp));
  const Params p{.ids = call.ids,
                 .starts = call.starts,
                 .time = static_cast<int>(call.time),
                 .first = call.first,
                 .tile_steps = static_cast<int>(tile_steps),
                 .tiles = FastDivider(tiles),
                 .batch = call.batch};
  return DispatchId(call.id_bytes, [&](auto id) {
    using Id = decltype(id);
    if (is_short) return Launch(SegmentStarts<Id, true>, blocks, threads, 0, stream, p);
    const cudaError_t error = Launch(TileBegins<Id>, blocks, threads, 0, stream, p);
    if (error != cudaSuccess) return error;
    return Launch(SegmentStarts<Id, false>, blocks, threads, 0, stream, p);
  });
}

}  // namespace jaxops::segment_starts::cuda
