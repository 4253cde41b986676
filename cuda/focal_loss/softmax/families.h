// This header declares the kernel families of the softmax focal loss: the calls that each family
// can run, and its launcher. dispatch.cc alone chooses between them. No size is zero.
#ifndef JAXOPS_CUDA_FOCAL_LOSS_SOFTMAX_FAMILIES_H_
#define JAXOPS_CUDA_FOCAL_LOSS_SOFTMAX_FAMILIES_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/focal_loss.h"
#include "cuda/common/device.h"

namespace jaxops::focal_loss::cuda {

using jaxops::cuda::Device;

// SoftmaxCall is a call and, if its sum is wanted, space for `splits` partial sums of each batch
// entry.
struct SoftmaxCall {
  const Softmax& loss;
  int64_t splits;
  void* partials;

  // The logits of a batch entry.
  int64_t size() const { return loss.rows * loss.classes; }
  int64_t entries() const { return loss.batch.size(); }
};

// RowVectors has the maximum number of 16-byte vectors in a row, and says whether there are no
// other elements and each row is aligned to vectors.
struct RowVectors {
  int64_t count;
  bool whole;

  explicit RowVectors(const Softmax& loss) {
    constexpr int kBytes = 16;
    const int elements = kBytes / (loss.dtype == DType::kF64   ? 8
                                   : loss.dtype == DType::kF32 ? 4
                                                               : 2);
    whole = loss.classes % elements == 0 && reinterpret_cast<uintptr_t>(loss.logits) % kBytes == 0;
    count = loss.classes / elements;
  }
};

// entries.cu runs rows of at most 1024 classes. A block takes EntryRows rows at a time, of whole
// entries, and at most eight times as many of one entry.
int64_t EntryRows(const SoftmaxCall& call);
bool CanRunManyEntries(const SoftmaxCall& call, const Device& device);
cudaError_t LaunchManyEntries(cudaStream_t stream, const SoftmaxCall& call, const Device& device);

// few.cu runs rows of at most 128 classes, and 2^31 elements; a sum needs a partial sum for each 32
// rows.
bool CanRunFewRows(const SoftmaxCall& call, const Device& device);
cudaError_t LaunchFewRows(cudaStream_t stream, const SoftmaxCall& call, const Device& device);

// short.cu runs rows of at most 128 bytes. A warp sums whole batch entries of at most 32 rows if
// they follow one another in memory and share their scalars.
bool SumsShortEntries(const SoftmaxCall& call);
bool CanRunShortRows(const SoftmaxCall& call, const Device& device);
cudaError_t LaunchShortRows(cudaStream_t stream, const SoftmaxCall& call, const Device& device);

// whole.cu runs 16-bit types with rows of 3 to 256 whole vectors; gradients without a sum have no
// batch.
bool CanRunWholeRows(const SoftmaxCall& call, const Device& device);
cudaError_t LaunchWholeRows(cudaStream_t stream, const SoftmaxCall& call, const Device& device);

// lanes.cu runs rows of at most 512 vectors.
bool CanRunLaneRows(const SoftmaxCall& call, const Device& device);
cudaError_t LaunchLaneRows(cudaStream_t stream, const SoftmaxCall& call, const Device& device);

// blocks.cu runs gradients of rows that fit the registers of a block or, on compute capability 9.0
// and later, of a cluster.
bool CanRunBlockRows(const SoftmaxCall& call, const Device& device);
cudaError_t LaunchBlockRows(cudaStream_t stream, const SoftmaxCall& call, const Device& device);

// streamed.cu runs all rows except short ones.
bool CanRunStreamedRows(const SoftmaxCall& call, const Device& device);
cudaError_t LaunchStreamedRows(cudaStream_t stream, const SoftmaxCall& call, const Device& device);

}  // namespace jaxops::focal_loss::cuda

#endif  // JAXOPS_CUDA_FOCAL_LOSS_SOFTMAX_FAMILIES_H_
