// These kernels compute causal lightweight convolution of two to eight taps in the NCT layout. The
// number of taps and the padding are constants, because instructions bound short filters of 16-bit
// elements in other kernels: a warp of nct/rows executes 662 for two vectors a thread.
#include "cuda/common/activation.cuh"
#include "cuda/lightweight_conv/families.h"
#include "cuda/lightweight_conv/nct/row_sums.cuh"

namespace jaxops::lightweight_conv::cuda::nct {
namespace {

using jaxops::cuda::Activate;
using jaxops::cuda::StoreVector;

constexpr int kThreads = 256;
constexpr int kMinTaps = 2, kMaxTaps = 8;

// A thread reads its own vector and this number of elements before it (forward) or after it
// (backward), as vectors of kReachVector elements.
template <int kTaps>
constexpr int kReach = kTaps <= 5 ? 4 : 8;
template <typename T, int kTaps>
constexpr int kReachVector = std::min(kReach<kTaps>, kVectorElements<T>);
template <typename T, int kTaps>
constexpr int kReachVectors = kReach<kTaps> / kReachVector<T, kTaps>;

// A thread has the loads of this number of items in flight. Items of 16-bit elements have more
// instructions, and more threads hide more of their latency than more items: one item instead of
// two made (2,1024,4096,1024,4) bf16 12.2 -> 11.6 us and its gradients 19.3 -> 18.5, but f32 18.8
// -> 20.7 and 28.3 -> 29.6.
template <typename T>
constexpr int kAtOnce = sizeof(T) == 2 ? 1 : 2;

// Registers are limited so that a multiprocessor has this number of blocks, if it has 2048 threads.
// Six forward blocks of 16-bit elements and five of 32-bit ones, with up to eight items a thread,
// took 71.2 us instead of 69.3 for (4,2048,8192,2048,4) bf16, and 133 instead of 127 for
// (1,1024,65536,128,4) f32. Six blocks of 32-bit elements take 131.6 us and five 134.5 with six
// taps, but 150 and 135 with seven.
template <typename T, int kTaps>
constexpr int kForwardBlocks =
#if __CUDA_ARCH__ == 800 || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1100)
    sizeof(T) == 2 ? 8 :
#endif
    kTaps <= 6 ? 6
               : 5;
constexpr int kBackwardBlocks = 4;

// ReadTaps reads the taps of a channel in the order in which they are used.
template <int kTaps, typename Acc>
__device__ __forceinline__ void ReadTaps(Acc (&weight)[kTaps], const void* base, DType dtype,
                                         int64_t offset, bool is_reversed) {
  WithElements(base, dtype, [&](const auto* weights) {
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      weight[k] = static_cast<Acc>(Widen(weights[offset + (is_reversed ? kTaps - 1 - k : k)]));
    }
  });
}

// --- forward -------------------------------------------------------------------------------------

// A thread has several items: the same vector of neighbouring batch entries, or vectors of one row.
struct CausalForwardParams {
  const void* x;
  const void* weight;
  const void* bias;
  void* y;
  // From one batch entry to the next, of the inner and of the outer batch dimension.
  int64_t x_inner, weight_inner, bias_inner, y_inner;
  int64_t x_outer, weight_outer, bias_outer, y_outer;
  int64_t x_step, y_step;  // from one item to the next
  int time, time_step;     // time_step: likewise
  uint32_t inner;          // size of the inner batch dimension
  int entries;             // inner batch entries of a thread
  int per_thread;          // items
  uint32_t threads;        // of an outer batch entry
  bool flip_taps;
  FastDivider row_threads, channels, depth;
  DType weight_dtype, bias_dtype;
  Activation activation;
};

// If kNested, blockIdx.y is the outer batch entry. Calls without an outer dimension have a kernel
// without it, which takes 18.0 us instead of 19.3 for (16,1024,512,1024,4) f32.
template <typename T, int kTaps, bool kNested>
__global__ void __launch_bounds__(kThreads, kForwardBlocks<T, kTaps>)
    CausalForwardNct(const __grid_constant__ CausalForwardParams p) {
  using Acc = Accumulator<T>;
  constexpr int kV = kVectorElements<T>;
  constexpr int kRead = kReachVector<T, kTaps>, kReads = kReachVectors<T, kTaps>;
  uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= p.threads) return;
  const int first_t = p.row_threads.DivMod(index) * kV;
  const int channel = p.channels.DivMod(index);
  // Both forms have the index type with which they were measured.
  using Index = std::conditional_t<kNested, int, uint32_t>;
  const Index inner = index * p.entries;
  const int outer = kNested ? blockIdx.y : 0;
  const int64_t row = int64_t{channel} * p.time + first_t;
  const T* x = static_cast<const T*>(p.x) + outer * p.x_outer + inner * p.x_inner + row;
  T* y = static_cast<T*>(p.y) + outer * p.y_outer + inner * p.y_inner + row;
  const int count = p.time_step == 0
                        ? min(p.per_thread, static_cast<int>(p.inner - inner))
                        : static_cast<int>(p.row_threads.Quotient((p.time - first_t - 1) / kV)) + 1;

