// This header holds the code that the kernels that sample volumes share.
#ifndef JAXOPS_CUDA_GRID_SAMPLE_SAMPLES_CUH_
#define JAXOPS_CUDA_GRID_SAMPLE_SAMPLES_CUH_

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/fast_divide.h"
#include "common/grid_sample.h"
#include "cuda/common/multilinear.cuh"
#include "cuda/common/numeric.cuh"
#include "cuda/grid_sample/order.cuh"

namespace jaxops::grid_sample::cuda {

using jaxops::cuda::kVectorBytes;

inline constexpr int kThreads = 256;

// This number of warps fills the largest devices.
inline constexpr int64_t kManyWarps = 8192;

struct Params {
  int64_t strides[kMaxAxes];  // of the volume, in elements
  int64_t points;             // of all batch entries
  FastDivider64 by_entry;     // points per batch entry
  FastDivider64 by_row;       // threads per row of channels
  FastDivider row;            // the same
  FastDivider64 by_split;     // warps that share the rows of the same points
  int lanes;                  // lanes per point, a power of two
  int rounds = 1;             // rounds in which a warp's lanes go through its points
  const Placed* order;        // null: the points are not ordered
  int64_t places;             // number of places in the order
  void* sums;                 // dvolume in the arithmetic type
  Call call;

  Params(const Call& args, int64_t row_threads)
      : points(args.batch.size() * args.geometry.points),
        by_entry(std::max<int64_t>(1, args.geometry.points)),
        by_row(row_threads),
        row(row_threads),
        by_split(std::clamp<int64_t>(kManyWarps / (points / 32 + 1), 1, row_threads)),
        lanes(multilinear::cuda::LanesFor(row_threads)),
        order(nullptr),
        places(points),
        sums(args.dvolume),
        call(args) {
    int64_t stride = args.geometry.width;
    for (int a = args.geometry.axes - 1; a >= 0; --a) {
      strides[a] = stride;
      stride *= args.geometry.sizes[a];
    }
  }
};

// Sought is one point of all batch entries.
template <typename A, int kAxes>
struct Sought {
  int64_t entry;  // batch entry
  int64_t point;  // index within the batch entry
  A coordinates[kAxes];

  // Ordered points belong to the only batch entry.
  __device__ __forceinline__ Sought(const Params& params, const Placed& placed)
      : entry(0), point(placed.index) {
    if constexpr (std::is_same_v<A, float>) {
#pragma unroll
      for (int a = 0; a < kAxes; ++a) coordinates[a] = placed.coordinates[a];
    } else {
      multilinear::cuda::LoadPoint<kAxes>(params.call.points, point * kAxes,
                                          params.call.point_dtype, coordinates);
    }
  }

  Sought() = default;
  __device__ __forceinline__ Sought(const Params& params, int64_t index) {
    uint64_t rest = index;
    point = params.by_entry.DivMod(rest);
    entry = rest;
    multilinear::cuda::LoadPoint<kAxes>(
        params.call.points, params.call.batch.Offset(entry, Call::kPoints) + point * kAxes,
        params.call.point_dtype, coordinates);
  }
};

// LocateAll finds the entries around a point along every axis.
template <typename A, int kAxes>
__device__ __forceinline__ void LocateAll(const A (&p)[kAxes], const Geometry& geometry,
                                          Place<A> (&found)[kAxes]) {
  if (geometry.padding == Padding::kZeros && geometry.method == Method::kLinear) {
#pragma unroll
    for (int a = 0; a < kAxes; ++a) found[a] = LocateInZeros(p[a], geometry.sizes[a], geometry);
  } else {
#pragma unroll
    for (int a = 0; a < kAxes; ++a) found[a] = Locate(p[a], geometry.sizes[a], geometry);
  }
}

// Stencil holds the entries around a point and the terms of their weights.
template <typename A, int kAxes>
struct Stencil {
  static constexpr int kCorners = 1 << kAxes;

  int64_t entry;
  int64_t point;
  multilinear::Axis<A> axes[kAxes];
  A terms[kCorners];
  int32_t places[kAxes];  // the lower entries
  int64_t low;            // offset of the lowest entry, which may lie outside the volume
  unsigned lower = 0;     // bit a: axis a has the lower entry; `upper` likewise
  unsigned upper = 0;
  bool lost = false;  // a coordinate is NaN

