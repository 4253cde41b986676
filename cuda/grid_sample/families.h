// This header declares the kernel families of grid_sample: the calls that each family can run, and
// its launcher. dispatch.cc alone chooses between them.
#ifndef JAXOPS_CUDA_GRID_SAMPLE_FAMILIES_H_
#define JAXOPS_CUDA_GRID_SAMPLE_FAMILIES_H_

#include <cuda_runtime_api.h>

#include "common/grid_sample.h"
#include "cuda/common/device.h"
#include "cuda/common/sizes.h"
#include "cuda/grid_sample/order.cuh"

#define JAXOPS_RETURN_IF_ERROR(expression) \
  if (const cudaError_t error = (expression); error != cudaSuccess) return error

namespace jaxops::grid_sample::cuda {

using jaxops::cuda::Device;

// Job is a call with at least one point and one channel, or one of the call's gradients.
struct Job {
  Call call;             // results that are not wanted are null
  bool vectors = false;  // rows are whole vectors of 16 bytes, and all arrays are aligned to them
  // The families that add in memory write the volume gradient in the arithmetic type to `sums`. It
  // is null if the sums must have the order of the points, or if no volume gradient is wanted.
  void* sums = nullptr;
  // The space holds the orders of the points; null: the points are not ordered.
  void* order_space = nullptr;
};

// RowThreads returns the number of threads per row if each has one vector or element.
inline int64_t RowThreads(const Job& job) {
  const Call& call = job.call;
  const int64_t count =
      job.vectors ? jaxops::cuda::kVectorBytes / jaxops::cuda::SizeOf(call.dtype) : 1;
  return call.geometry.width / count;
}

// IsCached says whether the L2 cache of an H200 holds the volume.
inline bool IsCached(const Call& call) {
  const int64_t entry_bytes = call.geometry.width * jaxops::cuda::SizeOf(call.dtype);
  return call.geometry.grid() * entry_bytes < int64_t{3} << 24;
}

// --- plain: values, and point gradients, without options -----------------------------------------
//
// The family runs linear samples with zeros or the border outside and without derivatives, whose
// points are contiguous and have the arithmetic type. All counts fit 32 bits, and the entries of an
// axis are exact in the arithmetic type.

bool CanRunPlain(const Job& job, const Device& device);
cudaError_t LaunchPlain(cudaStream_t stream, const Job& job, const Device& device);

// --- threads: every thread finds the entries around its point itself -----------------------------
//
// The family runs values, point gradients, and both gradients together.

bool CanRunThreads(const Job& job, const Device& device);
cudaError_t LaunchThreads(cudaStream_t stream, const Job& job, const Device& device);

// --- warps: lanes of a warp find the entries around points for each other ------------------------
//
// The family runs all calls except volume gradients whose sums must have the order of the points.

bool CanRunWarps(const Job& job, const Device& device);
cudaError_t LaunchWarps(cudaStream_t stream, const Job& job, const Device& device);

// --- sorted: volume gradients whose sums have the order of the points ----------------------------

bool CanRunSorted(const Job& job, const Device& device);
cudaError_t LaunchSorted(cudaStream_t stream, const Job& job, const Device& device);

// --- bricks: gradients of one large volume, summed brick by brick in shared memory ---------------

bool CanRunBricks(const Job& job, const Device& device);
cudaError_t LaunchBricks(cudaStream_t stream, const Job& job, const Device& device);

// --- sums: for all families that sum a volume gradient in the arithmetic type --------------------

int64_t SumsBytes(const Call& call);

cudaError_t ClearSums(cudaStream_t stream, const Job& job);

// RoundSums rounds the sums to the volume gradient, unless the volume gradient holds them already.
cudaError_t RoundSums(cudaStream_t stream, const Job& job);

}  // namespace jaxops::grid_sample::cuda

#endif  // JAXOPS_CUDA_GRID_SAMPLE_FAMILIES_H_
