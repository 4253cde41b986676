// Gradients of trilinear interpolation in cells whose rows vectors do not divide, or sectors of
// memory do not.
//
// The eight rows of a cell are a whole number of vectors and aligned together, but a row begins and
// ends amid a vector. A thread takes a vector of every row: the n-th of those that begin in it. All
// of them lie within one vector's elements less one of each other, from the same part of the
// cotangent, which the thread keeps in registers. By how much a row is shifted is known to the
// compiler, because it depends on no more than the corner and the rest of a row after its whole
// vectors. So is where the last vectors of a row go on with the next one: they are steps of another
// kind, which have warps of their own.
//
// Vectors of 16 bytes that are stored one by one cost two whole sectors each. So a block has an
// image of the features of its cells in shared memory, which it copies from and to memory in order.
#include <cuda_pipeline.h>

#include <algorithm>
#include <cstdint>

#include "common/fast_divide.h"
#include "common/host_device.h"
#include "cuda/trilinear.cuh"

namespace jaxops::trilinear::cuda {
namespace {

constexpr int kThreads = 256;
// What a multiprocessor has at least, with an image and without.
constexpr int kImageBlocks = 4;
constexpr int kDirectBlocks = 3;
// What the features of a block's cells take, and what they may take, of shared memory.
constexpr int64_t kImageBytes = 24 * 1024;
constexpr int64_t kFeatureImageBytes = 16 * 1024;  // of elements of 4 bytes, without points
constexpr int64_t kMaxImageBytes = 64 * 1024;
// About how many steps a block without an image takes.
constexpr int64_t kDirectSteps = 256;
constexpr int64_t kDirectWidth = 96;
// Fewer cells a block, where blocks would be fewer than this.
constexpr int64_t kFewBlocks = 256;

// Where the vectors are that begin in a corner's row. kRest is what a row has beside whole vectors.
template <typename T, int kRest>
struct Shifts {
  static constexpr int kPack = kPackElements<T>;

  // The first element of the row with which a vector begins.
  JAXOPS_HOST_DEVICE static constexpr int FirstOf(int corner) {
    return (kPack - corner * kRest % kPack) % kPack;
  }
  // Which vector of the cell that is, beside the whole ones of the rows before.
  JAXOPS_HOST_DEVICE static constexpr int VectorOf(int corner) {
    return (corner * kRest + FirstOf(corner)) / kPack;
  }
};

struct ShiftParams {
  Call call;
  FastDivider inner;    // steps of a cell of this kind
  FastDivider vectors;  // of a cell
  int steps;            // of a cell
  int tile;             // cells of a block
  bool dense;           // whether the features of all cells follow each other
  int64_t image_bytes;  // of a block
};

// Steps that no vector of leaves its row; the step after them; the last, which some rows lack.
enum class Step { kInner, kCrossing, kLast };

// Takes one vector of every row of a cell: the gradient by the features if kFeatures, and what
// these vectors add to the one by the point if kPoints. The features come from the cell's image if
// it has one, which their gradients replace.
template <typename T, int kRest, bool kFeatures, bool kPoints, bool kImage, Step kStep>
__device__ __forceinline__ void TakeStep(const ShiftParams& params, int64_t cell, int step,
                                         T* image, Accumulator<T> (&gradient)[kAxes]) {
  using A = Accumulator<T>;
  using Shifts = Shifts<T, kRest>;
  constexpr int kPack = Shifts::kPack;
  // What a row has from here: of elements behind that, vectors have those of the next row. Inner
  // steps have enough.
  constexpr int kLeft = kRest == 0                 ? kPack
                        : kStep == Step::kInner    ? 2 * kPack
                        : kStep == Step::kCrossing ? kPack + kRest
                                                   : kRest;
  // How many elements of the cotangent all of the vectors have together.
  constexpr int kSpan = kRest == 0             ? kPack
                        : kStep == Step::kLast ? kRest + kPack - 1
                                               : 2 * kPack - 1;
  const Call& call = params.call;
  const int whole = params.steps - (kRest != 0);  // vectors of a row
  const auto vector_of = [&](int corner) {
    return (corner * whole + Shifts::VectorOf(corner) + step) * kPack;
  };
  [[maybe_unused]] Pack<T, kPack> rows[kCorners];
  if constexpr (kPoints && !kImage) {
    const T* features =
        static_cast<const T*>(call.features) + call.cells.Offset(cell, Call::kFeatures);
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
      if (Shifts::FirstOf(c) < kLeft) rows[c] = LoadPack<kPack>(features + vector_of(c));
    }
  }
  const T* cotangent =
      static_cast<const T*>(call.cotangent) + call.cells.Offset(cell, Call::kCotangent);
  T read[kSpan];
#pragma unroll
  for (int k = 0; k < kSpan; ++k) {
    read[k] = cotangent[k < kLeft ? step * kPack + k : k - kLeft];
  }
  Coordinates<A> p;
  LoadCoordinates<A>(call, cell, p);
  A g[kSpan];
#pragma unroll
  for (int k = 0; k < kSpan; ++k) g[k] = Widen(read[k]);
  // Comes before the stores, so that no more than one half needs its registers.
  if constexpr (kPoints) {
    A dots[kCorners] = {};
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
      if (Shifts::FirstOf(c) >= kLeft) continue;
      if constexpr (kImage) rows[c] = LoadPack<kPack>(image + vector_of(c));
#pragma unroll
      for (int e = 0; e < kPack; ++e) {
        const int k = Shifts::FirstOf(c) + e;
        dots[k < kLeft ? c : c + 1] += Widen(rows[c].values[e]) * g[k];
      }
    }
    MakeGradient(call, cell, p, dots, gradient);
  }
  if constexpr (kFeatures) {
    A weights[kCorners];
    MakeWeights(call, cell, p, weights);
    [[maybe_unused]] T* to = nullptr;
    if constexpr (!kImage) to = static_cast<T*>(call.dfeatures) + cell * kCorners * call.width;
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
      if (Shifts::FirstOf(c) >= kLeft) continue;
      Pack<T, kPack> out;
#pragma unroll
      for (int e = 0; e < kPack; ++e) {
        const int k = Shifts::FirstOf(c) + e;
        out.values[e] = Narrow<T>(weights[k < kLeft ? c : c + 1] * g[k]);
      }
      if constexpr (kImage) {
        *reinterpret_cast<Pack<T, kPack>*>(image + vector_of(c)) = out;
      } else {
        StorePack(to + vector_of(c), out);
      }
    }
  }
}

