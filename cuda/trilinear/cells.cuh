// This header holds the code that the kernels of trilinear interpolation in cells share: weights
// and gradients from a cell's point, and the assignment of cells to warps and blocks.
#ifndef JAXOPS_CUDA_TRILINEAR_CELLS_CUH_
#define JAXOPS_CUDA_TRILINEAR_CELLS_CUH_

#include <cstdint>
#include <type_traits>

#include "common/trilinear.h"
#include "cuda/common/launch.h"
#include "cuda/common/multilinear.cuh"
#include "cuda/common/numeric.cuh"

namespace jaxops::trilinear::cuda {

using jaxops::cuda::Accumulator;
using jaxops::cuda::CeilDiv;
using jaxops::cuda::kVectorBytes;
using jaxops::cuda::kVectorElements;
using jaxops::cuda::kWarp;
using jaxops::cuda::Launch;
using jaxops::cuda::LoadVector;
using jaxops::cuda::Narrow;
using jaxops::cuda::StoreVector;
using jaxops::cuda::Vector;
using jaxops::cuda::Widen;
using multilinear::Axis;

template <typename A>
using Coordinates = A[kAxes];

template <typename A>
__device__ __forceinline__ void LoadCoordinates(const Call& call, int64_t cell,
                                                Coordinates<A>& coordinates) {
  multilinear::cuda::LoadPoint<kAxes>(call.points, call.cells.Offset(cell, Call::kPoints),
                                      call.point_dtype, coordinates);
}

template <typename A>
__device__ __forceinline__ void MakeAxes(const Coordinates<A>& p, Axis<A> (&axes)[kAxes]) {
#pragma unroll
  for (int a = 0; a < kAxes; ++a) axes[a] = {(1 - p[a]) / 2, (1 + p[a]) / 2, A(0.5)};
}

// Point holds a cell's point and the terms of its derivatives, from which the weights follow.
template <typename A>
struct Point {
  Axis<A> axes[kAxes];
  A terms[kCorners];

  __device__ __forceinline__ Point(const Call& call, int64_t cell, const Coordinates<A>& p) {
    MakeAxes(p, axes);
    multilinear::NoDerivative<kAxes>(terms);
#pragma unroll 1
    for (int d = 0; d < call.order; ++d) {
      A direction[kAxes];
      multilinear::cuda::LoadPoint<kAxes>(call.directions[d],
                                          call.cells.Offset(cell, Call::kDirections + d),
                                          call.point_dtype, direction);
      multilinear::Differentiate<kAxes>(axes, direction, terms);
    }
  }

  __device__ __forceinline__ Point(const Call& call, int64_t cell)
      : Point(call, cell, Loaded(call, cell).coordinates) {}

  // Weights overwrites the terms, so no other member may be called after Weights.
 __device__ __forceinline__ const A (&Weights(const Call& call)) [kCorners] {
   if (call.order == 0) {
     multilinear::PlainWeights<kAxes>(axes, terms);
   } else {
     multilinear::TermsToWeights<kAxes>(axes, terms);
   }
   return terms;
 }

 private : struct Loaded {
    Coordinates<A> coordinates;
    __device__ __forceinline__ Loaded(const Call& call, int64_t cell) {
      LoadCoordinates<A>(call, cell, coordinates);
    }
  };
};

template <typename A>
__device__ __forceinline__ void StorePoint(const Call& call, int64_t cell,
                                           const A (&value)[kAxes]) {
#pragma unroll
  for (int a = 0; a < kAxes; ++a) {
    jaxops::cuda::StoreAs(call.dpoints, cell * kAxes + a, call.point_dtype, value[a]);
  }
}

// MakeGradient computes the point gradient of a cell from the dot products of its corners, which
// MakeGradient overwrites. kPlain says that the weights are no derivatives, with which the compiler
// needs fewer registers.
template <bool kPlain = false, typename A>
__device__ __forceinline__ void MakeGradient(const Call& call, int64_t cell,
                                             const Coordinates<A>& p, A (&dots)[kCorners],
                                             A (&gradient)[kAxes]) {
  if (kPlain || call.order == 0) {
    Axis<A> axes[kAxes];
    MakeAxes(p, axes);
    multilinear::PlainPointGradient<kAxes>(axes, dots, gradient);
  } else {
    const Point<A> point(call, cell, p);
    multilinear::PointGradient<kAxes>(point.axes, point.terms, dots, gradient);
  }
}

template <bool kPlain = false, typename A>
__device__ __forceinline__ void MakeWeights(const Call& call, int64_t cell, const Coordinates<A>& p,
                                            A (&weights)[kCorners]) {
  if (kPlain || call.order == 0) {
    Axis<A> axes[kAxes];
    MakeAxes(p, axes);
    multilinear::PlainWeights<kAxes>(axes, weights);
  } else {
    Point<A> point(call, cell, p);
    multilinear::TermsToWeights<kAxes>(point.axes, point.terms);
#pragma unroll
    for (int c = 0; c < kCorners; ++c) weights[c] = point.terms[c];
  }
}

// WidenHalf converts the lower or the upper 16 bits.
template <typename T>
__device__ __forceinline__ float WidenHalf(uint32_t word, bool upper) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __uint_as_float(upper ? word & 0xffff0000u : word << 16);
  } else {
    return Widen(__ushort_as_half(static_cast<unsigned short>(upper ? word >> 16 : word)));
  }
}

