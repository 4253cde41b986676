// These kernels compute lightweight convolution with short filters in the NTC layout for rows that
// are whole vectors of channels: forward, and all gradients in one pass over x and g.
//
// Memory bounds these calls. A thread owns a vector of channels and loops over a range of time
// steps with the window of its filter in registers, so that every row is read once, except for the
// few rows that neighbouring ranges share. The next rows of a thread are in flight to a ring of
// its own in shared memory: registers do not limit the number of rows in flight, and the loop never
// synchronises, because no thread reads rows that another thread copied.
#include "cuda/common/activation.cuh"
#include "cuda/lightweight_conv/families.h"
#include "cuda/lightweight_conv/ntc/ring.cuh"

namespace jaxops::lightweight_conv::cuda::ntc {
namespace {

using jaxops::cuda::Activate;

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

template <typename T, int kV, int kTaps, bool kOneHead>
__global__ void __launch_bounds__(kRingThreads, kTaps <= 4 ? 5 : 4)
    ShortNtcForward(const __grid_constant__ ForwardParams p) {
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
  const auto batch = p.batch.AllOffsets(block);
  // Phases vary fastest, so that neighbouring groups read neighbouring rows.
  const int phase = ranges.phases.DivMod(index);
  const bool exists = index < ranges.per_phase.divisor() && channel < ranges.channels;
  StepRange range(ranges, exists ? index * ranges.length : 0, phase);
  if (!exists) range.count = 0;
  const T* x = static_cast<const T*>(p.x) + batch[Forward::kX] + channel;
  Ring ring(shared, ranges, range, x, nullptr);
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
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      if (k < ranges.taps) {
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

template <typename T, int kV, int kTaps, bool kOneHead>
__global__ void __launch_bounds__(kRingThreads, 3)
    ShortNtcBackward(const __grid_constant__ BackwardParams p) {
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
  const uint32_t stride = p.splits.divisor() * ranges.groups();
  uint32_t index = split * ranges.groups() + group;
  if (channel >= ranges.channels) index = p.items;
#pragma unroll 1
  for (; index < p.items; index += stride) {
    uint32_t item = index;
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
    Acc window[kTaps - 1 + kRows][kV];
    ReadCarried<kTaps>(window, ranges, range, g);
    // From these steps on, all pairs of kRows steps and the taps are inside the sequence.
    const Interval whole(range.low, min(range.count, range.high - ranges.taps + 1) - kRows + 1);
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
      const auto work = [&](auto all) {
#pragma unroll
        for (int j = 0; j < kTaps; ++j) {
          if (j < ranges.taps) {
            Acc weight[kWidth];
            staged.Read(weight, j, lane);
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
              if (all.value || (done + i < range.count && range.HasRow(done + i + j))) {
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

RingPlan MakePlan(const Forward& call) {
  RingPlan plan(call.geometry, call.dtype, 2);
  plan.CutForward(call);
  return plan;
}

RingPlan MakePlan(const Gradients& gradients) {
  const Backward& call = gradients.call;
  RingPlan plan(call.geometry, call.dtype, jaxops::cuda::SizeOf(call.dtype) == 2 ? 2 : 1);
  plan.CutBackward(gradients);
  return plan;
}

template <typename T, int kV, int kTaps, bool kOneHead>
cudaError_t LaunchPlan(cudaStream_t stream, const Forward& call, const RingPlan& plan) {
  const Geometry& g = call.geometry;
  ForwardParams params{StepRanges(g, g.padding, plan)};
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
  return Launch(ShortNtcForward<T, kV, kTaps, kOneHead>, plan.blocks, kRingThreads,
                RowRing<T, kV, kTaps, false>::kBytes, stream, params);
}

template <typename T, int kV, int kTaps, bool kOneHead>
cudaError_t LaunchPlan(cudaStream_t stream, const Gradients& gradients, const RingPlan& plan) {
  const Backward& call = gradients.call;
  const Geometry& g = call.geometry;
  const int64_t mirrored = Mirrored(g);
  BackwardParams params{StepRanges(g, mirrored, plan)};
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
  constexpr size_t kSums = size_t{kTaps} * (kRingThreads + kWarp) * kV * sizeof(Accumulator<T>);
  return Launch(ShortNtcBackward<T, kV, kTaps, kOneHead>, plan.blocks, kRingThreads,
                std::max(RowRing<T, kV, kTaps, true>::kBytes, kSums), stream, params);
}

// DispatchPlan calls `launch` with the template arguments of a plan.
template <typename T, int kFew, typename Function>
cudaError_t DispatchPlan(const RingPlan& plan, Function&& launch) {
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
  const RingPlan plan = MakePlan(call);
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
  const RingPlan plan = MakePlan(gradients);
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
