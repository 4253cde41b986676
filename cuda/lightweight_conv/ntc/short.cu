// These kernels compute lightweight convolution with short filters in the NTC layout: forward, and
// all gradients in one pass over x and g. Rows are whole vectors of channels, but for calls with
// segments or states.
//
// Memory bounds these calls. A thread owns a vector of channels and loops over a range of time
// steps with the window of its filter in registers, so that every row is read once, except for the
// few rows that neighbouring ranges share. The next rows of a thread are in flight to a ring of
// its own in shared memory: registers do not limit the number of rows in flight, and the loop never
// synchronises, because no thread reads rows that another thread copied.
//
// In calls with segments, the start of the last row that a range reads tells whether all rows are
// of one segment, as nearly all are if segments are long. Otherwise, and at the ends of a sequence,
// the threads of a group find the pairs of steps and rows. The rows of a state precede those of x,
// unless segments have states of their own.
#include "cuda/common/activation.cuh"
#include "cuda/lightweight_conv/families.h"
#include "cuda/lightweight_conv/ntc/ring.cuh"
#include "cuda/lightweight_conv/packed.cuh"

namespace jaxops::lightweight_conv::cuda::ntc {
namespace {

using jaxops::cuda::Activate;

// The segments and states of a call.
enum class Packing {
  kNone,
  kSegments,  // segments, or states of sequences, or both
  kSlots,     // segments with states of their own
};

// SegmentPairs says which of kRows steps of a range meet which rows of their windows in their own
// segment. The threads of a group share the work for kSets times kRows steps, the length of most
// ranges, with the loads of kAtOnce sets in flight; shared memory has the results.
template <int kTaps>
class SegmentPairs {
 public:
  static constexpr int kSets = 8, kAtOnce = 4;
  static constexpr size_t kGroupBytes = kSets * sizeof(uint32_t);

  // `starts` is null if the sequence is one segment. The block's channels begin with
  // `first_channel`. `storage` has kGroupBytes for each group of the block.
  template <int kV>
  __device__ __forceinline__ SegmentPairs(void* storage, const int32_t* starts,
                                          const StepRanges& ranges, const StepRange& range,
                                          int first_channel, std::integral_constant<int, kV>)
      : starts_(starts), dilation_(ranges.dilation), range_(range) {
    const int lanes = ranges.tile.lanes();
    // Threads without channels do not take part.
    lanes_ = min(lanes, (ranges.channels - first_channel + kV - 1) / kV);
    lane_ = threadIdx.x & (lanes - 1);
    threads_ = (lanes_ == kWarp ? ~0u : (1u << lanes_) - 1) << (threadIdx.x % kWarp - lane_);
    row_mask_ = (1u << ranges.taps) - 1;
    masks_ = static_cast<uint32_t*>(storage) + (threadIdx.x >> ranges.tile.lane_bits) * kSets;
    is_inside_ =
        range.low == 0 && range.count % kRows == 0 && range.high - ranges.taps + 1 >= range.count;
    // Where steps are not a multiple of the dilation from rows, they may be before the first row or
    // after the last one.
    const int last_row = Time(min(range.high, range.count + ranges.taps - 1) - 1);
    const int last_step = Step(range.count - 1);
    // The comparison is later, so that nothing waits for the start before.
    const bool has_segments = starts != nullptr && range.count > 0;
    first_row_ = has_segments ? min(Time(range.low), range.first) : 0;
    last_start_ = has_segments ? starts[max(last_row, last_step)] : 0;
  }

  // Take proceeds to the next kRows steps, at first to those from step 0 of the range on.
  __device__ __forceinline__ void Take() {
    first_ += kRows;
    if (first_ == 0) are_all_ = is_whole_ = is_inside_ && last_start_ <= first_row_;
    if (is_whole_) return;
    const int set = first_ / kRows % kSets;
    if (set == 0) Find();
    pairs_ = masks_[set];
    uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) all |= row_mask_ << i * kTaps;
    are_all_ = pairs_ == all;
  }

  // AreAll says whether all pairs exist.
  __device__ __forceinline__ bool AreAll() const { return are_all_; }
  // Pair (i, j) is of step i and row i + j.
  __device__ __forceinline__ bool Has(int i, int j) const { return pairs_ >> (i * kTaps + j) & 1; }

