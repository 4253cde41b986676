// The gradient by a volume, its sums in the order of the points, so that it is the same bit for bit
// in every run.
//
// A point adds to the entries around its cell, the cell being named by the entry below it along
// every axis, which is one before the first for points beyond the lower edge. Points are sorted by
// cell, stably. Then each entry of the volume gathers what the points of the cells around it add,
// cell by cell and point by point. Where many points share a cell, whole chunks of the sorted
// points are summed first, all chunks at once, and an entry adds up those sums.
#include <algorithm>
#include <cstdint>
#include <cub/device/device_radix_sort.cuh>
#include <type_traits>

#include "cuda/grid_sample.cuh"
#include "cuda/grid_sample.h"
#include "cuda/launch.h"

namespace jaxops::grid_sample::cuda {
namespace {

using jaxops::cuda::Accumulator;
using jaxops::cuda::CeilDiv;
using jaxops::cuda::Launch;
using jaxops::cuda::LoadPack;
using jaxops::cuda::Narrow;
using jaxops::cuda::Pack;
using jaxops::cuda::StorePack;
using jaxops::cuda::Widen;

// Points of a chunk; jaxops/grid_sample.py knows it too.
constexpr int kChunk = 256;
static_assert(kChunk == kThreads);

struct Range {
  uint32_t begin;
  uint32_t end;
};

struct SortedParams {
  Params common;
  int64_t cells;      // of a gradient
  int64_t cell_keys;  // of all; the key of points that add nothing
  int64_t gradient;   // elements of one
  uint64_t* keys;
  uint32_t* ids;  // of points, counted through all batch entries
  Range* ranges;  // of a cell's points among the sorted
  void* chunks;   // sums: (chunk, corner, channel)
  FastDivider64 sizes[kMaxAxes];
  FastDivider64 grid;
  int64_t gather_threads;
};

// The key of every point.
template <typename A, int kAxes>
__global__ void __launch_bounds__(kThreads) MakeKeys(const __grid_constant__ SortedParams params) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= params.common.points) return;
  const Call& call = params.common.call;
  const Stencil<A, kAxes> stencil(params.common, index);
  constexpr unsigned kAll = (1u << kAxes) - 1;
  uint64_t key = params.cell_keys;
  if (!stencil.lost && (stencil.lower | stencil.upper) == kAll) {
    key = call.batch.Offset(stencil.entry, Call::kGradient) / params.gradient;
#pragma unroll
    for (int a = 0; a < kAxes; ++a) {
      key = key * (static_cast<uint64_t>(call.geometry.sizes[a]) + 1) + (stencil.places[a] + 1);
    }
  }
  params.keys[index] = key;
  params.ids[index] = static_cast<uint32_t>(index);
}

// Where the points of each cell are among the sorted ones. Cells without keep a range of nothing.
__global__ void __launch_bounds__(kThreads)
    FindRanges(const __grid_constant__ SortedParams params) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= params.common.points) return;
  const uint64_t key = params.keys[i];
  if (key == params.cell_keys) return;
  if (i == 0 || params.keys[i - 1] != key) params.ranges[key].begin = static_cast<uint32_t>(i);
  if (i + 1 == params.common.points || params.keys[i + 1] != key) {
    params.ranges[key].end = static_cast<uint32_t>(i + 1);
  }
}

template <typename T>
__device__ __forceinline__ const T* CotangentOf(const Params& params, int64_t entry,
                                                int64_t point) {
  return static_cast<const T*>(params.call.cotangent) +
         params.call.batch.Offset(entry, Call::kCotangent) + point * params.call.geometry.width;
}

