// This header has the kernels that compute the gradients of lightweight convolution with long
// filters on tensor cores.
//
// As in `backward.cuh`, both gradients read g through the window of the flipped taps. Filters of up
// to kFusedBlocks blocks compute both in one pass over x and g. Longer filters are cut into groups
// of kFusedBlocks blocks, whose sums are independent, and their input gradient is a forward
// convolution.
//
// The sums of a few steps start from zero and are added in float32 with rounding, because tensor
// cores truncate. If one of the sums is not finite, it is computed again, pair by pair: at the end
// of an array, zeros in shared memory may have been multiplied by infinities or NaNs that belong to
// no pair, and an infinity of float32 has no low part.
//
// With segments, the pairs of steps of two segments are left out of the sums, and the input
// gradient is made as the value is (`mma/forward.cuh`).
#ifndef JAXOPS_CUDA_LIGHTWEIGHT_CONV_MMA_BACKWARD_CUH_
#define JAXOPS_CUDA_LIGHTWEIGHT_CONV_MMA_BACKWARD_CUH_

#include "cuda/lightweight_conv/families.h"
#include "cuda/lightweight_conv/mma/mma.cuh"

namespace jaxops::lightweight_conv::cuda::mma {
namespace {

constexpr int kFusedBlocks = 3;

// A warp has this number of steps of a tile.
constexpr int kWarpSteps = 64;

// A multiprocessor of a large GPU has shared memory and registers for this number of blocks.
constexpr int ResidentBlocks(int element_bytes) { return element_bytes == 4 ? 3 : 4; }
template <typename T>
constexpr int kResident = ResidentBlocks(sizeof(T));

struct BackwardParams {
  Backward call;
  int time, channels, taps, dilation;
  int mirrored, lead;
  int own;         // the step of the window that is a step's own g, for dbias
  uint32_t items;  // tiles of every phase of every summed batch entry
  FastDivider tiles, phases, tap_groups, channel_blocks, splits;
  FastDivider depth;       // channels of a head
  FastDivider head_edges;  // channels of a head in units of kEdge
  TileShape shape;
  float* partials;       // (kept, splits, channels / kEdge, tap groups, diagonals)
  float* bias_partials;  // (kept, splits, channels)
};

// PairSums holds the products of 16 steps (rows) and 16 kBlocks steps of a window (columns).
template <int kBlocks>
struct PairSums {
  float values[2 * kBlocks][4] = {};

  __device__ static int Row(int i) { return Sums::Row(i); }
  __device__ static int Column(int part, int i) { return part * 8 + Sums::Column(0, i); }

