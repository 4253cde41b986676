// This header reads taps and writes their gradients in the NCT layout.
#ifndef JAXOPS_CUDA_LIGHTWEIGHT_CONV_NCT_TAPS_CUH_
#define JAXOPS_CUDA_LIGHTWEIGHT_CONV_NCT_TAPS_CUH_

#include "cuda/lightweight_conv/filters.cuh"

namespace jaxops::lightweight_conv::cuda::nct {

// ReadTaps reads kTaps taps of the filter at element `at`, from `first` on and zero beyond the end;
// flipped taps are read from the other end.
template <int kTaps, typename Acc>
__device__ __forceinline__ void ReadTaps(Acc (&weight)[kTaps], const void* weights, DType dtype,
                                         int64_t at, int first, int taps, bool flip) {
  WithElements(weights, dtype, [&](const auto* elements) {
    const auto* filter = elements + at + (flip ? taps - 1 - first : first);
    const int step = flip ? -1 : 1;
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      weight[k] = first + k < taps ? static_cast<Acc>(Widen(filter[k * step])) : Acc(0);
    }
  });
}

// WriteRowSum writes the sum over a channel of tap `tap`, or after the last tap that of the bias.
template <typename Params, typename Acc>
__device__ __forceinline__ void WriteRowSum(const Params& p, Acc* partials, int64_t kept, int tap,
                                            int channel, Acc sum) {
  if (channel >= p.channels) return;
  if (!p.whole) {
    partials[int64_t{tap} * p.channels + channel] = sum;
  } else if (tap < p.taps) {
    StoreAs(p.call.dweight, (kept * p.channels + channel) * p.taps + tap, p.call.weight_dtype, sum);
  } else {
    StoreAs(p.call.dbias, kept * p.channels + channel, p.call.bias_dtype, sum);
  }
}

}  // namespace jaxops::lightweight_conv::cuda::nct

#endif  // JAXOPS_CUDA_LIGHTWEIGHT_CONV_NCT_TAPS_CUH_
