// These kernels sum the volume gradient brick by brick, see cuda/grid_sample/order.cuh.
//
// A warp keeps the sums of a brick in shared memory, loops over all points that touch the brick,
// and writes the brick once, so that the volume gradient in memory needs neither clearing nor
// reductions. In each step a warp adds the contributions of one point, which go to different
// entries; a few lanes share an entry. If a brick has more than kShare points, its warp takes the
// first kShare only. A second kernel distributes the others over free warps, kShare points of a
// brick each, and adds its sums in memory.
#include <algorithm>
#include <cstdint>

#include "cuda/common/launch.h"
#include "cuda/grid_sample/families.h"
#include "cuda/grid_sample/order.cuh"
#include "cuda/grid_sample/samples.cuh"

namespace jaxops::grid_sample::cuda {
namespace {

using jaxops::cuda::Accumulator;
using jaxops::cuda::CeilDiv;
using jaxops::cuda::kWarp;
using jaxops::cuda::Launch;
using jaxops::cuda::LoadVector;
using jaxops::cuda::StoreVector;
using jaxops::cuda::Vector;
using jaxops::cuda::Widen;

constexpr int64_t kMaxSharingBlocks = 2048;

// The updates of this number of points are read before they are added.
constexpr int kAhead = 4;

struct BrickParams {
  Params common;
  BrickOrder order;
  FastDivider chunks;           // chunks of channels; a warp has one chunk
  FastDivider along[kMaxAxes];  // bricks along an axis
};

// Update is the contribution of a point to an entry.
struct alignas(8) Update {
  int32_t place;  // offset of the entry in the brick; negative: the entry is not in the brick
  float weight;
};

template <int kAxes>
constexpr int kSets = kAxes == 3 ? 27 : 9;

// PointsOf lists the points that touch a brick, which are those of 3^axes bins; each lane holds one
// bin.
template <int kAxes>
class PointsOf {
 public:
  __device__ __forceinline__ PointsOf(const BrickOrder& order, const uint32_t (&brick)[kAxes]) {
    const int lane = threadIdx.x % kWarp;
    uint32_t at = 0, set = 0;
    bool there = lane < kSets<kAxes>;
    int digits = lane;
#pragma unroll
    for (int a = 0; a < kAxes; ++a) {
      const int digit = digits % 3;  // 0: not in the set; 1: in it; 2: in it, in the next brick
      digits /= 3;
      const uint32_t place = brick[a] + (digit == 2 ? 1 : 0);
      there = there && place < order.bricks[a];
      at = at * order.bricks[a] + place;
      set |= digit != 0 ? multilinear::BitOf<kAxes>(a) : 0;
    }
    const uint32_t bin = (at << kAxes) + set;
    const uint32_t count = there ? order.counts[bin] : 0;
    begin_ = there ? order.begins[bin] : 0;
    uint32_t sum = count;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, sum, distance);
      if (lane >= distance) sum += other;
    }
    before_ = sum - count;
    size_ = __shfl_sync(~0u, sum, kWarp - 1);
  }

  __device__ __forceinline__ uint32_t size() const { return size_; }

  // At returns the index in the order of the i-th point that touches the brick.
  __device__ __forceinline__ uint32_t At(uint32_t i) const {
    int bin = 0;
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) {
      if (__shfl_sync(~0u, before_, bin + step) <= i) bin += step;
    }
    return __shfl_sync(~0u, begin_, bin) + i - __shfl_sync(~0u, before_, bin);
  }

 private:
  uint32_t begin_;   // of the lane's bin
  uint32_t before_;  // number of points in the bins of the lanes before
  uint32_t size_;
};

// Memory holds the sums of a warp and the contributions that the warp adds next.
template <int kCount, int kAxes>
struct Memory {
  static constexpr int kCorners = 1 << kAxes;
  static constexpr int kLanes = kWarp / kCorners;  // lanes per corner
  static constexpr int kChannels = kLanes * kCount;

  alignas(16) float sums[kBrickEntries * kChannels];
  alignas(16) float cotangents[kWarp * kChannels];
  Update updates[kWarp * (kCorners + 1)];  // one more per point puts points into different banks
};

