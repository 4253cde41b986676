// Dynamic convolution has one kernel a result: apply.cu computes the value and the input gradient,
// short.cu the value of short filters, weight_grad.cu the gradient of the weights. Where there is a
// softmax, scales.cu computes what it is made of before, except for short.cu.
#include "cuda/dynamic_conv/families.h"
#include "cuda/dynamic_conv/launch.h"

namespace jaxops::dynamic_conv::cuda {

cudaError_t LaunchForward(cudaStream_t stream, const Forward& call, void* scales) {
  const Geometry& g = call.geometry;
  if (call.batch.size() * g.time * g.channels == 0) return cudaSuccess;
  if (CanRunShort(call)) return LaunchShort(stream, call);
  const cudaError_t error = LaunchScales(stream, call, scales);
  return error != cudaSuccess ? error : LaunchApply(stream, call, scales);
}

cudaError_t LaunchBackward(cudaStream_t stream, const Backward& call, void* scales) {
  const Geometry& g = call.geometry;
  if (call.batch.size() * g.time * g.heads == 0) return cudaSuccess;
  cudaError_t error = LaunchScales(stream, call, scales);
  if (error == cudaSuccess && call.dx != nullptr && g.channels > 0) {
    error = LaunchApply(stream, call, scales);
  }
  if (error == cudaSuccess && call.dweight != nullptr) {
    error = LaunchWeightGrad(stream, call, scales);
  }
  return error;
}

}  // namespace jaxops::dynamic_conv::cuda
