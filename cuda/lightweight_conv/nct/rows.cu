// These kernels compute lightweight convolution without dilation of short rows in the NCT layout: a
// thread owns one vector of steps of a row and of the same row of other batch entries, so that
// neighbouring threads have neighbouring memory however short a row is.
#include "cuda/common/activation.cuh"
#include "cuda/lightweight_conv/backward.cuh"
#include "cuda/lightweight_conv/families.h"
#include "cuda/lightweight_conv/nct/row_sums.cuh"

namespace jaxops::lightweight_conv::cuda::nct {
namespace {

using jaxops::cuda::Activate;

constexpr int kThreads = 256;

// A window of kVectors vectors of kV steps begins at a whole vector and holds the inputs of kV
// steps and this number of taps.
template <int kV, int kVectors>
constexpr int kWindowTaps = kV * (kVectors - 1) + 1;

// Threads of the forward kernel have the inputs of this number of batch entries in flight. Small
// windows leave registers for several; with others more threads hide more of the latency: one
// entry instead of four makes (4096,512,8,512,7) bf16 42 -> 31 us.
JAXOPS_HOST_DEVICE constexpr int CountEntries(int window) { return window <= 12 ? 2 : 1; }

// Registers are limited so that a multiprocessor has this number of blocks. Both functions have the
// numbers that were fastest for a window of `window` values.
JAXOPS_HOST_DEVICE constexpr int CountForwardBlocks(int bytes, int window) {
  return bytes == 8 ? 1 : window == 16 ? 5 : 4;
}
JAXOPS_HOST_DEVICE constexpr int CountBackwardBlocks(int bytes, int window) {
  return bytes == 8 ? 1 : window <= 12 ? 4 : window <= 16 ? 3 : 2;
}

// Empty taps at the front of a filter let its windows begin at whole vectors.
int CountLeadingTaps(int64_t padding, int vector) {
  return static_cast<int>((vector - padding % vector) % vector);
}

// Filter is where the taps of a call are.
struct Filter {
  const void* base;
  DType dtype;
  int taps, lead;
  bool is_reversed;
  FastDivider depth;  // channels of a head

  // Read reads the taps of a channel, and zero for those that the filter does not have.
  template <int kTaps, typename Acc>
  __device__ __forceinline__ void Read(Acc (&weight)[kTaps], int64_t offset, int channel) const {
    WithElements(base, dtype, [&](const auto* weights) {
      const auto* filter = weights + offset + int64_t{depth.Quotient(channel)} * taps;
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
        const int tap = j - lead;
        const bool exists = static_cast<unsigned>(tap) < static_cast<unsigned>(taps);
        weight[j] =
            exists ? static_cast<Acc>(Widen(filter[is_reversed ? taps - 1 - tap : tap])) : Acc(0);
      }
    });
  }
  __device__ TapRange range() const { return {lead, taps}; }
};

// ReadWindow reads the vectors from step `first` on of a row, zero outside of the row. Whole
// vectors are aligned, inside of the row or outside of it.
template <bool kWhole, int kV, int kVectors, typename T>
__device__ __forceinline__ void ReadWindow(Vector<T, kV> (&window)[kVectors], const T* row,
                                           int first, int time) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int step = first + v * kV;
    window[v] = {};
    if constexpr (kWhole) {
      if (static_cast<unsigned>(step) < static_cast<unsigned>(time)) {
        window[v] = LoadVector<kV>(row + step);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kV; ++i) {
        if (static_cast<unsigned>(step + i) < static_cast<unsigned>(time)) {
          window[v].values[i] = row[step + i];
        }
      }
    }
  }
}

template <int kCount, int kV, int kVectors, typename T>
__device__ __forceinline__ void WidenVectors(Accumulator<T> (&values)[kCount],
                                             const Vector<T, kV> (&vectors)[kVectors]) {
  static_assert(kCount == kV * kVectors);
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = Widen(vectors[i / kV].values[i % kV]);
}

