// These kernels compute lightweight convolution with short filters in the NTC layout for rows that
// are whole vectors of channels: forward, and all gradients in one pass over x and g.
//
// Memory bounds these calls. A thread owns a vector of channels and loops over a segment of time
// steps with the window of its filter in registers, so that every row is read once, except for the
// few rows that neighbouring segments share. The next rows of a thread are in flight to a ring of
// its own in shared memory: registers do not limit the number of rows in flight, and the loop never
// synchronises, because no thread reads rows that another thread copied.
#include "cuda/common/activation.cuh"
#include "cuda/common/async_copy.cuh"
#include "cuda/lightweight_conv/families.h"
#include "cuda/lightweight_conv/filters.cuh"
#include "cuda/lightweight_conv/ntc/rows.cuh"

namespace jaxops::lightweight_conv::cuda::ntc {
namespace {

using jaxops::cuda::Activate;
using jaxops::cuda::WaitCopies;

constexpr int kThreads = 128;
// A thread takes this number of rows at a time, and its ring has this number of such sets.
constexpr int kRows = 4;
constexpr int kStages = 3;
// These bound the steps of a segment, or the bytes that it reads of an array. Shorter segments
// would read the rows of their first window for too few steps. With longer segments, the rows that
// blocks read at the same time are further apart, and the last block ends later; backward, where
// every further block adds partial sums, a thread takes several segments instead.
constexpr int64_t kMinSegment = 8;
constexpr int64_t kForwardSegmentBytes = 256;
constexpr int64_t kMaxBackwardSegment = 32;
// Forward calls of at least this number of threads gain by shorter segments.
constexpr int64_t kForwardThreads = int64_t{1} << 16;

struct Plan {
  // The kernel's template arguments: channels of a thread, taps that it has registers for, and
  // whether its channels are always of one head.
  int vector, max_taps;
  bool one_head;
  ShortNtcTile tile;
  int64_t channel_blocks;
  int64_t phases;
  int64_t segment_steps = 0;
  int64_t segments = 0;  // segments of one phase
  int64_t items = 0;     // segments of all phases; backward, of all summed batch entries
  // A batch entry's channels have this number of blocks: tiles of segments, or splits of the sum.
  int64_t shares = 0;
  int64_t blocks = 0;  // blocks of the grid

  // A thread has the maximum number of channels for which the window, and backward the sums, fit
  // registers, or `few` channels if rows are not whole vectors of that size.
  Plan(const Geometry& g, DType dtype, int few)
      : vector(g.channels % MaxVector(dtype) == 0 ? MaxVector(dtype) : few),
        max_taps(vector == MaxVector(dtype) && g.taps <= 4 ? 4 : kShortTaps),
        one_head(vector == MaxVector(dtype) && max_taps == kShortTaps &&
                 g.channels / g.heads % vector == 0),
        tile(g.channels, vector),
        channel_blocks(CeilDiv(g.channels, int64_t{vector} * tile.lanes())),
        phases(std::min(g.dilation, g.time)) {}

  static int MaxVector(DType dtype) { return jaxops::cuda::SizeOf(dtype) == 8 ? 2 : 4; }

  // A block has this number of segments along time.
  int64_t groups() const { return kThreads >> tile.lane_bits; }

  // Cut cuts every phase into `wanted` segments, or fewer or more of `min` to `max` steps.
  void Cut(const Geometry& g, int64_t wanted, int64_t min, int64_t max) {
    const int64_t steps = CeilDiv(g.time, g.dilation);
    const int64_t fair = CeilDiv(steps, std::max<int64_t>(1, wanted));
    segment_steps = CeilDiv(std::clamp(fair, min, max), kRows) * kRows;
    segments = CeilDiv(steps, segment_steps);
  }

  bool CanLaunch() const { return items <= INT32_MAX && blocks <= kMaxBlocks; }
};

// These parameters are for both directions.
struct Segments {
  int time, channels, taps, dilation;
  int padding;  // from a step's row back to the first row of its window
  int length;   // steps of a segment
  ShortNtcTile tile;
  FastDivider channel_blocks;
  FastDivider per_phase;
  FastDivider phases;
  FastDivider depth;  // channels of a head

