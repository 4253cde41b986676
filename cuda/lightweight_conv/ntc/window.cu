// This kernel computes forward calls of lightweight convolution with short filters in the NTC
// layout, for rows that are whole vectors of 8 bytes.
//
// Memory bounds these calls. A thread computes kSteps steps of a vector of channels. Its window is
// in registers, and all loads of the window are in flight at once. Neighbouring windows share rows,
// which come from the cache.
//
// Kernels with kPacked have segments or states, and causal filters. The start of the last step's
// segment tells whether the windows of all steps are of one segment.
#include "cuda/common/activation.cuh"
#include "cuda/lightweight_conv/families.h"
#include "cuda/lightweight_conv/filters.cuh"
#include "cuda/lightweight_conv/ntc/rows.cuh"
#include "cuda/lightweight_conv/packed.h"

namespace jaxops::lightweight_conv::cuda::ntc {
namespace {

using jaxops::cuda::Activate;
using jaxops::cuda::AddTap;
using jaxops::cuda::AddTaps;

constexpr int kThreads = 128;
// Before 16-bit elements stayed in pairs, four steps in vectors of 16 bytes took 18.5 us instead of
// 15.8 for (1024,1024,8,1024,4) bf16 with float32 filters, and 16 steps 14.5 instead of 11.6 for
// (1024,1024,8,16,3) bf16.
constexpr int kSteps = 8;

// Larger vectors leave registers for fewer threads: at that time 16 bytes took 15.8 us instead of
// 12.9 for (1024,1024,8,1024,4) bf16 with float32 filters, and 19.2 instead of 18.6 for
// (2,1024,4096,1,8) f32.
constexpr int kVectorBytes = 8;
template <typename T>
constexpr int kChannels = kVectorBytes / sizeof(T);

// The filters of a vector's channels.
enum class Filters { kOne, kConsecutive, kAny };

struct WindowParams {
  const void *x, *weight, *bias;
  void* y;
  int time, channels, padding, dilation;
  DType weight_dtype, bias_dtype;
  Filters filters;
  bool flip_taps;
  Activation activation;
  uint32_t threads;
  FastDivider vectors;   // of a row
  FastDivider segments;  // kSteps steps of a phase: those of all phases of a sequence
  FastDivider phases;
  FastDivider depth;  // channels of a head
  BatchMap<Forward::kOperands> batch;
};

struct PackedWindowParams : WindowParams {
  const int32_t* starts;  // null: one segment, which has begun before the state
  const void* state;      // of the type of x; null: none
};

// ReadFilters reads the taps of kV channels in the order in which they are used.
template <int kTaps, int kV, typename Acc, typename W>
__device__ __forceinline__ void ReadFilters(Acc (&weight)[kTaps][kV], const W* weights, int channel,
                                            const WindowParams& p) {
  if (p.filters == Filters::kConsecutive) {
    // kTaps vectors of kV elements hold the taps of all channels.
    Vector<W, kV> vectors[kTaps];
#pragma unroll
    for (int i = 0; i < kTaps; ++i) {
      vectors[i] = LoadVector<kV>(weights + int64_t{channel} * kTaps + i * kV);
    }
    const auto element = [&](int i) { return vectors[i / kV].values[i % kV]; };
#pragma unroll
    for (int v = 0; v < kV; ++v) {
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        const W tap = p.flip_taps ? element(v * kTaps + kTaps - 1 - k) : element(v * kTaps + k);
        weight[k][v] = static_cast<Acc>(Widen(tap));
      }
    }
    return;
  }
#pragma unroll
  for (int v = 0; v < kV; ++v) {
    if (v == 0 || p.filters == Filters::kAny) {
      const W* filter = weights + int64_t{p.depth.Quotient(channel + v)} * kTaps;
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        weight[k][v] = static_cast<Acc>(Widen(filter[p.flip_taps ? kTaps - 1 - k : k]));
      }
    } else {
#pragma unroll
      for (int k = 0; k < kTaps; ++k) weight[k][v] = weight[k][0];
    }
  }
}

