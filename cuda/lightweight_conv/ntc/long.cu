// These kernels compute lightweight convolution with filters of any length in the NTC layout: a
// tile is staged in shared memory, and a window of registers slides over it.
#include "cuda/common/activation.cuh"
#include "cuda/lightweight_conv/backward.cuh"
#include "cuda/lightweight_conv/families.h"
#include "cuda/lightweight_conv/forward.cuh"

namespace jaxops::lightweight_conv::cuda::ntc {
namespace {

using jaxops::cuda::Activate;

// A thread owns kLaneChannels channels and kOut steps; a window of kOut + kStep - 1 inputs slides
// over them kStep taps at a time.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kNtcThreads)
    LongNtcForward(const __grid_constant__ ForwardParams p) {
  using Acc = Accumulator<T>;
  constexpr int kOut = 16;
  constexpr int kStep = 8;
  constexpr int kV = kLaneChannels<T>;
  constexpr int kChannels = kBlockChannels<T>;
  constexpr int kTileSteps = kNtcWarps * kOut;

  extern __shared__ __align__(16) unsigned char shared[];
  const int chunk_size = min(p.taps, kTapChunk);
  Acc* weights = reinterpret_cast<Acc*>(shared);
  T* rows = reinterpret_cast<T*>(weights + chunk_size * kChannels);

  uint32_t block = blockIdx.x;
  const int first_channel = p.channel_blocks.DivMod(block) * kChannels;
  const int first_step = p.tiles.DivMod(block) * kTileSteps;
  const int phase = p.phases.DivMod(block);
  const int64_t batch = block;

  const T* x = static_cast<const T*>(p.call.x) + p.call.batch.Offset(batch, Forward::kX);
  const int64_t weight_base = p.call.batch.Offset(batch, Forward::kWeight);
  const int lane_channel = threadIdx.x % kWarp * kV;
  const int warp_row = threadIdx.x / kWarp * kOut;
  // Shared memory holds the weights once per head, so that channels of one head share a read.
  const int first_head = p.depth.Quotient(first_channel);
  const int last_channel = min(first_channel + kChannels, p.channels) - 1;
  const int heads = p.depth.Quotient(last_channel) - first_head + 1;
  int head[kV];
#pragma unroll
  for (int v = 0; v < kV; ++v) {
    head[v] = p.depth.Quotient(min(first_channel + lane_channel + v, last_channel)) - first_head;
  }

  Acc sums[kOut][kV] = {};
  for (int first_tap = 0; first_tap < p.taps; first_tap += chunk_size) {
    const int chunk = min(chunk_size, p.taps - first_tap);
    StageRows<T, kAligned>(rows, x, phase - p.padding + (first_step + first_tap) * p.dilation,
                           p.dilation, kTileSteps + chunk - 1, p.time, p.channels, first_channel);
    __pipeline_commit();
    WithElements(p.call.weight, p.call.weight_dtype, [&](const auto* elements) {
      for (int h = threadIdx.x / kWarp; h < heads; h += kNtcWarps) {
        const auto* filter = elements + weight_base + int64_t{first_head + h} * p.taps;
        for (int k = threadIdx.x % kWarp; k < chunk; k += kWarp) {
          weights[k * heads + h] = static_cast<Acc>(Widen(filter[p.TapIndex(first_tap + k)]));
        }
      }
    });
    __pipeline_wait_prior(0);
    __syncthreads();

    Acc window[kOut + kStep - 1][kV];
#pragma unroll
    for (int i = 0; i < kOut - 1; ++i) ReadRow<T>(window[i], rows, warp_row + i);
    // The loop takes the taps from `tap` on: kStep of them, or fewer at the end of the filter.
    const auto advance = [&](int tap, auto whole) {
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        if (whole.value || tap + i < chunk) {
          ReadRow<T>(window[kOut - 1 + i], rows, warp_row + kOut - 1 + tap + i);
        }
      }
#pragma unroll
      for (int k = 0; k < kStep; ++k) {
        if (whole.value || tap + k < chunk) {
          Acc weight[kV];
#pragma unroll
          for (int v = 0; v < kV; ++v) weight[v] = weights[(tap + k) * heads + head[v]];
#pragma unroll
          for (int i = 0; i < kOut; ++i) {
#pragma unroll
            for (int v = 0; v < kV; ++v) sums[i][v] += weight[v] * window[i + k][v];
          }
        }
      }
    };
    int tap = 0;
    for (; tap + kStep <= chunk; tap += kStep) {
      advance(tap, std::true_type{});
#pragma unroll
      for (int i = 0; i < kOut - 1; ++i) {
#pragma unroll
        for (int v = 0; v < kV; ++v) window[i][v] = window[i + kStep][v];
      }
    }
    if (tap < chunk) advance(tap, std::false_type{});
    __syncthreads();
  }

