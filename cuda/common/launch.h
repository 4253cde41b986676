// Code that every launcher of kernels uses.
#ifndef JAXOPS_CUDA_COMMON_LAUNCH_H_
#define JAXOPS_CUDA_COMMON_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cuda/common/sizes.h"

namespace jaxops::cuda {

// A kernel needs no opt-in for up to kSharedWithoutOptIn bytes of dynamic shared memory, whatever
// static shared memory it has. The opt-in limit, kSharedOptInLimit, is above the need of every
// kernel, and fits every GPU next to 11 KiB of static memory. A kernel always has the same limit,
// because another thread may be about to launch it too.
inline constexpr size_t kSharedWithoutOptIn = 32 * 1024;
inline constexpr int kSharedOptInLimit = 88 * 1024;

// Threads that a multiprocessor of the architecture which is compiled for runs at a time: launch
// bounds of more draw a warning. Code for the host does not use the value.
inline constexpr int kMultiprocessorThreads =
#if __CUDA_ARCH__ == 800 || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1100)
    2048;
#else
    1536;
#endif

// Launches a kernel with `bytes` of dynamic shared memory, at most `opt_in_limit`.
template <typename Params>
cudaError_t Launch(void (*kernel)(Params), int64_t blocks, int threads, size_t bytes,
                   cudaStream_t stream, const Params& params,
                   int opt_in_limit = kSharedOptInLimit) {
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (bytes > kSharedWithoutOptIn) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, opt_in_limit);
    if (error != cudaSuccess) return error;
  }
  kernel<<<static_cast<unsigned>(blocks), threads, bytes, stream>>>(params);
  return cudaGetLastError();
}

// Counts the multiprocessors of the current device.
inline cudaError_t CountProcessors(int* count) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

// Tells whether the current device has clusters of neighbouring blocks, which share memory.
inline bool HasClusters() {
  int device = 0, has = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&has, cudaDevAttrClusterLaunch, device) == cudaSuccess && has;
}

// Launches a kernel in clusters of `per_cluster` blocks, at most 8. The caller has set the kernel's
// opt-in limit to at least `bytes`, the dynamic shared memory of a block.
template <typename Params>
cudaError_t LaunchClusters(void (*kernel)(Params), dim3 grid, unsigned per_cluster, int threads,
                           size_t bytes, cudaStream_t stream, const Params& params) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {per_cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, params);
}

template <typename Params>
cudaError_t LaunchClusters(void (*kernel)(Params), int64_t blocks, unsigned per_cluster,
                           int threads, size_t bytes, cudaStream_t stream, const Params& params) {
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  return LaunchClusters(kernel, dim3(static_cast<unsigned>(blocks)), per_cluster, threads, bytes,
                        stream, params);
}

}  // namespace jaxops::cuda

#endif  // JAXOPS_CUDA_COMMON_LAUNCH_H_
