// This header declares the launchers of weighted sums of the entries of a volume on CUDA devices.
#ifndef JAXOPS_CUDA_TAPS_LAUNCH_H_
#define JAXOPS_CUDA_TAPS_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "common/taps.h"

namespace jaxops::taps::cuda {

cudaError_t LaunchTaps(cudaStream_t stream, const Call& call);

// For calls with points and channels, of at most kMaxCudaTaps taps.
cudaError_t LaunchValues(cudaStream_t stream, const Call& call);
cudaError_t LaunchVolumeGrad(cudaStream_t stream, const Call& call);
cudaError_t LaunchWeightGrad(cudaStream_t stream, const Call& call);

}  // namespace jaxops::taps::cuda

#endif  // JAXOPS_CUDA_TAPS_LAUNCH_H_
