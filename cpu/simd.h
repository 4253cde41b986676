// Vectors, conversions between storage and arithmetic types, and exp, for the instruction set that
// the including file is compiled for.
//
// Kernel files are compiled once per instruction set with JAXOPS_ISA naming the build. Everything
// here lives in a namespace of that name: were it shared, the linker could keep an AVX-512 copy of
// an inline function for the baseline code to call. For the same reason kernel files use nothing
// inline from the standard library.
#ifndef JAXOPS_CPU_SIMD_H_
#define JAXOPS_CPU_SIMD_H_

#include <cstdint>

#include "common/types.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define JAXOPS_ALWAYS_INLINE inline __attribute__((always_inline))

namespace jaxops::cpu::JAXOPS_ISA {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

// Storage types without arithmetic.
enum class Half : uint16_t {};
enum class BFloat : uint16_t {};

// The constants and types of an arithmetic type.
template <typename A>
struct Simd;

template <>
struct Simd<float> {
  typedef float Vec __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Int __attribute__((vector_size(kVectorBytes)));
  static constexpr int kMantissaBits = 23;
  static constexpr int32_t kExponentBias = 127;
  // log(2) in two parts; the first has few bits, so that its product with an exponent is exact.
  static constexpr float kLog2High = 0x1.62ep-1f;
  static constexpr float kLog2Low = 0x1.0bfbe8p-15f;
  // exp is 0 below kExpMin and infinite above kExpMax.
  static constexpr float kExpMin = -104.0f;
  static constexpr float kExpMax = 89.0f;
  static constexpr int kExpDegree = 7;
  static constexpr int kLogDegree = 8;
};

template <>
struct Simd<double> {
  typedef double Vec __attribute__((vector_size(kVectorBytes)));
  typedef int64_t Int __attribute__((vector_size(kVectorBytes)));
  static constexpr int kMantissaBits = 52;
  static constexpr int64_t kExponentBias = 1023;
  static constexpr double kLog2High = 0x1.62e42fefap-1;
  static constexpr double kLog2Low = 0x1.cf79abc9e3b3ap-40;
  static constexpr double kExpMin = -746.0;
  static constexpr double kExpMax = 710.0;
  static constexpr int kExpDegree = 13;
  static constexpr int kLogDegree = 17;
};

template <typename A>
using Vec = typename Simd<A>::Vec;

template <typename A>
inline constexpr int kLanes = kVectorBytes / sizeof(A);

// The arithmetic type of a storage type.
template <typename S>
struct ArithmeticOf {
  using Type = float;
};
template <>
struct ArithmeticOf<double> {
  using Type = double;
};
template <typename S>
using Arithmetic = typename ArithmeticOf<S>::Type;

typedef uint32_t U32Vec __attribute__((vector_size(kVectorBytes)));
typedef uint16_t U16Vec __attribute__((vector_size(kVectorBytes / 2)));

template <typename To, typename From>
JAXOPS_ALWAYS_INLINE To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename V>
JAXOPS_ALWAYS_INLINE V LoadBits(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}

JAXOPS_ALWAYS_INLINE Vec<float> Load(const float* from) { return LoadBits<Vec<float>>(from); }
JAXOPS_ALWAYS_INLINE Vec<double> Load(const double* from) { return LoadBits<Vec<double>>(from); }

// a * b + c, with one rounding where the instruction set has such an operation. Unlike an
// expression that the compiler may contract or not, it has the same bits wherever it is inlined.
template <typename V>
JAXOPS_ALWAYS_INLINE V MultiplyAdd(V a, V b, V c) {
  constexpr bool kIsFloat = __is_same(V, Vec<float>);
  static_assert(kIsFloat || __is_same(V, Vec<double>));
#if defined(__AVX512F__)
  if constexpr (kIsFloat) {
    return BitCast<V>(_mm512_fmadd_ps(BitCast<__m512>(a), BitCast<__m512>(b), BitCast<__m512>(c)));
  } else {
    return BitCast<V>(
        _mm512_fmadd_pd(BitCast<__m512d>(a), BitCast<__m512d>(b), BitCast<__m512d>(c)));
  }
#elif defined(__FMA__)
  if constexpr (kIsFloat) {
    return BitCast<V>(_mm256_fmadd_ps(BitCast<__m256>(a), BitCast<__m256>(b), BitCast<__m256>(c)));
  } else {
    return BitCast<V>(
        _mm256_fmadd_pd(BitCast<__m256d>(a), BitCast<__m256d>(b), BitCast<__m256d>(c)));
  }
#elif defined(__aarch64__)
  V sum;
  for (int i = 0; i < kLanes<decltype(a[0] + 0)>; ++i) {
    if constexpr (kIsFloat) {
      sum[i] = __builtin_fmaf(a[i], b[i], c[i]);
    } else {
      sum[i] = __builtin_fma(a[i], b[i], c[i]);
    }
  }
  return sum;
#else
  return a * b + c;
#endif
}

// Zero-extends 16-bit entries. Like NarrowBits it uses intrinsics, because compilers split the
// vector.
JAXOPS_ALWAYS_INLINE U32Vec WidenBits(const void* from) {
#if defined(__AVX512F__)
  return BitCast<U32Vec>(_mm512_maskz_cvtepu16_epi32(0xffff, LoadBits<__m256i>(from)));
#elif defined(__AVX2__)
  return BitCast<U32Vec>(_mm256_cvtepu16_epi32(LoadBits<__m128i>(from)));
#else
  return __builtin_convertvector(LoadBits<U16Vec>(from), U32Vec);
#endif
}

// Stores entries below 2^16 in 16 bits each.
JAXOPS_ALWAYS_INLINE void NarrowBits(U32Vec bits, void* to) {
#if defined(__AVX512F__)
  const __m256i narrow = _mm512_maskz_cvtepi32_epi16(0xffff, BitCast<__m512i>(bits));
#elif defined(__AVX2__)
  const __m256i wide = BitCast<__m256i>(bits);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(wide, wide), 0x08);
  const __m128i narrow = _mm256_castsi256_si128(packed);
#else
  const U16Vec narrow = __builtin_convertvector(bits, U16Vec);
#endif
  __builtin_memcpy(to, &narrow, sizeof(narrow));
}

