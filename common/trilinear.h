// Calls of the kernels of trilinear interpolation in cells, on every platform.
//
// A cell has eight rows of features and one point; w_c is the weight of corner c there, or its
// derivative along `order` directions, see common/multilinear.h.
//
//   out[f]          = sum_c w_c features[c, f]
//   dfeatures[c, f] = w_c cotangent[f]
//   dpoints[a]      = the derivative along axis a of sum_{c, f} w_c features[c, f] cotangent[f]
#ifndef JAXOPS_COMMON_TRILINEAR_H_
#define JAXOPS_COMMON_TRILINEAR_H_

#include <cstdint>

#include "common/batch.h"
#include "common/multilinear.h"
#include "common/types.h"

namespace jaxops::trilinear {

inline constexpr int kAxes = 3;
inline constexpr int kCorners = 8;

struct Call {
  enum Operand {
    kFeatures,
    kPoints,
    kCotangent,
    kDirections,
    kOperands = kDirections + multilinear::kMaxDirections
  };

  int64_t width;  // features of a corner
  BatchMap<kOperands> cells;
  DType dtype;        // of features, cotangent, out and dfeatures; f16 and bf16 compute in f32
  DType point_dtype;  // of points, directions and dpoints; f64 only if dtype is
  int order;
  const void* features;  // null if neither out nor dpoints is wanted
  const void* points;
  const void* cotangent;  // null if out is wanted
  const void* directions[multilinear::kMaxDirections];
  // A call computes either out, or one or both of the others; these are dense, one entry a cell.
  void* out;
  void* dfeatures;
  void* dpoints;
};

}  // namespace jaxops::trilinear

#endif  // JAXOPS_COMMON_TRILINEAR_H_
