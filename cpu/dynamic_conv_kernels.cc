#include "cpu/dynamic_conv_kernels.h"

#include <cstdint>

#include "cpu/activations.h"
#include "cpu/simd.h"

namespace jaxops::dynamic_conv::cpu::JAXOPS_ISA {
namespace {

using namespace jaxops::cpu::JAXOPS_ISA;

template <typename A>
using Int = typename Simd<A>::Int;
template <typename A>
using Lane = decltype(Int<A>{}[0] + 0);

constexpr int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t Max(int64_t a, int64_t b) { return a < b ? b : a; }
constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename S>
S StorageOf(const S*);

// --- transposes ----------------------------------------------------------------------------------

template <int... kI>
struct Sequence {};
template <int kN, int... kI>
struct MakeSequence : MakeSequence<kN - 1, kN - 1, kI...> {};
template <int... kI>
struct MakeSequence<0, kI...> {
  using Type = Sequence<kI...>;
};

// Exchanges the lanes of b whose number has no bit kDistance for those of a that have it.
template <int kDistance, typename V, int... kI>
JAXOPS_ALWAYS_INLINE void ExchangeLanes(V& a, V& b, Sequence<kI...>) {
  constexpr int kCount = sizeof...(kI);
  const V low = __builtin_shufflevector(a, b, (kI & kDistance ? kCount + kI - kDistance : kI)...);
  const V high = __builtin_shufflevector(a, b, (kI & kDistance ? kCount + kI : kI + kDistance)...);
  a = low;
  b = high;
}

template <int kDistance, typename A>
JAXOPS_ALWAYS_INLINE void TransposeFrom(Vec<A>* rows) {
  constexpr int kLane = kLanes<A>;
  if constexpr (kDistance < kLane) {
#pragma GCC unroll 16
    for (int i = 0; i < kLane; ++i) {
      if (!(i & kDistance)) {
        ExchangeLanes<kDistance>(rows[i], rows[i + kDistance],
                                 typename MakeSequence<kLane>::Type());
      }
    }
    TransposeFrom<2 * kDistance, A>(rows);
  }
}

// Transposes a square of vectors: lane j of vector i goes to lane i of vector j.
template <typename A>
JAXOPS_ALWAYS_INLINE void Transpose(Vec<A>* rows) {
  TransposeFrom<1, A>(rows);
}

// --- which taps are valid ------------------------------------------------------------------------

// The taps [begin, end) of each step of a block that are valid, and the union of each vector's.
template <typename A>
struct TapRanges {
  const Lane<A>* begin;
  const Lane<A>* end;
  const VectorTaps* vectors;
  const VectorTaps& OfVector(int64_t i) const { return vectors[i / kLanes<A>]; }
};

// Finds the taps of the steps of a block. Taps of step t read steps from t - before on, every
// `dilation` steps; with `descending`, from t + ahead down. They are valid in the segment of the
// step, but not below `floor`.
template <typename A>
TapRanges<A> FindTaps(const Geometry& g, const Block& block, const int32_t* starts, int64_t floor,
                      bool descending, const TapScratch& scratch) {
  constexpr int kLane = kLanes<A>;
  auto* begins = static_cast<Lane<A>*>(scratch.begins);
  auto* ends = static_cast<Lane<A>*>(scratch.ends);
  const int64_t reach = (g.taps - 1) * g.dilation;
  const int64_t ahead = descending ? g.padding : reach - g.padding;
  const int64_t before = reach - ahead;
  int64_t end = g.time;
  if (starts != nullptr) {
    const int64_t last = block.time_end - 1;
    const int64_t limit = Min(g.time, block.time_end + ahead);
    end = block.time_end;
    while (end < limit && starts[end] == starts[last]) ++end;
  }
  const int64_t vectors = CeilDiv(block.time_end - block.time_begin, kLane);
  for (int64_t i = vectors * kLane; i-- > 0;) {
    const int64_t t = block.time_begin + i;
    begins[i] = 0;
    ends[i] = 0;
    if (t >= block.time_end) continue;
    int64_t begin = floor;
    if (starts != nullptr) {
      if (t + 1 < block.time_end && starts[t] != starts[t + 1]) end = t + 1;
      begin = Max(floor, starts[t]);
    }
    // Distances to the step that the first tap reads.
    const int64_t low = descending ? t + ahead - (end - 1) : begin - (t - before);
    const int64_t high = descending ? t + ahead - begin : end - 1 - (t - before);
    if (high < 0) continue;
    const int64_t first = low <= 0 ? 0 : g.dilation == 1 ? low : CeilDiv(low, g.dilation);
    const int64_t past = (g.dilation == 1 ? high : high / g.dilation) + 1;
    begins[i] = static_cast<Lane<A>>(Min(first, g.taps));
    ends[i] = static_cast<Lane<A>>(Min(past, g.taps));
  }
  for (int64_t v = 0; v < vectors; ++v) {
    VectorTaps found = {true, g.taps, 0};
    for (int64_t i = v * kLane; i < (v + 1) * kLane; ++i) {
      const int64_t begin = begins[i], end = ends[i];
      found.all = found.all && begin == 0 && end == g.taps;
      if (begin >= end) continue;
      found.begin = Min(found.begin, begin);
      found.end = Max(found.end, end);
    }
    scratch.vectors[v] = found;
  }
  return {begins, ends, scratch.vectors};
}

template <typename A>
JAXOPS_ALWAYS_INLINE Int<A> IsValid(const TapRanges<A>& ranges, int64_t i, int64_t tap) {
  const auto begin = LoadBits<Int<A>>(ranges.begin + i);
  const auto end = LoadBits<Int<A>>(ranges.end + i);
  const auto k = static_cast<Lane<A>>(tap);
  return (begin <= k) & (end > k);
}

// --- weights -------------------------------------------------------------------------------------

// Where panels of weights begin: they have kLanes<A> entries more on either side.
template <typename A>
struct Panels {
  A* data;
  int64_t pitch;
  A* At(int64_t panel, int64_t step) const { return data + panel * pitch + kLanes<A> + step; }
};

template <typename A>
Panels<A> WeightPanels(void* data, const Block& block) {
  const int64_t steps = CeilDiv(block.time_end - block.time_begin, kLanes<A>) * kLanes<A>;
  return {static_cast<A*>(data), steps + 2 * kLanes<A>};
}

// Loads the columns of up to kLanes<A> rows of `columns` entries into tile[column], a lane a row.
// `readable` is the number of entries from the first one on that may be read.
template <typename A, typename W>
void LoadColumns(const W* from, int64_t pitch, int64_t rows, int64_t columns, int64_t readable,
                 A* tile) {
  constexpr int kLane = kLanes<A>;
  Vec<A> square[kLane];
  for (int64_t c = 0; c < columns; c += kLane) {
    const int64_t valid = Min(kLane, columns - c);
    for (int r = 0; r < kLane; ++r) {
      const int64_t at = r * pitch + c;
      if (r >= rows) {
        square[r] = Vec<A>{};
      } else if constexpr (sizeof(Arithmetic<W>) == sizeof(A)) {
        square[r] = at + kLane <= readable ? Load(from + at) : LoadPartial(from + at, valid);
      } else {
        A entries[kLane] = {};
        Widen(from + at, valid, entries);
        square[r] = Load(entries);
      }
    }
    Transpose<A>(square);
#pragma GCC unroll 16
    for (int i = 0; i < kLane; ++i) Store(square[i], tile + (c + i) * kLane);
  }
}

// Stores the weights of rows [begin, end) of a block's heads to panels of its steps, a panel a tap.
// With `skewed`, tap k of row t is where the input gradient needs it, at step
// t + k * dilation - padding. `aligned`, if not null, gets them without that.
template <typename A, typename W>
void PackWeights(const Geometry& g, const Block& block, const W* weight, int64_t begin, int64_t end,
                 bool skewed, A* tile, const Panels<A>& panels, const Panels<A>* aligned) {
  constexpr int kLane = kLanes<A>;
  const int64_t heads = block.head_end - block.head_begin;
  const int64_t pitch = g.heads * g.taps;
  const int64_t steps = panels.pitch - 2 * kLane;
  for (int64_t t = begin; t < end; t += kLane) {
    const int64_t at = t * pitch + block.head_begin * g.taps;
    LoadColumns(weight + at, pitch, Min(kLane, end - t), heads * g.taps, g.time * pitch - at, tile);
    if (g.normalize) {
      for (int64_t h = 0; h < heads; ++h) NormalizeLanes(g.taps, tile + h * g.taps * kLane);
    }
    const int64_t step = t - block.time_begin;
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t k = 0; k < g.taps; ++k) {
        const int64_t panel = h * g.taps + k;
        const int64_t to = skewed ? step + k * g.dilation - g.padding : step;
        const Vec<A> v = Load(tile + panel * kLane);
        if (-kLane < to && to < steps) Store(v, panels.At(panel, to));
        if (aligned != nullptr && -kLane < step && step < steps) {
          Store(v, aligned->At(panel, step));
        }
      }
    }
  }
}

