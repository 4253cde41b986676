// Lightweight convolution, forward: y = act(bias + conv(x, weight)). With flipped taps and mirrored
// padding the same kernels make the input gradient.
#include "cuda/common/activation.cuh"
#include "cuda/lightweight_conv/filters.cuh"
#include "cuda/lightweight_conv/launch.h"

namespace jaxops::lightweight_conv::cuda {
namespace {

using jaxops::cuda::Activate;

// Taps staged in shared memory at a time; longer filters take several rounds.
constexpr int kTapChunk = 64;

struct ForwardParams {
  Forward call;
  int time, channels, taps, padding, dilation;
  FastDivider tiles;           // tiles of one phase (NTC) or of one row (NCT)
  FastDivider channel_blocks;  // blocks of channels
  FastDivider phases;
  FastDivider depth;  // channels of a head
  int chunks;         // runs of steps of one thread of a short filter
  ShortNtcTile ntc;
  NctTile nct;

  ForwardParams(const Forward& forward, int ntc_channels, int nct_steps)
      : call(forward),
        time(static_cast<int>(forward.geometry.time)),
        channels(static_cast<int>(forward.geometry.channels)),
        taps(static_cast<int>(forward.geometry.taps)),
        padding(static_cast<int>(forward.geometry.padding)),
        dilation(static_cast<int>(forward.geometry.dilation)),
        phases(std::min(forward.geometry.dilation, forward.geometry.time)),
        depth(forward.geometry.channels / forward.geometry.heads),
        chunks(1),
        ntc(forward.geometry.channels, ntc_channels),
        nct(forward.geometry.time, nct_steps) {}

  __device__ int TapIndex(int tap) const { return call.flip_taps ? taps - 1 - tap : tap; }

  // Reads kTaps taps of kV neighbouring channels, zero beyond the filter's length.
  template <int kTaps, int kV, typename Acc>
  __device__ void ReadWeights(Acc (&weight)[kTaps][kV], int64_t batch, int channel) const {
    const int64_t base = call.batch.Offset(batch, Forward::kWeight);
    WithElements(call.weight, call.weight_dtype, [&](const auto* weights) {
#pragma unroll
      for (int v = 0; v < kV; ++v) {
        const auto* filter = weights + base + int64_t{depth.Quotient(channel + v)} * taps;
#pragma unroll
        for (int k = 0; k < kTaps; ++k) {
          weight[k][v] = k < taps ? static_cast<Acc>(Widen(filter[TapIndex(k)])) : Acc(0);
        }
      }
    });
  }

