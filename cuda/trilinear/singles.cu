// These kernels interpolate one feature per corner, and compute the gradients: a lane has a cell.
#include <cstdint>
#include <cstring>

#include "cuda/trilinear/cells.cuh"
#include "cuda/trilinear/families.h"

namespace jaxops::trilinear::cuda {
namespace {

constexpr int kThreads = 256;

// TransposeVectors transposes the vectors of groups of kVectors neighbouring lanes: lane i of a
// group exchanges its vector j for vector i of lane j.
template <typename T, int kCount, int kVectors>
__device__ __forceinline__ void TransposeVectors(int lane, Vector<T, kCount> (&vecs)[kVectors]) {
  constexpr int kWords = sizeof(Vector<T, kCount>) / sizeof(uint32_t);
#pragma unroll
  for (int step = 1; step < kVectors; step *= 2) {
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (i & step) continue;
      uint32_t low[kWords], high[kWords];
      memcpy(low, &vecs[i], sizeof(low));
      memcpy(high, &vecs[i | step], sizeof(high));
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint32_t got = __shfl_xor_sync(~0u, upper ? low[w] : high[w], step);
        low[w] = upper ? got : low[w];
        high[w] = upper ? high[w] : got;
      }
      memcpy(&vecs[i], low, sizeof(low));
      memcpy(&vecs[i | step], high, sizeof(high));
    }
  }
}

struct SingleParams {
  Call call;
  int64_t strides[Call::kCotangent + 1];  // between cells that are not nested
};

// A row has one element, and a lane has a cell. kPlain says that there is no derivative, that
// points are of the features' dtype, and that cells are not nested: the registers of other calls
// leave room for half of the warps only, too few to hide the latency of memory.
template <typename T, bool kPlain, bool kOut, bool kFeatures, bool kPoints>
__global__ void __launch_bounds__(kThreads) Singles(const __grid_constant__ SingleParams params) {
  using A = Accumulator<T>;
  constexpr int kCount = kVectorElements<T>;
  constexpr int kVectors = kCorners / kCount;
  __shared__ A staged[kPoints ? kThreads * kAxes : 1];
  const Call& call = params.call;
  const int64_t own = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  // Lanes without a cell compute the last one, because the shuffles need whole warps.
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
  Vector<T, kCount> vecs[kVectors];
  if constexpr (kOut || kPoints) {
    const T* features = static_cast<const T*>(call.features) + offset(Call::kFeatures);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) vecs[i] = LoadVector<kCount>(features + i * kCount);
  }
  A weights[kCorners];
  if constexpr (kOut || kFeatures) MakeWeights<kPlain>(call, cell, p, weights);
  if constexpr (kOut) {
    A sum = 0;
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
      sum += weights[c] * Widen(vecs[c / kCount].values[c % kCount]);
    }
    if (own == cell) static_cast<T*>(call.out)[cell] = Narrow<T>(sum);
  }
  if constexpr (kPoints) {
    A dots[kCorners];
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
      dots[c] = Widen(g) * Widen(vecs[c / kCount].values[c % kCount]);
    }
    A gradient[kAxes];
    MakeGradient<kPlain>(call, cell, p, dots, gradient);
    StorePoints<kPlain, T>(call, WarpCells(call), gradient,
                           staged + threadIdx.x / kWarp * kWarp * kAxes);
  }
  if constexpr (kFeatures) {
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
      vecs[c / kCount].values[c % kCount] = Narrow<T>(weights[c] * Widen(g));
    }
    // Neighbouring lanes write a cell together, because two stores of half a sector cost two whole
    // sectors.
    TransposeVectors(static_cast<int>(threadIdx.x), vecs);
    const int piece = static_cast<int>(threadIdx.x) % kVectors;
    T* to = static_cast<T*>(call.dfeatures) + (own - piece) * kCorners + piece * kCount;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (own - piece + i < call.cells.size()) StoreVector(to + i * kCorners, vecs[i]);
    }
  }
}

template <typename T, bool kPlain>
cudaError_t LaunchOf(cudaStream_t stream, const Call& call) {
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

}  // namespace

bool CanRunSingles(const Call& call, const Device&) {
  return HasAlignedArrays(call) && call.width == 1;
}

cudaError_t LaunchSingles(cudaStream_t stream, const Call& call, const Device&) {
  const bool plain = call.order == 0 && call.point_dtype == call.dtype && call.cells.rank() <= 1;
  return jaxops::cuda::DispatchFloat(call.dtype, [&]<typename T>(T) {
    return plain ? LaunchOf<T, true>(stream, call) : LaunchOf<T, false>(stream, call);
  });
}

}  // namespace jaxops::trilinear::cuda
