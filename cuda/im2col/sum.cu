// These kernels run col2im: a thread owns entries of the image and sums the contributions of all
// patches, tap after tap, so that sums always have the same order.
#include <cuda_runtime_api.h>

#include <type_traits>

#include "cuda/common/launch.h"
#include "cuda/common/numeric.cuh"
#include "cuda/im2col/families.h"
#include "cuda/im2col/window.cuh"

namespace jaxops::im2col::cuda {
namespace {

using jaxops::cuda::Accumulator;
using jaxops::cuda::CeilDiv;
using jaxops::cuda::DispatchFloat;
using jaxops::cuda::kVectorBytes;
using jaxops::cuda::kVectorElements;
using jaxops::cuda::Launch;
using jaxops::cuda::LoadVector;
using jaxops::cuda::Narrow;
using jaxops::cuda::StoreVector;
using jaxops::cuda::Vector;
using jaxops::cuda::Widen;

// EntrySum adds the contributions of the patches to one entry: `entries` are the entry's
// coordinates, `patches` points to the patches of its row, and the units of neighbouring taps or
// patches are `tap_stride` or `out_stride` apart.
template <typename T, int kCount, typename UInt, int kDims>
struct EntrySum {
  const Params<UInt, kDims>& params;
  const UInt (&entries)[kDims];
  const T* patches;
  int64_t tap_stride;
  int64_t out_stride;
  Accumulator<T> sums[kCount] = {};

  template <int kDim>
  __device__ __forceinline__ void Add(UInt tap, UInt out) {
    const FastWindow<UInt>& window = params.dims[kDim];
#pragma unroll(kDim == kDims - 1 ? 4 : 1)
    for (UInt i = 0; i < window.taps.divisor(); ++i) {
      UInt patch;
      if (!window.FindPatch(entries[kDim], i, patch)) continue;
      const UInt next_tap = tap * window.taps.divisor() + i;
      const UInt next_out = out * window.out.divisor() + patch;
      if constexpr (kDim + 1 < kDims) {
        Add<kDim + 1>(next_tap, next_out);
      } else {
        const auto values =
            LoadVector<kCount>(patches + static_cast<int64_t>(next_tap) * tap_stride +
                               static_cast<int64_t>(next_out) * out_stride);
#pragma unroll
        for (int v = 0; v < kCount; ++v) sums[v] += Widen(values.values[v]);
      }
    }
  }
};

template <typename T, int kCount, typename UInt, int kDims, bool kChannelsLast>
__global__ void __launch_bounds__(kThreads)
    SumPatches(const __grid_constant__ Params<UInt, kDims> params) {
  const int64_t vector = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (vector >= params.count) return;
  UInt rest = static_cast<UInt>(vector);
  UInt channel = 0;
  if constexpr (kChannelsLast) channel = params.channels.DivMod(rest) * kCount;
  UInt entries[kDims];
  int64_t taps = 1;
  int64_t outs = 1;
#pragma unroll
  for (int d = kDims - 1; d >= 0; --d) {
    entries[d] = params.dims[d].in.DivMod(rest);
    taps *= params.dims[d].taps.divisor();
    outs *= params.dims[d].out.divisor();
  }
  const int64_t channels =
      kChannelsLast ? static_cast<int64_t>(params.channels.divisor()) * kCount : 1;
  const T* patches = static_cast<const T*>(params.from) +
                     static_cast<int64_t>(rest) * (taps * outs * channels) + channel;
  EntrySum<T, kCount, UInt, kDims> sum{params, entries, patches, kChannelsLast ? channels : outs,
                                       kChannelsLast ? taps * channels : 1};
  sum.template Add<0>(0, 0);
  Vector<T, kCount> result;
#pragma unroll
  for (int v = 0; v < kCount; ++v) result.values[v] = Narrow<T>(sum.sums[v]);
  StoreVector(static_cast<T*>(params.to) + vector * kCount, result);
}

template <typename T, int kCount, bool kChannelsLast>
cudaError_t LaunchSum(cudaStream_t stream, const Call& call) {
  return WithParams(call, kCount, call.image_size(), [&](const auto& params) {
    using P = std::decay_t<decltype(params)>;
    using UInt = std::decay_t<decltype(params.channels.divisor())>;
    constexpr int kDims = std::extent_v<decltype(P::dims)>;
    return Launch(SumPatches<T, kCount, UInt, kDims, kChannelsLast>,
                  CeilDiv(params.count, kThreads), kThreads, 0, stream, params);
  });
}

}  // namespace

cudaError_t LaunchSum(cudaStream_t stream, const Call& call, const Device&) {
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    if (!call.channels_last) return LaunchSum<T, 1, false>(stream, call);
    if (UnitBytes(call) == kVectorBytes) {
      return LaunchSum<T, kVectorElements<T>, true>(stream, call);
    }
    return LaunchSum<T, 1, true>(stream, call);
  });
}

}  // namespace jaxops::im2col::cuda
