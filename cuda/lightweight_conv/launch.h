// This header declares the launchers of lightweight convolution on CUDA devices.
#ifndef JAXOPS_CUDA_LIGHTWEIGHT_CONV_LAUNCH_H_
#define JAXOPS_CUDA_LIGHTWEIGHT_CONV_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/lightweight_conv.h"

namespace jaxops::lightweight_conv::cuda {

cudaError_t LaunchForward(cudaStream_t stream, const Forward& call);

// Sums over time and over the summed batch entries are cut into at most `splits` partial sums, held
// in `partials`: (kept, splits, taps + 1, channels) of the accumulation type. The number of partial
// sums determines the order of additions, so the caller derives it from shapes alone.
cudaError_t LaunchBackward(cudaStream_t stream, const Backward& call, int64_t splits,
                           void* partials);

}  // namespace jaxops::lightweight_conv::cuda

#endif  // JAXOPS_CUDA_LIGHTWEIGHT_CONV_LAUNCH_H_
