// The kernels of the steps of lightweight and of dynamic convolution.
//
// A step moves a few rows an entry and computes next to nothing: the latency from the launch to the
// last store bounds it. A thread owns a vector of channels of an entry, or a block owns kWarp of
// them. The owner reads the rows that its results need before it writes there, so that both states
// may be the same memory, and no owner reads what another one writes.
#include <algorithm>
#include <cstdint>
#include <type_traits>
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
using jaxops::cuda::kWarp;
using jaxops::cuda::Launch;
using jaxops::cuda::LoadRaw;
using jaxops::cuda::LoadRawIf;
using jaxops::cuda::MaxHeadsOfTile;
using jaxops::cuda::Narrow;
using jaxops::cuda::Raw;
using jaxops::cuda::StoreRaw;
using jaxops::cuda::StoreVector;
using jaxops::cuda::Vector;
using jaxops::cuda::Widen;
using jaxops::cuda::WithElements;

constexpr int kThreads = 128;

// The rows of filters up to this length stay in registers: a step of (64,1024) f32 with 7 taps
// takes 2.2 us on an H200, and 3.8 by StepByWarps.
constexpr int kMaxRegisterTaps = 8;

// Threads own whole vectors where there are at least so many of them: fewer threads would leave
// multiprocessors without work.
constexpr int64_t kMinVectors = int64_t{1} << 14;

// The warps of a block share the rows of an entry. Their number doubles until a warp has at most
// kMaxRowsOfWarp, and then until it has at most kMinRowsOfWarp or the grid has kGridWarps. With 1,
// 2, 4 and 8 warps an earlier form of the kernel took 15.0, 8.8, 5.9 and 5.2 us for the 256 blocks
// of (64,1024) bf16 with 31 taps on an H200, and 26.1, 26.4, 30.8 and 51.1 for the 4096 blocks of
// (256,4096) with 15 taps.
constexpr int kMaxWarps = 8, kMinRowsOfWarp = 4, kMaxRowsOfWarp = 16;
constexpr int64_t kGridWarps = 2048;

// Blocks own whole vectors of channels if shared memory has the weights of all taps, or if the grid
// has at least kMinBlocks: the 16 of (4,1024) bf16 with 1024 heads and 1023 taps took 328 us, and
// 101 with single channels.
constexpr int64_t kMinBlocks = 256;

// Shared memory has at most this number of bytes of weights at a time: eight blocks, which have all
// threads of a multiprocessor, then fit in the 227 KiB of a Hopper GPU with their sums.
constexpr int64_t kWeightBytes = 16 * 1024;

struct Params {
  Step call;
  int64_t items;          // batch entries, entries, vectors or tiles of channels
  FastDivider64 vectors;  // of an entry
  FastDivider64 entries;
  FastDivider64 depth;  // channels of a head
};

// The part of a call that a thread or a block owns. A slot below 0 is none.
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

// Replaces the taps of a channel by their softmax.
template <typename Acc, int kTaps, int kV>
__device__ __forceinline__ void Softmax(Acc (&weight)[kTaps][kV]) {
#pragma unroll
  for (int v = 0; v < kV; ++v) {
    Acc largest = weight[0][v], total = 0;
#pragma unroll
    for (int k = 1; k < kTaps; ++k) largest = max(largest, weight[k][v]);
#pragma unroll
    for (int k = 0; k < kTaps; ++k) total += weight[k][v] = exp(weight[k][v] - largest);
#pragma unroll
    for (int k = 0; k < kTaps; ++k) weight[k][v] /= total;
  }
}

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
  if (call.normalize) Softmax(weight);
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

struct WarpsParams {
  Params step;            // its items are blocks: tiles of channels of an entry
  FastDivider head_size;  // channels of a head, at most those of a tile
  FastDivider chunk;      // taps whose weights are in shared memory at a time
  int pitch;              // between the weights of taps, at least the heads of a tile
};

// Rows of the state that a warp moves at a time: all rows of a small call are then in flight at
// once.
constexpr int kRowsInFlight = kMinRowsOfWarp;

// Calls `set(head, k, weight)` with the softmax of taps [first, last) of every head, whose `taps`
// taps begin at `filters`. Up to kWarp neighbouring threads share a head.
template <typename Acc, typename W, typename Set>
__device__ __forceinline__ void SoftmaxOfHeads(const W* filters, int64_t taps, int heads,
                                               int64_t first, int64_t last, Set&& set) {
  int lanes = kWarp;
  while (lanes > 1 && heads * lanes > static_cast<int>(blockDim.x)) lanes /= 2;
  const int lane = threadIdx.x % lanes;
  for (int base = threadIdx.x / kWarp * kWarp / lanes; base < heads; base += blockDim.x / lanes) {
    const int head = base + threadIdx.x % kWarp / lanes;
    const W* filter = filters + min(head, heads - 1) * taps;
    const auto tap_at = [&](int64_t k) { return static_cast<Acc>(Widen(filter[k])); };
    Acc largest = tap_at(0), total = 0;
    for (int64_t k = lane; k < taps; k += lanes) largest = max(largest, tap_at(k));
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      largest = max(largest, __shfl_xor_sync(0xffffffff, largest, distance));
    }
    for (int64_t k = lane; k < taps; k += lanes) total += exp(tap_at(k) - largest);
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      total += __shfl_xor_sync(0xffffffff, total, distance);
    }
    if (head >= heads) continue;
    for (int64_t k = first + lane; k < last; k += lanes) {
      set(head, k, exp(tap_at(k) - largest) / total);
    }
  }
}

