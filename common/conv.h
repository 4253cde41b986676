// Convolution of images of channels, as the kernels see it.
//
// The result at pixel `out` is the sum over taps and channels c of
//
//   x[out * stride + tap * dilation - low, c] * kernel[tap, c, :]
//
// with x zero outside of it; of several groups of channels each has its own outputs. The input
// gradient is the transpose of that in x, the kernel gradient that in the kernel.
#ifndef JAXOPS_COMMON_CONV_H_
#define JAXOPS_COMMON_CONV_H_

#include <cstdint>

#include "common/im2col.h"
#include "common/types.h"

namespace jaxops::conv {

inline constexpr int kDims = 2;

// Applied to sums before they are rounded.
struct Epilogue {
  const void* bias = nullptr;  // an entry an output, of the type of the sums; null where none is
  Activation activation = Activation::kNone;
};

// Images are (images, in..., channels) and (images, out..., outputs), contiguous; the kernel is
// (taps..., channels / groups, outputs), but (taps..., outputs, channels / groups) of the forward
// product of TF32, to which the kernel has then been rounded.
struct Call {
  im2col::Window dims[kDims];  // the slowest first; of one dimension the first is not used
  int64_t images;
  int64_t channels;  // of all groups, as the outputs are
  int64_t outputs;
  int64_t groups = 1;
  DType dtype;            // of both operands
  DType result_dtype;     // that, or of 16-bit types f32
  bool tf32;              // whether f32 is multiplied as TF32
  const void* image;      // x; of the input gradient the cotangent of the result
  const void* kernel;     // not of the kernel gradient
  const void* cotangent;  // of the kernel gradient only
  void* result;           // the result, or the gradient
  Epilogue epilogue;      // of the forward product
};

}  // namespace jaxops::conv

#endif  // JAXOPS_COMMON_CONV_H_
