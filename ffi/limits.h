// Limits of CUDA kernels that the lowering of an operator keeps to, under the names by which Python
// knows them. Both modules have them, because machines without the CUDA module trace and export
// programs for CUDA devices, too.
#ifndef JAXOPS_FFI_LIMITS_H_
#define JAXOPS_FFI_LIMITS_H_

#include <algorithm>
#include <cstdint>

#include "common/batch.h"
#include "common/concatenate.h"
#include "common/conv.h"
#include "common/taps.h"

namespace jaxops::ffi {

struct Limit {
  const char* operator_name;
  const char* name;
  int64_t value;
};

// Batch dimensions that vary in different ways. Concatenation counts dimensions of its own, too.
inline constexpr int64_t kMaxBatchGroups =
    std::min<int64_t>(kMaxBatchDims, jaxops::concatenate::kMaxRowDims) - 1;

inline constexpr Limit kLimits[] = {
    {"batch", "max_groups", kMaxBatchGroups},
    {"concatenate", "max_pieces", jaxops::concatenate::kMaxPieces},
    {"concatenate", "max_parts", jaxops::concatenate::kMaxDestinations},
    {"conv", "max_taps", jaxops::conv::kMaxTaps},
    {"conv", "max_stride", jaxops::conv::kMaxStride},
    {"conv", "max_pixels", jaxops::conv::kMaxPixels},
    {"conv", "max_groups", jaxops::conv::kMaxGroups},
    {"conv", "max_kernel_bytes", jaxops::conv::kMaxKernelBytes},
    {"conv", "channel_bytes", jaxops::conv::kChannelBytes},
    {"conv", "min_fan", jaxops::conv::kMinFan},
    {"conv", "max_few_channels", jaxops::conv::kMaxFewChannels},
    {"conv", "max_few_tap_rows", jaxops::conv::kMaxFewTapRows},
    {"conv", "max_few_row_entries", jaxops::conv::kMaxFewRowEntries},
    {"conv", "max_few_outputs", jaxops::conv::kMaxFewOutputs},
    {"taps", "max_taps", jaxops::taps::kMaxCudaTaps},
};

}  // namespace jaxops::ffi

#endif  // JAXOPS_FFI_LIMITS_H_
