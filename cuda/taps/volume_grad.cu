// The kernels of the volume's gradient: every point adds to its entries in memory, in no fixed
// order, in the arithmetic type. Sums of 2-byte entries lie in the work space, and are rounded
// once.
#include "cuda/grid_sample/samples.cuh"
#include "cuda/taps/entries.cuh"
#include "cuda/taps/launch.h"

namespace jaxops::taps::cuda {
namespace {

using jaxops::cuda::Accumulator;
using jaxops::cuda::CeilDiv;
using jaxops::cuda::Launch;
using jaxops::cuda::LoadVector;
using jaxops::cuda::Narrow;
using jaxops::cuda::Vector;
using jaxops::cuda::Widen;

template <typename T, int kCount, int kTaps>
__global__ void __launch_bounds__(kThreads) AddToEntries(const __grid_constant__ Params params) {
  using A = Accumulator<T>;
  uint64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= params.threads) return;
  const int64_t f = static_cast<int64_t>(params.by_row.DivMod(index)) * kCount;
  const Call& call = params.call;
  const Entries<A, kTaps> entries(params, index);
  const auto g = LoadVector<kCount>(static_cast<const T*>(call.cotangent) +
                                    call.batch.Offset(entries.entry, Call::kCotangent) +
                                    entries.point * call.geometry.width + f);
  A* sums = static_cast<A*>(params.sums) + call.batch.Offset(entries.entry, Call::kGradient) + f;
  entries.ForEachRow([&](int, int, A w0, A w1, int64_t offset) {
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      if (!entries.IsValid(k)) continue;
      const A weight = w0 * w1 * entries.last_weights[k];
      A products[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) products[i] = weight * Widen(g.values[i]);
      grid_sample::cuda::Add<kCount>(sums + offset + entries.LastOffset(k), products);
    }
  });
}

struct Rounded {
  const float* from;
  void* to;
  int64_t count;
};

template <typename T>
__global__ void __launch_bounds__(kThreads) RoundSums(const __grid_constant__ Rounded params) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < params.count) static_cast<T*>(params.to)[i] = Narrow<T>(params.from[i]);
}

}  // namespace

cudaError_t LaunchVolumeGrad(cudaStream_t stream, const Call& call) {
  const bool is_narrow = SizeOf(call.dtype) == 2;
  void* const sums = is_narrow ? call.scratch : call.dvolume;
  const int64_t count = call.gradient_size();
  const int64_t bytes = is_narrow ? WorkSpaceBytes(call) : count * SizeOf(call.dtype);
  cudaError_t error = cudaMemsetAsync(sums, 0, bytes, stream);
  if (error != cudaSuccess) return error;
  error = Dispatch(call, sums,
                   [&]<typename T, int kCount, int kTaps>(T, Constant<kCount>, Constant<kTaps>) {
                     Params params(call, kCount);
                     params.sums = sums;
                     return Launch(AddToEntries<T, kCount, kTaps>,
                                   CeilDiv(params.threads, kThreads), kThreads, 0, stream, params);
                   });
  if (error != cudaSuccess || !is_narrow) return error;
  const Rounded params{static_cast<const float*>(sums), call.dvolume, count};
  return Launch(call.dtype == DType::kF16 ? RoundSums<__half> : RoundSums<__nv_bfloat16>,
                CeilDiv(count, kThreads), kThreads, 0, stream, params);
}

}  // namespace jaxops::taps::cuda
