// What the two Python modules have in common.
#ifndef JAXOPS_FFI_MODULE_H_
#define JAXOPS_FFI_MODULE_H_

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <new>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace jaxops::ffi {

// The error that becomes of an exception, which must not reach those who call a handler: they are
// C. Nothing here allocates.
inline XLA_FFI_Error* ToError(const XLA_FFI_CallFrame* frame, XLA_FFI_Error_Code code,
                              const char* message) {
  XLA_FFI_Error_Create_Args args{};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = message;
  args.errc = code;
  return frame->api->XLA_FFI_Error_Create(&args);
}

// Whether the bytes of an array can be counted, even were its dimensions of size 0 not there: no
// product of sizes overflows in what a handler then does.
inline bool IsCountable(const XLA_FFI_Buffer& buffer) {
  const xla::ffi::AnyBuffer array(&buffer);
  int64_t bytes = 16;  // of the largest items
  for (const int64_t size : array.dimensions()) {
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes)) return false;
  }
  return true;
}

inline bool AreCountable(const XLA_FFI_CallFrame* frame) {
  for (int64_t i = 0; i < frame->args.size; ++i) {
    if (!IsCountable(*static_cast<const XLA_FFI_Buffer*>(frame->args.args[i]))) return false;
  }
  for (int64_t i = 0; i < frame->rets.size; ++i) {
    if (!IsCountable(*static_cast<const XLA_FFI_Buffer*>(frame->rets.rets[i]))) return false;
  }
  return true;
}

template <XLA_FFI_Handler* kHandler>
XLA_FFI_Error* CallHandler(XLA_FFI_CallFrame* frame) noexcept {
  try {
    if (!AreCountable(frame)) {
      return ToError(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                     "jaxops: the sizes of an array are too large");
    }
    return kHandler(frame);
  } catch (const std::bad_alloc&) {
    return ToError(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED,
                   "jaxops: out of host memory for the work space of an operator");
  } catch (const std::exception& exception) {
    return ToError(frame, XLA_FFI_Error_Code_INTERNAL, exception.what());
  } catch (...) {
    return ToError(frame, XLA_FFI_Error_Code_INTERNAL, "jaxops: an unknown exception");
  }
}

template <XLA_FFI_Handler* kHandler>
nanobind::capsule Encapsulate() {
  return nanobind::capsule(reinterpret_cast<void*>(&CallHandler<kHandler>));
}

// What `jaxops._core.native` checks before it registers anything, and reports.
inline void DescribeBuild(nanobind::module_& module, const std::string& build) {
  module.attr("FFI_VERSION") = nanobind::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  module.attr("JAXLIB_VERSION") = JAXOPS_JAXLIB_VERSION;
  module.attr("INTERFACE") = JAXOPS_INTERFACE;
  module.attr("BUILD") = nanobind::str(build.c_str());
}

}  // namespace jaxops::ffi

#endif  // JAXOPS_FFI_MODULE_H_
