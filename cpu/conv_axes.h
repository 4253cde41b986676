// How the results of a convolution or of its input gradient lie along one dimension.
#ifndef JAXOPS_CPU_CONV_AXES_H_
#define JAXOPS_CPU_CONV_AXES_H_

#include <cstdint>

#include "common/types.h"

namespace jaxops::conv::cpu {

// Result i is a sum over taps j of entries `first + i * step + j * tap_step` of the source, as far
// as the source has them. The results of an input gradient with strides are those of several such
// axes, one for each remainder by the stride, with the taps of that remainder in descending order.
struct Axis {
  int64_t size = 1;  // of the source
  int64_t count = 1;
  int64_t taps = 1;
  int64_t first = 0;
  int64_t step = 1;
  int64_t tap_step = 1;
  int64_t result_size = 1;  // of the array that has the results
  int64_t result_first = 0;
  int64_t result_step = 1;
  int64_t kernel_taps = 1;  // of the array that has the taps
  int64_t kernel_first = 0;
  int64_t kernel_step = 1;
};

// The last steps, which make results of sums.
struct Results {
  DType dtype;
  Activation activation = Activation::kNone;
  const void* bias = nullptr;  // one entry per channel of the result, of the type of the sums
};

}  // namespace jaxops::conv::cpu

#endif  // JAXOPS_CPU_CONV_AXES_H_
