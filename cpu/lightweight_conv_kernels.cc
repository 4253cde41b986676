#include "cpu/lightweight_conv_kernels.h"

#include <cstdint>

#include "cpu/activations.h"
#include "cpu/simd.h"

namespace jaxops::lightweight_conv::cpu::JAXOPS_ISA {
namespace {

using namespace jaxops::cpu::JAXOPS_ISA;

// A tile has enough independent sums to hide the latency of a fused multiply-add.
constexpr int kTile = 8;

// Calls f with `n`, in [1, kTile], as a compile-time constant.
template <typename F>
JAXOPS_ALWAYS_INLINE void WithTile(int64_t n, F f) {
  static_assert(kTile == 8);
  switch (n) {
    case 1:
      return f(Constant<1>());
    case 2:
      return f(Constant<2>());
    case 3:
      return f(Constant<3>());
    case 4:
      return f(Constant<4>());
    case 5:
      return f(Constant<5>());
    case 6:
      return f(Constant<6>());
    case 7:
      return f(Constant<7>());
    default:
      return f(Constant<8>());
  }
}

constexpr int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t Max(int64_t a, int64_t b) { return a < b ? b : a; }
constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// An odd number of vectors between panels keeps them from competing for the same cache sets.
constexpr int64_t OddPitch(int64_t vectors) { return vectors | 1; }

// The layout of a block in panels.
template <typename A, DataFormat kFormat>
struct PanelLayout {
  static constexpr bool kTimeInLanes = kFormat == DataFormat::kNCT;

  PanelLayout(const Geometry& geometry, const Block& block)
      : channels(block.channel_end - block.channel_begin),
        steps(block.time_end - block.time_begin),
        panels(kTimeInLanes ? channels : CeilDiv(channels, kLanes<A>)),
        vectors(kTimeInLanes ? CeilDiv(steps, kLanes<A>) : steps),
        tap_stride(kTimeInLanes ? geometry.dilation : geometry.dilation * kLanes<A>),
        taps_per_group(Min(geometry.taps, 1 + kMaxTapSpan / geometry.dilation)) {}

  int64_t channels;
  int64_t steps;
  int64_t panels;
  int64_t vectors;     // of a panel, without the steps around it that taps reach
  int64_t tap_stride;  // entries between neighbouring taps in a panel
  int64_t taps_per_group;
};

// Copies the rows of the state into the steps [0, end) of panels with channels in lanes; the first
// is step `first` of the sequence.
template <typename A>
void PackState(const PanelLayout<A, DataFormat::kNTC>& layout, const Geometry& geometry,
               const Segments& segments, int64_t channel_begin, int64_t first, int64_t end,
               int64_t pitch, A* panels) {
  const int64_t row = geometry.padding + first;
  WithStorage(segments.state_dtype, segments.state, 0, [&](auto state) {
    A channels[kMaxBlockChannels] = {};
    for (int64_t i = 0; i < end; ++i) {
      Widen(state + (row + i) * geometry.channels + channel_begin, layout.channels, channels);
      for (int64_t p = 0; p < layout.panels; ++p) {
        Store(Load(channels + p * kLanes<A>), panels + p * pitch + i * kLanes<A>);
      }
    }
  });
}

// Copies `steps` steps of channel c, whose step 0 is at `row`, from step `first` on: those before
// the sequence are of its state, if there is one, and others outside of it are zero.
template <typename S, typename A>
void PackSteps(const Geometry& geometry, const Segments& segments, int64_t c, int64_t first,
               int64_t steps, const S* row, A* window) {
  constexpr int kLane = kLanes<A>;
  const int64_t begin = Min(Max(-first, 0), steps);
  const int64_t end = Min(Max(geometry.time - first, begin), steps);
  // Zeros are stored as whole vectors: the entries that they overwrite are stored afterwards.
  for (int64_t i = 0; i < begin; i += kLane) Store(Vec<A>{}, window + i);
  for (int64_t i = end; i < steps; i += kLane) Store(Vec<A>{}, window + i);
  Widen(row + (first + begin), end - begin, window + begin);
  if (segments.state != nullptr && segments.slots == nullptr) {
    WithStorage(segments.state_dtype, segments.state,
                c * geometry.padding + geometry.padding + first,
                [&](auto state) { Widen(state, begin, window); });
  }
}

// Copies the steps from `first` on into panels, with the `span` further steps that the taps of the
// block reach. Steps before the sequence are those of its state, if there is one. Other steps
// outside the sequence and channels past the block are zero. With segments and NTC, one more step
// of zeros follows. Returns the pitch.
template <DataFormat kFormat, typename S, typename A>
int64_t PackPanels(const PanelLayout<A, kFormat>& layout, const Geometry& geometry,
                   const Segments& segments, int64_t channel_begin, int64_t first, int64_t span,
                   const S* x, A* panels) {
  constexpr int kLane = kLanes<A>;
  const int64_t steps = (layout.kTimeInLanes ? layout.vectors * kLane : layout.vectors) + span;
  if constexpr (layout.kTimeInLanes) {
    const int64_t pitch = OddPitch(CeilDiv(steps, kLane)) * kLane;
    for (int64_t i = 0; i < layout.channels; ++i) {
      const int64_t c = channel_begin + i;
      PackSteps(geometry, segments, c, first, steps, x + c * geometry.time, panels + i * pitch);
    }
    return pitch;
  } else {
    const bool has_state = segments.state != nullptr && segments.slots == nullptr;
    const int64_t begin = Min(Max(-first, 0), steps);
    const int64_t end = Min(Max(geometry.time - first, begin), steps);
    const int64_t zeros = segments.starts != nullptr ? 1 : 0;
    const int64_t pitch = OddPitch(steps + zeros) * kLane;
    const int64_t whole = layout.channels / kLane;
    const int64_t rest = layout.channels % kLane;
    for (int64_t p = 0; p < layout.panels; ++p) {
      A* to = panels + p * pitch;
      for (int64_t i = 0; i < begin * kLane; ++i) to[i] = 0;
      for (int64_t i = end * kLane; i < (steps + zeros) * kLane; ++i) to[i] = 0;
    }
    if (has_state && begin > 0) {
      PackState(layout, geometry, segments, channel_begin, first, begin, pitch, panels);
    }
    for (int64_t t = begin; t < end; ++t) {
      const S* from = x + (first + t) * geometry.channels + channel_begin;
      A* to = panels + t * kLane;
      // Processors stop prefetching at the ends of pages. With this, and blocks of 1024 channels in
      // place of 512, (32,128,1024) f32 with 7 taps took 1.8 ms instead of 2.1.
      const S* ahead = t + 2 < end ? from + 2 * geometry.channels : from;
      for (int64_t p = 0; p < whole; ++p) {
        __builtin_prefetch(ahead + p * kLane);
        Store(Load(from + p * kLane), to + p * pitch);
      }
      if (rest > 0) Store(LoadPartial(from + whole * kLane, rest), to + whole * pitch);
    }
    return pitch;
  }
}

// An integer of the width of an arithmetic type.
template <typename A>
using Mark = decltype(typename Simd<A>::Int{}[0] + 0);

// Marks of steps outside the sequence; no segment starts there.
constexpr int32_t kBefore = INT32_MIN;
constexpr int32_t kAfter = INT32_MAX;
constexpr int32_t kNever = INT32_MIN + 1;  // is no mark in a window

// The segments of a block: the starts of its steps and of those that a group of taps reaches.
template <typename A, DataFormat kFormat>
class Marks {
 public:
  Marks(const PanelLayout<A, kFormat>& layout, const Geometry& geometry, const Block& block,
        const Segments& segments)
      : layout_(layout),
        dilation_(geometry.dilation),
        exists_(segments.starts != nullptr),
        own_(static_cast<Mark<A>*>(segments.marks)),
        window_(own_ + CeilDiv(layout.steps, kMaxLanes) * kMaxLanes),
        table_(static_cast<int32_t*>(segments.table)) {
    if (!exists_) return;
    const int64_t padded = CeilDiv(layout.steps, kMaxLanes) * kMaxLanes;
    for (int64_t i = 0; i < layout.steps; ++i) own_[i] = segments.starts[block.time_begin + i];
    for (int64_t i = layout.steps; i < padded; ++i) own_[i] = kNever;
  }

