// This header has the kernels that compute lightweight convolution with long filters on tensor
// cores. With flipped taps and mirrored padding, the same kernels compute the input gradient.
//
// With segments, 16 steps whose windows are inside of one segment are computed as without. Others
// take one product for each of their segments.
#ifndef JAXOPS_CUDA_LIGHTWEIGHT_CONV_MMA_FORWARD_CUH_
#define JAXOPS_CUDA_LIGHTWEIGHT_CONV_MMA_FORWARD_CUH_

#include "cuda/common/activation.cuh"
#include "cuda/lightweight_conv/families.h"
#include "cuda/lightweight_conv/mma/mma.cuh"

namespace jaxops::lightweight_conv::cuda::mma {
namespace {

using jaxops::cuda::Activate;

// A warp has this number of steps of a tile.
constexpr int WarpSteps(int element_bytes) { return 256 / element_bytes; }
template <typename T>
constexpr int kWarpSteps = WarpSteps(sizeof(T));

// A multiprocessor of a large GPU has shared memory and registers for this number of blocks.
constexpr int ResidentBlocks(int element_bytes, int window_blocks) {
  return (element_bytes == 4 ? 4 : 5) - (window_blocks > 3) - (window_blocks > kLongWindow);
}
template <typename T, int kBlocks>
constexpr int kResident = ResidentBlocks(sizeof(T), kBlocks);

struct ForwardParams {
  Forward call;
  int time, channels, taps, padding, dilation, lead;
  uint32_t items;  // tiles of every phase of every batch entry
  FastDivider tiles, channel_blocks, phases;
  FastDivider depth;  // channels of a head
  TileShape shape;
};

// A block keeps its channels; while the block computes one tile, the next tile is in flight.
template <typename T, typename W, bool kNct, int kBlocks, bool kSegments>
__global__ void __launch_bounds__(kThreads, kResident<T, kBlocks> - kSegments)
    ForwardMma(const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  uint32_t first_item = blockIdx.x;
  const int first_channel = p.channel_blocks.DivMod(first_item) * p.shape.channels;
  const uint32_t stride = gridDim.x / p.channel_blocks.divisor();
  const auto stage = [&](uint32_t index, int buffer) {
    if (index < p.items) {
      const Item item(p, index);
      Stage<T, kNct>(SharedAddress(shared) + buffer * p.shape.window_bytes, p.shape.window_pitch,
                     static_cast<const T*>(p.call.x) + p.call.batch.Offset(item.entry, Forward::kX),
                     item.phase + item.first_step * p.dilation - p.padding - p.lead, p.dilation,
                     p.shape.window_steps, p.shape, p.time, p.channels, first_channel);
    }
    CommitCopies();
  };
  stage(first_item, 0);

  const WarpPlace place(p.shape);
  const bool has_channels = first_channel + place.channel < p.channels;
  const int channel = min(first_channel + place.channel, p.channels - kEdge);
  const bool is_plain = p.call.bias == nullptr && p.call.activation == Activation::kNone;
  const W* const filters =
      static_cast<const W*>(p.call.weight) + int64_t{p.depth.Quotient(channel)} * p.taps;
  const W* weights = nullptr;
  const auto tap = [&](int k) { return Widen(weights[p.call.flip_taps ? p.taps - 1 - k : k]); };
  Toeplitz<T, W, kBlocks> filter;
  // The biases belong to the rows of the sums in NCT, and to the columns in NTC.
  float biases[2][2] = {};
  int64_t bias_offset = -1;
  int buffer = 0;
#pragma unroll 1
  for (uint32_t index = first_item; index < p.items; index += stride, buffer ^= 1) {
    stage(index + stride, buffer ^ 1);
    const Item item(p, index);
    // The filter is read again only if batch entries have filters of their own.
    const W* const item_weights = filters + p.call.batch.Offset(item.entry, Forward::kWeight);
    if (item_weights != weights) {
      weights = item_weights;
      filter.Read(p.taps, p.lead, tap);
    }
    const int64_t bias = p.call.batch.Offset(item.entry, Forward::kBias) + channel;
    if (p.call.bias != nullptr && bias != bias_offset) {
      bias_offset = bias;
      WithElements(p.call.bias, p.call.bias_dtype, [&](const auto* elements) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int at = kNct ? Sums::Row(2 * i) : Sums::Column(i, j);
            biases[i][j] = static_cast<float>(Widen(elements[bias + at]));
          }
        }
      });
    }
    WaitCopies<1>();
    __syncthreads();

    const Tile<T, kNct> window(SharedAddress(shared) + buffer * p.shape.window_bytes,
                               p.shape.window_pitch, place.step, place.channel);
    const int steps = kNct ? p.time : PhaseSteps(p.time, p.dilation, item.phase);
    const int step = item.first_step + place.step;
    const int count = has_channels ? min(kWarpSteps<T>, steps - step) : 0;
    const auto segments = [&] {
      if constexpr (kSegments) {
        const int first = item.phase + step * p.dilation;
        return Segments(p.call.starts + p.call.batch.Offset(item.entry, Forward::kStarts), first,
                        first - p.padding - p.lead, p.dilation, p.time);
      } else {
        return NoSegments();
      }
    }();
    const auto output = [&] {
      return Output<T, kNct>(
          static_cast<T*>(p.call.y) + p.call.batch.Offset(item.entry, Forward::kY), step, channel,
          item.phase, p.dilation, steps, p.time, p.channels);
    };
    const auto finish = [&](Sums& sums, Output<T, kNct>& out) {
      if (!is_plain) {
#pragma unroll
        for (int right = 0; right < 2; ++right) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sums.values[right][i] += kNct ? biases[i / 2][0] : biases[right][i % 2];
          }
          Activate(sums.values[right], p.call.activation);
        }
      }
      out.Write(sums);
    };
    using Operand = WindowOperand<T, kNct>;
    Probe<T> probe;
    // A ring keeps the entries that the windows of neighbouring steps share, if registers allow.
    constexpr bool kKeeps = kBlocks <= 3;
    constexpr int kRing = kKeeps ? kBlocks : 1;
    Operand kept[kRing];
    Output<T, kNct> out = output();
    bool are_finite = filter.IsFinite();
    if constexpr (kKeeps) {
#pragma unroll
      for (int j = 0; j < kBlocks - 1; ++j) {
        kept[j] = LoadWindow(window, j * kEdge);
        Meet(probe, kept[j]);
      }
    }
