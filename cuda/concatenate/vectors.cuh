// These functions access 16 bytes, or single items, at the speed of a copy.
#ifndef JAXOPS_CUDA_CONCATENATE_VECTORS_CUH_
#define JAXOPS_CUDA_CONCATENATE_VECTORS_CUH_

#include <cstdint>

#include "cuda/common/numeric.cuh"

namespace jaxops::concatenate::cuda {

using jaxops::cuda::kVectorBytes;

inline constexpr int kVectorThreads = 256;
// Missing segments of a table begin here.
inline constexpr uint32_t kNowhere = UINT32_MAX;

template <typename Item>
constexpr int kItems = kVectorBytes / sizeof(Item);

// Load keeps what it reads in the L2 cache longest, so that writes go to memory soon and in order.
// For items of less than 4 bytes this costs more than it gains.
template <typename Item>
__device__ __forceinline__ Item Load(const void* from) {
  if constexpr (sizeof(Item) < 4) {
    return __ldg(static_cast<const Item*>(from));
  } else {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    Item item;
    if constexpr (sizeof(Item) == 16) {
      asm("ld.global.nc.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
          : "=r"(item.x), "=r"(item.y), "=r"(item.z), "=r"(item.w)
          : "l"(from), "l"(policy));
    } else if constexpr (sizeof(Item) == 8) {
      asm("ld.global.nc.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
          : "=r"(item.x), "=r"(item.y)
          : "l"(from), "l"(policy));
    } else {
      asm("ld.global.nc.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(item) : "l"(from), "l"(policy));
    }
    return item;
  }
}

// Store leaves the L1 cache to reads.
__device__ __forceinline__ void Store(void* to, uint4 vector) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(vector.x),
               "r"(vector.y), "r"(vector.z), "r"(vector.w)
               : "memory");
}

template <typename Item>
constexpr auto kItemsOf = [](int64_t bytes) { return static_cast<uint32_t>(bytes / sizeof(Item)); };

}  // namespace jaxops::concatenate::cuda

#endif  // JAXOPS_CUDA_CONCATENATE_VECTORS_CUH_
