// Trilinear interpolation in cells and its gradients, see common/trilinear.h.
//
// Calls of a few cells, values of long rows and of short ones of a power of two elements, and most
// gradients by the points, unless they are derivatives or of nested cells: see plain.cu.
//
// All of the others are bound by memory, and features are most of that. How they move depends on
// the bytes of a row, which is what a corner has:
//
// Rows of 64 bytes and more that vectors divide (the kernels of vectors): a thread takes 16 bytes
// of each of the eight corners, straight from and to global memory.
//
// Those of one element (the kernels of singles): a lane has a cell.
//
// Other short ones of a power of two (the kernels of rows): a warp has 32 cells. A lane makes the
// weights or the gradient of a cell, but moves rows or parts of them as they follow each other in
// memory, so that the accesses of a warp are whole lines. What a lane knows of a corner goes to the
// other by shared memory.
//
// Other short ones of at most 4 bytes an element: see narrow.cu, but for some gradients
// that the kernels of groups make faster. Gradients of those of 8 bytes (the kernels of images) are
// made likewise, but with a corner a lane.
//
// Values of others that vectors divide: a block copies the features of some cells to shared memory,
// 16 bytes a thread. A thread sums a vector there (the kernel of tiles), or lanes share a cell,
// where rows are of 48 bytes (the kernel of columns).
//
// Others: see groups.cu, and shifts.cu for gradients of rows that are too long
// for these.
#include <cuda_pipeline.h>

#include <algorithm>
#include <cstdint>

#include "common/fast_divide.h"
#include "cuda/trilinear/cells.cuh"

namespace jaxops::trilinear::cuda {
namespace {

constexpr int kThreads = 256;

// What a multiprocessor has at least, of the kernels of vectors that read features: leaves
// registers for all of a thread's loads.
template <typename T, bool kWrites>
constexpr int kBlocksOf = kWrites || sizeof(T) == 8 ? 2 : 3;
constexpr int kLongRowBytes = 64;
constexpr int kSectorBytes = 32;
constexpr int64_t kMaxHalvedRowBytes = 8 * 1024;
constexpr int kBankLineBytes = 128;

// The features of a tile fill about this much shared memory, which leaves room for several blocks.
constexpr int64_t kTileBytes = 24 * 1024;
constexpr int64_t kMaxTileCells = 512;
constexpr int64_t kMaxTiledRowBytes = 32;

// Between the weights of two corners in shared memory, beside one entry a cell: puts the corners of
// a cell into different banks.
constexpr int kWeightPadding = 4;

// --- vectors -------------------------------------------------------------------------------------

struct VectorParams {
  Call call;
  FastDivider64 by_cell;  // vectors of a corner
  int64_t vectors;        // of all cells
  int lanes;              // that share a cell, a power of two
};

template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads, kBlocksOf<T, false>)
    InterpolateVectors(const __grid_constant__ VectorParams params) {
  using A = Accumulator<T>;
  uint64_t cell = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (cell >= params.vectors) return;
  const int64_t f = static_cast<int64_t>(params.by_cell.Peel(cell)) * kCount;
  const Call& call = params.call;
  const T* features =
      static_cast<const T*>(call.features) + call.cells.Offset(cell, Call::kFeatures) + f;
  Pack<T, kCount> corners[kCorners];
#pragma unroll
  for (int c = 0; c < kCorners; ++c) corners[c] = LoadPack<kCount>(features + c * call.width);
  Point<A> point(call, cell);
  const A(&weights)[kCorners] = point.Weights(call);
  Pack<T, kCount> out;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    // From zero and in this order, as in plain calls, so that these have the same bits.
    A sum = 0;
#pragma unroll
    for (int c = 0; c < kCorners; ++c) sum += weights[c] * Widen(corners[c].values[i]);
    out.values[i] = Narrow<T>(sum);
  }
  StorePack(static_cast<T*>(call.out) + cell * call.width + f, out);
}

