// Sampling of volumes at points and its gradients, see common/grid_sample.h.
//
// Neighbouring threads take neighbouring channels, 16 bytes each where rows allow it, of all the
// entries around a point at once. Gradients by the volume are added where they belong by atomics,
// four channels in one where the device has that, in the arithmetic type; a volume of 2-byte
// entries is rounded at the end. cuda/grid_sample_sorted.cu makes the same sums in a fixed order.
//
// Points at random places of a volume larger than the L2 would fetch entries from memory as often
// as they are met. They are then taken slab by slab of the volume, each of which the L2 holds; what
// it takes to put their indices in that order is a small part of what it saves.
#include <algorithm>
#include <cstdint>
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

// What a multiprocessor has at least, of kernels that read the volume: without the hint the
// compiler saves registers by waiting for some of a thread's loads before it starts others.
constexpr int kReadingBlocks = 2;

// What the lane that reads a row of channels is told of its point.
template <typename A, int kAxes>
struct Corners {
  static constexpr int kCorners = 1 << kAxes;

  int64_t low;     // the offset of the lowest entry, which need not be there
  unsigned there;  // a bit for each corner
  bool lost;
  A weights[kCorners];

  __device__ __forceinline__ bool IsThere(int corner) const { return there >> corner & 1; }

  __device__ __forceinline__ int64_t OffsetOf(int corner, const Params& params) const {
    int64_t offset = low;
#pragma unroll
    for (int a = 0; a < kAxes; ++a) {
      if (corner & multilinear::BitOf<kAxes>(a)) offset += params.strides[a];
    }
    return offset;
  }
};

// A warp finds the entries around 32 points, a lane for each, and then goes through their rows of
// channels together: calls step(point, f, corners) for every kCount channels from f on of every
// point. `operand` says which batch strides the entries' offsets have: those of the volume or of
// its gradient.
template <typename A, int kCount, int kAxes, typename Step>
__device__ __forceinline__ void ForEachRow(const Params& params, Call::Operand operand,
                                           Step&& step) {
  constexpr unsigned kWholeWarp = 0xffffffff;
  constexpr int kCorners = 1 << kAxes;
  constexpr unsigned kLost = 1u << kCorners;
  const Call& call = params.call;
  const int lane = threadIdx.x % 32;
  uint64_t group = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  const auto split = static_cast<uint32_t>(params.by_split.Peel(group));
  const int64_t first = static_cast<int64_t>(group) * 32;
  if (first >= params.points) return;
  // Lanes beyond the last point have company to shuffle with and nothing to do.
  Stencil<A, kAxes> own(params, params.PointAt(min(first + lane, params.points - 1)));
  const int64_t own_low = own.low + call.batch.Offset(own.entry, operand);
  unsigned own_there = own.lost ? kLost : 0;
#pragma unroll
  for (int c = 0; c < kCorners; ++c) own_there |= own.IsThere(c) ? 1u << c : 0;
  const bool plain = call.order == 0;
  if (!plain) {
    multilinear::TermsToWeights<kAxes>(own.axes, own.terms);
    // With a direction that is not a number, weights of what is not there are not either.
#pragma unroll
    for (int c = 0; c < kCorners; ++c) own.terms[c] = own.IsThere(c) ? own.terms[c] : A(0);
  }
  const uint32_t rows = params.row.divisor();
#pragma unroll 1
  for (uint32_t round = split; round < rows; round += params.by_split.divisor()) {
    uint32_t source = round * 32 + lane;
    const int64_t f = int64_t{params.row.Peel(source)} * kCount;
    Corners<A, kAxes> corners;
    corners.low = __shfl_sync(kWholeWarp, own_low, source);
    const unsigned flags = __shfl_sync(kWholeWarp, own_there, source);
    corners.there = flags;
    corners.lost = flags & kLost;
    if (plain) {
      multilinear::Axis<A> axes[kAxes];
#pragma unroll
      for (int a = 0; a < kAxes; ++a) {
        axes[a].lower = __shfl_sync(kWholeWarp, own.axes[a].lower, source);
        axes[a].upper = __shfl_sync(kWholeWarp, own.axes[a].upper, source);
      }
      multilinear::PlainWeights<kAxes>(axes, corners.weights);
    } else {
#pragma unroll
      for (int c = 0; c < kCorners; ++c) {
        corners.weights[c] = __shfl_sync(kWholeWarp, own.terms[c], source);
      }
    }
    if (first + source < params.points) step(params.PointAt(first + source), f, corners);
  }
}

