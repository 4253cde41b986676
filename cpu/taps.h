// Weighted sums of entries of a volume, on the host.
#ifndef JAXOPS_CPU_TAPS_H_
#define JAXOPS_CPU_TAPS_H_

#include "common/taps.h"
#include "cpu/parallel_for.h"

namespace jaxops::taps::cpu {

// Sums are always in the order of the points.
void RunTaps(const Call& call, const jaxops::cpu::ParallelFor& parallel_for);

}  // namespace jaxops::taps::cpu

#endif  // JAXOPS_CPU_TAPS_H_
