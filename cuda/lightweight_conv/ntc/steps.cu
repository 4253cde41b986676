// This kernel computes small forward calls of lightweight convolution with short filters in the NTC
// layout.
//
// The latency from the launch to the first result bounds a small call. A thread computes one step
// of a channel or of a pair of channels; the number of taps is a template argument, the thread
// finds its indices without a division, and the parameters fit few lines of the constant cache.
#include "cuda/common/activation.cuh"
#include "cuda/lightweight_conv/families.h"
#include "cuda/lightweight_conv/filters.cuh"
#include "cuda/lightweight_conv/ntc/rows.cuh"

namespace jaxops::lightweight_conv::cuda::ntc {
namespace {

using jaxops::cuda::Activate;
using jaxops::cuda::AddTaps;

// Up to this number of elements, a thread computes a single element.
constexpr int64_t kMaxSingleElements = int64_t{1} << 15;

struct Steps {
  const void *x, *weight;
  int64_t plane;    // elements of a batch entry
  int64_t before;   // from a step to the row of its first tap
  int64_t advance;  // from the row of a tap to that of the next tap
  int channels, time;
  int first, next;  // from a step to that of its first tap, and from a tap's step to the next
  bool one_head;    // pairs of channels are always of one head
  Activation activation;
  FastDivider depth;
  const void* bias;
  void* y;
};

constexpr int kStepThreads = 256;
constexpr int kStepRows = kStepThreads / kWarp;

template <typename T, int kV, int kTaps>
__global__ void __launch_bounds__(kStepThreads) StepForwardNtc(const __grid_constant__ Steps p) {
  const int channel = (blockIdx.x * kWarp + threadIdx.x % kWarp) * kV;
  const int step = blockIdx.y * kStepRows + threadIdx.x / kWarp;
  if (channel >= p.channels || step >= p.time) return;
  T weight[kTaps][kV];
  const auto read_taps = [&](int v) {
    const T* filter = static_cast<const T*>(p.weight) + p.depth.Quotient(channel + v) * kTaps;
#pragma unroll
    for (int k = 0; k < kTaps; ++k) weight[k][v] = filter[k];
  };
  read_taps(0);
  const int64_t at = blockIdx.z * p.plane + (int64_t{step} * p.channels + channel);
  const T* x = static_cast<const T*>(p.x) + at + p.before;
  int t = step + p.first;
  Raw<T, kV> rows[kTaps];
#pragma unroll
  for (int k = 0; k < kTaps; ++k) {
    rows[k] = LoadRawIf<kV>(static_cast<unsigned>(t) < static_cast<unsigned>(p.time), x);
    x += p.advance;
    t += p.next;
  }
  if constexpr (kV > 1) {
    if (p.one_head) {
#pragma unroll
      for (int k = 0; k < kTaps; ++k) weight[k][1] = weight[k][0];
    } else {
      read_taps(1);
    }
  }
  Accumulator<T> sums[kV] = {};
  if (p.bias != nullptr) {
    WidenAll(sums, LoadRaw<kV>(static_cast<const T*>(p.bias) + channel));
  }
  AddTaps(sums, weight, rows);
  Activate(sums, p.activation);
  StoreRow(static_cast<T*>(p.y) + at, sums);
}

struct Plan {
  int channels;  // per thread: one or two
  dim3 grid;
};

Plan MakePlan(const Forward& call) {
  const Geometry& g = call.geometry;
  const bool single =
      g.channels % 2 != 0 || call.batch.size() * g.time * g.channels <= kMaxSingleElements;
  Plan plan;
  plan.channels = single ? 1 : 2;
  plan.grid = dim3(static_cast<unsigned>(CeilDiv(g.channels, plan.channels * kWarp)),
                   static_cast<unsigned>(CeilDiv(g.time, kStepRows)),
                   static_cast<unsigned>(call.batch.size()));
  return plan;
}

template <typename T, int kV>
cudaError_t LaunchPlan(cudaStream_t stream, const Forward& call, const Plan& plan) {
  const Geometry& g = call.geometry;
  // Flipped taps start at the last row of the window.
  const int64_t first = call.flip_taps ? Mirrored(g) : -g.padding;
  const int64_t next = call.flip_taps ? -g.dilation : g.dilation;
  Steps params{};
  params.x = call.x;
  params.weight = call.weight;
  params.plane = g.time * g.channels;
  params.before = first * g.channels;
  params.channels = static_cast<int>(g.channels);
  params.time = static_cast<int>(g.time);
  params.first = static_cast<int>(first);
  params.next = static_cast<int>(next);
  params.advance = next * g.channels;
  params.one_head = g.channels / g.heads % kV == 0;
  params.activation = call.activation;
  params.depth = FastDivider(g.channels / g.heads);
  params.bias = call.bias;
  params.y = call.y;
  return DispatchTaps<1, kShortTaps>(g.taps, [&](auto taps) {
    StepForwardNtc<T, kV, taps.value><<<plan.grid, kStepThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

}  // namespace

// The batch entries must be contiguous and share filters of their own dtype, whose taps are counted
// in 32 bits.
bool CanRunSteps(const Forward& call, const Device&) {
  const Geometry& g = call.geometry;
  const auto& batch = call.batch;
  if (g.data_format != DataFormat::kNTC || g.taps > kShortTaps || g.heads * g.taps > INT32_MAX ||
      g.time > kMaxGridBlocks * kStepRows || call.weight_dtype != call.dtype ||
      (call.bias != nullptr && call.bias_dtype != call.dtype)) {
    return false;
  }
  const int64_t plane = g.time * g.channels;
  return batch.size() == 1 ||
         (batch.rank() == 1 && batch.size() <= kMaxGridBlocks &&
          batch.stride(0, Forward::kX) == plane && batch.stride(0, Forward::kY) == plane &&
          batch.stride(0, Forward::kWeight) == 0 &&
          (call.bias == nullptr || batch.stride(0, Forward::kBias) == 0));
}

cudaError_t LaunchSteps(cudaStream_t stream, const Forward& call, const Device&) {
  const Plan plan = MakePlan(call);
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    return plan.channels == 1 ? LaunchPlan<T, 1>(stream, call, plan)
                              : LaunchPlan<T, 2>(stream, call, plan);
  });
}

}  // namespace jaxops::lightweight_conv::cuda::ntc