// Steps of any filter: the warps of a block share the taps of kWarp vectors of channels of an
// entry, and the rows of its state. T is the type of x, S that of the state.
template <typename T, typename S, int kV>
__global__ void __launch_bounds__(kWarp* kMaxWarps)
    StepByWarps(const __grid_constant__ WarpsParams p) {
  using Acc = Accumulator<T>;
  constexpr int kTile = kWarp * kV;
  const Step& call = p.step.call;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  extern __shared__ __align__(16) unsigned char shared[];
  Acc* const weights = reinterpret_cast<Acc*>(shared);  // by tap and head
  const auto chunk = static_cast<int>(p.chunk.divisor());
  Acc* const partial = weights + chunk * p.pitch;  // sums by warp
  for (int64_t block = blockIdx.x; block < p.step.items; block += gridDim.x) {
    const Item item(p.step, block, kTile);
    const int width = static_cast<int>(min(int64_t{kTile}, call.channels - item.channel));
    const bool is_channel = lane * kV < width;
    const T* x = static_cast<const T*>(call.x) + item.x + lane * kV;
    const S* state = static_cast<const S*>(call.state) + item.state + lane * kV;
    // Both states may be the same memory: all warps load their next rows before one of them stores.
    const int64_t reach = item.slot >= 0 ? call.reach : 0;
    Raw<S, kV> moved[kRowsInFlight];
    const auto load_rows = [&](int64_t first) {
#pragma unroll
      for (int r = 0; r < kRowsInFlight; ++r) {
        const int64_t to = first + r * warps, row = to + call.steps;
        if (to >= reach || !is_channel) continue;
        if (row < call.reach) {
          moved[r] = LoadRaw<kV>(state + row * call.channels);
        } else if constexpr (std::is_same_v<T, S>) {
          moved[r] = LoadRaw<kV>(x + (row - call.reach) * call.channels);
        } else {
          const Acc value = Widen(x[(row - call.reach) * call.channels]);
          moved[r].words.values[0] = Narrow<S>(static_cast<Accumulator<S>>(value));
        }
      }
    };
    // The rows are in flight while the weights are read, and in the cache for the sums.
    load_rows(warp);
    auto first_head = static_cast<uint64_t>(item.channel);
    const auto before = static_cast<int64_t>(p.step.depth.DivMod(first_head));
    // Channels of the tile before its second head.
    const int of_first = static_cast<int>(
        min(int64_t{kTile}, static_cast<int64_t>(p.step.depth.divisor()) - before));
    const auto head_of = [&](int at) {
      return at < of_first ? 0 : 1 + static_cast<int>(p.head_size.Quotient(at - of_first));
    };
    const int heads = head_of(width - 1) + 1;
    int head[kV];
#pragma unroll
    for (int v = 0; v < kV; ++v) head[v] = head_of(lane * kV + v);
    int64_t filter = item.weight + static_cast<int64_t>(first_head) * call.taps;
    for (int64_t s = 0; s < call.steps; ++s, filter += call.weight_step) {
      Acc sums[kV] = {};
      for (int64_t first_tap = 0; first_tap < call.taps; first_tap += chunk) {
        const int taps = static_cast<int>(min(int64_t{chunk}, call.taps - first_tap));
        if (first_tap > 0) __syncthreads();
        const auto set_weight = [&](int of_head, int64_t k, Acc weight) {
          weights[static_cast<int>(k - first_tap) * p.pitch + of_head] = weight;
        };
        WithElements(call.weight, call.weight_dtype, [&](const auto* filters) {
          filters += filter;
          if (call.normalize) {
            SoftmaxOfHeads<Acc>(filters, call.taps, heads, first_tap, first_tap + taps, set_weight);
            return;
          }
          for (int i = threadIdx.x; i < heads * chunk; i += blockDim.x) {
            auto of_head = static_cast<uint32_t>(i);
            const int64_t k = first_tap + p.chunk.DivMod(of_head);
            if (k >= call.taps) continue;
            set_weight(static_cast<int>(of_head), k,
                       static_cast<Acc>(Widen(filters[of_head * call.taps + k])));
          }
        });
        __syncthreads();
        if (!is_channel) continue;
        const auto add_taps = [&](auto has_one_head) {
          constexpr bool kHasOneHead = decltype(has_one_head)::value;
#pragma unroll 4
          for (int k = warp; k < taps; k += warps) {
            const int64_t row = s + (first_tap + k) * call.dilation;
            Acc wide[kV] = {};
            if (row >= call.reach) {
              WidenAll(wide, LoadRaw<kV>(x + (row - call.reach) * call.channels));
            } else if (item.slot >= 0) {
              WidenAll(wide, LoadRaw<kV>(state + row * call.channels));
            }
            const Acc* tap = weights + k * p.pitch;
#pragma unroll
            for (int v = 0; v < kV; ++v) sums[v] += tap[head[kHasOneHead ? 0 : v]] * wide[v];
          }
        };
        if (kV == 1 || head[0] == head[kV - 1]) {
          add_taps(std::true_type{});
        } else {
          add_taps(std::false_type{});
        }
      }
#pragma unroll
      for (int v = 0; v < kV; ++v) partial[warp * kTile + lane * kV + v] = sums[v];
      __syncthreads();
      for (int i = threadIdx.x; i < width; i += blockDim.x) {
        Acc sum[1] = {};
        if (call.bias != nullptr) {
          WithElements(call.bias, call.bias_dtype, [&](const auto* bias) {
            sum[0] = static_cast<Acc>(Widen(bias[item.bias + i]));
          });
        }
        for (int other = 0; other < warps; ++other) sum[0] += partial[other * kTile + i];
        Activate(sum, call.activation);
        static_cast<T*>(call.y)[item.y + s * call.channels + i] = Narrow<T>(sum[0]);
      }
    }
    // All warps have read the rows to which others write.
    __syncthreads();
    S* new_state = static_cast<S*>(call.new_state) + item.new_state + lane * kV;
    const int at_once = kRowsInFlight * warps;
    for (int64_t first = 0; first < reach; first += at_once) {
      if (first > 0) {
        load_rows(first + warp);
        __syncthreads();
      }
#pragma unroll
      for (int r = 0; r < kRowsInFlight; ++r) {
        const int64_t to = first + warp + r * warps;
        if (to < reach && is_channel) StoreRaw(new_state + to * call.channels, moved[r]);
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
  const int64_t vectors = CeilDiv(call.channels, width);
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

template <typename T, typename S, int kV>
cudaError_t LaunchByWarps(cudaStream_t stream, const Step& call) {
  using Acc = Accumulator<T>;
  constexpr int kTile = kWarp * kV;
  WarpsParams params{MakeParams(call, kTile)};
  const int64_t blocks = params.step.items, depth = call.channels / call.heads;
  params.head_size = FastDivider(std::min<int64_t>(depth, kTile));
  const int64_t heads = MaxHeadsOfTile(kTile, call.channels, call.heads);
  params.pitch = static_cast<int>(heads | 1);
  const int64_t chunk = std::min<int64_t>(call.taps, kWeightBytes / sizeof(Acc) / params.pitch);
  if constexpr (kV > 1) {
    // Single channels have fewer filters, and more blocks.
    if (chunk < call.taps && blocks < kMinBlocks) return LaunchByWarps<T, S, 1>(stream, call);
  }
  params.chunk = FastDivider(chunk);
  int warps = 1;
  while (warps < kMaxWarps &&
         (warps * kMaxRowsOfWarp <= call.reach ||
          (warps * kMinRowsOfWarp <= call.reach && blocks * warps < kGridWarps))) {
    warps *= 2;
  }
  const size_t bytes = (warps * kTile + chunk * params.pitch) * sizeof(Acc);
  return Launch(StepByWarps<T, S, kV>, std::min<int64_t>(blocks, INT32_MAX), warps * kWarp, bytes,
                stream, params);
}

template <typename T>
cudaError_t LaunchByWarps(cudaStream_t stream, const Step& call) {
  if (call.state_dtype == call.dtype) {
    constexpr int kWide = kVectorElements<T>;
    return call.channels % kWide == 0 ? LaunchByWarps<T, T, kWide>(stream, call)
                                      : LaunchByWarps<T, T, 1>(stream, call);
  }
  return DispatchFloat(call.state_dtype, [&](auto state) {
    using S = decltype(state);
    // A state of float64 makes x float64 too.
    if constexpr (sizeof(S) <= sizeof(Accumulator<T>) && !std::is_same_v<S, T>) {
      return LaunchByWarps<T, S, 1>(stream, call);
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
    const bool has_one_filter = call.weight_step == 0 || call.steps == 1;
    if (!has_one_filter || call.dilation != 1 || call.taps > kMaxRegisterTaps ||
        call.state_dtype != call.dtype) {
      return LaunchByWarps<T>(stream, call);
    }
    constexpr int kWide = kVectorElements<T>;
    return call.channels % kWide == 0 && elements / kWide >= kMinVectors
               ? LaunchInRegisters<T, kWide>(stream, call)
               : LaunchInRegisters<T, 1>(stream, call);
  });
}

}  // namespace jaxops::lightweight_conv_step::cuda
