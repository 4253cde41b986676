// A question of lowering about the convolution on CUDA devices, before it calls a handler.
#ifndef JAXOPS_FFI_CONV_CUDA_H_
#define JAXOPS_FFI_CONV_CUDA_H_

#include <cstdint>
#include <vector>

namespace jaxops::ffi {

// Whether the handler of the kernel gradient of f32, which must not be rounded to TF32, multiplies
// it on tensor cores on Hopper GPUs, of images `in` (rows..., in..., channels), a kernel `taps`
// (taps..., channels of a group, outputs) and cotangents `out`. Throws std::invalid_argument where
// the sizes do not fit.
bool ConvIsKernelGradSplit(const std::vector<int64_t>& in, const std::vector<int64_t>& taps,
                           const std::vector<int64_t>& out, const std::vector<int64_t>& strides,
                           const std::vector<int64_t>& dilation, const std::vector<int64_t>& low);

}  // namespace jaxops::ffi

#endif  // JAXOPS_FFI_CONV_CUDA_H_
