// The kernels of the steps of lightweight and of dynamic convolution.
//
// A step moves a few rows an entry and computes next to nothing: the latency from the launch to the
// last store bounds it. A thread owns a vector of channels of an entry. It reads the rows of the
// state before it writes any, so that both states may be the same memory, and no thread reads what
// another one writes.
#include <algorithm>
#include <cstdint>
#include <utility>

#include "common/fast_divide.h"
#include "cuda/common/activation.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/numeric.cuh"
#include "cuda/lightweight_conv_step/launch.h"

namespace jaxops::lightweight_conv_step::cuda {
namespace {

using jaxops::cuda::Accumulator;
using jaxops::cuda::Activate;
using jaxops::cuda::AddTaps;
using jaxops::cuda::CeilDiv;
using jaxops::cuda::DispatchFloat;
using jaxops::cuda::kVectorElements;
using jaxops::cuda::Launch;
using jaxops::cuda::LoadRaw;
using jaxops::cuda::LoadRawIf;
using jaxops::cuda::Narrow;
using jaxops::cuda::Raw;
using jaxops::cuda::StoreRaw;
using jaxops::cuda::StoreVector;
using jaxops::cuda::Vector;
using jaxops::cuda::Widen;
using jaxops::cuda::WithElements;

constexpr int kThreads = 128;

// The rows of filters up to this length stay in registers.
constexpr int kMaxRegisterTaps = 8;

// Threads own whole vectors where there are at least so many of them: fewer threads would leave
// multiprocessors without work.
constexpr int64_t kMinVectors = int64_t{1} << 14;

struct Params {
  Step call;
  int64_t items;          // threads: batch entries, entries, vectors of channels
  FastDivider64 vectors;  // of an entry
  FastDivider64 entries;
  FastDivider64 depth;  // channels of a head
};

// The part of a call that a thread owns. A slot below 0 is none.
struct Item {
  __device__ __forceinline__ Item(const Params& p, int64_t index, int width) {
    auto rest = static_cast<uint64_t>(index);
    channel = static_cast<int64_t>(p.vectors.DivMod(rest)) * width;
    const auto entry = static_cast<int64_t>(p.entries.DivMod(rest));
    batch = static_cast<int64_t>(rest);
    const Step& call = p.call;
    const int64_t rows = entry * call.steps * call.channels + channel;
    slot = call.SlotOf(batch, entry);
    const int64_t state_rows = slot * call.reach * call.channels + channel;
    x = call.batch.Offset(batch, Step::kX) + rows;
    y = call.batch.Offset(batch, Step::kY) + rows;
    state = call.batch.Offset(batch, Step::kState) + state_rows;
    new_state = call.batch.Offset(batch, Step::kNewState) + state_rows;
    weight = call.batch.Offset(batch, Step::kWeight) + entry * call.weight_entry;
    bias = call.batch.Offset(batch, Step::kBias) + channel;
  }

  int64_t batch, slot, channel;
  int64_t x, y, state, new_state, weight, bias;  // offsets in elements
};

// Steps of filters without dilation and with a state of x's dtype: the last kTaps rows are in
// registers.
template <typename T, int kV, int kTaps>
__global__ void __launch_bounds__(kThreads) StepInRegisters(const __grid_constant__ Params p) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= p.items) return;
  using Acc = Accumulator<T>;
  constexpr int kReach = kTaps - 1;
  const Step& call = p.call;
  const Item item(p, index, kV);
  const T* x = static_cast<const T*>(call.x) + item.x;
  T* y = static_cast<T*>(call.y) + item.y;
  Raw<T, kV> rows[kTaps] = {};
  if (item.slot >= 0) {
    const T* state = static_cast<const T*>(call.state) + item.state;
#pragma unroll
    for (int r = 0; r < kReach; ++r) rows[r] = LoadRaw<kV>(state + r * call.channels);
  }
  Raw<T, kV> next = LoadRawIf<kV>(call.steps > 0, x);
  Acc weight[kTaps][kV];
  WithElements(call.weight, call.weight_dtype, [&](const auto* filters) {
    filters += item.weight;
#pragma unroll
    for (int v = 0; v < kV; ++v) {
      const auto* filter =
          filters + p.depth.Quotient(static_cast<uint64_t>(item.channel + v)) * kTaps;
#pragma unroll
      for (int k = 0; k < kTaps; ++k) weight[k][v] = static_cast<Acc>(Widen(filter[k]));
    }
  });
  Acc bias[kV] = {};
  if (call.bias != nullptr) {
    WithElements(call.bias, call.bias_dtype, [&](const auto* from) {
#pragma unroll
      for (int v = 0; v < kV; ++v) bias[v] = static_cast<Acc>(Widen(from[item.bias + v]));
    });
  }
  for (int64_t s = 0; s < call.steps; ++s) {
    rows[kReach] = next;
    // The next row is in flight while this step is computed.
    if (s + 1 < call.steps) next = LoadRaw<kV>(x + (s + 1) * call.channels);
    Acc sums[kV];
#pragma unroll
    for (int v = 0; v < kV; ++v) sums[v] = bias[v];
    AddTaps(sums, weight, rows);
    Activate(sums, call.activation);
    Vector<T, kV> out;
#pragma unroll
    for (int v = 0; v < kV; ++v) out.values[v] = Narrow<T>(sums[v]);
    StoreVector(y + s * call.channels, out);
#pragma unroll
    for (int r = 0; r < kReach; ++r) rows[r] = rows[r + 1];
  }
  if (item.slot < 0) return;
  T* new_state = static_cast<T*>(call.new_state) + item.new_state;
#pragma unroll
  for (int r = 0; r < kReach; ++r) StoreRaw(new_state + r * call.channels, rows[r]);
}

