// These kernels interpolate two features of 4 or 8 bytes per corner, and compute gradients of rows
// of one or two vectors, or of two features of 4 bytes.
//
// A warp has 32 cells. A lane computes the weights or the gradient of one cell, but moves rows or
// parts of rows in the order of memory, so that the accesses of a warp are whole lines. Lanes
// exchange values of corners through shared memory.
#include <cstdint>

#include "cuda/trilinear/cells.cuh"
#include "cuda/trilinear/corners.cuh"
#include "cuda/trilinear/families.h"

namespace jaxops::trilinear::cuda {
namespace {

constexpr int kThreads = 256;

// A row has kCount elements, which one access moves.
template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads)
    InterpolateRows(const __grid_constant__ WarpParams params) {
  using A = Accumulator<T>;
  __shared__ CornerValues<A> shared[kThreads / kWarp];
  const Call& call = params.call;
  const WarpCells cells(call);
  if (cells.count <= 0) return;
  const int corner = cells.lane % kCorners;
  Coordinates<A> p;
  LoadCoordinates<A>(call, cells.first + cells.own, p);
  const WarpFeatures<T> features(params, cells);
  Vector<T, kCount> rows[kCornerRounds];
#pragma unroll
  for (int j = 0; j < kCornerRounds; ++j) {
    const int cell = min((j * kWarp + cells.lane) / kCorners, cells.count - 1);
    rows[j] = LoadVector<kCount>(features.Of(cell) + corner * kCount);
  }
  CornerValues<A>& weights = shared[threadIdx.x / kWarp];
  Point<A> point(call, cells.first + cells.own, p);
  weights.Put(cells.lane, point.Weights(call));
  __syncwarp();
  A sums[kCornerRounds][kCount];
#pragma unroll
  for (int j = 0; j < kCornerRounds; ++j) {
    const A weight = weights.At((j * kWarp + cells.lane) / kCorners, corner);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[j][i] = weight * Widen(rows[j].values[i]);
  }
  // This is a reduction over the lanes of the corners: each lane keeps half of its cells in each
  // step.
#pragma unroll
  for (int half = kCornerRounds / 2; half > 0; half /= 2) {
    const bool upper = corner & half;
#pragma unroll
    for (int j = 0; j < half; ++j) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const A kept = upper ? sums[j + half][i] : sums[j][i];
        const A given = upper ? sums[j][i] : sums[j + half][i];
        sums[j][i] = kept + __shfl_xor_sync(~0u, given, half);
      }
    }
  }
  const int cell = corner * (kWarp / kCorners) + cells.lane / kCorners;
  if (cell >= cells.count) return;
  Vector<T, kCount> out;
#pragma unroll
  for (int i = 0; i < kCount; ++i) out.values[i] = Narrow<T>(sums[0][i]);
  StoreVector(static_cast<T*>(call.out) + (cells.first + cell) * kCount, out);
}

