// These kernels compute causal lightweight convolution of two to eight taps in the NCT layout. The
// number of taps and the padding are constants, because instructions bound short filters of 16-bit
// elements in other kernels: a warp of nct/rows executes 662 for two vectors a thread.
//
// Kernels of calls with segments or states read the start of one step's segment, which tells
// whether all windows of a part of a row are of one segment. Only other parts read the starts of
// all steps, and forward only warps in whose windows a segment ends add their pairs one by one. The
// rows of a block are of several channels, which share the starts.
#include "cuda/common/activation.cuh"
#include "cuda/lightweight_conv/families.h"
#include "cuda/lightweight_conv/nct/row_sums.cuh"
#include "cuda/lightweight_conv/packed.h"

namespace jaxops::lightweight_conv::cuda::nct {
namespace {

using jaxops::cuda::Activate;
using jaxops::cuda::StoreVector;

constexpr int kThreads = 256;

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
constexpr int kForwardBlocks = sizeof(T) == 2 && jaxops::cuda::kMultiprocessorThreads == 2048 ? 8
                               : kTaps <= 6                                                   ? 6
                                                                                              : 5;
// With segments a thread has the loads of this number of channels in flight. For
// (1,12288,16384,12288,4) bf16 in segments of 1000 steps one channel and six blocks took 218 us,
// two and five 204, two and four 213; for (4,1024,2048,1024,4) f32 24.7, 24.7 and 22.0. With seven
// taps two channels would spill registers.
template <int kTaps>
constexpr int kPackedForwardItems = kTaps <= 4 ? 2 : 1;
template <typename T, int kTaps>
constexpr int kPackedForwardBlocks = sizeof(T) == 2 && kTaps == 4 ? 5 : 4;
// With four blocks, gradients of more than five taps with segments would spill registers: 36 bytes
// of float32 with seven. Three take 33.8 us for (4,1024,2048,1024,7) f32 and 27.3 in bf16; four
// were not timed.
template <int kTaps, bool kPacked>
constexpr int kBackwardBlocks = kPacked && kTaps > 5 ? 3 : 4;

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

// WidenWindow widens the window of a thread's own steps.
template <typename T, int kTaps, typename Acc, int kRead, int kReads, int kV>
__device__ __forceinline__ void WidenWindow(Acc (&window)[kTaps - 1 + kV],
                                            const Raw<T, kRead> (&before)[kReads],
                                            const Raw<T, kV>& own) {
  Acc reach[kReads * kRead];
#pragma unroll
  for (int r = 0; r < kReads; ++r) WidenAll(reach + r * kRead, before[r]);
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i) window[i] = reach[kReads * kRead - (kTaps - 1) + i];
  WidenAll(window + kTaps - 1, own);
}

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
    Raw<T, kV> own[kAtOnce<T>];
    Raw<T, kRead> before[kAtOnce<T>][kReads];
#pragma unroll
    for (int e = 0; e < kAtOnce<T>; ++e) {
      own[e] = {};
#pragma unroll
      for (int r = 0; r < kReads; ++r) before[e][r] = {};
      if (item + e < count) {
        const T* at = x + (item + e) * p.x_step;
        own[e] = LoadRaw<kV>(at);
#pragma unroll
        for (int r = 0; r < kReads; ++r) {
          const int distance = kReach<kTaps> - r * kRead;
          before[e][r] =
              LoadRawIf<kRead>(first_t + (item + e) * p.time_step >= distance, at - distance);
        }
      }
    }
#pragma unroll
    for (int e = 0; e < kAtOnce<T>; ++e) {
      if (item + e >= count) return;
      Acc window[kTaps - 1 + kV], sums[kV];
      WidenWindow<T, kTaps>(window, before[e], own[e]);
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

// --- forward, with segments or a state -----------------------------------------------------------

// A thread has a vector of steps of several channels, `rows` apart.
struct PackedForwardParams {
  const void *x, *weight, *bias;
  const int32_t* starts;  // null: one segment, which has begun before the state
  const void* state;      // null: none
  void* y;
  int time, channels;
  int rows, per_thread;  // channels of a block at once, and of a thread
  bool flip_taps;
  FastDivider row_threads, parts, channel_blocks, depth;
  DType weight_dtype, bias_dtype, state_dtype;
  Activation activation;
  BatchMap<Forward::kOperands> batch;
};

// StepPairs has a bit for every pair of kV steps and kTaps taps.
template <int kV, int kTaps>
class StepPairs {
 public:
  // Step i has the taps from `first_tap` on.
  __device__ __forceinline__ void Set(int i, int first_tap) {
    const uint32_t taps = kAll & ~((1u << min(first_tap, kTaps)) - 1);
    words_[i / kSteps] |= taps << i % kSteps * kTaps;
  }
  __device__ __forceinline__ bool AreAll() const {
    bool are = true;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      constexpr int kRest = kV - (kWords - 1) * kSteps;
      const int bits = (w < kWords - 1 ? kSteps : kRest) * kTaps;
      are = are && words_[w] == ~0u >> (32 - bits);
    }
    return are;
  }
  __device__ __forceinline__ bool Has(int i, int k) const {
    return words_[i / kSteps] >> (i % kSteps * kTaps + k) & 1;
  }

 private:
  static constexpr uint32_t kAll = (1u << kTaps) - 1;
  static constexpr int kSteps = std::min(kV, 32 / kTaps);  // of a word
  static constexpr int kWords = (kV + kSteps - 1) / kSteps;
  uint32_t words_[kWords] = {};
};

// Shared memory has the taps and the biases of a block's channels. Those of a channel are whole
// vectors.
template <int kTaps>
constexpr int kFilterSize = (kTaps + 1 + 3) / 4 * 4;

template <typename T, int kTaps>
__global__ void __launch_bounds__(kThreads, kPackedForwardBlocks<T, kTaps>)
    CausalPackedForwardNct(const __grid_constant__ PackedForwardParams p) {
  using Acc = Accumulator<T>;
  constexpr int kV = kVectorElements<T>;
  constexpr int kPadding = kTaps - 1;
  constexpr int kRead = kReachVector<T, kTaps>, kReads = kReachVectors<T, kTaps>;
  constexpr int kSize = kFilterSize<kTaps>;
  extern __shared__ __align__(16) unsigned char shared[];
  Acc* const filters = reinterpret_cast<Acc*>(shared);
  uint32_t block = blockIdx.x;
  const int part_first = p.parts.DivMod(block) * p.row_threads.divisor() * kV;
  const int first_channel = p.channel_blocks.DivMod(block) * p.rows * p.per_thread;
  const int channels = min(p.channels - first_channel, p.rows * p.per_thread);
  const auto batch = p.batch.AllOffsets(block);
  uint32_t row = threadIdx.x;
  const int t = part_first + p.row_threads.DivMod(row) * kV;
  const bool is_idle = static_cast<int>(row) >= p.rows || t >= p.time;
  const int first = is_idle ? channels : row;  // among the block's channels

  const int64_t offset = int64_t{first_channel + static_cast<int>(row)} * p.time + t;
  const T* x = static_cast<const T*>(p.x) + batch[Forward::kX] + offset;
  T* y = static_cast<T*>(p.y) + batch[Forward::kY] + offset;
  const int64_t advance = int64_t{p.rows} * p.time;
  constexpr int kItems = kPackedForwardItems<kTaps>;
  Raw<T, kV> own[kItems];
  Raw<T, kRead> before[kItems][kReads];
  const auto load = [&](int channel) {
#pragma unroll
    for (int e = 0; e < kItems; ++e) {
      const bool exists = channel + e * p.rows < channels;
      own[e] = LoadRawIf<kV>(exists, x);
#pragma unroll
      for (int r = 0; r < kReads; ++r) {
        const int distance = kReach<kTaps> - r * kRead;
        before[e][r] = LoadRawIf<kRead>(exists && t >= distance, x - distance);
      }
      x += advance;
    }
  };
  load(first);

  const int32_t* starts = p.starts == nullptr ? nullptr : p.starts + batch[Forward::kStarts];
  // Taps read rows from here on, of the sequence and the state. Rows before the sequence are zeros
  // without a state.
  const int lowest = p.state == nullptr ? 0 : -kPadding;
  bool are_whole = true;  // all windows of the part are of one segment, later those of the warp
  if (starts != nullptr) {
    const int part_last = min(part_first + p.row_threads.divisor() * kV, p.time) - 1;
    are_whole = max(starts[part_last], lowest) <= max(part_first - kPadding, lowest);
  }
  WithElements(p.weight, p.weight_dtype, [&](const auto* weights) {
    for (int i = threadIdx.x; i < channels * kTaps; i += kThreads) {
      const int channel = i / kTaps, k = i % kTaps;
      const auto* filter = weights + batch[Forward::kWeight] +
                           int64_t{p.depth.Quotient(first_channel + channel)} * kTaps;
      filters[channel * kSize + k] =
          static_cast<Acc>(Widen(filter[p.flip_taps ? kTaps - 1 - k : k]));
    }
  });
  WithElements(p.bias, p.bias_dtype, [&](const auto* elements) {
    for (int i = threadIdx.x; i < channels; i += kThreads) {
      filters[i * kSize + kTaps] =
          elements == nullptr
              ? Acc(0)
              : static_cast<Acc>(Widen(elements[batch[Forward::kBias] + first_channel + i]));
    }
  });
  StepPairs<kV, kTaps> pairs;
  if (!are_whole && !is_idle) {
#pragma unroll
    for (int i = 0; i < kV; i += 4) {
      const auto vector = LoadVector<4>(starts + t + i);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int first_row = max(lowest, vector.values[e]);
        pairs.Set(i + e, max(first_row - (t + i + e - kPadding), 0));
      }
    }
    are_whole = pairs.AreAll();
  }
  // Otherwise a warp would run the loops of both kinds of windows.
  are_whole = __all_sync(~0u, are_whole || is_idle);
  const bool reads_state = p.state != nullptr && t < kPadding;
  __syncthreads();
#pragma unroll 1
  for (int item = first; item < channels; item += kItems * p.rows) {
#pragma unroll
    for (int e = 0; e < kItems; ++e) {
      const int channel = item + e * p.rows;
      if (channel >= channels) break;
      Acc weight[kSize], window[kPadding + kV], sums[kV];
#pragma unroll
      for (int k = 0; k < kSize; k += 4) {
        const auto vector = LoadVector<4>(filters + channel * kSize + k);
#pragma unroll
        for (int n = 0; n < 4; ++n) weight[k + n] = vector.values[n];
      }
      WidenWindow<T, kTaps>(window, before[e], own[e]);
      if (reads_state) {
        WithElements(p.state, p.state_dtype, [&](const auto* states) {
          const auto* state =
              states + batch[Forward::kState] + int64_t{first_channel + channel} * kPadding;
#pragma unroll
          for (int i = 0; i < kPadding; ++i) {
            if (t + i < kPadding) window[i] = static_cast<Acc>(Widen(state[t + i]));
          }
        });
      }
#pragma unroll
      for (int i = 0; i < kV; ++i) sums[i] = weight[kTaps];
      if (are_whole) {
#pragma unroll
        for (int k = 0; k < kTaps; ++k) {
#pragma unroll
          for (int i = 0; i < kV; ++i) sums[i] += weight[k] * window[i + k];
        }
      } else {
#pragma unroll
        for (int k = 0; k < kTaps; ++k) {
#pragma unroll
          for (int i = 0; i < kV; ++i) {
            if (pairs.Has(i, k)) sums[i] += weight[k] * window[i + k];
          }
        }
      }
      Activate(sums, p.activation);
      Vector<T, kV> result;
#pragma unroll
      for (int i = 0; i < kV; ++i) result.values[i] = Narrow<T>(sums[i]);
      StoreVector(y, result);
      y += advance;
    }
    load(item + kItems * p.rows);
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

struct PackedBackwardParams : CausalBackwardParams {
  const int32_t* starts;
  int64_t kept_starts, summed_starts;  // from one batch entry to the next
};

template <typename T, int kTaps, bool kPacked>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks<kTaps, kPacked>) CausalBackwardNct(
    const __grid_constant__ std::conditional_t<kPacked, PackedBackwardParams, CausalBackwardParams>
        p) {
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
    Raw<T, kV> own[kAtOnce<T>], own_g[kAtOnce<T>];
    Raw<T, kRead> after[kAtOnce<T>][kReads];
    uint32_t entry[kAtOnce<T>];
    int first_t[kAtOnce<T>], t[kAtOnce<T>];  // of the part, and of the thread
    bool exists[kAtOnce<T>];
    bool is_whole[kAtOnce<T>];
#pragma unroll
    for (int e = 0; e < kAtOnce<T>; ++e) {
      const int item = first + e * p.sums.groups;
      entry[e] = item;
      first_t[e] = p.parts.DivMod(entry[e]) * p.sums.row_threads.divisor() * kV;
      t[e] = first_t[e] + row_thread * kV;
      exists[e] = item < end && t[e] < p.time;
      is_whole[e] = true;
      own[e] = own_g[e] = {};
#pragma unroll
      for (int r = 0; r < kReads; ++r) after[e][r] = {};
      if (exists[e]) {
        const T* g_at = g + entry[e] * p.summed_g + t[e];
        own[e] = LoadRaw<kV>(x + entry[e] * p.summed_x + t[e]);
        own_g[e] = LoadRaw<kV>(g_at);
#pragma unroll
        for (int r = 0; r < kReads; ++r) {
          const int distance = kV + r * kRead;
          after[e][r] = LoadRawIf<kRead>(t[e] + distance < p.time, g_at + distance);
        }
        if constexpr (kPacked) {
          const int32_t* starts = p.starts + kept * p.kept_starts + entry[e] * p.summed_starts;
          const int end_t = first_t[e] + p.sums.row_threads.divisor() * kV;
          is_whole[e] = starts[min(end_t + kTaps - 2, p.time - 1)] <= first_t[e];
        }
      }
    }
#pragma unroll
    for (int e = 0; e < kAtOnce<T>; ++e) {
      if (!exists[e]) continue;
      Acc inputs[kV], window[kV + kTaps - 1];
      WidenAll(inputs, own[e]);
      WidenAll(window, own_g[e]);
      Acc reach[kReads * kRead];
#pragma unroll
      for (int r = 0; r < kReads; ++r) WidenAll(reach + r * kRead, after[e][r]);
#pragma unroll
      for (int i = 0; i < kTaps - 1; ++i) window[kV + i] = reach[i];
      const auto store = [&](const Acc(&sums)[kV]) {
        Vector<T, kV> result;
#pragma unroll
        for (int i = 0; i < kV; ++i) result.values[i] = Narrow<T>(sums[i]);
        StoreVector(dx + entry[e] * p.summed_dx + t[e], result);
      };
      if constexpr (kPacked) {
        if (!is_whole[e]) {
          // Step i and row i + j of the window are a pair if the row's segment has begun by then.
          const int32_t* starts = p.starts + kept * p.kept_starts + entry[e] * p.summed_starts;
          constexpr int kWindow = kV + kReach<kTaps>;
          int begins[kWindow];  // from t on
#pragma unroll
          for (int i = 0; i < kWindow; i += 4) {
            Vector<int32_t, 4> vector;
            const bool is_inside = t[e] + i < p.time;
            if (is_inside) vector = LoadVector<4>(starts + t[e] + i);
#pragma unroll
            for (int n = 0; n < 4; ++n) begins[i + n] = is_inside ? vector.values[n] - t[e] : kV;
          }
          Acc sums[kV] = {};
#pragma unroll
          for (int j = 0; j < kTaps; ++j) {
#pragma unroll
            for (int i = 0; i < kV; ++i) {
              if (begins[i + j] <= i) {
                sums[i] += weight[j] * window[i + j];
                dweight[j] += inputs[i] * window[i + j];
              }
            }
          }
#pragma unroll
          for (int i = 0; i < kV; ++i) dbias += window[i];
          if (wants_dx) store(sums);
          continue;
        }
      }
      if (wants_dx) {
        Acc sums[kV] = {};
#pragma unroll
        for (int j = 0; j < kTaps; ++j) {
#pragma unroll
          for (int i = 0; i < kV; ++i) sums[i] += weight[j] * window[i + j];
        }
        store(sums);
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

// The rows of a block share starts: it has up to this number of them.
constexpr int64_t kSharingRows = 4;

struct PackedForwardPlan {
  int64_t parts;        // of a row
  int64_t row_threads;  // of a part
  int64_t rows, per_thread, channel_blocks, blocks;
};

PackedForwardPlan MakePackedPlan(const Forward& call) {
  const Geometry& g = call.geometry;
  // A thread finds the pairs of its steps once for several channels, whose filters are in shared
  // memory, if threads that fill a device remain: for (4,1024,2048,1024,4) bf16 in segments of 1000
  // steps four, eight and sixteen channels took 12.9, 11.9 and 11.9 us, and 209, 204 and 211 for
  // (1,12288,16384,12288,4).
  constexpr int64_t kManyThreads = 1 << 17;
  constexpr int64_t kMaxBlockChannels = 32;
  const int64_t vectors = CountRowVectors(g, call.dtype);
  PackedForwardPlan plan;
  plan.parts = CeilDiv(vectors, kThreads / kSharingRows);
  plan.row_threads = CeilDiv(vectors, plan.parts);
  plan.rows = std::min<int64_t>(g.channels, kThreads / plan.row_threads);
  plan.per_thread = std::clamp<int64_t>(call.batch.size() * g.channels * vectors / kManyThreads, 1,
                                        std::max<int64_t>(1, kMaxBlockChannels / plan.rows));
  plan.channel_blocks = CeilDiv(g.channels, plan.rows * plan.per_thread);
  plan.blocks = call.batch.size() * plan.parts * plan.channel_blocks;
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
  const bool is_packed = IsPacked(call);
  plan.parts = std::max(
      CeilDiv(vectors, is_packed ? kWarp : kThreads),
      std::min(CeilDiv(std::min(per_thread, kMaxParts), entries), CeilDiv(vectors, kWarp)));
  plan.row_threads = CeilDiv(vectors, plan.parts);
  plan.items = entries * plan.parts;
  // A group of threads reads whole lines of memory. Groups of 8, 16 and 32 threads took 19.7, 17.9
  // and 24.3 us for (128,1024,64,16,3) bf16, and 30.5, 31.8 and 32.0 for (1024,1024,8,128,3) f32.
  const int64_t line_threads = jaxops::cuda::SizeOf(call.dtype) == 2 ? 16 : 8;
  // Rows share starts, if blocks for each multiprocessor remain. One, two, four and eight rows took
  // 19.3, 19.3, 22.5 and 35.7 us for (4,1024,2048,1024,4) bf16, and 319, 301, 297 and 301 for
  // (1,12288,16384,12288,4).
  const int64_t sharing_rows =
      std::clamp<int64_t>(call.kept.size() * g.channels / kBusyBlocks, 1, kSharingRows);
  const int64_t group_threads =
      is_packed ? plan.row_threads * sharing_rows : std::max(line_threads, plan.row_threads);
  plan.groups = std::clamp<int64_t>(plan.items / per_thread, 1, kThreads / group_threads);
  // Few items leave threads for more channels, of which a small call has blocks for each
  // multiprocessor.
  constexpr int64_t kFewBlocks = 128;
  const int64_t max_rows =
      std::max(is_packed ? sharing_rows : CeilDiv(line_threads, plan.row_threads),
               call.kept.size() * g.channels / kFewBlocks);
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
      return DispatchTaps<kMinCausalTaps, kShortTaps>(
          taps, [&](auto constant) { return launch(element, constant); });
    }
    return cudaErrorInvalidValue;
  });
}

// Kernels count threads and items in 32 bits.
constexpr int64_t kMaxCount = int64_t{1} << 30;

template <bool kPacked>
cudaError_t LaunchGradients(cudaStream_t stream, const Gradients& gradients) {
  const Backward& call = gradients.call;
  const Geometry& g = call.geometry;
  const BackwardPlan plan = MakePlan(gradients);
  std::conditional_t<kPacked, PackedBackwardParams, CausalBackwardParams> p{};
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
  if constexpr (kPacked) {
    p.starts = call.starts;
    p.kept_starts = call.kept.stride(0, Backward::kStarts);
    p.summed_starts = call.summed.stride(0, Backward::kStarts);
  }
  const cudaError_t error = DispatchKernel(call.dtype, g.taps, [&](auto element, auto taps) {
    return Launch(CausalBackwardNct<decltype(element), taps.value, kPacked>, plan.blocks, kThreads,
                  0, stream, p);
  });
  if (error != cudaSuccess || plan.whole) return error;
  return AddPartialSums(stream, call, {gradients.partials, plan.splits});
}

}  // namespace

