// Lightweight convolution, backward: dx, dweight and dbias from x, weight and g.
//
// With taps flipped (j = taps - 1 - k) and padding mirrored, both gradients read g through the same
// window:
//
//   dx[s]      = sum_j weight[taps - 1 - j] * g[s + j * dilation - mirrored]
//   dweight[j] = sum_s x[s] * g[s + j * dilation - mirrored]
//
// so short filters get both in one pass over x and g. A block keeps its channels and walks over
// tiles of time and batch with the sums of its taps in registers; every block writes its partial
// sums, and a second kernel adds them in a fixed order. Long filters are cut into groups of taps,
// and their input gradient, which is bound by arithmetic, is a forward convolution.
//
// Pairs (s, j) whose g lies outside the sequence are left out, not multiplied by zero: a NaN in x
// must not reach taps that never met it.
#include "cuda/lightweight_conv.cuh"
#include "cuda/lightweight_conv.h"

namespace jaxops::lightweight_conv::cuda {
namespace {

// Longest filter whose two gradients share one kernel.
constexpr int kFusedTaps = 8;

struct BackwardParams {
  Backward call;
  int64_t mirrored;        // padding of the flipped taps
  int64_t splits;          // blocks that share the sum of one set of channels
  int64_t tiles;           // tiles of one phase (NTC) or of one row (NCT)
  int64_t channel_blocks;  // blocks of channels
  int tap_groups;
  NctTile nct;
  void* partials;  // (kept, splits, taps + 1, channels)
};

// One block's share of the work.
struct Share {
  int64_t first_tap;  // flipped
  int64_t channel_block;
  int64_t split;
  int64_t kept;

  __device__ Share(const BackwardParams& params, int group_taps) {
    // Groups of taps vary fastest: the blocks that read the same data run together.
    int64_t block = blockIdx.x;
    first_tap = block % params.tap_groups * group_taps;
    block /= params.tap_groups;
    channel_block = block % params.channel_blocks;
    block /= params.channel_blocks;
    split = block % params.splits;
    kept = block / params.splits;
  }
};

template <typename T>
__device__ __forceinline__ Accumulator<T>* PartialRow(const BackwardParams& params,
                                                      const Share& share, int64_t tap) {
  const Geometry& g = params.call.geometry;
  return static_cast<Accumulator<T>*>(params.partials) +
         ((share.kept * params.splits + share.split) * (g.taps + 1) + tap) * g.channels;
}

// The pairs of one thread's steps and taps, kGuarded where some may lie outside: steps from `steps`
// on, and window entries outside [low, high).
template <bool kGuarded, int kSteps, int kTaps, typename Acc, int kV>
__device__ __forceinline__ void Correlate(Acc (&dweight)[kTaps][kV], const Acc (&x)[kSteps][kV],
                                          const Acc (&window)[kSteps + kTaps - 1][kV], int taps,
                                          int steps, int low, int high) {
#pragma unroll
  for (int j = 0; j < kTaps; ++j) {
    if (j < taps) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (!kGuarded || (i < steps && i + j >= low && i + j < high)) {
#pragma unroll
          for (int v = 0; v < kV; ++v) dweight[j][v] += x[i][v] * window[i + j][v];
        }
      }
    }
  }
}

template <int kSteps, int kTaps, typename Acc, int kV>
__device__ __forceinline__ void InputGrad(Acc (&dx)[kSteps][kV], const Acc (&weight)[kTaps][kV],
                                          const Acc (&window)[kSteps + kTaps - 1][kV], int taps) {
#pragma unroll
  for (int j = 0; j < kTaps; ++j) {
    if (j < taps) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int v = 0; v < kV; ++v) dx[i][v] += weight[j][v] * window[i + j][v];
      }
    }
  }
}

__device__ __forceinline__ int ClampToInt(int64_t value, int high) {
  return static_cast<int>(max(int64_t{0}, min(value, static_cast<int64_t>(high))));
}