  Segments(const Geometry& g, int64_t first_padding, const Plan& plan)
      : time(static_cast<int>(g.time)),
        channels(static_cast<int>(g.channels)),
        taps(static_cast<int>(g.taps)),
        dilation(static_cast<int>(g.dilation)),
        padding(static_cast<int>(first_padding)),
        length(static_cast<int>(plan.segment_steps)),
        tile(plan.tile),
        channel_blocks(plan.channel_blocks),
        per_phase(plan.segments),
        phases(plan.phases),
        depth(g.channels / g.heads) {}

  // A block has this number of segments along time.
  __device__ int groups() const { return kThreads >> tile.lane_bits; }
};

// One segment has the steps first, first + dilation, ... of one phase. Step i uses rows i to i +
// taps - 1 of the segment's window array; row e is time step origin + e * dilation, and only rows
// [low, high) are inside the sequence.
struct Segment {
  int first, count, origin, low, high;

  __device__ Segment(const Segments& segments, int step, int phase)
      : first(phase + step * segments.dilation),
        count(min(PhaseSteps(segments.time, segments.dilation, phase) - step, segments.length)),
        origin(first - segments.padding),
        low(origin >= 0 ? 0 : DivideByDilation(-origin, segments.dilation)),
        high(origin >= segments.time
                 ? 0
                 : DivideByDilation(segments.time - origin, segments.dilation)) {}

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
  using Row = Vector<T, kV>;
  static constexpr size_t kBytes =
      size_t{kStages} * (kOwn ? 2 : 1) * kRows * kThreads * sizeof(Row);

  // `window` and `own` are the thread's columns of the arrays.
  __device__ __forceinline__ RowRing(void* storage, const Segments& segments,
                                     const Segment& segment, const T* window, const T* own)
      : slots_(static_cast<Row*>(storage) + threadIdx.x),
        good_(window),
        window_(window +
                int64_t{segment.origin + kCarried * segments.dilation} * segments.channels),
        own_(kOwn ? own + int64_t{segment.first} * segments.channels : nullptr),
        advance_(int64_t{segments.dilation} * segments.channels),
        segment_(segment),
        inside_(segment.low - kCarried,
                min(kOwn ? segment.count : segment.high - kCarried, segment.high - kCarried) -
                    kRows + 1) {
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
      window[i] = from[i * kThreads];
      if constexpr (kOwn) own[i] = from[(kRows + i) * kThreads];
    }
    Fetch();
  }

 private:
  static constexpr int kCarried = kTaps - 1;
  static constexpr int kStageRows = (kOwn ? 2 : 1) * kRows * kThreads;

  __device__ static int Next(int stage) {
    return stage == (kStages - 1) * kStageRows ? 0 : stage + kStageRows;
  }

  __device__ __forceinline__ void Fetch() {
    if (fetched_ < segment_.count) {
      Row* to = slots_ + filled_;
      if (inside_.Has(fetched_)) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) Copy(to + i * kThreads, true, true);
      } else {
#pragma unroll 1
        for (int i = 0; i < kRows; ++i) {
          Copy(to + i * kThreads, segment_.HasRow(fetched_ + i + kCarried),
               fetched_ + i < segment_.count);
        }
      }
    }
    __pipeline_commit();
    fetched_ += kRows;
    filled_ = Next(filled_);
  }

  __device__ __forceinline__ void Copy(Row* to, bool has_window, bool has_own) {
    __pipeline_memcpy_async(to, has_window ? window_ : good_, sizeof(Row),
                            has_window ? 0 : sizeof(Row));
    window_ += advance_;
    if constexpr (kOwn) {
      __pipeline_memcpy_async(to + kRows * kThreads, has_own ? own_ : good_, sizeof(Row),
                              has_own ? 0 : sizeof(Row));
      own_ += advance_;
    }
  }

  Row* slots_;
  const T* good_;  // an address that is always valid to read
  const T* window_;
  const T* own_;
  int64_t advance_;
  Segment segment_;
  Interval inside_;  // steps from which kRows rows of each array can be copied without checks
  int fetched_ = 0;
  int filled_ = 0, taken_ = 0;  // indices of the next stage to fill and to read
};

