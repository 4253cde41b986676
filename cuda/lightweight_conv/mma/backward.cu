// The instances of the gradients of long filters on tensor cores for calls without segments.
#include "cuda/lightweight_conv/mma/backward.cuh"

namespace jaxops::lightweight_conv::cuda {

bool CanRunMma(const Gradients& gradients, const Device&) {
  const Backward& call = gradients.call;
  if (!HasFragments(call.geometry, call.dtype)) return false;
  if (call.dbias != nullptr && !mma::HasOwn(call.geometry)) return false;
  const mma::Plan plan = mma::MakePlan(gradients);
  return plan.room >= 1 && plan.items <= INT32_MAX && plan.blocks <= kMaxBlocks &&
         plan.add_blocks <= kMaxBlocks;
}

bool ComputesInputGradMma(const Backward& call) {
  return HasMatrix(call.dtype, call.weight_dtype) &&
         CountTapBlocks(call.geometry, Mirrored(call.geometry)) <= mma::kFusedBlocks;
}

cudaError_t LaunchMma(cudaStream_t stream, const Gradients& gradients, const Device&) {
  return mma::LaunchBackward<false>(stream, gradients);
}

}  // namespace jaxops::lightweight_conv::cuda