 private:
  static_assert(kRows * kTaps <= kWarp && kSets % kAtOnce == 0);

  __device__ __forceinline__ int Time(int row) const { return range_.origin + row * dilation_; }
  __device__ __forceinline__ int Step(int i) const { return range_.first + i * dilation_; }

  // Find finds the pairs of the next kSets times kRows steps.
  __device__ __forceinline__ void Find() {
#pragma unroll 1
    for (int set = 0; set < kSets; set += kAtOnce) {
      uint32_t found[kAtOnce] = {};
#pragma unroll 1
      for (int pair = lane_; pair < kRows * kTaps; pair += lanes_) {
        const int j = pair % kTaps;
        int start[kAtOnce], row_start[kAtOnce];
#pragma unroll
        for (int s = 0; s < kAtOnce; ++s) {
          const int i = first_ + (set + s) * kRows + pair / kTaps;
          // A start after all others marks pairs that do not exist.
          start[s] = INT32_MAX;
          row_start[s] = 0;
          if (i < range_.count && range_.HasRow(i + j) && (row_mask_ >> j & 1)) {
            const int row = Time(i + j);
            start[s] = row_start[s] = INT32_MIN;
            if (starts_ != nullptr) {
              start[s] = starts_[Step(i)];
              // Rows of a state are of the first segment if that began before them. Starts do not
              // decrease, and only the first one is negative.
              row_start[s] = row < 0 ? row : starts_[row];
            }
          }
        }
#pragma unroll
        for (int s = 0; s < kAtOnce; ++s) {
          const bool has_begun = row_start[s] < 0 && start[s] < row_start[s];
          found[s] |= uint32_t{has_begun || start[s] == row_start[s]} << pair;
        }
      }
      __syncwarp(threads_);  // the masks before have been read
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) {
        const uint32_t mask = __reduce_or_sync(threads_, found[s]);
        if (lane_ == 0) masks_[set + s] = mask;
      }
    }
    __syncwarp(threads_);
  }

  const int32_t* starts_;
  int dilation_;
  StepRange range_;
  int lane_, lanes_;
  uint32_t threads_;   // of the group
  uint32_t row_mask_;  // pairs of a step
  uint32_t* masks_;    // of a set of kRows steps each: pair (i, j) is bit i * kTaps + j
  // All rows and steps of the range are of one segment if that of the last one begins no later than
  // the first one.
  int first_row_, last_start_;
  bool is_inside_;  // the windows of all steps are inside of the sequence, and all sets whole
  bool is_whole_;   // all pairs of the range exist
  bool are_all_;    // those of the next kRows steps
  uint32_t pairs_;
  int first_ = -kRows;
};

// RangePairs says which of kRows steps meet which rows of their windows inside of the sequence.
class RangePairs {
 public:
  template <typename Vector>
  __device__ __forceinline__ RangePairs(void*, const int32_t*, const StepRanges& ranges,
                                        const StepRange& range, int, Vector)
      : range_(range),
        inside_(range.low, min(range.count, range.high - ranges.taps + 1) - kRows + 1) {}
  __device__ __forceinline__ void Take() { first_ += kRows; }
  __device__ __forceinline__ bool AreAll() const { return inside_.Has(first_); }
  __device__ __forceinline__ bool Has(int i, int j) const {
    return first_ + i < range_.count && range_.HasRow(first_ + i + j);
  }

 private:
  StepRange range_;
  Interval inside_;
  int first_ = -kRows;
};

// NoPairs is for forward calls without segments: rows outside of the sequence are zeros.
struct NoPairs {
  template <typename Vector>
  __device__ NoPairs(void*, const int32_t*, const StepRanges&, const StepRange&, int, Vector) {}
  __device__ void Take() {}
  __device__ static constexpr bool AreAll() { return true; }
  __device__ static constexpr bool Has(int, int) { return true; }
};

// --- forward -------------------------------------------------------------------------------------

struct ForwardParams {
  StepRanges ranges;
  const void *x, *weight, *bias;
  void* y;
  DType weight_dtype, bias_dtype;
  Activation activation;
  bool flip_taps;
  FastDivider tiles;  // ranges of one batch entry, divided by the groups of a block
  BatchMap<Forward::kOperands> batch;
};

struct PackedForwardParams : ForwardParams {
  const int32_t* starts;
  States states;
};