// The sums of the chunks whose points are all of one cell; a block has a chunk.
template <typename T, int kAxes>
__global__ void __launch_bounds__(kThreads) SumChunks(const __grid_constant__ SortedParams params) {
  using A = Accumulator<T>;
  constexpr int kCorners = 1 << kAxes;
  const int64_t first = int64_t{blockIdx.x} * kChunk;
  const uint64_t key = params.keys[first];
  if (key == params.cell_keys || params.keys[first + kChunk - 1] != key) return;
  __shared__ A weights[kCorners][kChunk];
  __shared__ const T* rows[kChunk];
  Stencil<A, kAxes> stencil(params.common, params.ids[first + threadIdx.x]);
  stencil.MakeWeights(params.common.call);
#pragma unroll
  for (int c = 0; c < kCorners; ++c) weights[c][threadIdx.x] = stencil.terms[c];
  rows[threadIdx.x] = CotangentOf<T>(params.common, stencil.entry, stencil.point);
  __syncthreads();
  const int64_t width = params.common.call.geometry.width;
  A* sums = static_cast<A*>(params.chunks) + blockIdx.x * kCorners * width;
  for (int64_t i = threadIdx.x; i < kCorners * width; i += kThreads) {
    const int64_t corner = i / width;
    const int64_t f = i - corner * width;
    A sum = 0;
    for (int p = 0; p < kChunk; ++p) sum += weights[corner][p] * Widen(rows[p][f]);
    sums[i] = sum;
  }
}

// Every entry of the volume adds up what the points around it give.
template <typename T, int kCount, int kAxes>
__global__ void __launch_bounds__(kThreads)
    GatherSums(const __grid_constant__ SortedParams params) {
  using A = Accumulator<T>;
  constexpr int kCorners = 1 << kAxes;
  const Call& call = params.common.call;
  const int64_t width = call.geometry.width;
  uint64_t rest = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (rest >= params.gather_threads) return;
  const int64_t f = static_cast<int64_t>(params.common.by_row.Peel(rest)) * kCount;
  const uint64_t row = rest;
  int64_t low = 0;  // the cell below the entry along all axes
  int64_t strides[kAxes];
  int64_t stride = 1;
#pragma unroll
  for (int a = kAxes - 1; a >= 0; --a) {
    low += static_cast<int64_t>(params.sizes[a].Peel(rest)) * stride;
    strides[a] = stride;
    stride *= call.geometry.sizes[a] + 1;
  }
  low += static_cast<int64_t>(rest) * params.cells;
  // The nearest entry is the lower one of all axes.
  const bool nearest = call.geometry.method == Method::kNearest;
  A sums[kCount] = {};
#pragma unroll 1
  for (int c = 0; c < (nearest ? 1 : kCorners); ++c) {
    // The entry is corner c of the cell that many below it.
    int64_t cell = low;
#pragma unroll
    for (int a = 0; a < kAxes; ++a) {
      if (!(c & multilinear::BitOf<kAxes>(a))) cell += strides[a];
    }
    const Range range = params.ranges[cell];
#pragma unroll 1
    for (uint32_t i = range.begin; i < range.end;) {
      if (i % kChunk == 0 && i + kChunk <= range.end) {
        const A* chunk =
            static_cast<const A*>(params.chunks) + (int64_t{i / kChunk} * kCorners + c) * width + f;
#pragma unroll
        for (int e = 0; e < kCount; ++e) sums[e] += chunk[e];
        i += kChunk;
        continue;
      }
      Stencil<A, kAxes> stencil(params.common, params.ids[i]);
      const auto g =
          LoadPack<kCount>(CotangentOf<T>(params.common, stencil.entry, stencil.point) + f);
      stencil.MakeWeights(call);
      A weight = stencil.terms[0];
#pragma unroll
      for (int other = 1; other < kCorners; ++other) {
        if (c == other) weight = stencil.terms[other];
      }
#pragma unroll
      for (int e = 0; e < kCount; ++e) sums[e] += weight * Widen(g.values[e]);
      ++i;
    }
  }
  Pack<T, kCount> out;
#pragma unroll
  for (int e = 0; e < kCount; ++e) out.values[e] = Narrow<T>(sums[e]);
  StorePack(static_cast<T*>(call.dvolume) + static_cast<int64_t>(row) * width + f, out);
}

// Pieces of the work space, aligned, one after the other.
class Workspace {
 public:
  Workspace(void* memory, int64_t bytes)
      : next_(static_cast<unsigned char*>(memory)), end_(next_ + bytes) {}