// --- sequences -----------------------------------------------------------------------------------

// Copies `rows` steps of `channels` channels to panels, a channel each. More than these steps may
// be overwritten, up to a vector's end.
template <DataFormat kFormat, typename A, typename S>
void PackRows(const S* from, int64_t steps_of_row, int64_t channels_of_row, int64_t rows,
              int64_t channels, int64_t pitch, A* to) {
  constexpr int kLane = kLanes<A>;
  if constexpr (kFormat == DataFormat::kNTC) {
    for (int64_t t = 0; t < rows; t += kLane) {
      for (int64_t c = 0; c < channels; c += kLane) {
        const int64_t valid = Min(kLane, channels - c);
        Vec<A> square[kLane];
        for (int r = 0; r < kLane; ++r) {
          const S* row = from + (t + r) * channels_of_row + c;
          if (t + r >= rows) {
            square[r] = Vec<A>{};
          } else if constexpr (sizeof(Arithmetic<S>) == sizeof(A)) {
            square[r] = LoadUpTo(row, valid);
          } else {
            A entries[kLane] = {};
            Widen(row, valid, entries);
            square[r] = Load(entries);
          }
        }
        Transpose<A>(square);
#pragma GCC unroll 16
        for (int i = 0; i < kLane; ++i) Store(square[i], to + (c + i) * pitch + t);
      }
    }
  } else {
    for (int64_t c = 0; c < channels; ++c) {
      const S* row = from + c * steps_of_row;
      A* panel = to + c * pitch;
      if constexpr (sizeof(Arithmetic<S>) == sizeof(A)) {
        int64_t t = 0;
        for (; t + kLane <= rows; t += kLane) Store(Load(row + t), panel + t);
        if (t < rows) Store(LoadPartial(row + t, rows - t), panel + t);
      } else {
        Widen(row, rows, panel);
      }
    }
  }
}