  // Reads the bias of kV neighbouring channels, zero where there is none.
  template <int kV, typename Acc>
  __device__ void ReadBias(Acc (&bias)[kV], int64_t batch, int channel) const {
#pragma unroll
    for (int v = 0; v < kV; ++v) bias[v] = 0;
    if (call.bias == nullptr) return;
    const int64_t base = call.batch.Offset(batch, Forward::kBias);
    WithElements(call.bias, call.bias_dtype, [&](const auto* biases) {
#pragma unroll
      for (int v = 0; v < kV; ++v) {
        if (channel + v < channels) bias[v] = static_cast<Acc>(Widen(biases[base + channel + v]));
      }
    });
  }
};

// --- short filters -------------------------------------------------------------------------------

// NTC, of channels that packs do not fit: a window of kSteps + kTaps - 1 rows moves down a thread's
// channel, kSteps rows at a time.
template <typename T>
__global__ void __launch_bounds__(kNtcThreads, 2)
    UnpackedNtcForward(const __grid_constant__ ForwardParams p) {
  using Acc = Accumulator<T>;
  constexpr int kV = 1;
  constexpr int kTaps = kShortTaps;
  constexpr int kSteps = 8;
  constexpr int kCarried = kTaps - 1;
  uint32_t block = blockIdx.x;
  const int lane = threadIdx.x & (p.ntc.lanes() - 1);
  const int group = threadIdx.x >> p.ntc.lane_bits;
  const int channel = (p.channel_blocks.Peel(block) * p.ntc.lanes() + lane) * kV;
  const int first_step = (p.tiles.Peel(block) * p.ntc.groups() + group) * p.chunks * kSteps;
  const int phase = p.phases.Peel(block);
  const int64_t batch = block;
  const int last_step = min(PhaseSteps(p.time, p.dilation, phase), first_step + p.chunks * kSteps);
  if (channel >= p.channels || first_step >= last_step) return;

  const T* x = static_cast<const T*>(p.call.x) + p.call.batch.Offset(batch, Forward::kX) + channel;
  T* y = static_cast<T*>(p.call.y) + p.call.batch.Offset(batch, Forward::kY) + channel;
  const int row = phase + first_step * p.dilation - p.padding;
  Pack<T, kV> carried[kCarried];
  Pack<T, kV> arriving[kSteps];
  ReadSteps(carried, x, row, p.dilation, kCarried, p.time, p.channels);
  ReadSteps(arriving, x, row + kCarried * p.dilation, p.dilation, kSteps, p.time, p.channels);
  Acc weight[kTaps][kV], bias[kV];
  p.ReadWeights(weight, batch, channel);
  p.ReadBias(bias, batch, channel);
  Acc window[kCarried + kSteps][kV];
#pragma unroll
  for (int i = 0; i < kCarried; ++i) {
#pragma unroll
    for (int v = 0; v < kV; ++v) window[i][v] = Widen(carried[i].values[v]);
  }

#pragma unroll 1
  for (int step = first_step; step < last_step; step += kSteps) {
    // Converted once, though every element meets several taps; the next rows are under way
    // meanwhile.
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int v = 0; v < kV; ++v) window[kCarried + i][v] = Widen(arriving[i].values[v]);
    }
    if (step + kSteps < last_step) {
      ReadSteps(arriving, x, phase + (step + kSteps + kCarried) * p.dilation - p.padding,
                p.dilation, kSteps, p.time, p.channels);
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (step + i >= last_step) break;
      Acc sums[kV];
#pragma unroll
      for (int v = 0; v < kV; ++v) sums[v] = bias[v];
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        if (k < p.taps) {
#pragma unroll
          for (int v = 0; v < kV; ++v) sums[v] += weight[k][v] * window[i + k][v];
        }
      }
      Activate(sums, p.call.activation);
      WriteStep<kV>(y, sums, phase + (step + i) * p.dilation, p.channels);
    }
#pragma unroll
    for (int i = 0; i < kCarried; ++i) {
#pragma unroll
      for (int v = 0; v < kV; ++v) window[i][v] = window[kSteps + i][v];
    }
  }
}

// For rows of whole packs.
template <typename T, int kTaps, int kShift>
__global__ void __launch_bounds__(kNctThreads) ShortNct(const __grid_constant__ ForwardParams p) {
  using Acc = Accumulator<T>;
  constexpr int kSteps = kPackElements<T>;
  uint32_t block = blockIdx.x;
  const int row_threads = p.nct.threads_per_row();
  const int lane = threadIdx.x & (row_threads - 1);
  const int first_step = p.tiles.Peel(block) * p.chunks * kFlight * row_threads * kSteps;
  const int channel = p.channel_blocks.Peel(block) * p.nct.rows() + (threadIdx.x >> p.nct.row_bits);
  const int64_t batch = block;
  if (channel >= p.channels) return;

  const int64_t row = int64_t{channel} * p.time;
  const T* x = static_cast<const T*>(p.call.x) + p.call.batch.Offset(batch, Forward::kX) + row;
  T* y = static_cast<T*>(p.call.y) + p.call.batch.Offset(batch, Forward::kY) + row;
  Acc weight[kTaps][1], bias[1];
  p.ReadWeights(weight, batch, channel);
  p.ReadBias(bias, batch, channel);

#pragma unroll 1
  for (int chunk = 0; chunk < p.chunks; ++chunk) {
    const int t = first_step + (chunk * kFlight * row_threads + lane) * kSteps;
    const int ahead = row_threads * kSteps;
    if (t >= p.time) return;
    Window<T, kSteps + kTaps - 1, kShift> windows[kFlight];
#pragma unroll
    for (int f = 0; f < kFlight; ++f) windows[f].Load(x, t + f * ahead - p.padding, p.time);
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      Acc sums[kSteps];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) sums[i] = bias[0];
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        if (k < p.taps) {
#pragma unroll
          for (int i = 0; i < kSteps; ++i) sums[i] += weight[k][0] * windows[f][i + k];
        }
      }
      Activate(sums, p.call.activation);
      WriteRun<T, kSteps, true>(y, sums, t + f * ahead, p.time);
    }
  }
}

