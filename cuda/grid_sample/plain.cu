// These kernels run plain samples of volumes and their point gradients, see CanRunPlain.
//
// Each thread finds the entries of its point itself: without options that is little work, and lanes
// of the same point repeat it rather than wait for another lane. The kernels are a fraction of the
// size of the kernels with all options, for whose instructions a small call waits.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/fast_divide.h"
#include "cuda/common/launch.h"
#include "cuda/common/multilinear.cuh"
#include "cuda/common/numeric.cuh"
#include "cuda/grid_sample/families.h"

namespace jaxops::grid_sample::cuda {
namespace {

using jaxops::cuda::Accumulator;
using jaxops::cuda::CeilDiv;
using jaxops::cuda::kVectorElements;
using jaxops::cuda::kWarp;
using jaxops::cuda::Launch;
using jaxops::cuda::LoadRawIf;
using jaxops::cuda::Narrow;
using jaxops::cuda::Raw;
using jaxops::cuda::SizeOf;
using jaxops::cuda::StoreVector;
using jaxops::cuda::Vector;
using jaxops::cuda::WidenAll;

constexpr int kSampleThreads = 128;
constexpr int kLanesThreads = 256;

template <typename A>
struct AxisParams {
  A slope;  // entries per unit of the coordinate
  A end;    // the number of entries
  A last;   // index of the last entry if it is not the only one; otherwise a value that x never has
  int32_t size;
  uint32_t stride;  // in elements
};

template <typename A, int kAxes>
struct PlainParams {
  // The members are in the order of their use, because small calls wait for every line of
  // constants.
  const A* points;
  const void* volume;
  void* out;
  uint32_t count;   // number of points of all batch entries, or of places in their order
  FastDivider row;  // threads per row of channels
  A shift;
  uint32_t volume_stride;  // stride of the batch, in elements
  AxisParams<A> axes[kAxes];
  uint32_t width;
  int lane_shift;  // for gradients: 2^this lanes share a point
  const void* cotangent;
  FastDivider by_entry;  // points per batch entry
  const Placed* order;   // null: the points are not ordered

  PlainParams(const Call& call, const RoughOrder& rough, int64_t row_threads, int shift_of_lanes)
      : points(static_cast<const A*>(call.points)),
        volume(call.volume),
        out(call.out != nullptr ? call.out : call.dpoints),
        count(static_cast<uint32_t>(
            rough.points != nullptr ? rough.size : call.batch.size() * call.geometry.points)),
        row(row_threads),
        shift(call.geometry.align_corners ? A(0) : A(-0.5)),
        volume_stride(call.batch.rank() == 0
                          ? 0
                          : static_cast<uint32_t>(call.batch.stride(0, Call::kVolume))),
        width(static_cast<uint32_t>(call.geometry.width)),
        lane_shift(shift_of_lanes),
        cotangent(call.cotangent),
        by_entry(call.geometry.points),
        order(rough.points) {
    int64_t stride = call.geometry.width;
    for (int a = kAxes - 1; a >= 0; --a) {
      const int32_t size = call.geometry.sizes[a];
      const A n = static_cast<A>(size);
      axes[a] = {(call.geometry.align_corners ? n - 1 : n) / 2, n, size > 1 ? n - 1 : A(-2), size,
                 static_cast<uint32_t>(stride)};
      stride *= size;
    }
  }
};

// PlainStencil holds the entries around a point, found as by LocateInZeros or, with a border, as by
// Locate.
template <typename A, int kAxes>
struct PlainStencil {
  static constexpr int kCorners = 1 << kAxes;

  multilinear::Axis<A> axes[kAxes];
  uint32_t offsets[kCorners];  // channel `first` of each entry
  bool there[kCorners];
  bool lost = false;  // a coordinate is NaN

