// These kernels compute lightweight convolution in the NCT layout with any filter: neighbouring
// threads take neighbouring steps and read the inputs of each tap through the cache.
#include "cuda/common/activation.cuh"
#include "cuda/lightweight_conv/backward.cuh"
#include "cuda/lightweight_conv/families.h"
#include "cuda/lightweight_conv/forward.cuh"

namespace jaxops::lightweight_conv::cuda::nct {
namespace {

using jaxops::cuda::Activate;

// The dilation is too large for tiles in shared memory: neighbouring threads take neighbouring
// steps and read the inputs of each tap through the cache.
template <typename T>
__global__ void __launch_bounds__(kNctThreads)
    DilatedNctForward(const __grid_constant__ ForwardParams p) {
  using Acc = Accumulator<T>;
  uint32_t block = blockIdx.x;
  const int first_step = p.tiles.DivMod(block) * (kNctThreads * kThreadSteps) + threadIdx.x;
  const int channel = p.channel_blocks.DivMod(block);
  const int64_t batch = block;
  const int64_t row = int64_t{channel} * p.time;
  const T* x = static_cast<const T*>(p.call.x) + p.call.batch.Offset(batch, Forward::kX) + row;
  T* y = static_cast<T*>(p.call.y) + p.call.batch.Offset(batch, Forward::kY) + row;
  const int64_t filter =
      p.call.batch.Offset(batch, Forward::kWeight) + int64_t{p.depth.Quotient(channel)} * p.taps;

  Acc sums[kThreadSteps], bias[1];
  p.ReadBias(bias, batch, channel);
#pragma unroll
  for (int i = 0; i < kThreadSteps; ++i) sums[i] = bias[0];
  WithElements(p.call.weight, p.call.weight_dtype, [&](const auto* weights) {
    for (int tap = 0; tap < p.taps; ++tap) {
      const Acc weight = static_cast<Acc>(Widen(weights[filter + p.TapIndex(tap)]));
#pragma unroll
      for (int i = 0; i < kThreadSteps; ++i) {
        const int t = first_step + i * kNctThreads + tap * p.dilation - p.padding;
        const bool inside = static_cast<unsigned>(t) < static_cast<unsigned>(p.time);
        sums[i] += weight * Widen(LoadIf<1>(inside, x + t, x).values[0]);
      }
    }
  });
  Activate(sums, p.call.activation);
#pragma unroll
  for (int i = 0; i < kThreadSteps; ++i) {
    const int t = first_step + i * kNctThreads;
    if (t < p.time) y[t] = Narrow<T>(sums[i]);
  }
}

// The dilation is too large for tiles in shared memory: neighbouring threads take neighbouring
// steps and read g through the cache.
template <typename T>
__global__ void __launch_bounds__(kNctThreads)
    DilatedNctBackward(const __grid_constant__ BackwardParams p) {
  using Acc = Accumulator<T>;
  const Share share(p, kStagedTaps);
  const Arrays<T> arrays(p, share.kept);
  const int taps = min(kStagedTaps, p.taps - share.first_tap);
  const int row_threads = p.nct.threads_per_row();
  const int first_channel = share.channel_block * p.nct.rows();
  const int lane = threadIdx.x & (row_threads - 1);
  const int channel = first_channel + (threadIdx.x >> p.nct.row_bits);
  const int row_time = channel < p.channels ? p.time : 0;
  const int64_t row = row_time == 0 ? 0 : int64_t{channel} * p.time;
  const bool wants_dbias = p.call.dbias != nullptr && share.first_tap == 0;

  Acc dweight[kStagedTaps][1] = {};
  Acc dbias[1][1] = {};
#pragma unroll 1
  for (uint32_t index = share.split; index < p.items; index += p.splits.divisor()) {
    const Item item(p, index);
    const T* g = item.At(p, arrays.g, Backward::kG) + row;
    const T* x = item.At(p, arrays.x, Backward::kX) + row;
    for (int i = 0; i < kThreadSteps; ++i) {
      const int step = (item.tile * kThreadSteps + i) * row_threads + lane;
      if (step >= row_time) break;
      const Acc own = Widen(x[step]);
#pragma unroll
      for (int j = 0; j < kStagedTaps; ++j) {
        const int t = step + (share.first_tap + j) * p.dilation - p.mirrored;
        if (j < taps && static_cast<unsigned>(t) < static_cast<unsigned>(p.time)) {
          dweight[j][0] += own * Widen(g[t]);
        }
      }
      if (wants_dbias) dbias[0][0] += Widen(g[step]);
    }
  }
  Acc* partials = share.PartialSums<T>(p);
  ReduceRows(dweight, p.nct.row_bits, [&](int j, int row, Acc sum) {
    if (j < taps && first_channel + row < p.channels) {
      partials[int64_t{p.taps - 1 - share.first_tap - j} * p.channels + first_channel + row] = sum;
    }
  });
  if (wants_dbias) {
    ReduceRows(dbias, p.nct.row_bits, [&](int, int row, Acc sum) {
      if (first_channel + row < p.channels) {
        partials[int64_t{p.taps} * p.channels + first_channel + row] = sum;
      }
    });
  }
}

ForwardPlan MakePlan(const Forward& call) {
  const Geometry& g = call.geometry;
  ForwardPlan plan;
  plan.tiles = CeilDiv(g.time, kNctThreads * kThreadSteps);
  plan.channel_blocks = g.channels;
  plan.blocks = call.batch.size() * plan.channel_blocks * plan.tiles;
  return plan;
}

BackwardPlan MakePlan(const Gradients& gradients) {
  const NctTile tile(gradients.call.geometry.time, kThreadSteps);
  return BackwardPlan(gradients.call, gradients.splits, 1,
                      int64_t{kThreadSteps} * tile.threads_per_row(), tile.rows(), kStagedTaps);
}

}  // namespace

bool CanRunDilated(const Forward& call, const Device&) {
  return call.geometry.data_format == DataFormat::kNCT && MakePlan(call).CanLaunch();
}

bool CanRunDilated(const Gradients& gradients, const Device&) {
  return gradients.call.geometry.data_format == DataFormat::kNCT && MakePlan(gradients).CanLaunch();
}

cudaError_t LaunchDilated(cudaStream_t stream, const Forward& call, const Device&) {
  const ForwardPlan plan = MakePlan(call);
  const ForwardParams params(call, plan, 1, kThreadSteps);
  return DispatchFloat(call.dtype, [&](auto element) {
    return Launch(DilatedNctForward<decltype(element)>, plan.blocks, kNctThreads, 0, stream,
                  params);
  });
}

cudaError_t LaunchDilated(cudaStream_t stream, const Gradients& gradients, const Device&) {
  const Backward& call = gradients.call;
  const BackwardPlan plan = MakePlan(gradients);
  const BackwardParams params(call, plan, gradients.partials, 1, kThreadSteps);
  const cudaError_t error = DispatchFloat(call.dtype, [&](auto element) {
    return Launch(DilatedNctBackward<decltype(element)>, plan.blocks, kNctThreads, 0, stream,
                  params);
  });
  if (error != cudaSuccess) return error;
  return AddPartialSums(stream, call, {gradients.partials, plan.splits});
}

}  // namespace jaxops::lightweight_conv::cuda::nct
