// This header holds the code that kernels of short filters in the NTC layout share if memory bounds
// them: a thread owns a vector of channels and loops over a range of time steps with the window of
// its filter in registers, and its next rows are in flight to a ring of its own in shared memory.
#ifndef JAXOPS_CUDA_LIGHTWEIGHT_CONV_NTC_RING_CUH_
#define JAXOPS_CUDA_LIGHTWEIGHT_CONV_NTC_RING_CUH_

#include "cuda/common/async_copy.cuh"
#include "cuda/lightweight_conv/families.h"
#include "cuda/lightweight_conv/filters.cuh"
#include "cuda/lightweight_conv/ntc/rows.cuh"
#include "cuda/lightweight_conv/packed.h"

namespace jaxops::lightweight_conv::cuda::ntc {

using jaxops::cuda::WaitCopies;

inline constexpr int kRingThreads = 128;
// A thread takes this number of rows at a time, and its ring has this number of such sets.
inline constexpr int kRows = 4;
inline constexpr int kStages = 3;
// These bound the steps of a range, or the bytes that it reads of an array. Shorter ranges
// would read the rows of their first window for too few steps. With longer ranges, the rows that
// blocks read at the same time are further apart, and the last block ends later; backward, where
// every further block adds partial sums, a thread takes several ranges instead.
inline constexpr int64_t kMinRange = 8;
inline constexpr int64_t kForwardRangeBytes = 256;
inline constexpr int64_t kMaxBackwardRange = 32;
// Forward calls of at least this number of threads gain by shorter ranges.
inline constexpr int64_t kForwardThreads = int64_t{1} << 16;

struct RingPlan {
  // The kernel's template arguments: channels of a thread, taps that it has registers for, and
  // whether its channels are always of one head.
  int vector, max_taps;
  bool one_head;
  ShortNtcTile tile;
  int64_t channel_blocks;
  int64_t phases;
  int64_t range_steps = 0;
  int64_t ranges = 0;  // ranges of one phase
  int64_t items = 0;   // ranges of all phases; backward, of all summed batch entries
  // A batch entry's channels have this number of blocks: tiles of ranges, or splits of the sum.
  int64_t shares = 0;
  int64_t blocks = 0;  // blocks of the grid

  // A thread has `many` channels, or `few` if rows are not whole vectors of that size.
  RingPlan(const Geometry& g, DType dtype, int many, int few)
      : vector(g.channels % many == 0 ? many : few),
        max_taps(vector == MaxVector(dtype) && g.taps <= 4 ? 4 : kShortTaps),
        one_head(vector == MaxVector(dtype) && max_taps == kShortTaps &&
                 g.channels / g.heads % vector == 0),
        tile(g.channels, vector),
        channel_blocks(CeilDiv(g.channels, int64_t{vector} * tile.lanes())),
        phases(std::min(g.dilation, g.time)) {}

  // The number of channels for which the window, and backward the sums, fit registers.
  static int MaxVector(DType dtype) { return jaxops::cuda::SizeOf(dtype) == 8 ? 2 : 4; }

  // A block has this number of ranges along time.
  int64_t groups() const { return kRingThreads >> tile.lane_bits; }

  void CutForward(const Forward& call) {
    const Geometry& g = call.geometry;
    const int64_t batch = call.batch.size();
    const int64_t sequences = batch * phases * CeilDiv(g.channels, vector);
    // There are at least as many ranges as a block has groups.
    Cut(g, std::max(kForwardThreads / sequences, CeilDiv(groups(), phases)), kMinRange,
        kForwardRangeBytes / (vector * jaxops::cuda::SizeOf(call.dtype)));
    items = ranges * phases;
    shares = CeilDiv(items, groups());
    blocks = batch * shares * channel_blocks;
  }

  void CutBackward(const Gradients& gradients) {
    const Backward& call = gradients.call;
    const Geometry& g = call.geometry;
    const int64_t all_phases = call.summed.size() * phases;
    // Longer ranges read fewer rows twice, but more of them contain the end of a segment.
    const bool is_long = call.dx == nullptr && !IsPacked(call);
    Cut(g, gradients.splits * groups() / all_phases, kMinRange,
        is_long ? g.time + kMinRange : kMaxBackwardRange);
    items = all_phases * ranges;
    shares = std::min(gradients.splits, CeilDiv(items, groups()));
    blocks = call.kept.size() * shares * channel_blocks;
  }

  // Cut cuts every phase into `wanted` ranges, or fewer or more of `min` to `max` steps.
  void Cut(const Geometry& g, int64_t wanted, int64_t min, int64_t max) {
    const int64_t steps = CeilDiv(g.time, g.dilation);
    const int64_t fair = CeilDiv(steps, std::max<int64_t>(1, wanted));
    range_steps = CeilDiv(std::clamp(fair, min, max), kRows) * kRows;
    ranges = CeilDiv(steps, range_steps);
  }

