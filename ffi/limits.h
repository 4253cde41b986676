// Limits of kernels that the lowering of an operator keeps to.
#ifndef JAXOPS_FFI_LIMITS_H_
#define JAXOPS_FFI_LIMITS_H_

#include <cstdint>
#include <utility>

namespace jaxops::ffi {

// A limit under the name by which Python knows it. Both modules have the limits of CUDA kernels,
// because machines without the CUDA module trace and export programs for CUDA devices, too.
struct Limit {
  Limit(const char* operator_name, const char* name, int64_t value)
      : operator_name(operator_name), name(name), value(value), next(std::exchange(first, this)) {}

  const char* operator_name;
  const char* name;
  int64_t value;
  const Limit* next;
  static inline constinit const Limit* first = nullptr;
};

}  // namespace jaxops::ffi

#endif  // JAXOPS_FFI_LIMITS_H_
