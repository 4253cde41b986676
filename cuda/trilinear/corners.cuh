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
    constexpr int kCount = kPackElements<A>;
#pragma unroll
    for (int c = 0; c < kCorners; c += kCount) {
      Pack<A, kCount> pack;
#pragma unroll
      for (int i = 0; i < kCount; ++i) pack.values[i] = of[c + i];
      *reinterpret_cast<Pack<A, kCount>*>(&At(cell, c)) = pack;
    }
  }
  __device__ __forceinline__ void Get(int cell, A (&of)[kCorners]) {
    constexpr int kCount = kPackElements<A>;
#pragma unroll
    for (int c = 0; c < kCorners; c += kCount) {
      const auto pack = LoadPack<kCount>(&At(cell, c));
#pragma unroll
      for (int i = 0; i < kCount; ++i) of[c + i] = pack.values[i];
    }
  }
};

}  // namespace jaxops::trilinear::cuda

#endif  // JAXOPS_CUDA_TRILINEAR_CORNERS_CUH_