// Reads the rows of a state that a range's first window has.
template <int kTaps, typename Acc, int kV, int kWindow>
__device__ __forceinline__ void ReadCarriedState(Acc (&window)[kWindow][kV],
                                                 const StepRanges& ranges, const StepRange& range,
                                                 const States& states, int64_t offset) {
  WithElements(states.states, states.dtype, [&](const auto* elements) {
#pragma unroll
    for (int i = 0; i < kTaps - 1; ++i) {
      const int t = range.origin + i * ranges.dilation;
      if (t >= 0) break;
      const auto* row = elements + offset + int64_t{t + ranges.padding} * ranges.channels;
#pragma unroll
      for (int v = 0; v < kV; ++v) window[i][v] = static_cast<Acc>(Widen(row[v]));
    }
  });
}

template <typename T, int kV, int kTaps, bool kOneHead, Packing kPacking>
__global__ void __launch_bounds__(kRingThreads, kTaps <= 4 && kPacking != Packing::kSlots ? 5 : 4)
    ShortNtcForward(const __grid_constant__ std::conditional_t<kPacking == Packing::kNone,
                                                               ForwardParams, PackedForwardParams>
                        p) {
  using Acc = Accumulator<T>;
  using Ring = RowRing<T, kV, kTaps, false>;
  using Taps = StagedTaps<Acc, kTaps, kV, kOneHead>;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Taps staged;
  const StepRanges& ranges = p.ranges;
  const int lane = threadIdx.x & (ranges.tile.lanes() - 1);
  const int group = threadIdx.x >> ranges.tile.lane_bits;
  uint32_t block = blockIdx.x;
  const int first_channel = ranges.channel_blocks.DivMod(block) * ranges.tile.lanes() * kV;
  const int channel = first_channel + lane * kV;
  uint32_t index = p.tiles.DivMod(block) * ranges.groups() + group;
  const uint32_t entry = block;
  const auto batch = p.batch.AllOffsets(entry);
  // Phases vary fastest, so that neighbouring groups read neighbouring rows.
  const int phase = ranges.phases.DivMod(index);
  const bool exists = index < ranges.per_phase.divisor() && channel < ranges.channels;
  StepRange range(ranges, exists ? index * ranges.length : 0, phase);
  if (!exists) range.count = 0;
  const T* x = static_cast<const T*>(p.x) + batch[Forward::kX] + channel;
  Ring ring(shared, ranges, range, x, nullptr);
  const int32_t* starts = nullptr;
  if constexpr (kPacking != Packing::kNone) {
    if (p.starts != nullptr) starts = p.starts + batch[Forward::kStarts];
  }
  StepRange readable = range;  // with the rows of a state
  if constexpr (kPacking == Packing::kSegments) {
    if (p.states.states != nullptr) readable.low = 0;
  }
  std::conditional_t<kPacking == Packing::kNone, NoPairs, SegmentPairs<kTaps>> pairs(
      shared + Ring::kBytes, starts, ranges, readable, first_channel,
      std::integral_constant<int, kV>{});
  staged.Stage(ranges, first_channel, p.weight, p.weight_dtype, batch[Forward::kWeight],
               p.flip_taps);
  __syncthreads();
  if (range.count <= 0) return;

  Acc weight[kTaps][Taps::kWidth];
#pragma unroll
  for (int k = 0; k < kTaps; ++k) staged.Read(weight[k], k, lane);
  Acc bias[kV] = {};
  if (p.bias != nullptr) {
    WithElements(p.bias, p.bias_dtype, [&](const auto* biases) {
#pragma unroll
      for (int v = 0; v < kV; ++v) {
        bias[v] = static_cast<Acc>(Widen(biases[batch[Forward::kBias] + channel + v]));
      }
    });
  }
  const int64_t advance = int64_t{ranges.dilation} * ranges.channels;
  T* y =
      static_cast<T*>(p.y) + batch[Forward::kY] + channel + int64_t{range.first} * ranges.channels;
  Acc window[kTaps - 1 + kRows][kV];
  ReadCarried<kTaps>(window, ranges, range, x);
  if constexpr (kPacking == Packing::kSegments) {
    if (p.states.states != nullptr && range.origin < 0) {
      ReadCarriedState<kTaps>(window, ranges, range, p.states, batch[Forward::kState] + channel);
    }
  }
#pragma unroll 1
  for (int done = 0; done < range.count; done += kRows) {
    pairs.Take();
    Raw<T, kV> rows[kRows], none[1];
    ring.Take(rows, none);
#pragma unroll
    for (int i = 0; i < kRows; ++i) WidenAll(window[kTaps - 1 + i], rows[i]);
    Acc sums[kRows][kV];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int v = 0; v < kV; ++v) sums[i][v] = bias[v];
    }
    const auto add_taps = [&](auto all) {
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        if (k < ranges.taps) {
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            if (all.value || pairs.Has(i, k)) {
#pragma unroll
              for (int v = 0; v < kV; ++v) {
                sums[i][v] += weight[k][v % Taps::kWidth] * window[i + k][v];
              }
            }
          }
        }
      }
    };
    if (pairs.AreAll()) {
      add_taps(std::true_type{});
    } else {
      if constexpr (kPacking == Packing::kSlots) {
        const int32_t* slots = p.states.slots + batch[Forward::kSlots];
#pragma unroll 1
        for (int i = 0; i < min(kRows, range.count - done); ++i) {
          const int t = range.first + (done + i) * ranges.dilation;
          Acc sum[kV];
#pragma unroll
          for (int v = 0; v < kV; ++v) sum[v] = bias[v];
          p.states.template ForEachTap<kV, Acc>(slots, batch[Forward::kState] + channel, t,
                                                starts[t], 0, [&](int k, const Acc(&row)[kV]) {
                                                  Acc tap[Taps::kWidth];
                                                  staged.Read(tap, k, lane);
#pragma unroll
                                                  for (int v = 0; v < kV; ++v)
                                                    sum[v] += tap[v % Taps::kWidth] * row[v];
                                                });
          // Registers have no index that is known only at run time.
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int v = 0; v < kV; ++v) sums[r][v] = r == i ? sum[v] : sums[r][v];
          }
        }
      }
      add_taps(std::false_type{});
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (done + i < range.count) {
        Activate(sums[i], p.activation);
        StoreRow(y, sums[i]);
      }
      y += advance;
    }
    Carry(window);
  }
}