  template <typename U>
  U* Take(int64_t count) {
    auto* taken = reinterpret_cast<U*>(next_);
    next_ += CeilDiv(count * sizeof(U), kAlignment) * kAlignment;
    return taken;
  }
  bool holds() const { return next_ <= end_; }

 private:
  static constexpr int64_t kAlignment = 256;
  unsigned char* next_;
  unsigned char* end_;
};

template <typename T, int kAxes>
cudaError_t LaunchAxes(cudaStream_t stream, const Call& call) {
  using A = Accumulator<T>;
  constexpr int kPack = kPackBytes / sizeof(T);
  const Geometry& geometry = call.geometry;
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  const bool packs =
      geometry.width % kPack == 0 && aligned(call.cotangent) && aligned(call.dvolume);
  SortedParams params{Params(call, geometry.width / (packs ? kPack : 1))};
  const int64_t points = params.common.points;
  if (points > UINT32_MAX - kChunk) return cudaErrorInvalidValue;
  params.cells = 1;
  for (int a = 0; a < kAxes; ++a) {
    params.cells *= geometry.sizes[a] + 1;
    params.sizes[a] = FastDivider64(geometry.sizes[a]);
  }
  params.cell_keys = call.gradients * params.cells;
  params.gradient = geometry.grid() * geometry.width;
  params.gather_threads =
      call.gradients * params.gradient / geometry.width * params.common.by_row.divisor();

  Workspace space(call.scratch, call.scratch_bytes);
  cub::DoubleBuffer<uint64_t> keys(space.Take<uint64_t>(points), space.Take<uint64_t>(points));
  cub::DoubleBuffer<uint32_t> ids(space.Take<uint32_t>(points), space.Take<uint32_t>(points));
  params.ranges = space.Take<Range>(params.cell_keys);
  params.chunks = space.Take<A>(CeilDiv(points, kChunk) * (int64_t{1} << kAxes) * geometry.width);
  int bits = 1;
  while (bits < 64 && params.cell_keys >> bits) ++bits;
  size_t sort_bytes = 0;
  JAXOPS_RETURN_IF_ERROR(
      cub::DeviceRadixSort::SortPairs(nullptr, sort_bytes, keys, ids, points, 0, bits, stream));
  void* sort_space = space.Take<unsigned char>(sort_bytes);
  if (!space.holds()) return cudaErrorInvalidValue;

  JAXOPS_RETURN_IF_ERROR(
      cudaMemsetAsync(params.ranges, 0, params.cell_keys * sizeof(Range), stream));
  if (points > 0) {
    const int64_t blocks = CeilDiv(points, kThreads);
    params.keys = keys.Current();
    params.ids = ids.Current();
    JAXOPS_RETURN_IF_ERROR(Launch(MakeKeys<A, kAxes>, blocks, kThreads, 0, stream, params));
    JAXOPS_RETURN_IF_ERROR(cub::DeviceRadixSort::SortPairs(sort_space, sort_bytes, keys, ids,
                                                           points, 0, bits, stream));
    params.keys = keys.Current();
    params.ids = ids.Current();
    JAXOPS_RETURN_IF_ERROR(Launch(FindRanges, blocks, kThreads, 0, stream, params));
    if (points >= kChunk) {
      JAXOPS_RETURN_IF_ERROR(
          Launch(SumChunks<T, kAxes>, points / kChunk, kThreads, 0, stream, params));
    }
  }
  const auto gather = packs ? GatherSums<T, kPack, kAxes> : GatherSums<T, 1, kAxes>;
  return Launch(gather, CeilDiv(params.gather_threads, kThreads), kThreads, 0, stream, params);
}

}  // namespace

cudaError_t LaunchSortedVolumeGrad(cudaStream_t stream, const Call& call) {
  return jaxops::cuda::DispatchFloat(call.dtype, [&]<typename T>(T) {
    return call.geometry.axes == 3 ? LaunchAxes<T, 3>(stream, call)
                                   : LaunchAxes<T, 2>(stream, call);
  });
}

}  // namespace jaxops::grid_sample::cuda
