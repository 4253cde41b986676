// These kernels compute lightweight convolution in the NCT layout for short filters of small
// problems: a thread owns single steps, and all its loads are in flight at once.
#include "cuda/common/activation.cuh"
#include "cuda/lightweight_conv/families.h"
#include "cuda/lightweight_conv/filters.cuh"

namespace jaxops::lightweight_conv::cuda::nct {
namespace {

using jaxops::cuda::Activate;

template <typename T>
constexpr DType kDTypeOf = std::is_same_v<T, __half>          ? DType::kF16
                           : std::is_same_v<T, __nv_bfloat16> ? DType::kBF16
                           : std::is_same_v<T, float>         ? DType::kF32
                                                              : DType::kF64;

// WithOwnElements is WithElements for an operand that nearly always has the others' type, because a
// small kernel would wait for the jump through a table.
template <typename T, typename Read>
__device__ __forceinline__ void WithOwnElements(const void* base, DType dtype, Read&& read) {
  if (dtype == kDTypeOf<T>) {
    read(static_cast<const T*>(base));
  } else {
    WithElements(base, dtype, read);
  }
}

// --- forward -------------------------------------------------------------------------------------

// StepForwardParams has fewer members than Forward, because a small kernel waits for its
// parameters.
struct StepForwardParams {
  const void* x;
  const void* weight;
  const void* bias;
  void* y;
  int64_t x_stride, weight_stride, bias_stride, y_stride;  // from one batch entry to the next
  int time, taps, padding, dilation;
  int first_tap, tap_step;  // offsets of taps in the filter
  uint32_t threads, batch;
  FastDivider row_threads, channels, depth;
  DType weight_dtype, bias_dtype;
  Activation activation;
};

// A thread owns kSteps neighbouring steps of kEntries neighbouring batch entries.
template <typename T, int kTaps, int kSteps, int kEntries>
__global__ void __launch_bounds__(kNctThreads)
    StepForwardNct(const __grid_constant__ StepForwardParams p) {
  using Acc = Accumulator<T>;
  uint32_t index = blockIdx.x * kNctThreads + threadIdx.x;
  if (index >= p.threads) return;
  const int t = p.row_threads.DivMod(index) * kSteps;
  const int channel = p.channels.DivMod(index);
  const uint32_t entry = index * kEntries;
  const int64_t row = int64_t{channel} * p.time + t;
  T values[kEntries][kTaps][kSteps];
#pragma unroll
  for (int e = 0; e < kEntries; ++e) {
    const bool there = kEntries == 1 || entry + e < p.batch;
    const T* x = static_cast<const T*>(p.x) + (entry + e) * p.x_stride + row - p.padding;
    int step = t - p.padding;
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const bool inside =
            there && k < p.taps && static_cast<unsigned>(step + i) < static_cast<unsigned>(p.time);
        values[e][k][i] = inside ? x[i] : T{};
      }
      x += p.dilation;
      step += p.dilation;
    }
  }
  Acc weight[kTaps], bias = 0;
  WithOwnElements<T>(p.weight, p.weight_dtype, [&](const auto* weights) {
    const auto* filter = weights + entry * p.weight_stride +
                         int64_t{p.depth.Quotient(channel)} * p.taps + p.first_tap;
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      weight[k] = k < p.taps ? static_cast<Acc>(Widen(*filter)) : Acc(0);
      filter += p.tap_step;
    }
  });
  if (p.bias != nullptr) {
    WithElements(p.bias, p.bias_dtype, [&](const auto* biases) {
      bias = static_cast<Acc>(Widen(biases[entry * p.bias_stride + channel]));
    });
  }
  T* y = static_cast<T*>(p.y) + entry * p.y_stride + row;
#pragma unroll
  for (int e = 0; e < kEntries; ++e) {
    if (kEntries > 1 && entry + e >= p.batch) return;
    Acc sums[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) sums[i] = bias;
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      if (k < p.taps) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) sums[i] += weight[k] * Widen(values[e][k][i]);
      }
    }
    Activate(sums, p.activation);
    Vector<T, kSteps> vec;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) vec.values[i] = Narrow<T>(sums[i]);
    *reinterpret_cast<Vector<T, kSteps>*>(y + e * p.y_stride) = vec;
  }
}

// --- backward ------------------------------------------------------------------------------------

