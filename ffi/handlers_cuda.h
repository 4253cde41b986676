// Every handler of the _cuda module.
#ifndef JAXOPS_FFI_HANDLERS_CUDA_H_
#define JAXOPS_FFI_HANDLERS_CUDA_H_

#include "xla/ffi/api/ffi.h"

namespace jaxops::ffi {

XLA_FFI_DECLARE_HANDLER_SYMBOL(ConcatenateCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(LightweightConvCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(LightweightConvFilterGradCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(LightweightConvBackwardCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SigmoidFocalLossCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SigmoidFocalLossGradientCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SigmoidFocalLossSumCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SigmoidFocalLossValueAndGradientCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SoftmaxFocalLossCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SoftmaxFocalLossGradientCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SplitCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TrilinearBackwardCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TrilinearFeatureGradCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TrilinearInterpolateCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TrilinearPointGradCuda);

}  // namespace jaxops::ffi

#endif  // JAXOPS_FFI_HANDLERS_CUDA_H_