// ReadCarried reads the rows of a segment's first window except the last kRows, zero outside the
// sequence.
template <int kTaps, typename T, typename Acc, int kV, int kWindow>
__device__ __forceinline__ void ReadCarried(Acc (&window)[kWindow][kV], const Segments& segments,
                                            const Segment& segment, const T* column) {
  Vector<T, kV> rows[kTaps - 1];
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i) {
    const int t = segment.origin + i * segments.dilation;
    rows[i] = LoadIf<kV>(segment.HasRow(i), column + int64_t{t} * segments.channels, column);
  }
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i) WidenRow(window[i], rows[i]);
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
  __device__ __forceinline__ void Stage(const Segments& segments, int first_channel,
                                        const void* weights, DType dtype, int64_t offset,
                                        bool reversed) {
    WithElements(weights, dtype, [&](const auto* elements) {
      for (int i = threadIdx.x; i < kWidth * segments.tile.lanes(); i += kThreads) {
        const int channel = min(first_channel + i * (kV / kWidth), segments.channels - 1);
        const auto* filter =
            elements + offset + int64_t{segments.depth.Quotient(channel)} * segments.taps;
#pragma unroll
        for (int k = 0; k < kTaps; ++k) {
          if (k < segments.taps) {
            taps_[k][i] = static_cast<Acc>(Widen(filter[reversed ? segments.taps - 1 - k : k]));
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

// --- forward -------------------------------------------------------------------------------------

struct ForwardParams {
  Segments segments;
  const void *x, *weight, *bias;
  void* y;
  DType weight_dtype, bias_dtype;
  Activation activation;
  bool flip_taps;
  FastDivider tiles;  // segments of one batch entry, divided by the groups of a block
  BatchMap<Forward::kOperands> batch;
};

template <typename T, int kV, int kTaps, bool kOneHead>
__global__ void __launch_bounds__(kThreads, kTaps <= 4 ? 5 : 4)
    ShortNtcForward(const __grid_constant__ ForwardParams p) {
  using Acc = Accumulator<T>;
  using Ring = RowRing<T, kV, kTaps, false>;
  using Taps = StagedTaps<Acc, kTaps, kV, kOneHead>;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Taps staged;
  const Segments& segments = p.segments;
  const int lane = threadIdx.x & (segments.tile.lanes() - 1);
  const int group = threadIdx.x >> segments.tile.lane_bits;
  uint32_t block = blockIdx.x;
  const int first_channel = segments.channel_blocks.DivMod(block) * segments.tile.lanes() * kV;
  const int channel = first_channel + lane * kV;
  uint32_t index = p.tiles.DivMod(block) * segments.groups() + group;
  const auto batch = p.batch.AllOffsets(block);
  // Phases vary fastest, so that neighbouring groups read neighbouring rows.
  const int phase = segments.phases.DivMod(index);
  const bool exists = index < segments.per_phase.divisor() && channel < segments.channels;
  Segment segment(segments, exists ? index * segments.length : 0, phase);
  if (!exists) segment.count = 0;
  const T* x = static_cast<const T*>(p.x) + batch[Forward::kX] + channel;
  Ring ring(shared, segments, segment, x, nullptr);
  staged.Stage(segments, first_channel, p.weight, p.weight_dtype, batch[Forward::kWeight],
               p.flip_taps);
  __syncthreads();
  if (segment.count <= 0) return;

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
  const int64_t advance = int64_t{segments.dilation} * segments.channels;
  T* y = static_cast<T*>(p.y) + batch[Forward::kY] + channel +
         int64_t{segment.first} * segments.channels;
  Acc window[kTaps - 1 + kRows][kV];
  ReadCarried<kTaps>(window, segments, segment, x);
#pragma unroll 1
  for (int done = 0; done < segment.count; done += kRows) {
    Vector<T, kV> rows[kRows], none[1];
    ring.Take(rows, none);
#pragma unroll
    for (int i = 0; i < kRows; ++i) WidenRow(window[kTaps - 1 + i], rows[i]);
    Acc sums[kRows][kV];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int v = 0; v < kV; ++v) sums[i][v] = bias[v];
    }
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      if (k < segments.taps) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
          for (int v = 0; v < kV; ++v) {
            sums[i][v] += weight[k][v % Taps::kWidth] * window[i + k][v];
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (done + i < segment.count) {
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
  Segments segments;
  const void *x, *weight, *g;
  void *dx, *dbias;
  void* partials;
  DType weight_dtype;
  int bias_tap;        // the flipped tap that meets a step's own g, or none
  uint32_t items;      // segments of all phases of all summed batch entries
  FastDivider splits;  // blocks that share the sum of one set of channels
  BatchMap<Backward::kOperands> kept, summed;
};

// SumGroups sums each thread's values over the block's threads that own the same channels, in a
// fixed order; total(i, column, sum) receives the sum of value i of each of the block's columns,
// kWidth columns per thread.
template <int kCount, int kWidth, typename Acc, typename Total>
__device__ __forceinline__ void SumGroups(Acc* shared, const Acc (&values)[kCount][kWidth],
                                          int count, int lanes, Total&& total) {
  // Neighbouring threads read neighbouring columns: kWidth rows that start in different banks.
  constexpr int kPitch = kThreads + kWarp / kWidth;
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
  for (int n = threadIdx.x; n < count * columns; n += kThreads) {
    const int i = n / columns;
    const int column = n - i * columns;
    const Acc* own = shared + (i * kWidth + column % kWidth) * kPitch + column / kWidth;
    Acc sum = 0;
#pragma unroll 4
    for (int other = 0; other < kThreads; other += lanes) sum += own[other];
    total(i, column, sum);
  }
}

template <typename T, int kV, int kTaps, bool kOneHead>
__global__ void __launch_bounds__(kThreads, 3)
    ShortNtcBackward(const __grid_constant__ BackwardParams p) {
  using Acc = Accumulator<T>;
  using Ring = RowRing<T, kV, kTaps, true>;
  using Taps = StagedTaps<Acc, kTaps, kV, kOneHead>;
  constexpr int kWidth = Taps::kWidth;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Taps staged;
  const Segments& segments = p.segments;
  const int lanes = segments.tile.lanes();
  const int lane = threadIdx.x & (lanes - 1);
  const int group = threadIdx.x >> segments.tile.lane_bits;
  uint32_t block = blockIdx.x;
  const int first_channel = segments.channel_blocks.DivMod(block) * lanes * kV;
  const int channel = first_channel + lane * kV;
  const uint32_t split = p.splits.DivMod(block);
  const int64_t kept_entry = block;
  const auto kept = p.kept.AllOffsets(block);
  const int64_t advance = int64_t{segments.dilation} * segments.channels;
  const bool wants_dx = p.dx != nullptr;
  const bool wants_dbias = p.dbias != nullptr;

  if (wants_dx) {
    staged.Stage(segments, first_channel, p.weight, p.weight_dtype, kept[Backward::kWeight], true);
    __syncthreads();
  }
  Acc dweight[kTaps][kWidth] = {};
  Acc dbias[1][kV] = {};
  const uint32_t stride = p.splits.divisor() * segments.groups();
  uint32_t index = split * segments.groups() + group;
  if (channel >= segments.channels) index = p.items;
#pragma unroll 1
  for (; index < p.items; index += stride) {
    uint32_t item = index;
    const int phase = segments.phases.DivMod(item);
    const int step = segments.per_phase.DivMod(item) * segments.length;
    const Segment segment(segments, step, phase);
    if (segment.count <= 0) continue;
    const auto summed = p.summed.AllOffsets(item);
    const auto column = [&](const void* array, int operand) {
      return static_cast<const T*>(array) + kept[operand] + summed[operand] + channel;
    };
    const T* g = column(p.g, Backward::kG);
    Ring ring(shared, segments, segment, g, column(p.x, Backward::kX));
    T* dx =
        const_cast<T*>(column(p.dx, Backward::kDx)) + int64_t{segment.first} * segments.channels;
    Acc window[kTaps - 1 + kRows][kV];
    ReadCarried<kTaps>(window, segments, segment, g);
    // From these steps on, all pairs of kRows steps and the taps are inside the sequence.
    const Interval whole(segment.low,
                         min(segment.count, segment.high - segments.taps + 1) - kRows + 1);
#pragma unroll 1
    for (int done = 0; done < segment.count; done += kRows) {
      Vector<T, kV> rows[kRows], own_rows[kRows];
      ring.Take(rows, own_rows);
      Acc own[kRows][kV];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        WidenRow(window[kTaps - 1 + i], rows[i]);
        WidenRow(own[i], own_rows[i]);
      }
      Acc sums[kRows][kV] = {};
      const auto work = [&](auto all) {
#pragma unroll
        for (int j = 0; j < kTaps; ++j) {
          if (j < segments.taps) {
            Acc weight[kWidth];
            staged.Read(weight, j, lane);
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
              if (all.value || (done + i < segment.count && segment.HasRow(done + i + j))) {
#pragma unroll
                for (int v = 0; v < kV; ++v) {
                  dweight[j][v % kWidth] += own[i][v] * window[i + j][v];
                }
              }
#pragma unroll
              for (int v = 0; v < kV; ++v) sums[i][v] += weight[v % kWidth] * window[i + j][v];
            }
          }
        }
      };
      if (whole.Has(done)) {
        work(std::true_type{});
      } else {
        work(std::false_type{});
      }
      if (wants_dx) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if (done + i < segment.count) StoreRow(dx, sums[i]);
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
                if (done + i < segment.count) {
#pragma unroll
                  for (int v = 0; v < kV; ++v) dbias[0][v] += window[i + j][v];
                }
              }
            }
          }
        } else {
          // Under dilation a step's own g may be outside the window, but is still in the cache.
          for (int i = 0; i < min(kRows, segment.count - done); ++i) {
            const int t = segment.first + (done + i) * segments.dilation;
            const auto row = LoadVector<kV>(g + int64_t{t} * segments.channels);
#pragma unroll
            for (int v = 0; v < kV; ++v) dbias[0][v] += Widen(row.values[v]);
          }
        }
      }
      Carry(window);
    }
  }

  Acc* sums = reinterpret_cast<Acc*>(shared);
  const int64_t first_row = (kept_entry * p.splits.divisor() + split) * (segments.taps + 1);
  Acc* partials = static_cast<Acc*>(p.partials) + first_row * segments.channels;
  const int first_column = first_channel / (kV / kWidth);
  SumGroups(sums, dweight, segments.taps, lanes, [&](int j, int i, Acc sum) {
    if (first_channel + i * (kV / kWidth) < segments.channels) {
      partials[int64_t{segments.taps - 1 - j} * segments.channels + first_column + i] = sum;
    }
  });
  if (wants_dbias) {
    SumGroups(sums, dbias, 1, lanes, [&](int, int i, Acc sum) {
      if (first_channel + i < segments.channels) {
        partials[int64_t{segments.taps} * segments.channels + first_channel + i] = sum;
      }
    });
  }
}

