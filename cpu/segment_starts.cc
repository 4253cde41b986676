#include "cpu/segment_starts.h"

#include <algorithm>

#include "cpu/arrays.h"

namespace jaxops::segment_starts::cpu {

using jaxops::cpu::CeilDiv;
using jaxops::cpu::ParallelFor;
using jaxops::cpu::RunTasks;

// Steps of a task, which take much longer than handing it to a thread.
constexpr int64_t kTaskSteps = 128 * 1024;

void RunSegmentStarts(const Call& call, const ParallelFor& parallel_for) {
  if (call.time == 0) return;
  const int64_t rows = call.batch.size();
  const int64_t task_rows = std::max<int64_t>(1, kTaskSteps / call.time);
  DispatchId(call.id_bytes, [&](auto id) {
    using Id = decltype(id);
    RunTasks(CeilDiv(rows, task_rows), parallel_for, [&](int64_t task) {
      const int64_t end = std::min(rows, (task + 1) * task_rows);
      for (int64_t row = task * task_rows; row < end; ++row) {
        const Id* ids = static_cast<const Id*>(call.ids) + call.batch.Offset(row, Call::kIds);
        int32_t* starts = call.starts + call.batch.Offset(row, Call::kStarts);
        int32_t start = call.first;
        starts[0] = start;
        for (int64_t t = 1; t < call.time; ++t) {
          if (ids[t] != ids[t - 1]) start = static_cast<int32_t>(t);
          starts[t] = start;
        }
      }
    });
  });
}

}  // namespace jaxops::segment_starts::cpu