template <typename T, int kTaps, bool kAligned>
__global__ void __launch_bounds__(kNtcThreads) BackwardNtc(const BackwardParams params) {
  using Acc = Accumulator<T>;
  constexpr int kV = kLaneChannels<T>;
  constexpr int kChannels = kBlockChannels<T>;
  constexpr int kSteps = 8;
  constexpr int kTileSteps = kNtcWarps * kSteps;
  constexpr int kWindowRows = kTileSteps + kTaps - 1;
  constexpr int kStageElements = (kWindowRows + kTileSteps) * kChannels;
  const Backward& call = params.call;
  const Geometry& g = call.geometry;
  extern __shared__ __align__(16) unsigned char shared[];
  T* stages = reinterpret_cast<T*>(shared);

  const Share share(params, kTaps);
  const int taps = static_cast<int>(min(static_cast<int64_t>(kTaps), g.taps - share.first_tap));
  const int64_t first_channel = share.channel_block * kChannels;
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int64_t channel = first_channel + lane * kV;
  const bool wants_dx = kTaps <= kFusedTaps && call.dx != nullptr;
  const bool wants_dbias = call.dbias != nullptr && share.first_tap == 0;

  Acc weight[kTaps][kV] = {};
  if (wants_dx) {
    const int64_t base = call.kept.Offset(share.kept, Backward::kWeight);
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
#pragma unroll
      for (int v = 0; v < kV; ++v) {
        if (j < taps && channel + v < g.channels) {
          const int64_t head = (channel + v) / (g.channels / g.heads);
          weight[j][v] =
              LoadAs<Acc>(call.weight, base + head * g.taps + g.taps - 1 - j, call.weight_dtype);
        }
      }
    }
  }

  const int64_t phases = min(g.dilation, g.time);
  const int64_t items = call.summed.size() * phases * params.tiles;
  struct Item {
    int64_t summed, phase, first_step;
  };
  const auto item_at = [&](int64_t index) {
    const int64_t tile = index % params.tiles;
    index /= params.tiles;
    return Item{index / phases, index % phases, tile * kTileSteps};
  };
  const auto offset = [&](const Item& item, int operand) {
    return call.kept.Offset(share.kept, operand) + call.summed.Offset(item.summed, operand);
  };
  const auto window_origin = [&](const Item& item) {
    return item.phase - params.mirrored + (item.first_step + share.first_tap) * g.dilation;
  };
  const auto stage = [&](int64_t index, int buffer) {
    if (index < items) {
      const Item item = item_at(index);
      T* window = stages + buffer * kStageElements;
      StageRows<T, kAligned>(window, static_cast<const T*>(call.g) + offset(item, Backward::kG),
                             window_origin(item), g.dilation, kWindowRows, g.time, g.channels,
                             first_channel);
      StageRows<T, kAligned>(window + kWindowRows * kChannels,
                             static_cast<const T*>(call.x) + offset(item, Backward::kX),
                             item.phase + item.first_step * g.dilation, g.dilation, kTileSteps,
                             g.time, g.channels, first_channel);
    }
    __pipeline_commit();
  };

  Acc dweight[kTaps][kV] = {};
  Acc dbias[kV] = {};
  stage(share.split, 0);
  int buffer = 0;
  for (int64_t index = share.split; index < items; index += params.splits, buffer ^= 1) {
    stage(index + params.splits, buffer ^ 1);
    __pipeline_wait_prior(1);
    __syncthreads();
    const Item item = item_at(index);
    const T* rows = stages + buffer * kStageElements;
    const int first_row = warp * kSteps;
    Acc window[kSteps + kTaps - 1][kV];
    Acc x[kSteps][kV];
#pragma unroll
    for (int i = 0; i < kSteps + kTaps - 1; ++i) ReadRow<T>(window[i], rows, first_row + i);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) ReadRow<T>(x[i], rows, kWindowRows + first_row + i);

    // Entry i of this thread's window is time origin + i * dilation.
    const int64_t origin = window_origin(item) + first_row * g.dilation;
    const int64_t step = item.first_step + first_row;
    const int steps = ClampToInt(PhaseSteps(g.time, g.dilation, item.phase) - step, kSteps);
    const int low = origin >= 0 ? 0 : ClampToInt((-origin + g.dilation - 1) / g.dilation, 1 << 20);
    const int high =
        origin >= g.time ? 0 : ClampToInt(PhaseSteps(g.time - origin, g.dilation, 0), 1 << 20);
    if (steps == kSteps && low == 0 && high >= kSteps + kTaps - 1) {
      Correlate<false>(dweight, x, window, taps, steps, low, high);
    } else {
      Correlate<true>(dweight, x, window, taps, steps, low, high);
    }
    if (wants_dx) {
      Acc dx[kSteps][kV] = {};
      InputGrad(dx, weight, window, taps);
      T* out = static_cast<T*>(call.dx) + offset(item, Backward::kDx);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (i < steps) {
          WriteRow<T, kAligned>(out + (item.phase + (step + i) * g.dilation) * g.channels, dx[i],
                                channel, g.channels);
        }
      }
    }
    if (wants_dbias) {
      // Under dilation a step's own g need not be in the window; the cache still has it.
      const T* own = static_cast<const T*>(call.g) + offset(item, Backward::kG);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int v = 0; v < kV; ++v) {
          if (i < steps && channel + v < g.channels) {
            dbias[v] +=
                Widen(own[(item.phase + (step + i) * g.dilation) * g.channels + channel + v]);
          }
        }
      }
    }
    __syncthreads();
  }

  // Sum over the block's warps, in order.
  __pipeline_wait_prior(0);
  Acc* sums = reinterpret_cast<Acc*>(shared);
  const auto reduce = [&](const Acc(&values)[kV], int64_t row) {
    __syncthreads();
#pragma unroll
    for (int v = 0; v < kV; ++v) sums[warp * kChannels + lane * kV + v] = values[v];
    __syncthreads();
    if (threadIdx.x < kChannels && first_channel + threadIdx.x < g.channels) {
      Acc total = 0;
      for (int w = 0; w < kNtcWarps; ++w) total += sums[w * kChannels + threadIdx.x];
      PartialRow<T>(params, share, row)[first_channel + threadIdx.x] = total;
    }
  };