// --- backward ------------------------------------------------------------------------------------

struct BackwardParams {
  StepRanges ranges;
  const void *x, *weight, *g;
  void *dx, *dbias;
  void* partials;
  DType weight_dtype;
  int bias_tap;        // the flipped tap that meets a step's own g, or none
  uint32_t items;      // ranges of all phases of all summed batch entries
  FastDivider splits;  // blocks that share the sum of one set of channels
  BatchMap<Backward::kOperands> kept, summed;
};

struct PackedBackwardParams : BackwardParams {
  const int32_t* starts;
};

template <typename T, int kV, int kTaps, bool kOneHead, bool kPacked>
__global__ void __launch_bounds__(kRingThreads, 3) ShortNtcBackward(
    const __grid_constant__ std::conditional_t<kPacked, PackedBackwardParams, BackwardParams> p) {
  using Acc = Accumulator<T>;
  using Ring = RowRing<T, kV, kTaps, true>;
  using Taps = StagedTaps<Acc, kTaps, kV, kOneHead>;
  constexpr int kWidth = Taps::kWidth;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Taps staged;
  const StepRanges& ranges = p.ranges;
  const int lanes = ranges.tile.lanes();
  const int lane = threadIdx.x & (lanes - 1);
  const int group = threadIdx.x >> ranges.tile.lane_bits;
  uint32_t block = blockIdx.x;
  const int first_channel = ranges.channel_blocks.DivMod(block) * lanes * kV;
  const int channel = first_channel + lane * kV;
  const uint32_t split = p.splits.DivMod(block);
  const int64_t kept_entry = block;
  const auto kept = p.kept.AllOffsets(block);
  const int64_t advance = int64_t{ranges.dilation} * ranges.channels;
  const bool wants_dx = p.dx != nullptr;
  const bool wants_dbias = p.dbias != nullptr;

  if (wants_dx) {
    staged.Stage(ranges, first_channel, p.weight, p.weight_dtype, kept[Backward::kWeight], true);
    __syncthreads();
  }
  Acc dweight[kTaps][kWidth] = {};
  Acc dbias[1][kV] = {};
  // Groups exchange ranges from one iteration to the next. Segments often end at multiples of a
  // power of two: the same groups would have all of these ends, and others would wait for them.
  const uint32_t stride = p.splits.divisor() * ranges.groups();
  uint32_t offset = split * ranges.groups() + group;
  const uint32_t end = channel < ranges.channels ? p.items : 0;
#pragma unroll 1
  for (uint32_t first = 0; first < end; first += stride) {
    uint32_t item = first + offset;
    if (++offset == stride) offset = 0;
    if (item >= end) continue;
    const int phase = ranges.phases.DivMod(item);
    const int step = ranges.per_phase.DivMod(item) * ranges.length;
    const StepRange range(ranges, step, phase);
    if (range.count <= 0) continue;
    const auto summed = p.summed.AllOffsets(item);
    const auto column = [&](const void* array, int operand) {
      return static_cast<const T*>(array) + kept[operand] + summed[operand] + channel;
    };
    const T* g = column(p.g, Backward::kG);
    Ring ring(shared, ranges, range, g, column(p.x, Backward::kX));
    T* dx = const_cast<T*>(column(p.dx, Backward::kDx)) + int64_t{range.first} * ranges.channels;
    const int32_t* starts = nullptr;
    if constexpr (kPacked) {
      starts = p.starts + kept[Backward::kStarts] + summed[Backward::kStarts];
    }
    std::conditional_t<kPacked, SegmentPairs<kTaps>, RangePairs> pairs(
        shared + Ring::kBytes, starts, ranges, range, first_channel,
        std::integral_constant<int, kV>{});
    Acc window[kTaps - 1 + kRows][kV];
    ReadCarried<kTaps>(window, ranges, range, g);
#pragma unroll 1
    for (int done = 0; done < range.count; done += kRows) {
      pairs.Take();
      Raw<T, kV> rows[kRows], own_rows[kRows];
      ring.Take(rows, own_rows);
      Acc own[kRows][kV];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        WidenAll(window[kTaps - 1 + i], rows[i]);
        WidenAll(own[i], own_rows[i]);
      }
      Acc sums[kRows][kV] = {};
      const auto work = [&](auto all) {
#pragma unroll
        for (int j = 0; j < kTaps; ++j) {
          if (j < ranges.taps) {
            Acc weight[kWidth];
            staged.Read(weight, j, lane);
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
              const bool has_pair = all.value || pairs.Has(i, j);
              if (has_pair) {
#pragma unroll
                for (int v = 0; v < kV; ++v) {
                  dweight[j][v % kWidth] += own[i][v] * window[i + j][v];
                }
              }
              // Rows outside of the sequence are zeros, those of other segments are not.
              if (!kPacked || has_pair) {
#pragma unroll
                for (int v = 0; v < kV; ++v) sums[i][v] += weight[v % kWidth] * window[i + j][v];
              }
            }
          }
        }
      };
      if (pairs.AreAll()) {
        work(std::true_type{});
      } else {
        work(std::false_type{});
      }
      if (wants_dx) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if (done + i < range.count) StoreRow(dx, sums[i]);
          dx += advance;
        }
      }
      if (wants_dbias) {
        if (p.bias_tap >= 0) {
#pragma unroll
          for (int j = 0; j < kTaps; ++j) {
            if (j == p.bias_tap) {
#pragma unroll
              for (int i = 0; i < kRows; ++i) {
                if (done + i < range.count) {
#pragma unroll
                  for (int v = 0; v < kV; ++v) dbias[0][v] += window[i + j][v];
                }
              }
            }
          }
        } else {
          // Under dilation a step's own g may be outside the window, but is still in the cache.
          for (int i = 0; i < min(kRows, range.count - done); ++i) {
            const int t = range.first + (done + i) * ranges.dilation;
            Acc row[kV];
            WidenAll(row, LoadRaw<kV>(g + int64_t{t} * ranges.channels));
#pragma unroll
            for (int v = 0; v < kV; ++v) dbias[0][v] += row[v];
          }
        }
      }
      Carry(window);
    }
  }

  Acc* sums = reinterpret_cast<Acc*>(shared);
  const int64_t first_row = (kept_entry * p.splits.divisor() + split) * (ranges.taps + 1);
  Acc* partials = static_cast<Acc*>(p.partials) + first_row * ranges.channels;
  const int first_column = first_channel / (kV / kWidth);
  SumGroups(sums, dweight, ranges.taps, lanes, [&](int j, int i, Acc sum) {
    if (first_channel + i * (kV / kWidth) < ranges.channels) {
      partials[int64_t{ranges.taps - 1 - j} * ranges.channels + first_column + i] = sum;
    }
  });
  if (wants_dbias) {
    SumGroups(sums, dbias, 1, lanes, [&](int, int i, Acc sum) {
      if (first_channel + i < ranges.channels) {
        partials[int64_t{ranges.taps} * ranges.channels + first_channel + i] = sum;
      }
    });
  }
}

