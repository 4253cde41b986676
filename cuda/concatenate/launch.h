// This header declares the launcher of concatenation and splitting.
#ifndef JAXOPS_CUDA_CONCATENATE_LAUNCH_H_
#define JAXOPS_CUDA_CONCATENATE_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "common/concatenate.h"

namespace jaxops::concatenate::cuda {

// Some calls of more than 200 destinations take several launches.
cudaError_t LaunchMove(cudaStream_t stream, const Job& job);

}  // namespace jaxops::concatenate::cuda

#endif  // JAXOPS_CUDA_CONCATENATE_LAUNCH_H_
