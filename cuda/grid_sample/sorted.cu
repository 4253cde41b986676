// These kernels compute the volume gradient with its sums in the order of the points, so that the
// result is the same bit for bit in every run.
//
// A point adds to the entries around its cell. A cell is named by the entry below it along every
// axis, which is one before the first entry for points beyond the lower edge. Points are sorted by
// cell, stably, and the terms of their sums are stored in that order: the position of a point in
// its cell, and the row of its cotangent. Each entry of the volume then gathers the contributions
// of the points of the cells around it, cell by cell and point by point. If many points share a
// cell, groups of the sorted points, and groups of those groups, are summed first, in parallel, and
// an entry adds up those sums.
#include <cstdint>
#include <cub/device/device_radix_sort.cuh>

#include "cuda/common/launch.h"
#include "cuda/grid_sample/families.h"
#include "cuda/grid_sample/samples.cuh"

namespace jaxops::grid_sample::cuda {
namespace {

using jaxops::cuda::Accumulator;
using jaxops::cuda::CeilDiv;
using jaxops::cuda::kWarp;
using jaxops::cuda::Launch;
using jaxops::cuda::LoadVector;
using jaxops::cuda::Narrow;
using jaxops::cuda::StoreVector;
using jaxops::cuda::Vector;
using jaxops::cuda::Widen;

// A group has this number of points, a group of the next level this number of groups, and so on;
// jaxops/grid_sample.py has the same constant.
constexpr int kGroupShift = 5;
constexpr uint32_t kGroup = 1 << kGroupShift;
static_assert(kGroup == kWarp);
constexpr int kLevels = 3;
constexpr uint32_t kSecond = kGroup * kGroup;  // points per group of the second level

// An entry around fewer points adds them one by one.
constexpr uint32_t kFew = 2 * kGroup;

// Neighbouring threads gather the 2^kTileShift entries of a tile.
constexpr int kTileShift = 7;

// The records, and then the rows, of this number of points are read together.
constexpr int kUnroll = 2;

constexpr int kGatherThreads = 256;

// This number of threads fills the largest devices.
constexpr int64_t kManyThreads = kManyWarps * kWarp;

struct Range {
  uint32_t begin;
  uint32_t end;
};

// Record holds the terms that the sums take from a point.
template <typename A>
struct alignas(16) Record {
  A fractions[kMaxAxes];  // weight of the upper entry along an axis; the lower entry has 1 minus it
  uint32_t row;           // of the cotangent
};

struct SortedParams {
  Params common;
  int64_t cell_keys;  // number of cells of all gradients, and the key of points that add nothing
  FastDivider64 by_gradient;  // elements per gradient
  FastDivider64 by_width;     // channels
  bool wide;                  // keys have 8 bytes instead of 4
  void* keys;
  uint32_t* ids;         // of points, counted through all batch entries
  Range* ranges;         // the sorted points of each cell
  void* records;         // of the sorted points
  void* weights;         // weights of each point's corners for a derivative; otherwise null
  void* sums[kLevels];   // of groups: (group, corner, channel)
  int shifts[kMaxAxes];  // of a tile
  int tile_shift;        // the sum of the shifts
  FastDivider tiles[kMaxAxes];
  FastDivider64 tiles_of_gradient;
  int lanes;  // lanes for the channels of a point in the sums of groups, a power of two
  int64_t gather_threads;

