#include "cpu/im2col_kernels.h"

#include <cstdint>

#include "cpu/simd.h"

namespace jaxops::im2col::cpu::JAXOPS_ISA {
namespace {

using namespace jaxops::cpu::JAXOPS_ISA;

// Returns the patch that has entry `in` of the image at `tap`, or -1.
JAXOPS_ALWAYS_INLINE int64_t PatchOf(const Window& window, int64_t in, int64_t tap) {
  int64_t out = in + window.low - tap * window.dilation;
  if (window.stride != 1) {  // a division takes longer than a few sums
    if (out < 0 || out % window.stride != 0) return -1;
    out /= window.stride;
  }
  return 0 <= out && out < window.out ? out : -1;
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
// apart, to a line of the image, for windows with strides.
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
    for (int64_t out = low; out < high; out += kLanes<A>) {
      const int64_t count = high - out < kLanes<A> ? high - out : kLanes<A>;
      const Vec<A> some = LoadUpTo(lines + out, count);
      for (int64_t i = 0; i < count; ++i, at += window.stride) *at += some[i];
    }
  }
}

// The lines of patches whose sum is a line of the image, or one entry of it with its channels. The
// sums of kMax lines stay in registers.
template <typename S>
class Sources {
 public:
  using A = Arithmetic<S>;

  // Sums fetch what is `ahead` entries beyond what they add, unless that is zero.
  Sources(const S* patches, int64_t ahead) : patches_(patches), ahead_(ahead) {}

  // Adds the sources to the sums of `width` entries, which count as zero before the first call.
  void Flush(int64_t width, A* sums) {
    Sum(width, sums, sums);
    has_sums_ = true;
  }

  // The same for the last sources, and stores the result.
  void Finish(int64_t width, const A* sums, S* result) {
    Sum(width, sums, result);
    has_sums_ = false;
  }

  // Tells whether Flush is to precede Add.
  bool IsFull() const { return count_ == kMax; }

  // Adds a source: entry i of [begin, end) is at patches[offset + i].
  void Add(int64_t offset, int64_t begin, int64_t end) {
    sources_[count_++] = {offset, begin, end};
  }

 private:
  static constexpr int kMax = 64;

  struct Source {
    int64_t offset, begin, end;
  };

  template <typename R>
  void Sum(int64_t width, const A* sums, R* result) {
    for (int64_t i = 0; i < width; i += 4 * kLanes<A>) {
      const int64_t count = width - i;
      if (count > 3 * kLanes<A>) {
        SumVectors<4>(i, count, sums, result);
      } else if (count > 2 * kLanes<A>) {
        SumVectors<3>(i, count, sums, result);
      } else if (count > kLanes<A>) {
        SumVectors<2>(i, count, sums, result);
      } else {
        SumVectors<1>(i, count, sums, result);
      }
    }
    count_ = 0;
  }

  // Sums kVectors vectors of the `count` entries from i on, or all of them if these are fewer.
  template <int kVectors, typename R>
  JAXOPS_ALWAYS_INLINE void SumVectors(int64_t i, int64_t count, const A* sums, R* result) const {
    constexpr int kLast = (kVectors - 1) * kLanes<A>;
    const int64_t tail = Clamp(count - kLast);
    Vec<A> sum[kVectors] = {};
    if (has_sums_) {
      for (int v = 0; v < kVectors; ++v) {
        sum[v] = LoadUpTo(sums + i + v * kLanes<A>, count - v * kLanes<A>);
      }
    }
    for (int n = 0; n < count_; ++n) {
      const Source& source = sources_[n];
      const S* from = patches_ + (source.offset + i);
      if (ahead_ != 0) __builtin_prefetch(from + ahead_);
      if (source.begin <= i && i + kLast + tail <= source.end) {
        for (int v = 0; v < kVectors - 1; ++v) sum[v] += Load(from + v * kLanes<A>);
        sum[kVectors - 1] += LoadLanes(from + kLast, 0, tail);
        continue;
      }
      for (int v = 0; v < kVectors; ++v) {
        const int64_t low = Clamp(source.begin - i - v * kLanes<A>);
        const int64_t high = Clamp(source.end - i - v * kLanes<A>);
        if (low < high) sum[v] += LoadLanes(from + v * kLanes<A>, low, high);
      }
    }
    for (int v = 0; v < kVectors - 1; ++v) Store(sum[v], result + i + v * kLanes<A>);
    StoreUpTo(sum[kVectors - 1], result + i + kLast, tail);
  }

