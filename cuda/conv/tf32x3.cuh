// True float32 by tensor cores: what kernels that multiply it as TF32 have in common.
//
// An entry is the sum of two of TF32, a high and a low one, and a product of entries that of three
// of their products: high by high, high by low, and low by high. The error of a product is a
// few times float32's last bit at most, of either sign, which long sums of rounded multiply-adds
// exceed. Tensor cores cut off what a sum has no bits for, always towards zero: they sum
// few products, from zero and small ones first, and these sums are added in float32, rounded.
//
// An entry that is not finite has no low part, and one near the largest float32 no high one. Both
// make sums that are not finite, of which every kernel leaves a note in a flag; the next kernel
// on the stream computes the results again, by multiply-adds, if the flag is set, or else returns.
#ifndef JAXOPS_CUDA_CONV_TF32X3_CUH_
#define JAXOPS_CUDA_CONV_TF32X3_CUH_

#include <cstdint>

#include "cuda/common/warp_matrix.cuh"

namespace jaxops::conv::cuda {

using jaxops::cuda::AreFinite;
using jaxops::cuda::SplitEntry;
using jaxops::cuda::SplitFloat32;

// The flag is the first entry of a workspace, and the rest begins after this number of bytes.
inline constexpr int kFlagBytes = 256;

// Whether a kernel that computes results again has anything to do. Without a flag it always has.
__device__ __forceinline__ bool IsNeeded(const int* flag) { return !flag || *flag != 0; }

}  // namespace jaxops::conv::cuda

#endif  // JAXOPS_CUDA_CONV_TF32X3_CUH_
