#include "cpu/lightweight_conv_step_kernels.h"

#include <cstdint>
#include <utility>

#include "cpu/activations.h"
#include "cpu/simd.h"

namespace jaxops::lightweight_conv_step::cpu::JAXOPS_ISA {
namespace {

using namespace jaxops::cpu::JAXOPS_ISA;

constexpr int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t Max(int64_t a, int64_t b) { return a < b ? b : a; }
constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A vector of 16 bytes, the largest that every instruction set shuffles in one instruction.
template <typename A>
struct Square;
template <>
struct Square<float> {
  typedef float Row __attribute__((vector_size(16)));
  static constexpr int kSize = 4;

  static JAXOPS_ALWAYS_INLINE void Transpose(Row (&rows)[kSize]) {
    const Row low = __builtin_shufflevector(rows[0], rows[1], 0, 4, 1, 5);
    const Row high = __builtin_shufflevector(rows[0], rows[1], 2, 6, 3, 7);
    const Row next_low = __builtin_shufflevector(rows[2], rows[3], 0, 4, 1, 5);
    const Row next_high = __builtin_shufflevector(rows[2], rows[3], 2, 6, 3, 7);
    rows[0] = __builtin_shufflevector(low, next_low, 0, 1, 4, 5);
    rows[1] = __builtin_shufflevector(low, next_low, 2, 3, 6, 7);
    rows[2] = __builtin_shufflevector(high, next_high, 0, 1, 4, 5);
    rows[3] = __builtin_shufflevector(high, next_high, 2, 3, 6, 7);
  }
};
template <>
struct Square<double> {
  typedef double Row __attribute__((vector_size(16)));
  static constexpr int kSize = 2;

