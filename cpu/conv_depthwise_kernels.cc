#include "cpu/conv_depthwise_kernels.h"

#include <cstdint>

#include "cpu/conv_results.h"
#include "cpu/simd.h"

namespace jaxops::conv::cpu::depthwise::JAXOPS_ISA {
namespace {

using namespace jaxops::conv::cpu::JAXOPS_ISA;

// Long functions with several callers are compiled once.
#define JAXOPS_NEVER_INLINE __attribute__((noinline))

// Taps of a line whose sums are in registers at a time.
constexpr int kMaxTaps = 8;

int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t Max(int64_t a, int64_t b) { return a < b ? b : a; }
int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t Aligned(int64_t bytes) { return CeilDiv(bytes, 64) * 64; }

// Copies `channels` of each of `count` pixels, vector by vector: those of a vector of channels
// follow each other, and those of the next one begin `plane` entries later.
template <typename S, typename A>
JAXOPS_NEVER_INLINE void CopyPixels(const S* from, int64_t stride, int64_t channels, int64_t count,
                                    A* to, int64_t plane) {
  for (int64_t i = 0; i < count; ++i) {
    int64_t c = 0;
    A* vector = to + i * kLanes<A>;
    for (; c + kLanes<A> <= channels; c += kLanes<A>, vector += plane) {
      Store(Load(from + i * stride + c), vector);
    }
    if (c < channels) Store(LoadPartial(from + i * stride + c, channels - c), vector);
  }
}

// Copies channel `member` of the group of each of some result channels, from pixels of `stride`
// channels: see the header.
template <typename S, typename A>
JAXOPS_NEVER_INLINE void SpreadPixels(const S* from, int64_t stride, int64_t fan, int64_t columns,
                                      int64_t member, int64_t channel, int64_t lanes, int64_t count,
                                      A* to) {
  int32_t sources[kLanes<A>] = {};
  for (int64_t i = 0; i < lanes; ++i) {
    sources[i] = static_cast<int32_t>(((channel + i) / columns - channel / columns) * fan + member);
  }
  from += channel / columns * fan;
#if defined(__AVX512F__)
  // All sources of a vector are among as many neighbouring channels.
  if constexpr (sizeof(A) == sizeof(float)) {
    if (lanes == kLanes<A> && sources[kLanes<A> - 1] < kLanes<A> &&
        channel / columns * fan + kLanes<A> <= stride) {
      const __m512i order = _mm512_loadu_si512(sources);
      for (int64_t i = 0; i < count; ++i) {
        const __m512 v = BitCast<__m512>(Load(from + i * stride));
        Store(BitCast<Vec<A>>(_mm512_maskz_permutexvar_ps(0xffff, order, v)), to + i * kLanes<A>);
      }
      return;
    }
  }
#endif
  for (int64_t i = 0; i < count; ++i) {
    S entries[kLanes<A>] = {};
    for (int64_t lane = 0; lane < lanes; ++lane) entries[lane] = from[i * stride + sources[lane]];
    Store(Load(entries), to + i * kLanes<A>);
  }
}

// Prefetches `count` pixels, `channels` entries a pixel. GCC leaves out calls of functions that do
// nothing but prefetch.
template <typename S>
JAXOPS_ALWAYS_INLINE void PrefetchPixels(const S* from, int64_t stride, int64_t channels,
                                         int64_t count) {
  constexpr int64_t kCacheLine = 64 / sizeof(S);
  for (int64_t i = 0; i < count; ++i, from += stride) {
    for (int64_t c = 0; c < channels; c += kCacheLine) __builtin_prefetch(from + c);
  }
}

template <typename A>
bool AreFinite(const A* entries, int64_t count) {
  Vec<A> differences = {};
  for (int64_t i = 0; i < count; i += kLanes<A>) {
    const Vec<A> v = Load(entries + i);
    differences += v - v;
  }
  A sum = 0;
  for (int i = 0; i < kLanes<A>; ++i) sum += differences[i];
  return sum == 0;
}

// The lines of an image that the windows of some line cover, for each tap of the first dimension,
// with what windows cover beyond both ends: for each vector of channels and each source channel of
// a group (taps, slots, width).
template <typename S>
struct Ring {
  using A = Arithmetic<S>;

