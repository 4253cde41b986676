// How a processor multiplies bfloat16.
#ifndef JAXOPS_CPU_BF16_PRODUCTS_H_
#define JAXOPS_CPU_BF16_PRODUCTS_H_

#include <cstdint>

#include "cpu/isa.h"

#if defined(JAXOPS_HAS_AVX512) && defined(JAXOPS_COMPILES_PAIRS)
#include <cpuid.h>
#endif
#if defined(JAXOPS_HAS_AVX512) && defined(JAXOPS_COMPILES_MATRICES)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jaxops::cpu {

// As f32, by the processor's sums of two products, or by its products of matrices.
enum class Bf16Products { kFloat32, kPairs, kMatrices };

// The fastest way of this processor. Those with AMX take longer for pairs than for f32:
// (32,128,28,28,128,3) took 37.3 ms on two cores of an Intel Xeon, f32 24.0, and matrices take 4.2
// (docs/conv2d.md). Linux has to permit matrices to a process, and the first call requests it.
inline Bf16Products FindBf16Products() {
#if defined(JAXOPS_HAS_AVX512) && defined(JAXOPS_COMPILES_PAIRS)
  static const Bf16Products fastest = [] {
    if (!__builtin_cpu_supports("avx512bf16")) return Bf16Products::kFloat32;
    constexpr uint32_t kAmxBf16 = 1 << 22, kAmxTile = 1 << 24;
    uint32_t eax, ebx, ecx, edx = 0;
    __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx);
    if ((edx & kAmxBf16) == 0 || (edx & kAmxTile) == 0) return Bf16Products::kPairs;
#if defined(JAXOPS_COMPILES_MATRICES)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // of asm/prctl.h, since Linux 5.16
    if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) return Bf16Products::kMatrices;
#endif
    return Bf16Products::kFloat32;
  }();
  return fastest;
#else
  return Bf16Products::kFloat32;
#endif
}

}  // namespace jaxops::cpu

#endif  // JAXOPS_CPU_BF16_PRODUCTS_H_