  Acc weight[kTaps], bias = 0;
  ReadTaps(
      weight, p.weight, p.weight_dtype,
      outer * p.weight_outer + inner * p.weight_inner + int64_t{p.depth.Quotient(channel)} * kTaps,
      p.flip_taps);
  if (p.bias != nullptr) {
    WithElements(p.bias, p.bias_dtype, [&](const auto* biases) {
      bias = static_cast<Acc>(Widen(biases[outer * p.bias_outer + inner * p.bias_inner + channel]));
    });
  }
#pragma unroll 1
  for (int item = 0; item < count; item += kAtOnce<T>) {
    Vector<T, kV> own[kAtOnce<T>];
    Vector<T, kRead> before[kAtOnce<T>][kReads];
#pragma unroll
    for (int e = 0; e < kAtOnce<T>; ++e) {
      own[e] = {};
#pragma unroll
      for (int r = 0; r < kReads; ++r) before[e][r] = {};
      if (item + e < count) {
        const T* at = x + (item + e) * p.x_step;
        own[e] = LoadVector<kV>(at);
#pragma unroll
        for (int r = 0; r < kReads; ++r) {
          const int distance = kReach<kTaps> - r * kRead;
          if (first_t + (item + e) * p.time_step >= distance) {
            before[e][r] = LoadVector<kRead>(at - distance);
          }
        }
      }
    }
#pragma unroll
    for (int e = 0; e < kAtOnce<T>; ++e) {
      if (item + e >= count) return;
      Acc window[kTaps - 1 + kV], sums[kV];
#pragma unroll
      for (int i = 0; i < kTaps - 1; ++i) {
        const int from = kReach<kTaps> - (kTaps - 1) + i;
        window[i] = Widen(before[e][from / kRead].values[from % kRead]);
      }
#pragma unroll
      for (int i = 0; i < kV; ++i) window[kTaps - 1 + i] = Widen(own[e].values[i]);
#pragma unroll
      for (int i = 0; i < kV; ++i) sums[i] = bias;
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
#pragma unroll
        for (int i = 0; i < kV; ++i) sums[i] += weight[k] * window[i + k];
      }
      Activate(sums, p.activation);
      Vector<T, kV> result;
#pragma unroll
      for (int i = 0; i < kV; ++i) result.values[i] = Narrow<T>(sums[i]);
      StoreVector(y + (item + e) * p.y_step, result);
    }
  }
}

// --- backward ------------------------------------------------------------------------------------

struct CausalBackwardParams {
  const void* x;
  const void* weight;
  const void* g;
  void* dx;
  int64_t kept_x, kept_weight, kept_g, kept_dx;  // from one batch entry to the next
  int64_t summed_x, summed_g, summed_dx;
  int time;
  int items, per_split;  // an item is a part of a row of a summed batch entry
  FastDivider parts, channel_blocks, depth;
  RowSums sums;
};

