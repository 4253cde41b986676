// The vectorised inner parts of the steps of lightweight convolution, built once per instruction
// set.
#ifndef JAXOPS_CPU_LIGHTWEIGHT_CONV_STEP_KERNELS_H_
#define JAXOPS_CPU_LIGHTWEIGHT_CONV_STEP_KERNELS_H_

#include <cstdint>

#include "common/lightweight_conv_step.h"
#include "cpu/isa.h"

namespace jaxops::lightweight_conv_step::cpu {

// No instruction set has more lanes than this.
inline constexpr int64_t kMaxLanes = 16;

// Channels of a block, at most; a multiple of kMaxLanes.
inline constexpr int64_t kMaxBlockChannels = 512;

// Channels [channel_begin, channel_end) of a batch entry.
struct Filters {
  const Step& call;
  int64_t channel_begin;
  int64_t channel_end;
  const void* weight;  // (heads, taps), or of every step (steps, heads, taps)
  const void* bias;    // null: none
  void* packed;        // of the arithmetic type: kMaxBlockChannels * (taps + 1), taps of all steps
  void* normalized;    // likewise: kMaxBlockChannels * taps, if there is a softmax
};

// The same channels of an entry.
struct Rows {
  const Step& call;
  int64_t channel_begin;
  int64_t channel_end;
  const void* packed;   // null: `filters` are read where they are, see CanReadFilters
  const void* filters;  // (heads, taps)
  const void* x;
  const void* state;  // null: zeros
  void* y;
  void* new_state;  // null: nothing is written there
};

// Tells whether a step can read filters of 3 or 4 taps where they are, of the arithmetic type and
// one for each channel. That is faster if each of them is read once: a step of one sequence of 1024
// channels in float32 takes 1.1 to 1.4 µs in a loop on an EPYC, and 1.5 with packed filters.
inline bool CanReadFilters(const Step& call) {
  const DType arithmetic = call.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  return call.steps == 1 && call.dilation == 1 && (call.taps == 3 || call.taps == 4) &&
         call.heads == call.channels && call.bias == nullptr && call.dtype == call.state_dtype &&
         call.weight_dtype == arithmetic && !call.normalize;
}

struct Kernels {
  void (*pack_filters)(const Filters&);
  void (*step)(const Rows&);
};

JAXOPS_DECLARE_KERNELS();

}  // namespace jaxops::lightweight_conv_step::cpu

#endif  // JAXOPS_CPU_LIGHTWEIGHT_CONV_STEP_KERNELS_H_