// WriteVector writes the first `count` values, all of a whole vector.
template <bool kWhole, int kV, typename T>
__device__ __forceinline__ void WriteVector(T* address, const Accumulator<T> (&values)[kV],
                                            int count) {
  Vector<T, kV> vec;
#pragma unroll
  for (int i = 0; i < kV; ++i) vec.values[i] = Narrow<T>(values[i]);
  if constexpr (kWhole) {
    *reinterpret_cast<Vector<T, kV>*>(address) = vec;
  } else {
#pragma unroll
    for (int i = 0; i < kV; ++i) {
      if (i < count) address[i] = vec.values[i];
    }
  }
}

// --- forward -------------------------------------------------------------------------------------

struct RowsForwardParams {
  Forward call;
  Filter filter;
  int time, padding;
  uint32_t threads;
  int batch, per_thread;  // batch entries
  FastDivider row_vectors, channels;
};

template <typename T, int kV, int kVectors, bool kWhole>
__global__ void __launch_bounds__(kThreads, CountForwardBlocks(sizeof(T), kV* kVectors))
    RowsForwardNct(const __grid_constant__ RowsForwardParams p) {
  using Acc = Accumulator<T>;
  constexpr int kTaps = kWindowTaps<kV, kVectors>;
  constexpr int kAtOnce = CountEntries(kV * kVectors);
  uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= p.threads) return;
  const int t = p.row_vectors.DivMod(index) * kV;
  const int channel = p.channels.DivMod(index);
  const int first_entry = index * p.per_thread;
  const int end_entry = min(p.batch, first_entry + p.per_thread);
  const int64_t row = int64_t{channel} * p.time;
  const T* x = static_cast<const T*>(p.call.x) + row;
  T* y = static_cast<T*>(p.call.y) + row + t;

  Acc weight[kTaps], bias = 0;
  p.filter.Read(weight, p.call.batch.Offset(first_entry, Forward::kWeight), channel);
  if (p.call.bias != nullptr) {
    WithElements(p.call.bias, p.call.bias_dtype, [&](const auto* biases) {
      bias = static_cast<Acc>(
          Widen(biases[p.call.batch.Offset(first_entry, Forward::kBias) + channel]));
    });
  }
  const TapRange taps = p.filter.range();
#pragma unroll 1
  for (int entry = first_entry; entry < end_entry; entry += kAtOnce) {
    Vector<T, kV> windows[kAtOnce][kVectors];
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) {
      const int time = entry + e < end_entry ? p.time : 0;
      ReadWindow<kWhole>(windows[e], x + p.call.batch.Offset(entry + e, Forward::kX),
                         t - p.padding - taps.first, time);
    }
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) {
      if (entry + e >= end_entry) return;
      Acc window[kV * kVectors], sums[kV];
      WidenVectors(window, windows[e]);
#pragma unroll
      for (int i = 0; i < kV; ++i) sums[i] = bias;
      taps.ForEach<kTaps>([&](int j) {
#pragma unroll
        for (int i = 0; i < kV; ++i) sums[i] += weight[j] * window[i + j];
      });
      Activate(sums, p.call.activation);
      WriteVector<kWhole>(y + p.call.batch.Offset(entry + e, Forward::kY), sums, p.time - t);
    }
  }
}

// --- backward ------------------------------------------------------------------------------------

struct RowsBackwardParams {
  Backward call;
  Filter filter;
  int time, mirrored;
  int entries, per_split;  // summed batch entries
  FastDivider channel_blocks;
  RowSums sums;
};

