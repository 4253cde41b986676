// These kernels compute lightweight convolution with segments and states for all filters: every tap
// is read through the cache. PackedStateSteps computes only the steps that read states of segments,
// with filters in shared memory.
//
// The fastest varying dimension of an array, channels (NTC) or time (NCT), belongs to neighbouring
// threads. Taps are added to the bias in ascending order, as by all kernels of up to 8 taps, so
// that a sequence has the same bits in parts as whole.
#include "cuda/common/activation.cuh"
#include "cuda/lightweight_conv/backward.cuh"
#include "cuda/lightweight_conv/families.h"
#include "cuda/lightweight_conv/packed.cuh"

namespace jaxops::lightweight_conv::cuda {
namespace {

using jaxops::cuda::Activate;

// --- forward -------------------------------------------------------------------------------------

struct ForwardPlan {
  ShortNtcTile tile;  // its lanes are along the fastest dimension, its groups along the other one
  int64_t lane_blocks, group_blocks;
  int64_t blocks;

  // The kernel computes the first `steps` steps of each sequence.
  ForwardPlan(const Forward& call, int64_t steps) : tile(Fastest(call.geometry, steps), 1) {
    const Geometry& g = call.geometry;
    lane_blocks = CeilDiv(Fastest(g, steps), tile.lanes());
    group_blocks = CeilDiv(g.data_format == DataFormat::kNTC ? steps : g.channels, tile.groups());
    blocks = call.batch.size() * lane_blocks * group_blocks;
  }

