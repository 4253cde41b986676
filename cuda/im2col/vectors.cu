// These kernels run im2col of pixels of whole vectors: a thread moves vectors of 16 bytes, and
// neighbouring threads write neighbouring bytes.
#include <cuda_runtime_api.h>

#include <type_traits>

#include "cuda/common/launch.h"
#include "cuda/common/numeric.cuh"
#include "cuda/im2col/families.h"
#include "cuda/im2col/window.cuh"

namespace jaxops::im2col::cuda {
namespace {

using jaxops::cuda::CeilDiv;
using jaxops::cuda::kVectorBytes;
using jaxops::cuda::Launch;

// A thread has this number of vectors in flight.
constexpr int kVectorsInFlight = 4;

template <typename UInt, int kDims>
__global__ void __launch_bounds__(kThreads)
    MoveVectors(const __grid_constant__ Params<UInt, kDims> params) {
  const int64_t first = int64_t{blockIdx.x} * (kThreads * kVectorsInFlight) + threadIdx.x;
  uint4 vectors[kVectorsInFlight];
#pragma unroll
  for (int i = 0; i < kVectorsInFlight; ++i) {
    const int64_t vector = first + i * kThreads;
    if (vector >= params.count) continue;
    vectors[i] =
        Place<UInt, kDims, true>(params, static_cast<UInt>(vector)).template Read<uint4>(params);
  }
#pragma unroll
  for (int i = 0; i < kVectorsInFlight; ++i) {
    const int64_t vector = first + i * kThreads;
    if (vector < params.count) static_cast<uint4*>(params.to)[vector] = vectors[i];
  }
}

}  // namespace

bool CanRunVectors(const Call& call, const Device&) {
  return call.channels_last && UnitBytes(call) == kVectorBytes;
}

cudaError_t LaunchVectors(cudaStream_t stream, const Call& call, const Device&) {
  Call vectors = call;
  vectors.channels = call.channels * call.item_bytes / kVectorBytes;
  return WithParams(vectors, 1, vectors.patches_size(), [&](const auto& params) {
    using P = std::decay_t<decltype(params)>;
    using UInt = std::decay_t<decltype(params.channels.divisor())>;
    constexpr int kDims = std::extent_v<decltype(P::dims)>;
    const int64_t blocks = CeilDiv(params.count, kThreads * kVectorsInFlight);
    return Launch(MoveVectors<UInt, kDims>, blocks, kThreads, 0, stream, params);
  });
}

}  // namespace jaxops::im2col::cuda
