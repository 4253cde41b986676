// These kernels interpolate in cells whose rows are whole vectors, and compute the gradients: a
// thread takes one vector of each corner.
#include "cuda/trilinear/families.h"
#include "cuda/trilinear/vectors.cuh"

namespace jaxops::trilinear::cuda {

bool CanRunVectors(const Call& call, const Device&) {
  return HasAlignedArrays(call) && call.width % VectorElements(call) == 0;
}

cudaError_t LaunchVectors(cudaStream_t stream, const Call& call, const Device&) {
  return jaxops::cuda::DispatchFloat(call.dtype, [&]<typename T>(T) {
    return LaunchVectorsOf<T, kVectorElements<T>>(stream, call);
  });
}

}  // namespace jaxops::trilinear::cuda