  template <bool kBorder>
  __device__ __forceinline__ PlainStencil(const PlainParams<A, kAxes>& params, uint32_t index,
                                          const A (&point)[kAxes], uint32_t first,
                                          std::bool_constant<kBorder>) {
    bool has[kAxes][2];
    uint32_t low = first;
    if (params.volume_stride > 0) low += params.by_entry.Quotient(index) * params.volume_stride;
#pragma unroll
    for (int a = 0; a < kAxes; ++a) {
      const AxisParams<A>& axis = params.axes[a];
      lost = lost || point[a] != point[a];
      const A free = MultiplyAdd(point[a] + 1, axis.slope, params.shift);
      const A x = kBorder ? min(max(free, A(0)), axis.end - 1) : free;
      const bool near = x > -1 && x < axis.end;
      // For a point outside, the conversion saturates, and the point has no entries.
      const int32_t entry = static_cast<int32_t>(Floor(x)) - (x == axis.last ? 1 : 0);
      const A fraction = near ? x - static_cast<A>(entry) : A(0);
      axes[a] = {1 - fraction, fraction, kBorder && x != free ? A(0) : axis.slope};
      has[a][0] = near && entry >= 0;
      has[a][1] = near && entry < axis.size - 1;
      low += static_cast<uint32_t>(entry) * axis.stride;
    }
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
      there[c] = true;
      offsets[c] = low;
#pragma unroll
      for (int a = 0; a < kAxes; ++a) {
        const bool up = c & multilinear::BitOf<kAxes>(a);
        there[c] = there[c] && has[a][up];
        if (up) offsets[c] += params.axes[a].stride;
      }
    }
  }
};

template <int kAxes, typename A>
__device__ __forceinline__ void LoadPoint(const PlainParams<A, kAxes>& params, uint32_t index,
                                          A (&point)[kAxes]) {
  const A* from = params.points + index * kAxes;
#pragma unroll
  for (int a = 0; a < kAxes; ++a) point[a] = from[a];
}

// FindPoint replaces a place in the order by the index of its point, and loads the point. It
// returns false if there is no point.
template <bool kOrdered, int kAxes, typename A>
__device__ __forceinline__ bool FindPoint(const PlainParams<A, kAxes>& params, uint32_t& index,
                                          A (&point)[kAxes]) {
  if (index >= params.count) return false;
  if constexpr (kOrdered) {
    const Placed placed = params.order[index];
    if (placed.index == Placed::kNone) return false;
    index = placed.index;
#pragma unroll
    for (int a = 0; a < kAxes; ++a) point[a] = placed.coordinates[a];
  } else {
    LoadPoint(params, index, point);
  }
  return true;
}

// Interpolate returns the weighted sums of the entries around a point for kCount channels.
template <int kCount, typename T, int kAxes>
__device__ __forceinline__ Vector<T, kCount> Interpolate(
    const PlainStencil<Accumulator<T>, kAxes>& stencil,
    const Raw<T, kCount> (&values)[1 << kAxes]) {
  using A = Accumulator<T>;
  A weights[1 << kAxes], sums[kCount];
  multilinear::PlainWeights<kAxes>(stencil.axes, weights);
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = stencil.lost ? static_cast<A>(nanf("")) : A(0);
#pragma unroll
  for (int c = 0; c < 1 << kAxes; ++c) {
    A wide[kCount];
    WidenAll(wide, values[c]);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] += weights[c] * wide[i];
  }
  Vector<T, kCount> out;
#pragma unroll
  for (int i = 0; i < kCount; ++i) out.values[i] = Narrow<T>(sums[i]);
  return out;
}

