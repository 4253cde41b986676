// The work space of grid_sample on CUDA devices. Its size depends on sizes, dtypes and options
// alone.
#ifndef JAXOPS_COMMON_GRID_SAMPLE_SPACE_H_
#define JAXOPS_COMMON_GRID_SAMPLE_SPACE_H_

#include <algorithm>
#include <cstdint>

#include "common/grid_sample.h"

namespace jaxops::grid_sample {

// Points that one block sorts roughly, and the bytes that a sort writes: tiles of 32 points, and 16
// bytes a point.
inline constexpr int64_t kRoughBlockPoints = 4096;
inline constexpr int64_t kRoughBlockBytes = (kRoughBlockPoints + 32 * 32) * 16;
// The entries of a brick along each axis of images and of volumes, the points that a block sorts by
// groups of bricks, the groups at most, and the points of a brick that one warp sums.
inline constexpr int kBrickSizes[2][kMaxAxes] = {{8, 16, 1}, {4, 4, 8}};
inline constexpr int64_t kBrickBlockPoints = 8192;
inline constexpr int64_t kMaxBrickGroups = 512;
inline constexpr int64_t kBrickShare = 1024;
// Sorted points of one cell that are summed together, and the number of levels of such groups.
inline constexpr int64_t kSortedGroup = 32;
inline constexpr int kSortedLevels = 3;

// Returns the bytes for an order of the points, or 0 if an order does not pay: points must meet
// entries repeatedly, and the volume must exceed the caches. For the volume's gradient (`sums`) the
// order may be by bricks, each of which has 2^axes bins.
inline int64_t OrderBytes(const Call& call, int64_t entry_bytes, bool sums) {
  constexpr int64_t kMinVolumeBytes = int64_t{1} << 25;
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const Geometry& g = call.geometry;
  const int64_t met = g.points << g.axes;
  if (call.batch.size() != 1 || met < 2 * g.grid() || g.grid() * entry_bytes < kMinVolumeBytes) {
    return 0;
  }
  const int64_t rough = ceil_div(g.points, kRoughBlockPoints) * kRoughBlockBytes;
  if (!sums) return rough;
  int64_t bins = int64_t{1} << g.axes;
  for (int a = 0; a < g.axes; ++a) bins *= ceil_div(g.sizes[a], kBrickSizes[g.axes - 2][a]);
  const int64_t numbers = 3 * g.points + 2 * bins + 2 * (met / kBrickShare) +
                          ceil_div(g.points, kBrickBlockPoints) * (kMaxBrickGroups + 1) + 2;
  return std::max(rough, 4 * numbers);
}

// Returns the bytes of the volume's gradient in a fixed order: two copies of a key and an index for
// each point; the work space of the sort itself; the first and the last point of every cell; a
// record of each point, with its weights for a derivative; and the sums of groups of points.
inline int64_t SortBytes(const Call& call, int64_t entry_bytes, int64_t item) {
  const Geometry& g = call.geometry;
  const int64_t count = call.batch.size() * g.points;
  const int64_t corners = int64_t{1} << g.axes;
  int64_t cells = call.gradients;
  for (int a = 0; a < g.axes; ++a) cells *= int64_t{g.sizes[a]} + 1;
  const int64_t key_bytes = cells > UINT32_MAX ? 8 : 4;
  const int64_t point_bytes =
      2 * (key_bytes + 4) + 4 * item + (call.order > 0 ? corners * item : 0);
  int64_t groups = 0, of_level = count;
  for (int level = 0; level < kSortedLevels; ++level) groups += of_level /= kSortedGroup;
  const int64_t sort = count + (int64_t{1} << 22);
  return count * point_bytes + cells * 8 + groups * corners * entry_bytes + sort;
}

// The sums of the volume's gradient, in f32 for 16-bit types, are followed by the order.
inline constexpr int64_t kOrderAlignment = 16;

inline int64_t WorkSpaceBytes(const Call& call) {
  const Geometry& g = call.geometry;
  if (call.dvolume == nullptr) {
    // For volumes that are only read, an order pays if entries are long and fill whole sectors of
    // memory.
    constexpr int64_t kMinReadBytes = int64_t{3} << 24, kMinEntryBytes = 64, kSectorBytes = 32;
    const int64_t entry_bytes = g.width * SizeOf(call.dtype);
    const bool pays = call.out != nullptr && entry_bytes >= kMinEntryBytes &&
                      entry_bytes % kSectorBytes == 0 && g.grid() * entry_bytes >= kMinReadBytes;
    return pays ? OrderBytes(call, entry_bytes, false) : 0;
  }
  const int64_t item = std::max<int64_t>(SizeOf(call.dtype), 4);
  const int64_t entry_bytes = g.width * item;
  if (call.deterministic) return SortBytes(call, entry_bytes, item);
  const int64_t sums = item == SizeOf(call.dtype) ? 0 : call.gradients * g.grid() * entry_bytes;
  const int64_t order = OrderBytes(call, entry_bytes, true);
  return order == 0 ? sums
                    : (sums + kOrderAlignment - 1) / kOrderAlignment * kOrderAlignment + order;
}

}  // namespace jaxops::grid_sample

#endif  // JAXOPS_COMMON_GRID_SAMPLE_SPACE_H_