// The panels of channels at steps [begin, end), of which those below 0 are the state's.
template <typename A>
struct Window {
  A* data;
  int64_t pitch;
  int64_t begin;
  int64_t end;
  const A* At(int64_t channel, int64_t step) const {
    return data + channel * pitch + kLanes<A> + (step - begin);
  }
};

template <DataFormat kFormat, typename S, typename A>
void PackWindow(const Geometry& g, const S* x, int64_t channel, int64_t channels,
                const Window<A>& window) {
  const int64_t begin = Max(window.begin, 0);
  if (begin >= window.end) return;
  const int64_t at =
      kFormat == DataFormat::kNTC ? begin * g.channels + channel : channel * g.time + begin;
  A* to = window.data + kLanes<A> + (begin - window.begin);
  PackRows<kFormat>(x + at, g.time, g.channels, window.end - begin, channels, window.pitch, to);
}

// Adds the valid taps of `kCount` vectors of kChannels channels in ascending order.
template <int kChannels, int kCount, bool kMasked, typename A>
JAXOPS_ALWAYS_INLINE void ConvolveTile(const A* weight, int64_t weight_pitch, const A* x,
                                       int64_t pitch, int64_t tap_stride, int64_t begin,
                                       int64_t end, const TapRanges<A>& ranges, int64_t i, A* sums,
                                       int64_t sums_pitch) {
  constexpr int kLane = kLanes<A>;
  Vec<A> sum[kChannels][kCount] = {};
  for (int64_t k = begin; k < end; ++k) {
    const A* w = weight + k * weight_pitch;
    const A* row = x + k * tap_stride;
#pragma GCC unroll 4
    for (int j = 0; j < kCount; ++j) {
      const Vec<A> wj = Load(w + j * kLane);
#pragma GCC unroll 4
      for (int c = 0; c < kChannels; ++c) {
        const Vec<A> next = MultiplyAdd(wj, Load(row + c * pitch + j * kLane), sum[c][j]);
        if constexpr (kMasked) {
          sum[c][j] = IsValid(ranges, i + j * kLane, k) ? next : sum[c][j];
        } else {
          sum[c][j] = next;
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < kChannels; ++c) {
#pragma GCC unroll 4
    for (int j = 0; j < kCount; ++j) Store(sum[c][j], sums + c * sums_pitch + j * kLane);
  }
}

// sums[c][t] = sum_k weight[k][t] * x[c][t + k * dilation - padding], or of x[t + padding - k *
// dilation] if `descending`, for channels [0, channels) of one head.
template <typename A>
void ConvolveHead(const Geometry& g, const Block& block, const TapRanges<A>& ranges,
                  bool descending, const Panels<A>& weight, int64_t panel, const Window<A>& window,
                  int64_t channel, int64_t channels, A* sums, int64_t sums_pitch) {
  constexpr int kLane = kLanes<A>;
  const int64_t steps = block.time_end - block.time_begin;
  const int64_t stride = descending ? -g.dilation : g.dilation;
  const int64_t shift = block.time_begin + (descending ? g.padding : -g.padding);
  const auto tile = [&](auto of_channels, auto count, auto masked, int64_t c, int64_t i,
                        int64_t begin, int64_t end) {
    ConvolveTile<of_channels.value, count.value, masked.value != 0>(
        weight.At(panel, i), weight.pitch, window.At(channel + c, shift + i), window.pitch, stride,
        begin, end, ranges, i, sums + (channel + c) * sums_pitch + i, sums_pitch);
  };
  const auto all_channels = [&](auto count, auto masked, int64_t i, int64_t begin, int64_t end) {
    int64_t c = 0;
    for (; c + 4 <= channels; c += 4) tile(Constant<4>(), count, masked, c, i, begin, end);
    for (; c < channels; ++c) tile(Constant<1>(), count, masked, c, i, begin, end);
  };
  for (int64_t i = 0; i < steps;) {
    const VectorTaps& taps = ranges.OfVector(i);
    if (!taps.all) {
      all_channels(Constant<1>(), Constant<1>(), i, taps.begin, taps.end);
      i += kLane;
      continue;
    }
    const auto is_full = [&](int64_t next) { return next < steps && ranges.OfVector(next).all; };
    if (channels < 4 && is_full(i + kLane) && is_full(i + 2 * kLane) && is_full(i + 3 * kLane)) {
      all_channels(Constant<4>(), Constant<0>(), i, 0, g.taps);
      i += 4 * kLane;
    } else if (is_full(i + kLane)) {
      all_channels(Constant<2>(), Constant<0>(), i, 0, g.taps);
      i += 2 * kLane;
    } else {
      all_channels(Constant<1>(), Constant<0>(), i, 0, g.taps);
      i += kLane;
    }
  }
}

// Stores act(sums + bias) of a block's steps and of channels [channel, channel + channels).
template <DataFormat kFormat, Activation kActivation, typename S, typename A>
void StoreSums(const Geometry& g, const Block& block, int64_t channel, int64_t channels,
               const A* sums, int64_t pitch, const A* bias, S* y) {
  constexpr int kLane = kLanes<A>;
  const int64_t steps = block.time_end - block.time_begin;
  if constexpr (kFormat == DataFormat::kNTC) {
    for (int64_t t = 0; t < steps; t += kLane) {
      for (int64_t c = 0; c < channels; c += kLane) {
        const int64_t valid = Min(kLane, channels - c);
        Vec<A> square[kLane];
#pragma GCC unroll 16
        for (int i = 0; i < kLane; ++i) square[i] = Load(sums + (c + i) * pitch + t);
        Transpose<A>(square);
        const Vec<A> added = Load(bias + c);
        S* to = y + (block.time_begin + t) * g.channels + channel + c;
        const int64_t rows = Min(kLane, steps - t);
        for (int64_t r = 0; r < rows; ++r) {
          StoreUpTo(Activate<kActivation>(square[r] + added), to + r * g.channels, valid);
        }
      }
    }
  } else {
    for (int64_t c = 0; c < channels; ++c) {
      const A* row = sums + c * pitch;
      S* to = y + (channel + c) * g.time + block.time_begin;
      const auto finished = [&](int64_t t) {
        return Activate<kActivation>(Load(row + t) + bias[c]);
      };
      int64_t t = 0;
      for (; t + 2 * kLane <= steps; t += 2 * kLane) {
        StorePair(finished(t), finished(t + kLane), to + t);
      }
      for (; t < steps; t += kLane) StoreUpTo(finished(t), to + t, steps - t);
    }
  }
}

// Calls f(head, channel, channels) for each head that has channels of [begin, begin + count), with
// the channels' number in that range.
template <typename F>
JAXOPS_ALWAYS_INLINE void ForEachHead(const Geometry& g, int64_t begin, int64_t count, F f) {
  const int64_t depth = g.channels / g.heads;
  for (int64_t c = 0; c < count;) {
    const int64_t head = (begin + c) / depth;
    const int64_t end = Min(count, (head + 1) * depth - begin);
    f(head, c, end - c);
    c = end;
  }
}

template <DataFormat kFormat, typename S>
void RunForwardAs(const ForwardBlock& args) {
  using A = Arithmetic<S>;
  const Forward& call = *args.call;
  const Geometry& g = call.geometry;
  const Block& block = args.block;
  const Scratch& scratch = args.scratch;
  const int64_t depth = g.channels / g.heads;
  const int64_t floor = call.state == nullptr ? 0 : -g.padding;
  const auto ranges = FindTaps<A>(g, block, call.starts, floor, false, scratch.ascending);
  const auto weights = WeightPanels<A>(scratch.weight, block);
  WithStorage(call.weight_dtype, call.weight, 0, [&](auto weight) {
    PackWeights<A>(g, block, weight, block.time_begin, block.time_end, false,
                   static_cast<A*>(scratch.tile), weights, nullptr);
  });
  const int64_t ahead = (g.taps - 1) * g.dilation - g.padding;
  const Window<A> window = {static_cast<A*>(scratch.window), scratch.pitch,
                            Max(floor, block.time_begin - g.padding),
                            Min(g.time, block.time_end + ahead)};
  A* sums = static_cast<A*>(scratch.sums);
  const int64_t sums_pitch = weights.pitch - kLanes<A>;
  const int64_t end = block.head_end * depth;
  for (int64_t channel = block.head_begin * depth; channel < end; channel += scratch.width) {
    const int64_t channels = Min(scratch.width, end - channel);
    if (window.begin < 0) {
      const int64_t rows = Min(window.end, 0) - window.begin;
      const int64_t first = window.begin + g.padding;
      WithStorage(call.state_dtype, call.state, 0, [&](auto state) {
        const int64_t at = kFormat == DataFormat::kNTC ? first * g.channels + channel
                                                       : channel * g.padding + first;
        PackRows<kFormat>(state + at, g.padding, g.channels, rows, channels, window.pitch,
                          window.data + kLanes<A>);
      });
    }
    PackWindow<kFormat>(g, static_cast<const S*>(call.x), channel, channels, window);
    ForEachHead(g, channel, channels, [&](int64_t head, int64_t c, int64_t count) {
      ConvolveHead(g, block, ranges, false, weights, (head - block.head_begin) * g.taps, window, c,
                   count, sums, sums_pitch);
    });
    A bias[kMaxWidth] = {};
    if (call.bias != nullptr) {
      WithStorage(call.bias_dtype, call.bias, channel,
                  [&](auto from) { Widen(from, channels, bias); });
    }
    WithActivation(call.activation, [&](auto activation) {
      StoreSums<kFormat, static_cast<Activation>(activation.value)>(
          g, block, channel, channels, sums, sums_pitch, bias, static_cast<S*>(call.y));
    });
  }
}

// --- rows of channels ----------------------------------------------------------------------------

// Adds `count` taps to the sums of kCount vectors of channels.
template <int kCount, typename A>
JAXOPS_ALWAYS_INLINE void AddTaps(const A* x, int64_t stride, const A* weight,
                                  int64_t weight_stride, int64_t count, Vec<A>* sum) {
  for (int64_t k = 0; k < count; ++k) {
    const Vec<A> w = Broadcast(weight[k * weight_stride]);
    const A* row = x + k * stride;
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) sum[i] = MultiplyAdd(w, Load(row + i * kLanes<A>), sum[i]);
  }
}

// The rows of channels that a block reads: those of x from step 0 on, before them copies of the
// state's. Channel 0 is the block's first.
template <typename A>
struct Rows {
  const A* x;
  int64_t pitch;
  const A* before;  // the row of step 0, had it followed the state's
  int64_t width;
};

// The weights of tap 0 of a step and head, and how far apart its taps are.
template <typename A>
struct HeadWeights {
  const A* first;
  int64_t stride;
};

// y of kCount vectors of channels at one step, whose valid taps are [begin, end). Those below
// `first` read the state.
template <int kCount, typename S, typename A>
JAXOPS_ALWAYS_INLINE void ConvolveRow(const Geometry& g, const Rows<A>& rows,
                                      const HeadWeights<A>& weights, int64_t step, int64_t channel,
                                      int64_t begin, int64_t first, int64_t end, const A* bias,
                                      Activation activation, S* y) {
  constexpr int kLane = kLanes<A>;
  Vec<A> sum[kCount] = {};
  const int64_t from = step - g.padding;
  if (begin < first) {
    AddTaps<kCount>(rows.before + (from + begin * g.dilation) * rows.width + channel,
                    g.dilation * rows.width, weights.first + begin * weights.stride, weights.stride,
                    Min(first, end) - begin, sum);
    begin = first;
  }
  AddTaps<kCount>(rows.x + (from + begin * g.dilation) * rows.pitch + channel,
                  g.dilation * rows.pitch, weights.first + begin * weights.stride, weights.stride,
                  end - begin, sum);
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) {
    sum[i] += bias == nullptr ? Vec<A>{} : Load(bias + channel + i * kLane);
  }
  ActivateTile(activation, sum);
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) Store(sum[i], y + channel + i * kLane);
}

