// This file computes the convolution of single channels with long filters on tensor cores, as
// `mma/channels.cuh` describes.
//
// A block keeps its channels, with their filters in shared memory; in NCT the next tile is in
// flight while it computes one. A warp multiplies one channel after the other, and writes the sums
// over the window, from where they are written to the array. If a sum is not finite, the warp
// computes these steps again, tap by tap: a zero of the Toeplitz matrix may have been multiplied by
// an infinity or a NaN.
#include "cuda/common/activation.cuh"
#include "cuda/lightweight_conv/families.h"
#include "cuda/lightweight_conv/mma/channels.cuh"

namespace jaxops::lightweight_conv::cuda {
namespace mma {
namespace {

using jaxops::cuda::Activate;

// A tile has up to this number of parts.
constexpr int kParts = 4;
// A warp has kShortBlocks blocks of taps in registers, for filters of up to 33 taps or so, or
// kLongBlocks at a time.
constexpr int kShortBlocks = 3, kLongBlocks = 9;
// A warp multiplies one part after the other by few blocks. Many blocks, which it reads again for
// each tile, serve all parts.
template <int kBlocks>
constexpr int kSumParts = kBlocks == kShortBlocks ? 1 : kParts;
// A filter in shared memory has this number of zeros before it, which the first block has.
constexpr int kMargin = 24;

// A multiprocessor of a large GPU has registers for this number of blocks.
constexpr int ResidentBlocks(int64_t blocks) { return blocks == kShortBlocks ? 4 : 2; }

struct ChannelParams {
  Forward call;
  int time, channels, taps, padding, lead;
  int blocks;  // of 16 taps
  int window_steps, pitch, stage_bytes;
  int filter_taps;  // of a channel in shared memory, with the zeros around them
  ChannelTile tile;
  uint32_t items;  // tiles of every batch entry
  FastDivider tiles, channel_blocks;
  FastDivider depth;  // channels of a head
};

// AddTaps computes the sums of a part tap by tap.
template <typename T, typename Tap>
__device__ __forceinline__ void AddTaps(Sums& sums, const Rows<T>& rows, int part, int taps,
                                        int lead, Tap&& tap) {
#pragma unroll
  for (int right = 0; right < 2; ++right) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int step = part * kPartSteps + Sums::Row(i) * kEdge + Sums::Column(right, i);
      float sum = 0;
      for (int k = 0; k < taps; ++k) sum += tap(k) * rows.At(step + lead + k);
      sums.values[right][i] = sum;
    }
  }
}

template <typename T, typename W, bool kNct, int kBlocks>
__global__ void __launch_bounds__(kChannelThreads, ResidentBlocks(kBlocks))
    ForwardChannels(const __grid_constant__ ChannelParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr bool kIsShort = kBlocks == kShortBlocks;
  constexpr int kGroup = kSumParts<kBlocks>;
  uint32_t first_item = blockIdx.x;
  const int first_channel = p.channel_blocks.DivMod(first_item) * p.tile.channels();
  const uint32_t stride = gridDim.x / p.channel_blocks.divisor();
  const uint32_t base = SharedAddress(shared);
  const auto stage = [&](uint32_t index, int buffer) {
    if (index < p.items) {
      uint32_t entry = index;
      const int first = p.tiles.DivMod(entry) * p.tile.steps - p.padding - p.lead;
      StageChannels<T, kNct>(
          base + buffer * p.stage_bytes, p.pitch,
          static_cast<const T*>(p.call.x) + p.call.batch.Offset(entry, Forward::kX), first,
          p.window_steps, p.tile, p.time, p.channels, first_channel);
    }
    CommitCopies();
  };
  if constexpr (kStages<kNct> == 2) stage(first_item, 0);

  W* const filters = reinterpret_cast<W*>(shared + kStages<kNct> * p.stage_bytes);
  const int lane = threadIdx.x % kWarp;
  const auto stage_filters = [&](const W* weights) {
    // The loads of all channels of a warp are in flight.
    constexpr int kMaxOwn = kNct ? 1 : 4;
    const int warp = threadIdx.x / kWarp, count = p.tile.channels() / kChannelWarps;
#pragma unroll 4
    for (int i = lane; i < p.filter_taps; i += kWarp) {
      const int tap = p.call.flip_taps ? p.taps - 1 - (i - kMargin) : i - kMargin;
      const bool exists = static_cast<unsigned>(tap) < static_cast<unsigned>(p.taps);
#pragma unroll
      for (int own = 0; own < kMaxOwn; ++own) {
        if (own >= count) break;
        const int c = own * kChannelWarps + warp;
        const int channel = min(first_channel + c, p.channels - 1);
        const int64_t first = int64_t{p.depth.Quotient(channel)} * p.taps;
        filters[c * p.filter_taps + i] = exists ? weights[first + tap] : W(0.0f);
      }
    }
    __syncwarp();
  };
  const W* staged_weights = nullptr;
  const bool is_plain = p.call.bias == nullptr && p.call.activation == Activation::kNone;
  int buffer = 0;
#pragma unroll 1
  for (uint32_t index = first_item; index < p.items; index += stride) {
    if constexpr (kStages<kNct> == 2) {
      stage(index + stride, buffer ^ 1);
    } else {
      stage(index, 0);
    }
    WaitCopies<kStages<kNct> - 1>();
    Synchronize<kNct>();
    uint32_t entry = index;
    const int first_step = p.tiles.DivMod(entry) * p.tile.steps;
    const uint32_t staged = base + buffer * p.stage_bytes;
    // Filters are staged again only if batch entries have filters of their own.
    const W* const weights =
        static_cast<const W*>(p.call.weight) + p.call.batch.Offset(entry, Forward::kWeight);
    if (weights != staged_weights) stage_filters(weights);
    staged_weights = weights;
#pragma unroll 1
    for (int c = threadIdx.x / kWarp; c < p.tile.channels(); c += kChannelWarps) {
      const int channel = first_channel + c;
      if (channel >= p.channels) break;
      const W* const taps = filters + c * p.filter_taps + kMargin;
      const auto tap = [&](int k) { return Widen(taps[k]); };
      Toeplitz<T, W, kBlocks> filter;
      if constexpr (kIsShort) filter.ReadPadded(p.lead, tap);
      float bias = 0;
      if (p.call.bias != nullptr) {
        const int64_t at = p.call.batch.Offset(entry, Forward::kBias) + channel;
        WithElements(p.call.bias, p.call.bias_dtype,
                     [&](const auto* elements) { bias = static_cast<float>(Widen(elements[at])); });
      }
      const Rows<T> rows(staged + c * p.pitch);
#pragma unroll 1
      for (int from = 0; from < p.tile.parts(); from += kGroup) {
        Sums sums[kGroup];
#pragma unroll 1
        for (int first = 0; first < p.blocks; first += kBlocks) {
          if constexpr (!kIsShort) filter.ReadPadded(p.lead - first * kEdge, tap);
#pragma unroll
          for (int j = 0; j < kBlocks; ++j) {
            if (!kIsShort && first + j >= p.blocks) break;
#pragma unroll
            for (int part = 0; part < kGroup; ++part) {
              if (from + part >= p.tile.parts()) break;
              MultiplyTaps<T, W, true>(sums[part].values, filter, j,
                                       rows.Load((from + part) * kEdge, first + j));
            }
          }
        }
        bool are_finite = true;
#pragma unroll
        for (int part = 0; part < kGroup; ++part) are_finite &= AreFinite(sums[part].values);
        if (__any_sync(0xffffffff, !are_finite)) {
#pragma unroll 1
          for (int part = 0; part < kGroup; ++part) {
            if (from + part >= p.tile.parts()) break;
            Sums exact;
            AddTaps(exact, rows, from + part, p.taps, p.lead, tap);
#pragma unroll
            for (int other = 0; other < kGroup; ++other) {
              if (other == part) sums[other] = exact;
            }
          }
        }
        // Parts after these do not read the steps of these.
        __syncwarp();
#pragma unroll
        for (int part = 0; part < kGroup; ++part) {
          if (from + part >= p.tile.parts()) break;
          if (!is_plain) {
#pragma unroll
            for (int right = 0; right < 2; ++right) {
#pragma unroll
              for (int i = 0; i < 4; ++i) sums[part].values[right][i] += bias;
              Activate(sums[part].values[right], p.call.activation);
            }
          }
          rows.Store((from + part) * kEdge, sums[part]);
        }
      }
    }
    Synchronize<kNct>();
    WriteChannels<T, kNct>(static_cast<T*>(p.call.y) + p.call.batch.Offset(entry, Forward::kY),
                           staged, p.pitch, first_step, p.tile, p.time, p.channels, first_channel);
    Synchronize<kNct>();
    if constexpr (kStages<kNct> == 2) buffer ^= 1;
  }
}

struct ChannelPlan {
  int64_t blocks;  // of 16 taps
  bool is_short;
  ChannelTile tile;
  int64_t window_steps, pitch, filter_taps, shared_bytes, tiles, channel_blocks, items;
  int64_t grid;