struct StepBackwardParams {
  const void* x;
  const void* weight;
  const void* g;
  void* dx;
  void* dweight;
  void* dbias;
  void* partials;
  int64_t kept_x, kept_weight, kept_g, kept_dx;  // from one batch entry to the next
  int64_t summed_x, summed_g, summed_dx;
  int time, channels, taps, mirrored, dilation;
  int block_channels;  // channels of a head, or one
  int entries;         // summed batch entries
  int per_split;       // summed batch entries per split
  int entry_groups;    // warps per channel: each has every entry_groups-th batch entry
  FastDivider channel_blocks, splits, depth, channel_warps, row_warps;
  DType weight_dtype, bias_dtype;
  bool whole;  // a block computes a filter's whole sum
};

// Most problems give a block fewer warps, and with this number each warp has enough registers.
constexpr int StepWarps(int64_t element_bytes) { return element_bytes == 8 ? 16 : 24; }
template <typename T>
constexpr int kStepWarps = StepWarps(sizeof(T));

// Blocks of one channel have fewer warps, so that several blocks are resident.
constexpr int kStepChannelWarps = 8;

// A thread owns single steps of one channel, of kAtOnce batch entries at a time.
template <typename T, int kTaps, int kAtOnce>
__global__ void __launch_bounds__(kStepWarps<T>* kWarp)
    StepBackwardNct(const __grid_constant__ StepBackwardParams p) {
  using Acc = Accumulator<T>;
  __shared__ Acc tap_sums[kStepWarps<T> * kTaps];
  __shared__ Acc bias_sums[kStepWarps<T>];
  uint32_t block = blockIdx.x;
  const int first_channel = p.channel_blocks.DivMod(block) * p.block_channels;
  const int split = p.splits.DivMod(block);
  const uint32_t kept = block;
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int warps = blockDim.x / kWarp;
  const int channel_warps = p.channel_warps.divisor();
  uint32_t rest = warp;
  const uint32_t channel_warp = p.channel_warps.DivMod(rest);
  const int channel_group = rest;
  const int channel_groups = p.channel_warps.Quotient(warps);
  const int entry_group = p.row_warps.Quotient(channel_warp);
  const int first_t = (channel_warp - entry_group * p.row_warps.divisor()) * kWarp + lane;
  const int first_entry = split * p.per_split + entry_group;
  const int end_entry = min(p.entries, (split + 1) * p.per_split);
  const bool wants_dx = p.dx != nullptr;
  const bool wants_dbias = p.dbias != nullptr;

  Acc weight[kTaps] = {};
  Acc dweight[kTaps] = {};
  Acc dbias = 0;
  bool needs_weights = wants_dx;
#pragma unroll 1
  for (int c = channel_group; c < p.block_channels; c += channel_groups) {
    dbias = 0;
#pragma unroll 1
    for (int t = first_t; t < p.time; t += p.row_warps.divisor() * kWarp) {
      const int64_t at = int64_t{first_channel + c} * p.time + t;
      const T* x = static_cast<const T*>(p.x) + kept * p.kept_x + at;
      const T* g = static_cast<const T*>(p.g) + kept * p.kept_g + at;
      T* dx = static_cast<T*>(p.dx) + kept * p.kept_dx + at;
      const int origin = t - p.mirrored;
      bool inside[kTaps];
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
        inside[j] = j < p.taps &&
                    static_cast<unsigned>(origin + j * p.dilation) < static_cast<unsigned>(p.time);
      }
#pragma unroll 1
      for (int first = first_entry; first < end_entry; first += p.entry_groups * kAtOnce) {
        T own[kAtOnce], own_g[kAtOnce], window[kAtOnce][kTaps];
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u) {
          const int entry = first + u * p.entry_groups;
          const bool there = entry < end_entry;
          const T* g_at = g + entry * p.summed_g;
          own[u] = there ? x[entry * p.summed_x] : T{};
          own_g[u] = there && wants_dbias ? *g_at : T{};
          g_at -= p.mirrored;
#pragma unroll
          for (int j = 0; j < kTaps; ++j) {
            window[u][j] = there && inside[j] ? *g_at : T{};
            g_at += p.dilation;
          }
        }
        if (needs_weights) {
          needs_weights = false;
          WithOwnElements<T>(p.weight, p.weight_dtype, [&](const auto* weights) {
            const auto* filter = weights + kept * p.kept_weight +
                                 int64_t{p.depth.Quotient(first_channel)} * p.taps + p.taps - 1;
#pragma unroll
            for (int j = 0; j < kTaps; ++j) {
              if (j < p.taps) weight[j] = static_cast<Acc>(Widen(filter[-j]));
            }
          });
        }
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u) {
          const int entry = first + u * p.entry_groups;
          if (entry >= end_entry) break;
          Acc sum = 0;
#pragma unroll
          for (int j = 0; j < kTaps; ++j) {
            if (j < p.taps) {
              const Acc value = Widen(window[u][j]);
              sum += weight[j] * value;
              // A NaN in x must not reach taps with which it forms no pair.
              if (inside[j]) dweight[j] += Widen(own[u]) * value;
            }
          }
          if (wants_dx) dx[entry * p.summed_dx] = Narrow<T>(sum);
          dbias += Widen(own_g[u]);
        }
      }
    }
    if (wants_dbias) {
#pragma unroll
      for (int distance = kWarp / 2; distance > 0; distance /= 2) {
        dbias += __shfl_xor_sync(0xffffffff, dbias, distance);
      }
      // If a channel has several warps, no warp has several channels.
      if (channel_warps > 1 || !p.whole) {
        if (lane == 0) bias_sums[warp] = dbias;
      } else if (lane == 0) {
        StoreAs(p.dbias, int64_t{kept} * p.channels + first_channel + c, p.bias_dtype, dbias);
      }
    }
  }
  int value = 0;
  FoldLanes<kTaps, kWarp / 2>(dweight, value);
  if (lane % (kWarp / kTaps) == 0) tap_sums[warp * kTaps + value] = dweight[0];
  __syncthreads();
  Acc* partials = static_cast<Acc*>(p.partials) +
                  (int64_t{kept} * p.splits.divisor() + split) * (p.taps + 1) * p.channels +
                  first_channel;
  if (threadIdx.x < p.taps) {
    const int tap = p.taps - 1 - threadIdx.x;
    Acc total = 0;
#pragma unroll 8
    for (int w = 0; w < warps; ++w) total += tap_sums[w * kTaps + threadIdx.x];
    if (p.whole) {
      const int64_t head =
          int64_t{kept} * p.channel_blocks.divisor() + p.depth.Quotient(first_channel);
      StoreAs(p.dweight, head * p.taps + tap, p.weight_dtype, total);
    } else {
      partials[int64_t{tap} * p.channels] = total;
    }
  }
  const int c = static_cast<int>(threadIdx.x) - kTaps;
  if (wants_dbias && (channel_warps > 1 || !p.whole) && c >= 0 && c < p.block_channels) {
    Acc total = 0;
    for (int w = 0; w < channel_warps; ++w) total += bias_sums[c * channel_warps + w];
    if (p.whole) {
      StoreAs(p.dbias, int64_t{kept} * p.channels + first_channel + c, p.bias_dtype, total);
    } else {
      partials[int64_t{p.taps} * p.channels + c] = total;
    }
  }
}

