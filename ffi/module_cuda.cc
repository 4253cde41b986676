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
  module.def("conv_split_workspace", &ConvSplitWorkspace);
  module.def("conv_is_kernel_grad_split", &ConvIsKernelGradSplit);
  module.def("conv_kernel_grad_workspace", &ConvKernelGradWorkspace);
}

}  // namespace jaxops::ffi
