// This header declares the launchers of im2col and col2im on CUDA devices.
#ifndef JAXOPS_CUDA_IM2COL_LAUNCH_H_
#define JAXOPS_CUDA_IM2COL_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "common/im2col.h"

namespace jaxops::im2col::cuda {

cudaError_t LaunchIm2Col(cudaStream_t stream, const Call& call);

cudaError_t LaunchCol2Im(cudaStream_t stream, const Call& call);

}  // namespace jaxops::im2col::cuda

#endif  // JAXOPS_CUDA_IM2COL_LAUNCH_H_