// The forward pass with NTC where the channels of a head are whole vectors. A vector has
// neighbouring channels, and taps that are not valid are left out.
template <typename S>
void RunRowsAs(const ForwardBlock& args) {
  using A = Arithmetic<S>;
  constexpr int kLane = kLanes<A>;
  const Forward& call = *args.call;
  const Geometry& g = call.geometry;
  const Block& block = args.block;
  const Scratch& scratch = args.scratch;
  const int64_t depth = g.channels / g.heads;
  const int64_t heads = block.head_end - block.head_begin;
  const int64_t channel = block.head_begin * depth, channels = heads * depth;
  const int64_t floor = call.state == nullptr ? 0 : -g.padding;
  const auto ranges = FindTaps<A>(g, block, call.starts, floor, false, scratch.ascending);
  const int64_t ahead = (g.taps - 1) * g.dilation - g.padding;
  const int64_t begin = Max(floor, block.time_begin - g.padding);
  const int64_t end = Min(g.time, block.time_end + ahead);

  A* copies = static_cast<A*>(scratch.window);
  const S* x = static_cast<const S*>(call.x) + channel;
  Rows<A> rows = {nullptr, g.channels, copies - begin * channels, channels};
  const auto copy = [&](auto from, int64_t step) {
    A* to = copies + (step - begin) * channels;
    if constexpr (sizeof(Arithmetic<decltype(StorageOf(from))>) == sizeof(A)) {
      for (int64_t c = 0; c < channels; c += kLane) Store(Load(from + c), to + c);
    } else {
      Widen(from, channels, to);
    }
  };
  if (begin < 0) {
    WithStorage(call.state_dtype, call.state, channel, [&](auto state) {
      for (int64_t s = begin; s < Min(0, end); ++s) copy(state + (g.padding + s) * g.channels, s);
    });
  }
  if constexpr (sizeof(S) == sizeof(A)) {
    rows.x = x;
  } else {
    for (int64_t s = Max(0, begin); s < end; ++s) copy(x + s * g.channels, s);
    rows.x = rows.before;
    rows.pitch = channels;
  }
  A* bias = nullptr;
  if (call.bias != nullptr) {
    bias = static_cast<A*>(scratch.sums);
    WithStorage(call.bias_dtype, call.bias, channel,
                [&](auto from) { Widen(from, channels, bias); });
  }

  WithStorage(call.weight_dtype, call.weight, 0, [&](auto weight) {
    using W = decltype(StorageOf(weight));
    const int64_t row_size = g.heads * g.taps;
    A* tile = static_cast<A*>(scratch.tile);
    for (int64_t chunk = block.time_begin; chunk < block.time_end; chunk += kLane) {
      const int64_t steps = Min(kLane, block.time_end - chunk);
      const bool in_place = !g.normalize && sizeof(W) == sizeof(A);
      // The lanes of a softmax are steps, or heads where these are more.
      const bool by_head = !in_place && steps < heads;
      if (!in_place && !by_head) {
        const int64_t at = chunk * row_size + block.head_begin * g.taps;
        LoadColumns(weight + at, row_size, steps, heads * g.taps, g.time * row_size - at, tile);
        for (int64_t h = 0; g.normalize && h < heads; ++h) {
          NormalizeLanes(g.taps, tile + h * g.taps * kLane);
        }
      }
      for (int64_t t = chunk; t < chunk + steps; ++t) {
        const int64_t at = t * row_size + block.head_begin * g.taps;
        for (int64_t h = 0; by_head && h < heads; h += kLane) {
          A* of_heads = tile + h * g.taps;
          LoadColumns(weight + at + h * g.taps, g.taps, Min(kLane, heads - h), g.taps,
                      g.time * row_size - at - h * g.taps, of_heads);
          if (g.normalize) NormalizeLanes(g.taps, of_heads);
        }
        const int64_t i = t - block.time_begin;
        const int64_t low = ranges.begin[i], high = Max(low, ranges.end[i]);
        const int64_t first = t >= g.padding ? 0 : Min(high, CeilDiv(g.padding - t, g.dilation));
        S* y = static_cast<S*>(call.y) + t * g.channels + channel;
        for (int64_t h = 0; h < heads; ++h) {
          HeadWeights<A> of_head;
          if (by_head) {
            of_head = {tile + h / kLane * kLane * g.taps + h % kLane, kLane};
          } else {
            of_head = {tile + h * g.taps * kLane + (t - chunk), kLane};
          }
          if constexpr (sizeof(W) == sizeof(A)) {
            if (in_place) of_head = {weight + at + h * g.taps, 1};
          }
          const auto convolve = [&](auto count, int64_t c) {
            ConvolveRow<count.value>(g, rows, of_head, t, h * depth + c, low, first, high, bias,
                                     call.activation, y);
          };
          int64_t c = 0;
          for (; c + 8 * kLane <= depth; c += 8 * kLane) convolve(Constant<8>(), c);
          for (; c + 4 * kLane <= depth; c += 4 * kLane) convolve(Constant<4>(), c);
          for (; c < depth; c += kLane) convolve(Constant<1>(), c);
        }
      }
    }
  });
}

