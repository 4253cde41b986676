// This header declares the launcher of trilinear interpolation in cells on CUDA devices.
#ifndef JAXOPS_CUDA_TRILINEAR_LAUNCH_H_
#define JAXOPS_CUDA_TRILINEAR_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "common/trilinear.h"

namespace jaxops::trilinear::cuda {

cudaError_t LaunchCells(cudaStream_t stream, const Call& call);

}  // namespace jaxops::trilinear::cuda

#endif  // JAXOPS_CUDA_TRILINEAR_LAUNCH_H_