template <typename T, int kV, int kVectors, bool kWhole>
__global__ void __launch_bounds__(kThreads, CountBackwardBlocks(sizeof(T), kV* kVectors))
    RowsBackwardNct(const __grid_constant__ RowsBackwardParams p) {
  using Acc = Accumulator<T>;
  constexpr int kTaps = kWindowTaps<kV, kVectors>;
  // A thread's sums for the taps and for the bias.
  __shared__ Acc shared[(kTaps + 1) * kThreads];
  uint32_t block = blockIdx.x;
  const int first_channel = p.channel_blocks.DivMod(block) * p.sums.rows;
  const int split = p.sums.splits.DivMod(block);
  const int64_t kept = block;
  uint32_t index = threadIdx.x;
  uint32_t lane = p.sums.group_threads.DivMod(index);
  const int group = index;
  const int t = p.sums.row_threads.DivMod(lane) * kV;
  const int channel = first_channel + lane;
  const bool is_idle = group >= p.sums.groups || channel >= p.sums.channels;
  const int end_entry = is_idle ? 0 : min(p.entries, (split + 1) * p.per_split);
  const int64_t row = is_idle ? 0 : int64_t{channel} * p.time;
  const T* x = static_cast<const T*>(p.call.x) + p.call.kept.Offset(kept, Backward::kX) + row;
  const T* g = static_cast<const T*>(p.call.g) + p.call.kept.Offset(kept, Backward::kG) + row;
  T* dx = static_cast<T*>(p.call.dx) + p.call.kept.Offset(kept, Backward::kDx) + row + t;
  const TapRange taps = p.filter.range();
  const int origin = t - p.mirrored - taps.first;
  const Inside inside(kWhole ? kV : min(kV, p.time - t), origin, 1, p.time);
  const bool wants_dx = p.call.dx != nullptr;
  const bool wants_dbias = p.sums.dbias != nullptr;

  Acc weight[kTaps] = {};
  Acc dweight[kTaps][1] = {};
  Acc dbias = 0;
  if (wants_dx && !is_idle) {
    p.filter.Read(weight, p.call.kept.Offset(kept, Backward::kWeight), channel);
  }
  // More threads hide latency better than more entries of a thread in flight: see CountEntries.
#pragma unroll 1
  for (int entry = split * p.per_split + group; entry < end_entry; entry += p.sums.groups) {
    Vector<T, kV> own_vector[1], window_vectors[kVectors];
    ReadWindow<kWhole>(own_vector, x + p.call.summed.Offset(entry, Backward::kX), t, p.time);
    ReadWindow<kWhole>(window_vectors, g + p.call.summed.Offset(entry, Backward::kG), origin,
                       p.time);
    Acc own[kV], window[kV * kVectors];
    WidenVectors(own, own_vector);
    WidenVectors(window, window_vectors);
    if (wants_dx) {
      Acc sums[kV] = {};
      taps.ForEach<kTaps>([&](int j) {
#pragma unroll
        for (int i = 0; i < kV; ++i) sums[i] += weight[j] * window[i + j];
      });
      WriteVector<kWhole>(dx + p.call.summed.Offset(entry, Backward::kDx), sums, p.time - t);
    }
    if (wants_dbias) {
      const int before = p.mirrored + taps.first;  // from the window's first step to the first own
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
        if (j == before) {
#pragma unroll
          for (int i = 0; i < kV; ++i) dbias += window[i + j];
        }
      }
    }
    const auto own_at = [&](int i, int) { return own[i]; };
    const auto window_at = [&](int i, int) { return window[i]; };
    Correlate<kV>(dweight, own_at, window_at, taps, inside);
  }

#pragma unroll
  for (int j = 0; j < kTaps; ++j) shared[j * kThreads + threadIdx.x] = dweight[j][0];
  shared[kTaps * kThreads + threadIdx.x] = dbias;
  __syncthreads();
  p.sums.template Write<kThreads>(shared, p.filter.taps, taps.first, kTaps, first_channel, kept,
                                  split);
}

// --- launches ------------------------------------------------------------------------------------

// Kernel has the template arguments of a kernel.
struct Kernel {
  int vector;   // steps of a vector
  int vectors;  // of a window; 0: no kernel has one for the filter
  bool is_whole;
  int lead;  // empty taps
};

// Windows of rows of whole vectors, and of others. Those of 16-bit elements would have too many
// values otherwise.
template <typename T, bool kWhole>
constexpr int kVector = sizeof(T) == 8 ? 2
                        : kWhole       ? kVectorElements<T>
                                       : 4;
template <int kVector>
using Windows =
    std::conditional_t<kVector == 8, std::integer_sequence<int, 2, 3>,
                       std::conditional_t<kVector == 4, std::integer_sequence<int, 2, 3, 5>,
                                          std::integer_sequence<int, 3, 5>>>;

