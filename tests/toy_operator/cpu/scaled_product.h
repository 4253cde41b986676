// The scaled product on the host.
#ifndef JAXOPS_CPU_SCALED_PRODUCT_H_
#define JAXOPS_CPU_SCALED_PRODUCT_H_

#include "common/scaled_product.h"
#include "cpu/parallel_for.h"

namespace jaxops::scaled_product::cpu {

void RunProduct(const Call& call, const jaxops::cpu::ParallelFor& parallel_for);

}  // namespace jaxops::scaled_product::cpu

#endif  // JAXOPS_CPU_SCALED_PRODUCT_H_