template <typename T, int kCount, int kAxes>
__global__ void __launch_bounds__(kThreads, kReadingBlocks)
    Sample(const __grid_constant__ Params params) {
  using A = Accumulator<T>;
  constexpr int kCorners = 1 << kAxes;
  const Call& call = params.call;
  const bool marks = call.geometry.method == Method::kLinear;
  ForEachRow<A, kCount, kAxes>(
      params, Call::kVolume, [&](int64_t point, int64_t f, const Corners<A, kAxes>& corners) {
        const T* volume = static_cast<const T*>(call.volume) + f;
        Pack<T, kCount> values[kCorners];
#pragma unroll
        for (int c = 0; c < kCorners; ++c) {
          if (corners.IsThere(c)) {
            values[c] = LoadPack<kCount>(volume + corners.OffsetOf(c, params));
          } else {
            values[c] = {};
          }
        }
        A sums[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          sums[i] = corners.lost && marks ? static_cast<A>(nanf("")) : A(0);
        }
#pragma unroll
        for (int c = 0; c < kCorners; ++c) {
#pragma unroll
          for (int i = 0; i < kCount; ++i)
            sums[i] += corners.weights[c] * Widen(values[c].values[i]);
        }
        Pack<T, kCount> out;
#pragma unroll
        for (int i = 0; i < kCount; ++i) out.values[i] = Narrow<T>(sums[i]);
        StorePack(static_cast<T*>(call.out) + point * call.geometry.width + f, out);
      });
}

// Adds to neighbouring sums, four at a time where the device can.
template <int kCount, typename A>
__device__ __forceinline__ void Add(A* to, const A (&values)[kCount]) {
#if __CUDA_ARCH__ >= 900
  constexpr bool kFour = std::is_same_v<A, float> && kCount % 4 == 0;
#else
  constexpr bool kFour = false;
#endif
  if constexpr (kFour) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + i),
                   "f"(values[i]), "f"(values[i + 1]), "f"(values[i + 2]), "f"(values[i + 3])
                   : "memory");
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) atomicAdd(to + i, values[i]);
  }
}

template <typename T, int kCount, int kAxes>
__global__ void __launch_bounds__(kThreads) VolumeGrad(const __grid_constant__ Params params) {
  using A = Accumulator<T>;
  constexpr int kCorners = 1 << kAxes;
  const Call& call = params.call;
  const int64_t width = call.geometry.width;
  ForEachRow<A, kCount, kAxes>(
      params, Call::kGradient, [&](int64_t point, int64_t f, const Corners<A, kAxes>& corners) {
        uint64_t entry = point;
        const auto within = static_cast<int64_t>(params.by_entry.Peel(entry));
        const T* cotangent = static_cast<const T*>(call.cotangent) +
                             call.batch.Offset(entry, Call::kCotangent) + within * width;
        const auto g = LoadPack<kCount>(cotangent + f);
        A* sums = static_cast<A*>(params.sums) + f;
#pragma unroll
        for (int c = 0; c < kCorners; ++c) {
          if (!corners.IsThere(c)) continue;
          A products[kCount];
#pragma unroll
          for (int i = 0; i < kCount; ++i) products[i] = corners.weights[c] * Widen(g.values[i]);
          Add<kCount>(sums + corners.OffsetOf(c, params), products);
        }
      });
}

