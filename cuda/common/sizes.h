#ifndef JAXOPS_CUDA_COMMON_SIZES_H_
#define JAXOPS_CUDA_COMMON_SIZES_H_

#include <cstdint>

#include "common/host_device.h"

namespace jaxops::cuda {

inline constexpr int kWarp = 32;

JAXOPS_HOST_DEVICE inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace jaxops::cuda

#endif  // JAXOPS_CUDA_COMMON_SIZES_H_