// --- gradients -----------------------------------------------------------------------------------

// dweight[k] += sum_c g[c] * x[c][t + k * dilation - padding] for kCount taps and a vector of
// steps.
template <int kCount, bool kMasked, typename A>
JAXOPS_ALWAYS_INLINE void WeightGradTile(const A* cotangent, int64_t cotangent_pitch, const A* x,
                                         int64_t pitch, int64_t tap_stride, int64_t channels,
                                         const TapRanges<A>& ranges, int64_t i, int64_t tap,
                                         A* dweight, int64_t dweight_pitch) {
  Vec<A> sum[kCount] = {};
  for (int64_t c = 0; c < channels; ++c) {
    const Vec<A> gc = Load(cotangent + c * cotangent_pitch);
    const A* row = x + c * pitch;
#pragma GCC unroll 8
    for (int k = 0; k < kCount; ++k) sum[k] = MultiplyAdd(gc, Load(row + k * tap_stride), sum[k]);
  }
#pragma GCC unroll 8
  for (int k = 0; k < kCount; ++k) {
    A* to = dweight + k * dweight_pitch;
    const Vec<A> total = Load(to) + sum[k];
    if constexpr (kMasked) {
      Store(IsValid(ranges, i, tap + k) ? total : Load(to), to);
    } else {
      Store(total, to);
    }
  }
}

