// Convolution of images of channels, as the kernels see it.
//
// The result at pixel `out` is the sum over taps and channels c of
//
//   x[out * stride + tap * dilation - low, c] * kernel[tap, c, :]
//
// with x zero outside of it. The input gradient is the transpose of that in x, the kernel gradient
// that in the kernel.
#ifndef JAXOPS_COMMON_CONV_H_
#define JAXOPS_COMMON_CONV_H_

#include <cstdint>

#include "common/im2col.h"
#include "common/types.h"

namespace jaxops::conv {

inline constexpr int kDims = 2;

// Images are (images, in..., channels) and (images, out..., outputs), contiguous; the kernel is
// (taps..., channels, outputs).
struct Call {
  im2col::Window dims[kDims];  // the slowest first; of one dimension the first is not used
  int64_t images;
  int64_t channels;
  int64_t outputs;
  DType dtype;            // of both operands: f16 or bf16
  DType result_dtype;     // that, or f32
  const void* image;      // x; of the input gradient the cotangent of the result
  const void* kernel;     // not of the kernel gradient
  const void* cotangent;  // of the kernel gradient only
  void* result;           // the result, or the gradient
};

}  // namespace jaxops::conv

#endif  // JAXOPS_COMMON_CONV_H_