template <typename T, int kRest, bool kFeatures, bool kPoints, bool kImage>
__global__ void __launch_bounds__(kThreads, kImage ? kImageBlocks : kDirectBlocks)
    BackwardShifts(const __grid_constant__ ShiftParams params) {
  using A = Accumulator<T>;
  constexpr int kPack = kPackElements<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  [[maybe_unused]] T* image = reinterpret_cast<T*>(shared);
  // What every step of every cell adds to the gradient by the point.
  [[maybe_unused]] A* parts = reinterpret_cast<A*>(shared + params.image_bytes);
  const Call& call = params.call;
  const int threads = static_cast<int>(blockDim.x);
  const int64_t first = int64_t{blockIdx.x} * params.tile;
  const int cells = static_cast<int>(min(int64_t{params.tile}, call.cells.size() - first));
  const int per_cell = static_cast<int>(params.vectors.divisor());
  if constexpr (kImage && kPoints) {
    CopyFeatures(call, params.vectors, params.dense, first, cells, threads, image);
    __pipeline_wait_prior(0);
    __syncthreads();
  }
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  constexpr int kOthers = kRest == 0 ? 0 : 2;  // steps that are not inner ones
  const int inner = params.steps - kOthers;
  const int items = cells * inner;
  const int rounds = (items + kWarp - 1) / kWarp;
  // After the rounds of inner steps come one of crossing and one of last ones.
  for (int round = static_cast<int>(threadIdx.x) / kWarp; round < rounds + kOthers;
       round += threads / kWarp) {
    uint32_t cell = lane;
    int step = 0;
    A gradient[kAxes];
    if (round < rounds) {
      const int item = round * kWarp + lane;
      if (item >= items) continue;
      cell = item;
      step = params.inner.Peel(cell);
      TakeStep<T, kRest, kFeatures, kPoints, kImage, Step::kInner>(
          params, first + cell, step, image + cell * per_cell * kPack, gradient);
    } else if constexpr (kOthers > 0) {
      if (lane >= cells) continue;
      T* of_cell = image + cell * per_cell * kPack;
      if (round == rounds) {
        step = inner;
        TakeStep<T, kRest, kFeatures, kPoints, kImage, Step::kCrossing>(params, first + cell, step,
                                                                        of_cell, gradient);
      } else {
        step = inner + 1;
        TakeStep<T, kRest, kFeatures, kPoints, kImage, Step::kLast>(params, first + cell, step,
                                                                    of_cell, gradient);
      }
    }
    if constexpr (kPoints) {
#pragma unroll
      for (int a = 0; a < kAxes; ++a) {
        parts[(cell * kAxes + a) * params.steps + step] = gradient[a];
      }
    }
  }
  if constexpr (kImage || kPoints) __syncthreads();
  if constexpr (kImage && kFeatures) {
    T* to = static_cast<T*>(call.dfeatures) + first * kCorners * call.width;
#pragma unroll 4
    for (int i = threadIdx.x; i < cells * per_cell; i += threads) {
      StorePack(to + i * kPack, LoadPack<kPack>(image + i * kPack));
    }
  }
  if constexpr (kPoints) {
    constexpr int kLanes = 8;  // that share a sum
    const int sums = cells * kAxes;
    for (int begin = 0; begin < sums; begin += threads / kLanes) {
      const int sum = begin + static_cast<int>(threadIdx.x) / kLanes;
      A total[1] = {};
      if (sum < sums) {
        for (int step = lane % kLanes; step < params.steps; step += kLanes) {
          total[0] += parts[sum * params.steps + step];
        }
      }
      multilinear::cuda::SumOverLanes(total, kLanes);
      if (sum < sums && lane % kLanes == 0) {
        jaxops::cuda::StoreAs(call.dpoints, first * kAxes + sum, call.point_dtype, total[0]);
      }
    }
  }
}

