// The first steps of segments on the host.
#ifndef JAXOPS_CPU_SEGMENT_STARTS_H_
#define JAXOPS_CPU_SEGMENT_STARTS_H_

#include "common/segment_starts.h"
#include "cpu/parallel_for.h"

namespace jaxops::segment_starts::cpu {

void RunSegmentStarts(const Call& call, const jaxops::cpu::ParallelFor& parallel_for);

}  // namespace jaxops::segment_starts::cpu

#endif  // JAXOPS_CPU_SEGMENT_STARTS_H_
