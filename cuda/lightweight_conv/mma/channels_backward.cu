// This file computes the kernel gradient of single channels with long filters on tensor cores, as
// `mma/channels.cuh` describes. The input gradient is a forward convolution.
//
// As in `backward.cuh`, tap j of the flipped filter gets the products of x[s] and g[s + j -
// mirrored]. A product of the transposed parts of x and of g's window, both of 16 rows, has the
// sums over the rows for 16 steps of x and 16 of the window, and a diagonal of it has those of one
// tap. Long filters are cut into groups of taps, each with blocks of threads of its own.
//
// If a sum is not finite, the warp computes it again, pair by pair: at the end of an array, zeros
// may have been multiplied by infinities or NaNs that belong to no pair.
#include "cuda/lightweight_conv/families.h"
#include "cuda/lightweight_conv/mma/channels.cuh"

namespace jaxops::lightweight_conv::cuda {
namespace mma {
namespace {

// A filter of more than kMaxGroupBlocks blocks is cut into groups of 16 kGroupBlocks diagonals,
// to which one block more contributes.
constexpr int kGroupBlocks = 8, kMaxGroupBlocks = kGroupBlocks + 1;
// Filters of up to 49 taps or so have this number of blocks.
constexpr int kShortBlocks = 4;
// The rows of products in shared memory are this number of floats apart, so that four neighbouring
// ones are in different banks.
constexpr int kProductPitch = kEdge + 8;

struct ChannelParams {
  Backward call;
  int time, channels, taps;
  int mirrored, lead;
  int blocks;        // of 16 steps over which the window of 16 steps extends
  int group_blocks;  // diagonals of a group / 16
  int bias_group;    // whose window has the steps of x themselves, for dbias
  int window_steps, own_pitch, window_pitch;
  int own_bytes, stage_bytes;
  int sums;  // of a channel: its diagonals and dbias
  ChannelTile tile;
  uint32_t items;  // tiles of every summed batch entry
  FastDivider tiles, groups, channel_blocks, splits;
  float* partials;  // (kept, splits, taps + 1, channels)
};

// A warp of few blocks in NCT has one channel, and keeps its products in registers. Others add the
// diagonals of a tile in shared memory.
template <bool kNct, int kBlocks>
constexpr bool kKeepsProducts = kNct && kBlocks == kShortBlocks;

// Products are the sums of the products of 16 steps (rows) and 16 kBlocks steps of a window.
template <int kBlocks>
struct Products {
  float values[std::max(1, kBlocks)][2][4] = {};

  __device__ __forceinline__ void Add(const Products& other) {
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
      for (int right = 0; right < 2; ++right) {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[j][right][i] += other.values[j][right][i];
      }
    }
  }

  // AddDiagonals adds the sums of the diagonals of a warp's products to `sums`. `shared` has room
  // for 16 rows of products.
  __device__ __forceinline__ void AddDiagonals(float* sums, float* shared, int blocks) const {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      if (j >= blocks) break;
#pragma unroll
      for (int right = 0; right < 2; ++right) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float* const to = shared + Sums::Row(2 * half) * kProductPitch + Sums::Column(right, 0);
          *reinterpret_cast<float2*>(to) =
              make_float2(values[j][right][2 * half], values[j][right][2 * half + 1]);
        }
      }
      __syncwarp();
      float sum = 0;
#pragma unroll
      for (int row = 0; row < kEdge; ++row) {
        const int column = lane - (kEdge - 1) + row;
        if (static_cast<unsigned>(column) < kEdge) sum += shared[row * kProductPitch + column];
      }
      if (lane < 2 * kEdge - 1) sums[j * kEdge + lane] += sum;
      __syncwarp();
    }
  }
};