#pragma unroll
  for (int j = 0; j < kTaps; ++j) {
    if (j < taps) reduce(dweight[j], g.taps - 1 - share.first_tap - j);
  }
  if (wants_dbias) reduce(dbias, g.taps);
}

// kDilated reads g through the cache, neighbouring threads at neighbouring steps; otherwise a
// thread owns a run of steps and its window is in shared memory.
template <typename T, int kTaps, bool kAligned, bool kDilated>
__global__ void __launch_bounds__(kNctThreads) BackwardNct(const BackwardParams params) {
  using Acc = Accumulator<T>;
  constexpr int kWindow = kRun + kTaps - 1;
  const Backward& call = params.call;
  const Geometry& g = call.geometry;
  const NctTile tile = params.nct;
  extern __shared__ __align__(16) unsigned char shared[];
  Acc* columns = reinterpret_cast<Acc*>(shared);
  const int pitch = Skew(tile.steps() + kTaps);

  const Share share(params, kTaps);
  const int taps = static_cast<int>(min(static_cast<int64_t>(kTaps), g.taps - share.first_tap));
  const int64_t first_channel = share.channel_block * tile.rows();
  const int row = threadIdx.x / tile.threads_per_row;
  const int lane = threadIdx.x % tile.threads_per_row;
  const int64_t channel = first_channel + row;
  const bool inside = channel < g.channels;
  const bool wants_dx = kTaps <= kFusedTaps && call.dx != nullptr;
  const bool wants_dbias = call.dbias != nullptr && share.first_tap == 0;

  Acc weight[kTaps][1] = {};
  if (wants_dx && inside) {
    const int64_t base =
        call.kept.Offset(share.kept, Backward::kWeight) + channel / (g.channels / g.heads) * g.taps;
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      if (j < taps) {
        weight[j][0] = LoadAs<Acc>(call.weight, base + g.taps - 1 - j, call.weight_dtype);
      }
    }
  }

  Acc dweight[kTaps][1] = {};
  Acc dbias = 0;
  const int64_t items = call.summed.size() * params.tiles;
  for (int64_t index = share.split; index < items; index += params.splits) {
    const int64_t first_step = index % params.tiles * tile.steps();
    const int64_t summed = index / params.tiles;
    const auto offset = [&](int operand) {
      return call.kept.Offset(share.kept, operand) + call.summed.Offset(summed, operand);
    };
    const T* all_g = static_cast<const T*>(call.g) + offset(Backward::kG);
    const T* row_g = all_g + (inside ? channel * g.time : 0);
    const T* row_x =
        static_cast<const T*>(call.x) + offset(Backward::kX) + (inside ? channel * g.time : 0);
    T* row_dx = wants_dx && inside
                    ? static_cast<T*>(call.dx) + offset(Backward::kDx) + channel * g.time
                    : nullptr;
    if constexpr (kDilated) {
      for (int i = 0; i < kRun; ++i) {
        const int64_t step = first_step + i * tile.threads_per_row + lane;
        if (!inside || step >= g.time) continue;
        const Acc own_x = Widen(row_x[step]);
        Acc dx = 0;
#pragma unroll
        for (int j = 0; j < kTaps; ++j) {
          const int64_t t = step + (share.first_tap + j) * g.dilation - params.mirrored;
          if (j < taps && t >= 0 && t < g.time) {
            const Acc value = Widen(row_g[t]);
            dweight[j][0] += own_x * value;
            dx += weight[j][0] * value;
          }
        }
        if (wants_dx) row_dx[step] = Narrow<T>(dx);
        if (wants_dbias) dbias += Widen(row_g[step]);
      }
    } else {
      const int64_t origin = first_step + share.first_tap - params.mirrored;
      const int64_t step = first_step + lane * kRun;
      Acc run[kRun];
      ReadRun<T, kAligned>(run, row_x, step, inside ? g.time : 0);
      __syncthreads();
      StageColumns<T, kAligned>(columns, pitch, all_g, origin, tile.steps() + kTaps - 1, tile,
                                g.time, g.channels, first_channel);
      __syncthreads();
      const Acc* staged = columns + row * pitch + Skew(lane * kRun);
      Acc window[kWindow][1];
      Acc x[kRun][1];
#pragma unroll
      for (int i = 0; i < kWindow; ++i) window[i][0] = staged[Skew(i)];
#pragma unroll
      for (int i = 0; i < kRun; ++i) x[i][0] = run[i];
      const int64_t own_origin = origin + lane * kRun;
      const int steps = inside ? ClampToInt(g.time - step, kRun) : 0;
      const int low = ClampToInt(-own_origin, 1 << 20);
      const int high = ClampToInt(g.time - own_origin, 1 << 20);
      if (steps == kRun && low == 0 && high >= kWindow) {
        Correlate<false>(dweight, x, window, taps, steps, low, high);
      } else {
        Correlate<true>(dweight, x, window, taps, steps, low, high);
      }
      if (wants_dx && inside) {
        Acc dx[kRun][1] = {};
        InputGrad(dx, weight, window, taps);
        Acc values[kRun];
#pragma unroll
        for (int i = 0; i < kRun; ++i) values[i] = dx[i][0];
        WriteRun<T, kAligned>(row_dx, values, step, g.time);
      }
      if (wants_dbias) {
        ReadRun<T, kAligned>(run, row_g, step, inside ? g.time : 0);
#pragma unroll
        for (int i = 0; i < kRun; ++i) dbias += run[i];
      }
    }
  }

  // Sum over the threads of a row: within warps by halves, then over the row's warps in order.
  __shared__ Acc warp_sums[kNctThreads / kWarp];
  const int lanes = min(tile.threads_per_row, kWarp);
  const auto reduce = [&](Acc value, int64_t tap) {
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      value += __shfl_down_sync(0xffffffff, value, distance, lanes);
    }
    if (tile.threads_per_row > kWarp) {
      __syncthreads();
      if (threadIdx.x % kWarp == 0) warp_sums[threadIdx.x / kWarp] = value;
      __syncthreads();
      value = 0;
      for (int w = 0; w < tile.threads_per_row / kWarp; ++w) {
        value += warp_sums[row * (tile.threads_per_row / kWarp) + w];
      }
    }
    if (lane == 0 && inside) PartialRow<T>(params, share, tap)[channel] = value;
  };