template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads)
    FeatureGradVectors(const __grid_constant__ VectorParams params) {
  using A = Accumulator<T>;
  uint64_t cell = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (cell >= params.vectors) return;
  const int64_t f = static_cast<int64_t>(params.by_cell.Peel(cell)) * kCount;
  const Call& call = params.call;
  const auto g = LoadPack<kCount>(static_cast<const T*>(call.cotangent) +
                                  call.cells.Offset(cell, Call::kCotangent) + f);
  Point<A> point(call, cell);
  const A(&weights)[kCorners] = point.Weights(call);
  T* to = static_cast<T*>(call.dfeatures) + cell * kCorners * call.width + f;
#pragma unroll
  for (int c = 0; c < kCorners; ++c) {
    Pack<T, kCount> out;
#pragma unroll
    for (int i = 0; i < kCount; ++i) out.values[i] = Narrow<T>(weights[c] * Widen(g.values[i]));
    StorePack(to + c * call.width, out);
  }
}

// The gradient by the point, and by the features if kFeatures.
template <typename T, int kCount, bool kFeatures>
__global__ void __launch_bounds__(kThreads, kBlocksOf<T, kFeatures>)
    BackwardVectors(const __grid_constant__ VectorParams params) {
  using A = Accumulator<T>;
  const Call& call = params.call;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int lane = static_cast<int>(threadIdx.x) & (params.lanes - 1);
  int64_t cell = thread / params.lanes;
  // Lanes of no cell help the last one to sum, so that whole warps meet.
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
    const auto g = LoadPack<kCount>(cotangent + f);
    Pack<T, kCount> corners[kCorners];
#pragma unroll
    for (int c = 0; c < kCorners; ++c) corners[c] = LoadPack<kCount>(features + c * call.width + f);
    if constexpr (kFeatures) {
      T* to = static_cast<T*>(call.dfeatures) + cell * kCorners * call.width + f;
#pragma unroll
      for (int c = 0; c < kCorners; ++c) {
        Pack<T, kCount> out;
#pragma unroll
        for (int i = 0; i < kCount; ++i) out.values[i] = Narrow<T>(weights[c] * Widen(g.values[i]));
        if (real) StorePack(to + c * call.width, out);
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
cudaError_t LaunchVectors(cudaStream_t stream, const Call& call) {
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

// --- rows ----------------------------------------------------------------------------------------

// A warp has as many cells as lanes: so often a lane meets a corner.
constexpr int kCornerRounds = kCorners;

// Between the corners of two cells in shared memory: lanes that have a cell each meet no bank
// twice.
constexpr int kCornerPitch = 12;

// What the lanes of a warp exchange of the corners of its cells.
template <typename A>
struct CornerValues {
  alignas(16) A values[kWarp * kCornerPitch];

  __device__ __forceinline__ A& At(int cell, int corner) {
    return values[cell * kCornerPitch + corner];
  }
  __device__ __forceinline__ void Put(int cell, const A (&of)[kCorners]) {
    constexpr int kCount = kPackElements<A>;
#pragma unroll
    for (int c = 0; c < kCorners; c += kCount) {
      Pack<A, kCount> pack;
#pragma unroll
      for (int i = 0; i < kCount; ++i) pack.values[i] = of[c + i];
      *reinterpret_cast<Pack<A, kCount>*>(&At(cell, c)) = pack;
    }
  }
  __device__ __forceinline__ void Get(int cell, A (&of)[kCorners]) {
    constexpr int kCount = kPackElements<A>;
#pragma unroll
    for (int c = 0; c < kCorners; c += kCount) {
      const auto pack = LoadPack<kCount>(&At(cell, c));
#pragma unroll
      for (int i = 0; i < kCount; ++i) of[c + i] = pack.values[i];
    }
  }
};

// Transposes the packs of groups of kPacks neighbouring lanes: lane i of a group gives its pack j
// for pack i of lane j.
template <typename T, int kCount, int kPacks>
__device__ __forceinline__ void TransposePacks(int lane, Pack<T, kCount> (&packs)[kPacks]) {
  constexpr int kWords = sizeof(Pack<T, kCount>) / sizeof(uint32_t);
#pragma unroll
  for (int step = 1; step < kPacks; step *= 2) {
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (i & step) continue;
      uint32_t low[kWords], high[kWords];
      memcpy(low, &packs[i], sizeof(low));
      memcpy(high, &packs[i | step], sizeof(high));
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint32_t got = __shfl_xor_sync(~0u, upper ? low[w] : high[w], step);
        low[w] = upper ? got : low[w];
        high[w] = upper ? high[w] : got;
      }
      memcpy(&packs[i], low, sizeof(low));
      memcpy(&packs[i | step], high, sizeof(high));
    }
  }
}

struct SingleParams {
  Call call;
  int64_t strides[Call::kCotangent + 1];  // between cells that are not nested
};

// Rows are of one element: a lane has a cell. kPlain says that there is no derivative, that points
// are of the features' dtype, and that cells are not nested: all the rest takes so many registers
// that half of the warps would be left to wait for memory.
template <typename T, bool kPlain, bool kOut, bool kFeatures, bool kPoints>
__global__ void __launch_bounds__(kThreads) Singles(const __grid_constant__ SingleParams params) {
  using A = Accumulator<T>;
  constexpr int kCount = kPackElements<T>;
  constexpr int kPacks = kCorners / kCount;
  __shared__ A staged[kPoints ? kThreads * kAxes : 1];
  const Call& call = params.call;
  const int64_t own = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  // Lanes of no cell go along, so that whole warps exchange.
  const int64_t cell = min(own, call.cells.size() - 1);
  const auto offset = [&](Call::Operand operand) {
    return kPlain ? cell * params.strides[operand] : call.cells.Offset(cell, operand);
  };
  Coordinates<A> p;
  if constexpr (kPlain) {
    const T* point = static_cast<const T*>(call.points) + offset(Call::kPoints);
#pragma unroll
    for (int a = 0; a < kAxes; ++a) p[a] = Widen(point[a]);
  } else {
    LoadCoordinates<A>(call, cell, p);
  }
  [[maybe_unused]] T g;
  if constexpr (!kOut) {
    g = static_cast<const T*>(call.cotangent)[offset(Call::kCotangent)];
  }
  Pack<T, kCount> packs[kPacks];
  if constexpr (kOut || kPoints) {
    const T* features = static_cast<const T*>(call.features) + offset(Call::kFeatures);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) packs[i] = LoadPack<kCount>(features + i * kCount);
  }
  A weights[kCorners];
  if constexpr (kOut || kFeatures) MakeWeights<kPlain>(call, cell, p, weights);
  if constexpr (kOut) {
    A sum = 0;
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
      sum += weights[c] * Widen(packs[c / kCount].values[c % kCount]);
    }
    if (own == cell) static_cast<T*>(call.out)[cell] = Narrow<T>(sum);
  }
  if constexpr (kPoints) {
    A dots[kCorners];
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
      dots[c] = Widen(g) * Widen(packs[c / kCount].values[c % kCount]);
    }
    A gradient[kAxes];
    MakeGradient<kPlain>(call, cell, p, dots, gradient);
    StorePoints<kPlain, T>(call, WarpCells(call), gradient,
                           staged + threadIdx.x / kWarp * kWarp * kAxes);
  }
  if constexpr (kFeatures) {
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
      packs[c / kCount].values[c % kCount] = Narrow<T>(weights[c] * Widen(g));
    }
    // Neighbours write a cell together, because two stores of half a sector cost two whole ones.
    TransposePacks(static_cast<int>(threadIdx.x), packs);
    const int piece = static_cast<int>(threadIdx.x) % kPacks;
    T* to = static_cast<T*>(call.dfeatures) + (own - piece) * kCorners + piece * kCount;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (own - piece + i < call.cells.size()) StorePack(to + i * kCorners, packs[i]);
    }
  }
}

