#include "cpu/grid_sample.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "cpu/arrays.h"
#include "cpu/grid_sample_kernels.h"
#include "cpu/isa.h"

namespace jaxops::grid_sample::cpu {
namespace {

using jaxops::cpu::At;
using jaxops::cpu::CeilDiv;
using jaxops::cpu::ParallelFor;
using jaxops::cpu::RunTasks;
using jaxops::cpu::SizeOf;

// Channels of all the entries around points that make a task long beside what it costs to hand it
// to a thread.
constexpr int64_t kTask = int64_t{1} << 16;

// What a point costs beside them, in channels.
constexpr int64_t kPointCost = 64;

// Every slab of a volume looks at every point, so that more slabs are more work.
constexpr int64_t kMaxSlabs = 16;

JAXOPS_DEFINE_BEST_KERNELS();

int64_t Cost(const Geometry& geometry) { return (geometry.width << geometry.axes) + kPointCost; }

// Points [begin, end) of a batch entry.
Points Slice(const Call& call, int64_t entry, int64_t begin, int64_t end) {
  const auto at = [&](const void* base, int operand, int64_t size, DType dtype) {
    return At(base, call.batch.Offset(entry, operand) + begin * size, dtype);
  };
  const Geometry& geometry = call.geometry;
  Points points = {};
  points.geometry = geometry;
  points.dtype = call.dtype;
  points.point_dtype = call.point_dtype;
  points.order = call.order;
  points.count = end - begin;
  points.points = at(call.points, Call::kPoints, geometry.axes, call.point_dtype);
  points.cotangent = at(call.cotangent, Call::kCotangent, geometry.width, call.dtype);
  for (int d = 0; d < call.order; ++d) {
    points.directions[d] =
        at(call.directions[d], Call::kDirections + d, geometry.axes, call.point_dtype);
  }
  return points;
}

void RunGathers(const Kernels& kernels, const Call& call, const ParallelFor& parallel_for) {
  const Geometry& geometry = call.geometry;
  const int64_t per_task = std::max<int64_t>(1, kTask / Cost(geometry));
  const int64_t tasks_per_entry = CeilDiv(geometry.points, per_task);
  RunTasks(call.batch.size() * tasks_per_entry, parallel_for, [&](int64_t i) {
    const int64_t entry = i / tasks_per_entry;
    const int64_t begin = i % tasks_per_entry * per_task;
    const int64_t end = std::min(geometry.points, begin + per_task);
    const int64_t point = entry * geometry.points + begin;
    Gather gather = {};
    gather.points = Slice(call, entry, begin, end);
    gather.volume = At(call.volume, call.batch.Offset(entry, Call::kVolume), call.dtype);
    gather.out = At(call.out, point * geometry.width, call.dtype);
    gather.dpoints = At(call.dpoints, point * geometry.axes, call.point_dtype);
    kernels.gather(gather);
  });
}

void RunScatters(const Kernels& kernels, const Call& call, const ParallelFor& parallel_for) {
  const Geometry& geometry = call.geometry;
  const int64_t size = geometry.grid() * geometry.width;  // of a gradient
  if (call.gradients == 0 || size == 0) return;
  // The batch entries in the order of the gradients that they add to.
  std::vector<int64_t> entries(call.batch.size());
  std::iota(entries.begin(), entries.end(), 0);
  const auto gradient = [&](int64_t entry) {
    return call.batch.Offset(entry, Call::kGradient) / size;
  };
  std::stable_sort(entries.begin(), entries.end(),
                   [&](int64_t a, int64_t b) { return gradient(a) < gradient(b); });
  const int64_t work =
      static_cast<int64_t>(entries.size()) / call.gradients * geometry.points * Cost(geometry);
  const int64_t length = geometry.sizes[0];
  const int64_t slabs =
      std::clamp<int64_t>((work + size) / (4 * kTask), 1, std::min(kMaxSlabs, length));
  const int64_t thickness = CeilDiv(length, slabs);
  const int64_t slice = size / length;
  const bool narrow = SizeOf(call.dtype) == 2;
  RunTasks(call.gradients * slabs, parallel_for, [&](int64_t i) {
    const int64_t which = i / slabs;
    Scatter scatter = {};
    scatter.begin = std::min(length, i % slabs * thickness);
    scatter.end = std::min(length, scatter.begin + thickness);
    const int64_t count = (scatter.end - scatter.begin) * slice;
    if (count == 0) return;
    void* to = At(call.dvolume, which * size + scatter.begin * slice, call.dtype);
    std::vector<float> sums(narrow ? count : 0);
    scatter.sums = narrow ? sums.data() : to;
    if (!narrow) std::memset(to, 0, count * SizeOf(call.dtype));
    const auto begin = std::partition_point(entries.begin(), entries.end(),
                                            [&](int64_t e) { return gradient(e) < which; });
    for (auto e = begin; e != entries.end() && gradient(*e) == which; ++e) {
      scatter.points = Slice(call, *e, 0, geometry.points);
      kernels.scatter(scatter);
    }
    if (narrow) kernels.store_sums({call.dtype, count, sums.data(), to});
  });
}

}  // namespace

void Run(const Call& call, const ParallelFor& parallel_for) {
  const Kernels& kernels = BestKernels();
  if (call.out != nullptr || call.dpoints != nullptr) RunGathers(kernels, call, parallel_for);
  if (call.dvolume != nullptr) RunScatters(kernels, call, parallel_for);
}

}  // namespace jaxops::grid_sample::cpu
