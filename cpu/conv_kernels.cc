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
constexpr int kTileMatrices = 2;

// Entries of a packed kernel that stay in a cache while tiles are multiplied by them.
constexpr int64_t kPanelBytes = 512 * 1024;
// Copies of lines that stay in a cache with a panel.
constexpr int64_t kCopyBytes = 128 * 1024;
// Entries of both operands of a kernel gradient that stay in a cache.
constexpr int64_t kGradCacheBytes = 256 * 1024;

int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t Max(int64_t a, int64_t b) { return a < b ? b : a; }
int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

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

#if defined(JAXOPS_HAS_PAIRS) && defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#define JAXOPS_HAS_MATRICES 1
#define JAXOPS_MATRICES_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,amx-tile,amx-bf16")))

// Registers of matrices have 16 rows of 64 bytes. The sums are in 0 to 3, the operands in 4 to 7.
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

JAXOPS_MATRICES_TARGET void ConfigureMatrices() {
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

JAXOPS_MATRICES_TARGET void ReleaseMatrices() { _tile_release(); }

// As AddPairs, for one or two matrices, whose rows are `step` entries apart. Two matrices share
// what is loaded of the kernel, and two vectors what is loaded of the source.
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

// Adds products of `kPixels` pixels with `kVectors` vectors of columns to `sums`, or sets them.
template <int kPixels, int kVectors, typename A>
void AddProducts(const Factors<A>* factors, int64_t count, const int64_t (&offsets)[kPixels],
                 bool adds, A* sums) {
  constexpr int kWidth = kVectors * kLanes<A>;
  Vec<A> total[kPixels][kVectors];
  LoadSums(sums, adds, total);
  for (int64_t f = 0; f < count; ++f) {
    const A* kernel = factors[f].kernel;
    const A* source[kPixels];
#pragma GCC unroll 16
    for (int p = 0; p < kPixels; ++p) source[p] = factors[f].source + offsets[p];
    const int64_t length = factors[f].length;
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
JAXOPS_ALWAYS_INLINE void AddFactors(const Factors<E>* factors, int64_t count,
                                     const int64_t (&offsets)[kPixels], bool adds,
                                     Arithmetic<E>* sums) {
  if constexpr (kPair<E> == 1) {
    AddProducts<kPixels, kVectors>(factors, count, offsets, adds, sums);
  } else {
#if defined(JAXOPS_HAS_PAIRS)
    AddPairs<kPixels, kVectors>(factors, count, offsets, adds, sums);
#endif
  }
}

// A pixel of the result in a block.
struct Pixel {
  int64_t line;
  int64_t at;  // in its line
};

JAXOPS_ALWAYS_INLINE void Advance(int64_t width, Pixel& pixel) {
  if (++pixel.at < width) return;
  pixel.at = 0;
  ++pixel.line;
}

// Pixels that are computed from one copy of what they read: those of some lines, from `low` on.
struct Block {
  int64_t image;
  int64_t at0;   // in the first dimension
  int64_t line;  // the first one, in the second dimension
  int64_t lines;
  int64_t low;
  int64_t count;  // of a line
};

// The block that begins with part `index` of all lines.
Block BlockAt(const Product& product, int64_t index, int64_t end) {
  const Axis* axes = product.axes;
  Block block;
  block.line = index % axes[1].count;
  block.lines = Min(Min(product.lines, axes[1].count - block.line), end - index);
  index /= axes[1].count;
  block.low = index % product.parts() * product.span;
  block.count = Min(product.span, axes[2].count - block.low);
  index /= product.parts();
  block.at0 = index % axes[0].count;
  block.image = index / axes[0].count;
  return block;
}

// How a block's entries of the source lie in memory, in entries.
struct Layout {
  int64_t pixel;   // between pixels of the source
  int64_t step;    // between what two neighbouring pixels of the result read
  int64_t line;    // between lines of the result
  int64_t pixels;  // of the source that a line of the result covers
};

// The places of lines of the source in a copy: those for a tap follow one another.
struct Places {
  int64_t of_tap;  // between taps, if no two taps share lines
  int64_t of_remainder;
  int64_t count;

  static Places Of(const Axis& axis, int64_t lines) {
    if (axis.tap_step >= lines * axis.step) return {lines, 0, Max(1, axis.taps) * lines};
    const int64_t of_remainder = lines + Max(0, axis.taps - 1) * axis.tap_step / axis.step;
    return {0, of_remainder, axis.step * of_remainder};
  }

  int64_t At(const Axis& axis, int64_t tap) const {
    if (of_tap > 0) return tap * of_tap;
    const int64_t entry = tap * axis.tap_step;
    return entry % axis.step * of_remainder + entry / axis.step;
  }
};

// Where a block reads a segment for its first pixel, which is the one of these taps.
template <typename E>
struct Segment {
  const E* source;
  int64_t index;  // of all segments
  int64_t taps[im2col::kMaxDims];
};

// The memory of a task.
template <typename E>
struct Space {
  E* copy;          // of the lines that a block reads
  E* line;          // a line of them, without what fills up segments
  char* is_copied;  // for each line of a plane
  Segment<E>* segments;
  Factors<E>* factors;
  Arithmetic<E>* sums;  // of a tile, or of all tiles where these wait for other segments
};

// Whether every pixel of the result has a copy of its segment, filled up for products of matrices.
bool IsExpanded(const Product& product) {
  return product.is_merged && product.segment() != product.packed_rows();
}

// Copies' entries of a pixel of the source.
int64_t PixelEntries(const Product& product) {
  return Max(1, product.is_merged ? product.fan : product.packed_rows());
}

int64_t CoveredPixels(const Axis& axis, int64_t count) {
  return (count - 1) * axis.step + Max(0, axis.taps - 1) * axis.tap_step + 1;
}

Layout LayoutOfCopies(const Product& product, int64_t count) {
  const Axis& axis = product.axes[2];
  Layout layout;
  layout.pixels = CoveredPixels(axis, count);
  layout.pixel = PixelEntries(product);
  if (IsExpanded(product)) {
    layout.step = product.packed_rows();
    layout.line = count * layout.step;
  } else {
    layout.step = axis.step * layout.pixel;
    layout.line = CeilDiv(layout.pixels, axis.step) * layout.step;
  }
  return layout;
}

// Whether blocks inside of the source are read there. Copies pay for themselves where several taps
// read a line, and are needed for other dtypes and where segments are not contiguous or filled up.
bool CanBeInPlace(const Product& product) {
  const Axis* axes = product.axes;
  return product.source_dtype == product.dtype && axes[0].taps * axes[1].taps == 1 &&
         product.segment() > 0 && product.segment() == product.packed_rows() &&
         (!product.is_merged || axes[2].taps == 1 || product.fan == product.source_channels) &&
         (!product.has_matrices || product.span >= kMatrixRows);
}

int64_t Aligned(int64_t bytes) { return CeilDiv(bytes, 64) * 64; }

// Segments whose rows of a packed kernel stay in a cache.
template <typename E>
int64_t SegmentsPerPass(const Product& product, int vectors) {
  const int64_t bytes = product.packed_rows() * vectors * kVectorBytes / kPair<E>;
  return Min(Max(1, product.segments()), Max(1, kPanelBytes / Max(1, bytes)));
}

// Rows of the matrices of a line. Those after its pixels are computed for nothing: as many as are
// in copies before the next line, or as whole matrices have.
int64_t MatrixLine(const Layout& layout, const Block& block, bool is_copied) {
  const int64_t whole = CeilDiv(block.count, kMatrixRows) * kMatrixRows;
  const int64_t joined = layout.line / layout.step;
  const bool are_joined =
      is_copied && CeilDiv(block.lines * joined, kMatrixRows) * kMatrixRows < block.lines * whole;
  return are_joined ? joined : whole;
}

template <typename E>
int64_t Lay(const Product& product, char* memory, Space<E>& space) {
  const Axis* axes = product.axes;
  const Layout layout = LayoutOfCopies(product, product.span);
  const int64_t places = Places::Of(axes[1], product.lines).count;
  const int64_t copy = axes[0].taps * places * layout.line;
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    char* at = memory + used;
    used += Aligned(bytes);
    return at;
  };
  // Rows after the pixels of a block, of matrices, read what follows.
  const int64_t after = product.has_matrices ? kMatrixRows * layout.step + layout.line : 0;
  space.copy = reinterpret_cast<E*>(take((copy + after) * sizeof(E)));
  space.line = reinterpret_cast<E*>(
      take(IsExpanded(product) ? layout.pixels * layout.pixel * sizeof(E) : 0));
  space.is_copied = take(places);
  space.segments = reinterpret_cast<Segment<E>*>(take(product.segments() * sizeof(Segment<E>)));
  // A segment of a single pixel may be cut in two, with a row of pairs of its own.
  int64_t rows = 0, sums = 0;
  for (int vectors = 1; vectors <= product.max_vectors; ++vectors) {
    const int64_t width = vectors * kLanes<Arithmetic<E>>;
    const int64_t segments = SegmentsPerPass<E>(product, vectors);
    const int64_t tile = product.has_matrices ? kTileMatrices * kMatrixRows : TilePixels(vectors);
    const int64_t whole = CeilDiv(product.span, kMatrixRows) * kMatrixRows;
    const int64_t pixels = product.lines * (product.has_matrices ? whole : product.span);
    const int64_t waiting = segments < product.segments() ? CeilDiv(pixels, tile) : 1;
    rows = Max(rows, segments * (2 * static_cast<int64_t>(sizeof(Factors<E>)) +
                                 (kPair<E> - 1) * 2 * width * static_cast<int64_t>(sizeof(E))));
    sums = Max(sums, waiting * tile * vectors * kVectorBytes);
  }
  space.factors = reinterpret_cast<Factors<E>*>(take(rows));
  space.sums = reinterpret_cast<Arithmetic<E>*>(take(sums));
  return used;
}

template <typename S, typename A>
void WidenRows(const S* from, int64_t rows, int64_t stride, int64_t fan, int64_t padded, A* to) {
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
void CopyPixels(DType, const void* from, int64_t stride, int64_t pixels, int64_t count,
                int64_t width, BFloat* to) {
  WidenRows(static_cast<const BFloat*>(from), pixels, stride, count, width, to);
}
#endif

// Finds the segments of a block in the source, or copies the lines that they are in.
template <typename E>
struct Reader {
  const Product& product;
  const Space<E>& space;
  const Places places = Places::Of(product.axes[1], product.lines);
  int64_t segments = 0;
  Layout layout = {};
  bool is_copied = false;

  void Read(const Block& block, int64_t group) {
    is_copied = !IsInPlace(block);
    layout = LayoutOfCopies(product, block.count);
    if (!is_copied) {
      layout.pixel = product.source_channels;
      layout.step = product.axes[2].step * layout.pixel;
    }
    segments = 0;
    const Axis* axes = product.axes;
    const int64_t channel = group * product.fan;
    const int64_t taps2 = product.is_merged ? 1 : axes[2].taps;
    E* plane = space.copy;
    for (int64_t t0 = 0; t0 < axes[0].taps; ++t0) {
      const int64_t in0 = axes[0].first + block.at0 * axes[0].step + t0 * axes[0].tap_step;
      if (in0 < 0 || in0 >= axes[0].size) continue;
      if (is_copied) __builtin_memset(space.is_copied, 0, places.count);
      for (int64_t t1 = 0; t1 < axes[1].taps; ++t1) {
        const int64_t in1 = axes[1].first + block.line * axes[1].step + t1 * axes[1].tap_step;
        const E* source;
        if (is_copied) {
          const int64_t place = places.At(axes[1], t1);
          for (int64_t line = 0; line < block.lines; ++line) {
            if (space.is_copied[place + line]) continue;
            space.is_copied[place + line] = true;
            CopyLine(block, in0, in1 + line * axes[1].step, channel,
                     plane + (place + line) * layout.line);
          }
          source = plane + place * layout.line;
        } else {
          if (in1 < 0 || in1 >= axes[1].size) continue;
          source = static_cast<const E*>(product.sources[block.image]) + channel +
                   ((in0 * axes[1].size + in1) * axes[2].size + FirstIn(block)) * layout.pixel;
        }
        for (int64_t t2 = 0; t2 < taps2; ++t2) {
          const int64_t index = (t0 * axes[1].taps + t1) * taps2 + t2;
          space.segments[segments++] = {
              source + t2 * axes[2].tap_step * layout.pixel, index, {t0, t1, t2}};
        }
      }
      plane += places.count * layout.line;
    }
  }

 private:
  // The entry of the last dimension that the first tap of the block's first pixel reads.
  int64_t FirstIn(const Block& block) const {
    return product.axes[2].first + block.low * product.axes[2].step;
  }

  bool IsInPlace(const Block& block) const {
    const Axis& axis = product.axes[2];
    const int64_t first = FirstIn(block);
    return CanBeInPlace(product) && first >= 0 &&
           first + CoveredPixels(axis, block.count) <= axis.size &&
           (!product.has_matrices || block.count >= kMatrixRows);
  }

  // Copies what a line of a block covers of a line of the source; what is outside is zeros.
  void CopyLine(const Block& block, int64_t in0, int64_t in1, int64_t channel, E* to) const {
    const Axis* axes = product.axes;
    const bool is_expanded = IsExpanded(product);
    E* line = is_expanded ? space.line : to;
    int64_t low = 0, high = 0;
    if (in1 >= 0 && in1 < axes[1].size) {
      const int64_t first = FirstIn(block);
      low = Min(Max(0, -first), layout.pixels);
      high = Max(low, Min(layout.pixels, axes[2].size - first));
      const int64_t from = (in0 * axes[1].size + in1) * axes[2].size + first + low;
      CopyPixels(product.source_dtype,
                 EntryAt(const_cast<void*>(product.sources[block.image]),
                         from * product.source_channels + channel, product.source_dtype),
                 product.source_channels, high - low, product.fan, layout.pixel,
                 line + low * layout.pixel);
    }
    __builtin_memset(line, 0, low * layout.pixel * sizeof(E));
    __builtin_memset(line + high * layout.pixel, 0,
                     (layout.pixels - high) * layout.pixel * sizeof(E));
    if (!is_expanded) return;
    const int64_t length = product.segment();
    for (int64_t p = 0; p < block.count; ++p, to += layout.step) {
      __builtin_memcpy(to, line + p * axes[2].step * layout.pixel, length * sizeof(E));
      __builtin_memset(to + length, 0, (layout.step - length) * sizeof(E));
    }
  }
};

// Computes a block of pixels by a panel of columns.
template <typename E, int kVectors, bool kMatrices>
struct Multiplier {
  using A = Arithmetic<E>;
  static constexpr int kPixels = kMatrices ? kTileMatrices * kMatrixRows : TilePixels(kVectors);
  static constexpr int64_t kWidth = kVectors * kLanes<A>;

  const Product& product;
  const Panel& panel;
  const Space<E>& space;
  const Reader<E>& reader;
  const Block& block;

  // Rows of the packed kernel from entry `first` of a segment on, which is even for pairs.
  const E* KernelAt(int64_t index, int64_t first = 0) const {
    return static_cast<const E*>(panel.packed) + (index * product.packed_rows() + first) * kWidth;
  }

  // A kernel that is not finite is multiplied pixel by pixel.
  bool UsesMatrices() const { return kMatrices && panel.is_finite; }

  int64_t OffsetOf(const Pixel& pixel) const {
    return pixel.line * reader.layout.line + pixel.at * reader.layout.step;
  }

  // Finds the entries [low, high) of a segment that are in the image.
  void Find(const Pixel& pixel, const int64_t* taps, int64_t& low, int64_t& high) const {
    const auto& [a0, a1, a2] = product.axes;
    const int64_t in1 = a1.first + (block.line + pixel.line) * a1.step + taps[1] * a1.tap_step;
    const int64_t in2 = a2.first + (block.low + pixel.at) * a2.step + taps[2] * a2.tap_step;
    low = high = 0;
    if (in1 < 0 || in1 >= a1.size) return;
    if (product.is_merged) {
      low = Min(Max(0, -in2), a2.taps) * product.fan;
      high = Max(low, Min(a2.taps, a2.size - in2) * product.fan);
    } else if (0 <= in2 && in2 < a2.size) {
      high = product.fan;
    }
  }

  // Adds segments [begin, end) of a pixel, and no products with what is outside of the image.
  void AddPixel(const Pixel& pixel, int64_t begin, int64_t end, A* sums) const {
    const int64_t offset = OffsetOf(pixel);
    Factors<E>* factors = space.factors;
    E* copy = reinterpret_cast<E*>(factors + 2 * (end - begin));
    int64_t count = 0;
    for (const Segment<E>* s = space.segments + begin; s < space.segments + end; ++s) {
      int64_t low, high;
      Find(pixel, s->taps, low, high);
      if (low == high) continue;
      const E* source = s->source + offset;
      if (low % kPair<E> != 0) {
        // The first one of a pair is outside: the row of the second one follows a zero entry, and
        // the kernel is not finite, so its own row would not do.
        factors[count++] = {OddRow(s->index, low, copy), source + low, 1};
        copy += 2 * kWidth;
        ++low;
      }
      if (low < high) factors[count++] = {KernelAt(s->index, low), source + low, high - low};
    }
    const int64_t none[1] = {};
    AddFactors<1, kVectors>(factors, count, none, begin > 0, sums);
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

  void Run() const {
    const int64_t per_pass = SegmentsPerPass<E>(product, kVectors);
    const int64_t width =
        UsesMatrices() ? MatrixLine(reader.layout, block, reader.is_copied) : block.count;
    const int64_t rows = block.lines * width;
    const bool is_waiting = per_pass < reader.segments;
    int64_t begin = 0;
    do {  // at least once, so that sums of nothing are zeros
      const int64_t end = Min(reader.segments, begin + per_pass);
      if (panel.is_finite) FindFactors(begin, end);
      A* sums = space.sums;
      Pixel pixel = {};
      for (int64_t row = 0; row < rows; row += kPixels) {
        const int64_t count = Min(kPixels, rows - row);
        const Pixel first = pixel;
        AddTile(begin, end, width, count, pixel, sums);
        if (end == reader.segments) Finish(first, width, count, sums);
        if (is_waiting) sums += kPixels * kWidth;
      }
      begin = end;
    } while (begin < reader.segments);
  }

  // Finds what is multiplied where the kernel is finite: what is outside is zeros.
  void FindFactors(int64_t begin, int64_t end) const {
    const int64_t length = product.packed_rows();
    for (int64_t i = begin; i < end; ++i) {
      const Segment<E>& segment = space.segments[i];
      space.factors[i - begin] = {KernelAt(segment.index), segment.source, length};
    }
  }

  // Adds segments [begin, end) of `count` rows from `pixel` on, which moves behind them.
  void AddTile(int64_t begin, int64_t end, int64_t width, int64_t count, Pixel& pixel,
               A* sums) const {
    if (!panel.is_finite) {
      for (int64_t p = 0; p < count; ++p, Advance(width, pixel)) {
        if (pixel.at < block.count) AddPixel(pixel, begin, end, sums + p * kWidth);
      }
      return;
    }
    if constexpr (!kMatrices) {
      int64_t offsets[kPixels];
      for (int64_t p = 0; p < kPixels; ++p) {  // the last one is repeated
        offsets[p] = p < count ? OffsetOf(pixel) : offsets[p - 1];
        if (p < count) Advance(width, pixel);
      }
      AddFactors<kPixels, kVectors>(space.factors, end - begin, offsets, begin > 0, sums);
    } else {
#if defined(JAXOPS_HAS_MATRICES)
      int64_t offsets[kTileMatrices];
      const int64_t matrices = CeilDiv(count, kMatrixRows);
      for (int64_t m = 0; m < matrices; ++m) {
        offsets[m] = OffsetOf(FirstOf(pixel));
        pixel.at += kMatrixRows;
        pixel.line += pixel.at / width;
        pixel.at %= width;
      }
      AddMatrices<kVectors>(space.factors, end - begin, offsets, matrices, reader.layout.step,
                            begin > 0, sums);
#endif
    }
  }

  // The first pixel of a matrix. In the source, nothing may be read after the pixels of a line.
  Pixel FirstOf(const Pixel& pixel) const {
    return {pixel.line, reader.is_copied ? pixel.at : Min(pixel.at, block.count - kMatrixRows)};
  }

  // Writes the results of `count` rows.
  void Finish(Pixel pixel, int64_t width, int64_t count, const A* sums) const {
    for (int64_t row = 0; row < count;) {
      int64_t size = Min(count - row, width - pixel.at);
      Pixel first = pixel;
      if (UsesMatrices() && !reader.is_copied) {
        size = kMatrixRows;
        first = FirstOf(pixel);
      }
      const int64_t pixels = Min(size, block.count - first.at);
      if (pixels > 0) Write(first, pixels, sums + row * kWidth);
      row += size;
      pixel.at += size;
      if (pixel.at < width) continue;
      pixel.at = 0;
      ++pixel.line;
    }
  }

  // Writes the results of `count` pixels of a line.
  void Write(const Pixel& first, int64_t count, const A* sums) const {
    const Axis* axes = product.axes;
    const int64_t columns = Min(kWidth, product.columns - panel.first_column);
    const int64_t channel = panel.group * product.columns + panel.first_column;
    const int64_t places[] = {block.at0, block.line + first.line, block.low + first.at};
    int64_t at = 0;
    for (int d = 0; d < im2col::kMaxDims; ++d) {
      at = at * axes[d].result_size + axes[d].result_first + places[d] * axes[d].result_step;
    }
    void* to = EntryAt(product.results[block.image], at * product.result_channels + channel,
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

// Lines of a block: enough pixels for whole tiles, of which a cache holds what they read.
int64_t BlockLines(const Product& product) {
  constexpr int64_t kMaxPixels = 512;
  if (CanBeInPlace(product)) return 1;
  const Axis* axes = product.axes;
  const int64_t entry = SizeOf(product.dtype);
  const int64_t line = LayoutOfCopies(product, product.span).line * entry * axes[0].taps;
  int64_t lines = 1;
  while (lines < axes[1].count && (lines + 1) * product.span <= kMaxPixels &&
         Places::Of(axes[1], lines + 1).count * line <= kCopyBytes) {
    ++lines;
  }
  return CeilDiv(axes[1].count, CeilDiv(axes[1].count, lines));
}

int64_t MultiplySpace(const Product& product) {
  int64_t bytes = 0;
  WithEntries(product.dtype, [&](auto entry) {
    Space<decltype(entry)> space;
    bytes = Lay(product, nullptr, space);
  });
  return bytes;
}

void Multiply(const Product& product, const Panel* panels, int64_t count, int64_t begin,
              int64_t end, void* memory) {
#if defined(JAXOPS_HAS_MATRICES)
  if (product.has_matrices) ConfigureMatrices();
#endif
  WithEntries(product.dtype, [&](auto entry) {
    using E = decltype(entry);
    Space<E> space;
    Lay(product, static_cast<char*>(memory), space);
    Reader<E> reader = {product, space};
    while (begin < end) {
      const Block block = BlockAt(product, begin, end);
      begin += block.lines;
      for (int64_t i = 0; i < count; ++i) {
        const Panel& panel = panels[i];
        if (i == 0 || panel.group != panels[i - 1].group) reader.Read(block, panel.group);
        WithVectors(panel.vectors, [&](auto vectors) {
          constexpr int kVectors = decltype(vectors)::value;
          if constexpr (kPair<E> == 2 && kVectors <= kMatrixVectors) {
            if (product.has_matrices) {
              return Multiplier<E, kVectors, true>{product, panel, space, reader, block}.Run();
            }
          }
          Multiplier<E, kVectors, false>{product, panel, space, reader, block}.Run();
        });
      }
    }
  });
#if defined(JAXOPS_HAS_MATRICES)
  if (product.has_matrices) ReleaseMatrices();
#endif
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
  const int64_t rows = product.packed_rows();
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
  const int64_t tile = TilePixels(task.vectors);
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

template <typename E, int kVectors>
struct GradMultiplier {
  using A = Arithmetic<E>;
  static constexpr int kRows = TilePixels(kVectors);
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
    AddLines<kCount, kVectors>(space.lines, lines, step, CotangentStep(), to);
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

#if defined(JAXOPS_HAS_MATRICES)
// to[r][k] = from[k][r] for 16 x 16 entries of 32 bits.
JAXOPS_ALWAYS_INLINE JAXOPS_MATRICES_TARGET void TransposeVectors(__m512i (&a)[16]) {
  __m512i b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_maskz_unpacklo_epi32(0xffff, a[i], a[i + 1]);
    b[i + 1] = _mm512_maskz_unpackhi_epi32(0xffff, a[i], a[i + 1]);
  }
  // Then a[4 i + j] has, in its part q of four entries, column 4 q + j of the rows from 4 i on.
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
    b[j] = join(even[0], even[1], Constant<kEven>());
    b[4 + j] = join(odd[0], odd[1], Constant<kEven>());
    b[8 + j] = join(even[0], even[1], Constant<kOdd>());
    b[12 + j] = join(odd[0], odd[1], Constant<kOdd>());
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = b[i];
}

// Entries of up to 32 channels of two pixels, joined to pairs.
struct PixelPairs {
  __m512i low;   // of channels 0 to 3, 8 to 11, 16 to 19 and 24 to 27
  __m512i high;  // of the others
};

// The channel whose pairs are lane `i` of `low`; those of `high` are 4 later.
constexpr int ChannelOfLane(int i) { return i / 4 * 8 + i % 4; }

__mmask32 MaskOf(int64_t count) { return count >= 32 ? ~0u : (1u << Max(0, count)) - 1; }

// Joins entries of two pixels, with zeros where masks have none, and keeps the largest exponents.
JAXOPS_ALWAYS_INLINE JAXOPS_MATRICES_TARGET PixelPairs JoinPixels(const BFloat* first,
                                                                  __mmask32 first_mask,
                                                                  const BFloat* second,
                                                                  __mmask32 second_mask,
                                                                  __m512i& largest) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  const __m512i a = _mm512_maskz_loadu_epi16(first_mask, first);
  const __m512i b = _mm512_maskz_loadu_epi16(second_mask, second);
  largest = _mm512_max_epu16(largest, _mm512_and_si512(a, exponent));
  largest = _mm512_max_epu16(largest, _mm512_and_si512(b, exponent));
  return {_mm512_maskz_unpacklo_epi16(~0u, a, b), _mm512_maskz_unpackhi_epi16(~0u, a, b)};
}

JAXOPS_ALWAYS_INLINE JAXOPS_MATRICES_TARGET bool AreFinite(__m512i largest) {
  return _mm512_cmpeq_epi16_mask(largest, _mm512_set1_epi16(0x7f80)) == 0;
}

// Pixels of a line of the source at equal distances, some of which may be outside of it.
struct Pixels {
  const BFloat* line;
  int64_t size;
  int64_t stride;  // entries between pixels of the line
  int64_t first;   // the pixel
  int64_t step;
  int64_t count;
};

// Writes each of `channels` channels of the pixels to a row of its own; rows are `pitch` entries
// apart. Returns whether all entries are finite.
JAXOPS_MATRICES_TARGET bool TransposePixels(const Pixels& pixels, int64_t channels, BFloat* to,
                                            int64_t pitch) {
  // Copies: the compiler would read what `pixels` has after every store.
  const int64_t count = pixels.count;
  const int64_t distance = pixels.step * pixels.stride;
  const BFloat* const zeroth = pixels.line + pixels.first * pixels.stride;
  // Pixels [low, high) are inside.
  const int64_t low = pixels.first < 0 ? Min(count, CeilDiv(-pixels.first, pixels.step)) : 0;
  const int64_t high =
      Max(low, Min(count, CeilDiv(Max(0, pixels.size - pixels.first), pixels.step)));
  __m512i largest = _mm512_setzero_si512();
  for (int64_t c = 0; c < channels; c += 32) {
    const __mmask32 mask = MaskOf(channels - c);
    const bool has_high = channels - c > 4;
    for (int64_t i = 0; i < count; i += 32) {
      __m512i first[16], second[16];
      const BFloat* pixel = zeroth + (i * distance + c);
#pragma GCC unroll 16
      for (int j = 0; j < 16; ++j) {
        const auto masked = [&](int64_t at) JAXOPS_MATRICES_TARGET
            __attribute__((always_inline)) { return at >= low && at < high ? mask : __mmask32{0}; };
        const PixelPairs pairs =
            JoinPixels(pixel, masked(i + 2 * j), pixel + distance, masked(i + 2 * j + 1), largest);
        first[j] = pairs.low;
        second[j] = pairs.high;
        pixel += 2 * distance;
      }
      const __mmask32 stored = MaskOf(count - i);
      BFloat* row = to + (c * pitch + i);
      const int64_t rows = channels - c;
      const auto store = [&](__m512i(&entries)[16], int channel) JAXOPS_MATRICES_TARGET
          __attribute__((always_inline)) {
            TransposeVectors(entries);
#pragma GCC unroll 16
            for (int j = 0; j < 16; ++j) {
              const int64_t at = channel + ChannelOfLane(j);
              if (at < rows) _mm512_mask_storeu_epi16(row + at * pitch, stored, entries[j]);
            }
          };
      store(first, 0);
      if (has_high) store(second, 4);
    }
  }
  return AreFinite(largest);
}

// The memory of a task of matrices.
struct MatrixSpace {
  BFloat* source;      // (rows, pitch): lines one after the other
  BFloat* line;        // a line of channels, whose rows are for several taps
  BFloat* cotangents;  // (columns / 32, windows / 2, 32, 2), in that order, too
  char* is_copied;     // for each line of a plane
  float* sums;         // (segments, rows / 32, columns / 32, 32, 32), columns in the order of pairs
};

// The kernel gradient by products of matrices: their rows are channels, or channels at a tap, their
// columns outputs, and they sum over the windows of some lines. Windows are joined as pixels of a
// padded line are, with cotangents of zero where no window begins.
struct MatrixGrad {
  static constexpr int64_t kTileRows = kTileMatrices * kMatrixRows;
  static constexpr int64_t kTileColumns = kMatrixVectors * kLanes<float>;
  static constexpr int64_t kTile = kTileRows * kTileColumns;

  const GradProduct& product;
  const GradTask& task;
  const MatrixSpace& space;

  static Axis AxisOf(const im2col::Window& window) {
    Axis axis;
    axis.taps = window.taps;
    axis.step = window.stride;
    axis.tap_step = window.dilation;
    return axis;
  }

  // How entries of the source lie in a row.
  struct RowLayout {
    int64_t covered;  // pixels of a line with the same remainder by the stride
    int64_t line;     // between lines
    int64_t phase;    // between remainders
    int64_t pitch;    // between rows
    Places places;
  };

  static int64_t BlockLines(const GradProduct& product) {
    constexpr int64_t kMaxWindows = 256;
    if (product.spans() > 1) return 1;
    const int64_t most = Max(1, kMaxWindows / product.span), lines = Max(1, product.dims[1].out);
    return CeilDiv(lines, CeilDiv(lines, most));
  }

  static RowLayout LayoutOf(const GradProduct& product) {
    const Axis axis = AxisOf(product.dims[2]);
    RowLayout layout;
    layout.places = Places::Of(AxisOf(product.dims[1]), BlockLines(product));
    layout.covered = CeilDiv(CoveredPixels(axis, product.span), axis.step);
    layout.line = product.is_merged ? product.span : layout.covered;
    layout.phase = layout.places.count * layout.line;
    // Whole matrices are read from every tap on. An odd number of cache lines spreads rows over all
    // sets of a cache.
    const int64_t entries =
        (product.is_merged ? 1 : axis.step) * layout.phase + layout.line + 2 * kMatrixEntries;
    layout.pitch = (CeilDiv(entries, kMatrixEntries) | 1) * kMatrixEntries;
    return layout;
  }

  int64_t rows() const { return task.row_end - task.row_begin; }
  int64_t RowTiles() const { return CeilDiv(rows(), kTileRows); }
  int64_t ColumnTiles() const { return CeilDiv(task.vectors, kMatrixVectors); }

  float* SumsOf(int64_t segment, int64_t row_tile, int64_t column_tile) const {
    return space.sums + ((segment * RowTiles() + row_tile) * ColumnTiles() + column_tile) * kTile;
  }

  // The sum of a row and an output, whose place in a tile is that of its pairs.
  float* SumOf(int64_t segment, int64_t row, int64_t output) const {
    const int64_t column = output % kTileColumns;
    const int64_t place = column % 8 / 4 * kLanes<float> + column / 8 * 4 + column % 4;
    return SumsOf(segment, row / kTileRows, output / kTileColumns) +
           row % kTileRows * kTileColumns + place;
  }

  Block BlockAt(int64_t index) const {
    const auto& [d0, d1, d2] = product.dims;
    Block block;
    const int64_t end = task.span_end - index;
    block.low = index % product.spans() * product.span;
    block.count = Min(product.span, d2.out - block.low);
    index /= product.spans();
    block.line = index % d1.out;
    block.lines = Min(Min(BlockLines(product), d1.out - block.line), end);
    block.at0 = index / d1.out % d0.out;
    block.image = index / d1.out / d0.out;
    return block;
  }

  const BFloat* CotangentsOf(const Block& block, int64_t line, int64_t window) const {
    const auto& [d0, d1, d2] = product.dims;
    const int64_t at = ((block.at0 * d1.out + block.line + line) * d2.out + block.low + window);
    return static_cast<const BFloat*>(product.cotangents[block.image]) +
           at * product.cotangent_channels + task.output;
  }

  // Copies the cotangents of `windows` windows, with zeros between lines and after the last one.
  // Returns whether all are finite.
  JAXOPS_MATRICES_TARGET bool CopyCotangents(const Block& block, int64_t line_windows,
                                             int64_t windows) const {
    // Copies: the compiler would read what `block` has after every store.
    const int64_t count = block.count, lines = block.lines, stride = product.cotangent_channels;
    const int64_t line_stride = product.dims[2].out * stride;
    const BFloat* const zeroth = CotangentsOf(block, 0, 0);
    __m512i largest = _mm512_setzero_si512();
    for (int64_t column = 0; column < task.outputs; column += kTileColumns) {
      const __mmask32 mask = MaskOf(task.outputs - column);
      BFloat* to = space.cotangents + column * windows;
      int64_t line = 0, at = 0;
      const BFloat* from[2];
      __mmask32 masks[2];
      for (int64_t i = 0; i < windows; i += 2, to += 2 * kTileColumns) {
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
          from[j] = zeroth + (line * line_stride + at * stride + column);
          masks[j] = line < lines && at < count ? mask : 0;
          const bool is_last = ++at == line_windows;
          at = is_last ? 0 : at;
          line += is_last;
        }
        const PixelPairs pairs = JoinPixels(from[0], masks[0], from[1], masks[1], largest);
        _mm512_storeu_si512(to, pairs.low);
        _mm512_storeu_si512(to + kTileColumns, pairs.high);
      }
    }
    return AreFinite(largest);
  }

  // Copies what the windows of a line cover of a line of the source, which may be outside of it.
  JAXOPS_MATRICES_TARGET bool CopyLine(const RowLayout& layout, const Block& block, int64_t in0,
                                       int64_t in1, BFloat* to) const {
    const auto& [d0, d1, d2] = product.dims;
    Pixels pixels;
    pixels.size = in1 >= 0 && in1 < d1.in ? d2.in : 0;
    pixels.stride = product.source_channels;
    pixels.line = static_cast<const BFloat*>(product.sources[block.image]) +
                  (pixels.size > 0 ? (in0 * d1.in + in1) * d2.in * pixels.stride : 0) +
                  task.channel;
    pixels.step = d2.stride;
    pixels.count = CeilDiv(CoveredPixels(AxisOf(d2), block.count), d2.stride);
    const int64_t first = block.low * d2.stride - d2.low;
    // Segments of a row of taps have rows for each of them, which are parts of those of channels.
    const int64_t channels = product.is_merged ? product.fan_in : rows();
    const int64_t channel = product.is_merged ? 0 : task.row_begin;
    pixels.line += channel;
    BFloat* transposed = product.is_merged ? space.line : to;
    const int64_t pitch = product.is_merged ? layout.covered * d2.stride : layout.pitch;
    const int64_t phase_step = product.is_merged ? layout.covered : layout.phase;
    bool is_finite = true;
    for (int64_t phase = 0; phase < d2.stride; ++phase) {
      bool is_read = false;
      for (int64_t tap = 0; tap < d2.taps; ++tap) {
        is_read |= tap * d2.dilation % d2.stride == phase;
      }
      if (!is_read) continue;
      pixels.first = first + phase;
      is_finite &= TransposePixels(pixels, channels, transposed + phase * phase_step, pitch);
    }
    for (int64_t row = task.row_begin; row < task.row_end && product.is_merged; ++row) {
      const int64_t tap = row / product.fan_in;
      __builtin_memcpy(to + (row - task.row_begin) * layout.pitch,
                       transposed + row % product.fan_in * pitch + tap % d2.stride * phase_step +
                           tap / d2.stride,
                       block.count * sizeof(BFloat));
    }
    return is_finite;
  }

  struct Tap {
    int64_t at[im2col::kMaxDims];  // the first one of a segment
  };

  Tap TapOf(int64_t segment) const {
    const int64_t per_line = product.is_merged ? 1 : product.dims[2].taps;
    return {segment / per_line / product.dims[1].taps, segment / per_line % product.dims[1].taps,
            segment % per_line};
  }

  // Adds segments [begin, end), which read one plane of the source.
  JAXOPS_MATRICES_TARGET void AddSegments(const RowLayout& layout, const Block& block,
                                          int64_t windows, int64_t begin, int64_t end) const {
    const Axis a1 = AxisOf(product.dims[1]);
    const im2col::Window& d2 = product.dims[2];
    for (int64_t column_tile = 0; column_tile < ColumnTiles(); ++column_tile) {
      Factors<BFloat> factors;
      factors.kernel = space.cotangents + column_tile * windows * kTileColumns;
      factors.length = windows;
      for (int64_t row_tile = 0; row_tile < RowTiles(); ++row_tile) {
        const int64_t row = row_tile * kTileRows;
        const int64_t matrices = CeilDiv(Min(rows() - row, kTileRows), kMatrixRows);
        const int64_t offsets[kTileMatrices] = {0, kMatrixRows * layout.pitch};
        for (int64_t s = begin; s < end; ++s) {
          const Tap tap = TapOf(s);
          const int64_t entry = tap.at[2] * d2.dilation;
          factors.source = space.source + row * layout.pitch +
                           layout.places.At(a1, tap.at[1]) * layout.line +
                           entry % d2.stride * layout.phase + entry / d2.stride;
          float* sums = SumsOf(s - task.segment_begin, row_tile, column_tile);
          AddMatrices<kMatrixVectors>(&factors, 1, offsets, matrices, layout.pitch, true, sums);
        }
      }
    }
  }

  // The same without products with what is outside of the image, or with zeros between lines.
  void AddInside(const Block& block, int64_t in0, int64_t segment) const {
    const auto& [d0, d1, d2] = product.dims;
    const Tap tap = TapOf(segment);
    for (int64_t line = 0; line < block.lines; ++line) {
      const int64_t in1 = (block.line + line) * d1.stride + tap.at[1] * d1.dilation - d1.low;
      if (in1 < 0 || in1 >= d1.in) continue;
      const BFloat* source = static_cast<const BFloat*>(product.sources[block.image]) +
                             (in0 * d1.in + in1) * d2.in * product.source_channels + task.channel;
      for (int64_t r = 0; r < rows(); ++r) {
        const int64_t row = task.row_begin + r;
        const int64_t tap2 = product.is_merged ? row / product.fan_in : tap.at[2];
        const int64_t channel = product.is_merged ? row % product.fan_in : row;
        const Range range = WindowsOf(d2, tap2);
        const int64_t last = Min(range.high, block.low + block.count);
        for (int64_t w = Max(range.low, block.low); w < last; ++w) {
          const int64_t in2 = w * d2.stride + tap2 * d2.dilation - d2.low;
          const float entry = ToFloat(source[in2 * product.source_channels + channel]);
          const BFloat* cotangents = CotangentsOf(block, line, w - block.low);
          for (int64_t output = 0; output < task.outputs; ++output) {
            *SumOf(segment - task.segment_begin, r, output) += entry * ToFloat(cotangents[output]);
          }
        }
      }
    }
  }

  static float ToFloat(BFloat entry) { return BitCast<float>(static_cast<uint32_t>(entry) << 16); }

  JAXOPS_MATRICES_TARGET void AddBlock(const RowLayout& layout, const Block& block) const {
    const auto& [d0, d1, d2] = product.dims;
    const Axis a1 = AxisOf(d1);
    const int64_t windows = CeilDiv(block.lines * layout.line, kMatrixEntries) * kMatrixEntries;
    const bool are_finite = CopyCotangents(block, layout.line, windows);
    const int64_t per_plane = d1.taps * (product.is_merged ? 1 : d2.taps);
    for (int64_t begin = task.segment_begin; begin < task.segment_end;) {
      const Tap first = TapOf(begin);
      const int64_t end = Min(task.segment_end, (first.at[0] + 1) * per_plane);
      const int64_t in0 = block.at0 * d0.stride + first.at[0] * d0.dilation - d0.low;
      if (in0 >= 0 && in0 < d0.in) {
        bool is_finite = are_finite;
        __builtin_memset(space.is_copied, 0, layout.places.count);
        for (int64_t tap = first.at[1]; tap <= TapOf(end - 1).at[1]; ++tap) {
          const int64_t place = layout.places.At(a1, tap);
          const int64_t in1 = block.line * d1.stride + tap * d1.dilation - d1.low;
          for (int64_t line = 0; line < block.lines; ++line) {
            if (space.is_copied[place + line]) continue;
            space.is_copied[place + line] = true;
            is_finite &= CopyLine(layout, block, in0, in1 + line * d1.stride,
                                  space.source + (place + line) * layout.line);
          }
        }
        if (is_finite) {
          AddSegments(layout, block, windows, begin, end);
        } else {
          for (int64_t s = begin; s < end; ++s) AddInside(block, in0, s);
          ClearSource(layout);
        }
      }
      begin = end;
    }
  }

  // Entries between lines are multiplied by zeros, so none of them may be NaN or Inf.
  void ClearSource(const RowLayout& layout) const {
    __builtin_memset(space.source, 0, RowTiles() * kTileRows * layout.pitch * sizeof(BFloat));
  }

  void Run(float* result, int64_t segment_stride, int64_t stride) const {
    const RowLayout layout = LayoutOf(product);
    const int64_t segments = task.segment_end - task.segment_begin;
    const int64_t sums = segments * RowTiles() * ColumnTiles() * kTile;
    __builtin_memset(space.sums, 0, sums * sizeof(float));
    ClearSource(layout);
    for (int64_t span = task.span_begin; span < task.span_end;) {
      const Block block = BlockAt(span);
      AddBlock(layout, block);
      span += block.lines;
    }
    for (int64_t s = 0; s < segments; ++s) {
      for (int64_t r = 0; r < rows(); ++r) {
        float* to = result + s * segment_stride + r * stride;
        for (int64_t i = 0; i < task.vectors * kLanes<float>; i += 4) {
          __builtin_memcpy(to + i, SumOf(s, r, i), 4 * sizeof(float));
        }
      }
    }
  }
};

int64_t LayMatrices(const GradProduct& product, const GradTask& task, char* memory,
                    MatrixSpace& space) {
  const MatrixGrad grad = {product, task, space};
  const MatrixGrad::RowLayout layout = MatrixGrad::LayoutOf(product);
  const int64_t windows =
      CeilDiv(MatrixGrad::BlockLines(product) * layout.line, kMatrixEntries) * kMatrixEntries;
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    char* at = memory + used;
    used += Aligned(bytes);
    return at;
  };
  const int64_t rows = grad.RowTiles() * MatrixGrad::kTileRows;
  const int64_t columns = grad.ColumnTiles() * MatrixGrad::kTileColumns;
  const int64_t segments = task.segment_end - task.segment_begin;
  constexpr int64_t kEntry = sizeof(BFloat);
  space.source = reinterpret_cast<BFloat*>(take(rows * layout.pitch * kEntry));
  space.line = reinterpret_cast<BFloat*>(take(
      product.is_merged ? product.fan_in * product.dims[2].stride * layout.covered * kEntry : 0));
  space.cotangents = reinterpret_cast<BFloat*>(take(windows * columns * kEntry));
  space.is_copied = take(layout.places.count);
  space.sums = reinterpret_cast<float*>(take(segments * rows * columns * sizeof(float)));
  return used;
}
#endif

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
#if defined(JAXOPS_HAS_MATRICES)
  if (product.has_matrices) {
    MatrixSpace space;
    return LayMatrices(product, task, nullptr, space);
  }
#endif
  int64_t bytes = 0;
  WithGradEntries(product, [&](auto entry) {
    GradSpace<decltype(entry)> space;
    bytes = LayGrad(product, task, nullptr, space);
  });
  return bytes;
}

void Grad(const GradProduct& product, const GradTask& task, void* memory, void* result,
          int64_t segment_stride, int64_t stride) {
#if defined(JAXOPS_HAS_MATRICES)
  if (product.has_matrices) {
    MatrixSpace space;
    LayMatrices(product, task, static_cast<char*>(memory), space);
    ConfigureMatrices();
    MatrixGrad{product, task, space}.Run(static_cast<float*>(result), segment_stride, stride);
    return ReleaseMatrices();
  }
#endif
  WithGradEntries(product, [&](auto entry) {
    using E = decltype(entry);
    GradSpace<E> space;
    LayGrad(product, task, static_cast<char*>(memory), space);
    auto* sums = static_cast<Arithmetic<E>*>(result);
    WithVectors(task.vectors, [&](auto vectors) {
      GradMultiplier<E, decltype(vectors)::value> multiplier = {product, task, space};
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

const Kernels kKernels = {kVectorBytes,   kMaxVectors, FindBf16Products, WidenTo,
                          Pack,           BlockLines,  MultiplySpace,    Multiply,
                          GradSpaceBytes, Grad,        AddParts};

}  // namespace jaxops::conv::cpu::JAXOPS_ISA
