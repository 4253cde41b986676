// The kernel of the value and of the input gradient of dynamic convolution.
//
// A warp has 32 or 64 neighbouring channels, and a thread 8 steps of its one or two. The thread
// reads each row that these steps need once, in the order of the taps, and multiplies it with the
// weights of all 8 steps for that row. These lie in shared memory as a band: entry (row, step) is
// the weight of tap row - step, zero if the step has no such tap or does not read the row. The
// threads of a block compute the band together, so that the softmax costs one exponential a weight.
//
// The input gradient is the same sum over the cotangent, whose band has the weights of the row's
// own step, taps reversed.
//
// A zero of the band times a NaN or infinity is NaN, so a thread that reads one adds it to the
// steps that read the row only.
#include "cuda/common/activation.cuh"
#include "cuda/dynamic_conv/families.h"
#include "cuda/dynamic_conv/weights.cuh"

namespace jaxops::dynamic_conv::cuda {
namespace {

constexpr int kSteps = 8;      // of a thread
constexpr int kMaxGroups = 4;  // warps of a block, each of which has steps of its own
constexpr int kMaxChunk = 64;  // taps whose band is in shared memory at once
// Blocks of this size let a multiprocessor have several.
constexpr int64_t kWantedBytes = 40 * 1024;

template <typename Call>
struct ApplyParams {
  Call call;
  const void* scales;
  int time, channels, heads, taps, dilation;
  int before;       // the steps by which the first row of a step precedes it
  int state_steps;  // rows of the state
  int groups, block_heads, chunk;
  FastDivider channel_blocks, tiles, phases, depth;
};

struct ApplyPlan {
  int vector;  // channels of a thread
  int groups, block_heads, chunk;
  int64_t channel_blocks, tiles, phases, blocks;
  int64_t bytes;  // of shared memory

  static int Pitch(int channels) { return channels + 2; }