// --- long filters --------------------------------------------------------------------------------

// A thread owns kLaneChannels channels and kOut steps; a window of kOut + kStep - 1 inputs slides
// over them kStep taps at a time.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kNtcThreads)
    LongNtcForward(const __grid_constant__ ForwardParams p) {
  using Acc = Accumulator<T>;
  constexpr int kOut = 16;
  constexpr int kStep = 8;
  constexpr int kV = kLaneChannels<T>;
  constexpr int kChannels = kBlockChannels<T>;
  constexpr int kTileSteps = kNtcWarps * kOut;

  extern __shared__ __align__(16) unsigned char shared[];
  const int chunk_size = min(p.taps, kTapChunk);
  Acc* weights = reinterpret_cast<Acc*>(shared);
  T* rows = reinterpret_cast<T*>(weights + chunk_size * kChannels);

  uint32_t block = blockIdx.x;
  const int first_channel = p.channel_blocks.Peel(block) * kChannels;
  const int first_step = p.tiles.Peel(block) * kTileSteps;
  const int phase = p.phases.Peel(block);
  const int64_t batch = block;

  const T* x = static_cast<const T*>(p.call.x) + p.call.batch.Offset(batch, Forward::kX);
  const int64_t weight_base = p.call.batch.Offset(batch, Forward::kWeight);
  const int lane_channel = threadIdx.x % kWarp * kV;
  const int warp_row = threadIdx.x / kWarp * kOut;
  // Weights are kept once a head of the block's, so that channels of one head share the read.
  const int first_head = p.depth.Quotient(first_channel);
  const int last_channel = min(first_channel + kChannels, p.channels) - 1;
  const int heads = p.depth.Quotient(last_channel) - first_head + 1;
  int head[kV];
#pragma unroll
  for (int v = 0; v < kV; ++v) {
    head[v] = p.depth.Quotient(min(first_channel + lane_channel + v, last_channel)) - first_head;
  }

  Acc sums[kOut][kV] = {};
  for (int first_tap = 0; first_tap < p.taps; first_tap += chunk_size) {
    const int chunk = min(chunk_size, p.taps - first_tap);
    StageRows<T, kAligned>(rows, x, phase - p.padding + (first_step + first_tap) * p.dilation,
                           p.dilation, kTileSteps + chunk - 1, p.time, p.channels, first_channel);
    __pipeline_commit();
    WithElements(p.call.weight, p.call.weight_dtype, [&](const auto* elements) {
      for (int h = threadIdx.x / kWarp; h < heads; h += kNtcWarps) {
        const auto* filter = elements + weight_base + int64_t{first_head + h} * p.taps;
        for (int k = threadIdx.x % kWarp; k < chunk; k += kWarp) {
          weights[k * heads + h] = static_cast<Acc>(Widen(filter[p.TapIndex(first_tap + k)]));
        }
      }
    });
    __pipeline_wait_prior(0);
    __syncthreads();

    Acc window[kOut + kStep - 1][kV];
#pragma unroll
    for (int i = 0; i < kOut - 1; ++i) ReadRow<T>(window[i], rows, warp_row + i);
    // The taps from `tap` on: kStep of them, or fewer where the filter ends.
    const auto advance = [&](int tap, auto whole) {
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        if (whole.value || tap + i < chunk) {
          ReadRow<T>(window[kOut - 1 + i], rows, warp_row + kOut - 1 + tap + i);
        }
      }
#pragma unroll
      for (int k = 0; k < kStep; ++k) {
        if (whole.value || tap + k < chunk) {
          Acc weight[kV];
#pragma unroll
          for (int v = 0; v < kV; ++v) weight[v] = weights[(tap + k) * heads + head[v]];
#pragma unroll
          for (int i = 0; i < kOut; ++i) {
#pragma unroll
            for (int v = 0; v < kV; ++v) sums[i][v] += weight[v] * window[i + k][v];
          }
        }
      }
    };
    int tap = 0;
    for (; tap + kStep <= chunk; tap += kStep) {
      advance(tap, std::true_type{});
#pragma unroll
      for (int i = 0; i < kOut - 1; ++i) {
#pragma unroll
        for (int v = 0; v < kV; ++v) window[i][v] = window[i + kStep][v];
      }
    }
    if (tap < chunk) advance(tap, std::false_type{});
    __syncthreads();
  }

  const int steps = PhaseSteps(p.time, p.dilation, phase);
  const int channel = first_channel + lane_channel;
  if (channel >= p.channels) return;
  T* y = static_cast<T*>(p.call.y) + p.call.batch.Offset(batch, Forward::kY) + channel;
  Acc bias[kV];
  p.ReadBias(bias, batch, channel);
