// These kernels compute lightweight convolution with segments and states for short filters in the
// NTC layout: forward, and all gradients in one pass over x and g.
//
// They read x and g as the kernels of ntc/short.cu do, and in addition two starts for every kRows
// steps: if the first and the last row of these steps' windows are of one segment, then so are all
// rows between, and the kernels do the same as without segments. Only steps whose windows reach
// beyond a segment or the sequence find out tap by tap which pairs take part, and read states.
#include "cuda/common/activation.cuh"
#include "cuda/lightweight_conv/families.h"
#include "cuda/lightweight_conv/ntc/ring.cuh"
#include "cuda/lightweight_conv/packed.cuh"

namespace jaxops::lightweight_conv::cuda::ntc {
namespace {

using jaxops::cuda::Activate;

// WindowCheck says of kRows steps after the other whether their windows are inside of one segment.
// The starts of the next steps are in flight meanwhile.
class WindowCheck {
 public:
  // `starts` is null if the sequence is one segment. All of kRows steps are below `max_steps`.
  __device__ __forceinline__ WindowCheck(const int32_t* starts, const StepRanges& ranges,
                                         const StepRange& range, int max_steps)
      : first_(starts == nullptr ? nullptr : starts + range.origin),
        dilation_(ranges.dilation),
        last_((kRows + ranges.taps - 2) * ranges.dilation),
        inside_(range.low, min(max_steps, range.high - ranges.taps + 1) - kRows + 1) {
    Fetch();
  }

  __device__ __forceinline__ bool Take() {
    const bool is_whole = inside_.Has(done_) && first_start_ == last_start_;
    done_ += kRows;
    Fetch();
    return is_whole;
  }

 private:
  __device__ __forceinline__ void Fetch() {
    if (first_ == nullptr || !inside_.Has(done_)) return;
    const int row = done_ * dilation_;
    first_start_ = first_[row];
    last_start_ = first_[row + last_];
  }

