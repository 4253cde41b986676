// The kernel of weighted sums of entries. A thread has a vector of channels of a point, or one
// channel, and reads the entries of the last axis together.
#include "cuda/taps/entries.cuh"
#include "cuda/taps/launch.h"

namespace jaxops::taps::cuda {
namespace {

using jaxops::cuda::Accumulator;
using jaxops::cuda::CeilDiv;
using jaxops::cuda::Launch;
using jaxops::cuda::LoadVector;
using jaxops::cuda::Narrow;
using jaxops::cuda::StoreVector;
using jaxops::cuda::Vector;
using jaxops::cuda::Widen;

template <typename T, int kCount, int kTaps>
__global__ void __launch_bounds__(kThreads) SumEntries(const __grid_constant__ Params params) {
  using A = Accumulator<T>;
  uint64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= params.threads) return;
  const int64_t f = static_cast<int64_t>(params.by_row.DivMod(index)) * kCount;
  const Call& call = params.call;
  const Entries<A, kTaps> entries(params, index);
  const T* volume =
      static_cast<const T*>(call.volume) + call.batch.Offset(entries.entry, Call::kVolume) + f;
  A sums[kCount] = {};
  entries.ForEachRow([&](int, int, A w0, A w1, int64_t offset) {
    Vector<T, kCount> values[kTaps];
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      if (entries.IsValid(k))
        values[k] = LoadVector<kCount>(volume + offset + entries.LastOffset(k));
    }
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      if (!entries.IsValid(k)) continue;
      const A weight = w0 * w1 * entries.last_weights[k];
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[i] += weight * Widen(values[k].values[i]);
    }
  });
  Vector<T, kCount> out;
#pragma unroll
  for (int i = 0; i < kCount; ++i) out.values[i] = Narrow<T>(sums[i]);
  StoreVector(static_cast<T*>(call.out) + static_cast<int64_t>(index) * call.geometry.width + f,
              out);
}

}  // namespace

cudaError_t LaunchValues(cudaStream_t stream, const Call& call) {
  return Dispatch(call, nullptr,
                  [&]<typename T, int kCount, int kTaps>(T, Constant<kCount>, Constant<kTaps>) {
                    const Params params(call, kCount);
                    return Launch(SumEntries<T, kCount, kTaps>, CeilDiv(params.threads, kThreads),
                                  kThreads, 0, stream, params);
                  });
}

}  // namespace jaxops::taps::cuda
