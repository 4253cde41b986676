// Definitions that the two Python modules have in common.
#ifndef JAXOPS_FFI_MODULE_H_
#define JAXOPS_FFI_MODULE_H_

#include <nanobind/nanobind.h>

#include <string>

#include "ffi/bind.h"
#include "xla/ffi/api/ffi.h"

namespace jaxops::ffi {

// The handlers that are linked into the module, by the names under which XLA knows them.
inline nanobind::dict Registrations() {
  nanobind::dict handlers;
  for (const Registration* r = Registration::first; r != nullptr; r = r->next) {
    handlers[r->name] = nanobind::capsule(reinterpret_cast<void*>(r->handler));
  }
  return handlers;
}

// Attributes that `jaxops._core.native` checks first, and reports, and the handlers it registers.
inline void DefineCommon(nanobind::module_& module, const std::string& build) {
  module.attr("FFI_VERSION") = nanobind::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  module.attr("JAXLIB_VERSION") = JAXOPS_JAXLIB_VERSION;
  module.attr("INTERFACE") = JAXOPS_INTERFACE;
  module.attr("BUILD") = nanobind::str(build.c_str());
  module.def("registrations", &Registrations);
}

}  // namespace jaxops::ffi

#endif  // JAXOPS_FFI_MODULE_H_