// --- launches ------------------------------------------------------------------------------------

Plan MakePlan(const Forward& call) {
  const Geometry& g = call.geometry;
  const int64_t batch = call.batch.size();
  Plan plan(g, call.dtype, 2);
  const int64_t sequences = batch * plan.phases * CeilDiv(g.channels, plan.vector);
  // There are at least as many segments as a block has groups.
  plan.Cut(g, std::max(kForwardThreads / sequences, CeilDiv(plan.groups(), plan.phases)),
           kMinSegment, kForwardSegmentBytes / (plan.vector * jaxops::cuda::SizeOf(call.dtype)));
  plan.items = plan.segments * plan.phases;
  plan.shares = CeilDiv(plan.items, plan.groups());
  plan.blocks = batch * plan.shares * plan.channel_blocks;
  return plan;
}

Plan MakePlan(const Gradients& gradients) {
  const Backward& call = gradients.call;
  const Geometry& g = call.geometry;
  Plan plan(g, call.dtype, jaxops::cuda::SizeOf(call.dtype) == 2 ? 2 : 1);
  const int64_t phases = call.summed.size() * plan.phases;
  plan.Cut(g, gradients.splits * plan.groups() / phases, kMinSegment,
           call.dx == nullptr ? g.time + kMinSegment : kMaxBackwardSegment);
  plan.items = phases * plan.segments;
  plan.shares = std::min(gradients.splits, CeilDiv(plan.items, plan.groups()));
  plan.blocks = call.kept.size() * plan.shares * plan.channel_blocks;
  return plan;
}

