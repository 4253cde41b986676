// The vectorised inner parts of depthwise convolution and of that in small groups, built once per
// instruction set.
//
// A convolution in groups of `fan` source channels is the sum of as many depthwise ones, whose
// sources have the first, second, ... channel of each group at all the result channels of the
// group.
//
// A task has some vectors of channels. It copies the lines of an image that its windows cover, with
// their padding, vector by vector to a ring that stays in a cache, and has the sums of neighbouring
// pixels, or of taps in the kernel gradient, in registers.
#ifndef JAXOPS_CPU_CONV_DEPTHWISE_KERNELS_H_
#define JAXOPS_CPU_CONV_DEPTHWISE_KERNELS_H_

#include <cstdint>

#include "common/im2col.h"
#include "common/types.h"
#include "cpu/conv_axes.h"
#include "cpu/isa.h"

namespace jaxops::conv::cpu::depthwise {

// The forward product, or the input gradient at the pixels of some remainders by the strides.
struct Product {
  Axis axes[im2col::kMaxDims];
  const void* const* sources;
  void* const* results;
  int64_t channels;  // of the results
  int64_t fan;       // source channels of a group
  int64_t columns;   // result channels of a group
  DType dtype;
  Results finish;
  const void* kernel;  // of `dtype`
  int64_t tap_stride;  // entries of the kernel between taps
  int64_t fan_stride;  // between source channels of a group
  int64_t group_stride;
  int64_t column_stride;
};

// Lines [begin, end) of the results of an image, by some whole vectors of channels, of which the
// last one may end beyond the channels.
struct Task {
  int64_t image;
  int64_t channel;
  int64_t vectors;
  int64_t line_begin, line_end;  // first and second dimension
};

struct GradProduct {
  im2col::Window dims[im2col::kMaxDims];
  const void* const* sources;
  const void* const* cotangents;
  int64_t channels;  // of the cotangents
  int64_t fan;
  int64_t columns;
  DType dtype;
};

// The same for the kernel gradient, of lines of all images.
struct GradTask {
  int64_t channel;
  int64_t vectors;
  int64_t line_begin, line_end;  // image, first and second dimension
};

struct Kernels {
  int64_t vector_bytes;
  int64_t (*convolve_space)(const Product& product, int64_t vectors);
  void (*convolve)(const Product& product, const Task& task, void* space);
  int64_t (*grad_space)(const GradProduct& product, int64_t vectors);
  // Writes sums (taps, fan, channels of the task), `stride` entries apart.
  void (*grad)(const GradProduct& product, const GradTask& task, void* space, void* sums,
               int64_t stride);
};

JAXOPS_DECLARE_KERNELS();

}  // namespace jaxops::conv::cpu::depthwise

#endif  // JAXOPS_CPU_CONV_DEPTHWISE_KERNELS_H_
