// Rows of channels as vectors, and functions that all kernels of interpolation along axes share.
#ifndef JAXOPS_CPU_ROWS_H_
#define JAXOPS_CPU_ROWS_H_

#include <cstdint>

#include "cpu/simd.h"

namespace jaxops::cpu::JAXOPS_ISA {

#if defined(__AVX2__)
// Returns a mask with all bits of the first `count` lanes.
template <typename A>
JAXOPS_ALWAYS_INLINE __m256i FirstLanes(int64_t count) {
  if constexpr (sizeof(A) == 8) {
    return _mm256_cmpgt_epi64(_mm256_set1_epi64x(count), _mm256_setr_epi64x(0, 1, 2, 3));
  } else {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
}
#endif

// The first `count` lanes, fewer than all.
template <typename S>
JAXOPS_ALWAYS_INLINE Vec<Arithmetic<S>> LoadFirst(const S* from, int64_t count) {
#if defined(__AVX512F__)
  const uint32_t mask = (1u << count) - 1;
  if constexpr (sizeof(S) == 8) {
    return _mm512_maskz_loadu_pd(mask, from);
  } else if constexpr (sizeof(S) == 4) {
    return _mm512_maskz_loadu_ps(mask, from);
  } else {
    const __m256i lanes = _mm256_maskz_loadu_epi16(mask, from);
    return Load(reinterpret_cast<const S*>(&lanes));
  }
#else
#if defined(__AVX2__)
  if constexpr (sizeof(S) == 8) return _mm256_maskload_pd(from, FirstLanes<double>(count));
  if constexpr (sizeof(S) == 4) return _mm256_maskload_ps(from, FirstLanes<float>(count));
#endif
  return LoadPartial(from, count);
#endif
}

template <typename S>
JAXOPS_ALWAYS_INLINE void StoreFirst(Vec<Arithmetic<S>> v, S* to, int64_t count) {
#if defined(__AVX512F__)
  const uint32_t mask = (1u << count) - 1;
  if constexpr (sizeof(S) == 8) {
    _mm512_mask_storeu_pd(to, mask, v);
  } else if constexpr (sizeof(S) == 4) {
    _mm512_mask_storeu_ps(to, mask, v);
  } else {
    __m256i lanes;
    Store(v, reinterpret_cast<S*>(&lanes));
    _mm256_mask_storeu_epi16(to, mask, lanes);
  }
#else
#if defined(__AVX2__)
  if constexpr (sizeof(S) == 8) return _mm256_maskstore_pd(to, FirstLanes<double>(count), v);
  if constexpr (sizeof(S) == 4) return _mm256_maskstore_ps(to, FirstLanes<float>(count), v);
#endif
  StorePartial(v, to, count);
#endif
}

template <typename A, int kCount>
struct LanesOf {
  typedef A Type __attribute__((vector_size(kCount * sizeof(A))));
};
template <typename A>
struct LanesOf<A, 1> {
  using Type = A;
};

// A vector of kCount lanes, a power of two.
template <typename A, int kCount>
using Lanes = typename LanesOf<A, kCount>::Type;

// Rows of kWidth channels, as vectors whose lanes after the last channel are zero.
template <typename A, int kWidth>
struct Row {
  static constexpr int kCount = kWidth == 3 ? 4 : kWidth;
  using V = Lanes<A, kCount>;

  JAXOPS_ALWAYS_INLINE static V Read(const A* from) {
    if constexpr (kWidth == kCount) {
      return LoadBits<V>(from);
    } else {
#if defined(__AVX2__)
      if constexpr (sizeof(A) == 8) return _mm256_maskload_pd(from, FirstLanes<double>(kWidth));
      if constexpr (sizeof(A) == 4) return _mm_maskload_ps(from, _mm_setr_epi32(-1, -1, -1, 0));
#endif
      return V{from[0], from[1], from[2], 0};
    }
  }

  template <typename S>
  JAXOPS_ALWAYS_INLINE static V Read(const S* from) {
    constexpr int kBits = kWidth < 4 ? 4 : kWidth;  // channels that are converted together
    using Bits = Lanes<uint16_t, kBits>;
    Bits bits;
    if constexpr (kWidth >= 4) {
      bits = LoadBits<Bits>(from);
    } else {
      // The vector is formed in a register: a load of just-written entries would wait for their
      // stores.
      uint64_t all;
      if constexpr (kWidth == 1) {
        all = LoadBits<uint16_t>(from);
      } else {
        all = LoadBits<uint32_t>(from);
      }
      if constexpr (kWidth == 3) all |= uint64_t{LoadBits<uint16_t>(from + 2)} << 32;
      bits = BitCast<Bits>(all);
    }
    const auto wide = ToFloat<kBits>(bits, S{});
    if constexpr (kWidth == 1) return wide[0];
    if constexpr (kWidth == 2) return V{wide[0], wide[1]};
    if constexpr (kWidth >= 3) return wide;
  }

  JAXOPS_ALWAYS_INLINE static void Write(V v, A* to) {
    if constexpr (kWidth == kCount) {
      __builtin_memcpy(to, &v, sizeof(v));
    } else {
      for (int f = 0; f < kWidth; ++f) to[f] = v[f];
    }
  }

  JAXOPS_ALWAYS_INLINE static A Sum(V v) {
    if constexpr (kWidth == 1) {
      return v;
    } else {
      A sum = v[0];
      for (int f = 1; f < kWidth; ++f) sum += v[f];
      return sum;
    }
  }

 private:
  template <int kBits>
  JAXOPS_ALWAYS_INLINE static Lanes<float, kBits> ToFloat(Lanes<uint16_t, kBits> bits, BFloat) {
    using Wide = Lanes<uint32_t, kBits>;
    return BitCast<Lanes<float, kBits>>(__builtin_convertvector(bits, Wide) << 16);
  }

  template <int kBits>
  JAXOPS_ALWAYS_INLINE static Lanes<float, kBits> ToFloat(Lanes<uint16_t, kBits> bits, Half) {
#if defined(__AVX2__)
    if constexpr (kBits == 4) return _mm_cvtph_ps(_mm_cvtsi64_si128(BitCast<int64_t>(bits)));
    if constexpr (kBits == 8) return _mm256_cvtph_ps(BitCast<__m128i>(bits));
#else
    Half halves[kBits];
    float lanes[kBits];
    __builtin_memcpy(halves, &bits, sizeof(bits));
    for (int i = 0; i < kBits; i += kLanes<float>) Store(Load(halves + i), lanes + i);
    return LoadBits<Lanes<float, kBits>>(lanes);
#endif
  }
};

// Entries in the arithmetic type, rounded.
template <typename S>
JAXOPS_ALWAYS_INLINE void StoreRounded(const Arithmetic<S>* from, int64_t count, S* to) {
  constexpr int64_t kStep = kLanes<Arithmetic<S>>;
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) Store(Load(from + i), to + i);
  if (i < count) StorePartial(LoadPartial(from + i, count - i), to + i, count - i);
}

// Entries of a storage type in the arithmetic type.
template <typename S>
JAXOPS_ALWAYS_INLINE void LoadWide(const S* from, int64_t count, Arithmetic<S>* to) {
  constexpr int64_t kStep = kLanes<Arithmetic<S>>;
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) Store(Load(from + i), to + i);
  if (i < count) StorePartial(LoadPartial(from + i, count - i), to + i, count - i);
}

