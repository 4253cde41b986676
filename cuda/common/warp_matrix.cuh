// Products of matrices by one warp on tensor cores, and the loads and splits of their operands.
#ifndef JAXOPS_CUDA_COMMON_WARP_MATRIX_CUH_
#define JAXOPS_CUDA_COMMON_WARP_MATRIX_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>
#include <cstdint>
#include <type_traits>

namespace jaxops::cuda {

// Loads four 8 x 8 matrices of 2-byte entries, with a row at the address of each lane.
__device__ inline void LoadMatrices(uint32_t (&to)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row_address));
}

// Loads four such matrices, each transposed.
__device__ inline void LoadTransposed(uint32_t (&to)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row_address));
}

// Computes sums += a b for 16 rows and 8 columns, over 32 bytes of a row of each.
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

// Two TF32 numbers, in the bits of float32, that add up to an entry. Products drop the bits of the
// low part that TF32 does not have: at most the entry's last bit.
struct SplitEntry {
  uint32_t high, low;
};

// Splits an entry. The high part is the nearest TF32, ties away from zero. The high part of a NaN
// may be any number, but the low part of an entry that is not finite is NaN.
__device__ __forceinline__ SplitEntry SplitFloat32(uint32_t bits) {
  const uint32_t high = (bits + 0x1000) & 0xFFFFE000;
  return {high, __float_as_uint(__uint_as_float(bits) - __uint_as_float(high))};
}

// Tells whether all of these sums are finite, which they are only if all entries that they met are.
template <int kCount>
__device__ __forceinline__ bool AreFinite(const float (&sums)[kCount]) {
  bool are_finite = true;
#pragma unroll
  for (int i = 0; i < kCount; ++i) are_finite &= fabsf(sums[i]) <= FLT_MAX;
  return are_finite;
}

}  // namespace jaxops::cuda

#endif  // JAXOPS_CUDA_COMMON_WARP_MATRIX_CUH_
