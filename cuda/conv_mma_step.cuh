// The product of a warp on tensor cores.
#ifndef JAXOPS_CUDA_CONV_MMA_STEP_CUH_
#define JAXOPS_CUDA_CONV_MMA_STEP_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace jaxops::conv::cuda {

// sums += a b, of 16 rows and 8 columns, over 32 bytes of a row of each.
template <typename T>
__device__ inline void MultiplyStep(float* sums, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#define JAXOPS_MMA(shape, type)                                              \
  asm("mma.sync.aligned." shape ".row.col.f32." type "." type                \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])           \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (std::is_same_v<T, float>) {
    JAXOPS_MMA("m16n8k8", "tf32");
  } else if constexpr (std::is_same_v<T, __half>) {
    JAXOPS_MMA("m16n8k16", "f16");
  } else {
    JAXOPS_MMA("m16n8k16", "bf16");
  }
#undef JAXOPS_MMA
}

}  // namespace jaxops::conv::cuda

#endif  // JAXOPS_CUDA_CONV_MMA_STEP_CUH_
