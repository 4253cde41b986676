// Code that kernels of interpolation share, see common/multilinear.h.
#ifndef JAXOPS_CUDA_COMMON_MULTILINEAR_CUH_
#define JAXOPS_CUDA_COMMON_MULTILINEAR_CUH_

#include <cstdint>

#include "common/multilinear.h"
#include "cuda/common/numeric.cuh"

namespace jaxops::multilinear::cuda {

// Loads a point or a direction, in the arithmetic type.
template <int kAxes, typename A>
__device__ __forceinline__ void LoadPoint(const void* base, int64_t offset, DType dtype,
                                          A (&point)[kAxes]) {
  jaxops::cuda::WithElements(base, dtype, [&](const auto* from) {
#pragma unroll
    for (int a = 0; a < kAxes; ++a) {
      point[a] = static_cast<A>(jaxops::cuda::Widen(from[offset + a]));
    }
  });
}

// Sums over groups of `lanes` neighbouring lanes, a power of two; every lane of the warp calls this
// function.
template <int kAxes, typename A>
__device__ __forceinline__ void SumOverLanes(A (&values)[kAxes], int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int a = 0; a < kAxes; ++a) {
      values[a] += __shfl_xor_sync(0xffffffff, values[a], distance);
    }
  }
}

// Returns the largest power of two that is at most `count` and at most 32, but at least 1.
inline int LanesFor(int64_t count) {
  int lanes = 1;
  while (lanes < 32 && 2 * lanes <= count) lanes *= 2;
  return lanes;
}

}  // namespace jaxops::multilinear::cuda

#endif  // JAXOPS_CUDA_COMMON_MULTILINEAR_CUH_
