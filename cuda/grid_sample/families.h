// The kernel families of grid_sample and what one is given; dispatch.cu alone chooses between them.
#ifndef JAXOPS_CUDA_GRID_SAMPLE_FAMILIES_H_
#define JAXOPS_CUDA_GRID_SAMPLE_FAMILIES_H_

#include <cuda_runtime_api.h>

#include "common/grid_sample.h"
#include "cuda/grid_sample/order.cuh"

namespace jaxops::grid_sample::cuda {

// A call, or one of its gradients.
struct Job {
  Call call;              // results that are not asked for are null
  bool vectors;           // rows are whole vectors of 16 bytes, and aligned
  void* sums = nullptr;   // of the volume's gradient in the arithmetic type, to be added in memory
  RoughOrder order = {};  // of the points; null: they are taken as they come
};

// --- plain: values and gradients by points without options, see IsPlain --------------------------

// Linear, with zeros around, without derivatives, the points in the arithmetic type and one after
// another, and all counted in 32 bits, the entries of an axis also exactly in the arithmetic type.
bool IsPlain(const Call& call);

// Whether an L2 holds the volume.
bool IsCached(const Call& call);

cudaError_t LaunchPlain(cudaStream_t stream, const Job& job);

// --- threads: every thread finds the entries around its point itself -----------------------------

cudaError_t LaunchThreads(cudaStream_t stream, const Job& job);

// --- warps: lanes of a warp find the entries around points for each other ------------------------

cudaError_t LaunchWarps(cudaStream_t stream, const Job& job);

// --- sorted: the gradient by the volume, its sums in the order of the points ---------------------

cudaError_t LaunchSorted(cudaStream_t stream, const Call& call);

// --- bricks: the gradient by a large volume, summed brick by brick in shared memory --------------

// Whether it makes the gradient by the volume that is asked for.
bool HasBricks(const Call& call);

cudaError_t LaunchBricks(cudaStream_t stream, const Job& job, const BrickOrder& order);

// --- sums: what families that add have in common -------------------------------------------------

// Of the volume's gradient in the arithmetic type.
int64_t SumsBytes(const Call& call);

cudaError_t ClearSums(cudaStream_t stream, const Job& job);

// Rounds them to the volume's dtype, if they are not of it.
cudaError_t RoundSums(cudaStream_t stream, const Job& job);

}  // namespace jaxops::grid_sample::cuda

#endif  // JAXOPS_CUDA_GRID_SAMPLE_FAMILIES_H_