  static int64_t Clamp(int64_t lane) { return lane < 0 ? 0 : lane > kLanes<A> ? kLanes<A> : lane; }

  const S* patches_;
  int64_t ahead_;
  bool has_sums_ = false;
  int count_ = 0;
  Source sources_[kMax];
};

// The image has the type of the patches; f32 and f64 are summed in the result itself.
template <typename S>
void MakeLines(const Call& call, const S* patches, int64_t begin, int64_t end, float* buffer) {
  using A = Arithmetic<S>;
  const auto& [d0, d1, d2] = call.dims;
  const int64_t channels = call.channels;
  const int64_t width = d2.in * channels;
  const int64_t plane = d0.out * d1.out * d2.out;
  const bool sums_lines = !call.channels_last && d2.stride == 1;
  const bool sums_entries = call.channels_last && channels >= kLanes<A>;
  Sources<S> sources(patches, sums_lines ? 0 : call.taps() * channels);
  int64_t in1 = begin % d1.in;
  int64_t in0 = begin / d1.in % d0.in;
  int64_t row = begin / d1.in / d0.in;
  const auto advance = [&] {
    if (++in1 < d1.in) return;
    in1 = 0;
    if (++in0 < d0.in) return;
    in0 = 0;
    ++row;
  };
  for (int64_t line = begin; line < end; ++line, advance()) {
    S* result = static_cast<S*>(call.to) + line * width;
    A* sums;
    if constexpr (sizeof(S) == sizeof(A)) {
      sums = result;
    } else {
      sums = buffer;
    }
    // Calls f with the offsets of the lines of patches that add up to the line of the image, at the
    // first tap of the last dimension.
    const auto for_each_line = [&](auto f) __attribute__((always_inline)) {
      for (int64_t tap0 = 0; tap0 < d0.taps; ++tap0) {
        const int64_t out0 = PatchOf(d0, in0, tap0);
        if (out0 < 0) continue;
        for (int64_t tap1 = 0; tap1 < d1.taps; ++tap1) {
          const int64_t out1 = PatchOf(d1, in1, tap1);
          if (out1 < 0) continue;
          const int64_t tap = (tap0 * d1.taps + tap1) * d2.taps;
          if (call.channels_last) {
            const int64_t patch = ((row * d0.out + out0) * d1.out + out1) * d2.out;
            f((patch * call.taps() + tap) * channels);
          } else {
            f((row * call.taps() + tap) * plane + (out0 * d1.out + out1) * d2.out);
          }
        }
      }
    };
    if (sums_lines) {
      for_each_line([&](int64_t offset) {
        for (int64_t tap = 0; tap < d2.taps; ++tap) {
          const int64_t first = EntryOf(d2, 0, tap);
          const int64_t last = first + d2.out < d2.in ? first + d2.out : d2.in;
          if (sources.IsFull()) sources.Flush(width, sums);
          sources.Add(offset + tap * plane - first, first > 0 ? first : 0, last);
        }
      });
      sources.Finish(width, sums, result);
    } else if (sums_entries) {
      for (int64_t in2 = 0; in2 < d2.in; ++in2) {
        for_each_line([&](int64_t offset) {
          for (int64_t tap = 0; tap < d2.taps; ++tap) {
            const int64_t out = PatchOf(d2, in2, tap);
            if (out < 0) continue;
            if (sources.IsFull()) sources.Flush(channels, sums + in2 * channels);
            sources.Add(offset + (out * call.taps() + tap) * channels, 0, channels);
          }
        });
        sources.Finish(channels, sums + in2 * channels, result + in2 * channels);
      }
    } else {
      for (int64_t i = 0; i < width; ++i) sums[i] = 0;
      for_each_line([&](int64_t offset) {
        if (call.channels_last) {
          AddChannelsLast(call, patches + offset, sums);
        } else {
          AddChannelsFirst(call, patches + offset, plane, sums);
        }
      });
      if constexpr (sizeof(S) != sizeof(A)) {
        for (int64_t i = 0; i < width; i += kLanes<A>) {
          StoreUpTo(LoadUpTo(sums + i, width - i), result + i, width - i);
        }
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
