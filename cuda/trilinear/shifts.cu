// Gradients of trilinear interpolation in cells whose rows vectors do not divide and which are too
// large for the memory that a block shares.
//
// The eight rows of a cell are a whole number of vectors and aligned together, but a row begins and
// ends inside a vector. A thread takes a vector of every row: the n-th of those that begin in it.
// All of them lie within one vector's elements less one of each other, from the same part of the
// cotangent, which the thread keeps in registers. By how much a row is shifted is known to the
// compiler, because it depends on no more than the corner and the rest of a row after its whole
// vectors. So is where the last vectors of a row go on with the next one: they are steps of another
// kind, which have warps of their own.
#include <algorithm>
#include <cstdint>

#include "common/host_device.h"
#include "cuda/trilinear/cells.cuh"
#include "cuda/trilinear/families.h"

namespace jaxops::trilinear::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxRowBytes = 56 * 1024;
// What a multiprocessor has at least: leaves registers for all that a thread has of the cotangent.
template <typename T>
constexpr int kBlocks = sizeof(T) == 2 ? 2 : 3;

// Where the vectors are that begin in a corner's row. kRest is what a row has next to whole
// vectors.
template <typename T, int kRest>
struct Shifts {
  static constexpr int kPack = kPackElements<T>;

  // The first element of the row with which a vector begins.
  JAXOPS_HOST_DEVICE static constexpr int FirstOf(int corner) {
    return (kPack - corner * kRest % kPack) % kPack;
  }
  // Which vector of the cell that is, next to the whole ones of the rows before.
  JAXOPS_HOST_DEVICE static constexpr int VectorOf(int corner) {
    return (corner * kRest + FirstOf(corner)) / kPack;
  }
};

struct ShiftParams {
  Call call;
  int steps;  // of a cell
};

// Steps that no vector of leaves its row; the step after them; the last, which some rows lack.
enum class Step { kInner, kCrossing, kLast };
constexpr int kOthers = 2;  // that are not inner ones

// Takes one vector of every row of a cell: the feature gradient if kFeatures, and what
// these vectors add to the one by the point if kPoints.
template <typename T, int kRest, bool kFeatures, bool kPoints, Step kStep>
__device__ __forceinline__ void TakeStep(const ShiftParams& params, int64_t cell, int step,
                                         Accumulator<T> (&gradient)[kAxes]) {
  using A = Accumulator<T>;
  using Shifts = Shifts<T, kRest>;
  constexpr int kPack = Shifts::kPack;
  // What a row has from here: of elements behind that, vectors have those of the next row. Inner
  // steps have enough.
  constexpr int kLeft = kStep == Step::kInner      ? 2 * kPack
                        : kStep == Step::kCrossing ? kPack + kRest
                                                   : kRest;
  // How many elements of the cotangent all of the vectors have together.
  constexpr int kSpan = kStep == Step::kLast ? kRest + kPack - 1 : 2 * kPack - 1;
  const Call& call = params.call;
  const int whole = params.steps - 1;  // vectors of a row
  const auto vector_of = [&](int corner) {
    return (corner * whole + Shifts::VectorOf(corner) + step) * kPack;
  };
  [[maybe_unused]] Pack<T, kPack> rows[kCorners];
  if constexpr (kPoints) {
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
    T* to = static_cast<T*>(call.dfeatures) + cell * kCorners * call.width;
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
      if (Shifts::FirstOf(c) >= kLeft) continue;
      Pack<T, kPack> out;
#pragma unroll
      for (int e = 0; e < kPack; ++e) {
        const int k = Shifts::FirstOf(c) + e;
        out.values[e] = Narrow<T>(weights[k < kLeft ? c : c + 1] * g[k]);
      }
      StorePack(to + vector_of(c), out);
    }
  }
}

