#include "cpu/grid_sample.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <span>
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

// The cost of a task, in channels of all the entries around its points: such a task takes much
// longer than handing it to a thread.
constexpr int64_t kTask = int64_t{1} << 18;

// The cost of a point in addition to its entries, in channels.
constexpr int64_t kPointCost = 20;

// The cost of a slab of a volume, in channels: adding to such a slab takes much longer than sorting
// the points by slabs, which for few channels costs more than adding them.
constexpr int64_t kSlabCost = int64_t{1} << 25;

// Bytes of a slab's sums, which a core's own caches hold, and least bytes of a volume's sums for
// such slabs, which are used only if points share entries.
constexpr int64_t kSlabBytes = int64_t{1} << 20;
constexpr int64_t kLargeBytes = int64_t{1} << 23;

// Parts of the points, at most, that add to sums of their own where a volume is small: the gradient
// of 4096 entries by 100 000 points along one axis took 250 µs without parts, and takes 169.
constexpr int64_t kMaxParts = 8;

// The cost of clearing such a sum and adding it up, in channels.
constexpr int64_t kPartCost = 4;

JAXOPS_DEFINE_BEST_KERNELS();

int64_t Cost(const Geometry& geometry) { return (geometry.width << geometry.axes) + kPointCost; }

// Points [begin, end) of a batch entry.
Points Slice(const Call& call, int64_t entry, int64_t begin, int64_t end) {
  const auto at = [&](const void* base, int operand, int64_t size, DType dtype) {
    return At(base, call.batch.Offset(entry, operand) + begin * size, dtype);
  };
  const Geometry& geometry = call.geometry;
  const int64_t stride = geometry.points_minor ? 1 : geometry.axes;
  Points points = {};
  points.geometry = geometry;
  points.dtype = call.dtype;
  points.point_dtype = call.point_dtype;
  points.order = call.order;
  points.count = end - begin;
  points.points = at(call.points, Call::kPoints, stride, call.point_dtype);
  points.cotangent = at(call.cotangent, Call::kCotangent, geometry.width, call.dtype);
  for (int d = 0; d < call.order; ++d) {
    points.directions[d] = at(call.directions[d], Call::kDirections + d, stride, call.point_dtype);
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
    const int64_t coordinates = entry * geometry.points * geometry.axes +
                                begin * (geometry.points_minor ? 1 : geometry.axes);
    gather.dpoints = At(call.dpoints, coordinates, call.point_dtype);
    kernels.gather(gather);
  });
}

// Adds up the sums of parts, `size` each, in those of the first.
template <typename A>
void AddParts(A* sums, int64_t size, int64_t parts) {
  for (int64_t part = 1; part < parts; ++part) {
    const A* terms = sums + part * size;
    for (int64_t i = 0; i < size; ++i) sums[i] += terms[i];
  }
}

// Adds to one gradient from parts of its points at a time, which have sums of their own. `entries`
// are the batch entries that add to it.
void ScatterByParts(const Kernels& kernels, const Call& call, const ParallelFor& parallel_for,
                    std::span<const int64_t> entries, int64_t parts, int64_t size, void* to) {
  const Geometry& geometry = call.geometry;
  const bool is_wide = call.dtype == DType::kF64;
  const int64_t bytes = size * (is_wide ? sizeof(double) : sizeof(float));
  std::vector<std::byte> sums(parts * bytes);
  RunTasks(parts, parallel_for, [&](int64_t part) {
    Scatter scatter = {};
    scatter.begin = 0;
    scatter.end = geometry.sizes[0];
    scatter.sums = sums.data() + part * bytes;
    for (const int64_t entry : entries) {
      scatter.points =
          Slice(call, entry, part * geometry.points / parts, (part + 1) * geometry.points / parts);
      if (scatter.points.count > 0) kernels.scatter(scatter);
    }
  });
  if (is_wide) {
    AddParts(reinterpret_cast<double*>(sums.data()), size, parts);
  } else {
    AddParts(reinterpret_cast<float*>(sums.data()), size, parts);
  }
  kernels.store_sums({call.dtype, size, sums.data(), to});
}

