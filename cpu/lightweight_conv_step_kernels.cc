#include "cpu/lightweight_conv_step_kernels.h"

#include <cstdint>

#include "cpu/activations.h"
#include "cpu/simd.h"

namespace jaxops::lightweight_conv_step::cpu::JAXOPS_ISA {
namespace {

using namespace jaxops::cpu::JAXOPS_ISA;

constexpr int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t Max(int64_t a, int64_t b) { return a < b ? b : a; }
constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The entries of two vectors at even places, or at odd ones, in their order.
template <int kOdd, typename V>
JAXOPS_ALWAYS_INLINE V EverySecond(V a, V b) {
  constexpr int kLane = sizeof(V) / sizeof(a[0]);
  if constexpr (kLane == 2) {
    return __builtin_shufflevector(a, b, kOdd, 2 + kOdd);
  } else if constexpr (kLane == 4) {
    return __builtin_shufflevector(a, b, kOdd, 2 + kOdd, 4 + kOdd, 6 + kOdd);
  } else if constexpr (kLane == 8) {
    return __builtin_shufflevector(a, b, kOdd, 2 + kOdd, 4 + kOdd, 6 + kOdd, 8 + kOdd, 10 + kOdd,
                                   12 + kOdd, 14 + kOdd);
  } else {
    static_assert(kLane == 16);
    return __builtin_shufflevector(a, b, kOdd, 2 + kOdd, 4 + kOdd, 6 + kOdd, 8 + kOdd, 10 + kOdd,
                                   12 + kOdd, 14 + kOdd, 16 + kOdd, 18 + kOdd, 20 + kOdd, 22 + kOdd,
                                   24 + kOdd, 26 + kOdd, 28 + kOdd, 30 + kOdd);
  }
}

// Sets to[k * kLanes + i] = from[i * kTaps + k] for a power of two. Vectors are loaded and
// shuffled: a call has to do this before it can compute anything.
template <int kTaps, typename A>
JAXOPS_ALWAYS_INLINE void Transpose(const A* from, A* to) {
  constexpr int kLane = kLanes<A>;
  Vec<A> v[kTaps];
#pragma GCC unroll 8
  for (int k = 0; k < kTaps; ++k) v[k] = Load(from + k * kLane);
  // Each round brings the entries of every second tap of a part to its first half.
#pragma GCC unroll 8
  for (int part = kTaps; part > 1; part /= 2) {
    Vec<A> next[kTaps];
#pragma GCC unroll 8
    for (int begin = 0; begin < kTaps; begin += part) {
#pragma GCC unroll 8
      for (int i = 0; i < part / 2; ++i) {
        next[begin + i] = EverySecond<0>(v[begin + 2 * i], v[begin + 2 * i + 1]);
        next[begin + part / 2 + i] = EverySecond<1>(v[begin + 2 * i], v[begin + 2 * i + 1]);
      }
    }
#pragma GCC unroll 8
    for (int k = 0; k < kTaps; ++k) v[k] = next[k];
  }
  // The halves of halves are in the order of the taps with their bits reversed.
#pragma GCC unroll 8
  for (int k = 0; k < kTaps; ++k) {
    const int tap = kTaps == 8   ? (k & 1) << 2 | (k & 2) | k >> 2
                    : kTaps == 4 ? (k & 1) << 1 | k >> 1
                                 : k;
    Store(v[k], to + tap * kLane);
  }
}

template <typename A>
void TransposeTaps(const A* from, int64_t taps, A* to) {
  switch (taps) {
    case 1:
      return Transpose<1>(from, to);
    case 2:
      return Transpose<2>(from, to);
    case 4:
      return Transpose<4>(from, to);
    case 8:
      return Transpose<8>(from, to);
    default:
      for (int64_t k = 0; k < taps; ++k) {
        for (int i = 0; i < kLanes<A>; ++i) to[k * kLanes<A> + i] = from[i * taps + k];
      }
  }
}

// to[i] = from[i], in whole vectors where there are no others.
template <typename A, typename W>
JAXOPS_ALWAYS_INLINE void WidenMany(const W* from, int64_t count, A* to) {
  if constexpr (__is_same(Arithmetic<W>, A)) {
    constexpr int kLane = kLanes<A>;
    int64_t i = 0;
    for (; i + kLane <= count; i += kLane) Store(Load(from + i), to + i);
    if (i < count) StorePartial(LoadPartial(from + i, count - i), to + i, count - i);
  } else {
    Widen(from, count, to);
  }
}

// Widens the filters of each channel, (taps,), into vectors of channels, (panels, taps, lanes),
// with zeros for the channels past the block. The bias, zeros for none, comes after them.
template <typename A, typename W>
void PackFiltersAs(const Filters& args, const W* weight) {
  constexpr int kLane = kLanes<A>;
  const int64_t taps = args.call.taps;
  const int64_t depth = args.call.channels / args.call.heads;
  const int64_t channels = args.channel_end - args.channel_begin;
  const int64_t panels = CeilDiv(channels, kLane);
  A* packed = static_cast<A*>(args.packed);
  // The filters of a vector of channels, for a group of taps.
  constexpr int64_t kGroup = 8;
  A strip[kLane * kGroup];
  for (int64_t p = 0; p < panels; ++p) {
    const int64_t first = args.channel_begin + p * kLane;
    const int64_t lanes = Min(kLane, channels - p * kLane);
    if constexpr (__is_same(W, A)) {
      if (depth == 1 && taps <= kGroup && lanes == kLane) {
        TransposeTaps(weight + first * taps, taps, packed + p * taps * kLane);
        continue;
      }
    }
    const int64_t head = depth == 1 ? first : first / depth;
    const bool is_of_one_head = depth > 1 && (first + lanes - 1) / depth == head;
    for (int64_t tap = 0; tap < taps; tap += kGroup) {
      const int64_t count = Min(kGroup, taps - tap);
      A* to = packed + (p * taps + tap) * kLane;
      if (is_of_one_head) {
        WidenMany(weight + head * taps + tap, count, strip);
        for (int64_t k = 0; k < count; ++k) Store(Vec<A>{} + strip[k], to + k * kLane);
        continue;
      }
      if (depth == 1 && count == taps) {
        WidenMany(weight + first * taps, lanes * taps, strip);
      } else {
        for (int64_t i = 0; i < lanes; ++i) {
          WidenMany(weight + (first + i) / depth * taps + tap, count, strip + i * count);
        }
      }
      for (int64_t i = lanes * count; i < kLane * count; ++i) strip[i] = 0;
      TransposeTaps(strip, count, to);
    }
  }
  A* bias = packed + panels * taps * kLane;
  for (int64_t i = 0; i < panels * kLane; ++i) bias[i] = 0;
  if (args.bias != nullptr) {
    WithStorage(args.call.bias_dtype, args.bias, args.channel_begin,
                [&](auto from) { WidenMany(from, channels, bias); });
  }
}

// Loads min(count, lanes) lanes as vectors of A, which is at least as wide as S's arithmetic type.
template <typename A, typename S>
JAXOPS_ALWAYS_INLINE Vec<A> LoadAs(const S* from, int64_t count) {
  if constexpr (__is_same(Arithmetic<S>, A)) {
    return LoadUpTo(from, count);
  } else {
    A wide[kLanes<A>] = {};
    Widen(from, Min(count, kLanes<A>), wide);
    return Load(wide);
  }
}

// y = act(sum + bias) for each step, with the operations of a whole sequence
// (cpu/lightweight_conv_kernels.cc) in the same order.
template <Activation kActivation, typename S, typename T>
void MakeSteps(const Rows& args, const S* x, const T* state, S* y) {
  using A = Arithmetic<S>;
  constexpr int kLane = kLanes<A>;
  const Step& call = args.call;
  const int64_t channels = args.channel_end - args.channel_begin;
  const int64_t panels = CeilDiv(channels, kLane);
  const A* bias = static_cast<const A*>(args.packed) + panels * call.taps * kLane;
  // A state of zeros is a single row.
  T zeros[kMaxBlockChannels];
  const int64_t pitch = state == nullptr ? 0 : call.channels;
  if (state == nullptr) {
    __builtin_memset(zeros, 0, sizeof(zeros));
    state = zeros;
  }
  for (int64_t p = 0; p < panels; ++p) {
    const A* weight = static_cast<const A*>(args.packed) + p * call.taps * kLane;
    const int64_t at = p * kLane;
    const int64_t lanes = channels - at;
    for (int64_t s = 0; s < call.steps; ++s) {
      const int64_t before =
          Min(call.taps, CeilDiv(Max(call.reach - s, 0), call.dilation));  // taps of the state
      Vec<A> sum = {};
      for (int64_t k = 0; k < before; ++k) {
        const T* row = state + (s + k * call.dilation) * pitch + at;
        sum = MultiplyAdd(Load(weight + k * kLane), LoadAs<A>(row, lanes), sum);
      }
      for (int64_t k = before; k < call.taps; ++k) {
        const S* row = x + (s + k * call.dilation - call.reach) * call.channels + at;
        sum = MultiplyAdd(Load(weight + k * kLane), LoadUpTo(row, lanes), sum);
      }
      StoreUpTo(Activate<kActivation>(sum + Load(bias + at)), y + s * call.channels + at, lanes);
    }
  }
}

// The new state in the order of its rows, which is safe in place: a row comes from a later one.
template <typename S, typename T>
void MoveRows(const Rows& args, const S* x, const T* state, T* new_state) {
  const Step& call = args.call;
  const int64_t channels = args.channel_end - args.channel_begin;
  for (int64_t row = 0; row < call.reach; ++row) {
    T* to = new_state + row * call.channels;
    const int64_t from = row + call.steps;
    if (from < call.reach) {
      const T* old = state + from * call.channels;
      if (old != to) __builtin_memcpy(to, old, channels * sizeof(T));
    } else {
      const S* newer = x + (from - call.reach) * call.channels;
      if constexpr (__is_same(S, T)) {
        __builtin_memcpy(to, newer, channels * sizeof(T));
      } else {
        Arithmetic<S> wide[kMaxBlockChannels];
        Widen(newer, channels, wide);
        Narrow(wide, channels, to);
      }
    }
  }
}

void RunPackFilters(const Filters& args) {
  WithStorage(args.call.weight_dtype, args.weight, 0, [&](auto weight) {
    if (args.call.dtype == DType::kF64) {
      PackFiltersAs<double>(args, weight);
    } else {
      PackFiltersAs<float>(args, weight);
    }
  });
}

template <typename S>
S StorageOf(const S*);

void RunStep(const Rows& args) {
  const Step& call = args.call;
  WithStorage(call.dtype, args.x, args.channel_begin, [&](auto x) {
    using S = decltype(StorageOf(x));
    S* y = static_cast<S*>(args.y) + args.channel_begin;
    WithStorage(call.state_dtype, nullptr, 0, [&](auto storage) {
      using T = decltype(StorageOf(storage));
      // Such a state makes x float64 too.
      if constexpr (sizeof(T) <= sizeof(Arithmetic<S>)) {
        const T* state = static_cast<const T*>(args.state);
        if (state != nullptr) state += args.channel_begin;
        WithActivation(call.activation, [&](auto activation) {
          MakeSteps<static_cast<Activation>(activation.value)>(args, x, state, y);
        });
        if (args.new_state != nullptr) {
          MoveRows(args, x, state, static_cast<T*>(args.new_state) + args.channel_begin);
        }
      }
    });
  });
}

}  // namespace

const Kernels kKernels = {RunPackFilters, RunStep};

}  // namespace jaxops::lightweight_conv_step::cpu::JAXOPS_ISA