  bool CanLaunch() const { return items <= INT32_MAX && blocks <= kMaxBlocks; }
};

// These parameters are for both directions.
struct StepRanges {
  int time, channels, taps, dilation;
  int padding;  // from a step's row back to the first row of its window
  int length;   // steps of a range
  ShortNtcTile tile;
  FastDivider channel_blocks;
  FastDivider per_phase;
  FastDivider phases;
  FastDivider depth;  // channels of a head

  StepRanges(const Geometry& g, int64_t first_padding, const RingPlan& plan)
      : time(static_cast<int>(g.time)),
        channels(static_cast<int>(g.channels)),
        taps(static_cast<int>(g.taps)),
        dilation(static_cast<int>(g.dilation)),
        padding(static_cast<int>(first_padding)),
        length(static_cast<int>(plan.range_steps)),
        tile(plan.tile),
        channel_blocks(plan.channel_blocks),
        per_phase(plan.ranges),
        phases(plan.phases),
        depth(g.channels / g.heads) {}

  // A block has this number of ranges along time.
  __device__ int groups() const { return kRingThreads >> tile.lane_bits; }
};

// One range has the steps first, first + dilation, ... of one phase. Step i uses rows i to i +
// taps - 1 of the range's window array; row e is time step origin + e * dilation, and only rows
// [low, high) are inside the sequence.
struct StepRange {
  int first, count, origin, low, high;

  __device__ StepRange(const StepRanges& ranges, int step, int phase)
      : first(phase + step * ranges.dilation),
        count(min(PhaseSteps(ranges.time, ranges.dilation, phase) - step, ranges.length)),
        origin(first - ranges.padding),
        low(origin >= 0 ? 0 : DivideByDilation(-origin, ranges.dilation)),
        high(origin >= ranges.time ? 0 : DivideByDilation(ranges.time - origin, ranges.dilation)) {}

  __device__ bool HasRow(int row) const { return row >= low && row < high; }
};

// Interval is the `size` numbers from `first` on, or none.
struct Interval {
  int first;
  unsigned size;

  __device__ Interval(int begin, int end)
      : first(begin), size(static_cast<unsigned>(max(0, end - begin))) {}
  __device__ bool Has(int i) const { return static_cast<unsigned>(i - first) < size; }
};

// The ring holds a thread's rows in flight: the rows of the window array from kTaps - 1 on, and if
// kOwn the steps' own rows of another array. Rows outside the sequence arrive as zeros.
template <typename T, int kV, int kTaps, bool kOwn>
class RowRing {
 public:
  using Row = Raw<T, kV>;
  static constexpr size_t kBytes =
      size_t{kStages} * (kOwn ? 2 : 1) * kRows * kRingThreads * sizeof(Row);

  // `window` and `own` are the thread's columns of the arrays.
  __device__ __forceinline__ RowRing(void* storage, const StepRanges& ranges,
                                     const StepRange& range, const T* window, const T* own)
      : slots_(static_cast<Row*>(storage) + threadIdx.x),
        good_(window),
        window_(window + int64_t{range.origin + kCarried * ranges.dilation} * ranges.channels),
        own_(kOwn ? own + int64_t{range.first} * ranges.channels : nullptr),
        advance_(int64_t{ranges.dilation} * ranges.channels),
        range_(range),
        inside_(
            range.low - kCarried,
            min(kOwn ? range.count : range.high - kCarried, range.high - kCarried) - kRows + 1) {
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) Fetch();
  }

  // Take waits for the oldest rows, reads them, and starts the copies of others to the stage read
  // before.
  __device__ __forceinline__ void Take(Row (&window)[kRows], Row (&own)[kOwn ? kRows : 1]) {
    WaitCopies<kStages - 2>();  // a fence for the compiler too: no barrier follows
    const Row* from = slots_ + taken_;
    taken_ = Next(taken_);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      window[i] = from[i * kRingThreads];
      if constexpr (kOwn) own[i] = from[(kRows + i) * kRingThreads];
    }
    Fetch();
  }

 private:
  static constexpr int kCarried = kTaps - 1;
  static constexpr int kStageRows = (kOwn ? 2 : 1) * kRows * kRingThreads;

  __device__ static int Next(int stage) {
    return stage == (kStages - 1) * kStageRows ? 0 : stage + kStageRows;
  }

  __device__ __forceinline__ void Fetch() {
    if (fetched_ < range_.count) {
      Row* to = slots_ + filled_;
      if (inside_.Has(fetched_)) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) Copy(to + i * kRingThreads, true, true);
      } else {
#pragma unroll 1
        for (int i = 0; i < kRows; ++i) {
          Copy(to + i * kRingThreads, range_.HasRow(fetched_ + i + kCarried),
               fetched_ + i < range_.count);
        }
      }
    }
    __pipeline_commit();
    fetched_ += kRows;
    filled_ = Next(filled_);
  }

  __device__ __forceinline__ void Copy(Row* to, bool has_window, bool has_own) {
    Copy(to, window_, has_window);
    window_ += advance_;
    if constexpr (kOwn) {
      Copy(to + kRows * kRingThreads, own_, has_own);
      own_ += advance_;
    }
  }

  // An asynchronous copy cannot move a single channel of 2 bytes.
  __device__ __forceinline__ void Copy(Row* to, const T* from, bool exists) {
    if constexpr (sizeof(Row) < 4) {
      *to = LoadRawIf<kV>(exists, from);
    } else {
      __pipeline_memcpy_async(to, exists ? from : good_, sizeof(Row), exists ? 0 : sizeof(Row));
    }
  }

  Row* slots_;
  const T* good_;  // an address that is always valid to read
  const T* window_;
  const T* own_;
  int64_t advance_;
  StepRange range_;
  Interval inside_;  // steps from which kRows rows of each array can be copied without checks
  int fetched_ = 0;
  int filled_ = 0, taken_ = 0;  // indices of the next stage to fill and to read
};

