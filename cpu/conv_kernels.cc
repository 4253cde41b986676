#include "cpu/conv_kernels.h"

#include <cstdint>

#include "cpu/conv_products.h"

namespace jaxops::conv::cpu::JAXOPS_ISA {
namespace {

// Entries of a packed kernel that stay in a cache while tiles are multiplied by them.
constexpr int64_t kPanelBytes = 512 * 1024;
// If it is larger, a slice of it that an L1 cache holds. Only products of matrices are fast enough
// to gain by that: (32,128,28,28,128,3) bf16 takes 2.9 ms for 3.2 (docs/conv2d.md).
constexpr int64_t kSliceBytes = 36 * 1024;
// Copies of lines that stay in a cache with a panel.
constexpr int64_t kCopyBytes = 128 * 1024;

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
  int64_t pixel;  // between pixels of the source
  int64_t step;   // between what two neighbouring pixels of the result read
  int64_t line;   // between lines of the result
};

// A segment of a block: where its first pixel reads it, and its first taps.
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
  E* line;          // a line before its segments are filled up
  char* is_copied;  // for each line of a plane
  Segment<E>* segments;
  Factors<E>* factors;
  Arithmetic<E>* sums;  // of a tile, or of all tiles where these wait for other segments
};

// Whether every pixel of the result has a copy of its segment: segments are filled up, or do not
// share entries.
bool IsExpanded(const Product& product) {
  return product.is_merged && (product.segment() != product.packed_rows() ||
                               product.axes[2].step > product.axes[2].taps);
}

// Entries of a pixel of the source in a copy.
int64_t PixelEntries(const Product& product) {
  return Max(1, product.is_merged ? product.fan : product.packed_rows());
}

// Pixels of the source in the copy of a line that is not expanded, or before it is.
int64_t CopiedPixels(const Product& product, int64_t count) {
  const Axis& axis = product.axes[2];
  if (!product.is_merged) return TapLayout::Of(axis, count).count;
  if (axis.step > axis.taps) return 0;
  return CeilDiv((count - 1) * axis.step + axis.taps, axis.step) * axis.step;
}

Layout LayoutOfCopies(const Product& product, int64_t count) {
  Layout layout;
  layout.pixel = PixelEntries(product);
  if (IsExpanded(product)) {
    layout.step = Max(1, product.packed_rows());
    layout.line = count * layout.step;
  } else {
    layout.step = (product.is_merged ? product.axes[2].step : 1) * layout.pixel;
    layout.line = CopiedPixels(product, count) * layout.pixel;
  }
  return layout;
}

// Whether blocks inside of the source are read there. Copies pay for themselves where windows have
// several lines of taps, and are needed for other dtypes and where segments are filled up or not
// contiguous.
bool CanBeInPlace(const Product& product) {
  const Axis* axes = product.axes;
  return product.source_dtype == product.dtype && axes[0].taps * axes[1].taps == 1 &&
         product.segment() > 0 && product.segment() == product.packed_rows() &&
         (!product.is_merged || axes[2].taps == 1 || product.fan == product.source_channels) &&
         (!product.has_matrices || product.span >= kMatrixRows);
}

// Segments whose rows of a packed kernel stay in a cache.
template <typename E>
int64_t SegmentsPerPass(const Product& product, int vectors) {
  const int64_t bytes = product.packed_rows() * vectors * kVectorBytes / kPair<E>;
  const bool is_slice = product.has_matrices && bytes <= kSliceBytes;
  const int64_t most = (is_slice ? kSliceBytes : kPanelBytes) / Max(1, bytes);
  return Min(Max(1, product.segments()), Max(1, most));
}