#pragma unroll
  for (int j = 0; j < kTaps; ++j) {
    if (j < taps) reduce(dweight[j][0], g.taps - 1 - share.first_tap - j);
  }
  if (wants_dbias) reduce(dbias, g.taps);
}

// One thread an entry of dweight for shallow heads, one warp for deep ones; dbias after them.
template <typename Acc, bool kWarpPerEntry>
__global__ void __launch_bounds__(256) AddPartials(const BackwardParams params) {
  const Backward& call = params.call;
  const Geometry& g = call.geometry;
  const Acc* partials = static_cast<const Acc*>(params.partials);
  const int64_t depth = g.channels / g.heads;
  const int64_t weights = call.kept.size() * g.taps * g.heads;
  const int64_t biases = call.dbias == nullptr ? 0 : call.kept.size() * g.channels;
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t entry = kWarpPerEntry ? thread / kWarp : thread;
  const int lane = kWarpPerEntry ? threadIdx.x % kWarp : 0;
  constexpr int kStride = kWarpPerEntry ? kWarp : 1;
  if (entry >= weights + biases) return;

  const bool is_weight = entry < weights;
  // Heads, or channels for dbias, vary fastest so that threads read neighbouring sums.
  const int64_t width = is_weight ? g.heads : g.channels;
  const int64_t rest = is_weight ? entry : entry - weights;
  const int64_t column = rest % width;
  const int64_t tap = is_weight ? rest / width % g.taps : g.taps;
  const int64_t kept = rest / width / (is_weight ? g.taps : 1);
  const int64_t count = is_weight ? depth : 1;
  Acc total = 0;
  for (int64_t i = lane; i < params.splits * count; i += kStride) {
    const int64_t split = i / count;
    total += partials[((kept * params.splits + split) * (g.taps + 1) + tap) * g.channels +
                      column * count + i % count];
  }
  if constexpr (kWarpPerEntry) {
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      total += __shfl_down_sync(0xffffffff, total, distance);
    }
  }
  if (lane != 0) return;
  if (is_weight) {
    StoreAs(call.dweight, (kept * g.heads + column) * g.taps + tap, call.weight_dtype, total);
  } else {
    StoreAs(call.dbias, kept * g.channels + column, call.bias_dtype, total);
  }
}