  const int32_t* first_;  // the start of the window array's first row
  int dilation_;
  int last_;  // steps from the first row of kRows windows to their last one
  Interval inside_;
  int done_ = 0;
  int first_start_ = 0, last_start_ = 0;
};

// FindRowPairs returns the pairs of kRows steps from step `done` of a range on as bits: pair
// (i, j) of step done + i and tap j is bit i * kTaps + j.
template <int kTaps>
__device__ __forceinline__ uint32_t FindRowPairs(const int32_t* starts, const StepRanges& ranges,
                                                 const StepRange& range, int done) {
  static_assert(kRows * kTaps <= 32);
  uint32_t pairs = 0;
#pragma unroll 1
  for (int i = 0; i < min(kRows, range.count - done); ++i) {
    const int row = (done + i) * ranges.dilation;
    pairs |= FindPairs<kTaps>(starts, range.first + row, range.origin + row, ranges.dilation,
                              ranges.taps, ranges.time)
             << i * kTaps;
  }
  return pairs;
}

// --- forward -------------------------------------------------------------------------------------

struct ForwardParams {
  StepRanges ranges;
  const void *x, *weight, *bias;
  const int32_t* starts;
  States states;
  void* y;
  DType weight_dtype, bias_dtype;
  Activation activation;
  bool flip_taps;
  FastDivider tiles;  // ranges of one batch entry, divided by the groups of a block
  BatchMap<Forward::kOperands> batch;
};

template <typename T, int kV, int kTaps>
__global__ void __launch_bounds__(kRingThreads, 4)
    PackedNtcForward(const __grid_constant__ ForwardParams p) {
  using Acc = Accumulator<T>;
  using Ring = RowRing<T, kV, kTaps, false>;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ StagedTaps<Acc, kTaps, kV, false> staged;
  const StepRanges& ranges = p.ranges;
  const int lane = threadIdx.x & (ranges.tile.lanes() - 1);
  const int group = threadIdx.x >> ranges.tile.lane_bits;
  uint32_t block = blockIdx.x;
  const int first_channel = ranges.channel_blocks.DivMod(block) * ranges.tile.lanes() * kV;
  const int channel = first_channel + lane * kV;
  uint32_t index = p.tiles.DivMod(block) * ranges.groups() + group;
  const uint32_t entry = block;
  // Phases vary fastest, so that neighbouring groups read neighbouring rows.
  const int phase = ranges.phases.DivMod(index);
  const bool exists = index < ranges.per_phase.divisor() && channel < ranges.channels;
  StepRange range(ranges, exists ? index * ranges.length : 0, phase);
  if (!exists) range.count = 0;
  const T* x = static_cast<const T*>(p.x) + p.batch.Offset(entry, Forward::kX) + channel;
  const int32_t* starts = nullptr;
  if (p.starts != nullptr) starts = p.starts + p.batch.Offset(entry, Forward::kStarts);
  Ring ring(shared, ranges, range, x, nullptr);
  WindowCheck check(starts, ranges, range, ranges.time);
  staged.Stage(ranges, first_channel, p.weight, p.weight_dtype,
               p.batch.Offset(entry, Forward::kWeight), p.flip_taps);
  __syncthreads();
  if (range.count <= 0) return;

  Acc bias[kV] = {};
  if (p.bias != nullptr) {
    const int64_t at = p.batch.Offset(entry, Forward::kBias) + channel;
    WithElements(p.bias, p.bias_dtype, [&](const auto* biases) {
#pragma unroll
      for (int v = 0; v < kV; ++v) bias[v] = static_cast<Acc>(Widen(biases[at + v]));
    });
  }
  const int64_t advance = int64_t{ranges.dilation} * ranges.channels;
  T* y = static_cast<T*>(p.y) + p.batch.Offset(entry, Forward::kY) + channel +
         int64_t{range.first} * ranges.channels;
  Acc window[kTaps - 1 + kRows][kV];
  ReadCarried<kTaps>(window, ranges, range, x);
#pragma unroll 1
  for (int done = 0; done < range.count; done += kRows) {
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
    if (check.Take()) {
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        if (k < ranges.taps) {
          Acc weight[kV];
          staged.Read(weight, k, lane);
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
#pragma unroll
            for (int v = 0; v < kV; ++v) sums[i][v] += weight[v] * window[i + k][v];
          }
        }
      }
    } else {
      if (p.states.states != nullptr) {
        const int32_t* slots = nullptr;
        if (p.states.slots != nullptr) {
          slots = p.states.slots + p.batch.Offset(entry, Forward::kSlots);
        }
        const int64_t offset = p.batch.Offset(entry, Forward::kState) + channel;
#pragma unroll 1
        for (int i = 0; i < min(kRows, range.count - done); ++i) {
          const int t = range.first + (done + i) * ranges.dilation;
          Acc sum[kV];
#pragma unroll
          for (int v = 0; v < kV; ++v) sum[v] = bias[v];
          p.states.ForEachTap<kV, Acc>(slots, offset, t,
                                       starts == nullptr ? -ranges.padding : starts[t], 0,
                                       [&](int k, const Acc(&row)[kV]) {
                                         Acc tap[kV];
                                         staged.Read(tap, k, lane);
#pragma unroll
                                         for (int v = 0; v < kV; ++v) sum[v] += tap[v] * row[v];
                                       });
          // Registers have no index that is known only at run time.
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int v = 0; v < kV; ++v) sums[r][v] = r == i ? sum[v] : sums[r][v];
          }
        }
      }
      const uint32_t pairs = FindRowPairs<kTaps>(starts, ranges, range, done);
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        if (k < ranges.taps) {
          Acc weight[kV];
          staged.Read(weight, k, lane);
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            if (pairs >> (i * kTaps + k) & 1) {
#pragma unroll
              for (int v = 0; v < kV; ++v) sums[i][v] += weight[v] * window[i + k][v];
            }
          }
        }
      }
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
  const int32_t* starts;
  void *dx, *dbias;
  void* partials;
  DType weight_dtype;
  int bias_tap;        // the flipped tap that meets a step's own g, or none
  uint32_t items;      // ranges of all phases of all summed batch entries
  FastDivider splits;  // blocks that share the sum of one set of channels
  BatchMap<Backward::kOperands> kept, summed;
};