template <typename T, bool kNct, int kBlocks>
__global__ void __launch_bounds__(kChannelThreads, kBlocks == kShortBlocks && !kNct ? 3 : 2)
    KernelGradChannels(const __grid_constant__ ChannelParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  uint32_t block = blockIdx.x;
  const int group = p.groups.DivMod(block);
  const int first_channel = p.channel_blocks.DivMod(block) * p.tile.channels();
  const uint32_t split = p.splits.DivMod(block);
  const int64_t kept = block;
  const int first_block = max(0, group * p.group_blocks - 1);
  const int blocks = min(p.blocks, (group + 1) * p.group_blocks) - first_block;
  const int to_window = first_block * kEdge - p.mirrored - p.lead;

  const uint32_t base = SharedAddress(shared);
  float* const sums = reinterpret_cast<float*>(shared + kStages<kNct> * p.stage_bytes);
  float* const own_products =
      sums + p.tile.channels() * p.sums + threadIdx.x / kWarp * kEdge * kProductPitch;
  Products<kKeepsProducts<kNct, kBlocks> ? kBlocks : 0> kept_products;
  const int lane = threadIdx.x % kWarp;
  for (int i = threadIdx.x; i < p.tile.channels() * p.sums; i += kChannelThreads) sums[i] = 0;
  __syncthreads();

  const T* const x = static_cast<const T*>(p.call.x) + p.call.kept.Offset(kept, Backward::kX);
  const T* const g = static_cast<const T*>(p.call.g) + p.call.kept.Offset(kept, Backward::kG);
  const auto stage = [&](uint32_t index, int buffer) {
    if (index < p.items) {
      uint32_t entry = index;
      const int first = p.tiles.DivMod(entry) * p.tile.steps;
      const uint32_t to = base + buffer * p.stage_bytes;
      StageChannels<T, kNct>(to, p.own_pitch, x + p.call.summed.Offset(entry, Backward::kX), first,
                             p.tile.steps, p.tile, p.time, p.channels, first_channel);
      StageChannels<T, kNct>(to + p.own_bytes, p.window_pitch,
                             g + p.call.summed.Offset(entry, Backward::kG), first + to_window,
                             p.window_steps, p.tile, p.time, p.channels, first_channel);
    }
    CommitCopies();
  };
  int buffer = 0;
  if constexpr (kStages<kNct> == 2) stage(split, 0);
#pragma unroll 1
  for (uint32_t index = split; index < p.items; index += p.splits.divisor()) {
    if constexpr (kStages<kNct> == 2) {
      stage(index + p.splits.divisor(), buffer ^ 1);
    } else {
      stage(index, 0);
    }
    WaitCopies<kStages<kNct> - 1>();
    Synchronize<kNct>();
    uint32_t entry = index;
    const int first_step = p.tiles.DivMod(entry) * p.tile.steps;
    const uint32_t staged = base + buffer * p.stage_bytes;
#pragma unroll 1
    for (int c = threadIdx.x / kWarp; c < p.tile.channels(); c += kChannelWarps) {
      if (first_channel + c >= p.channels) break;
      const Rows<T> own_rows(staged + c * p.own_pitch);
      const Rows<T> window(staged + p.own_bytes + c * p.window_pitch);
      float* const channel_sums = sums + c * p.sums;
      // The sums of a tile start from zero and are added with rounding: tensor cores truncate.
      Products<kBlocks> products;
#pragma unroll 1
      for (int part = 0; part < p.tile.parts(); ++part) {
        const Left<T> left = own_rows.LoadTransposedLeft(part * kEdge);
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
          if (j >= blocks) break;
          const Rights<T> rights = window.LoadRights(part * kEdge, j);
          Multiply<T>(products.values[j][0], left, rights, 0);
          Multiply<T>(products.values[j][1], left, rights, 1);
        }
      }
      bool are_finite = true;
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) are_finite &= AreFinite(products.values[j]);
      if (__any_sync(0xffffffff, !are_finite)) {
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
          for (int right = 0; right < 2; ++right) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int step = Sums::Row(i), entry = j * kEdge + Sums::Column(right, i);
              float sum = 0;
              if (j < blocks) {
#pragma unroll 1
                for (int at = 0; at < p.tile.steps; at += kEdge) {
                  const int t = first_step + at + step, s = first_step + at + entry + to_window;
                  if (t < p.time && static_cast<unsigned>(s) < static_cast<unsigned>(p.time)) {
                    sum += own_rows.At(at + step) * window.At(at + entry);
                  }
                }
              }
              products.values[j][right][i] = sum;
            }
          }
        }
      }
      if constexpr (kKeepsProducts<kNct, kBlocks>) {
        kept_products.Add(products);
      } else {
        products.AddDiagonals(channel_sums, own_products, blocks);
      }
      if (p.call.dbias != nullptr && group == p.bias_group) {
        const int own = p.mirrored + p.lead - first_block * kEdge;
        float sum = 0;
        for (int step = lane; step < min(p.tile.steps, p.time - first_step); step += kWarp) {
          sum += window.At(own + step);
        }
#pragma unroll
        for (int distance = kWarp / 2; distance > 0; distance /= 2) {
          sum += __shfl_xor_sync(0xffffffff, sum, distance);
        }
        if (lane == 0) channel_sums[p.sums - 1] += sum;
      }
    }
    Synchronize<kNct>();
    if constexpr (kStages<kNct> == 2) buffer ^= 1;
  }

  WaitCopies<0>();
  if constexpr (kKeepsProducts<kNct, kBlocks>) {
    // A tile has as many channels as a block has warps.
    kept_products.AddDiagonals(sums + threadIdx.x / kWarp * p.sums, own_products, blocks);
  }
  __syncthreads();
  const int64_t first_row = (kept * p.splits.divisor() + split) * (p.taps + 1);
  // Neighbouring threads have neighbouring channels. A group has the diagonals from its own first
  // one on.
  const int first_own = group * p.group_blocks * kEdge;
  for (int i = threadIdx.x; i < p.group_blocks * kEdge * p.tile.channels(); i += kChannelThreads) {
    const int c = i & (p.tile.channels() - 1);
    const int diagonal = first_own + (i >> (3 + p.tile.octet_bits));
    const int tap = p.taps - 1 - (diagonal - p.lead - (kEdge - 1));
    if (static_cast<unsigned>(tap) < static_cast<unsigned>(p.taps) &&
        first_channel + c < p.channels) {
      p.partials[(first_row + tap) * p.channels + first_channel + c] =
          sums[c * p.sums + diagonal - first_block * kEdge];
    }
  }
  if (p.call.dbias != nullptr && group == p.bias_group) {
    for (int c = threadIdx.x; c < min(p.tile.channels(), p.channels - first_channel);
         c += kChannelThreads) {
      p.partials[(first_row + p.taps) * p.channels + first_channel + c] =
          sums[c * p.sums + p.sums - 1];
    }
  }
}

