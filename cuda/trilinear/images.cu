// These kernels compute gradients of trilinear interpolation in cells of few features of 8 bytes: a
// warp copies the features of its cells to shared memory, and a lane has a corner.
#include <cuda_pipeline.h>

#include <cstdint>

#include "common/fast_divide.h"
#include "cuda/trilinear/cells.cuh"
#include "cuda/trilinear/corners.cuh"
#include "cuda/trilinear/families.h"

namespace jaxops::trilinear::cuda {
namespace {

constexpr int kImageThreads = 128;

struct ImageParams {
  WarpParams warp;
  FastDivider pieces;   // vectors of 16 bytes in a cell's features
  int64_t image_bytes;  // features of a warp's cells in shared memory
  int64_t cotangent_bytes;
};

// The kernel computes the feature gradient if kFeatures and the point gradient if kPoints. A lane
// has a corner of every fourth cell.
template <typename T, bool kFeatures, bool kPoints>
__global__ void __launch_bounds__(kImageThreads)
    BackwardImage(const __grid_constant__ ImageParams params) {
  using A = Accumulator<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  const Call& call = params.warp.call;
  const WarpCells cells(call);
  if (cells.count <= 0) return;
  const int64_t warp_bytes =
      params.image_bytes + params.cotangent_bytes + static_cast<int64_t>(sizeof(CornerValues<A>));
  unsigned char* memory = shared + threadIdx.x / kWarp * warp_bytes;
  T* image = reinterpret_cast<T*>(memory);
  A* cotangents = reinterpret_cast<A*>(memory + params.image_bytes);
  auto& corners =
      *reinterpret_cast<CornerValues<A>*>(memory + params.image_bytes + params.cotangent_bytes);
  const int width = static_cast<int>(call.width);
  const int pieces = params.pieces.divisor() * cells.count;
  Coordinates<A> p;
  LoadCoordinates<A>(call, cells.first + cells.own, p);
  if constexpr (kPoints) {
    const WarpFeatures<T> features(params.warp, cells);
    for (int i = cells.lane; i < (pieces + kWarp - 1) / kWarp * kWarp; i += kWarp) {
      uint32_t cell = min(i, pieces - 1);
      const uint32_t piece = params.pieces.DivMod(cell);
      const T* from = features.Of(static_cast<int>(cell)) + piece * kVectorElements<T>;
      if (i < pieces) __pipeline_memcpy_async(image + i * kVectorElements<T>, from, kVectorBytes);
    }
    __pipeline_commit();
  }
  {
    const T* cotangent = static_cast<const T*>(call.cotangent) +
                         call.cells.Offset(cells.first + cells.own, Call::kCotangent);
    for (int f = 0; f < width; ++f) cotangents[cells.lane * width + f] = Widen(cotangent[f]);
  }
  A weights[kCornerRounds];
  const int corner = cells.lane % kCorners;
  const int fourth = cells.lane / kCorners;
  if constexpr (kFeatures) {
    Point<A> point(call, cells.first + cells.own, p);
    corners.Put(cells.lane, point.Weights(call));
  }
  if constexpr (kPoints) __pipeline_wait_prior(0);
  __syncwarp();
  if constexpr (kFeatures) {
#pragma unroll
    for (int j = 0; j < kCornerRounds; ++j) {
      weights[j] = corners.At(j * (kWarp / kCorners) + fourth, corner);
    }
    __syncwarp();
  }
  A dots[kCornerRounds] = {};
  T* row = image + cells.lane * width;
  const A* g = cotangents + fourth * width;
#pragma unroll 1
  for (int f = 0; f < width; ++f) {
#pragma unroll
    for (int j = 0; j < kCornerRounds; ++j) {
      const A factor = g[j * (kWarp / kCorners) * width + f];
      T& value = row[j * kWarp * width + f];
      if constexpr (kPoints) dots[j] += Widen(value) * factor;
      if constexpr (kFeatures) value = Narrow<T>(weights[j] * factor);
    }
  }
  if constexpr (kPoints) {
#pragma unroll
    for (int j = 0; j < kCornerRounds; ++j) {
      corners.At(j * (kWarp / kCorners) + fourth, corner) = dots[j];
    }
  }
  __syncwarp();
  if constexpr (kPoints) {
    A of_cell[kCorners];
    corners.Get(cells.lane, of_cell);
    A gradient[kAxes];
    MakeGradient(call, cells.first + cells.own, p, of_cell, gradient);
    __syncwarp();
    StorePoints<false, T>(call, cells, gradient, corners.values);
  }
  if constexpr (kFeatures) {
    T* to = static_cast<T*>(call.dfeatures) + cells.first * kCorners * width;
    for (int i = cells.lane; i < pieces; i += kWarp) {
      StoreVector(to + i * kVectorElements<T>,
                  LoadVector<kVectorElements<T>>(image + i * kVectorElements<T>));
    }
  }
}

// ImagePlan lays out a block's shared memory.
struct ImagePlan {
  int64_t image_bytes;      // features of a warp's cells
  int64_t cotangent_bytes;  // per warp
  int64_t shared_bytes;

  explicit ImagePlan(const Call& call)
      : image_bytes(kWarp * kCorners * RowBytes(call)), cotangent_bytes(kWarp * RowBytes(call)) {
    constexpr int64_t kCornerBytes = sizeof(CornerValues<double>);
    shared_bytes = kImageThreads / kWarp * (image_bytes + cotangent_bytes + kCornerBytes);
  }
};

}  // namespace

bool CanRunImages(const Call& call, const Device&) {
  return HasAlignedArrays(call) && call.dtype == DType::kF64 && call.out == nullptr &&
         ImagePlan(call).shared_bytes <= jaxops::cuda::kSharedOptInLimit;
}

cudaError_t LaunchImages(cudaStream_t stream, const Call& call, const Device&) {
  const ImagePlan plan(call);
  const ImageParams params{ParamsOfWarps(call),
                           FastDivider(kCorners * RowBytes(call) / kVectorBytes), plan.image_bytes,
                           plan.cotangent_bytes};
  const auto kernel = call.dpoints == nullptr     ? BackwardImage<double, true, false>
                      : call.dfeatures == nullptr ? BackwardImage<double, false, true>
                                                  : BackwardImage<double, true, true>;
  return Launch(kernel, CeilDiv(call.cells.size(), kImageThreads), kImageThreads, plan.shared_bytes,
                stream, params);
}

}  // namespace jaxops::trilinear::cuda
