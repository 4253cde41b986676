// The Python module jaxops._cpu.
#include <nanobind/ndarray.h>

#include "common/fast_divide.h"
#include "cpu/bf16_products.h"
#include "cpu/isa.h"
#include "ffi/module.h"

namespace jaxops::ffi {
namespace {

// The tests compare the division by which kernels index with the plain operator.
template <typename UInt>
void DivideInPlace(nanobind::ndarray<UInt, nanobind::shape<-1>, nanobind::c_contig> numbers,
                   int64_t divisor) {
  const FastDividerOf<UInt> divider(divisor);
  for (size_t i = 0; i < numbers.size(); ++i) numbers(i) = divider.Quotient(numbers(i));
}

}  // namespace

NB_MODULE(_cpu, module) {
  static constexpr bool kBuilt = true;
  if (cpu::BestOf<bool>(JAXOPS_IF_BASELINE(&kBuilt), JAXOPS_IF_AVX2(&kBuilt),
                        JAXOPS_IF_AVX512(&kBuilt)) == nullptr) {
    throw nanobind::import_error(
        "it was built for " JAXOPS_CPU_ISAS
        ", which this processor does not have. Rebuild jaxops in its source tree with "
        "`pip install .` on this machine, or with `JAXOPS_CPU_ISAS=all pip install .` for all.");
  }
  DefineCommon(module, "C++ for " JAXOPS_CPU_ISAS);
  module.attr("CPU_ONLY") = JAXOPS_CPU_ONLY;
  module.def("has_bf16_matrices",
             [] { return cpu::FindBf16Products() == cpu::Bf16Products::kMatrices; });
  // A converted array would be a copy, and the caller would not see its quotients.
  const auto numbers = nanobind::arg("numbers").noconvert();
  module.def("divide_in_place", &DivideInPlace<uint32_t>, numbers, nanobind::arg("divisor"));
  module.def("divide_in_place", &DivideInPlace<uint64_t>, numbers, nanobind::arg("divisor"));
}

}  // namespace jaxops::ffi
