// The gradient of a depthwise convolution by its kernel on tensor cores, one of the kernels of
// direct convolution.
#ifndef JAXOPS_CUDA_CONV_DIRECT_DEPTHWISE_H_
#define JAXOPS_CUDA_CONV_DIRECT_DEPTHWISE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/conv/launch.h"

namespace jaxops::conv::cuda {

// Whether there is one: for 16-bit entries, groups of one channel and output in multiples of 8, and
// square windows of 5 or 7 taps without strides and dilation.
bool IsDepthwise(const Call& call);

int64_t KernelGradDepthwiseWorkspace(const Call& call, int processors);

cudaError_t LaunchKernelGradDepthwise(cudaStream_t stream, const Call& call, Space workspace,
                                      int processors);

}  // namespace jaxops::conv::cuda

#endif  // JAXOPS_CUDA_CONV_DIRECT_DEPTHWISE_H_