// The gradient by the points, and by the volume if kVolume.
template <typename T, int kCount, int kAxes, bool kVolume>
__global__ void __launch_bounds__(kThreads, kReadingBlocks)
    Backward(const __grid_constant__ Params params) {
  using A = Accumulator<T>;
  constexpr int kCorners = 1 << kAxes;
  const Call& call = params.call;
  const int64_t width = call.geometry.width;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int lane = static_cast<int>(threadIdx.x) & (params.lanes - 1);
  int64_t index = thread / params.lanes;
  // Lanes of no point help the last one to sum, so that whole warps meet.
  const bool real = index < params.points;
  index = params.PointAt(real ? index : params.points - 1);
  Stencil<A, kAxes> stencil(params, index);
  const T* cotangent = static_cast<const T*>(call.cotangent) +
                       call.batch.Offset(stencil.entry, Call::kCotangent) + stencil.point * width;
  const T* volume =
      static_cast<const T*>(call.volume) + call.batch.Offset(stencil.entry, Call::kVolume);
  A* sums = nullptr;
  A weights[kCorners];
  if constexpr (kVolume) {
    sums = static_cast<A*>(params.sums) + call.batch.Offset(stencil.entry, Call::kGradient);
    Stencil<A, kAxes> other = stencil;
    other.MakeWeights(call);
#pragma unroll
    for (int c = 0; c < kCorners; ++c) weights[c] = other.terms[c];
  }
  A dots[kCorners] = {};
  for (int64_t f = int64_t{lane} * kCount; f < width; f += params.lanes * kCount) {
    const auto read = LoadPack<kCount>(cotangent + f);
    A g[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) g[i] = Widen(read.values[i]);
    Pack<T, kCount> values[kCorners];
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
      if (stencil.IsThere(c)) {
        values[c] = LoadPack<kCount>(volume + stencil.OffsetOf(c, params) + f);
      } else {
        values[c] = {};
      }
    }
    if constexpr (kVolume) {
#pragma unroll
      for (int c = 0; c < kCorners; ++c) {
        if (!real || !stencil.IsThere(c)) continue;
        A products[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) products[i] = weights[c] * g[i];
        Add<kCount>(sums + stencil.OffsetOf(c, params) + f, products);
      }
    }
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
      if (!stencil.IsThere(c)) continue;
#pragma unroll
      for (int i = 0; i < kCount; ++i) dots[c] += g[i] * Widen(values[c].values[i]);
    }
  }
  A gradient[kAxes];
  multilinear::PointGradient<kAxes>(stencil.axes, stencil.terms, dots, gradient);
  multilinear::cuda::SumOverLanes(gradient, params.lanes);
  if (!real || lane != 0) return;
  const A lost = static_cast<A>(call.geometry.method == Method::kLinear ? nanf("") : 0.0f);
#pragma unroll
  for (int a = 0; a < kAxes; ++a) {
    jaxops::cuda::StoreAs(call.dpoints, index * kAxes + a, call.point_dtype,
                          stencil.lost ? lost : gradient[a]);
  }
}

// --- slabs ---------------------------------------------------------------------------------------

constexpr int kMostSlabs = 16;
constexpr int kPointsOfThread = 8;
constexpr int kPointsOfBlock = kPointsOfThread * kThreads;

struct OrderParams {
  Call call;
  int64_t points;
  FastDivider thickness;  // of a slab, in entries of the first axis
  uint32_t blocks;
  uint32_t* counts;  // of the points of every block in each slab, kMostSlabs a block
  uint32_t* order;
};

// The slabs of this thread's points, kMostSlabs for those beyond the last.
template <int kAxes>
__device__ __forceinline__ void FindSlabs(uint32_t (&slabs)[kPointsOfThread],
                                          const OrderParams& params, int64_t first) {
  const Geometry& geometry = params.call.geometry;
  float p[kPointsOfThread][1];
#pragma unroll
  for (int i = 0; i < kPointsOfThread; ++i) {
    const int64_t index = min(first + i * kThreads, params.points - 1);
    multilinear::cuda::LoadPoint<1>(params.call.points, index * kAxes, params.call.point_dtype,
                                    p[i]);
  }
#pragma unroll
  for (int i = 0; i < kPointsOfThread; ++i) {
    const int entry = Locate(p[i][0], geometry.sizes[0], geometry).entry;
    slabs[i] = first + i * kThreads < params.points
                   ? params.thickness.Quotient(min(max(entry, 0), geometry.sizes[0] - 1))
                   : kMostSlabs;
  }
}

template <int kAxes>
__global__ void __launch_bounds__(kThreads)
    CountInSlabs(const __grid_constant__ OrderParams params) {
  __shared__ uint32_t counts[kMostSlabs + 1];
  if (threadIdx.x <= kMostSlabs) counts[threadIdx.x] = 0;
  uint32_t slabs[kPointsOfThread];
  FindSlabs<kAxes>(slabs, params, int64_t{blockIdx.x} * kPointsOfBlock + threadIdx.x);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPointsOfThread; ++i) {
    const unsigned same = __match_any_sync(~0u, slabs[i]);
    if (threadIdx.x % 32 == __ffs(same) - 1) atomicAdd(counts + slabs[i], __popc(same));
  }
  __syncthreads();
  if (threadIdx.x < kMostSlabs) {
    params.counts[blockIdx.x * kMostSlabs + threadIdx.x] = counts[threadIdx.x];
  }
}

