// Trilinear interpolation in cells on the host.
#ifndef JAXOPS_CPU_TRILINEAR_H_
#define JAXOPS_CPU_TRILINEAR_H_

#include "common/trilinear.h"
#include "cpu/parallel_for.h"

namespace jaxops::trilinear::cpu {

void RunCells(const Call& call, const jaxops::cpu::ParallelFor& parallel_for);

}  // namespace jaxops::trilinear::cpu

#endif  // JAXOPS_CPU_TRILINEAR_H_
