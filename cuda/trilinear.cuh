// What the kernels of trilinear interpolation in cells share: what they make of a cell's point, and
// which cells a warp has.
#ifndef JAXOPS_CUDA_TRILINEAR_CUH_
#define JAXOPS_CUDA_TRILINEAR_CUH_

#include <cuda_pipeline.h>

#include <algorithm>
#include <cstdint>

#include "common/fast_divide.h"
#include "cuda/launch.h"
#include "cuda/multilinear.cuh"
#include "cuda/numeric.cuh"
#include "cuda/trilinear.h"

namespace jaxops::trilinear::cuda {

using jaxops::cuda::Accumulator;
using jaxops::cuda::CeilDiv;
using jaxops::cuda::kPackBytes;
using jaxops::cuda::kPackElements;
using jaxops::cuda::kWarp;
using jaxops::cuda::Launch;
using jaxops::cuda::LoadPack;
using jaxops::cuda::Narrow;
using jaxops::cuda::Pack;
using jaxops::cuda::StorePack;
using jaxops::cuda::Widen;
using multilinear::Axis;

// See trilinear_narrow.cu: values of rows of 2 bytes an element, and gradients of those of at most
// 4 bytes, of some widths up to kMaxNarrowWidth.
inline constexpr int64_t kMaxNarrowWidth = 15;
inline constexpr bool HasNarrowGradients(int64_t width, int64_t item_bytes) {
  return width <= kMaxNarrowWidth && width != 8 && (item_bytes == 2 || (width != 2 && width != 4));
}
inline constexpr bool HasNarrowValues(int64_t width) {
  return width == 2 || width == 4 || (width <= kMaxNarrowWidth && width % 2 != 0);
}
cudaError_t LaunchNarrow(cudaStream_t stream, const Call& call);

// Gradients of rows of at least one vector and at most kMaxShiftRowBytes, of at most 4 bytes an
// element, see trilinear_shifts.cu.
inline constexpr int64_t kMaxShiftRowBytes = 56 * 1024;
cudaError_t LaunchShifts(cudaStream_t stream, const Call& call);

// Calls of operands and results that are aligned to vectors, see trilinear_plain.cu.
bool HasFasterPlain(const Call& call);
cudaError_t LaunchPlain(cudaStream_t stream, const Call& call);

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

// A cell's point, and what to do with it.
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

  // To be called last: it replaces the terms.
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

// Makes the gradient by the point of a cell of the dot products of its corners, which it
// overwrites. kPlain says that the weights are no derivatives, which the compiler turns into fewer
// registers.
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

// Whether the features of all cells follow each other.
inline bool AreDense(const Call& call) {
  return call.cells.rank() == 0 ||
         (call.cells.rank() == 1 && call.cells.stride(0, Call::kFeatures) == kCorners * call.width);
}

struct WarpParams {
  Call call;
  int64_t stride;  // between the features of two cells
  bool nested;     // they have none
};

// Which cells a warp has, and where their features are.
struct WarpCells {
  int lane;
  int64_t first;
  int count;  // at most 32; negative: none
  int own;    // the cell of this lane; the last has those of lanes that have none

  __device__ __forceinline__ explicit WarpCells(const Call& call) {
    lane = static_cast<int>(threadIdx.x % kWarp);
    first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kWarp * kWarp;
    count = static_cast<int>(min(int64_t{kWarp}, call.cells.size() - first));
    own = min(lane, count - 1);
  }
};

// Where the features of a warp's cells are. All lanes ask, each for a cell.
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

// Stores the gradients by the points of a warp's cells in the order of memory: three stores of
// every third element would each cost all the sectors. `staged` has kAxes elements a lane. kPlain
// says that points are of type T.
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

// Has the threads of a block start to copy the features of some cells to shared memory, in vectors
// of 16 bytes of which a cell has `vectors`. They are dense where those of all cells follow each
// other.
template <typename T>
__device__ __forceinline__ void CopyFeatures(const Call& call, const FastDivider& vectors,
                                             bool dense, int64_t first, int cells, int threads,
                                             T* to) {
  constexpr int kPack = kPackElements<T>;
  const int per_cell = static_cast<int>(vectors.divisor());
  const T* from = static_cast<const T*>(call.features);
  if (dense) from += first * kCorners * call.width;
#pragma unroll 4
  for (int i = threadIdx.x; i < cells * per_cell; i += threads) {
    int64_t at = i * kPack;
    if (!dense) {
      uint32_t cell = i;
      const uint32_t vector = vectors.Peel(cell);
      at = call.cells.Offset(first + cell, Call::kFeatures) + vector * kPack;
    }
    __pipeline_memcpy_async(to + i * kPack, from + at, kPackBytes);
  }
  __pipeline_commit();
}

}  // namespace jaxops::trilinear::cuda

#endif  // JAXOPS_CUDA_TRILINEAR_CUH_
