#include "cpu/conv_depthwise_kernels.h"

#include <cstdint>

#include "cpu/conv_results.h"
#include "cpu/simd.h"

namespace jaxops::conv::cpu::depthwise::JAXOPS_ISA {
namespace {

using namespace jaxops::conv::cpu::JAXOPS_ISA;

// Taps of a line whose sums are in registers at a time.
constexpr int kMaxTaps = 8;

int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t Max(int64_t a, int64_t b) { return a < b ? b : a; }
int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t Aligned(int64_t bytes) { return CeilDiv(bytes, 64) * 64; }

// Copies one vector of channels of neighbouring pixels. Returns whether all are finite.
template <typename S, typename A>
bool CopyPixels(const S* from, int64_t channels, int64_t lanes, int64_t count, A* to) {
  Vec<A> differences = {};
  if (lanes == kLanes<A>) {
    for (int64_t i = 0; i < count; ++i) {
      const Vec<A> v = Load(from + i * channels);
      differences += v - v;
      Store(v, to + i * kLanes<A>);
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      const Vec<A> v = LoadPartial(from + i * channels, lanes);
      differences += v - v;
      Store(v, to + i * kLanes<A>);
    }
  }
  A sum = 0;
  for (int i = 0; i < kLanes<A>; ++i) sum += differences[i];
  return sum == 0;
}

// The lines of an image that the windows of some line cover, for each tap of the first dimension,
// with what windows cover beyond both ends.
template <typename S>
struct Ring {
  using A = Arithmetic<S>;

  // Lines of `width` pixels, from entry `first` of the image's lines on.
  int64_t width, first;
  int64_t slots;  // for each tap of the first dimension
  int64_t* held;  // the number of the line in each slot
  A* entries;

  static int64_t Bytes(int64_t width, int64_t taps0, int64_t slots) {
    return Aligned(taps0 * slots * sizeof(int64_t)) +
           taps0 * slots * width * static_cast<int64_t>(kVectorBytes);
  }

  Ring(int64_t width, int64_t first, int64_t taps0, int64_t slots, void* memory)
      : width(width), first(first), slots(slots), held(static_cast<int64_t*>(memory)) {
    entries = reinterpret_cast<A*>(static_cast<char*>(memory) +
                                   Aligned(taps0 * slots * sizeof(int64_t)));
    for (int64_t i = 0; i < taps0 * slots; ++i) held[i] = -1;
  }

