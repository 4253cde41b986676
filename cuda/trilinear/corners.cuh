// The lanes of a warp exchange values of the corners of its cells through shared memory.
#ifndef JAXOPS_CUDA_TRILINEAR_CORNERS_CUH_
#define JAXOPS_CUDA_TRILINEAR_CORNERS_CUH_

#include "cuda/trilinear/cells.cuh"

namespace jaxops::trilinear::cuda {

// A warp has as many cells as lanes, so a lane handles a given corner in kCorners rounds.
constexpr int kCornerRounds = kCorners;

// The pitch is the number of values between two cells in shared memory. Lanes with one cell each
// access different banks.
constexpr int kCornerPitch = 12;

// CornerValues holds one value per corner of a warp's cells in shared memory.
template <typename A>
struct CornerValues {
  alignas(16) A values[kWarp * kCornerPitch];

  __device__ __forceinline__ A& At(int cell, int corner) {
    return values[cell * kCornerPitch + corner];
  }
  __device__ __forceinline__ void Put(int cell, const A (&of)[kCorners]) {
    constexpr int kCount = kVectorElements<A>;
#pragma unroll
    for (int c = 0; c < kCorners; c += kCount) {
      Vector<A, kCount> vec;
#pragma unroll
      for (int i = 0; i < kCount; ++i) vec.values[i] = of[c + i];
      *reinterpret_cast<Vector<A, kCount>*>(&At(cell, c)) = vec;
    }
  }
  __device__ __forceinline__ void Get(int cell, A (&of)[kCorners]) {
    constexpr int kCount = kVectorElements<A>;
#pragma unroll
    for (int c = 0; c < kCorners; c += kCount) {
      const auto vec = LoadVector<kCount>(&At(cell, c));
#pragma unroll
      for (int i = 0; i < kCount; ++i) of[c + i] = vec.values[i];
    }
  }
};

}  // namespace jaxops::trilinear::cuda

#endif  // JAXOPS_CUDA_TRILINEAR_CORNERS_CUH_
