// This header describes rows of neighbouring channels in the NTC layout.
#ifndef JAXOPS_CUDA_LIGHTWEIGHT_CONV_NTC_ROWS_CUH_
#define JAXOPS_CUDA_LIGHTWEIGHT_CONV_NTC_ROWS_CUH_

#include "cuda/lightweight_conv/filters.cuh"

namespace jaxops::lightweight_conv::cuda::ntc {

template <typename T, int kV>
__device__ __forceinline__ void StoreRow(T* address, const Accumulator<T> (&values)[kV]) {
  Vector<T, kV> row;
#pragma unroll
  for (int v = 0; v < kV; ++v) row.values[v] = Narrow<T>(values[v]);
  StoreVector(address, row);
}

}  // namespace jaxops::lightweight_conv::cuda::ntc

#endif  // JAXOPS_CUDA_LIGHTWEIGHT_CONV_NTC_ROWS_CUH_
