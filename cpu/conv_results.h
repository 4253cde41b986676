// Bias, activation and rounding of the sums of a convolution, for kernel files (see simd.h).
#ifndef JAXOPS_CPU_CONV_RESULTS_H_
#define JAXOPS_CPU_CONV_RESULTS_H_

#include <cstdint>

#include "common/types.h"
#include "cpu/activations.h"
#include "cpu/conv_axes.h"
#include "cpu/simd.h"

namespace jaxops::conv::cpu::JAXOPS_ISA {

using namespace jaxops::cpu::JAXOPS_ISA;

// A pointer to entry `offset` of an array of `dtype`.
JAXOPS_ALWAYS_INLINE void* EntryAt(void* base, int64_t offset, DType dtype) {
  return static_cast<char*>(base) + offset * SizeOf(dtype);
}

// Calls f with a pointer to the storage type of results of sums of type A.
template <typename A, typename F>
JAXOPS_ALWAYS_INLINE void WithResult(DType dtype, void* to, F f) {
  if constexpr (sizeof(A) == sizeof(double)) {
    f(static_cast<double*>(to));
  } else if (dtype == DType::kF32) {
    f(static_cast<float*>(to));
  } else if (dtype == DType::kBF16) {
    f(static_cast<BFloat*>(to));
  } else {
    f(static_cast<Half*>(to));
  }
}

// Writes `pixels` results of `count` channels each, from channel `channel` on. Sums are
// `sums_stride` entries apart and have whole vectors of channels; results are `stride` apart.
template <typename A>
__attribute__((noinline)) void FinishPixels(const Results& finish, const A* sums,
                                            int64_t sums_stride, int64_t pixels, int64_t channel,
                                            int64_t count, void* to, int64_t stride) {
  const A* bias = finish.bias ? static_cast<const A*>(finish.bias) + channel : nullptr;
  const Activation named = finish.activation;
  // The lambdas capture copies: the compiler then knows that writing results does not change them.
  WithResult<A>(finish.dtype, to, [=](auto* result) {
    WithActivation(named, [=](auto activation) {
      constexpr auto kActivation = static_cast<Activation>(decltype(activation)::value);
      for (int64_t p = 0; p < pixels; ++p) {
        for (int64_t i = 0; i < count; i += kLanes<A>) {
          Vec<A> v = Load(sums + p * sums_stride + i);
          if (bias) v += LoadUpTo(bias + i, count - i);
          StoreUpTo(Activate<kActivation>(v), result + p * stride + i, count - i);
        }
      }
    });
  });
}

}  // namespace jaxops::conv::cpu::JAXOPS_ISA

#endif  // JAXOPS_CPU_CONV_RESULTS_H_