// Within a slab, points come in the order of the blocks, and a block's in any order.
template <int kAxes>
__global__ void __launch_bounds__(kThreads)
    PlaceInSlabs(const __grid_constant__ OrderParams params) {
  __shared__ uint32_t totals[kMostSlabs];
  __shared__ uint32_t next[kMostSlabs + 1];
  if (threadIdx.x < kMostSlabs) totals[threadIdx.x] = next[threadIdx.x] = 0;
  const int64_t first = int64_t{blockIdx.x} * kPointsOfBlock + threadIdx.x;
  uint32_t slabs[kPointsOfThread];
  FindSlabs<kAxes>(slabs, params, first);
  uint32_t total = 0, before = 0;
#pragma unroll 8
  for (uint32_t i = threadIdx.x; i < params.blocks * kMostSlabs; i += kThreads) {
    const uint32_t count = params.counts[i];
    total += count;
    before += i / kMostSlabs < blockIdx.x ? count : 0;
  }
  __syncthreads();
  atomicAdd(totals + threadIdx.x % kMostSlabs, total);
  atomicAdd(next + threadIdx.x % kMostSlabs, before);
  __syncthreads();
  if (threadIdx.x < kMostSlabs) {
    uint32_t begin = 0;
    for (int slab = 0; slab < threadIdx.x; ++slab) begin += totals[slab];
    next[threadIdx.x] += begin;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPointsOfThread; ++i) {
    const unsigned same = __match_any_sync(~0u, slabs[i]);
    const int lane = threadIdx.x % 32, leader = __ffs(same) - 1;
    uint32_t at = 0;
    if (lane == leader && slabs[i] < kMostSlabs) at = atomicAdd(next + slabs[i], __popc(same));
    at = __shfl_sync(~0u, at, leader) + __popc(same & ((1u << lane) - 1));
    if (slabs[i] < kMostSlabs) params.order[at] = static_cast<uint32_t>(first + i * kThreads);
  }
}

// Orders the points by slabs of `size` bytes a channel if that is worth it and there is `space` for
// it; *order is null otherwise.
cudaError_t OrderPoints(cudaStream_t stream, const Call& call, int64_t size, void* space,
                        int64_t space_bytes, const uint32_t** order) {
  *order = nullptr;
  const Geometry& geometry = call.geometry;
  const int64_t blocks = CeilDiv(geometry.points, kPointsOfBlock);
  const int64_t numbers = geometry.points + blocks * kMostSlabs;
  if (call.batch.size() != 1 || geometry.points > UINT32_MAX ||
      space_bytes < numbers * static_cast<int64_t>(sizeof(uint32_t))) {
    return cudaSuccess;
  }
  int device, cache;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&cache, cudaDevAttrL2CacheSize, device);
  if (error != cudaSuccess) return error;
  // A slab fits the L2 well beside all else that goes through it.
  const int64_t wanted = CeilDiv(geometry.grid() * geometry.width * size, cache / 4);
  if (wanted <= 2) return cudaSuccess;
  auto* counts = static_cast<uint32_t*>(space);
  const int64_t slabs = std::min<int64_t>(wanted, kMostSlabs);
  const OrderParams params{call,
                           geometry.points,
                           FastDivider(CeilDiv(geometry.sizes[0], slabs)),
                           static_cast<uint32_t>(blocks),
                           counts,
                           counts + blocks * kMostSlabs};
  const bool volume = geometry.axes == 3;
  error = Launch(volume ? CountInSlabs<3> : CountInSlabs<2>, blocks, kThreads, 0, stream, params);
  if (error != cudaSuccess) return error;
  *order = params.order;
  return Launch(volume ? PlaceInSlabs<3> : PlaceInSlabs<2>, blocks, kThreads, 0, stream, params);
}

// --- launches ------------------------------------------------------------------------------------

