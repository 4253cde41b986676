#include "cpu/conv_kernels.h"

#include <cstdint>

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
constexpr int kMaxTilePixels = 12;

// Entries of a packed kernel that stay in a cache while tiles are multiplied by them.
constexpr int64_t kPanelBytes = 512 * 1024;
// Pixels of both operands of a kernel gradient that stay in a cache.
constexpr int64_t kGradBytes = 256 * 1024;

int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t Max(int64_t a, int64_t b) { return a < b ? b : a; }
int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// An entry in all lanes. Its sum with zeros would be another operation, because of the sign of
// zero.
JAXOPS_ALWAYS_INLINE Vec<float> Broadcast(float entry) {
#if defined(__AVX512F__)
  return BitCast<Vec<float>>(_mm512_set1_ps(entry));
#elif defined(__AVX2__)
  return BitCast<Vec<float>>(_mm256_set1_ps(entry));
#else
  return Vec<float>{entry, entry, entry, entry};
#endif
}

JAXOPS_ALWAYS_INLINE Vec<double> Broadcast(double entry) {
#if defined(__AVX512F__)
  return BitCast<Vec<double>>(_mm512_set1_pd(entry));
#elif defined(__AVX2__)
  return BitCast<Vec<double>>(_mm256_set1_pd(entry));
#else
  return Vec<double>{entry, entry};
#endif
}

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

#if defined(__AVX512F__) && (defined(__clang__) || __GNUC__ >= 10)
#define JAXOPS_HAS_PAIRS 1
// The only function that needs more than the features of this file: `MultipliesPairs` is asked
// before it is called.
#define JAXOPS_PAIRS_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))

bool MultipliesPairs() { return __builtin_cpu_supports("avx512bf16"); }

// Adds the products of a pair of entries of each pixel.
template <int kPixels, int kVectors>
JAXOPS_ALWAYS_INLINE JAXOPS_PAIRS_TARGET void AddPair(const BFloat* kernel, const int32_t* pairs,
                                                      __m512 (*total)[kVectors]) {
  __m512i entries[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v)
    entries[v] = _mm512_loadu_si512(kernel + 2 * v * kLanes<float>);
#pragma GCC unroll 16
  for (int p = 0; p < kPixels; ++p) {
    const __m512i pair = _mm512_set1_epi32(pairs[p]);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      total[p][v] = _mm512_dpbf16_ps(total[p][v], (__m512bh)pair, (__m512bh)entries[v]);
    }
  }
}

template <int kPixels, int kVectors>
JAXOPS_PAIRS_TARGET void AddPairs(const Segment<BFloat>* segments, int64_t count, bool adds,
                                  float* sums) {
  constexpr int kWidth = kVectors * kLanes<float>;
  __m512 total[kPixels][kVectors];
#pragma GCC unroll 16
  for (int p = 0; p < kPixels; ++p) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      total[p][v] =
          adds ? _mm512_loadu_ps(sums + p * kWidth + v * kLanes<float>) : _mm512_setzero_ps();
    }
  }
  for (int64_t s = 0; s < count; ++s) {
    const BFloat* kernel = segments[s].kernel;
    const BFloat* source[kPixels];
#pragma GCC unroll 16
    for (int p = 0; p < kPixels; ++p) source[p] = segments[s].source[p];
    const int64_t length = segments[s].length;
    int32_t pairs[kPixels];
    int64_t i = 0;
    for (; i + 2 <= length; i += 2, kernel += 2 * kWidth) {
#pragma GCC unroll 16
      for (int p = 0; p < kPixels; ++p)
        __builtin_memcpy(&pairs[p], source[p] + i, sizeof(pairs[p]));
      AddPair<kPixels, kVectors>(kernel, pairs, total);
    }
    if (i < length) {
      // The entry after the last one may be NaN.
#pragma GCC unroll 16
      for (int p = 0; p < kPixels; ++p) pairs[p] = static_cast<uint16_t>(source[p][i]);
      AddPair<kPixels, kVectors>(kernel, pairs, total);
    }
  }
