// This header declares the kernel families of trilinear interpolation in cells: the calls that each
// family can run, and its launcher. dispatch.cc alone chooses between them. All families except
// `elements` need arrays aligned to 16 bytes.
#ifndef JAXOPS_CUDA_TRILINEAR_FAMILIES_H_
#define JAXOPS_CUDA_TRILINEAR_FAMILIES_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/trilinear.h"
#include "cuda/common/device.h"
#include "cuda/common/sizes.h"

namespace jaxops::trilinear::cuda {

using jaxops::cuda::Device;
using jaxops::cuda::SizeOf;

// RowBytes returns the bytes of the features of one corner.
inline int64_t RowBytes(const Call& call) { return call.width * SizeOf(call.dtype); }

inline int64_t VectorElements(const Call& call) {
  return jaxops::cuda::kVectorBytes / SizeOf(call.dtype);
}

inline bool HasAlignedArrays(const Call& call) {
  const auto bits = [](const void* array) { return reinterpret_cast<uintptr_t>(array); };
  return (bits(call.features) | bits(call.cotangent) | bits(call.out) | bits(call.dfeatures)) %
             jaxops::cuda::kVectorBytes ==
         0;
}

// AreDense says whether the features of all cells are contiguous.
inline bool AreDense(const Call& call) {
  return call.cells.rank() == 0 ||
         (call.cells.rank() == 1 && call.cells.stride(0, Call::kFeatures) == kCorners * call.width);
}

// --- plain ---------------------------------------------------------------------------------------
//
// The family runs calls without derivatives, with points of the features' dtype, at most one
// dimension of cells and fewer than 2^31 elements of features.

bool CanRunPlain(const Call& call, const Device& device);
cudaError_t LaunchPlain(cudaStream_t stream, const Call& call, const Device& device);

// Warps load whole cells for values of rows whose number of elements is a power of two: 2 elements
// up to 32 bytes, or up to 64 bytes for dtypes of 2 bytes.
bool CanShareValues(const Call& call);

// A thread can have several values of rows of at least 64 bytes.
bool HasLongRows(const Call& call);

// PlainPointPlan describes the kernels of the point gradient, alone or with the feature gradient.
struct PlainPointPlan {
  int count;       // elements per load of a lane
  uint32_t lanes;  // lanes per cell

  explicit PlainPointPlan(const Call& call);
};

// --- vectors -------------------------------------------------------------------------------------
//
// The family runs calls whose rows are whole vectors of 16 bytes.

bool CanRunVectors(const Call& call, const Device& device);
cudaError_t LaunchVectors(cudaStream_t stream, const Call& call, const Device& device);

// --- singles -------------------------------------------------------------------------------------
//
// The family runs calls whose rows have one element.

bool CanRunSingles(const Call& call, const Device& device);
cudaError_t LaunchSingles(cudaStream_t stream, const Call& call, const Device& device);

// --- rows ----------------------------------------------------------------------------------------
//
// The family runs values of 2 elements of 4 or 8 bytes, and gradients of one or two vectors or of 2
// elements of 4 bytes.

bool CanRunRows(const Call& call, const Device& device);
cudaError_t LaunchRows(cudaStream_t stream, const Call& call, const Device& device);

// --- narrow --------------------------------------------------------------------------------------
//
// The family runs gradients of 2 to 15 elements of at most 4 bytes, values of odd numbers of such
// elements, and values of 2 and 4 elements of 2 bytes.

bool CanRunNarrow(const Call& call, const Device& device);
cudaError_t LaunchNarrow(cudaStream_t stream, const Call& call, const Device& device);

// --- tiles ---------------------------------------------------------------------------------------
//
// The family runs values of whole vectors in cells of at most 24 KiB.

bool CanRunTiles(const Call& call, const Device& device);
cudaError_t LaunchTiles(cudaStream_t stream, const Call& call, const Device& device);

// --- columns -------------------------------------------------------------------------------------
//
// The family runs values of whole vectors if a block's shared memory holds a cell.

bool CanRunColumns(const Call& call, const Device& device);
cudaError_t LaunchColumns(cudaStream_t stream, const Call& call, const Device& device);

// --- images --------------------------------------------------------------------------------------
//
// The family runs gradients of float64 if a block's shared memory holds 128 cells.

bool CanRunImages(const Call& call, const Device& device);
cudaError_t LaunchImages(cudaStream_t stream, const Call& call, const Device& device);

// --- groups --------------------------------------------------------------------------------------
//
// The family runs calls with cells of at most 72 KiB.

bool CanRunGroups(const Call& call, const Device& device);
cudaError_t LaunchGroups(cudaStream_t stream, const Call& call, const Device& device);

// --- shifts --------------------------------------------------------------------------------------
//
// The family runs gradients of rows longer than one vector that are not whole vectors, of at most
// 56 KiB a row and at most 4 bytes an element.

bool CanRunShifts(const Call& call, const Device& device);
cudaError_t LaunchShifts(cudaStream_t stream, const Call& call, const Device& device);

// --- elements ------------------------------------------------------------------------------------
//
// The family runs all calls.

bool CanRunElements(const Call& call, const Device& device);
cudaError_t LaunchElements(cudaStream_t stream, const Call& call, const Device& device);

}  // namespace jaxops::trilinear::cuda

#endif  // JAXOPS_CUDA_TRILINEAR_FAMILIES_H_
