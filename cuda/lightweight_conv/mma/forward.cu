// The instances of the kernels of long filters on tensor cores for calls without segments.
#include "cuda/lightweight_conv/mma/forward.cuh"

namespace jaxops::lightweight_conv::cuda {

bool CanRunMma(const Forward& call, const Device&) {
  return call.state == nullptr && HasFragments(call.geometry, call.dtype) &&
         HasMatrix(call.dtype, call.weight_dtype) &&
         CountTapBlocks(call.geometry, call.geometry.padding) <= kMaxWindowBlocks &&
         mma::MakePlan(call).items <= INT32_MAX;
}

cudaError_t LaunchMma(cudaStream_t stream, const Forward& call, const Device&) {
  return mma::LaunchForward<false>(stream, call);
}

}  // namespace jaxops::lightweight_conv::cuda
