// Asynchronous copies to shared memory (`cp.async`), of compute capability 8.0.
#ifndef JAXOPS_CUDA_COMMON_ASYNC_COPY_CUH_
#define JAXOPS_CUDA_COMMON_ASYNC_COPY_CUH_

#include <cstdint>

namespace jaxops::cuda {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies kBytes through the L1 cache, or zeros where `exists` is false: `from` must be aligned
// then, too, but may point anywhere. No thread reads the copy before WaitCopies, so the compiler
// may move other accesses across it.
template <int kBytes>
__device__ __forceinline__ void CopyAsync(uint32_t to, const char* from, bool exists) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes),
               "r"(exists ? kBytes : 0));
}

// Copies kBytes from `offset` bytes after `base`, which is aligned; `offset` may have any value
// where `exists` is false.
template <int kBytes>
__device__ __forceinline__ void CopyAsync(uint32_t to, const char* base, int64_t offset,
                                          bool exists) {
  CopyAsync<kBytes>(to, base + (exists ? offset : 0), exists);
}

// Copies 16 bytes, or zeros, around the L1 cache, which does not help data that is read once.
__device__ __forceinline__ void CopyAsyncPast(uint32_t to, const char* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(exists ? 16 : 0));
}

// Ends a group of this thread's copies.
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all but the last kLeft groups of this thread's copies are complete.
template <int kLeft>
__device__ __forceinline__ void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

}  // namespace jaxops::cuda

#endif  // JAXOPS_CUDA_COMMON_ASYNC_COPY_CUH_
