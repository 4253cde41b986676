// Orders of points in which those that meet the same entries of a volume come together.
//
// Kernels that read the volume want a rough one: by parts of the volume that the L2 holds.
//
// The volume gradient wants one by bricks. A point is in the brick of the upper entry of its
// cell. Where that is the brick's first entry along an axis, the cell's lower entry is in the brick
// before; a brick's points are therefore in bins, by the set of axes of which that is so. What
// touches the entries of a brick are all of its own bins, and of the bricks after it those bins
// whose set has the axes along which they are after.
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

// Points that one warp takes of a brick when it sums a gradient.
inline constexpr uint32_t kShare = 1024;

// A point in its turn.
struct alignas(16) Placed {
  static constexpr uint32_t kNone = ~0u;

  float coordinates[kMaxAxes];
  uint32_t index;  // kNone: there is no point
};

// Tiles of 32 points, of which only the last ones may be kNone.
struct RoughOrder {
  int64_t size = 0;          // places for points
  Placed* points = nullptr;  // null: they are taken as they come
};

struct BrickOrder {
  uint32_t bricks[kMaxAxes];  // along an axis
  uint32_t bins;              // 2^axes a brick
  uint32_t* counts;           // of the points in each bin
  uint32_t* begins;           // of each bin in `points`
  uint32_t* points;           // their indices, bin by bin
  uint32_t* left;             // zero; for LaunchBricks, and room for two numbers a share
  uint32_t* shares;           // of a brick's points
};

// The work space that an order takes, aligned to 16 bytes; 0 if the points cannot be put in it.
int64_t RoughOrderBytes(const Call& call);
int64_t BrickOrderBytes(const Call& call);

// Put points that can be put in an order in it.
cudaError_t OrderRoughly(cudaStream_t stream, const Call& call, void* space, RoughOrder* order);
cudaError_t OrderByBricks(cudaStream_t stream, const Call& call, void* space, BrickOrder* order);

}  // namespace jaxops::grid_sample::cuda

#endif  // JAXOPS_CUDA_GRID_SAMPLE_ORDER_CUH_
