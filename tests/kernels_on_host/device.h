// A CUDA device on the host, for the kernels that are plain C++: included before each of their
// files, which `test_kernels_on_host.py` compiles for the host.
//
// A thread is a fiber, and blocks run one after another. A block's dynamic shared memory has its
// exact size, and no value that a kernel could count on.
#ifndef JAXOPS_TESTS_KERNELS_ON_HOST_DEVICE_H_
#define JAXOPS_TESTS_KERNELS_ON_HOST_DEVICE_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
// Blocks do not run at the same time.
#undef __shared__
#define __shared__ static

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace host_cuda {

inline constexpr int kWarp = 32;

// Runs a kernel's threads.
void RunGrid(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& thread);

template <typename Params>
void Run(void (*kernel)(Params), dim3 grid, dim3 block, size_t shared_bytes,
         const std::type_identity_t<Params>& params) {
  RunGrid(grid, block, shared_bytes, [&] { kernel(params); });
}

// The dynamic shared memory of the block.
void* Shared();

// Waits for all threads of the block.
void WaitForBlock();

// Waits for the lanes in `mask` that have not returned, and returns the lanes' values. Groups of a
// warp's lanes do not wait for each other.
const uint64_t* Exchange(uint32_t mask, uint64_t value);

// Asynchronous copies of the thread: each happens as late as it may, so that a thread that does not
// wait reads what was there before.
void StartCopy(void* to, const void* from, size_t bytes, size_t zeros);
void EndCopyGroup();
// Completes all but the last `left` groups.
void WaitForCopies(size_t left);

inline int Lane() {
  return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % kWarp;
}

// The value of lane `from`.
template <typename T>
T ValueOf(uint32_t mask, T value, int from) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  std::memcpy(&value, &Exchange(mask, bits)[from], sizeof(T));
  return value;
}

}  // namespace host_cuda

inline void __syncthreads() { host_cuda::WaitForBlock(); }
inline void __syncwarp(uint32_t mask = 0xffffffff) { host_cuda::Exchange(mask, 0); }

template <typename T>
T __shfl_sync(uint32_t mask, T value, int lane) {
  return host_cuda::ValueOf(mask, value, lane % host_cuda::kWarp);
}
template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int lanes) {
  return host_cuda::ValueOf(mask, value, host_cuda::Lane() ^ lanes);
}
template <typename T>
T __shfl_up_sync(uint32_t mask, T value, unsigned lanes) {
  const int from = host_cuda::Lane() - static_cast<int>(lanes);
  return host_cuda::ValueOf(mask, value, from < 0 ? host_cuda::Lane() : from);
}
inline uint32_t __ballot_sync(uint32_t mask, bool holds) {
  const uint64_t* of_lane = host_cuda::Exchange(mask, holds);
  uint32_t found = 0;
  for (int i = 0; i < host_cuda::kWarp; ++i) {
    if ((mask >> i & 1) != 0 && of_lane[i] != 0) found |= 1u << i;
  }
  return found;
}
inline bool __any_sync(uint32_t mask, bool holds) { return __ballot_sync(mask, holds) != 0; }
inline bool __all_sync(uint32_t mask, bool holds) { return __ballot_sync(mask, !holds) == 0; }

inline uint32_t __reduce_or_sync(uint32_t mask, uint32_t value) {
  const uint64_t* of_lane = host_cuda::Exchange(mask, value);
  uint32_t all = 0;
  for (int i = 0; i < host_cuda::kWarp; ++i) {
    if ((mask >> i & 1) != 0) all |= static_cast<uint32_t>(of_lane[i]);
  }
  return all;
}
inline int __reduce_max_sync(uint32_t mask, int value) {
  const uint64_t* of_lane = host_cuda::Exchange(mask, static_cast<uint32_t>(value));
  for (int i = 0; i < host_cuda::kWarp; ++i) {
    if ((mask >> i & 1) == 0) continue;
    const int other = static_cast<int>(of_lane[i]);
    value = value < other ? other : value;
  }
  return value;
}

inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes, size_t zeros = 0) {
  host_cuda::StartCopy(to, from, bytes, zeros);
}
inline void __pipeline_commit() { host_cuda::EndCopyGroup(); }
inline size_t __cvta_generic_to_shared(const void* address) {
  return reinterpret_cast<size_t>(address);
}

template <typename T>
T __ldg(const T* address) {
  return *address;
}
// Fibers take turns at barriers alone.
template <typename T>
T atomicAdd(T* address, T value) {
  const T before = *address;
  *address += value;
  return before;
}
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline float __fdividef(float a, float b) { return a / b; }
inline uint32_t __clz(uint32_t n) { return n == 0 ? 32 : __builtin_clz(n); }
inline uint32_t __popc(uint32_t n) { return __builtin_popcount(n); }
inline uint32_t __ffs(uint32_t n) { return __builtin_ffs(static_cast<int>(n)); }

template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(b) < T(a) ? T(b) : T(a);
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) < T(b) ? T(b) : T(a);
}

template <typename Params>
cudaError_t cudaFuncSetAttribute(void (*)(Params), cudaFuncAttribute, int) {
  return cudaSuccess;
}

#endif  // JAXOPS_TESTS_KERNELS_ON_HOST_DEVICE_H_