template <typename T, int kV, int kTaps, bool kOneHead>
cudaError_t LaunchPlan(cudaStream_t stream, const Forward& call, const Plan& plan) {
  const Geometry& g = call.geometry;
  ForwardParams params{Segments(g, g.padding, plan)};
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
  return Launch(ShortNtcForward<T, kV, kTaps, kOneHead>, plan.blocks, kThreads,
                RowRing<T, kV, kTaps, false>::kBytes, stream, params);
}

template <typename T, int kV, int kTaps, bool kOneHead>
cudaError_t LaunchPlan(cudaStream_t stream, const Gradients& gradients, const Plan& plan) {
  const Backward& call = gradients.call;
  const Geometry& g = call.geometry;
  const int64_t mirrored = Mirrored(g);
  BackwardParams params{Segments(g, mirrored, plan)};
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
  constexpr size_t kSums = size_t{kTaps} * (kThreads + kWarp) * kV * sizeof(Accumulator<T>);
  return Launch(ShortNtcBackward<T, kV, kTaps, kOneHead>, plan.blocks, kThreads,
                std::max(RowRing<T, kV, kTaps, true>::kBytes, kSums), stream, params);
}

// DispatchPlan calls `launch` with the template arguments of a plan.
template <typename T, int kFew, typename Function>
cudaError_t DispatchPlan(const Plan& plan, Function&& launch) {
  constexpr std::integral_constant<int, sizeof(T) == 8 ? 2 : 4> many;
  constexpr std::integral_constant<int, kFew> few;
  constexpr std::integral_constant<int, 4> few_taps;
  constexpr std::integral_constant<int, kShortTaps> all_taps;
  if (plan.vector != many.value) return launch(few, all_taps, std::false_type{});
  if (plan.max_taps == few_taps.value) return launch(many, few_taps, std::false_type{});
  return DispatchBool(plan.one_head,
                      [&](auto one_head) { return launch(many, all_taps, one_head); });
}

