// Which kernels take a convolution, and their launch.
#ifndef JAXOPS_CUDA_CONV_DISPATCH_H_
#define JAXOPS_CUDA_CONV_DISPATCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/conv.h"

namespace jaxops::conv::cuda {

enum class Direction { kForward, kInputGrad, kKernelGrad };

// Memory of the device that a launcher may write.
struct Space {
  void* data = nullptr;
  int64_t bytes = 0;
};

// The bytes of workspace for the forward product or the input gradient of f32 that is
// not rounded; 0 where no family that is estimated to be faster needs any.
int64_t SumWorkspace(const Call& call, Direction direction);

// The bytes that the kernel gradient needs, enough for the family of every device.
int64_t KernelGradWorkspace(const Call& call);

// Whether a Hopper GPU takes the kernel gradient of f32, which is not rounded, on tensor cores.
bool IsKernelGradTf32x3(const Call& call);

// Launches the kernels of the family that takes the call on the current device; dispatch.cc has the
// tables. With too small a workspace the error is cudaErrorInvalidValue.
cudaError_t Launch(cudaStream_t stream, const Call& call, Direction direction, Space workspace);

}  // namespace jaxops::conv::cuda

#endif  // JAXOPS_CUDA_CONV_DISPATCH_H_
