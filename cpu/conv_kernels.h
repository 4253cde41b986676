// The vectorised inner parts of convolution as matrix products, built once per instruction set.
//
// The sum over taps and channels of a pixel is cut into segments, whose entries are contiguous in
// the source, or in a copy of the lines that a block of pixels reads: the channels of a tap, or of
// a row of taps if the last dimension is not dilated. Tiles of pixels and columns have their sums
// in registers. The columns of the kernel are packed in blocks of vectors.
#ifndef JAXOPS_CPU_CONV_KERNELS_H_
#define JAXOPS_CPU_CONV_KERNELS_H_

#include <cstdint>

#include "common/im2col.h"
#include "common/types.h"
#include "cpu/conv_axes.h"
#include "cpu/isa.h"

namespace jaxops::conv::cpu {

// Rows and entries of a product of matrices, and vectors of its panels: two matrices of pixels are
// multiplied by two of columns, so that each that is loaded is multiplied twice.
inline constexpr int kMatrixRows = 16;
inline constexpr int kMatrixEntries = 32;
inline constexpr int kMatrixVectors = 2;

// The forward product, or the input gradient at the pixels of some remainders by the strides.
struct Product {
  Axis axes[im2col::kMaxDims];
  int64_t images;
  const void* const* sources;
  void* const* results;
  int64_t source_channels;  // of all groups
  int64_t result_channels;
  int64_t fan;      // source channels of a group
  int64_t columns;  // result channels of a group
  DType source_dtype;
  DType dtype;        // of factors: f32 or f64, or bf16 (see bf16_products.h)
  bool has_matrices;  // whether bf16 products are those of matrices
  int max_vectors;    // of a panel
  bool is_merged;     // whether a segment has all taps of the last dimension
  Results finish;
  const void* kernel;  // of `dtype`
  int64_t tap_stride;  // entries of the kernel between taps
  int64_t fan_stride;
  int64_t column_stride;
  int64_t group_stride;
  int64_t span;   // pixels of a line that are computed at a time
  int64_t lines;  // that are computed at a time, at most

  // Spans of a line, and of all lines.
  int64_t parts() const { return (axes[2].count + span - 1) / span; }
  int64_t spans() const { return images * axes[0].count * axes[1].count * parts(); }
  // Segments of a pixel, and entries of a segment.
  int64_t segments() const { return axes[0].taps * axes[1].taps * (is_merged ? 1 : axes[2].taps); }
  int64_t segment() const { return (is_merged ? axes[2].taps : 1) * fan; }
  // Entries of a segment of the packed kernel, which zeros fill up.
  int64_t packed_rows() const {
    const int64_t whole = has_matrices ? kMatrixEntries : dtype == DType::kBF16 ? 2 : 1;
    return (segment() + whole - 1) / whole * whole;
  }
};

// A block of columns of a group.
struct Panel {
  int64_t group;
  int64_t first_column;
  int vectors;
  bool is_finite;  // whether all entries are finite, so that their products with zeros are zeros
  void* packed;    // (segments, rows, columns); for bf16 (segments, pairs of rows, columns, 2)
};

struct Kernels {
  int64_t vector_bytes;
  int max_vectors;  // of a panel, but for products of matrices
  // Copies 16-bit entries to f32.
  void (*widen)(DType dtype, const void* from, int64_t count, void* to);
  // Fills panel.packed and sets panel.is_finite.
  void (*pack)(const Product& product, Panel& panel);
  // How many lines of a span `multiply` should compute at a time.
  int64_t (*block_lines)(const Product& product);
  // Bytes that `multiply` needs.
  int64_t (*multiply_space)(const Product& product);
  // Computes spans [begin, end), which follow one another line by line, by `count` panels.
  void (*multiply)(const Product& product, const Panel* panels, int64_t count, int64_t begin,
                   int64_t end, void* space);
  // to = the sum of `parts` arrays of f32 or f64, rounded. Rows of `padded` columns become `fan`.
  void (*add_parts)(DType dtype, const void* sums, int64_t parts, int64_t part_stride, int64_t rows,
                    int64_t fan, int64_t padded, DType result_dtype, void* to);
};

JAXOPS_DECLARE_KERNELS();

}  // namespace jaxops::conv::cpu

#endif  // JAXOPS_CPU_CONV_KERNELS_H_