template <typename T, int kTaps>
cudaError_t LaunchSums(cudaStream_t stream, BackwardParams params) {
  const Geometry& g = params.call.geometry;
  const bool ntc = g.data_format == DataFormat::kNTC;
  params.tap_groups = static_cast<int>(CeilDiv(g.taps, kTaps));
  const int channels = ntc ? kBlockChannels<T> : params.nct.rows();
  params.channel_blocks = CeilDiv(g.channels, channels);
  const int64_t blocks =
      params.call.kept.size() * params.splits * params.channel_blocks * params.tap_groups;
  if (ntc) {
    constexpr int kTileSteps = kNtcWarps * 8;
    params.tiles = CeilDiv(PhaseSteps(g.time, g.dilation, 0), kTileSteps);
    const size_t stage = (2 * kTileSteps + kTaps - 1) * kBlockChannels<T> * sizeof(T);
    const size_t sums = kNtcWarps * kBlockChannels<T> * sizeof(Accumulator<T>);
    return DispatchBool(RowsAligned(g.channels, params.call.dtype), [&](auto aligned) {
      return Launch(BackwardNtc<T, kTaps, aligned.value>, blocks, kNtcThreads,
                    std::max(2 * stage, sums), stream, params);
    });
  }
  params.tiles = CeilDiv(g.time, params.nct.steps());
  if (g.dilation > 1) {
    return Launch(BackwardNct<T, kTaps, false, true>, blocks, kNctThreads, 0, stream, params);
  }
  const size_t bytes =
      params.nct.rows() * Skew(params.nct.steps() + kTaps) * sizeof(Accumulator<T>);
  return DispatchBool(RowsAligned(g.time, params.call.dtype), [&](auto aligned) {
    return Launch(BackwardNct<T, kTaps, aligned.value, false>, blocks, kNctThreads, bytes, stream,
                  params);
  });
}