struct ChannelPlan {
  int64_t blocks, group_blocks, groups;
  ChannelTile tile;
  int64_t window_steps, own_pitch, window_pitch, sums, shared_bytes, tiles, channel_blocks, items,
      splits;
  int64_t grid;

  explicit ChannelPlan(const Gradients& gradients) {
    const Backward& call = gradients.call;
    const Geometry& g = call.geometry;
    const bool is_nct = g.data_format == DataFormat::kNCT;
    blocks = CountTapBlocks(g, Mirrored(g));
    // A single group has all diagonals, those of the last block's end included.
    group_blocks = blocks <= kMaxGroupBlocks ? blocks + 1 : kGroupBlocks;
    groups = CeilDiv(blocks + 1, group_blocks);
    const int64_t blocks_of_group = std::min<int64_t>(blocks, kMaxGroupBlocks);
    // One block more, so that the window has the steps of x for dbias.
    const int64_t more = blocks_of_group * kEdge;
    const int64_t all_steps = CeilDiv(g.time, kPartSteps) * kPartSteps;
    const int64_t max_steps = (is_nct ? 4 : blocks <= kShortBlocks ? 2 : 1) * kPartSteps;
    tile = {static_cast<int>(std::min(max_steps, all_steps)), is_nct ? 0 : 2};
    window_steps = tile.steps + more;
    own_pitch = 2 * tile.steps;
    window_pitch = 2 * window_steps;
    // A last sum is that of dbias, or none, for an even number.
    sums = (blocks_of_group + 1) * kEdge + 2;
    const int64_t stage_bytes = tile.channels() * (own_pitch + window_pitch);
    shared_bytes = (is_nct ? kStages<true> : kStages<false>)*stage_bytes +
                   sizeof(float) * (tile.channels() * sums + kChannelWarps * kEdge * kProductPitch);
    tiles = CeilDiv(g.time, tile.steps);
    channel_blocks = CeilDiv(g.channels, tile.channels());
    items = call.summed.size() * tiles;
    splits = std::min(gradients.splits, items);
    grid = call.kept.size() * splits * channel_blocks * groups;
  }
};