  __device__ __forceinline__ void Add(const PairSums& other) {
#pragma unroll
    for (int part = 0; part < 2 * kBlocks; ++part) {
#pragma unroll
      for (int i = 0; i < 4; ++i) values[part][i] += other.values[part][i];
    }
  }
};

// A group of taps has this number of diagonals.
constexpr int CountDiagonals(int blocks) { return blocks * kEdge + kEdge - 1; }
template <int kBlocks>
inline constexpr int kDiagonals = CountDiagonals(kBlocks);
// A row of pairs in shared memory has an odd number of floats, so that diagonals are in different
// banks.
constexpr int PairPitch(int blocks) { return blocks * kEdge + 1; }
template <int kBlocks>
inline constexpr int kPairPitch = PairPitch(kBlocks);

// A block keeps its channels and its group of taps; while the block computes one tile, the next
// tile is in flight.
template <typename T, typename W, bool kNct, int kBlocks, bool kDx, bool kSegments>
__global__ void __launch_bounds__(kThreads, kResident<T> - kSegments)
    BackwardMma(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  // The sums of 16 steps are complete by themselves, not those of a tile.
  constexpr bool kSumsSteps = sizeof(T) == 4 || kSegments;
  // Groups of taps vary fastest, so that blocks that read the same data are resident together.
  uint32_t block = blockIdx.x;
  const int tap_group = p.tap_groups.DivMod(block);
  const int channel_block = p.channel_blocks.DivMod(block);
  const uint32_t split = p.splits.DivMod(block);
  const int64_t kept = block;
  const int first_channel = channel_block * p.shape.channels;
  const WarpPlace place(p.shape);
  const bool has_channels = first_channel + place.channel < p.channels;
  const int channel = min(first_channel + place.channel, p.channels - kEdge);
  const int group_step = tap_group * kBlocks * kEdge;
  const bool wants_dbias = p.call.dbias != nullptr && tap_group == 0;

  const T* const x = static_cast<const T*>(p.call.x) + p.call.kept.Offset(kept, Backward::kX);
  const T* const g = static_cast<const T*>(p.call.g) + p.call.kept.Offset(kept, Backward::kG);
  const int own_bytes = p.shape.own_bytes;
  const int stage_bytes = own_bytes + p.shape.window_bytes;
  // The distance is from the time step of a step to the time step of its first tap.
  const int to_window = group_step * p.dilation - p.mirrored - p.lead;

  const W* const weights = static_cast<const W*>(p.call.weight) +
                           p.call.kept.Offset(kept, Backward::kWeight) +
                           int64_t{p.depth.Quotient(channel)} * p.taps;
  const auto tap = [&](int j) { return Widen(weights[p.taps - 1 - j]); };
  Toeplitz<T, W, kBlocks> filter;
  if constexpr (kDx) filter.Read(p.taps, p.lead, tap);

  PairSums<kBlocks> dweight;
  float dbias = 0;  // half a warp shares its channels, and each lane has every other step
  const auto stage = [&](uint32_t index, int buffer) {
    if (index < p.items) {
      const Item item(p, index);
      const uint32_t base = SharedAddress(shared) + buffer * stage_bytes;
      const int first = item.phase + item.first_step * p.dilation;
      Stage<T, kNct>(base, p.shape.own_pitch, x + p.call.summed.Offset(item.entry, Backward::kX),
                     first, p.dilation, p.shape.steps, p.shape, p.time, p.channels, first_channel);
      Stage<T, kNct>(base + own_bytes, p.shape.window_pitch,
                     g + p.call.summed.Offset(item.entry, Backward::kG), first + to_window,
                     p.dilation, p.shape.window_steps, p.shape, p.time, p.channels, first_channel);
    }
    CommitCopies();
  };
  stage(split, 0);
  int buffer = 0;
#pragma unroll 1
  for (uint32_t index = split; index < p.items; index += p.splits.divisor(), buffer ^= 1) {
    stage(index + p.splits.divisor(), buffer ^ 1);
    WaitCopies<1>();
    __syncthreads();
    const Item item(p, index);
    const uint32_t base = SharedAddress(shared) + buffer * stage_bytes;
    const Tile<T, kNct> own_tile(base, p.shape.own_pitch, place.step, place.channel);
    const Tile<T, kNct> window(base + own_bytes, p.shape.window_pitch, place.step, place.channel);
    const int steps = PhaseSteps(p.time, p.dilation, item.phase);
    const int step = item.first_step + place.step;
    const int count = has_channels ? min(kWarpSteps, steps - step) : 0;
    const auto segments = [&] {
      if constexpr (kSegments) {
        const int first = item.phase + step * p.dilation;
        return Segments(p.call.starts + p.call.kept.Offset(kept, Backward::kStarts) +
                            p.call.summed.Offset(item.entry, Backward::kStarts),
                        first, first + to_window, p.dilation, p.time);
      } else {
        return NoSegments();
      }
    }();
    const auto output = [&] {
      return Output<T, kNct>(static_cast<T*>(p.call.dx) + p.call.kept.Offset(kept, Backward::kDx) +
                                 p.call.summed.Offset(item.entry, Backward::kDx),
                             step, channel, item.phase, p.dilation, steps, p.time, p.channels);
    };
    if (wants_dbias) {
      for (int own = threadIdx.x / kEdge % 2; own < count; own += 2) {
        dbias += window.At(own + p.own, threadIdx.x % kEdge);
      }
      __syncwarp();
    }

    Probe<T> x_probe, g_probe;
    PairSums<kBlocks> pairs;
    // This loop multiplies pair by pair, for the steps in [from, to).
    const auto add_pairs = [&](int from, int to) {
      pairs = {};
#pragma unroll 1
      for (int own = from; own < to; own += kEdge) {
#pragma unroll
        for (int part = 0; part < 2 * kBlocks; ++part) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = own + PairSums<kBlocks>::Row(i);
            const int column = own + PairSums<kBlocks>::Column(part, i);
            const int t = item.phase + (step + column) * p.dilation + to_window;
            if (row < count && static_cast<unsigned>(t) < static_cast<unsigned>(p.time) &&
                segments.IsPair(row, column)) {
#pragma unroll 1
              for (int c = 0; c < kEdge; ++c) {
                pairs.values[part][i] += own_tile.At(row, c) * window.At(column, c);
              }
            }
          }
        }
      }
      __syncwarp();
    };
    Output<T, kNct> out = output();
    bool are_finite = true;
    if constexpr (kDx) are_finite = filter.IsFinite();
#pragma unroll 1
    for (int own = 0; own < count; own += kEdge) {
      const Left<T> left = own_tile.template LoadLeft<Over::kChannels>(own);
      Meet(x_probe, left);
      Sums sums;
      if constexpr (kSumsSteps) pairs = {};
      const bool is_one = segments.AreOne(own, kBlocks);
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const Rights<T> rights = window.template LoadRights<Over::kChannels>(own + j * kEdge);
        if (own == 0 || j == kBlocks - 1) Meet(g_probe, rights);
#pragma unroll
        for (int right = 0; right < 2; ++right) {
          Multiply<T>(pairs.values[2 * j + right], left, rights, right);
        }
        if constexpr (kDx) {
          if (is_one) {
            MultiplyTaps<T, W, kNct>(sums.values, filter, j, LoadWindow(window, own + j * kEdge));
          }
        }
      }
      if constexpr (kSegments) {
        if (!is_one) {
#pragma unroll
          for (int part = 0; part < 2 * kBlocks; ++part) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int row = own + PairSums<kBlocks>::Row(i);
              const int column = own + PairSums<kBlocks>::Column(part, i);
              if (!segments.IsPair(row, column)) pairs.values[part][i] = 0;
            }
          }
          if constexpr (kDx) segments.AddProducts(sums, filter, window, own);
        }
      }
      if constexpr (kSumsSteps) {
        if (__any_sync(0xffffffff, !AreFinite(pairs.values))) add_pairs(own, own + kEdge);
        dweight.Add(pairs);
      }
      if constexpr (kDx && sizeof(T) == 4) are_finite &= AreFinite(sums.values);
      if constexpr (kDx) out.Write(sums);
    }
    // dx does not depend on x, nor on any product with x.
    const bool is_clear = !__any_sync(0xffffffff, !g_probe.IsClear() || !are_finite);
    if constexpr (!kSumsSteps) {
      if (__any_sync(0xffffffff, !x_probe.IsClear()) || !is_clear) add_pairs(0, count);
      dweight.Add(pairs);
    }
    if constexpr (kDx) {
      if (!is_clear) {
        Output<T, kNct> again = output();
#pragma unroll 1
        for (int own = 0; own < count; own += kEdge) {
          Sums sums;
          sums.AddTaps(window, own, p.taps, p.lead, segments, tap);
          again.Write(sums);
        }
      }
    }
    __syncthreads();
  }

  // The sums along the diagonals are over all warps of the same channels.
  WaitCopies<0>();
  float* const pairs = reinterpret_cast<float*>(shared);
  constexpr int kPitch = kPairPitch<kBlocks>;
