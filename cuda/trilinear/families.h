// The kernel families of trilinear interpolation in cells; dispatch.cu alone chooses between them.
#ifndef JAXOPS_CUDA_TRILINEAR_FAMILIES_H_
#define JAXOPS_CUDA_TRILINEAR_FAMILIES_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/trilinear.h"

namespace jaxops::trilinear::cuda {

// Whether the features of all cells follow each other.
inline bool AreDense(const Call& call) {
  return call.cells.rank() == 0 ||
         (call.cells.rank() == 1 && call.cells.stride(0, Call::kFeatures) == kCorners * call.width);
}

// See narrow.cu: rows of at most 4 bytes an element, of some widths up to
// kMaxNarrowWidth.
inline constexpr int64_t kMaxNarrowWidth = 15;

// Whether the kernels of groups make a plain gradient by the points of such rows faster: together
// with that by the features those of the widest, and alone of those whose cells would come in
// pieces of 16 bytes.
constexpr bool GroupsAreFaster(int64_t width, int64_t item_bytes, bool both) {
  if (both) return width >= (item_bytes == 2 ? 14 : 9);
  return item_bytes == 4 && (width == 10 || width == 14);
}
inline constexpr bool HasNarrowGradients(int64_t width, int64_t item_bytes) {
  return width <= kMaxNarrowWidth && width != 8 && (item_bytes == 2 || (width != 2 && width != 4));
}
inline constexpr bool HasNarrowValues(int64_t width, int64_t item_bytes) {
  if (width % 2 != 0) return width <= kMaxNarrowWidth;
  return item_bytes == 2 && (width == 2 || width == 4);
}
cudaError_t LaunchNarrow(cudaStream_t stream, const Call& call);

// Cells of at most so many bytes, see groups.cu.
inline constexpr int64_t kMaxGroupCellBytes = 72 * 1024;
cudaError_t LaunchGroups(cudaStream_t stream, const Call& call);

// Gradients of rows of at least one vector and at most kMaxShiftRowBytes, of at most 4 bytes an
// element, see shifts.cu.
inline constexpr int64_t kMaxShiftRowBytes = 56 * 1024;
cudaError_t LaunchShifts(cudaStream_t stream, const Call& call);

// Calls of operands and results that are aligned to vectors, see plain.cu.
bool HasFasterPlain(const Call& call);
cudaError_t LaunchPlain(cudaStream_t stream, const Call& call);

cudaError_t LaunchVectors(cudaStream_t stream, const Call& call);
cudaError_t LaunchElements(cudaStream_t stream, const Call& call);
cudaError_t LaunchSingles(cudaStream_t stream, const Call& call);
cudaError_t LaunchRows(cudaStream_t stream, const Call& call);
cudaError_t LaunchImages(cudaStream_t stream, const Call& call);
cudaError_t LaunchTiles(cudaStream_t stream, const Call& call);
cudaError_t LaunchColumns(cudaStream_t stream, const Call& call);

}  // namespace jaxops::trilinear::cuda

#endif  // JAXOPS_CUDA_TRILINEAR_FAMILIES_H_
