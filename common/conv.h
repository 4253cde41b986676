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

// The limits of the kernels for CUDA devices. Lowering asks for them by `ffi/limits.h`.
inline constexpr int kMaxTaps = 128;  // of a window
inline constexpr int kMaxStride = 8;  // except in the fma family
// Fewer pixels, padding included, are numbered in 32 bits with room for a tile beyond the end.
inline constexpr int64_t kMaxPixels = int64_t{1} << 30;
inline constexpr int kMaxGroups = UINT16_MAX;  // a dimension of a grid
// Fewer bytes of a kernel are counted in 32 bits by the fma family.
inline constexpr int64_t kMaxKernelBytes = int64_t{1} << 30;
// Tensor cores multiply channels and outputs in multiples of this number of bytes.
inline constexpr int kChannelBytes = 16;
// The direct kernels compute groups of fewer channels or outputs.
inline constexpr int kMinFan = 8;
// The limits of the kernels of few channels.
inline constexpr int kMaxFewChannels = 7;
inline constexpr int kMaxFewTapRows = 8;
inline constexpr int kMaxFewRowEntries = 24;  // of a row of a window
inline constexpr int kMaxFewOutputs = 512;

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
