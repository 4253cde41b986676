#include "cpu/trilinear.h"

#include <algorithm>
#include <cstdint>

#include "cpu/arrays.h"
#include "cpu/isa.h"
#include "cpu/trilinear_kernels.h"

namespace jaxops::trilinear::cpu {
namespace {

using jaxops::cpu::At;
using jaxops::cpu::CeilDiv;
using jaxops::cpu::ParallelFor;

// Features of a task, which takes much longer than handing it to a thread.
constexpr int64_t kTask = int64_t{1} << 16;

// The cost of a cell in addition to its features, in features.
constexpr int64_t kCellCost = 32;

JAXOPS_DEFINE_BEST_KERNELS();

// Runs cells [begin, end), which are one segment of the innermost batch dimension.
void RunSegment(const Kernels& kernels, const Call& call, int64_t begin, int64_t end) {
  const auto& map = call.cells;
  const auto stride = [&](int operand) {
    return map.rank() == 0 ? 0 : map.stride(map.rank() - 1, operand);
  };
  Cells cells = {};
  cells.width = call.width;
  cells.count = end - begin;
  cells.dtype = call.dtype;
  cells.point_dtype = call.point_dtype;
  cells.order = call.order;
  cells.features = At(call.features, map.Offset(begin, Call::kFeatures), call.dtype);
  cells.points = At(call.points, map.Offset(begin, Call::kPoints), call.point_dtype);
  cells.cotangent = At(call.cotangent, map.Offset(begin, Call::kCotangent), call.dtype);
  cells.features_stride = stride(Call::kFeatures);
  cells.points_stride = stride(Call::kPoints);
  cells.cotangent_stride = stride(Call::kCotangent);
  for (int i = 0; i < call.order; ++i) {
    const int operand = Call::kDirections + i;
    cells.directions[i] = At(call.directions[i], map.Offset(begin, operand), call.point_dtype);
    cells.direction_strides[i] = stride(operand);
  }
  cells.out = At(call.out, begin * call.width, call.dtype);
  cells.dfeatures = At(call.dfeatures, begin * kCorners * call.width, call.dtype);
  cells.dpoints = At(call.dpoints, begin * kAxes, call.point_dtype);
  kernels.cells(cells);
}

}  // namespace

void RunCells(const Call& call, const ParallelFor& parallel_for) {
  const int64_t count = call.cells.size();
  if (count == 0) return;
  const Kernels& kernels = BestKernels();
  const int64_t innermost = call.cells.rank() == 0 ? count : call.cells.size(call.cells.rank() - 1);
  const int64_t per_task = std::max<int64_t>(1, kTask / (kCorners * call.width + kCellCost));
  const int64_t tasks = CeilDiv(count, per_task);
  const auto task = [&](int64_t i) {
    const int64_t end = std::min(count, (i + 1) * per_task);
    for (int64_t begin = i * per_task; begin < end;) {
      const int64_t stop = std::min(end, (begin / innermost + 1) * innermost);
      RunSegment(kernels, call, begin, stop);
      begin = stop;
    }
  };
  if (tasks == 1) {
    task(0);
  } else {
    parallel_for(tasks, task);
  }
}

}  // namespace jaxops::trilinear::cpu
