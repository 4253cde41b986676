// Which kernels interpolate in cells and make the gradients, see common/trilinear.h.
//
// Large calls are bound by memory, and features are most of that. How they move depends on the
// bytes of a row, which is what a corner has.
#include <cstdint>

#include "cuda/common/numeric.cuh"
#include "cuda/trilinear/families.h"
#include "cuda/trilinear/launch.h"

namespace jaxops::trilinear::cuda {
namespace {

using jaxops::cuda::kPackBytes;
using jaxops::cuda::kPackElements;

constexpr int kLongRowBytes = 64;
constexpr int kSectorBytes = 32;
constexpr int64_t kMaxHalvedRowBytes = 8 * 1024;
constexpr int64_t kMaxTiledRowBytes = 32;
// What a cell has of features at most. It ends where the kernels of groups become faster.
constexpr int64_t kMaxImageCellBytes = 256;

bool IsAligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kPackBytes == 0;
}

template <typename T>
cudaError_t LaunchValues(cudaStream_t stream, const Call& call) {
  constexpr int kPack = kPackElements<T>;
  const int64_t row_bytes = call.width * static_cast<int64_t>(sizeof(T));
  const bool whole = call.width % kPack == 0;
  if constexpr (sizeof(T) == 2) {
    if (HasNarrowValues(call.width, sizeof(T))) return LaunchNarrow(stream, call);
  } else {
    if (call.width == 2) {
      return LaunchRows(stream, call);
    }
    if (sizeof(T) == 4 && HasNarrowValues(call.width, sizeof(T))) {
      return LaunchNarrow(stream, call);
    }
  }
  if (!whole) {
    return kCorners * row_bytes <= kMaxGroupCellBytes ? LaunchGroups(stream, call)
                                                      : LaunchElements(stream, call);
  }
  return row_bytes <= kMaxTiledRowBytes ? LaunchTiles(stream, call) : LaunchColumns(stream, call);
}

// Whether that is one for the kernels of groups, where rows are narrow.
bool HasFasterGroups(const Call& call, int64_t item_bytes) {
  const bool plain = call.order == 0 && call.point_dtype == call.dtype && AreDense(call);
  return plain && call.dpoints != nullptr && call.width <= kMaxNarrowWidth &&
         GroupsAreFaster(call.width, item_bytes, call.dfeatures != nullptr);
}

template <typename T>
cudaError_t LaunchGradients(cudaStream_t stream, const Call& call) {
  constexpr int kPack = kPackElements<T>;
  const int64_t row_bytes = call.width * static_cast<int64_t>(sizeof(T));
  if (call.width == 2 * kPack) return LaunchRows(stream, call);
  if constexpr (sizeof(T) == 2) {
    if (call.width == 8) return LaunchRows(stream, call);
    if (call.width == 3 * kPack && call.dfeatures == nullptr) {
      return LaunchVectors(stream, call);
    }
    if (HasFasterGroups(call, sizeof(T))) return LaunchGroups(stream, call);
    if (call.width <= kMaxNarrowWidth) return LaunchNarrow(stream, call);
  } else {
    if (call.width == 2) return LaunchRows(stream, call);
    if constexpr (kPack == 4) {
      if (call.width == 4) return LaunchRows(stream, call);
      if (HasFasterGroups(call, sizeof(T))) return LaunchGroups(stream, call);
      if (call.width <= kMaxNarrowWidth) return LaunchNarrow(stream, call);
    } else {
      if (kCorners * row_bytes <= kMaxImageCellBytes) return LaunchImages(stream, call);
    }
  }
  if (kCorners * row_bytes <= kMaxGroupCellBytes) return LaunchGroups(stream, call);
  return sizeof(T) < 8 && row_bytes <= kMaxShiftRowBytes ? LaunchShifts(stream, call)
                                                         : LaunchElements(stream, call);
}

template <typename T>
cudaError_t LaunchOf(cudaStream_t stream, const Call& call) {
  constexpr int kPack = kPackElements<T>;
  const bool aligned = IsAligned(call.features) && IsAligned(call.cotangent) &&
                       IsAligned(call.out) && IsAligned(call.dfeatures);
  if (!aligned) return LaunchElements(stream, call);
  if (HasFasterPlain(call)) return LaunchPlain(stream, call);
  const int64_t row_bytes = call.width * static_cast<int64_t>(sizeof(T));
  if (call.width % kPack == 0 && row_bytes >= kLongRowBytes) {
    // Two stores of half a sector cost two whole ones.
    const bool halves = call.dfeatures != nullptr && row_bytes % kSectorBytes != 0;
    return halves && row_bytes <= kMaxHalvedRowBytes ? LaunchGroups(stream, call)
                                                     : LaunchVectors(stream, call);
  }
  if (call.width == 1) {
    return LaunchSingles(stream, call);
  }
  return call.out != nullptr ? LaunchValues<T>(stream, call) : LaunchGradients<T>(stream, call);
}

}  // namespace

cudaError_t LaunchCells(cudaStream_t stream, const Call& call) {
  if (call.cells.size() == 0) return cudaSuccess;
  if (call.width == 0) {
    if (call.dpoints == nullptr) return cudaSuccess;
    const int64_t bytes = call.cells.size() * kAxes * jaxops::cuda::SizeOf(call.point_dtype);
    return cudaMemsetAsync(call.dpoints, 0, bytes, stream);
  }
  return jaxops::cuda::DispatchFloat(call.dtype,
                                     [&]<typename T>(T) { return LaunchOf<T>(stream, call); });
}

}  // namespace jaxops::trilinear::cuda