  __device__ __forceinline__ uint64_t KeyAt(int64_t i) const {
    return wide ? static_cast<const uint64_t*>(keys)[i] : static_cast<const uint32_t*>(keys)[i];
  }
};

template <typename A, int kAxes>
__global__ void __launch_bounds__(kThreads) MakeKeys(const __grid_constant__ SortedParams params) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= params.common.points) return;
  const Call& call = params.common.call;
  const Sought<A, kAxes> sought(params.common, index);
  Place<A> found[kAxes];
  LocateAll(sought.coordinates, call.geometry, found);
  bool adds = true;
  uint64_t key = params.by_gradient.Quotient(call.batch.Offset(sought.entry, Call::kGradient));
#pragma unroll
  for (int a = 0; a < kAxes; ++a) {
    const A p = sought.coordinates[a];
    adds = adds && p == p && (found[a].lower || found[a].upper);
    key = key * (static_cast<uint64_t>(call.geometry.sizes[a]) + 1) + (found[a].entry + 1);
  }
  if (!adds) key = params.cell_keys;
  if (params.wide) {
    static_cast<uint64_t*>(params.keys)[index] = key;
  } else {
    static_cast<uint32_t*>(params.keys)[index] = static_cast<uint32_t>(key);
  }
  params.ids[index] = static_cast<uint32_t>(index);
}

// MakeRecords finds the range of each cell among the sorted points, and stores the points' records.
// Cells without points keep an empty range.
template <typename A, int kAxes>
__global__ void __launch_bounds__(kThreads)
    MakeRecords(const __grid_constant__ SortedParams params) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= params.common.points) return;
  const uint64_t key = params.KeyAt(i);
  if (key == params.cell_keys) return;
  const Call& call = params.common.call;
  Stencil<A, kAxes> stencil(params.common, params.ids[i]);
  if (i == 0 || params.KeyAt(i - 1) != key) params.ranges[key].begin = static_cast<uint32_t>(i);
  if (i + 1 == params.common.points || params.KeyAt(i + 1) != key) {
    params.ranges[key].end = static_cast<uint32_t>(i + 1);
  }
  Record<A> record{};
#pragma unroll
  for (int a = 0; a < kAxes; ++a) record.fractions[a] = stencil.axes[a].upper;
  const int64_t row =
      params.by_width.Quotient(call.batch.Offset(stencil.entry, Call::kCotangent)) + stencil.point;
  record.row = static_cast<uint32_t>(row);
  static_cast<Record<A>*>(params.records)[i] = record;
  if (params.weights == nullptr) return;
  constexpr int kCorners = 1 << kAxes;
  A* weights = static_cast<A*>(params.weights) + i * kCorners;
  stencil.MakeWeights(call);
#pragma unroll
  for (int c = 0; c < kCorners; ++c) weights[c] = stencil.terms[c];
}

// WeightOf returns the weight of a corner; `i` is the index of the point among the sorted points.
template <int kAxes, typename A>
__device__ __forceinline__ A WeightOf(const SortedParams& params, const Record<A>& record,
                                      uint32_t i, int corner) {
  if (params.weights != nullptr) {
    return static_cast<const A*>(params.weights)[(int64_t{i} << kAxes) + corner];
  }
  A product = 1;
#pragma unroll
  for (int a = 0; a < kAxes; ++a) {
    const A upper = record.fractions[a];
    product *= corner & multilinear::BitOf<kAxes>(a) ? upper : 1 - upper;
  }
  return product;
}

// SumOfGroup adds up kGroup sums, `pitch` elements apart.
template <typename A>
__device__ __forceinline__ A SumOfGroup(const A* sums, int64_t pitch) {
  A sum = 0;
#pragma unroll 8
  for (int p = 0; p < static_cast<int>(kGroup); ++p) sum += sums[p * pitch];
  return sum;
}

// SumGroups sums those groups of the first two levels whose points are all of one cell. A block has
// a group of the second level, and each warp some groups of the first level.
template <typename T, int kAxes>
__global__ void __launch_bounds__(kThreads) SumGroups(const __grid_constant__ SortedParams params) {
  using A = Accumulator<T>;
  constexpr int kCorners = 1 << kAxes;
  constexpr int kGroups = kSecond / kThreads;  // per warp
  const int64_t width = params.common.call.geometry.width;
  const int lanes = params.lanes;
  const int lane = threadIdx.x % kWarp;
  const int64_t first = int64_t{blockIdx.x} * kSecond;
  const int64_t of_warp = first + threadIdx.x / kWarp * (kGroups * kGroup);
  A* all_sums = static_cast<A*>(params.sums[0]);
  const auto is_group = [&](int64_t begin, int64_t count) {
    if (begin + count > params.common.points) return false;
    const uint64_t key = params.KeyAt(begin);
    return key != params.cell_keys && params.KeyAt(begin + count - 1) == key;
  };
  unsigned groups = 0;
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    groups |= is_group(of_warp + j * kGroup, kGroup) ? 1u << j : 0;
  }
