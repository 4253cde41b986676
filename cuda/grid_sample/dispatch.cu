// Sampling of volumes at points and its gradients, see common/grid_sample.h.
//
// A lane looks at a point and tells others of its warp, who take neighbouring channels, 16 bytes
// each where rows allow it, of all the entries around a point at once. Gradients by the volume are
// made brick by brick where points are many (cuda/grid_sample/bricks.cu), and else added where they
// belong by atomics, four channels in one where the device has that; both in the arithmetic type, a
// volume of 2-byte entries being rounded at the end. cuda/grid_sample/sorted.cu makes the same sums
// in a fixed order. Where a sample has few points and channels, nothing is told: each thread looks
// at the point of its own channels (SampleFew).
//
// The kernels here know every option. Plain values and gradients by points have smaller ones, see
// cuda/grid_sample/plain.h.
//
// Points at random places of a volume larger than the L2 would fetch entries from memory as often
// as they are met. They are then taken in an order, see cuda/grid_sample/order.cuh; what that takes
// is a small part of what it saves.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/common/launch.h"
#include "cuda/grid_sample/launch.h"
#include "cuda/grid_sample/order.cuh"
#include "cuda/grid_sample/plain.h"
#include "cuda/grid_sample/samples.cuh"

namespace jaxops::grid_sample::cuda {
namespace {

using jaxops::cuda::Accumulator;
using jaxops::cuda::CeilDiv;
using jaxops::cuda::kWarp;
using jaxops::cuda::Launch;
using jaxops::cuda::LoadPack;
using jaxops::cuda::Narrow;
using jaxops::cuda::Pack;
using jaxops::cuda::StorePack;
using jaxops::cuda::Widen;

// What a multiprocessor has at least, of kernels that read the volume: as many as there are
// registers for. Those in float32 that only read take few.
template <typename T, bool kAdds = false>
constexpr int kReadingBlocks = sizeof(T) == 4 && !kAdds ? 4 : 2;

constexpr int kFewThreads = 128;
// Up to so many threads in all, each looks at its point itself; of more it pays to tell each other.
// Measured on an H200.
constexpr int64_t kMostFew = int64_t{1} << 18;

// What lanes of a warp that move channels are told of its 32 points, each of which one lane has
// looked at.
template <typename A, int kAxes>
struct WarpPoints {
  static constexpr int kCorners = 1 << kAxes;
  static constexpr int kPitch = kCorners + 4;  // lanes that read of other points find other banks
  static constexpr unsigned kLost = 1u << kCorners;

  alignas(16) A values[kWarp * kPitch];  // of the corners: weights, or what the lanes found there
  int64_t lows[kWarp];                   // the offsets of the lowest entries
  int64_t rows[kWarp];                   // the offsets of the cotangents
  int64_t indices[kWarp];
  unsigned there[kWarp];  // a bit for each corner, and kLost

  // Tells of this lane's point. `operand` says which batch strides the entries' offsets have: those
  // of the volume or of its gradient.
  __device__ __forceinline__ void Put(const Params& params, int64_t index,
                                      const Sought<A, kAxes>& sought, Call::Operand operand) {
    Stencil<A, kAxes> stencil(params, sought);
    const unsigned flags = Put(params, index, stencil, operand);
    stencil.MakeWeights(params.call);
    // With a direction that is not a number, weights of what is not there are not either.
#pragma unroll
    for (int c = 0; c < kCorners; ++c) stencil.terms[c] = flags >> c & 1 ? stencil.terms[c] : A(0);
    constexpr int kCount = jaxops::cuda::kPackElements<A>;
#pragma unroll
    for (int c = 0; c < kCorners; c += kCount) {
      Pack<A, kCount> pack;
#pragma unroll
      for (int i = 0; i < kCount; ++i) pack.values[i] = stencil.terms[c + i];
      *reinterpret_cast<Pack<A, kCount>*>(values + threadIdx.x % kWarp * kPitch + c) = pack;
    }
  }