  template <typename Call>
  explicit ApplyPlan(const Call& call) {
    const Geometry& g = call.geometry;
    const int64_t depth = g.channels / g.heads;
    const bool is_f64 = call.dtype == DType::kF64;
    const int64_t item = is_f64 ? 8 : 4;
    vector = !is_f64 && depth % 2 == 0 ? 2 : 1;
    const int64_t channels = kWarp * vector;
    block_heads = static_cast<int>(depth % channels == 0   ? 1
                                   : channels % depth == 0 ? channels / depth
                                                           : channels / depth + 2);
    groups = kMaxGroups;
    chunk = static_cast<int>(std::min<int64_t>(g.taps, kMaxChunk));
    const auto count_bytes = [&] {
      const int64_t band = int64_t{groups} * block_heads * (chunk + kSteps - 1) * kSteps;
      const int64_t window =
          g.data_format == DataFormat::kNTC
              ? 0
              : (groups * kSteps + chunk - 1) * Pitch(static_cast<int>(channels));
      return (band + window) * item;
    };
    while ((bytes = count_bytes()) > kWantedBytes && (chunk > 8 || groups > 1)) {
      if (chunk > 16 || groups == 1) {
        chunk = std::max(8, chunk / 2);
      } else {
        groups /= 2;
      }
    }
    phases = std::min(g.dilation, g.time);
    tiles = CeilDiv(CeilDiv(g.time, phases), groups * kSteps);
    channel_blocks = CeilDiv(g.channels, channels);
    blocks = call.batch.size() * phases * tiles * channel_blocks;
  }
};

template <typename Call>
inline constexpr bool kIsBackward = std::is_same_v<Call, Backward>;

template <typename T, bool kNct, int kV, typename Call>
__global__ void __launch_bounds__(kMaxGroups* kWarp)
    DynamicConvApply(const __grid_constant__ ApplyParams<Call> p) {
  using Acc = Accumulator<T>;
  constexpr int kChannels = kWarp * kV;
  constexpr int kPitch = kChannels + 2;
  extern __shared__ __align__(16) unsigned char shared[];
  const Call& call = p.call;
  const int threads = p.groups * kWarp;
  const int lane = threadIdx.x % kWarp, group = threadIdx.x / kWarp;
  uint32_t block = blockIdx.x;
  const int first_channel = p.channel_blocks.DivMod(block) * kChannels;
  const int tile_step = p.tiles.DivMod(block) * p.groups * kSteps;
  const int phase = p.phases.DivMod(block);
  const int64_t batch = block;
  const int channel = first_channel + lane * kV;
  const bool has_channel = channel < p.channels;
  const int first_head = p.depth.Quotient(first_channel);
  const int last_channel = min(first_channel + kChannels, p.channels) - 1;
  const int heads = static_cast<int>(p.depth.Quotient(last_channel)) - first_head + 1;
  const int head = has_channel ? static_cast<int>(p.depth.Quotient(channel)) - first_head : 0;

  const T* source;
  T* out;
  Segments segments{nullptr, p.time, 0};
  const void* state = nullptr;
  int64_t state_offset = 0;
  DType state_dtype = call.dtype;
  if constexpr (kIsBackward<Call>) {
    source = static_cast<const T*>(call.g) + call.batch.Offset(batch, Call::kG);
    out = static_cast<T*>(call.dx) + call.batch.Offset(batch, Call::kDx);
  } else {
    source = static_cast<const T*>(call.x) + call.batch.Offset(batch, Call::kX);
    out = static_cast<T*>(call.y) + call.batch.Offset(batch, Call::kY);
    state = call.state;
    if (state != nullptr) {
      state_offset = call.batch.Offset(batch, Call::kState);
      state_dtype = call.state_dtype;
      segments.first = -p.state_steps;
    }
  }
  if (call.starts != nullptr) {
    segments.starts = call.starts + call.batch.Offset(batch, Call::kStarts);
  }
  const Weights<Acc> weights(call, p.scales, batch);

  const auto time_of = [&](int step) { return phase + (tile_step + step) * p.dilation; };
  // Rows are counted from the first that the tile's first step reads.
  const auto time_of_row = [&](int row) { return time_of(row) - p.before; };
  const auto read_state = [&](int t, int of_channel) {
    const int64_t row = t + p.state_steps;
    const int64_t at =
        kNct ? int64_t{of_channel} * p.state_steps + row : row * p.channels + of_channel;
    return LoadAs<Acc>(state, state_offset + at, state_dtype);
  };

  Acc* const band = reinterpret_cast<Acc*>(shared);
  const int band_rows = p.chunk + kSteps - 1;
  Acc* const window = band + p.groups * p.block_heads * band_rows * kSteps;
  Acc sums[kSteps][kV] = {};
  for (int first_tap = 0; first_tap < p.taps; first_tap += p.chunk) {
    const int taps = min(p.chunk, p.taps - first_tap);
    const int rows = taps + kSteps - 1;
    if (first_tap > 0) __syncthreads();
    for (int index = threadIdx.x; index < p.groups * heads * rows * kSteps; index += threads) {
      const int step = index % kSteps;
      int rest = index / kSteps;
      const int row = rest % rows;
      rest /= rows;
      const int of_group = rest % p.groups, of_head = rest / p.groups;
      const int tap = row - step;
      const int t = time_of(of_group * kSteps + step);
      const int s = time_of_row(of_group * kSteps + first_tap + row);
      Acc weight = 0;
      if (tap >= 0 && tap < taps && t < p.time && segments.IsPair(t, s)) {
        const int64_t of_weight = kIsBackward<Call> ? s : t;
        weight = weights.At(of_weight * p.heads + first_head + of_head,
                            kIsBackward<Call> ? p.taps - 1 - first_tap - tap : first_tap + tap);
      }
      band[((of_group * p.block_heads + of_head) * band_rows + row) * kSteps + step] = weight;
    }
    if constexpr (kNct) {
      const int entries = p.groups * kSteps + taps - 1;
      for (int index = threadIdx.x; index < entries * kChannels; index += threads) {
        const int entry = index % entries, of_channel = first_channel + index / entries;
        const int t = time_of_row(first_tap + entry);
        Acc value = 0;
        if (of_channel < p.channels && t < p.time) {
          if (t >= 0) {
            value = Widen(source[int64_t{of_channel} * p.time + t]);
          } else if (state != nullptr) {
            value = read_state(t, of_channel);
          }
        }
        window[entry * kPitch + of_channel - first_channel] = value;
      }
    }
    __syncthreads();

    const Acc* const own_band = band + (group * p.block_heads + head) * band_rows * kSteps;
#pragma unroll 2
    for (int row = 0; row < rows; ++row) {
      const int t = time_of_row(group * kSteps + first_tap + row);
      Acc values[kV] = {};
      if constexpr (kNct) {
#pragma unroll
        for (int v = 0; v < kV; ++v) {
          values[v] = window[(group * kSteps + row) * kPitch + lane * kV + v];
        }
      } else if (has_channel) {
        if (static_cast<unsigned>(t) < static_cast<unsigned>(p.time)) {
          const auto loaded = LoadVector<kV>(source + int64_t{t} * p.channels + channel);
#pragma unroll
          for (int v = 0; v < kV; ++v) values[v] = Widen(loaded.values[v]);
        } else if (t < 0 && state != nullptr) {
#pragma unroll
          for (int v = 0; v < kV; ++v) values[v] = read_state(t, channel + v);
        }
      }
      const auto filter = LoadVector<kSteps>(own_band + row * kSteps);
      Acc probe = 0;
#pragma unroll
      for (int v = 0; v < kV; ++v) probe += Acc(0) * values[v];
      const bool are_finite = probe == Acc(0);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const bool reads = are_finite || (row >= step && row - step < taps &&
                                          time_of(group * kSteps + step) < p.time &&
                                          segments.IsPair(time_of(group * kSteps + step), t));
        if (reads) {
#pragma unroll
          for (int v = 0; v < kV; ++v) {
            sums[step][v] = fma(filter.values[step], values[v], sums[step][v]);
          }
        }
      }
    }
  }

