// This header declares the launchers that sample volumes at points on CUDA devices.
#ifndef JAXOPS_CUDA_GRID_SAMPLE_LAUNCH_H_
#define JAXOPS_CUDA_GRID_SAMPLE_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "common/grid_sample.h"

namespace jaxops::grid_sample::cuda {

cudaError_t LaunchSample(cudaStream_t stream, const Call& call);

}  // namespace jaxops::grid_sample::cuda

#endif  // JAXOPS_CUDA_GRID_SAMPLE_LAUNCH_H_