#pragma GCC unroll 16
  for (int p = 0; p < kPixels; ++p) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      _mm512_storeu_ps(sums + p * kWidth + v * kLanes<float>, total[p][v]);
    }
  }
}
#else
bool MultipliesPairs() { return false; }
#endif

// Adds products of segments of `kPixels` pixels with `kVectors` vectors of columns to `sums`, or
// sets them.
template <int kPixels, int kVectors, typename A>
void AddProducts(const Segment<A>* segments, int64_t count, bool adds, A* sums) {
  constexpr int kWidth = kVectors * kLanes<A>;
  Vec<A> total[kPixels][kVectors];
#pragma GCC unroll 16
  for (int p = 0; p < kPixels; ++p) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      total[p][v] = adds ? Load(sums + p * kWidth + v * kLanes<A>) : Vec<A>{};
    }
  }
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
#pragma GCC unroll 16
  for (int p = 0; p < kPixels; ++p) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) Store(total[p][v], sums + p * kWidth + v * kLanes<A>);
  }
}

template <int kPixels, int kVectors, typename E>
JAXOPS_ALWAYS_INLINE void Add(const Segment<E>* segments, int64_t count, bool adds,
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
  Arithmetic<E>* sums;  // of all tiles
};

int64_t Aligned(int64_t bytes) { return CeilDiv(bytes, 64) * 64; }

template <typename E>
int64_t SegmentsPerBlock(const Product& product, int vectors) {
  const int64_t bytes = product.segment() * vectors * kVectorBytes / kPair<E>;
  return Min(Max(1, product.segments()), Max(1, kPanelBytes / Max(1, bytes)));
}

template <typename E>
int64_t Lay(const Product& product, int vectors, int64_t tiles, char* memory, Space<E>& space) {
  const int64_t pixels = TilePixels(vectors);
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
  space.sums = reinterpret_cast<Arithmetic<E>*>(take(tiles * pixels * vectors * kVectorBytes));
  return used;
}

// Computes tiles of a block of columns.
template <typename E, int kVectors>
struct Multiplier {
  using A = Arithmetic<E>;
  static constexpr int kPixels = TilePixels(kVectors);
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
  void AddTile(const Entry<E>* entries, int64_t begin, int64_t end, A* sums) const {
    const int64_t length = product.segment();
    Segment<E>* segments = space.segments;
    E* copy = space.copies;
    int64_t count = 0;
    bool are_inside = true;
    for (int p = 0; p < kPixels; ++p) are_inside &= IsInside(entries[p]);
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
    Add<kPixels, kVectors>(segments, count, begin > 0, sums);
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
    Add<1, kVectors>(segments, count, begin > 0, sums);
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
    for (int64_t i = 0; i < product.segment(); ++i) space.zeros[i] = E{};
    int64_t begin = 0;
    do {  // at least once, so that sums of nothing are zeros
      const int64_t end = product.segment() == 0 ? begin : Min(segments, begin + per_block);
      for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
        Pixel pixels[kPixels];
        const int64_t count = Min(kPixels, all - tile * kPixels);
        pixels[0] = PixelAt(product.axes, tile * kPixels);
        for (int p = 1; p < kPixels; ++p) {
          pixels[p] = pixels[p - 1];
          if (p < count) Advance(product.axes, pixels[p]);
        }
        Entry<E> entries[kPixels];
        for (int p = 0; p < kPixels; ++p) entries[p] = EntryOf(pixels[p]);
        A* sums = space.sums + (tile - tile_begin) * kPixels * kWidth;
        if (panel.is_finite) {
          AddTile(entries, begin, end, sums);
        } else {
          for (int64_t p = 0; p < count; ++p) AddPixel(entries[p], begin, end, sums + p * kWidth);
        }
        if (begin + per_block >= segments) Finish(pixels, count, sums);
      }
      begin += per_block;
    } while (begin < segments);
  }

  void Finish(const Pixel* pixels, int64_t count, const A* sums) const {
    const Axis* axes = product.axes;
    const int64_t columns = Min(kWidth, product.columns - panel.first_column);
    const int64_t channel = panel.group * product.columns + panel.first_column;
    for (int64_t p = 0; p < count;) {
      // Pixels of a line are written at once.
      int64_t next = p + 1;
      while (next < count && pixels[next].at[2] > 0) ++next;
      int64_t at = 0;
      for (int d = 0; d < im2col::kMaxDims; ++d) {
        at =
            at * axes[d].result_size + axes[d].result_first + pixels[p].at[d] * axes[d].result_step;
      }
      void* to = EntryAt(product.results[pixels[p].image], at * product.result_channels + channel,
                         product.finish.dtype);
      FinishPixels(product.finish, sums + p * kWidth, kWidth, next - p, channel, columns, to,
                   axes[2].result_step * product.result_channels);
      p = next;
    }
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

int64_t PixelsOfTile(int vectors) { return TilePixels(vectors); }

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
      Multiplier<E, decltype(vectors)::value>{product, panel, space}.Run(tile_begin, tile_end);
    });
  });
}

