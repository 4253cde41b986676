#include "cpu/taps.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "cpu/arrays.h"
#include "cpu/isa.h"
#include "cpu/taps_kernels.h"

namespace jaxops::taps::cpu {
namespace {

using jaxops::cpu::At;
using jaxops::cpu::CeilDiv;
using jaxops::cpu::ParallelFor;
using jaxops::cpu::RunTasks;

// The cost of a task, in channels of entries: such a task takes much longer than handing it to a
// thread.
constexpr int64_t kTask = int64_t{1} << 18;

// The cost of an entry in addition to its channels, in channels.
constexpr int64_t kEntryCost = 4;

// The cost of a slab of a volume, in channels: adding to such a slab takes much longer than finding
// the entries that are in other slabs.
constexpr int64_t kSlabCost = int64_t{1} << 22;
constexpr int64_t kMaxSlabs = 8;

JAXOPS_DEFINE_BEST_KERNELS();

DType ArithmeticOf(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

int64_t Cost(const Geometry& geometry) {
  return geometry.combinations * (geometry.width + kEntryCost);
}

// Points [begin, end) of a batch entry.
Points Slice(const Call& call, int64_t entry, int64_t begin, int64_t end) {
  const Geometry& geometry = call.geometry;
  Points points = {};
  points.geometry = geometry;
  points.dtype = call.dtype;
  points.count = end - begin;
  const int64_t taps = geometry.points_minor ? 1 : geometry.taps;
  points.indices = call.indices + call.batch.Offset(entry, Call::kIndices) +
                   begin * (geometry.points_minor ? 1 : geometry.axes) * taps;
  for (int a = 0; a < geometry.axes; ++a) {
    const int64_t offset = call.batch.Offset(entry, Call::kWeights + a);
    points.weights[a] = At(call.weights[a], offset + begin * taps, ArithmeticOf(call.dtype));
  }
  return points;
}

const void* CotangentOf(const Call& call, int64_t entry, int64_t begin) {
  const int64_t offset = call.batch.Offset(entry, Call::kCotangent);
  return At(call.cotangent, offset + begin * call.geometry.width, call.dtype);
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
    const Points points = Slice(call, entry, begin, end);
    const void* volume = At(call.volume, call.batch.Offset(entry, Call::kVolume), call.dtype);
    if (call.out != nullptr) {
      kernels.values({points, volume, At(call.out, point * geometry.width, call.dtype)});
      return;
    }
    WeightGradients gradients = {points, volume, CotangentOf(call, entry, begin), {}};
    for (int a = 0; a < geometry.axes; ++a) {
      const int64_t weights = entry * geometry.points * geometry.taps +
                              begin * (geometry.points_minor ? 1 : geometry.taps);
      gradients.dweights[a] = At(call.dweights[a], weights, ArithmeticOf(call.dtype));
    }
    kernels.weight_gradients(gradients);
  });
}

void RunScatters(const Kernels& kernels, const Call& call, const ParallelFor& parallel_for) {
  const Geometry& geometry = call.geometry;
  const int64_t length = geometry.sizes[0];
  const int64_t grid = std::accumulate(geometry.sizes, geometry.sizes + geometry.axes, int64_t{1},
                                       std::multiplies<int64_t>());
  const int64_t size = grid * geometry.width;  // of one gradient
  if (call.gradients == 0 || size == 0) return;
  // The batch entries are sorted by the gradients that they add to.
  std::vector<int64_t> entries(call.batch.size());
  std::iota(entries.begin(), entries.end(), 0);
  const auto gradient = [&](int64_t entry) {
    return call.batch.Offset(entry, Call::kGradient) / size;
  };
  std::stable_sort(entries.begin(), entries.end(),
                   [&](int64_t a, int64_t b) { return gradient(a) < gradient(b); });
  // An entry adds its points in their order, in whichever slab it is.
  const int64_t points = static_cast<int64_t>(entries.size()) / call.gradients * geometry.points;
  const int64_t wanted = std::clamp<int64_t>((points * Cost(geometry) + size) / kSlabCost, 1,
                                             std::min(kMaxSlabs, length));
  const int64_t thickness = CeilDiv(length, wanted);
  const int64_t slabs = CeilDiv(length, thickness);
  const int64_t slice = size / length;
  const bool narrow = SizeOf(call.dtype) == 2;
  RunTasks(call.gradients * slabs, parallel_for, [&](int64_t i) {
    const int64_t which = i / slabs;
    Scatter scatter = {};
    scatter.begin = i % slabs * thickness;
    scatter.end = std::min(length, scatter.begin + thickness);
    const int64_t count = (scatter.end - scatter.begin) * slice;
    void* to = At(call.dvolume, which * size + scatter.begin * slice, call.dtype);
    std::vector<float> sums(narrow ? count : 0);
    scatter.sums = narrow ? sums.data() : to;
    if (!narrow) std::memset(to, 0, count * SizeOf(call.dtype));
    const auto begin = std::partition_point(entries.begin(), entries.end(),
                                            [&](int64_t e) { return gradient(e) < which; });
    for (auto e = begin; e != entries.end() && gradient(*e) == which; ++e) {
      scatter.points = Slice(call, *e, 0, geometry.points);
      scatter.cotangent = CotangentOf(call, *e, 0);
      kernels.scatter(scatter);
    }
    if (narrow) kernels.store_sums({call.dtype, count, sums.data(), to});
  });
}

}  // namespace

void RunTaps(const Call& call, const ParallelFor& parallel_for) {
  const Kernels& kernels = BestKernels();
  if (call.dvolume != nullptr) {
    RunScatters(kernels, call, parallel_for);
  } else {
    RunGathers(kernels, call, parallel_for);
  }
}

}  // namespace jaxops::taps::cpu