bool IsShort(const Geometry& g) {
  return g.data_format == DataFormat::kNTC && g.taps <= kShortTaps;
}

}  // namespace

// An asynchronous copy cannot move a single channel of 2 bytes, and no forward kernels of one
// channel exist for other types. ntc/window runs float32.
bool CanRunShort(const Forward& call, const Device&) {
  return IsShort(call.geometry) && call.dtype != DType::kF32 && call.geometry.channels % 2 == 0 &&
         MakePlan(call).CanLaunch();
}
bool CanRunShort(const Gradients& gradients, const Device&) {
  const Backward& call = gradients.call;
  return IsShort(call.geometry) && RowsAligned(call.geometry.channels, call.dtype, 4) &&
         MakePlan(gradients).CanLaunch();
}

cudaError_t LaunchShort(cudaStream_t stream, const Forward& call, const Device&) {
  const Plan plan = MakePlan(call);
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    if constexpr (std::is_same_v<T, float>) {
      return cudaErrorInvalidValue;
    } else {
      return DispatchPlan<T, 2>(plan, [&](auto vector, auto taps, auto one_head) {
        return LaunchPlan<T, vector.value, taps.value, one_head.value>(stream, call, plan);
      });
    }
  });
}

cudaError_t LaunchShort(cudaStream_t stream, const Gradients& gradients, const Device&) {
  const Backward& call = gradients.call;
  const Plan plan = MakePlan(gradients);
  const cudaError_t error = DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kFew = sizeof(T) == 2 ? 2 : 1;
    return DispatchPlan<T, kFew>(plan, [&](auto vector, auto taps, auto one_head) {
      return LaunchPlan<T, vector.value, taps.value, one_head.value>(stream, gradients, plan);
    });
  });
  if (error != cudaSuccess) return error;
  return AddPartialSums(stream, call,
                        {gradients.partials, plan.shares, plan.one_head ? plan.vector : 1});
}

}  // namespace jaxops::lightweight_conv::cuda::ntc