// Registers are limited so that a multiprocessor has this number of blocks. Without, 16-bit kernels
// with segments would have 78, 90, 96 and 110 registers for four to seven taps and not 72, 80, 80
// and 96, and others 102 for eight and not 96.
template <int kTaps, bool kPacked>
constexpr int kBlocks = kTaps == 8              ? 5
                        : !kPacked || kTaps < 4 ? 1
                        : kTaps == 4            ? 7
                        : kTaps == 7            ? 5
                                                : 6;

template <typename T, int kTaps, bool kPacked>
__global__ void __launch_bounds__(kThreads, kBlocks<kTaps, kPacked>) WindowForwardNtc(
    const __grid_constant__ std::conditional_t<kPacked, PackedWindowParams, WindowParams> p) {
  using Acc = Accumulator<T>;
  constexpr int kV = kChannels<T>;
  uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= p.threads) return;
  const int channel = p.vectors.DivMod(index) * kV;
  uint32_t segment = p.segments.DivMod(index);
  const auto batch = p.batch.AllOffsets(index);
  // Phases vary fastest, so that neighbouring threads read neighbouring rows.
  const int phase = p.phases.DivMod(segment);
  const int first = phase + static_cast<int>(segment) * kSteps * p.dilation;

  // Row i is that of the first tap of step i.
  constexpr int kRows = kSteps + kTaps - 1;
  const T* x = static_cast<const T*>(p.x) + batch[Forward::kX] + channel;
  Raw<T, kV> rows[kRows];
  int t = first - p.padding;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const bool exists = static_cast<unsigned>(t) < static_cast<unsigned>(p.time);
    rows[i] = LoadRawIf<kV>(exists, x + int64_t{t} * p.channels);
    t += p.dilation;
  }
  if constexpr (kPacked) {
    if (p.state != nullptr && first < p.padding) {
      const T* state = static_cast<const T*>(p.state) + batch[Forward::kState] + channel;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = first + i * p.dilation;  // of the state
        if (row < p.padding) rows[i] = LoadRaw<kV>(state + int64_t{row} * p.channels);
      }
    }
  }
  const int32_t* starts = nullptr;
  int last_start = INT32_MIN;  // of the last step's segment
  if constexpr (kPacked) {
    if (p.starts != nullptr) {
      starts = p.starts + batch[Forward::kStarts];
      const int steps = min(kSteps, DivideByDilation(p.time - first, p.dilation));
      last_start = starts[first + (steps - 1) * p.dilation];
    }
  }

  Acc weight[kTaps][kV], bias[kV] = {};
  WithElements(p.weight, p.weight_dtype, [&](const auto* weights) {
    ReadFilters(weight, weights + batch[Forward::kWeight], channel, p);
  });
  if (p.bias != nullptr) {
    WithElements(p.bias, p.bias_dtype, [&](const auto* biases) {
#pragma unroll
      for (int v = 0; v < kV; ++v) {
        bias[v] = static_cast<Acc>(Widen(biases[batch[Forward::kBias] + channel + v]));
      }
    });
  }

  // Taps read rows from this step on, of the sequence and the state. Rows before the sequence are
  // zeros, but those of a state are not.
  int lowest = 0;
  bool are_whole = true;
  if constexpr (kPacked) {
    if (p.state != nullptr) lowest = -p.padding;
    // The comparison is here so that the loads of filters do not wait for the start.
    are_whole = max(last_start, lowest) <= max(first - p.padding, lowest);
  }
  T* y = static_cast<T*>(p.y) + batch[Forward::kY] + channel;
  // There is a loop for whole windows and one for others: a branch in each step would widen rows
  // again for each of their taps.
  const auto compute = [&](auto add) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int step = first + i * p.dilation;
      if (step >= p.time) return;
      Acc sums[kV];
