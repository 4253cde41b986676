// The instances of the kernels of long filters on tensor cores for calls with segments.
#include "cuda/lightweight_conv/mma/forward.cuh"

namespace jaxops::lightweight_conv::cuda {

cudaError_t LaunchMmaOfSegments(cudaStream_t stream, const Forward& call, const Device&) {
  return mma::LaunchForward<true>(stream, call);
}

}  // namespace jaxops::lightweight_conv::cuda