// The kernel computes the feature gradient if kFeatures and the point gradient if kPoints. A row
// has kPieces vectors of kCount elements, and a warp moves the vectors of its rows in order.
template <typename T, int kCount, int kPieces, bool kFeatures, bool kPoints>
__global__ void __launch_bounds__(kThreads)
    BackwardRows(const __grid_constant__ WarpParams params) {
  using A = Accumulator<T>;
  constexpr int kWidth = kCount * kPieces;
  constexpr int kRounds = kCornerRounds * kPieces;
  __shared__ CornerValues<A> shared[kThreads / kWarp];
  __shared__ Vector<T, kCount> cotangents[kThreads][kPieces];
  const Call& call = params.call;
  const WarpCells cells(call);
  if (cells.count <= 0) return;
  const auto cell_of = [&](int j) { return (j * kWarp + cells.lane) / (kCorners * kPieces); };
  const int corner = cells.lane / kPieces % kCorners;
  const int piece = cells.lane % kPieces;
  // All loads are issued before the first use of any.
  Coordinates<A> p;
  LoadCoordinates<A>(call, cells.first + cells.own, p);
  const T* cotangent = static_cast<const T*>(call.cotangent) +
                       call.cells.Offset(cells.first + cells.own, Call::kCotangent);
  Vector<T, kCount> own[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) own[i] = LoadVector<kCount>(cotangent + i * kCount);
  [[maybe_unused]] Vector<T, kCount> rows[kPoints ? kRounds : 1];
  if constexpr (kPoints) {
    const WarpFeatures<T> features(params, cells);
#pragma unroll
    for (int j = 0; j < kRounds; ++j) {
      rows[j] = LoadVector<kCount>(features.Of(min(cell_of(j), cells.count - 1)) + corner * kWidth +
                                   piece * kCount);
    }
  }
#pragma unroll
  for (int i = 0; i < kPieces; ++i) cotangents[threadIdx.x][i] = own[i];
  const auto* of_warp = cotangents + threadIdx.x / kWarp * kWarp;
  CornerValues<A>& corners = shared[threadIdx.x / kWarp];
  if constexpr (kFeatures) {
    Point<A> point(call, cells.first + cells.own, p);
    corners.Put(cells.lane, point.Weights(call));
  }
  __syncwarp();
  T* to = nullptr;
  if constexpr (kFeatures) {
    to = static_cast<T*>(call.dfeatures) + cells.first * kCorners * kWidth;
  }
#pragma unroll
  for (int j = 0; j < kRounds; ++j) {
    const int cell = cell_of(j);
    const Vector<T, kCount> g = of_warp[cell][piece];
    if constexpr (kFeatures) {
      const A weight = corners.At(cell, corner);
      Vector<T, kCount> out;
#pragma unroll
      for (int i = 0; i < kCount; ++i) out.values[i] = Narrow<T>(weight * Widen(g.values[i]));
      if (cell < cells.count) StoreVector(to + (j * kWarp + cells.lane) * kCount, out);
    }
    if constexpr (kPoints) {
      A dot = 0;
#pragma unroll
      for (int i = 0; i < kCount; ++i) dot += Widen(rows[j].values[i]) * Widen(g.values[i]);
#pragma unroll
      for (int distance = 1; distance < kPieces; distance *= 2) {
        dot += __shfl_xor_sync(~0u, dot, distance);
      }
      // The dot product overwrites the weight, which the lanes of other vectors may not yet have
      // read.
      if constexpr (kFeatures && kPieces > 1) __syncwarp();
      if (piece == 0) corners.At(cell, corner) = dot;
    }
  }
  if constexpr (kPoints) {
    __syncwarp();
    A dots[kCorners];
    corners.Get(cells.lane, dots);
    A gradient[kAxes];
    MakeGradient(call, cells.first + cells.own, p, dots, gradient);
    __syncwarp();
    StorePoints<false, T>(call, cells, gradient, corners.values);
  }
}

template <typename T, int kCount, int kPieces>
cudaError_t LaunchGradients(cudaStream_t stream, const Call& call) {
  const auto kernel = call.dpoints == nullptr     ? BackwardRows<T, kCount, kPieces, true, false>
                      : call.dfeatures == nullptr ? BackwardRows<T, kCount, kPieces, false, true>
                                                  : BackwardRows<T, kCount, kPieces, true, true>;
  return Launch(kernel, CeilDiv(call.cells.size(), kThreads), kThreads, 0, stream,
                ParamsOfWarps(call));
}

template <typename T>
cudaError_t LaunchOf(cudaStream_t stream, const Call& call) {
  constexpr int kVector = kVectorElements<T>;
  if (call.out != nullptr) {
    if constexpr (sizeof(T) > 2) {
      if (call.width == 2) {
        return Launch(InterpolateRows<T, 2>, CeilDiv(call.cells.size(), kThreads), kThreads, 0,
                      stream, ParamsOfWarps(call));
      }
    }
    return cudaErrorNotSupported;
  }
  if (call.width == 2 * kVector) return LaunchGradients<T, kVector, 2>(stream, call);
  if (call.width == kVector) return LaunchGradients<T, kVector, 1>(stream, call);
  if constexpr (kVector == 4) {
    if (call.width == 2) return LaunchGradients<T, 2, 1>(stream, call);
  }
  return cudaErrorNotSupported;
}

}  // namespace

bool CanRunRows(const Call& call, const Device&) {
  if (!HasAlignedArrays(call)) return false;
  const int64_t vector = VectorElements(call);
  if (call.out != nullptr) return call.width == 2 && vector < 8;
  return call.width == vector || call.width == 2 * vector || (call.width == 2 && vector == 4);
}

cudaError_t LaunchRows(cudaStream_t stream, const Call& call, const Device&) {
  return jaxops::cuda::DispatchFloat(call.dtype,
                                     [&]<typename T>(T) { return LaunchOf<T>(stream, call); });
}

}  // namespace jaxops::trilinear::cuda
