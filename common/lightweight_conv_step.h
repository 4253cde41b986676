// Calls of the steps of the causal lightweight convolution, and of the dynamic one, on every
// platform.
//
//   y[b, s, c] = act(bias[c] + sum_k weight[c / (channels / heads), k] * rows[b, s + k * dilation,
//   c])
//
// where rows[b] has the `reach` rows of the state's slot of entry b and then the rows of x[b]. The
// last `reach` of these are the new state of the slot. In a dynamic convolution every step of an
// entry has a weight of its own, of which the softmax over the taps is taken if `normalize`.
// Kernels read the rows of a state that they need before they write there, because both states may
// be the same memory.
#ifndef JAXOPS_COMMON_LIGHTWEIGHT_CONV_STEP_H_
#define JAXOPS_COMMON_LIGHTWEIGHT_CONV_STEP_H_

#include <cstdint>

#include "common/batch.h"
#include "common/host_device.h"
#include "common/types.h"

namespace jaxops::lightweight_conv_step {

struct Step {
  enum Operand { kX, kState, kWeight, kBias, kIndices, kY, kNewState, kOperands };

  int64_t entries;
  int64_t steps;
  int64_t slots;  // at least `entries`, unless there are indices
  int64_t reach;  // (taps - 1) * dilation
  int64_t channels;
  int64_t heads;  // divides channels
  int64_t taps;
  int64_t dilation;
  // Elements between the weights of entries, and of steps; 0: all have one weight.
  int64_t weight_entry = 0;
  int64_t weight_step = 0;
  bool normalize = false;
  BatchMap<kOperands> batch;
  DType dtype;         // of x and y; f16 and bf16 accumulate in f32
  DType state_dtype;   // never f64 unless dtype is f64
  DType weight_dtype;  // likewise
  DType bias_dtype;    // likewise
  Activation activation;
  const void* x;
  const void* state;
  const void* weight;
  const void* bias;       // null: none
  const void* indices;    // the slots, all different, or others for none; null: entry i has slot i
  bool has_wide_indices;  // of 64 bits, otherwise 32
  void* y;
  void* new_state;

  // The slot of an entry of a batch entry, or a negative number.
  JAXOPS_HOST_DEVICE int64_t SlotOf(int64_t batch_entry, int64_t entry) const {
    if (indices == nullptr) return entry;
    const int64_t at = batch.Offset(batch_entry, kIndices) + entry;
    const int64_t slot = has_wide_indices ? static_cast<const int64_t*>(indices)[at]
                                          : static_cast<const int32_t*>(indices)[at];
    return slot < slots ? slot : -1;
  }

  // Returns whether slots that no entry names have to be copied. Indices of no entries may have no
  // address.
  bool copies_slots() const {
    return (indices != nullptr || entries == 0) && new_state != state &&
           slots * reach * channels > 0;
  }
};

}  // namespace jaxops::lightweight_conv_step

#endif  // JAXOPS_COMMON_LIGHTWEIGHT_CONV_STEP_H_
