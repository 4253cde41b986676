#include "cpu/conv_kernels.h"

#include <cstdint>
#if defined(__AVX512F__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#include "cpu/conv_results.h"
#include "cpu/simd.h"

namespace jaxops::conv::cpu::JAXOPS_ISA {
namespace {

// The sums of a tile, a few vectors of the kernel and an entry of the source are in registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kMaxVectors = 4;
constexpr int TilePixels(int vectors) { return vectors == 4 ? 6 : vectors == 3 ? 8 : 12; }
#else
constexpr int kMaxVectors = 2;
constexpr int TilePixels(int vectors) { return vectors == 2 ? 6 : 8; }
#endif
constexpr int kMaxTilePixels = kMatrixRows;
static_assert(kTilesEnd % kMatrixRows == 0 && kTilesEnd % TilePixels(1) == 0 &&
              kTilesEnd % TilePixels(2) == 0 && kTilesEnd % TilePixels(3) == 0 &&
              kTilesEnd % TilePixels(4) == 0);

// Entries of a packed kernel that stay in a cache while tiles are multiplied by them.
constexpr int64_t kPanelBytes = 512 * 1024;
// Entries of both operands of a kernel gradient that stay in a cache.
constexpr int64_t kGradCacheBytes = 256 * 1024;

int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t Max(int64_t a, int64_t b) { return a < b ? b : a; }
int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How many entries are multiplied at a time.
template <typename E>
inline constexpr int kPair = sizeof(E) == sizeof(uint16_t) ? 2 : 1;

// Where a segment of each pixel of a tile is, and the rows of the kernel for it.
template <typename E>
struct Segment {
  const E* kernel;
  int64_t length;
  const E* source[kMaxTilePixels];
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

#if defined(__AVX512F__) && (defined(__clang__) || __GNUC__ >= 10)
#define JAXOPS_HAS_PAIRS 1
// For functions that need more than the features of this file: `FindBf16Products` is asked before
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
JAXOPS_PAIRS_TARGET void AddPairs(const Segment<BFloat>* segments, int64_t count, bool adds,
                                  float* sums) {
  constexpr int kWidth = kVectors * kLanes<float>;
  __m512 total[kPixels][kVectors];
  LoadSums(sums, adds, total);
  for (int64_t s = 0; s < count; ++s) {
    const BFloat* kernel = segments[s].kernel;
    const BFloat* source[kPixels];
#pragma GCC unroll 16
    for (int p = 0; p < kPixels; ++p) source[p] = segments[s].source[p];
    const int64_t length = segments[s].length;
    int64_t i = 0;
    for (; i + 2 <= length; i += 2, kernel += 2 * kWidth) {
      AddPair<kPixels, kVectors, false>(kernel, source, i, total);
    }
    if (i < length) AddPair<kPixels, kVectors, true>(kernel, source, i, total);
  }
  StoreSums(total, sums);
}
#endif

#if defined(JAXOPS_HAS_PAIRS) && defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#define JAXOPS_HAS_MATRICES 1
#define JAXOPS_MATRICES_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,amx-tile,amx-bf16")))

// Registers of matrices have 16 rows of 64 bytes. The sums are in 0 to 3, the operands in 4 and 5,
// and those at the end of a segment in 6 and 7.
constexpr int64_t kMatrixEntries = 32;
constexpr int64_t kMatrixRowBytes = kMatrixEntries * sizeof(BFloat);
static_assert(kVectorBytes == kMatrixRowBytes);

// Asks Linux for the registers of matrices: every process has to.
bool AreMatricesPermitted() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // of asm/prctl.h, since Linux 5.16
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Orders reads and writes of `memory` with those of instructions for matrices, which compilers do
// not know.
JAXOPS_ALWAYS_INLINE void OrderMemory(const void* memory) {
  asm volatile("" : : "r"(memory) : "memory");
}

// For products of segments of this number of entries, or of whole matrices alone.
JAXOPS_MATRICES_TARGET void ConfigureMatrices(int64_t segment) {
  struct {
    uint8_t palette = 1;
    uint8_t reserved[15] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < 6; ++i) {
    config.row_bytes[i] = kMatrixRowBytes;
    config.rows[i] = kMatrixRows;
  }
  if (const int64_t pairs = CeilDiv(segment % kMatrixEntries, 2); pairs > 0) {
    config.row_bytes[6] = pairs * 2 * sizeof(BFloat);
    config.rows[6] = kMatrixRows;
    config.row_bytes[7] = kMatrixRowBytes;
    config.rows[7] = pairs;
  }
  OrderMemory(&config);
  _tile_loadconfig(&config);
}

JAXOPS_MATRICES_TARGET void ReleaseMatrices() { _tile_release(); }

// Copies `count` entries from entry `i` on to a row for every pixel, and fills the rows with zeros.
JAXOPS_ALWAYS_INLINE JAXOPS_MATRICES_TARGET void CopyRows(const Segment<BFloat>& segment, int64_t i,
                                                          int64_t count, BFloat* rows) {
  const __mmask32 mask = _cvtu32_mask32(count == kMatrixEntries ? ~0u : (1u << count) - 1);
#pragma GCC unroll 16
  for (int p = 0; p < kMatrixRows; ++p) {
    const __m512i row = _mm512_maskz_loadu_epi16(mask, segment.source[p] + i);
    _mm512_storeu_si512(rows + p * kMatrixEntries, row);
  }
  OrderMemory(rows);
}

// Reads the sums of kVectors matrices next to one another, or sets them to zeros.
template <int kVectors>
JAXOPS_ALWAYS_INLINE JAXOPS_MATRICES_TARGET void LoadMatrices(const float* sums, bool adds) {
  constexpr int64_t kRowBytes = kVectors * kVectorBytes;
  OrderMemory(sums);
  if (adds) {
    _tile_loadd(0, sums, kRowBytes);
    if constexpr (kVectors > 1) _tile_loadd(1, sums + kLanes<float>, kRowBytes);
    if constexpr (kVectors > 2) _tile_loadd(2, sums + 2 * kLanes<float>, kRowBytes);
    if constexpr (kVectors > 3) _tile_loadd(3, sums + 3 * kLanes<float>, kRowBytes);
  } else {
    _tile_zero(0);
    if constexpr (kVectors > 1) _tile_zero(1);
    if constexpr (kVectors > 2) _tile_zero(2);
    if constexpr (kVectors > 3) _tile_zero(3);
  }
}

template <int kVectors>
JAXOPS_ALWAYS_INLINE JAXOPS_MATRICES_TARGET void StoreMatrices(float* sums) {
  constexpr int64_t kRowBytes = kVectors * kVectorBytes;
  _tile_stored(0, sums, kRowBytes);
  if constexpr (kVectors > 1) _tile_stored(1, sums + kLanes<float>, kRowBytes);
  if constexpr (kVectors > 2) _tile_stored(2, sums + 2 * kLanes<float>, kRowBytes);
  if constexpr (kVectors > 3) _tile_stored(3, sums + 3 * kLanes<float>, kRowBytes);
  OrderMemory(sums);
}

// Adds the products of the matrix `left`, whose rows are `left_bytes` apart, with kVectors matrices
// next to one another. The registers for the end of a segment have fewer columns and rows.
template <int kVectors, bool kIsEnd>
JAXOPS_ALWAYS_INLINE JAXOPS_MATRICES_TARGET void MultiplyMatrices(const void* left,
                                                                  int64_t left_bytes,
                                                                  const void* right,
                                                                  int64_t right_bytes) {
  const char* from = static_cast<const char*>(right);
#define JAXOPS_MULTIPLY_MATRIX(v)                            \
  if constexpr (kVectors > v && !kIsEnd) {                   \
    _tile_loadd(5, from + v * kMatrixRowBytes, right_bytes); \
    _tile_dpbf16ps(v, 4, 5);                                 \
  } else if constexpr (kVectors > v) {                       \
    _tile_loadd(7, from + v * kMatrixRowBytes, right_bytes); \
    _tile_dpbf16ps(v, 6, 7);                                 \
  }
  if constexpr (kIsEnd) {
    _tile_loadd(6, left, left_bytes);
  } else {
    _tile_loadd(4, left, left_bytes);
  }
  JAXOPS_MULTIPLY_MATRIX(0)
  JAXOPS_MULTIPLY_MATRIX(1)
  JAXOPS_MULTIPLY_MATRIX(2)
  JAXOPS_MULTIPLY_MATRIX(3)
#undef JAXOPS_MULTIPLY_MATRIX
  OrderMemory(left);
  OrderMemory(right);
}

// As AddPairs, for kMatrixRows pixels. The registers are configured for segments of this length.
template <int kVectors>
JAXOPS_MATRICES_TARGET void AddMatrices(const Segment<BFloat>* segments, int64_t count, bool adds,
                                        float* sums) {
  constexpr int64_t kWidth = kVectors * kLanes<float>;
  constexpr int64_t kPairBytes = 2 * kWidth * sizeof(BFloat);  // of a row of pairs of the kernel
  LoadMatrices<kVectors>(sums, adds);
  alignas(64) BFloat rows[2][kMatrixRows * kMatrixEntries];
  int buffer = 0;
  for (int64_t s = 0; s < count; ++s) {
    const Segment<BFloat>& segment = segments[s];
    const int64_t length = segment.length;
    // Rows at equal distances are read in place.
    const auto bytes_to = [&](int p) {
      return reinterpret_cast<intptr_t>(segment.source[p]) -
             reinterpret_cast<intptr_t>(segment.source[p - 1]);
    };
    const int64_t step_bytes = bytes_to(1);
    bool has_step = true;
    for (int p = 2; p < kMatrixRows; ++p) has_step &= bytes_to(p) == step_bytes;
    int64_t i = 0;
    for (; i + kMatrixEntries <= length; i += kMatrixEntries) {
      const BFloat* kernel = segment.kernel + i * kWidth;
      if (has_step) {
        MultiplyMatrices<kVectors, false>(segment.source[0] + i, step_bytes, kernel, kPairBytes);
      } else {
        CopyRows(segment, i, kMatrixEntries, rows[buffer]);
        MultiplyMatrices<kVectors, false>(rows[buffer], kMatrixRowBytes, kernel, kPairBytes);
        buffer ^= 1;
      }
    }
    if (i == length) continue;
    CopyRows(segment, i, length - i, rows[buffer]);
    MultiplyMatrices<kVectors, true>(rows[buffer], kMatrixRowBytes, segment.kernel + i * kWidth,
                                     kPairBytes);
    buffer ^= 1;
  }
  StoreMatrices<kVectors>(sums);
}
#endif

// How this processor multiplies bf16 fastest. Processors with AMX take longer for pairs than for
// f32: (32,128,28,28,128,3) took 37.3 ms on two cores of an Intel Xeon, f32 20.9, and matrices take
// 4.2 (docs/conv2d.md).
Bf16Products FindBf16Products() {
#if defined(JAXOPS_HAS_PAIRS)
  static const Bf16Products fastest = [] {
    if (!__builtin_cpu_supports("avx512bf16")) return Bf16Products::kFloat32;
    constexpr uint32_t kAmxBf16 = 1 << 22, kAmxTile = 1 << 24;
    uint32_t eax, ebx, ecx, edx = 0;
    __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx);
    if ((edx & kAmxBf16) == 0 || (edx & kAmxTile) == 0) return Bf16Products::kPairs;
#if defined(JAXOPS_HAS_MATRICES)
    if (AreMatricesPermitted()) return Bf16Products::kMatrices;
#endif
    return Bf16Products::kFloat32;
  }();
  return fastest;
#else
  return Bf16Products::kFloat32;
#endif
}

// Adds products of segments of `kPixels` pixels with `kVectors` vectors of columns to `sums`, or
// sets them.
template <int kPixels, int kVectors, typename A>
void AddProducts(const Segment<A>* segments, int64_t count, bool adds, A* sums) {
  constexpr int kWidth = kVectors * kLanes<A>;
  Vec<A> total[kPixels][kVectors];
  LoadSums(sums, adds, total);
  for (int64_t s = 0; s < count; ++s) {
    const A* kernel = segments[s].kernel;
    const A* source[kPixels];
#pragma GCC unroll 16
    for (int p = 0; p < kPixels; ++p) source[p] = segments[s].source[p];
    const int64_t length = segments[s].length;
    for (int64_t i = 0; i < length; ++i, kernel += kWidth) {
      Vec<A> entries[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) entries[v] = Load(kernel + v * kLanes<A>);
#pragma GCC unroll 16
      for (int p = 0; p < kPixels; ++p) {
        const Vec<A> entry = Broadcast(source[p][i]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          total[p][v] = MultiplyAdd(entry, entries[v], total[p][v]);
        }
      }
    }
  }
  StoreSums(total, sums);
}

template <int kPixels, int kVectors, typename E>
JAXOPS_ALWAYS_INLINE void AddSegments(const Segment<E>* segments, int64_t count, bool adds,
                                      Arithmetic<E>* sums) {
  if constexpr (kPair<E> == 1) {
    AddProducts<kPixels, kVectors>(segments, count, adds, sums);
  } else {
#if defined(JAXOPS_HAS_PAIRS)
    AddPairs<kPixels, kVectors>(segments, count, adds, sums);
#endif
  }
}

// A pixel of the result: its image, and its place there.
struct Pixel {
  int64_t image;
  int64_t at[im2col::kMaxDims];
};

JAXOPS_ALWAYS_INLINE Pixel PixelAt(const Axis* axes, int64_t index) {
  Pixel pixel;
  for (int d = im2col::kMaxDims - 1; d >= 0; --d) {
    pixel.at[d] = index % axes[d].count;
    index /= axes[d].count;
  }
  pixel.image = index;
  return pixel;
}

JAXOPS_ALWAYS_INLINE void Advance(const Axis* axes, Pixel& pixel) {
  for (int d = im2col::kMaxDims - 1; d >= 0; --d) {
    if (++pixel.at[d] < axes[d].count) return;
    pixel.at[d] = 0;
  }
  ++pixel.image;
}

// The entry of the source at the first tap of a pixel, which may be outside of the image.
template <typename E>
struct Entry {
  const E* image;
  int64_t offset;
  int64_t in[im2col::kMaxDims];
};

// The taps of a segment, or its first ones.
struct Taps {
  int64_t at[im2col::kMaxDims];
};

// The memory of a task.
template <typename E>
struct Space {
  E* zeros;   // of a segment
  E* copies;  // of segments that are partly outside of the image
  Segment<E>* segments;
  Arithmetic<E>* sums;  // of a tile, or of all tiles where these wait for other segments
};

int64_t PixelsOfTile(const Product& product, int vectors) {
  return product.has_matrices ? kMatrixRows : TilePixels(vectors);
}

int64_t Aligned(int64_t bytes) { return CeilDiv(bytes, 64) * 64; }

template <typename E>
int64_t SegmentsPerBlock(const Product& product, int vectors) {
  const int64_t bytes = product.segment() * vectors * kVectorBytes / kPair<E>;
  return Min(Max(1, product.segments()), Max(1, kPanelBytes / Max(1, bytes)));
}

template <typename E>
int64_t Lay(const Product& product, int vectors, int64_t tiles, char* memory, Space<E>& space) {
  const int64_t pixels = PixelsOfTile(product, vectors);
  const int64_t segments = SegmentsPerBlock<E>(product, vectors);
  const int64_t width = vectors * kVectorBytes / static_cast<int64_t>(sizeof(Arithmetic<E>));
  // Copies of segments of tiles, or of rows of pairs.
  const int64_t copies = Max(pixels * product.segment(), kPair<E> * width);
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    char* at = memory + used;
    used += Aligned(bytes);
    return at;
  };
  space.zeros = reinterpret_cast<E*>(take(product.segment() * sizeof(E)));
  space.copies = reinterpret_cast<E*>(take(product.is_merged ? segments * copies * sizeof(E) : 0));
  space.segments = reinterpret_cast<Segment<E>*>(take((2 * segments + 1) * sizeof(Segment<E>)));
  const int64_t waiting = segments < product.segments() ? tiles : 1;
  space.sums = reinterpret_cast<Arithmetic<E>*>(take(waiting * pixels * vectors * kVectorBytes));
  return used;
}

// Computes tiles of a block of columns.
template <typename E, int kVectors, bool kMatrices>
struct Multiplier {
  using A = Arithmetic<E>;
  static constexpr int kPixels = kMatrices ? kMatrixRows : TilePixels(kVectors);
  static constexpr int64_t kWidth = kVectors * kLanes<A>;