// A block has a cell.
template <typename T, int kRest, bool kFeatures, bool kPoints>
__global__ void __launch_bounds__(kThreads, kBlocks<T>)
    BackwardShifts(const __grid_constant__ ShiftParams params) {
  using A = Accumulator<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  // What every step adds to the point gradient.
  [[maybe_unused]] A* parts = reinterpret_cast<A*>(shared);
  const Call& call = params.call;
  const int64_t cell = blockIdx.x;
  const int threads = static_cast<int>(blockDim.x);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int inner = params.steps - kOthers;
  const int rounds = (inner + kWarp - 1) / kWarp;
  // After the rounds of inner steps come one of the crossing and one of the last one.
  for (int round = static_cast<int>(threadIdx.x) / kWarp; round < rounds + kOthers;
       round += threads / kWarp) {
    int step = round * kWarp + lane;
    A gradient[kAxes];
    if (round < rounds) {
      if (step >= inner) continue;
      TakeStep<T, kRest, kFeatures, kPoints, Step::kInner>(params, cell, step, gradient);
    } else {
      if (lane > 0) continue;
      step = inner + round - rounds;
      if (round == rounds) {
        TakeStep<T, kRest, kFeatures, kPoints, Step::kCrossing>(params, cell, step, gradient);
      } else {
        TakeStep<T, kRest, kFeatures, kPoints, Step::kLast>(params, cell, step, gradient);
      }
    }
    if constexpr (kPoints) {
#pragma unroll
      for (int a = 0; a < kAxes; ++a) parts[a * params.steps + step] = gradient[a];
    }
  }
  if constexpr (kPoints) {
    __syncthreads();
    if (threadIdx.x >= kWarp) return;
    constexpr int kLanes = 8;  // that share a sum
    const int axis = lane / kLanes;
    A total[1] = {};
    if (axis < kAxes) {
      for (int step = lane % kLanes; step < params.steps; step += kLanes) {
        total[0] += parts[axis * params.steps + step];
      }
    }
    multilinear::cuda::SumOverLanes(total, kLanes);
    if (axis < kAxes && lane % kLanes == 0) {
      jaxops::cuda::StoreAs(call.dpoints, cell * kAxes + axis, call.point_dtype, total[0]);
    }
  }
}

template <typename T, int kRest>
cudaError_t LaunchOfRest(cudaStream_t stream, const Call& call) {
  using A = Accumulator<T>;
  const ShiftParams params{call, static_cast<int>(CeilDiv(call.width, kPackElements<T>))};
  // As many rounds for all warps, if it can be.
  const int64_t rounds = CeilDiv(params.steps - kOthers, kWarp) + kOthers;
  const int64_t warps = CeilDiv(rounds, CeilDiv(rounds, kThreads / kWarp));
  const int64_t bytes =
      call.dpoints == nullptr ? 0 : int64_t{params.steps} * kAxes * static_cast<int64_t>(sizeof(A));
  const auto kernel = call.dpoints == nullptr     ? BackwardShifts<T, kRest, true, false>
                      : call.dfeatures == nullptr ? BackwardShifts<T, kRest, false, true>
                                                  : BackwardShifts<T, kRest, true, true>;
  return Launch(kernel, call.cells.size(), static_cast<int>(warps) * kWarp, bytes, stream, params);
}

template <typename T, int kRest = 1>
cudaError_t LaunchOf(cudaStream_t stream, const Call& call) {
  if constexpr (kRest < kPackElements<T>) {
    return call.width % kPackElements<T> == kRest ? LaunchOfRest<T, kRest>(stream, call)
                                                  : LaunchOf<T, kRest + 1>(stream, call);
  } else {
    return cudaErrorInvalidValue;
  }
}

}  // namespace

bool CanRunShifts(const Call& call, const Device&) {
  const int64_t vector = VectorElements(call);
  return HasAlignedArrays(call) && call.out == nullptr && call.dtype != DType::kF64 &&
         call.width > vector && call.width % vector != 0 && RowBytes(call) <= kMaxRowBytes &&
         call.cells.size() <= INT32_MAX;
}

cudaError_t LaunchShifts(cudaStream_t stream, const Call& call, const Device&) {
  return jaxops::cuda::DispatchFloat(call.dtype, [&]<typename T>(T) {
    if constexpr (sizeof(T) == sizeof(double)) {
      return cudaErrorInvalidValue;
    } else {
      return LaunchOf<T>(stream, call);
    }
  });
}

}  // namespace jaxops::trilinear::cuda
