// The kernels of dynamic convolution; dispatch.cc alone chooses between them.
#ifndef JAXOPS_CUDA_DYNAMIC_CONV_FAMILIES_H_
#define JAXOPS_CUDA_DYNAMIC_CONV_FAMILIES_H_

#include <cuda_runtime_api.h>

#include "common/dynamic_conv.h"

namespace jaxops::dynamic_conv::cuda {

// LaunchScales computes the scales of all rows of weights, if there is a softmax.
template <typename Call>
cudaError_t LaunchScales(cudaStream_t stream, const Call& call, void* scales);

// LaunchApply computes the value, or the input gradient.
cudaError_t LaunchApply(cudaStream_t stream, const Forward& call, void* scales);
cudaError_t LaunchApply(cudaStream_t stream, const Backward& call, void* scales);

cudaError_t LaunchWeightGrad(cudaStream_t stream, const Backward& call, void* scales);

// CanRunShort says whether the kernels of short filters take a call; LaunchShort computes all of
// it.
bool CanRunShort(const Forward& call);
bool CanRunShort(const Backward& call);
cudaError_t LaunchShort(cudaStream_t stream, const Forward& call);
cudaError_t LaunchShort(cudaStream_t stream, const Backward& call);

}  // namespace jaxops::dynamic_conv::cuda

#endif  // JAXOPS_CUDA_DYNAMIC_CONV_FAMILIES_H_
