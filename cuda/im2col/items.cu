// These kernels run im2col of any items: a thread gathers 16 bytes of patches from items as large
// as all sizes and addresses allow. The thread computes the source of the first item and steps from
// there, so that only one of many items costs divisions. Neighbouring threads write neighbouring
// bytes.
#include <cuda_runtime_api.h>

#include <type_traits>

#include "cuda/common/launch.h"
#include "cuda/common/numeric.cuh"
#include "cuda/im2col/families.h"
#include "cuda/im2col/window.cuh"

namespace jaxops::im2col::cuda {
namespace {

using jaxops::cuda::CeilDiv;
using jaxops::cuda::kVectorElements;
using jaxops::cuda::Launch;
using jaxops::cuda::StoreVector;
using jaxops::cuda::Vector;

template <typename Unit, typename UInt, int kDims, bool kChannelsLast>
__global__ void __launch_bounds__(kThreads)
    GatherItems(const __grid_constant__ Params<UInt, kDims> params) {
  constexpr int kUnits = kVectorElements<Unit>;
  const int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kUnits;
  if (first >= params.count) return;
  Unit* to = static_cast<Unit*>(params.to) + first;
  Place<UInt, kDims, kChannelsLast> place(params, static_cast<UInt>(first));
  Vector<Unit, kUnits> vector;
  // Beyond the end there is nothing to read either.
  const int64_t left = params.count - first;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    vector.values[i] = i < left ? place.template Read<Unit>(params) : Unit{};
    place.Advance(params);
  }
  if (left >= kUnits && params.is_packed) {
    StoreVector(to, vector);
    return;
  }
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    if (i < left) to[i] = vector.values[i];
  }
}

template <typename Unit>
cudaError_t LaunchGather(cudaStream_t stream, const Call& call) {
  Call units = call;
  units.channels = call.channels * call.item_bytes / static_cast<int64_t>(sizeof(Unit));
  return WithParams(units, 1, units.patches_size(), [&](const auto& params) {
    using P = std::decay_t<decltype(params)>;
    using UInt = std::decay_t<decltype(params.channels.divisor())>;
    constexpr int kDims = std::extent_v<decltype(P::dims)>;
    const int64_t blocks = CeilDiv(CeilDiv(params.count, kVectorElements<Unit>), kThreads);
    return call.channels_last
               ? Launch(GatherItems<Unit, UInt, kDims, true>, blocks, kThreads, 0, stream, params)
               : Launch(GatherItems<Unit, UInt, kDims, false>, blocks, kThreads, 0, stream, params);
  });
}

}  // namespace

cudaError_t LaunchItems(cudaStream_t stream, const Call& call, const Device&) {
  switch (UnitBytes(call)) {
    case 16:
    case 8:
      return LaunchGather<uint2>(stream, call);
    case 4:
      return LaunchGather<uint32_t>(stream, call);
    case 2:
      return LaunchGather<uint16_t>(stream, call);
    default:
      return LaunchGather<uint8_t>(stream, call);
  }
}

}  // namespace jaxops::im2col::cuda