  const Product& product;
  const Panel& panel;
  const Space<E>& space;

  // Rows of the packed kernel before segment `index`, or before its entry `first`, which is even
  // for pairs.
  const E* KernelAt(int64_t index, int64_t first = 0) const {
    const int64_t rows = CeilDiv(product.segment(), kPair<E>) * kPair<E>;
    return static_cast<const E*>(panel.packed) + (index * rows + first) * kWidth;
  }

  Entry<E> EntryOf(const Pixel& pixel) const {
    const Axis* axes = product.axes;
    Entry<E> entry = {};
    entry.image = static_cast<const E*>(product.sources[pixel.image]) + panel.group * product.fan;
    for (int d = 0; d < im2col::kMaxDims; ++d) {
      entry.in[d] = axes[d].first + pixel.at[d] * axes[d].step;
      entry.offset = entry.offset * axes[d].size + entry.in[d];
    }
    entry.offset *= product.source_channels;
    return entry;
  }

  Taps TapsOf(int64_t index) const {
    if (index == 0) return {};  // and no division by taps that a remainder by the strides lacks
    const int64_t per_line = product.is_merged ? 1 : product.axes[2].taps;
    const int64_t line = index / per_line;
    return {line / product.axes[1].taps, line % product.axes[1].taps, index % per_line};
  }

