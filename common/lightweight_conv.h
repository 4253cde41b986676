// Calls of the lightweight convolution kernels of every platform.
//
//   y[t, c] = act(bias[c] + sum_k weight[c / (channels / heads), k] * x[t + k * dilation - padding,
//   c])
//
// for each batch entry, with x zero outside [0, time).
#ifndef JAXOPS_COMMON_LIGHTWEIGHT_CONV_H_
#define JAXOPS_COMMON_LIGHTWEIGHT_CONV_H_

#include <cstdint>

#include "common/batch.h"
#include "common/types.h"

namespace jaxops::lightweight_conv {

struct Geometry {
  int64_t time;
  int64_t channels;
  int64_t heads;  // divides channels
  int64_t taps;
  int64_t padding;  // in [0, (taps - 1) * dilation]
  int64_t dilation;
  DataFormat data_format;
};

struct Forward {
  enum Operand { kX, kWeight, kBias, kY, kOperands };

  Geometry geometry;
  BatchMap<kOperands> batch;
  DType dtype;         // of x and y; f16 and bf16 accumulate in f32
  DType weight_dtype;  // never f64 unless dtype is f64
  DType bias_dtype;    // likewise
  Activation activation;
  bool flip_taps;  // read weight[h, taps - 1 - k] instead of weight[h, k]
  const void* x;
  const void* weight;
  const void* bias;  // null: none
  void* y;
};

// With g the cotangent of y (before bias and activation):
//
//   dx[s, c]      = sum_k weight[h(c), k] * g[s - k * dilation + padding, c]
//   dweight[h, k] = sum_{n, t, c in h} g[n, t, c] * x[n, t + k * dilation - padding, c]
//   dbias[c]      = sum_{n, t} g[n, t, c]
//
// where n runs over the `summed` batch dimensions; dweight and dbias have one entry for each entry
// of `kept`, densely packed, and dx one for each pair (kept, summed).
struct Backward {
  enum Operand { kX, kWeight, kG, kDx, kOperands };

  Geometry geometry;
  BatchMap<kOperands> kept;
  BatchMap<kOperands> summed;
  DType dtype;         // of x, g and dx
  DType weight_dtype;  // of weight and dweight
  DType bias_dtype;    // of dbias
  const void* x;
  const void* weight;  // null when dx is
  const void* g;
  void* dx;       // null: not wanted
  void* dweight;  // (kept, heads, taps)
  void* dbias;    // (kept, channels); null: not wanted
};

}  // namespace jaxops::lightweight_conv

#endif  // JAXOPS_COMMON_LIGHTWEIGHT_CONV_H_
