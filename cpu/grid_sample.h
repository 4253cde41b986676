// Sampling of volumes at points, on the host.
#ifndef JAXOPS_CPU_GRID_SAMPLE_H_
#define JAXOPS_CPU_GRID_SAMPLE_H_

#include "common/grid_sample.h"
#include "cpu/parallel_for.h"

namespace jaxops::grid_sample::cpu {

// Sums are always in the order of the points.
void RunSample(const Call& call, const jaxops::cpu::ParallelFor& parallel_for);

}  // namespace jaxops::grid_sample::cpu

#endif  // JAXOPS_CPU_GRID_SAMPLE_H_
