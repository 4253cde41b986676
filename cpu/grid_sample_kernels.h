// The vectorised inner parts of sampling volumes, built once per instruction set.
#ifndef JAXOPS_CPU_GRID_SAMPLE_KERNELS_H_
#define JAXOPS_CPU_GRID_SAMPLE_KERNELS_H_

#include <cstdint>

#include "common/grid_sample.h"
#include "cpu/isa.h"

namespace jaxops::grid_sample::cpu {

// `count` neighbouring points of a batch entry, and what belongs to them.
struct Points {
  Geometry geometry;
  DType dtype;
  DType point_dtype;
  int order;
  int64_t count;
  const void* points;
  const void* cotangent;  // null with out
  const void* directions[multilinear::kMaxDirections];
};

// Values, or gradients by the points.
struct Gather {
  Points points;
  const void* volume;
  void* out;      // null where dpoints is not
  void* dpoints;  // null where out is not
};

// Adds to the gradient by the entries whose index along the first axis is in [begin, end).
struct Scatter {
  Points points;
  int64_t begin;
  int64_t end;
  void* sums;  // of the arithmetic type
};

// Rounds `count` sums of dtype's arithmetic type.
struct StoreSums {
  DType dtype;
  int64_t count;
  const void* sums;
  void* to;
};

struct Kernels {
  void (*gather)(const Gather&);
  void (*scatter)(const Scatter&);
  void (*store_sums)(const StoreSums&);
};

JAXOPS_DECLARE_KERNELS();

}  // namespace jaxops::grid_sample::cpu

#endif  // JAXOPS_CPU_GRID_SAMPLE_KERNELS_H_