  static JAXOPS_ALWAYS_INLINE void Transpose(Row (&rows)[kSize]) {
    const Row first = rows[0];
    rows[0] = __builtin_shufflevector(first, rows[1], 0, 2);
    rows[1] = __builtin_shufflevector(first, rows[1], 1, 3);
  }
};

// Sets to[k * kLanes + i] = from[i * taps + k]. Squares are shuffled in registers: a call has to do
// this before it can compute anything.
template <typename A>
JAXOPS_ALWAYS_INLINE void TransposeTaps(const A* from, int64_t taps, A* to) {
  using Row = typename Square<A>::Row;
  constexpr int kSize = Square<A>::kSize;
  const int64_t squares = taps / kSize * kSize;
#pragma GCC unroll 4
  for (int i = 0; i < kLanes<A>; i += kSize) {
    for (int64_t k = 0; k < squares; k += kSize) {
      Row rows[kSize];
#pragma GCC unroll 4
      for (int r = 0; r < kSize; ++r) rows[r] = LoadBits<Row>(from + (i + r) * taps + k);
      Square<A>::Transpose(rows);
#pragma GCC unroll 4
      for (int r = 0; r < kSize; ++r) {
        __builtin_memcpy(to + (k + r) * kLanes<A> + i, &rows[r], sizeof(Row));
      }
    }
  }
  for (int64_t k = squares; k < taps; ++k) {
    for (int i = 0; i < kLanes<A>; ++i) to[k * kLanes<A> + i] = from[i * taps + k];
  }
}

// Returns element `kFirst + kIndex * kStride` of neighbouring vectors in lane kIndex.
template <int kFirst, int kStride, int kVectors, typename V, int... kIndex>
JAXOPS_ALWAYS_INLINE V TakeStrided(const V (&vectors)[kVectors],
                                   std::integer_sequence<int, kIndex...>) {
  constexpr int kLane = sizeof...(kIndex);
  static_assert(kFirst + (kLane - 1) * kStride < kVectors * kLane);
  V found = vectors[0];
  const auto take =
      [&]<int kVector>(std::integral_constant<int, kVector>) __attribute__((always_inline)) {
        // Lanes whose element is in this vector take it; in the first step the others are of vector
        // 0.
        found = __builtin_shufflevector(found, vectors[kVector],
                                        ((kFirst + kIndex * kStride) / kLane == kVector
                                             ? kLane + (kFirst + kIndex * kStride) % kLane
                                         : kVector == 1 ? (kFirst + kIndex * kStride) % kLane
                                                        : kIndex)...);
      };
  const auto take_all = [&]<int... kOther>(std::integer_sequence<int, kOther...>)
                            __attribute__((always_inline)) {
                              (take(std::integral_constant<int, kOther + 1>()), ...);
                            };
  take_all(std::make_integer_sequence<int, kVectors - 1>());
  return found;
}

// Sets lane i of to[k] to from[i * kTaps + k]. Whole vectors are loaded and shuffled.
template <int kTaps, typename A>
JAXOPS_ALWAYS_INLINE void LoadTaps(const A* from, Vec<A> (&to)[kTaps]) {
  constexpr int kLane = kLanes<A>;
  constexpr auto kIndices = std::make_integer_sequence<int, kLane>();
  Vec<A> read[kTaps];
#pragma GCC unroll 8
  for (int v = 0; v < kTaps; ++v) read[v] = Load(from + v * kLane);
  if constexpr (kTaps == 4) {
    // Halves of halves take fewer shuffles.
    const Vec<A> low[] = {read[0], read[1]}, high[] = {read[2], read[3]};
    const Vec<A> even[] = {TakeStrided<0, 2>(low, kIndices), TakeStrided<0, 2>(high, kIndices)};
    const Vec<A> odd[] = {TakeStrided<1, 2>(low, kIndices), TakeStrided<1, 2>(high, kIndices)};
    to[0] = TakeStrided<0, 2>(even, kIndices);
    to[1] = TakeStrided<0, 2>(odd, kIndices);
    to[2] = TakeStrided<1, 2>(even, kIndices);
    to[3] = TakeStrided<1, 2>(odd, kIndices);
  } else {
    const auto set_all = [&]<int... kTap>(std::integer_sequence<int, kTap...>)
                             __attribute__((always_inline)) {
                               ((to[kTap] = TakeStrided<kTap, kTaps>(read, kIndices)), ...);
                             };
    set_all(std::make_integer_sequence<int, kTaps>());
  }
}

// The same of bfloat16, whose bits are the upper half of a float's.
JAXOPS_ALWAYS_INLINE void LoadTaps(const BFloat* from, Vec<float> (&to)[4]) {
  using Int = Simd<float>::Int;
  constexpr int kLane = kLanes<float>;
  constexpr auto kIndices = std::make_integer_sequence<int, kLane>();
  const Int read[] = {LoadBits<Int>(from), LoadBits<Int>(from + 2 * kLane)};
  const Int pairs[] = {TakeStrided<0, 2>(read, kIndices), TakeStrided<1, 2>(read, kIndices)};
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    to[2 * i] = BitCast<Vec<float>>(pairs[i] << 16);
    to[2 * i + 1] = BitCast<Vec<float>>(pairs[i] & (-1 << 16));
  }
}

// LoadTaps for every channel's own filter in memory, in vectors of channels.
template <int kTaps, typename A, typename W>
JAXOPS_ALWAYS_INLINE void StoreTaps(const W* from, A* to) {
  Vec<A> taps[kTaps];
  LoadTaps(from, taps);
#pragma GCC unroll 8
  for (int k = 0; k < kTaps; ++k) Store(taps[k], to + k * kLanes<A>);
}

// The softmax of filters that follow each other, with the bits of NormalizeLanes.
template <typename A>
void NormalizeFilters(int64_t count, int64_t taps, A* filters) {
  const int64_t size = count * taps;
  for (A* filter = filters; filter != filters + size; filter += taps) {
    A max = filter[0];
    for (int64_t k = 1; k < taps; ++k) max = filter[k] > max ? filter[k] : max;
    for (int64_t k = 0; k < taps; ++k) filter[k] -= max;
  }
  for (int64_t i = 0; i < size; i += kLanes<A>) {
    StoreUpTo(Exp(LoadUpTo(filters + i, size - i)), filters + i, size - i);
  }
  for (A* filter = filters; filter != filters + size; filter += taps) {
    A sum = 0;
    for (int64_t k = 0; k < taps; ++k) sum += filter[k];
    const A scale = A(1) / sum;
    for (int64_t k = 0; k < taps; ++k) filter[k] *= scale;
  }
}

// Widens the filters of each channel, (taps,), into vectors of channels, (panels, taps, lanes),
// with zeros for the channels past the block. The first filter in memory is that of `first_head`.
template <typename A, typename W>
void PackFiltersOfStep(const Filters& args, const W* weight, int64_t first_head, A* packed) {
  constexpr int kLane = kLanes<A>;
  const int64_t taps = args.call.taps;
  const int64_t depth = args.call.channels / args.call.heads;
  const int64_t channels = args.channel_end - args.channel_begin;
  const int64_t panels = CeilDiv(channels, kLane);
  // The filters of a vector of channels, for a group of taps.
  constexpr int64_t kGroup = 8;
  A strip[kLane * kGroup];
  for (int64_t p = 0; p < panels; ++p) {
    const int64_t first = args.channel_begin + p * kLane;
    const int64_t lanes = Min(kLane, channels - p * kLane);
    if (depth == 1 && lanes == kLane) {
      const W* from = weight + (first - first_head) * taps;
      A* to = packed + p * taps * kLane;
      if constexpr (__is_same(W, A) || (__is_same(W, BFloat) && __is_same(A, float))) {
        if (taps == 4) {
          StoreTaps<4>(from, to);
          continue;
        }
      }
      if constexpr (__is_same(W, A)) {
        if (taps == 3) {
          StoreTaps<3>(from, to);
          continue;
        }
        if (taps <= kGroup) {
          TransposeTaps(from, taps, to);
          continue;
        }
      }
    }
    const int64_t head = depth == 1 ? first : first / depth;
    const bool is_of_one_head = depth > 1 && (first + lanes - 1) / depth == head;
    for (int64_t tap = 0; tap < taps; tap += kGroup) {
      const int64_t count = Min(kGroup, taps - tap);
      A* to = packed + (p * taps + tap) * kLane;
      if (is_of_one_head) {
        Widen(weight + (head - first_head) * taps + tap, count, strip);
        for (int64_t k = 0; k < count; ++k) Store(Broadcast(strip[k]), to + k * kLane);
        continue;
      }
      if (depth == 1 && count == taps) {
        Widen(weight + (first - first_head) * taps, lanes * taps, strip);
      } else {
        for (int64_t i = 0; i < lanes; ++i) {
          const int64_t own = (first + i) / depth - first_head;
          Widen(weight + own * taps + tap, count, strip + i * count);
        }
      }
      for (int64_t i = lanes * count; i < kLane * count; ++i) strip[i] = 0;
      TransposeTaps(strip, count, to);
    }
  }
}

// The filters of a step, or of every step, and after them the bias, zeros for none.
template <typename A, typename W>
void PackFiltersAs(const Filters& args, const W* weight) {
  constexpr int kLane = kLanes<A>;
  const Step& call = args.call;
  const int64_t channels = args.channel_end - args.channel_begin;
  const int64_t panels = CeilDiv(channels, kLane);
  A* packed = static_cast<A*>(args.packed);
  const int64_t filters = call.weight_step == 0 ? 1 : call.steps;
  const int64_t size = panels * call.taps * kLane;
  const int64_t depth = call.channels / call.heads, first_head = args.channel_begin / depth;
  const int64_t heads = (args.channel_end - 1) / depth - first_head + 1;
  for (int64_t s = 0; s < filters; ++s, weight += call.weight_step, packed += size) {
    if (!call.normalize) {
      PackFiltersOfStep(args, weight, 0, packed);
      continue;
    }
    A* normalized = static_cast<A*>(args.normalized);
    Widen(weight + first_head * call.taps, heads * call.taps, normalized);
    NormalizeFilters(heads, call.taps, normalized);
    PackFiltersOfStep(args, normalized, first_head, packed);
  }
  A* bias = packed;
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
template <typename S, typename T>
void MakeSteps(const Rows& args, const S* x, const T* state, S* y) {
  using A = Arithmetic<S>;
  constexpr int kLane = kLanes<A>;
  const Step& call = args.call;
  const int64_t channels = args.channel_end - args.channel_begin;
  const int64_t panels = CeilDiv(channels, kLane);
  const int64_t filters = call.weight_step == 0 ? 1 : call.steps;
  const A* packed = static_cast<const A*>(args.packed);
  const A* bias = packed + filters * panels * call.taps * kLane;
  // A state of zeros is a single row.
  T zeros[kMaxBlockChannels];
  const int64_t pitch = state == nullptr ? 0 : call.channels;
  if (state == nullptr) {
    __builtin_memset(zeros, 0, sizeof(zeros));
    state = zeros;
  }
  for (int64_t p = 0; p < panels; ++p) {
    const A* weight = packed + p * call.taps * kLane;
    const int64_t next_filter = call.weight_step == 0 ? 0 : panels * call.taps * kLane;
    const int64_t at = p * kLane;
    const int64_t lanes = channels - at;
    for (int64_t s = 0; s < call.steps; ++s, weight += next_filter) {
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
      sum = ActivateAs(call.activation, sum + Load(bias + at));
      StoreUpTo(sum, y + s * call.channels + at, lanes);
    }
  }
}

// The same for one step of kTaps taps without dilation, and the new state on the way, which spares
// reading the old one twice. Both states may be the same memory. If `filters` are not null, each
// channel's is there, there is no bias, and nothing is packed.
template <int kTaps, typename T, typename W = Arithmetic<T>>
void MakeStep(const Rows& args, const T* x, const T* state, T* new_state, T* y,
              const W* filters = nullptr) {
  using A = Arithmetic<T>;
  constexpr int kLane = kLanes<A>;
  typedef uint8_t Bytes __attribute__((vector_size(kLane * sizeof(T))));
  const int64_t pitch = args.call.channels;
  const int64_t channels = args.channel_end - args.channel_begin;
  const int64_t panels = CeilDiv(channels, kLane);
  const A* weight = static_cast<const A*>(args.packed);
  const A* bias = weight + panels * kTaps * kLane;
  const auto widen = [](Bytes bytes) {
    if constexpr (__is_same(T, A)) {
      return BitCast<Vec<A>>(bytes);
    } else {
      T entries[kLane];
      __builtin_memcpy(entries, &bytes, sizeof(bytes));
      return Load(entries);
    }
  };
  const auto make = [&](int64_t at, int64_t lanes) __attribute__((always_inline)) {
    const auto read = [&](const T* from) {
      if (lanes == kLane) return LoadBits<Bytes>(from);
      Bytes bytes = {};
      __builtin_memcpy(&bytes, from, lanes * sizeof(T));
      return bytes;
    };
    Bytes rows[kTaps];
#pragma GCC unroll 8
    for (int k = 0; k < kTaps - 1; ++k) rows[k] = read(state + k * pitch + at);
    rows[kTaps - 1] = read(x + at);
    Vec<A> taps[kTaps];
    if (filters == nullptr) {
#pragma GCC unroll 8
      for (int k = 0; k < kTaps; ++k) taps[k] = Load(weight + (at * kTaps + k * kLane));
    } else if constexpr (kTaps <= 4) {
      if (lanes == kLane) {
        LoadTaps(filters + at * kTaps, taps);
      } else {
        W some[kLane * kTaps] = {};
        __builtin_memcpy(some, filters + at * kTaps, lanes * kTaps * sizeof(W));
        LoadTaps(some, taps);
      }
    }
    Vec<A> sum = {};
#pragma GCC unroll 8
    for (int k = 0; k < kTaps; ++k) sum = MultiplyAdd(taps[k], widen(rows[k]), sum);
    sum += filters == nullptr ? Load(bias + at) : Vec<A>{};
    StoreUpTo(ActivateAs(args.call.activation, sum), y + at, lanes);
#pragma GCC unroll 8
    for (int k = 1; k < kTaps; ++k) {
      __builtin_memcpy(new_state + (k - 1) * pitch + at, &rows[k], lanes * sizeof(T));
    }
  };
  int64_t at = 0;
  for (; at + kLane <= channels; at += kLane) make(at, kLane);
  if (at < channels) make(at, channels - at);
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
        T* new_state = static_cast<T*>(args.new_state);
        if (new_state != nullptr) new_state += args.channel_begin;
        if constexpr (__is_same(S, T)) {
          if (args.packed == nullptr) {
            const int64_t first = args.channel_begin * call.taps;
            const auto* own = static_cast<const Arithmetic<S>*>(args.filters);
            if (call.taps == 3) return MakeStep<3>(args, x, state, new_state, y, own + first);
            return MakeStep<4>(args, x, state, new_state, y, own + first);
          }
          if (call.steps == 1 && call.dilation == 1 && state != nullptr && new_state != nullptr) {
            if (call.taps == 2) return MakeStep<2>(args, x, state, new_state, y);
            if (call.taps == 3) return MakeStep<3>(args, x, state, new_state, y);
            if (call.taps == 4) return MakeStep<4>(args, x, state, new_state, y);
            if (call.taps == 7) return MakeStep<7>(args, x, state, new_state, y);
          }
        }
        MakeSteps(args, x, state, y);
        if (new_state != nullptr) MoveRows(args, x, state, new_state);
      }
    });
  });
}

}  // namespace

const Kernels kKernels = {RunPackFilters, RunStep};

}  // namespace jaxops::lightweight_conv_step::cpu::JAXOPS_ISA
