// Lightweight convolution with short filters of any number of channels, in the NTC layout: a thread
// owns one channel.
#include "cuda/common/activation.cuh"
#include "cuda/lightweight_conv/backward.cuh"
#include "cuda/lightweight_conv/forward.cuh"

namespace jaxops::lightweight_conv::cuda {
namespace {

using jaxops::cuda::Activate;

// NTC, of channels that packs do not fit: a window of kSteps + kTaps - 1 rows moves down a thread's
// channel, kSteps rows at a time.
template <typename T>
__global__ void __launch_bounds__(kNtcThreads, 2)
    UnpackedNtcForward(const __grid_constant__ ForwardParams p) {
  using Acc = Accumulator<T>;
  constexpr int kV = 1;
  constexpr int kTaps = kShortTaps;
  constexpr int kSteps = 8;
  constexpr int kCarried = kTaps - 1;
  uint32_t block = blockIdx.x;
  const int lane = threadIdx.x & (p.ntc.lanes() - 1);
  const int group = threadIdx.x >> p.ntc.lane_bits;
  const int channel = (p.channel_blocks.Peel(block) * p.ntc.lanes() + lane) * kV;
  const int first_step = (p.tiles.Peel(block) * p.ntc.groups() + group) * p.chunks * kSteps;
  const int phase = p.phases.Peel(block);
  const int64_t batch = block;
  const int last_step = min(PhaseSteps(p.time, p.dilation, phase), first_step + p.chunks * kSteps);
  if (channel >= p.channels || first_step >= last_step) return;

  const T* x = static_cast<const T*>(p.call.x) + p.call.batch.Offset(batch, Forward::kX) + channel;
  T* y = static_cast<T*>(p.call.y) + p.call.batch.Offset(batch, Forward::kY) + channel;
  const int row = phase + first_step * p.dilation - p.padding;
  Pack<T, kV> carried[kCarried];
  Pack<T, kV> arriving[kSteps];
  ReadSteps(carried, x, row, p.dilation, kCarried, p.time, p.channels);
  ReadSteps(arriving, x, row + kCarried * p.dilation, p.dilation, kSteps, p.time, p.channels);
  Acc weight[kTaps][kV], bias[kV];
  p.ReadWeights(weight, batch, channel);
  p.ReadBias(bias, batch, channel);
  Acc window[kCarried + kSteps][kV];
#pragma unroll
  for (int i = 0; i < kCarried; ++i) {
#pragma unroll
    for (int v = 0; v < kV; ++v) window[i][v] = Widen(carried[i].values[v]);
  }

#pragma unroll 1
  for (int step = first_step; step < last_step; step += kSteps) {
    // Converted once, though every element meets several taps; the next rows are under way
    // meanwhile.
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int v = 0; v < kV; ++v) window[kCarried + i][v] = Widen(arriving[i].values[v]);
    }
    if (step + kSteps < last_step) {
      ReadSteps(arriving, x, phase + (step + kSteps + kCarried) * p.dilation - p.padding,
                p.dilation, kSteps, p.time, p.channels);
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (step + i >= last_step) break;
      Acc sums[kV];
#pragma unroll
      for (int v = 0; v < kV; ++v) sums[v] = bias[v];
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        if (k < p.taps) {
#pragma unroll
          for (int v = 0; v < kV; ++v) sums[v] += weight[k][v] * window[i + k][v];
        }
      }
      Activate(sums, p.call.activation);
      WriteStep<kV>(y, sums, phase + (step + i) * p.dilation, p.channels);
    }
#pragma unroll
    for (int i = 0; i < kCarried; ++i) {
#pragma unroll
      for (int v = 0; v < kV; ++v) window[i][v] = window[kSteps + i][v];
    }
  }
}

