// Calls of the convolution kernels.
//
// The result at pixel `out` is the sum over taps and channels c of
//
//   x[out * stride + tap * dilation - low, c] * kernel[tap, c, :]
//
// with x zero outside of the image. Each group of channels has its own outputs. The input gradient
// is the transpose of this sum in x, the kernel gradient the transpose in the kernel.
#ifndef JAXOPS_COMMON_CONV_H_
#define JAXOPS_COMMON_CONV_H_

#include <cstdint>

#include "common/im2col.h"
#include "common/types.h"

namespace jaxops::conv {

inline constexpr int kDims = 2;

// The epilogue is applied to sums before they are rounded.
struct Epilogue {
  const void* bias = nullptr;  // one entry per output, of the type of the sums; null: none
  Activation activation = Activation::kNone;
};

// Images are (images, in..., channels) and (images, out..., outputs), contiguous. The kernel is
// (taps..., channels / groups, outputs). For the forward product of TF32 it is (taps..., outputs,
// channels / groups), already rounded to TF32.
struct Call {
  im2col::Window dims[kDims];  // the slowest first; with one dimension the first is unused
  int64_t images;
  int64_t channels;  // of all groups, like the outputs
  int64_t outputs;
  int64_t groups = 1;
  DType dtype;            // of both operands
  DType result_dtype;     // the same, or f32 with 16-bit operands
  bool tf32;              // whether f32 is multiplied as TF32
  const void* image;      // x; for the input gradient the cotangent of the result
  const void* kernel;     // unused by the kernel gradient
  const void* cotangent;  // used by the kernel gradient only
  void* result;           // the result, or the gradient
  Epilogue epilogue;      // of the forward product
};

}  // namespace jaxops::conv

#endif  // JAXOPS_COMMON_CONV_H_