#pragma unroll
  for (int i = 0; i < kOut; ++i) {
    const int step = first_step + warp_row + i;
    if (step >= steps) return;
#pragma unroll
    for (int v = 0; v < kV; ++v) sums[i][v] += bias[v];
    Activate(sums[i], p.call.activation);
    const int t = phase + step * p.dilation;
    if constexpr (kAligned) {
      WriteStep<kV>(y, sums[i], t, p.channels);
    } else {
#pragma unroll
      for (int v = 0; v < kV; ++v) {
        if (channel + v < p.channels) y[int64_t{t} * p.channels + v] = Narrow<T>(sums[i][v]);
      }
    }
  }
}

// Undilated: a window of two runs slides over the taps kRun at a time.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kNctThreads) LongNct(const __grid_constant__ ForwardParams p) {
  using Acc = Accumulator<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  const int chunk_size = min(p.taps, kTapChunk);
  const int padded_chunk = (chunk_size + kRun - 1) / kRun * kRun;
  const int steps = p.nct.threads_per_row() * kRun;
  const int pitch = Skew(steps + padded_chunk);
  Acc* weights = reinterpret_cast<Acc*>(shared);
  Acc* columns = weights + p.nct.rows() * padded_chunk;

  uint32_t block = blockIdx.x;
  const int first_step = p.tiles.Peel(block) * steps;
  const int first_channel = p.channel_blocks.Peel(block) * p.nct.rows();
  const int64_t batch = block;
  const int row = threadIdx.x >> p.nct.row_bits;
  const int lane = threadIdx.x & (p.nct.threads_per_row() - 1);
  const int channel = first_channel + row;
  const int head = p.depth.Quotient(min(channel, p.channels - 1));

  const T* x = static_cast<const T*>(p.call.x) + p.call.batch.Offset(batch, Forward::kX);
  const int64_t weight_base = p.call.batch.Offset(batch, Forward::kWeight);
  Acc sums[kRun] = {};
  for (int first_tap = 0; first_tap < p.taps; first_tap += chunk_size) {
    const int chunk = min(chunk_size, p.taps - first_tap);
    StageColumns<T, kAligned>(columns, pitch, x, first_step + first_tap - p.padding,
                              steps + chunk - 1, p.nct, p.time, p.channels, first_channel);
    WithElements(p.call.weight, p.call.weight_dtype, [&](const auto* elements) {
      const auto* filter = elements + weight_base + int64_t{head} * p.taps;
      for (int k = lane; k < padded_chunk; k += p.nct.threads_per_row()) {
        weights[row * padded_chunk + k] =
            k < chunk ? static_cast<Acc>(Widen(filter[p.TapIndex(first_tap + k)])) : Acc(0);
      }
    });
    __syncthreads();

    const Acc* run = columns + row * pitch + Skew(lane * kRun);
    const Acc* filter = weights + row * padded_chunk;
    Acc window[2 * kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) window[i] = run[i];
    // The taps from `tap` on: kRun of them, or fewer where the filter ends.
    const auto advance = [&](int tap, auto whole) {
      const Acc* next = run + Skew(tap + kRun);
      Pack<Acc, kRun / 2> taps[2];
      taps[0] = LoadPack<kRun / 2>(filter + tap);
      taps[1] = LoadPack<kRun / 2>(filter + tap + kRun / 2);
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        if (whole.value || tap + i + 1 < chunk) window[kRun + i] = next[i];
      }
#pragma unroll
      for (int k = 0; k < kRun; ++k) {
        if (whole.value || tap + k < chunk) {
          const Acc weight = taps[k / (kRun / 2)].values[k % (kRun / 2)];
#pragma unroll
          for (int i = 0; i < kRun; ++i) sums[i] += weight * window[i + k];
        }
      }
    };
    int tap = 0;
    for (; tap + kRun < chunk; tap += kRun) {
      advance(tap, std::true_type{});
#pragma unroll
      for (int i = 0; i < kRun; ++i) window[i] = window[kRun + i];
    }
    advance(tap, std::false_type{});
    __syncthreads();
  }

  if (channel >= p.channels) return;
  Acc bias[1];
  p.ReadBias(bias, batch, channel);
