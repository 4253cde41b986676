// These kernels compute lightweight convolution with short filters of any number of channels in the
// NTC layout: a thread owns one channel.
#include "cuda/common/activation.cuh"
#include "cuda/lightweight_conv/backward.cuh"
#include "cuda/lightweight_conv/families.h"
#include "cuda/lightweight_conv/forward.cuh"

namespace jaxops::lightweight_conv::cuda::ntc {
namespace {

using jaxops::cuda::Activate;

// A window of kSteps + kTaps - 1 rows moves down a thread's channel, kSteps rows at a time.
template <typename T>
__global__ void __launch_bounds__(kNtcThreads, 2)
    ScalarNtcForward(const __grid_constant__ ForwardParams p) {
  using Acc = Accumulator<T>;
  constexpr int kV = 1;
  constexpr int kTaps = kShortTaps;
  constexpr int kSteps = 8;
  constexpr int kCarried = kTaps - 1;
  uint32_t block = blockIdx.x;
  const int lane = threadIdx.x & (p.ntc.lanes() - 1);
  const int group = threadIdx.x >> p.ntc.lane_bits;
  const int channel = (p.channel_blocks.DivMod(block) * p.ntc.lanes() + lane) * kV;
  const int first_step = (p.tiles.DivMod(block) * p.ntc.groups() + group) * p.chunks * kSteps;
  const int phase = p.phases.DivMod(block);
  const int64_t batch = block;
  const int last_step = min(PhaseSteps(p.time, p.dilation, phase), first_step + p.chunks * kSteps);
  if (channel >= p.channels || first_step >= last_step) return;

  const T* x = static_cast<const T*>(p.call.x) + p.call.batch.Offset(batch, Forward::kX) + channel;
  T* y = static_cast<T*>(p.call.y) + p.call.batch.Offset(batch, Forward::kY) + channel;
  const int row = phase + first_step * p.dilation - p.padding;
  Vector<T, kV> carried[kCarried];
  Vector<T, kV> arriving[kSteps];
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
    // The rows are converted once, though every element meets several taps; the next rows are in
    // flight at the same time.
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

// ScalarNtcBackward is for an odd number of channels of 2 bytes.
template <typename T>
__global__ void __launch_bounds__(kNtcThreads, 2)
    ScalarNtcBackward(const __grid_constant__ BackwardParams p) {
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
      Vector<T, kV> window[kWindow];
      Vector<T, kV> own[kSteps];
      ReadSteps(window, g, origin, p.dilation, kSteps + p.taps - 1, p.time, p.channels);
      ReadSteps(own, x, first, p.dilation, kSteps, p.time, p.channels);
      const auto own_at = [&](int i, int v) { return Widen(own[i].values[v]); };
      const auto window_at = [&](int i, int v) { return Widen(window[i].values[v]); };
      const Inside inside(steps, origin, p.dilation, p.time);
      // Few warps are at an end of the sequence, and Correlate would cost registers in all warps.
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
        // Under dilation a step's own g may be outside the window, but is still in the cache.
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

ForwardPlan MakePlan(const Forward& call) {
  const Geometry& g = call.geometry;
  const ShortNtcTile tile(g.channels, 1);
  const int64_t steps = CeilDiv(g.time, g.dilation);
  const int64_t phases = std::min(g.dilation, g.time);
  const int64_t batch = call.batch.size();
  ForwardPlan plan;
  plan.chunks = ShortChunks(batch * phases * CeilDiv(steps, kSteps) * g.channels, 8);
  plan.tiles = CeilDiv(steps, int64_t{kSteps} * plan.chunks * tile.groups());
  plan.channel_blocks = CeilDiv(g.channels, tile.lanes());
  plan.blocks = batch * phases * plan.tiles * plan.channel_blocks;
  return plan;
}

BackwardPlan MakePlan(const Gradients& gradients) {
  const Geometry& g = gradients.call.geometry;
  const ShortNtcTile tile(g.channels, 1);
  return BackwardPlan(gradients.call, gradients.splits, std::min(g.dilation, g.time),
                      int64_t{kSteps} * tile.groups(), tile.lanes(), kShortTaps);
}

bool IsShort(const Geometry& g) {
  return g.data_format == DataFormat::kNTC && g.taps <= kShortTaps;
}

}  // namespace

bool CanRunScalar(const Forward& call, const Device&) {
  return IsShort(call.geometry) && MakePlan(call).CanLaunch();
}

// Kernels exist for 2-byte elements only.
bool CanRunScalar(const Gradients& gradients, const Device&) {
  return IsShort(gradients.call.geometry) && jaxops::cuda::SizeOf(gradients.call.dtype) == 2 &&
         MakePlan(gradients).CanLaunch();
}

cudaError_t LaunchScalar(cudaStream_t stream, const Forward& call, const Device&) {
  const ForwardPlan plan = MakePlan(call);
  const ForwardParams params(call, plan, 1, 1);
  return DispatchFloat(call.dtype, [&](auto element) {
    return Launch(ScalarNtcForward<decltype(element)>, plan.blocks, kNtcThreads, 0, stream, params);
  });
}

cudaError_t LaunchScalar(cudaStream_t stream, const Gradients& gradients, const Device&) {
  const Backward& call = gradients.call;
  const BackwardPlan plan = MakePlan(gradients);
  const BackwardParams params(call, plan, gradients.partials, 1, 1);
  const auto launch = [&](auto element) {
    return Launch(ScalarNtcBackward<decltype(element)>, plan.blocks, kNtcThreads, 0, stream,
                  params);
  };
  const cudaError_t error = call.dtype == DType::kF16 ? launch(__half{}) : launch(__nv_bfloat16{});
  if (error != cudaSuccess) return error;
  return AddPartialSums(stream, call, {gradients.partials, plan.splits});
}

}  // namespace jaxops::lightweight_conv::cuda::ntc
