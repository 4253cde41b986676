// These kernels order points, see cuda/grid_sample/order.cuh. Each block sorts its own points by
// groups of neighbouring bins in shared memory. For a rough order no more is needed: the first
// tiles of all blocks come first, then the second tiles, and so on. For the order by bricks, one
// block per group then gathers the points of the group from all blocks and sorts them by bins.
#include <algorithm>
#include <cstdint>

#include "cuda/common/launch.h"
#include "cuda/grid_sample/families.h"
#include "cuda/grid_sample/order.cuh"
#include "cuda/grid_sample/samples.cuh"

namespace jaxops::grid_sample::cuda {
namespace {

using jaxops::cuda::CeilDiv;
using jaxops::cuda::kWarp;
using jaxops::cuda::Launch;

constexpr int kOrderThreads = 1024;
static_assert(kOrderThreads == kWarp * kWarp);

// These constants belong to a block that sorts a part of a rough order.
constexpr int kRoughGroups = 32;
constexpr int kRoughPoints = 4 * kOrderThreads;
constexpr int kTiles = kRoughPoints / kWarp + kRoughGroups;

// These constants belong to a block that sorts by groups of bricks.
constexpr int kBrickGroups = 512;
constexpr int kBrickPoints = 8 * kOrderThreads;
constexpr int kMaxBinsOfGroup = 8192;

// A group of at most this number of points is sorted in shared memory.
constexpr uint32_t kStaged = 8192;

struct alignas(8) Member {
  uint32_t index;
  uint32_t bin;
};

struct OrderParams {
  Call call;
  int64_t points;
  uint32_t bricks[kMaxAxes];
  uint32_t bins;
  int shift;  // a group has 2^shift bins
  uint32_t groups;
  RoughOrder rough;
  BrickOrder by_bricks;
  uint32_t blocks;   // number of blocks that sort
  Member* members;   // kBrickPoints per block, sorted by group
  uint32_t* begins;  // begins of the groups in a block's members, and the end: groups + 1 per block
  uint32_t* taken;   // number of places of the order in use
};

// SumTo returns the sum of the values of all threads up to this one, and writes the sum of all.
__device__ __forceinline__ uint32_t SumTo(uint32_t value, uint32_t* total) {
  __shared__ uint32_t warps[kWarp];
  const int lane = threadIdx.x % kWarp;
  const auto sum_to = [lane](uint32_t sum) {
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, sum, distance);
      if (lane >= distance) sum += other;
    }
    return sum;
  };
  const uint32_t sum = sum_to(value);
  if (lane == kWarp - 1) warps[threadIdx.x / kWarp] = sum;
  __syncthreads();
  const uint32_t of_warps = sum_to(warps[lane]);
  __syncthreads();
  *total = __shfl_sync(~0u, of_warps, kWarp - 1);
  const int warp = threadIdx.x / kWarp;
  const uint32_t before = __shfl_sync(~0u, of_warps, max(0, warp - 1));
  return sum + (warp == 0 ? 0 : before);
}

// Count adds one at `place` for each thread that is `real`, and returns the count before.
__device__ __forceinline__ uint32_t Count(uint32_t* counts, uint32_t place, bool real) {
  // Neighbouring points often have the same place, for which one addition per warp is enough.
  const uint32_t first = __shfl_sync(~0u, place, 0);
  if (__all_sync(~0u, real && place == first)) {
    const int lane = threadIdx.x % kWarp;
    uint32_t rank = 0;
    if (lane == 0) rank = atomicAdd(counts + place, kWarp);
    return __shfl_sync(~0u, rank, 0) + lane;
  }
  return real ? atomicAdd(counts + place, 1) : 0;
}

// Found holds this thread's points and their bins. Points beyond the last are the last one.
template <int kPoints, int kAxes>
struct Found {
  float coordinates[kPoints][kAxes];
  uint32_t bins[kPoints];

  __device__ __forceinline__ Found(const OrderParams& params, int64_t first) {
    const Geometry& geometry = params.call.geometry;
#pragma unroll
    for (int i = 0; i < kPoints; ++i) {
      const int64_t index = min(first + i * kOrderThreads, params.points - 1);
      multilinear::cuda::LoadPoint<kAxes>(params.call.points, index * kAxes,
                                          params.call.point_dtype, coordinates[i]);
    }
#pragma unroll
    for (int i = 0; i < kPoints; ++i) {
      uint32_t brick = 0, set = 0;
      bool meets = true;
      Place<float> found[kAxes];
      LocateAll(coordinates[i], geometry, found);
#pragma unroll
      for (int a = 0; a < kAxes; ++a) {
        const Place<float>& place = found[a];
        meets = meets && (place.lower || place.upper);
        const int upper = max(0, min(place.entry + 1, geometry.sizes[a] - 1));
        brick = brick * params.bricks[a] + (upper >> BrickShift<kAxes>(a));
        const bool first_entry = upper % (1 << BrickShift<kAxes>(a)) == 0;
        set |= first_entry ? multilinear::BitOf<kAxes>(a) : 0;
      }
      // Points that touch no entry may have any bin, but all in one bin would unbalance the groups.
      bins[i] = meets ? (brick << kAxes) + set
                      : static_cast<uint32_t>(first + i * kOrderThreads) % params.bins;
    }
  }
};

