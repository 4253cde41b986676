// What the kernels of the scaled product are asked to compute, on every platform.
#ifndef JAXOPS_COMMON_SCALED_PRODUCT_H_
#define JAXOPS_COMMON_SCALED_PRODUCT_H_

#include <cstdint>

#include "common/batch.h"
#include "common/types.h"

namespace jaxops::scaled_product {

// out[i] = scale a[i] b[i] in every row; rows are the batch.
struct Call {
  enum Operand { kA, kB, kOut, kOperands };

  int64_t width;
  BatchMap<kOperands> rows;
  DType dtype;  // f32 or f64
  double scale;
  const void* a;
  const void* b;
  void* out;
};

}  // namespace jaxops::scaled_product

#endif  // JAXOPS_COMMON_SCALED_PRODUCT_H_
