// Marks functions that run on the host and in kernels alike.
#ifndef JAXOPS_COMMON_HOST_DEVICE_H_
#define JAXOPS_COMMON_HOST_DEVICE_H_

#if defined(__CUDACC__)
#define JAXOPS_HOST_DEVICE __host__ __device__
#else
#define JAXOPS_HOST_DEVICE
#endif

#endif  // JAXOPS_COMMON_HOST_DEVICE_H_
