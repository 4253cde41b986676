// Vocabulary shared by the CPU kernels, the CUDA kernels and the FFI handlers.
// It depends on neither XLA nor CUDA nor Python.
#ifndef JAXOPS_COMMON_TYPES_H_
#define JAXOPS_COMMON_TYPES_H_

#include <cstdint>

namespace jaxops {

enum class DType : int32_t { kF16, kBF16, kF32, kF64 };

constexpr int64_t SizeOf(DType dtype) {
  return dtype == DType::kF64 ? 8 : dtype == DType::kF32 ? 4 : 2;
}

enum class Activation : int32_t { kNone, kRelu, kSilu, kGelu };

// The layout of a sequence: time-major rows of channels, or channel-major rows of time steps.
enum class DataFormat : int32_t { kNTC, kNCT };

}  // namespace jaxops

#endif  // JAXOPS_COMMON_TYPES_H_
