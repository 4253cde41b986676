// Concatenation and splitting on the host.
#ifndef JAXOPS_CPU_CONCATENATE_H_
#define JAXOPS_CPU_CONCATENATE_H_

#include "common/concatenate.h"
#include "cpu/parallel_for.h"

namespace jaxops::concatenate::cpu {

void RunMove(const Job& job, const jaxops::cpu::ParallelFor& parallel_for);

}  // namespace jaxops::concatenate::cpu

#endif  // JAXOPS_CPU_CONCATENATE_H_