// NTC, of an odd number of channels of 2 bytes.
template <typename T>
__global__ void __launch_bounds__(kNtcThreads, 2)
    UnpackedNtcBackward(const __grid_constant__ BackwardParams p) {
  using Acc = Accumulator<T>;
  constexpr int kV = 1;
  constexpr int kTaps = kShortTaps;
  constexpr int kWindow = kSteps + kTaps - 1;
  __shared__ Acc shared[kTaps * kV * kNtcThreads];
  const Share share(p, kTaps);
  const TapRange taps = {0, p.taps};
  const Arrays<T> arrays(p, share.kept);
  const int lanes = p.ntc.lanes();
  const int lane = threadIdx.x & (lanes - 1);
  const int group = threadIdx.x >> p.ntc.lane_bits;
  const int groups = p.ntc.groups();
  const int channel = (share.channel_block * lanes + lane) * kV;
  const bool wants_dx = p.call.dx != nullptr;
  const bool wants_dbias = p.call.dbias != nullptr;

  Acc weight[kTaps][kV] = {};
  Acc dweight[kTaps][kV] = {};
  Acc dbias[1][kV] = {};
  if (channel < p.channels) {
    if (wants_dx) p.ReadWeights(weight, share.kept, channel);
#pragma unroll 1
    for (uint32_t index = share.split; index < p.items; index += p.splits.divisor()) {
      const Item item(p, index);
      const int step = (item.tile * groups + group) * kSteps;
      const int steps = PhaseSteps(p.time, p.dilation, item.phase) - step;
      if (steps <= 0) continue;
      const T* x = item.At(p, arrays.x, Backward::kX) + channel;
      const T* g = item.At(p, arrays.g, Backward::kG) + channel;
      const int first = item.phase + step * p.dilation;
      const int origin = first - p.mirrored;
      Pack<T, kV> window[kWindow];
      Pack<T, kV> own[kSteps];
      ReadSteps(window, g, origin, p.dilation, kSteps + p.taps - 1, p.time, p.channels);
      ReadSteps(own, x, first, p.dilation, kSteps, p.time, p.channels);
      const auto own_at = [&](int i, int v) { return Widen(own[i].values[v]); };
      const auto window_at = [&](int i, int v) { return Widen(window[i].values[v]); };
      const Inside inside(steps, origin, p.dilation, p.time);
      // Few warps are at an end of the sequence, and Correlate would cost all of them registers.
      if (inside.All(kSteps, kSteps + p.taps - 1)) {
        AddPairs<true, kSteps>(dweight, own_at, window_at, taps, inside);
      } else {
        AddPairs<false, kSteps>(dweight, own_at, window_at, taps, inside);
      }
      if (wants_dx) {
        T* dx = item.At(p, arrays.dx, Backward::kDx) + channel;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          if (i < steps) {
            Acc sums[kV] = {};
#pragma unroll
            for (int j = 0; j < kTaps; ++j) {
              if (j < p.taps) {
#pragma unroll
                for (int v = 0; v < kV; ++v) sums[v] += weight[j][v] * window_at(i + j, v);
              }
            }
            WriteStep<kV>(dx, sums, first + i * p.dilation, p.channels);
          }
        }
      }
      if (wants_dbias) {
        // Under dilation a step's own g need not be in the window; the cache still has it.
        ReadSteps(own, g, first, p.dilation, kSteps, p.time, p.channels);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
#pragma unroll
          for (int v = 0; v < kV; ++v) dbias[0][v] += own_at(i, v);
        }
      }
    }
  }
  Acc* partials = share.PartialSums<T>(p);
  const int first_channel = share.channel_block * lanes * kV;
  ReduceGroups(shared, dweight, lanes, [&](int j, int v, int lane, Acc sum) {
    const int channel = first_channel + lane * kV + v;
    if (j < p.taps && channel < p.channels) {
      partials[int64_t{p.taps - 1 - j} * p.channels + channel] = sum;
    }
  });
  if (wants_dbias) {
    ReduceGroups(shared, dbias, lanes, [&](int, int v, int lane, Acc sum) {
      const int channel = first_channel + lane * kV + v;
      if (channel < p.channels) partials[int64_t{p.taps} * p.channels + channel] = sum;
    });
  }
}

template <typename T>
cudaError_t LaunchUnpackedNtc(cudaStream_t stream, const Forward& call) {
  ForwardParams params(call, 1, 1);
  const int64_t steps = PhaseSteps(params.time, params.dilation, 0);
  const int64_t phases = params.phases.divisor();
  const int64_t batch = call.batch.size();
  params.chunks = ShortChunks(batch * phases * CeilDiv(steps, 8) * params.channels, 8);
  const int64_t tiles = CeilDiv(steps, int64_t{8} * params.chunks * params.ntc.groups());
  const int64_t channel_blocks = CeilDiv(params.channels, params.ntc.lanes());
  params.tiles = FastDivider(tiles);
  params.channel_blocks = FastDivider(channel_blocks);
  return Launch(UnpackedNtcForward<T>, batch * phases * tiles * channel_blocks, kNtcThreads, 0,
                stream, params);
}

template <typename T>
cudaError_t LaunchUnpackedNtc(cudaStream_t stream, const Backward& call, int64_t splits,
                              void* partials) {
  BackwardParams params(call, splits, partials, 1, 1);
  const int64_t blocks = params.Cut(
      PhaseSteps(params.time, params.dilation, 0), std::min(params.dilation, params.time),
      int64_t{kSteps} * params.ntc.groups(), params.ntc.lanes(), kShortTaps);
  return Launch(UnpackedNtcBackward<T>, blocks, kNtcThreads, 0, stream, params);
}

}  // namespace

cudaError_t LaunchScalarNtc(cudaStream_t stream, const Forward& call) {
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    return LaunchUnpackedNtc<T>(stream, call);
  });
}

cudaError_t LaunchScalarNtc(cudaStream_t stream, const Backward& call, PartialSums& partials) {
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    // Packs of 4 bytes fit all others.
    if constexpr (sizeof(T) == 2) {
      return LaunchUnpackedNtc<T>(stream, call, partials.splits, partials.sums);
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace jaxops::lightweight_conv::cuda