#pragma unroll
  for (int i = 0; i < kRun; ++i) sums[i] += bias[0];
  Activate(sums, p.call.activation);
  T* y = static_cast<T*>(p.call.y) + p.call.batch.Offset(batch, Forward::kY) +
         int64_t{channel} * p.time;
  WriteRun<T, kRun, kAligned>(y, sums, first_step + lane * kRun, p.time);
}

// Dilated too far for tiles in shared memory: neighbouring threads take neighbouring steps and read
// every tap through the cache.
template <typename T>
__global__ void __launch_bounds__(kNctThreads)
    DilatedNctForward(const __grid_constant__ ForwardParams p) {
  using Acc = Accumulator<T>;
  uint32_t block = blockIdx.x;
  const int first_step = p.tiles.Peel(block) * (kNctThreads * kRun) + threadIdx.x;
  const int channel = p.channel_blocks.Peel(block);
  const int64_t batch = block;
  const int64_t row = int64_t{channel} * p.time;
  const T* x = static_cast<const T*>(p.call.x) + p.call.batch.Offset(batch, Forward::kX) + row;
  T* y = static_cast<T*>(p.call.y) + p.call.batch.Offset(batch, Forward::kY) + row;
  const int64_t filter =
      p.call.batch.Offset(batch, Forward::kWeight) + int64_t{p.depth.Quotient(channel)} * p.taps;

  Acc sums[kRun], bias[1];
  p.ReadBias(bias, batch, channel);
#pragma unroll
  for (int i = 0; i < kRun; ++i) sums[i] = bias[0];
  WithElements(p.call.weight, p.call.weight_dtype, [&](const auto* weights) {
    for (int tap = 0; tap < p.taps; ++tap) {
      const Acc weight = static_cast<Acc>(Widen(weights[filter + p.TapIndex(tap)]));
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        const int t = first_step + i * kNctThreads + tap * p.dilation - p.padding;
        const bool inside = static_cast<unsigned>(t) < static_cast<unsigned>(p.time);
        sums[i] += weight * Widen(LoadIf<1>(inside, x + t, x).values[0]);
      }
    }
  });
  Activate(sums, p.call.activation);
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const int t = first_step + i * kNctThreads;
    if (t < p.time) y[t] = Narrow<T>(sums[i]);
  }
}

// --- launches ------------------------------------------------------------------------------------

// Runs of one thread: enough threads for every device first, then more runs, up to `most`.
int ShortChunks(int64_t threads, int most) {
  return static_cast<int>(std::clamp<int64_t>(threads / (int64_t{1} << 17), 1, most));
}

template <typename T>
cudaError_t LaunchUnpackedNtc(cudaStream_t stream, const Forward& call) {
  ForwardParams params(call, 1, 1);
  const int64_t steps = PhaseSteps(params.time, params.dilation, 0);
  const int64_t phases = params.phases.divisor();
  const int64_t batch = call.batch.size();
  params.chunks = ShortChunks(batch * phases * CeilDiv(steps, 8) * params.channels, 8);
  const int64_t tiles = CeilDiv(steps, int64_t{8} * params.chunks * params.ntc.groups());
  const int64_t channel_blocks = CeilDiv(params.channels, params.ntc.lanes());
  params.tiles = FastDivider(tiles);
  params.channel_blocks = FastDivider(channel_blocks);
  return Launch(UnpackedNtcForward<T>, batch * phases * tiles * channel_blocks, kNtcThreads, 0,
                stream, params);
}