  static int64_t Fastest(const Geometry& g, int64_t steps) {
    return g.data_format == DataFormat::kNTC ? g.channels : steps;
  }
};

struct ForwardParams {
  Forward call;
  States states;
  int time, steps, channels, taps, padding, dilation;
  int behind;  // taps that meet a step no later than their own
  bool is_ntc;
  ShortNtcTile tile;
  FastDivider lane_blocks, group_blocks;
  FastDivider depth;  // channels of a head
};

template <typename T>
__global__ void __launch_bounds__(kNtcThreads, 4)
    PackedForward(const __grid_constant__ ForwardParams p) {
  using Acc = Accumulator<T>;
  const Forward& call = p.call;
  uint32_t block = blockIdx.x;
  const int lane =
      p.lane_blocks.DivMod(block) * p.tile.lanes() + (threadIdx.x & (p.tile.lanes() - 1));
  const int group =
      p.group_blocks.DivMod(block) * p.tile.groups() + (threadIdx.x >> p.tile.lane_bits);
  const int64_t batch = block;
  const int channel = p.is_ntc ? lane : group;
  const int t = p.is_ntc ? group : lane;
  if (channel >= p.channels || t >= p.steps) return;

  const int64_t advance = p.is_ntc ? p.channels : 1;
  const int64_t column = p.is_ntc ? channel : int64_t{channel} * p.time;
  const T* x = static_cast<const T*>(call.x) + call.batch.Offset(batch, Forward::kX) + column;
  const int32_t* starts = nullptr;
  if (call.starts != nullptr) starts = call.starts + call.batch.Offset(batch, Forward::kStarts);
  const int start = starts == nullptr ? -p.padding : starts[t];
  Acc sums[1] = {};
  if (call.bias != nullptr) {
    const int64_t at = call.batch.Offset(batch, Forward::kBias) + channel;
    WithElements(call.bias, call.bias_dtype,
                 [&](const auto* biases) { sums[0] = static_cast<Acc>(Widen(biases[at])); });
  }
  WithElements(call.weight, call.weight_dtype, [&](const auto* weights) {
    const auto* filter = weights + call.batch.Offset(batch, Forward::kWeight) +
                         int64_t{p.depth.Quotient(channel)} * p.taps;
    const int sign = call.flip_taps ? -1 : 1;
    if (call.flip_taps) filter += p.taps - 1;
    if (call.state != nullptr) {
      const int32_t* slots = nullptr;
      if (call.slots != nullptr) slots = call.slots + call.batch.Offset(batch, Forward::kSlots);
      p.states.ForEachTap<1, Acc>(slots, call.batch.Offset(batch, Forward::kState), t, start,
                                  channel, [&](int k, const Acc(&row)[1]) {
                                    sums[0] += static_cast<Acc>(Widen(filter[k * sign])) * row[0];
                                  });
    }
    const int first_row = t - p.padding;
    int k = CountTapsBefore(min(max(start, 0), t) - first_row, p.dilation);
#pragma unroll 4
    for (; k < p.behind; ++k) {
      const Acc row = Widen(x[(first_row + k * p.dilation) * advance]);
      sums[0] += static_cast<Acc>(Widen(filter[k * sign])) * row;
    }
    for (; k < p.taps; ++k) {
      const int s = first_row + k * p.dilation;
      if (s >= p.time || (starts != nullptr && starts[s] != start)) break;
      sums[0] += static_cast<Acc>(Widen(filter[k * sign])) * Widen(x[s * advance]);
    }
  });
  Activate(sums, call.activation);
  T* y = static_cast<T*>(call.y) + call.batch.Offset(batch, Forward::kY) + column;
  y[t * advance] = Narrow<T>(sums[0]);
}

// --- steps that read states of segments ----------------------------------------------------------

// A block has kWindow steps of kWarp vectors of channels, a warp kSteps of these.
constexpr int kSteps = 4;
constexpr int kWindow = kSteps * kNtcWarps;
static_assert(kWindow == kWarp);  // lane i of a warp looks at step i

// A thread has a vector of kStateVector channels, and loads kRowsInFlight rows at a time. For 16
// sequences of (4096,1024,16,31) f32 the kernel takes 10.3 us on an H200, with one row at a time
// 19.9, and with one step of one channel a thread 29.5.
constexpr int kStateVector = 4, kRowsInFlight = 8;

struct StateStepsParams {
  Forward call;
  int time, channels, taps;
  FastDivider channel_blocks, windows;
  FastDivider depth;  // channels of a head
  FastDivider tap_divider;
};

// Computes the steps whose taps read the state of their segment in a causal call without dilation.
// Neighbouring steps of a segment are computed together, so that a row is read once for all of
// them.
template <typename T>
__global__ void __launch_bounds__(kNtcThreads)
    PackedStateSteps(const __grid_constant__ StateStepsParams p) {
  using Acc = Accumulator<T>;
  constexpr int kV = kStateVector;
  const Forward& call = p.call;
  const int lane = threadIdx.x % kWarp, first_of_warp = threadIdx.x / kWarp * kSteps;
  uint32_t block = blockIdx.x;
  const int channel = (p.channel_blocks.DivMod(block) * kWarp + lane) * kV;
  const int window = p.windows.DivMod(block) * kWindow;
  const int64_t batch = block;
  const int reach = p.taps - 1;
  const int32_t* slots = call.slots + call.batch.Offset(batch, Forward::kSlots);
  int start = 0;
  bool reads_state = false;
  if (window + lane < p.time) {
    start = call.starts[call.batch.Offset(batch, Forward::kStarts) + window + lane];
    reads_state = window + lane - start < reach;
  }
  const uint32_t steps = __ballot_sync(0xffffffff, reads_state);
  if (steps == 0) return;

  // The filters of the block's channels, in the order of rows.
  extern __shared__ __align__(16) unsigned char shared[];
  Acc* const filters = reinterpret_cast<Acc*>(shared);
  const int first_channel = channel - lane * kV;
  const int last_channel = min(first_channel + kWarp * kV, p.channels) - 1;
  const int first_head = static_cast<int>(p.depth.Quotient(first_channel));
  const int heads = static_cast<int>(p.depth.Quotient(last_channel)) - first_head + 1;
  WithElements(call.weight, call.weight_dtype, [&](const auto* weights) {
    weights += call.batch.Offset(batch, Forward::kWeight) + int64_t{first_head} * p.taps;
    for (int i = threadIdx.x; i < heads * p.taps; i += kNtcThreads) {
      uint32_t head = i;
      const int k = static_cast<int>(p.tap_divider.DivMod(head));
      filters[static_cast<int>(head) * p.taps + (call.flip_taps ? reach - k : k)] =
          static_cast<Acc>(Widen(weights[i]));
    }
  });
  __syncthreads();
  const Acc* const filter =
      filters + (static_cast<int>(p.depth.Quotient(channel)) - first_head) * p.taps;
  const T* x = static_cast<const T*>(call.x) + call.batch.Offset(batch, Forward::kX) + channel;
  T* y = static_cast<T*>(call.y) + call.batch.Offset(batch, Forward::kY) + channel;
  uint32_t left = steps >> first_of_warp & ((1u << kSteps) - 1);
  while (left != 0) {
    // The next steps of one segment.
    const int next = __ffs(left) - 1;
    const int begin = __shfl_sync(0xffffffff, start, first_of_warp + next);
    int count = 0;
    while (left >> (next + count) & 1 &&
           __shfl_sync(0xffffffff, start, first_of_warp + next + count) == begin) {
      left ^= 1u << (next + count);
      ++count;
    }
    const int t = window + first_of_warp + next;
    const int slot = slots[t];
    // Steps without a state are complete: the kernel before has computed them.
    if (slot < 0 || slot >= call.num_slots || channel >= p.channels) continue;

    Acc sums[kSteps][kV] = {};
    if (call.bias != nullptr) {
      WithElements(call.bias, call.bias_dtype, [&](const auto* bias) {
        bias += call.batch.Offset(batch, Forward::kBias) + channel;
#pragma unroll
        for (int v = 0; v < kV; ++v) sums[0][v] = static_cast<Acc>(Widen(bias[v]));
      });
#pragma unroll
      for (int i = 1; i < kSteps; ++i) {
#pragma unroll
        for (int v = 0; v < kV; ++v) sums[i][v] = sums[0][v];
      }
    }
    // Row j is the one that the first tap of step t + j reads.
    const auto add_row = [&](int j, const auto& raw) {
      Acc row[kV];
      WidenAll(row, raw);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        // A tap that does not exist must not meet a row that is not finite.
        if (j < i || j > reach + i) continue;
        const Acc tap = filter[j - i];
#pragma unroll
        for (int v = 0; v < kV; ++v) sums[i][v] += tap * row[v];
      }
    };
    const int rows = reach + count;
    const int before = min(begin - (t - reach), rows);  // of the state
    WithElements(call.state, call.state_dtype, [&](const auto* state) {
      state += call.batch.Offset(batch, Forward::kState) +
               (int64_t{slot} * reach + t - begin) * p.channels + channel;
#pragma unroll kRowsInFlight
      for (int j = 0; j < before; ++j) add_row(j, LoadRaw<kV>(state + int64_t{j} * p.channels));
    });
    // A segment may begin before step 0.
#pragma unroll kRowsInFlight
    for (int j = max(before, reach - t); j < rows; ++j) {
      add_row(j, LoadRaw<kV>(x + int64_t{t - reach + j} * p.channels));
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (i >= count) continue;
      Activate(sums[i], call.activation);
      Vector<T, kV> out;
#pragma unroll
      for (int v = 0; v < kV; ++v) out.values[v] = Narrow<T>(sums[i][v]);
      StoreVector(y + int64_t{t + i} * p.channels, out);
    }
  }
}

// --- kernel gradient -----------------------------------------------------------------------------

// A block has this number of taps, and a thread this number of steps of an item.
constexpr int kTapsOfBlock = 8;
constexpr int kStepsOfItem = 8;

// The tile's lanes are along the fastest dimension, as forward. A thread has the same channel in
// every item.
template <typename T>
__global__ void __launch_bounds__(kNtcThreads, 4)
    PackedBackward(const __grid_constant__ BackwardParams p) {
  using Acc = Accumulator<T>;
  __shared__ Acc shared[(kTapsOfBlock + 1) * kNtcThreads];
  const Share share(p, kTapsOfBlock);
  const Arrays<T> arrays(p, share.kept);
  const bool is_ntc = p.call.geometry.data_format == DataFormat::kNTC;
  const int lanes = p.ntc.lanes();
  const int lane = threadIdx.x & (lanes - 1);
  const int group = threadIdx.x >> p.ntc.lane_bits;
  const int channels = is_ntc ? lanes : p.ntc.groups();  // of a block
  const int steps = kNtcThreads / channels;              // that the block takes at once
  const int channel = share.channel_block * channels + (is_ntc ? lane : group);
  const int64_t advance = is_ntc ? p.channels : 1;
  const int64_t column = is_ntc ? channel : int64_t{channel} * p.time;
  const int padding = (p.taps - 1) * p.dilation - p.mirrored;

  Acc sums[kTapsOfBlock] = {};
  Acc dbias = 0;
  const uint32_t end = channel < p.channels ? p.items : 0;
  for (uint32_t index = share.split; index < end; index += p.splits.divisor()) {
    const Item item(p, index);
    const T* x = item.At(p, arrays.x, Backward::kX) + column;
    const T* g = item.At(p, arrays.g, Backward::kG) + column;
    const int32_t* starts = item.At(
        p, p.call.starts + p.call.kept.Offset(share.kept, Backward::kStarts), Backward::kStarts);
    for (int i = 0; i < kStepsOfItem; ++i) {
      const int t = (item.tile * kStepsOfItem + i) * steps + (is_ntc ? group : lane);
      if (t >= p.time) break;
      const Acc own = Widen(g[t * advance]);
      const int first_row = t + share.first_tap * p.dilation - padding;
      const uint32_t pairs = FindPairs<kTapsOfBlock>(starts, t, first_row, p.dilation,
                                                     p.taps - share.first_tap, p.time);
      dbias += own;
#pragma unroll
      for (int j = 0; j < kTapsOfBlock; ++j) {
        if (pairs >> j & 1) sums[j] += own * Widen(x[(first_row + j * p.dilation) * advance]);
      }
    }
  }

  // Sums of the threads that own a channel are added in a fixed order.
#pragma unroll
  for (int j = 0; j < kTapsOfBlock; ++j) shared[j * kNtcThreads + threadIdx.x] = sums[j];
  shared[kTapsOfBlock * kNtcThreads + threadIdx.x] = dbias;
  __syncthreads();
  Acc* partials = share.PartialSums<T>(p);
  for (int i = threadIdx.x; i < (kTapsOfBlock + 1) * channels; i += kNtcThreads) {
    const int j = i / channels;
    const int of_block = i - j * channels;
    const int sum_channel = share.channel_block * channels + of_block;
    const bool is_bias = j == kTapsOfBlock;
    const bool is_wanted =
        is_bias ? share.first_tap == 0 && p.call.dbias != nullptr : share.first_tap + j < p.taps;
    if (!is_wanted || sum_channel >= p.channels) continue;
    const Acc* first = shared + j * kNtcThreads + (is_ntc ? of_block : of_block * lanes);
    Acc sum = 0;
    for (int n = 0; n < steps; ++n) sum += first[is_ntc ? n * lanes : n];
    partials[int64_t{is_bias ? p.taps : share.first_tap + j} * p.channels + sum_channel] = sum;
  }
}

// The heads that a block of PackedStateSteps may have.
int64_t StateHeads(const Geometry& g) {
  return jaxops::cuda::MaxHeadsOfTile(kWarp * kStateVector, g.channels, g.heads);
}

BackwardPlan MakePlan(const Gradients& gradients) {
  const Geometry& g = gradients.call.geometry;
  const ShortNtcTile tile(ForwardPlan::Fastest(g, g.time), 1);
  const int channels = g.data_format == DataFormat::kNTC ? tile.lanes() : tile.groups();
  return BackwardPlan(gradients.call, gradients.splits, 1, kStepsOfItem * (kNtcThreads / channels),
                      channels, kTapsOfBlock);
}

// Computes the first `steps` steps of each sequence.
cudaError_t LaunchSteps(cudaStream_t stream, const Forward& call, int64_t steps) {
  const Geometry& g = call.geometry;
  const ForwardPlan plan(call, steps);
  ForwardParams params{.call = call,
                       .states = States(call),
                       .time = static_cast<int>(g.time),
                       .steps = static_cast<int>(steps),
                       .channels = static_cast<int>(g.channels),
                       .taps = static_cast<int>(g.taps),
                       .padding = static_cast<int>(g.padding),
                       .dilation = static_cast<int>(g.dilation),
                       .behind = static_cast<int>(std::min(g.taps, g.padding / g.dilation + 1)),
                       .is_ntc = g.data_format == DataFormat::kNTC,
                       .tile = plan.tile,
                       .lane_blocks = FastDivider(plan.lane_blocks),
                       .group_blocks = FastDivider(plan.group_blocks),
                       .depth = FastDivider(g.channels / g.heads)};
  return DispatchFloat(call.dtype, [&](auto element) {
    return Launch(PackedForward<decltype(element)>, plan.blocks, kNtcThreads, 0, stream, params);
  });
}

}  // namespace