// --- launches ------------------------------------------------------------------------------------

struct ForwardPlan {
  int max_taps, steps, entries;  // per thread: the kernel's template arguments
  int64_t threads;
};

ForwardPlan MakePlan(const Forward& call) {
  // A thread has several batch entries if enough threads remain and the filter is shared by all
  // entries.
  constexpr int64_t kFewElements = 1 << 17;
  const Geometry& g = call.geometry;
  const int64_t batch = call.batch.size();
  const bool is_single =
      batch * g.channels * g.time <= kFewElements || batch == 1 || !SharesFilters(call);
  const bool makes_pairs = !is_single && jaxops::cuda::SizeOf(call.dtype) == 2 && g.time % 2 == 0;
  ForwardPlan plan;
  plan.max_taps = g.taps <= 4 ? 4 : kShortTaps;
  plan.steps = makes_pairs ? 2 : 1;
  plan.entries = is_single ? 1 : makes_pairs ? 2 : 4;
  plan.threads = CeilDiv(batch, plan.entries) * g.channels * (g.time / plan.steps);
  return plan;
}

template <typename T, int kTaps, int kSteps, int kEntries>
cudaError_t LaunchStepForward(cudaStream_t stream, const Forward& call, const ForwardPlan& plan) {
  const Geometry& g = call.geometry;
  StepForwardParams p{};
  p.x = call.x;
  p.weight = call.weight;
  p.bias = call.bias;
  p.y = call.y;
  p.x_stride = call.batch.stride(0, Forward::kX);
  p.weight_stride = call.batch.stride(0, Forward::kWeight);
  p.bias_stride = call.batch.stride(0, Forward::kBias);
  p.y_stride = call.batch.stride(0, Forward::kY);
  p.time = static_cast<int>(g.time);
  p.taps = static_cast<int>(g.taps);
  p.padding = static_cast<int>(g.padding);
  p.dilation = static_cast<int>(g.dilation);
  p.first_tap = call.flip_taps ? p.taps - 1 : 0;
  p.tap_step = call.flip_taps ? -1 : 1;
  p.batch = static_cast<uint32_t>(call.batch.size());
  p.row_threads = FastDivider(g.time / kSteps);
  p.channels = FastDivider(g.channels);
  p.depth = FastDivider(g.channels / g.heads);
  p.weight_dtype = call.weight_dtype;
  p.bias_dtype = call.bias_dtype;
  p.activation = call.activation;
  p.threads = static_cast<uint32_t>(plan.threads);
  return Launch(StepForwardNct<T, kTaps, kSteps, kEntries>, CeilDiv(plan.threads, kNctThreads),
                kNctThreads, 0, stream, p);
}

