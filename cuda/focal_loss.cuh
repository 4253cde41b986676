// The functions of one logit that both focal losses are made of.
//
// In f32 an element costs two operations of the special function unit, one exponential and one
// reciprocal; the logarithm is a polynomial because that unit's is inaccurate near 1. All hold a
// relative error of a few roundings where the result is a normal number.
#ifndef JAXOPS_CUDA_FOCAL_LOSS_CUH_
#define JAXOPS_CUDA_FOCAL_LOSS_CUH_

#include <algorithm>
#include <cfloat>

#include "common/focal_loss.h"
#include "cuda/launch.h"
#include "cuda/numeric.cuh"

namespace jaxops::focal_loss::cuda {

using jaxops::cuda::Accumulator;
using jaxops::cuda::CeilDiv;
using jaxops::cuda::DispatchBool;
using jaxops::cuda::DispatchFloat;
using jaxops::cuda::kPackBytes;
using jaxops::cuda::kPackElements;
using jaxops::cuda::kWarp;
using jaxops::cuda::LoadPack;
using jaxops::cuda::Narrow;
using jaxops::cuda::Pack;
using jaxops::cuda::Widen;

inline constexpr int kThreads = 256;

inline constexpr float kLog2E = 0x1.715476p+0f;
// log(2) in two parts.
inline constexpr float kLn2High = 0x1.62e430p-1f;
inline constexpr float kLn2Low = -0x1.05c610p-29f;

// Where the loss has underflowed, for every type and however small gamma is.
inline constexpr int kFar = 2000;

__device__ __forceinline__ float Exp2Flushed(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Of x in [1, 2^126].
__device__ __forceinline__ float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ double Reciprocal(double x) { return 1 / x; }

// exp(-|x|). The multiplication by log2(e) rounds the exponent, which a long one magnifies: what it
// lost comes back as a factor. Subnormal results cost three instructions more, or are 0.
template <bool kSubnormal>
__device__ __forceinline__ float ExpOfMagnitude(float x) {
  // Where the result is 0 anyway; an infinite x would lose everything.
  float bounded;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(bounded) : "f"(-fabsf(x)), "f"(-float{kFar}));
  const float exponent = bounded * kLog2E;
  const float lost = fmaf(exponent, -kLn2High, bounded);
  const float power = kSubnormal ? Exp2(exponent) : Exp2Flushed(exponent);
  return fmaf(power, lost, power);
}
template <bool kSubnormal>
__device__ __forceinline__ double ExpOfMagnitude(double x) {
  return exp(-abs(x));
}

// log(1 + x) for x in [0, 1], where `rest` is x / (1 + x): x times one and a polynomial in each of
// the two, with a relative error of 3.7e-8. In x alone that takes two terms more.
__device__ __forceinline__ float Log1p(float x, float rest, float plus) {
  float p = -0x1.06bbe4p-9f;
  p = fmaf(p, x, 0x1.2801aep-6f);
  p = fmaf(p, x, -0x1.8887a2p-4f);
  p = fmaf(p, x, 1.0f);
  float q = -0x1.6e20e2p-6f;
  q = fmaf(q, rest, -0x1.6bca52p-4f);
  q = fmaf(q, rest, -0x1.9ddeecp-2f);
  return fmaf(fmaf(q, rest, p), x, plus);
}
__device__ __forceinline__ double Log1p(double x, double, double plus) { return plus + log1p(x); }

// exp(gamma (log_high + log_low)), exact to a few roundings however long the product is.
__device__ __forceinline__ float ExpOfProduct(float gamma, float log_high, float log_low) {
  log_high = log_high < -kFar ? -kFar : log_high;
  const float high = gamma * log_high;
  const float low = fmaf(gamma, log_low, fmaf(gamma, log_high, -high));
  const float sum = high + low;
  const float back = sum - high;
  const float rest = (high - (sum - back)) + (low - back);
  const float exponent = sum * kLog2E;
  const float lost = fmaf(exponent, -kLn2Low, fmaf(exponent, -kLn2High, sum)) + rest;
  const float power = Exp2(exponent);
  return power == 0 ? power : fmaf(power, lost, power);
}
__device__ __forceinline__ double ExpOfProduct(double gamma, double log_high, double log_low) {
  log_high = log_high < -kFar ? -kFar : log_high;
  const double high = gamma * log_high;
  const double low = fma(gamma, log_low, fma(gamma, log_high, -high));
  const double sum = high + low;
  const double back = sum - high;
  const double rest = (high - (sum - back)) + (low - back);
  const double power = exp(sum);
  return fma(power, rest, power);
}

__device__ __forceinline__ float SquareRoot(float x) {
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ double SquareRoot(double x) { return sqrt(x); }

// What the loss and its slope are made of, for kCount logits of a thread: the probability of the
// wrong answer, which is replaced by its power, and its logarithm in two parts where `power` needs
// it. One choice of the exponent serves them all.
template <typename A, int kCount>
__device__ __forceinline__ void RaiseToGamma(A (&wrong)[kCount], const A (&log_high)[kCount],
                                             const A (&log_low)[kCount], Power power, A gamma) {
  switch (power) {
    case Power::kZero:
#pragma unroll
      for (int k = 0; k < kCount; ++k) wrong[k] = 1;
      break;
    case Power::kHalf:
#pragma unroll
      for (int k = 0; k < kCount; ++k) wrong[k] = SquareRoot(wrong[k]);
      break;
    case Power::kOne:
      break;
    case Power::kTwo:
#pragma unroll
      for (int k = 0; k < kCount; ++k) wrong[k] *= wrong[k];
      break;
    case Power::kAny:
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        wrong[k] = ExpOfProduct(gamma, log_high[k], log_low[k]);
      }
      break;
  }
}

template <typename A>
__device__ __forceinline__ A Largest() {
  return std::is_same_v<A, float> ? A(FLT_MAX) : A(DBL_MAX);
}

// The largest finite number for infinity, where it will be multiplied by zero.
template <typename A>
__device__ __forceinline__ A Finite(A x) {
  return x > Largest<A>() ? Largest<A>() : x;
}

// exp(-|x|) of kCount numbers; subnormal only where the power of the loss would not make it vanish.
template <typename A, int kCount>
__device__ __forceinline__ void ExpOfMagnitude(A (&e)[kCount], const A (&x)[kCount], Power power) {
  if (power == Power::kZero || power == Power::kAny) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) e[k] = ExpOfMagnitude<true>(x[k]);
  } else {
#pragma unroll
    for (int k = 0; k < kCount; ++k) e[k] = ExpOfMagnitude<false>(x[k]);
  }
}