  if constexpr (!kIsBackward<Call>) {
    if (call.bias != nullptr && has_channel) {
      const int64_t offset = call.batch.Offset(batch, Call::kBias) + channel;
#pragma unroll
      for (int v = 0; v < kV; ++v) {
        const Acc bias = LoadAs<Acc>(call.bias, offset + v, call.bias_dtype);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) sums[step][v] += bias;
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) jaxops::cuda::Activate(sums[step], call.activation);
  }
  if constexpr (kNct) {
    // Neighbouring threads write neighbouring steps.
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int v = 0; v < kV; ++v) {
        window[(group * kSteps + step) * kPitch + lane * kV + v] = sums[step][v];
      }
    }
    __syncthreads();
    const int steps = p.groups * kSteps;
    for (int index = threadIdx.x; index < steps * kChannels; index += threads) {
      const int step = index % steps, of_channel = first_channel + index / steps;
      const int t = time_of(step);
      if (of_channel < p.channels && t < p.time) {
        out[int64_t{of_channel} * p.time + t] =
            Narrow<T>(window[step * kPitch + of_channel - first_channel]);
      }
    }
  } else if (has_channel) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int t = time_of(group * kSteps + step);
      if (t >= p.time) break;
      Vector<T, kV> vector;
#pragma unroll
      for (int v = 0; v < kV; ++v) vector.values[v] = Narrow<T>(sums[step][v]);
      jaxops::cuda::StoreVector(out + int64_t{t} * p.channels + channel, vector);
    }
  }
}

template <typename Call>
cudaError_t Launch(cudaStream_t stream, const Call& call, void* scales) {
  const Geometry& g = call.geometry;
  const ApplyPlan plan(call);
  const int64_t reach = (g.taps - 1) * g.dilation;
  ApplyParams<Call> params;
  params.call = call;
  params.scales = scales;
  params.time = static_cast<int>(g.time);
  params.channels = static_cast<int>(g.channels);
  params.heads = static_cast<int>(g.heads);
  params.taps = static_cast<int>(g.taps);
  params.dilation = static_cast<int>(g.dilation);
  params.before = static_cast<int>(kIsBackward<Call> ? reach - g.padding : g.padding);
  params.state_steps = static_cast<int>(g.padding);
  params.groups = plan.groups;
  params.block_heads = plan.block_heads;
  params.chunk = plan.chunk;
  params.channel_blocks = FastDivider(plan.channel_blocks);
  params.tiles = FastDivider(plan.tiles);
  params.phases = FastDivider(plan.phases);
  params.depth = FastDivider(g.channels / g.heads);
  return DispatchFloat(call.dtype, [&](auto element) {
    return DispatchBool(g.data_format == DataFormat::kNCT, [&](auto is_nct) {
      using T = decltype(element);
      const auto launch = [&](auto kernel) {
        return jaxops::cuda::Launch(kernel, plan.blocks, plan.groups * kWarp, plan.bytes, stream,
                                    params);
      };
      if constexpr (!std::is_same_v<T, double>) {
        if (plan.vector == 2) return launch(DynamicConvApply<T, is_nct.value, 2, Call>);
      }
      return launch(DynamicConvApply<T, is_nct.value, 1, Call>);
    });
  });
}

}  // namespace

cudaError_t LaunchApply(cudaStream_t stream, const Forward& call, void* scales) {
  return Launch(stream, call, scales);
}
cudaError_t LaunchApply(cudaStream_t stream, const Backward& call, void* scales) {
  return Launch(stream, call, scales);
}

}  // namespace jaxops::dynamic_conv::cuda