template <typename T>
cudaError_t LaunchNtc(cudaStream_t stream, const Forward& call) {
  const Geometry& g = call.geometry;
  if (g.taps <= kShortTaps) {
    return TakesShortNtc(call) ? LaunchShortNtc(stream, call) : LaunchUnpackedNtc<T>(stream, call);
  }
  constexpr int kChannels = kBlockChannels<T>;
  constexpr int kTileSteps = kNtcWarps * 16;
  ForwardParams params(call, 1, 1);
  const int64_t chunk = std::min<int64_t>(g.taps, kTapChunk);
  const int64_t tiles = CeilDiv(PhaseSteps(params.time, params.dilation, 0), kTileSteps);
  const int64_t channel_blocks = CeilDiv(g.channels, kChannels);
  params.tiles = FastDivider(tiles);
  params.channel_blocks = FastDivider(channel_blocks);
  const int64_t blocks = call.batch.size() * params.phases.divisor() * tiles * channel_blocks;
  const size_t bytes =
      chunk * kChannels * sizeof(Accumulator<T>) + (kTileSteps + chunk - 1) * kChannels * sizeof(T);
  return DispatchBool(RowsAligned(g.channels, call.dtype, 16), [&](auto aligned) {
    return Launch(LongNtcForward<T, aligned.value>, blocks, kNtcThreads, bytes, stream, params);
  });
}

template <typename T, int kTaps>
cudaError_t LaunchShortNct(cudaStream_t stream, const Forward& call) {
  constexpr int kSteps = kPackElements<T>;
  ForwardParams params(call, 1, kFlight * kSteps);
  const int64_t row_steps = int64_t{params.nct.threads_per_row()} * kFlight * kSteps;
  params.chunks =
      ShortChunks(call.batch.size() * params.channels * CeilDiv(params.time, kFlight * kSteps), 4);
  const int64_t tiles = CeilDiv(params.time, row_steps * params.chunks);
  const int64_t channel_blocks = CeilDiv(params.channels, params.nct.rows());
  params.tiles = FastDivider(tiles);
  params.channel_blocks = FastDivider(channel_blocks);
  const int window_shift = WindowShift<T>(params.time, call.dtype, params.padding);
  return DispatchShift<T>(window_shift, [&](auto shift) {
    return Launch(ShortNct<T, kTaps, shift.value>, call.batch.size() * tiles * channel_blocks,
                  kNctThreads, 0, stream, params);
  });
}

template <typename T>
cudaError_t LaunchNct(cudaStream_t stream, const Forward& call) {
  const Geometry& g = call.geometry;
  ForwardParams params(call, 1, kRun);
  if (g.dilation > 1) {
    const int64_t tiles = CeilDiv(g.time, kNctThreads * kRun);
    params.tiles = FastDivider(tiles);
    params.channel_blocks = FastDivider(g.channels);
    return Launch(DilatedNctForward<T>, call.batch.size() * g.channels * tiles, kNctThreads, 0,
                  stream, params);
  }
  if (g.taps <= 4) return LaunchShortNct<T, 4>(stream, call);
  if (g.taps <= kShortTaps) return LaunchShortNct<T, kShortTaps>(stream, call);
  const int64_t chunk = CeilDiv(std::min<int64_t>(g.taps, kTapChunk), kRun) * kRun;
  const int steps = params.nct.threads_per_row() * kRun;
  const int64_t tiles = CeilDiv(g.time, steps);
  const int64_t channel_blocks = CeilDiv(g.channels, params.nct.rows());
  params.tiles = FastDivider(tiles);
  params.channel_blocks = FastDivider(channel_blocks);
  const size_t bytes =
      params.nct.rows() * (chunk + Skew(steps + static_cast<int>(chunk))) * sizeof(Accumulator<T>);
  return DispatchBool(RowsAligned(g.time, call.dtype, 16), [&](auto aligned) {
    return Launch(LongNct<T, aligned.value>, call.batch.size() * tiles * channel_blocks,
                  kNctThreads, bytes, stream, params);
  });
}

}  // namespace

cudaError_t LaunchForward(cudaStream_t stream, const Forward& call) {
  const Geometry& g = call.geometry;
  if (call.batch.size() == 0 || g.time == 0 || g.channels == 0) return cudaSuccess;
  if (!FitsKernels(g)) return cudaErrorInvalidValue;
  if (TakesMma(call)) return LaunchForwardMma(stream, call);
  if (g.data_format == DataFormat::kNCT && ServesNct(call)) return LaunchServedNct(stream, call);
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    return g.data_format == DataFormat::kNCT ? LaunchNct<T>(stream, call)
                                             : LaunchNtc<T>(stream, call);
  });
}

}  // namespace jaxops::lightweight_conv::cuda
