// What the two Python modules have in common.
#ifndef JAXOPS_FFI_MODULE_H_
#define JAXOPS_FFI_MODULE_H_

#include <nanobind/nanobind.h>

#include <string>

#include "xla/ffi/api/ffi.h"

namespace jaxops::ffi {

inline nanobind::capsule Encapsulate(XLA_FFI_Handler* handler) {
  return nanobind::capsule(reinterpret_cast<void*>(handler));
}

// What `jaxops._core.native` checks before it registers anything, and reports.
inline void DescribeBuild(nanobind::module_& module, const std::string& build) {
  module.attr("FFI_VERSION") = nanobind::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  module.attr("JAXLIB_VERSION") = JAXOPS_JAXLIB_VERSION;
  module.attr("BUILD") = nanobind::str(build.c_str());
}

}  // namespace jaxops::ffi

#endif  // JAXOPS_FFI_MODULE_H_