  // The same, but for the weights.
  __device__ __forceinline__ unsigned Put(const Params& params, int64_t index,
                                          const Stencil<A, kAxes>& stencil, Call::Operand operand) {
    const Call& call = params.call;
    const int lane = threadIdx.x % kWarp;
    unsigned flags = stencil.lost ? kLost : 0;
#pragma unroll
    for (int c = 0; c < kCorners; ++c) flags |= stencil.IsThere(c) ? 1u << c : 0;
    lows[lane] = stencil.low + call.batch.Offset(stencil.entry, operand);
    rows[lane] = call.cotangent == nullptr ? 0
                                           : call.batch.Offset(stencil.entry, Call::kCotangent) +
                                                 stencil.point * call.geometry.width;
    indices[lane] = index;
    there[lane] = flags;
    return flags;
  }

  __device__ __forceinline__ void Get(int source, A (&of_corners)[kCorners]) const {
    constexpr int kCount = jaxops::cuda::kPackElements<A>;
#pragma unroll
    for (int c = 0; c < kCorners; c += kCount) {
      const auto pack = LoadPack<kCount>(values + source * kPitch + c);
#pragma unroll
      for (int i = 0; i < kCount; ++i) of_corners[c + i] = pack.values[i];
    }
  }
};

// The offset of a corner's entry from that of the lowest.
template <int kAxes>
__device__ __forceinline__ int64_t CornerOffset(int corner, const Params& params) {
  int64_t offset = 0;
#pragma unroll
  for (int a = 0; a < kAxes; ++a) {
    if (corner & multilinear::BitOf<kAxes>(a)) offset += params.strides[a];
  }
  return offset;
}

// A warp finds the entries around 32 points, a lane for each, and then goes through their rows of
// channels together: calls step(points, source, f) for every kCount channels from f on of every
// point.
template <typename A, int kCount, int kAxes, typename Step>
__device__ __forceinline__ void ForEachRow(const Params& params, Call::Operand operand,
                                           Step&& step) {
  __shared__ WarpPoints<A, kAxes> shared[kThreads / kWarp];
  WarpPoints<A, kAxes>& points = shared[threadIdx.x / kWarp];
  const int lane = threadIdx.x % kWarp;
  uint64_t group = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  const auto split = static_cast<uint32_t>(params.by_split.Peel(group));
  const int64_t first = static_cast<int64_t>(group) * kWarp;
  if (first >= params.places) return;
  uint32_t count;
  int64_t index;
  Sought<A, kAxes> sought;
  if (params.order == nullptr) {
    index = min(first + lane, params.points - 1);
    sought = Sought<A, kAxes>(params, index);
    count = static_cast<uint32_t>(min(int64_t{kWarp}, params.points - first));
  } else {
    Placed placed = params.order[first + lane];
    count = __popc(__ballot_sync(~0u, placed.index != Placed::kNone));
    if (count == 0) return;
    if (lane >= count) placed = params.order[first];
    index = placed.index;
    sought = Sought<A, kAxes>(params, placed);
  }
  points.Put(params, index, sought, operand);
  __syncwarp();
  const uint32_t rows = params.row.divisor();
#pragma unroll 1
  for (uint32_t round = split; round < rows; round += params.by_split.divisor()) {
    uint32_t source = round * kWarp + lane;
    const int64_t f = int64_t{params.row.Peel(source)} * kCount;
    if (source < count) step(points, source, f);
  }
}

// The weighted sums of entries around a point, kCount channels of them.
template <int kCount, typename A, typename T, int kCorners>
__device__ __forceinline__ Pack<T, kCount> WeightedSums(const Pack<T, kCount> (&values)[kCorners],
                                                        const A (&weights)[kCorners], bool is_nan) {
  A sums[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = is_nan ? static_cast<A>(nanf("")) : A(0);
#pragma unroll
  for (int c = 0; c < kCorners; ++c) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] += weights[c] * Widen(values[c].values[i]);
  }
  Pack<T, kCount> out;
#pragma unroll
  for (int i = 0; i < kCount; ++i) out.values[i] = Narrow<T>(sums[i]);
  return out;
}

template <typename T, int kCount, int kAxes>
__global__ void __launch_bounds__(kThreads, kReadingBlocks<T>)
    Sample(const __grid_constant__ Params params) {
  using A = Accumulator<T>;
  constexpr int kCorners = 1 << kAxes;
  const Call& call = params.call;
  const bool marks = call.geometry.method == Method::kLinear;
  ForEachRow<A, kCount, kAxes>(
      params, Call::kVolume, [&](const WarpPoints<A, kAxes>& points, uint32_t source, int64_t f) {
        const T* volume = static_cast<const T*>(call.volume) + points.lows[source] + f;
        const unsigned there = points.there[source];
        Pack<T, kCount> values[kCorners];
#pragma unroll
        for (int c = 0; c < kCorners; ++c) {
          if (there >> c & 1) {
            values[c] = LoadPack<kCount>(volume + CornerOffset<kAxes>(c, params));
          } else {
            values[c] = {};
          }
        }
        A weights[kCorners];
        points.Get(source, weights);
        StorePack(static_cast<T*>(call.out) + points.indices[source] * call.geometry.width + f,
                  WeightedSums<kCount>(values, weights, there & points.kLost && marks));
      });
}

// The same of few points: every thread looks at the point of its channels itself.
template <typename T, int kCount, int kAxes>
__global__ void __launch_bounds__(kFewThreads) SampleFew(const __grid_constant__ Params params) {
  using A = Accumulator<T>;
  constexpr int kCorners = 1 << kAxes;
  const Call& call = params.call;
  uint32_t index = blockIdx.x * kFewThreads + threadIdx.x;
  const int64_t f = int64_t{params.row.Peel(index)} * kCount;
  if (index >= params.points) return;
  Stencil<A, kAxes> stencil(params, index);
  const T* volume =
      static_cast<const T*>(call.volume) + call.batch.Offset(stencil.entry, Call::kVolume) + f;
  Pack<T, kCount> values[kCorners];
#pragma unroll
  for (int c = 0; c < kCorners; ++c) {
    if (stencil.IsThere(c)) {
      values[c] = LoadPack<kCount>(volume + stencil.OffsetOf(c, params));
    } else {
      values[c] = {};
    }
  }
  stencil.MakeWeights(call);
#pragma unroll
  for (int c = 0; c < kCorners; ++c) {
    if (!stencil.IsThere(c)) stencil.terms[c] = 0;
  }
  const bool is_nan = stencil.lost && call.geometry.method == Method::kLinear;
  StorePack(static_cast<T*>(call.out) + index * call.geometry.width + f,
            WeightedSums<kCount>(values, stencil.terms, is_nan));
}

template <typename T, int kCount, int kAxes>
__global__ void __launch_bounds__(kThreads) VolumeGrad(const __grid_constant__ Params params) {
  using A = Accumulator<T>;
  constexpr int kCorners = 1 << kAxes;
  const Call& call = params.call;
  ForEachRow<A, kCount, kAxes>(
      params, Call::kGradient, [&](const WarpPoints<A, kAxes>& points, uint32_t source, int64_t f) {
        const auto g =
            LoadPack<kCount>(static_cast<const T*>(call.cotangent) + points.rows[source] + f);
        A* sums = static_cast<A*>(params.sums) + points.lows[source] + f;
        const unsigned there = points.there[source];
        A weights[kCorners];
        points.Get(source, weights);
#pragma unroll
        for (int c = 0; c < kCorners; ++c) {
          if (!(there >> c & 1)) continue;
          A products[kCount];
#pragma unroll
          for (int i = 0; i < kCount; ++i) products[i] = weights[c] * Widen(g.values[i]);
          Add<kCount>(sums + CornerOffset<kAxes>(c, params), products);
        }
      });
}

// Sums over `lanes` neighbouring lanes, a power of two, what each has of every corner. Afterwards a
// lane has some corners' sums, from *begin on; returns how many.
template <int kCorners, typename A>
__device__ __forceinline__ int SumCorners(A (&values)[kCorners], int lanes, int* begin) {
  const int lane = threadIdx.x % kWarp;
  int count = kCorners, distance = 1;
  *begin = 0;
#pragma unroll
  for (int half = kCorners / 2; half > 0; half /= 2) {
    if (distance < lanes) {
      const bool upper = lane & distance;
#pragma unroll
      for (int c = 0; c < half; ++c) {
        const A kept = upper ? values[c + half] : values[c];
        const A given = upper ? values[c] : values[c + half];
        values[c] = kept + __shfl_xor_sync(~0u, given, distance);
      }
      *begin += upper ? half : 0;
      count = half;
      distance *= 2;
    }
  }
  for (; distance < lanes; distance *= 2) values[0] += __shfl_xor_sync(~0u, values[0], distance);
  return count;
}

// The gradient by a point that is not a number.
template <typename A>
__device__ __forceinline__ A LostGradient(const Call& call) {
  return static_cast<A>(call.geometry.method == Method::kLinear ? nanf("") : 0.0f);
}

// The gradient by the points, and by the volume if kVolume. Each thread has a point, whose channels
// are few.
template <typename T, int kCount, int kAxes, bool kVolume>
__global__ void __launch_bounds__(kThreads, 2)
    BackwardNarrow(const __grid_constant__ Params params) {
  using A = Accumulator<T>;
  constexpr int kCorners = 1 << kAxes;
  const Call& call = params.call;
  const int64_t width = call.geometry.width;
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= params.points) return;
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
  for (int64_t f = 0; f < width; f += kCount) {
    const auto row = LoadPack<kCount>(cotangent + f);
    Pack<T, kCount> values[kCorners];
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
      if (stencil.IsThere(c)) {
        values[c] = LoadPack<kCount>(volume + stencil.OffsetOf(c, params) + f);
      } else {
        values[c] = {};
      }
    }
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
      if (!stencil.IsThere(c)) continue;
      if constexpr (kVolume) {
        A products[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) products[i] = weights[c] * Widen(row.values[i]);
        Add<kCount>(sums + stencil.OffsetOf(c, params) + f, products);
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) dots[c] += Widen(row.values[i]) * Widen(values[c].values[i]);
    }
  }
  A gradient[kAxes];
  multilinear::PointGradient<kAxes>(stencil.axes, stencil.terms, dots, gradient);
