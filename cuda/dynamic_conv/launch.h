// The launchers of dynamic convolution on CUDA devices.
#ifndef JAXOPS_CUDA_DYNAMIC_CONV_LAUNCH_H_
#define JAXOPS_CUDA_DYNAMIC_CONV_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "common/dynamic_conv.h"

namespace jaxops::dynamic_conv::cuda {

// With `normalize`, `scales` is the work space: for each row of weights its maximum, and one over
// the sum of its exponentials, in the type of the arithmetic.
cudaError_t LaunchForward(cudaStream_t stream, const Forward& call, void* scales);
cudaError_t LaunchBackward(cudaStream_t stream, const Backward& call, void* scales);

}  // namespace jaxops::dynamic_conv::cuda

#endif  // JAXOPS_CUDA_DYNAMIC_CONV_LAUNCH_H_