#pragma unroll
  for (int part = 0; part < 2 * kBlocks; ++part) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = threadIdx.x / kWarp * kEdge + PairSums<kBlocks>::Row(i);
      pairs[row * kPitch + PairSums<kBlocks>::Column(part, i)] = dweight.values[part][i];
    }
  }
  float* const biases = pairs + kWarps * kEdge * kPitch;
  dbias += __shfl_xor_sync(0xffffffff, dbias, kEdge);
  if (threadIdx.x % kWarp < kEdge) {
    biases[threadIdx.x / kWarp * kEdge + threadIdx.x % kEdge] = dbias;
  }
  __syncthreads();
  const int64_t slot = kept * p.splits.divisor() + split;
  const int time_warps = 1 << p.shape.time_bits;
  const int block_channels = min(p.shape.channels, p.channels - first_channel);
  for (int i = threadIdx.x; i < block_channels / kEdge * kDiagonals<kBlocks>; i += kThreads) {
    const int of_channels = i / kDiagonals<kBlocks>;
    const int diagonal = i % kDiagonals<kBlocks>;
    float sum = 0;
    for (int row = 0; row < time_warps * kEdge; ++row) {
      const int column = diagonal - (kEdge - 1) + row % kEdge;
      if (static_cast<unsigned>(column) < kBlocks * kEdge) {
        sum += pairs[(of_channels * time_warps * kEdge + row) * kPitch + column];
      }
    }
    const int64_t edge = slot * (p.channels / kEdge) + first_channel / kEdge + of_channels;
    p.partials[(edge * p.tap_groups.divisor() + tap_group) * kDiagonals<kBlocks> + diagonal] = sum;
  }
  if (wants_dbias) {
    for (int c = threadIdx.x; c < block_channels; c += kThreads) {
      float sum = 0;
      for (int warp = 0; warp < time_warps; ++warp) {
        sum += biases[((c / kEdge) * time_warps + warp) * kEdge + c % kEdge];
      }
      p.bias_partials[slot * p.channels + first_channel + c] = sum;
    }
  }
}

// --- the sum of the partial sums -----------------------------------------------------------------

