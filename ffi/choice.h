// Queries whether a GPU is to run a call's kernels, or XLA's program of the call.
#ifndef JAXOPS_FFI_CHOICE_H_
#define JAXOPS_FFI_CHOICE_H_

#include <optional>

#include "xla/ffi/api/ffi.h"

namespace jaxops::ffi {

// The address for the answer of a handler that is asked; null if the handler is to run. Handlers of
// both platforms answer, because programs are also exported for CUDA devices on machines without
// the CUDA module.
inline thread_local std::optional<bool>* choice_answer = nullptr;

// Answers a query, with an error that ends the handler.
inline xla::ffi::Error AnswerChoice(bool prefers_kernels) {
  if (choice_answer == nullptr) return xla::ffi::Error::Success();
  *choice_answer = prefers_kernels;
  return xla::ffi::Error(xla::ffi::ErrorCode::kCancelled, "jaxops: whether to run kernels");
}

}  // namespace jaxops::ffi

#endif  // JAXOPS_FFI_CHOICE_H_
