// Which kernels take a convolution, and their launch.
#ifndef JAXOPS_CUDA_CONV_DISPATCH_H_
#define JAXOPS_CUDA_CONV_DISPATCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

#include "common/conv.h"

namespace jaxops::conv::cuda {

enum class Direction { kForward, kInputGrad, kKernelGrad };

// Described in families.h.
enum class Family { kWgmma, kTf32x3, kMma, kFma, kFewChannels, kDirect, kDepthwise };

const char* ToString(Family family);

// Memory of the device that a launcher may write.
struct Space {
  void* data = nullptr;
  int64_t bytes = 0;
};

// The choice depends on the call and on this.
struct Device {
  int major, minor;  // its compute capability
  int processors;    // multiprocessors
  bool has_wgmma;    // capability 9.0, and the module has code for 90a
};

cudaError_t DescribeCurrent(Device& device);

// The family that takes a call, if one does on this device. A forward product or an input gradient
// without a workspace has none of those that need one.
std::optional<Family> Choose(const Call& call, Direction direction, const Device& device,
                             bool has_workspace);

// The bytes that Choose may count on for the forward product or the input gradient of f32 that is
// not rounded; 0 where no family that is estimated to be faster needs any.
int64_t SumWorkspace(const Call& call, Direction direction);

// The bytes that the kernel gradient needs, enough for the family of every device.
int64_t KernelGradWorkspace(const Call& call);

// Whether a Hopper GPU takes the kernel gradient of f32, which is not rounded, on tensor cores.
bool IsKernelGradTf32x3(const Call& call);

// Launches the kernels of the family that Choose returns for the current device. Without one the
// error is cudaErrorNoKernelImageForDevice, with too small a workspace cudaErrorInvalidValue.
cudaError_t Launch(cudaStream_t stream, const Call& call, Direction direction, Space workspace);

}  // namespace jaxops::conv::cuda

#endif  // JAXOPS_CUDA_CONV_DISPATCH_H_