#pragma unroll
  for (int a = 0; a < kAxes; ++a) {
    jaxops::cuda::StoreAs(call.dpoints, index * kAxes + a, call.point_dtype,
                          stencil.lost ? LostGradient<A>(call) : gradient[a]);
  }
}

// The same, but lanes share a point, so that each has some of its channels.
template <typename T, int kCount, int kAxes, bool kVolume>
__global__ void __launch_bounds__(kThreads, kReadingBlocks<T, kVolume>)
    Backward(const __grid_constant__ Params params) {
  using A = Accumulator<T>;
  constexpr int kCorners = 1 << kAxes;
  __shared__ WarpPoints<A, kAxes> shared[kThreads / kWarp];
  WarpPoints<A, kAxes>& points = shared[threadIdx.x / kWarp];
  const Call& call = params.call;
  const int64_t width = call.geometry.width;
  const int lane = threadIdx.x % kWarp;
  // Warps of so many points that lanes which share each go through all in params.rounds.
  const int count = kWarp / params.lanes * params.rounds;
  const int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp * count;
  if (first >= params.points) return;
  const int real = static_cast<int>(min(int64_t{count}, params.points - first));
  const int64_t index = first + min(lane, real - 1);
  const Sought<A, kAxes> sought(params, index);
  int64_t shift = 0;  // from the volume's entries to those of its gradient
  if constexpr (kVolume) {
    shift = call.batch.Offset(sought.entry, Call::kGradient) -
            call.batch.Offset(sought.entry, Call::kVolume);
    points.Put(params, index, sought, Call::kVolume);
  } else {
    points.Put(params, index, Stencil<A, kAxes>(params, sought), Call::kVolume);
  }
  __syncwarp();
  for (int round = 0; round < params.rounds; ++round) {
    const int place = (round * kWarp + lane) / params.lanes;
    const int source = min(place, real - 1);
    const unsigned there = points.there[source];
    const T* volume = static_cast<const T*>(call.volume) + points.lows[source];
    const T* cotangent = static_cast<const T*>(call.cotangent) + points.rows[source];
    A* sums = nullptr;
    A weights[kVolume ? kCorners : 1];
    if constexpr (kVolume) {
      sums = static_cast<A*>(params.sums) + points.lows[source] + __shfl_sync(~0u, shift, source);
      points.Get(source, weights);
    }
    A dots[kCorners] = {};
    for (int64_t f = lane % params.lanes * kCount; f < width; f += params.lanes * kCount) {
      const auto row = LoadPack<kCount>(cotangent + f);
      Pack<T, kCount> values[kCorners];
#pragma unroll
      for (int c = 0; c < kCorners; ++c) {
        if (there >> c & 1) {
          values[c] = LoadPack<kCount>(volume + CornerOffset<kAxes>(c, params) + f);
        } else {
          values[c] = {};
        }
      }
      A g[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) g[i] = Widen(row.values[i]);
#pragma unroll
      for (int c = 0; c < kCorners; ++c) {
        if (!(there >> c & 1)) continue;
        if constexpr (kVolume) {
          if (place < real) {
            A products[kCount];
#pragma unroll
            for (int i = 0; i < kCount; ++i) products[i] = weights[c] * g[i];
            Add<kCount>(sums + CornerOffset<kAxes>(c, params) + f, products);
          }
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) dots[c] += g[i] * Widen(values[c].values[i]);
      }
    }
    int begin;
    const int kept = SumCorners(dots, params.lanes, &begin);
    __syncwarp();  // the weights of the point have been read
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
      if (c < kept && lane % params.lanes < kCorners)
        points.values[place * points.kPitch + begin + c] = dots[c];
    }
  }
  __syncwarp();
  A dots[kCorners], gradient[kAxes];
  points.Get(lane % count, dots);
  __syncwarp();
  // Again, because to keep it would take the registers of loads.
  const Stencil<A, kAxes> stencil(params, sought);
  multilinear::PointGradient<kAxes>(stencil.axes, stencil.terms, dots, gradient);
  // The coordinates of a point are stored side by side.
