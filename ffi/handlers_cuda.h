// The handlers of the convolution, which are bound by hand.
#ifndef JAXOPS_FFI_HANDLERS_CUDA_H_
#define JAXOPS_FFI_HANDLERS_CUDA_H_

#include "xla/ffi/api/ffi.h"

namespace jaxops::ffi {

XLA_FFI_DECLARE_HANDLER_SYMBOL(ConvCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(ConvInputGradCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(ConvKernelGradCuda);

}  // namespace jaxops::ffi

#endif  // JAXOPS_FFI_HANDLERS_CUDA_H_
