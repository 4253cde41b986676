// This header declares orders of points that bring points of the same entries of a volume together.
//
// Kernels that read the volume use a rough order, by parts of the volume that the L2 cache holds.
//
// The volume gradient uses an order by bricks. A point belongs to the brick of the upper entry of
// its cell. If that is the brick's first entry along an axis, the cell's lower entry lies in the
// brick before; the points of a brick are therefore divided into bins by the set of axes for which
// this holds. The points that touch a brick are those of all of its own bins, and those of the bins
// of following bricks whose set contains the axes along which the brick follows.
#ifndef JAXOPS_CUDA_GRID_SAMPLE_ORDER_CUH_
#define JAXOPS_CUDA_GRID_SAMPLE_ORDER_CUH_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/grid_sample.h"

namespace jaxops::grid_sample::cuda {

// A brick has 2^shift entries along an axis.
template <int kAxes>
__host__ __device__ constexpr int BrickShift(int axis) {
  if (kAxes == 2) return axis == 0 ? 3 : 4;
  return axis == 2 ? 3 : 2;
}
inline constexpr int kBrickEntries = 128;

// One warp sums at most this number of points of a brick.
inline constexpr uint32_t kShare = 1024;

// Placed is an entry of a rough order.
struct alignas(16) Placed {
  static constexpr uint32_t kNone = ~0u;

  float coordinates[kMaxAxes];
  uint32_t index;  // kNone: there is no point
};

// A rough order consists of tiles of 32 points, of which only the last points may be kNone.
struct RoughOrder {
  int64_t size = 0;          // number of places for points
  Placed* points = nullptr;  // null: the points are not ordered
};

struct BrickOrder {
  uint32_t bricks[kMaxAxes];  // along an axis
  uint32_t bins;              // 2^axes per brick
  uint32_t* counts;           // number of points in each bin
  uint32_t* begins;           // begin of each bin in `points`
  uint32_t* points;           // indices of the points, bin by bin
  uint32_t* left;             // zero on entry to LaunchBricks, which counts shares here
  uint32_t* shares;           // two numbers per share of a brick's points: the brick and the share
};

// These functions return the bytes of work space of an order, aligned to 16 bytes; 0 if the points
// cannot be ordered.
int64_t RoughOrderBytes(const Call& call);
int64_t BrickOrderBytes(const Call& call);

// These functions order the points of a call for which the space is not 0.
cudaError_t OrderRoughly(cudaStream_t stream, const Call& call, void* space, RoughOrder* order);
cudaError_t OrderByBricks(cudaStream_t stream, const Call& call, void* space, BrickOrder* order);

}  // namespace jaxops::grid_sample::cuda

#endif  // JAXOPS_CUDA_GRID_SAMPLE_ORDER_CUH_
