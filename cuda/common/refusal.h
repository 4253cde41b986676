// Refusals of calls by the code that launches kernels.
#ifndef JAXOPS_CUDA_COMMON_REFUSAL_H_
#define JAXOPS_CUDA_COMMON_REFUSAL_H_

#include <cuda_runtime_api.h>

#include <string>
#include <utility>

namespace jaxops::cuda {

// The reason for which a call of this thread was refused, with its operator, for the error of its
// handler.
inline thread_local std::string refusal;

// Refuses a call. Returns `status`.
inline cudaError_t Refuse(cudaError_t status, std::string why) {
  refusal = std::move(why);
  return status;
}

}  // namespace jaxops::cuda

#endif  // JAXOPS_CUDA_COMMON_REFUSAL_H_
