// Kernel gradients by the products of matrices of AMX; for conv_grad_kernels.cc alone.
#ifndef JAXOPS_CPU_CONV_GRAD_MATRICES_H_
#define JAXOPS_CPU_CONV_GRAD_MATRICES_H_

#include <cstdint>

#include "common/im2col.h"
#include "cpu/conv_axes.h"
#include "cpu/conv_grad_kernels.h"
#include "cpu/conv_products.h"

#if defined(JAXOPS_HAS_MATRICES)
namespace jaxops::conv::cpu::grad::JAXOPS_ISA {
namespace {

using namespace jaxops::conv::cpu::JAXOPS_ISA;

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

// Pairs entries of two pixels, with zeros where masks have none, and keeps the largest exponents.
JAXOPS_ALWAYS_INLINE JAXOPS_MATRICES_TARGET PixelPairs PairPixels(const BFloat* first,
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
  const uint64_t distance = static_cast<uint64_t>(pixels.step) * pixels.stride * sizeof(BFloat);
  // Integers: addresses of pixels that are outside, and are not read, may be no pointers.
  const uint64_t zeroth = reinterpret_cast<uintptr_t>(pixels.line) +
                          static_cast<uint64_t>(pixels.first) * pixels.stride * sizeof(BFloat);
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
      uint64_t pixel = zeroth + i * distance + c * sizeof(BFloat);
#pragma GCC unroll 16
      for (int j = 0; j < 16; ++j) {
        const auto masked = [&](int64_t at) JAXOPS_MATRICES_TARGET
            __attribute__((always_inline)) { return at >= low && at < high ? mask : __mmask32{0}; };
        const PixelPairs pairs = PairPixels(
            reinterpret_cast<const BFloat*>(pixel), masked(i + 2 * j),
            reinterpret_cast<const BFloat*>(pixel + distance), masked(i + 2 * j + 1), largest);
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

// The memory of a task of matrices. Columns are in the order of the lanes of `PixelPairs`.
struct MatrixSpace {
  BFloat* source;      // (rows, pitch): lines one after the other
  BFloat* line;        // a line of channels, whose rows are for several taps
  BFloat* cotangents;  // (columns / 32, windows / 2, 32, 2)
  char* is_copied;     // for each line of a plane
  float* sums;         // (segments, rows / 32, columns / 32, 32, 32)
};

// Products of matrices for the kernel gradient: rows are channels, or channels at a tap, columns
// are outputs, and sums are over the windows of some lines. Windows follow one another as the
// pixels of a padded line do, with cotangents of zero where no window begins.
struct MatrixGrad {
  static constexpr int64_t kTileRows = kTileMatrices * kMatrixRows;
  static constexpr int64_t kTileColumns = kMatrixVectors * kLanes<float>;
  static constexpr int64_t kTile = kTileRows * kTileColumns;

  const Product& product;
  const Task& task;
  const MatrixSpace& space;

  static Axis AxisOf(const im2col::Window& window) {
    Axis axis;
    axis.taps = window.taps;
    axis.step = window.stride;
    axis.tap_step = window.dilation;
    return axis;
  }

  struct Tap {
    int64_t at[im2col::kMaxDims];  // the first one of a segment
  };

  static Tap TapOf(const Product& product, int64_t segment) {
    const int64_t per_line = product.is_merged ? 1 : product.dims[2].taps;
    return {segment / per_line / product.dims[1].taps, segment / per_line % product.dims[1].taps,
            segment % per_line};
  }

  // How entries of the source lie in a row.
  struct RowLayout {
    TapLayout lines;
    TapLayout pixels;  // of a line
    int64_t line;      // between lines
    int64_t plane;     // between taps of a line that share no pixels
    int64_t pitch;     // between rows
  };

  static int64_t BlockLines(const Product& product) {
    constexpr int64_t kMaxWindows = 256;  // whose operands the first cache holds
    const int64_t lines = Max(1, product.dims[1].out);
    const int64_t most = Min(lines, kMaxWindows / product.span);
    if (product.spans() > 1 || most <= 1) return 1;
    const int64_t joined = CeilDiv(lines, CeilDiv(lines, most));
    // Joined lines have what lies between them, and single ones are filled up and read sums more
    // often. With a line at a time, a dilation of 12 took 9.7 ms, and 6.9 takes this choice
    // (docs/conv2d.md).
    constexpr int64_t kSumWindows = 64;
    const int64_t single = CeilDiv(product.span, kMatrixEntries) * kMatrixEntries + kSumWindows;
    return JoinedWindows(product, joined) + kSumWindows < joined * single ? joined : 1;
  }

  static int64_t LineStep(const Product& product) {
    return product.is_merged ? product.span
                             : TapLayout::Of(AxisOf(product.dims[2]), product.span).size;
  }

  // Windows of some joined lines, in whole matrices.
  static int64_t JoinedWindows(const Product& product, int64_t lines) {
    const int64_t windows = (lines - 1) * LineStep(product) + product.span;
    return CeilDiv(windows, kMatrixEntries) * kMatrixEntries;
  }

  static RowLayout LayoutOf(const Product& product) {
    RowLayout layout;
    layout.lines = TapLayout::Of(AxisOf(product.dims[1]), BlockLines(product));
    layout.pixels = TapLayout::Of(AxisOf(product.dims[2]), product.span);
    layout.line = LineStep(product);
    layout.plane = layout.lines.count * layout.line;
    // Whole matrices are read from every tap on. An odd number of cache lines spreads rows over all
    // sets of a cache.
    const int64_t planes = product.is_merged ? 1 : layout.pixels.count / layout.pixels.size;
    const int64_t entries = planes * layout.plane + kMatrixEntries;
    layout.pitch = (CeilDiv(entries, kMatrixEntries) | 1) * kMatrixEntries;
    return layout;
  }

  int64_t rows() const { return task.row_end - task.row_begin; }
  int64_t RowTiles() const { return CeilDiv(rows(), kTileRows); }
  int64_t ColumnTiles() const { return CeilDiv(task.vectors, kMatrixVectors); }

  float* SumsOf(int64_t segment, int64_t row_tile, int64_t column_tile) const {
    return space.sums + ((segment * RowTiles() + row_tile) * ColumnTiles() + column_tile) * kTile;
  }

  // The sum of a row and an output, whose column in a tile is that of its pairs.
  float* SumOf(int64_t segment, int64_t row, int64_t output) const {
    const int64_t column = output % kTileColumns;
    const int64_t lane = column % 8 / 4 * kLanes<float> + column / 8 * 4 + column % 4;
    return SumsOf(segment, row / kTileRows, output / kTileColumns) +
           row % kTileRows * kTileColumns + lane;
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
        const PixelPairs pairs = PairPixels(from[0], masks[0], from[1], masks[1], largest);
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
    // Segments of a row of taps have rows for each of them, which are parts of those of channels.
    const int64_t channels = product.is_merged ? product.fan_in : rows();
    pixels.line += product.is_merged ? 0 : task.row_begin;
    BFloat* transposed = product.is_merged ? space.line : to;
    const int64_t pitch = product.is_merged ? layout.pixels.count : layout.pitch;
    const int64_t plane = product.is_merged ? layout.pixels.size : layout.plane;
    pixels.count = block.count + layout.pixels.size - product.span;
    bool is_finite = true;
    for (int64_t tap = 0; tap < Min(layout.pixels.period, d2.taps); ++tap) {
      pixels.first = block.low * d2.stride - d2.low + layout.pixels.FirstOf(tap, AxisOf(d2));
      is_finite &= TransposePixels(pixels, channels, transposed + tap * plane, pitch);
    }
    for (int64_t row = task.row_begin; row < task.row_end && product.is_merged; ++row) {
      const int64_t tap = row / product.fan_in;
      __builtin_memcpy(to + (row - task.row_begin) * layout.pitch,
                       transposed + row % product.fan_in * pitch + layout.pixels.At(tap),
                       block.count * sizeof(BFloat));
    }
    return is_finite;
  }

  // Adds segments [begin, end), which read one plane of the source.
  JAXOPS_MATRICES_TARGET void AddSegments(const RowLayout& layout, int64_t windows, int64_t begin,
                                          int64_t end) const {
    for (int64_t column_tile = 0; column_tile < ColumnTiles(); ++column_tile) {
      Factors<BFloat> factors;
      factors.kernel = space.cotangents + column_tile * windows * kTileColumns;
      factors.length = windows;
      for (int64_t row_tile = 0; row_tile < RowTiles(); ++row_tile) {
        const int64_t row = row_tile * kTileRows;
        const int64_t matrices = CeilDiv(Min(rows() - row, kTileRows), kMatrixRows);
        const int64_t offsets[kTileMatrices] = {0, kMatrixRows * layout.pitch};
        for (int64_t s = begin; s < end; ++s) {
          const Tap tap = TapOf(product, s);
          factors.source =
              space.source + row * layout.pitch + layout.lines.At(tap.at[1]) * layout.line +
              tap.at[2] % layout.pixels.period * layout.plane + layout.pixels.Within(tap.at[2]);
          AddMatrices<kMatrixVectors>(&factors, 1, offsets, matrices, layout.pitch, true,
                                      SumsOf(s - task.segment_begin, row_tile, column_tile));
        }
      }
    }
  }

  // The same without products with what is outside of the image, or with zeros between lines.
  void AddInside(const Block& block, int64_t in0, int64_t segment) const {
    const auto& [d0, d1, d2] = product.dims;
    const Tap tap = TapOf(product, segment);
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
        const int64_t low = Max(range.low, block.low);
        const int64_t high = Min(range.high, block.low + block.count);
        for (int64_t output = 0; output < task.outputs; output += kLanes<float>) {
          const int64_t outputs = Min(kLanes<float>, task.outputs - output);
          Vec<float> sum = {};
          for (int64_t w = low; w < high; ++w) {
            const int64_t in2 = w * d2.stride + tap2 * d2.dilation - d2.low;
            const float entry = ToFloat(source[in2 * product.source_channels + channel]);
            const BFloat* cotangents = CotangentsOf(block, line, w - block.low) + output;
            sum = MultiplyAdd(Broadcast(entry), LoadUpTo(cotangents, outputs), sum);
          }
          for (int64_t i = 0; i < outputs && low < high; ++i) {
            *SumOf(segment - task.segment_begin, r, output + i) += sum[i];
          }
        }
      }
    }
  }

  static float ToFloat(BFloat entry) { return BitCast<float>(static_cast<uint32_t>(entry) << 16); }

  JAXOPS_MATRICES_TARGET void AddBlock(const RowLayout& layout, const Block& block) const {
    const auto& [d0, d1, d2] = product.dims;
    const int64_t windows = JoinedWindows(product, block.lines);
    const bool are_finite = CopyCotangents(block, layout.line, windows);
    const int64_t per_plane = d1.taps * (product.is_merged ? 1 : d2.taps);
    for (int64_t begin = task.segment_begin; begin < task.segment_end;) {
      const Tap first = TapOf(product, begin);
      const int64_t end = Min(task.segment_end, (first.at[0] + 1) * per_plane);
      const int64_t in0 = block.at0 * d0.stride + first.at[0] * d0.dilation - d0.low;
      if (in0 >= 0 && in0 < d0.in) {
        // All lines that taps of the plane read, if the task has these taps or not: which products
        // are matrices must not depend on that.
        bool is_finite = are_finite;
        __builtin_memset(space.is_copied, 0, layout.lines.count);
        for (int64_t tap = 0; tap < d1.taps; ++tap) {
          const int64_t first_line = layout.lines.At(tap);
          const int64_t in1 = block.line * d1.stride + tap * d1.dilation - d1.low;
          for (int64_t line = 0; line < block.lines; ++line) {
            if (space.is_copied[first_line + line]) continue;
            space.is_copied[first_line + line] = true;
            is_finite &= CopyLine(layout, block, in0, in1 + line * d1.stride,
                                  space.source + (first_line + line) * layout.line);
          }
        }
        if (is_finite) AddSegments(layout, windows, begin, end);
        for (int64_t s = begin; s < end && !is_finite; ++s) AddInside(block, in0, s);
        if (!is_finite) ClearSource(layout);
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

int64_t LayMatrices(const Product& product, const Task& task, char* memory, MatrixSpace& space) {
  const MatrixGrad grad = {product, task, space};
  const MatrixGrad::RowLayout layout = MatrixGrad::LayoutOf(product);
  const int64_t windows = MatrixGrad::JoinedWindows(product, MatrixGrad::BlockLines(product));
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
  space.line = reinterpret_cast<BFloat*>(
      take(product.is_merged ? product.fan_in * layout.pixels.count * kEntry : 0));
  space.cotangents = reinterpret_cast<BFloat*>(take(windows * columns * kEntry));
  space.is_copied = take(layout.lines.count);
  space.sums = reinterpret_cast<float*>(take(segments * rows * columns * sizeof(float)));
  return used;
}

}  // namespace
}  // namespace jaxops::conv::cpu::grad::JAXOPS_ISA
#endif

#endif  // JAXOPS_CPU_CONV_GRAD_MATRICES_H_