  void NextTaps(Taps& taps) const {
    if (!product.is_merged && ++taps.at[2] < product.axes[2].taps) return;
    taps.at[2] = 0;
    if (++taps.at[1] < product.axes[1].taps) return;
    taps.at[1] = 0;
    ++taps.at[0];
  }

  // Entries of the source between the first tap and these.
  int64_t OffsetOf(const Taps& taps) const {
    int64_t offset = 0;
    for (int d = 0; d < im2col::kMaxDims; ++d) {
      offset = offset * product.axes[d].size + taps.at[d] * product.axes[d].tap_step;
    }
    return offset * product.source_channels;
  }

  // Whether an image has all taps of a pixel.
  bool IsInside(const Entry<E>& entry) const {
    bool is_inside = true;
    for (int d = 0; d < im2col::kMaxDims; ++d) {
      const Axis& axis = product.axes[d];
      is_inside &= entry.in[d] >= 0 && entry.in[d] + (axis.taps - 1) * axis.tap_step < axis.size;
    }
    return is_inside;
  }

  // Finds the entries [low, high) of a segment that are in the image.
  void Find(const Entry<E>& entry, const Taps& taps, int64_t& low, int64_t& high) const {
    const Axis* axes = product.axes;
    int64_t in[im2col::kMaxDims];
    for (int d = 0; d < im2col::kMaxDims; ++d) {
      in[d] = entry.in[d] + taps.at[d] * axes[d].tap_step;
    }
    low = high = 0;
    if (in[0] < 0 || in[0] >= axes[0].size || in[1] < 0 || in[1] >= axes[1].size) return;
    if (product.is_merged) {
      low = Min(Max(0, -in[2]), axes[2].taps) * product.fan;
      high = Max(low, Min(axes[2].taps, axes[2].size - in[2]) * product.fan);
    } else if (0 <= in[2] && in[2] < axes[2].size) {
      high = product.fan;
    }
  }

  // Adds segments [begin, end) of a tile whose kernel is finite: what is outside is zeros.
  void AddTile(const Entry<E>* entries, bool are_inside, int64_t begin, int64_t end,
               A* sums) const {
    const int64_t length = product.segment();
    Segment<E>* segments = space.segments;
    E* copy = space.copies;
    int64_t count = 0;
    Taps taps = TapsOf(begin);
    for (int64_t index = begin; index < end; ++index, NextTaps(taps)) {
      Segment<E>& segment = segments[count];
      segment.kernel = KernelAt(index);
      segment.length = length;
      const int64_t offset = OffsetOf(taps);
      if (are_inside) {
        for (int p = 0; p < kPixels; ++p) {
          segment.source[p] = entries[p].image + (entries[p].offset + offset);
        }
        ++count;
        continue;
      }
      bool has_entries = false;
      for (int p = 0; p < kPixels; ++p) {
        int64_t low, high;
        Find(entries[p], taps, low, high);
        has_entries |= low < high;
        const E* image = entries[p].image;
        const int64_t at = entries[p].offset + offset;
        if (high - low == length) {
          segment.source[p] = image + at;
        } else if (low == high) {
          segment.source[p] = space.zeros;
        } else {
          __builtin_memset(copy, 0, low * sizeof(E));
          __builtin_memcpy(copy + low, image + (at + low), (high - low) * sizeof(E));
          __builtin_memset(copy + high, 0, (length - high) * sizeof(E));
          segment.source[p] = copy;
          copy += length;
        }
      }
      count += has_entries;
    }
    if constexpr (!kMatrices) {
      AddSegments<kPixels, kVectors>(segments, count, begin > 0, sums);
    } else {
#if defined(JAXOPS_HAS_MATRICES)
      AddMatrices<kVectors>(segments, count, begin > 0, sums);
#endif
    }
  }

  // Adds segments [begin, end) of a pixel, and no products with what is outside of the image.
  void AddPixel(const Entry<E>& entry, int64_t begin, int64_t end, A* sums) const {
    Segment<E>* segments = space.segments;
    E* copy = space.copies;
    int64_t count = 0;
    Taps taps = TapsOf(begin);
    for (int64_t index = begin; index < end; ++index, NextTaps(taps)) {
      int64_t low, high;
      Find(entry, taps, low, high);
      if (low == high) continue;
      const int64_t at = entry.offset + OffsetOf(taps);
      const E* kernel = KernelAt(index, low / kPair<E> * kPair<E>);
      if (low % kPair<E> != 0) {
        // The first one of a pair is outside: the row of the second one follows a zero entry, and
        // the kernel is not finite, so its own row would not do.
        segments[count++] = {OddRow(index, low, copy), 1, {entry.image + (at + low)}};
        copy += 2 * kWidth;
        kernel += 2 * kWidth;
        ++low;
      }
      if (low < high) segments[count++] = {kernel, high - low, {entry.image + (at + low)}};
    }
    AddSegments<1, kVectors>(segments, count, begin > 0, sums);
  }

  // The row of the kernel for entry `entry`, the second one of a pair, as the first one.
  const E* OddRow(int64_t index, int64_t entry, E* to) const {
    const E* row = KernelAt(index, entry - 1);
    for (int64_t i = 0; i < kWidth; ++i) {
      to[2 * i] = row[2 * i + 1];
      to[2 * i + 1] = E{};
    }
    return to;
  }