template <typename T, int kTaps>
cudaError_t LaunchStepForward(cudaStream_t stream, const Forward& call, const ForwardPlan& plan) {
  if (plan.entries == 1) return LaunchStepForward<T, kTaps, 1, 1>(stream, call, plan);
  if constexpr (sizeof(T) == 2) {
    if (plan.steps == 2) return LaunchStepForward<T, kTaps, 2, 2>(stream, call, plan);
  }
  return LaunchStepForward<T, kTaps, 1, 4>(stream, call, plan);
}

struct BackwardPlan {
  int max_taps, at_once;  // the kernel's template arguments
  int64_t block_channels;
  int64_t splits, per_split;  // number of splits, and batch entries per split
  int64_t row_warps, entry_groups, channel_warps;
  bool whole;      // a block computes a filter's whole sum
  int64_t warps;   // warps per block
  int64_t blocks;  // blocks of the grid
};

BackwardPlan MakePlan(const Gradients& gradients) {
  const Backward& call = gradients.call;
  const Geometry& g = call.geometry;
  const int64_t depth = g.channels / g.heads;
  const int64_t entries = call.summed.size();
  // One block has a whole head if that is little work; otherwise each channel has blocks of its
  // own, as many as run at once.
  constexpr int64_t kHeadElements = 2048;
  constexpr int64_t kChannelElements = 4096;
  constexpr int64_t kManyBlocks = 512;
  const bool heads = depth > 1 && depth * entries * g.time <= kHeadElements;
  const bool whole = heads || (depth == 1 && entries * g.time <= kChannelElements);
  const int64_t fewer = std::max<int64_t>(1, kManyBlocks / (call.kept.size() * g.channels));
  const int64_t max_warps = heads ? StepWarps(jaxops::cuda::SizeOf(call.dtype)) : kStepChannelWarps;
  BackwardPlan plan;
  plan.max_taps = g.taps <= 4 ? 4 : kShortTaps;
  plan.at_once = entries < 4 ? 2 : 4;
  plan.block_channels = heads ? depth : 1;
  plan.splits = whole ? 1 : std::min({gradients.splits, fewer, entries});
  plan.whole = plan.splits == 1 && plan.block_channels == depth;
  plan.per_split = CeilDiv(entries, plan.splits);
  // The warps that share a channel divide its row, and its batch entries in groups of at_once.
  const int64_t max_channel_warps = std::max<int64_t>(1, max_warps / plan.block_channels);
  plan.row_warps = std::min(CeilDiv(g.time, kWarp), max_channel_warps);
  plan.entry_groups =
      std::min(CeilDiv(plan.per_split, plan.at_once), max_channel_warps / plan.row_warps);
  plan.channel_warps = plan.row_warps * plan.entry_groups;
  plan.warps = plan.channel_warps * std::min(plan.block_channels, max_warps / plan.channel_warps);
  plan.blocks = call.kept.size() * plan.splits * (g.channels / plan.block_channels);
  return plan;
}

