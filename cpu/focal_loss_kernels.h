// The vectorised inner parts of the focal losses, built once per instruction set.
#ifndef JAXOPS_CPU_FOCAL_LOSS_KERNELS_H_
#define JAXOPS_CPU_FOCAL_LOSS_KERNELS_H_

#include <cstdint>

#include "common/focal_loss.h"
#include "cpu/isa.h"

namespace jaxops::focal_loss::cpu {

// The target of a logit whose results are zero, whatever it is.
inline constexpr int kIgnored = -1;

// Neighbouring logits, with everything that depends on their rows and classes written out. Arrays
// without a storage type are of the arithmetic type and may be read a vector past their end.
struct Elements {
  DType dtype;  // of logits, loss and gradient
  Power power;
  double gamma;
  double negative;  // factors of targets 0 and 1
  double positive;
  int64_t count;
  const void* logits;
  bool soft;           // targets between 0 and 1
  const void* target;  // 0, 1, kIgnored, or in between
  const void* factor;
  void* loss;      // null: not wanted
  void* gradient;  // null: not wanted
  double* sum;     // of the loss; null: not wanted
};

// Neighbouring rows of a softmax.
struct Rows {
  DType dtype;  // of logits and gradient
  Power power;
  double gamma;
  int64_t rows;
  int64_t classes;
  const void* logits;
  const int32_t* labels;
  const void* factor;  // (rows,), of each row's results
  void* loss;          // (rows,); null: not wanted
  void* gradient;      // (rows, classes); null: not wanted
};

struct Widened {
  DType dtype;
  int64_t count;
  const void* from;
  void* to;
};

struct Kernels {
  void (*elements)(const Elements&);
  void (*rows)(const Rows&);
  void (*widen)(const Widened&);  // to f32
};

JAXOPS_DECLARE_KERNELS();

}  // namespace jaxops::focal_loss::cpu

#endif  // JAXOPS_CPU_FOCAL_LOSS_KERNELS_H_