#pragma unroll 1
  for (int j = 0; j < kGroups; ++j) {
    if (!(groups >> j & 1)) continue;
    const int64_t begin = of_warp + j * kGroup;
    const int64_t i = begin + lane;
    const Record<A> record = static_cast<const Record<A>*>(params.records)[i];
    A weights[kCorners];
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
      weights[c] = WeightOf<kAxes>(params, record, static_cast<uint32_t>(i), c);
    }
    const T* cotangents = static_cast<const T*>(params.common.call.cotangent);
    A* to = all_sums + begin / kGroup * kCorners * width;
    for (int64_t from = 0; from < width; from += lanes) {
      const int64_t f = from + (lane & (lanes - 1));
      A sums[kCorners] = {};
      // Lanes of the same channels have different points.
#pragma unroll 4
      for (int p = 0; p < lanes; ++p) {
        const int source = (lane & -lanes) + p;
        const int64_t row = __shfl_sync(~0u, record.row, source);
        const A g = f < width ? Widen(cotangents[row * width + f]) : A(0);
#pragma unroll
        for (int c = 0; c < kCorners; ++c) sums[c] += __shfl_sync(~0u, weights[c], source) * g;
      }
      for (int distance = lanes; distance < kWarp; distance *= 2) {
#pragma unroll
        for (int c = 0; c < kCorners; ++c) sums[c] += __shfl_xor_sync(~0u, sums[c], distance);
      }
      if (lane < lanes && f < width) {
#pragma unroll
        for (int c = 0; c < kCorners; ++c) to[c * width + f] = sums[c];
      }
    }
  }
  if (!is_group(first, kSecond)) return;
  __syncthreads();
  const A* from = all_sums + first / kGroup * kCorners * width;
  A* to = static_cast<A*>(params.sums[1]) + first / kSecond * kCorners * width;
  for (int64_t i = threadIdx.x; i < kCorners * width; i += kThreads) {
    to[i] = SumOfGroup(from + i, kCorners * width);
  }
}

// SumThirdLevel sums the groups of the third level from the sums of the second level.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    SumThirdLevel(const __grid_constant__ SortedParams params) {
  const int64_t first = int64_t{blockIdx.x} * kGroup * kSecond;
  const uint64_t key = params.KeyAt(first);
  if (key == params.cell_keys || params.KeyAt(first + kGroup * kSecond - 1) != key) return;
  const int64_t size = params.common.call.geometry.width << params.common.call.geometry.axes;
  const A* from = static_cast<const A*>(params.sums[1]) + first / kSecond * size;
  A* to = static_cast<A*>(params.sums[2]) + blockIdx.x * size;
  for (int64_t i = threadIdx.x; i < size; i += kThreads) to[i] = SumOfGroup(from + i, size);
}

// Gatherer sums the contributions to kCount channels of an entry, from channel `f` on.
template <typename T, int kCount, int kAxes>
class Gatherer {
  using A = Accumulator<T>;
  static constexpr int kCorners = 1 << kAxes;
  static constexpr int kPairs = kCorners / 2;  // pairs of neighbouring cells along the last axis
  static constexpr int kLoad =
      kCount * sizeof(T) > kVectorBytes ? kVectorBytes / sizeof(T) : kCount;

 public:
  __device__ __forceinline__ Gatherer(const SortedParams& params, int64_t f)
      : params_(params),
        f_(f),
        cotangents_(static_cast<const T*>(params.common.call.cotangent) + f) {}