// AddPoints adds the points from `begin` to `end` of those that touch a brick.
template <typename T, int kCount, int kAxes>
__device__ __forceinline__ void AddPoints(Memory<kCount, kAxes>& memory, const BrickParams& params,
                                          const uint32_t (&brick)[kAxes],
                                          const PointsOf<kAxes>& points, uint32_t begin,
                                          uint32_t end, int64_t channel) {
  using M = Memory<kCount, kAxes>;
  constexpr int kRounds = M::kLanes;  // rounds in which a warp loads the rows of its points
  const Call& call = params.common.call;
  const int64_t width = call.geometry.width;
  const int lane = threadIdx.x % kWarp;
  const int corner = lane / M::kLanes;
  const int within = lane % M::kLanes * kCount;
  const auto index_at = [&](uint32_t i) { return params.order.points[points.At(min(i, end - 1))]; };
  // The next points of a warp are loaded while the current points are added.
  Sought<float, kAxes> sought;  // in the only batch entry
  sought.entry = 0;
  Vector<T, kCount> rows[kRounds];
  const auto load = [&](uint32_t index) {
    sought.point = index;
    multilinear::cuda::LoadPoint<kAxes>(call.points, int64_t{index} * kAxes, call.point_dtype,
                                        sought.coordinates);
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const uint32_t of = __shfl_sync(~0u, index, round * M::kCorners + corner);
      const T* row = static_cast<const T*>(call.cotangent) + of * width + channel + within;
      rows[round] = channel + within < width ? LoadVector<kCount>(row) : Vector<T, kCount>{};
    }
  };
  uint32_t index = begin < end ? index_at(begin + lane) : 0;
  uint32_t next = begin < end ? index_at(begin + kWarp + lane) : 0;
  if (begin < end) load(index);
#pragma unroll 1
  for (uint32_t first = begin; first < end; first += kWarp) {
    const bool real = first + lane < end;
    Stencil<float, kAxes> stencil(params.common, sought);
    int places[kAxes];
    bool inside[kAxes][2];
#pragma unroll
    for (int a = 0; a < kAxes; ++a) {
      places[a] = stencil.places[a] - static_cast<int>(brick[a] << BrickShift<kAxes>(a));
#pragma unroll
      for (int up = 0; up < 2; ++up) {
        inside[a][up] = static_cast<uint32_t>(places[a] + up) < 1u << BrickShift<kAxes>(a);
      }
    }
    stencil.MakeWeights(call);
    __syncwarp();
#pragma unroll
    for (int c = 0; c < M::kCorners; ++c) {
      bool there = real && stencil.IsThere(c);
      int place = 0;
#pragma unroll
      for (int a = 0; a < kAxes; ++a) {
        const int up = c & multilinear::BitOf<kAxes>(a) ? 1 : 0;
        there = there && inside[a][up];
        place = (place << BrickShift<kAxes>(a)) + places[a] + up;
      }
      memory.updates[lane * (M::kCorners + 1) + c] = {there ? place * M::kChannels : -1,
                                                      stencil.terms[c]};
    }
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      Vector<float, kCount> row;
#pragma unroll
      for (int i = 0; i < kCount; ++i) row.values[i] = Widen(rows[round].values[i]);
      *reinterpret_cast<Vector<float, kCount>*>(
          memory.cotangents + (round * M::kCorners + corner) * M::kChannels + within) = row;
    }
    __syncwarp();
    index = next;
    if (first + kWarp < end) {
      load(index);
      next = index_at(first + 2 * kWarp + lane);
    }
    const int count = static_cast<int>(min(static_cast<uint32_t>(kWarp), end - first));
#pragma unroll 1
    for (int p = 0; p < count; p += kAhead) {
      Update updates[kAhead];
      Vector<float, kCount> values[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        updates[i] = memory.updates[(p + i) * (M::kCorners + 1) + corner];
        values[i] = LoadVector<kCount>(memory.cotangents + (p + i) * M::kChannels + within);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (updates[i].place >= 0) {
          auto* sums =
              reinterpret_cast<Vector<float, kCount>*>(memory.sums + updates[i].place + within);
          Vector<float, kCount> sum = *sums;
#pragma unroll
          for (int e = 0; e < kCount; ++e) sum.values[e] += updates[i].weight * values[i].values[e];
          *sums = sum;
        }
        // Another lane may add to the same entry next.
        __syncwarp();
      }
    }
  }
}

