// Sizes and counts that hosts and kernels compute with.
#ifndef JAXOPS_CUDA_COMMON_SIZES_H_
#define JAXOPS_CUDA_COMMON_SIZES_H_

#include <cstdint>

#include "common/host_device.h"
#include "common/types.h"

namespace jaxops::cuda {

using jaxops::SizeOf;

inline constexpr int kWarp = 32;

// The bytes of the widest access.
inline constexpr int kVectorBytes = 16;

JAXOPS_HOST_DEVICE inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The largest number of heads that have channels in a tile, which may begin and end inside of one.
inline int64_t MaxHeadsOfTile(int64_t tile, int64_t channels, int64_t heads) {
  const int64_t count = (tile - 2) / (channels / heads) + 2;
  return count < heads ? count : heads;
}

}  // namespace jaxops::cuda

#endif  // JAXOPS_CUDA_COMMON_SIZES_H_