  // Returns line `number` of an image and copies it if it is not there. `image` is the image at the
  // first channel, `line` the number of the line in that.
  const A* Get(int64_t tap0, int64_t line, int64_t number, const S* image, int64_t size,
               int64_t channels, int64_t lanes) const {
    const int64_t slot = tap0 * slots + line % slots;
    A* to = entries + slot * width * kLanes<A>;
    if (held[slot] == number) return to;
    held[slot] = number;
    const int64_t low = Min(Max(0, -first), width);
    const int64_t high = Max(low, Min(width, size - first));
    __builtin_memset(to, 0, low * kVectorBytes);
    CopyPixels(image + (number * size + first + low) * channels, channels, lanes, high - low,
               to + low * kLanes<A>);
    __builtin_memset(to + high * kLanes<A>, 0, (width - high) * kVectorBytes);
    return to;
  }
};

// Taps of a line: entries of the source are `step` vectors apart, see Axis.
template <typename A>
struct LineOfTaps {
  const A* source;
  const A* kernel;
};

// Sums of products of `kPixels` neighbouring pixels.
template <int kPixels, int kStep, typename A>
JAXOPS_ALWAYS_INLINE void ConvolvePixels(const LineOfTaps<A>* lines, int64_t count, int64_t taps,
                                         int64_t pixel, int64_t step, int64_t tap_step, A* sums) {
  if (kStep > 0) step = kStep;
  Vec<A> total[kPixels] = {};
  for (int64_t l = 0; l < count; ++l) {
    const A* source = lines[l].source + pixel * step * kLanes<A>;
    const A* kernel = lines[l].kernel;
    for (int64_t tap = 0; tap < taps; ++tap) {
      const Vec<A> entry = Load(kernel);
#pragma GCC unroll 8
      for (int p = 0; p < kPixels; ++p) {
        total[p] = MultiplyAdd(entry, Load(source + p * step * kLanes<A>), total[p]);
      }
      source += tap_step * kLanes<A>;
      kernel += kLanes<A>;
    }
  }
#pragma GCC unroll 8
  for (int p = 0; p < kPixels; ++p) Store(total[p], sums + (pixel + p) * kLanes<A>);
}

// All pixels of a line; the last ones of a tile of pixels may be computed twice.
template <int kStep, typename A>
void ConvolveLine(const LineOfTaps<A>* lines, int64_t count, int64_t taps, int64_t pixels,
                  int64_t step, int64_t tap_step, A* sums) {
  if (pixels >= 8) {
    for (int64_t p = 0; p < pixels; p += 8) {
      ConvolvePixels<8, kStep>(lines, count, taps, Min(p, pixels - 8), step, tap_step, sums);
    }
  } else if (pixels >= 4) {
    for (int64_t p = 0; p < pixels; p += 4) {
      ConvolvePixels<4, kStep>(lines, count, taps, Min(p, pixels - 4), step, tap_step, sums);
    }
  } else {
    for (int64_t p = 0; p < pixels; ++p) {
      ConvolvePixels<1, kStep>(lines, count, taps, p, step, tap_step, sums);
    }
  }
}

// The same, without products with what is outside of the image: for kernels that are not finite.
template <typename A>
void ConvolveInside(const LineOfTaps<A>* lines, int64_t count, const Axis& axis, A* sums) {
  for (int64_t p = 0; p < axis.count; ++p) {
    Vec<A> total = {};
    for (int64_t l = 0; l < count; ++l) {
      for (int64_t tap = 0; tap < axis.taps; ++tap) {
        const int64_t at = p * axis.step + tap * axis.tap_step;
        if (axis.first + at < 0 || axis.first + at >= axis.size) continue;
        total = MultiplyAdd(Load(lines[l].kernel + tap * kLanes<A>),
                            Load(lines[l].source + at * kLanes<A>), total);
      }
    }
    Store(total, sums + p * kLanes<A>);
  }
}

int64_t Width(const Axis& axis) {
  return (axis.count - 1) * axis.step + Max(0, axis.taps - 1) * axis.tap_step + 1;
}

int64_t Slots(const Axis& axis) { return Max(0, axis.taps - 1) * axis.tap_step + 1; }

template <typename S>
int64_t SpaceOf(const Product& product) {
  using A = Arithmetic<S>;
  const auto& [a0, a1, a2] = product.axes;
  return Ring<S>::Bytes(Width(a2), a0.taps, Slots(a1)) +
         Aligned((a0.taps * a1.taps + 1) * sizeof(LineOfTaps<A>)) +
         (a0.taps * a1.taps * a2.taps + a2.count) * kVectorBytes;
}

template <typename S>
void ConvolveTask(const Product& product, const Task& task, char* memory) {
  using A = Arithmetic<S>;
  const auto& [a0, a1, a2] = product.axes;
  const int64_t lanes = Min(kLanes<A>, product.channels - task.channel);
  const Ring<S> ring(Width(a2), a2.first, a0.taps, Slots(a1), memory);
  memory += Ring<S>::Bytes(Width(a2), a0.taps, Slots(a1));
  auto* lines = reinterpret_cast<LineOfTaps<A>*>(memory);
  memory += Aligned((a0.taps * a1.taps + 1) * sizeof(LineOfTaps<A>));
  A* kernel = reinterpret_cast<A*>(memory);
  A* sums = kernel + a0.taps * a1.taps * a2.taps * kLanes<A>;

  bool is_finite = true;
  A* to = kernel;
  for (int64_t j0 = 0; j0 < a0.taps; ++j0) {
    for (int64_t j1 = 0; j1 < a1.taps; ++j1) {
      for (int64_t j2 = 0; j2 < a2.taps; ++j2, to += kLanes<A>) {
        const int64_t t0 = a0.kernel_first + j0 * a0.kernel_step;
        const int64_t t1 = a1.kernel_first + j1 * a1.kernel_step;
        const int64_t t2 = a2.kernel_first + j2 * a2.kernel_step;
        const int64_t tap = (t0 * a1.kernel_taps + t1) * a2.kernel_taps + t2;
        const S* from =
            static_cast<const S*>(product.kernel) + tap * product.channels + task.channel;
        is_finite &= CopyPixels(from, product.channels, lanes, 1, to);
      }
    }
  }

  const S* source = static_cast<const S*>(product.sources[task.image]) + task.channel;
  const int64_t stride = a2.result_step * product.channels;
  for (int64_t line = task.line_begin; line < task.line_end; ++line) {
    const int64_t at0 = line / a1.count, at1 = line % a1.count;
    int64_t count = 0;
    for (int64_t j0 = 0; j0 < a0.taps; ++j0) {
      const int64_t in0 = a0.first + at0 * a0.step + j0 * a0.tap_step;
      if (in0 < 0 || in0 >= a0.size) continue;
      for (int64_t j1 = 0; j1 < a1.taps; ++j1) {
        const int64_t in1 = a1.first + at1 * a1.step + j1 * a1.tap_step;
        if (in1 < 0 || in1 >= a1.size) continue;
        lines[count++] = {ring.Get(j0, in1, in0 * a1.size + in1, source, a2.size,
                                   product.channels, lanes),
                          kernel + (j0 * a1.taps + j1) * a2.taps * kLanes<A>};
      }
    }
    const int64_t out0 = a0.result_first + at0 * a0.result_step;
    const int64_t out1 = a1.result_first + at1 * a1.result_step;
    const int64_t first = (out0 * a1.result_size + out1) * a2.result_size + a2.result_first;
    void* result = EntryAt(product.results[task.image], first * product.channels + task.channel,
                           product.finish.dtype);
    if (!is_finite) {
      ConvolveInside(lines, count, a2, sums);
    } else if (a2.step == 1) {
      ConvolveLine<1>(lines, count, a2.taps, a2.count, 1, a2.tap_step, sums);
    } else if (a2.step == 2) {
      ConvolveLine<2>(lines, count, a2.taps, a2.count, 2, a2.tap_step, sums);
    } else {
      ConvolveLine<0>(lines, count, a2.taps, a2.count, a2.step, a2.tap_step, sums);
    }
    FinishPixels(product.finish, sums, kLanes<A>, a2.count, task.channel, lanes, result, stride);
  }
}

int64_t ConvolveSpace(const Product& product) {
  int64_t bytes = 0;
  WithStorage(product.dtype, nullptr, 0,
              [&]<typename S>(const S*) { bytes = SpaceOf<S>(product); });
  return bytes;
}

void Convolve(const Product& product, const Task& task, void* memory) {
  WithStorage(product.dtype, nullptr, 0, [&]<typename S>(const S*) {
    ConvolveTask<S>(product, task, static_cast<char*>(memory));
  });
}

// --- the kernel gradient -------------------------------------------------------------------------

// Adds products of `count` cotangents with `kTaps` taps of a line.
template <int kTaps, int kStep, typename A>
void AddTaps(const A* source, const A* cotangent, int64_t count, int64_t step, int64_t tap_step,
             A* sums) {
  if (kStep > 0) step = kStep;
  Vec<A> total[kTaps];
#pragma GCC unroll 8
  for (int tap = 0; tap < kTaps; ++tap) total[tap] = Load(sums + tap * kLanes<A>);
  for (int64_t i = 0; i < count; ++i) {
    const Vec<A> entry = Load(cotangent);
#pragma GCC unroll 8
    for (int tap = 0; tap < kTaps; ++tap) {
      total[tap] = MultiplyAdd(entry, Load(source + tap * tap_step * kLanes<A>), total[tap]);
    }
    source += step * kLanes<A>;
    cotangent += kLanes<A>;
  }
#pragma GCC unroll 8
  for (int tap = 0; tap < kTaps; ++tap) Store(total[tap], sums + tap * kLanes<A>);
}

template <typename A>
void AddSomeTaps(int64_t taps, const A* source, const A* cotangent, int64_t count, int64_t step,
                 int64_t tap_step, A* sums) {
  const auto add = [&](auto number) {
    constexpr int kTaps = decltype(number)::value;
    if (tap_step == 1) return AddTaps<kTaps, 0>(source, cotangent, count, step, 1, sums);
    AddTaps<kTaps, 0>(source, cotangent, count, step, tap_step, sums);
  };
  switch (taps) {
    case 1:
      return add(Constant<1>());
    case 2:
      return add(Constant<2>());
    case 3:
      return add(Constant<3>());
    case 4:
      return add(Constant<4>());
    case 5:
      return add(Constant<5>());
    case 6:
      return add(Constant<6>());
    case 7:
      return add(Constant<7>());
    default:
      return add(Constant<8>());
  }
}

int64_t Width(const im2col::Window& window) {
  return (window.out - 1) * window.stride + (window.taps - 1) * window.dilation + 1;
}

int64_t Slots(const im2col::Window& window) { return (window.taps - 1) * window.dilation + 1; }

template <typename S>
int64_t GradSpaceOf(const GradProduct& product) {
  const auto& [d0, d1, d2] = product.dims;
  return Ring<S>::Bytes(Width(d2), d0.taps, Slots(d1)) +
         (d0.taps * d1.taps * d2.taps + d2.out) * kVectorBytes;
}

template <typename S>
void GradTaskOf(const GradProduct& product, const GradTask& task, char* memory,
                Arithmetic<S>* result, int64_t stride) {
  using A = Arithmetic<S>;
  const auto& [d0, d1, d2] = product.dims;
  const int64_t lanes = Min(kLanes<A>, product.channels - task.channel);
  const int64_t taps = d0.taps * d1.taps * d2.taps;
  A* sums = reinterpret_cast<A*>(memory + Ring<S>::Bytes(Width(d2), d0.taps, Slots(d1)));
  A* cotangents = sums + taps * kLanes<A>;
  for (int64_t i = 0; i < taps * kLanes<A>; ++i) sums[i] = 0;
  for (int64_t line = task.line_begin; line < task.line_end;) {
    const int64_t image = line / d1.out / d0.out;
    const int64_t end = Min(task.line_end, (image + 1) * d0.out * d1.out);
    const Ring<S> ring(Width(d2), -d2.low, d0.taps, Slots(d1), memory);
    const S* source = static_cast<const S*>(product.sources[image]) + task.channel;
    for (; line < end; ++line) {
      const int64_t out1 = line % d1.out;
      const int64_t out0 = line / d1.out % d0.out;
      const S* from = static_cast<const S*>(product.cotangents[image]) + task.channel +
                      (out0 * d1.out + out1) * d2.out * product.channels;
      const bool is_finite = CopyPixels(from, product.channels, lanes, d2.out, cotangents);
      for (int64_t t0 = 0; t0 < d0.taps; ++t0) {
        const int64_t in0 = out0 * d0.stride + t0 * d0.dilation - d0.low;
        if (in0 < 0 || in0 >= d0.in) continue;
        for (int64_t t1 = 0; t1 < d1.taps; ++t1) {
          const int64_t in1 = out1 * d1.stride + t1 * d1.dilation - d1.low;
          if (in1 < 0 || in1 >= d1.in) continue;
          const A* entries = ring.Get(t0, in1, in0 * d1.in + in1, source, d2.in,
                                      product.channels, lanes);
          A* to = sums + (t0 * d1.taps + t1) * d2.taps * kLanes<A>;
          const int64_t per_loop = is_finite ? kMaxTaps : 1;
          for (int64_t t2 = 0; t2 < d2.taps; t2 += per_loop) {
            // Cotangents that are not finite are not multiplied by zeros of the padding.
            int64_t low = 0, high = d2.out;
            if (!is_finite) {
              const int64_t first = t2 * d2.dilation - d2.low;
              low = first < 0 ? CeilDiv(-first, d2.stride) : 0;
              high = first < d2.in ? Min(high, CeilDiv(d2.in - first, d2.stride)) : 0;
              if (low >= high) continue;
            }
            AddSomeTaps(Min(per_loop, d2.taps - t2),
                        entries + (low * d2.stride + t2 * d2.dilation) * kLanes<A>,
                        cotangents + low * kLanes<A>, high - low, d2.stride, d2.dilation,
                        to + t2 * kLanes<A>);
          }
        }
      }
    }
  }
  for (int64_t tap = 0; tap < taps; ++tap) {
    StoreUpTo(Load(sums + tap * kLanes<A>), result + tap * stride, lanes);
  }
}

int64_t GradSpace(const GradProduct& product) {
  int64_t bytes = 0;
  WithStorage(product.dtype, nullptr, 0,
              [&]<typename S>(const S*) { bytes = GradSpaceOf<S>(product); });
  return bytes;
}

void Grad(const GradProduct& product, const GradTask& task, void* memory, void* sums,
          int64_t stride) {
  WithStorage(product.dtype, nullptr, 0, [&]<typename S>(const S*) {
    GradTaskOf<S>(product, task, static_cast<char*>(memory),
                  static_cast<Arithmetic<S>*>(sums), stride);
  });
}

}  // namespace

const Kernels kKernels = {kVectorBytes, ConvolveSpace, Convolve, GradSpace, Grad};

}  // namespace jaxops::conv::cpu::depthwise::JAXOPS_ISA
