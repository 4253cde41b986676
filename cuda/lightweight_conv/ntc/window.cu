// This kernel computes forward calls of lightweight convolution with short filters in the NTC
// layout, for rows that are whole vectors of 8 bytes.
//
// A thread computes kSteps steps of a vector of channels. Its window is in registers, and all loads
// of the window are in flight at once: a loop over time, as in ntc/short, begins too slowly for
// sequences that end early.
#include "cuda/common/activation.cuh"
#include "cuda/lightweight_conv/families.h"
#include "cuda/lightweight_conv/filters.cuh"
#include "cuda/lightweight_conv/ntc/rows.cuh"

namespace jaxops::lightweight_conv::cuda::ntc {
namespace {

using jaxops::cuda::Activate;
using jaxops::cuda::AddTaps;

constexpr int kThreads = 128;
// Four steps took 18.5 us instead of 15.8 for (1024,1024,8,1024,4) bf16 with float32 filters, in
// vectors of 16 bytes; 16 steps took 14.5 instead of 11.6 for (1024,1024,8,16,3) bf16.
constexpr int kSteps = 8;

// Larger vectors leave registers for fewer threads: 16 bytes took 15.8 us instead of 12.9 for
// (1024,1024,8,1024,4) bf16 with float32 filters, and 19.2 instead of 18.6 for
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

template <typename T, int kTaps>
__global__ void __launch_bounds__(kThreads)
    WindowForwardNtc(const __grid_constant__ WindowParams p) {
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
  Vector<T, kV> rows[kRows];
  int t = first - p.padding;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    rows[i] = {};
    if (static_cast<unsigned>(t) < static_cast<unsigned>(p.time)) {
      rows[i] = LoadVector<kV>(x + int64_t{t} * p.channels);
    }
    t += p.dilation;
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

  T* y = static_cast<T*>(p.y) + batch[Forward::kY] + channel;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int step = first + i * p.dilation;
    if (step >= p.time) break;
    Acc sums[kV];
#pragma unroll
    for (int v = 0; v < kV; ++v) sums[v] = bias[v];
    AddTaps(sums, weight, rows + i);
    Activate(sums, p.activation);
    StoreRow(y + int64_t{step} * p.channels, sums);
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

template <typename T>
cudaError_t LaunchPlan(cudaStream_t stream, const Forward& call, const Plan& plan) {
  const Geometry& g = call.geometry;
  const int64_t depth = g.channels / g.heads;
  WindowParams p{};
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
  return DispatchTaps<1, kShortTaps>(g.taps, [&](auto taps) {
    return Launch(WindowForwardNtc<T, taps.value>, CeilDiv(plan.threads, kThreads), kThreads, 0,
                  stream, p);
  });
}

}  // namespace

bool CanRunWindow(const Forward& call, const Device&) {
  const Geometry& g = call.geometry;
  return g.data_format == DataFormat::kNTC && g.taps <= kShortTaps && call.dtype != DType::kF64 &&
         RowsAligned(g.channels, call.dtype, kVectorBytes) && MakePlan(call).threads <= INT32_MAX;
}

cudaError_t LaunchWindow(cudaStream_t stream, const Forward& call, const Device&) {
  const Plan plan = MakePlan(call);
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    if constexpr (std::is_same_v<T, double>) {
      return cudaErrorInvalidValue;
    } else {
      return LaunchPlan<T>(stream, call, plan);
    }
  });
}

}  // namespace jaxops::lightweight_conv::cuda::ntc
