// The sum of the parts of a kernel gradient.
#ifndef JAXOPS_CUDA_CONV_ADD_PARTS_H_
#define JAXOPS_CUDA_CONV_ADD_PARTS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/types.h"

namespace jaxops::conv::cuda {

// Adds `parts` results of `size` entries each, which follow each other in memory, in the
// accumulation type of the result.
cudaError_t LaunchAddParts(cudaStream_t stream, const void* from, void* result, DType dtype,
                           int64_t size, int parts);

}  // namespace jaxops::conv::cuda

#endif  // JAXOPS_CUDA_CONV_ADD_PARTS_H_