  // AddAll adds the points of the cells around an entry. The entry is the upper entry along all
  // axes of the cell `low`.
  __device__ __forceinline__ void AddAll(int64_t low, const int64_t (&strides)[kAxes]) {
    // The nearest entry is the lower entry along all axes.
    const bool nearest = params_.common.call.geometry.method == Method::kNearest;
    Range upper[kPairs], lower[kPairs];
#pragma unroll
    for (int q = 0; q < kPairs; ++q) {
      const Range* range = params_.ranges + low;
#pragma unroll
      for (int a = 0; a < kAxes - 1; ++a) {
        if (!(2 * q & multilinear::BitOf<kAxes>(a))) range += strides[a];
      }
      upper[q] = nearest ? Range{} : range[0];
      lower[q] = nearest && q != 0 ? Range{} : range[1];
    }
    // The points of a pair of cells are contiguous.
    uint32_t begins[kPairs], middles[kPairs], ends[kPairs];  // ends count the points of all pairs
    uint32_t total = 0;
#pragma unroll
    for (int q = 0; q < kPairs; ++q) {
      const uint32_t of_upper = upper[q].end - upper[q].begin;
      const uint32_t begin = of_upper == 0 ? lower[q].begin : upper[q].begin;
      middles[q] = begin + of_upper;
      begins[q] = begin - total;
      total += of_upper + (lower[q].end - lower[q].begin);
      ends[q] = total;
    }
    if (total < kFew) {
      uint32_t k = 0;
      const auto find = [&](uint32_t k, int* corner) {
        uint32_t i = begins[0], middle = middles[0];
        int pair = 0;
#pragma unroll
        for (int q = 1; q < kPairs; ++q) {
          if (k >= ends[q - 1]) {
            i = begins[q];
            middle = middles[q];
            pair = q;
          }
        }
        i += k;
        *corner = 2 * pair + (i < middle ? 1 : 0);
        return i;
      };
#pragma unroll 1
      for (; k + kUnroll <= total; k += kUnroll) {
        uint32_t places[kUnroll];
        int corners[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) places[u] = find(k + u, &corners[u]);
        Add<kUnroll>(places, corners);
      }
#pragma unroll 1
      for (; k < total; ++k) {
        uint32_t places[1];
        int corners[1];
        places[0] = find(k, &corners[0]);
        Add<1>(places, corners);
      }
      return;
    }
#pragma unroll 1
    for (int c = 0; c < (nearest ? 1 : kCorners); ++c) {
      int64_t cell = low;
#pragma unroll
      for (int a = 0; a < kAxes; ++a) {
        if (!(c & multilinear::BitOf<kAxes>(a))) cell += strides[a];
      }
      AddCell(params_.ranges[cell], c);
    }
  }

  __device__ __forceinline__ void StoreAt(int64_t row) const {
    T* to = static_cast<T*>(params_.common.call.dvolume) +
            row * params_.common.call.geometry.width + f_;
#pragma unroll
    for (int e = 0; e < kCount; e += kLoad) {
      Vector<T, kLoad> out;
#pragma unroll
      for (int i = 0; i < kLoad; ++i) out.values[i] = Narrow<T>(sums_[e + i]);
      StoreVector(to + e, out);
    }
  }