  // Sets the window to a group of taps of which the first reads step `first` first.
  void SetTaps(const Geometry& geometry, const Segments& segments, int64_t first, int64_t taps) {
    taps_ = taps;
    if (!exists_) return;
    const int32_t* starts = segments.starts;
    const int64_t span = (taps - 1) * dilation_;
    const int64_t count =
        (layout_.kTimeInLanes ? layout_.vectors * kLanes<A> : layout_.steps) + span;
    const int64_t begin = Min(Max(-first, 0), count);
    const int64_t end = Min(Max(geometry.time - first, begin), count);
    for (int64_t i = 0; i < begin; ++i) {
      window_[i] = starts[0] < 0 && first + i >= starts[0] ? starts[0] : kBefore;
    }
    for (int64_t i = begin; i < end; ++i) window_[i] = starts[first + i];
    for (int64_t i = end; i < count; ++i) window_[i] = kAfter;
    if constexpr (!layout_.kTimeInLanes) {
      for (int64_t k = 0; k < taps; ++k) {
        const Mark<A>* reached = window_ + k * dilation_;
        int32_t* rows = table_ + k * layout_.steps;
        for (int64_t i = 0; i < layout_.steps; ++i) {
          const int64_t row = reached[i] == own_[i] ? i + k * dilation_ : count;
          rows[i] = static_cast<int32_t>(row * kLanes<A>);
        }
      }
    }
  }

  // Tells whether all taps of the vectors [i, i + count) are of one segment. Marks do not decrease,
  // neither in the window nor among the block's own.
  bool AreOne(int64_t i, int64_t count) const {
    if (!exists_) return true;
    const int64_t lanes = layout_.kTimeInLanes ? kLanes<A> : 1;
    const int64_t first = i * lanes, last = Min((i + count) * lanes, layout_.steps) - 1;
    const Mark<A> mark = own_[first];
    return mark == own_[last] && mark == window_[first] &&
           mark == window_[last + (taps_ - 1) * dilation_];
  }

  // What tap k of the block's vector i reads in a panel, with zero for other segments.
  JAXOPS_ALWAYS_INLINE Vec<A> Read(const A* panel, int64_t i, int64_t k) const {
    if constexpr (layout_.kTimeInLanes) {
      using Int = typename Simd<A>::Int;
      const int64_t at = i * kLanes<A> + k * dilation_;
      const Int same = LoadBits<Int>(own_ + i * kLanes<A>) == LoadBits<Int>(window_ + at);
      return BitCast<Vec<A>>(BitCast<Int>(Load(panel + at)) & same);
    } else {
      return Load(panel + table_[k * layout_.steps + i]);
    }
  }

 private:
  PanelLayout<A, kFormat> layout_;
  int64_t dilation_;
  int64_t taps_ = 0;
  bool exists_;
  Mark<A>* own_;
  Mark<A>* window_;
  int32_t* table_;
};

// Reads what tap k of vector i reads in a panel where all taps are of one segment.
template <typename A>
struct PanelReader {
  JAXOPS_ALWAYS_INLINE Vec<A> operator()(int64_t i, int64_t k) const {
    return Load(panel + i * kLanes<A> + k * tap_stride);
  }

  const A* panel;
  int64_t tap_stride;
};

// The same from vector `first` on of a block with segments.
template <typename A, DataFormat kFormat>
struct MarkedReader {
  JAXOPS_ALWAYS_INLINE Vec<A> operator()(int64_t i, int64_t k) const {
    return marks.Read(panel, first + i, k);
  }