constexpr int kAddThreads = 512;

// A block computes the gradient of 32 taps of a head, one tap per lane; the warps share the partial
// sums. The blocks after those compute dbias of 32 channels each.
template <int kBlocks>
__global__ void __launch_bounds__(kAddThreads)
    AddPartialsMma(const __grid_constant__ BackwardParams p) {
  constexpr int kAddWarps = kAddThreads / kWarp;
  __shared__ float sums[kAddWarps][kWarp];
  const Geometry& geometry = p.call.geometry;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int splits = p.splits.divisor();
  const int edges = p.channels / kEdge;
  const uint32_t head_edges = p.head_edges.divisor();
  const int tap_blocks = CeilDiv(p.taps, kWarp);
  const int64_t weight_blocks = p.call.kept.size() * geometry.heads * tap_blocks;
  const bool is_weight = blockIdx.x < weight_blocks;
  float total = 0;
  int64_t kept, column;
  int tap;
  if (is_weight) {
    tap = static_cast<int>(blockIdx.x % tap_blocks) * kWarp + lane;
    column = blockIdx.x / tap_blocks % geometry.heads;
    kept = blockIdx.x / tap_blocks / geometry.heads;
    const int groups = p.tap_groups.divisor();
    const int place = tap + p.lead + kEdge - 1;  // index of the diagonal in the first group
    const int last_group = place / (kBlocks * kEdge);
    const int first_group =
        place < kDiagonals<kBlocks> ? 0 : CeilDiv(place - kDiagonals<kBlocks> + 1, kBlocks * kEdge);
    if (tap < p.taps) {
#pragma unroll 4
      for (uint32_t i = warp; i < splits * head_edges; i += kAddWarps) {
        uint32_t split = i;
        const int64_t of_head = p.head_edges.DivMod(split);
        const int64_t edge = (kept * splits + split) * edges + column * head_edges + of_head;
        for (int group = first_group; group <= last_group; ++group) {
          total += p.partials[(edge * groups + group) * kDiagonals<kBlocks> + place -
                              group * kBlocks * kEdge];
        }
      }
    }
  } else {
    const int64_t entry = (blockIdx.x - weight_blocks) * kWarp + lane;
    kept = entry / p.channels;
    column = entry % p.channels;
    tap = 0;
    if (kept < p.call.kept.size()) {
#pragma unroll 4
      for (int split = warp; split < splits; split += kAddWarps) {
        total += p.bias_partials[(kept * splits + split) * p.channels + column];
      }
    }
  }
  sums[warp][lane] = total;
  __syncthreads();
  if (warp != 0) return;
  total = 0;
#pragma unroll
  for (int i = 0; i < kAddWarps; ++i) total += sums[i][lane];
  if (is_weight) {
    if (tap < p.taps) {
      StoreAs(p.call.dweight, (kept * geometry.heads + column) * p.taps + p.taps - 1 - tap,
              p.call.weight_dtype, total);
    }
  } else if (kept < p.call.kept.size()) {
    StoreAs(p.call.dbias, kept * geometry.channels + column, p.call.bias_dtype, total);
  }
}

// --- launches ------------------------------------------------------------------------------------

struct Plan {
  int group_blocks;  // blocks of 16 steps in a group's window: the kernel's template argument
  TileShape shape;
  int64_t phases, tiles, channel_blocks;
  int64_t groups;  // groups of taps
  int64_t items;   // tiles of every phase of every summed batch entry
  int64_t room;    // splits for which the work space has room
  int64_t splits;
  int64_t sums;  // sums of taps per split
  int64_t shared_bytes;
  int64_t blocks, add_blocks;  // blocks of the grids
};

