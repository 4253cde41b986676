// Calls of the dynamic convolution kernels of every platform.
//
//   y[t, c] = act(bias[c] + sum_k p[t, h, k] * x[t + k * dilation - padding, c])
//
// for each batch entry, with h = c / (channels / heads) and p the weight or its softmax over the
// taps. Tap k of step t reads step s = t + k * dilation - padding if 0 <= s < time and both are in
// one segment, that is starts[s] == starts[t]. With a state it also reads s < 0 if s >= starts[t].
// Other taps contribute nothing, whatever they would read.
#ifndef JAXOPS_COMMON_DYNAMIC_CONV_H_
#define JAXOPS_COMMON_DYNAMIC_CONV_H_

#include <cstdint>

#include "common/batch.h"
#include "common/types.h"

namespace jaxops::dynamic_conv {

struct Geometry {
  int64_t time;
  int64_t channels;
  int64_t heads;  // divides channels
  int64_t taps;
  int64_t padding;  // in [0, (taps - 1) * dilation]
  int64_t dilation;
  DataFormat data_format;
  bool normalize;
};

struct Forward {
  enum Operand { kX, kWeight, kBias, kStarts, kState, kY, kOperands };

  Geometry geometry;
  BatchMap<kOperands> batch;
  DType dtype;         // of x and y; f16 and bf16 accumulate in f32
  DType weight_dtype;  // never f64 unless dtype is f64
  DType bias_dtype;    // likewise
  DType state_dtype;   // likewise
  Activation activation;
  const void* x;
  const void* weight;     // (time, heads, taps)
  const void* bias;       // null: none
  const int32_t* starts;  // non-decreasing; null: one segment
  const void* state;      // `padding` steps in the layout of x, oldest first; null: none
  void* y;
};

// With g the cotangent of y (before bias and activation), and t = s - k * dilation + padding:
//
//   dx[s, c]    = sum_k p[t, h(c), k] * g[t, c]
//   dp[t, h, k] = sum_{c in h} g[t, c] * x[s, c]
//
// over the valid pairs of steps; dweight is dp or, with `normalize`, the cotangent of the weight
// whose softmax has the cotangent dp.
struct Backward {
  enum Operand { kX, kWeight, kG, kStarts, kDx, kDWeight, kOperands };

  Geometry geometry;
  BatchMap<kOperands> batch;
  DType dtype;          // of x, g and dx
  DType weight_dtype;   // never f64 unless dtype is f64
  DType dweight_dtype;  // likewise
  const void* x;        // null if dweight is
  const void* weight;   // null if neither dx nor `normalize` needs it
  const void* g;
  const int32_t* starts;  // as above
  void* dx;               // null: not wanted
  void* dweight;          // (time, heads, taps); null: not wanted
};

// Returns the bytes of the work space on CUDA devices: two numbers for each row of weights, of
// which the softmax is made.
template <typename Call>
int64_t WorkSpaceBytes(const Call& call) {
  const Geometry& g = call.geometry;
  if (!g.normalize) return 0;
  return 2 * call.batch.size() * g.time * g.heads * (call.dtype == DType::kF64 ? 8 : 4);
}

// GPUs have a kernel for the value with at most so many taps.
inline constexpr int64_t kMaxShortTaps = 8;

// IsShort says whether that kernel takes a call, wherever its arrays are: without dilation, in NTC,
// with heads of 2^n vectors of 16 bytes and at most 32.
inline bool IsShort(const Forward& call) {
  const Geometry& g = call.geometry;
  const int64_t vector = 16 / SizeOf(call.dtype);
  const int64_t depth = g.channels / g.heads, lanes = depth / vector;
  return call.dtype != DType::kF64 && g.data_format == DataFormat::kNTC &&
         g.taps <= kMaxShortTaps && (g.dilation == 1 || g.taps == 1) && depth % vector == 0 &&
         lanes > 0 && lanes <= 32 && (lanes & (lanes - 1)) == 0 &&
         (call.state == nullptr || call.state_dtype == call.dtype);
}

// PrefersKernels says whether a GPU is to run kernels, and not XLA's program: docs/dynamic_conv.md
// has times. XLA is faster at gradients of short filters, and at their values for small arrays.
// Those times are of 3, 4 and 7 taps, of heads of 64 channels, and of arrays of 2^18 and of 2^20 to
// 2^24 entries: other taps and heads, and the limits of entries, lie between them and were not
// measured.
inline bool PrefersKernels(const Forward& call) {
  const Geometry& g = call.geometry;
  if (g.taps >= 15) return g.channels / g.heads % 32 == 0 && g.data_format == DataFormat::kNTC;
  const int64_t entries = call.batch.size() * g.time * g.channels;
  const bool has_work = SizeOf(call.dtype) >= 4 || g.normalize;
  return IsShort(call) && ((g.taps >= 5 && entries >= int64_t{1} << 21) ||
                           (g.taps >= 3 && entries >= int64_t{1} << 22 && has_work));
}
inline bool PrefersKernels(const Backward& call) {
  const Geometry& g = call.geometry;
  return g.taps >= 15 && g.channels / g.heads % 32 == 0;
}

}  // namespace jaxops::dynamic_conv

#endif  // JAXOPS_COMMON_DYNAMIC_CONV_H_
