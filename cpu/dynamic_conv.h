// Dynamic convolution on the host.
#ifndef JAXOPS_CPU_DYNAMIC_CONV_H_
#define JAXOPS_CPU_DYNAMIC_CONV_H_

#include "common/dynamic_conv.h"
#include "cpu/parallel_for.h"

namespace jaxops::dynamic_conv::cpu {

// Results do not depend on how `parallel_for` schedules its tasks, not even in the last bit.
void RunForward(const Forward& args, const jaxops::cpu::ParallelFor& parallel_for);
void RunBackward(const Backward& args, const jaxops::cpu::ParallelFor& parallel_for);

}  // namespace jaxops::dynamic_conv::cpu

#endif  // JAXOPS_CPU_DYNAMIC_CONV_H_
