// The choice of the fastest build of a kernel file for this machine.
#ifndef JAXOPS_CPU_ISA_H_
#define JAXOPS_CPU_ISA_H_

namespace jaxops::cpu {

#if defined(__x86_64__)
// Returns one of the kernels that were compiled for each instruction set.
template <typename Kernels>
const Kernels& BestFor(const Kernels& baseline, const Kernels& avx2, const Kernels& avx512) {
  // The builds of the kernel files may use exactly these features.
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx2 && has_avx512) return avx512;
  return has_avx2 ? avx2 : baseline;
}
#endif

}  // namespace jaxops::cpu

// JAXOPS_DECLARE_KERNELS declares the Kernels of an operator in its namespace, one for each
// instruction set. JAXOPS_DEFINE_BEST_KERNELS defines the function that returns the best of them;
// no file that is compiled for one of these instruction sets may have it.
#if defined(__x86_64__)
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
#define JAXOPS_DEFINE_BEST_KERNELS()                                                \
  const Kernels& BestKernels() {                                                    \
    static const Kernels& best =                                                    \
        jaxops::cpu::BestFor(baseline::kKernels, avx2::kKernels, avx512::kKernels); \
    return best;                                                                    \
  }                                                                                 \
  static_assert(true)
#else
#define JAXOPS_DECLARE_KERNELS() \
  namespace baseline {           \
  extern const Kernels kKernels; \
  }                              \
  static_assert(true)
#define JAXOPS_DEFINE_BEST_KERNELS()                          \
  const Kernels& BestKernels() { return baseline::kKernels; } \
  static_assert(true)
#endif

#endif  // JAXOPS_CPU_ISA_H_