 private:
  template <int kPoints>
  __device__ __forceinline__ void Add(const uint32_t (&places)[kPoints],
                                      const int (&corners)[kPoints]) {
    Record<A> records[kPoints];
#pragma unroll
    for (int u = 0; u < kPoints; ++u) {
      records[u] = static_cast<const Record<A>*>(params_.records)[places[u]];
    }
    Vector<T, kLoad> rows[kPoints][kCount / kLoad];
#pragma unroll
    for (int u = 0; u < kPoints; ++u) {
      const T* row = cotangents_ + records[u].row * params_.common.call.geometry.width;
#pragma unroll
      for (int e = 0; e < kCount / kLoad; ++e) rows[u][e] = LoadVector<kLoad>(row + e * kLoad);
    }
#pragma unroll
    for (int u = 0; u < kPoints; ++u) {
      const A weight = WeightOf<kAxes>(params_, records[u], places[u], corners[u]);
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        sums_[e] += weight * Widen(rows[u][e / kLoad].values[e % kLoad]);
      }
    }
  }

  // AddGroups adds `count` points, or groups of a level, from point `i` on.
  __device__ __forceinline__ void AddGroups(int level, uint32_t i, uint32_t count, int corner) {
    if (level == 0) {
#pragma unroll 1
      for (; count >= kUnroll; count -= kUnroll, i += kUnroll) {
        uint32_t places[kUnroll];
        int corners[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          places[u] = i + u;
          corners[u] = corner;
        }
        Add<kUnroll>(places, corners);
      }
#pragma unroll 1
      for (; count > 0; --count, ++i) {
        const uint32_t places[1] = {i};
        const int corners[1] = {corner};
        Add<1>(places, corners);
      }
      return;
    }
    const int64_t width = params_.common.call.geometry.width;
    const A* sums = static_cast<const A*>(params_.sums[level - 1]) +
                    ((int64_t{i >> kGroupShift * level} << kAxes) + corner) * width + f_;
#pragma unroll 4
    for (; count > 0; --count, sums += width << kAxes) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) sums_[e] += sums[e];
    }
  }

  // AddCell adds the points of a cell by the largest groups available: points up to the first
  // group, groups up to the first group of the next level, and so on, and then down again.
  __device__ __forceinline__ void AddCell(const Range range, int corner) {
    int64_t i = range.begin;
    const int64_t end = range.end;
    const auto round_up = [](int64_t n, int level) {
      const int64_t size = int64_t{1} << kGroupShift * level;
      return (n + size - 1) & -size;
    };
    int top = 0;
    while (top < kLevels && round_up(i, top + 1) + (int64_t{1} << kGroupShift * (top + 1)) <= end)
      ++top;
#pragma unroll 1
    for (int step = 0; step <= 2 * top; ++step) {
      const int level = step <= top ? step : 2 * top - step;
      const int64_t until = step < top ? round_up(i, level + 1) : end;
      const int64_t count = (until - i) >> kGroupShift * level;
      AddGroups(level, static_cast<uint32_t>(i), static_cast<uint32_t>(count), corner);
      i += count << kGroupShift * level;
    }
  }

  const SortedParams& params_;
  const int64_t f_;
  const T* cotangents_;
  A sums_[kCount] = {};
};

template <typename T, int kCount, int kAxes>
__global__ void __launch_bounds__(kGatherThreads)
    GatherSums(const __grid_constant__ SortedParams params) {
  const Call& call = params.common.call;
  uint64_t rest = int64_t{blockIdx.x} * kGatherThreads + threadIdx.x;
  if (rest >= params.gather_threads) return;
  const int64_t f = static_cast<int64_t>(params.common.by_row.DivMod(rest)) * kCount;
  uint32_t within = static_cast<uint32_t>(rest) & ((1u << params.tile_shift) - 1);
  rest >>= params.tile_shift;
  uint32_t tile = static_cast<uint32_t>(rest);
  int64_t gradient = 0;
  if (call.gradients > 1) {
    tile = static_cast<uint32_t>(params.tiles_of_gradient.DivMod(rest));
    gradient = rest;
  }
  int32_t places[kAxes];
#pragma unroll
  for (int a = kAxes - 1; a >= 0; --a) {
    const int shift = params.shifts[a];
    const int64_t place =
        (int64_t{params.tiles[a].DivMod(tile)} << shift) + (within & ((1u << shift) - 1));
    within >>= shift;
    if (place >= call.geometry.sizes[a]) return;
    places[a] = static_cast<int32_t>(place);
  }
  int64_t row = gradient, low = gradient;
  int64_t strides[kAxes];
#pragma unroll
  for (int a = 0; a < kAxes; ++a) {
    row = row * call.geometry.sizes[a] + places[a];
    low = low * (int64_t{call.geometry.sizes[a]} + 1) + places[a];
  }
  int64_t stride = 1;
#pragma unroll
  for (int a = kAxes - 1; a >= 0; --a) {
    strides[a] = stride;
    stride *= int64_t{call.geometry.sizes[a]} + 1;
  }
  Gatherer<T, kCount, kAxes> sums(params, f);
  sums.AddAll(low, strides);
  sums.StoreAt(row);
}