template <typename A>
void WeightGradHead(const Geometry& g, const Block& block, const TapRanges<A>& ranges,
                    const Window<A>& cotangent, const Window<A>& window, int64_t channel,
                    int64_t channels, const Panels<A>& dweight, int64_t panel) {
  const int64_t steps = block.time_end - block.time_begin;
  for (int64_t i = 0; i < steps; i += kLanes<A>) {
    const VectorTaps& taps = ranges.OfVector(i);
    const int64_t step = block.time_begin + i;
    const auto tile = [&](auto count, auto masked, int64_t tap) {
      WeightGradTile<count.value, masked.value != 0>(
          cotangent.At(channel, step), cotangent.pitch,
          window.At(channel, step + tap * g.dilation - g.padding), window.pitch, g.dilation,
          channels, ranges, i, tap, dweight.At(panel + tap, i), dweight.pitch);
    };
    int64_t k = taps.begin;
    if (taps.all) {
      for (; k + 8 <= taps.end; k += 8) tile(Constant<8>(), Constant<0>(), k);
      for (; k + 4 <= taps.end; k += 4) tile(Constant<4>(), Constant<0>(), k);
      for (; k + 2 <= taps.end; k += 2) tile(Constant<2>(), Constant<0>(), k);
      for (; k < taps.end; ++k) tile(Constant<1>(), Constant<0>(), k);
    } else {
      for (; k + 4 <= taps.end; k += 4) tile(Constant<4>(), Constant<1>(), k);
      for (; k < taps.end; ++k) tile(Constant<1>(), Constant<1>(), k);
    }
  }
}

