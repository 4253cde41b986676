// The vectorised inner parts of trilinear interpolation in cells, built once per instruction set.
#ifndef JAXOPS_CPU_TRILINEAR_KERNELS_H_
#define JAXOPS_CPU_TRILINEAR_KERNELS_H_

#include <cstdint>

#include "common/types.h"
#include "cpu/isa.h"

namespace jaxops::trilinear::cpu {

// `count` consecutive cells. common/trilinear.h describes each pointer; strides are between
// neighbouring cells, in elements.
struct Cells {
  int64_t width;
  int64_t count;
  DType dtype;
  DType point_dtype;
  int order;
  const void* features;
  const void* points;
  const void* cotangent;
  const void* directions[3];
  int64_t features_stride;
  int64_t points_stride;
  int64_t cotangent_stride;
  int64_t direction_strides[3];
  void* out;
  void* dfeatures;
  void* dpoints;
};

struct Kernels {
  void (*cells)(const Cells&);
};

JAXOPS_DECLARE_KERNELS();

}  // namespace jaxops::trilinear::cpu

#endif  // JAXOPS_CPU_TRILINEAR_KERNELS_H_
