// Sampling of volumes at points and its gradients, see common/grid_sample.h.
//
// Neighbouring threads take neighbouring channels, 16 bytes each where rows allow it, of all the
// entries around a point at once. Gradients by the volume are added where they belong by atomics,
// four channels in one where the device has that, in the arithmetic type; a volume of 2-byte
// entries is rounded at the end. cuda/grid_sample_sorted.cu makes the same sums in a fixed order.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/grid_sample.cuh"
#include "cuda/grid_sample.h"
#include "cuda/launch.h"

namespace jaxops::grid_sample::cuda {
namespace {

using jaxops::cuda::Accumulator;
using jaxops::cuda::CeilDiv;
using jaxops::cuda::Launch;
using jaxops::cuda::LoadPack;
using jaxops::cuda::Narrow;
using jaxops::cuda::Pack;
using jaxops::cuda::StorePack;
using jaxops::cuda::Widen;

template <typename T, int kCount, int kAxes>
__global__ void __launch_bounds__(kThreads) Sample(const __grid_constant__ Params params) {
  using A = Accumulator<T>;
  constexpr int kCorners = 1 << kAxes;
  uint64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= params.threads) return;
  const int64_t f = static_cast<int64_t>(params.by_row.Peel(index)) * kCount;
  const Call& call = params.call;
  Stencil<A, kAxes> stencil(params, index);
  const T* volume =
      static_cast<const T*>(call.volume) + call.batch.Offset(stencil.entry, Call::kVolume) + f;
  Pack<T, kCount> values[kCorners];
#pragma unroll
  for (int c = 0; c < kCorners; ++c) {
    if (stencil.IsThere(c)) {
      values[c] = LoadPack<kCount>(volume + stencil.OffsetOf(c, params));
    } else {
      values[c] = {};
    }
  }
  stencil.MakeWeights(call);
  // Weights of what is not there may be anything but a number.
  const bool lost = stencil.lost && call.geometry.method == Method::kLinear;
  A sums[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = lost ? static_cast<A>(nanf("")) : A(0);
#pragma unroll
  for (int c = 0; c < kCorners; ++c) {
    const A weight = stencil.IsThere(c) ? stencil.terms[c] : A(0);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] += weight * Widen(values[c].values[i]);
  }
  Pack<T, kCount> out;
#pragma unroll
  for (int i = 0; i < kCount; ++i) out.values[i] = Narrow<T>(sums[i]);
  StorePack(static_cast<T*>(call.out) + static_cast<int64_t>(index) * call.geometry.width + f, out);
}

// Adds to neighbouring sums, four at a time where the device can.
template <int kCount, typename A>
__device__ __forceinline__ void Add(A* to, const A (&values)[kCount]) {
#if __CUDA_ARCH__ >= 900
  constexpr bool kFour = std::is_same_v<A, float> && kCount % 4 == 0;
#else
  constexpr bool kFour = false;
#endif
  if constexpr (kFour) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + i),
                   "f"(values[i]), "f"(values[i + 1]), "f"(values[i + 2]), "f"(values[i + 3])
                   : "memory");
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) atomicAdd(to + i, values[i]);
  }
}

// Gradients by the volume and by the points.
template <typename T, int kCount, int kAxes, bool kVolume, bool kPoints>
__global__ void __launch_bounds__(kThreads) Backward(const __grid_constant__ Params params) {
  using A = Accumulator<T>;
  constexpr int kCorners = 1 << kAxes;
  const Call& call = params.call;
  const int64_t width = call.geometry.width;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int lane = static_cast<int>(threadIdx.x) & (params.lanes - 1);
  int64_t index = thread / params.lanes;
  // Lanes of no point help the last one to sum, so that whole warps meet.
  const bool real = index < params.points;
  if (!real) index = params.points - 1;
  Stencil<A, kAxes> stencil(params, index);
  const T* cotangent = static_cast<const T*>(call.cotangent) +
                       call.batch.Offset(stencil.entry, Call::kCotangent) + stencil.point * width;
  const T* volume = nullptr;
  if constexpr (kPoints) {
    volume = static_cast<const T*>(call.volume) + call.batch.Offset(stencil.entry, Call::kVolume);
  }
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
  for (int64_t f = int64_t{lane} * kCount; f < width; f += params.lanes * kCount) {
    const auto read = LoadPack<kCount>(cotangent + f);
    A g[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) g[i] = Widen(read.values[i]);
    if constexpr (kPoints) {
      Pack<T, kCount> values[kCorners];
#pragma unroll
      for (int c = 0; c < kCorners; ++c) {
        if (stencil.IsThere(c)) {
          values[c] = LoadPack<kCount>(volume + stencil.OffsetOf(c, params) + f);
        }
      }
#pragma unroll
      for (int c = 0; c < kCorners; ++c) {
        if (!stencil.IsThere(c)) continue;
#pragma unroll
        for (int i = 0; i < kCount; ++i) dots[c] += g[i] * Widen(values[c].values[i]);
      }
    }
    if constexpr (kVolume) {
#pragma unroll
      for (int c = 0; c < kCorners; ++c) {
        if (!real || !stencil.IsThere(c)) continue;
        A products[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) products[i] = weights[c] * g[i];
        Add<kCount>(sums + stencil.OffsetOf(c, params) + f, products);
      }
    }
  }
  if constexpr (kPoints) {
    A gradient[kAxes];
    multilinear::PointGradient<kAxes>(stencil.axes, stencil.terms, dots, gradient);
    multilinear::cuda::SumOverLanes(gradient, params.lanes);
    if (!real || lane != 0) return;
    const A lost = static_cast<A>(call.geometry.method == Method::kLinear ? nanf("") : 0.0f);
#pragma unroll
    for (int a = 0; a < kAxes; ++a) {
      jaxops::cuda::StoreAs(call.dpoints, index * kAxes + a, call.point_dtype,
                            stencil.lost ? lost : gradient[a]);
    }
  }
}