  const Marks<A, kFormat>& marks;
  const A* panel;
  int64_t first;
};

// Calls f with each of 0, ..., kEnd - 1 as a compile-time constant.
template <int kEnd, typename F>
JAXOPS_ALWAYS_INLINE void ForEachConstant(F f) {
  if constexpr (kEnd > 0) {
    ForEachConstant<kEnd - 1>(f);
    f(Constant<kEnd - 1>());
  }
}

// sum[i] += sum_k weight[k] * x[i + k] for kCount vectors of neighbouring steps: what a tap reads
// is shifted out of vectors that are loaded for as many taps as there are lanes. A vector that is
// loaded for one tap crosses a cache line: with 31 taps in float32 a multiply-add took 0.56 ns on a
// core of an EPYC, and takes 0.44.
template <int kCount, typename X, typename A>
JAXOPS_ALWAYS_INLINE void ConvolveShifts(const X* x, const A* weight, int64_t taps,
                                         Vec<A> (&sum)[kCount]) {
  constexpr int kLane = kLanes<A>;
  for (int64_t k = 0; k < taps; k += kLane) {
    Vec<A> row[kCount + 1];
#pragma GCC unroll 9
    for (int i = 0; i <= kCount; ++i) row[i] = Load(x + k + i * kLane);
    ForEachConstant<kLane>([&](auto lane) __attribute__((always_inline)) {
      if (k + lane.value >= taps) return;
      const Vec<A> w = Broadcast(weight[k + lane.value]);
#pragma GCC unroll 8
      for (int i = 0; i < kCount; ++i) {
        sum[i] = MultiplyAdd(w, Shift<lane.value>(row[i], row[i + 1]), sum[i]);
      }
    });
  }
}

// The panels of one tile, and the distances between their steps and between their weights.
struct TilePanels {
  int64_t count;
  int64_t pitch;
  int64_t weight_pitch;
};

// sums[i] (+)= sum_k weight[k] * read(i, k) for `count` vectors, at most kTile, of every panel.
template <DataFormat kFormat, typename A, typename R>
__attribute__((noinline)) void ConvolveTile(TilePanels panels, R read, const A* weight,
                                            int64_t taps, int64_t count, bool add, A* sums) {
  WithTile(count, [&](auto constant) __attribute__((always_inline)) {
    for (int64_t p = 0; p < panels.count; ++p) {
      Vec<A> sum[constant.value] = {};
      if (add) {
#pragma GCC unroll 8
        for (int i = 0; i < constant.value; ++i) sum[i] = Load(sums + i * kLanes<A>);
      }
      bool is_shifted = false;
      if constexpr (kHasShifts && kFormat == DataFormat::kNCT && __is_same(R, PanelReader<A>)) {
        is_shifted = read.tap_stride == 1;
        if (is_shifted) ConvolveShifts<constant.value>(read.panel, weight, taps, sum);
      }
      for (int64_t k = 0; k < taps && !is_shifted; ++k) {
        Vec<A> w;
        if constexpr (kFormat == DataFormat::kNTC) {
          w = Load(weight + k * kLanes<A>);
        } else {
          w = Broadcast(weight[k]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < constant.value; ++i) sum[i] = MultiplyAdd(w, read(i, k), sum[i]);
      }
#pragma GCC unroll 8
      for (int i = 0; i < constant.value; ++i) Store(sum[i], sums + i * kLanes<A>);
      read.panel += panels.pitch;
      weight += panels.weight_pitch;
      sums += kTile * kLanes<A>;
    }
  });
}

// One sum a tap is too few if taps are few: each multiply-add would wait for the one before.
template <int kTaps>
inline constexpr int kWaysOf = kTaps <= kTile / 4   ? 4
                               : kTaps <= kTile / 2 ? 2
                                                    : 1;

// dweight[k] += sum over the ways of sum[way][k], lane by lane.
template <int kWays, int kTaps, typename A>
JAXOPS_ALWAYS_INLINE void AddWays(const Vec<A> (&sum)[kWays][kTaps], A* dweight) {
#pragma GCC unroll 8
  for (int k = 0; k < kTaps; ++k) {
    Vec<A> total = sum[0][k];
#pragma GCC unroll 4
    for (int way = 1; way < kWays; ++way) total += sum[way][k];
    Store(Load(dweight + k * kLanes<A>) + total, dweight + k * kLanes<A>);
  }
}

// dweight[k] += sum_i g[i] * read(i, k) for kCount taps, lane by lane. Only the first `tail` lanes
// of the last, partial vector are added: x is not zero in its others.
template <int kCount, typename A, typename R>
JAXOPS_ALWAYS_INLINE void FilterGradTile(const A* g, R read, int64_t vectors, int64_t tail,
                                         A* dweight) {
  constexpr int kLane = kLanes<A>;
  constexpr int kWays = kWaysOf<kCount>;
  Vec<A> sum[kWays][kCount] = {};
  int64_t i = 0;
  for (; i + kWays <= vectors; i += kWays) {
#pragma GCC unroll 4
    for (int way = 0; way < kWays; ++way) {
      const Vec<A> gi = Load(g + (i + way) * kLane);
#pragma GCC unroll 8
      for (int k = 0; k < kCount; ++k) {
        sum[way][k] = MultiplyAdd(gi, read(i + way, k), sum[way][k]);
      }
    }
  }
  for (; i < vectors; ++i) {
    const Vec<A> gi = Load(g + i * kLane);
#pragma GCC unroll 8
    for (int k = 0; k < kCount; ++k) sum[0][k] = MultiplyAdd(gi, read(i, k), sum[0][k]);
  }
  if (tail > 0) {
    const Vec<A> gi = Load(g + vectors * kLane);
#pragma GCC unroll 8
    for (int k = 0; k < kCount; ++k) {
      sum[0][k] = MultiplyAdd(gi, KeepLanes<A>(read(vectors, k), tail), sum[0][k]);
    }
  }
  AddWays(sum, dweight);
}

template <typename A, typename R>
__attribute__((noinline)) void FilterGradPanel(const A* g, R read, int64_t vectors, int64_t tail,
                                               int64_t taps, A* dweight) {
  const auto tile = [&](auto count, int64_t k) __attribute__((always_inline)) {
    const auto read_tap = [read, k](int64_t i, int64_t tap)
                              __attribute__((always_inline)) { return read(i, k + tap); };
    FilterGradTile<count.value>(g, read_tap, vectors, tail, dweight + k * kLanes<A>);
  };
  int64_t k = 0;
  for (; k + kTile <= taps; k += kTile) tile(Constant<kTile>(), k);
  if (k == taps) return;
  WithTile(taps - k, [&](auto count) { tile(count, k); });
}

// y = act(sums + bias) for `count` steps; the sums of neighbouring panels are kTile vectors apart.
template <Activation kActivation, typename S, typename A>
JAXOPS_ALWAYS_INLINE void StoreRows(int64_t count, int64_t channels, int64_t row_pitch,
                                    const A* sums, const A* bias, S* y) {
  constexpr int kLane = kLanes<A>;
  const int64_t whole = channels / kLane;
  const int64_t rest = channels % kLane;
  for (int64_t i = 0; i < count; ++i) {
    const auto finished = [&](int64_t p) {
      return Activate<kActivation>(Load(sums + (p * kTile + i) * kLane) + Load(bias + p * kLane));
    };
    S* to = y + i * row_pitch;
    int64_t p = 0;
    for (; p + 2 <= whole; p += 2) StorePair(finished(p), finished(p + 1), to + p * kLane);
    if (p < whole) Store(finished(p), to + p * kLane);
    if (rest > 0) StorePartial(finished(whole), to + whole * kLane, rest);
  }
}

// y = act(sums + bias) for `steps` steps of one channel.
template <Activation kActivation, typename S, typename A>
JAXOPS_ALWAYS_INLINE void StoreSteps(int64_t steps, const A* sums, A bias, S* y) {
  constexpr int kLane = kLanes<A>;
  const auto finished = [&](int64_t i) { return Activate<kActivation>(Load(sums + i) + bias); };
  int64_t i = 0;
  for (; i + 2 * kLane <= steps; i += 2 * kLane) {
    StorePair(finished(i), finished(i + kLane), y + i);
  }
  for (; i + kLane <= steps; i += kLane) Store(finished(i), y + i);
  if (i < steps) StorePartial(finished(i), y + i, steps - i);
}

// Adds what the taps [tap, tap + taps) read in states of slots to the sums of `count` steps, which
// begin as zeros with the first tap. Returns whether there is anything to add to.
template <typename A>
bool AddSlots(const Convolve& args, const PanelLayout<A, DataFormat::kNTC>& layout, int64_t i,
              int64_t count, int64_t tap, int64_t taps, A* sums) {
  constexpr int kLane = kLanes<A>;
  const Geometry& geometry = args.geometry;
  const Segments& segments = args.segments;
  const A* weight = static_cast<const A*>(args.packed_weight);
  bool has_sums = tap > 0;
  for (int64_t j = 0; j < count; ++j) {
    const int64_t step = args.block.time_begin + i + j;
    const int64_t since = step - segments.starts[step];
    const int64_t slot = segments.slots[step];
    if (since < 0 || since >= geometry.padding || slot < 0 || slot >= segments.num_slots) continue;
    const int64_t end =
        Min(CeilDiv(geometry.padding - since, geometry.dilation), Min(tap + taps, geometry.taps));
    if (!has_sums) {
      for (int64_t p = 0; p < layout.panels; ++p) {
        for (int64_t n = 0; n < count; ++n) Store(Vec<A>{}, sums + (p * kTile + n) * kLane);
      }
      has_sums = true;
    }
    for (int64_t k = tap; k < end; ++k) {
      const int64_t row = slot * geometry.padding + since + k * geometry.dilation;
      A channels[kMaxBlockChannels] = {};
      WithStorage(segments.state_dtype, segments.state,
                  row * geometry.channels + args.block.channel_begin,
                  [&](auto from) { Widen(from, layout.channels, channels); });
      for (int64_t p = 0; p < layout.panels; ++p) {
        A* to = sums + (p * kTile + j) * kLane;
        const Vec<A> w = Load(weight + (p * geometry.taps + k) * kLane);
        Store(MultiplyAdd(w, Load(channels + p * kLane), Load(to)), to);
      }
    }
  }
  return has_sums;
}

// Steps that ConvolveRows computes together.
constexpr int kSteps = sizeof(Vec<float>) == 64 ? 8 : 4;

// Tells whether a block's taps can be read from rows of x in memory, where neighbouring steps share
// them. Packing such rows into panels takes longer than their few taps: (32,1024,128,16,7)
// takes 3.1 ms in panels on two cores of an EPYC in float32 and 1.9 in bfloat16, and 1.6 and 1.0
// without.
bool CanReadRows(const Convolve& args) {
  const Geometry& geometry = args.geometry;
  return geometry.dilation == 1 && geometry.taps <= kTile && args.segments.starts == nullptr &&
         args.segments.state == nullptr;
}

// y = act(sum + bias) for kCount steps from `step` on, in the order of a block's sums. A row of x
// that several of them read is loaded once. Rows outside the sequence are zeros, and are
// multiplied: a tap that is not finite shows there, too.
template <int kTaps, int kCount, typename S, typename A>
JAXOPS_ALWAYS_INLINE void ConvolveRows(const Convolve& args, int64_t step, const A* bias) {
  constexpr int kLane = kLanes<A>;
  constexpr int kWindow = kTaps + kCount - 1;
  const Geometry& geometry = args.geometry;
  const int64_t pitch = geometry.channels;
  const int64_t channels = args.block.channel_end - args.block.channel_begin;
  // Row r of the window is that of tap r of the first step.
  const int64_t first = step - geometry.padding;
  const int64_t begin = Max(0, -first);
  const int64_t end = Max(Min(kWindow, geometry.time - first), begin);
  const int64_t offset = first * pitch + args.block.channel_begin;
  const S* x = static_cast<const S*>(args.x);
  S* y = static_cast<S*>(args.y) + step * pitch + args.block.channel_begin;
  // The rows that the next steps read first.
  const int64_t fetched = Min(kCount, geometry.time - first - kWindow);

  const auto make = [&](int64_t at, int64_t lanes, bool is_whole) __attribute__((always_inline)) {
    Vec<A> sum[kCount] = {};
    const A* weight = static_cast<const A*>(args.packed_weight) + at * kTaps;
    for (int64_t i = 0; i < fetched; ++i) {
      __builtin_prefetch(x + (offset + (kWindow + i) * pitch + at));
    }
    const auto add = [&](int64_t r, bool exists) __attribute__((always_inline)) {
      const Vec<A> row = exists ? LoadUpTo(x + (offset + r * pitch + at), lanes) : Vec<A>{};
#pragma GCC unroll 8
      for (int j = 0; j < kCount; ++j) {
        const int64_t k = r - j;
        if (k < 0 || k >= kTaps) continue;
        sum[j] = MultiplyAdd(Load(weight + k * kLane), row, sum[j]);
      }
    };
    if (is_whole) {
#pragma GCC unroll 16
      for (int r = 0; r < kWindow; ++r) add(r, true);
    } else {
      for (int64_t r = 0; r < kWindow; ++r) add(r, r >= begin && r < end);
    }
#pragma GCC unroll 8
    for (int j = 0; j < kCount; ++j) sum[j] += Load(bias + at);
    ActivateTile(args.activation, sum);
#pragma GCC unroll 8
    for (int j = 0; j < kCount; ++j) StoreUpTo(sum[j], y + j * pitch + at, lanes);
  };
  int64_t at = 0;
  if (begin == 0 && end == kWindow) {
    for (; at + kLane <= channels; at += kLane) make(at, kLane, true);
  }
  for (; at < channels; at += kLane) make(at, channels - at, false);
}

template <int kTaps, typename S, typename A>
void ConvolveBlockSteps(const Convolve& args, const A* bias) {
  int64_t t = args.block.time_begin;
  for (; t + kSteps <= args.block.time_end; t += kSteps) {
    ConvolveRows<kTaps, kSteps, S>(args, t, bias);
  }
  for (; t < args.block.time_end; ++t) ConvolveRows<kTaps, 1, S>(args, t, bias);
}

// Tells whether the taps of a block with time in lanes can be read from x in memory. With panels,
// the processor loads no steps while it multiplies: (32,1024,128,16) float32 took 1.2 ms with 3
// taps on two cores of an EPYC and 2.9 with 31, and takes 0.7 and 1.9.
template <typename S>
bool CanReadSteps(const Convolve& args) {
  // Without shifts, a step in 16 bits would be converted for each of its taps.
  constexpr bool kIsConvertedOnce = kHasShifts || __is_same(S, Arithmetic<S>);
  const Geometry& geometry = args.geometry;
  return kIsConvertedOnce && geometry.dilation == 1 && geometry.taps <= 1 + kMaxTapSpan &&
         args.segments.starts == nullptr;
}

// sum[i] += sum_k weight[k] * x[i + k] for kCount vectors of neighbouring steps. Loads x up to
// entry LoadedSteps(kCount, taps).
template <int kCount, typename X, typename A>
JAXOPS_ALWAYS_INLINE void ConvolveNeighbours(const X* x, const A* weight, int64_t taps,
                                             Vec<A> (&sum)[kCount]) {
  if constexpr (kHasShifts) {
    ConvolveShifts<kCount>(x, weight, taps, sum);
  } else {
    for (int64_t k = 0; k < taps; ++k) {
#pragma GCC unroll 8
      for (int i = 0; i < kCount; ++i) {
        sum[i] = MultiplyAdd(Broadcast(weight[k]), Load(x + i * kLanes<A> + k), sum[i]);
      }
    }
  }
}

template <typename A>
constexpr int64_t LoadedSteps(int64_t vectors, int64_t taps) {
  return kHasShifts ? (CeilDiv(taps, kLanes<A>) + vectors) * kLanes<A>
                    : vectors * kLanes<A> + taps - 1;
}

// y = act(sum + bias) for the steps of a block of which CanReadSteps is true.
template <typename S>
void ConvolveBlockOfSteps(const Convolve& args, const Arithmetic<S>* bias) {
  using A = Arithmetic<S>;
  constexpr int kLane = kLanes<A>;
  constexpr int64_t kTileSteps = kTile * kLane;
  const Geometry& geometry = args.geometry;
  const Block& block = args.block;
  const int64_t time = geometry.time;
  const int64_t taps = geometry.taps;
  const A* weight = static_cast<const A*>(args.packed_weight);
  A* window = static_cast<A*>(args.window);
  for (int64_t c = block.channel_begin; c < block.channel_end; ++c, weight += taps) {
    const S* row = static_cast<const S*>(args.x) + c * time;
    S* y = static_cast<S*>(args.y) + c * time;
    const Vec<A> shift = Broadcast(bias[c - block.channel_begin]);
    for (int64_t t = block.time_begin; t < block.time_end; t += kTileSteps) {
      const int64_t steps = Min(kTileSteps, block.time_end - t);
      const int64_t vectors = CeilDiv(steps, kLane);
      const int64_t first = t - geometry.padding;
      const auto convolve = [&](auto count, const auto* x) __attribute__((always_inline)) {
        Vec<A> sum[count.value] = {};
        ConvolveNeighbours<count.value>(x, weight, taps, sum);
#pragma GCC unroll 8
        for (int i = 0; i < count.value; ++i) sum[i] += shift;
        ActivateTile(args.activation, sum);
        if (steps == count.value * kLane && count.value % 2 == 0) {
#pragma GCC unroll 4
          for (int i = 0; i + 1 < count.value; i += 2) {
            StorePair(sum[i], sum[i + 1], y + t + i * kLane);
          }
          return;
        }
#pragma GCC unroll 8
        for (int i = 0; i + 1 < count.value; ++i) Store(sum[i], y + t + i * kLane);
        const int64_t whole = (count.value - 1) * kLane;
        StoreUpTo(sum[count.value - 1], y + t + whole, steps - whole);
      };
      const int64_t loaded = LoadedSteps<A>(vectors, taps);
      // Sums that are stored have no terms of another channel, but vectors may be loaded from it.
      if (vectors == kTile && first >= 0 && first + steps + taps - 1 <= time &&
          c * time + first + loaded <= geometry.channels * time) {
        convolve(Constant<kTile>(), row + first);
      } else {
        PackSteps(geometry, args.segments, c, first, loaded, row, window);
        WithTile(vectors,
                 [&](auto count) __attribute__((always_inline)) { convolve(count, window); });
      }
    }
  }
}

template <DataFormat kFormat, typename S>
void ConvolveBlock(const Convolve& args) {
  using A = Arithmetic<S>;
  constexpr int kLane = kLanes<A>;
  const Geometry& geometry = args.geometry;
  const Block& block = args.block;
  const PanelLayout<A, kFormat> layout(geometry, block);
  constexpr int kWeightLanes = layout.kTimeInLanes ? 1 : kLane;
  const A* weight = static_cast<const A*>(args.packed_weight);
  A* window = static_cast<A*>(args.window);
  A* sums = static_cast<A*>(args.sums);
  S* y = static_cast<S*>(args.y);
  A bias[kMaxBlockChannels] = {};
  if (args.bias != nullptr) {
    WithStorage(args.bias_dtype, args.bias, block.channel_begin,
                [&](auto from) { Widen(from, layout.channels, bias); });
  }
  if constexpr (layout.kTimeInLanes) {
    if (CanReadSteps<S>(args)) return ConvolveBlockOfSteps<S>(args, bias);
  } else {
    if (CanReadRows(args)) {
      WithTile(geometry.taps, [&](auto taps) { ConvolveBlockSteps<taps.value, S>(args, bias); });
      return;
    }
  }
  Marks<A, kFormat> marks(layout, geometry, block, args.segments);

  for (int64_t tap = 0; tap < geometry.taps; tap += layout.taps_per_group) {
    const int64_t taps = Min(layout.taps_per_group, geometry.taps - tap);
    const bool last = tap + taps == geometry.taps;
    const int64_t first = block.time_begin - geometry.padding + tap * geometry.dilation;
    const int64_t pitch =
        PackPanels(layout, geometry, args.segments, block.channel_begin, first,
                   (taps - 1) * geometry.dilation, static_cast<const S*>(args.x), window);
    marks.SetTaps(geometry, args.segments, first, taps);
    // Sums of the only group of taps are stored at once, so every tile may have the same address.
    const int64_t sums_pitch = taps == geometry.taps ? 0 : layout.panels * kLane;
    const TilePanels panels{layout.kTimeInLanes ? 1 : layout.panels, pitch,
                            geometry.taps * kWeightLanes};
    // From panel p on.
    const auto convolve = [&](int64_t p, int64_t i, int64_t count, bool is_one, bool add, A* tile) {
      const A* w = weight + (p * geometry.taps + tap) * kWeightLanes;
      const A* panel = window + p * pitch;
      if (is_one) {
        const PanelReader<A> read{panel + i * kLane, layout.tap_stride};
        ConvolveTile<kFormat>(panels, read, w, taps, count, add, tile);
      } else {
        const MarkedReader<A, kFormat> read{marks, panel, i};
        ConvolveTile<kFormat>(panels, read, w, taps, count, add, tile);
      }
    };
    if constexpr (layout.kTimeInLanes) {
      for (int64_t p = 0; p < layout.panels; ++p) {
        S* row = y + (block.channel_begin + p) * geometry.time + block.time_begin;
        for (int64_t i = 0; i < layout.vectors; i += kTile) {
          const int64_t count = Min(kTile, layout.vectors - i);
          const int64_t steps = Min(kTile * kLane, layout.steps - i * kLane);
          A* tile = sums + i * sums_pitch + p * kTile * kLane;
          S* to = row + i * kLane;
          const bool is_one = marks.AreOne(i, count);
          // A tile has many steps: vectors whose taps are of one segment need no marks.
          for (int64_t j = 0, next; j < count; j = next) {
            const bool alike = is_one || marks.AreOne(i + j, 1);
            next = is_one ? count : j + 1;
            while (next < count && marks.AreOne(i + next, 1) == alike) ++next;
            convolve(p, i + j, next - j, alike, tap > 0, tile + j * kLane);
          }
          if (!last) continue;
          WithActivation(args.activation, [&](auto activation) {
            StoreSteps<static_cast<Activation>(activation.value)>(steps, tile, bias[p], to);
          });
        }
      }
    } else {
      for (int64_t i = 0; i < layout.vectors; i += kTile) {
        const int64_t count = Min(kTile, layout.vectors - i);
        A* tile = sums + i * sums_pitch;
        bool add = tap > 0;
        if (args.segments.slots != nullptr) {
          add = AddSlots<A>(args, layout, i, count, tap, taps, tile);
        }
        convolve(0, i, count, marks.AreOne(i, count), add, tile);
        if (!last) continue;
        S* to = y + (block.time_begin + i) * geometry.channels + block.channel_begin;
        WithActivation(args.activation, [&](auto activation) {
          StoreRows<static_cast<Activation>(activation.value)>(count, layout.channels,
                                                               geometry.channels, tile, bias, to);
        });
      }
    }
  }
}

// dweight[k] += sum_i g[i] * x[i + k] for kCount taps from kOffset on, lane by lane, as
// ConvolveShifts reads them. The last lanes as in FilterGradTile.
template <int kOffset, int kCount, typename A>
JAXOPS_ALWAYS_INLINE void FilterGradShifts(const A* g, const A* x, int64_t vectors, int64_t tail,
                                           A* dweight) {
  constexpr int kLane = kLanes<A>;
  constexpr int kWays = kWaysOf<kCount>;
  Vec<A> sum[kWays][kCount] = {};
  Vec<A> low = Load(x);
  const auto add = [&](int way, int64_t i, auto keep) __attribute__((always_inline)) {
    const Vec<A> high = Load(x + (i + 1) * kLane);
    const Vec<A> gi = Load(g + i * kLane);
    ForEachConstant<kCount>([&](auto k) __attribute__((always_inline)) {
      const Vec<A> shifted = keep(Shift<kOffset + k.value>(low, high));
      sum[way][k.value] = MultiplyAdd(gi, shifted, sum[way][k.value]);
    });
    low = high;
  };
  const auto keep_all = [](Vec<A> v) __attribute__((always_inline)) { return v; };
  int64_t i = 0;
  for (; i + kWays <= vectors; i += kWays) {
#pragma GCC unroll 4
    for (int way = 0; way < kWays; ++way) add(way, i + way, keep_all);
  }
  for (; i < vectors; ++i) add(0, i, keep_all);
  if (tail > 0) add(0, i, [&](Vec<A> v) { return KeepLanes<A>(v, tail); });
  AddWays(sum, dweight);
}

template <typename A>
__attribute__((noinline)) void FilterGradPanelOfShifts(const A* g, const A* x, int64_t vectors,
                                                       int64_t tail, int64_t taps, A* dweight) {
  constexpr int kLane = kLanes<A>;
  for (int64_t k = 0; k < taps; k += kTile) {
    WithTile(Min(kTile, taps - k), [&](auto count) {
      A* sums = dweight + k * kLane;
      if constexpr (kLane > kTile) {
        static_assert(kLane == 2 * kTile);
        if (k % kLane != 0) {
          return FilterGradShifts<kTile, count.value>(g, x + (k - kTile), vectors, tail, sums);
        }
      }
      FilterGradShifts<0, count.value>(g, x + k, vectors, tail, sums);
    });
  }
}

// Tells whether a block's sums for the filter are those of FilterGradBlockOfSteps.
bool CanShiftSteps(const FilterGrad& args) {
  const Geometry& geometry = args.geometry;
  return kHasShifts && geometry.data_format == DataFormat::kNCT && geometry.dilation == 1 &&
         geometry.taps <= 1 + kMaxTapSpan && args.segments.starts == nullptr;
}

// FilterGradBlock without panels: steps are read from memory or, if they are converted, at the ends
// of the sequence, or fewer than kCopied, from copies that stay in the first cache. The gradients
// of (32,1024,128,16) float32 took 2.5 ms with 7 taps on two cores of an EPYC and 5.0 with 31, and
// take 1.5 and 4.0.
template <typename S>
void FilterGradBlockOfSteps(const FilterGrad& args) {
  using A = Arithmetic<S>;
  constexpr int kLane = kLanes<A>;
  constexpr int64_t kCopied = 32 * kLane;  // steps
  const Geometry& geometry = args.geometry;
  const Block& block = args.block;
  const int64_t time = geometry.time;
  const int64_t taps = geometry.taps;
  const int64_t depth = geometry.channels / geometry.heads;
  for (int64_t c = block.channel_begin; c < block.channel_end; ++c) {
    const S* x_row = static_cast<const S*>(args.x) + c * time;
    const S* g_row = static_cast<const S*>(args.g) + c * time;
    const int64_t head = c / depth - block.channel_begin / depth;
    A* dweight = static_cast<A*>(args.dweight) + head * taps * kLane;
    A* dbias = static_cast<A*>(args.dbias) + (c - block.channel_begin) * kLane;
    for (int64_t t = block.time_begin; t < block.time_end; t += kCopied) {
      const int64_t steps = Min(kCopied, block.time_end - t);
      const int64_t first = t - geometry.padding;
      const int64_t padded = CeilDiv(steps, kLane) * kLane;
      const int64_t loaded = LoadedSteps<A>(padded / kLane, taps);
      const A* g = static_cast<const A*>(args.cotangent);
      const A* x = static_cast<const A*>(args.window);
      bool is_copied = true;
      if constexpr (__is_same(S, A)) {
        is_copied = steps < kCopied || first < 0 || first + steps + taps - 1 > time ||
                    c * time + first + loaded > geometry.channels * time;
        if (!is_copied) {
          g = g_row + t;
          x = x_row + first;
        }
      }
      if (is_copied) {
        PackSteps(geometry, {}, c, t, padded, g_row, static_cast<A*>(args.cotangent));
        PackSteps(geometry, args.segments, c, first, loaded, x_row, static_cast<A*>(args.window));
      }
      const int64_t vectors = steps / kLane;
      const int64_t tail = steps % kLane;
      Vec<A> sum = {};
      for (int64_t i = 0; i < padded; i += kLane) sum += Load(g + i);
      Store(Load(dbias) + sum, dbias);
      FilterGradPanelOfShifts(g, x, vectors, tail, taps, dweight);
    }
  }
}

template <DataFormat kFormat, typename S>
void FilterGradBlock(const FilterGrad& args) {
  if constexpr (kHasShifts && kFormat == DataFormat::kNCT) {
    if (CanShiftSteps(args)) return FilterGradBlockOfSteps<S>(args);
  }
  using A = Arithmetic<S>;
  const Geometry& geometry = args.geometry;
  const Block& block = args.block;
  const PanelLayout<A, kFormat> layout(geometry, block);
  const int64_t depth = geometry.channels / geometry.heads;
  const int64_t tail = layout.kTimeInLanes ? layout.steps % kLanes<A> : 0;
  const int64_t whole = layout.vectors - (tail > 0 ? 1 : 0);
  A* window = static_cast<A*>(args.window);
  A* g = static_cast<A*>(args.cotangent);
  A* dweight = static_cast<A*>(args.dweight);
  A* dbias = static_cast<A*>(args.dbias);

  const int64_t g_pitch = PackPanels(layout, geometry, {}, block.channel_begin, block.time_begin, 0,
                                     static_cast<const S*>(args.g), g);
  Marks<A, kFormat> marks(layout, geometry, block, args.segments);
  for (int64_t p = 0; p < layout.panels; ++p) {
    Vec<A> sum = {};
    for (int64_t i = 0; i < layout.vectors; ++i) sum += Load(g + p * g_pitch + i * kLanes<A>);
    Store(Load(dbias + p * kLanes<A>) + sum, dbias + p * kLanes<A>);
  }

  for (int64_t tap = 0; tap < geometry.taps; tap += layout.taps_per_group) {
    const int64_t taps = Min(layout.taps_per_group, geometry.taps - tap);
    const int64_t first = block.time_begin - geometry.padding + tap * geometry.dilation;
    const int64_t pitch =
        PackPanels(layout, geometry, args.segments, block.channel_begin, first,
                   (taps - 1) * geometry.dilation, static_cast<const S*>(args.x), window);
    marks.SetTaps(geometry, args.segments, first, taps);
    // Neighbouring tiles of vectors that are read in the same way are added together.
    for (int64_t begin = 0, end; begin < layout.vectors; begin = end) {
      const auto are_one = [&](int64_t i) {
        return marks.AreOne(i, Min(kTile, layout.vectors - i));
      };
      const bool is_one = are_one(begin);
      end = args.segments.starts == nullptr ? layout.vectors : begin + kTile;
      while (end < layout.vectors && are_one(end) == is_one) end += kTile;
      end = Min(end, layout.vectors);
      for (int64_t p = 0; p < layout.panels; ++p) {
        const int64_t row = layout.kTimeInLanes
                                ? (block.channel_begin + p) / depth - block.channel_begin / depth
                                : p;
        const A* panel = window + p * pitch;
        const A* own = g + p * g_pitch + begin * kLanes<A>;
        A* sums = dweight + (row * geometry.taps + tap) * kLanes<A>;
        if constexpr (kHasShifts && kFormat == DataFormat::kNCT) {
          if (is_one && geometry.dilation == 1) {
            FilterGradPanelOfShifts(own, panel + begin * kLanes<A>, Min(end, whole) - begin,
                                    end > whole ? tail : 0, taps, sums);
            continue;
          }
        }
        if (is_one) {
          const PanelReader<A> read{panel + begin * kLanes<A>, layout.tap_stride};
          FilterGradPanel(own, read, Min(end, whole) - begin, end > whole ? tail : 0, taps, sums);
        } else {
          const MarkedReader<A, kFormat> read{marks, panel, begin};
          FilterGradPanel(own, read, end - begin, 0, taps, sums);
        }
      }
    }
  }
}

template <typename A, typename W>
void PackWeightAs(const PackWeight& args, const W* weight) {
  const int64_t taps = args.geometry.taps;
  const int64_t depth = args.geometry.channels / args.geometry.heads;
  const int64_t channels = args.channel_end - args.channel_begin;
  const bool time_in_lanes = args.geometry.data_format == DataFormat::kNCT;
  const int64_t lanes = time_in_lanes ? 1 : kLanes<A>;
  const int64_t padded = CeilDiv(channels, lanes) * lanes;
  A* packed = static_cast<A*>(args.packed);
  constexpr int64_t kStrip = 64;
  A strip[kStrip];
  for (int64_t begin = 0; begin < taps; begin += kStrip) {
    const int64_t count = Min(kStrip, taps - begin);
    int64_t head = -1;
    for (int64_t c = 0; c < padded; ++c) {
      if (c >= channels) {
        for (int64_t k = 0; k < count; ++k) strip[k] = 0;
      } else if (const int64_t next = (args.channel_begin + c) / depth; next != head) {
        head = next;
        const int64_t from = args.flip_taps ? taps - begin - count : begin;
        Widen(weight + head * taps + from, count, strip);
      }
      A* to = packed + (c / lanes * taps + begin) * lanes + c % lanes;
      for (int64_t k = 0; k < count; ++k) {
        to[k * lanes] = strip[args.flip_taps ? count - 1 - k : k];
      }
    }
  }
}

template <typename A>
void ReduceLanesAs(const ReduceLanes& args) {
  const int64_t taps = args.geometry.taps;
  const int64_t depth = args.geometry.channels / args.geometry.heads;
  const int64_t first_head = args.channel_begin / depth;
  const int64_t heads = (args.channel_end - 1) / depth + 1 - first_head;
  const int64_t channels = args.channel_end - args.channel_begin;
  const A* lanes_dweight = static_cast<const A*>(args.lanes_dweight);
  const A* lanes_dbias = static_cast<const A*>(args.lanes_dbias);
  A* dweight = static_cast<A*>(args.dweight);
  A* dbias = static_cast<A*>(args.dbias);
  if (args.geometry.data_format == DataFormat::kNCT) {
    for (int64_t i = 0; i < heads * taps; ++i) {
      dweight[i] = 0;
      for (int lane = 0; lane < kLanes<A>; ++lane) {
        dweight[i] += lanes_dweight[i * kLanes<A> + lane];
      }
    }
    for (int64_t c = 0; c < channels; ++c) {
      dbias[c] = 0;
      for (int lane = 0; lane < kLanes<A>; ++lane) dbias[c] += lanes_dbias[c * kLanes<A> + lane];
    }
  } else {
    for (int64_t i = 0; i < heads * taps; ++i) dweight[i] = 0;
    for (int64_t c = 0; c < channels; ++c) {
      A* to = dweight + ((args.channel_begin + c) / depth - first_head) * taps;
      const A* from = lanes_dweight + c / kLanes<A> * taps * kLanes<A> + c % kLanes<A>;
      for (int64_t k = 0; k < taps; ++k) to[k] += from[k * kLanes<A>];
    }
    for (int64_t c = 0; c < channels; ++c) dbias[c] = lanes_dbias[c];
  }
}

// Calls f with a null pointer to the storage type and the layout as a compile-time constant.
template <typename F>
JAXOPS_ALWAYS_INLINE void WithLayout(DType dtype, DataFormat format, F f) {
  WithStorage(dtype, nullptr, 0, [&](auto storage) {
    if (format == DataFormat::kNTC) {
      f(storage, Constant<static_cast<int>(DataFormat::kNTC)>());
    } else {
      f(storage, Constant<static_cast<int>(DataFormat::kNCT)>());
    }
  });
}

template <typename S>
S StorageOf(const S*);

void RunPackWeight(const PackWeight& args) {
  WithStorage(args.weight_dtype, args.weight, 0, [&](auto weight) {
    if (args.dtype == DType::kF64) {
      PackWeightAs<double>(args, weight);
    } else {
      PackWeightAs<float>(args, weight);
    }
  });
}

void RunConvolve(const Convolve& args) {
  WithLayout(args.dtype, args.geometry.data_format, [&](auto storage, auto format) {
    ConvolveBlock<static_cast<DataFormat>(format.value), decltype(StorageOf(storage))>(args);
  });
}

void RunFilterGrad(const FilterGrad& args) {
  WithLayout(args.dtype, args.geometry.data_format, [&](auto storage, auto format) {
    FilterGradBlock<static_cast<DataFormat>(format.value), decltype(StorageOf(storage))>(args);
  });
}

void RunReduceLanes(const ReduceLanes& args) {
  if (args.dtype == DType::kF64) {
    ReduceLanesAs<double>(args);
  } else {
    ReduceLanesAs<float>(args);
  }
}

void RunStoreSums(const StoreSums& args) {
  WithStorage(args.to_dtype, args.to, args.offset, [&](auto to) {
    using S = decltype(StorageOf(to));
    if (args.dtype == DType::kF64) {
      Narrow(static_cast<const double*>(args.sums), args.count, const_cast<S*>(to));
    } else {
      Narrow(static_cast<const float*>(args.sums), args.count, const_cast<S*>(to));
    }
  });
}

}  // namespace

const Kernels kKernels = {RunPackWeight, RunConvolve, RunFilterGrad, RunReduceLanes, RunStoreSums};

}  // namespace jaxops::lightweight_conv::cpu::JAXOPS_ISA
