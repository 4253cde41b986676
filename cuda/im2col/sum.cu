// These kernels run col2im: a thread owns entries of the image and sums the contributions of all
// patches in an order that follows from the window alone: three taps of the last dimension, at all
// taps of the others, then the next three.
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

// Rows of the image that a thread of channels first has: they share the arithmetic of indices.
constexpr int kRowsOfThread = 4;

// EntrySum adds the contributions of the patches to an entry of kRows rows: `entries` are the
// entry's coordinates, `rows` are the indices of the rows' patches, and the units of neighbouring
// taps and patches are `tap_stride` and `out_stride` apart. The loads of kTaps taps of the last
// dimension are in flight together, for all rows.
template <typename T, int kCount, int kRows, typename UInt, int kDims>
struct EntrySum {
  static constexpr int kTaps = 3;

  const Params<UInt, kDims>& params;
  const UInt (&entries)[kDims];
  UInt tap_stride, out_stride;
  UInt rows[kRows];
  Accumulator<T> sums[kRows][kCount] = {};
  UInt offsets[kTaps] = {};  // of the patches that have the entry at taps of the last dimension
  bool exists[kTaps] = {};   // whether there are such patches

  __device__ __forceinline__ void AddAll() {
    const FastWindow<UInt>& last = params.dims[kDims - 1];
    for (UInt begin = 0; begin < last.taps.divisor(); begin += kTaps) {
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
        const UInt tap = begin + j;
        UInt patch = 0;
        exists[j] = last.FindPatch(entries[kDims - 1], tap, patch) && tap < last.taps.divisor();
        offsets[j] = exists[j] ? tap * tap_stride + patch * out_stride : 0;
      }
      Add<0>(0, 0);
    }
  }

 private:
  template <int kDim>
  __device__ __forceinline__ void Add(UInt tap, UInt out) {
    const FastWindow<UInt>& window = params.dims[kDim];
    if constexpr (kDim == kDims - 1) {
      const UInt line =
          tap * window.taps.divisor() * tap_stride + out * window.out.divisor() * out_stride;
      const T* patches = static_cast<const T*>(params.from);
      // Loads without a condition are in flight together. A tap without a patch reads the first
      // entry of the line, which exists.
      Vector<T, kCount> values[kTaps][kRows];
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          values[j][r] = LoadVector<kCount>(patches + (rows[r] + line + offsets[j]));
        }
      }
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
        if (!exists[j]) continue;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int v = 0; v < kCount; ++v) sums[r][v] += Widen(values[j][r].values[v]);
        }
      }
    } else {
#pragma unroll 1
      for (UInt i = 0; i < window.taps.divisor(); ++i) {
        UInt patch;
        if (!window.FindPatch(entries[kDim], i, patch)) continue;
        Add<kDim + 1>(tap * window.taps.divisor() + i, out * window.out.divisor() + patch);
      }
    }
  }
};

template <typename UInt, int kDims>
struct SumParams : Params<UInt, kDims> {
  UInt rows;
};

template <typename T, int kCount, typename UInt, int kDims, bool kChannelsLast>
__global__ void __launch_bounds__(kThreads)
    SumPatches(const __grid_constant__ SumParams<UInt, kDims> params) {
  constexpr int kRows = kChannelsLast ? 1 : kRowsOfThread;
  const int64_t vector = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (vector >= params.count) return;
  UInt rest = static_cast<UInt>(vector);
  UInt channel = 0;
  if constexpr (kChannelsLast) channel = params.channels.DivMod(rest) * kCount;
  UInt entries[kDims];
  UInt taps = 1, outs = 1;
  int64_t image = 1;
#pragma unroll
  for (int d = kDims - 1; d >= 0; --d) {
    entries[d] = params.dims[d].in.DivMod(rest);
    taps *= params.dims[d].taps.divisor();
    outs *= params.dims[d].out.divisor();
    image *= params.dims[d].in.divisor();
  }
  const UInt channels = kChannelsLast ? params.channels.divisor() * kCount : UInt{1};
  EntrySum<T, kCount, kRows, UInt, kDims> sum{params, entries, kChannelsLast ? channels : outs,
                                              kChannelsLast ? taps * channels : UInt{1}};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    // Rows beyond the last one are read as that.
    const UInt row = kRows == 1 ? rest : min(rest * kRows + r, params.rows - 1);
    sum.rows[r] = row * (taps * outs * channels) + channel;
  }
  sum.AddAll();
  T* to = static_cast<T*>(params.to) +
          (kChannelsLast ? vector * kCount : vector + rest * (kRows - 1) * image);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (kRows > 1 && rest * kRows + r >= params.rows) return;
    Vector<T, kCount> result;
#pragma unroll
    for (int v = 0; v < kCount; ++v) result.values[v] = Narrow<T>(sum.sums[r][v]);
    StoreVector(to + r * image, result);
  }
}

template <typename T, int kCount, bool kChannelsLast>
cudaError_t LaunchSum(cudaStream_t stream, const Call& call) {
  const int64_t entries = kChannelsLast
                              ? call.image_size()
                              : call.image_size() / call.rows * CeilDiv(call.rows, kRowsOfThread);
  return WithParams(call, kCount, entries, [&](const auto& some) {
    using P = std::decay_t<decltype(some)>;
    using UInt = std::decay_t<decltype(some.channels.divisor())>;
    constexpr int kDims = std::extent_v<decltype(P::dims)>;
    const SumParams<UInt, kDims> params{some, static_cast<UInt>(call.rows)};
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