template <typename T, bool kPlain>
cudaError_t LaunchSingles(cudaStream_t stream, const Call& call) {
  SingleParams params{call};
  for (const auto operand : {Call::kFeatures, Call::kPoints, Call::kCotangent}) {
    params.strides[operand] = call.cells.rank() == 1 ? call.cells.stride(0, operand) : 0;
  }
  const auto kernel = call.out != nullptr         ? Singles<T, kPlain, true, false, false>
                      : call.dpoints == nullptr   ? Singles<T, kPlain, false, true, false>
                      : call.dfeatures == nullptr ? Singles<T, kPlain, false, false, true>
                                                  : Singles<T, kPlain, false, true, true>;
  return Launch(kernel, CeilDiv(call.cells.size(), kThreads), kThreads, 0, stream, params);
}

// Rows are kCount elements each, which is one access.
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
  Pack<T, kCount> rows[kCornerRounds];
#pragma unroll
  for (int j = 0; j < kCornerRounds; ++j) {
    const int cell = min((j * kWarp + cells.lane) / kCorners, cells.count - 1);
    rows[j] = LoadPack<kCount>(features.Of(cell) + corner * kCount);
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
  // Sums over the corners' lanes, of which each keeps half of the cells every time.
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
  Pack<T, kCount> out;
#pragma unroll
  for (int i = 0; i < kCount; ++i) out.values[i] = Narrow<T>(sums[0][i]);
  StorePack(static_cast<T*>(call.out) + (cells.first + cell) * kCount, out);
}