template <typename T, int kCount, int kAxes, bool kRest>
__global__ void __launch_bounds__(kWarp) SumInBricks(const __grid_constant__ BrickParams params) {
  using M = Memory<kCount, kAxes>;
  extern __shared__ __align__(16) unsigned char shared[];
  M& memory = *reinterpret_cast<M*>(shared);
  const Geometry& geometry = params.common.call.geometry;
  const int lane = threadIdx.x;
  const uint32_t items = kRest ? *params.order.left * params.chunks.divisor() : gridDim.x;
  for (uint32_t item = blockIdx.x; item < items; item += gridDim.x) {
    uint32_t rest = item;
    const uint32_t chunk = params.chunks.DivMod(rest);
    const int64_t channel = int64_t{chunk} * M::kChannels;
    uint32_t begin = 0;
    if constexpr (kRest) {
      begin = params.order.shares[2 * rest + 1] * kShare;
      rest = params.order.shares[2 * rest];
    }
    uint32_t brick[kAxes];
#pragma unroll
    for (int a = kAxes - 1; a > 0; --a) brick[a] = params.along[a].DivMod(rest);
    brick[0] = rest;
    const PointsOf<kAxes> points(params.order, brick);
    const uint32_t end = min(points.size(), begin + kShare);
    if (!kRest && chunk == 0 && end < points.size()) {
      const uint32_t more = (points.size() - 1) / kShare;
      uint32_t at = 0;
      if (lane == 0) at = atomicAdd(params.order.left, more);
      at = __shfl_sync(~0u, at, 0);
      for (uint32_t i = lane; i < more; i += kWarp) {
        params.order.shares[2 * (at + i)] = item / params.chunks.divisor();
        params.order.shares[2 * (at + i) + 1] = i + 1;
      }
    }
    for (int i = lane * 4; i < kBrickEntries * M::kChannels; i += kWarp * 4) {
      *reinterpret_cast<float4*>(memory.sums + i) = float4{};
    }
    __syncwarp();
    AddPoints<T>(memory, params, brick, points, begin, end, channel);
    for (int i = lane; i < kBrickEntries * M::kLanes; i += kWarp) {
      const int64_t f = channel + i % M::kLanes * kCount;
      int place = i / M::kLanes;
      int64_t offset = f;
      bool there = f < geometry.width;
#pragma unroll
      for (int a = kAxes - 1; a >= 0; --a) {
        const int64_t entry =
            (brick[a] << BrickShift<kAxes>(a)) + place % (1 << BrickShift<kAxes>(a));
        place >>= BrickShift<kAxes>(a);
        there = there && entry < geometry.sizes[a];
        offset += entry * params.common.strides[a];
      }
      if (!there) continue;
      const auto sums = LoadVector<kCount>(memory.sums + i * kCount);
      float* to = static_cast<float*>(params.common.sums) + offset;
      if constexpr (kRest) {
        Add(to, sums.values);
      } else {
        StoreVector(to, sums);
      }
    }
    if constexpr (kRest) __syncwarp();
  }
}

template <typename T, int kCount, int kAxes>
cudaError_t LaunchAxes(cudaStream_t stream, const Call& call, const BrickOrder& order,
                       float* sums) {
  using M = Memory<kCount, kAxes>;
  BrickParams params{
      Params(call, 1), order, FastDivider(CeilDiv(call.geometry.width, M::kChannels)), {}};
  params.common.sums = sums;
  for (int a = 0; a < kAxes; ++a) params.along[a] = FastDivider(order.bricks[a]);
  const int64_t blocks = int64_t{order.bins >> kAxes} * params.chunks.divisor();
  JAXOPS_RETURN_IF_ERROR(
      Launch(SumInBricks<T, kCount, kAxes, false>, blocks, kWarp, sizeof(M), stream, params));
  return Launch(SumInBricks<T, kCount, kAxes, true>, std::min(blocks, kMaxSharingBlocks), kWarp,
                sizeof(M), stream, params);
}

template <typename T>
cudaError_t LaunchOf(cudaStream_t stream, const Call& call, const BrickOrder& order, float* sums) {
  const auto with = [&]<int kAxes>(std::integral_constant<int, kAxes>) {
    // Each lane has as many channels as possible without idle lanes.
    constexpr int kLanes = kWarp >> kAxes;
    const int64_t width = call.geometry.width;
    const bool aligned =
        (reinterpret_cast<uintptr_t>(call.cotangent) | reinterpret_cast<uintptr_t>(sums)) %
            kVectorBytes ==
        0;
    if (aligned && width % (4 * kLanes) == 0) {
      return LaunchAxes<T, 4, kAxes>(stream, call, order, sums);
    }
    if (aligned && width % (2 * kLanes) == 0) {
      return LaunchAxes<T, 2, kAxes>(stream, call, order, sums);
    }
    return LaunchAxes<T, 1, kAxes>(stream, call, order, sums);
  };
  return call.geometry.axes == 3 ? with(std::integral_constant<int, 3>{})
                                 : with(std::integral_constant<int, 2>{});
}

}  // namespace

bool CanRunBricks(const Job& job, const Device&) {
  return job.sums != nullptr && job.call.dtype != DType::kF64 && job.order_space != nullptr &&
         BrickOrderBytes(job.call) > 0;
}

cudaError_t LaunchBricks(cudaStream_t stream, const Job& job, const Device&) {
  const Call& call = job.call;
  auto* sums = static_cast<float*>(job.sums);
  BrickOrder order;
  JAXOPS_RETURN_IF_ERROR(OrderByBricks(stream, call, job.order_space, &order));
  switch (call.dtype) {
    case DType::kF16:
      return LaunchOf<__half>(stream, call, order, sums);
    case DType::kBF16:
      return LaunchOf<__nv_bfloat16>(stream, call, order, sums);
    case DType::kF32:
      return LaunchOf<float>(stream, call, order, sums);
    case DType::kF64:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace jaxops::grid_sample::cuda
