// Arrays whose dtype is known only at run time. Kernel files must not include this file: they are
// compiled once for each instruction set, and the linker would keep only one copy of a shared
// function.
#ifndef JAXOPS_CPU_ARRAYS_H_
#define JAXOPS_CPU_ARRAYS_H_

#include <cstddef>
#include <cstdint>

#include "common/types.h"

namespace jaxops::cpu {

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The address of element `offset`; null stays null.
inline const void* At(const void* base, int64_t offset, DType dtype) {
  return base == nullptr ? nullptr : static_cast<const std::byte*>(base) + offset * SizeOf(dtype);
}
inline void* At(void* base, int64_t offset, DType dtype) {
  return const_cast<void*>(At(static_cast<const void*>(base), offset, dtype));
}

}  // namespace jaxops::cpu

#endif  // JAXOPS_CPU_ARRAYS_H_
