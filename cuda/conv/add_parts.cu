// Adds the parts of a kernel gradient whose sum over pixels is split.
#include <cstdint>
#include <type_traits>

#include "cuda/common/launch.h"
#include "cuda/common/numeric.cuh"
#include "cuda/conv/add_parts.h"
#include "cuda/conv/results.cuh"

namespace jaxops::conv::cuda {
namespace {

template <typename In, typename Out>
__global__ void __launch_bounds__(kAddThreads)
    AddParts(const In* __restrict__ from, Out* __restrict__ to, int64_t count, int parts) {
  constexpr int kEntries = std::is_same_v<In, float4> ? 4 : 1;
  const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const In sum = SumOfParts(from, at, count, parts);
  if (at < count && threadIdx.y == 0) Store(to + kEntries * at, sum);
}

}  // namespace

cudaError_t LaunchAddParts(cudaStream_t stream, const void* from, void* result, DType dtype,
                           int64_t size, int parts) {
  const int adjacent = parts >= 128 ? 8 : parts >= 16 ? 32 : kAddThreads;
  const dim3 threads(adjacent, kAddThreads / adjacent);
  const auto launch = [&]<typename In>(const In* parts_from, auto* to, int64_t count) {
    const int64_t blocks = jaxops::cuda::CeilDiv(count, threads.x);
    if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
    AddParts<<<static_cast<unsigned>(blocks), threads, 0, stream>>>(parts_from, to, count, parts);
    return cudaGetLastError();
  };
  return jaxops::cuda::DispatchFloat(dtype, [&]<typename Out>(Out) {
    Out* to = static_cast<Out*>(result);
    if constexpr (!std::is_same_v<Out, double>) {
      if (size % 4 == 0) return launch(static_cast<const float4*>(from), to, size / 4);
    }
    return launch(static_cast<const jaxops::cuda::Accumulator<Out>*>(from), to, size);
  });
}

}  // namespace jaxops::conv::cuda
