// Tiles of sums, products of matrices and copies of pixels, which the kernels of convolution share;
// for kernel files (see simd.h).
#ifndef JAXOPS_CPU_CONV_PRODUCTS_H_
#define JAXOPS_CPU_CONV_PRODUCTS_H_

#include <cstdint>

#include "common/im2col.h"
#include "common/types.h"
#include "cpu/conv_axes.h"
#include "cpu/conv_kernels.h"
#include "cpu/conv_results.h"
#include "cpu/isa.h"
#include "cpu/simd.h"

namespace jaxops::conv::cpu::JAXOPS_ISA {

// The sums of a tile, a few vectors of the kernel and an entry of the source are in registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kMaxVectors = 4;
constexpr int TilePixels(int vectors) { return vectors == 4 ? 6 : vectors == 3 ? 8 : 12; }
#else
constexpr int kMaxVectors = 2;
constexpr int TilePixels(int vectors) { return vectors == 2 ? 6 : 8; }
#endif
constexpr int kTileMatrices = 2;

inline int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t Max(int64_t a, int64_t b) { return a < b ? b : a; }
inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t Aligned(int64_t bytes) { return CeilDiv(bytes, 64) * 64; }

// How many entries are multiplied at a time.
template <typename E>
inline constexpr int kPair = sizeof(E) == sizeof(uint16_t) ? 2 : 1;

// Entries of the source and rows of the kernel that are multiplied. The pixels of a tile have their
// entries at offsets from these.
template <typename E>
struct Factors {
  const E* kernel;
  const E* source;
  int64_t length;
};

// Reads the sums of a tile, or sets them to zeros.
template <int kRows, int kVectors, typename V>
JAXOPS_ALWAYS_INLINE void LoadSums(const void* sums, bool adds, V (&total)[kRows][kVectors]) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const char* from = static_cast<const char*>(sums) + (r * kVectors + v) * sizeof(V);
      total[r][v] = adds ? LoadBits<V>(from) : V{};
    }
  }
}

template <int kRows, int kVectors, typename V>
JAXOPS_ALWAYS_INLINE void StoreSums(const V (&total)[kRows][kVectors], void* sums) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      char* to = static_cast<char*>(sums) + (r * kVectors + v) * sizeof(V);
      __builtin_memcpy(to, &total[r][v], sizeof(V));
    }
  }
}

#if defined(__AVX512F__) && defined(JAXOPS_COMPILES_PAIRS)
#define JAXOPS_HAS_PAIRS 1
// For functions that need more than the features of their file: `FindBf16Products` is asked before
// they are called.
#define JAXOPS_PAIRS_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))

// Adds the products of entries `i` and `i` + 1 of all pixels, or of entry `i` alone: what follows
// it in the source and in the kernel may be NaN or Inf.
template <int kPixels, int kVectors, bool kIsSingle>
JAXOPS_ALWAYS_INLINE JAXOPS_PAIRS_TARGET void AddPair(const BFloat* kernel,
                                                      const BFloat* const (&source)[kPixels],
                                                      int64_t i, __m512 (*total)[kVectors]) {
  __m512i entries[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    entries[v] = _mm512_loadu_si512(kernel + 2 * v * kLanes<float>);
    if (kIsSingle) entries[v] = _mm512_and_si512(entries[v], _mm512_set1_epi32(0xffff));
  }
#pragma GCC unroll 16
  for (int p = 0; p < kPixels; ++p) {
    // No array of the pairs of all pixels: GCC would collect it in a vector, entry by entry.
    int32_t pair = static_cast<uint16_t>(source[p][i]);
    if constexpr (!kIsSingle) __builtin_memcpy(&pair, source[p] + i, sizeof(pair));
    const __m512i pairs = _mm512_set1_epi32(pair);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      total[p][v] = _mm512_dpbf16_ps(total[p][v], (__m512bh)pairs, (__m512bh)entries[v]);
    }
  }
}