  const int steps = PhaseSteps(p.time, p.dilation, phase);
  const int channel = first_channel + lane_channel;
  if (channel >= p.channels) return;
  T* y = static_cast<T*>(p.call.y) + p.call.batch.Offset(batch, Forward::kY) + channel;
  Acc bias[kV];
  p.ReadBias(bias, batch, channel);
#pragma unroll
  for (int i = 0; i < kOut; ++i) {
    const int step = first_step + warp_row + i;
    if (step >= steps) return;
#pragma unroll
    for (int v = 0; v < kV; ++v) sums[i][v] += bias[v];
    Activate(sums[i], p.call.activation);
    const int t = phase + step * p.dilation;
    if constexpr (kAligned) {
      WriteStep<kV>(y, sums[i], t, p.channels);
    } else {
#pragma unroll
      for (int v = 0; v < kV; ++v) {
        if (channel + v < p.channels) y[int64_t{t} * p.channels + v] = Narrow<T>(sums[i][v]);
      }
    }
  }
}

// Two tiles are in shared memory: the next tile arrives while the block computes the current one.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kNtcThreads)
    LongNtcBackward(const __grid_constant__ BackwardParams p) {
  using Acc = Accumulator<T>;
  constexpr int kV = kLaneChannels<T>;
  constexpr int kChannels = kBlockChannels<T>;
  constexpr int kTileSteps = kNtcWarps * kSteps;
  constexpr int kWindow = kSteps + kStagedTaps - 1;
  constexpr int kWindowRows = kTileSteps + kStagedTaps - 1;
  constexpr int kStageElements = (kWindowRows + kTileSteps) * kChannels;
  extern __shared__ __align__(16) unsigned char shared[];
  T* stages = reinterpret_cast<T*>(shared);

  const Share share(p, kStagedTaps);
  const Arrays<T> arrays(p, share.kept);
  const int taps = min(kStagedTaps, p.taps - share.first_tap);
  const int first_channel = share.channel_block * kChannels;
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int channel = first_channel + lane * kV;
  const bool wants_dbias = p.call.dbias != nullptr && share.first_tap == 0;

  const auto stage = [&](uint32_t index, int buffer) {
    if (index < p.items) {
      const Item item(p, index);
      const int first = item.phase + item.tile * kTileSteps * p.dilation;
      T* window = stages + buffer * kStageElements;
      StageRows<T, kAligned>(window, item.At(p, arrays.g, Backward::kG),
                             first + share.first_tap * p.dilation - p.mirrored, p.dilation,
                             kWindowRows, p.time, p.channels, first_channel);
      StageRows<T, kAligned>(window + kWindowRows * kChannels, item.At(p, arrays.x, Backward::kX),
                             first, p.dilation, kTileSteps, p.time, p.channels, first_channel);
    }
    __pipeline_commit();
  };

  Acc dweight[kStagedTaps][kV] = {};
  Acc dbias[1][kV] = {};
  stage(share.split, 0);
  int buffer = 0;
#pragma unroll 1
  for (uint32_t index = share.split; index < p.items; index += p.splits.divisor(), buffer ^= 1) {
    stage(index + p.splits.divisor(), buffer ^ 1);
    __pipeline_wait_prior(1);
    __syncthreads();
    const Item item(p, index);
    const T* rows = stages + buffer * kStageElements;
    const int step = item.tile * kTileSteps + warp * kSteps;
    const int first = item.phase + step * p.dilation;
    const int steps = PhaseSteps(p.time, p.dilation, item.phase) - step;
    Acc window[kWindow][kV], own[kSteps][kV];
#pragma unroll
    for (int i = 0; i < kWindow; ++i) ReadRow<T>(window[i], rows, warp * kSteps + i);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) ReadRow<T>(own[i], rows, kWindowRows + warp * kSteps + i);
    const auto own_at = [&](int i, int v) { return own[i][v]; };
    const auto window_at = [&](int i, int v) { return window[i][v]; };
    Correlate<kSteps>(
        dweight, own_at, window_at, TapRange{0, taps},
        Inside(steps, first + share.first_tap * p.dilation - p.mirrored, p.dilation, p.time));
    if (wants_dbias) {
      const T* g = item.At(p, arrays.g, Backward::kG);
      for (int i = 0; i < min(steps, kSteps); ++i) {
        const int64_t at = int64_t{first + i * p.dilation} * p.channels + channel;
#pragma unroll
        for (int v = 0; v < kV; ++v) {
          if (channel + v < p.channels) dbias[0][v] += Widen(g[at + v]);
        }
      }
    }
    __syncthreads();
  }

