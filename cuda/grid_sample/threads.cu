// These kernels sample volumes at points and compute the gradients: every thread finds the entries
// around its point itself, so that no lane waits for another. A thread of a value has one vector or
// element of channels, and a thread of a gradient has all channels of its point.
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
using jaxops::cuda::Launch;
using jaxops::cuda::LoadVector;
using jaxops::cuda::StoreVector;
using jaxops::cuda::Vector;
using jaxops::cuda::Widen;

constexpr int kValueThreads = 128;

template <typename T, int kCount, int kAxes>
__global__ void __launch_bounds__(kValueThreads) SampleFew(const __grid_constant__ Params params) {
  using A = Accumulator<T>;
  constexpr int kCorners = 1 << kAxes;
  const Call& call = params.call;
  uint32_t index = blockIdx.x * kValueThreads + threadIdx.x;
  const int64_t f = int64_t{params.row.DivMod(index)} * kCount;
  if (index >= params.points) return;
  Stencil<A, kAxes> stencil(params, index);
  const T* volume =
      static_cast<const T*>(call.volume) + call.batch.Offset(stencil.entry, Call::kVolume) + f;
  Vector<T, kCount> values[kCorners];
#pragma unroll
  for (int c = 0; c < kCorners; ++c) {
    if (stencil.IsThere(c)) {
      values[c] = LoadVector<kCount>(volume + stencil.OffsetOf(c, params));
    } else {
      values[c] = {};
    }
  }
  stencil.MakeWeights(call);
#pragma unroll
  for (int c = 0; c < kCorners; ++c) {
    if (!stencil.IsThere(c)) stencil.terms[c] = 0;
  }
  const bool is_nan = stencil.lost && call.geometry.method == Method::kLinear;
  StoreVector(static_cast<T*>(call.out) + index * call.geometry.width + f,
              WeightedSums<kCount>(values, stencil.terms, is_nan));
}

// The kernel computes the point gradient, and the volume gradient if kVolume. Each thread has a
// point of few channels.
template <typename T, int kCount, int kAxes, bool kVolume>
__global__ void __launch_bounds__(kThreads, 2)
    BackwardNarrow(const __grid_constant__ Params params) {
  using A = Accumulator<T>;
  constexpr int kCorners = 1 << kAxes;
  const Call& call = params.call;
  const int64_t width = call.geometry.width;
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= params.points) return;
  Stencil<A, kAxes> stencil(params, index);
  const T* cotangent = static_cast<const T*>(call.cotangent) +
                       call.batch.Offset(stencil.entry, Call::kCotangent) + stencil.point * width;
  const T* volume =
      static_cast<const T*>(call.volume) + call.batch.Offset(stencil.entry, Call::kVolume);
  A* sums = nullptr;
  A weights[kCorners];
  if constexpr (kVolume) {
    sums = static_cast<A*>(params.sums) + call.batch.Offset(stencil.entry, Call::kGradient);
    Stencil<A, kAxes> other = stencil;
    other.MakeWeights(call);
#pragma unroll
    for (int c = 0; c < kCorners; ++c) weights[c] = other.terms[c];
  }
  A dots[kCorners] = {};
  for (int64_t f = 0; f < width; f += kCount) {
    const auto row = LoadVector<kCount>(cotangent + f);
    Vector<T, kCount> values[kCorners];
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
      if (stencil.IsThere(c)) {
        values[c] = LoadVector<kCount>(volume + stencil.OffsetOf(c, params) + f);
      } else {
        values[c] = {};
      }
    }
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
      if (!stencil.IsThere(c)) continue;
      if constexpr (kVolume) {
        A products[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) products[i] = weights[c] * Widen(row.values[i]);
        Add<kCount>(sums + stencil.OffsetOf(c, params) + f, products);
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) dots[c] += Widen(row.values[i]) * Widen(values[c].values[i]);
    }
  }
  A gradient[kAxes];
  multilinear::PointGradient<kAxes>(stencil.axes, stencil.terms, dots, gradient);
#pragma unroll
  for (int a = 0; a < kAxes; ++a) {
    jaxops::cuda::StoreAs(call.dpoints, index * kAxes + a, call.point_dtype,
                          stencil.lost ? LostGradient<A>(call) : gradient[a]);
  }
}

template <typename T, int kCount, int kAxes>
cudaError_t LaunchWith(cudaStream_t stream, const Job& job) {
  const Call& call = job.call;
  const int64_t row_threads = call.geometry.width / kCount;
  Params params(call, row_threads);
  if (call.out != nullptr) {
    return Launch(SampleFew<T, kCount, kAxes>, CeilDiv(params.points * row_threads, kValueThreads),
                  kValueThreads, 0, stream, params);
  }
  const bool adds = job.sums != nullptr;
  if (adds) {
    JAXOPS_RETURN_IF_ERROR(ClearSums(stream, job));
    params.sums = job.sums;
  }
  const auto kernel =
      adds ? BackwardNarrow<T, kCount, kAxes, true> : BackwardNarrow<T, kCount, kAxes, false>;
  return Launch(kernel, CeilDiv(params.points, kThreads), kThreads, 0, stream, params);
}

template <typename T, int kCount>
cudaError_t LaunchAxes(cudaStream_t stream, const Job& job) {
  return job.call.geometry.axes == 3 ? LaunchWith<T, kCount, 3>(stream, job)
                                     : LaunchWith<T, kCount, 2>(stream, job);
}

}  // namespace

bool CanRunThreads(const Job& job, const Device&) {
  const Call& call = job.call;
  // SampleFew counts threads in 31 bits.
  if (call.out != nullptr) {
    return RowThreads(job) * call.batch.size() * call.geometry.points <= INT32_MAX - kValueThreads;
  }
  return call.dvolume == nullptr || job.sums != nullptr;
}

cudaError_t LaunchThreads(cudaStream_t stream, const Job& job, const Device&) {
  return jaxops::cuda::DispatchFloat(job.call.dtype, [&]<typename T>(T) {
    return job.vectors ? LaunchAxes<T, jaxops::cuda::kVectorElements<T>>(stream, job)
                       : LaunchAxes<T, 1>(stream, job);
  });
}

}  // namespace jaxops::grid_sample::cuda