template <typename T, int kRest, bool kImage>
cudaError_t LaunchOfRest(cudaStream_t stream, const Call& call) {
  using A = Accumulator<T>;
  const int64_t cell_bytes = kCorners * call.width * static_cast<int64_t>(sizeof(T));
  ShiftParams params{call};
  params.vectors = FastDivider(cell_bytes / kPackBytes);
  constexpr int kOthers = kRest == 0 ? 0 : 2;
  params.steps = static_cast<int>(CeilDiv(call.width, kPackElements<T>));
  params.inner = FastDivider(std::max(params.steps - kOthers, 1));
  params.dense = AreDense(call);
  const bool small = sizeof(T) == 4 && call.dpoints == nullptr;
  const int64_t image_bytes = small ? kFeatureImageBytes : kImageBytes;
  const int64_t most = std::clamp<int64_t>(
      kImage ? image_bytes / cell_bytes : kDirectSteps / params.steps, 1, kWarp);
  params.tile = static_cast<int>(std::clamp<int64_t>(call.cells.size() / kFewBlocks, 1, most));
  params.image_bytes = kImage ? params.tile * cell_bytes : 0;
  // As many rounds for all warps, if it can be; more than one where memory waits for blocks.
  const int64_t rounds = CeilDiv(params.tile * (params.steps - kOthers), kWarp) + kOthers;
  const int64_t least = rounds > 3 && kImage && !small ? 2 : 1;
  const int64_t warps = CeilDiv(rounds, std::max(CeilDiv(rounds, kThreads / kWarp), least));
  int64_t bytes = params.image_bytes;
  if (call.dpoints != nullptr) bytes += int64_t{params.tile} * params.steps * kAxes * sizeof(A);
  const auto kernel = call.dpoints == nullptr     ? BackwardShifts<T, kRest, true, false, kImage>
                      : call.dfeatures == nullptr ? BackwardShifts<T, kRest, false, true, kImage>
                                                  : BackwardShifts<T, kRest, true, true, kImage>;
  return Launch(kernel, CeilDiv(call.cells.size(), params.tile), static_cast<int>(warps) * kWarp,
                bytes, stream, params);
}

template <typename T, int kRest = 0>
cudaError_t LaunchOf(cudaStream_t stream, const Call& call) {
  if constexpr (kRest < kPackElements<T>) {
    if (call.width % kPackElements<T> == kRest) {
      // Points alone need no image where rows are long: nothing is stored amid a sector.
      const bool direct = call.dfeatures == nullptr && call.width >= kDirectWidth;
      const int64_t cell_bytes = kCorners * call.width * static_cast<int64_t>(sizeof(T));
      return cell_bytes <= kMaxImageBytes && !direct ? LaunchOfRest<T, kRest, true>(stream, call)
                                                     : LaunchOfRest<T, kRest, false>(stream, call);
    }
    return LaunchOf<T, kRest + 1>(stream, call);
  } else {
    return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t LaunchShifts(cudaStream_t stream, const Call& call) {
  return jaxops::cuda::DispatchFloat(call.dtype, [&]<typename T>(T) {
    if constexpr (sizeof(T) == sizeof(double)) {
      return cudaErrorInvalidValue;
    } else {
      return LaunchOf<T>(stream, call);
    }
  });
}

}  // namespace jaxops::trilinear::cuda
