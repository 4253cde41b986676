// These kernels compute lightweight convolution without dilation with filters of any length in the
// NCT layout: a tile is staged in shared memory, and a window of registers slides over it.
#include "cuda/common/activation.cuh"
#include "cuda/lightweight_conv/families.h"
#include "cuda/lightweight_conv/forward.cuh"

namespace jaxops::lightweight_conv::cuda::nct {
namespace {

using jaxops::cuda::Activate;

// Without dilation, a window of 2 kThreadSteps inputs slides over kThreadSteps taps at a time.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kNctThreads) LongNct(const __grid_constant__ ForwardParams p) {
  using Acc = Accumulator<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  const int chunk_size = min(p.taps, kTapChunk);
  const int padded_chunk = (chunk_size + kThreadSteps - 1) / kThreadSteps * kThreadSteps;
  const int steps = p.nct.threads_per_row() * kThreadSteps;
  const int pitch = Skew(steps + padded_chunk);
  Acc* weights = reinterpret_cast<Acc*>(shared);
  Acc* columns = weights + p.nct.rows() * padded_chunk;

  uint32_t block = blockIdx.x;
  const int first_step = p.tiles.DivMod(block) * steps;
  const int first_channel = p.channel_blocks.DivMod(block) * p.nct.rows();
  const int64_t batch = block;
  const int row = threadIdx.x >> p.nct.row_bits;
  const int lane = threadIdx.x & (p.nct.threads_per_row() - 1);
  const int channel = first_channel + row;
  const int head = p.depth.Quotient(min(channel, p.channels - 1));

  const T* x = static_cast<const T*>(p.call.x) + p.call.batch.Offset(batch, Forward::kX);
  const int64_t weight_base = p.call.batch.Offset(batch, Forward::kWeight);
  Acc sums[kThreadSteps] = {};
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

    const Acc* own = columns + row * pitch + Skew(lane * kThreadSteps);
    const Acc* filter = weights + row * padded_chunk;
    Acc window[2 * kThreadSteps];
#pragma unroll
    for (int i = 0; i < kThreadSteps; ++i) window[i] = own[i];
    // The loop takes the taps from `tap` on: kThreadSteps of them, or fewer at the end of the
    // filter.
    const auto advance = [&](int tap, auto whole) {
      const Acc* next = own + Skew(tap + kThreadSteps);
      Vector<Acc, kThreadSteps / 2> taps[2];
      taps[0] = LoadVector<kThreadSteps / 2>(filter + tap);
      taps[1] = LoadVector<kThreadSteps / 2>(filter + tap + kThreadSteps / 2);
#pragma unroll
      for (int i = 0; i < kThreadSteps; ++i) {
        if (whole.value || tap + i + 1 < chunk) window[kThreadSteps + i] = next[i];
      }
#pragma unroll
      for (int k = 0; k < kThreadSteps; ++k) {
        if (whole.value || tap + k < chunk) {
          const Acc weight = taps[k / (kThreadSteps / 2)].values[k % (kThreadSteps / 2)];
#pragma unroll
          for (int i = 0; i < kThreadSteps; ++i) sums[i] += weight * window[i + k];
        }
      }
    };
    int tap = 0;
    for (; tap + kThreadSteps < chunk; tap += kThreadSteps) {
      advance(tap, std::true_type{});
#pragma unroll
      for (int i = 0; i < kThreadSteps; ++i) window[i] = window[kThreadSteps + i];
    }
    advance(tap, std::false_type{});
    __syncthreads();
  }

  if (channel >= p.channels) return;
  Acc bias[1];
  p.ReadBias(bias, batch, channel);
#pragma unroll
  for (int i = 0; i < kThreadSteps; ++i) sums[i] += bias[0];
  Activate(sums, p.call.activation);
  T* y = static_cast<T*>(p.call.y) + p.call.batch.Offset(batch, Forward::kY) +
         int64_t{channel} * p.time;
  WriteSteps<T, kThreadSteps, kAligned>(y, sums, first_step + lane * kThreadSteps, p.time);
}

// A row has no more threads than it has steps for: with at least 16 of them
// (128,1024,64,128,31) bf16 took 72.1 us instead of 39.8. More rows of float64 do not fit shared
// memory.
template <typename T>
constexpr int kMinRowBits = sizeof(T) == 8 ? 1 : 0;

template <typename T>
ForwardPlan MakePlan(const Forward& call) {
  const Geometry& g = call.geometry;
  const NctTile tile(g.time, kThreadSteps, kMinRowBits<T>);
  const int64_t chunk = CeilDiv(std::min<int64_t>(g.taps, kTapChunk), kThreadSteps) * kThreadSteps;
  const int steps = tile.threads_per_row() * kThreadSteps;
  ForwardPlan plan;
  plan.tiles = CeilDiv(g.time, steps);
  plan.channel_blocks = CeilDiv(g.channels, tile.rows());
  plan.blocks = call.batch.size() * plan.tiles * plan.channel_blocks;
  plan.shared_bytes =
      tile.rows() * (chunk + Skew(steps + static_cast<int>(chunk))) * sizeof(Accumulator<T>);
  return plan;
}

}  // namespace

bool CanRunLong(const Forward& call, const Device&) {
  const Geometry& g = call.geometry;
  return g.data_format == DataFormat::kNCT && g.dilation == 1 &&
         DispatchFloat(call.dtype,
                       [&](auto element) { return MakePlan<decltype(element)>(call).CanLaunch(); });
}

cudaError_t LaunchLong(cudaStream_t stream, const Forward& call, const Device&) {
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    const ForwardPlan plan = MakePlan<T>(call);
    const ForwardParams params(call, plan, 1, kThreadSteps, kMinRowBits<T>);
    return DispatchBool(RowsAligned(call.geometry.time, call.dtype, 16), [&](auto aligned) {
      return Launch(LongNct<T, aligned.value>, plan.blocks, kNctThreads, plan.shared_bytes, stream,
                    params);
    });
  });
}

}  // namespace jaxops::lightweight_conv::cuda::nct
