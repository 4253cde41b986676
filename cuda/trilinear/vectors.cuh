// In these kernels a thread moves kCount elements of each of the eight corners directly between
// registers and global memory: a vector of 16 bytes, see vectors.cu, or one element, see
// elements.cu.
#ifndef JAXOPS_CUDA_TRILINEAR_VECTORS_CUH_
#define JAXOPS_CUDA_TRILINEAR_VECTORS_CUH_

#include <cstdint>

#include "common/fast_divide.h"
#include "cuda/trilinear/cells.cuh"

namespace jaxops::trilinear::cuda {

constexpr int kThreads = 256;

// A multiprocessor has at least this number of blocks of the kernels that read features, which
// leaves registers for all of a thread's loads.
template <typename T, bool kWrites>
constexpr int kBlocksOf = kWrites || sizeof(T) == 8 ? 2 : 3;

struct VectorParams {
  Call call;
  FastDivider64 by_cell;  // vectors per corner
  int64_t vectors;        // vectors per corner, times the number of cells
  int lanes;              // lanes per cell, a power of two
};

template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads, kBlocksOf<T, false>)
    InterpolateVectors(const __grid_constant__ VectorParams params) {
  using A = Accumulator<T>;
  uint64_t cell = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (cell >= params.vectors) return;
  const int64_t f = static_cast<int64_t>(params.by_cell.DivMod(cell)) * kCount;
  const Call& call = params.call;
  const T* features =
      static_cast<const T*>(call.features) + call.cells.Offset(cell, Call::kFeatures) + f;
  Vector<T, kCount> corners[kCorners];
#pragma unroll
  for (int c = 0; c < kCorners; ++c) corners[c] = LoadVector<kCount>(features + c * call.width);
  Point<A> point(call, cell);
  const A(&weights)[kCorners] = point.Weights(call);
  Vector<T, kCount> out;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    // The sum starts at zero and has the same order as in plain calls, so that both have the same
    // bits.
    A sum = 0;
#pragma unroll
    for (int c = 0; c < kCorners; ++c) sum += weights[c] * Widen(corners[c].values[i]);
    out.values[i] = Narrow<T>(sum);
  }
  StoreVector(static_cast<T*>(call.out) + cell * call.width + f, out);
}

template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads)
    FeatureGradVectors(const __grid_constant__ VectorParams params) {
  using A = Accumulator<T>;
  uint64_t cell = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (cell >= params.vectors) return;
  const int64_t f = static_cast<int64_t>(params.by_cell.DivMod(cell)) * kCount;
  const Call& call = params.call;
  const auto g = LoadVector<kCount>(static_cast<const T*>(call.cotangent) +
                                    call.cells.Offset(cell, Call::kCotangent) + f);
  Point<A> point(call, cell);
  const A(&weights)[kCorners] = point.Weights(call);
  T* to = static_cast<T*>(call.dfeatures) + cell * kCorners * call.width + f;
#pragma unroll
  for (int c = 0; c < kCorners; ++c) {
    Vector<T, kCount> out;
#pragma unroll
    for (int i = 0; i < kCount; ++i) out.values[i] = Narrow<T>(weights[c] * Widen(g.values[i]));
    StoreVector(to + c * call.width, out);
  }
}

// The kernel computes the point gradient, and the feature gradient if kFeatures.
template <typename T, int kCount, bool kFeatures>
__global__ void __launch_bounds__(kThreads, kBlocksOf<T, kFeatures>)
    BackwardVectors(const __grid_constant__ VectorParams params) {
  using A = Accumulator<T>;
  const Call& call = params.call;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int lane = static_cast<int>(threadIdx.x) & (params.lanes - 1);
  int64_t cell = thread / params.lanes;
  // Lanes without a cell sum along with those of the last cell, because the shuffles need whole
  // warps.
  const bool real = cell < call.cells.size();
  if (!real) cell = call.cells.size() - 1;
  const T* features =
      static_cast<const T*>(call.features) + call.cells.Offset(cell, Call::kFeatures);
  const T* cotangent =
      static_cast<const T*>(call.cotangent) + call.cells.Offset(cell, Call::kCotangent);
  Point<A> point(call, cell);
  A weights[kCorners];
  if constexpr (kFeatures) {
    Point<A> other = point;
    const A(&made)[kCorners] = other.Weights(call);
#pragma unroll
    for (int c = 0; c < kCorners; ++c) weights[c] = made[c];
  }
  A dots[kCorners] = {};
  for (int64_t f = int64_t{lane} * kCount; f < call.width; f += params.lanes * kCount) {
    const auto g = LoadVector<kCount>(cotangent + f);
    Vector<T, kCount> corners[kCorners];
#pragma unroll
    for (int c = 0; c < kCorners; ++c)
      corners[c] = LoadVector<kCount>(features + c * call.width + f);
    if constexpr (kFeatures) {
      T* to = static_cast<T*>(call.dfeatures) + cell * kCorners * call.width + f;
#pragma unroll
      for (int c = 0; c < kCorners; ++c) {
        Vector<T, kCount> out;
#pragma unroll
        for (int i = 0; i < kCount; ++i) out.values[i] = Narrow<T>(weights[c] * Widen(g.values[i]));
        if (real) StoreVector(to + c * call.width, out);
      }
    }
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        dots[c] += Widen(corners[c].values[i]) * Widen(g.values[i]);
      }
    }
  }
  A gradient[kAxes];
  multilinear::PointGradient<kAxes>(point.axes, point.terms, dots, gradient);
  multilinear::cuda::SumOverLanes(gradient, params.lanes);
  if (real && lane == 0) StorePoint(call, cell, gradient);
}

template <typename T, int kCount>
cudaError_t LaunchVectorsOf(cudaStream_t stream, const Call& call) {
  VectorParams params{call, FastDivider64(call.width / kCount),
                      call.cells.size() * (call.width / kCount),
                      multilinear::cuda::LanesFor(call.width / kCount)};
  if (call.dpoints != nullptr) {
    const int64_t blocks = CeilDiv(call.cells.size(), kThreads / params.lanes);
    const auto kernel = call.dfeatures != nullptr ? BackwardVectors<T, kCount, true>
                                                  : BackwardVectors<T, kCount, false>;
    return Launch(kernel, blocks, kThreads, 0, stream, params);
  }
  const auto kernel =
      call.out != nullptr ? InterpolateVectors<T, kCount> : FeatureGradVectors<T, kCount>;
  return Launch(kernel, CeilDiv(params.vectors, kThreads), kThreads, 0, stream, params);
}

}  // namespace jaxops::trilinear::cuda

#endif  // JAXOPS_CUDA_TRILINEAR_VECTORS_CUH_
