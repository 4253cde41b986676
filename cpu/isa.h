// Which build of the kernel files this machine runs best.
#ifndef JAXOPS_CPU_ISA_H_
#define JAXOPS_CPU_ISA_H_

namespace jaxops::cpu {

#if defined(__x86_64__)
// Picks one of the kernels that were compiled for each instruction set.
template <typename Kernels>
const Kernels& BestFor(const Kernels& baseline, const Kernels& avx2, const Kernels& avx512) {
  // The features are those that the build of each kernel file is allowed to use.
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

#endif  // JAXOPS_CPU_ISA_H_
