// The vectorised inner parts of convolution as matrix products, built once per instruction set.
//
// The sum over taps and channels of a pixel is cut into segments, whose entries are contiguous in
// the source: the channels of a tap, or of a row of taps if the last dimension is not dilated and
// there is one group. Tiles of pixels and columns have their sums in registers, and read segments
// where they are. The columns of the kernel are packed in blocks of vectors.
#ifndef JAXOPS_CPU_CONV_KERNELS_H_
#define JAXOPS_CPU_CONV_KERNELS_H_

#include <cstdint>

#include "common/im2col.h"
#include "common/types.h"
#include "cpu/conv_axes.h"
#include "cpu/isa.h"

namespace jaxops::conv::cpu {

// Pixels after which tiles of any number of vectors end.
inline constexpr int64_t kTilesEnd = 48;

// Rows of a product of matrices.
inline constexpr int kMatrixRows = 16;

// How bf16 is multiplied: as f32, by the processor's sums of two products, or by its products of
// matrices.
enum class Bf16Products { kFloat32, kPairs, kMatrices };

// The forward product, or the input gradient at the pixels of some remainders by the strides.
struct Product {
  Axis axes[im2col::kMaxDims];
  int64_t images;
  const void* const* sources;
  void* const* results;
  int64_t source_channels;  // of all groups
  int64_t result_channels;
  int64_t fan;        // source channels of a group
  int64_t columns;    // result channels of a group
  DType dtype;        // of the sources: f32 or f64, or bf16 but for `Bf16Products::kFloat32`
  bool has_matrices;  // whether bf16 products are those of matrices
  bool is_merged;     // whether a segment has all taps of the last dimension
  Results finish;
  const void* kernel;  // of `dtype`
  int64_t tap_stride;  // entries of the kernel between taps
  int64_t fan_stride;
  int64_t column_stride;
  int64_t group_stride;

  int64_t pixels() const { return images * axes[0].count * axes[1].count * axes[2].count; }
  // Segments of a pixel, and entries of a segment.
  int64_t segments() const { return axes[0].taps * axes[1].taps * (is_merged ? 1 : axes[2].taps); }
  int64_t segment() const { return (is_merged ? axes[2].taps : 1) * fan; }
};

// A block of columns of a group.
struct Panel {
  int64_t group;
  int64_t first_column;
  int vectors;
  bool is_finite;  // whether all entries are finite, so that their products with zeros are zeros
  void* packed;    // (segments, entries, columns); for bf16 (segments, pairs, columns, 2)
};

// The kernel gradient. Sums are of `vectors` whole vectors of outputs.
struct GradProduct {
  im2col::Window dims[im2col::kMaxDims];
  int64_t images;
  const void* const* sources;
  const void* const* cotangents;
  int64_t source_channels;     // of all groups
  int64_t cotangent_channels;  // of all groups
  int64_t fan_in;
  DType dtype;             // of both
  bool has_pairs;          // whether bf16 products are those of pairs of windows by the processor
  bool has_matrices;       // whether these are products of matrices, of kMatrixRows rows or more
  bool copies_sources;     // of a dtype that is not that of sums
  bool copies_cotangents;  // the same, or of outputs that are no whole vectors
  bool is_merged;
  int64_t span;  // windows of a line that are taken at a time

  int64_t spans() const { return (dims[2].out + span - 1) / span; }  // of a line
  int64_t segments() const { return dims[0].taps * dims[1].taps * (is_merged ? 1 : dims[2].taps); }
};

// The part of a kernel gradient that a task computes: rows of the products of some segments of taps
// and channels, see above, by a block of outputs, summed over spans of windows.
struct GradTask {
  int64_t segment_begin, segment_end;
  int64_t channel;  // of the source, the first of the group
  int64_t output;   // of the cotangents
  int64_t outputs;  // at most those of the vectors
  int vectors;
  int64_t row_begin, row_end;    // entries of a segment
  int64_t span_begin, span_end;  // image, first and second dimension, part of a line
};

struct Kernels {
  int64_t vector_bytes;
  int max_vectors;                  // of a block
  Bf16Products (*bf16_products)();  // of this processor
  int64_t (*tile_pixels)(const Product& product, int vectors);
  // Copies 16-bit entries to f32.
  void (*widen)(DType dtype, const void* from, int64_t count, void* to);
  // Fills panel.packed and sets panel.is_finite.
  void (*pack)(const Product& product, Panel& panel);
  // Bytes that `multiply` needs for `tiles` tiles.
  int64_t (*multiply_space)(const Product& product, int vectors, int64_t tiles);
  void (*multiply)(const Product& product, const Panel& panel, int64_t tile_begin, int64_t tile_end,
                   void* space);
  // Bytes that `grad` needs.
  int64_t (*grad_space)(const GradProduct& product, const GradTask& task);
  // Writes (segments, rows, columns) of sums; segments and rows are these numbers of entries apart.
  void (*grad)(const GradProduct& product, const GradTask& task, void* space, void* sums,
               int64_t segment_stride, int64_t row_stride);
  // to = the sum of `parts` arrays of f32 or f64, rounded. Rows of `padded` columns become `fan`.
  void (*add_parts)(DType dtype, const void* sums, int64_t parts, int64_t part_stride, int64_t rows,
                    int64_t fan, int64_t padded, DType result_dtype, void* to);
};

JAXOPS_DECLARE_KERNELS();

}  // namespace jaxops::conv::cpu

#endif  // JAXOPS_CPU_CONV_KERNELS_H_
