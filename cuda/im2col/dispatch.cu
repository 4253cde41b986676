// The patches of images and the images of patches, see common/im2col.h.
//
// im2col moves bytes. Where the channels of a pixel are whole 16 bytes, a thread moves 16 bytes at
// a time (MovePacks). Otherwise it gathers 16 bytes of patches from units as large as all sizes and
// addresses allow (GatherPacks): it finds where the first comes from and walks on from there, so
// that only one in many costs divisions. Either way neighbouring threads write neighbouring bytes.
//
// col2im gathers (SumPatches): a thread owns entries of the image and sums what all patches have of
// them, tap after tap, so that sums are always made in the same order.
//
// Indices are 32-bit where both arrays and all coordinates fit.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <type_traits>

#include "common/fast_divide.h"
#include "cuda/common/launch.h"
#include "cuda/common/numeric.cuh"
#include "cuda/im2col/launch.h"

namespace jaxops::im2col::cuda {
namespace {

using jaxops::cuda::Accumulator;
using jaxops::cuda::CeilDiv;
using jaxops::cuda::DispatchFloat;
using jaxops::cuda::kPackBytes;
using jaxops::cuda::kPackElements;
using jaxops::cuda::Launch;
using jaxops::cuda::LoadPack;
using jaxops::cuda::Narrow;
using jaxops::cuda::Pack;
using jaxops::cuda::SizeOf;
using jaxops::cuda::StorePack;
using jaxops::cuda::Widen;

constexpr int kThreads = 256;

// Packs of a thread that are under way together.
constexpr int kPacksInFlight = 4;

// A Window with the sizes that threads divide by.
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

  // Finds the patch that has `entry` of the image at `tap`; false if there is none.
  __device__ __forceinline__ bool FindPatch(UInt entry, UInt tap, UInt& patch) const {
    const Int begin = static_cast<Int>(entry) + low - static_cast<Int>(tap) * dilation;
    if (begin < 0) return false;
    patch = stride.Quotient(static_cast<UInt>(begin));
    return patch * stride.divisor() == static_cast<UInt>(begin) && patch < out.divisor();
  }
};

// Sizes are in units: what is moved as one, or elements.
template <typename UInt, int kDims>
struct Params {
  FastWindow<UInt> dims[kDims];
  FastDividerOf<UInt> channels;
  int64_t count;   // units of the result
  bool is_packed;  // the result begins at a multiple of 16 bytes
  const void* from;
  void* to;
};

// --- im2col --------------------------------------------------------------------------------------

// Where in the patches a unit is, and where it comes from.
template <typename UInt, int kDims, bool kChannelsLast>
struct Place {
  using Int = std::make_signed_t<UInt>;

  UInt channel = 0;
  UInt taps[kDims];
  UInt outs[kDims];
  UInt row;

  __device__ __forceinline__ Place(const Params<UInt, kDims>& params, UInt unit) {
    if constexpr (kChannelsLast) {
      channel = params.channels.Peel(unit);
      PeelTaps(params, unit);
    }
#pragma unroll
    for (int d = kDims - 1; d >= 0; --d) outs[d] = params.dims[d].out.Peel(unit);
    if constexpr (!kChannelsLast) PeelTaps(params, unit);
    row = unit;
  }

  __device__ __forceinline__ void PeelTaps(const Params<UInt, kDims>& params, UInt& unit) {
#pragma unroll
    for (int d = kDims - 1; d >= 0; --d) taps[d] = params.dims[d].taps.Peel(unit);
  }

  // Goes on to the next unit.
  __device__ __forceinline__ void Advance(const Params<UInt, kDims>& params) {
    if constexpr (kChannelsLast) {
      if (++channel < params.channels.divisor()) return;
      channel = 0;
      if (AdvanceTaps(params) && AdvanceOuts(params)) ++row;
    } else {
      if (AdvanceOuts(params) && AdvanceTaps(params)) ++row;
    }
  }

  // Whether it was the last one, and the first is next.
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

template <typename UInt, int kDims>
__global__ void __launch_bounds__(kThreads)
    MovePacks(const __grid_constant__ Params<UInt, kDims> params) {
  const int64_t first = int64_t{blockIdx.x} * (kThreads * kPacksInFlight) + threadIdx.x;
  uint4 packs[kPacksInFlight];
#pragma unroll
  for (int i = 0; i < kPacksInFlight; ++i) {
    const int64_t pack = first + i * kThreads;
    if (pack >= params.count) continue;
    packs[i] =
        Place<UInt, kDims, true>(params, static_cast<UInt>(pack)).template Read<uint4>(params);
  }
#pragma unroll
  for (int i = 0; i < kPacksInFlight; ++i) {
    const int64_t pack = first + i * kThreads;
    if (pack < params.count) static_cast<uint4*>(params.to)[pack] = packs[i];
  }
}

template <typename Unit, typename UInt, int kDims, bool kChannelsLast>
__global__ void __launch_bounds__(kThreads)
    GatherPacks(const __grid_constant__ Params<UInt, kDims> params) {
  constexpr int kUnits = kPackElements<Unit>;
  const int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kUnits;
  if (first >= params.count) return;
  Unit* to = static_cast<Unit*>(params.to) + first;
  Place<UInt, kDims, kChannelsLast> place(params, static_cast<UInt>(first));
  Pack<Unit, kUnits> pack;
  // Beyond the end there is nothing to read either.
  const int64_t left = params.count - first;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    pack.values[i] = i < left ? place.template Read<Unit>(params) : Unit{};
    place.Advance(params);
  }
  if (left >= kUnits && params.is_packed) {
    StorePack(to, pack);
    return;
  }
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    if (i < left) to[i] = pack.values[i];
  }
}

