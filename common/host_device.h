// Marks of functions that run both on the host and in kernels.
#ifndef JAXOPS_COMMON_HOST_DEVICE_H_
#define JAXOPS_COMMON_HOST_DEVICE_H_

// A function with the inline mark is always inlined: kernel files of the host are compiled once for
// each instruction set, and the linker would keep only one copy of a shared function.
#if defined(__CUDACC__)
#define JAXOPS_HOST_DEVICE __host__ __device__
#define JAXOPS_HOST_DEVICE_INLINE __host__ __device__ __forceinline__
#define JAXOPS_UNROLL _Pragma("unroll")
#else
#define JAXOPS_HOST_DEVICE
#define JAXOPS_HOST_DEVICE_INLINE inline __attribute__((always_inline))
#define JAXOPS_UNROLL _Pragma("GCC unroll 16")
#endif

#endif  // JAXOPS_COMMON_HOST_DEVICE_H_