struct NarrowParams {
  const float* from;
  void* to;
  int64_t count;
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    NarrowSums(const __grid_constant__ NarrowParams params) {
  constexpr int kCount = 4;
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kCount;
  T* to = static_cast<T*>(params.to);
  if (i + kCount <= params.count) {
    const auto values = LoadPack<kCount>(params.from + i);
    Pack<T, kCount> out;
#pragma unroll
    for (int e = 0; e < kCount; ++e) out.values[e] = Narrow<T>(values.values[e]);
    StorePack(to + i, out);
  } else {
    for (int64_t e = i; e < params.count; ++e) to[e] = Narrow<T>(params.from[e]);
  }
}

template <typename T, int kCount, int kAxes>
cudaError_t LaunchWith(cudaStream_t stream, const Call& call, const uint32_t* order) {
  const int64_t row_threads = call.geometry.width / kCount;
  Params params(call, row_threads);
  params.order = order;
  const bool adds = call.dvolume != nullptr && !call.deterministic;
  if (adds && !std::is_same_v<T, Accumulator<T>>) params.sums = call.scratch;
  if (call.dpoints == nullptr) {
    const int64_t warps = CeilDiv(params.points, 32) * params.by_split.divisor();
    const auto kernel =
        call.out != nullptr ? Sample<T, kCount, kAxes> : VolumeGrad<T, kCount, kAxes>;
    return Launch(kernel, CeilDiv(warps * 32, kThreads), kThreads, 0, stream, params);
  }
  const auto kernel = adds ? Backward<T, kCount, kAxes, true> : Backward<T, kCount, kAxes, false>;
  const int64_t blocks = CeilDiv(params.points, kThreads / params.lanes);
  return Launch(kernel, blocks, kThreads, 0, stream, params);
}

template <typename T, int kCount>
cudaError_t LaunchAxes(cudaStream_t stream, const Call& call, const uint32_t* order) {
  return call.geometry.axes == 3 ? LaunchWith<T, kCount, 3>(stream, call, order)
                                 : LaunchWith<T, kCount, 2>(stream, call, order);
}

bool IsAligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kPackBytes == 0;
}

template <typename T>
cudaError_t LaunchOf(cudaStream_t stream, const Call& call) {
  constexpr int kPack = kPackBytes / sizeof(T);
  using A = Accumulator<T>;
  const int64_t size = call.gradients * call.geometry.grid() * call.geometry.width;
  const bool adds = call.dvolume != nullptr && !call.deterministic;
  const int64_t sums_bytes = adds && !std::is_same_v<T, A> ? size * sizeof(A) : 0;
  if (adds) {
    if (call.scratch_bytes < sums_bytes) return cudaErrorInvalidValue;
    void* sums = std::is_same_v<T, A> ? call.dvolume : call.scratch;
    const cudaError_t error = cudaMemsetAsync(sums, 0, size * sizeof(A), stream);
    if (error != cudaSuccess) return error;
  }
  const bool aligned = IsAligned(call.volume) && IsAligned(call.cotangent) && IsAligned(call.out) &&
                       IsAligned(call.dvolume) && IsAligned(call.scratch);
  if (call.batch.size() * call.geometry.points > 0 &&
      (call.out != nullptr || call.dpoints != nullptr || adds)) {
    const uint32_t* order = nullptr;
    cudaError_t error = cudaSuccess;
    if (call.out != nullptr || adds) {
      error = OrderPoints(stream, call, adds ? sizeof(A) : sizeof(T),
                          static_cast<unsigned char*>(call.scratch) + sums_bytes,
                          call.scratch_bytes - sums_bytes, &order);
      if (error != cudaSuccess) return error;
    }
    error = aligned && call.geometry.width % kPack == 0 ? LaunchAxes<T, kPack>(stream, call, order)
                                                        : LaunchAxes<T, 1>(stream, call, order);
    if (error != cudaSuccess) return error;
  }
  if constexpr (!std::is_same_v<T, A>) {
    if (adds) {
      const NarrowParams params{static_cast<const float*>(call.scratch), call.dvolume, size};
      return Launch(NarrowSums<T>, CeilDiv(size, 4 * kThreads), kThreads, 0, stream, params);
    }
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t LaunchSample(cudaStream_t stream, const Call& call) {
  const int64_t points = call.batch.size() * call.geometry.points;
  // A warp counts the channels of its 32 points in 32 bits.
  if (call.geometry.width >= int64_t{1} << 26) return cudaErrorInvalidValue;
  if (call.geometry.width == 0) {
    if (call.dpoints == nullptr || points == 0) return cudaSuccess;
    const int64_t bytes = points * call.geometry.axes * jaxops::cuda::SizeOf(call.point_dtype);
    return cudaMemsetAsync(call.dpoints, 0, bytes, stream);
  }
  Call rest = call;
  if (call.dvolume != nullptr && call.gradients * call.geometry.grid() == 0) {
    rest.dvolume = nullptr;
  }
  if (rest.dvolume != nullptr && rest.deterministic) {
    const cudaError_t error = LaunchSortedVolumeGrad(stream, rest);
    if (error != cudaSuccess) return error;
  }
  return jaxops::cuda::DispatchFloat(call.dtype,
                                     [&]<typename T>(T) { return LaunchOf<T>(stream, rest); });
}

}  // namespace jaxops::grid_sample::cuda