bool CanRunPacked(const Forward& call, const Device&) {
  return ForwardPlan(call, call.geometry.time).blocks <= kMaxBlocks;
}
bool CanRunPacked(const Gradients& gradients, const Device&) {
  return MakePlan(gradients).CanLaunch();
}

cudaError_t LaunchPacked(cudaStream_t stream, const Forward& call, const Device&) {
  return LaunchSteps(stream, call, call.geometry.time);
}

cudaError_t LaunchPackedHeads(cudaStream_t stream, const Forward& call) {
  const int64_t steps = std::min(call.geometry.time, call.geometry.padding);
  return steps == 0 ? cudaSuccess : LaunchSteps(stream, call, steps);
}

bool CanRunStateSteps(const Forward& call) {
  const Geometry& g = call.geometry;
  const size_t accumulator = call.dtype == DType::kF64 ? sizeof(double) : sizeof(float);
  return call.slots != nullptr && g.dilation == 1 && g.padding == g.taps - 1 &&
         g.channels / g.heads % kStateVector == 0 &&
         StateHeads(g) * g.taps * accumulator <= jaxops::cuda::kSharedOptInLimit &&
         call.batch.size() * CeilDiv(g.channels, kWarp * kStateVector) * CeilDiv(g.time, kWindow) <=
             kMaxBlocks;
}