Plan MakePlan(const Gradients& gradients) {
  const Backward& call = gradients.call;
  const Geometry& g = call.geometry;
  const int element_bytes = static_cast<int>(jaxops::cuda::SizeOf(call.dtype));
  const int64_t kept = call.kept.size();
  Plan plan;
  plan.group_blocks = RoundBlocks(CountTapBlocks(g, Mirrored(g)), kFusedBlocks);
  plan.shape = TileShape::Of(g, element_bytes, kWarpSteps, plan.group_blocks);
  plan.phases = std::min(g.dilation, g.time);
  plan.tiles = CeilDiv(CeilDiv(g.time, g.dilation), plan.shape.steps);
  plan.channel_blocks = CeilDiv(g.channels, plan.shape.channels);
  plan.groups = CeilDiv(CountTapBlocks(g, Mirrored(g)), plan.group_blocks);
  plan.items = call.summed.size() * plan.phases * plan.tiles;
  // There are as many splits as the GPU holds and the work space has room for. Their numbers of
  // items differ by at most one.
  plan.sums = g.channels / kEdge * plan.groups * CountDiagonals(plan.group_blocks);
  plan.room =
      gradients.splits * (g.taps + 1) * g.channels / (plan.sums + (call.dbias ? g.channels : 0));
  const int64_t wanted = std::max<int64_t>(
      1, kProcessors * ResidentBlocks(element_bytes) / (kept * plan.channel_blocks * plan.groups));
  const int64_t splits = std::max<int64_t>(1, std::min({wanted, plan.room, plan.items}));
  plan.splits = CeilDiv(plan.items, CeilDiv(plan.items, splits));
  const int64_t tile_bytes = 2 * (plan.shape.own_bytes + plan.shape.window_bytes);
  const int64_t pair_bytes = kWarps * kEdge * (PairPitch(plan.group_blocks) + 1) * sizeof(float);
  plan.shared_bytes = std::max(tile_bytes, pair_bytes);
  plan.blocks = kept * plan.splits * plan.channel_blocks * plan.groups;
  plan.add_blocks = kept * g.heads * CeilDiv(g.taps, kWarp) +
                    (call.dbias ? CeilDiv(kept * g.channels, kWarp) : 0);
  return plan;
}

template <typename T, typename W, bool kNct, int kBlocks, bool kDx, bool kSegments>
cudaError_t Launch(cudaStream_t stream, const Gradients& gradients, const Plan& plan) {
  const Backward& call = gradients.call;
  const Geometry& g = call.geometry;
  BackwardParams params;
  params.call = call;
  params.time = static_cast<int>(g.time);
  params.channels = static_cast<int>(g.channels);
  params.taps = static_cast<int>(g.taps);
  params.dilation = static_cast<int>(g.dilation);
  params.mirrored = static_cast<int>(Mirrored(g));
  params.lead = WindowLead(g, Mirrored(g));
  params.own = params.mirrored / params.dilation + params.lead;
  params.items = static_cast<uint32_t>(plan.items);
  params.tiles = FastDivider(plan.tiles);
  params.phases = FastDivider(plan.phases);
  params.tap_groups = FastDivider(plan.groups);
  params.channel_blocks = FastDivider(plan.channel_blocks);
  params.splits = FastDivider(plan.splits);
  params.depth = FastDivider(g.channels / g.heads);
  params.head_edges = FastDivider(g.channels / g.heads / kEdge);
  params.shape = plan.shape;
  params.partials = static_cast<float*>(gradients.partials);
  params.bias_partials = params.partials + call.kept.size() * plan.splits * plan.sums;
  const cudaError_t error =
      jaxops::cuda::Launch(BackwardMma<T, W, kNct, kBlocks, kDx, kSegments>, plan.blocks, kThreads,
                           plan.shared_bytes, stream, params);
  if (error != cudaSuccess) return error;
  return jaxops::cuda::Launch(AddPartialsMma<kBlocks>, plan.add_blocks, kAddThreads, 0, stream,
                              params);
}

// HasOwn says whether a step's own g is in the window of the first group of taps, for dbias.
bool HasOwn(const Geometry& g) {
  const int64_t mirrored = Mirrored(g);
  const int64_t blocks = std::min<int64_t>(CountTapBlocks(g, mirrored), kFusedBlocks);
  return mirrored % g.dilation == 0 &&
         mirrored / g.dilation + WindowLead(g, mirrored) + kEdge <= blocks * kEdge;
}

template <bool kSegments>
cudaError_t LaunchBackward(cudaStream_t stream, const Gradients& gradients) {
  const Backward& call = gradients.call;
  const Plan plan = MakePlan(gradients);
  const bool makes_dx = call.dx != nullptr && ComputesInputGradMma(call);
  // The kernel gradient alone does not depend on the filters' type.
  return Dispatch<kFusedBlocks>(
      call.geometry.data_format, plan.group_blocks, call.dtype,
      makes_dx ? call.weight_dtype : call.dtype,
      [&](auto element, auto weight, auto is_nct, auto blocks) {
        using T = decltype(element);
        using W = decltype(weight);
        if (makes_dx) {
          return Launch<T, W, is_nct.value, blocks.value, true, kSegments>(stream, gradients, plan);
        }
        return Launch<T, T, is_nct.value, blocks.value, false, kSegments>(stream, gradients, plan);
      });
}

}  // namespace
}  // namespace jaxops::lightweight_conv::cuda::mma

#endif  // JAXOPS_CUDA_LIGHTWEIGHT_CONV_MMA_BACKWARD_CUH_
