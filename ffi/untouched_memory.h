// Results in memory that the process has not touched yet.
#ifndef JAXOPS_FFI_UNTOUCHED_MEMORY_H_
#define JAXOPS_FFI_UNTOUCHED_MEMORY_H_

#include <cstddef>
#include <cstdint>

#include "xla/ffi/api/ffi.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace jaxops::ffi {

// XLA allocates large results again for every call. A handler that only moves memory then spends
// most of its time in the kernel of the system, which maps a page at each first write. Huge pages
// make such writes a few hundred times rarer, if the system gives them on request.
inline void ExpectWrites(void* data, size_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kHugePage = 2 << 20;
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (address + bytes) / kHugePage * kHugePage;
  if (begin >= end) return;
  // Memory that was in use before has its pages. The end of a block that the allocator has grown is
  // its newest part.
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  unsigned char is_mapped = 1;
  mincore(reinterpret_cast<void*>(end - page), page, &is_mapped);
  if (is_mapped & 1) return;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

inline void ExpectWrites(xla::ffi::AnyBuffer result) {
  ExpectWrites(result.untyped_data(), result.size_bytes());
}

}  // namespace jaxops::ffi

#endif  // JAXOPS_FFI_UNTOUCHED_MEMORY_H_
