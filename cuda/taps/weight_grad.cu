// The kernel of the gradients of all axes' weights. Several lanes share a point, and each has some
// of its channels: an entry's dot product with the cotangent is added to the gradient of one tap of
// each axis, with the weights of the other axes, and the lanes' gradients are summed at the end.
#include <algorithm>

#include "cuda/common/multilinear.cuh"
#include "cuda/taps/entries.cuh"
#include "cuda/taps/launch.h"

namespace jaxops::taps::cuda {
namespace {

using jaxops::cuda::Accumulator;
using jaxops::cuda::CeilDiv;
using jaxops::cuda::Launch;
using jaxops::cuda::LoadVector;
using jaxops::cuda::Vector;
using jaxops::cuda::Widen;

template <typename T, int kCount, int kTaps>
__global__ void __launch_bounds__(kThreads)
    DifferentiateWeights(const __grid_constant__ Params params) {
  using A = Accumulator<T>;
  const int lane = threadIdx.x % params.lanes;
  const int64_t wanted = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / params.lanes;
  const bool is_point = wanted < params.points;  // other lanes take part in the sums
  const int64_t index = is_point ? wanted : params.points - 1;
  const Call& call = params.call;
  const int64_t width = call.geometry.width;
  const Entries<A, kTaps> entries(params, index);
  const T* volume =
      static_cast<const T*>(call.volume) + call.batch.Offset(entries.entry, Call::kVolume);
  const T* cotangent = static_cast<const T*>(call.cotangent) +
                       call.batch.Offset(entries.entry, Call::kCotangent) + entries.point * width;
  A gradients[kMaxAxes][kTaps] = {};
  for (int64_t f = lane * kCount; f < width; f += params.lanes * kCount) {
    const auto g = LoadVector<kCount>(cotangent + f);
    entries.ForEachRow([&](int k0, int k1, A w0, A w1, int64_t offset) {
      Vector<T, kCount> values[kTaps];
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        if (entries.IsValid(k)) {
          values[k] = LoadVector<kCount>(volume + offset + entries.LastOffset(k) + f);
        }
      }
      A of_row = 0;
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        if (!entries.IsValid(k)) continue;
        A dot = 0;
#pragma unroll
        for (int i = 0; i < kCount; ++i) dot += Widen(g.values[i]) * Widen(values[k].values[i]);
        gradients[2][k] += w0 * w1 * dot;
        of_row += entries.last_weights[k] * dot;
      }
      // The gradients stay in registers, which have no addresses.
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        gradients[1][k] += k == k1 ? w0 * of_row : A(0);
        gradients[0][k] += k == k0 ? w1 * of_row : A(0);
      }
    });
  }
#pragma unroll
  for (int a = 0; a < kMaxAxes; ++a) {
    const Axis& axis = params.axes[a];
    if (axis.weights == nullptr) continue;
    multilinear::cuda::SumOverLanes(gradients[a], params.lanes);
    A* to = static_cast<A*>(call.dweights[axis.place]) + index * axis.taps;
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      if (is_point && lane == 0 && k < axis.taps) to[k] = gradients[a][k];
    }
  }
}

}  // namespace

cudaError_t LaunchWeightGrad(cudaStream_t stream, const Call& call) {
  return Dispatch(
      call, nullptr, [&]<typename T, int kCount, int kTaps>(T, Constant<kCount>, Constant<kTaps>) {
        Params params(call, kCount);
        params.lanes = multilinear::cuda::LanesFor(call.geometry.width / kCount);
        return Launch(DifferentiateWeights<T, kCount, kTaps>,
                      CeilDiv(params.points * params.lanes, kThreads), kThreads, 0, stream, params);
      });
}

}  // namespace jaxops::taps::cuda
