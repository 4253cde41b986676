// The vectorised inner parts of col2im, built once per instruction set.
#ifndef JAXOPS_CPU_IM2COL_KERNELS_H_
#define JAXOPS_CPU_IM2COL_KERNELS_H_

#include <cstdint>

#include "common/im2col.h"
#include "cpu/isa.h"

namespace jaxops::im2col::cpu {

struct Kernels {
  // Makes lines [begin, end) of the image, a line being everything but the last dimension and the
  // channels. `sums` has room for one line of float, and is not used where dtype is f32 or f64.
  void (*col2im)(const Call& call, int64_t begin, int64_t end, float* sums);
};

JAXOPS_DECLARE_KERNELS();

}  // namespace jaxops::im2col::cpu

#endif  // JAXOPS_CPU_IM2COL_KERNELS_H_
