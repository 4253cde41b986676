// A query about convolution on CUDA devices, which lowering makes before it calls a handler.
#ifndef JAXOPS_FFI_CONV_CUDA_H_
#define JAXOPS_FFI_CONV_CUDA_H_

#include <cstdint>
#include <vector>

namespace jaxops::ffi {

// Returns whether the handler of the kernel gradient of f32 without rounding to TF32 uses tensor
// cores on Hopper GPUs. The images are `in` (rows..., in..., channels), the kernel is `taps`
// (taps..., channels of a group, outputs), and the cotangents are `out`. Throws
// std::invalid_argument if the sizes do not fit together.
bool ConvIsKernelGradSplit(const std::vector<int64_t>& in, const std::vector<int64_t>& taps,
                           const std::vector<int64_t>& out, const std::vector<int64_t>& strides,
                           const std::vector<int64_t>& dilation, const std::vector<int64_t>& low);

}  // namespace jaxops::ffi

#endif  // JAXOPS_FFI_CONV_CUDA_H_
