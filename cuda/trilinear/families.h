// The kernel families of trilinear interpolation in cells: the calls that each can run, and its
// launcher. dispatch.cu alone chooses between them. All but `elements` need arrays that are aligned
// to 16 bytes.
#ifndef JAXOPS_CUDA_TRILINEAR_FAMILIES_H_
#define JAXOPS_CUDA_TRILINEAR_FAMILIES_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/trilinear.h"
#include "cuda/common/dispatch.h"
#include "cuda/common/numeric.cuh"

namespace jaxops::trilinear::cuda {

using jaxops::cuda::Device;
using jaxops::cuda::SizeOf;

// Of the features of a corner.
inline int64_t RowBytes(const Call& call) { return call.width * SizeOf(call.dtype); }

inline int64_t VectorElements(const Call& call) {
  return jaxops::cuda::kPackBytes / SizeOf(call.dtype);
}

inline bool HasAlignedArrays(const Call& call) {
  const auto bits = [](const void* array) { return reinterpret_cast<uintptr_t>(array); };
  return (bits(call.features) | bits(call.cotangent) | bits(call.out) | bits(call.dfeatures)) %
             jaxops::cuda::kPackBytes ==
         0;
}

// Whether the features of all cells follow each other.
inline bool AreDense(const Call& call) {
  return call.cells.rank() == 0 ||
         (call.cells.rank() == 1 && call.cells.stride(0, Call::kFeatures) == kCorners * call.width);
}

// --- plain ---------------------------------------------------------------------------------------
//
// No derivatives, points of the features' dtype, at most one dimension of cells, 2^31 elements of
// features.

bool CanRunPlain(const Call& call, const Device& device);
cudaError_t LaunchPlain(cudaStream_t stream, const Call& call, const Device& device);

// Values of a power of two elements a row, from 2 to those of 32 bytes, or 64 of 2 bytes each:
// warps load whole cells.
bool HasSharedValues(const Call& call);

// Values of rows of at least 64 bytes, of which a thread can have several.
bool HasLongRows(const Call& call);

// Point gradients, and both gradients.
struct PlainPointPlan {
  int count;       // elements that a lane loads at once
  uint32_t lanes;  // that share a cell

  explicit PlainPointPlan(const Call& call);
};

// --- vectors -------------------------------------------------------------------------------------
//
// Rows of whole vectors of 16 bytes.

bool CanRunVectors(const Call& call, const Device& device);
cudaError_t LaunchVectors(cudaStream_t stream, const Call& call, const Device& device);

// --- singles -------------------------------------------------------------------------------------
//
// Rows of one element.

bool CanRunSingles(const Call& call, const Device& device);
cudaError_t LaunchSingles(cudaStream_t stream, const Call& call, const Device& device);

// --- rows ----------------------------------------------------------------------------------------
//
// Values of 2 elements of 4 and 8 bytes; gradients of one and of two vectors, and of 2 elements of
// 4 bytes.

bool CanRunRows(const Call& call, const Device& device);
cudaError_t LaunchRows(cudaStream_t stream, const Call& call, const Device& device);

// --- narrow --------------------------------------------------------------------------------------
//
// 2 to 15 elements of at most 4 bytes; values of odd numbers, and of 2 and 4 of 2 bytes.

bool CanRunNarrow(const Call& call, const Device& device);
cudaError_t LaunchNarrow(cudaStream_t stream, const Call& call, const Device& device);

// --- tiles ---------------------------------------------------------------------------------------
//
// Values of whole vectors, cells of at most 24 KiB.

bool CanRunTiles(const Call& call, const Device& device);
cudaError_t LaunchTiles(cudaStream_t stream, const Call& call, const Device& device);

// --- columns -------------------------------------------------------------------------------------
//
// Values of whole vectors, of which a block's shared memory holds a cell.

bool CanRunColumns(const Call& call, const Device& device);
cudaError_t LaunchColumns(cudaStream_t stream, const Call& call, const Device& device);

// --- images --------------------------------------------------------------------------------------
//
// Gradients of float64, of which a block's shared memory holds 128 cells.

bool CanRunImages(const Call& call, const Device& device);
cudaError_t LaunchImages(cudaStream_t stream, const Call& call, const Device& device);

// --- groups --------------------------------------------------------------------------------------
//
// Cells of at most 72 KiB.

bool CanRunGroups(const Call& call, const Device& device);
cudaError_t LaunchGroups(cudaStream_t stream, const Call& call, const Device& device);

// --- shifts --------------------------------------------------------------------------------------
//
// Gradients of rows of more than one vector but not of whole ones, at most 56 KiB, of at most 4
// bytes an element.

bool CanRunShifts(const Call& call, const Device& device);
cudaError_t LaunchShifts(cudaStream_t stream, const Call& call, const Device& device);

// --- elements ------------------------------------------------------------------------------------
//
// All calls.

bool CanRunElements(const Call& call, const Device& device);
cudaError_t LaunchElements(cudaStream_t stream, const Call& call, const Device& device);

}  // namespace jaxops::trilinear::cuda

#endif  // JAXOPS_CUDA_TRILINEAR_FAMILIES_H_