template <typename T, bool kNct, int kBlocks>
cudaError_t LaunchKernelGradChannels(cudaStream_t stream, const Gradients& gradients,
                                     const ChannelPlan& plan, int opt_in_limit) {
  const Backward& call = gradients.call;
  const Geometry& g = call.geometry;
  const int mirrored = static_cast<int>(Mirrored(g)), lead = WindowLead(g, Mirrored(g));
  const int own_pitch = static_cast<int>(plan.own_pitch);
  const int window_pitch = static_cast<int>(plan.window_pitch);
  const ChannelParams params{
      .call = call,
      .time = static_cast<int>(g.time),
      .channels = static_cast<int>(g.channels),
      .taps = static_cast<int>(g.taps),
      .mirrored = mirrored,
      .lead = lead,
      .blocks = static_cast<int>(plan.blocks),
      .group_blocks = static_cast<int>(plan.group_blocks),
      .bias_group = static_cast<int>((mirrored + lead) / kEdge / plan.group_blocks),
      .window_steps = static_cast<int>(plan.window_steps),
      .own_pitch = own_pitch,
      .window_pitch = window_pitch,
      .own_bytes = own_pitch * plan.tile.channels(),
      .stage_bytes = (own_pitch + window_pitch) * plan.tile.channels(),
      .sums = static_cast<int>(plan.sums),
      .tile = plan.tile,
      .items = static_cast<uint32_t>(plan.items),
      .tiles = FastDivider(plan.tiles),
      .groups = FastDivider(plan.groups),
      .channel_blocks = FastDivider(plan.channel_blocks),
      .splits = FastDivider(plan.splits),
      .partials = static_cast<float*>(gradients.partials),
  };
  const cudaError_t error =
      jaxops::cuda::Launch(KernelGradChannels<T, kNct, kBlocks>, plan.grid, kChannelThreads,
                           plan.shared_bytes, stream, params, opt_in_limit);
  if (error != cudaSuccess) return error;
  return AddPartialSums(stream, call, {gradients.partials, plan.splits});
}

}  // namespace
}  // namespace mma

bool CanRunMmaChannels(const Gradients& gradients, const Device& device) {
  if (!mma::CanTileChannels(gradients.call.geometry, gradients.call.dtype)) return false;
  const mma::ChannelPlan plan(gradients);
  return plan.shared_bytes <= device.shared_bytes && plan.items <= INT32_MAX &&
         plan.grid <= kMaxBlocks;
}

cudaError_t LaunchMmaChannels(cudaStream_t stream, const Gradients& gradients,
                              const Device& device) {
  const Backward& call = gradients.call;
  const mma::ChannelPlan plan(gradients);
  const int limit = device.shared_bytes;
  return DispatchBool(call.geometry.data_format == DataFormat::kNCT, [&](auto is_nct) {
    return DispatchBool(plan.blocks <= mma::kShortBlocks, [&](auto is_short) {
      constexpr int kBlocks = is_short.value ? mma::kShortBlocks : mma::kMaxGroupBlocks;
      if (call.dtype == DType::kF16) {
        return mma::LaunchKernelGradChannels<__half, is_nct.value, kBlocks>(stream, gradients, plan,
                                                                            limit);
      }
      return mma::LaunchKernelGradChannels<__nv_bfloat16, is_nct.value, kBlocks>(stream, gradients,
                                                                                 plan, limit);
    });
  });
}

}  // namespace jaxops::lightweight_conv::cuda