// The threads of a point have kTimes times kCount of its channels each.
template <typename T, int kCount, int kTimes, int kAxes, bool kBorder, bool kOrdered>
__global__ void __launch_bounds__(kSampleThreads, 1)
    SamplePlain(const __grid_constant__ PlainParams<Accumulator<T>, kAxes> params) {
  using A = Accumulator<T>;
  constexpr int kCorners = 1 << kAxes;
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  uint32_t index = thread;
  const uint32_t f = params.row.DivMod(index) * kCount;
  A point[kAxes];
  if (!FindPoint<kOrdered>(params, index, point)) return;
  const PlainStencil<A, kAxes> stencil(params, index, point, f, std::bool_constant<kBorder>());
  const T* volume = static_cast<const T*>(params.volume);
  const uint32_t step = params.row.divisor() * kCount;
  Raw<T, kCount> values[kTimes][kCorners];
#pragma unroll
  for (int t = 0; t < kTimes; ++t) {
    const bool real = kTimes == 1 || f + t * step < params.width;
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
      values[t][c] =
          LoadRawIf<kCount>(real && stencil.there[c], volume + (stencil.offsets[c] + t * step));
    }
  }
  const uint64_t at =
      !kOrdered && kTimes == 1 ? uint64_t{thread} * kCount : uint64_t{index} * params.width + f;
  T* out = static_cast<T*>(params.out) + at;
#pragma unroll
  for (int t = 0; t < kTimes; ++t) {
    if (kTimes > 1 && f + t * step >= params.width) break;
    StoreVector(out + t * step, Interpolate<kCount, T>(stencil, values[t]));
  }
}

// 2^params.lane_shift neighbouring lanes share a point. In each iteration a lane takes kTimes times
// kCount of the channels.
template <typename T, int kCount, int kTimes, int kAxes, bool kBorder>
__global__ void __launch_bounds__(kLanesThreads, kCount > 1 ? 4 : 1)
    PointGradPlain(const __grid_constant__ PlainParams<Accumulator<T>, kAxes> params) {
  using A = Accumulator<T>;
  constexpr int kCorners = 1 << kAxes;
  const uint32_t thread = blockIdx.x * kLanesThreads + threadIdx.x;
  const uint32_t lanes = 1u << params.lane_shift;
  const uint32_t lane = threadIdx.x & (lanes - 1);
  const uint32_t sought = thread >> params.lane_shift;
  // Lanes without a point compute the last one, because whole warps take part in the sums.
  const uint32_t index = min(sought, params.count - 1);
  A point[kAxes];
  LoadPoint(params, index, point);
  // The loads of the cotangent do not wait for the point.
  const T* row = static_cast<const T*>(params.cotangent) + uint64_t{index} * params.width;
  const uint32_t step = lanes * kCount;
  Raw<T, kCount> rows[kTimes];
  const auto load_rows = [&](uint32_t f) {
#pragma unroll
    for (int t = 0; t < kTimes; ++t) {
      rows[t] = LoadRawIf<kCount>(f + t * step < params.width, row + f + t * step);
    }
  };
  uint32_t f = lane * kCount;
  load_rows(f);
  const PlainStencil<A, kAxes> stencil(params, index, point, 0, std::bool_constant<kBorder>());
  const T* volume = static_cast<const T*>(params.volume);
  A dots[kCorners] = {};
#pragma unroll 1
  while (true) {
    Raw<T, kCount> values[kTimes][kCorners];
#pragma unroll
    for (int t = 0; t < kTimes; ++t) {
      const uint32_t at = f + t * step;
#pragma unroll
      for (int c = 0; c < kCorners; ++c) {
        values[t][c] = LoadRawIf<kCount>(stencil.there[c] && at < params.width,
                                         volume + (stencil.offsets[c] + at));
      }
    }
#pragma unroll
    for (int t = 0; t < kTimes; ++t) {
      A g[kCount];
      WidenAll(g, rows[t]);
#pragma unroll
      for (int c = 0; c < kCorners; ++c) {
        A wide[kCount];
        WidenAll(wide, values[t][c]);
#pragma unroll
        for (int i = 0; i < kCount; ++i) dots[c] += g[i] * wide[i];
      }
    }
    f += kTimes * step;
    if (f >= params.width) break;
    load_rows(f);
  }
  A gradient[kAxes];
  multilinear::PlainPointGradient<kAxes>(stencil.axes, dots, gradient);
  multilinear::cuda::SumOverLanes<kAxes>(gradient, lanes);
  if (lane == 0 && sought < params.count) {
    A* out = static_cast<A*>(params.out) + index * kAxes;
#pragma unroll
    for (int a = 0; a < kAxes; ++a) out[a] = stencil.lost ? static_cast<A>(nanf("")) : gradient[a];
  }
}