  void Run(int64_t tile_begin, int64_t tile_end) const {
    const int64_t all = product.pixels();
    const int64_t per_block = SegmentsPerBlock<E>(product, kVectors);
    const int64_t segments = product.segments();
    const int64_t line = product.axes[2].count;
    const int64_t entry_step = product.axes[2].step * product.source_channels;
    for (int64_t i = 0; i < product.segment(); ++i) space.zeros[i] = E{};
    int64_t begin = 0;
    do {  // at least once, so that sums of nothing are zeros
      const int64_t end = product.segment() == 0 ? begin : Min(segments, begin + per_block);
      Pixel pixel = PixelAt(product.axes, tile_begin * kPixels);  // the first one of a tile
      for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
        const bool is_waiting = per_block < segments;
        A* sums = space.sums + (is_waiting ? tile - tile_begin : 0) * kPixels * kWidth;
        const bool is_last = begin + per_block >= segments;
        // Most tiles are of a line. Their entries are steps apart, and are not copied from one to
        // the next: a copy of what was just written in parts waits for it.
        if (pixel.at[2] + kPixels <= line) {
          const Entry<E> first = EntryOf(pixel);
          Entry<E> entries[kPixels];
          for (int p = 0; p < kPixels; ++p) {
            entries[p].image = first.image;
            entries[p].offset = first.offset + p * entry_step;
            entries[p].in[0] = first.in[0];
            entries[p].in[1] = first.in[1];
            entries[p].in[2] = first.in[2] + p * product.axes[2].step;
          }
          const bool are_inside = IsInside(first) && IsInside(entries[kPixels - 1]);
          Add(entries, are_inside, kPixels, begin, end, sums);
          if (is_last) Finish(pixel, kPixels, sums);
          pixel.at[2] += kPixels - 1;
          Advance(product.axes, pixel);
          continue;
        }
        Pixel pixels[kPixels];
        const int64_t count = Min(kPixels, all - tile * kPixels);
        Entry<E> entries[kPixels];
        bool are_inside = true;
        for (int p = 0; p < kPixels; ++p) {
          // After the last pixel it is repeated.
          pixels[p] = p < count ? pixel : pixels[p - 1];
          if (p < count) Advance(product.axes, pixel);
          entries[p] = EntryOf(pixels[p]);
          are_inside &= IsInside(entries[p]);
        }
        Add(entries, are_inside, count, begin, end, sums);
        for (int64_t p = 0; p < count && is_last;) {
          int64_t next = p + 1;
          while (next < count && pixels[next].at[2] > 0) ++next;
          Finish(pixels[p], next - p, sums + p * kWidth);
          p = next;
        }
      }
      begin += per_block;
    } while (begin < segments);
  }

  void Add(const Entry<E>* entries, bool are_inside, int64_t count, int64_t begin, int64_t end,
           A* sums) const {
    if (panel.is_finite) {
      AddTile(entries, are_inside, begin, end, sums);
    } else {
      for (int64_t p = 0; p < count; ++p) AddPixel(entries[p], begin, end, sums + p * kWidth);
    }
  }

  // Writes the results of `count` pixels of a line.
  void Finish(const Pixel& first, int64_t count, const A* sums) const {
    const Axis* axes = product.axes;
    const int64_t columns = Min(kWidth, product.columns - panel.first_column);
    const int64_t channel = panel.group * product.columns + panel.first_column;
    int64_t at = 0;
    for (int d = 0; d < im2col::kMaxDims; ++d) {
      at = at * axes[d].result_size + axes[d].result_first + first.at[d] * axes[d].result_step;
    }
    void* to = EntryAt(product.results[first.image], at * product.result_channels + channel,
                       product.finish.dtype);
    FinishPixels(product.finish, sums, kWidth, count, channel, columns, to,
                 axes[2].result_step * product.result_channels);
  }
};

