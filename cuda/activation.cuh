// Fused activations, in the accumulation type.
#ifndef JAXOPS_CUDA_ACTIVATION_CUH_
#define JAXOPS_CUDA_ACTIVATION_CUH_

#include "common/types.h"

namespace jaxops::cuda {

__device__ __forceinline__ float Exp(float x) { return expf(x); }
__device__ __forceinline__ double Exp(double x) { return exp(x); }
__device__ __forceinline__ float Tanh(float x) { return tanhf(x); }
__device__ __forceinline__ double Tanh(double x) { return tanh(x); }

template <typename Acc>
__device__ __forceinline__ Acc Activate(Acc x, Activation activation) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return x < Acc(0) ? Acc(0) : x;  // NaN stays NaN
    case Activation::kSilu:
      return x / (Acc(1) + Exp(-x));
    case Activation::kGelu: {
      const Acc inner = Acc(0.7978845608028654) * (x + Acc(0.044715) * x * x * x);
      return Acc(0.5) * x * (Acc(1) + Tanh(inner));
    }
  }
  return x;
}

}  // namespace jaxops::cuda

#endif  // JAXOPS_CUDA_ACTIVATION_CUH_
