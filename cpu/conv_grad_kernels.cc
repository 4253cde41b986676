#include "cpu/conv_grad_kernels.h"

#include <cstdint>

#include "cpu/conv_grad_matrices.h"
#include "cpu/conv_products.h"

namespace jaxops::conv::cpu::grad::JAXOPS_ISA {
namespace {

using namespace jaxops::conv::cpu::JAXOPS_ISA;

// Entries of both operands of a kernel gradient that stay in a cache.
constexpr int64_t kGradCacheBytes = 256 * 1024;

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
  static GradBlock Of(const Product& product, const Task& task, E) {
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
int64_t LayGrad(const Product& product, const Task& task, char* memory, GradSpace<E>& space) {
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

  const Product& product;
  const Task& task;
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

// Calls f with the entry type of a kernel gradient.
template <typename F>
JAXOPS_ALWAYS_INLINE void WithGradEntries(const Product& product, F f) {
  if (product.dtype == DType::kF64) return f(double());
#if defined(JAXOPS_HAS_PAIRS)
  if (product.has_pairs) return f(Pair());
#endif
  f(float());
}

int64_t GradSpaceBytes(const Product& product, const Task& task) {
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

void Grad(const Product& product, const Task& task, void* memory, void* result,
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

}  // namespace

const Kernels kKernels = {GradSpaceBytes, Grad};

}  // namespace jaxops::conv::cpu::grad::JAXOPS_ISA
