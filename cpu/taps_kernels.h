// The vectorised inner parts of weighted sums of entries, built once per instruction set.
#ifndef JAXOPS_CPU_TAPS_KERNELS_H_
#define JAXOPS_CPU_TAPS_KERNELS_H_

#include <cstdint>

#include "common/taps.h"
#include "cpu/isa.h"

namespace jaxops::taps::cpu {

// `count` neighbouring points of a batch entry.
struct Points {
  Geometry geometry;
  DType dtype;
  int64_t count;
  const int32_t* indices;
  const void* weights[kMaxAxes];
};

struct Values {
  Points points;
  const void* volume;
  void* out;
};

struct WeightGradients {
  Points points;
  const void* volume;
  const void* cotangent;
  void* dweights[kMaxAxes];
};

// Adds to the volume's gradient at the entries whose index along the first axis is in [begin, end).
struct Scatter {
  Points points;
  const void* cotangent;
  int64_t begin;
  int64_t end;
  void* sums;  // of the arithmetic type, from index `begin` on
};

// Rounds `count` sums of dtype's arithmetic type.
struct StoreSums {
  DType dtype;
  int64_t count;
  const void* sums;
  void* to;
};

struct Kernels {
  void (*values)(const Values&);
  void (*weight_gradients)(const WeightGradients&);
  void (*scatter)(const Scatter&);
  void (*store_sums)(const StoreSums&);
};

JAXOPS_DECLARE_KERNELS();

}  // namespace jaxops::taps::cpu

#endif  // JAXOPS_CPU_TAPS_KERNELS_H_
