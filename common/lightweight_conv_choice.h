// Calls of lightweight convolution for which GPUs have fast kernels.
//
// Kernels exist for all calls. Some with segments or states read every tap through the cache, and
// others are dilated, which is slower than XLA's program of the same call (docs/lightweight_conv.md
// has times): these are left to XLA when a program is lowered. Machines without the CUDA module
// lower programs, too, so that this header is for both modules.
#ifndef JAXOPS_COMMON_LIGHTWEIGHT_CONV_CHOICE_H_
#define JAXOPS_COMMON_LIGHTWEIGHT_CONV_CHOICE_H_

#include <cstdint>

#include "common/lightweight_conv.h"

namespace jaxops::lightweight_conv {

// Memory bounds filters up to this length, and arithmetic longer ones.
inline constexpr int kShortTaps = 8;

// Tensor cores multiply fragments of 16 channels of one head and 16 steps.
inline constexpr int kEdge = 16;
// This bounds the longest filters on tensor cores: float32 fragments fill the registers, and
// windows fill shared memory.
inline constexpr int kMaxWindowBlocks = 9;

// IsWholeVectors says whether rows of "NCT" are multiples of 16 bytes.
inline bool IsWholeVectors(const Geometry& g, DType dtype) {
  return g.time * SizeOf(dtype) % 16 == 0;
}

// WindowLead is the number of steps by which a window on tensor cores begins before its filter
// needs it, so that rows of steps begin at whole vectors: 8 entries for any type.
inline int WindowLead(const Geometry& g, int64_t padding) {
  return g.data_format == DataFormat::kNCT ? static_cast<int>((8 - padding % 8) % 8) : 0;
}

// CountTapBlocks is the number of blocks of 16 columns over which the taps of 16 steps extend.
inline int64_t CountTapBlocks(const Geometry& g, int64_t padding) {
  return (g.taps + kEdge - 1 + WindowLead(g, padding) + kEdge - 1) / kEdge;
}

// HasFragments says whether heads are whole fragments, and rows whole vectors.
inline bool HasFragments(const Geometry& g, DType dtype) {
  const bool is_nct = g.data_format == DataFormat::kNCT;
  return dtype != DType::kF64 && g.channels / g.heads % kEdge == 0 &&
         (!is_nct || (g.dilation == 1 && IsWholeVectors(g, dtype)));
}

// HasMatrix says whether filters of this type have matrices: f16 cannot hold the small parts of
// float32.
inline bool HasMatrix(DType dtype, DType weight_dtype) {
  return weight_dtype == dtype || (dtype == DType::kBF16 && weight_dtype == DType::kF32);
}

// CanMultiply says whether tensor cores compute a call with segments, whose window begins `padding`
// steps before its own.
inline bool CanMultiply(const Geometry& g, DType dtype, DType weight_dtype, int64_t padding) {
  return g.taps > kShortTaps && HasFragments(g, dtype) && HasMatrix(dtype, weight_dtype) &&
         CountTapBlocks(g, padding) <= kMaxWindowBlocks;
}

inline constexpr int kMinCausalTaps = 2;

// IsShortCausalNct says whether kernels exist that have the number of taps and the padding as
// constants: causal filters of kMinCausalTaps to kShortTaps taps, in rows of whole vectors.
inline bool IsShortCausalNct(const Geometry& g, DType dtype) {
  return g.data_format == DataFormat::kNCT && dtype != DType::kF64 && g.dilation == 1 &&
         g.taps >= kMinCausalTaps && g.taps <= kShortTaps && g.padding == g.taps - 1 &&
         IsWholeVectors(g, dtype);
}

// IsLargeDilatedNct says whether a call is dilated in NCT, and of a type and a size that were
// measured next to XLA's program: `entries` batch entries of 2^23 elements or more.
inline bool IsLargeDilatedNct(const Geometry& g, DType dtype, int64_t entries) {
  return g.data_format == DataFormat::kNCT && g.dilation > 1 && dtype != DType::kF64 &&
         entries * g.time * g.channels >= int64_t{1} << 23;
}

// PrefersKernels says whether a GPU is to run kernels, and not XLA's program. A state without
// segments costs a launch for its steps, next to the kernels of calls without states.
inline bool PrefersKernels(const Forward& call) {
  const Geometry& g = call.geometry;
  const bool is_ntc = g.data_format == DataFormat::kNTC;
  if (call.starts == nullptr && call.state == nullptr &&
      IsLargeDilatedNct(g, call.dtype, call.batch.size())) {
    // XLA takes 19.2 us for (128,1024,64,16,7) bf16 with dilation 2, where kernels take 51.8, and
    // 26.9 in float32, where kernels take 44.5.
    constexpr int64_t kMaxRowSteps = 64;
    if (g.time <= kMaxRowSteps) return g.taps > kShortTaps;
    // For (8,1024,2048,1024,K) with dilation 2 XLA takes 24.7 us with four taps and 37.4 with seven
    // in bf16, where kernels take 31.1 and 36.3; in float32 37.6 and 35.6 with four.
    return SizeOf(call.dtype) != 2 || g.taps > 4;
  }
  if (call.starts == nullptr) {
    return call.state == nullptr || is_ntc || g.taps <= kShortTaps || g.time >= 8 * g.padding;
  }
  if (call.slots != nullptr) return true;
  if (CanMultiply(g, call.dtype, call.weight_dtype, g.padding)) return true;
  if (g.taps > kShortTaps) return is_ntc && call.state == nullptr;
  // XLA runs the definition in 24.9 us for (4,1024,2048,1024,4) f32 in segments of 128 steps,
  // kernels take 22.2; for (1,6144,16384,6144,4) 219 and 212.
  return is_ntc || IsShortCausalNct(g, call.dtype);
}
inline bool PrefersKernels(const Backward& call) {
  const Geometry& g = call.geometry;
  const int64_t mirrored = (g.taps - 1) * g.dilation - g.padding;
  if (call.starts == nullptr &&
      IsLargeDilatedNct(g, call.dtype, call.kept.size() * call.summed.size())) {
    // For (8,1024,2048,1024,K) bf16 with dilation 2 XLA takes 33.1, 40.7 and 106 us with 4, 7 and
    // 15 taps, where kernels take 63.2, 70.3 and 97.6; in float32 97.7 and 72.7 with seven.
    return SizeOf(call.dtype) != 2 || g.taps > kShortTaps;
  }
  if (call.starts == nullptr || g.data_format == DataFormat::kNTC) return true;
  if (CanMultiply(g, call.dtype, call.weight_dtype, mirrored)) return true;
  return IsShortCausalNct(g, call.dtype) && call.kept.rank() <= 1 && call.summed.rank() <= 1;
}

}  // namespace jaxops::lightweight_conv

#endif  // JAXOPS_COMMON_LIGHTWEIGHT_CONV_CHOICE_H_
