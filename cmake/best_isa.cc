// Prints the best instruction set of this machine that kernels are compiled for.
#include <cstdio>

#include "cpu/isa.h"

int main() {
  using jaxops::cpu::Isa;
  const char* best = "baseline";
  if (CanRun(Isa::kAvx2)) best = "avx2";
  if (CanRun(Isa::kAvx512)) best = "avx512";
  std::fputs(best, stdout);
}
