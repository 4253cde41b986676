// Definitions that both Python modules share.
#ifndef JAXOPS_FFI_MODULE_H_
#define JAXOPS_FFI_MODULE_H_

#include <nanobind/nanobind.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "ffi/bind.h"
#include "ffi/call_frame.h"
#include "ffi/choice.h"
#include "ffi/limits.h"
#include "ffi/work_space.h"
#include "xla/ffi/api/ffi.h"

namespace jaxops::ffi {

// Returns the handlers in this module, by their names in XLA.
inline nanobind::dict Registrations() {
  nanobind::dict handlers;
  for (const Registration* r = Registration::first; r != nullptr; r = r->next) {
    handlers[r->name] = nanobind::capsule(reinterpret_cast<void*>(r->handler));
  }
  return handlers;
}

// Returns the bytes of work space that a call needs on CUDA devices. Throws the handler's refusal.
inline int64_t WorkSpaceBytes(const std::string& target, const std::vector<FrameArray>& operands,
                              const std::vector<FrameArray>& results,
                              const std::vector<FrameAttribute>& attributes) {
  CallFrame frame(FindHandler(target), operands, results, attributes);
  int64_t bytes = -1;
  work_space_answer = &bytes;
  const std::string error = frame.Call();
  work_space_answer = nullptr;
  if (bytes < 0) throw std::invalid_argument(error);
  return bytes;
}

// Returns whether a GPU is to run the kernels of a call, and not XLA's program. Throws the refusal
// of the handler, which must be one that answers.
inline bool PrefersKernels(const std::string& target, const std::vector<FrameArray>& operands,
                           const std::vector<FrameArray>& results,
                           const std::vector<FrameAttribute>& attributes) {
  CallFrame frame(FindHandler(target), operands, results, attributes);
  std::optional<bool> prefers;
  choice_answer = &prefers;
  const std::string error = frame.Call();
  choice_answer = nullptr;
  if (!prefers) throw std::invalid_argument(error);
  return *prefers;
}

// Returns the limits of each operator, by name.
inline nanobind::dict Limits() {
  nanobind::dict operators;
  for (const auto& [operator_name, name, value] : kLimits) {
    const nanobind::str key(operator_name);
    if (!operators.contains(key)) operators[key] = nanobind::dict();
    operators[key][name] = value;
  }
  return operators;
}

// Defines the attributes that `jaxops._core.native` checks first and reports, and the handlers it
// registers.
inline void DefineCommon(nanobind::module_& module, const std::string& build) {
  module.attr("FFI_VERSION") = nanobind::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  module.attr("JAXLIB_VERSION") = JAXOPS_JAXLIB_VERSION;
  module.attr("INTERFACE") = JAXOPS_INTERFACE;
  module.attr("BUILD") = nanobind::str(build.c_str());
  module.def("registrations", &Registrations);
  module.def("work_space_bytes", &WorkSpaceBytes);
  module.def("prefers_kernels", &PrefersKernels);
  module.attr("LIMITS") = Limits();
}

}  // namespace jaxops::ffi

#endif  // JAXOPS_FFI_MODULE_H_
