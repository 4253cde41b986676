// The instruction sets that kernels are compiled for, and the choice of the best one of this
// machine.
#ifndef JAXOPS_CPU_ISA_H_
#define JAXOPS_CPU_ISA_H_

namespace jaxops::cpu {

// From the slowest to the fastest. A module has one or several of them, JAXOPS_HAS_... say which.
enum class Isa { kBaseline, kAvx2, kAvx512 };

// Whether this machine has the features that kernels of an instruction set may use.
inline bool CanRun(Isa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (isa == Isa::kAvx2) return has_avx2;
  if (isa == Isa::kAvx512) return has_avx2 && has_avx512;
#endif
  return isa == Isa::kBaseline;
}

// Returns the best of the kernels that are not null and run on this machine, or null.
template <typename Kernels>
const Kernels* BestOf(const Kernels* baseline, const Kernels* avx2, const Kernels* avx512) {
  if (avx512 != nullptr && CanRun(Isa::kAvx512)) return avx512;
  if (avx2 != nullptr && CanRun(Isa::kAvx2)) return avx2;
  return baseline;
}

}  // namespace jaxops::cpu

#ifdef JAXOPS_HAS_BASELINE
#define JAXOPS_IF_BASELINE(kernels) (kernels)
#else
#define JAXOPS_IF_BASELINE(kernels) nullptr
#endif
#ifdef JAXOPS_HAS_AVX2
#define JAXOPS_IF_AVX2(kernels) (kernels)
#else
#define JAXOPS_IF_AVX2(kernels) nullptr
#endif
#ifdef JAXOPS_HAS_AVX512
#define JAXOPS_IF_AVX512(kernels) (kernels)
#else
#define JAXOPS_IF_AVX512(kernels) nullptr
#endif

// Whether the compiler has the instructions of AVX512_BF16, and those of AMX on Linux.
#if defined(__clang__) || __GNUC__ >= 10
#define JAXOPS_COMPILES_PAIRS 1
#endif
#if defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#define JAXOPS_COMPILES_MATRICES 1
#endif

// JAXOPS_DECLARE_KERNELS declares the Kernels of an operator in its namespace, one for each
// instruction set. JAXOPS_DEFINE_BEST_KERNELS defines the function that returns the best of them.
// There always is one: without it the module is not imported. No file that is compiled for one of
// these instruction sets may have it.
#define JAXOPS_DECLARE_KERNELS() \
  namespace baseline {           \
  extern const Kernels kKernels; \
  }                              \
  namespace avx2 {               \
  extern const Kernels kKernels; \
  }                              \
  namespace avx512 {             \
  extern const Kernels kKernels; \
  }                              \
  static_assert(true)
#define JAXOPS_DEFINE_BEST_KERNELS()                                              \
  const Kernels& BestKernels() {                                                  \
    static const Kernels& best = *jaxops::cpu::BestOf<Kernels>(                   \
        JAXOPS_IF_BASELINE(&baseline::kKernels), JAXOPS_IF_AVX2(&avx2::kKernels), \
        JAXOPS_IF_AVX512(&avx512::kKernels));                                     \
    return best;                                                                  \
  }                                                                               \
  static_assert(true)

#endif  // JAXOPS_CPU_ISA_H_