// Loss and slope times `factor` from e = exp(-|x|), x = positive + negative_high + negative_low:
// one of the two parts is zero, and `leads` says whether it is the negative one.
template <bool kSlope, typename A, int kCount>
__device__ __forceinline__ void Evaluate(A (&loss)[kCount], A (&slope)[kCount],
                                         const A (&e)[kCount], const bool (&leads)[kCount],
                                         const A (&positive)[kCount],
                                         const A (&negative_high)[kCount],
                                         const A (&negative_low)[kCount], const A (&factor)[kCount],
                                         Power power, A gamma) {
  A scaled[kCount], wrong[kCount], right[kCount], softplus[kCount], log_low[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const A inverse = Reciprocal(1 + e[k]);
    const A rest = e[k] * inverse;
    wrong[k] = scaled[k] = leads[k] ? inverse : rest;
    right[k] = leads[k] ? rest : inverse;
    softplus[k] = Log1p(e[k], rest, positive[k]);
    // Unused, like the other logarithm, but for exponents that need them.
    log_low[k] = negative_low[k] - Log1p(e[k], rest, A(0));
  }
  RaiseToGamma(scaled, negative_high, log_low, power, gamma);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    scaled[k] *= factor[k];
    loss[k] = scaled[k] * softplus[k];
    if constexpr (kSlope) {
      slope[k] = scaled[k] * (gamma * right[k] * Finite(softplus[k]) + wrong[k]);
    }
  }
}

// Widens a pack; a pair of bf16 is one word, of which each half is one instruction away.
template <typename T, int kCount>
__device__ __forceinline__ void WidenAll(Accumulator<T> (&wide)[kCount],
                                         const Pack<T, kCount>& pack) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && kCount > 1) {
    const auto* words = reinterpret_cast<const uint32_t*>(&pack);
#pragma unroll
    for (int k = 0; k < kCount / 2; ++k) {
      wide[2 * k] = __uint_as_float(words[k] << 16);
      wide[2 * k + 1] = __uint_as_float(words[k] & 0xffff0000);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kCount; ++k) wide[k] = Widen(pack.values[k]);
  }
}

template <typename Params>
cudaError_t Launch(void (*kernel)(Params), int64_t blocks, cudaStream_t stream,
                   const Params& params) {
  return jaxops::cuda::Launch(kernel, blocks, kThreads, 0, stream, params);
}

}  // namespace jaxops::focal_loss::cuda

#endif  // JAXOPS_CUDA_FOCAL_LOSS_CUH_