// --- launches ------------------------------------------------------------------------------------

// Calls with segments or states have kernels for rows of any size: of pairs of 16-bit channels, or
// of single ones. An asynchronous copy cannot move a single channel of 2 bytes, so that others do
// without. Their forward kernels have two channels: ntc/window runs vectors of four.
template <typename Call>
RingPlan MakeRingPlan(const Call& call, bool is_packed, bool is_forward) {
  const Geometry& g = call.geometry;
  const int many = RingPlan::MaxVector(call.dtype);
  const bool has_two_bytes = SizeOf(call.dtype) == 2;
  if (is_packed) return {g, call.dtype, many, has_two_bytes && g.channels % 2 == 0 ? 2 : 1};
  if (is_forward) return {g, call.dtype, 2, 2};
  return {g, call.dtype, many, has_two_bytes ? 2 : 1};
}

RingPlan MakePlan(const Forward& call) {
  RingPlan plan = MakeRingPlan(call, IsPacked(call), true);
  plan.CutForward(call);
  return plan;
}

RingPlan MakePlan(const Gradients& gradients) {
  RingPlan plan = MakeRingPlan(gradients.call, IsPacked(gradients.call), false);
  plan.CutBackward(gradients);
  return plan;
}

template <typename T, int kV, int kTaps, bool kOneHead, Packing kPacking>
cudaError_t LaunchPlan(cudaStream_t stream, const Forward& call, const RingPlan& plan) {
  const Geometry& g = call.geometry;
  std::conditional_t<kPacking == Packing::kNone, ForwardParams, PackedForwardParams> params{
      {StepRanges(g, g.padding, plan)}};
  params.x = call.x;
  params.weight = call.weight;
  params.bias = call.bias;
  params.y = call.y;
  params.weight_dtype = call.weight_dtype;
  params.bias_dtype = call.bias_dtype;
  params.activation = call.activation;
  params.flip_taps = call.flip_taps;
  params.tiles = FastDivider(plan.shares);
  params.batch = call.batch;
  if constexpr (kPacking != Packing::kNone) {
    params.starts = call.starts;
    params.states = States(call);
  }
  size_t bytes = RowRing<T, kV, kTaps, false>::kBytes;
  if constexpr (kPacking != Packing::kNone) {
    bytes += plan.groups() * SegmentPairs<kTaps>::kGroupBytes;
  }
  return Launch(ShortNtcForward<T, kV, kTaps, kOneHead, kPacking>, plan.blocks, kRingThreads, bytes,
                stream, params);
}

