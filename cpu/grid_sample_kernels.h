// The vectorised inner parts of sampling volumes, built once per instruction set.
#ifndef JAXOPS_CPU_GRID_SAMPLE_KERNELS_H_
#define JAXOPS_CPU_GRID_SAMPLE_KERNELS_H_

#include <cstdint>

#include "common/grid_sample.h"
#include "cpu/isa.h"

namespace jaxops::grid_sample::cpu {

// Points of a batch entry with their operands: `count` neighbours, or those that `chosen` names.
struct Points {
  Geometry geometry;
  DType dtype;
  DType point_dtype;
  int order;
  int64_t count;
  const uint16_t* chosen;
  const void* points;
  const void* cotangent;  // null with out
  const void* directions[multilinear::kMaxDirections];
};

// Computes values, or gradients with respect to the points.
struct Gather {
  Points points;
  const void* volume;
  void* out;      // null where dpoints is not
  void* dpoints;  // null where out is not
};

inline constexpr int64_t kMaxChunk = 8192;
inline constexpr int kMaxSlabs = 16;

// Sorts at most kMaxChunk neighbouring points by the slab of the volume that they add to, and keeps
// their order within a slab. A slab is 2^shift indices of the first axis. A point between two slabs
// is in the lists of both.
struct Bins {
  Points points;
  int slabs;
  int shift;
  uint16_t* lists;   // two for each point
  uint32_t* starts;  // begin of each slab's list, and the end of the last list
};

// Adds to the volume's gradient at the entries whose index along the first axis is in [begin, end).
struct Scatter {
  Points points;
  int32_t begin;
  int32_t end;
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
  void (*bins)(const Bins&);
  void (*scatter)(const Scatter&);
  void (*store_sums)(const StoreSums&);
};

JAXOPS_DECLARE_KERNELS();

}  // namespace jaxops::grid_sample::cpu

#endif  // JAXOPS_CPU_GRID_SAMPLE_KERNELS_H_