// --- launches ------------------------------------------------------------------------------------

// PlainPlan says how the threads of a call share rows.
struct PlainPlan {
  int times = 1;       // vectors or elements of a row that a thread has in flight
  int lane_shift = 0;  // for gradients: 2^this lanes share a point
};

// All choices below were measured on an H200.

// This number of threads keeps an H200 busy.
constexpr int64_t kManyThreads = int64_t{1} << 18;

PlainPlan PlanValue(const Call& call, int count) {
  const int64_t width = call.geometry.width;
  // If there are many threads, those of rows that are not whole vectors have several elements.
  if (count > 1 || call.batch.size() * call.geometry.points * width <= kManyThreads) return {};
  const int64_t from_three = SizeOf(call.dtype) == 2 ? 33 : 96;
  const int64_t above_one = call.geometry.axes == 2 ? 12 : 24;
  return {width >= from_three ? 3 : width > above_one ? 2 : 1};
}

PlainPlan PlanPointGrad(const Call& call, int count) {
  const int64_t width = call.geometry.width;
  // Lanes of rows that are not whole vectors have three elements in flight, except for short rows.
  const bool three = count == 1 && width > 4;
  // More lanes shorten the sequence of loads of each lane, and fewer lanes repeat less work. Whole
  // lines are the most efficient reads.
  const int64_t lanes = CeilDiv(width, count * (three ? 3 : 1));
  int shift = three ? 2 : 0;
  while (shift < 5 && 1 << shift < lanes) ++shift;
  const bool many = call.batch.size() * call.geometry.points << shift > kManyThreads;
  const int min_shift = count > 1 && IsCached(call) ? 2 : 3;
  if (many && shift > min_shift) shift = std::min(shift - 1, count > 1 ? 3 : 4);
  return {three && !(many && SizeOf(call.dtype) == 2) ? 3 : 1, shift};
}

template <typename T, int kCount, int kTimes, int kAxes, bool kBorder>
cudaError_t LaunchPointGrad(cudaStream_t stream, const Call& call, int lane_shift) {
  const PlainParams<Accumulator<T>, kAxes> params(call, {}, 1, lane_shift);
  return Launch(PointGradPlain<T, kCount, kTimes, kAxes, kBorder>,
                CeilDiv(int64_t{params.count} << lane_shift, kLanesThreads), kLanesThreads, 0,
                stream, params);
}

template <typename T, int kCount, int kTimes, int kAxes, bool kBorder>
cudaError_t LaunchValue(cudaStream_t stream, const Job& job) {
  constexpr bool kCanOrder = sizeof(T) < sizeof(double) && kCount > 1;
  RoughOrder order;
  if (kCanOrder && job.order_space != nullptr) {
    JAXOPS_RETURN_IF_ERROR(OrderRoughly(stream, job.call, job.order_space, &order));
  }
  const int64_t row_threads = CeilDiv(job.call.geometry.width, kCount * kTimes);
  const PlainParams<Accumulator<T>, kAxes> params(job.call, order, row_threads, 0);
  const int64_t threads = params.count * row_threads;
  // Calls of few threads use small blocks, in order to reach more multiprocessors.
  const int block = threads > 4096 ? kSampleThreads : kSampleThreads / 2;
  auto kernel = SamplePlain<T, kCount, kTimes, kAxes, kBorder, false>;
  if constexpr (kCanOrder) {
    if (order.points != nullptr) kernel = SamplePlain<T, kCount, kTimes, kAxes, kBorder, true>;
  }
  return Launch(kernel, CeilDiv(threads, block), block, 0, stream, params);
}

