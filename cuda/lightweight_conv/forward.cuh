// This header holds the parameters of the forward kernels without tensor cores, and reads taps and
// bias.
#ifndef JAXOPS_CUDA_LIGHTWEIGHT_CONV_FORWARD_CUH_
#define JAXOPS_CUDA_LIGHTWEIGHT_CONV_FORWARD_CUH_

#include "cuda/lightweight_conv/filters.cuh"

namespace jaxops::lightweight_conv::cuda {

// Shared memory holds this number of taps at a time; longer filters take several rounds.
constexpr int kTapChunk = 64;

// ForwardPlan cuts the work of such a kernel into tiles of time and blocks of channels.
struct ForwardPlan {
  int64_t tiles;  // of one phase (NTC) or of one row (NCT)
  int64_t channel_blocks;
  int64_t blocks;  // blocks of the grid
  int chunks = 1;  // segments of steps per thread of a short filter
  size_t shared_bytes = 0;

  bool CanLaunch() const { return blocks <= kMaxBlocks; }
};

struct ForwardParams {
  Forward call;
  int time, channels, taps, padding, dilation;
  FastDivider tiles;           // tiles of one phase (NTC) or of one row (NCT)
  FastDivider channel_blocks;  // blocks of channels
  FastDivider phases;
  FastDivider depth;  // channels of a head
  int chunks;         // segments of steps per thread of a short filter
  ShortNtcTile ntc;
  NctTile nct;

  ForwardParams(const Forward& forward, const ForwardPlan& plan, int ntc_channels, int nct_steps,
                int nct_min_row_bits = NctTile::kMinSummedRowBits)
      : call(forward),
        time(static_cast<int>(forward.geometry.time)),
        channels(static_cast<int>(forward.geometry.channels)),
        taps(static_cast<int>(forward.geometry.taps)),
        padding(static_cast<int>(forward.geometry.padding)),
        dilation(static_cast<int>(forward.geometry.dilation)),
        tiles(plan.tiles),
        channel_blocks(plan.channel_blocks),
        phases(std::min(forward.geometry.dilation, forward.geometry.time)),
        depth(forward.geometry.channels / forward.geometry.heads),
        chunks(plan.chunks),
        ntc(forward.geometry.channels, ntc_channels),
        nct(forward.geometry.time, nct_steps, nct_min_row_bits) {}

  __device__ int TapIndex(int tap) const { return call.flip_taps ? taps - 1 - tap : tap; }

  // ReadWeights reads kTaps taps of kV neighbouring channels, zero beyond the filter's length.
  template <int kTaps, int kV, typename Acc>
  __device__ void ReadWeights(Acc (&weight)[kTaps][kV], int64_t batch, int channel) const {
    const int64_t base = call.batch.Offset(batch, Forward::kWeight);
    WithElements(call.weight, call.weight_dtype, [&](const auto* weights) {
#pragma unroll
      for (int v = 0; v < kV; ++v) {
        const auto* filter = weights + base + int64_t{depth.Quotient(channel + v)} * taps;
#pragma unroll
        for (int k = 0; k < kTaps; ++k) {
          weight[k][v] = k < taps ? static_cast<Acc>(Widen(filter[TapIndex(k)])) : Acc(0);
        }
      }
    });
  }

  // ReadBias reads the bias of kV neighbouring channels, zero without a bias.
  template <int kV, typename Acc>
  __device__ void ReadBias(Acc (&bias)[kV], int64_t batch, int channel) const {
#pragma unroll
    for (int v = 0; v < kV; ++v) bias[v] = 0;
    if (call.bias == nullptr) return;
    const int64_t base = call.batch.Offset(batch, Forward::kBias);
    WithElements(call.bias, call.bias_dtype, [&](const auto* biases) {
#pragma unroll
      for (int v = 0; v < kV; ++v) {
        if (channel + v < channels) bias[v] = static_cast<Acc>(Widen(biases[base + channel + v]));
      }
    });
  }
};

// A thread gets more segments, up to `max`, only when there are enough threads for every device.
inline int ShortChunks(int64_t threads, int max) {
  return static_cast<int>(std::clamp<int64_t>(threads / (int64_t{1} << 17), 1, max));
}

}  // namespace jaxops::lightweight_conv::cuda

#endif  // JAXOPS_CUDA_LIGHTWEIGHT_CONV_FORWARD_CUH_
