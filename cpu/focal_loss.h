// The focal losses on the host.
#ifndef JAXOPS_CPU_FOCAL_LOSS_H_
#define JAXOPS_CPU_FOCAL_LOSS_H_

#include "common/focal_loss.h"
#include "cpu/parallel_for.h"

namespace jaxops::focal_loss::cpu {

// Results do not depend on how `parallel_for` schedules its tasks, not even in the last bit.
void RunSigmoid(const Sigmoid& args, const jaxops::cpu::ParallelFor& parallel_for);
void RunSoftmax(const Softmax& args, const jaxops::cpu::ParallelFor& parallel_for);

}  // namespace jaxops::focal_loss::cpu

#endif  // JAXOPS_CPU_FOCAL_LOSS_H_
