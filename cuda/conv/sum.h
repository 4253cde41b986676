// The sums that a convolution and its input gradient are, before it is known how they are tiled.
#ifndef JAXOPS_CUDA_CONV_SUM_H_
#define JAXOPS_CUDA_CONV_SUM_H_

#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/common/numeric.cuh"
#include "cuda/conv/families.h"
#include "cuda/conv/plan.h"

namespace jaxops::conv::cuda {

// Where the entries of a tap lie in an image, for the pixel at 0, 0, and which matrix of the kernel
// they are multiplied by.
struct Tap {
  int64_t row, column;
  int matrix;
};

// A sum over taps: of pixels, and of channels to outputs, both those of one group.
struct Sum {
  Tap tap[kMaxTaps];
  int taps;
  int number;  // of the sums that a call is cut into
  int64_t groups;
  int64_t images, image_rows, image_columns, channels;
  int64_t rows, columns, outputs;
  int64_t stride_row, stride_column;
  int64_t result_image, result_row, result_column;  // entries between neighbours of the result
  int matrices;
  const void* image;
  const void* kernel;
  void* result;
  Epilogue epilogue;

  bool is_empty() const { return images * rows * columns * outputs == 0; }
};

// Fills in the taps of the forward product and returns how many there are, at most kMaxTaps.
inline int FillTaps(Tap* tap, const Call& call) {
  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  int taps = 0;
  for (int64_t r = 0; r < h.taps; ++r) {
    for (int64_t s = 0; s < w.taps; ++s, ++taps) {
      tap[taps] = {r * h.dilation - h.low, s * w.dilation - w.low, taps};
    }
  }
  return taps;
}

// Calls `launch` with the sum that the convolution is.
template <typename Launch>
cudaError_t LaunchForwardSum(const Call& call, Launch&& launch) {
  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  if (h.taps * w.taps > kMaxTaps) return cudaErrorNotSupported;
  Sum sum{};
  sum.taps = FillTaps(sum.tap, call);
  sum.groups = call.groups;
  sum.images = call.images;
  sum.image_rows = h.in;
  sum.image_columns = w.in;
  sum.channels = call.channels / call.groups;
  sum.rows = h.out;
  sum.columns = w.out;
  sum.outputs = call.outputs / call.groups;
  sum.stride_row = h.stride;
  sum.stride_column = w.stride;
  sum.result_column = call.outputs;
  sum.result_row = w.out * call.outputs;
  sum.result_image = h.out * sum.result_row;
  sum.matrices = sum.taps;
  sum.image = call.image;
  sum.kernel = call.kernel;
  sum.result = call.result;
  sum.epilogue = call.epilogue;
  return sum.is_empty() ? cudaSuccess : launch(sum);
}

// Calls `launch` with each of the sums that the input gradient is: over the cotangent, with
// taps mirrored. Where strides lie between its pixels, those with the same remainders by the
// strides have the same taps: each such set is a sum, the cells of it apart by the strides.
template <typename Launch>
cudaError_t LaunchInputGradSums(const Call& call, Launch&& launch) {
  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  if (h.taps * w.taps > kMaxTaps) return cudaErrorNotSupported;
  int number = 0;
  for (int64_t first_row = 0; first_row < std::min(h.stride, h.in); ++first_row) {
    for (int64_t first_column = 0; first_column < std::min(w.stride, w.in); ++first_column) {
      // x[first + cell * stride] is entry `tap` of the patch cell + (first + low - tap * dilation)
      // / stride, for the taps for which that is an integer.
      Sum sum{};
      sum.number = number++;
      for (int64_t r = h.taps; r-- > 0;) {
        const int64_t row = first_row + h.low - r * h.dilation;
        if (row % h.stride) continue;
        for (int64_t s = w.taps; s-- > 0;) {
          const int64_t column = first_column + w.low - s * w.dilation;
          if (column % w.stride) continue;
          sum.tap[sum.taps++] = {row / h.stride, column / w.stride,
                                 static_cast<int>(r * w.taps + s)};
        }
      }
      sum.groups = call.groups;
      sum.images = call.images;
      sum.image_rows = h.out;
      sum.image_columns = w.out;
      sum.channels = call.outputs / call.groups;
      sum.rows = jaxops::cuda::CeilDiv(h.in - first_row, h.stride);
      sum.columns = jaxops::cuda::CeilDiv(w.in - first_column, w.stride);
      sum.outputs = call.channels / call.groups;
      sum.stride_row = sum.stride_column = 1;
      sum.result_column = w.stride * call.channels;
      sum.result_row = h.stride * w.in * call.channels;
      sum.result_image = h.in * w.in * call.channels;
      sum.matrices = static_cast<int>(h.taps * w.taps);
      sum.image = call.image;
      sum.kernel = call.kernel;
      const int64_t offset = (first_row * w.in + first_column) * call.channels;
      sum.result =
          static_cast<char*>(call.result) + offset * jaxops::cuda::SizeOf(call.result_dtype);
      if (sum.is_empty()) return cudaSuccess;
      const cudaError_t error = launch(sum);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

// The cycles that the kernels of multiply-adds are estimated to take for a sum of f32 and of one
// group, on a GPU that has clusters and this number of multiprocessors; 0 if they cannot run it.
int64_t FmaCycles(const Sum& sum, bool is_input_grad, int processors);

}  // namespace jaxops::conv::cuda

#endif  // JAXOPS_CUDA_CONV_SUM_H_