// Calls f with the entry type of a product.
template <typename F>
JAXOPS_ALWAYS_INLINE void WithEntries(DType dtype, F f) {
  if (dtype == DType::kF64) return f(double());
#if defined(JAXOPS_HAS_PAIRS)
  if (dtype == DType::kBF16) return f(BFloat());
#endif
  f(float());
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

int64_t MultiplySpace(const Product& product, int vectors, int64_t tiles) {
  int64_t bytes = 0;
  WithEntries(product.dtype, [&](auto entry) {
    Space<decltype(entry)> space;
    bytes = Lay(product, vectors, tiles, nullptr, space);
  });
  return bytes;
}

void Multiply(const Product& product, const Panel& panel, int64_t tile_begin, int64_t tile_end,
              void* memory) {
  WithEntries(product.dtype, [&](auto entry) {
    using E = decltype(entry);
    Space<E> space;
    Lay(product, panel.vectors, tile_end - tile_begin, static_cast<char*>(memory), space);
    WithVectors(panel.vectors, [&](auto vectors) {
#if defined(JAXOPS_HAS_MATRICES)
      if constexpr (kPair<E> == 2) {
        if (product.has_matrices) {
          ConfigureMatrices(product.segment());
          Multiplier<E, decltype(vectors)::value, true>{product, panel, space}.Run(tile_begin,
                                                                                   tile_end);
          return ReleaseMatrices();
        }
      }
#endif
      Multiplier<E, decltype(vectors)::value, false>{product, panel, space}.Run(tile_begin,
                                                                                tile_end);
    });
  });
}

// The bits of an entry, and those that are all set in NaN and Inf.
template <typename E>
struct Bits {
  using Type = uint32_t;
  static constexpr Type kExponent = 0x7f800000;
};
template <>
struct Bits<double> {
  using Type = uint64_t;
  static constexpr Type kExponent = 0x7ff0000000000000;
};
template <>
struct Bits<BFloat> {
  using Type = uint16_t;
  static constexpr Type kExponent = 0x7f80;
};

template <typename E>
bool AreFinite(const E* entries, int64_t count) {
  using B = Bits<E>;
  typename B::Type bad = 0;
  for (int64_t i = 0; i < count; ++i) {
    bad |= (BitCast<typename B::Type>(entries[i]) & B::kExponent) == B::kExponent ? 1 : 0;
  }
  return bad == 0;
}

// to[i][n] = from[n][i] for entries of 32 bits, rows `from_stride` and `to_stride` bytes apart.
void Transpose(const void* from, int64_t from_stride, int64_t columns, int64_t count, void* to,
               int64_t to_stride) {
  constexpr int64_t kEntry = sizeof(uint32_t);
  const auto from_at = [&](int64_t i, int64_t n) {
    return static_cast<const char*>(from) + n * from_stride + i * kEntry;
  };
  const auto to_at = [&](int64_t i, int64_t n) {
    return static_cast<char*>(to) + i * to_stride + n * kEntry;
  };
  constexpr int64_t kBlock = 16;  // whole cache lines of results
  for (int64_t first = 0; first < columns; first += kBlock) {
    const int64_t last = Min(columns, first + kBlock);
    for (int64_t i = 0; i < count; i += 4) {
      int64_t n = first;
#if defined(__AVX2__)
      for (; n + 4 <= last && i + 4 <= count; n += 4) {
        __m128 rows[4];
        for (int j = 0; j < 4; ++j) rows[j] = LoadBits<__m128>(from_at(i, n + j));
        _MM_TRANSPOSE4_PS(rows[0], rows[1], rows[2], rows[3]);
        for (int j = 0; j < 4; ++j) __builtin_memcpy(to_at(i + j, n), &rows[j], sizeof(rows[j]));
      }
#endif
      for (; n < last; ++n) {
        for (int64_t j = i; j < Min(count, i + 4); ++j) {
          __builtin_memcpy(to_at(j, n), from_at(j, n), kEntry);
        }
      }
    }
  }
}

// Copies a row of a tap of the kernel to row `row` of a segment.
template <typename E>
void PackRow(const Product& product, const E* from, int64_t columns, int64_t width, int64_t row,
             E* to) {
  E* line = to + row / kPair<E> * kPair<E> * width + row % kPair<E>;
  for (int64_t n = 0; n < columns; ++n) line[n * kPair<E>] = from[n * product.column_stride];
}

#if defined(JAXOPS_HAS_PAIRS)
// Copies two rows of columns that are contiguous.
void PackTwoRows(const BFloat* first, const BFloat* second, int64_t columns, BFloat* to) {
  for (int64_t n = 0; n < columns; ++n) {
    const uint32_t both = static_cast<uint16_t>(first[n]) |
                          static_cast<uint32_t>(static_cast<uint16_t>(second[n])) << 16;
    __builtin_memcpy(to + 2 * n, &both, sizeof(both));
  }
}
#endif

// Copies the rows of a tap of the kernel, which are `row` and those that follow of a segment.
template <typename E>
bool PackTap(const Product& product, const E* tap, int64_t columns, int64_t width, int64_t row,
             E* to) {
  const bool has_rows =
      product.column_stride == 1;  // or else the entries of a column are contiguous
  bool is_finite = true;
  for (int64_t i = 0; i < (has_rows ? product.fan : columns); ++i) {
    is_finite &= has_rows ? AreFinite(tap + i * product.fan_stride, columns)
                          : AreFinite(tap + i * product.column_stride, product.fan);
  }
  int64_t k = 0;
  if constexpr (kPair<E> == 2) {
    if (row % 2 == 1 && product.fan > 0) {
      PackRow(product, tap, columns, width, row, to);
      k = 1;
    }
  }
  if (!has_rows && sizeof(E) * kPair<E> == sizeof(uint32_t)) {
    const int64_t count = (product.fan - k) / kPair<E>;
    Transpose(tap + k, product.column_stride * sizeof(E), columns, count, to + (row + k) * width,
              width * sizeof(uint32_t));
    k += count * kPair<E>;
  }
  if constexpr (kPair<E> == 2) {
    for (; k + 2 <= product.fan && has_rows; k += 2) {
      const E* from = tap + k * product.fan_stride;
      PackTwoRows(from, from + product.fan_stride, columns, to + (row + k) * width);
    }
  }
  for (; k < product.fan; ++k) {
    PackRow(product, tap + k * product.fan_stride, columns, width, row + k, to);
  }
  return is_finite;
}

template <typename E>
bool PackPanel(const Product& product, const Panel& panel, const E* kernel, E* to) {
  const Axis* axes = product.axes;
  const int64_t width = panel.vectors * (kVectorBytes / static_cast<int64_t>(sizeof(E)) / kPair<E>);
  const int64_t columns = Min(width, product.columns - panel.first_column);
  const int64_t length = product.segment();
  const int64_t rows = CeilDiv(length, kPair<E>) * kPair<E>;
  kernel += panel.group * product.group_stride + panel.first_column * product.column_stride;
  if (columns < width || rows != length) {
    __builtin_memset(to, 0, product.segments() * rows * width * sizeof(E));
  }
  bool is_finite = true;
  int64_t row = 0;  // of the segment
  for (int64_t j0 = 0; j0 < axes[0].taps; ++j0) {
    for (int64_t j1 = 0; j1 < axes[1].taps; ++j1) {
      for (int64_t j2 = 0; j2 < axes[2].taps; ++j2) {
        const int64_t t0 = axes[0].kernel_first + j0 * axes[0].kernel_step;
        const int64_t t1 = axes[1].kernel_first + j1 * axes[1].kernel_step;
        const int64_t t2 = axes[2].kernel_first + j2 * axes[2].kernel_step;
        const int64_t tap = (t0 * axes[1].kernel_taps + t1) * axes[2].kernel_taps + t2;
        is_finite &= PackTap(product, kernel + tap * product.tap_stride, columns, width, row, to);
        row += product.fan;
        if (row == length) {
          row = 0;
          to += rows * width;
        }
      }
    }
  }
  return is_finite;
}

void Pack(const Product& product, Panel& panel) {
  panel.is_finite = true;
  if (product.segment() == 0) return;
  WithEntries(product.dtype, [&](auto entry) {
    using E = decltype(entry);
    panel.is_finite = PackPanel(product, panel, static_cast<const E*>(product.kernel),
                                static_cast<E*>(panel.packed));
  });
}

// --- the kernel gradient -------------------------------------------------------------------------

// The bfloat16 entries of a channel in two windows that follow one another.
enum class Pair : uint32_t {};

// Neighbouring pixels of a line: products of `count` of them are summed.
template <typename E>
struct Line {
  const E* source;
  const E* cotangent;
  int64_t count;
};

// Adds products of `kRows` neighbouring entries of the source with vectors of cotangents.
template <int kRows, int kVectors, typename A>
void AddLines(const Line<A>* lines, int64_t count, int64_t source_step, int64_t cotangent_step,
              A* sums) {
  Vec<A> total[kRows][kVectors];
  LoadSums(sums, true, total);
  for (int64_t l = 0; l < count; ++l) {
    const A* source = lines[l].source;
    const A* cotangent = lines[l].cotangent;
    const int64_t pixels = lines[l].count;
    for (int64_t i = 0; i < pixels; ++i) {
      Vec<A> entries[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) entries[v] = Load(cotangent + v * kLanes<A>);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Vec<A> entry = Broadcast(source[r]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          total[r][v] = MultiplyAdd(entry, entries[v], total[r][v]);
        }
      }
      source += source_step;
      cotangent += cotangent_step;
    }
  }
  StoreSums(total, sums);
}

#if defined(JAXOPS_HAS_PAIRS)
// Adds the products of two windows, or of the first one alone.
template <int kRows, int kVectors, bool kIsSingle>
JAXOPS_ALWAYS_INLINE JAXOPS_PAIRS_TARGET void AddWindows(const Pair* source, const Pair* cotangent,
                                                         __m512 (*total)[kVectors]) {
  const __m512i first = _mm512_set1_epi32(0xffff);
  __m512i entries[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    entries[v] = _mm512_loadu_si512(cotangent + v * kLanes<float>);
    if (kIsSingle) entries[v] = _mm512_and_si512(entries[v], first);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    __m512i pair = _mm512_set1_epi32(static_cast<int32_t>(source[r]));
    if (kIsSingle) pair = _mm512_and_si512(pair, first);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      total[r][v] = _mm512_dpbf16_ps(total[r][v], (__m512bh)pair, (__m512bh)entries[v]);
    }
  }
}

template <int kRows, int kVectors>
JAXOPS_PAIRS_TARGET void AddLines(const Line<Pair>* lines, int64_t count, int64_t source_step,
                                  int64_t cotangent_step, float* sums) {
  __m512 total[kRows][kVectors];
  LoadSums(sums, true, total);
  for (int64_t l = 0; l < count; ++l) {
    const Pair* source = lines[l].source;
    const Pair* cotangent = lines[l].cotangent;
    const int64_t pixels = lines[l].count;
    for (int64_t i = 0; i + 2 <= pixels; i += 2) {
      AddWindows<kRows, kVectors, false>(source, cotangent, total);
      source += 2 * source_step;
      cotangent += 2 * cotangent_step;
    }
    if (pixels % 2 != 0) AddWindows<kRows, kVectors, true>(source, cotangent, total);
  }
  StoreSums(total, sums);
}
#endif

