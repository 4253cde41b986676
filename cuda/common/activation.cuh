// Fused activations, in the accumulation type.
#ifndef JAXOPS_CUDA_COMMON_ACTIVATION_CUH_
#define JAXOPS_CUDA_COMMON_ACTIVATION_CUH_

#include "common/types.h"

namespace jaxops::cuda {

// Returns x times the logistic function of z. For very negative z the quotient is zero, not NaN.
__device__ __forceinline__ float TimesLogistic(float x, float z) {
  return __fdividef(x, 1.0f + expf(-z));
}
__device__ __forceinline__ double TimesLogistic(double x, double z) { return x / (1 + exp(-z)); }

// Applies one activation to a thread's values, with one branch for all of them. GELU is the tanh
// form, jax.nn.gelu's default: (1 + tanh(u)) / 2 is the logistic function of 2u.
template <typename Acc, int kCount>
__device__ __forceinline__ void Activate(Acc (&values)[kCount], Activation activation) {
  if (activation == Activation::kNone) return;
  if (activation == Activation::kRelu) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] = values[i] < Acc(0) ? Acc(0) : values[i];  // NaN stays NaN
    }
    return;
  }
  const bool gelu = activation == Activation::kGelu;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const Acc x = values[i];
    const Acc doubled = Acc(1.5957691216057308) * (x + Acc(0.044715) * x * x * x);
    values[i] = TimesLogistic(x, gelu ? doubled : x);
  }
}

}  // namespace jaxops::cuda

#endif  // JAXOPS_CUDA_COMMON_ACTIVATION_CUH_
