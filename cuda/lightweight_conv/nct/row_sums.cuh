// This header adds the gradients of filters and biases that the threads of a block have: each of
// them has sums of one channel, and several threads have the same one.
#ifndef JAXOPS_CUDA_LIGHTWEIGHT_CONV_NCT_ROW_SUMS_CUH_
#define JAXOPS_CUDA_LIGHTWEIGHT_CONV_NCT_ROW_SUMS_CUH_

#include <bit>

#include "cuda/lightweight_conv/families.h"
#include "cuda/lightweight_conv/filters.cuh"

namespace jaxops::lightweight_conv::cuda::nct {

struct RowSums {
  int rows;      // channels of a block
  int groups;    // of threads; each has other items of these channels
  int adders;    // threads that add the sums of a tap of a channel; a power of two up to kWarp
  int channels;  // of the call
  bool whole;    // a block computes a filter's whole sum
  void *dweight, *dbias;  // dbias is null if not wanted
  void* partials;         // (kept, splits, taps + 1, channels)
  DType weight_dtype, bias_dtype;
  FastDivider row_threads;    // threads of a channel in a group
  FastDivider group_threads;  // rows * row_threads
  FastDivider splits;

  // The members of `plan` have the names of these.
  template <typename Plan>
  RowSums(const Gradients& gradients, const Plan& plan)
      : rows(static_cast<int>(plan.rows)),
        groups(static_cast<int>(plan.groups)),
        adders(std::min<int>(kWarp,
                             std::bit_ceil(static_cast<unsigned>(plan.groups * plan.row_threads)))),
        channels(static_cast<int>(gradients.call.geometry.channels)),
        whole(plan.whole),
        dweight(gradients.call.dweight),
        dbias(gradients.call.dbias),
        partials(gradients.partials),
        weight_dtype(gradients.call.weight_dtype),
        bias_dtype(gradients.call.bias_dtype),
        row_threads(plan.row_threads),
        group_threads(plan.group_threads),
        splits(plan.splits) {}
  RowSums() = default;

  // Write adds the sums in `shared`: the value of tap j of `taps` (flipped) of a thread is in row j
  // + first_tap of kThreads values, and that of the bias in row bias_slot. Threads are ordered by
  // group, then by channel.
  template <int kThreads, typename Acc>
  __device__ __forceinline__ void Write(const Acc* shared, int taps, int first_tap, int bias_slot,
                                        int first_channel, int64_t kept, int split) const {
    const int row_size = row_threads.divisor();
    const int terms = row_size * groups;
    const int adder = threadIdx.x % adders;
    const int tap_sums = taps + (dbias != nullptr);
    Acc* block_partials =
        static_cast<Acc*>(partials) + (kept * splits.divisor() + split) * (taps + 1) * channels;
    // Threads of a warp leave the loop together.
    const int warp_items = kWarp / adders;
    const int items = (rows * tap_sums + warp_items - 1) / warp_items * warp_items;
#pragma unroll 1
    for (int item = threadIdx.x / adders; item < items; item += kThreads / adders) {
      const int tap = item / rows;
      const int own_row = item - tap * rows;
      const bool is_bias = tap == taps;
      const int slot = is_bias ? bias_slot : tap + first_tap;
      Acc sum = 0;
      if (tap < tap_sums) {
#pragma unroll 1
        for (int i = adder; i < terms; i += adders) {
          uint32_t other = i;
          const int vector = row_threads.DivMod(other);
          const int thread = other * group_threads.divisor() + own_row * row_size + vector;
          sum += shared[slot * kThreads + thread];
        }
      }
      for (int distance = adders / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(0xffffffff, sum, distance);
      }
      const int channel = first_channel + own_row;
      if (adder != 0 || tap >= tap_sums || channel >= channels) continue;
      const int k = taps - 1 - tap;
      if (!whole) {
        block_partials[int64_t{is_bias ? tap : k} * channels + channel] = sum;
      } else if (is_bias) {
        StoreAs(dbias, kept * channels + channel, bias_dtype, sum);
      } else {
        StoreAs(dweight, (kept * channels + channel) * taps + k, weight_dtype, sum);
      }
    }
  }
};

}  // namespace jaxops::lightweight_conv::cuda::nct

#endif  // JAXOPS_CUDA_LIGHTWEIGHT_CONV_NCT_ROW_SUMS_CUH_