template <int kAxes>
__global__ void __launch_bounds__(kOrderThreads)
    SortIntoTiles(const __grid_constant__ OrderParams params) {
  constexpr int kPoints = kRoughPoints / kOrderThreads;
  __shared__ uint32_t counts[kRoughGroups];
  extern __shared__ __align__(16) unsigned char shared[];
  auto* sorted = reinterpret_cast<Placed*>(shared);
  if (threadIdx.x < kRoughGroups) counts[threadIdx.x] = 0;
  for (int i = threadIdx.x; i < kTiles * kWarp; i += kOrderThreads) {
    sorted[i].index = Placed::kNone;
  }
  const int64_t first = int64_t{blockIdx.x} * kRoughPoints + threadIdx.x;
  const Found<kPoints, kAxes> found(params, first);
  __syncthreads();
  uint32_t ranks[kPoints];
#pragma unroll
  for (int i = 0; i < kPoints; ++i) {
    const bool real = first + i * kOrderThreads < params.points;
    ranks[i] = Count(counts, found.bins[i] >> params.shift, real);
  }
  __syncthreads();
  // Every group begins at a tile.
  uint32_t tiles, group_tiles = 0;
  if (threadIdx.x < kRoughGroups) group_tiles = (counts[threadIdx.x] + kWarp - 1) / kWarp;
  const uint32_t begin = SumTo(group_tiles, &tiles) - group_tiles;
  if (threadIdx.x < kRoughGroups) counts[threadIdx.x] = begin * kWarp;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPoints; ++i) {
    const int64_t index = first + i * kOrderThreads;
    if (index >= params.points) continue;
    Placed placed{{}, static_cast<uint32_t>(index)};
#pragma unroll
    for (int a = 0; a < kAxes; ++a) placed.coordinates[a] = found.coordinates[i][a];
    sorted[counts[found.bins[i] >> params.shift] + ranks[i]] = placed;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kTiles * kWarp; i += kOrderThreads) {
    const int64_t tile = int64_t{i / kWarp} * gridDim.x + blockIdx.x;
    params.rough.points[tile * kWarp + i % kWarp] = sorted[i];
  }
}

template <int kAxes>
__global__ void __launch_bounds__(kOrderThreads)
    SortIntoGroups(const __grid_constant__ OrderParams params) {
  constexpr int kPoints = kBrickPoints / kOrderThreads;
  __shared__ uint32_t counts[kBrickGroups];
  extern __shared__ __align__(16) unsigned char shared[];
  auto* sorted = reinterpret_cast<Member*>(shared);
  if (threadIdx.x < kBrickGroups) counts[threadIdx.x] = 0;
  if (blockIdx.x == 0 && threadIdx.x == 0) *params.taken = *params.by_bricks.left = 0;
  const int64_t first = int64_t{blockIdx.x} * kBrickPoints + threadIdx.x;
  const Found<kPoints, kAxes> found(params, first);
  __syncthreads();
  uint32_t ranks[kPoints];
#pragma unroll
  for (int i = 0; i < kPoints; ++i) {
    const bool real = first + i * kOrderThreads < params.points;
    ranks[i] = Count(counts, found.bins[i] >> params.shift, real);
  }
  __syncthreads();
  const uint32_t count = threadIdx.x < kBrickGroups ? counts[threadIdx.x] : 0;
  uint32_t size;
  const uint32_t begin = SumTo(count, &size) - count;
  if (threadIdx.x < kBrickGroups) counts[threadIdx.x] = begin;
  if (threadIdx.x <= params.groups) {
    params.begins[int64_t{blockIdx.x} * (params.groups + 1) + threadIdx.x] = begin;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPoints; ++i) {
    const int64_t index = first + i * kOrderThreads;
    if (index >= params.points) continue;
    sorted[counts[found.bins[i] >> params.shift] + ranks[i]] = {static_cast<uint32_t>(index),
                                                                found.bins[i]};
  }
  __syncthreads();
  Member* to = params.members + int64_t{blockIdx.x} * kBrickPoints;
  for (uint32_t i = threadIdx.x; i < size; i += kOrderThreads) to[i] = sorted[i];
}

