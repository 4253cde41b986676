// Weighted sums of entries have one kernel a result: values.cu, volume_grad.cu, weight_grad.cu.
#include "cuda/common/refusal.h"
#include "cuda/taps/launch.h"

namespace jaxops::taps::cuda {

cudaError_t LaunchTaps(cudaStream_t stream, const Call& call) {
  const Geometry& geometry = call.geometry;
  if (geometry.taps > kMaxCudaTaps) {
    return jaxops::cuda::Refuse(cudaErrorNotSupported,
                                "taps: at most " + std::to_string(kMaxCudaTaps) + " taps on a GPU");
  }
  const int64_t points = call.batch.size() * geometry.points;
  if (call.dvolume != nullptr) {
    const int64_t size = call.gradient_size();
    if (size == 0) return cudaSuccess;
    return points == 0 ? cudaMemsetAsync(call.dvolume, 0, size * SizeOf(call.dtype), stream)
                       : LaunchVolumeGrad(stream, call);
  }
  if (points == 0) return cudaSuccess;
  if (call.out != nullptr) return geometry.width == 0 ? cudaSuccess : LaunchValues(stream, call);
  if (geometry.width > 0) return LaunchWeightGrad(stream, call);
  const int64_t bytes = points * geometry.taps * (call.dtype == DType::kF64 ? 8 : 4);
  cudaError_t error = cudaSuccess;
  for (int a = 0; a < geometry.axes && error == cudaSuccess; ++a) {
    error = cudaMemsetAsync(call.dweights[a], 0, bytes, stream);
  }
  return error;
}

}  // namespace jaxops::taps::cuda
