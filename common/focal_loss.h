// Calls of the focal loss kernels of every platform.
//
// x is the lead of the wrong answer: for a sigmoid the logit of a class that is not the target, or
// minus the logit of the target; for a softmax the log-sum-exp of the other logits minus the logit
// of the label.
//
//   loss(x)  = sigmoid(x)^gamma softplus(x)
//   slope(x) = sigmoid(x)^gamma (gamma sigmoid(-x) softplus(x) + sigmoid(x))
// Both are sums of positive terms: computed from exp(-|x|), they are exact to a few roundings for
// every x.
#ifndef JAXOPS_COMMON_FOCAL_LOSS_H_
#define JAXOPS_COMMON_FOCAL_LOSS_H_

#include <algorithm>
#include <cstdint>

#include "common/batch.h"
#include "common/types.h"

namespace jaxops::focal_loss {

// Exponents that need no exponential.
enum class Power : int32_t { kAny, kZero, kHalf, kOne, kTwo };

// The type of soft labels: that of logits, the arithmetic type, or booleans of one byte.
enum class TargetType : int32_t { kLogits, kArithmetic, kBool };

// The id of class 0.
inline constexpr int32_t kFirstClassId = 1;

// Each batch entry has `rows` rows of `classes` logits. Scalars and weights are of the arithmetic
// type, f64 for f64 logits and f32 for the others.
struct Sigmoid {
  enum Operand {
    kLogits,
    kLabels,
    kClassIds,
    kScale,
    kParameters,
    kWeight,
    kElements,
    kSum,
    kOperands
  };

  int64_t rows;
  int64_t classes;
  BatchMap<kOperands> batch;
  DType dtype;  // of logits and elementwise results
  Power power;
  bool soft;               // every logit has a target; or else rows have classes
  TargetType target_type;  // of soft labels
  bool has_ignored;        // rows of label `ignored` are zero, whatever their logits
  int32_t ignored;
  const void* logits;
  const void* labels;        // int32 (rows,), or soft (rows, classes)
  const int32_t* class_ids;  // (classes,), consecutive: the class of each logit, plus kFirstClassId
  const void* scale;         // (), factor of all results
  const void* parameters;    // (3,): gamma, factor of negative targets, of positive ones
  const void* weight;        // (rows,), null: none
  void* loss;                // elementwise; null: not wanted
  void* gradient;            // elementwise; null: not wanted
  void* sum;                 // of the loss, a scalar of the arithmetic type; null: not wanted
};

// Scalars and weights are of the arithmetic type here too. The loss and the gradient of a row whose
// label is outside [0, classes) are zero, whatever its weight.
struct Softmax {
  enum Operand { kLogits, kLabels, kScale, kGamma, kWeight, kResult, kSum, kOperands };

  int64_t rows;
  int64_t classes;
  BatchMap<kOperands> batch;
  DType dtype;  // of logits and gradient
  Power power;
  const void* logits;
  const int32_t* labels;  // (rows,)
  const void* scale;      // (), factor of all results; null: 1
  const void* gamma;      // ()
  const void* weight;     // (rows,), factor of each row's results; null: none
  void* loss;             // (rows,) of the arithmetic type; null: not wanted
  void* gradient;         // (rows, classes); null: not wanted
  void* sum;              // of the loss, a scalar of the arithmetic type; null: not wanted
};

// Returns the number of partial sums of a batch entry on CUDA devices: one for each thread block,
// which has at least 2048 logits except for the last block. This number decides the order of
// additions, and depends on sizes alone.
template <typename Call>
int64_t CountSplits(const Call& call) {
  constexpr int64_t kSplit = 2048, kMaxSplits = 16384;
  const int64_t splits = (call.rows * call.classes + kSplit - 1) / kSplit;
  return std::clamp<int64_t>(splits, 1, kMaxSplits);
}

// Returns the bytes of the partial sums, which are of the arithmetic type; 0 without a sum.
template <typename Call>
int64_t WorkSpaceBytes(const Call& call) {
  if (call.sum == nullptr) return 0;
  return call.batch.size() * CountSplits(call) * (call.dtype == DType::kF64 ? 8 : 4);
}

}  // namespace jaxops::focal_loss

#endif  // JAXOPS_COMMON_FOCAL_LOSS_H_