// A block gathers the points of one group and sorts them by bins.
__global__ void __launch_bounds__(kOrderThreads)
    SortIntoBins(const __grid_constant__ OrderParams params) {
  __shared__ uint32_t runs_before[kOrderThreads + 1];  // number of members in the blocks before
  __shared__ int64_t runs_shift[kOrderThreads];        // offset from there to the members
  __shared__ uint32_t base;
  extern __shared__ __align__(16) unsigned char shared[];
  auto* staged = reinterpret_cast<uint32_t*>(shared);
  uint32_t* places = staged + kStaged;  // counts of the bins, then the next place of each bin
  const uint32_t group = blockIdx.x;
  const uint32_t first_bin = group << params.shift;
  const uint32_t bins = min(1u << params.shift, params.bins - first_bin);

  // for_members calls visit(member, real) for all members, with whole warps.
  const auto for_members = [&](auto&& visit) {
    uint32_t all = 0;
    for (uint32_t block = 0; block < params.blocks; block += kOrderThreads) {
      const uint32_t of = block + threadIdx.x;
      uint32_t begin = 0, end = 0;
      if (of < params.blocks) {
        const uint32_t* begins = params.begins + int64_t{of} * (params.groups + 1) + group;
        begin = begins[0];
        end = begins[1];
      }
      uint32_t size;
      const uint32_t before = SumTo(end - begin, &size) - (end - begin);
      runs_before[threadIdx.x] = before;
      runs_shift[threadIdx.x] = int64_t{of} * kBrickPoints + begin - before;
      if (threadIdx.x == 0) runs_before[kOrderThreads] = size;
      __syncthreads();
      const uint32_t rounded = (size + kWarp - 1) / kWarp * kWarp;
      for (uint32_t i = threadIdx.x; i < rounded; i += kOrderThreads) {
        uint32_t run = 0;
#pragma unroll
        for (int step = kOrderThreads / 2; step > 0; step /= 2) {
          if (runs_before[run + step] <= i) run += step;
        }
        const bool real = i < size;
        visit(real ? params.members[runs_shift[run] + i] : Member{0, first_bin}, real);
      }
      __syncthreads();
      all += size;
    }
    return all;
  };

  for (uint32_t i = threadIdx.x; i < bins; i += kOrderThreads) places[i] = 0;
  const uint32_t size =
      for_members([&](Member member, bool real) { Count(places, member.bin - first_bin, real); });
  if (threadIdx.x == 0) base = atomicAdd(params.taken, size);
  __syncthreads();
  uint32_t next = 0;
  for (uint32_t from = 0; from < bins; from += kOrderThreads) {
    const uint32_t bin = from + threadIdx.x;
    const uint32_t count = bin < bins ? places[bin] : 0;
    uint32_t of_all;
    const uint32_t place = next + SumTo(count, &of_all) - count;
    next += of_all;
    if (bin < bins) {
      places[bin] = place;
      params.by_bricks.counts[first_bin + bin] = count;
      params.by_bricks.begins[first_bin + bin] = base + place;
    }
  }
  __syncthreads();
  uint32_t* to = params.by_bricks.points + base;
  const bool stages = size <= kStaged;
  for_members([&](Member member, bool real) {
    const uint32_t place = Count(places, member.bin - first_bin, real);
    if (real) (stages ? staged : to)[place] = member.index;
  });
  if (!stages) return;
  for (uint32_t i = threadIdx.x; i < size; i += kOrderThreads) to[i] = staged[i];
}

// BinPlan describes the groups of bins by which points are sorted.
struct BinPlan {
  uint32_t bricks[kMaxAxes] = {};
  int64_t bins = 0;  // 0: the points cannot be ordered
  int shift = 0;     // a group has 2^shift bins
  int64_t groups = 0;

  BinPlan(const Call& call, int64_t max_groups, int64_t max_bins) {
    const Geometry& geometry = call.geometry;
    if (call.batch.size() != 1 || geometry.points == 0 || geometry.points >= Placed::kNone) return;
    int64_t product = int64_t{1} << geometry.axes;
    for (int a = 0; a < geometry.axes; ++a) {
      const int brick_shift = geometry.axes == 3 ? BrickShift<3>(a) : BrickShift<2>(a);
      bricks[a] = static_cast<uint32_t>((int64_t{geometry.sizes[a]} + (1 << brick_shift) - 1) >>
                                        brick_shift);
      product *= bricks[a];
      if (product == 0 || product > max_bins) return;
    }
    bins = product;
    const auto count_groups = [&] { return (bins + (int64_t{1} << shift) - 1) >> shift; };
    while (count_groups() > max_groups) ++shift;
    groups = count_groups();
  }

