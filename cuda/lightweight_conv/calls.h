// This header has properties of calls of lightweight convolution, and sizes of blocks, that
// dispatch and kernel families share.
#ifndef JAXOPS_CUDA_LIGHTWEIGHT_CONV_CALLS_H_
#define JAXOPS_CUDA_LIGHTWEIGHT_CONV_CALLS_H_

#include <cstdint>

#include "common/lightweight_conv.h"
#include "cuda/common/sizes.h"

namespace jaxops::lightweight_conv::cuda {

using jaxops::cuda::CeilDiv;
using jaxops::cuda::kWarp;

// This number of blocks keeps today's devices busy; results depend on it, so it is the same on all
// devices.
inline constexpr int64_t kBusyBlocks = 480;

// NCT: the threads of a block, and the minimum for a row.
inline constexpr int kNctThreads = 128;
inline constexpr int kNctMinRowThreads = 16;

// RowsAligned says whether rows of the array's fastest dimension can be read `bytes` bytes at a
// time.
inline bool RowsAligned(int64_t row_elements, DType dtype, int64_t bytes) {
  return row_elements * SizeOf(dtype) % bytes == 0;
}

// SharesFilters says whether weight and bias are the same for all batch entries.
inline bool SharesFilters(const Forward& call) {
  for (int d = 0; d < call.batch.rank(); ++d) {
    if (call.batch.stride(d, Forward::kWeight) != 0 || call.batch.stride(d, Forward::kBias) != 0) {
      return false;
    }
  }
  return true;
}

// With this padding of the flipped taps, the input gradient is a convolution.
inline int64_t Mirrored(const Geometry& g) { return (g.taps - 1) * g.dilation - g.padding; }

// A grid has at most this number of blocks along x, and along y and z.
inline constexpr int64_t kMaxBlocks = INT32_MAX;
inline constexpr int64_t kMaxGridBlocks = 65535;

}  // namespace jaxops::lightweight_conv::cuda

#endif  // JAXOPS_CUDA_LIGHTWEIGHT_CONV_CALLS_H_