template <typename T, int kV, int kTaps, bool kOneHead, Packing kPacking>
cudaError_t LaunchPlan(cudaStream_t stream, const Gradients& gradients, const RingPlan& plan) {
  const Backward& call = gradients.call;
  const Geometry& g = call.geometry;
  const int64_t mirrored = Mirrored(g);
  constexpr bool kPacked = kPacking != Packing::kNone;
  std::conditional_t<kPacked, PackedBackwardParams, BackwardParams> params{
      {StepRanges(g, mirrored, plan)}};
  params.x = call.x;
  params.weight = call.weight;
  params.g = call.g;
  params.dx = call.dx;
  params.dbias = call.dbias;
  params.partials = gradients.partials;
  params.weight_dtype = call.weight_dtype;
  params.bias_tap = mirrored % g.dilation == 0 ? static_cast<int>(mirrored / g.dilation) : -1;
  params.items = static_cast<uint32_t>(plan.items);
  params.splits = FastDivider(plan.shares);
  params.kept = call.kept;
  params.summed = call.summed;
  if constexpr (kPacked) params.starts = call.starts;
  constexpr size_t kSums = size_t{kTaps} * (kRingThreads + kWarp) * kV * sizeof(Accumulator<T>);
  size_t bytes = RowRing<T, kV, kTaps, true>::kBytes;
  if constexpr (kPacked) bytes += plan.groups() * SegmentPairs<kTaps>::kGroupBytes;
  return Launch(ShortNtcBackward<T, kV, kTaps, kOneHead, kPacked>, plan.blocks, kRingThreads,
                std::max(bytes, kSums), stream, params);
}

