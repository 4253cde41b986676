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
using jaxops::cuda::kPackBytes;
using jaxops::cuda::Launch;

// A thread has this number of vectors in flight.
constexpr int kPacksInFlight = 4;

template <typename UInt, int kDims>
__global__ void __launch_bounds__(kThreads)
    MovePacks(const __grid_constant__ Params<UInt, kDims> params) {
  const int64_t first = int64_t{blockIdx.x} * (kThreads * kPacksInFlight) + threadIdx.x;
  uint4 packs[kPacksInFlight];
#pragma unroll
  for (int i = 0; i < kPacksInFlight; ++i) {
    const int64_t pack = first + i * kThreads;
    if (pack >= params.count) continue;
    packs[i] =
        Place<UInt, kDims, true>(params, static_cast<UInt>(pack)).template Read<uint4>(params);
  }
#pragma unroll
  for (int i = 0; i < kPacksInFlight; ++i) {
    const int64_t pack = first + i * kThreads;
    if (pack < params.count) static_cast<uint4*>(params.to)[pack] = packs[i];
  }
}

}  // namespace

bool CanRunVectors(const Call& call, const Device&) {
  return call.channels_last && UnitBytes(call) == kPackBytes;
}

cudaError_t LaunchVectors(cudaStream_t stream, const Call& call, const Device&) {
  Call packs = call;
  packs.channels = call.channels * call.item_bytes / kPackBytes;
  return WithParams(packs, 1, packs.patches_size(), [&](const auto& params) {
    using P = std::decay_t<decltype(params)>;
    using UInt = std::decay_t<decltype(params.channels.divisor())>;
    constexpr int kDims = std::extent_v<decltype(P::dims)>;
    const int64_t blocks = CeilDiv(params.count, kThreads * kPacksInFlight);
    return Launch(MovePacks<UInt, kDims>, blocks, kThreads, 0, stream, params);
  });
}

}  // namespace jaxops::im2col::cuda