#if defined(JAXOPS_HAS_MATRICES)
// to[r][k] = from[k][r] for matrices of 16 x 16 pairs; rows of `from` are `stride` pairs apart.
JAXOPS_ALWAYS_INLINE JAXOPS_MATRICES_TARGET void TransposePairs(const Pair* from, int64_t stride,
                                                                Pair* to) {
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(from + i * stride);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_maskz_unpacklo_epi32(0xffff, a[i], a[i + 1]);
    b[i + 1] = _mm512_maskz_unpackhi_epi32(0xffff, a[i], a[i + 1]);
  }
  // Then a[4 i + j] has, in its part q of four pairs, column 4 q + j of the rows from 4 i on.
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_maskz_unpacklo_epi64(0xff, b[i], b[i + 2]);
    a[i + 1] = _mm512_maskz_unpackhi_epi64(0xff, b[i], b[i + 2]);
    a[i + 2] = _mm512_maskz_unpacklo_epi64(0xff, b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_maskz_unpackhi_epi64(0xff, b[i + 1], b[i + 3]);
  }
  constexpr int kEven = 0x88, kOdd = 0xdd;  // parts of both operands
  const auto join = [](__m512i low, __m512i high, auto parts) JAXOPS_MATRICES_TARGET
      __attribute__((always_inline)) {
        return _mm512_maskz_shuffle_i32x4(0xffff, low, high, decltype(parts)::value);
      };
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i even[] = {join(a[j], a[4 + j], Constant<kEven>()),
                            join(a[8 + j], a[12 + j], Constant<kEven>())};
    const __m512i odd[] = {join(a[j], a[4 + j], Constant<kOdd>()),
                           join(a[8 + j], a[12 + j], Constant<kOdd>())};
    _mm512_storeu_si512(to + j * 16, join(even[0], even[1], Constant<kEven>()));
    _mm512_storeu_si512(to + (4 + j) * 16, join(odd[0], odd[1], Constant<kEven>()));
    _mm512_storeu_si512(to + (8 + j) * 16, join(even[0], even[1], Constant<kOdd>()));
    _mm512_storeu_si512(to + (12 + j) * 16, join(odd[0], odd[1], Constant<kOdd>()));
  }
  OrderMemory(to);
}

// As AddLines for kMatrixRows rows. Pairs that do not fill a matrix wait for those of other lines.
template <int kVectors>
JAXOPS_MATRICES_TARGET void AddLineMatrices(const Line<Pair>* lines, int64_t count,
                                            int64_t source_step, int64_t cotangent_step,
                                            float* sums) {
  constexpr int kPairs = 16;  // of a matrix
  constexpr int64_t kWidth = kVectors * kLanes<float>;
  constexpr int64_t kBytes = sizeof(Pair);
  alignas(64) Pair left[kMatrixRows * kPairs];
  alignas(64) Pair sources[kPairs * kMatrixRows];  // that wait
  alignas(64) Pair cotangents[kPairs * kWidth];
  int waiting = 0;
  const auto copy = [&](const Pair* from, __m512i mask, Pair* to) JAXOPS_MATRICES_TARGET
      __attribute__((always_inline)) {
        _mm512_store_si512(to, _mm512_and_si512(_mm512_loadu_si512(from), mask));
      };
  const auto add_waiting = [&]() JAXOPS_MATRICES_TARGET __attribute__((always_inline)) {
    TransposePairs(sources, kMatrixRows, left);
    OrderMemory(cotangents);
    MultiplyMatrices<kVectors, false>(left, kPairs * kBytes, cotangents, kWidth * kBytes);
    waiting = 0;
  };
  LoadMatrices<kVectors>(sums, true);
  for (int64_t l = 0; l < count; ++l) {
    const Pair* source = lines[l].source;
    const Pair* cotangent = lines[l].cotangent;
    const int64_t pixels = lines[l].count;
    int64_t i = 0;
    for (; i + 2 * kPairs <= pixels; i += 2 * kPairs) {
      TransposePairs(source + i * source_step, 2 * source_step, left);
      MultiplyMatrices<kVectors, false>(left, kPairs * kBytes, cotangent + i * cotangent_step,
                                        2 * cotangent_step * kBytes);
    }
    for (; i < pixels; i += 2) {
      const __m512i mask = _mm512_set1_epi32(i + 1 < pixels ? -1 : 0xffff);
      copy(source + i * source_step, mask, sources + waiting * kMatrixRows);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        copy(cotangent + i * cotangent_step + v * kLanes<float>, mask,
             cotangents + waiting * kWidth + v * kLanes<float>);
      }
      if (++waiting == kPairs) add_waiting();
    }
  }
  if (waiting > 0) {
    __builtin_memset(sources + waiting * kMatrixRows, 0, (kPairs - waiting) * kMatrixRows * kBytes);
    __builtin_memset(cotangents + waiting * kWidth, 0, (kPairs - waiting) * kWidth * kBytes);
    add_waiting();
  }
  StoreMatrices<kVectors>(sums);
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

template <typename S, typename A>
void WidenRows(const S* from, int64_t rows, int64_t stride, int64_t fan, int64_t padded, A* to) {
  if (fan == padded && fan == stride) {
    fan = padded = rows * fan;
    rows = 1;
  }
  for (int64_t row = 0; row < rows; ++row, from += stride, to += padded) {
    for (int64_t i = 0; i < fan; i += kLanes<A>) {
      StoreUpTo(LoadUpTo(from + i, fan - i), to + i, padded - i);
    }
  }
}

// Copies pixels of `count` entries each, filled up with zeros to `width`, in the type of sums.
void CopyPixels(DType dtype, const void* from, int64_t stride, int64_t pixels, int64_t count,
                int64_t width, float* to) {
  WithStorage(dtype, from, 0, [=]<typename S>(const S* entries) {
    if constexpr (sizeof(Arithmetic<S>) == sizeof(float)) {
      WidenRows(entries, pixels, stride, count, width, to);
    }
  });
}

void CopyPixels(DType, const void* from, int64_t stride, int64_t pixels, int64_t count,
                int64_t width, double* to) {
  WidenRows(static_cast<const double*>(from), pixels, stride, count, width, to);
}

#if defined(JAXOPS_HAS_PAIRS)
// Joins each bf16 pixel with the one that is `step` pixels later. The first `paired` pixels have
// one; the others are joined with zeros.
void JoinPixels(const void* from, int64_t stride, int64_t pixels, int64_t count, int64_t width,
                int64_t step, int64_t paired, Pair* to) {
  const BFloat* entries = static_cast<const BFloat*>(from);
  for (int64_t p = 0; p < pixels; ++p, entries += stride, to += width) {
    const BFloat* next = p < paired ? entries + step * stride : nullptr;
    int64_t i = 0;
    for (; i + kLanes<float> <= count; i += kLanes<float>) {
      const U32Vec high = next ? WidenBits(next + i) : U32Vec{};
      const U32Vec both = WidenBits(entries + i) | (high << 16);
      __builtin_memcpy(to + i, &both, sizeof(both));
    }
    for (; i < width; ++i) {
      const uint32_t low = i < count ? static_cast<uint16_t>(entries[i]) : 0;
      const uint32_t high = i < count && next ? static_cast<uint16_t>(next[i]) : 0;
      to[i] = static_cast<Pair>(low | high << 16);
    }
  }
}
#endif

// The size of a block of spans, whose pixels stay in a cache with their copies.
struct GradBlock {
  int64_t spans;
  int64_t source_width;   // entries of a copied pixel
  int64_t source_span;    // pixels that the windows of a span cover
  int64_t source_pixels;  // the same, but at most a line
  int64_t copies;         // of spans of the source: more than a tap of the block needs
  int64_t first_line;     // of the images that the task sums over
  int64_t source_lines;   // of these images

  template <typename E>
  static GradBlock Of(const GradProduct& product, const GradTask& task, E) {
    const auto& [d0, d1, d2] = product.dims;
    GradBlock block;
    block.source_width = product.is_merged ? product.fan_in : task.row_end - task.row_begin;
    block.source_span = (product.span - 1) * d2.stride + (d2.taps - 1) * d2.dilation + 1;
    block.source_pixels = Min(block.source_span, d2.in);
    const int64_t entries = task.vectors * kLanes<Arithmetic<E>> + task.row_end - task.row_begin;
    const int64_t bytes = Max(1, product.span * entries * static_cast<int64_t>(sizeof(E)));
    block.spans = Min(Max(1, kGradCacheBytes / bytes), Max(1, task.span_end - task.span_begin));
    block.copies = 2 * block.spans + 8;
    const int64_t per_image = Max(1, d0.out * d1.out * product.spans());
    const int64_t first_image = task.span_begin / per_image;
    block.first_line = first_image * d0.in * d1.in;
    block.source_lines = (CeilDiv(task.span_end, per_image) - first_image) * d0.in * d1.in;
    return block;
  }
};