  static BinPlan Rough(const Call& call) { return {call, kRoughGroups, INT32_MAX}; }
  static BinPlan ByBricks(const Call& call) {
    return {call, kBrickGroups, int64_t{kBrickGroups} * kMaxBinsOfGroup};
  }
};

OrderParams MakeParams(const Call& call, const BinPlan& plan) {
  OrderParams params{};
  params.call = call;
  params.points = call.geometry.points;
  std::copy_n(plan.bricks, kMaxAxes, params.bricks);
  params.bins = static_cast<uint32_t>(plan.bins);
  params.shift = plan.shift;
  params.groups = static_cast<uint32_t>(plan.groups);
  return params;
}

// RoughSize returns the number of places for points in a rough order.
int64_t RoughSize(const Call& call) {
  return CeilDiv(call.geometry.points, kRoughPoints) * kTiles * kWarp;
}

// BrickSpace lays out the work space of an order by bricks, in 4-byte numbers from its begin.
struct BrickSpace {
  int64_t members = 0, counts, begins, left, shares, taken, group_begins, points, size;

  BrickSpace(const Geometry& geometry, const BinPlan& plan) {
    counts = members + 2 * geometry.points;
    begins = counts + plan.bins;
    left = begins + plan.bins;
    shares = left + 1;
    taken = shares + 2 * ((geometry.points << geometry.axes) / kShare);
    group_begins = taken + 1;
    points = group_begins + CeilDiv(geometry.points, kBrickPoints) * (plan.groups + 1);
    size = points + geometry.points;
  }
};

}  // namespace

int64_t RoughOrderBytes(const Call& call) {
  if (BinPlan::Rough(call).bins == 0) return 0;
  return RoughSize(call) * static_cast<int64_t>(sizeof(Placed));
}

int64_t BrickOrderBytes(const Call& call) {
  const BinPlan plan = BinPlan::ByBricks(call);
  if (plan.bins == 0) return 0;
  return BrickSpace(call.geometry, plan).size * static_cast<int64_t>(sizeof(uint32_t));
}

cudaError_t OrderRoughly(cudaStream_t stream, const Call& call, void* space, RoughOrder* order) {
  OrderParams params = MakeParams(call, BinPlan::Rough(call));
  *order = params.rough = {RoughSize(call), static_cast<Placed*>(space)};
  const auto kernel = call.geometry.axes == 3 ? SortIntoTiles<3> : SortIntoTiles<2>;
  return Launch(kernel, CeilDiv(call.geometry.points, kRoughPoints), kOrderThreads,
                kTiles * kWarp * sizeof(Placed), stream, params);
}

cudaError_t OrderByBricks(cudaStream_t stream, const Call& call, void* space, BrickOrder* order) {
  const BinPlan plan = BinPlan::ByBricks(call);
  OrderParams params = MakeParams(call, plan);
  const BrickSpace parts(call.geometry, plan);
  auto* numbers = static_cast<uint32_t*>(space);
  std::copy_n(params.bricks, kMaxAxes, order->bricks);
  order->bins = params.bins;
  order->counts = numbers + parts.counts;
  order->begins = numbers + parts.begins;
  order->points = numbers + parts.points;
  order->left = numbers + parts.left;
  order->shares = numbers + parts.shares;
  const int64_t blocks = CeilDiv(params.points, kBrickPoints);
  params.by_bricks = *order;
  params.blocks = static_cast<uint32_t>(blocks);
  params.members = reinterpret_cast<Member*>(numbers + parts.members);
  params.begins = numbers + parts.group_begins;
  params.taken = numbers + parts.taken;
  const auto kernel = call.geometry.axes == 3 ? SortIntoGroups<3> : SortIntoGroups<2>;
  JAXOPS_RETURN_IF_ERROR(
      Launch(kernel, blocks, kOrderThreads, kBrickPoints * sizeof(Member), stream, params));
  // On some GPUs the static shared memory leaves less than the usual limit of dynamic memory.
  constexpr int kMaxBytes = (kStaged + kMaxBinsOfGroup) * static_cast<int>(sizeof(uint32_t));
  return Launch(SortIntoBins, params.groups, kOrderThreads,
                (kStaged + (size_t{1} << params.shift)) * sizeof(uint32_t), stream, params,
                kMaxBytes);
}

}  // namespace jaxops::grid_sample::cuda