template <int... kSizes>
int FindWindow(std::integer_sequence<int, kSizes...>, int vector, int64_t taps) {
  int found = 0;
  ((found = found == 0 && taps <= vector * (kSizes - 1) + 1 ? kSizes : found), ...);
  return found;
}

Kernel FindKernel(const Geometry& g, DType dtype, int64_t padding) {
  return DispatchFloat(dtype, [&](auto element) {
    return DispatchBool(RowsAligned(g.time, dtype, 16), [&](auto is_whole) -> Kernel {
      constexpr int kSteps = kVector<decltype(element), is_whole.value>;
      const int lead = is_whole.value ? CountLeadingTaps(padding, kSteps) : 0;
      return {kSteps, FindWindow(Windows<kSteps>{}, kSteps, g.taps + lead), is_whole.value, lead};
    });
  });
}

// DispatchKernel calls `launch` with the template arguments of the kernel, three constants.
template <typename T, typename Function>
cudaError_t DispatchKernel(const Kernel& kernel, Function&& launch) {
  return DispatchBool(kernel.is_whole, [&](auto is_whole) {
    constexpr int kSteps = kVector<T, is_whole.value>;
    cudaError_t error = cudaErrorInvalidValue;
    const auto try_all = [&]<int... kSizes>(std::integer_sequence<int, kSizes...>) {
      const auto launch_if = [&](auto vectors) {
        if (kernel.vectors == vectors.value) {
          error = launch(std::integral_constant<int, kSteps>{}, vectors, is_whole);
        }
      };
      (launch_if(std::integral_constant<int, kSizes>{}), ...);
    };
    try_all(Windows<kSteps>{});
    return error;
  });
}

Filter MakeFilter(const void* weight, DType dtype, const Geometry& g, int lead, bool is_reversed) {
  return {weight, dtype,       static_cast<int>(g.taps),
          lead,   is_reversed, FastDivider(g.channels / g.heads)};
}

struct ForwardPlan {
  Kernel kernel;
  int64_t per_thread;  // batch entries
  int64_t threads;
};

ForwardPlan MakePlan(const Forward& call) {
  const Geometry& g = call.geometry;
  ForwardPlan plan;
  plan.kernel = FindKernel(g, call.dtype, g.padding);
  // Taps are read once for several batch entries, if threads that fill a device remain. Half or
  // twice as many threads cost up to 10 %.
  constexpr int64_t kManyThreads = 1 << 19;
  constexpr int64_t kMaxEntries = 16;
  const int64_t entry_threads = g.channels * CeilDiv(g.time, plan.kernel.vector);
  const int64_t batch = call.batch.size();
  plan.per_thread = SharesFilters(call)
                        ? std::clamp<int64_t>(batch * entry_threads / kManyThreads, 1, kMaxEntries)
                        : 1;
  plan.threads = CeilDiv(batch, plan.per_thread) * entry_threads;
  return plan;
}

struct BackwardPlan {
  Kernel kernel;
  int64_t rows, groups, group_threads, row_threads;
  int64_t splits, per_split, channel_blocks, blocks;
  bool whole;
};

BackwardPlan MakePlan(const Gradients& gradients) {
  const Backward& call = gradients.call;
  const Geometry& g = call.geometry;
  BackwardPlan plan;
  plan.kernel = FindKernel(g, call.dtype, Mirrored(g));
  // A group of threads reads the memory of a warp, and the groups of a block share their sums.
  plan.row_threads = CeilDiv(g.time, plan.kernel.vector);
  plan.rows = std::min(g.channels, CeilDiv(kWarp, plan.row_threads));
  plan.group_threads = plan.rows * plan.row_threads;
  plan.groups = std::max<int64_t>(1, kThreads / plan.group_threads);
  plan.channel_blocks = CeilDiv(g.channels, plan.rows);
  // A thread should have several batch entries before its block adds sums, and no more blocks than
  // run at once should add any: twice as many cost up to 20 %.
  constexpr int64_t kLeastEntries = 4;
  constexpr int64_t kProcessors = 128;
  const int64_t blocks =
      kProcessors * CountBackwardBlocks(jaxops::cuda::SizeOf(call.dtype),
                                        plan.kernel.vector * plan.kernel.vectors);
  const int64_t entries = call.summed.size();
  const int64_t most = std::min(entries / (plan.groups * kLeastEntries),
                                blocks / (call.kept.size() * plan.channel_blocks));
  plan.splits = std::clamp<int64_t>(most, 1, gradients.splits);
  plan.per_split = CeilDiv(entries, plan.splits);
  plan.whole = plan.splits == 1 && g.channels == g.heads;
  plan.blocks = call.kept.size() * plan.splits * plan.channel_blocks;
  return plan;
}