// LaunchPlan launches the kernel of a plan whose smaller vectors have kFew channels.
template <typename T, int kFew, Packing kPacking, typename Call>
cudaError_t LaunchPlan(cudaStream_t stream, const Call& call, const RingPlan& plan) {
  constexpr int kMany = sizeof(T) == 8 ? 2 : 4;
  if constexpr (kPacking != Packing::kNone && kFew > 1) {
    if (plan.vector == 1) {
      return LaunchPlan<T, 1, kShortTaps, false, kPacking>(stream, call, plan);
    }
  }
  if constexpr (kMany > 2 && kPacking == Packing::kNone && std::is_same_v<Call, Forward>) {
    return LaunchPlan<T, kFew, kShortTaps, false, kPacking>(stream, call, plan);
  } else {
    if (plan.vector != kMany) {
      return LaunchPlan<T, kFew, kShortTaps, false, kPacking>(stream, call, plan);
    }
    if (plan.max_taps == 4) return LaunchPlan<T, kMany, 4, false, kPacking>(stream, call, plan);
    return DispatchBool(plan.one_head, [&](auto one_head) {
      return LaunchPlan<T, kMany, kShortTaps, one_head.value, kPacking>(stream, call, plan);
    });
  }
}

bool IsShort(const Geometry& g) {
  return g.data_format == DataFormat::kNTC && g.taps <= kShortTaps;
}

template <Packing kPacking>
cudaError_t LaunchGradients(cudaStream_t stream, const Gradients& gradients) {
  const Backward& call = gradients.call;
  const RingPlan plan = MakePlan(gradients);
  const cudaError_t error = DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    return LaunchPlan<T, sizeof(T) == 2 ? 2 : 1, kPacking>(stream, gradients, plan);
  });
  if (error != cudaSuccess) return error;
  return AddPartialSums(stream, call,
                        {gradients.partials, plan.shares, plan.one_head ? plan.vector : 1});
}

}  // namespace

// ntc/window runs float32, and whole vectors of four 16-bit channels.
bool CanRunShort(const Forward& call, const Device&) {
  return IsShort(call.geometry) && call.dtype != DType::kF32 && call.geometry.channels % 2 == 0 &&
         MakePlan(call).CanLaunch();
}
bool CanRunShort(const Gradients& gradients, const Device&) {
  const Backward& call = gradients.call;
  return IsShort(call.geometry) && RowsAligned(call.geometry.channels, call.dtype, 4) &&
         MakePlan(gradients).CanLaunch();
}
bool CanRunShortOfSegments(const Forward& call, const Device&) {
  return IsShort(call.geometry) && MakePlan(call).CanLaunch();
}
bool CanRunShortOfSegments(const Gradients& gradients, const Device&) {
  return IsShort(gradients.call.geometry) && MakePlan(gradients).CanLaunch();
}

cudaError_t LaunchShort(cudaStream_t stream, const Forward& call, const Device&) {
  const RingPlan plan = MakePlan(call);
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    if constexpr (std::is_same_v<T, float>) {
      return cudaErrorInvalidValue;
    } else {
      return LaunchPlan<T, 2, Packing::kNone>(stream, call, plan);
    }
  });
}

cudaError_t LaunchShort(cudaStream_t stream, const Gradients& gradients, const Device&) {
  return LaunchGradients<Packing::kNone>(stream, gradients);
}

cudaError_t LaunchShortOfSegments(cudaStream_t stream, const Forward& call, const Device&) {
  const RingPlan plan = MakePlan(call);
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kFew = sizeof(T) == 2 ? 2 : 1;
    if (call.slots == nullptr) {
      return LaunchPlan<T, kFew, Packing::kSegments>(stream, call, plan);
    }
    return LaunchPlan<T, kFew, Packing::kSlots>(stream, call, plan);
  });
}

cudaError_t LaunchShortOfSegments(cudaStream_t stream, const Gradients& gradients, const Device&) {
  return LaunchGradients<Packing::kSegments>(stream, gradients);
}

}  // namespace jaxops::lightweight_conv::cuda::ntc
