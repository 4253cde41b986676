// This header declares the launcher of the steps of lightweight convolution on CUDA devices.
#ifndef JAXOPS_CUDA_LIGHTWEIGHT_CONV_STEP_LAUNCH_H_
#define JAXOPS_CUDA_LIGHTWEIGHT_CONV_STEP_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "common/lightweight_conv_step.h"

namespace jaxops::lightweight_conv_step::cuda {

cudaError_t LaunchStep(cudaStream_t stream, const Step& call);

}  // namespace jaxops::lightweight_conv_step::cuda

#endif  // JAXOPS_CUDA_LIGHTWEIGHT_CONV_STEP_LAUNCH_H_