template <typename T, int kCount, int kAxes, bool kBorder>
cudaError_t LaunchWith(cudaStream_t stream, const Job& job) {
  const Call& call = job.call;
  const bool is_value = call.out != nullptr;
  const PlainPlan plan = is_value ? PlanValue(call, kCount) : PlanPointGrad(call, kCount);
  if constexpr (kCount == 1) {
    if (plan.times == 3) {
      return is_value ? LaunchValue<T, 1, 3, kAxes, kBorder>(stream, job)
                      : LaunchPointGrad<T, 1, 3, kAxes, kBorder>(stream, call, plan.lane_shift);
    }
    if (plan.times == 2) return LaunchValue<T, 1, 2, kAxes, kBorder>(stream, job);
  }
  return is_value ? LaunchValue<T, kCount, 1, kAxes, kBorder>(stream, job)
                  : LaunchPointGrad<T, kCount, 1, kAxes, kBorder>(stream, call, plan.lane_shift);
}

}  // namespace

bool CanRunPlain(const Job& job, const Device&) {
  const Call& call = job.call;
  const Geometry& geometry = call.geometry;
  const bool has_border = geometry.padding == Padding::kBorder;
  if (call.order > 0 || geometry.method != Method::kLinear) return false;
  if (geometry.padding != Padding::kZeros && !has_border) return false;
  if (call.point_dtype != (call.dtype == DType::kF64 ? DType::kF64 : DType::kF32)) return false;
  // Positions of larger entries are rounded in float32, which PlainStencil does not handle.
  constexpr int32_t kMaxExact = 1 << 24;
  for (int a = 0; a < geometry.axes; ++a) {
    // With align_corners or a border, every coordinate maps to the only entry of an axis of one,
    // and the derivative is zero.
    if (geometry.sizes[a] < (geometry.align_corners || has_border ? 2 : 1)) return false;
    if (call.point_dtype == DType::kF32 && geometry.sizes[a] > kMaxExact) return false;
  }
  int64_t volumes = 1;
  if (call.batch.rank() > 0) {
    const auto is_dense = [&](Call::Operand operand, int64_t row) {
      return call.batch.stride(0, operand) == geometry.points * row;
    };
    if (call.batch.rank() > 1 || !is_dense(Call::kPoints, geometry.axes)) return false;
    if (call.cotangent != nullptr && !is_dense(Call::kCotangent, geometry.width)) return false;
    if (call.batch.stride(0, Call::kVolume) > 0) volumes = call.batch.size();
  }
  // An order has more places than points.
  constexpr int64_t kMaxThreads = int64_t{1} << 30;
  const int64_t points = call.batch.size() * geometry.points;
  return volumes * geometry.grid() * geometry.width <= UINT32_MAX &&
         points * std::max<int64_t>(geometry.width, kWarp) <= kMaxThreads;
}

cudaError_t LaunchPlain(cudaStream_t stream, const Job& job, const Device&) {
  return jaxops::cuda::DispatchFloat(job.call.dtype, [&]<typename T>(T) {
    const auto launch = [&]<int kCount>(std::integral_constant<int, kCount>) {
      const bool is_volume = job.call.geometry.axes == 3;
      if (job.call.geometry.padding == Padding::kBorder) {
        return is_volume ? LaunchWith<T, kCount, 3, true>(stream, job)
                         : LaunchWith<T, kCount, 2, true>(stream, job);
      }
      return is_volume ? LaunchWith<T, kCount, 3, false>(stream, job)
                       : LaunchWith<T, kCount, 2, false>(stream, job);
    };
    return job.vectors ? launch(std::integral_constant<int, kVectorElements<T>>{})
                       : launch(std::integral_constant<int, 1>{});
  });
}

}  // namespace jaxops::grid_sample::cuda
