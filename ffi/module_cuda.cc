// The Python module jaxops._cuda.
#include <nanobind/stl/vector.h>

#include "ffi/conv_cuda.h"
#include "ffi/dry_run_module_cuda.h"
#include "ffi/module.h"

namespace jaxops::ffi {
NB_MODULE(_cuda, module) {
  DefineCommon(module, "CUDA " JAXOPS_NVCC_VERSION " for sm " JAXOPS_CUDA_ARCHITECTURES);
  module.attr("ARCHITECTURES") = JAXOPS_CUDA_ARCHITECTURES;
  dry_run::DefineDryRun(module);
  module.def("conv_is_kernel_grad_split", &ConvIsKernelGradSplit);
}

}  // namespace jaxops::ffi
