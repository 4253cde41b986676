// This header declares the launchers of the focal losses on CUDA devices.
#ifndef JAXOPS_CUDA_FOCAL_LOSS_LAUNCH_H_
#define JAXOPS_CUDA_FOCAL_LOSS_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/focal_loss.h"

namespace jaxops::focal_loss::cuda {

// Sums are cut into `splits` partial sums per batch entry, held in `partials`: (entries, splits) of
// the arithmetic type. The number of partial sums determines the order of additions, so the caller
// derives it from shapes alone. Without a sum neither is used.
cudaError_t LaunchSigmoid(cudaStream_t stream, const Sigmoid& call, int64_t splits, void* partials);

cudaError_t LaunchSoftmax(cudaStream_t stream, const Softmax& call, int64_t splits, void* partials);

}  // namespace jaxops::focal_loss::cuda

#endif  // JAXOPS_CUDA_FOCAL_LOSS_LAUNCH_H_
