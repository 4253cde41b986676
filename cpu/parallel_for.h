// The interface between the CPU kernels and threads.
#ifndef JAXOPS_CPU_PARALLEL_FOR_H_
#define JAXOPS_CPU_PARALLEL_FOR_H_

#include <cstdint>
#include <functional>

namespace jaxops::cpu {

// Runs task(0), ..., task(count - 1) in any order on any threads and returns when all are done.
struct ParallelFor {
  using Run = std::function<void(int64_t count, const std::function<void(int64_t)>& task)>;

  int64_t threads;  // that may run tasks at a time
  Run run;

  void operator()(int64_t count, const std::function<void(int64_t)>& task) const {
    run(count, task);
  }
};

// Runs any number of tasks; a single task wakes no thread.
inline void RunTasks(int64_t count, const ParallelFor& parallel_for,
                     const std::function<void(int64_t)>& task) {
  if (count == 1) {
    task(0);
  } else if (count > 1) {
    parallel_for(count, task);
  }
}

}  // namespace jaxops::cpu

#endif  // JAXOPS_CPU_PARALLEL_FOR_H_
