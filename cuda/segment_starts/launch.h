// This header declares the launcher of the first steps of segments on CUDA devices.
#ifndef JAXOPS_CUDA_SEGMENT_STARTS_LAUNCH_H_
#define JAXOPS_CUDA_SEGMENT_STARTS_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "common/segment_starts.h"

namespace jaxops::segment_starts::cuda {

cudaError_t LaunchSegmentStarts(cudaStream_t stream, const Call& call);

}  // namespace jaxops::segment_starts::cuda

#endif  // JAXOPS_CUDA_SEGMENT_STARTS_LAUNCH_H_
