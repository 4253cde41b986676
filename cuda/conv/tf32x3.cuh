// True float32 on tensor cores: code that the kernels of TF32x3 products share.
//
// An entry is the sum of two TF32 numbers, a high part and a low part. A product of entries is the
// sum of three products of parts: high by high, high by low, and low by high. The error of a
// product is at most a few times float32's last bit, of either sign; the error of long sums of
// rounded multiply-adds is larger. Tensor cores truncate a sum towards zero: the kernels therefore
// sum few products at a time, from zero and small products first, and add these sums in float32
// with rounding.
//
// An entry that is not finite has no low part, and an entry near the largest float32 has no high
// part. Both make sums that are not finite, and every kernel then sets a flag. The next kernel on
// the stream computes the results again, by multiply-adds, if the flag is set, or else returns.
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

// Tells whether a kernel that computes results again has work. Without a flag it always has.
__device__ __forceinline__ bool IsNeeded(const int* flag) { return !flag || *flag != 0; }

}  // namespace jaxops::conv::cuda

#endif  // JAXOPS_CUDA_CONV_TF32X3_CUH_
