// The kernel families of grid_sample: the calls that each can run, and its launcher. dispatch.cu
// alone chooses between them.
#ifndef JAXOPS_CUDA_GRID_SAMPLE_FAMILIES_H_
#define JAXOPS_CUDA_GRID_SAMPLE_FAMILIES_H_

#include <cuda_runtime_api.h>

#include "common/grid_sample.h"
#include "cuda/common/dispatch.h"
#include "cuda/common/numeric.cuh"
#include "cuda/grid_sample/order.cuh"

#define JAXOPS_RETURN_IF_ERROR(expression) \
  if (const cudaError_t error = (expression); error != cudaSuccess) return error

namespace jaxops::grid_sample::cuda {

using jaxops::cuda::Device;

// A call of at least one point and channel, or one of its gradients.
struct Job {
  Call call;             // results that are not asked for are null
  bool vectors = false;  // rows are whole vectors of 16 bytes, and all arrays are aligned to them
  // The volume's gradient in the arithmetic type, for families that add to it in memory; null: its
  // sums are to be in the order of the points, or it is not asked for.
  void* sums = nullptr;
  // Of as many bytes as the orders of the points take; null: these are taken as they come.
  void* order_space = nullptr;
};

// Threads that share a row, of a vector or an element each.
inline int64_t RowThreads(const Job& job) {
  const Call& call = job.call;
  const int64_t count =
      job.vectors ? jaxops::cuda::kPackBytes / jaxops::cuda::SizeOf(call.dtype) : 1;
  return call.geometry.width / count;
}

// Whether the L2 of an H200 holds the volume.
inline bool IsCached(const Call& call) {
  const int64_t entry_bytes = call.geometry.width * jaxops::cuda::SizeOf(call.dtype);
  return call.geometry.grid() * entry_bytes < int64_t{3} << 24;
}

// --- plain: values, and point gradients, without options -----------------------------------------
//
// Linear, with zeros around, without derivatives, the points in the arithmetic type and one after
// another, and all counted in 32 bits, the entries of an axis also exactly in the arithmetic type.

bool CanRunPlain(const Job& job, const Device& device);
cudaError_t LaunchPlain(cudaStream_t stream, const Job& job, const Device& device);

// --- threads: every thread finds the entries around its point itself -----------------------------
//
// Values, point gradients, and both gradients.

bool CanRunThreads(const Job& job, const Device& device);
cudaError_t LaunchThreads(cudaStream_t stream, const Job& job, const Device& device);

// --- warps: lanes of a warp find the entries around points for each other ------------------------
//
// All calls but volume gradients whose sums are to be in the order of the points.

bool CanRunWarps(const Job& job, const Device& device);
cudaError_t LaunchWarps(cudaStream_t stream, const Job& job, const Device& device);

// --- sorted: volume gradients whose sums are in the order of the points --------------------------

bool CanRunSorted(const Job& job, const Device& device);
cudaError_t LaunchSorted(cudaStream_t stream, const Job& job, const Device& device);

// --- bricks: gradients of one large volume, summed brick by brick in shared memory ---------------

bool CanRunBricks(const Job& job, const Device& device);
cudaError_t LaunchBricks(cudaStream_t stream, const Job& job, const Device& device);

// --- sums: for all families that make them in the arithmetic type --------------------------------

int64_t SumsBytes(const Call& call);

cudaError_t ClearSums(cudaStream_t stream, const Job& job);

// Rounds them to the volume's gradient, unless they are it.
cudaError_t RoundSums(cudaStream_t stream, const Job& job);

}  // namespace jaxops::grid_sample::cuda

#endif  // JAXOPS_CUDA_GRID_SAMPLE_FAMILIES_H_
