// These kernels sample volumes at points and compute the gradients: one lane of a warp finds the
// entries around a point and shares them with the other lanes. All lanes then read neighbouring
// channels of all of these entries, by 16 bytes if rows allow it. Volume gradients are added in
// memory, four channels per reduction if the device has such an instruction.
//
// The kernels know every option.
#include <algorithm>
#include <cstdint>

#include "cuda/common/launch.h"
#include "cuda/grid_sample/families.h"
#include "cuda/grid_sample/samples.cuh"

namespace jaxops::grid_sample::cuda {
namespace {

using jaxops::cuda::Accumulator;
using jaxops::cuda::CeilDiv;
using jaxops::cuda::kWarp;
using jaxops::cuda::Launch;
using jaxops::cuda::LoadVector;
using jaxops::cuda::Narrow;
using jaxops::cuda::StoreVector;
using jaxops::cuda::Vector;
using jaxops::cuda::Widen;

// A multiprocessor has at least this number of blocks of kernels that read the volume, as registers
// allow. The kernels in float32 that only read need few registers.
template <typename T, bool kAdds = false>
constexpr int kReadingBlocks = sizeof(T) == 4 && !kAdds ? 4 : 2;

// WarpPoints holds the 32 points of a warp, each found by one lane, for the lanes that move
// channels.
template <typename A, int kAxes>
struct WarpPoints {
  static constexpr int kCorners = 1 << kAxes;
  static constexpr int kPitch = kCorners + 4;  // puts different points into different banks
  static constexpr unsigned kLost = 1u << kCorners;

  alignas(16) A values[kWarp * kPitch];  // of the corners: weights, or the lanes' dot products
  int64_t lows[kWarp];                   // offsets of the lowest entries
  int64_t rows[kWarp];                   // offsets of the cotangents
  int64_t indices[kWarp];
  unsigned there[kWarp];  // a bit per corner, and kLost

  // Put stores this lane's point. `operand` names the batch strides of the entries' offsets: those
  // of the volume or of its gradient.
  __device__ __forceinline__ void Put(const Params& params, int64_t index,
                                      const Sought<A, kAxes>& sought, Call::Operand operand) {
    Stencil<A, kAxes> stencil(params, sought);
    const unsigned flags = Put(params, index, stencil, operand);
    stencil.MakeWeights(params.call);
    // A direction that is NaN makes weights of missing entries NaN too.
#pragma unroll
    for (int c = 0; c < kCorners; ++c) stencil.terms[c] = flags >> c & 1 ? stencil.terms[c] : A(0);
    constexpr int kCount = jaxops::cuda::kVectorElements<A>;
#pragma unroll
    for (int c = 0; c < kCorners; c += kCount) {
      Vector<A, kCount> vec;
#pragma unroll
      for (int i = 0; i < kCount; ++i) vec.values[i] = stencil.terms[c + i];
      *reinterpret_cast<Vector<A, kCount>*>(values + threadIdx.x % kWarp * kPitch + c) = vec;
    }
  }

  // This overload stores the point without its weights.
  __device__ __forceinline__ unsigned Put(const Params& params, int64_t index,
                                          const Stencil<A, kAxes>& stencil, Call::Operand operand) {
    const Call& call = params.call;
    const int lane = threadIdx.x % kWarp;
    unsigned flags = stencil.lost ? kLost : 0;
#pragma unroll
    for (int c = 0; c < kCorners; ++c) flags |= stencil.IsThere(c) ? 1u << c : 0;
    lows[lane] = stencil.low + call.batch.Offset(stencil.entry, operand);
    rows[lane] = call.cotangent == nullptr ? 0
                                           : call.batch.Offset(stencil.entry, Call::kCotangent) +
                                                 stencil.point * call.geometry.width;
    indices[lane] = index;
    there[lane] = flags;
    return flags;
  }

