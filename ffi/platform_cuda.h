// Handlers on CUDA devices.
#ifndef JAXOPS_FFI_PLATFORM_CUDA_H_
#define JAXOPS_FFI_PLATFORM_CUDA_H_

#include <cuda_runtime_api.h>

#include <type_traits>

#include "ffi/cuda_status.h"
#include "xla/ffi/api/ffi.h"

#define JAXOPS_KERNEL(operator_name, name) ::jaxops::operator_name::cuda::Launch##name

namespace jaxops::ffi {

using Context = cudaStream_t;
using ContextTag = xla::ffi::PlatformStream<cudaStream_t>;

inline constexpr bool kHasWorkSpace = true;
inline constexpr std::initializer_list<xla::ffi::Traits> kTraits = {
    xla::ffi::Traits::kCmdBufferCompatible};

template <typename Call, typename... More>
xla::ffi::Error Run(Context stream, const char* operation,
                    cudaError_t (*launch)(cudaStream_t, const Call&, More...), const Call& call,
                    std::type_identity_t<More>... more) {
  return ToError(operation, launch(stream, call, more...));
}

template <typename... Results>
void ExpectWrites(const Results&...) {}

}  // namespace jaxops::ffi

#endif  // JAXOPS_FFI_PLATFORM_CUDA_H_
