// The device of a call, as kernel families see it. Sources of kernels include this in the place of
// dispatch.h, whose headers of the standard library take compilers longer than most kernels do.
#ifndef JAXOPS_CUDA_COMMON_DEVICE_H_
#define JAXOPS_CUDA_COMMON_DEVICE_H_

namespace jaxops::cuda {

// The device of a call. Choices depend only on the call and on this struct.
struct Device {
  int number = -1;
  int major = 0, minor = 0;  // its compute capability
  int processors = 0;        // multiprocessors
  int shared_bytes = 0;      // of shared memory that a block can opt in to
  bool has_wgmma = false;    // capability 9.0, and the module has code for 90a

  bool has_clusters() const { return major >= 9; }
};

}  // namespace jaxops::cuda

#endif  // JAXOPS_CUDA_COMMON_DEVICE_H_
