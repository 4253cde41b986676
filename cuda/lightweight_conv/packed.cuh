// This header holds the code that the forward kernels of segments and states share: sums over the
// taps that read a state.
#ifndef JAXOPS_CUDA_LIGHTWEIGHT_CONV_PACKED_CUH_
#define JAXOPS_CUDA_LIGHTWEIGHT_CONV_PACKED_CUH_

#include "cuda/lightweight_conv/filters.cuh"
#include "cuda/lightweight_conv/packed.h"

namespace jaxops::lightweight_conv::cuda {

// States are those of a call: one for each batch entry, or with `slots` one for each segment.
struct States {
  const void* states;  // null: none
  DType dtype;
  const int32_t* slots;  // null: one state for each batch entry
  int64_t num_slots;
  int padding, dilation, taps;
  int64_t channels;
  bool is_ntc;

  States() = default;
  explicit States(const Forward& call)
      : states(call.state),
        dtype(call.state_dtype),
        slots(call.slots),
        num_slots(call.num_slots),
        padding(static_cast<int>(call.geometry.padding)),
        dilation(static_cast<int>(call.geometry.dilation)),
        taps(static_cast<int>(call.geometry.taps)),
        channels(call.geometry.channels),
        is_ntc(call.geometry.data_format == DataFormat::kNTC) {}

  // ForEachTap finds the taps of step t that read a state, in ascending order: add_tap(k, row) is
  // called with tap k and the row that it reads, of kV neighbouring channels. `entry_slots` and
  // `offset` are those of the batch entry.
  template <int kV, typename Acc, typename AddTap>
  __device__ __forceinline__ void ForEachTap(const int32_t* entry_slots, int64_t offset, int t,
                                             int start, int channel, AddTap&& add_tap) const {
    const StateTaps found =
        FindStateTaps(t, start, padding, dilation, taps, entry_slots != nullptr);
    if (found.first >= found.end) return;
    if (entry_slots != nullptr) {
      const int slot = entry_slots[t];
      if (slot < 0 || slot >= num_slots) return;
      offset += int64_t{slot} * padding * channels;
    }
    const int64_t advance = is_ntc ? channels : 1;
    offset += is_ntc ? channel : int64_t{channel} * padding;
    WithElements(states, dtype, [&](const auto* elements) {
      const auto* row = elements + offset + found.row * advance;
#pragma unroll(kV == 1 ? 4 : 1)
      for (int k = found.first; k < found.end; ++k) {
        Acc values[kV];
#pragma unroll
        for (int v = 0; v < kV; ++v) {
          values[v] = static_cast<Acc>(Widen(row[k * dilation * advance + v]));
        }
        add_tap(k, values);
      }
    });
  }
};

}  // namespace jaxops::lightweight_conv::cuda

#endif  // JAXOPS_CUDA_LIGHTWEIGHT_CONV_PACKED_CUH_
