// The activations of sums and the softmax, for the instruction set that the including kernel file
// is compiled for (see simd.h).
#ifndef JAXOPS_CPU_ACTIVATIONS_H_
#define JAXOPS_CPU_ACTIVATIONS_H_

#include "common/types.h"
#include "cpu/simd.h"

namespace jaxops::cpu::JAXOPS_ISA {

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

template <Activation kActivation, typename V>
JAXOPS_ALWAYS_INLINE V Activate(V v) {
  using A = decltype(v[0] + 0);
  if constexpr (kActivation == Activation::kRelu) {
    // NaN passes this comparison.
    return v <= A(0) ? V{} : v;
  } else if constexpr (kActivation == Activation::kSilu) {
    return v / (A(1) + Exp(-v));
  } else if constexpr (kActivation == Activation::kGelu) {
    // (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)), with u = sqrt(2 / pi) (v + 0.044715 v^3).
    constexpr A kMinusTwoRoot = A(-1.5957691216057307118);
    return v / (A(1) + Exp(kMinusTwoRoot * MultiplyAdd(V{} + A(0.044715), v * v * v, v)));
  } else {
    return v;
  }
}

// The activation of one vector at a time, where the choice costs less than a copy of the code
// around it.
template <typename V>
JAXOPS_ALWAYS_INLINE V ActivateAs(Activation activation, V v) {
  switch (activation) {
    case Activation::kNone:
      break;
    case Activation::kRelu:
      return Activate<Activation::kRelu>(v);
    case Activation::kSilu:
      return Activate<Activation::kSilu>(v);
    case Activation::kGelu:
      return Activate<Activation::kGelu>(v);
  }
  return v;
}

// Calls f with the activation as a compile-time constant.
template <typename F>
JAXOPS_ALWAYS_INLINE void WithActivation(Activation activation, F f) {
  switch (activation) {
    case Activation::kNone:
      return f(Constant<static_cast<int>(Activation::kNone)>());
    case Activation::kRelu:
      return f(Constant<static_cast<int>(Activation::kRelu)>());
    case Activation::kSilu:
      return f(Constant<static_cast<int>(Activation::kSilu)>());
    case Activation::kGelu:
      return f(Constant<static_cast<int>(Activation::kGelu)>());
  }
}

// v[i] = act(v[i]) for `count` vectors in memory.
template <typename V>
__attribute__((noinline)) void ActivateInMemory(Activation activation, int count, V* v) {
  WithActivation(activation, [&](auto constant) {
    for (int i = 0; i < count; ++i) v[i] = Activate<static_cast<Activation>(constant.value)>(v[i]);
  });
}

// v[i] = act(v[i]) for the vectors of a tile, which stay in registers if there is no activation.
// The activations are not inlined: so lightweight_conv_kernels.cc compiles in 24 s in place of 64.
template <int kCount, typename V>
JAXOPS_ALWAYS_INLINE void ActivateTile(Activation activation, V (&v)[kCount]) {
  if (activation == Activation::kNone) [[likely]]
    return;
  V stored[kCount];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) stored[i] = v[i];
  ActivateInMemory(activation, kCount, stored);
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) v[i] = stored[i];
}

// NormalizeLanes replaces `count` vectors in memory by the softmax over them, lane by lane.
template <typename A>
JAXOPS_ALWAYS_INLINE void NormalizeLanes(int64_t count, A* values) {
  constexpr int kLane = kLanes<A>;
  Vec<A> max = Load(values);
  for (int64_t i = 1; i < count; ++i) {
    const Vec<A> v = Load(values + i * kLane);
    max = v > max ? v : max;
  }
  Vec<A> sum = {};
  for (int64_t i = 0; i < count; ++i) {
    const Vec<A> v = Exp(Load(values + i * kLane) - max);
    Store(v, values + i * kLane);
    sum += v;
  }
  const Vec<A> scale = A(1) / sum;
  for (int64_t i = 0; i < count; ++i) Store(Load(values + i * kLane) * scale, values + i * kLane);
}

}  // namespace jaxops::cpu::JAXOPS_ISA

#endif  // JAXOPS_CPU_ACTIVATIONS_H_
