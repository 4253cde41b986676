// This header declares the kernel families of im2col and col2im: the calls that each family can
// run, and its launcher. dispatch.cc alone chooses between them. No family runs calls of images or
// patches without entries.
#ifndef JAXOPS_CUDA_IM2COL_FAMILIES_H_
#define JAXOPS_CUDA_IM2COL_FAMILIES_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/im2col.h"
#include "cuda/common/device.h"
#include "cuda/common/sizes.h"

namespace jaxops::im2col::cuda {

using jaxops::cuda::Device;

inline bool IsAligned(const void* address, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

// UnitBytes returns the largest power of two up to 16 that divides a pixel and the addresses.
inline int64_t UnitBytes(const Call& call) {
  int64_t unit = jaxops::cuda::kVectorBytes;
  while (call.channels * call.item_bytes % unit != 0 || !IsAligned(call.from, unit) ||
         !IsAligned(call.to, unit)) {
    unit /= 2;
  }
  return unit;
}

// The family runs im2col of aligned pixels of whole vectors.
bool CanRunVectors(const Call& call, const Device& device);
cudaError_t LaunchVectors(cudaStream_t stream, const Call& call, const Device& device);

// The family runs im2col of any call.
cudaError_t LaunchItems(cudaStream_t stream, const Call& call, const Device& device);

// The family runs col2im of any call.
cudaError_t LaunchSum(cudaStream_t stream, const Call& call, const Device& device);

}  // namespace jaxops::im2col::cuda

#endif  // JAXOPS_CUDA_IM2COL_FAMILIES_H_