  explicit ChannelPlan(const Forward& call) {
    const Geometry& g = call.geometry;
    const bool is_nct = g.data_format == DataFormat::kNCT;
    blocks = CountTapBlocks(g, g.padding);
    is_short = blocks <= kShortBlocks;
    if (is_short) blocks = kShortBlocks;
    const int64_t many = is_short ? kShortBlocks : kLongBlocks;
    const int64_t more = (blocks - 1) * kEdge;  // steps of a window than of its tile
    // Windows of few taps and 32 channels of NTC have half of the parts, for more blocks at a time.
    const int64_t max_parts = !is_nct && (is_short || more > 512) ? kParts / 2 : kParts;
    filter_taps = kMargin + CeilDiv(blocks, many) * many * kEdge + kEdge;
    const int64_t steps = std::min(max_parts, CeilDiv(g.time, kPartSteps)) * kPartSteps;
    // A row of channels in NTC is 64 bytes, or 32 if their windows would not fit.
    for (int octet_bits : {is_nct ? 0 : 2, 1}) {
      tile = {static_cast<int>(steps), octet_bits};
      window_steps = steps + more;
      pitch = 2 * window_steps;
      shared_bytes = tile.channels() * ((is_nct ? kStages<true> : kStages<false>)*pitch +
                                        filter_taps * jaxops::cuda::SizeOf(call.weight_dtype));
      if (is_nct || shared_bytes <= 74 * 1024) break;
    }
    tiles = CeilDiv(g.time, tile.steps);
    channel_blocks = CeilDiv(g.channels, tile.channels());
    items = call.batch.size() * tiles;
    // The numbers of items of blocks differ by at most one.
    const int64_t max = std::max<int64_t>(1, kProcessors * ResidentBlocks(many) / channel_blocks);
    grid = CeilDiv(items, CeilDiv(items, max)) * channel_blocks;
  }
};

template <typename T, typename W, bool kNct, int kBlocks>
cudaError_t LaunchForwardChannels(cudaStream_t stream, const Forward& call, const ChannelPlan& plan,
                                  int opt_in_limit) {
  const Geometry& g = call.geometry;
  const ChannelParams params{
      .call = call,
      .time = static_cast<int>(g.time),
      .channels = static_cast<int>(g.channels),
      .taps = static_cast<int>(g.taps),
      .padding = static_cast<int>(g.padding),
      .lead = WindowLead(g, g.padding),
      .blocks = static_cast<int>(plan.blocks),
      .window_steps = static_cast<int>(plan.window_steps),
      .pitch = static_cast<int>(plan.pitch),
      .stage_bytes = static_cast<int>(plan.pitch * plan.tile.channels()),
      .filter_taps = static_cast<int>(plan.filter_taps),
      .tile = plan.tile,
      .items = static_cast<uint32_t>(plan.items),
      .tiles = FastDivider(plan.tiles),
      .channel_blocks = FastDivider(plan.channel_blocks),
      .depth = FastDivider(g.channels / g.heads),
  };
  return jaxops::cuda::Launch(ForwardChannels<T, W, kNct, kBlocks>, plan.grid, kChannelThreads,
                              plan.shared_bytes, stream, params, opt_in_limit);
}

}  // namespace
}  // namespace mma

