// This header describes windows and arrays as threads index them.
//
// Indices are 32-bit if both arrays and all coordinates fit.
#ifndef JAXOPS_CUDA_IM2COL_WINDOW_CUH_
#define JAXOPS_CUDA_IM2COL_WINDOW_CUH_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <type_traits>

#include "common/fast_divide.h"
#include "common/im2col.h"
#include "cuda/common/numeric.cuh"
#include "cuda/im2col/families.h"

namespace jaxops::im2col::cuda {

inline constexpr int kThreads = 256;

// FastWindow is a Window with the sizes by which threads divide.
template <typename UInt>
struct FastWindow {
  using Int = std::make_signed_t<UInt>;

  FastDividerOf<UInt> in, out, taps, stride;
  Int dilation, low;

  FastWindow() = default;
  explicit FastWindow(const Window& w)
      : in(w.in),
        out(w.out),
        taps(w.taps),
        stride(w.stride),
        dilation(static_cast<Int>(w.dilation)),
        low(static_cast<Int>(w.low)) {}

  __device__ __forceinline__ Int EntryOf(UInt patch, UInt tap) const {
    return static_cast<Int>(patch * stride.divisor()) + static_cast<Int>(tap) * dilation - low;
  }

  __device__ __forceinline__ bool IsInside(Int entry) const {
    return static_cast<UInt>(entry) < in.divisor();
  }

  // FindPatch finds the patch that has `entry` of the image at `tap`, and returns false if there is
  // none.
  __device__ __forceinline__ bool FindPatch(UInt entry, UInt tap, UInt& patch) const {
    const Int begin = static_cast<Int>(entry) + low - static_cast<Int>(tap) * dilation;
    if (begin < 0) return false;
    patch = stride.Quotient(static_cast<UInt>(begin));
    return patch * stride.divisor() == static_cast<UInt>(begin) && patch < out.divisor();
  }
};

// Sizes count units: a vector or an item that moves as one, or elements.
template <typename UInt, int kDims>
struct Params {
  FastWindow<UInt> dims[kDims];
  FastDividerOf<UInt> channels;
  int64_t count;   // units of the result
  bool is_packed;  // the result begins at a multiple of 16 bytes
  const void* from;
  void* to;
};

// Place holds the position of a unit in the patches, and its source.
template <typename UInt, int kDims, bool kChannelsLast>
struct Place {
  using Int = std::make_signed_t<UInt>;

  UInt channel = 0;
  UInt taps[kDims];
  UInt outs[kDims];
  UInt row;

  __device__ __forceinline__ Place(const Params<UInt, kDims>& params, UInt unit) {
    if constexpr (kChannelsLast) {
      channel = params.channels.DivMod(unit);
      DivModTaps(params, unit);
    }
#pragma unroll
    for (int d = kDims - 1; d >= 0; --d) outs[d] = params.dims[d].out.DivMod(unit);
    if constexpr (!kChannelsLast) DivModTaps(params, unit);
    row = unit;
  }

  __device__ __forceinline__ void DivModTaps(const Params<UInt, kDims>& params, UInt& unit) {
#pragma unroll
    for (int d = kDims - 1; d >= 0; --d) taps[d] = params.dims[d].taps.DivMod(unit);
  }

  __device__ __forceinline__ void Advance(const Params<UInt, kDims>& params) {
    if constexpr (kChannelsLast) {
      if (++channel < params.channels.divisor()) return;
      channel = 0;
      if (AdvanceTaps(params) && AdvanceOuts(params)) ++row;
    } else {
      if (AdvanceOuts(params) && AdvanceTaps(params)) ++row;
    }
  }

  // AdvanceTaps and AdvanceOuts return whether the last position wraps to the first.
  __device__ __forceinline__ bool AdvanceTaps(const Params<UInt, kDims>& params) {
#pragma unroll
    for (int d = kDims - 1; d >= 0; --d) {
      if (++taps[d] < params.dims[d].taps.divisor()) return false;
      taps[d] = 0;
    }
    return true;
  }

  __device__ __forceinline__ bool AdvanceOuts(const Params<UInt, kDims>& params) {
#pragma unroll
    for (int d = kDims - 1; d >= 0; --d) {
      if (++outs[d] < params.dims[d].out.divisor()) return false;
      outs[d] = 0;
    }
    return true;
  }

  template <typename Unit>
  __device__ __forceinline__ Unit Read(const Params<UInt, kDims>& params) const {
    bool is_inside = true;
    UInt at = row;
#pragma unroll
    for (int d = 0; d < kDims; ++d) {
      const Int entry = params.dims[d].EntryOf(outs[d], taps[d]);
      is_inside = is_inside && params.dims[d].IsInside(entry);
      at = at * params.dims[d].in.divisor() + static_cast<UInt>(entry);
    }
    if constexpr (kChannelsLast) at = at * params.channels.divisor() + channel;
    return is_inside ? __ldg(static_cast<const Unit*>(params.from) + at) : Unit{};
  }
};

// IsSmall says whether 32-bit indices and coordinates hold all values.
inline bool IsSmall(const Call& call) {
  constexpr int64_t kMax = INT32_MAX;
  bool is_small = call.image_size() <= kMax && call.patches_size() <= kMax;
  for (const Window& w : call.dims) {
    // Each bound is checked alone first, so that the sum cannot overflow.
    const bool fits = w.stride <= kMax && w.dilation <= kMax && std::abs(w.low) <= kMax / 4 &&
                      w.in <= kMax / 4 && w.out <= kMax && w.taps <= kMax;
    is_small = is_small && fits && w.out * w.stride <= kMax / 4 && w.taps * w.dilation <= kMax / 4;
  }
  return is_small;
}

// WithParams calls launch(params) with the parameters of a call whose units have `unit` items.
template <typename Function>
cudaError_t WithParams(const Call& call, int64_t unit, int64_t items, Function&& launch) {
  const auto fill = [&](auto params) {
    constexpr int kDims = std::extent_v<decltype(params.dims)>;
    using UInt = std::decay_t<decltype(params.channels.divisor())>;
    for (int d = 0; d < kDims; ++d) {
      params.dims[d] = FastWindow<UInt>(call.dims[kMaxDims - kDims + d]);
    }
    params.channels = FastDividerOf<UInt>(std::max<int64_t>(1, call.channels / unit));
    params.count = items / unit;
    params.is_packed = IsAligned(call.to, jaxops::cuda::kVectorBytes);
    params.from = call.from;
    params.to = call.to;
    return launch(params);
  };
  if (!IsSmall(call)) return fill(Params<uint64_t, 3>());
  const Window& first = call.dims[0];
  const bool is_flat = first.in == 1 && first.out == 1 && first.taps == 1 && first.low == 0;
  return is_flat ? fill(Params<uint32_t, 2>()) : fill(Params<uint32_t, 3>());
}

}  // namespace jaxops::im2col::cuda

#endif  // JAXOPS_CUDA_IM2COL_WINDOW_CUH_
