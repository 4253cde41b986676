#include "cpu/im2col_kernels.h"

#include <cstdint>

#include "cpu/simd.h"

namespace jaxops::im2col::cpu::JAXOPS_ISA {
namespace {

using namespace jaxops::cpu::JAXOPS_ISA;

// Returns the patch that has entry `in` of the image at `tap`, or -1.
JAXOPS_ALWAYS_INLINE int64_t PatchOf(const Window& window, int64_t in, int64_t tap) {
  const int64_t begin = in + window.low - tap * window.dilation;
  if (begin < 0 || begin % window.stride != 0) return -1;
  const int64_t out = begin / window.stride;
  return out < window.out ? out : -1;
}

// Returns the entry of the image at `tap` of patch `out`, which may be outside of the image.
JAXOPS_ALWAYS_INLINE int64_t EntryOf(const Window& window, int64_t out, int64_t tap) {
  return out * window.stride + tap * window.dilation - window.low;
}

template <typename S, typename A>
JAXOPS_ALWAYS_INLINE void Add(const S* from, int64_t count, A* sums) {
  int64_t i = 0;
  for (; i + kLanes<A> <= count; i += kLanes<A>) Store(Load(sums + i) + Load(from + i), sums + i);
  if (i == count) return;
  const int64_t rest = count - i;
  StorePartial(LoadPartial(sums + i, rest) + LoadPartial(from + i, rest), sums + i, rest);
}

// Adds a line of patches (out, taps..., channels) to a line of the image; `taps` are those of the
// last dimension.
template <typename S, typename A>
JAXOPS_ALWAYS_INLINE void AddChannelsLast(const Call& call, const S* taps, A* sums) {
  const Window& window = call.dims[2];
  const int64_t channels = call.channels;
  const int64_t patch = call.taps() * channels;
  for (int64_t out = 0; out < window.out; ++out, taps += patch) {
    const int64_t first = EntryOf(window, out, 0);
    if (window.dilation == 1) {  // neighbouring taps are neighbours in the image
      const int64_t low = first < 0 ? -first : 0;
      const int64_t high = first + window.taps > window.in ? window.in - first : window.taps;
      if (low < high) {
        Add(taps + low * channels, (high - low) * channels, sums + (first + low) * channels);
      }
      continue;
    }
    for (int64_t tap = 0; tap < window.taps; ++tap) {
      const int64_t in = first + tap * window.dilation;
      if (in < 0 || in >= window.in) continue;
      Add(taps + tap * channels, channels, sums + in * channels);
    }
  }
}

// Adds lines of patches (taps, ..., out), one for each tap of the last dimension and `stride`
// apart, to a line of the image.
template <typename S, typename A>
JAXOPS_ALWAYS_INLINE void AddChannelsFirst(const Call& call, const S* lines, int64_t stride,
                                           A* sums) {
  const Window& window = call.dims[2];
  for (int64_t tap = 0; tap < window.taps; ++tap, lines += stride) {
    const int64_t first = EntryOf(window, 0, tap);
    int64_t low = 0;
    if (first < 0) low = (-first + window.stride - 1) / window.stride;
    int64_t high = 0;
    if (first < window.in) high = (window.in - first + window.stride - 1) / window.stride;
    if (high > window.out) high = window.out;
    if (low >= high) continue;
    A* at = sums + first + low * window.stride;
    if (window.stride == 1) {
      Add(lines + low, high - low, at);
      continue;
    }
    for (int64_t out = low; out < high; out += kLanes<A>) {
      const int64_t count = high - out < kLanes<A> ? high - out : kLanes<A>;
      const Vec<A> some = LoadUpTo(lines + out, count);
      for (int64_t i = 0; i < count; ++i, at += window.stride) *at += some[i];
    }
  }
}

// The image has the type of the patches; f32 and f64 are summed in the result itself.
template <typename S>
void MakeLines(const Call& call, const S* patches, int64_t begin, int64_t end, float* buffer) {
  using A = Arithmetic<S>;
  const auto& [d0, d1, d2] = call.dims;
  const int64_t width = d2.in * call.channels;
  S* image = static_cast<S*>(call.to);
  for (int64_t line = begin; line < end; ++line) {
    const int64_t in1 = line % d1.in;
    const int64_t in0 = line / d1.in % d0.in;
    const int64_t row = line / d1.in / d0.in;
    A* sums;
    if constexpr (sizeof(S) == sizeof(A)) {
      sums = image + line * width;
    } else {
      sums = buffer;
    }
    for (int64_t i = 0; i < width; ++i) sums[i] = 0;
    for (int64_t tap0 = 0; tap0 < d0.taps; ++tap0) {
      const int64_t out0 = PatchOf(d0, in0, tap0);
      if (out0 < 0) continue;
      for (int64_t tap1 = 0; tap1 < d1.taps; ++tap1) {
        const int64_t out1 = PatchOf(d1, in1, tap1);
        if (out1 < 0) continue;
        const int64_t tap = (tap0 * d1.taps + tap1) * d2.taps;
        if (call.channels_last) {
          const int64_t patch = ((row * d0.out + out0) * d1.out + out1) * d2.out;
          AddChannelsLast(call, patches + (patch * call.taps() + tap) * call.channels, sums);
        } else {
          const int64_t stride = d0.out * d1.out * d2.out;
          const int64_t out = (out0 * d1.out + out1) * d2.out;
          AddChannelsFirst(call, patches + (row * call.taps() + tap) * stride + out, stride, sums);
        }
      }
    }
    if constexpr (sizeof(S) != sizeof(A)) {
      S* to = image + line * width;
      for (int64_t i = 0; i < width; i += kLanes<A>) {
        StoreUpTo(LoadUpTo(sums + i, width - i), to + i, width - i);
      }
    }
  }
}

void Col2Im(const Call& call, int64_t begin, int64_t end, float* sums) {
  WithStorage(call.dtype, call.from, 0,
              [&](const auto* patches) { MakeLines(call, patches, begin, end, sums); });
}

}  // namespace

const Kernels kKernels = {Col2Im};

}  // namespace jaxops::im2col::cpu::JAXOPS_ISA
