// How every launcher of kernels starts them.
#ifndef JAXOPS_CUDA_LAUNCH_H_
#define JAXOPS_CUDA_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "common/host_device.h"

namespace jaxops::cuda {

JAXOPS_HOST_DEVICE inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Lets a kernel use `bytes` of dynamic shared memory and launches it.
template <typename Params>
cudaError_t Launch(void (*kernel)(Params), int64_t blocks, int threads, size_t bytes,
                   cudaStream_t stream, const Params& params) {
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (bytes > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (error != cudaSuccess) return error;
  }
  kernel<<<static_cast<unsigned>(blocks), threads, bytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace jaxops::cuda

#endif  // JAXOPS_CUDA_LAUNCH_H_