template <typename T, int kV, int kTaps>
__global__ void __launch_bounds__(kRingThreads, 3)
    PackedNtcBackward(const __grid_constant__ BackwardParams p) {
  using Acc = Accumulator<T>;
  using Ring = RowRing<T, kV, kTaps, true>;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ StagedTaps<Acc, kTaps, kV, false> staged;
  const StepRanges& ranges = p.ranges;
  const int lanes = ranges.tile.lanes();
  const int lane = threadIdx.x & (lanes - 1);
  const int group = threadIdx.x >> ranges.tile.lane_bits;
  uint32_t block = blockIdx.x;
  const int first_channel = ranges.channel_blocks.DivMod(block) * lanes * kV;
  const int channel = first_channel + lane * kV;
  const uint32_t split = p.splits.DivMod(block);
  const uint32_t kept_entry = block;
  const auto kept = p.kept.AllOffsets(kept_entry);
  const int64_t advance = int64_t{ranges.dilation} * ranges.channels;
  const bool wants_dx = p.dx != nullptr;
  const bool wants_dbias = p.dbias != nullptr;

  if (wants_dx) {
    staged.Stage(ranges, first_channel, p.weight, p.weight_dtype, kept[Backward::kWeight], true);
    __syncthreads();
  }
  Acc dweight[kTaps][kV] = {};
  Acc dbias[1][kV] = {};
  const uint32_t stride = p.splits.divisor() * ranges.groups();
  uint32_t index = split * ranges.groups() + group;
  if (channel >= ranges.channels) index = p.items;
#pragma unroll 1
  for (; index < p.items; index += stride) {
    uint32_t rest = index;
    const int phase = ranges.phases.DivMod(rest);
    const int step = ranges.per_phase.DivMod(rest) * ranges.length;
    const auto summed = p.summed.AllOffsets(rest);
    const StepRange range(ranges, step, phase);
    const auto at = [&](int operand) { return kept[operand] + summed[operand]; };
    const T* x = static_cast<const T*>(p.x) + at(Backward::kX) + channel;
    const T* g = static_cast<const T*>(p.g) + at(Backward::kG) + channel;
    const int32_t* starts = p.starts + at(Backward::kStarts);
    Ring ring(shared, ranges, range, g, x);
    WindowCheck check(starts, ranges, range, range.count);
    T* dx = static_cast<T*>(p.dx) + (at(Backward::kDx) + channel) +
            int64_t{range.first} * ranges.channels;
    Acc window[kTaps - 1 + kRows][kV];
    ReadCarried<kTaps>(window, ranges, range, g);
#pragma unroll 1
    for (int done = 0; done < range.count; done += kRows) {
      Vector<T, kV> rows[kRows], own_rows[kRows];
      ring.Take(rows, own_rows);
      Acc own[kRows][kV];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        WidenRow(window[kTaps - 1 + i], rows[i]);
        WidenRow(own[i], own_rows[i]);
      }
      Acc sums[kRows][kV] = {};
      const auto work = [&](auto all, uint32_t pairs) {
#pragma unroll
        for (int j = 0; j < kTaps; ++j) {
          if (j < ranges.taps) {
            Acc weight[kV];
            staged.Read(weight, j, lane);
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
              if (all.value || (pairs >> (i * kTaps + j) & 1)) {
#pragma unroll
                for (int v = 0; v < kV; ++v) {
                  dweight[j][v] += own[i][v] * window[i + j][v];
                  sums[i][v] += weight[v] * window[i + j][v];
                }
              }
            }
          }
        }
      };
      if (check.Take()) {
        work(std::true_type{}, 0);
      } else {
        work(std::false_type{}, FindRowPairs<kTaps>(starts, ranges, range, done));
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
            const auto row = LoadVector<kV>(g + int64_t{t} * ranges.channels);
#pragma unroll
            for (int v = 0; v < kV; ++v) dbias[0][v] += Widen(row.values[v]);
          }
        }
      }
      Carry(window);
    }
  }

  Acc* sums = reinterpret_cast<Acc*>(shared);
  const int64_t first_row = (int64_t{kept_entry} * p.splits.divisor() + split) * (ranges.taps + 1);
  Acc* partials = static_cast<Acc*>(p.partials) + first_row * ranges.channels + first_channel;
  SumGroups(sums, dweight, ranges.taps, lanes, [&](int j, int i, Acc sum) {
    if (first_channel + i < ranges.channels) {
      partials[int64_t{ranges.taps - 1 - j} * ranges.channels + i] = sum;
    }
  });
  if (wants_dbias) {
    SumGroups(sums, dbias, 1, lanes, [&](int, int i, Acc sum) {
      if (first_channel + i < ranges.channels) {
        partials[int64_t{ranges.taps} * ranges.channels + i] = sum;
      }
    });
  }
}

// --- launches ------------------------------------------------------------------------------------

// Rows that are not whole vectors are read in channels of at least 4 bytes, or one by one.
RingPlan MakePlan(const Geometry& g, DType dtype) {
  RingPlan plan(g, dtype, jaxops::cuda::SizeOf(dtype) == 2 && g.channels % 2 == 0 ? 2 : 1);
  plan.one_head = false;
  return plan;
}