JAXOPS_ALWAYS_INLINE Vec<float> Load(const BFloat* from) {
  return BitCast<Vec<float>>(WidenBits(from) << 16);
}

JAXOPS_ALWAYS_INLINE Vec<float> Load(const Half* from) {
#if defined(__AVX512F__)
  // The mask has all lanes: GCC 12 warns about the unmasked form in its own header.
  return _mm512_maskz_cvtph_ps(0xffff, LoadBits<__m256i>(from));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(LoadBits<__m128i>(from));
#else
  const U32Vec bits = WidenBits(from);
  const U32Vec magnitude = bits & 0x7fff;
  const U32Vec normal = (magnitude << 13) + (112u << 23);
  // This forms no subnormal float, which the caller's floating-point mode may flush to zero.
  const U32Vec subnormal = BitCast<U32Vec>(BitCast<Vec<float>>(normal + (1u << 23)) - 0x1p-14f);
  const U32Vec special = (magnitude << 13) | 0x7f800000;
  const U32Vec finite = magnitude < 0x400 ? subnormal : normal;
  const U32Vec result = magnitude >= 0x7c00 ? special : finite;
  return BitCast<Vec<float>>(result | ((bits & 0x8000) << 16));
#endif
}

JAXOPS_ALWAYS_INLINE void Store(Vec<float> v, float* to) { __builtin_memcpy(to, &v, sizeof(v)); }
JAXOPS_ALWAYS_INLINE void Store(Vec<double> v, double* to) { __builtin_memcpy(to, &v, sizeof(v)); }

// Returns the bits of each entry, rounded to a BFloat.
JAXOPS_ALWAYS_INLINE U32Vec RoundToBFloat(Vec<float> v) {
  const U32Vec bits = BitCast<U32Vec>(v);
  const U32Vec rounded = bits + 0x7fff + ((bits >> 16) & 1);
  // NaN gets a quiet bit, because its payload may be entirely in the half that is dropped.
  return (v != v ? bits | 0x400000 : rounded) >> 16;
}

JAXOPS_ALWAYS_INLINE void Store(Vec<float> v, BFloat* to) { NarrowBits(RoundToBFloat(v), to); }

JAXOPS_ALWAYS_INLINE void Store(Vec<float> v, Half* to) {
#if defined(__AVX512F__)
  constexpr int kRounding = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const __m256i narrow = _mm512_maskz_cvtps_ph(0xffff, v, kRounding);
  __builtin_memcpy(to, &narrow, sizeof(narrow));
#elif defined(__AVX2__)
  const __m128i narrow = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __builtin_memcpy(to, &narrow, sizeof(narrow));
#else
  const U32Vec bits = BitCast<U32Vec>(v);
  const U32Vec magnitude = bits & 0x7fffffff;
  const U32Vec normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
  // After the addition of 1/2, the last bits of the float are a subnormal half, correctly rounded.
  const U32Vec subnormal = BitCast<U32Vec>(BitCast<Vec<float>>(magnitude) + 0.5f) - 0x3f000000;
  const U32Vec nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
  const U32Vec infinity = U32Vec{} + 0x7c00;
  const U32Vec finite = magnitude < 0x38800000 ? subnormal : normal;
  const U32Vec ordered = magnitude >= 0x47800000 ? infinity : finite;
  NarrowBits((v != v ? nan : ordered) | ((bits >> 16) & 0x8000), to);
#endif
}