cudaError_t LaunchStateSteps(cudaStream_t stream, const Forward& call) {
  const Geometry& g = call.geometry;
  const int64_t channel_blocks = CeilDiv(g.channels, kWarp * kStateVector);
  const int64_t windows = CeilDiv(g.time, kWindow);
  const StateStepsParams params{.call = call,
                                .time = static_cast<int>(g.time),
                                .channels = static_cast<int>(g.channels),
                                .taps = static_cast<int>(g.taps),
                                .channel_blocks = FastDivider(channel_blocks),
                                .windows = FastDivider(windows),
                                .depth = FastDivider(g.channels / g.heads),
                                .tap_divider = FastDivider(g.taps)};
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    return Launch(PackedStateSteps<T>, call.batch.size() * channel_blocks * windows, kNtcThreads,
                  StateHeads(g) * g.taps * sizeof(Accumulator<T>), stream, params);
  });
}

cudaError_t LaunchPacked(cudaStream_t stream, const Gradients& gradients, const Device&) {
  const Backward& call = gradients.call;
  const BackwardPlan plan = MakePlan(gradients);
  BackwardParams params(call, plan, gradients.partials, 1, 1);
  const Geometry& g = call.geometry;
  params.ntc = ShortNtcTile(ForwardPlan::Fastest(g, g.time), 1);
  const cudaError_t error = DispatchFloat(call.dtype, [&](auto element) {
    return Launch(PackedBackward<decltype(element)>, plan.blocks, kNtcThreads, 0, stream, params);
  });
  if (error != cudaSuccess) return error;
  return AddPartialSums(stream, call, {gradients.partials, plan.splits});
}

}  // namespace jaxops::lightweight_conv::cuda
