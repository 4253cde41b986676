// Handlers on the host.
#ifndef JAXOPS_FFI_PLATFORM_CPU_H_
#define JAXOPS_FFI_PLATFORM_CPU_H_

#include "ffi/thread_pool.h"
#include "ffi/untouched_memory.h"
#include "xla/ffi/api/ffi.h"

#define JAXOPS_KERNEL(operator_name, name) ::jaxops::operator_name::cpu::Run##name

namespace jaxops::ffi {

using Context = xla::ffi::ThreadPool;
using ContextTag = xla::ffi::ThreadPool;

inline constexpr bool kHasWorkSpace = false;
inline constexpr std::initializer_list<xla::ffi::Traits> kTraits = {};

// Exceptions of kernels become errors in `bind.h`.
template <typename Call, typename... Ignored>
xla::ffi::Error Run(Context& context, const char*,
                    void (*kernel)(const Call&, const cpu::ParallelFor&), const Call& call,
                    const Ignored&...) {
  kernel(call, ParallelForOn(context));
  return xla::ffi::Error::Success();
}

}  // namespace jaxops::ffi

#endif  // JAXOPS_FFI_PLATFORM_CPU_H_
