// The calls of im2col and col2im, for the kernels of every platform.
//
// A patch holds the inputs that a window of `taps` covers, in up to three dimensions, each with its
// own stride, dilation and padding. Entry `tap` of patch `out` is, along each dimension, entry
//
//   out * stride + tap * dilation - low
//
// of the image, or zero where the image has no such entry. im2col writes the patches of an image;
// col2im, its transpose, sums the entries of patches that are copies of the same entry of the
// image.
#ifndef JAXOPS_COMMON_IM2COL_H_
#define JAXOPS_COMMON_IM2COL_H_

#include <cstdint>

#include "common/types.h"

namespace jaxops::im2col {

inline constexpr int kMaxDims = 3;

// One dimension of the window.
struct Window {
  int64_t in = 1;   // entries of the image
  int64_t out = 1;  // patches
  int64_t taps = 1;
  int64_t stride = 1;
  int64_t dilation = 1;
  int64_t low = 0;  // entries of padding before the image; negative: entries that are skipped
};

// Images are (rows, in..., channels) and patches (rows, out..., taps..., channels) if
// `channels_last`. Otherwise channels count as rows, images are (rows, in...) and patches
// (rows, taps..., out...).
struct Call {
  Window dims[kMaxDims];  // the slowest first; unused ones precede the others
  int64_t rows;
  int64_t channels;  // 1 unless channels_last
  bool channels_last;
  int item_bytes;
  DType dtype;  // col2im only; f16 and bf16 are summed in f32
  const void* from;
  void* to;

  int64_t taps() const { return dims[0].taps * dims[1].taps * dims[2].taps; }
  int64_t image_size() const { return rows * dims[0].in * dims[1].in * dims[2].in * channels; }
  int64_t patches_size() const {
    return rows * dims[0].out * dims[1].out * dims[2].out * taps() * channels;
  }
};

}  // namespace jaxops::im2col

#endif  // JAXOPS_COMMON_IM2COL_H_
