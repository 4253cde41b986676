// The instances of the gradients of long filters on tensor cores for calls with segments.
#include "cuda/lightweight_conv/mma/backward.cuh"

namespace jaxops::lightweight_conv::cuda {

cudaError_t LaunchMmaOfSegments(cudaStream_t stream, const Gradients& gradients, const Device&) {
  return mma::LaunchBackward<true>(stream, gradients);
}

}  // namespace jaxops::lightweight_conv::cuda