#pragma unroll
      for (int v = 0; v < kV; ++v) sums[v] = bias[v];
      add(sums, i, step);
      Activate(sums, p.activation);
      StoreRow(y + int64_t{step} * p.channels, sums);
    }
  };
  if (are_whole) {
    compute([&](auto& sums, int i, int) { AddTaps(sums, weight, rows + i); });
  } else {
    compute([&](auto& sums, int i, int step) {
      const int first_row = starts == nullptr ? lowest : max(lowest, starts[step]);
      const int first_tap = CountTapsBefore(first_row - (step - p.padding), p.dilation);
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        if (k >= first_tap) AddTap(sums, weight[k], rows[i + k]);
      }
    });
  }
}

struct Plan {
  int64_t vectors, phases, segments, threads;
};

Plan MakePlan(const Forward& call) {
  const Geometry& g = call.geometry;
  Plan plan;
  plan.vectors = g.channels * jaxops::cuda::SizeOf(call.dtype) / kVectorBytes;
  plan.phases = std::min(g.dilation, g.time);
  plan.segments = plan.phases * CeilDiv(CeilDiv(g.time, g.dilation), kSteps);
  plan.threads = call.batch.size() * plan.segments * plan.vectors;
  return plan;
}

template <typename T, bool kPacked>
cudaError_t LaunchPlan(cudaStream_t stream, const Forward& call, const Plan& plan) {
  const Geometry& g = call.geometry;
  const int64_t depth = g.channels / g.heads;
  std::conditional_t<kPacked, PackedWindowParams, WindowParams> p{};
  p.x = call.x;
  p.weight = call.weight;
  p.bias = call.bias;
  p.y = call.y;
  p.time = static_cast<int>(g.time);
  p.channels = static_cast<int>(g.channels);
  p.padding = static_cast<int>(g.padding);
  p.dilation = static_cast<int>(g.dilation);
  p.weight_dtype = call.weight_dtype;
  p.bias_dtype = call.bias_dtype;
  p.filters = depth % kChannels<T> == 0 ? Filters::kOne
              : depth == 1              ? Filters::kConsecutive
                                        : Filters::kAny;
  p.flip_taps = call.flip_taps;
  p.activation = call.activation;
  p.threads = static_cast<uint32_t>(plan.threads);
  p.vectors = FastDivider(plan.vectors);
  p.segments = FastDivider(plan.segments);
  p.phases = FastDivider(plan.phases);
  p.depth = FastDivider(depth);
  p.batch = call.batch;
  if constexpr (kPacked) {
    p.starts = call.starts;
    p.state = call.state;
  }
  return DispatchTaps<kPacked ? 2 : 1, kShortTaps>(g.taps, [&](auto taps) {
    return Launch(WindowForwardNtc<T, taps.value, kPacked>, CeilDiv(plan.threads, kThreads),
                  kThreads, 0, stream, p);
  });
}

template <bool kPacked>
cudaError_t LaunchCall(cudaStream_t stream, const Forward& call) {
  const Plan plan = MakePlan(call);
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    if constexpr (std::is_same_v<T, double>) {
      return cudaErrorInvalidValue;
    } else {
      return LaunchPlan<T, kPacked>(stream, call, plan);
    }
  });
}

}  // namespace

bool CanRunWindow(const Forward& call, const Device&) {
  const Geometry& g = call.geometry;
  return g.data_format == DataFormat::kNTC && g.taps <= kShortTaps && call.dtype != DType::kF64 &&
         RowsAligned(g.channels, call.dtype, kVectorBytes) && MakePlan(call).threads <= INT32_MAX;
}
bool CanRunWindowOfSegments(const Forward& call, const Device& device) {
  return call.geometry.taps > 1 && Mirrored(call.geometry) == 0 && call.slots == nullptr &&
         (call.state == nullptr || call.state_dtype == call.dtype) && CanRunWindow(call, device);
}

cudaError_t LaunchWindow(cudaStream_t stream, const Forward& call, const Device&) {
  return LaunchCall<false>(stream, call);
}
cudaError_t LaunchWindowOfSegments(cudaStream_t stream, const Forward& call, const Device&) {
  return LaunchCall<true>(stream, call);
}

}  // namespace jaxops::lightweight_conv::cuda::ntc