#pragma unroll
  for (int a = 0; a < kAxes; ++a) {
    points.values[lane * kAxes + a] = stencil.lost ? LostGradient<A>(call) : gradient[a];
  }
  __syncwarp();
#pragma unroll
  for (int round = 0; round < kAxes; ++round) {
    const int i = round * kWarp + lane;
    if (i < real * kAxes) {
      jaxops::cuda::StoreAs(call.dpoints, first * kAxes + i, call.point_dtype, points.values[i]);
    }
  }
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
cudaError_t LaunchWith(cudaStream_t stream, const Call& call, const RoughOrder& order) {
  const bool adds = call.dvolume != nullptr && !call.deterministic;
  if (!adds && IsFasterPlain(call, order, kCount > 1)) {
    return LaunchPlain(stream, call, order, kCount > 1);
  }
  const int64_t row_threads = call.geometry.width / kCount;
  Params params(call, row_threads);
  if (order.points != nullptr) {
    params.order = order.points;
    params.places = order.size;
  }
  if (adds && !std::is_same_v<T, Accumulator<T>>) params.sums = call.scratch;
  const int64_t threads = params.points * row_threads;
  if (call.out != nullptr && order.points == nullptr && threads <= kMostFew) {
    return Launch(SampleFew<T, kCount, kAxes>, CeilDiv(threads, kFewThreads), kFewThreads, 0,
                  stream, params);
  }
  if (call.dpoints == nullptr) {
    const int64_t warps = CeilDiv(params.places, 32) * params.by_split.divisor();
    const auto kernel =
        call.out != nullptr ? Sample<T, kCount, kAxes> : VolumeGrad<T, kCount, kAxes>;
    return Launch(kernel, CeilDiv(warps * 32, kThreads), kThreads, 0, stream, params);
  }
  if (params.lanes == 1) {
    const auto kernel =
        adds ? BackwardNarrow<T, kCount, kAxes, true> : BackwardNarrow<T, kCount, kAxes, false>;
    return Launch(kernel, CeilDiv(params.points, kThreads), kThreads, 0, stream, params);
  }
  const auto kernel = adds ? Backward<T, kCount, kAxes, true> : Backward<T, kCount, kAxes, false>;
  // Fewer points a warp where there are too few to fill the device.
  params.rounds = static_cast<int>(
      std::clamp<int64_t>(params.points * params.lanes / kWarp / kManyWarps, 1, params.lanes));
  const int64_t points_of_block = kThreads / params.lanes * params.rounds;
  const int64_t blocks = CeilDiv(params.points, points_of_block);
  return Launch(kernel, blocks, kThreads, 0, stream, params);
}

