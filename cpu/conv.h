// Convolution on the host, without patches in memory.
#ifndef JAXOPS_CPU_CONV_H_
#define JAXOPS_CPU_CONV_H_

#include <cstdint>
#include <vector>

#include "common/im2col.h"
#include "common/types.h"
#include "cpu/parallel_for.h"

namespace jaxops::conv::cpu {

// A convolution of images with one kernel, or a gradient of that, in up to three dimensions, as
// `common/conv.h` defines it. Images are (in..., channels) or (out..., outputs) each, the kernel is
// (taps..., channels / groups, outputs).
struct Call {
  im2col::Window dims[im2col::kMaxDims];  // the slowest first; unused ones precede the others
  int64_t channels;                       // of all groups, like the outputs
  int64_t outputs;
  int64_t groups;
  DType dtype;         // of both operands
  DType result_dtype;  // the same, or f32 with 16-bit operands
  Activation activation = Activation::kNone;
  std::vector<const void*> images;      // x; for the input gradient the cotangents of the result
  std::vector<const void*> cotangents;  // of the same images, for the kernel gradient
  std::vector<void*> results;           // one for each image; for the kernel gradient a single one
  const void* kernel = nullptr;         // unused by the kernel gradient
  const void* bias = nullptr;           // one entry per output, of the type of the sums, or null

  int64_t taps() const { return dims[0].taps * dims[1].taps * dims[2].taps; }
};

// Calls of the same sizes that differ in the arrays.
using Calls = std::vector<Call>;

void RunForward(const Calls& calls, const jaxops::cpu::ParallelFor& parallel_for);
void RunInputGrad(const Calls& calls, const jaxops::cpu::ParallelFor& parallel_for);
void RunKernelGrad(const Calls& calls, const jaxops::cpu::ParallelFor& parallel_for);

}  // namespace jaxops::conv::cpu

#endif  // JAXOPS_CPU_CONV_H_