void RunScatters(const Kernels& kernels, const Call& call, const ParallelFor& parallel_for) {
  const Geometry& geometry = call.geometry;
  const int64_t size = geometry.grid() * geometry.width;  // of one gradient
  if (call.gradients == 0 || size == 0) return;
  // The batch entries are sorted by the gradients that they add to.
  std::vector<int64_t> entries(call.batch.size());
  std::iota(entries.begin(), entries.end(), 0);
  const auto gradient = [&](int64_t entry) {
    return call.batch.Offset(entry, Call::kGradient) / size;
  };
  std::stable_sort(entries.begin(), entries.end(),
                   [&](int64_t a, int64_t b) { return gradient(a) < gradient(b); });
  const int64_t points = static_cast<int64_t>(entries.size()) / call.gradients * geometry.points;
  const int64_t length = geometry.sizes[0];
  const int64_t sum_bytes = size * (call.dtype == DType::kF64 ? 8 : 4);
  const bool is_large = sum_bytes >= kLargeBytes && (points << geometry.axes) >= geometry.grid();
  const int64_t wanted = std::clamp<int64_t>(
      std::max((points * Cost(geometry) + size) / kSlabCost, is_large ? sum_bytes / kSlabBytes : 0),
      1, std::min<int64_t>(kMaxSlabs, length));
  int shift = 0;
  while (CeilDiv(length, int64_t{1} << shift) > wanted) ++shift;
  const int64_t thickness = int64_t{1} << shift;
  const int64_t slabs = CeilDiv(length, thickness);

  // Clearing and adding up the sums of a part costs less than the points that it has.
  const int64_t parts = std::min(kMaxParts, points * Cost(geometry) / (kPartCost * size + kTask));
  if (slabs == 1 && call.gradients == 1 && parts > 1) {
    ScatterByParts(kernels, call, parallel_for, entries, parts, size, call.dvolume);
    return;
  }

  // Points are sorted by slabs once, in chunks.
  const int64_t per_entry = slabs == 1 ? 1 : CeilDiv(geometry.points, kMaxChunk);
  const int64_t per_chunk = slabs == 1 ? geometry.points : std::min(geometry.points, kMaxChunk);
  const auto points_of = [&](int64_t chunk) {
    const int64_t begin = chunk % per_entry * per_chunk;
    return Slice(call, entries[chunk / per_entry], begin,
                 std::min(geometry.points, begin + per_chunk));
  };
  const int64_t chunks = slabs == 1 ? 0 : static_cast<int64_t>(entries.size()) * per_entry;
  const std::unique_ptr<uint16_t[]> lists(new uint16_t[chunks * 2 * per_chunk]);
  const std::unique_ptr<uint32_t[]> starts(new uint32_t[chunks * (slabs + 1)]);
  const auto bins_of = [&](int64_t chunk) {
    Bins bins = {};
    bins.points = points_of(chunk);
    bins.slabs = static_cast<int>(slabs);
    bins.shift = shift;
    bins.lists = lists.get() + chunk * 2 * per_chunk;
    bins.starts = starts.get() + chunk * (slabs + 1);
    return bins;
  };
  RunTasks(chunks, parallel_for, [&](int64_t chunk) { kernels.bins(bins_of(chunk)); });

  const int64_t slice = size / length;
  const bool narrow = SizeOf(call.dtype) == 2;
  RunTasks(call.gradients * slabs, parallel_for, [&](int64_t i) {
    const int64_t which = i / slabs;
    const int64_t slab = i % slabs;
    Scatter scatter = {};
    scatter.begin = static_cast<int32_t>(slab * thickness);
    scatter.end = static_cast<int32_t>(std::min(length, (slab + 1) * thickness));
    const int64_t count = (scatter.end - scatter.begin) * slice;
    void* to = At(call.dvolume, which * size + scatter.begin * slice, call.dtype);
    std::vector<float> sums(narrow ? count : 0);
    scatter.sums = narrow ? sums.data() : to;
    if (!narrow) std::memset(to, 0, count * SizeOf(call.dtype));
    const auto begin = std::partition_point(entries.begin(), entries.end(),
                                            [&](int64_t e) { return gradient(e) < which; });
    for (auto e = begin; e != entries.end() && gradient(*e) == which; ++e) {
      for (int64_t c = 0; c < per_entry; ++c) {
        const int64_t chunk = (e - entries.begin()) * per_entry + c;
        scatter.points = points_of(chunk);
        if (slabs > 1) {
          const Bins bins = bins_of(chunk);
          scatter.points.chosen = bins.lists + bins.starts[slab];
          scatter.points.count = bins.starts[slab + 1] - bins.starts[slab];
        }
        if (scatter.points.count > 0) kernels.scatter(scatter);
      }
    }
    if (narrow) kernels.store_sums({call.dtype, count, sums.data(), to});
  });
}

}  // namespace

void RunSample(const Call& call, const ParallelFor& parallel_for) {
  const Kernels& kernels = BestKernels();
  if (call.out != nullptr || call.dpoints != nullptr) RunGathers(kernels, call, parallel_for);
  if (call.dvolume != nullptr) RunScatters(kernels, call, parallel_for);
}

}  // namespace jaxops::grid_sample::cpu
