// This header says which taps of a step take part in calls with segments or states, and which rows
// they read. Its functions run on the host too, where a test compares them with the definition.
//
// starts[t] is the first step of the segment of step t; it is negative if the segment began before
// step 0. Neighbouring steps with the same start are one segment, and starts do not decrease. Calls
// without starts have one segment, which began before step 0.
#ifndef JAXOPS_CUDA_LIGHTWEIGHT_CONV_PACKED_H_
#define JAXOPS_CUDA_LIGHTWEIGHT_CONV_PACKED_H_

#include <algorithm>
#include <cstdint>

#include "common/host_device.h"
#include "common/lightweight_conv.h"

namespace jaxops::lightweight_conv::cuda {

// IsPacked says whether a call has segments or states.
inline bool IsPacked(const Forward& call) {
  return call.starts != nullptr || call.state != nullptr;
}
inline bool IsPacked(const Backward& call) { return call.starts != nullptr; }

// CountTapsBefore returns the number of taps whose row is less than `distance` steps after the row
// of the first tap.
JAXOPS_HOST_DEVICE inline int CountTapsBefore(int distance, int dilation) {
  if (distance <= 0) return 0;
  return dilation == 1 ? distance : (distance + dilation - 1) / dilation;
}

// StateTaps names the taps [first, end) of a step, which read a state; tap k reads its row
// row + k * dilation.
struct StateTaps {
  int first, end, row;
};

// FindStateTaps finds these taps of step t, whose segment has the start `start`. If every segment
// has its own state, the state precedes the segment, and otherwise step 0. Rows are inside of the
// state for any `start`.
JAXOPS_HOST_DEVICE inline StateTaps FindStateTaps(int t, int start, int padding, int dilation,
                                                  int taps, bool is_of_segment) {
  const int begin = start < -padding ? -padding : start > t ? t : start;
  const int before = CountTapsBefore(begin - (t - padding), dilation);
  if (is_of_segment) return {0, before < taps ? before : taps, t - begin};
  const int outside = CountTapsBefore(padding - t, dilation);
  return {before, outside < taps ? outside : taps, t};
}

// FindPairs returns the taps of step t that meet a step of its own segment, as a bit for each; tap
// k meets step first_row + k * dilation.
template <int kTaps>
JAXOPS_HOST_DEVICE inline uint32_t FindPairs(const int32_t* starts, int t, int first_row,
                                             int dilation, int taps, int time) {
  static_assert(kTaps <= 32);
  const int own = starts == nullptr ? 0 : starts[t];
  uint32_t pairs = 0;
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int k = 0; k < kTaps; ++k) {
    const int s = first_row + k * dilation;
    if (k < taps && s >= 0 && s < time && (starts == nullptr || starts[s] == own)) {
      pairs |= uint32_t{1} << k;
    }
  }
  return pairs;
}

}  // namespace jaxops::lightweight_conv::cuda

#endif  // JAXOPS_CUDA_LIGHTWEIGHT_CONV_PACKED_H_
