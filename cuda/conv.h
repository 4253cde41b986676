// Launchers of convolution on CUDA devices.
#ifndef JAXOPS_CUDA_CONV_H_
#define JAXOPS_CUDA_CONV_H_

#include <cuda_runtime_api.h>

#include "common/conv.h"

namespace jaxops::conv::cuda {

// The three need a GPU of compute capability 9.0 and code for it, which the caller checks, channels
// and outputs in multiples of 8, and nothing of size zero. Steps from column to column of the image
// are at most 8, taps at most kMaxTaps, and pixels, also those of padding, fewer than 2^30. What
// cannot be cut into tiles is cudaErrorNotSupported.
inline constexpr int kMaxTaps = 128;

cudaError_t LaunchForward(cudaStream_t stream, const Call& call);

cudaError_t LaunchInputGrad(cudaStream_t stream, const Call& call);

// Makes channels in multiples of 8 for them: `outputs` channels, of which the first are those of
// a block of `stride` pixels of the image, from `low` before it on, and the others zeros. There
// are no taps, and this one needs no particular GPU.
cudaError_t LaunchDeepen(cudaStream_t stream, const Call& call);

// The kernel gradient splits the sum over pixels by sizes and a number of processors, which its
// workspace of so many bytes depends on: both must be given the same one. Any is correct, the
// device's own is fast.
inline constexpr int kProcessors = 132;

int64_t KernelGradWorkspace(const Call& call, int processors = kProcessors);

cudaError_t LaunchKernelGrad(cudaStream_t stream, const Call& call, void* workspace,
                             int processors = kProcessors);

}  // namespace jaxops::conv::cuda

#endif  // JAXOPS_CUDA_CONV_H_