template <typename E>
JAXOPS_ALWAYS_INLINE bool IsFinite(E value) {
  if constexpr (sizeof(E) == sizeof(uint16_t)) {
    return (static_cast<uint16_t>(value) & 0x7f80) != 0x7f80;
  } else {
    return value - value == 0;
  }
}

// Copies the rows of a tap of the kernel.
template <typename E>
bool PackTap(const Product& product, const E* tap, int64_t columns, int64_t width, int64_t row,
             E* to) {
  bool is_finite = true;
  for (int64_t k = 0; k < product.fan; ++k, ++row) {
    const E* from = tap + k * product.fan_stride;
    E* line = to + row / kPair<E> * kPair<E> * width + row % kPair<E>;
    for (int64_t n = 0; n < columns; ++n) {
      const E value = from[n * product.column_stride];
      is_finite &= IsFinite(value);
      line[n * kPair<E>] = value;
    }
  }
  return is_finite;
}

// The same for rows that are contiguous and of the type of the sums.
template <typename E>
bool PackContiguousTap(const Product& product, const E* tap, int64_t width, int64_t row, E* to) {
  Vec<E> differences = {};
  for (int64_t k = 0; k < product.fan; ++k, ++row) {
    for (int64_t n = 0; n < width; n += kLanes<E>) {
      const Vec<E> v = Load(tap + k * product.fan_stride + n);
      differences += v - v;
      Store(v, to + row * width + n);
    }
  }
  E sum = 0;
  for (int i = 0; i < kLanes<E>; ++i) sum += differences[i];
  return sum == 0;
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
        const E* from = kernel + tap * product.tap_stride;
        bool is_packed = false;
        if constexpr (kPair<E> == 1) {
          if (columns == width && product.column_stride == 1) {
            is_finite &= PackContiguousTap(product, from, width, row, to);
            is_packed = true;
          }
        }
        if (!is_packed) is_finite &= PackTap(product, from, columns, width, row, to);
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

// Neighbouring pixels of a line: products of `count` of them are summed.
template <typename A>
struct Line {
  const A* source;
  const A* cotangent;
  int64_t count;
};

// Adds products of `kRows` neighbouring entries of the source with vectors of cotangents.
template <int kRows, int kVectors, typename A>
void AddLines(const Line<A>* lines, int64_t count, int64_t source_step, int64_t cotangent_step,
              A* sums) {
  constexpr int kWidth = kVectors * kLanes<A>;
  Vec<A> total[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) total[r][v] = Load(sums + r * kWidth + v * kLanes<A>);
  }
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
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) Store(total[r][v], sums + r * kWidth + v * kLanes<A>);
  }
}

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