  __device__ __forceinline__ void Get(int source, A (&of_corners)[kCorners]) const {
    constexpr int kCount = jaxops::cuda::kVectorElements<A>;
#pragma unroll
    for (int c = 0; c < kCorners; c += kCount) {
      const auto vec = LoadVector<kCount>(values + source * kPitch + c);
#pragma unroll
      for (int i = 0; i < kCount; ++i) of_corners[c + i] = vec.values[i];
    }
  }
};

// A warp finds the entries around 32 points, one per lane, and then goes through their rows of
// channels together: it calls step(points, source, f) for each point and each kCount channels from
// f on.
template <typename A, int kCount, int kAxes, typename Step>
__device__ __forceinline__ void ForEachRow(const Params& params, Call::Operand operand,
                                           Step&& step) {
  __shared__ WarpPoints<A, kAxes> shared[kThreads / kWarp];
  WarpPoints<A, kAxes>& points = shared[threadIdx.x / kWarp];
  const int lane = threadIdx.x % kWarp;
  uint64_t group = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  const auto split = static_cast<uint32_t>(params.by_split.DivMod(group));
  const int64_t first = static_cast<int64_t>(group) * kWarp;
  if (first >= params.places) return;
  uint32_t count;
  int64_t index;
  Sought<A, kAxes> sought;
  if (params.order == nullptr) {
    index = min(first + lane, params.points - 1);
    sought = Sought<A, kAxes>(params, index);
    count = static_cast<uint32_t>(min(int64_t{kWarp}, params.points - first));
  } else {
    Placed placed = params.order[first + lane];
    count = __popc(__ballot_sync(~0u, placed.index != Placed::kNone));
    if (count == 0) return;
    if (lane >= count) placed = params.order[first];
    index = placed.index;
    sought = Sought<A, kAxes>(params, placed);
  }
  points.Put(params, index, sought, operand);
  __syncwarp();
  const uint32_t rows = params.row.divisor();
#pragma unroll 1
  for (uint32_t round = split; round < rows; round += params.by_split.divisor()) {
    uint32_t source = round * kWarp + lane;
    const int64_t f = int64_t{params.row.DivMod(source)} * kCount;
    if (source < count) step(points, source, f);
  }
}

template <typename T, int kCount, int kAxes>
__global__ void __launch_bounds__(kThreads, kReadingBlocks<T>)
    Sample(const __grid_constant__ Params params) {
  using A = Accumulator<T>;
  constexpr int kCorners = 1 << kAxes;
  const Call& call = params.call;
  const bool marks = call.geometry.method == Method::kLinear;
  ForEachRow<A, kCount, kAxes>(
      params, Call::kVolume, [&](const WarpPoints<A, kAxes>& points, uint32_t source, int64_t f) {
        const T* volume = static_cast<const T*>(call.volume) + points.lows[source] + f;
        const unsigned there = points.there[source];
        Vector<T, kCount> values[kCorners];
#pragma unroll
        for (int c = 0; c < kCorners; ++c) {
          if (there >> c & 1) {
            values[c] = LoadVector<kCount>(volume + CornerOffset<kAxes>(c, params));
          } else {
            values[c] = {};
          }
        }
        A weights[kCorners];
        points.Get(source, weights);
        StoreVector(static_cast<T*>(call.out) + points.indices[source] * call.geometry.width + f,
                    WeightedSums<kCount>(values, weights, there & points.kLost && marks));
      });
}

template <typename T, int kCount, int kAxes>
__global__ void __launch_bounds__(kThreads) VolumeGrad(const __grid_constant__ Params params) {
  using A = Accumulator<T>;
  constexpr int kCorners = 1 << kAxes;
  const Call& call = params.call;
  ForEachRow<A, kCount, kAxes>(
      params, Call::kGradient, [&](const WarpPoints<A, kAxes>& points, uint32_t source, int64_t f) {
        const auto g =
            LoadVector<kCount>(static_cast<const T*>(call.cotangent) + points.rows[source] + f);
        A* sums = static_cast<A*>(params.sums) + points.lows[source] + f;
        const unsigned there = points.there[source];
        A weights[kCorners];
        points.Get(source, weights);
#pragma unroll
        for (int c = 0; c < kCorners; ++c) {
          if (!(there >> c & 1)) continue;
          A products[kCount];
#pragma unroll
          for (int i = 0; i < kCount; ++i) products[i] = weights[c] * Widen(g.values[i]);
          Add<kCount>(sums + CornerOffset<kAxes>(c, params), products);
        }
      });
}

// SumCorners sums each corner's value over `lanes` neighbouring lanes, a power of two. Afterwards a
// lane has the sums of some corners, from *begin on; the function returns their number.
template <int kCorners, typename A>
__device__ __forceinline__ int SumCorners(A (&values)[kCorners], int lanes, int* begin) {
  const int lane = threadIdx.x % kWarp;
  int count = kCorners, distance = 1;
  *begin = 0;
#pragma unroll
  for (int half = kCorners / 2; half > 0; half /= 2) {
    if (distance < lanes) {
      const bool upper = lane & distance;
#pragma unroll
      for (int c = 0; c < half; ++c) {
        const A kept = upper ? values[c + half] : values[c];
        const A given = upper ? values[c] : values[c + half];
        values[c] = kept + __shfl_xor_sync(~0u, given, distance);
      }
      *begin += upper ? half : 0;
      count = half;
      distance *= 2;
    }
  }
  for (; distance < lanes; distance *= 2) values[0] += __shfl_xor_sync(~0u, values[0], distance);
  return count;
}

// The kernel computes the point gradient, and the volume gradient if kVolume. Several lanes share a
// point, and each has some of its channels.
template <typename T, int kCount, int kAxes, bool kVolume>
__global__ void __launch_bounds__(kThreads, kReadingBlocks<T, kVolume>)
    Backward(const __grid_constant__ Params params) {
  using A = Accumulator<T>;
  constexpr int kCorners = 1 << kAxes;
  __shared__ WarpPoints<A, kAxes> shared[kThreads / kWarp];
  WarpPoints<A, kAxes>& points = shared[threadIdx.x / kWarp];
  const Call& call = params.call;
  const int64_t width = call.geometry.width;
  const int lane = threadIdx.x % kWarp;
  // A warp has the number of points that its lanes go through in params.rounds.
  const int count = kWarp / params.lanes * params.rounds;
  const int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp * count;
  if (first >= params.points) return;
  const int real = static_cast<int>(min(int64_t{count}, params.points - first));
  const int64_t index = first + min(lane, real - 1);
  const Sought<A, kAxes> sought(params, index);
  int64_t shift = 0;  // from the volume's entries to those of its gradient
  if constexpr (kVolume) {
    shift = call.batch.Offset(sought.entry, Call::kGradient) -
            call.batch.Offset(sought.entry, Call::kVolume);
    points.Put(params, index, sought, Call::kVolume);
  } else {
    points.Put(params, index, Stencil<A, kAxes>(params, sought), Call::kVolume);
  }
  __syncwarp();
  for (int round = 0; round < params.rounds; ++round) {
    const int place = (round * kWarp + lane) / params.lanes;
    const int source = min(place, real - 1);
    const unsigned there = points.there[source];
    const T* volume = static_cast<const T*>(call.volume) + points.lows[source];
    const T* cotangent = static_cast<const T*>(call.cotangent) + points.rows[source];
    A* sums = nullptr;
    A weights[kVolume ? kCorners : 1];
    if constexpr (kVolume) {
      sums = static_cast<A*>(params.sums) + points.lows[source] + __shfl_sync(~0u, shift, source);
      points.Get(source, weights);
    }
    A dots[kCorners] = {};
    for (int64_t f = lane % params.lanes * kCount; f < width; f += params.lanes * kCount) {
      const auto row = LoadVector<kCount>(cotangent + f);
      Vector<T, kCount> values[kCorners];
#pragma unroll
      for (int c = 0; c < kCorners; ++c) {
        if (there >> c & 1) {
          values[c] = LoadVector<kCount>(volume + CornerOffset<kAxes>(c, params) + f);
        } else {
          values[c] = {};
        }
      }
      A g[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) g[i] = Widen(row.values[i]);
#pragma unroll
      for (int c = 0; c < kCorners; ++c) {
        if (!(there >> c & 1)) continue;
        if constexpr (kVolume) {
          if (place < real) {
            A products[kCount];
#pragma unroll
            for (int i = 0; i < kCount; ++i) products[i] = weights[c] * g[i];
            Add<kCount>(sums + CornerOffset<kAxes>(c, params) + f, products);
          }
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) dots[c] += g[i] * Widen(values[c].values[i]);
      }
    }
    int begin;
    const int kept = SumCorners(dots, params.lanes, &begin);
    __syncwarp();  // all lanes have read the weights of the point
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
      if (c < kept && lane % params.lanes < kCorners)
        points.values[place * points.kPitch + begin + c] = dots[c];
    }
  }
  __syncwarp();
  A dots[kCorners], gradient[kAxes];
  points.Get(lane % count, dots);
  __syncwarp();
  // The stencil is computed again, because its registers are needed for loads in the loop.
  const Stencil<A, kAxes> stencil(params, sought);
  multilinear::PointGradient<kAxes>(stencil.axes, stencil.terms, dots, gradient);
  // The coordinates of a point are contiguous in memory.
#pragma unroll
  for (int a = 0; a < kAxes; ++a) {
    points.values[lane * kAxes + a] = stencil.lost ? LostGradient<A>(call) : gradient[a];
  }
  __syncwarp();
#pragma unroll
  for (int round = 0; round < kAxes; ++round) {
    const int i = round * kWarp + lane;
    if (i < real * kAxes) {
      jaxops::cuda::StoreAs(call.dpoints, first * kAxes + i, call.point_dtype, points.values[i]);
    }
  }
}

template <typename T, int kCount, int kAxes>
cudaError_t LaunchWith(cudaStream_t stream, const Job& job) {
  const Call& call = job.call;
  const bool adds = job.sums != nullptr;
  Params params(call, call.geometry.width / kCount);
  if (adds) {
    JAXOPS_RETURN_IF_ERROR(ClearSums(stream, job));
    params.sums = job.sums;
  }
  if (call.dpoints == nullptr) {
    if (job.order_space != nullptr) {
      RoughOrder order;
      JAXOPS_RETURN_IF_ERROR(OrderRoughly(stream, call, job.order_space, &order));
      params.order = order.points;
      params.places = order.size;
    }
    const int64_t warps = CeilDiv(params.places, 32) * params.by_split.divisor();
    const auto kernel =
        call.out != nullptr ? Sample<T, kCount, kAxes> : VolumeGrad<T, kCount, kAxes>;
    return Launch(kernel, CeilDiv(warps * 32, kThreads), kThreads, 0, stream, params);
  }
  const auto kernel = adds ? Backward<T, kCount, kAxes, true> : Backward<T, kCount, kAxes, false>;
  // Warps have fewer points if there are too few points to fill the device.
  params.rounds = static_cast<int>(
      std::clamp<int64_t>(params.points * params.lanes / kWarp / kManyWarps, 1, params.lanes));
  const int64_t points_of_block = kThreads / params.lanes * params.rounds;
  const int64_t blocks = CeilDiv(params.points, points_of_block);
  return Launch(kernel, blocks, kThreads, 0, stream, params);
}

template <typename T, int kCount>
cudaError_t LaunchAxes(cudaStream_t stream, const Job& job) {
  return job.call.geometry.axes == 3 ? LaunchWith<T, kCount, 3>(stream, job)
                                     : LaunchWith<T, kCount, 2>(stream, job);
}

}  // namespace

bool CanRunWarps(const Job& job, const Device&) {
  return job.call.dvolume == nullptr || job.sums != nullptr;
}

cudaError_t LaunchWarps(cudaStream_t stream, const Job& job, const Device&) {
  return jaxops::cuda::DispatchFloat(job.call.dtype, [&]<typename T>(T) {
    return job.vectors ? LaunchAxes<T, jaxops::cuda::kVectorElements<T>>(stream, job)
                       : LaunchAxes<T, 1>(stream, job);
  });
}

}  // namespace jaxops::grid_sample::cuda