template <typename T, int kTaps, int kAtOnce>
cudaError_t LaunchStepBackward(cudaStream_t stream, const Gradients& gradients,
                               const BackwardPlan& plan) {
  const Backward& call = gradients.call;
  const Geometry& g = call.geometry;
  StepBackwardParams p{};
  p.x = call.x;
  p.weight = call.weight;
  p.g = call.g;
  p.dx = call.dx;
  p.dweight = call.dweight;
  p.dbias = call.dbias;
  p.partials = gradients.partials;
  p.kept_x = call.kept.stride(0, Backward::kX);
  p.kept_weight = call.kept.stride(0, Backward::kWeight);
  p.kept_g = call.kept.stride(0, Backward::kG);
  p.kept_dx = call.kept.stride(0, Backward::kDx);
  p.summed_x = call.summed.stride(0, Backward::kX);
  p.summed_g = call.summed.stride(0, Backward::kG);
  p.summed_dx = call.summed.stride(0, Backward::kDx);
  p.time = static_cast<int>(g.time);
  p.channels = static_cast<int>(g.channels);
  p.taps = static_cast<int>(g.taps);
  p.mirrored = static_cast<int>(Mirrored(g));
  p.dilation = static_cast<int>(g.dilation);
  p.block_channels = static_cast<int>(plan.block_channels);
  p.whole = plan.whole;
  p.entries = static_cast<int>(call.summed.size());
  p.per_split = static_cast<int>(plan.per_split);
  p.entry_groups = static_cast<int>(plan.entry_groups);
  p.row_warps = FastDivider(plan.row_warps);
  p.channel_blocks = FastDivider(g.channels / plan.block_channels);
  p.splits = FastDivider(plan.splits);
  p.depth = FastDivider(g.channels / g.heads);
  p.channel_warps = FastDivider(plan.channel_warps);
  p.weight_dtype = call.weight_dtype;
  p.bias_dtype = call.bias_dtype;
  return Launch(StepBackwardNct<T, kTaps, kAtOnce>, plan.blocks,
                static_cast<int>(plan.warps) * kWarp, 0, stream, p);
}

template <typename T, int kTaps>
cudaError_t LaunchStepBackward(cudaStream_t stream, const Gradients& gradients,
                               const BackwardPlan& plan) {
  return plan.at_once == 2 ? LaunchStepBackward<T, kTaps, 2>(stream, gradients, plan)
                           : LaunchStepBackward<T, kTaps, 4>(stream, gradients, plan);
}

// Kernels count threads and steps in 32 bits.
bool CanRun(const Geometry& g, int64_t batch) {
  return g.data_format == DataFormat::kNCT && g.taps <= kShortTaps &&
         batch * g.channels * g.time <= int64_t{1} << 30;
}

}  // namespace

bool CanRunSteps(const Forward& call, const Device&) {
  return call.batch.rank() <= 1 && CanRun(call.geometry, call.batch.size());
}

bool CanRunSteps(const Gradients& gradients, const Device&) {
  const Backward& call = gradients.call;
  return call.kept.rank() <= 1 && call.summed.rank() <= 1 &&
         CanRun(call.geometry, call.kept.size() * call.summed.size());
}

cudaError_t LaunchSteps(cudaStream_t stream, const Forward& call, const Device&) {
  const ForwardPlan plan = MakePlan(call);
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    return plan.max_taps == 4 ? LaunchStepForward<T, 4>(stream, call, plan)
                              : LaunchStepForward<T, kShortTaps>(stream, call, plan);
  });
}

cudaError_t LaunchSteps(cudaStream_t stream, const Gradients& gradients, const Device&) {
  const BackwardPlan plan = MakePlan(gradients);
  const cudaError_t error = DispatchFloat(gradients.call.dtype, [&](auto element) {
    using T = decltype(element);
    return plan.max_taps == 4 ? LaunchStepBackward<T, 4>(stream, gradients, plan)
                              : LaunchStepBackward<T, kShortTaps>(stream, gradients, plan);
  });
  if (error != cudaSuccess || plan.whole) return error;
  return AddPartialSums(stream, gradients.call, {gradients.partials, plan.splits});
}

}  // namespace jaxops::lightweight_conv::cuda::nct