// Turns the cotangents of probabilities into those of the weights, for a vector of steps of a head.
template <typename A>
void SoftmaxGrad(int64_t taps, const A* p, A* dp, int64_t pitch) {
  Vec<A> dot = {};
  for (int64_t k = 0; k < taps; ++k)
    dot = MultiplyAdd(Load(p + k * pitch), Load(dp + k * pitch), dot);
  for (int64_t k = 0; k < taps; ++k) {
    Store(Load(p + k * pitch) * (Load(dp + k * pitch) - dot), dp + k * pitch);
  }
}

// Stores the panels of a block's kernel gradient.
template <typename A, typename W>
void StoreWeightGrad(const Geometry& g, const Block& block, const Panels<A>& panels, W* dweight) {
  constexpr int kLane = kLanes<A>;
  const int64_t steps = block.time_end - block.time_begin;
  const int64_t columns = (block.head_end - block.head_begin) * g.taps;
  for (int64_t t = 0; t < steps; t += kLane) {
    const int64_t rows = Min(kLane, steps - t);
    for (int64_t c = 0; c < columns; c += kLane) {
      const int64_t valid = Min(kLane, columns - c);
      Vec<A> square[kLane];
      for (int i = 0; i < kLane; ++i) {
        square[i] = i < valid ? Load(panels.At(c + i, t)) : Vec<A>{};
      }
      Transpose<A>(square);
      for (int64_t r = 0; r < rows; ++r) {
        W* to = dweight + ((block.time_begin + t + r) * g.heads + block.head_begin) * g.taps + c;
        if constexpr (sizeof(Arithmetic<W>) == sizeof(A)) {
          StoreUpTo(square[r], to, valid);
        } else {
          A entries[kLane];
          Store(square[r], entries);
          Narrow(entries, valid, to);
        }
      }
    }
  }
}