RingPlan MakePlan(const Forward& call) {
  RingPlan plan = MakePlan(call.geometry, call.dtype);
  plan.CutForward(call);
  return plan;
}

RingPlan MakePlan(const Gradients& gradients) {
  RingPlan plan = MakePlan(gradients.call.geometry, gradients.call.dtype);
  plan.CutBackward(gradients);
  return plan;
}

template <typename T, int kV, int kTaps>
cudaError_t LaunchPlan(cudaStream_t stream, const Forward& call, const RingPlan& plan) {
  const Geometry& g = call.geometry;
  ForwardParams params{StepRanges(g, g.padding, plan)};
  params.x = call.x;
  params.weight = call.weight;
  params.bias = call.bias;
  params.starts = call.starts;
  params.states = States(call);
  params.y = call.y;
  params.weight_dtype = call.weight_dtype;
  params.bias_dtype = call.bias_dtype;
  params.activation = call.activation;
  params.flip_taps = call.flip_taps;
  params.tiles = FastDivider(plan.shares);
  params.batch = call.batch;
  return Launch(PackedNtcForward<T, kV, kTaps>, plan.blocks, kRingThreads,
                RowRing<T, kV, kTaps, false>::kBytes, stream, params);
}

template <typename T, int kV, int kTaps>
cudaError_t LaunchPlan(cudaStream_t stream, const Gradients& gradients, const RingPlan& plan) {
  const Backward& call = gradients.call;
  const Geometry& g = call.geometry;
  const int64_t mirrored = Mirrored(g);
  BackwardParams params{StepRanges(g, mirrored, plan)};
  params.x = call.x;
  params.weight = call.weight;
  params.g = call.g;
  params.starts = call.starts;
  params.dx = call.dx;
  params.dbias = call.dbias;
  params.partials = gradients.partials;
  params.weight_dtype = call.weight_dtype;
  params.bias_tap = mirrored % g.dilation == 0 ? static_cast<int>(mirrored / g.dilation) : -1;
  params.items = static_cast<uint32_t>(plan.items);
  params.splits = FastDivider(plan.shares);
  params.kept = call.kept;
  params.summed = call.summed;
  constexpr size_t kSums = size_t{kTaps} * (kRingThreads + kWarp) * kV * sizeof(Accumulator<T>);
  return Launch(PackedNtcBackward<T, kV, kTaps>, plan.blocks, kRingThreads,
                std::max(RowRing<T, kV, kTaps, true>::kBytes, kSums), stream, params);
}

template <typename Call>
cudaError_t LaunchCall(cudaStream_t stream, const Call& call, DType dtype, const RingPlan& plan) {
  return DispatchFloat(dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kMany = sizeof(T) == 8 ? 2 : 4;
    if (plan.vector == kMany && plan.max_taps == 4) {
      return LaunchPlan<T, kMany, 4>(stream, call, plan);
    }
    if (plan.vector == kMany) return LaunchPlan<T, kMany, kShortTaps>(stream, call, plan);
    if constexpr (sizeof(T) == 2) {
      if (plan.vector == 2) return LaunchPlan<T, 2, kShortTaps>(stream, call, plan);
    }
    return LaunchPlan<T, 1, kShortTaps>(stream, call, plan);
  });
}

bool IsShort(const Geometry& g) {
  return g.data_format == DataFormat::kNTC && g.taps <= kShortTaps;
}

}  // namespace

bool CanRunPacked(const Forward& call, const Device&) {
  return IsShort(call.geometry) && MakePlan(call).CanLaunch();
}
bool CanRunPacked(const Gradients& gradients, const Device&) {
  return IsShort(gradients.call.geometry) && MakePlan(gradients).CanLaunch();
}

cudaError_t LaunchPacked(cudaStream_t stream, const Forward& call, const Device&) {
  return LaunchCall(stream, call, call.dtype, MakePlan(call));
}

cudaError_t LaunchPacked(cudaStream_t stream, const Gradients& gradients, const Device&) {
  const Backward& call = gradients.call;
  const RingPlan plan = MakePlan(gradients);
  const cudaError_t error = LaunchCall(stream, gradients, call.dtype, plan);
  if (error != cudaSuccess) return error;
  return AddPartialSums(stream, call, {gradients.partials, plan.shares});
}

}  // namespace jaxops::lightweight_conv::cuda::ntc