// Workspace hands out aligned parts of the work space, one after the other.
class Workspace {
 public:
  Workspace(void* memory, int64_t bytes)
      : next_(static_cast<unsigned char*>(memory)), end_(next_ + bytes) {}

  void* Take(int64_t bytes) {
    void* taken = next_;
    next_ += CeilDiv(bytes, kAlignment) * kAlignment;
    return taken;
  }
  bool holds() const { return next_ <= end_; }

 private:
  static constexpr int64_t kAlignment = 256;
  unsigned char* next_;
  unsigned char* end_;
};

// SortPoints computes the keys and sorts the points by key.
template <typename Key>
cudaError_t SortPoints(cudaStream_t stream, SortedParams& params, void (*make_keys)(SortedParams),
                       Workspace& space, void* (&buffers)[4]) {
  cub::DoubleBuffer<Key> keys(static_cast<Key*>(buffers[0]), static_cast<Key*>(buffers[1]));
  cub::DoubleBuffer<uint32_t> ids(static_cast<uint32_t*>(buffers[2]),
                                  static_cast<uint32_t*>(buffers[3]));
  const auto points = static_cast<uint32_t>(params.common.points);
  int bits = 1;
  while (bits < 64 && params.cell_keys >> bits) ++bits;
  size_t bytes = 0;
  JAXOPS_RETURN_IF_ERROR(
      cub::DeviceRadixSort::SortPairs(nullptr, bytes, keys, ids, points, 0, bits, stream));
  void* sort_space = space.Take(bytes);
  if (!space.holds()) return cudaErrorInvalidValue;
  params.keys = keys.Current();
  params.ids = ids.Current();
  JAXOPS_RETURN_IF_ERROR(Launch(make_keys, CeilDiv(points, kThreads), kThreads, 0, stream, params));
  JAXOPS_RETURN_IF_ERROR(
      cub::DeviceRadixSort::SortPairs(sort_space, bytes, keys, ids, points, 0, bits, stream));
  params.keys = keys.Current();
  params.ids = ids.Current();
  return cudaSuccess;
}

// TilePlan cuts a gradient into tiles that are as close to cubes as the volume allows.
struct TilePlan {
  int shifts[kMaxAxes] = {};
  int tile_shift = 0;  // the sum of the shifts
  int64_t along[kMaxAxes] = {};
  int64_t tiles = 1;

  explicit TilePlan(const Geometry& geometry) {
    for (; tile_shift < kTileShift; ++tile_shift) {
      int best = -1;
      for (int a = geometry.axes - 1; a >= 0; --a) {
        const bool has_room = geometry.sizes[a] > 1 << shifts[a];
        if (has_room && (best < 0 || shifts[a] < shifts[best])) best = a;
      }
      if (best < 0) break;
      ++shifts[best];
    }
    for (int a = 0; a < geometry.axes; ++a) {
      along[a] = (int64_t{geometry.sizes[a]} + (1 << shifts[a]) - 1) >> shifts[a];
      tiles *= along[a];
    }
  }
};