// Kernels count threads and batch entries in 32 bits.
constexpr int64_t kMaxCount = int64_t{1} << 30;

bool CanRun(const Geometry& g) { return g.data_format == DataFormat::kNCT && g.dilation == 1; }

}  // namespace

bool CanRunRows(const Forward& call, const Device&) {
  if (!CanRun(call.geometry)) return false;
  const ForwardPlan plan = MakePlan(call);
  return plan.kernel.vectors != 0 && plan.threads <= kMaxCount && call.batch.size() <= kMaxCount;
}

bool CanRunRows(const Gradients& gradients, const Device&) {
  const Backward& call = gradients.call;
  const Geometry& g = call.geometry;
  if (!CanRun(g)) return false;
  const BackwardPlan plan = MakePlan(gradients);
  return plan.kernel.vectors != 0 && plan.group_threads <= kThreads && plan.blocks <= kMaxBlocks &&
         call.summed.size() <= kMaxCount;
}

cudaError_t LaunchRows(cudaStream_t stream, const Forward& call, const Device&) {
  const Geometry& g = call.geometry;
  const ForwardPlan plan = MakePlan(call);
  RowsForwardParams p{};
  p.call = call;
  p.filter = MakeFilter(call.weight, call.weight_dtype, g, plan.kernel.lead, call.flip_taps);
  p.time = static_cast<int>(g.time);
  p.padding = static_cast<int>(g.padding);
  p.threads = static_cast<uint32_t>(plan.threads);
  p.batch = static_cast<int>(call.batch.size());
  p.per_thread = static_cast<int>(plan.per_thread);
  p.row_vectors = FastDivider(CeilDiv(g.time, plan.kernel.vector));
  p.channels = FastDivider(g.channels);
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    return DispatchKernel<T>(plan.kernel, [&](auto vector, auto vectors, auto is_whole) {
      return Launch(RowsForwardNct<T, vector.value, vectors.value, is_whole.value>,
                    CeilDiv(plan.threads, kThreads), kThreads, 0, stream, p);
    });
  });
}

cudaError_t LaunchRows(cudaStream_t stream, const Gradients& gradients, const Device&) {
  const Backward& call = gradients.call;
  const Geometry& g = call.geometry;
  const BackwardPlan plan = MakePlan(gradients);
  RowsBackwardParams p{};
  p.call = call;
  p.mirrored = static_cast<int>(Mirrored(g));
  p.filter = MakeFilter(call.weight, call.weight_dtype, g, plan.kernel.lead, true);
  p.time = static_cast<int>(g.time);
  p.entries = static_cast<int>(call.summed.size());
  p.per_split = static_cast<int>(plan.per_split);
  p.channel_blocks = FastDivider(plan.channel_blocks);
  p.sums = RowSums(gradients, plan);
  const cudaError_t error = DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    return DispatchKernel<T>(plan.kernel, [&](auto vector, auto vectors, auto is_whole) {
      return Launch(RowsBackwardNct<T, vector.value, vectors.value, is_whole.value>, plan.blocks,
                    kThreads, 0, stream, p);
    });
  });
  if (error != cudaSuccess || plan.whole) return error;
  return AddPartialSums(stream, call, {gradients.partials, plan.splits});
}

}  // namespace jaxops::lightweight_conv::cuda::nct
