// The only thing the CPU kernels know about threads.
#ifndef JAXOPS_CPU_PARALLEL_FOR_H_
#define JAXOPS_CPU_PARALLEL_FOR_H_

#include <cstdint>
#include <functional>

namespace jaxops::cpu {

// Runs task(0), ..., task(count - 1) in any order on any threads and returns when all are done.
using ParallelFor = std::function<void(int64_t count, const std::function<void(int64_t)>& task)>;

}  // namespace jaxops::cpu

#endif  // JAXOPS_CPU_PARALLEL_FOR_H_