  __pipeline_wait_prior(0);
  Acc* sums = reinterpret_cast<Acc*>(shared);
  Acc* partials = share.PartialSums<T>(p);
  ReduceGroups(sums, dweight, kWarp, [&](int j, int v, int lane, Acc sum) {
    const int channel = first_channel + lane * kV + v;
    if (j < taps && channel < p.channels) {
      partials[int64_t{p.taps - 1 - share.first_tap - j} * p.channels + channel] = sum;
    }
  });
  if (wants_dbias) {
    ReduceGroups(sums, dbias, kWarp, [&](int, int v, int lane, Acc sum) {
      const int channel = first_channel + lane * kV + v;
      if (channel < p.channels) partials[int64_t{p.taps} * p.channels + channel] = sum;
    });
  }
}

template <typename T>
ForwardPlan MakePlan(const Forward& call) {
  const Geometry& g = call.geometry;
  constexpr int kChannels = kBlockChannels<T>;
  constexpr int kTileSteps = kNtcWarps * 16;
  const int64_t chunk = std::min<int64_t>(g.taps, kTapChunk);
  ForwardPlan plan;
  plan.tiles = CeilDiv(CeilDiv(g.time, g.dilation), kTileSteps);
  plan.channel_blocks = CeilDiv(g.channels, kChannels);
  plan.blocks = call.batch.size() * std::min(g.dilation, g.time) * plan.tiles * plan.channel_blocks;
  plan.shared_bytes =
      chunk * kChannels * sizeof(Accumulator<T>) + (kTileSteps + chunk - 1) * kChannels * sizeof(T);
  return plan;
}

template <typename T>
BackwardPlan MakePlan(const Gradients& gradients) {
  const Geometry& g = gradients.call.geometry;
  constexpr int kTileSteps = kNtcWarps * kSteps;
  BackwardPlan plan(gradients.call, gradients.splits, std::min(g.dilation, g.time), kTileSteps,
                    kBlockChannels<T>, kStagedTaps);
  const size_t stages = 2 * (2 * kTileSteps + kStagedTaps - 1) * kBlockChannels<T> * sizeof(T);
  const size_t sums = kStagedTaps * kLaneChannels<T> * kNtcThreads * sizeof(Accumulator<T>);
  plan.shared_bytes = std::max(stages, sums);
  return plan;
}

}  // namespace

bool CanRunLong(const Forward& call, const Device&) {
  return call.geometry.data_format == DataFormat::kNTC &&
         DispatchFloat(call.dtype,
                       [&](auto element) { return MakePlan<decltype(element)>(call).CanLaunch(); });
}

bool CanRunLong(const Gradients& gradients, const Device&) {
  return gradients.call.geometry.data_format == DataFormat::kNTC &&
         DispatchFloat(gradients.call.dtype, [&](auto element) {
           return MakePlan<decltype(element)>(gradients).CanLaunch();
         });
}

cudaError_t LaunchLong(cudaStream_t stream, const Forward& call, const Device&) {
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    const ForwardPlan plan = MakePlan<T>(call);
    const ForwardParams params(call, plan, 1, 1);
    return DispatchBool(RowsAligned(call.geometry.channels, call.dtype, 16), [&](auto aligned) {
      return Launch(LongNtcForward<T, aligned.value>, plan.blocks, kNtcThreads, plan.shared_bytes,
                    stream, params);
    });
  });
}

cudaError_t LaunchLong(cudaStream_t stream, const Gradients& gradients, const Device&) {
  const Backward& call = gradients.call;
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    const BackwardPlan plan = MakePlan<T>(gradients);
    const BackwardParams params(call, plan, gradients.partials, 1, 1);
    const cudaError_t error =
        DispatchBool(RowsAligned(call.geometry.channels, call.dtype, 16), [&](auto aligned) {
          return Launch(LongNtcBackward<T, aligned.value>, plan.blocks, kNtcThreads,
                        plan.shared_bytes, stream, params);
        });
    if (error != cudaSuccess) return error;
    return AddPartialSums(stream, call, {gradients.partials, plan.splits});
  });
}

}  // namespace jaxops::lightweight_conv::cuda::ntc