// Rows of the matrices of a line: its pixels, and rows after them whose results are dropped, up to
// the next line of a copy or to whole matrices.
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
  const int64_t lines = TapLayout::Of(axes[1], product.lines).count;
  const int64_t copy = axes[0].taps * lines * layout.line;
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    char* at = memory + used;
    used += Aligned(bytes);
    return at;
  };
  // The last matrix of a block has rows after its pixels, which read beyond the copy.
  const int64_t after = product.has_matrices ? kMatrixRows * layout.step + layout.line : 0;
  space.copy = reinterpret_cast<E*>(take((copy + after) * sizeof(E)));
  space.line = reinterpret_cast<E*>(take(
      IsExpanded(product) ? CopiedPixels(product, product.span) * layout.pixel * sizeof(E) : 0));
  space.is_copied = take(lines);
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

// Finds the segments of a block in the source, or copies the lines that they are in.
template <typename E>
struct Reader {
  const Product& product;
  const Space<E>& space;
  const TapLayout lines = TapLayout::Of(product.axes[1], product.lines);
  int64_t segments = 0;
  Layout layout = {};
  bool is_copied = false;

  void Read(const Block& block, int64_t group) {
    is_copied = !IsInPlace(block);
    layout = LayoutOfCopies(product, block.count);
    if (!is_copied) {
      layout.pixel = product.source_channels;
      // Steps of single pixels and lines may be close to the largest integer.
      layout.step = block.count > 1 ? product.axes[2].step * layout.pixel : 0;
      layout.line =
          block.lines > 1 ? product.axes[1].step * product.axes[2].size * layout.pixel : 0;
    }
    segments = 0;
    if (product.segment() == 0) return;
    const Axis* axes = product.axes;
    const int64_t channel = group * product.fan;
    const int64_t taps2 = product.is_merged ? 1 : axes[2].taps;
    E* plane = space.copy;
    for (int64_t t0 = 0; t0 < axes[0].taps; ++t0) {
      const int64_t in0 = axes[0].first + block.at0 * axes[0].step + t0 * axes[0].tap_step;
      if (in0 < 0 || in0 >= axes[0].size) continue;
      if (is_copied) __builtin_memset(space.is_copied, 0, lines.count);
      for (int64_t t1 = 0; t1 < axes[1].taps; ++t1) {
        const int64_t in1 = axes[1].first + block.line * axes[1].step + t1 * axes[1].tap_step;
        const E* source;
        if (is_copied) {
          const int64_t first_line = lines.At(t1);
          for (int64_t line = 0; line < block.lines; ++line) {
            if (space.is_copied[first_line + line]) continue;
            space.is_copied[first_line + line] = true;
            CopyLine(block, in0, in1 + line * axes[1].step, channel,
                     plane + (first_line + line) * layout.line);
          }
          source = plane + first_line * layout.line;
        } else {
          source = static_cast<const E*>(product.sources[block.image]) + channel +
                   ((in0 * axes[1].size + in1) * axes[2].size + FirstIn(block)) * layout.pixel;
        }
        const TapLayout pixels = TapLayout::Of(axes[2], block.count);
        for (int64_t t2 = 0; t2 < taps2; ++t2) {
          const int64_t index = (t0 * axes[1].taps + t1) * taps2 + t2;
          const int64_t at = is_copied ? pixels.At(t2) : t2 * axes[2].tap_step;
          space.segments[segments++] = {source + at * layout.pixel, index, {t0, t1, t2}};
        }
      }
      plane += lines.count * layout.line;
    }
  }

 private:
  // The entry of the last dimension that the first tap of the block's first pixel reads.
  int64_t FirstIn(const Block& block) const {
    return product.axes[2].first + block.low * product.axes[2].step;
  }

  bool IsInPlace(const Block& block) const {
    if (!CanBeInPlace(product)) return false;
    const Axis &lines = product.axes[1], &axis = product.axes[2];
    const int64_t line = lines.first + block.line * lines.step;
    const int64_t first = FirstIn(block);
    const int64_t last = first + (block.count - 1) * axis.step + (axis.taps - 1) * axis.tap_step;
    return line >= 0 && line + (block.lines - 1) * lines.step < lines.size && first >= 0 &&
           last < axis.size && (!product.has_matrices || block.count >= kMatrixRows);
  }

