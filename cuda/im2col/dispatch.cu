// The patches of images and the images of patches, see common/im2col.h.
#include "cuda/common/numeric.cuh"
#include "cuda/im2col/families.h"
#include "cuda/im2col/launch.h"

namespace jaxops::im2col::cuda {

cudaError_t LaunchIm2Col(cudaStream_t stream, const Call& call) {
  if (call.patches_size() == 0) return cudaSuccess;
  // Nothing but padding, of an image without entries to divide by.
  if (call.image_size() == 0) {
    return cudaMemsetAsync(call.to, 0, call.patches_size() * call.item_bytes, stream);
  }
  return UnitBytes(call) == jaxops::cuda::kPackBytes ? LaunchVectors(stream, call)
                                                     : LaunchItems(stream, call);
}

cudaError_t LaunchCol2Im(cudaStream_t stream, const Call& call) {
  if (call.image_size() == 0) return cudaSuccess;
  // Sums of nothing: there are no patches, or no taps, to divide by.
  if (call.patches_size() == 0) {
    return cudaMemsetAsync(call.to, 0, call.image_size() * jaxops::cuda::SizeOf(call.dtype),
                           stream);
  }
  return LaunchSum(stream, call);
}

}  // namespace jaxops::im2col::cuda