bool CanRunCausal(const Forward& call, const Device&) {
  if (!IsShortCausalNct(call.geometry, call.dtype) || call.batch.rank() > 2) return false;
  const ForwardPlan plan = MakePlan(call);
  return plan.outer <= kMaxGridBlocks && plan.inner <= kMaxCount && plan.threads <= kMaxCount;
}

bool CanRunCausalOfSegments(const Forward& call, const Device&) {
  return IsShortCausalNct(call.geometry, call.dtype) && MakePackedPlan(call).blocks <= kMaxBlocks;
}

bool CanRunCausal(const Gradients& gradients, const Device&) {
  const Backward& call = gradients.call;
  if (!IsShortCausalNct(call.geometry, call.dtype) || call.kept.rank() > 1 ||
      call.summed.rank() > 1) {
    return false;
  }
  const BackwardPlan plan = MakePlan(gradients);
  return plan.items <= kMaxCount && plan.blocks <= kMaxBlocks;
}

bool CanRunCausalOfSegments(const Gradients& gradients, const Device& device) {
  return CanRunCausal(gradients, device);
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

cudaError_t LaunchCausalOfSegments(cudaStream_t stream, const Forward& call, const Device&) {
  const Geometry& g = call.geometry;
  const PackedForwardPlan plan = MakePackedPlan(call);
  const PackedForwardParams p{.x = call.x,
                              .weight = call.weight,
                              .bias = call.bias,
                              .starts = call.starts,
                              .state = call.state,
                              .y = call.y,
                              .time = static_cast<int>(g.time),
                              .channels = static_cast<int>(g.channels),
                              .rows = static_cast<int>(plan.rows),
                              .per_thread = static_cast<int>(plan.per_thread),
                              .flip_taps = call.flip_taps,
                              .row_threads = FastDivider(plan.row_threads),
                              .parts = FastDivider(plan.parts),
                              .channel_blocks = FastDivider(plan.channel_blocks),
                              .depth = FastDivider(g.channels / g.heads),
                              .weight_dtype = call.weight_dtype,
                              .bias_dtype = call.bias_dtype,
                              .state_dtype = call.state_dtype,
                              .activation = call.activation,
                              .batch = call.batch};
  return DispatchKernel(call.dtype, g.taps, [&](auto element, auto taps) {
    using Acc = Accumulator<decltype(element)>;
    const size_t bytes = plan.rows * plan.per_thread * kFilterSize<taps.value> * sizeof(Acc);
    return Launch(CausalPackedForwardNct<decltype(element), taps.value>, plan.blocks, kThreads,
                  bytes, stream, p);
  });
}

cudaError_t LaunchCausal(cudaStream_t stream, const Gradients& gradients, const Device&) {
  return LaunchGradients<false>(stream, gradients);
}
cudaError_t LaunchCausalOfSegments(cudaStream_t stream, const Gradients& gradients, const Device&) {
  return LaunchGradients<true>(stream, gradients);
}

}  // namespace jaxops::lightweight_conv::cuda::nct
