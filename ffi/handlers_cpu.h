// Every handler of the _cpu module.
#ifndef JAXOPS_FFI_HANDLERS_CPU_H_
#define JAXOPS_FFI_HANDLERS_CPU_H_

#include "xla/ffi/api/ffi.h"

namespace jaxops::ffi {

XLA_FFI_DECLARE_HANDLER_SYMBOL(ConcatenateCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GridSampleCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GridSampleBackwardCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GridSamplePointGradCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GridSampleVolumeGradCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(LightweightConvCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(LightweightConvFilterGradCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(LightweightConvBackwardCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SigmoidFocalLossCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SigmoidFocalLossGradientCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SigmoidFocalLossSumCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SigmoidFocalLossValueAndGradientCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SoftmaxFocalLossCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SoftmaxFocalLossGradientCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SplitCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TrilinearBackwardCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TrilinearFeatureGradCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TrilinearInterpolateCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TrilinearPointGradCpu);

}  // namespace jaxops::ffi

#endif  // JAXOPS_FFI_HANDLERS_CPU_H_
