// These kernels interpolate in any cells, at any addresses, and compute the gradients: a thread
// takes one element of each corner.
#include "cuda/trilinear/families.h"
#include "cuda/trilinear/vectors.cuh"

namespace jaxops::trilinear::cuda {

bool CanRunElements(const Call&, const Device&) { return true; }

cudaError_t LaunchElements(cudaStream_t stream, const Call& call, const Device&) {
  return jaxops::cuda::DispatchFloat(
      call.dtype, [&]<typename T>(T) { return LaunchVectorsOf<T, 1>(stream, call); });
}

}  // namespace jaxops::trilinear::cuda