  // Copies `count` pixels of a line of the source from pixel `first` on, `step` apart. A null line
  // and pixels outside of it are zeros.
  void CopyPart(const void* line, int64_t first, int64_t step, int64_t count, E* to) const {
    int64_t low = 0, high = 0;
    if (line != nullptr) {
      low = first < 0 ? Min(count, CeilDiv(-first, step)) : 0;
      high = Max(low, Min(count, CeilDiv(Max(0, product.axes[2].size - first), step)));
    }
    if (low < high) {
      const int64_t at = (first + low * step) * product.source_channels;
      CopyPixels(product.source_dtype, EntryAt(const_cast<void*>(line), at, product.source_dtype),
                 high - low > 1 ? step * product.source_channels : 0, high - low, product.fan,
                 layout.pixel, to + low * layout.pixel);
    }
    __builtin_memset(to, 0, low * layout.pixel * sizeof(E));
    __builtin_memset(to + high * layout.pixel, 0, (count - high) * layout.pixel * sizeof(E));
  }

  // Copies what a line of a block reads of a line of the source, which may be outside of it.
  void CopyLine(const Block& block, int64_t in0, int64_t in1, int64_t channel, E* to) const {
    const Axis* axes = product.axes;
    const Axis& axis = axes[2];
    const int64_t first = FirstIn(block);
    const void* line = nullptr;
    if (in1 >= 0 && in1 < axes[1].size) {
      const int64_t at = (in0 * axes[1].size + in1) * axis.size * product.source_channels + channel;
      line = EntryAt(const_cast<void*>(product.sources[block.image]), at, product.source_dtype);
    }
    if (!product.is_merged) {
      const TapLayout pixels = TapLayout::Of(axis, block.count);
      for (int64_t tap = 0; tap < Min(pixels.period, axis.taps); ++tap) {
        CopyPart(line, first + pixels.FirstOf(tap, axis), axis.step, pixels.size,
                 to + tap * pixels.size * layout.pixel);
      }
      return;
    }
    const int64_t copied = CopiedPixels(product, block.count);
    if (!IsExpanded(product)) return CopyPart(line, first, 1, copied, to);
    if (copied > 0) CopyPart(line, first, 1, copied, space.line);
    const int64_t length = product.segment();
    for (int64_t p = 0; p < block.count; ++p, to += layout.step) {
      if (copied > 0) {
        __builtin_memcpy(to, space.line + p * axis.step * layout.pixel, length * sizeof(E));
      } else {
        CopyPart(line, first + p * axis.step, 1, axis.taps, to);
      }
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
        AddPixel(pixel, begin, end, sums + p * kWidth);
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
    const int64_t indices[] = {block.at0, block.line + first.line, block.low + first.at};
    int64_t at = 0;
    for (int d = 0; d < im2col::kMaxDims; ++d) {
      at = at * axes[d].result_size + axes[d].result_first + indices[d] * axes[d].result_step;
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

// Lines of a block: enough pixels for several tiles, if a cache holds what they read.
int64_t BlockLines(const Product& product) {
  constexpr int64_t kMaxPixels = 512;
  const Axis* axes = product.axes;
  const int64_t entry = SizeOf(product.dtype);
  const int64_t line = LayoutOfCopies(product, product.span).line * entry * axes[0].taps;
  int64_t lines = 1;
  while (lines < axes[1].count && (lines + 1) * product.span <= kMaxPixels &&
         TapLayout::Of(axes[1], lines + 1).count * line <= kCopyBytes) {
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

const Kernels kKernels = {kVectorBytes, kMaxVectors,   WidenTo,  Pack,
                          BlockLines,   MultiplySpace, Multiply, AddParts};

}  // namespace jaxops::conv::cpu::JAXOPS_ISA
