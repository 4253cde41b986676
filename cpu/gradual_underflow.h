// An object during whose life the thread computes with subnormal numbers, which XLA turns off.
#ifndef JAXOPS_CPU_GRADUAL_UNDERFLOW_H_
#define JAXOPS_CPU_GRADUAL_UNDERFLOW_H_

#include <cstdint>

namespace jaxops::cpu {

class GradualUnderflow {
 public:
  GradualUnderflow() : mode_(Get()) { Set(mode_ & ~kFlush); }
  ~GradualUnderflow() { Set(mode_); }
  GradualUnderflow(const GradualUnderflow&) = delete;
  GradualUnderflow& operator=(const GradualUnderflow&) = delete;

 private:
#if defined(__x86_64__)
  using Mode = uint32_t;
  static constexpr Mode kFlush = 0x8040;  // results to zero, and operands
  static Mode Get() { return __builtin_ia32_stmxcsr(); }
  static void Set(Mode mode) { __builtin_ia32_ldmxcsr(mode); }
#elif defined(__aarch64__)
  using Mode = uint64_t;
  static constexpr Mode kFlush = Mode{1} << 24;
  static Mode Get() {
    Mode mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void Set(Mode mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }
#else
  using Mode = uint32_t;
  static constexpr Mode kFlush = 0;
  static Mode Get() { return 0; }
  static void Set(Mode) {}
#endif

  Mode mode_;
};

}  // namespace jaxops::cpu

#endif  // JAXOPS_CPU_GRADUAL_UNDERFLOW_H_
