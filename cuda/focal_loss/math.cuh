// This header has the functions of one logit that both focal losses use.
//
// In f32 an element costs two operations of the special function unit, one exponential and one
// reciprocal; the logarithm is a polynomial because that unit's is inaccurate near 1. All hold a
// relative error of a few roundings where the result is a normal number.
#ifndef JAXOPS_CUDA_FOCAL_LOSS_MATH_CUH_
#define JAXOPS_CUDA_FOCAL_LOSS_MATH_CUH_

#include <algorithm>
#include <cfloat>

#include "common/focal_loss.h"
#include "cuda/common/launch.h"
#include "cuda/common/numeric.cuh"

namespace jaxops::focal_loss::cuda {

using jaxops::cuda::Accumulator;
using jaxops::cuda::CeilDiv;
using jaxops::cuda::DispatchBool;
using jaxops::cuda::DispatchFloat;
using jaxops::cuda::kVectorBytes;
using jaxops::cuda::kVectorElements;
using jaxops::cuda::kWarp;
using jaxops::cuda::LoadVector;
using jaxops::cuda::Narrow;
using jaxops::cuda::Vector;
using jaxops::cuda::Widen;

inline constexpr int kThreads = 256;

inline constexpr float kLog2E = 0x1.715476p+0f;
// kLn2High and kLn2Low add up to log(2).
inline constexpr float kLn2High = 0x1.62e430p-1f;
inline constexpr float kLn2Low = -0x1.05c610p-29f;

// At this magnitude the loss has underflowed, for every type and any small gamma.
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
// This Reciprocal is for x up to 2^126.
__device__ __forceinline__ float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// The 20 bits of the unit and one step of Halley's method give an error of 0.53 units in the last
// place.
__device__ __forceinline__ double Reciprocal(double x) {
  double y;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
  const double error = fma(-x, y, 1.0);
  return fma(y, fma(error, error, error), y);
}

// ExpOfMagnitude returns exp(-|x|). The multiplication by log2(e) rounds the exponent, and a large
// exponent magnifies that error, so the lost part is multiplied back in. Subnormal results cost
// three instructions more, or are 0.
template <bool kSubnormal>
__device__ __forceinline__ float ExpOfMagnitude(float x) {
  // Beyond the bound the result is 0 anyway, and an infinite x would make the lost part NaN.
  float bounded;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(bounded) : "f"(-fabsf(x)), "f"(-float{kFar}));
  const float exponent = bounded * kLog2E;
  const float lost = fmaf(exponent, -kLn2High, bounded);
  const float power = kSubnormal ? Exp2(exponent) : Exp2Flushed(exponent);
  return fmaf(power, lost, power);
}

// Polynomial evaluates a polynomial from its coefficients, the highest power first.
template <int kTerms>
__device__ __forceinline__ double Polynomial(const double (&terms)[kTerms], double x) {
  double p = terms[0];
#pragma unroll
  for (int i = 1; i < kTerms; ++i) p = fma(p, x, terms[i]);
  return p;
}

// In f64, exp(-|x|) is a polynomial, with a relative error of 3.6e-18, times a power of two. The
// power is added directly to the exponent bits, lifted so that they stay normal until the last
// multiplication.
template <bool kSubnormal>
__device__ __forceinline__ double ExpOfMagnitude(double x) {
  constexpr double kTerms[] = {0x1.ad7f6d7911672p-26,
                               0x1.28ad72d147d89p-22,
                               0x1.71df2552af8d3p-19,
                               0x1.a0199a0c611a8p-16,
                               0x1.a01a012a57cd8p-13,
                               0x1.6c16c1842a147p-10,
                               0x1.1111111127be4p-7,
                               0x1.555555555087cp-5,
                               0x1.55555555554fap-3,
                               0x1.000000000000ap-1,
                               1.0};
  constexpr int kLift = 64;
  // Numbers of this size have no fraction, and are integers in their lower 32 bits.
  constexpr double kRound = 0x1.8p52;
  // A sign change that is not part of another instruction would be an f64 instruction of its own,
  // so this code changes bits.
  const double magnitude = __hiloint2double(__double2hiint(x) & INT32_MAX, __double2loint(x));
  const double bounded = magnitude > 746 ? 746 : magnitude;
  const double rounded = fma(bounded, -0x1.71547652b82fep+0, kRound);
  const double exponent = rounded - kRound;
  const double rest =
      fma(exponent, -0x1.abc9e3b39803fp-56, fma(exponent, -0x1.62e42fefa39efp-1, -bounded));
  const double p = Polynomial(kTerms, rest);
  const int lifted = (__double2loint(rounded) + kLift) << 20;
  const double power = __hiloint2double(__double2hiint(1.0) + lifted, 0);
  const double slope = __hiloint2double(__double2hiint(p) + lifted, __double2loint(p));
  return fma(slope, rest, power) * 0x1p-64;
}