  int64_t width, first;  // a line has `width` pixels, from entry `first` of the image's lines on
  int64_t taps0, slots;
  int64_t fan, columns;
  int64_t* held;  // the number of the line in each slot
  A* entries;

  static int64_t Bytes(int64_t width, int64_t taps0, int64_t slots, int64_t planes) {
    return Aligned(taps0 * slots * sizeof(int64_t)) +
           planes * taps0 * slots * width * static_cast<int64_t>(kVectorBytes);
  }

  Ring(int64_t width, int64_t first, int64_t taps0, int64_t slots, int64_t fan, int64_t columns,
       void* memory)
      : width(width),
        first(first),
        taps0(taps0),
        slots(slots),
        fan(fan),
        columns(columns),
        held(static_cast<int64_t*>(memory)) {
    entries =
        reinterpret_cast<A*>(static_cast<char*>(memory) + Aligned(taps0 * slots * sizeof(int64_t)));
    for (int64_t i = 0; i < taps0 * slots; ++i) held[i] = -1;
  }

  // Entries between source channels of a group; vectors of channels are `fan` such planes apart.
  int64_t plane() const { return taps0 * slots * width * kLanes<A>; }

  // Returns line `number` of an image, line `line` along the second dimension, and copies it if it
  // is not there, for result channels [channel, channel + count) of all `channels`.
  JAXOPS_NEVER_INLINE const A* Get(int64_t tap0, int64_t line, int64_t number, const S* image,
                                   int64_t size, int64_t channels, int64_t channel,
                                   int64_t count) const {
    const int64_t slot = tap0 * slots + line % slots;
    A* to = entries + slot * width * kLanes<A>;
    if (held[slot] == number) return to;
    held[slot] = number;
    const int64_t low = Min(Max(0, -first), width);
    const int64_t high = Max(low, Min(width, size - first));
    for (int64_t i = 0; i < CeilDiv(count, kLanes<A>) * fan; ++i) {
      __builtin_memset(to + i * plane(), 0, low * kVectorBytes);
      __builtin_memset(to + i * plane() + high * kLanes<A>, 0, (width - high) * kVectorBytes);
    }
    to += low * kLanes<A>;
    const int64_t stride = channels / columns * fan;
    const S* from = image + (number * size + first + low) * stride;
    if (fan == 1 && columns == 1) {
      CopyPixels(from + channel, stride, count, high - low, to, plane());
    } else {
      for (int64_t c = 0; c < count; c += kLanes<A>) {
        for (int64_t member = 0; member < fan; ++member) {
          SpreadPixels(from, stride, fan, columns, member, channel + c, Min(kLanes<A>, count - c),
                       high - low, to + (c / kLanes<A> * fan + member) * plane());
        }
      }
    }
    return to - low * kLanes<A>;
  }