// Rows that move at once.
constexpr int kRowsInFlight = 8;

// Returns the sum of rows by the softmax of their taps.
template <typename Acc, typename Tap, typename Row>
__device__ __forceinline__ Acc NormalizedSum(int64_t taps, Tap&& tap_at, Row&& row_at) {
  Acc largest = tap_at(0);
#pragma unroll kRowsInFlight
  for (int64_t k = 1; k < taps; ++k) largest = max(largest, tap_at(k));
  Acc total = 0, sum = 0;
#pragma unroll kRowsInFlight
  for (int64_t k = 0; k < taps; ++k) {
    const Acc share = exp(tap_at(k) - largest);
    total += share;
    sum += share * row_at(k);
  }
  return sum / total;
}

// Steps of any filter: every tap is read through the cache. T is the type of x, S that of the
// state.
template <typename T, typename S>
__global__ void __launch_bounds__(kThreads) StepThroughCache(const __grid_constant__ Params p) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= p.items) return;
  using Acc = Accumulator<T>;
  const Step& call = p.call;
  const Item item(p, index, 1);
  const T* x = static_cast<const T*>(call.x) + item.x;
  const S* state = static_cast<const S*>(call.state) + item.state;
  const auto row_at = [&](int64_t row) -> Acc {
    if (row >= call.reach) return Widen(x[(row - call.reach) * call.channels]);
    return item.slot < 0 ? Acc(0) : static_cast<Acc>(Widen(state[row * call.channels]));
  };
  Acc bias[1] = {};
  if (call.bias != nullptr) {
    WithElements(call.bias, call.bias_dtype,
                 [&](const auto* from) { bias[0] = static_cast<Acc>(Widen(from[item.bias])); });
  }
  int64_t filter =
      item.weight +
      static_cast<int64_t>(p.depth.Quotient(static_cast<uint64_t>(item.channel))) * call.taps;
  for (int64_t s = 0; s < call.steps; ++s, filter += call.weight_step) {
    Acc sums[1] = {bias[0]};
    WithElements(call.weight, call.weight_dtype, [&](const auto* weight) {
      const auto tap_at = [&](int64_t k) { return static_cast<Acc>(Widen(weight[filter + k])); };
      if (call.normalize) {
        sums[0] += NormalizedSum<Acc>(call.taps, tap_at,
                                      [&](int64_t k) { return row_at(s + k * call.dilation); });
        return;
      }
#pragma unroll kRowsInFlight
      for (int64_t k = 0; k < call.taps; ++k) sums[0] += tap_at(k) * row_at(s + k * call.dilation);
    });
    Activate(sums, call.activation);
    static_cast<T*>(call.y)[item.y + s * call.channels] = Narrow<T>(sums[0]);
  }
  if (item.slot < 0) return;
  S* new_state = static_cast<S*>(call.new_state) + item.new_state;
  // In place a row comes from a later one, so that rows which are already written are not read.
  for (int64_t row = 0; row < call.reach; row += kRowsInFlight) {
    Acc moved[kRowsInFlight];
#pragma unroll
    for (int r = 0; r < kRowsInFlight; ++r) {
      if (row + r < call.reach) moved[r] = row_at(row + r + call.steps);
    }
#pragma unroll
    for (int r = 0; r < kRowsInFlight; ++r) {
      if (row + r < call.reach) {
        new_state[(row + r) * call.channels] = Narrow<S>(static_cast<Accumulator<S>>(moved[r]));
      }
    }
  }
}

