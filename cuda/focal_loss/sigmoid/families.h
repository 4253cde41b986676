// This header declares the kernel families of the sigmoid focal loss: the calls that each family
// can run, and its launcher. dispatch.cc alone chooses between them. No size is zero.
#ifndef JAXOPS_CUDA_FOCAL_LOSS_SIGMOID_FAMILIES_H_
#define JAXOPS_CUDA_FOCAL_LOSS_SIGMOID_FAMILIES_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/focal_loss.h"
#include "cuda/common/device.h"

namespace jaxops::focal_loss::cuda {

using jaxops::cuda::Device;

// SigmoidCall is a call and, if its sum is wanted, space for `splits` partial sums of each batch
// entry.
struct SigmoidCall {
  const Sigmoid& loss;
  int64_t splits;
  void* partials;

  // The elements of a batch entry.
  int64_t size() const { return loss.rows * loss.classes; }
  int64_t entries() const { return loss.batch.size(); }
};

// entries.cu runs sums and gradients of entries of at most 1024 elements.
bool CanRunManyEntries(const SigmoidCall& call, const Device& device);
cudaError_t LaunchManyEntries(cudaStream_t stream, const SigmoidCall& call, const Device& device);

// few.cu runs class ids without weights, not of f64. The blocks of a batch entry form a cluster if
// a sum is wanted, and without a sum there is no batch.
bool CanRunFewElements(const SigmoidCall& call, const Device& device);
cudaError_t LaunchFewElements(cudaStream_t stream, const SigmoidCall& call, const Device& device);

// targets_last.cu runs class ids without weights, not of f64, elementwise and without a batch, with
// rows that are not too short.
// If rows are shorter, a block may have more rows than threads.
inline constexpr int64_t kMinTargetsLastClasses = 20;
bool CanRunTargetsLast(const SigmoidCall& call, const Device& device);
cudaError_t LaunchTargetsLast(cudaStream_t stream, const SigmoidCall& call, const Device& device);

// spread.cu runs class ids without weights of f32, elementwise and without a batch, with an
// exponent that needs no power.
bool CanRunSpreadElements(const SigmoidCall& call, const Device& device);
cudaError_t LaunchSpreadElements(cudaStream_t stream, const SigmoidCall& call,
                                 const Device& device);

// streamed.cu runs only sums, of class ids without weights, not of f64, on compute capability 9.0
// and later.
bool CanRunStreamedSum(const SigmoidCall& call, const Device& device);
cudaError_t LaunchStreamedSum(cudaStream_t stream, const SigmoidCall& call, const Device& device);

// hard.cu runs all class ids.
bool CanRunHard(const SigmoidCall& call, const Device& device);
cudaError_t LaunchHard(cudaStream_t stream, const SigmoidCall& call, const Device& device);

// soft.cu runs all soft labels.
bool CanRunSoft(const SigmoidCall& call, const Device& device);
cudaError_t LaunchSoft(cudaStream_t stream, const SigmoidCall& call, const Device& device);

}  // namespace jaxops::focal_loss::cuda

#endif  // JAXOPS_CUDA_FOCAL_LOSS_SIGMOID_FAMILIES_H_
