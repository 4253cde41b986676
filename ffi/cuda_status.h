// CUDA status codes as FFI errors.
#ifndef JAXOPS_FFI_CUDA_STATUS_H_
#define JAXOPS_FFI_CUDA_STATUS_H_

#include <cuda_runtime_api.h>

#include <string>
#include <utility>

#include "cuda/common/dispatch.h"
#include "xla/ffi/api/ffi.h"

namespace jaxops::ffi {

inline xla::ffi::Error ToError(const char* operation, cudaError_t status) {
  if (status == cudaSuccess) return xla::ffi::Error::Success();
  std::string text = std::exchange(jaxops::cuda::refusal, "");
  if (text.empty()) text = std::string(operation) + ": " + cudaGetErrorString(status);
  return xla::ffi::Error::Internal(text + " (" + cudaGetErrorName(status) + ")");
}

}  // namespace jaxops::ffi

#endif  // JAXOPS_FFI_CUDA_STATUS_H_