// Log1p returns log(1 + x) for x in [0, 1], where `rest` is x / (1 + x): x times one plus a
// polynomial in each of x and `rest`, with a relative error of 3.7e-8. A polynomial in x alone
// would need two terms more.
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
// With s = x / (2 + x), log(1 + x) is 2 atanh(s), an odd function, whose polynomial is short: with
// a relative error of 4.9e-17. Twice s is x - s x, and most of the result thus exact.
__device__ __forceinline__ double Log1p(double x, double, double plus) {
  constexpr double kTerms[] = {0x1.6b4f6a3f020a2p-3, 0x1.959e9c1f5d93dp-4, 0x1.163f6a532cfc1p-3,
                               0x1.3aa9285ab0208p-3, 0x1.74624feff72c4p-3, 0x1.c71c4a6da1bc2p-3,
                               0x1.2492497829efcp-2, 0x1.99999998ebdcdp-2, 0x1.5555555555937p-1};
  const double s = x * Reciprocal(2 + x);
  const double square = s * s;
  return fma(-s, fma(-square, Polynomial(kTerms, square), x), x + plus);
}

// ExpOfProduct returns exp(gamma (log_high + log_low)) with an error of a few roundings for any
// size of the product. The bound keeps the rest of an infinite product from being NaN.
__device__ __forceinline__ float ExpOfProduct(float gamma, float log_high, float log_low) {
  log_high = log_high < -kFar ? -kFar : log_high;
  float high;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(high) : "f"(gamma * log_high), "f"(-FLT_MAX));
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
  const double product = gamma * log_high;
  const double high = product < -DBL_MAX ? -DBL_MAX : product;
  const double low = fma(gamma, log_low, fma(gamma, log_high, -high));
  const double sum = high + low;
  const double back = sum - high;
  const double rest = (high - (sum - back)) + (low - back);
  const double power = ExpOfMagnitude<true>(sum);
  return power == 0 ? power : fma(power, rest, power);
}