// Some neighbouring windows of a line.
template <typename E>
struct Span {
  int64_t image, out0, out1;
  int64_t part;  // of the line
  Range windows;
  const E* cotangents;  // of the first window: copies, or in the array
};

// A span of a line of the source: a copy, or the line itself.
template <typename E>
struct Source {
  const E* entries;
  int64_t first;  // the pixel of the line that they begin with
};

// The memory of a task.
template <typename E>
struct GradSpace {
  Arithmetic<E>* sums;  // of tiles of rows, for all segments
  Span<E>* spans;       // of a block
  Line<E>* lines;       // of the block at a tap
  Source<E>* sources;   // of the spans at a tap, null outside of the image
  E* cotangents;        // copies, if any are made
  E* copies;            // of sources
  int64_t* held;        // the number of the copy of a span of a line, or -1
};

template <typename E>
int64_t LayGrad(const GradProduct& product, const GradTask& task, char* memory,
                GradSpace<E>& space) {
  const GradBlock block = GradBlock::Of(product, task, E());
  const int64_t tile = product.has_matrices ? kMatrixRows : TilePixels(task.vectors);
  const int64_t rows = CeilDiv(Max(1, task.row_end - task.row_begin), tile) * tile;
  const int64_t width = task.vectors * kLanes<Arithmetic<E>>;
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    char* at = memory + used;
    used += Aligned(bytes);
    return at;
  };
  space.sums = reinterpret_cast<Arithmetic<E>*>(
      take((task.segment_end - task.segment_begin) * rows * task.vectors * kVectorBytes));
  space.spans = reinterpret_cast<Span<E>*>(take(block.spans * sizeof(Span<E>)));
  space.lines = reinterpret_cast<Line<E>*>(take(block.spans * sizeof(Line<E>)));
  space.sources = reinterpret_cast<Source<E>*>(take(block.spans * sizeof(Source<E>)));
  space.cotangents = reinterpret_cast<E*>(
      take(product.copies_cotangents ? block.spans * product.span * width * sizeof(E) : 0));
  const bool copies = product.copies_sources;
  space.copies = reinterpret_cast<E*>(
      take(copies ? block.copies * block.source_pixels * block.source_width * sizeof(E) : 0));
  space.held = reinterpret_cast<int64_t*>(
      take(copies ? block.source_lines * product.spans() * sizeof(int64_t) : 0));
  return used;
}

template <typename E, int kVectors, bool kMatrices>
struct GradMultiplier {
  using A = Arithmetic<E>;
  static constexpr int kRows = kMatrices ? kMatrixRows : TilePixels(kVectors);
  static constexpr int64_t kWidth = kVectors * kLanes<A>;

  const GradProduct& product;
  const GradTask& task;
  const GradSpace<E>& space;
  const GradBlock block = GradBlock::Of(product, task, E());
  int64_t used = 0;     // copies of sources
  int64_t retired = 0;  // copies that were replaced, whose numbers are below this

  // The first row of copies of sources, which have those of the task.
  int64_t FirstRow() const {
    return product.copies_sources && !product.is_merged ? task.row_begin : 0;
  }

  int64_t SourceStep() const {
    return product.copies_sources ? block.source_width : product.source_channels;
  }

  int64_t CotangentStep() const {
    return product.copies_cotangents ? kWidth : product.cotangent_channels;
  }

  Span<E> SpanAt(int64_t index) const {
    const auto& [d0, d1, d2] = product.dims;
    Span<E> span;
    span.part = index % product.spans();
    index /= product.spans();
    span.out1 = index % d1.out;
    span.out0 = index / d1.out % d0.out;
    span.image = index / d1.out / d0.out;
    span.windows.low = span.part * product.span;
    span.windows.high = Min(d2.out, span.windows.low + product.span);
    return span;
  }

  // Finds the spans of a block, and copies their cotangents.
  void FindSpans(int64_t begin, int64_t end) const {
    const auto& [d0, d1, d2] = product.dims;
    for (int64_t i = begin; i < end; ++i) {
      Span<E> span = SpanAt(i);
      const int64_t window = (span.out0 * d1.out + span.out1) * d2.out + span.windows.low;
      const int64_t stride = product.cotangent_channels;
      const void* from = EntryAt(const_cast<void*>(product.cotangents[span.image]),
                                 window * stride + task.output, product.dtype);
      span.cotangents = static_cast<const E*>(from);
      if (product.copies_cotangents) {
        E* to = space.cotangents + (i - begin) * product.span * kWidth;
        const int64_t windows = span.windows.high - span.windows.low;
        if constexpr (__is_same(E, Pair)) {
          JoinPixels(from, stride, windows, task.outputs, kWidth, 1, d2.out - 1 - span.windows.low,
                     to);
        } else {
          CopyPixels(product.dtype, from, stride, windows, task.outputs, kWidth, to);
        }
        span.cotangents = to;
      }
      space.spans[i - begin] = span;
    }
  }

  // Copies what the windows of a span cover of a line of an image, if it is not there.
  Source<E> CopySource(const Span<E>& span, int64_t in0, int64_t in1) {
    const auto& [d0, d1, d2] = product.dims;
    const int64_t covered = span.windows.low * d2.stride - d2.low;
    const int64_t first = Min(Max(0, covered), d2.in);
    const int64_t line = (span.image * d0.in + in0) * d1.in + in1 - block.first_line;
    int64_t& held = space.held[line * product.spans() + span.part];
    const int64_t size = block.source_pixels * block.source_width;
    if (held >= retired) return {space.copies + (held - retired) * size, first};
    held = retired + used;
    E* to = space.copies + used * size;
    ++used;
    const int64_t pixels = Max(0, Min(d2.in, covered + block.source_span) - first);
    const int64_t at = ((in0 * d1.in + in1) * d2.in + first) * product.source_channels;
    const void* from = EntryAt(const_cast<void*>(product.sources[span.image]),
                               at + task.channel + FirstRow(), product.dtype);
    const int64_t width = block.source_width;
    if constexpr (__is_same(E, Pair)) {
      JoinPixels(from, product.source_channels, pixels, width, width, d2.stride,
                 d2.in - d2.stride - first, to);
    } else {
      CopyPixels(product.dtype, from, product.source_channels, pixels, width, width, to);
    }
    return {to, first};
  }

  // Finds the taps of a segment, or its first ones.
  void FindTaps(int64_t segment, int64_t* taps) const {
    const int64_t per_line = product.is_merged ? 1 : product.dims[2].taps;
    taps[0] = segment / per_line / product.dims[1].taps;
    taps[1] = segment / per_line % product.dims[1].taps;
    taps[2] = segment % per_line;
  }

  // Finds the sources of `count` spans at the taps of a segment.
  void FindSources(const int64_t* taps, int64_t count) {
    const auto& [d0, d1, d2] = product.dims;
    if (used + count > block.copies) {
      retired += used;
      used = 0;
    }
    for (int64_t i = 0; i < count; ++i) {
      const Span<E>& span = space.spans[i];
      const int64_t in0 = span.out0 * d0.stride + taps[0] * d0.dilation - d0.low;
      const int64_t in1 = span.out1 * d1.stride + taps[1] * d1.dilation - d1.low;
      Source<E>& source = space.sources[i];
      if (in0 < 0 || in0 >= d0.in || in1 < 0 || in1 >= d1.in) {
        source = {};
      } else if (product.copies_sources) {
        source = CopySource(span, in0, in1);
      } else {
        source.entries = static_cast<const E*>(product.sources[span.image]) +
                         (in0 * d1.in + in1) * d2.in * product.source_channels + task.channel;
        source.first = 0;
      }
    }
  }