// ReadCarried reads the rows of a range's first window except the last kRows, zero outside the
// sequence.
template <int kTaps, typename T, typename Acc, int kV, int kWindow>
__device__ __forceinline__ void ReadCarried(Acc (&window)[kWindow][kV], const StepRanges& ranges,
                                            const StepRange& range, const T* column) {
  Raw<T, kV> rows[kTaps - 1];
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i) {
    const int t = range.origin + i * ranges.dilation;
    rows[i] = LoadRawIf<kV>(range.HasRow(i), column + int64_t{t} * ranges.channels);
  }
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i) WidenAll(window[i], rows[i]);
}

// Carry advances by kRows rows.
template <typename Acc, int kV, int kWindow>
__device__ __forceinline__ void Carry(Acc (&window)[kWindow][kV]) {
#pragma unroll
  for (int i = 0; i < kWindow - kRows; ++i) {
#pragma unroll
    for (int v = 0; v < kV; ++v) window[i][v] = window[kRows + i][v];
  }
}

// Shared memory holds the taps of a block's channels, read once per block and as vectors. The
// channels of a vector share their taps if they are always of one head.
template <typename Acc, int kTaps, int kV, bool kOneHead>
class StagedTaps {
 public:
  static constexpr int kWidth = kOneHead ? 1 : kV;  // filters of a thread

  // The block has to synchronise after the call.
  __device__ __forceinline__ void Stage(const StepRanges& ranges, int first_channel,
                                        const void* weights, DType dtype, int64_t offset,
                                        bool reversed) {
    WithElements(weights, dtype, [&](const auto* elements) {
      for (int i = threadIdx.x; i < kWidth * ranges.tile.lanes(); i += kRingThreads) {
        const int channel = min(first_channel + i * (kV / kWidth), ranges.channels - 1);
        const auto* filter =
            elements + offset + int64_t{ranges.depth.Quotient(channel)} * ranges.taps;
#pragma unroll
        for (int k = 0; k < kTaps; ++k) {
          if (k < ranges.taps) {
            taps_[k][i] = static_cast<Acc>(Widen(filter[reversed ? ranges.taps - 1 - k : k]));
          }
        }
      }
    });
  }

  __device__ __forceinline__ void Read(Acc (&weight)[kWidth], int tap, int lane) const {
    constexpr int kMax = 16 / sizeof(Acc);
    constexpr int kVector = kWidth < kMax ? kWidth : kMax;
#pragma unroll
    for (int v = 0; v < kWidth; v += kVector) {
      const auto vec = LoadVector<kVector>(&taps_[tap][lane * kWidth + v]);
#pragma unroll
      for (int e = 0; e < kVector; ++e) weight[v + e] = vec.values[e];
    }
  }

 private:
  alignas(16) Acc taps_[kTaps][kWarp * kWidth];
};

// SumGroups sums each thread's values over the block's threads that own the same channels, in a
// fixed order; total(i, column, sum) receives the sum of value i of each of the block's columns,
// kWidth columns per thread.
template <int kCount, int kWidth, typename Acc, typename Total>
__device__ __forceinline__ void SumGroups(Acc* shared, const Acc (&values)[kCount][kWidth],
                                          int count, int lanes, Total&& total) {
  // Neighbouring threads read neighbouring columns: kWidth rows that start in different banks.
  constexpr int kPitch = kRingThreads + kWarp / kWidth;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int v = 0; v < kWidth; ++v) {
      shared[(i * kWidth + v) * kPitch + threadIdx.x] = values[i][v];
    }
  }
  __syncthreads();
  const int columns = lanes * kWidth;
#pragma unroll 1
  for (int n = threadIdx.x; n < count * columns; n += kRingThreads) {
    const int i = n / columns;
    const int column = n - i * columns;
    const Acc* own = shared + (i * kWidth + column % kWidth) * kPitch + column / kWidth;
    Acc sum = 0;
#pragma unroll 4
    for (int other = 0; other < kRingThreads; other += lanes) sum += own[other];
    total(i, column, sum);
  }
}

}  // namespace jaxops::lightweight_conv::cuda::ntc

#endif  // JAXOPS_CUDA_LIGHTWEIGHT_CONV_NTC_RING_CUH_