struct WarpParams {
  Call call;
  int64_t stride;  // elements between the features of two cells; unused for nested cells
  bool nested;     // cells have more than one dimension, so one stride does not describe them
};

// WarpCells says which cells a warp has.
struct WarpCells {
  int lane;
  int64_t first;
  int count;  // at most 32; negative: the warp has no cell
  int own;    // the cell of this lane; lanes without a cell have the last one

  __device__ __forceinline__ explicit WarpCells(const Call& call) {
    lane = static_cast<int>(threadIdx.x % kWarp);
    first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kWarp * kWarp;
    count = static_cast<int>(min(int64_t{kWarp}, call.cells.size() - first));
    own = min(lane, count - 1);
  }
};

// WarpFeatures gives the addresses of the features of a warp's cells. All lanes of the warp call Of
// together, each for one cell.
template <typename T>
struct WarpFeatures {
  const T* own;
  int64_t stride;
  bool nested;

  __device__ __forceinline__ WarpFeatures(const WarpParams& params, const WarpCells& cells) {
    nested = params.nested;
    stride = params.stride;
    own = static_cast<const T*>(params.call.features) +
          params.call.cells.Offset(cells.first + (nested ? cells.own : 0), Call::kFeatures);
  }

  __device__ __forceinline__ const T* Of(int cell) const {
    if (!nested) return own + cell * stride;
    return reinterpret_cast<const T*>(
        __shfl_sync(~0u, reinterpret_cast<unsigned long long>(own), cell));
  }
};

inline WarpParams ParamsOfWarps(const Call& call) {
  return {call, call.cells.rank() == 1 ? call.cells.stride(0, Call::kFeatures) : 0,
          call.cells.rank() > 1};
}

// StorePoints stores the point gradients of a warp's cells in the order of memory, because three
// stores with a stride of three elements would each touch all sectors. `staged` has kAxes elements
// per lane. kPlain says that points are of type T.
template <bool kPlain, typename T, typename A>
__device__ __forceinline__ void StorePoints(const Call& call, const WarpCells& cells,
                                            const A (&gradient)[kAxes], A* staged) {
#pragma unroll
  for (int a = 0; a < kAxes; ++a) staged[cells.lane * kAxes + a] = gradient[a];
  __syncwarp();
#pragma unroll
  for (int a = 0; a < kAxes; ++a) {
    const int i = a * kWarp + cells.lane;
    if (i >= cells.count * kAxes) continue;
    if constexpr (kPlain) {
      static_cast<T*>(call.dpoints)[cells.first * kAxes + i] = Narrow<T>(staged[i]);
    } else {
      jaxops::cuda::StoreAs(call.dpoints, cells.first * kAxes + i, call.point_dtype, staged[i]);
    }
  }
}

// Bulk copies are the fastest when source and destination have the same offset within a line.
inline constexpr int kLineBytes = 128;
__device__ __forceinline__ int PlaceInLine(const void* address) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(address) % kLineBytes);
}

}  // namespace jaxops::trilinear::cuda

#endif  // JAXOPS_CUDA_TRILINEAR_CELLS_CUH_