template <typename A>
int64_t LinesPerBlock(const GradProduct& product, const GradTask& task) {
  const int64_t entries = task.vectors * kLanes<A> + task.row_end - task.row_begin;
  const int64_t bytes = Max(1, product.dims[2].out * entries * static_cast<int64_t>(sizeof(A)));
  return Min(Max(1, kGradBytes / bytes), Max(1, task.line_end - task.line_begin));
}

template <typename A, int kVectors>
struct GradMultiplier {
  static constexpr int kRows = TilePixels(kVectors);
  static constexpr int64_t kWidth = kVectors * kLanes<A>;

  const GradProduct& product;
  const GradTask& task;
  Line<A>* lines;
  A* sums;  // of tiles of kRows rows

  // Adds the products of rows [row, row + kCount) of the segment with windows of `range`.
  template <int kCount>
  void AddRows(int64_t row, Range range, int64_t line_begin, int64_t line_end, A* to) const {
    if (range.low >= range.high) return;
    const auto& [d0, d1, d2] = product.dims;
    const int64_t in2 = range.low * d2.stride + task.taps[2] * d2.dilation - d2.low;
    int64_t count = 0;
    for (int64_t line = line_begin; line < line_end; ++line) {
      const int64_t out1 = line % d1.out;
      const int64_t out0 = line / d1.out % d0.out;
      const int64_t image = line / d1.out / d0.out;
      const int64_t in0 = out0 * d0.stride + task.taps[0] * d0.dilation - d0.low;
      const int64_t in1 = out1 * d1.stride + task.taps[1] * d1.dilation - d1.low;
      if (in0 < 0 || in0 >= d0.in || in1 < 0 || in1 >= d1.in) continue;
      const A* source = static_cast<const A*>(product.sources[image]) +
                        ((in0 * d1.in + in1) * d2.in + in2) * product.source_channels +
                        task.channel + row;
      const A* cotangent =
          static_cast<const A*>(product.cotangents[image]) +
          ((out0 * d1.out + out1) * d2.out + range.low) * product.cotangent_channels + task.output;
      lines[count++] = {source, cotangent, range.high - range.low};
    }
    AddLines<kCount, kVectors>(lines, count, d2.stride * product.source_channels,
                               product.cotangent_channels, to);
  }

  // The windows whose tap at a row of the segment is in the image.
  Range RangeOf(int64_t row) const {
    const int64_t tap = product.is_merged ? row / product.fan_in : 0;
    return WindowsOf(product.dims[2], task.taps[2] + tap);
  }

  // The first row of a tile; the last one ends where the rows end.
  int64_t RowOf(int64_t tile) const {
    return Min(task.row_begin + tile * kRows, task.row_end - kRows);
  }

  void AddTile(int64_t tile, int64_t line_begin, int64_t line_end) const {
    A* to = sums + tile * kRows * kWidth;
    const int64_t row = RowOf(tile);
    Range shared = RangeOf(row);
    bool is_same = true;
    for (int r = 1; r < kRows && product.is_merged; ++r) {
      const Range range = RangeOf(row + r);
      is_same &= range.low == shared.low && range.high == shared.high;
      shared.low = Max(shared.low, range.low);
      shared.high = Min(shared.high, range.high);
    }
    if (shared.high < shared.low) shared.high = shared.low;
    AddRows<kRows>(row, shared, line_begin, line_end, to);
    if (is_same) return;
    // The others are added row by row: none is multiplied by what is outside of the image.
    for (int r = 0; r < kRows; ++r) {
      const Range range = RangeOf(row + r);
      const Range before = {range.low, Min(range.high, shared.low)};
      const Range after = {Max(range.low, shared.high), range.high};
      A* single = to + r * kWidth;
      AddRows<1>(row + r, before, line_begin, line_end, single);
      AddRows<1>(row + r, after, line_begin, line_end, single);
    }
  }

