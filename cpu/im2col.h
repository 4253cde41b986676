// Patches of images, and images of patches, on the host.
#ifndef JAXOPS_CPU_IM2COL_H_
#define JAXOPS_CPU_IM2COL_H_

#include "common/im2col.h"
#include "cpu/parallel_for.h"

namespace jaxops::im2col::cpu {

void RunIm2Col(const Call& call, const jaxops::cpu::ParallelFor& parallel_for);

void RunCol2Im(const Call& call, const jaxops::cpu::ParallelFor& parallel_for);

}  // namespace jaxops::im2col::cpu

#endif  // JAXOPS_CPU_IM2COL_H_
