// The softmax focal loss: the choice of kernels.
#include "cuda/focal_loss/launch.h"
#include "cuda/focal_loss/softmax/rows.cuh"

namespace jaxops::focal_loss::cuda {
namespace {

// Rows of at most so many accesses are in the registers of a warp; where f32 gradients are wanted
// alone, of fewer, because 16 rows of two warps each then keep the memory of a multiprocessor busy.
constexpr int64_t kMostPacks = 512;
constexpr int64_t kMostPacksOfGradient = 224;

}  // namespace

cudaError_t LaunchSoftmax(cudaStream_t stream, const Softmax& call, int64_t splits,
                          void* partials) {
  const int64_t entries = call.batch.size();
  const size_t scalar = call.dtype == DType::kF64 ? sizeof(double) : sizeof(float);
  if (entries == 0) return cudaSuccess;
  if (call.rows == 0 || call.classes == 0) {
    if (call.sum != nullptr) {
      const cudaError_t error = cudaMemsetAsync(call.sum, 0, entries * scalar, stream);
      if (error != cudaSuccess) return error;
    }
    return call.loss == nullptr
               ? cudaSuccess
               : cudaMemsetAsync(call.loss, 0, entries * call.rows * scalar, stream);
  }
  // Positions in a row, and what threads go beyond its end.
  if (call.classes > INT32_MAX - (1 << 20)) return cudaErrorInvalidValue;
  if (AreFewRows(call, splits)) return LaunchFewRows(stream, call, partials);
  const PacksOfRow packs(call);
  if (call.classes <= kShortClasses && !packs.whole) {
    return LaunchShortRows(stream, call, splits, partials);
  }
  if (AreWholeRows(call)) return LaunchWholeRows(stream, call, splits, partials);
  const bool gradient_alone = call.gradient != nullptr && call.sum == nullptr;
  const int64_t most_packs =
      gradient_alone && call.dtype == DType::kF32 ? kMostPacksOfGradient : kMostPacks;
  if (packs.count <= most_packs) return LaunchLaneRows(stream, call, splits, partials);
  return LaunchBlockRows(stream, call, splits, partials);
}

}  // namespace jaxops::focal_loss::cuda