  // Prefetches part `part` of `parts` of line `number`, which `Get` will copy.
  JAXOPS_ALWAYS_INLINE void Prefetch(int64_t number, const S* image, int64_t size, int64_t channels,
                                     int64_t channel, int64_t count, int64_t part,
                                     int64_t parts) const {
    const int64_t stride = channels / columns * fan;
    const int64_t begin = size * part / parts;
    const S* from = image + (number * size + begin) * stride + channel / columns * fan;
    PrefetchPixels(from, stride, CeilDiv(count, columns) * fan, size * (part + 1) / parts - begin);
  }
};

// Lines of results that are computed for one vector of channels after the other.
constexpr int kLines = 2;

// A line of the source, and the entries of the kernel before those of its taps.
template <typename A>
struct LineOfTaps {
  const A* source;
  int64_t kernel;
};

// All lines of a line of results, at one of the vectors of channels.
template <typename A>
struct Shifted {
  const LineOfTaps<A>* lines;
  int64_t count;
  int64_t offset;  // of the entries of the source
  const A* kernel;
};

// Sums of products of `kPixels` neighbouring pixels.
template <int kPixels, int kStep, typename A>
JAXOPS_ALWAYS_INLINE void ConvolvePixels(const Shifted<A>& all, int64_t taps, int64_t pixel,
                                         int64_t step, int64_t tap_step, A* sums, int64_t stride) {
  if (kStep > 0) step = kStep;
  Vec<A> total[kPixels] = {};
  for (int64_t l = 0; l < all.count; ++l) {
    const A* source = all.lines[l].source + all.offset + pixel * step * kLanes<A>;
    const A* kernel = all.kernel + all.lines[l].kernel;
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
  for (int p = 0; p < kPixels; ++p) Store(total[p], sums + (pixel + p) * stride);
}

// All pixels of a line; the last ones of a tile of pixels may be computed twice.
template <int kStep, typename A>
JAXOPS_NEVER_INLINE void ConvolveLine(const Shifted<A>& all, int64_t taps, int64_t pixels,
                                      int64_t step, int64_t tap_step, A* sums, int64_t stride) {
  if (pixels >= 8) {
    for (int64_t p = 0; p < pixels; p += 8) {
      ConvolvePixels<8, kStep>(all, taps, Min(p, pixels - 8), step, tap_step, sums, stride);
    }
  } else if (pixels >= 4) {
    for (int64_t p = 0; p < pixels; p += 4) {
      ConvolvePixels<4, kStep>(all, taps, Min(p, pixels - 4), step, tap_step, sums, stride);
    }
  } else {
    for (int64_t p = 0; p < pixels; ++p) {
      ConvolvePixels<1, kStep>(all, taps, p, step, tap_step, sums, stride);
    }
  }
}

// All pixels of a line whose neighbours have the same entries at neighbouring taps: an entry is
// loaded once for all its products. The sums have the order of `ConvolvePixels`.
template <int kPixels, int kTaps, typename A>
JAXOPS_NEVER_INLINE void ConvolveNeighbours(const Shifted<A>& all, int64_t pixels, A* sums,
                                            int64_t stride) {
  for (int64_t first = 0; first < pixels; first += kPixels) {
    const int64_t pixel = Min(first, pixels - kPixels);
    Vec<A> total[kPixels] = {};
    for (int64_t l = 0; l < all.count; ++l) {
      const A* source = all.lines[l].source + all.offset + pixel * kLanes<A>;
      const A* kernel = all.kernel + all.lines[l].kernel;
      Vec<A> entries[kTaps];
#pragma GCC unroll 8
      for (int tap = 0; tap < kTaps; ++tap) entries[tap] = Load(kernel + tap * kLanes<A>);
#pragma GCC unroll 32
      for (int i = 0; i < kPixels + kTaps - 1; ++i) {
        const Vec<A> v = Load(source + i * kLanes<A>);
#pragma GCC unroll 8
        for (int tap = 0; tap < kTaps; ++tap) {
          const int p = i - tap;
          if (0 <= p && p < kPixels) total[p] = MultiplyAdd(entries[tap], v, total[p]);
        }
      }
    }
#pragma GCC unroll 16
    for (int p = 0; p < kPixels; ++p) Store(total[p], sums + (pixel + p) * stride);
  }
}

// Computes a line of kTaps taps and at least 7 pixels and returns true, or returns false.
template <int kTaps, typename A>
bool TryNeighbours(const Shifted<A>& all, int64_t taps, int64_t pixels, A* sums, int64_t stride) {
  if (taps != kTaps || pixels < 7) return false;
#if defined(__AVX512F__) || defined(__aarch64__)
  if (pixels >= 14) {  // whose sums are in half of 32 registers
    ConvolveNeighbours<14, kTaps>(all, pixels, sums, stride);
    return true;
  }
#endif
  ConvolveNeighbours<7, kTaps>(all, pixels, sums, stride);
  return true;
}

// The same, without products with what is outside of the image: for kernels that are not finite.
template <typename A>
void ConvolveInside(const Shifted<A>& all, const Axis& axis, A* sums, int64_t stride) {
  for (int64_t p = 0; p < axis.count; ++p) {
    Vec<A> total = {};
    for (int64_t l = 0; l < all.count; ++l) {
      for (int64_t tap = 0; tap < axis.taps; ++tap) {
        const int64_t at = p * axis.step + tap * axis.tap_step;
        if (axis.first + at < 0 || axis.first + at >= axis.size) continue;
        const Vec<A> entry = Load(all.kernel + all.lines[l].kernel + tap * kLanes<A>);
        total = MultiplyAdd(entry, Load(all.lines[l].source + all.offset + at * kLanes<A>), total);
      }
    }
    Store(total, sums + p * stride);
  }
}

int64_t Width(const Axis& axis) {
  return (axis.count - 1) * axis.step + Max(0, axis.taps - 1) * axis.tap_step + 1;
}

int64_t Slots(const Axis& axis) { return Max(0, axis.taps - 1) * axis.tap_step + 1; }

template <typename S>
int64_t SpaceOf(const Product& product, int64_t vectors) {
  using A = Arithmetic<S>;
  const auto& [a0, a1, a2] = product.axes;
  const int64_t planes = vectors * product.fan;
  return Ring<S>::Bytes(Width(a2), a0.taps, Slots(a1) + kLines - 1, planes) +
         Aligned((a0.taps * a1.taps * product.fan + 1) * kLines * sizeof(LineOfTaps<A>)) +
         (planes * a0.taps * a1.taps * a2.taps + a2.count) * kVectorBytes;
}

template <typename S>
struct Convolver {
  using A = Arithmetic<S>;

  const Product& product;
  const Task& task;

  // Copies the kernel (vectors, fan, taps, lanes) in the order of the axes' taps.
  void CopyKernel(int64_t channels, A* to) const {
    const auto& [a0, a1, a2] = product.axes;
    const S* kernel = static_cast<const S*>(product.kernel);
    for (int64_t c = 0; c < channels; c += kLanes<A>) {
      const int64_t lanes = Min(kLanes<A>, channels - c);
      int64_t offsets[kLanes<A>] = {};
      for (int64_t i = 0; i < lanes; ++i) {
        const int64_t channel = task.channel + c + i;
        offsets[i] = channel / product.columns * product.group_stride +
                     channel % product.columns * product.column_stride;
      }
      for (int64_t member = 0; member < product.fan; ++member) {
        for (int64_t j0 = 0; j0 < a0.taps; ++j0) {
          for (int64_t j1 = 0; j1 < a1.taps; ++j1) {
            for (int64_t j2 = 0; j2 < a2.taps; ++j2, to += kLanes<A>) {
              const int64_t t0 = a0.kernel_first + j0 * a0.kernel_step;
              const int64_t t1 = a1.kernel_first + j1 * a1.kernel_step;
              const int64_t t2 = a2.kernel_first + j2 * a2.kernel_step;
              const int64_t tap = (t0 * a1.kernel_taps + t1) * a2.kernel_taps + t2;
              const S* from = kernel + tap * product.tap_stride + member * product.fan_stride;
              S entries[kLanes<A>] = {};
              for (int64_t i = 0; i < lanes; ++i) entries[i] = from[offsets[i]];
              Store(Load(entries), to);
            }
          }
        }
      }
    }
  }

  // Finds the taps of a line of results that are in the image, and returns their number.
  int64_t FindLines(const Ring<S>& ring, int64_t line, int64_t channels,
                    LineOfTaps<A>* lines) const {
    const auto& [a0, a1, a2] = product.axes;
    const S* source = static_cast<const S*>(product.sources[task.image]);
    const int64_t kernel_plane = a0.taps * a1.taps * a2.taps * kLanes<A>;
    int64_t count = 0;
    for (int64_t j0 = 0; j0 < a0.taps; ++j0) {
      const int64_t in0 = a0.first + line / a1.count * a0.step + j0 * a0.tap_step;
      if (in0 < 0 || in0 >= a0.size) continue;
      for (int64_t j1 = 0; j1 < a1.taps; ++j1) {
        const int64_t in1 = a1.first + line % a1.count * a1.step + j1 * a1.tap_step;
        if (in1 < 0 || in1 >= a1.size) continue;
        const A* entries = ring.Get(j0, in1, in0 * a1.size + in1, source, a2.size, product.channels,
                                    task.channel, channels);
        const int64_t tap = (j0 * a1.taps + j1) * a2.taps;
        for (int64_t member = 0; member < product.fan; ++member) {
          lines[count++] = {entries + member * ring.plane(),
                            member * kernel_plane + tap * kLanes<A>};
        }
      }
    }
    return count;
  }

  // Prefetches part `part` of `parts` of the lines that the last taps of a line of results read.
  JAXOPS_ALWAYS_INLINE void Prefetch(const Ring<S>& ring, int64_t line, int64_t channels,
                                     int64_t part, int64_t parts) const {
    const auto& [a0, a1, a2] = product.axes;
    const S* source = static_cast<const S*>(product.sources[task.image]);
    const int64_t in1 = a1.first + line % a1.count * a1.step + (a1.taps - 1) * a1.tap_step;
    if (a1.taps == 0 || in1 < 0 || in1 >= a1.size) return;
    for (int64_t j0 = 0; j0 < a0.taps; ++j0) {
      const int64_t in0 = a0.first + line / a1.count * a0.step + j0 * a0.tap_step;
      if (in0 < 0 || in0 >= a0.size) continue;
      ring.Prefetch(in0 * a1.size + in1, source, a2.size, product.channels, task.channel, channels,
                    part, parts);
    }
  }

  // Computes a line of results of one vector of channels.
  void ConvolveVector(const Shifted<A>& taps, int64_t line, int64_t channel, int64_t lanes,
                      bool is_finite, A* sums) const {
    const auto& [a0, a1, a2] = product.axes;
    const int64_t out0 = a0.result_first + line / a1.count * a0.result_step;
    const int64_t out1 = a1.result_first + line % a1.count * a1.result_step;
    const int64_t first = (out0 * a1.result_size + out1) * a2.result_size + a2.result_first;
    void* result = EntryAt(product.results[task.image], first * product.channels + channel,
                           product.finish.dtype);
    const int64_t result_stride = a2.result_step * product.channels;
    // Sums that are results are written there.
    const bool is_direct = SizeOf(product.finish.dtype) == sizeof(A) && lanes == kLanes<A> &&
                           product.finish.activation == Activation::kNone && !product.finish.bias;
    A* to = is_direct ? static_cast<A*>(result) : sums;
    const int64_t stride = is_direct ? result_stride : kLanes<A>;
    if (!is_finite) {
      ConvolveInside(taps, a2, to, stride);
    } else if (a2.step != 1) {
      ConvolveLine<0>(taps, a2.taps, a2.count, a2.step, a2.tap_step, to, stride);
    } else {
      const bool is_done =
          a2.tap_step == 1 && (TryNeighbours<3>(taps, a2.taps, a2.count, to, stride) ||
                               TryNeighbours<5>(taps, a2.taps, a2.count, to, stride) ||
                               TryNeighbours<7>(taps, a2.taps, a2.count, to, stride));
      if (!is_done) ConvolveLine<1>(taps, a2.taps, a2.count, 1, a2.tap_step, to, stride);
    }
    if (is_direct) return;
    FinishPixels(product.finish, sums, kLanes<A>, a2.count, channel, lanes, result, result_stride);
  }

  void Run(char* memory) const {
    const auto& [a0, a1, a2] = product.axes;
    const int64_t channels = Min(task.vectors * kLanes<A>, product.channels - task.channel);
    const int64_t slots = Slots(a1) + kLines - 1;
    const Ring<S> ring(Width(a2), a2.first, a0.taps, slots, product.fan, product.columns, memory);
    memory += Ring<S>::Bytes(Width(a2), a0.taps, slots, task.vectors * product.fan);
    auto* lines = reinterpret_cast<LineOfTaps<A>*>(memory);
    const int64_t max_lines = a0.taps * a1.taps * product.fan + 1;
    memory += Aligned(max_lines * kLines * sizeof(LineOfTaps<A>));
    A* kernel = reinterpret_cast<A*>(memory);
    const int64_t of_vector = product.fan * a0.taps * a1.taps * a2.taps * kLanes<A>;
    A* sums = kernel + task.vectors * of_vector;
    CopyKernel(channels, kernel);
    const bool is_finite = AreFinite(kernel, CeilDiv(channels, kLanes<A>) * of_vector);
    // Copies wait for lines that hardware does not prefetch: (32,128,28,28,128,3) f32 in 32 groups
    // took 3.52 ms and takes 3.17. Depthwise gains nothing.
    const bool prefetches = product.fan > 1 || product.columns > 1;
    for (int64_t line = task.line_begin; line < task.line_end;) {
      // Neighbouring lines share most of the lines that they read.
      int64_t counts[kLines];
      int64_t block = 0;
      do {
        counts[block] = FindLines(ring, line + block, channels, lines + block * max_lines);
        ++block;
      } while (block < kLines && line + block < task.line_end && a1.step == 1 &&
               (line + block) % a1.count != 0);
      for (int64_t c = 0; c < channels; c += kLanes<A>) {
        const int64_t vector = c / kLanes<A>;
        for (int64_t i = 0; i < block; ++i) {
          if (prefetches && line + block + i < task.line_end) {
            Prefetch(ring, line + block + i, channels, vector, CeilDiv(channels, kLanes<A>));
          }
          const Shifted<A> taps = {lines + i * max_lines, counts[i],
                                   vector * product.fan * ring.plane(),
                                   kernel + vector * of_vector};
          ConvolveVector(taps, line + i, task.channel + c, Min(kLanes<A>, channels - c), is_finite,
                         sums);
        }
      }
      line += block;
    }
  }
};

int64_t ConvolveSpace(const Product& product, int64_t vectors) {
  int64_t bytes = 0;
  WithStorage(product.dtype, nullptr, 0,
              [&]<typename S>(const S*) { bytes = SpaceOf<S>(product, vectors); });
  return bytes;
}

void Convolve(const Product& product, const Task& task, void* memory) {
  WithStorage(product.dtype, nullptr, 0, [&]<typename S>(const S*) {
    Convolver<S>{product, task}.Run(static_cast<char*>(memory));
  });
}

// --- the kernel gradient -------------------------------------------------------------------------

// Adds products of `count` cotangents with `kTaps` taps of `kCount` lines.
template <int kCount, int kTaps, typename A>
void AddTaps(const A* const* lines, const A* cotangent, int64_t count, int64_t step,
             int64_t tap_step, A* const* sums) {
  Vec<A> total[kCount][kTaps];
  const A* sources[kCount];
#pragma GCC unroll 4
  for (int l = 0; l < kCount; ++l) {
    sources[l] = lines[l];
#pragma GCC unroll 8
    for (int tap = 0; tap < kTaps; ++tap) total[l][tap] = Load(sums[l] + tap * kLanes<A>);
  }
  for (int64_t i = 0; i < count; ++i) {
    const Vec<A> entry = Load(cotangent);
#pragma GCC unroll 4
    for (int l = 0; l < kCount; ++l) {
#pragma GCC unroll 8
      for (int tap = 0; tap < kTaps; ++tap) {
        const Vec<A> source = Load(sources[l] + tap * tap_step * kLanes<A>);
        total[l][tap] = MultiplyAdd(entry, source, total[l][tap]);
      }
      sources[l] += step * kLanes<A>;
    }
    cotangent += kLanes<A>;
  }
#pragma GCC unroll 4
  for (int l = 0; l < kCount; ++l) {
#pragma GCC unroll 8
    for (int tap = 0; tap < kTaps; ++tap) Store(total[l][tap], sums[l] + tap * kLanes<A>);
  }
}

// The same for any number of lines of `taps` taps, of which there are at most kMaxTaps.
template <typename A>
JAXOPS_NEVER_INLINE void AddLines(const A* const* lines, int64_t line_count, int64_t taps,
                                  const A* cotangent, int64_t count, int64_t step, int64_t tap_step,
                                  A* const* sums) {
  const auto add = [&](auto number) {
    constexpr int kTaps = decltype(number)::value;
    // Fewer sums would wait for each other.
    constexpr int kCount = kTaps <= 3 ? 3 : kTaps <= 5 ? 2 : 1;
    int64_t l = 0;
    for (; l + kCount <= line_count; l += kCount) {
      AddTaps<kCount, kTaps>(lines + l, cotangent, count, step, tap_step, sums + l);
    }
    for (; l < line_count && kCount > 1; ++l) {
      AddTaps<1, kTaps>(lines + l, cotangent, count, step, tap_step, sums + l);
    }
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

// Lines of taps of a line of cotangents that are added at a time.
constexpr int kMaxLines = 32;

template <typename S>
int64_t GradSpaceOf(const GradProduct& product, int64_t vectors) {
  const auto& [d0, d1, d2] = product.dims;
  return Ring<S>::Bytes(Width(d2), d0.taps, Slots(d1), vectors * product.fan) +
         vectors * (product.fan * d0.taps * d1.taps * d2.taps + d2.out) * kVectorBytes;
}

template <typename S>
struct GradSummer {
  using A = Arithmetic<S>;

  const GradProduct& product;
  const GradTask& task;

  // Adds the products of a line of cotangents of one vector of channels.
  void AddLine(const A* const* lines, A* const* sums, int64_t count, const A* cotangents) const {
    const im2col::Window& window = product.dims[2];
    const bool is_finite = AreFinite(cotangents, window.out * kLanes<A>);
    const int64_t per_loop = is_finite ? kMaxTaps : 1;
    for (int64_t tap = 0; tap < window.taps; tap += per_loop) {
      // Cotangents that are not finite are not multiplied by zeros of the padding.
      int64_t low = 0, high = window.out;
      const int64_t first = tap * window.dilation - window.low;
      if (!is_finite) {
        low = first < 0 ? CeilDiv(-first, window.stride) : 0;
        high = first < window.in ? Min(high, CeilDiv(window.in - first, window.stride)) : 0;
        if (low >= high) continue;
      }
      const A* sources[kMaxLines];
      A* to[kMaxLines];
      for (int64_t i = 0; i < count; ++i) {
        sources[i] = lines[i] + (low * window.stride + tap * window.dilation) * kLanes<A>;
        to[i] = sums[i] + tap * kLanes<A>;
      }
      AddLines(sources, count, Min(per_loop, window.taps - tap), cotangents + low * kLanes<A>,
               high - low, window.stride, window.dilation, to);
    }
  }

  // Entries of sums of a tap, and of a vector of channels: sums are (vectors, taps of the first two
  // dimensions, fan, taps of the last one, lanes).
  int64_t plane() const {
    const auto& [d0, d1, d2] = product.dims;
    return d0.taps * d1.taps * product.fan * d2.taps * kLanes<A>;
  }

  void Run(char* memory, A* result, int64_t stride) const {
    const auto& [d0, d1, d2] = product.dims;
    const int64_t channels = Min(task.vectors * kLanes<A>, product.channels - task.channel);
    const int64_t planes = task.vectors * product.fan;
    A* sums = reinterpret_cast<A*>(memory + Ring<S>::Bytes(Width(d2), d0.taps, Slots(d1), planes));
    A* cotangents = sums + task.vectors * plane();
    for (int64_t i = 0; i < task.vectors * plane(); ++i) sums[i] = 0;
    for (int64_t line = task.line_begin; line < task.line_end;) {
      const int64_t image = line / d1.out / d0.out;
      const int64_t end = Min(task.line_end, (image + 1) * d0.out * d1.out);
      const Ring<S> ring(Width(d2), -d2.low, d0.taps, Slots(d1), product.fan, product.columns,
                         memory);
      for (; line < end; ++line) AddImageLine(ring, image, line, channels, cotangents, sums);
    }
    for (int64_t c = 0; c < channels; c += kLanes<A>) {
      const A* from = sums + c / kLanes<A> * plane();
      for (int64_t line = 0; line < d0.taps * d1.taps; ++line) {
        for (int64_t member = 0; member < product.fan; ++member) {
          for (int64_t tap = 0; tap < d2.taps; ++tap, from += kLanes<A>) {
            A* to = result + ((line * d2.taps + tap) * product.fan + member) * stride + c;
            StoreUpTo(Load(from), to, channels - c);
          }
        }
      }
    }
  }

  void AddImageLine(const Ring<S>& ring, int64_t image, int64_t line, int64_t channels,
                    A* cotangents, A* sums) const {
    const auto& [d0, d1, d2] = product.dims;
    const int64_t out1 = line % d1.out;
    const int64_t out0 = line / d1.out % d0.out;
    const S* source = static_cast<const S*>(product.sources[image]);
    const S* from = static_cast<const S*>(product.cotangents[image]) + task.channel +
                    (out0 * d1.out + out1) * d2.out * product.channels;
    CopyPixels(from, product.channels, channels, d2.out, cotangents, d2.out * kLanes<A>);
    const A* lines[kMaxLines];
    A* to[kMaxLines];
    int64_t count = 0;
    const auto add = [&] {
      for (int64_t c = 0; c < channels; c += kLanes<A>) {
        AddLine(lines, to, count, cotangents + c * d2.out);
        for (int64_t i = 0; i < count; ++i) {
          lines[i] += product.fan * ring.plane();
          to[i] += plane();
        }
      }
      count = 0;
    };
    for (int64_t t0 = 0; t0 < d0.taps; ++t0) {
      const int64_t in0 = out0 * d0.stride + t0 * d0.dilation - d0.low;
      if (in0 < 0 || in0 >= d0.in) continue;
      for (int64_t t1 = 0; t1 < d1.taps; ++t1) {
        const int64_t in1 = out1 * d1.stride + t1 * d1.dilation - d1.low;
        if (in1 < 0 || in1 >= d1.in) continue;
        const A* entries = ring.Get(t0, in1, in0 * d1.in + in1, source, d2.in, product.channels,
                                    task.channel, channels);
        for (int64_t member = 0; member < product.fan; ++member) {
          lines[count] = entries + member * ring.plane();
          to[count] = sums + ((t0 * d1.taps + t1) * product.fan + member) * d2.taps * kLanes<A>;
          if (++count == kMaxLines) add();
        }
      }
    }
    if (count > 0) add();
  }
};

int64_t GradSpace(const GradProduct& product, int64_t vectors) {
  int64_t bytes = 0;
  WithStorage(product.dtype, nullptr, 0,
              [&]<typename S>(const S*) { bytes = GradSpaceOf<S>(product, vectors); });
  return bytes;
}

void Grad(const GradProduct& product, const GradTask& task, void* memory, void* sums,
          int64_t stride) {
  WithStorage(product.dtype, nullptr, 0, [&]<typename S>(const S*) {
    GradSummer<S>{product, task}.Run(static_cast<char*>(memory), static_cast<Arithmetic<S>*>(sums),
                                     stride);
  });
}

}  // namespace

const Kernels kKernels = {kVectorBytes, ConvolveSpace, Convolve, GradSpace, Grad};

}  // namespace jaxops::conv::cpu::depthwise::JAXOPS_ISA
