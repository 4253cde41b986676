// These kernels interpolate in cells whose rows are whole vectors: a block copies the features of
// several cells to shared memory by vectors of 16 bytes, and a thread sums a vector.
#include <cuda_pipeline.h>

#include <algorithm>
#include <cstdint>

#include "common/fast_divide.h"
#include "cuda/trilinear/cells.cuh"
#include "cuda/trilinear/families.h"

namespace jaxops::trilinear::cuda {
namespace {

constexpr int kThreads = 256;

constexpr int kBankLineBytes = 128;

// The features of a tile fill about this much shared memory, which leaves room for several blocks
// on a multiprocessor.
constexpr int64_t kTileBytes = 24 * 1024;
constexpr int64_t kMaxTileCells = 512;

// The padding between the weights of two corners in shared memory puts the corners of a cell into
// different banks.
constexpr int kWeightPadding = 4;

struct TileParams {
  Call call;
  int tile_cells;
  FastDivider pieces;      // vectors of 16 bytes in a cell's features
  FastDivider width;       // elements of a corner
  int64_t features_bytes;  // bytes of a tile's features in shared memory, before the weights
};

// Tile describes the shared memory of a block.
template <typename T>
struct Tile {
  using A = Accumulator<T>;

  const T* features;
  A* weights;
  int pitch;      // between the weights of two corners
  int64_t first;  // index of the tile's first cell
  int cells;

  __device__ __forceinline__ Tile(const TileParams& params, unsigned char* shared) {
    features = reinterpret_cast<const T*>(shared);
    weights = reinterpret_cast<A*>(shared + params.features_bytes);
    pitch = params.tile_cells + kWeightPadding;
    first = int64_t{blockIdx.x} * params.tile_cells;
    cells = static_cast<int>(min(int64_t{params.tile_cells}, params.call.cells.size() - first));
  }

  __device__ __forceinline__ void FetchFeatures(const TileParams& params) {
    const Call& call = params.call;
    const int pieces = cells * params.pieces.divisor();
    for (int i = threadIdx.x; i < pieces; i += kThreads) {
      uint32_t cell = i;
      const uint32_t piece = params.pieces.DivMod(cell);
      const T* from = static_cast<const T*>(call.features) +
                      call.cells.Offset(first + cell, Call::kFeatures) +
                      piece * (kVectorBytes / sizeof(T));
      __pipeline_memcpy_async(const_cast<T*>(features) + i * (kVectorBytes / sizeof(T)), from,
                              kVectorBytes);
    }
    __pipeline_commit();
  }

  __device__ __forceinline__ void MakeWeights(const Call& call) {
    for (int cell = threadIdx.x; cell < cells; cell += kThreads) {
      Point<A> point(call, first + cell);
      const A(&made)[kCorners] = point.Weights(call);
#pragma unroll
      for (int c = 0; c < kCorners; ++c) weights[c * pitch + cell] = made[c];
    }
  }

  // FirstCorner returns the corner at which a thread begins, such that the threads of a warp read
  // different banks.
  __device__ __forceinline__ int FirstCorner(int cell, int width) const {
    return static_cast<int>(cell * width * kCorners * sizeof(T) / kBankLineBytes);
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    InterpolateTile(const __grid_constant__ TileParams params) {
  using A = Accumulator<T>;
  constexpr int kCount = kVectorElements<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  Tile<T> tile(params, shared);
  tile.FetchFeatures(params);
  tile.MakeWeights(params.call);
  __pipeline_wait_prior(0);
  __syncthreads();
  const int width = params.width.divisor();
  const int vectors = tile.cells * width / kCount;
  T* to = static_cast<T*>(params.call.out) + tile.first * width;
  for (int i = threadIdx.x; i < vectors; i += kThreads) {
    uint32_t cell = i * kCount;
    const int f = params.width.DivMod(cell);
    const int begin = tile.FirstCorner(cell, width);
    const T* features = tile.features + cell * width * kCorners + f;
    A sums[kCount] = {};
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
      const int corner = (begin + c) % kCorners;
      const A weight = tile.weights[corner * tile.pitch + cell];
      const auto values = LoadVector<kCount>(features + corner * width);
#pragma unroll
      for (int e = 0; e < kCount; ++e) sums[e] += weight * Widen(values.values[e]);
    }
    Vector<T, kCount> out;
#pragma unroll
    for (int e = 0; e < kCount; ++e) out.values[e] = Narrow<T>(sums[e]);
    StoreVector(to + i * kCount, out);
  }
}

template <typename T>
cudaError_t LaunchOf(cudaStream_t stream, const Call& call) {
  const int64_t cell_bytes = kCorners * RowBytes(call);
  TileParams params{call};
  params.tile_cells = static_cast<int>(std::min(kTileBytes / cell_bytes, kMaxTileCells));
  params.pieces = FastDivider(cell_bytes / kVectorBytes);
  params.width = FastDivider(call.width);
  params.features_bytes = params.tile_cells * cell_bytes;
  const int64_t bytes = params.features_bytes +
                        kCorners * (params.tile_cells + kWeightPadding) * sizeof(Accumulator<T>);
  return Launch(InterpolateTile<T>, CeilDiv(call.cells.size(), params.tile_cells), kThreads, bytes,
                stream, params);
}

}  // namespace

bool CanRunTiles(const Call& call, const Device&) {
  return HasAlignedArrays(call) && call.out != nullptr && call.width % VectorElements(call) == 0 &&
         kCorners * RowBytes(call) <= kTileBytes;
}

cudaError_t LaunchTiles(cudaStream_t stream, const Call& call, const Device&) {
  return jaxops::cuda::DispatchFloat(call.dtype,
                                     [&]<typename T>(T) { return LaunchOf<T>(stream, call); });
}

}  // namespace jaxops::trilinear::cuda