  void Run(A* result, int64_t stride) const {
    const int64_t rows = task.row_end - task.row_begin;
    const bool is_tiled = rows >= kRows;
    const int64_t tiles = is_tiled ? CeilDiv(rows, kRows) : 1;
    const int64_t per_block = LinesPerBlock<A>(product, task);
    for (int64_t i = 0; i < tiles * kRows * kWidth; ++i) sums[i] = 0;
    for (int64_t begin = task.line_begin; begin < task.line_end; begin += per_block) {
      const int64_t end = Min(task.line_end, begin + per_block);
      for (int64_t tile = 0; tile < tiles && is_tiled; ++tile) AddTile(tile, begin, end);
      for (int64_t r = 0; r < rows && !is_tiled; ++r) {
        const int64_t row = task.row_begin + r;
        AddRows<1>(row, RangeOf(row), begin, end, sums + r * kWidth);
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      // A row of the last tile may be in the tile before as well.
      const int64_t tile = is_tiled ? Min(r / kRows, tiles - 1) : 0;
      const int64_t within = is_tiled ? task.row_begin + r - RowOf(tile) : r;
      const A* from = sums + (tile * kRows + within) * kWidth;
      for (int64_t i = 0; i < kWidth; i += kLanes<A>)
        Store(Load(from + i), result + r * stride + i);
    }
  }
};

template <typename A>
int64_t LayGrad(const GradProduct& product, const GradTask& task, char* memory, Line<A>*& lines,
                A*& sums) {
  const int64_t rows = task.row_end - task.row_begin;
  const int64_t tile = TilePixels(task.vectors);
  const int64_t of_lines = Aligned(LinesPerBlock<A>(product, task) * sizeof(Line<A>));
  lines = reinterpret_cast<Line<A>*>(memory);
  sums = reinterpret_cast<A*>(memory + of_lines);
  return of_lines + Aligned(CeilDiv(Max(1, rows), tile) * tile * task.vectors * kVectorBytes);
}

int64_t GradSpace(const GradProduct& product, const GradTask& task) {
  Line<float>* lines;
  float* sums;
  Line<double>* wide_lines;
  double* wide_sums;
  return product.dtype == DType::kF64 ? LayGrad(product, task, nullptr, wide_lines, wide_sums)
                                      : LayGrad(product, task, nullptr, lines, sums);
}

template <typename A>
void GradOf(const GradProduct& product, const GradTask& task, void* memory, A* result,
            int64_t stride) {
  Line<A>* lines;
  A* sums;
  LayGrad(product, task, static_cast<char*>(memory), lines, sums);
  WithVectors(task.vectors, [&](auto vectors) {
    GradMultiplier<A, decltype(vectors)::value>{product, task, lines, sums}.Run(result, stride);
  });
}

void Grad(const GradProduct& product, const GradTask& task, void* memory, void* sums,
          int64_t stride) {
  if (product.dtype == DType::kF64) {
    GradOf(product, task, memory, static_cast<double*>(sums), stride);
  } else {
    GradOf(product, task, memory, static_cast<float*>(sums), stride);
  }
}

// --- copies --------------------------------------------------------------------------------------

template <typename S, typename A>
void WidenRows(const S* from, int64_t rows, int64_t fan, int64_t padded, A* to) {
  if (fan == padded) {
    fan = padded = rows * fan;
    rows = 1;
  }
  for (int64_t row = 0; row < rows; ++row, from += fan, to += padded) {
    for (int64_t i = 0; i < fan; i += kLanes<A>) {
      StoreUpTo(LoadUpTo(from + i, fan - i), to + i, padded - i);
    }
  }
}

void WidenTo(DType dtype, const void* from, int64_t rows, int64_t fan, int64_t padded, void* to) {
  WithStorage(dtype, from, 0, [&]<typename S>(const S* entries) {
    WidenRows(entries, rows, fan, padded, static_cast<Arithmetic<S>*>(to));
  });
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

const Kernels kKernels = {kVectorBytes,  kMaxVectors, MultipliesPairs, PixelsOfTile, WidenTo, Pack,
                          MultiplySpace, Multiply,    GradSpace,       Grad,         AddParts};

}  // namespace jaxops::conv::cpu::JAXOPS_ISA