#pragma unroll 1
    for (int first = 0; first < count; first += kRing * kEdge) {
#pragma unroll
      for (int i = 0; i < kRing; ++i) {
        const int own = first + i * kEdge;
        if (own >= count) break;
        Sums sums;
        if constexpr (kKeeps) {
          Operand& next = kept[(i + kBlocks - 1) % kBlocks];
          next = LoadWindow(window, own + (kBlocks - 1) * kEdge);
          Meet(probe, next);
        }
        const bool is_one = segments.AreOne(own, kBlocks);
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
          Operand operand;
          if constexpr (kKeeps) {
            operand = kept[(i + j) % kBlocks];
          } else {
            operand = LoadWindow(window, own + j * kEdge);
            if (own == 0 || j == kBlocks - 1) Meet(probe, operand);
          }
          if (is_one) MultiplyTaps<T, W, kNct>(sums.values, filter, j, operand);
        }
        if constexpr (kSegments) {
          if (!is_one) segments.AddProducts(sums, filter, window, own);
        }
        if constexpr (sizeof(T) == 4) are_finite &= AreFinite(sums.values);
        finish(sums, out);
      }
    }
    if (__any_sync(0xffffffff, !probe.IsClear() || !are_finite)) {
      Output<T, kNct> again = output();
#pragma unroll 1
      for (int own = 0; own < count; own += kEdge) {
        Sums sums;
        sums.AddTaps(window, own, p.taps, p.lead, segments, tap);
        finish(sums, again);
      }
    }
    __syncthreads();
  }
}

struct Plan {
  int window_blocks;  // the kernel's template argument
  TileShape shape;
  int64_t phases, tiles, channel_blocks;
  int64_t items;   // tiles of every phase of every batch entry
  int64_t blocks;  // blocks of the grid
};

Plan MakePlan(const Forward& call) {
  const Geometry& g = call.geometry;
  const int element_bytes = static_cast<int>(jaxops::cuda::SizeOf(call.dtype));
  Plan plan;
  plan.window_blocks = RoundBlocks(CountTapBlocks(g, g.padding), kMaxWindowBlocks);
  plan.shape = TileShape::Of(g, element_bytes, WarpSteps(element_bytes), plan.window_blocks);
  plan.phases = std::min(g.dilation, g.time);
  plan.tiles = CeilDiv(CeilDiv(g.time, g.dilation), plan.shape.steps);
  plan.channel_blocks = CeilDiv(g.channels, plan.shape.channels);
  plan.items = call.batch.size() * plan.phases * plan.tiles;
  // The numbers of items of blocks differ by at most one.
  const int resident = ResidentBlocks(element_bytes, plan.window_blocks);
  const int64_t max = std::max<int64_t>(1, kProcessors * resident / plan.channel_blocks);
  plan.blocks = CeilDiv(plan.items, CeilDiv(plan.items, max)) * plan.channel_blocks;
  return plan;
}

template <typename T, typename W, bool kNct, int kBlocks, bool kSegments>
cudaError_t Launch(cudaStream_t stream, const Forward& call, const Plan& plan) {
  const Geometry& g = call.geometry;
  ForwardParams params;
  params.call = call;
  params.time = static_cast<int>(g.time);
  params.channels = static_cast<int>(g.channels);
  params.taps = static_cast<int>(g.taps);
  params.padding = static_cast<int>(g.padding);
  params.dilation = static_cast<int>(g.dilation);
  params.lead = WindowLead(g, g.padding);
  params.items = static_cast<uint32_t>(plan.items);
  params.tiles = FastDivider(plan.tiles);
  params.channel_blocks = FastDivider(plan.channel_blocks);
  params.phases = FastDivider(plan.phases);
  params.depth = FastDivider(g.channels / g.heads);
  params.shape = plan.shape;
  return jaxops::cuda::Launch(ForwardMma<T, W, kNct, kBlocks, kSegments>, plan.blocks, kThreads,
                              2 * plan.shape.window_bytes, stream, params);
}

template <bool kSegments>
cudaError_t LaunchForward(cudaStream_t stream, const Forward& call) {
  const Plan plan = MakePlan(call);
  return Dispatch<kMaxWindowBlocks>(
      call.geometry.data_format, plan.window_blocks, call.dtype, call.weight_dtype,
      [&](auto element, auto weight, auto is_nct, auto blocks) {
        return Launch<decltype(element), decltype(weight), is_nct.value, blocks.value, kSegments>(
            stream, call, plan);
      });
}

}  // namespace
}  // namespace jaxops::lightweight_conv::cuda::mma

#endif  // JAXOPS_CUDA_LIGHTWEIGHT_CONV_MMA_FORWARD_CUH_
