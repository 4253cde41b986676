// The submodule `dry_run` of jaxops._cuda.
#ifndef JAXOPS_FFI_DRY_RUN_MODULE_CUDA_H_
#define JAXOPS_FFI_DRY_RUN_MODULE_CUDA_H_

#include <nanobind/nanobind.h>

namespace jaxops::dry_run {

void DefineDryRun(nanobind::module_& module);

}  // namespace jaxops::dry_run

#endif  // JAXOPS_FFI_DRY_RUN_MODULE_CUDA_H_