bool CanRunMmaChannels(const Forward& call, const Device& device) {
  if (call.state != nullptr || !mma::CanTileChannels(call.geometry, call.dtype) ||
      !HasMatrix(call.dtype, call.weight_dtype)) {
    return false;
  }
  const mma::ChannelPlan plan(call);
  return plan.shared_bytes <= device.shared_bytes && plan.items <= INT32_MAX &&
         plan.grid <= kMaxBlocks;
}

cudaError_t LaunchMmaChannels(cudaStream_t stream, const Forward& call, const Device& device) {
  const mma::ChannelPlan plan(call);
  return DispatchBool(call.geometry.data_format == DataFormat::kNCT, [&](auto is_nct) {
    const auto launch = [&](auto element, auto weight) {
      using T = decltype(element);
      using W = decltype(weight);
      return DispatchBool(plan.is_short, [&](auto is_short) {
        constexpr int kBlocks = is_short.value ? mma::kShortBlocks : mma::kLongBlocks;
        return mma::LaunchForwardChannels<T, W, is_nct.value, kBlocks>(stream, call, plan,
                                                                       device.shared_bytes);
      });
    };
    if (call.dtype == DType::kF16) return launch(__half{}, __half{});
    if (call.weight_dtype == DType::kF32) return launch(__nv_bfloat16{}, float{});
    return launch(__nv_bfloat16{}, __nv_bfloat16{});
  });
}

}  // namespace jaxops::lightweight_conv::cuda
