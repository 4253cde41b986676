// These kernels handle the sums of a volume gradient in the arithmetic type: they clear the sums
// before points are added, and round the sums at the end if the volume has 2-byte entries.
#include <cstdint>

#include "cuda/common/launch.h"
#include "cuda/grid_sample/families.h"
#include "cuda/grid_sample/samples.cuh"

namespace jaxops::grid_sample::cuda {
namespace {

using jaxops::cuda::CeilDiv;
using jaxops::cuda::Launch;
using jaxops::cuda::LoadVector;
using jaxops::cuda::Narrow;
using jaxops::cuda::StoreVector;
using jaxops::cuda::Vector;

struct NarrowParams {
  const float* from;
  void* to;
  int64_t count;
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    NarrowSums(const __grid_constant__ NarrowParams params) {
  constexpr int kCount = 4;
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kCount;
  T* to = static_cast<T*>(params.to);
  if (i + kCount <= params.count) {
    const auto values = LoadVector<kCount>(params.from + i);
    Vector<T, kCount> out;
#pragma unroll
    for (int e = 0; e < kCount; ++e) out.values[e] = Narrow<T>(values.values[e]);
    StoreVector(to + i, out);
  } else {
    for (int64_t e = i; e < params.count; ++e) to[e] = Narrow<T>(params.from[e]);
  }
}

int64_t CountSums(const Call& call) {
  return call.gradients * call.geometry.grid() * call.geometry.width;
}

}  // namespace

int64_t SumsBytes(const Call& call) {
  return CountSums(call) *
         static_cast<int64_t>(call.dtype == DType::kF64 ? sizeof(double) : sizeof(float));
}

cudaError_t ClearSums(cudaStream_t stream, const Job& job) {
  return cudaMemsetAsync(job.sums, 0, SumsBytes(job.call), stream);
}

cudaError_t RoundSums(cudaStream_t stream, const Job& job) {
  if (job.sums == job.call.dvolume) return cudaSuccess;
  const int64_t count = CountSums(job.call);
  const NarrowParams params{static_cast<const float*>(job.sums), job.call.dvolume, count};
  const auto kernel =
      job.call.dtype == DType::kF16 ? NarrowSums<__half> : NarrowSums<__nv_bfloat16>;
  return Launch(kernel, CeilDiv(count, 4 * kThreads), kThreads, 0, stream, params);
}

}  // namespace jaxops::grid_sample::cuda