// --- col2im --------------------------------------------------------------------------------------

// Adds what the patches have of one entry: `entries` are its coordinates, `patches` points to the
// patches of its row, and their units of a tap or of a patch lie `tap_stride` or `out_stride`
// apart.
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
        const auto values = LoadPack<kCount>(patches + static_cast<int64_t>(next_tap) * tap_stride +
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
  const int64_t pack = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (pack >= params.count) return;
  UInt rest = static_cast<UInt>(pack);
  UInt channel = 0;
  if constexpr (kChannelsLast) channel = params.channels.Peel(rest) * kCount;
  UInt entries[kDims];
  int64_t taps = 1;
  int64_t outs = 1;
#pragma unroll
  for (int d = kDims - 1; d >= 0; --d) {
    entries[d] = params.dims[d].in.Peel(rest);
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
  Pack<T, kCount> result;
#pragma unroll
  for (int v = 0; v < kCount; ++v) result.values[v] = Narrow<T>(sum.sums[v]);
  StorePack(static_cast<T*>(params.to) + pack * kCount, result);
}

// --- launchers -----------------------------------------------------------------------------------

bool IsAligned(const void* address, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

// The largest power of two up to 16 that divides a pixel and the addresses.
int64_t UnitBytes(const Call& call) {
  int64_t unit = kPackBytes;
  while (call.channels * call.item_bytes % unit != 0 || !IsAligned(call.from, unit) ||
         !IsAligned(call.to, unit)) {
    unit /= 2;
  }
  return unit;
}

// Whether 32-bit indices and coordinates hold everything.
bool IsSmall(const Call& call) {
  constexpr int64_t kMost = INT32_MAX;
  bool is_small = call.image_size() <= kMost && call.patches_size() <= kMost;
  for (const Window& w : call.dims) {
    // Each alone first, so that the sum cannot overflow.
    const bool fits = w.stride <= kMost && w.dilation <= kMost && std::abs(w.low) <= kMost / 4 &&
                      w.in <= kMost / 4 && w.out <= kMost && w.taps <= kMost;
    is_small =
        is_small && fits && w.out * w.stride <= kMost / 4 && w.taps * w.dilation <= kMost / 4;
  }
  return is_small;
}

// Calls launch(params) with those of the call, of which a unit has `unit` items.
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
    params.is_packed = IsAligned(call.to, kPackBytes);
    params.from = call.from;
    params.to = call.to;
    return launch(params);
  };
  if (!IsSmall(call)) return fill(Params<uint64_t, 3>());
  const Window& first = call.dims[0];
  const bool is_flat = first.in == 1 && first.out == 1 && first.taps == 1 && first.low == 0;
  return is_flat ? fill(Params<uint32_t, 2>()) : fill(Params<uint32_t, 3>());
}

template <typename Unit>
cudaError_t LaunchGather(cudaStream_t stream, const Call& call) {
  Call units = call;
  units.channels = call.channels * call.item_bytes / static_cast<int64_t>(sizeof(Unit));
  return WithParams(units, 1, units.patches_size(), [&](const auto& params) {
    using P = std::decay_t<decltype(params)>;
    using UInt = std::decay_t<decltype(params.channels.divisor())>;
    constexpr int kDims = std::extent_v<decltype(P::dims)>;
    const int64_t blocks = CeilDiv(CeilDiv(params.count, kPackElements<Unit>), kThreads);
    return call.channels_last
               ? Launch(GatherPacks<Unit, UInt, kDims, true>, blocks, kThreads, 0, stream, params)
               : Launch(GatherPacks<Unit, UInt, kDims, false>, blocks, kThreads, 0, stream, params);
  });
}

cudaError_t LaunchMove(cudaStream_t stream, const Call& call) {
  Call packs = call;
  packs.channels = call.channels * call.item_bytes / kPackBytes;
  return WithParams(packs, 1, packs.patches_size(), [&](const auto& params) {
    using P = std::decay_t<decltype(params)>;
    using UInt = std::decay_t<decltype(params.channels.divisor())>;
    constexpr int kDims = std::extent_v<decltype(P::dims)>;
    const int64_t blocks = CeilDiv(params.count, kThreads * kPacksInFlight);
    return Launch(MovePacks<UInt, kDims>, blocks, kThreads, 0, stream, params);
  });
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

cudaError_t LaunchIm2Col(cudaStream_t stream, const Call& call) {
  if (call.patches_size() == 0) return cudaSuccess;
  // Nothing but padding, of an image without entries to divide by.
  if (call.image_size() == 0) {
    return cudaMemsetAsync(call.to, 0, call.patches_size() * call.item_bytes, stream);
  }
  switch (UnitBytes(call)) {
    case 16:
      return LaunchMove(stream, call);
    case 8:
      return LaunchGather<uint2>(stream, call);
    case 4:
      return LaunchGather<uint32_t>(stream, call);
    case 2:
      return LaunchGather<uint16_t>(stream, call);
    default:
      return LaunchGather<uint8_t>(stream, call);
  }
}

cudaError_t LaunchCol2Im(cudaStream_t stream, const Call& call) {
  if (call.image_size() == 0) return cudaSuccess;
  // Sums of nothing: there are no patches, or no taps, to divide by.
  if (call.patches_size() == 0) {
    return cudaMemsetAsync(call.to, 0, call.image_size() * SizeOf(call.dtype), stream);
  }
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    if (!call.channels_last) return LaunchSum<T, 1, false>(stream, call);
    if (UnitBytes(call) == kPackBytes) {
      return LaunchSum<T, kPackElements<T>, true>(stream, call);
    }
    return LaunchSum<T, 1, true>(stream, call);
  });
}

}  // namespace jaxops::im2col::cuda