__device__ __forceinline__ float SquareRoot(float x) {
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ double SquareRoot(double x) { return sqrt(x); }

// Digits says which results the code serves: f32, f64 or a sum; f16 or bf16 with a sum; or f16 or
// bf16 alone.
enum class Digits { kFull, kHalfWithSum, kHalf };

// These are exp(-|x|) and log(1 + x) with a relative error of 6e-6, for results of 11 bits.
template <bool kSubnormal>
__device__ __forceinline__ float ShortExpOfMagnitude(float x) {
  const float exponent = -kLog2E * fabsf(x);
  return kSubnormal ? Exp2(exponent) : Exp2Flushed(exponent);
}
__device__ __forceinline__ float ShortLog1p(float x, float rest, float plus) {
  const float p = fmaf(fmaf(0x1.bb4930p-7f, x, -0x1.932aecp-4f), x, 1.0f);
  const float q = fmaf(-0x1.5cd2f0p-4f, rest, -0x1.9af1d4p-2f);
  return fmaf(fmaf(q, rest, p), x, plus);
}

// RaiseToGamma replaces the probability of the wrong answer by its power, for kCount logits of a
// thread. The logarithm of the probability comes in two parts, for a `power` that needs it. All
// logits share one branch on the exponent.
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

// Finite returns the largest finite number for infinity, for a multiplication by zero.
template <typename A>
__device__ __forceinline__ A Finite(A x) {
  return x > Largest<A>() ? Largest<A>() : x;
}
// In f64, Finite returns a large number for infinity and NaN, without an f64 instruction. A NaN
// also reaches the result by another operand.
__device__ __forceinline__ double Finite(double x) {
  return __hiloint2double(min(__double2hiint(x), __double2hiint(DBL_MAX)), __double2loint(x));
}

// This overload computes exp(-|x|) of kCount numbers; results are subnormal only if the power of
// the loss would not underflow anyway.
template <Digits kDigits = Digits::kFull, typename A, int kCount>
__device__ __forceinline__ void ExpOfMagnitude(A (&e)[kCount], const A (&x)[kCount], Power power) {
  const auto each = [&](auto subnormal) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if constexpr (kDigits == Digits::kHalf) {
        e[k] = ShortExpOfMagnitude<subnormal.value>(x[k]);
      } else {
        e[k] = ExpOfMagnitude<subnormal.value>(x[k]);
      }
    }
  };
  if (power == Power::kZero || power == Power::kAny) {
    each(std::true_type());
  } else {
    each(std::false_type());
  }
}

// Evaluate computes the loss and the slope times `factor` from e = exp(-|x|), where x = positive +
// negative_high + negative_low. One of the two signs' parts is zero, and `leads` says whether it is
// the negative one.
template <bool kSlope, Digits kDigits = Digits::kFull, typename A, int kCount>
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
    // The compiler removes the logarithm of `wrong` for exponents that do not need it.
    if constexpr (kDigits == Digits::kHalf) {
      softplus[k] = ShortLog1p(e[k], rest, positive[k]);
      log_low[k] = negative_low[k] - ShortLog1p(e[k], rest, A(0));
    } else {
      softplus[k] = Log1p(e[k], rest, positive[k]);
      log_low[k] = negative_low[k] - Log1p(e[k], rest, A(0));
    }
  }
  RaiseToGamma(scaled, negative_high, log_low, power, gamma);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    scaled[k] *= factor[k];
    loss[k] = scaled[k] * softplus[k];
    if constexpr (kSlope) {
      // If `wrong` is near 1, the difference from 1 has few digits, but 16-bit results need few:
      // the difference is added to `wrong`.
      const A share = kDigits == Digits::kFull ? gamma * right[k] : gamma - gamma * wrong[k];
      slope[k] =
          scaled[k] * (power == Power::kZero ? wrong[k] : share * Finite(softplus[k]) + wrong[k]);
    }
  }
}

// WidenVector widens a vector; each half of a pair of bf16 takes one instruction. WidenAll of
// cuda/common/numeric.cuh does the same, with machine code that losses have not run with on a GPU.
template <typename T, int kCount>
__device__ __forceinline__ void WidenVector(Accumulator<T> (&wide)[kCount],
                                            const Vector<T, kCount>& vec) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && kCount > 1) {
    const auto* words = reinterpret_cast<const uint32_t*>(&vec);
#pragma unroll
    for (int k = 0; k < kCount / 2; ++k) {
      wide[2 * k] = __uint_as_float(words[k] << 16);
      wide[2 * k + 1] = __uint_as_float(words[k] & 0xffff0000);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kCount; ++k) wide[k] = Widen(vec.values[k]);
  }
}

template <typename Params>
cudaError_t Launch(void (*kernel)(Params), int64_t blocks, cudaStream_t stream,
                   const Params& params) {
  return jaxops::cuda::Launch(kernel, blocks, kThreads, 0, stream, params);
}

}  // namespace jaxops::focal_loss::cuda

#endif  // JAXOPS_CUDA_FOCAL_LOSS_MATH_CUH_