template <int kPixels, int kVectors>
JAXOPS_PAIRS_TARGET void AddPairs(const Factors<BFloat>* factors, int64_t count,
                                  const int64_t (&offsets)[kPixels], bool adds, float* sums) {
  constexpr int kWidth = kVectors * kLanes<float>;
  __m512 total[kPixels][kVectors];
  LoadSums(sums, adds, total);
  for (int64_t f = 0; f < count; ++f) {
    const BFloat* kernel = factors[f].kernel;
    const BFloat* source[kPixels];
#pragma GCC unroll 16
    for (int p = 0; p < kPixels; ++p) source[p] = factors[f].source + offsets[p];
    const int64_t length = factors[f].length;
    int64_t i = 0;
    for (; i + 2 <= length; i += 2, kernel += 2 * kWidth) {
      AddPair<kPixels, kVectors, false>(kernel, source, i, total);
    }
    if (i < length) AddPair<kPixels, kVectors, true>(kernel, source, i, total);
  }
  StoreSums(total, sums);
}
#endif

#if defined(JAXOPS_HAS_PAIRS) && defined(JAXOPS_COMPILES_MATRICES)
#define JAXOPS_HAS_MATRICES 1
#define JAXOPS_MATRICES_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,amx-tile,amx-bf16")))

// Registers of matrices have 16 rows of 64 bytes. The sums are in 0 to 3, the operands in 4 to 7.
constexpr int64_t kMatrixRowBytes = kMatrixEntries * sizeof(BFloat);
static_assert(kVectorBytes == kMatrixRowBytes);

// Orders reads and writes of `memory` with those of instructions for matrices, which compilers do
// not know.
JAXOPS_ALWAYS_INLINE void OrderMemory(const void* memory) {
  asm volatile("" : : "r"(memory) : "memory");
}

inline JAXOPS_MATRICES_TARGET void ConfigureMatrices() {
  struct {
    uint8_t palette = 1;
    uint8_t reserved[15] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = kMatrixRowBytes;
    config.rows[i] = kMatrixRows;
  }
  OrderMemory(&config);
  _tile_loadconfig(&config);
}

inline JAXOPS_MATRICES_TARGET void ReleaseMatrices() { _tile_release(); }

// As AddPairs, for one or two matrices, whose rows are `step` entries apart. Two matrices share
// what is loaded of the kernel, and two vectors what is loaded of the source. Lengths are multiples
// of kMatrixEntries.
template <int kVectors>
JAXOPS_MATRICES_TARGET void AddMatrices(const Factors<BFloat>* factors, int64_t count,
                                        const int64_t* offsets, int64_t matrices, int64_t step,
                                        bool adds, float* sums) {
  constexpr int64_t kWidth = kVectors * kLanes<float>;
  constexpr int64_t kPairBytes = 2 * kWidth * sizeof(BFloat);  // of a row of pairs of the kernel
  constexpr int64_t kSumBytes = kWidth * sizeof(float);
  const int64_t step_bytes = step * sizeof(BFloat);
  const bool has_two = matrices > 1;
  float* const second_sums = sums + kMatrixRows * kWidth;
  OrderMemory(sums);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if (adds) {
    _tile_loadd(0, sums, kSumBytes);
    if constexpr (kVectors > 1) _tile_loadd(1, sums + kLanes<float>, kSumBytes);
    if (has_two) {
      _tile_loadd(2, second_sums, kSumBytes);
      if constexpr (kVectors > 1) _tile_loadd(3, second_sums + kLanes<float>, kSumBytes);
    }
  }
  for (int64_t f = 0; f < count; ++f) {
    const BFloat* kernel = factors[f].kernel;
    const BFloat* source = factors[f].source;
    for (int64_t i = 0; i < factors[f].length;
         i += kMatrixEntries, kernel += kMatrixEntries * kWidth) {
      _tile_loadd(4, source + offsets[0] + i, step_bytes);
      _tile_loadd(6, kernel, kPairBytes);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kVectors > 1) {
        _tile_loadd(7, kernel + kMatrixEntries, kPairBytes);
        _tile_dpbf16ps(1, 4, 7);
      }
      if (has_two) {
        _tile_loadd(5, source + offsets[1] + i, step_bytes);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (kVectors > 1) _tile_dpbf16ps(3, 5, 7);
      }
    }
  }
  _tile_stored(0, sums, kSumBytes);
  if constexpr (kVectors > 1) _tile_stored(1, sums + kLanes<float>, kSumBytes);
  if (has_two) {
    _tile_stored(2, second_sums, kSumBytes);
    if constexpr (kVectors > 1) _tile_stored(3, second_sums + kLanes<float>, kSumBytes);
  }
  OrderMemory(sums);
}
#endif

// Pixels that are computed from one copy of what they read: those of some lines, from `low` on.
struct Block {
  int64_t image;
  int64_t at0;   // in the first dimension
  int64_t line;  // the first one, in the second dimension
  int64_t lines;
  int64_t low;
  int64_t count;  // of a line
};

