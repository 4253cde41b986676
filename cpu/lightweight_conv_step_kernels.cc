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

// Sets to[k * kLanes + i] = from[i * taps + k]; with few taps, kTaps, in shuffles of vectors.
template <int kTaps, typename A>
JAXOPS_ALWAYS_INLINE void Transpose(const A* from, int64_t taps, A* to) {
  const int64_t count = kTaps > 0 ? kTaps : taps;
  for (int64_t k = 0; k < count; ++k) {
    for (int i = 0; i < kLanes<A>; ++i) to[k * kLanes<A> + i] = from[i * count + k];
  }
}

template <typename A>
void TransposeTaps(const A* from, int64_t taps, A* to) {
  switch (taps) {
    case 2:
      return Transpose<2>(from, taps, to);
    case 3:
      return Transpose<3>(from, taps, to);
    case 4:
      return Transpose<4>(from, taps, to);
    default:
      return Transpose<0>(from, taps, to);
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
    for (int64_t tap = 0; tap < taps; tap += kGroup) {
      const int64_t count = Min(kGroup, taps - tap);
      if (depth == 1 && count == taps) {
        Widen(weight + first * taps, lanes * taps, strip);
      } else {
        for (int64_t i = 0; i < lanes; ++i) {
          Widen(weight + (first + i) / depth * taps + tap, count, strip + i * count);
        }
      }
      for (int64_t i = lanes * count; i < kLane * count; ++i) strip[i] = 0;
      TransposeTaps(strip, count, packed + (p * taps + tap) * kLane);
    }
  }
  A* bias = packed + panels * taps * kLane;
  for (int64_t i = 0; i < panels * kLane; ++i) bias[i] = 0;
  if (args.bias != nullptr) {
    WithStorage(args.call.bias_dtype, args.bias, args.channel_begin,
                [&](auto from) { Widen(from, channels, bias); });
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
        sum += Load(weight + k * kLane) * LoadAs<A>(row, lanes);
      }
      for (int64_t k = before; k < call.taps; ++k) {
        const S* row = x + (s + k * call.dilation - call.reach) * call.channels + at;
        sum += Load(weight + k * kLane) * LoadUpTo(row, lanes);
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