template <typename T, int kCount>
cudaError_t LaunchAxes(cudaStream_t stream, const Call& call, const RoughOrder& order) {
  return call.geometry.axes == 3 ? LaunchWith<T, kCount, 3>(stream, call, order)
                                 : LaunchWith<T, kCount, 2>(stream, call, order);
}

bool IsAligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kPackBytes == 0;
}

// Whether the gradients by the volume and by the points are faster by two kernels than by one. A
// plain one by the points is, where the one by the volume is added element by element, but for few
// elements and the shortest rows. Measured on an H200.
bool IsFasterApart(const Call& call, bool packs) {
  const int64_t width = call.geometry.width;
  const int64_t elements = call.batch.size() * call.geometry.points * width;
  return !packs && width > 2 && (width > 32 || elements > int64_t{1} << 18) && IsPlain(call);
}

template <typename T>
cudaError_t LaunchOf(cudaStream_t stream, const Call& call) {
  constexpr int kPack = kPackBytes / sizeof(T);
  using A = Accumulator<T>;
  const int64_t size = call.gradients * call.geometry.grid() * call.geometry.width;
  const bool adds = call.dvolume != nullptr && !call.deterministic;
  const int64_t sums_bytes = adds && !std::is_same_v<T, A> ? size * sizeof(A) : 0;
  if (call.scratch_bytes < sums_bytes) return cudaErrorInvalidValue;
  const int64_t order_offset = CeilDiv(sums_bytes, kPackBytes) * kPackBytes;
  void* sums = std::is_same_v<T, A> ? call.dvolume : call.scratch;
  const bool any = call.batch.size() * call.geometry.points > 0;
  void* order_space = static_cast<unsigned char*>(call.scratch) + order_offset;
  const int64_t order_bytes = call.scratch_bytes - order_offset;
  bool added = !adds;
  if constexpr (std::is_same_v<A, float>) {
    if (adds && any && HasBricks(call)) {
      BrickOrder order;
      JAXOPS_RETURN_IF_ERROR(OrderByBricks(stream, call, order_space, order_bytes, &order));
      if (order.points != nullptr) {
        JAXOPS_RETURN_IF_ERROR(
            LaunchBrickVolumeGrad(stream, call, order, static_cast<float*>(sums)));
        added = true;
      }
    }
  }
  if (!added) JAXOPS_RETURN_IF_ERROR(cudaMemsetAsync(sums, 0, size * sizeof(A), stream));
  const bool aligned = IsAligned(call.volume) && IsAligned(call.cotangent) && IsAligned(call.out) &&
                       IsAligned(call.dvolume) && IsAligned(call.scratch);
  const bool packs = aligned && call.geometry.width % kPack == 0;
  const auto launch = packs ? LaunchAxes<T, kPack> : LaunchAxes<T, 1>;
  if (any && (call.out != nullptr || !added)) {
    RoughOrder order;
    JAXOPS_RETURN_IF_ERROR(OrderRoughly(stream, call, order_space, order_bytes, &order));
    // The gradient by points takes them as they come, so that cotangents are read in their order.
    if (call.dpoints != nullptr && (order.points != nullptr || IsFasterApart(call, packs))) {
      Call first = call;
      first.dpoints = nullptr;
      JAXOPS_RETURN_IF_ERROR(launch(stream, first, order));
      added = true;
    } else {
      JAXOPS_RETURN_IF_ERROR(launch(stream, call, order));
    }
  }
  if (any && call.dpoints != nullptr && added) {
    Call rest = call;
    rest.dvolume = nullptr;
    JAXOPS_RETURN_IF_ERROR(launch(stream, rest, RoughOrder{}));
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