// The gradient by the features if kFeatures, by the point if kPoints. Rows are kPieces times kCount
// elements; the pieces of a warp's rows are moved in order.
template <typename T, int kCount, int kPieces, bool kFeatures, bool kPoints>
__global__ void __launch_bounds__(kThreads)
    BackwardRows(const __grid_constant__ WarpParams params) {
  using A = Accumulator<T>;
  constexpr int kWidth = kCount * kPieces;
  constexpr int kRounds = kCornerRounds * kPieces;
  __shared__ CornerValues<A> shared[kThreads / kWarp];
  __shared__ Pack<T, kCount> cotangents[kThreads][kPieces];
  const Call& call = params.call;
  const WarpCells cells(call);
  if (cells.count <= 0) return;
  const auto cell_of = [&](int j) { return (j * kWarp + cells.lane) / (kCorners * kPieces); };
  const int corner = cells.lane / kPieces % kCorners;
  const int piece = cells.lane % kPieces;
  // All loads come before whatever waits for one.
  Coordinates<A> p;
  LoadCoordinates<A>(call, cells.first + cells.own, p);
  const T* cotangent = static_cast<const T*>(call.cotangent) +
                       call.cells.Offset(cells.first + cells.own, Call::kCotangent);
  Pack<T, kCount> own[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) own[i] = LoadPack<kCount>(cotangent + i * kCount);
  [[maybe_unused]] Pack<T, kCount> rows[kPoints ? kRounds : 1];
  if constexpr (kPoints) {
    const WarpFeatures<T> features(params, cells);
#pragma unroll
    for (int j = 0; j < kRounds; ++j) {
      rows[j] = LoadPack<kCount>(features.Of(min(cell_of(j), cells.count - 1)) + corner * kWidth +
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
    const Pack<T, kCount> g = of_warp[cell][piece];
    if constexpr (kFeatures) {
      const A weight = corners.At(cell, corner);
      Pack<T, kCount> out;
#pragma unroll
      for (int i = 0; i < kCount; ++i) out.values[i] = Narrow<T>(weight * Widen(g.values[i]));
      if (cell < cells.count) StorePack(to + (j * kWarp + cells.lane) * kCount, out);
    }
    if constexpr (kPoints) {
      A dot = 0;
#pragma unroll
      for (int i = 0; i < kCount; ++i) dot += Widen(rows[j].values[i]) * Widen(g.values[i]);
#pragma unroll
      for (int distance = 1; distance < kPieces; distance *= 2) {
        dot += __shfl_xor_sync(~0u, dot, distance);
      }
      // Where the weight was, which other pieces may still have to read.
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
cudaError_t LaunchRows(cudaStream_t stream, const Call& call) {
  const auto kernel = call.dpoints == nullptr     ? BackwardRows<T, kCount, kPieces, true, false>
                      : call.dfeatures == nullptr ? BackwardRows<T, kCount, kPieces, false, true>
                                                  : BackwardRows<T, kCount, kPieces, true, true>;
  return Launch(kernel, CeilDiv(call.cells.size(), kThreads), kThreads, 0, stream,
                ParamsOfWarps(call));
}

// --- images --------------------------------------------------------------------------------------

constexpr int kImageThreads = 128;
// What a cell has of features at most. It ends where the kernels of groups become faster.
constexpr int64_t kMaxImageCellBytes = 256;

struct ImageParams {
  WarpParams warp;
  FastDivider pieces;   // of 16 bytes, of a cell's features
  int64_t image_bytes;  // of a warp's features, and of what follows them
  int64_t cotangent_bytes;
};

// The gradient by the features if kFeatures, by the point if kPoints. A lane has a corner of every
// fourth cell.
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
      const uint32_t piece = params.pieces.Peel(cell);
      const T* from = features.Of(static_cast<int>(cell)) + piece * kPackElements<T>;
      if (i < pieces) __pipeline_memcpy_async(image + i * kPackElements<T>, from, kPackBytes);
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
      StorePack(to + i * kPackElements<T>,
                LoadPack<kPackElements<T>>(image + i * kPackElements<T>));
    }
  }
}

template <typename T>
cudaError_t LaunchImages(cudaStream_t stream, const Call& call) {
  using A = Accumulator<T>;
  const int64_t cell_bytes = kCorners * call.width * sizeof(T);
  const ImageParams params{ParamsOfWarps(call), FastDivider(cell_bytes / kPackBytes),
                           kWarp * cell_bytes,
                           kWarp * call.width * static_cast<int64_t>(sizeof(A))};
  const auto kernel = call.dpoints == nullptr     ? BackwardImage<T, true, false>
                      : call.dfeatures == nullptr ? BackwardImage<T, false, true>
                                                  : BackwardImage<T, true, true>;
  const int64_t bytes =
      kImageThreads / kWarp *
      (params.image_bytes + params.cotangent_bytes + static_cast<int64_t>(sizeof(CornerValues<A>)));
  return Launch(kernel, CeilDiv(call.cells.size(), kImageThreads), kImageThreads, bytes, stream,
                params);
}

// --- tiles ---------------------------------------------------------------------------------------

struct TileParams {
  Call call;
  int tile_cells;
  FastDivider pieces;      // of 16 bytes, of a cell's features
  FastDivider width;       // of a corner
  int64_t features_bytes;  // of a tile's copy, which the weights follow
};

// What a block keeps in shared memory.
template <typename T>
struct Tile {
  using A = Accumulator<T>;

  const T* features;
  A* weights;
  int pitch;      // between the weights of two corners
  int64_t first;  // the first cell
  int cells;

  __device__ __forceinline__ Tile(const TileParams& params, unsigned char* shared) {
    features = reinterpret_cast<const T*>(shared);
    weights = reinterpret_cast<A*>(shared + params.features_bytes);
    pitch = params.tile_cells + kWeightPadding;
    first = int64_t{blockIdx.x} * params.tile_cells;
    cells = static_cast<int>(min(int64_t{params.tile_cells}, params.call.cells.size() - first));
  }

  // Starts to copy the features.
  __device__ __forceinline__ void FetchFeatures(const TileParams& params) {
    const Call& call = params.call;
    const int pieces = cells * params.pieces.divisor();
    for (int i = threadIdx.x; i < pieces; i += kThreads) {
      uint32_t cell = i;
      const uint32_t piece = params.pieces.Peel(cell);
      const T* from = static_cast<const T*>(call.features) +
                      call.cells.Offset(first + cell, Call::kFeatures) +
                      piece * (kPackBytes / sizeof(T));
      __pipeline_memcpy_async(const_cast<T*>(features) + i * (kPackBytes / sizeof(T)), from,
                              kPackBytes);
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

  // By which corner to begin, so that the threads of a warp read different banks.
  __device__ __forceinline__ int FirstCorner(int cell, int width) const {
    return static_cast<int>(cell * width * kCorners * sizeof(T) / kBankLineBytes);
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    InterpolateTile(const __grid_constant__ TileParams params) {
  using A = Accumulator<T>;
  constexpr int kCount = kPackElements<T>;
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
    const int f = params.width.Peel(cell);
    const int begin = tile.FirstCorner(cell, width);
    const T* features = tile.features + cell * width * kCorners + f;
    A sums[kCount] = {};
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
      const int corner = (begin + c) % kCorners;
      const A weight = tile.weights[corner * tile.pitch + cell];
      const auto values = LoadPack<kCount>(features + corner * width);
#pragma unroll
      for (int e = 0; e < kCount; ++e) sums[e] += weight * Widen(values.values[e]);
    }
    Pack<T, kCount> out;
#pragma unroll
    for (int e = 0; e < kCount; ++e) out.values[e] = Narrow<T>(sums[e]);
    StorePack(to + i * kCount, out);
  }
}

template <typename T>
cudaError_t LaunchTiles(cudaStream_t stream, const Call& call) {
  using A = Accumulator<T>;
  const int64_t cell_bytes = kCorners * call.width * sizeof(T);
  TileParams params{call};
  params.tile_cells = static_cast<int>(std::min(kTileBytes / cell_bytes, kMaxTileCells));
  params.pieces = FastDivider(cell_bytes / kPackBytes);
  params.width = FastDivider(call.width);
  params.features_bytes = params.tile_cells * cell_bytes;
  const int64_t bytes =
      params.features_bytes + kCorners * (params.tile_cells + kWeightPadding) * sizeof(A);
  return Launch(InterpolateTile<T>, CeilDiv(call.cells.size(), params.tile_cells), kThreads, bytes,
                stream, params);
}

// --- columns -------------------------------------------------------------------------------------

struct InterpolateColumnsParams {
  Call call;
  int lanes;           // that share a cell, a power of two
  int pitch;           // between the features of two cells, in bytes
  FastDivider pieces;  // of 16 bytes, of a cell's features
};

// A block copies the features of kThreads / lanes cells to shared memory, in pieces of 16 bytes,
// which may span corners. A lane takes kCount elements of all corners after each other, with
// weights that it keeps.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    InterpolateColumns(const __grid_constant__ InterpolateColumnsParams params) {
  using A = Accumulator<T>;
  constexpr int kCount = kPackElements<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  const Call& call = params.call;
  const int width = static_cast<int>(call.width);
  const int lanes = params.lanes;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int local = static_cast<int>(threadIdx.x) / lanes;
  const int64_t first = int64_t{blockIdx.x} * (kThreads / lanes);
  const int cells = static_cast<int>(min(int64_t{kThreads / lanes}, call.cells.size() - first));
  const int pieces = cells * params.pieces.divisor();
  for (int i = threadIdx.x; i < pieces; i += kThreads) {
    uint32_t cell = i;
    const uint32_t piece = params.pieces.Peel(cell);
    const T* from = static_cast<const T*>(call.features) +
                    call.cells.Offset(first + cell, Call::kFeatures) + piece * kCount;
    __pipeline_memcpy_async(shared + cell * params.pitch + piece * kPackBytes, from, kPackBytes);
  }
  __pipeline_commit();
  const int64_t cell = first + min(local, cells - 1);
  Coordinates<A> p;
  LoadCoordinates<A>(call, cell, p);
  A weights[kCorners];
  MakeWeights(call, cell, p, weights);
  __pipeline_wait_prior(0);
  __syncthreads();
  if (local >= cells) return;
  for (int f = lane * kCount; f < width; f += lanes * kCount) {
    const T* column = reinterpret_cast<const T*>(shared + local * params.pitch) + f;
    A sum[kCount] = {};
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
      const auto row = LoadPack<kCount>(column + c * width);
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum[i] += weights[c] * Widen(row.values[i]);
    }
    Pack<T, kCount> out;
#pragma unroll
    for (int i = 0; i < kCount; ++i) out.values[i] = Narrow<T>(sum[i]);
    StorePack(static_cast<T*>(call.out) + cell * width + f, out);
  }
}

// Between the features of two cells in shared memory, of each of which so many elements are read at
// once: as far apart as these are, beside whole lines of banks, so that all lanes of a warp read
// different banks.
template <typename T>
int PitchOf(int64_t cell_bytes, int elements) {
  const int64_t at_once = std::clamp<int64_t>(elements * sizeof(T), kPackBytes, kBankLineBytes);
  return static_cast<int>(cell_bytes + ((at_once - cell_bytes) % kBankLineBytes + kBankLineBytes) %
                                           kBankLineBytes);
}

template <typename T>
cudaError_t LaunchInterpolateColumns(cudaStream_t stream, const Call& call) {
  const int64_t cell_bytes = kCorners * call.width * static_cast<int64_t>(sizeof(T));
  InterpolateColumnsParams params{call, 1};
  while (params.lanes < kThreads && kThreads / params.lanes * cell_bytes > kTileBytes) {
    params.lanes *= 2;
  }
  params.pitch = PitchOf<T>(cell_bytes, params.lanes * kPackElements<T>);
  params.pieces = FastDivider(cell_bytes / kPackBytes);
  const int64_t cells = kThreads / params.lanes;
  return Launch(InterpolateColumns<T>, CeilDiv(call.cells.size(), cells), kThreads,
                cells * params.pitch, stream, params);
}

// --- which ---------------------------------------------------------------------------------------

bool IsAligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kPackBytes == 0;
}

template <typename T>
cudaError_t LaunchValues(cudaStream_t stream, const Call& call) {
  constexpr int kPack = kPackElements<T>;
  const int64_t row_bytes = call.width * static_cast<int64_t>(sizeof(T));
  const bool whole = call.width % kPack == 0;
  if constexpr (sizeof(T) == 2) {
    if (HasNarrowValues(call.width, sizeof(T))) return LaunchNarrow(stream, call);
  } else {
    if (call.width == 2) {
      return Launch(InterpolateRows<T, 2>, CeilDiv(call.cells.size(), kThreads), kThreads, 0,
                    stream, ParamsOfWarps(call));
    }
    if (sizeof(T) == 4 && HasNarrowValues(call.width, sizeof(T))) {
      return LaunchNarrow(stream, call);
    }
  }
  if (!whole) {
    return kCorners * row_bytes <= kMaxGroupCellBytes ? LaunchGroups(stream, call)
                                                      : LaunchVectors<T, 1>(stream, call);
  }
  return row_bytes <= kMaxTiledRowBytes ? LaunchTiles<T>(stream, call)
                                        : LaunchInterpolateColumns<T>(stream, call);
}

// Whether that is one for the kernels of groups, where rows are narrow.
bool HasFasterGroups(const Call& call, int64_t item_bytes) {
  const bool plain = call.order == 0 && call.point_dtype == call.dtype && AreDense(call);
  return plain && call.dpoints != nullptr && call.width <= kMaxNarrowWidth &&
         GroupsAreFaster(call.width, item_bytes, call.dfeatures != nullptr);
}

template <typename T>
cudaError_t LaunchGradients(cudaStream_t stream, const Call& call) {
  constexpr int kPack = kPackElements<T>;
  const int64_t row_bytes = call.width * static_cast<int64_t>(sizeof(T));
  if (call.width == 2 * kPack) return LaunchRows<T, kPack, 2>(stream, call);
  if constexpr (sizeof(T) == 2) {
    if (call.width == 8) return LaunchRows<T, 8, 1>(stream, call);
    if (call.width == 3 * kPack && call.dfeatures == nullptr) {
      return LaunchVectors<T, kPack>(stream, call);
    }
    if (HasFasterGroups(call, sizeof(T))) return LaunchGroups(stream, call);
    if (call.width <= kMaxNarrowWidth) return LaunchNarrow(stream, call);
  } else {
    if (call.width == 2) return LaunchRows<T, 2, 1>(stream, call);
    if constexpr (kPack == 4) {
      if (call.width == 4) return LaunchRows<T, 4, 1>(stream, call);
      if (HasFasterGroups(call, sizeof(T))) return LaunchGroups(stream, call);
      if (call.width <= kMaxNarrowWidth) return LaunchNarrow(stream, call);
    } else {
      if (kCorners * row_bytes <= kMaxImageCellBytes) return LaunchImages<T>(stream, call);
    }
  }
  if (kCorners * row_bytes <= kMaxGroupCellBytes) return LaunchGroups(stream, call);
  return sizeof(T) < 8 && row_bytes <= kMaxShiftRowBytes ? LaunchShifts(stream, call)
                                                         : LaunchVectors<T, 1>(stream, call);
}

template <typename T>
cudaError_t LaunchOf(cudaStream_t stream, const Call& call) {
  constexpr int kPack = kPackElements<T>;
  const bool aligned = IsAligned(call.features) && IsAligned(call.cotangent) &&
                       IsAligned(call.out) && IsAligned(call.dfeatures);
  if (!aligned) return LaunchVectors<T, 1>(stream, call);
  if (HasFasterPlain(call)) return LaunchPlain(stream, call);
  const int64_t row_bytes = call.width * static_cast<int64_t>(sizeof(T));
  if (call.width % kPack == 0 && row_bytes >= kLongRowBytes) {
    // Two stores of half a sector cost two whole ones.
    const bool halves = call.dfeatures != nullptr && row_bytes % kSectorBytes != 0;
    return halves && row_bytes <= kMaxHalvedRowBytes ? LaunchGroups(stream, call)
                                                     : LaunchVectors<T, kPack>(stream, call);
  }
  if (call.width == 1) {
    const bool plain = call.order == 0 && call.point_dtype == call.dtype && call.cells.rank() <= 1;
    return plain ? LaunchSingles<T, true>(stream, call) : LaunchSingles<T, false>(stream, call);
  }
  return call.out != nullptr ? LaunchValues<T>(stream, call) : LaunchGradients<T>(stream, call);
}

}  // namespace

cudaError_t LaunchCells(cudaStream_t stream, const Call& call) {
  if (call.cells.size() == 0) return cudaSuccess;
  if (call.width == 0) {
    if (call.dpoints == nullptr) return cudaSuccess;
    const int64_t bytes = call.cells.size() * kAxes * jaxops::cuda::SizeOf(call.point_dtype);
    return cudaMemsetAsync(call.dpoints, 0, bytes, stream);
  }
  return jaxops::cuda::DispatchFloat(call.dtype,
                                     [&]<typename T>(T) { return LaunchOf<T>(stream, call); });
}

}  // namespace jaxops::trilinear::cuda