template <DataFormat kFormat, typename S>
void RunBackwardAs(const BackwardBlock& args) {
  using A = Arithmetic<S>;
  const Backward& call = *args.call;
  const Geometry& g = call.geometry;
  const Block& block = args.block;
  const Scratch& scratch = args.scratch;
  const int64_t depth = g.channels / g.heads;
  const int64_t ahead = (g.taps - 1) * g.dilation - g.padding;
  const bool want_dx = call.dx != nullptr, want_dweight = call.dweight != nullptr;
  const auto weights = WeightPanels<A>(scratch.weight, block);
  const auto probabilities = WeightPanels<A>(scratch.probabilities, block);
  const auto dweight = WeightPanels<A>(scratch.dweight, block);
  // The rows of g, and of weights, that dx of the block needs; these include the block's own.
  const Window<A> cotangent = {static_cast<A*>(scratch.cotangent), scratch.pitch,
                               want_dx ? Max(0, block.time_begin - ahead) : block.time_begin,
                               want_dx ? Min(g.time, block.time_end + g.padding) : block.time_end};
  const Window<A> window = {static_cast<A*>(scratch.window), scratch.pitch,
                            Max(0, block.time_begin - g.padding),
                            Min(g.time, block.time_end + ahead)};
  const bool normalize = g.normalize && want_dweight;
  if (want_dx || normalize) {
    WithStorage(call.weight_dtype, call.weight, 0, [&](auto weight) {
      PackWeights<A>(g, block, weight, cotangent.begin, cotangent.end, true,
                     static_cast<A*>(scratch.tile), weights, normalize ? &probabilities : nullptr);
    });
  }
  const int64_t panels = (block.head_end - block.head_begin) * g.taps;
  if (want_dweight) {
    for (int64_t i = 0; i < panels * dweight.pitch; ++i) dweight.data[i] = 0;
  }
  const auto ranges = FindTaps<A>(g, block, call.starts, 0, false, scratch.ascending);
  const auto of_dx = FindTaps<A>(g, block, call.starts, 0, true, scratch.descending);
  A* sums = static_cast<A*>(scratch.sums);
  const int64_t sums_pitch = weights.pitch - kLanes<A>;
  const A no_bias[kMaxWidth] = {};
  const int64_t end = block.head_end * depth;
  for (int64_t channel = block.head_begin * depth; channel < end; channel += scratch.width) {
    const int64_t channels = Min(scratch.width, end - channel);
    PackWindow<kFormat>(g, static_cast<const S*>(call.g), channel, channels, cotangent);
    if (want_dx) {
      ForEachHead(g, channel, channels, [&](int64_t head, int64_t c, int64_t count) {
        ConvolveHead(g, block, of_dx, true, weights, (head - block.head_begin) * g.taps, cotangent,
                     c, count, sums, sums_pitch);
      });
      StoreSums<kFormat, Activation::kNone>(g, block, channel, channels, sums, sums_pitch, no_bias,
                                            static_cast<S*>(call.dx));
    }
    if (want_dweight) {
      PackWindow<kFormat>(g, static_cast<const S*>(call.x), channel, channels, window);
      ForEachHead(g, channel, channels, [&](int64_t head, int64_t c, int64_t count) {
        WeightGradHead(g, block, ranges, cotangent, window, c, count, dweight,
                       (head - block.head_begin) * g.taps);
      });
    }
  }
  if (!want_dweight) return;
  if (normalize) {
    const int64_t steps = block.time_end - block.time_begin;
    for (int64_t panel = 0; panel < panels; panel += g.taps) {
      for (int64_t i = 0; i < steps; i += kLanes<A>) {
        SoftmaxGrad(g.taps, probabilities.At(panel, i), dweight.At(panel, i), dweight.pitch);
      }
    }
  }
  WithStorage(call.dweight_dtype, call.dweight, 0, [&](auto to) {
    using W = decltype(StorageOf(to));
    StoreWeightGrad(g, block, dweight, const_cast<W*>(to));
  });
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

void ForwardOf(const ForwardBlock& args) {
  const Forward& call = *args.call;
  WithLayout(call.dtype, call.geometry.data_format, [&](auto storage, auto format) {
    RunForwardAs<static_cast<DataFormat>(format.value), decltype(StorageOf(storage))>(args);
  });
}

void RowsOf(const ForwardBlock& args) {
  WithStorage(args.call->dtype, nullptr, 0,
              [&](auto storage) { RunRowsAs<decltype(StorageOf(storage))>(args); });
}

void BackwardOf(const BackwardBlock& args) {
  const Backward& call = *args.call;
  WithLayout(call.dtype, call.geometry.data_format, [&](auto storage, auto format) {
    RunBackwardAs<static_cast<DataFormat>(format.value), decltype(StorageOf(storage))>(args);
  });
}

}  // namespace

const Kernels kKernels = {kLanes<float>, ForwardOf, RowsOf, BackwardOf};

}  // namespace jaxops::dynamic_conv::cpu::JAXOPS_ISA
