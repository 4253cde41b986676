// This header has the weights of dynamic convolution as kernels read them: as they are, or as the
// softmax over their taps.
#ifndef JAXOPS_CUDA_DYNAMIC_CONV_WEIGHTS_CUH_
#define JAXOPS_CUDA_DYNAMIC_CONV_WEIGHTS_CUH_

#include <algorithm>

#include "common/dynamic_conv.h"
#include "common/fast_divide.h"
#include "cuda/common/launch.h"
#include "cuda/common/numeric.cuh"

namespace jaxops::dynamic_conv::cuda {

using jaxops::cuda::Accumulator;
using jaxops::cuda::CeilDiv;
using jaxops::cuda::DispatchBool;
using jaxops::cuda::DispatchFloat;
using jaxops::cuda::kWarp;
using jaxops::cuda::LoadVector;
using jaxops::cuda::Narrow;
using jaxops::cuda::StoreAs;
using jaxops::cuda::Vector;
using jaxops::cuda::Widen;

template <typename Acc>
__device__ __forceinline__ Acc LoadAs(const void* base, int64_t index, DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return Acc(Widen(static_cast<const __half*>(base)[index]));
    case DType::kBF16:
      return Acc(Widen(static_cast<const __nv_bfloat16*>(base)[index]));
    case DType::kF64:
      return Acc(static_cast<const double*>(base)[index]);
    case DType::kF32:
      break;
  }
  return Acc(static_cast<const float*>(base)[index]);
}

// The weights of one batch entry. A row is step * heads + head.
template <typename Acc>
struct Weights {
  const void* data;
  int64_t offset;  // of the batch entry
  DType dtype;
  int64_t taps;
  // The maximum of each row and one over the sum of its exponentials; null: no softmax.
  const Acc* scales;

  template <typename Call>
  __device__ __forceinline__ Weights(const Call& call, const void* all_scales, int64_t batch)
      : data(call.weight),
        offset(call.batch.Offset(batch, Call::kWeight)),
        dtype(call.weight_dtype),
        taps(call.geometry.taps),
        scales(nullptr) {
    const Geometry& g = call.geometry;
    if (g.normalize) {
      scales = static_cast<const Acc*>(all_scales) + 2 * batch * g.time * g.heads;
    }
  }

  __device__ __forceinline__ Acc At(int64_t row, int64_t tap) const {
    const Acc w = LoadAs<Acc>(data, offset + row * taps + tap, dtype);
    return scales == nullptr ? w : exp(w - scales[2 * row]) * scales[2 * row + 1];
  }
};

// The segments of one batch entry.
struct Segments {
  const int32_t* starts;  // null: one segment
  int time;
  int first;  // the first step that a segment without starts has, in the state before step 0

  // IsPair says whether a step may read a row, which is before step 0 if it is negative.
  __device__ __forceinline__ bool IsPair(int step, int row) const {
    if (row >= time) return false;
    if (row < 0) return row >= (starts == nullptr ? first : max(starts[step], first));
    return starts == nullptr || starts[row] == starts[step];
  }
};

}  // namespace jaxops::dynamic_conv::cuda

#endif  // JAXOPS_CUDA_DYNAMIC_CONV_WEIGHTS_CUH_