  __device__ __forceinline__ Stencil(const Params& params, int64_t index)
      : Stencil(params, Sought<A, kAxes>(params, index)) {}

  __device__ __forceinline__ Stencil(const Params& params, const Sought<A, kAxes>& sought)
      : entry(sought.entry), point(sought.point) {
    const auto& p = sought.coordinates;
    const Call& call = params.call;
    Place<A> found[kAxes];
    LocateAll(p, call.geometry, found);
    low = 0;
#pragma unroll
    for (int a = 0; a < kAxes; ++a) {
      lost = lost || p[a] != p[a];
      axes[a] = found[a].axis;
      places[a] = found[a].entry;
      low += found[a].entry * params.strides[a];
      lower |= found[a].lower ? 1u << a : 0;
      upper |= found[a].upper ? 1u << a : 0;
    }
    multilinear::NoDerivative<kAxes>(terms);
#pragma unroll 1
    for (int d = 0; d < call.order; ++d) {
      A direction[kAxes];
      multilinear::cuda::LoadPoint<kAxes>(
          call.directions[d], call.batch.Offset(entry, Call::kDirections + d) + point * kAxes,
          call.point_dtype, direction);
      multilinear::Differentiate<kAxes>(axes, direction, terms);
    }
  }

  // MakeWeights overwrites the terms, so it must be called last.
  __device__ __forceinline__ void MakeWeights(const Call& call) {
    if (call.order == 0) {
      multilinear::PlainWeights<kAxes>(axes, terms);
    } else {
      multilinear::TermsToWeights<kAxes>(axes, terms);
    }
  }

  __device__ __forceinline__ bool IsThere(int corner) const {
    bool there = !lost;
#pragma unroll
    for (int a = 0; a < kAxes; ++a) {
      const bool up = corner & multilinear::BitOf<kAxes>(a);
      there = there && ((up ? upper : lower) >> a & 1);
    }
    return there;
  }

  // OffsetOf returns the offset of a corner's entry in elements of the volume.
  __device__ __forceinline__ int64_t OffsetOf(int corner, const Params& params) const {
    int64_t offset = low;
#pragma unroll
    for (int a = 0; a < kAxes; ++a) {
      if (corner & multilinear::BitOf<kAxes>(a)) offset += params.strides[a];
    }
    return offset;
  }
};

// Add adds to neighbouring sums in memory, four at a time if the device has such an instruction.
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

// CornerOffset returns the offset of a corner's entry from the lowest entry.
template <int kAxes>
__device__ __forceinline__ int64_t CornerOffset(int corner, const Params& params) {
  int64_t offset = 0;
#pragma unroll
  for (int a = 0; a < kAxes; ++a) {
    if (corner & multilinear::BitOf<kAxes>(a)) offset += params.strides[a];
  }
  return offset;
}

// WeightedSums returns the weighted sums of the entries around a point for kCount channels.
template <int kCount, typename A, typename T, int kCorners>
__device__ __forceinline__ jaxops::cuda::Vector<T, kCount> WeightedSums(
    const jaxops::cuda::Vector<T, kCount> (&values)[kCorners], const A (&weights)[kCorners],
    bool is_nan) {
  A sums[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = is_nan ? static_cast<A>(nanf("")) : A(0);
#pragma unroll
  for (int c = 0; c < kCorners; ++c) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      sums[i] += weights[c] * jaxops::cuda::Widen(values[c].values[i]);
  }
  jaxops::cuda::Vector<T, kCount> out;
#pragma unroll
  for (int i = 0; i < kCount; ++i) out.values[i] = jaxops::cuda::Narrow<T>(sums[i]);
  return out;
}

// LostGradient is the gradient with respect to a point that is not a number.
template <typename A>
__device__ __forceinline__ A LostGradient(const Call& call) {
  return static_cast<A>(call.geometry.method == Method::kLinear ? nanf("") : 0.0f);
}

}  // namespace jaxops::grid_sample::cuda

#endif  // JAXOPS_CUDA_GRID_SAMPLE_SAMPLES_CUH_
