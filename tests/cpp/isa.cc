// The choice of kernels among those of the instruction sets that a module has.
#include "cpu/isa.h"

#include <cstdio>
#include <cstdlib>

namespace {

using jaxops::cpu::BestOf;
using jaxops::cpu::CanRun;
using jaxops::cpu::Isa;

void Check(const int* chosen, const int* expected, const char* what) {
  if (chosen == expected) return;
  std::fprintf(stderr, "wrong choice of %s\n", what);
  std::exit(1);
}

}  // namespace

int main() {
  const int baseline = 0, avx2 = 0, avx512 = 0;
  const bool has_avx2 = CanRun(Isa::kAvx2), has_avx512 = CanRun(Isa::kAvx512);
  if (!CanRun(Isa::kBaseline) || (has_avx512 && !has_avx2)) return 1;
  const int* best = has_avx2 ? &avx2 : &baseline;
  Check(BestOf(&baseline, &avx2, &avx512), has_avx512 ? &avx512 : best, "all");
  Check(BestOf<int>(&baseline, &avx2, nullptr), best, "two");
  Check(BestOf<int>(&baseline, nullptr, nullptr), &baseline, "one");
  Check(BestOf<int>(nullptr, &avx2, nullptr), has_avx2 ? &avx2 : nullptr, "AVX2 alone");
  Check(BestOf<int>(nullptr, nullptr, &avx512), has_avx512 ? &avx512 : nullptr, "AVX-512 alone");
}
