// The Python module jaxops._cpu.
#include "ffi/handlers_cpu.h"
#include "ffi/module.h"

namespace jaxops::ffi {
namespace {

nanobind::dict Registrations() {
  nanobind::dict handlers;
  handlers["jaxops_concatenate"] = Encapsulate(ConcatenateCpu);
  handlers["jaxops_split"] = Encapsulate(SplitCpu);
  handlers["jaxops_lightweight_conv"] = Encapsulate(LightweightConvCpu);
  handlers["jaxops_lightweight_conv_filter_grad"] = Encapsulate(LightweightConvFilterGradCpu);
  handlers["jaxops_lightweight_conv_backward"] = Encapsulate(LightweightConvBackwardCpu);
  return handlers;
}

}  // namespace

NB_MODULE(_cpu, module) {
  DescribeBuild(module, "C++ for " JAXOPS_CPU_ISAS);
  module.def("registrations", &Registrations);
}

}  // namespace jaxops::ffi
