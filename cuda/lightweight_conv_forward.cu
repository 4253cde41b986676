// Lightweight convolution, forward: y = act(bias + conv(x, weight)). With flipped taps and mirrored
// padding the same kernels make the input gradient.
#include "cuda/activation.cuh"
#include "cuda/lightweight_conv.cuh"
#include "cuda/lightweight_conv.h"

namespace jaxops::lightweight_conv::cuda {
namespace {

using jaxops::cuda::Activate;

// Taps staged in shared memory at a time; longer filters take several rounds.
constexpr int kTapChunk = 64;

struct ForwardParams {
  Forward call;
  int64_t tiles;           // tiles of one phase (NTC) or of one row (NCT)
  int64_t channel_blocks;  // blocks of channels
  NctTile nct;
};

__device__ __forceinline__ int64_t TapIndex(const Forward& call, int64_t tap) {
  return call.flip_taps ? call.geometry.taps - 1 - tap : tap;
}

template <typename Acc>
__device__ __forceinline__ Acc Epilogue(const Forward& call, Acc value, int64_t bias_base,
                                        int64_t channel) {
  if (call.bias != nullptr) value += LoadAs<Acc>(call.bias, bias_base + channel, call.bias_dtype);
  return Activate(value, call.activation);
}

// A thread owns kLaneChannels channels and kOut steps; a window of kOut + kStep - 1 inputs slides
// over them kStep taps at a time.
template <typename T, int kOut, int kStep, bool kAligned>
__global__ void __launch_bounds__(kNtcThreads) ForwardNtc(const ForwardParams params) {
  using Acc = Accumulator<T>;
  constexpr int kV = kLaneChannels<T>;
  constexpr int kChannels = kBlockChannels<T>;
  constexpr int kTileSteps = kNtcWarps * kOut;
  const Forward& call = params.call;
  const Geometry& g = call.geometry;

  extern __shared__ __align__(16) unsigned char shared[];
  const int chunk_size = static_cast<int>(min(g.taps, static_cast<int64_t>(kTapChunk)));
  const int padded_chunk = (chunk_size + kStep - 1) / kStep * kStep;
  Acc* weights = reinterpret_cast<Acc*>(shared);
  T* rows = reinterpret_cast<T*>(weights + padded_chunk * kChannels);

  int64_t block = blockIdx.x;
  const int64_t first_channel = block % params.channel_blocks * kChannels;
  block /= params.channel_blocks;
  const int64_t tile = block % params.tiles;
  block /= params.tiles;
  const int64_t phases = min(g.dilation, g.time);
  const int64_t phase = block % phases;
  const int64_t batch = block / phases;

  const T* x = static_cast<const T*>(call.x) + call.batch.Offset(batch, Forward::kX);
  T* y = static_cast<T*>(call.y) + call.batch.Offset(batch, Forward::kY);
  const int64_t weight_base = call.batch.Offset(batch, Forward::kWeight);
  const int64_t bias_base = call.batch.Offset(batch, Forward::kBias);
  const int64_t depth = g.channels / g.heads;
  const int64_t first_step = tile * kTileSteps;
  const int lane_channel = threadIdx.x % kWarp * kV;
  const int warp_row = threadIdx.x / kWarp * kOut;

  Acc sums[kOut][kV] = {};
  for (int64_t first_tap = 0; first_tap < g.taps; first_tap += chunk_size) {
    const int chunk = static_cast<int>(min(static_cast<int64_t>(chunk_size), g.taps - first_tap));
    StageRows<T, kAligned>(rows, x, phase - g.padding + (first_step + first_tap) * g.dilation,
                           g.dilation, kTileSteps + chunk - 1, g.time, g.channels, first_channel);
    __pipeline_commit();
    for (int i = threadIdx.x; i < chunk * kChannels; i += kNtcThreads) {
      const int64_t channel = first_channel + i % kChannels;
      const int64_t tap = TapIndex(call, first_tap + i / kChannels);
      weights[i] = channel < g.channels
                       ? LoadAs<Acc>(call.weight, weight_base + channel / depth * g.taps + tap,
                                     call.weight_dtype)
                       : Acc(0);
    }
    __pipeline_wait_prior(0);
    __syncthreads();

    Acc window[kOut + kStep - 1][kV];
#pragma unroll
    for (int i = 0; i < kOut - 1; ++i) ReadRow<T>(window[i], rows, warp_row + i);
    for (int tap = 0; tap < chunk; tap += kStep) {
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        // The last window of a filter whose length kStep does not divide ends early.
        if (tap + i < chunk) ReadRow<T>(window[kOut - 1 + i], rows, warp_row + kOut - 1 + tap + i);
      }
#pragma unroll
      for (int k = 0; k < kStep; ++k) {
        if (tap + k < chunk) {
          const auto weight = LoadPack<kV>(weights + (tap + k) * kChannels + lane_channel);
#pragma unroll
          for (int i = 0; i < kOut; ++i) {
#pragma unroll
            for (int v = 0; v < kV; ++v) sums[i][v] += weight.values[v] * window[i + k][v];
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kOut - 1; ++i) {
#pragma unroll
        for (int v = 0; v < kV; ++v) window[i][v] = window[i + kStep][v];
      }
    }
    __syncthreads();
  }

  const int64_t steps = PhaseSteps(g.time, g.dilation, phase);
  const int64_t channel = first_channel + lane_channel;
#pragma unroll
  for (int i = 0; i < kOut; ++i) {
    const int64_t step = first_step + warp_row + i;
    if (step >= steps) break;
    Acc values[kV];
#pragma unroll
    for (int v = 0; v < kV; ++v) {
      values[v] =
          channel + v < g.channels ? Epilogue(call, sums[i][v], bias_base, channel + v) : Acc(0);
    }
    WriteRow<T, kAligned>(y + (phase + step * g.dilation) * g.channels, values, channel,
                          g.channels);
  }
}

// Undilated: a window of two runs slides over the taps kRun at a time.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kNctThreads) ForwardNct(const ForwardParams params) {
  using Acc = Accumulator<T>;
  const Forward& call = params.call;
  const Geometry& g = call.geometry;
  const NctTile tile_shape = params.nct;

  extern __shared__ __align__(16) unsigned char shared[];
  const int chunk_size = static_cast<int>(min(g.taps, static_cast<int64_t>(kTapChunk)));
  const int padded_chunk = (chunk_size + kRun - 1) / kRun * kRun;
  const int pitch = Skew(tile_shape.steps() + padded_chunk);
  Acc* weights = reinterpret_cast<Acc*>(shared);
  Acc* columns = weights + tile_shape.rows() * padded_chunk;

  int64_t block = blockIdx.x;
  const int64_t first_step = block % params.tiles * tile_shape.steps();
  block /= params.tiles;
  const int64_t first_channel = block % params.channel_blocks * tile_shape.rows();
  const int64_t batch = block / params.channel_blocks;

  const T* x = static_cast<const T*>(call.x) + call.batch.Offset(batch, Forward::kX);
  const int64_t weight_base = call.batch.Offset(batch, Forward::kWeight);
  const int64_t depth = g.channels / g.heads;
  const int row = threadIdx.x / tile_shape.threads_per_row;
  const int lane = threadIdx.x % tile_shape.threads_per_row;

  Acc sums[kRun] = {};
  for (int64_t first_tap = 0; first_tap < g.taps; first_tap += chunk_size) {
    const int chunk = static_cast<int>(min(static_cast<int64_t>(chunk_size), g.taps - first_tap));
    StageColumns<T, kAligned>(columns, pitch, x, first_step + first_tap - g.padding,
                              tile_shape.steps() + chunk - 1, tile_shape, g.time, g.channels,
                              first_channel);
    for (int i = threadIdx.x; i < tile_shape.rows() * padded_chunk; i += kNctThreads) {
      const int64_t channel = first_channel + i / padded_chunk;
      const int tap = i % padded_chunk;
      weights[i] = channel < g.channels && tap < chunk
                       ? LoadAs<Acc>(call.weight,
                                     weight_base + channel / depth * g.taps +
                                         TapIndex(call, first_tap + tap),
                                     call.weight_dtype)
                       : Acc(0);
    }
    __syncthreads();

    const Acc* run = columns + row * pitch + Skew(lane * kRun);
    const Acc* filter = weights + row * padded_chunk;
    Acc window[2 * kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) window[i] = run[i];
    for (int tap = 0; tap < chunk; tap += kRun) {
      const Acc* next = run + Skew(tap + kRun);
      const auto taps = LoadPack<kRun / 2>(filter + tap);
      const auto more_taps = LoadPack<kRun / 2>(filter + tap + kRun / 2);
#pragma unroll
      for (int i = 0; i < kRun - 1; ++i) {
        if (tap + i + 1 < chunk) window[kRun + i] = next[i];
      }
#pragma unroll
      for (int k = 0; k < kRun; ++k) {
        if (tap + k < chunk) {
          const Acc weight =
              k < kRun / 2 ? taps.values[k % (kRun / 2)] : more_taps.values[k % (kRun / 2)];
#pragma unroll
          for (int i = 0; i < kRun; ++i) sums[i] += weight * window[i + k];
        }
      }
      if (tap + kRun < chunk) {
        window[2 * kRun - 1] = next[kRun - 1];
#pragma unroll
        for (int i = 0; i < kRun; ++i) window[i] = window[kRun + i];
      }
    }
    __syncthreads();
  }

  const int64_t channel = first_channel + row;
  if (channel >= g.channels) return;
  const int64_t bias_base = call.batch.Offset(batch, Forward::kBias);
#pragma unroll
  for (int i = 0; i < kRun; ++i) sums[i] = Epilogue(call, sums[i], bias_base, channel);
  T* y = static_cast<T*>(call.y) + call.batch.Offset(batch, Forward::kY) + channel * g.time;
  WriteRun<T, kAligned>(y, sums, first_step + lane * kRun, g.time);
}

// Dilated: neighbouring threads take neighbouring steps and read every tap through the cache.
template <typename T>
__global__ void __launch_bounds__(kNctThreads) ForwardNctDilated(const ForwardParams params) {
  using Acc = Accumulator<T>;
  const Forward& call = params.call;
  const Geometry& g = call.geometry;
  int64_t block = blockIdx.x;
  const int64_t first_step = block % params.tiles * (kNctThreads * kRun);
  block /= params.tiles;
  const int64_t channel = block % g.channels;
  const int64_t batch = block / g.channels;
  const T* x =
      static_cast<const T*>(call.x) + call.batch.Offset(batch, Forward::kX) + channel * g.time;
  T* y = static_cast<T*>(call.y) + call.batch.Offset(batch, Forward::kY) + channel * g.time;
  const int64_t weight_base =
      call.batch.Offset(batch, Forward::kWeight) + channel / (g.channels / g.heads) * g.taps;
  const int64_t bias_base = call.batch.Offset(batch, Forward::kBias);

  Acc sums[kRun] = {};
  for (int64_t tap = 0; tap < g.taps; ++tap) {
    const Acc weight =
        LoadAs<Acc>(call.weight, weight_base + TapIndex(call, tap), call.weight_dtype);
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const int64_t t = first_step + i * kNctThreads + threadIdx.x + tap * g.dilation - g.padding;
      if (t >= 0 && t < g.time) sums[i] += weight * Widen(x[t]);
    }
  }
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const int64_t t = first_step + i * kNctThreads + threadIdx.x;
    if (t < g.time) y[t] = Narrow<T>(Epilogue(call, sums[i], bias_base, channel));
  }
}