// Stores two vectors one after the other.
template <typename S>
JAXOPS_ALWAYS_INLINE void StorePair(Vec<Arithmetic<S>> a, Vec<Arithmetic<S>> b, S* to) {
  Store(a, to);
  Store(b, to + kLanes<Arithmetic<S>>);
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Narrowing takes two vectors at a time in this build.
JAXOPS_ALWAYS_INLINE void StorePair(Vec<float> a, Vec<float> b, BFloat* to) {
  const __m256i packed =
      _mm256_packus_epi32(BitCast<__m256i>(RoundToBFloat(a)), BitCast<__m256i>(RoundToBFloat(b)));
  const __m256i narrow = _mm256_permute4x64_epi64(packed, 0xd8);
  __builtin_memcpy(to, &narrow, sizeof(narrow));
}
#endif

// Masks tell the processor which lanes to read and write. The sanitizer of addresses does not know
// them: its build copies entries.
#if defined(__AVX512F__) && !defined(__SANITIZE_ADDRESS__)
#define JAXOPS_HAS_MASKS 1
#else
#define JAXOPS_HAS_MASKS 0
#endif

// Loads the lanes [begin, end) of a vector; the others are zero, and are not read.
template <typename S>
JAXOPS_ALWAYS_INLINE Vec<Arithmetic<S>> LoadLanes(const S* from, int64_t begin, int64_t end) {
#if JAXOPS_HAS_MASKS
  const uint32_t mask = ((uint32_t{1} << end) - 1) & ~((uint32_t{1} << begin) - 1);
  if constexpr (sizeof(S) == 8) {
    return _mm512_maskz_loadu_pd(static_cast<__mmask8>(mask), from);
  } else if constexpr (sizeof(S) == 4) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), from);
  } else {
    S lanes[kLanes<float>];
    const __m256i bits = _mm256_maskz_loadu_epi16(static_cast<__mmask16>(mask), from);
    __builtin_memcpy(lanes, &bits, sizeof(bits));
    return Load(lanes);
  }
#else
  S lanes[kLanes<Arithmetic<S>>] = {};
  __builtin_memcpy(lanes + begin, from + begin, (end - begin) * sizeof(S));
  return Load(lanes);
#endif
}

// Loads the first `count` lanes; the others are zero.
template <typename S>
JAXOPS_ALWAYS_INLINE Vec<Arithmetic<S>> LoadPartial(const S* from, int64_t count) {
  return LoadLanes(from, 0, count);
}

template <typename S>
JAXOPS_ALWAYS_INLINE void StorePartial(Vec<Arithmetic<S>> v, S* to, int64_t count) {
#if JAXOPS_HAS_MASKS
  const uint32_t mask = (uint32_t{1} << count) - 1;
  if constexpr (sizeof(S) == 8) {
    _mm512_mask_storeu_pd(to, static_cast<__mmask8>(mask), v);
  } else if constexpr (sizeof(S) == 4) {
    _mm512_mask_storeu_ps(to, static_cast<__mmask16>(mask), v);
  } else {
    S lanes[kLanes<float>];
    Store(v, lanes);
    _mm256_mask_storeu_epi16(to, static_cast<__mmask16>(mask), LoadBits<__m256i>(lanes));
  }
#else
  S lanes[kLanes<Arithmetic<S>>];
  Store(v, lanes);
  __builtin_memcpy(to, lanes, count * sizeof(S));
#endif
}

// Loads min(count, lanes) lanes; the others are zero.
template <typename S>
JAXOPS_ALWAYS_INLINE Vec<Arithmetic<S>> LoadUpTo(const S* from, int64_t count) {
  return count < kLanes<Arithmetic<S>> ? LoadPartial(from, count) : Load(from);
}

template <typename S>
JAXOPS_ALWAYS_INLINE void StoreUpTo(Vec<Arithmetic<S>> v, S* to, int64_t count) {
  count < kLanes<Arithmetic<S>> ? StorePartial(v, to, count) : Store(v, to);
}

