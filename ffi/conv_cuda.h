// Queries of lowering about the convolution on CUDA devices, before it calls a handler.
#ifndef JAXOPS_FFI_CONV_CUDA_H_
#define JAXOPS_FFI_CONV_CUDA_H_

#include <cstdint>
#include <vector>

namespace jaxops::ffi {

// The bytes that the handler of the value or, if is_input_grad, of the input gradient needs as its
// second result, of images `in` (rows..., in..., channels), a kernel `taps` (taps..., channels of a
// group, outputs) and results `out`, for f32 that is not multiplied as TF32 to be multiplied on
// tensor cores: 0, and no such result, where that is not faster. Throws std::invalid_argument where
// the sizes do not fit.
int64_t ConvSplitWorkspace(const std::vector<int64_t>& in, const std::vector<int64_t>& taps,
                           const std::vector<int64_t>& out, const std::vector<int64_t>& strides,
                           const std::vector<int64_t>& dilation, const std::vector<int64_t>& low,
                           bool is_input_grad);

// Whether the handler of the kernel gradient of f32, which must not be rounded to TF32, multiplies
// it on tensor cores on Hopper GPUs, of sizes as below.
bool ConvIsKernelGradSplit(const std::vector<int64_t>& in, const std::vector<int64_t>& taps,
                           const std::vector<int64_t>& out, const std::vector<int64_t>& strides,
                           const std::vector<int64_t>& dilation, const std::vector<int64_t>& low);

// The bytes that the handler of the kernel gradient needs as its second result, of images `in`
// (rows..., in..., channels), a kernel `taps` (taps..., channels of a group, outputs) and
// cotangents `out`, with entries of `item_bytes`, f32 multiplied as TF32 or not. They are enough on
// every GPU. Throws std::invalid_argument where the sizes do not fit.
int64_t ConvKernelGradWorkspace(const std::vector<int64_t>& in, const std::vector<int64_t>& taps,
                                const std::vector<int64_t>& out,
                                const std::vector<int64_t>& strides,
                                const std::vector<int64_t>& dilation,
                                const std::vector<int64_t>& low, int item_bytes, bool tf32);

}  // namespace jaxops::ffi

#endif  // JAXOPS_FFI_CONV_CUDA_H_