template <typename T>
cudaError_t LaunchAddPartials(cudaStream_t stream, const BackwardParams& params) {
  const Backward& call = params.call;
  const Geometry& g = call.geometry;
  const int64_t entries = call.kept.size() * (g.taps * g.heads + (call.dbias ? g.channels : 0));
  return DispatchBool(g.channels / g.heads >= kWarp, [&](auto warp_per_entry) {
    const int64_t threads = entries * (warp_per_entry.value ? kWarp : 1);
    return Launch(AddPartials<Accumulator<T>, warp_per_entry.value>, CeilDiv(threads, 256), 256, 0,
                  stream, params);
  });
}

// The input gradient as a forward convolution of g over every batch entry.
cudaError_t LaunchInputGrad(cudaStream_t stream, const Backward& call, int64_t mirrored) {
  Forward forward{};
  forward.geometry = call.geometry;
  forward.geometry.padding = mirrored;
  // The order of the entries does not matter, so kept and summed ones follow each other.
  const std::array<int, Forward::kOperands> operands = {Backward::kG, Backward::kWeight,
                                                        Backward::kWeight, Backward::kDx};
  if (!forward.batch.AppendFrom(call.kept, operands) ||
      !forward.batch.AppendFrom(call.summed, operands)) {
    return cudaErrorInvalidValue;
  }
  forward.dtype = call.dtype;
  forward.weight_dtype = call.weight_dtype;
  forward.bias_dtype = call.weight_dtype;
  forward.activation = Activation::kNone;
  forward.flip_taps = true;
  forward.x = call.g;
  forward.weight = call.weight;
  forward.bias = nullptr;
  forward.y = call.dx;
  return LaunchForward(stream, forward);
}

}  // namespace

cudaError_t LaunchBackward(cudaStream_t stream, const Backward& call, int64_t splits,
                           void* partials) {
  const Geometry& g = call.geometry;
  const int64_t kept = call.kept.size();
  if (kept == 0) return cudaSuccess;
  if (call.summed.size() == 0 || g.time == 0 || g.channels == 0) {
    const int64_t weights = kept * g.heads * g.taps * jaxops::cuda::SizeOf(call.weight_dtype);
    const cudaError_t error = cudaMemsetAsync(call.dweight, 0, weights, stream);
    if (error != cudaSuccess || call.dbias == nullptr) return error;
    const int64_t biases = kept * g.channels * jaxops::cuda::SizeOf(call.bias_dtype);
    return cudaMemsetAsync(call.dbias, 0, biases, stream);
  }
  BackwardParams params{
      call, (g.taps - 1) * g.dilation - g.padding, splits, 0, 0, 0, NctTile(g.time), partials};
  if (g.taps > kFusedTaps && call.dx != nullptr) {
    const cudaError_t error = LaunchInputGrad(stream, call, params.mirrored);
    if (error != cudaSuccess) return error;
  }
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    const cudaError_t error = g.taps <= 4            ? LaunchSums<T, 4>(stream, params)
                              : g.taps <= kFusedTaps ? LaunchSums<T, kFusedTaps>(stream, params)
                                                     : LaunchSums<T, 16>(stream, params);
    return error != cudaSuccess ? error : LaunchAddPartials<T>(stream, params);
  });
}

}  // namespace jaxops::lightweight_conv::cuda