template <typename T, int kAxes>
cudaError_t LaunchAxes(cudaStream_t stream, const Call& call) {
  using A = Accumulator<T>;
  constexpr int kCorners = 1 << kAxes;
  constexpr int kVector = kVectorBytes / sizeof(T);
  // Threads have more channels of elements of at least 4 bytes, so that fewer threads repeat the
  // work of an entry.
  constexpr int kWide = sizeof(T) < 4 ? kVector : 2 * kVector;
  const Geometry& geometry = call.geometry;
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  const bool vectors =
      geometry.width % kVector == 0 && aligned(call.cotangent) && aligned(call.dvolume);
  // That is faster only while there are threads for the whole device.
  const bool is_wide = vectors && geometry.width % kWide == 0 &&
                       call.gradients * geometry.grid() * (geometry.width / kWide) >= kManyThreads;
  const int count = is_wide ? kWide : vectors ? kVector : 1;
  SortedParams params{Params(call, geometry.width / count)};
  const int64_t points = params.common.points;
  params.by_gradient = FastDivider64(geometry.grid() * geometry.width);
  params.by_width = FastDivider64(geometry.width);
  params.cell_keys = call.gradients;
  params.lanes = 1;
  while (params.lanes < kWarp && params.lanes < geometry.width) params.lanes *= 2;
  const TilePlan plan(geometry);
  params.tile_shift = plan.tile_shift;
  for (int a = 0; a < kAxes; ++a) {
    params.cell_keys *= int64_t{geometry.sizes[a]} + 1;
    params.shifts[a] = plan.shifts[a];
    params.tiles[a] = FastDivider(plan.along[a]);
  }
  params.tiles_of_gradient = FastDivider64(plan.tiles);
  params.gather_threads =
      (call.gradients * plan.tiles << params.tile_shift) * params.common.by_row.divisor();

  Workspace space(call.scratch, call.scratch_bytes);
  params.wide = params.cell_keys > UINT32_MAX;
  const int64_t key_bytes = points * (params.wide ? sizeof(uint64_t) : sizeof(uint32_t));
  const int64_t id_bytes = points * sizeof(uint32_t);
  void* buffers[] = {space.Take(key_bytes), space.Take(key_bytes), space.Take(id_bytes),
                     space.Take(id_bytes)};
  params.ranges = static_cast<Range*>(space.Take(params.cell_keys * sizeof(Range)));
  params.records = space.Take(points * sizeof(Record<A>));
  if (call.order > 0) params.weights = space.Take(points * kCorners * sizeof(A));
  int64_t groups = points;
  for (void*& sums : params.sums) {
    groups /= kGroup;
    sums = space.Take(groups * kCorners * geometry.width * sizeof(A));
  }
  if (!space.holds()) return cudaErrorInvalidValue;
  JAXOPS_RETURN_IF_ERROR(
      cudaMemsetAsync(params.ranges, 0, params.cell_keys * sizeof(Range), stream));
  if (points > 0) {
    const auto sort = params.wide ? SortPoints<uint64_t> : SortPoints<uint32_t>;
    JAXOPS_RETURN_IF_ERROR(sort(stream, params, MakeKeys<A, kAxes>, space, buffers));
    JAXOPS_RETURN_IF_ERROR(
        Launch(MakeRecords<A, kAxes>, CeilDiv(points, kThreads), kThreads, 0, stream, params));
    if (points >= kGroup) {
      JAXOPS_RETURN_IF_ERROR(
          Launch(SumGroups<T, kAxes>, CeilDiv(points, kSecond), kThreads, 0, stream, params));
    }
    if (groups > 0) {
      JAXOPS_RETURN_IF_ERROR(Launch(SumThirdLevel<A>, groups, kThreads, 0, stream, params));
    }
  }
  const auto gather = is_wide   ? GatherSums<T, kWide, kAxes>
                      : vectors ? GatherSums<T, kVector, kAxes>
                                : GatherSums<T, 1, kAxes>;
  return Launch(gather, CeilDiv(params.gather_threads, kGatherThreads), kGatherThreads, 0, stream,
                params);
}

}  // namespace

bool CanRunSorted(const Job& job, const Device&) {
  const Call& call = job.call;
  return call.deterministic && call.batch.size() * call.geometry.points <= UINT32_MAX &&
         TilePlan(call.geometry).tiles <= INT32_MAX;
}

cudaError_t LaunchSorted(cudaStream_t stream, const Job& job, const Device&) {
  const Call& call = job.call;
  return jaxops::cuda::DispatchFloat(call.dtype, [&]<typename T>(T) {
    return call.geometry.axes == 3 ? LaunchAxes<T, 3>(stream, call)
                                   : LaunchAxes<T, 2>(stream, call);
  });
}

}  // namespace jaxops::grid_sample::cuda