template <typename T, int kOut, int kStep, bool kAligned>
cudaError_t LaunchNtc(cudaStream_t stream, ForwardParams params) {
  using Acc = Accumulator<T>;
  constexpr int kChannels = kBlockChannels<T>;
  const Geometry& g = params.call.geometry;
  const int64_t chunk = std::min<int64_t>(g.taps, kTapChunk);
  params.tiles = CeilDiv(PhaseSteps(g.time, g.dilation, 0), kNtcWarps * kOut);
  params.channel_blocks = CeilDiv(g.channels, kChannels);
  const int64_t phases = std::min(g.dilation, g.time);
  const int64_t blocks = params.call.batch.size() * phases * params.tiles * params.channel_blocks;
  const size_t bytes = CeilDiv(chunk, kStep) * kStep * kChannels * sizeof(Acc) +
                       (kNtcWarps * kOut + chunk - 1) * kChannels * sizeof(T);
  return Launch(ForwardNtc<T, kOut, kStep, kAligned>, blocks, kNtcThreads, bytes, stream, params);
}

template <typename T>
cudaError_t LaunchNct(cudaStream_t stream, ForwardParams params) {
  using Acc = Accumulator<T>;
  const Geometry& g = params.call.geometry;
  if (g.dilation > 1) {
    params.tiles = CeilDiv(g.time, kNctThreads * kRun);
    return Launch(ForwardNctDilated<T>, params.call.batch.size() * g.channels * params.tiles,
                  kNctThreads, 0, stream, params);
  }
  const NctTile& tile = params.nct;
  const int64_t chunk = CeilDiv(std::min<int64_t>(g.taps, kTapChunk), kRun) * kRun;
  params.tiles = CeilDiv(g.time, tile.steps());
  params.channel_blocks = CeilDiv(g.channels, tile.rows());
  const int64_t blocks = params.call.batch.size() * params.tiles * params.channel_blocks;
  const size_t bytes =
      tile.rows() * (chunk + Skew(tile.steps() + static_cast<int>(chunk))) * sizeof(Acc);
  return DispatchBool(RowsAligned(g.time, params.call.dtype), [&](auto aligned) {
    return Launch(ForwardNct<T, aligned.value>, blocks, kNctThreads, bytes, stream, params);
  });
}

}  // namespace

cudaError_t LaunchForward(cudaStream_t stream, const Forward& call) {
  const Geometry& g = call.geometry;
  if (call.batch.size() == 0 || g.time == 0 || g.channels == 0) return cudaSuccess;
  const ForwardParams params{call, 0, 0, NctTile(g.time)};
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    if (g.data_format == DataFormat::kNCT) return LaunchNct<T>(stream, params);
    return DispatchBool(RowsAligned(g.channels, call.dtype), [&](auto aligned) {
      // Short filters are bound by memory and want many threads, long ones want reuse.
      return g.taps <= 4 ? LaunchNtc<T, 8, 4, aligned.value>(stream, params)
                         : LaunchNtc<T, 16, 8, aligned.value>(stream, params);
    });
  });
}

}  // namespace jaxops::lightweight_conv::cuda