// The sum of all lanes, by halves.
template <typename A, int kCount = kLanes<A>>
JAXOPS_ALWAYS_INLINE A SumLanes(Lanes<A, kCount> v) {
  if constexpr (kCount == 1) {
    return v;
  } else {
    struct Halves {
      Lanes<A, kCount / 2> first, second;
    };
    const auto halves = BitCast<Halves>(v);
    return SumLanes<A, kCount / 2>(halves.first + halves.second);
  }
}

// Multiplies the weights of the entries around points, for the axes before this one, by the factors
// of this axis: w[2c] and w[2c + 1] are computed from w[c].
template <int kCorners, typename V>
JAXOPS_ALWAYS_INLINE void MultiplyWeights(int axis, V lower, V upper, V (&weights)[kCorners]) {
  JAXOPS_UNROLL
  for (int c = (1 << axis) - 1; c >= 0; --c) {
    weights[2 * c + 1] = weights[c] * upper;
    weights[2 * c] = weights[c] * lower;
  }
}

template <int kValue>
struct Constant {};

// kWidth if a vector has at least that number of lanes, otherwise 0.
template <typename A, int kWidth>
constexpr Constant<(kWidth <= kLanes<A> ? kWidth : 0)> IfHeld() {
  return {};
}

// Calls run with the number of channels, or with 0 if no kernel has that number as a constant.
template <typename A, typename Run>
JAXOPS_ALWAYS_INLINE void WithWidth(int64_t width, Run run) {
  switch (width) {
    case 1:
      return run(Constant<1>());
    case 2:
      return run(IfHeld<A, 2>());
    case 3:
      return run(IfHeld<A, 3>());
    case 4:
      return run(IfHeld<A, 4>());
    case 8:
      return run(IfHeld<A, 8>());
    default:
      return run(Constant<0>());
  }
}

// One entry of a storage type.
template <typename A, typename S>
JAXOPS_ALWAYS_INLINE A LoadScalar(const S* from) {
  if constexpr (sizeof(S) == sizeof(uint16_t)) {
    return Row<float, 1>::Read(from);
  } else {
    return static_cast<A>(*from);
  }
}

}  // namespace jaxops::cpu::JAXOPS_ISA

#endif  // JAXOPS_CPU_ROWS_H_