// Keeps the first `count` lanes and sets the others to zero, even if they are NaN.
template <typename A>
JAXOPS_ALWAYS_INLINE Vec<A> KeepLanes(Vec<A> v, int64_t count) {
  using Int = typename Simd<A>::Int;
  Int lane;
  for (int i = 0; i < kLanes<A>; ++i) lane[i] = i;
  const Int keep = lane < static_cast<decltype(lane[0] + 0)>(count);
  return BitCast<Vec<A>>(BitCast<Int>(v) & keep);
}

// All lanes are `a`. A sum with zero would be one more instruction, as it makes 0 of -0.
template <typename A>
JAXOPS_ALWAYS_INLINE Vec<A> Broadcast(A a) {
  return a - Vec<A>{};
}

// Whether Shift is one instruction.
#if defined(__AVX512F__)
inline constexpr bool kHasShifts = true;
#else
inline constexpr bool kHasShifts = false;
#endif

// The lanes of `low` from kLane on, followed by the first kLane lanes of `high`.
template <int kLane, typename V>
JAXOPS_ALWAYS_INLINE V Shift(V low, V high) {
  constexpr int kLanesOfV = sizeof(V) / sizeof(low[0]);
  static_assert(kLane >= 0 && kLane < kLanesOfV);
  if constexpr (kLane == 0) return low;
#if defined(__AVX512F__)
  if constexpr (kLanesOfV == 16) {
    return BitCast<V>(
        _mm512_maskz_alignr_epi32(0xffff, BitCast<__m512i>(high), BitCast<__m512i>(low), kLane));
  } else {
    return BitCast<V>(
        _mm512_maskz_alignr_epi64(0xff, BitCast<__m512i>(high), BitCast<__m512i>(low), kLane));
  }
#else
  V shifted;
  for (int i = 0; i < kLanesOfV; ++i) {
    shifted[i] = i + kLane < kLanesOfV ? low[i + kLane] : high[i + kLane - kLanesOfV];
  }
  return shifted;
#endif
}

// 1 / i! for the terms r^i of exp(r).
template <typename A>
struct ExpSeries {
  A of[Simd<A>::kExpDegree + 1];
};

template <typename A>
constexpr ExpSeries<A> ExpCoefficients() {
  ExpSeries<A> series = {};
  double factorial = 1;
  for (int i = 0; i <= Simd<A>::kExpDegree; ++i) {
    series.of[i] = static_cast<A>(1 / factorial);
    factorial *= i + 1;
  }
  return series;
}

template <typename V>
JAXOPS_ALWAYS_INLINE V Exp(V x) {
  using A = decltype(x[0] + 0);
  using T = Simd<A>;
  using Int = typename T::Int;
  // NaN passes these comparisons.
  x = x < T::kExpMin ? V{} + T::kExpMin : x;
  x = x > T::kExpMax ? V{} + T::kExpMax : x;
  // Adding 1.5 * 2^mantissa rounds to an integer, which is then in the low bits.
  constexpr A kRounder = A(3) * (int64_t{1} << (T::kMantissaBits - 1));
  const V shifted = MultiplyAdd(x, V{} + A(0x1.71547652b82fep0), V{} + kRounder);
  const V exponent = shifted - kRounder;
  const Int power = BitCast<Int>(shifted) - BitCast<Int>(V{} + kRounder);
  const V high = MultiplyAdd(-exponent, V{} + T::kLog2High, x);
  const V r = MultiplyAdd(-exponent, V{} + T::kLog2Low, high);
  constexpr auto kCoefficients = ExpCoefficients<A>();
  V series = V{} + kCoefficients.of[T::kExpDegree];
#pragma GCC unroll 16
  for (int i = T::kExpDegree - 1; i >= 0; --i) {
    series = MultiplyAdd(series, r, V{} + kCoefficients.of[i]);
  }
  // The scale is two factors, because the power of two may be out of range if the result is not.
  const Int half = power >> 1;
  const V scale = BitCast<V>((half + T::kExponentBias) << T::kMantissaBits);
  const V rest = BitCast<V>((power - half + T::kExponentBias) << T::kMantissaBits);
  return series * scale * rest;
}

// 2 atanh(s), the logarithm of (1 + s) / (1 - s), for s in [-1/3, 1/3].
template <typename V>
JAXOPS_ALWAYS_INLINE V TwiceAtanh(V s) {
  using A = decltype(s[0] + 0);
  const V square = s * s;
  V series = V{} + A(1) / A(2 * Simd<A>::kLogDegree + 1);
#pragma GCC unroll 32
  for (int i = Simd<A>::kLogDegree - 1; i > 0; --i) series = A(1) / A(2 * i + 1) + square * series;
  return A(2) * (s + s * (square * series));
}

