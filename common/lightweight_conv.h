// Calls of the lightweight convolution kernels of every platform.
//
//   y[t, c] = act(bias[c] + sum_k weight[c / (channels / heads), k] * x[t + k * dilation - padding,
//   c])
//
// for each batch entry, with x zero outside [0, time).
//
// With segments, starts[t] is the first step of the segment of step t: starts do not decrease, and
// two steps are of one segment if and only if their starts are equal. A tap of step t at step
// s = t + k * dilation - padding is valid if
//
//   - 0 <= s < time and starts[s] == starts[t], or
//   - s < 0 and s >= starts[t]: it reads row padding + s of the state, zero if there is none, or
//   - s < starts[t] and the call has slots: it reads row padding + s - starts[t] of the state of
//     slots[t], zero if that is not in [0, num_slots).
//
// All other taps read zero, as those outside of a sequence do. Starts may be negative, for a
// segment that began before step 0; without starts, all steps are of such a segment.
#ifndef JAXOPS_COMMON_LIGHTWEIGHT_CONV_H_
#define JAXOPS_COMMON_LIGHTWEIGHT_CONV_H_

#include <algorithm>
#include <cstdint>

#include "common/batch.h"
#include "common/types.h"

namespace jaxops::lightweight_conv {

struct Geometry {
  int64_t time;
  int64_t channels;
  int64_t heads;  // divides channels
  int64_t taps;
  int64_t padding;  // in [0, (taps - 1) * dilation]
  int64_t dilation;
  DataFormat data_format;
};

struct Forward {
  enum Operand { kX, kWeight, kBias, kStarts, kState, kSlots, kY, kOperands };

  Geometry geometry;
  BatchMap<kOperands> batch;
  DType dtype;         // of x and y; f16 and bf16 accumulate in f32
  DType weight_dtype;  // never f64 unless dtype is f64
  DType bias_dtype;    // likewise
  DType state_dtype;   // likewise
  Activation activation;
  bool flip_taps;  // read weight[h, taps - 1 - k] instead of weight[h, k]
  const void* x;
  const void* weight;
  const void* bias;       // null: none
  const int32_t* starts;  // (time,); null: none
  // The steps before step 0, (padding, channels) or with NCT (channels, padding). With slots, which
  // come with starts and NTC, those before each segment: (num_slots, padding, channels). Null:
  // none.
  const void* state;
  const int32_t* slots;  // (time,), the same number at all steps of a segment; null: none
  int64_t num_slots;
  void* y;
};

// With g the cotangent of y (before bias and activation):
//
//   dx[s, c]      = sum_k weight[h(c), k] * g[s - k * dilation + padding, c]
//   dweight[h, k] = sum_{n, t, c in h} g[n, t, c] * x[n, t + k * dilation - padding, c]
//   dbias[c]      = sum_{n, t} g[n, t, c]
//
// where n runs over the `summed` batch dimensions; dweight and dbias have one entry for each entry
// of `kept`, densely packed, and dx one for each pair (kept, summed). With segments, g and x are of
// the same one.
struct Backward {
  enum Operand { kX, kWeight, kG, kStarts, kDx, kOperands };

  Geometry geometry;
  BatchMap<kOperands> kept;
  BatchMap<kOperands> summed;
  DType dtype;         // of x, g and dx
  DType weight_dtype;  // of weight and dweight
  DType bias_dtype;    // of dbias
  const void* x;
  const void* weight;  // null if dx is null
  const void* g;
  const int32_t* starts;  // (time,); null: none
  void* dx;               // null: not wanted
  void* dweight;          // (kept, heads, taps)
  void* dbias;            // (kept, channels); null: not wanted
};

// Says whether no step reads another one and rows are those of "NTC", as those of single steps in
// "NCT" are, so that kernels may treat batch entries as steps of one sequence.
inline bool AreEntriesSteps(const Geometry& g) {
  return g.taps == 1 && (g.data_format == DataFormat::kNTC || g.time == 1);
}

// Returns the number of partial sums over time and the `summed` batch entries on CUDA devices, for
// each entry of `kept`. This number decides the order of additions. It depends on sizes alone, so
// that results do not depend on the device. It is large enough for thread blocks that fill a
// device, each with a few tiles; kernels may use fewer.
inline int64_t CountSplits(const Backward& call) {
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  // Returns the first of `least`, 2 `least`, ... up to `most` that is at least n, or `most`.
  const auto power_of_two = [](int64_t n, int64_t least, int64_t most) {
    int64_t power = least;
    while (power < n && power < most) power *= 2;
    return power;
  };
  const Geometry& g = call.geometry;
  const int64_t item = SizeOf(call.dtype);
  int64_t channel_blocks, wanted, min_steps;
  if (AreEntriesSteps(g) || (g.data_format == DataFormat::kNTC && g.taps <= 8)) {
    // Neighbouring threads have neighbouring channels, up to 32 vectors of them, and then segments
    // of time; each thread loops over the steps of its segment.
    const int64_t wide = item == 8 ? 2 : 4, narrow = item == 2 ? 2 : 1;
    const int64_t vectors = ceil_div(g.channels, g.channels % wide == 0 ? wide : narrow);
    const int64_t lanes = power_of_two(vectors, 1, 32);
    channel_blocks = ceil_div(vectors, lanes);
    wanted = 384;
    min_steps = 4 * 128 / lanes;
  } else if (g.data_format == DataFormat::kNTC) {
    channel_blocks = ceil_div(g.channels, 64);
    wanted = 1024;
    min_steps = 4 * 64;
  } else {
    const int64_t vector = 16 / item;
    const int64_t row_threads = power_of_two(ceil_div(g.time, vector), 16, 128);
    channel_blocks = ceil_div(g.channels * row_threads, 128);
    wanted = g.taps <= 8 || g.dilation > 1 ? 1024 : 512;
    min_steps = 4 * vector * row_threads;
  }
  const int64_t blocks = std::max<int64_t>(1, call.kept.size() * channel_blocks);
  const int64_t steps = call.summed.size() * g.time;
  const int64_t splits = std::min(ceil_div(wanted, blocks), steps / min_steps);
  // Tensor cores compute smaller partial sums of long filters, and need space for more of them.
  return std::max<int64_t>(g.taps > 8 ? 2 : 1, splits);
}

// Returns the bytes of the partial sums: (kept, splits, taps + 1, channels) of the accumulation
// type. The last row is for the bias.
inline int64_t WorkSpaceBytes(const Backward& call) {
  const Geometry& g = call.geometry;
  const int64_t item = call.dtype == DType::kF64 ? 8 : 4;
  return call.kept.size() * CountSplits(call) * (g.taps + 1) * g.channels * item;
}

}  // namespace jaxops::lightweight_conv

#endif  // JAXOPS_COMMON_LIGHTWEIGHT_CONV_H_
