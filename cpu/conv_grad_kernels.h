// The vectorised inner parts of kernel gradients as matrix products, built once per instruction
// set.
//
// Rows are channels of the source at a tap, or at a row of taps if channels are few; columns are
// outputs. A task sums over spans of windows, for as many taps as a cache holds sums of.
#ifndef JAXOPS_CPU_CONV_GRAD_KERNELS_H_
#define JAXOPS_CPU_CONV_GRAD_KERNELS_H_

#include <cstdint>

#include "common/im2col.h"
#include "common/types.h"
#include "cpu/isa.h"

namespace jaxops::conv::cpu::grad {

// The kernel gradient. Sums are of `vectors` whole vectors of outputs.
struct Product {
  im2col::Window dims[im2col::kMaxDims];
  int64_t images;
  const void* const* sources;
  const void* const* cotangents;
  int64_t source_channels;     // of all groups
  int64_t cotangent_channels;  // of all groups
  int64_t fan_in;
  DType dtype;             // of both
  bool has_pairs;          // whether bf16 products are those of pairs of windows by the processor
  bool has_matrices;       // whether they are products of matrices
  bool copies_sources;     // of a dtype that is not that of sums
  bool copies_cotangents;  // the same, or of outputs that are no whole vectors
  bool is_merged;
  int64_t span;  // windows of a line that are taken at a time

  int64_t spans() const { return (dims[2].out + span - 1) / span; }  // of a line
  int64_t segments() const { return dims[0].taps * dims[1].taps * (is_merged ? 1 : dims[2].taps); }
};

// The part of a kernel gradient that a task computes: rows of the products of some segments of taps
// and channels, see above, by a block of outputs, summed over spans of windows.
struct Task {
  int64_t segment_begin, segment_end;
  int64_t channel;  // of the source, the first of the group
  int64_t output;   // of the cotangents
  int64_t outputs;  // at most those of the vectors
  int vectors;
  int64_t row_begin, row_end;    // entries of a segment
  int64_t span_begin, span_end;  // image, first and second dimension, part of a line
};

struct Kernels {
  // Bytes that `sum` needs.
  int64_t (*space)(const Product& product, const Task& task);
  // Writes (segments, rows, columns) of sums; segments and rows are these numbers of entries apart.
  void (*sum)(const Product& product, const Task& task, void* space, void* sums,
              int64_t segment_stride, int64_t row_stride);
};

JAXOPS_DECLARE_KERNELS();

}  // namespace jaxops::conv::cpu::grad

#endif  // JAXOPS_CPU_CONV_GRAD_KERNELS_H_
