// These kernels compute gradients of trilinear interpolation in cells whose rows are not whole
// vectors and which are too large for a block's shared memory.
//
// The eight rows of a cell together are whole vectors and aligned, but a row begins and ends inside
// a vector. A thread takes one vector of every row: the n-th of the vectors that begin in the row.
// The positions of these vectors in their rows differ by less than one vector, so all use the same
// part of the cotangent, which the thread keeps in registers. The shift of a row is a compile-time
// constant, because it depends only on the corner and on the elements of a row after its whole
// vectors. So is the position where the last vectors of a row continue in the next row: these
// vectors are steps of another kind, which have their own warps.
#include <algorithm>
#include <cstdint>

#include "common/host_device.h"
#include "cuda/trilinear/cells.cuh"
#include "cuda/trilinear/families.h"

namespace jaxops::trilinear::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxRowBytes = 56 * 1024;
// A multiprocessor has at least this number of blocks, which leaves registers for all of a thread's
// cotangent.
template <typename T>
constexpr int kBlocks = sizeof(T) == 2 ? 2 : 3;

// Shifts says which vectors begin in a corner's row. kRest is the number of elements of a row after
// its whole vectors.
template <typename T, int kRest>
struct Shifts {
  static constexpr int kVector = kVectorElements<T>;

  // FirstOf returns the first element of the row at which a vector begins.
  JAXOPS_HOST_DEVICE static constexpr int FirstOf(int corner) {
    return (kVector - corner * kRest % kVector) % kVector;
  }
  // VectorOf returns the index of that vector in the cell, not counting the whole vectors of the
  // rows before.
  JAXOPS_HOST_DEVICE static constexpr int VectorOf(int corner) {
    return (corner * kRest + FirstOf(corner)) / kVector;
  }
};

struct ShiftParams {
  Call call;
  int steps;  // per cell
};

// The vectors of inner steps do not leave their rows; the crossing step follows them; some rows do
// not have the last step.
enum class Step { kInner, kCrossing, kLast };
constexpr int kOthers = 2;  // steps that are not inner ones

// TakeStep handles one vector of every row of a cell: it stores the feature gradient if kFeatures,
// and returns the contribution of these vectors to the point gradient if kPoints.
template <typename T, int kRest, bool kFeatures, bool kPoints, Step kStep>
__device__ __forceinline__ void TakeStep(const ShiftParams& params, int64_t cell, int step,
                                         Accumulator<T> (&gradient)[kAxes]) {
  using A = Accumulator<T>;
  using Shifts = Shifts<T, kRest>;
  constexpr int kVector = Shifts::kVector;
  // kLeft is the number of elements of the row from this step on; further elements of a vector
  // belong to the next row. Inner steps have enough elements.
  constexpr int kLeft = kStep == Step::kInner      ? 2 * kVector
                        : kStep == Step::kCrossing ? kVector + kRest
                                                   : kRest;
  // kSpan is the number of elements of the cotangent that all vectors of the step use.
  constexpr int kSpan = kStep == Step::kLast ? kRest + kVector - 1 : 2 * kVector - 1;
  const Call& call = params.call;
  const int whole = params.steps - 1;  // whole vectors per row
  const auto vector_of = [&](int corner) {
    return (corner * whole + Shifts::VectorOf(corner) + step) * kVector;
  };
  [[maybe_unused]] Vector<T, kVector> rows[kCorners];
  if constexpr (kPoints) {
    const T* features =
        static_cast<const T*>(call.features) + call.cells.Offset(cell, Call::kFeatures);
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
      if (Shifts::FirstOf(c) < kLeft) rows[c] = LoadVector<kVector>(features + vector_of(c));
    }
  }
  const T* cotangent =
      static_cast<const T*>(call.cotangent) + call.cells.Offset(cell, Call::kCotangent);
  T read[kSpan];
#pragma unroll
  for (int k = 0; k < kSpan; ++k) {
    read[k] = cotangent[k < kLeft ? step * kVector + k : k - kLeft];
  }
  Coordinates<A> p;
  LoadCoordinates<A>(call, cell, p);
  A g[kSpan];
#pragma unroll
  for (int k = 0; k < kSpan; ++k) g[k] = Widen(read[k]);
  // The dot products come before the stores, so that the registers of the two are not live
  // together.
  if constexpr (kPoints) {
    A dots[kCorners] = {};
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
      if (Shifts::FirstOf(c) >= kLeft) continue;
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
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
      Vector<T, kVector> out;
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        const int k = Shifts::FirstOf(c) + e;
        out.values[e] = Narrow<T>(weights[k < kLeft ? c : c + 1] * g[k]);
      }
      StoreVector(to + vector_of(c), out);
    }
  }
}

// A block has one cell.
template <typename T, int kRest, bool kFeatures, bool kPoints>
__global__ void __launch_bounds__(kThreads, kBlocks<T>)
    BackwardShifts(const __grid_constant__ ShiftParams params) {
  using A = Accumulator<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  // `parts` holds the contribution of every step to the point gradient.
  [[maybe_unused]] A* parts = reinterpret_cast<A*>(shared);
  const Call& call = params.call;
  const int64_t cell = blockIdx.x;
  const int threads = static_cast<int>(blockDim.x);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int inner = params.steps - kOthers;
  const int rounds = (inner + kWarp - 1) / kWarp;
  // The rounds of inner steps come first, then one of the crossing step and one of the last step.
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
    constexpr int kLanes = 8;  // lanes per sum
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
  const ShiftParams params{call, static_cast<int>(CeilDiv(call.width, kVectorElements<T>))};
  // All warps have the same number of rounds if possible.
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
  if constexpr (kRest < kVectorElements<T>) {
    return call.width % kVectorElements<T> == kRest ? LaunchOfRest<T, kRest>(stream, call)
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