struct Copy {
  Step call;
  int64_t items;           // of all batch entries
  FastDivider64 of_state;  // the items of a batch entry
};

// Copies the state of each batch entry, an item a thread.
template <typename Item>
__global__ void __launch_bounds__(kThreads) CopySlots(const __grid_constant__ Copy p) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= p.items) return;
  auto batch = static_cast<uint64_t>(index);
  const auto at = static_cast<int64_t>(p.of_state.DivMod(batch));
  const auto n = static_cast<int64_t>(batch);
  static_cast<Item*>(p.call.new_state)[p.call.batch.Offset(n, Step::kNewState) + at] =
      static_cast<const Item*>(p.call.state)[p.call.batch.Offset(n, Step::kState) + at];
}

cudaError_t LaunchCopy(cudaStream_t stream, const Step& call) {
  Copy params{call};
  const int64_t of_state = call.slots * call.reach * call.channels;
  params.items = call.batch.size() * of_state;
  params.of_state = FastDivider64(of_state);
  const int64_t blocks = CeilDiv(params.items, kThreads);
  if (blocks == 0) return cudaSuccess;
  switch (SizeOf(call.state_dtype)) {
    case 2:
      return Launch(CopySlots<uint16_t>, blocks, kThreads, 0, stream, params);
    case 4:
      return Launch(CopySlots<uint32_t>, blocks, kThreads, 0, stream, params);
    default:
      return Launch(CopySlots<uint64_t>, blocks, kThreads, 0, stream, params);
  }
}

Params MakeParams(const Step& call, int width) {
  Params params{call};
  const int64_t vectors = call.channels / width;
  params.items = call.batch.size() * call.entries * vectors;
  params.vectors = FastDivider64(vectors);
  params.entries = FastDivider64(call.entries);
  params.depth = FastDivider64(call.channels / call.heads);
  return params;
}

template <typename T, int kV>
cudaError_t LaunchInRegisters(cudaStream_t stream, const Step& call) {
  const Params params = MakeParams(call, kV);
  const int64_t blocks = CeilDiv(params.items, kThreads);
  cudaError_t error = cudaErrorInvalidValue;
  [&]<int... kFewer>(std::integer_sequence<int, kFewer...>) {
    ((call.taps == kFewer + 1 ? void(error = Launch(StepInRegisters<T, kV, kFewer + 1>, blocks,
                                                    kThreads, 0, stream, params))
                              : void()),
     ...);
  }(std::make_integer_sequence<int, kMaxRegisterTaps>{});
  return error;
}

template <typename T>
cudaError_t LaunchThroughCache(cudaStream_t stream, const Step& call) {
  const Params params = MakeParams(call, 1);
  return DispatchFloat(call.state_dtype, [&](auto state) {
    using S = decltype(state);
    // Such a state makes x float64 too.
    if constexpr (sizeof(S) <= sizeof(Accumulator<T>)) {
      return Launch(StepThroughCache<T, S>, CeilDiv(params.items, kThreads), kThreads, 0, stream,
                    params);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

}  // namespace

cudaError_t LaunchStep(cudaStream_t stream, const Step& call) {
  if (call.copies_slots()) {
    const cudaError_t error = LaunchCopy(stream, call);
    if (error != cudaSuccess) return error;
  }
  const int64_t elements = call.batch.size() * call.entries * call.channels;
  if (elements == 0) return cudaSuccess;
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    // Registers hold one filter, without a softmax.
    const bool has_one_filter = !call.normalize && (call.weight_step == 0 || call.steps == 1);
    if (!has_one_filter || call.dilation != 1 || call.taps > kMaxRegisterTaps ||
        call.state_dtype != call.dtype) {
      return LaunchThroughCache<T>(stream, call);
    }
    constexpr int kWide = kVectorElements<T>;
    return call.channels % kWide == 0 && elements / kWide >= kMinVectors
               ? LaunchInRegisters<T, kWide>(stream, call)
               : LaunchInRegisters<T, 1>(stream, call);
  });
}

}  // namespace jaxops::lightweight_conv_step::cuda
