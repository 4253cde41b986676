// Steps of the lightweight convolution on the host.
#ifndef JAXOPS_CPU_LIGHTWEIGHT_CONV_STEP_H_
#define JAXOPS_CPU_LIGHTWEIGHT_CONV_STEP_H_

#include "common/lightweight_conv_step.h"
#include "cpu/parallel_for.h"

namespace jaxops::lightweight_conv_step::cpu {

// y is that of the whole sequence (cpu/lightweight_conv.h), to the last bit.
void RunStep(const Step& call, const jaxops::cpu::ParallelFor& parallel_for);

}  // namespace jaxops::lightweight_conv_step::cpu

#endif  // JAXOPS_CPU_LIGHTWEIGHT_CONV_STEP_H_