template <typename T, int kTaps>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks)
    CausalBackwardNct(const __grid_constant__ CausalBackwardParams p) {
  using Acc = Accumulator<T>;
  constexpr int kV = kVectorElements<T>;
  constexpr int kRead = kReachVector<T, kTaps>, kReads = kReachVectors<T, kTaps>;
  __shared__ Acc shared[(kTaps + 1) * kThreads];
  uint32_t block = blockIdx.x;
  const int first_channel = p.channel_blocks.DivMod(block) * p.sums.rows;
  const int split = p.sums.splits.DivMod(block);
  const int64_t kept = block;
  uint32_t group = threadIdx.x;
  uint32_t lane = p.sums.group_threads.DivMod(group);
  const int row_thread = p.sums.row_threads.DivMod(lane);
  const int channel = first_channel + lane;
  const bool is_idle = static_cast<int>(group) >= p.sums.groups || channel >= p.sums.channels;
  const int end = is_idle ? 0 : min(p.items, (split + 1) * p.per_split);
  const int64_t row = is_idle ? 0 : int64_t{channel} * p.time;
  const T* x = static_cast<const T*>(p.x) + kept * p.kept_x + row;
  const T* g = static_cast<const T*>(p.g) + kept * p.kept_g + row;
  T* dx = static_cast<T*>(p.dx) + kept * p.kept_dx + row;
  const bool wants_dx = p.dx != nullptr;

  // Taps are flipped: both gradients of step t read g from t on.
  Acc weight[kTaps] = {}, dweight[kTaps] = {}, dbias = 0;
  if (wants_dx && !is_idle) {
    ReadTaps(weight, p.weight, p.sums.weight_dtype,
             kept * p.kept_weight + int64_t{p.depth.Quotient(channel)} * kTaps, true);
  }
#pragma unroll 1
  for (int first = split * p.per_split + group; first < end; first += p.sums.groups * kAtOnce<T>) {
    Vector<T, kV> own[kAtOnce<T>], own_g[kAtOnce<T>];
    Vector<T, kRead> after[kAtOnce<T>][kReads];
    uint32_t entry[kAtOnce<T>];
    int t[kAtOnce<T>];
    bool exists[kAtOnce<T>];
#pragma unroll
    for (int e = 0; e < kAtOnce<T>; ++e) {
      const int item = first + e * p.sums.groups;
      entry[e] = item;
      t[e] = (p.parts.DivMod(entry[e]) * p.sums.row_threads.divisor() + row_thread) * kV;
      exists[e] = item < end && t[e] < p.time;
      own[e] = own_g[e] = {};
#pragma unroll
      for (int r = 0; r < kReads; ++r) after[e][r] = {};
      if (exists[e]) {
        const T* g_at = g + entry[e] * p.summed_g + t[e];
        own[e] = LoadVector<kV>(x + entry[e] * p.summed_x + t[e]);
        own_g[e] = LoadVector<kV>(g_at);
#pragma unroll
        for (int r = 0; r < kReads; ++r) {
          const int distance = kV + r * kRead;
          if (t[e] + distance < p.time) after[e][r] = LoadVector<kRead>(g_at + distance);
        }
      }
    }
#pragma unroll
    for (int e = 0; e < kAtOnce<T>; ++e) {
      if (!exists[e]) continue;
      Acc inputs[kV], window[kV + kTaps - 1];
#pragma unroll
      for (int i = 0; i < kV; ++i) inputs[i] = Widen(own[e].values[i]);
#pragma unroll
      for (int i = 0; i < kV; ++i) window[i] = Widen(own_g[e].values[i]);
#pragma unroll
      for (int i = 0; i < kTaps - 1; ++i) {
        window[kV + i] = Widen(after[e][i / kRead].values[i % kRead]);
      }
      if (wants_dx) {
        Acc sums[kV] = {};
#pragma unroll
        for (int j = 0; j < kTaps; ++j) {
#pragma unroll
          for (int i = 0; i < kV; ++i) sums[i] += weight[j] * window[i + j];
        }
        Vector<T, kV> result;
#pragma unroll
        for (int i = 0; i < kV; ++i) result.values[i] = Narrow<T>(sums[i]);
        StoreVector(dx + entry[e] * p.summed_dx + t[e], result);
      }
      // Inputs at the end of a row form no pair with later steps, whose zeros do not cancel a NaN.
#pragma unroll
      for (int i = 0; i < kV; ++i) {
#pragma unroll
        for (int j = 0; j < kTaps; ++j) {
          const bool has_pair = i + j < kV || t[e] + (i + j) / kV * kV < p.time;
          dweight[j] += (has_pair ? inputs[i] : Acc(0)) * window[i + j];
        }
        dbias += window[i];
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kTaps; ++j) shared[j * kThreads + threadIdx.x] = dweight[j];
  shared[kTaps * kThreads + threadIdx.x] = dbias;
  __syncthreads();
  p.sums.template Write<kThreads>(shared, kTaps, 0, kTaps, first_channel, kept, split);
}

// --- launches ------------------------------------------------------------------------------------

bool CanRun(const Geometry& g, DType dtype) {
  return g.data_format == DataFormat::kNCT && dtype != DType::kF64 && g.dilation == 1 &&
         g.taps >= kMinTaps && g.taps <= kMaxTaps && g.padding == g.taps - 1 &&
         RowsAligned(g.time, dtype, 16);
}

int64_t CountRowVectors(const Geometry& g, DType dtype) {
  return g.time * jaxops::cuda::SizeOf(dtype) / 16;
}

struct ForwardPlan {
  int inner_dim;         // of the batch
  int64_t inner, outer;  // sizes of its dimensions
  bool by_entries;       // the items of a thread are inner batch entries
  int64_t per_thread;
  int64_t row_threads;
  int64_t threads;  // of an outer batch entry
};

ForwardPlan MakePlan(const Forward& call) {
  const Geometry& g = call.geometry;
  // Taps are read once for two items, if threads that fill a device remain. More items took up to
  // 4 % longer, and single ones up to 20 %.
  constexpr int64_t kManyThreads = 1 << 18;
  constexpr int64_t kMaxItems = 2;
  const auto& batch = call.batch;
  const int64_t vectors = CountRowVectors(g, call.dtype);
  ForwardPlan plan;
  plan.inner_dim = std::max(0, batch.rank() - 1);
  plan.outer = batch.rank() > 1 ? batch.size(0) : 1;
  plan.inner = batch.size() / plan.outer;
  plan.per_thread =
      std::clamp<int64_t>(batch.size() * g.channels * vectors / kManyThreads, 1, kMaxItems);
  plan.by_entries = plan.inner >= plan.per_thread &&
                    batch.stride(plan.inner_dim, Forward::kWeight) == 0 &&
                    batch.stride(plan.inner_dim, Forward::kBias) == 0;
  if (!plan.by_entries) {
    // Threads of a warp have neighbouring vectors.
    plan.per_thread = std::min(plan.per_thread, CeilDiv(vectors, kWarp));
  }
  plan.row_threads = plan.by_entries ? vectors : CeilDiv(vectors, plan.per_thread);
  plan.threads = (plan.by_entries ? CeilDiv(plan.inner, plan.per_thread) : plan.inner) *
                 g.channels * plan.row_threads;
  return plan;
}

struct BackwardPlan {
  int64_t row_threads, parts, rows, group_threads, groups;
  int64_t items, splits, per_split, channel_blocks, blocks;
  bool whole;
};

BackwardPlan MakePlan(const Gradients& gradients) {
  const Backward& call = gradients.call;
  const Geometry& g = call.geometry;
  BackwardPlan plan;
  const int64_t vectors = CountRowVectors(g, call.dtype);
  const int64_t entries = call.summed.size();
  // A thread has several items before its block adds sums, if threads that fill a device remain.
  // With up to four, 16 examples of (8,1024,64,1024,4) bf16 took 24.3 us instead of 19.2.
  constexpr int64_t kManyThreads = 1 << 16;
  constexpr int64_t kMaxItems = 8;
  const int64_t per_thread = std::clamp<int64_t>(
      call.kept.size() * entries * g.channels * vectors / kManyThreads, 1, kMaxItems);
  // A row is cut for up to four items. For (1,2048,2048,2048,4) bf16 one item took 15.5 us, two
  // 13.2, four 11.6 and eight 14.1.
  constexpr int64_t kMaxParts = 4;
  plan.parts = std::max(
      CeilDiv(vectors, kThreads),
      std::min(CeilDiv(std::min(per_thread, kMaxParts), entries), CeilDiv(vectors, kWarp)));
  plan.row_threads = CeilDiv(vectors, plan.parts);
  plan.items = entries * plan.parts;
  // A group of threads reads whole lines of memory. Groups of 8, 16 and 32 threads took 19.7, 17.9
  // and 24.3 us for (128,1024,64,16,3) bf16, and 30.5, 31.8 and 32.0 for (1024,1024,8,128,3) f32.
  const int64_t line_threads = jaxops::cuda::SizeOf(call.dtype) == 2 ? 16 : 8;
  plan.groups = std::clamp<int64_t>(plan.items / per_thread, 1,
                                    kThreads / std::max(line_threads, plan.row_threads));
  // Few items leave threads for more channels, of which a small call has blocks for each
  // multiprocessor.
  constexpr int64_t kFewBlocks = 128;
  const int64_t max_rows =
      std::max(CeilDiv(line_threads, plan.row_threads), call.kept.size() * g.channels / kFewBlocks);
  plan.rows = std::min({g.channels, max_rows, kThreads / (plan.groups * plan.row_threads)});
  plan.group_threads = plan.rows * plan.row_threads;
  plan.channel_blocks = CeilDiv(g.channels, plan.rows);
  // No more blocks than run at once should add sums.
  constexpr int64_t kMinItems = 2;
  constexpr int64_t kManyBlocks = 512;
  const int64_t most = std::min(plan.items / (plan.groups * kMinItems),
                                kManyBlocks / (call.kept.size() * plan.channel_blocks));
  plan.splits = std::clamp<int64_t>(most, 1, gradients.splits);
  plan.per_split = CeilDiv(plan.items, plan.splits);
  plan.whole = plan.splits == 1 && g.channels == g.heads;
  plan.blocks = call.kept.size() * plan.splits * plan.channel_blocks;
  return plan;
}

template <typename Function>
cudaError_t DispatchKernel(DType dtype, int64_t taps, Function&& launch) {
  return DispatchFloat(dtype, [&](auto element) {
    using T = decltype(element);
    if constexpr (!std::is_same_v<T, double>) {
      return DispatchTaps<kMinTaps, kMaxTaps>(
          taps, [&](auto constant) { return launch(element, constant); });
    }
    return cudaErrorInvalidValue;
  });
}

// Kernels count threads and items in 32 bits.
constexpr int64_t kMaxCount = int64_t{1} << 30;

}  // namespace

bool CanRunCausal(const Forward& call, const Device&) {
  if (!CanRun(call.geometry, call.dtype) || call.batch.rank() > 2) return false;
  const ForwardPlan plan = MakePlan(call);
  return plan.outer <= kMaxGridBlocks && plan.inner <= kMaxCount && plan.threads <= kMaxCount;
}

bool CanRunCausal(const Gradients& gradients, const Device&) {
  const Backward& call = gradients.call;
  if (!CanRun(call.geometry, call.dtype) || call.kept.rank() > 1 || call.summed.rank() > 1) {
    return false;
  }
  const BackwardPlan plan = MakePlan(gradients);
  return plan.items <= kMaxCount && plan.blocks <= kMaxBlocks;
}

cudaError_t LaunchCausal(cudaStream_t stream, const Forward& call, const Device&) {
  const Geometry& g = call.geometry;
  const ForwardPlan plan = MakePlan(call);
  CausalForwardParams p{};
  p.x = call.x;
  p.weight = call.weight;
  p.bias = call.bias;
  p.y = call.y;
  const int inner = plan.inner_dim;
  p.x_inner = call.batch.stride(inner, Forward::kX);
  p.weight_inner = call.batch.stride(inner, Forward::kWeight);
  p.bias_inner = call.batch.stride(inner, Forward::kBias);
  p.y_inner = call.batch.stride(inner, Forward::kY);
  p.x_outer = call.batch.stride(0, Forward::kX);
  p.weight_outer = call.batch.stride(0, Forward::kWeight);
  p.bias_outer = call.batch.stride(0, Forward::kBias);
  p.y_outer = call.batch.stride(0, Forward::kY);
  p.time = static_cast<int>(g.time);
  p.time_step = plan.by_entries
                    ? 0
                    : static_cast<int>(plan.row_threads * 16 / jaxops::cuda::SizeOf(call.dtype));
  p.x_step = plan.by_entries ? p.x_inner : p.time_step;
  p.y_step = plan.by_entries ? p.y_inner : p.time_step;
  p.entries = plan.by_entries ? static_cast<int>(plan.per_thread) : 1;
  p.per_thread = static_cast<int>(plan.per_thread);
  p.threads = static_cast<uint32_t>(plan.threads);
  p.inner = static_cast<uint32_t>(plan.inner);
  p.flip_taps = call.flip_taps;
  p.row_threads = FastDivider(plan.row_threads);
  p.channels = FastDivider(g.channels);
  p.depth = FastDivider(g.channels / g.heads);
  p.weight_dtype = call.weight_dtype;
  p.bias_dtype = call.bias_dtype;
  p.activation = call.activation;
  return DispatchKernel(call.dtype, g.taps, [&](auto element, auto taps) {
    return DispatchBool(plan.outer > 1, [&](auto nested) {
      const dim3 grid(static_cast<unsigned>(CeilDiv(plan.threads, kThreads)),
                      static_cast<unsigned>(plan.outer));
      CausalForwardNct<decltype(element), taps.value, nested.value>
          <<<grid, kThreads, 0, stream>>>(p);
      return cudaGetLastError();
    });
  });
}

cudaError_t LaunchCausal(cudaStream_t stream, const Gradients& gradients, const Device&) {
  const Backward& call = gradients.call;
  const Geometry& g = call.geometry;
  const BackwardPlan plan = MakePlan(gradients);
  CausalBackwardParams p{};
  p.x = call.x;
  p.weight = call.weight;
  p.g = call.g;
  p.dx = call.dx;
  p.kept_x = call.kept.stride(0, Backward::kX);
  p.kept_weight = call.kept.stride(0, Backward::kWeight);
  p.kept_g = call.kept.stride(0, Backward::kG);
  p.kept_dx = call.kept.stride(0, Backward::kDx);
  p.summed_x = call.summed.stride(0, Backward::kX);
  p.summed_g = call.summed.stride(0, Backward::kG);
  p.summed_dx = call.summed.stride(0, Backward::kDx);
  p.time = static_cast<int>(g.time);
  p.items = static_cast<int>(plan.items);
  p.per_split = static_cast<int>(plan.per_split);
  p.parts = FastDivider(plan.parts);
  p.channel_blocks = FastDivider(plan.channel_blocks);
  p.depth = FastDivider(g.channels / g.heads);
  p.sums = RowSums(gradients, plan);
  const cudaError_t error = DispatchKernel(call.dtype, g.taps, [&](auto element, auto taps) {
    return Launch(CausalBackwardNct<decltype(element), taps.value>, plan.blocks, kThreads, 0,
                  stream, p);
  });
  if (error != cudaSuccess || plan.whole) return error;
  return AddPartialSums(stream, call, {gradients.partials, plan.splits});
}

}  // namespace jaxops::lightweight_conv::cuda::nct
