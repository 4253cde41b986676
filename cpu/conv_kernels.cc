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
constexpr int kMaxTilePixels = 12;  // and all are factors of 24, see conv.cc

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

// Adds the products of entries `i` and `i` + 1 of each pixel, or of the first one alone. The entry
// after the last one may be NaN.
template <int kPixels, int kVectors, bool kIsSingle>
JAXOPS_ALWAYS_INLINE JAXOPS_PAIRS_TARGET void AddPair(const BFloat* kernel,
                                                      const BFloat* const (&source)[kPixels],
                                                      int64_t i, __m512 (*total)[kVectors]) {
  __m512i entries[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v)
    entries[v] = _mm512_loadu_si512(kernel + 2 * v * kLanes<float>);
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
    int64_t i = 0;
    for (; i + 2 <= length; i += 2, kernel += 2 * kWidth) {
      AddPair<kPixels, kVectors, false>(kernel, source, i, total);
    }
    if (i < length) AddPair<kPixels, kVectors, true>(kernel, source, i, total);
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
  const int64_t waiting = segments < product.segments() ? tiles : 1;
  space.sums = reinterpret_cast<Arithmetic<E>*>(take(waiting * pixels * vectors * kVectorBytes));
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
    AddSegments<kPixels, kVectors>(segments, count, begin > 0, sums);
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

// Copies two rows of columns that are contiguous.
void PackTwoRows(const BFloat* first, const BFloat* second, int64_t columns, BFloat* to) {
  for (int64_t n = 0; n < columns; ++n) {
    const uint32_t both = static_cast<uint16_t>(first[n]) |
                          static_cast<uint32_t>(static_cast<uint16_t>(second[n])) << 16;
    __builtin_memcpy(to + 2 * n, &both, sizeof(both));
  }
}

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
  constexpr int kWidth = kVectors * kLanes<float>;
  __m512 total[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      total[r][v] = _mm512_loadu_ps(sums + r * kWidth + v * kLanes<float>);
    }
  }
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
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      _mm512_storeu_ps(sums + r * kWidth + v * kLanes<float>, total[r][v]);
    }
  }
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

template <typename E>
int64_t LinesPerBlock(const GradProduct& product, const GradTask& task) {
  const int64_t entries = task.vectors * kLanes<Arithmetic<E>> + task.row_end - task.row_begin;
  const int64_t bytes = Max(1, product.dims[2].out * entries * static_cast<int64_t>(sizeof(E)));
  return Min(Max(1, kGradBytes / bytes), Max(1, task.line_end - task.line_begin));
}

template <typename E, int kVectors>
struct GradMultiplier {
  using A = Arithmetic<E>;
  static constexpr int kRows = TilePixels(kVectors);
  static constexpr int64_t kWidth = kVectors * kLanes<A>;

  const GradProduct& product;
  const GradTask& task;
  Line<E>* lines;
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
      const E* source = static_cast<const E*>(product.sources[image]) +
                        ((in0 * d1.in + in1) * d2.in + in2) * product.source_channels +
                        task.channel + row;
      const E* cotangent =
          static_cast<const E*>(product.cotangents[image]) +
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
    const int64_t per_block = LinesPerBlock<E>(product, task);
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

template <typename E>
int64_t LayGrad(const GradProduct& product, const GradTask& task, char* memory, Line<E>*& lines,
                Arithmetic<E>*& sums) {
  const int64_t rows = task.row_end - task.row_begin;
  const int64_t tile = TilePixels(task.vectors);
  const int64_t of_lines = Aligned(LinesPerBlock<E>(product, task) * sizeof(Line<E>));
  lines = reinterpret_cast<Line<E>*>(memory);
  sums = reinterpret_cast<Arithmetic<E>*>(memory + of_lines);
  return of_lines + Aligned(CeilDiv(Max(1, rows), tile) * tile * task.vectors * kVectorBytes);
}

// Calls f with the entry type of a kernel gradient.
template <typename F>
JAXOPS_ALWAYS_INLINE void WithGradEntries(DType dtype, F f) {
  if (dtype == DType::kF64) return f(double());
#if defined(JAXOPS_HAS_PAIRS)
  if (dtype == DType::kBF16) return f(Pair());
#endif
  f(float());
}

int64_t GradSpace(const GradProduct& product, const GradTask& task) {
  int64_t bytes = 0;
  WithGradEntries(product.dtype, [&](auto entry) {
    Line<decltype(entry)>* lines;
    Arithmetic<decltype(entry)>* sums;
    bytes = LayGrad(product, task, nullptr, lines, sums);
  });
  return bytes;
}

void Grad(const GradProduct& product, const GradTask& task, void* memory, void* result,
          int64_t stride) {
  WithGradEntries(product.dtype, [&](auto entry) {
    using E = decltype(entry);
    using A = Arithmetic<E>;
    Line<E>* lines;
    A* sums;
    LayGrad(product, task, static_cast<char*>(memory), lines, sums);
    WithVectors(task.vectors, [&](auto vectors) {
      GradMultiplier<E, decltype(vectors)::value>{product, task, lines, sums}.Run(
          static_cast<A*>(result), stride);
    });
  });
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

// Copies `count` entries as pairs with those that are `distance` after them, or with zeros from
// entry `paired` on.
void JoinEntries(const BFloat* from, int64_t count, int64_t distance, int64_t paired,
                 uint32_t* to) {
  int64_t i = 0;
  for (; i + kLanes<float> <= paired; i += kLanes<float>) {
    const U32Vec both = WidenBits(from + i) | (WidenBits(from + distance + i) << 16);
    __builtin_memcpy(to + i, &both, sizeof(both));
  }
  for (; i < count; ++i) {
    const uint32_t high = i < paired ? static_cast<uint16_t>(from[distance + i]) : 0;
    to[i] = static_cast<uint16_t>(from[i]) | high << 16;
  }
}

void JoinPairs(const void* from, int64_t row_begin, int64_t row_end, int64_t step, int64_t rows,
               int64_t fan, int64_t padded, void* to) {
  const BFloat* entries = static_cast<const BFloat*>(from) + row_begin * fan;
  uint32_t* pairs = static_cast<uint32_t*>(to);
  const int64_t count = row_end - row_begin;
  const int64_t paired = Min(count, Max(0, rows - step - row_begin));
  if (fan == padded) return JoinEntries(entries, count * fan, step * fan, paired * fan, pairs);
  for (int64_t row = 0; row < count; ++row, entries += fan, pairs += padded) {
    JoinEntries(entries, fan, step * fan, row < paired ? fan : 0, pairs);
    for (int64_t i = fan; i < padded; ++i) pairs[i] = 0;
  }
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

const Kernels kKernels = {kVectorBytes, kMaxVectors, MultipliesPairs, PixelsOfTile, WidenTo,
                          JoinPairs,    Pack,        MultiplySpace,   Multiply,     GradSpace,
                          Grad,         AddParts};

}  // namespace jaxops::conv::cpu::JAXOPS_ISA