// log(1 + x) for x in [0, 1], to two roundings of the result.
template <typename V>
JAXOPS_ALWAYS_INLINE V Log1p(V x) {
  using A = decltype(x[0] + 0);
  return TwiceAtanh<V>(x / (x + A(2)));
}

// log(|x|) for x that is not subnormal, as exact + rest: `exact` is a multiple of the high part of
// log(2) and has no rounding error.
template <typename V>
JAXOPS_ALWAYS_INLINE void LogInParts(V x, V& exact, V& rest) {
  using A = decltype(x[0] + 0);
  using T = Simd<A>;
  using Int = typename T::Int;
  // |x| = fraction * 2^power with a fraction between 3/4 and 3/2. With a sign, which targets
  // outside of [0, 1] can give x, the difference of integers would overflow.
  constexpr auto kMagnitude =
      static_cast<decltype(Int{}[0] + 0)>((uint64_t{1} << (8 * sizeof(A) - 1)) - 1);
  const Int bits = BitCast<Int>(x) & kMagnitude;
  const Int three_quarters = BitCast<Int>(V{} + A(0.75));
  const Int power = (bits - three_quarters) >> T::kMantissaBits;
  const V fraction = BitCast<V>(bits - (power << T::kMantissaBits));
  const V exponent = __builtin_convertvector(power, V);
  const V log = TwiceAtanh<V>((fraction - A(1)) / (fraction + A(1)));
  exact = exponent * T::kLog2High;
  rest = exponent * T::kLog2Low + log;
}

// log(x) for x > 0 that is not subnormal; x may be infinite or NaN.
template <typename V>
JAXOPS_ALWAYS_INLINE V Log(V x) {
  V exact, rest;
  LogInParts(x, exact, rest);
  return x - x == 0 ? exact + rest : x;
}

// Rounds to odd: a second rounding, to fewer bits, then equals a single rounding.
JAXOPS_ALWAYS_INLINE float RoundToOdd(double value) {
  const float nearest = static_cast<float>(value);
  const double back = nearest;
  if (back == value || value != value) return nearest;
  const bool away = (back > value) == (value > 0);
  return BitCast<float>((BitCast<uint32_t>(nearest) - (away ? 1u : 0u)) | 1u);
}
JAXOPS_ALWAYS_INLINE float RoundToOdd(float value) { return value; }

// to[i] = from[i] for entries of storage type S and arithmetic type A.
template <typename S, typename A>
inline void Widen(const S* from, int64_t count, A* to) {
  using Wide = Arithmetic<S>;
  constexpr int kLane = kLanes<Wide>;
  if constexpr (__is_same(Wide, A)) {
    int64_t i = 0;
    for (; i + kLane <= count; i += kLane) Store(Load(from + i), to + i);
    if (i < count) StorePartial(LoadPartial(from + i, count - i), to + i, count - i);
  } else {
    for (int64_t i = 0; i < count; i += kLane) {
      const int64_t lanes = count - i < kLane ? count - i : kLane;
      const Vec<Wide> v = LoadPartial(from + i, lanes);
      for (int64_t j = 0; j < lanes; ++j) to[i + j] = static_cast<A>(v[j]);
    }
  }
}

template <typename A, typename S>
inline void Narrow(const A* from, int64_t count, S* to) {
  using Wide = Arithmetic<S>;
  constexpr int kLane = kLanes<Wide>;
  for (int64_t i = 0; i < count; i += kLane) {
    const int64_t lanes = count - i < kLane ? count - i : kLane;
    if constexpr (__is_same(Wide, A)) {
      StorePartial(LoadPartial(from + i, lanes), to + i, lanes);
      continue;
    }
    Vec<Wide> v = {};
    for (int64_t j = 0; j < lanes; ++j) {
      if constexpr (sizeof(S) == sizeof(uint16_t)) {
        v[j] = RoundToOdd(from[i + j]);
      } else {
        v[j] = static_cast<Wide>(from[i + j]);
      }
    }
    StorePartial(v, to + i, lanes);
  }
}

// Calls f with `pointer + offset` as a pointer to the storage type that dtype names.
template <typename F>
JAXOPS_ALWAYS_INLINE void WithStorage(DType dtype, const void* pointer, int64_t offset, F f) {
  switch (dtype) {
    case DType::kF16:
      return f(static_cast<const Half*>(pointer) + offset);
    case DType::kBF16:
      return f(static_cast<const BFloat*>(pointer) + offset);
    case DType::kF32:
      return f(static_cast<const float*>(pointer) + offset);
    case DType::kF64:
      return f(static_cast<const double*>(pointer) + offset);
  }
}

}  // namespace jaxops::cpu::JAXOPS_ISA

#endif  // JAXOPS_CPU_SIMD_H_