inline int64_t GreatestCommonDivisor(int64_t a, int64_t b) {
  while (b != 0) {
    const int64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

// How entries of the source along a dimension are copied: those of all results for a tap follow one
// another. Taps may share entries if their distance is a multiple of the step of results, and do so
// if that takes fewer copies.
struct TapLayout {
  int64_t period;  // of taps that share entries
  int64_t size;    // between taps that do not
  int64_t count;
  int64_t tap_step;
  int64_t step;

  static TapLayout Of(const Axis& axis, int64_t results) {
    const int64_t taps = Max(1, axis.taps);
    const int64_t period = axis.step / GreatestCommonDivisor(axis.step, axis.tap_step);
    const int64_t size = results + (taps - 1) * axis.tap_step / axis.step;
    // Compared by division: a dilation may be close to the largest integer.
    if (size >= CeilDiv(taps * results, Min(period, taps))) {
      return {taps, results, taps * results, 0, axis.step};
    }
    return {period, size, Min(period, taps) * size, axis.tap_step, axis.step};
  }

  int64_t At(int64_t tap) const { return tap % period * size + Within(tap); }
  // The copy among those that taps share.
  int64_t Within(int64_t tap) const { return tap * tap_step / step; }
  // The first entry that is copied for a tap that shares entries with none before it.
  int64_t FirstOf(int64_t tap, const Axis& axis) const {
    return tap * axis.tap_step - Within(tap) * step;
  }
};

template <typename S, typename A>
inline void WidenRows(const S* from, int64_t rows, int64_t stride, int64_t fan, int64_t padded,
                      A* to) {
  if (fan == padded && fan == stride) {
    fan = padded = rows * fan;
    rows = 1;
  }
  for (int64_t row = 0; row < rows; ++row, from += stride, to += padded) {
    if constexpr (__is_same(S, A)) {
      __builtin_memcpy(to, from, fan * sizeof(A));
      __builtin_memset(to + fan, 0, (padded - fan) * sizeof(A));
    } else {
      for (int64_t i = 0; i < fan; i += kLanes<A>) {
        StoreUpTo(LoadUpTo(from + i, fan - i), to + i, padded - i);
      }
    }
  }
}

// Copies pixels of `count` entries each, filled up with zeros to `width`.
inline void CopyPixels(DType dtype, const void* from, int64_t stride, int64_t pixels, int64_t count,
                       int64_t width, float* to) {
  WithStorage(dtype, from, 0, [=]<typename S>(const S* entries) {
    if constexpr (sizeof(Arithmetic<S>) == sizeof(float)) {
      WidenRows(entries, pixels, stride, count, width, to);
    }
  });
}

inline void CopyPixels(DType, const void* from, int64_t stride, int64_t pixels, int64_t count,
                       int64_t width, double* to) {
  WidenRows(static_cast<const double*>(from), pixels, stride, count, width, to);
}

#if defined(JAXOPS_HAS_PAIRS)
inline void CopyPixels(DType, const void* from, int64_t stride, int64_t pixels, int64_t count,
                       int64_t width, BFloat* to) {
  WidenRows(static_cast<const BFloat*>(from), pixels, stride, count, width, to);
}
#endif

// Windows [low, high) whose tap is in the image.
struct Range {
  int64_t low, high;
};

JAXOPS_ALWAYS_INLINE Range WindowsOf(const im2col::Window& window, int64_t tap) {
  const int64_t first = tap * window.dilation - window.low;
  Range range;
  range.low = first < 0 ? CeilDiv(-first, window.stride) : 0;
  range.high = first < window.in ? CeilDiv(window.in - first, window.stride) : 0;
  range.high = Min(range.high, window.out);
  range.low = Min(range.low, range.high);
  return range;
}

// Calls f with a number of vectors as a compile-time constant.
template <typename F>
JAXOPS_ALWAYS_INLINE void WithVectors(int vectors, F f) {
#if defined(__AVX512F__) || defined(__aarch64__)
  if (vectors == 4) return f(Constant<4>());
  if (vectors == 3) return f(Constant<3>());
#endif
  if (vectors == 2) return f(Constant<2>());
  f(Constant<1>());
}

}  // namespace jaxops::conv::cpu::JAXOPS_ISA

#endif  // JAXOPS_CPU_CONV_PRODUCTS_H_