struct NarrowParams {
  const float* from;
  void* to;
  int64_t count;
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    NarrowSums(const __grid_constant__ NarrowParams params) {
  constexpr int kCount = 4;
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kCount;
  T* to = static_cast<T*>(params.to);
  if (i + kCount <= params.count) {
    const auto values = LoadPack<kCount>(params.from + i);
    Pack<T, kCount> out;
#pragma unroll
    for (int e = 0; e < kCount; ++e) out.values[e] = Narrow<T>(values.values[e]);
    StorePack(to + i, out);
  } else {
    for (int64_t e = i; e < params.count; ++e) to[e] = Narrow<T>(params.from[e]);
  }
}

template <typename T, int kCount, int kAxes>
cudaError_t LaunchWith(cudaStream_t stream, const Call& call) {
  const int64_t row_threads = call.geometry.width / kCount;
  Params params(call, row_threads);
  if (call.out != nullptr) {
    return Launch(Sample<T, kCount, kAxes>, CeilDiv(params.threads, kThreads), kThreads, 0, stream,
                  params);
  }
  const int64_t blocks = CeilDiv(params.points, kThreads / params.lanes);
  if (call.dvolume == nullptr || call.deterministic) {
    return Launch(Backward<T, kCount, kAxes, false, true>, blocks, kThreads, 0, stream, params);
  }
  if (!std::is_same_v<T, Accumulator<T>>) params.sums = call.scratch;
  const auto kernel = call.dpoints != nullptr ? Backward<T, kCount, kAxes, true, true>
                                              : Backward<T, kCount, kAxes, true, false>;
  return Launch(kernel, blocks, kThreads, 0, stream, params);
}

template <typename T, int kCount>
cudaError_t LaunchAxes(cudaStream_t stream, const Call& call) {
  return call.geometry.axes == 3 ? LaunchWith<T, kCount, 3>(stream, call)
                                 : LaunchWith<T, kCount, 2>(stream, call);
}

bool IsAligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kPackBytes == 0;
}

template <typename T>
cudaError_t LaunchOf(cudaStream_t stream, const Call& call) {
  constexpr int kPack = kPackBytes / sizeof(T);
  using A = Accumulator<T>;
  const int64_t size = call.gradients * call.geometry.grid() * call.geometry.width;
  const bool adds = call.dvolume != nullptr && !call.deterministic;
  if (adds) {
    if (!std::is_same_v<T, A> && call.scratch_bytes < size * static_cast<int64_t>(sizeof(A))) {
      return cudaErrorInvalidValue;
    }
    void* sums = std::is_same_v<T, A> ? call.dvolume : call.scratch;
    const cudaError_t error = cudaMemsetAsync(sums, 0, size * sizeof(A), stream);
    if (error != cudaSuccess) return error;
  }
  const bool aligned = IsAligned(call.volume) && IsAligned(call.cotangent) && IsAligned(call.out) &&
                       IsAligned(call.dvolume) && IsAligned(call.scratch);
  if (call.batch.size() * call.geometry.points > 0 &&
      (call.out != nullptr || call.dpoints != nullptr || adds)) {
    const cudaError_t error = aligned && call.geometry.width % kPack == 0
                                  ? LaunchAxes<T, kPack>(stream, call)
                                  : LaunchAxes<T, 1>(stream, call);
    if (error != cudaSuccess) return error;
  }
  if constexpr (!std::is_same_v<T, A>) {
    if (adds) {
      const NarrowParams params{static_cast<const float*>(call.scratch), call.dvolume, size};
      return Launch(NarrowSums<T>, CeilDiv(size, 4 * kThreads), kThreads, 0, stream, params);
    }
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t LaunchSample(cudaStream_t stream, const Call& call) {
  const int64_t points = call.batch.size() * call.geometry.points;
  if (call.geometry.width == 0) {
    if (call.dpoints == nullptr || points == 0) return cudaSuccess;
    const int64_t bytes = points * call.geometry.axes * jaxops::cuda::SizeOf(call.point_dtype);
    return cudaMemsetAsync(call.dpoints, 0, bytes, stream);
  }
  Call rest = call;
  if (call.dvolume != nullptr && call.gradients * call.geometry.grid() == 0) {
    rest.dvolume = nullptr;
  }
  if (rest.dvolume != nullptr && rest.deterministic) {
    const cudaError_t error = LaunchSortedVolumeGrad(stream, rest);
    if (error != cudaSuccess) return error;
  }
  return jaxops::cuda::DispatchFloat(call.dtype,
                                     [&]<typename T>(T) { return LaunchOf<T>(stream, rest); });
}

}  // namespace jaxops::grid_sample::cuda
