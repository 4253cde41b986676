// Launches the kernel of concatenation and splitting.
#ifndef JAXOPS_CUDA_CONCATENATE_LAUNCH_H_
#define JAXOPS_CUDA_CONCATENATE_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "common/concatenate.h"

namespace jaxops::concatenate::cuda {

// As many pieces of one destination, or destinations of a piece each, as are given to LaunchMove.
// It takes several launches for some of more than 200 destinations.
inline constexpr int64_t kMaxPieces = 480;
inline constexpr int64_t kMaxDestinations = 480;

cudaError_t LaunchMove(cudaStream_t stream, const Job& job);

}  // namespace jaxops::concatenate::cuda

#endif  // JAXOPS_CUDA_CONCATENATE_LAUNCH_H_
