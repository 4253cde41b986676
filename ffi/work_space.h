// The work space of calls on CUDA devices, and queries of its size.
#ifndef JAXOPS_FFI_WORK_SPACE_H_
#define JAXOPS_FFI_WORK_SPACE_H_

#include <cstdint>

#include "ffi/bind.h"
#include "ffi/decode.h"
#include "xla/ffi/api/ffi.h"

namespace jaxops::ffi {

// The address for the answer of a handler that is asked for the size of its work space; null if the
// handler is to run. Handlers of both platforms answer, because programs are also exported for CUDA
// devices on machines without the CUDA module.
inline thread_local int64_t* work_space_answer = nullptr;

// Takes the work space of a call. Fewer than the needed bytes are an error. A handler that is asked
// for the size stores it, and this function returns an error that ends the handler.
inline xla::ffi::Error TakeWorkSpace(void*& data, const char* operator_name, WorkSpace given,
                                     int64_t needed) {
  if (work_space_answer != nullptr) {
    *work_space_answer = needed;
    return xla::ffi::Error(xla::ffi::ErrorCode::kCancelled, "jaxops: the size of a work space");
  }
  data = nullptr;
  if (given && needed == 0) return InvalidArgument(operator_name, ": a result too many");
  if (!kHasWorkSpace) return xla::ffi::Error::Success();
  const int64_t bytes = given ? static_cast<int64_t>((*given)->size_bytes()) : 0;
  if (bytes < needed) {
    return InvalidArgument(operator_name, ": the work space must have ", needed, " bytes, got ",
                           bytes);
  }
  if (given) data = (*given)->untyped_data();
  return xla::ffi::Error::Success();
}

}  // namespace jaxops::ffi

#endif  // JAXOPS_FFI_WORK_SPACE_H_