  // Adds the products of rows [row, row + kCount) of a segment, whose first tap of the last
  // dimension is `tap`, with windows of `range`.
  template <int kCount>
  void AddRows(int64_t row, int64_t tap, Range range, int64_t count, A* to) const {
    const im2col::Window& d2 = product.dims[2];
    int64_t lines = 0;
    for (int64_t i = 0; i < count; ++i) {
      const Span<E>& span = space.spans[i];
      const Source<E>& source = space.sources[i];
      const int64_t low = Max(range.low, span.windows.low);
      const int64_t high = Min(range.high, span.windows.high);
      if (source.entries == nullptr || low >= high) continue;
      const int64_t in2 = low * d2.stride + tap * d2.dilation - d2.low - source.first;
      space.lines[lines++] = {source.entries + in2 * SourceStep() + row - FirstRow(),
                              span.cotangents + (low - span.windows.low) * CotangentStep(),
                              high - low};
    }
    if (lines == 0) return;
    const int64_t step = d2.stride * SourceStep();
    if constexpr (!kMatrices || kCount != kMatrixRows) {
      AddLines<kCount, kVectors>(space.lines, lines, step, CotangentStep(), to);
    } else {
#if defined(JAXOPS_HAS_MATRICES)
      AddLineMatrices<kVectors>(space.lines, lines, step, CotangentStep(), to);
#endif
    }
  }

  // The windows whose tap at a row of the segment is in the image.
  Range RangeOf(int64_t row, int64_t tap) const {
    return WindowsOf(product.dims[2], tap + (product.is_merged ? row / product.fan_in : 0));
  }

  // The first row of a tile; the last one ends where the rows end.
  int64_t RowOf(int64_t tile) const {
    return Min(task.row_begin + tile * kRows, task.row_end - kRows);
  }

  void AddTile(int64_t tile, int64_t tap, int64_t count, A* to) const {
    const int64_t row = RowOf(tile);
    Range shared = RangeOf(row, tap);
    bool is_same = true;
    for (int r = 1; r < kRows && product.is_merged; ++r) {
      const Range range = RangeOf(row + r, tap);
      is_same &= range.low == shared.low && range.high == shared.high;
      shared.low = Max(shared.low, range.low);
      shared.high = Min(shared.high, range.high);
    }
    if (shared.high < shared.low) shared.high = shared.low;
    AddRows<kRows>(row, tap, shared, count, to);
    if (is_same) return;
    // The others are added row by row: none is multiplied by what is outside of the image.
    for (int r = 0; r < kRows; ++r) {
      const Range range = RangeOf(row + r, tap);
      const Range before = {range.low, Min(range.high, shared.low)};
      const Range after = {Max(range.low, shared.high), range.high};
      A* single = to + r * kWidth;
      AddRows<1>(row + r, tap, before, count, single);
      AddRows<1>(row + r, tap, after, count, single);
    }
  }

  void Run(A* result, int64_t segment_stride, int64_t stride) {
    const int64_t rows = task.row_end - task.row_begin;
    const bool is_tiled = rows >= kRows;
    const int64_t tiles = is_tiled ? CeilDiv(rows, kRows) : 1;
    const int64_t segments = task.segment_end - task.segment_begin;
    const int64_t of_segment = tiles * kRows * kWidth;
    for (int64_t i = 0; i < segments * of_segment; ++i) space.sums[i] = 0;
    if (product.copies_sources) {
      const int64_t lines = block.source_lines * product.spans();
      for (int64_t i = 0; i < lines; ++i) space.held[i] = -1;
    }
    for (int64_t begin = task.span_begin; begin < task.span_end; begin += block.spans) {
      const int64_t end = Min(task.span_end, begin + block.spans);
      const int64_t count = end - begin;
      FindSpans(begin, end);
      for (int64_t s = 0; s < segments; ++s) {
        int64_t taps[im2col::kMaxDims];
        FindTaps(task.segment_begin + s, taps);
        FindSources(taps, count);
        A* sums = space.sums + s * of_segment;
        for (int64_t tile = 0; tile < tiles && is_tiled; ++tile) {
          AddTile(tile, taps[2], count, sums + tile * kRows * kWidth);
        }
        for (int64_t r = 0; r < rows && !is_tiled; ++r) {
          const int64_t row = task.row_begin + r;
          AddRows<1>(row, taps[2], RangeOf(row, taps[2]), count, sums + r * kWidth);
        }
      }
    }
    for (int64_t s = 0; s < segments; ++s) {
      for (int64_t r = 0; r < rows; ++r) {
        // A row of the last tile may be in the tile before as well.
        const int64_t tile = is_tiled ? Min(r / kRows, tiles - 1) : 0;
        const int64_t within = is_tiled ? task.row_begin + r - RowOf(tile) : r;
        const A* from = space.sums + s * of_segment + (tile * kRows + within) * kWidth;
        A* to = result + s * segment_stride + r * stride;
        for (int64_t i = 0; i < kWidth; i += kLanes<A>) Store(Load(from + i), to + i);
      }
    }
  }
};

// Calls f with the entry type of a kernel gradient.
template <typename F>
JAXOPS_ALWAYS_INLINE void WithGradEntries(const GradProduct& product, F f) {
  if (product.dtype == DType::kF64) return f(double());
#if defined(JAXOPS_HAS_PAIRS)
  if (product.has_pairs) return f(Pair());
#endif
  f(float());
}

int64_t GradSpaceBytes(const GradProduct& product, const GradTask& task) {
  int64_t bytes = 0;
  WithGradEntries(product, [&](auto entry) {
    GradSpace<decltype(entry)> space;
    bytes = LayGrad(product, task, nullptr, space);
  });
  return bytes;
}

void Grad(const GradProduct& product, const GradTask& task, void* memory, void* result,
          int64_t segment_stride, int64_t stride) {
  WithGradEntries(product, [&](auto entry) {
    using E = decltype(entry);
    GradSpace<E> space;
    LayGrad(product, task, static_cast<char*>(memory), space);
    auto* sums = static_cast<Arithmetic<E>*>(result);
    WithVectors(task.vectors, [&](auto vectors) {
#if defined(JAXOPS_HAS_MATRICES)
      if constexpr (__is_same(E, Pair)) {
        if (product.has_matrices) {
          ConfigureMatrices(0);
          GradMultiplier<E, decltype(vectors)::value, true> multiplier = {product, task, space};
          multiplier.Run(sums, segment_stride, stride);
          return ReleaseMatrices();
        }
      }
#endif
      GradMultiplier<E, decltype(vectors)::value, false> multiplier = {product, task, space};
      multiplier.Run(sums, segment_stride, stride);
    });
  });
}

// --- copies --------------------------------------------------------------------------------------

void WidenTo(DType dtype, const void* from, int64_t count, void* to) {
  CopyPixels(dtype, from, count, 1, count, count, static_cast<float*>(to));
}

template <typename A>
void AddPartsOf(const A* sums, int64_t parts, int64_t part_stride, int64_t rows, int64_t fan,
                int64_t padded, DType dtype, void* to) {
  WithResult<A>(dtype, to, [&](auto* result) {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < fan; i += kLanes<A>) {
        const A* from = sums + row * padded + i;
        Vec<A> sum = LoadUpTo(from, fan - i);
        for (int64_t part = 1; part < parts; ++part) {
          sum += LoadUpTo(from + part * part_stride, fan - i);
        }
        StoreUpTo(sum, result + row * fan + i, fan - i);
      }
    }
  });
}

void AddParts(DType dtype, const void* sums, int64_t parts, int64_t part_stride, int64_t rows,
              int64_t fan, int64_t padded, DType result_dtype, void* to) {
  if (dtype == DType::kF64) {
    AddPartsOf(static_cast<const double*>(sums), parts, part_stride, rows, fan, padded,
               result_dtype, to);
  } else {
    AddPartsOf(static_cast<const float*>(sums), parts, part_stride, rows, fan, padded, result_dtype,
               to);
  }
}

}  // namespace

const Kernels kKernels = {kVectorBytes,  kMaxVectors, FindBf16Products, PixelsOfTile, WidenTo, Pack,
                          MultiplySpace, Multiply,    GradSpaceBytes,   Grad,         AddParts};

}  // namespace jaxops::conv::cpu::JAXOPS_ISA
