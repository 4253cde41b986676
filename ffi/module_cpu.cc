// The Python module jaxops._cpu.
#include "ffi/handlers_cpu.h"
#include "ffi/module.h"

namespace jaxops::ffi {
namespace {

nanobind::dict Registrations() {
  nanobind::dict handlers;
  handlers["jaxops_lightweight_conv"] = Encapsulate(LightweightConvCpu);
  handlers["jaxops_lightweight_conv_filter_grad"] = Encapsulate(LightweightConvFilterGradCpu);
  handlers["jaxops_lightweight_conv_backward"] = Encapsulate(LightweightConvBackwardCpu);
  handlers["jaxops_sigmoid_focal_loss"] = Encapsulate(SigmoidFocalLossCpu);
  handlers["jaxops_sigmoid_focal_loss_gradient"] = Encapsulate(SigmoidFocalLossGradientCpu);
  handlers["jaxops_sigmoid_focal_loss_sum"] = Encapsulate(SigmoidFocalLossSumCpu);
  handlers["jaxops_sigmoid_focal_loss_value_and_gradient"] =
      Encapsulate(SigmoidFocalLossValueAndGradientCpu);
  handlers["jaxops_softmax_focal_loss"] = Encapsulate(SoftmaxFocalLossCpu);
  handlers["jaxops_softmax_focal_loss_gradient"] = Encapsulate(SoftmaxFocalLossGradientCpu);
  return handlers;
}

}  // namespace

NB_MODULE(_cpu, module) {
  DescribeBuild(module, "C++ for " JAXOPS_CPU_ISAS);
  module.def("registrations", &Registrations);
}

}  // namespace jaxops::ffi
