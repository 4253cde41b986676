// The kernel of the value of dynamic convolution with short filters in NTC: at most 8 taps without
// dilation.
//
// It is bound by memory: a thread has one vector of neighbouring channels and walks over
// consecutive steps, and keeps the rows that its next steps read in registers, so that x is read
// once. The weights of a block's steps, after the softmax, lie in shared memory with bits that say
// which taps read a row of their own segment.
#include "cuda/common/activation.cuh"
#include "cuda/dynamic_conv/families.h"
#include "cuda/dynamic_conv/weights.cuh"

namespace jaxops::dynamic_conv::cuda {
namespace {

using jaxops::cuda::Activate;
using jaxops::cuda::kVectorElements;
using jaxops::cuda::StoreVector;

constexpr int kMaxThreads = 128;
constexpr int kMaxRun = 32;               // steps of a thread
constexpr int64_t kMaxBytes = 40 * 1024;  // lets a multiprocessor have several blocks
// Fewer threads leave multiprocessors of current GPUs without enough loads in flight.
constexpr int64_t kWantedThreads = 132 * 1024;

struct ShortParams {
  Forward call;
  int time, channels, heads, taps, padding;
  int run;
  FastDivider channel_blocks, tiles, of_lanes, block_heads;
};

struct ShortPlan {
  int taps;  // in shared memory and in registers
  int threads, run, lanes, block_heads;
  int64_t channel_blocks, tiles, blocks, bytes;

  explicit ShortPlan(const Forward& call) {
    const Geometry& g = call.geometry;
    const int vector = static_cast<int>(16 / SizeOf(call.dtype));
    taps = g.taps <= 4 ? 4 : kMaxShortTaps;
    lanes = static_cast<int>(g.channels / g.heads / vector);
    threads = static_cast<int>(
        std::min<int64_t>(kMaxThreads, CeilDiv(g.channels / vector, kWarp) * kWarp));
    run = kMaxRun;
    const auto count = [&] {
      block_heads = threads / lanes;
      channel_blocks = CeilDiv(g.channels, int64_t{threads} * vector);
      tiles = CeilDiv(g.time, run);
      blocks = call.batch.size() * tiles * channel_blocks;
      bytes = 4 * (int64_t{run} * block_heads * taps + run);
    };
    count();
    while (run > kMaxShortTaps && (blocks * threads < kWantedThreads || bytes > kMaxBytes)) {
      run /= 2;
      count();
    }
    while (threads > kWarp && bytes > kMaxBytes) {
      threads /= 2;
      count();
    }
  }
};

// The probabilities of the block's heads at its steps: entry (step, head, tap).
template <int kTaps>
__device__ __forceinline__ void StageWeights(const ShortParams& p, int64_t batch, int first,
                                             int first_head, float* to) {
  const Forward& call = p.call;
  const uint32_t rows = p.run * p.block_heads.divisor();
  const int64_t offset = call.batch.Offset(batch, Forward::kWeight);
  for (uint32_t index = threadIdx.x; index < rows; index += blockDim.x) {
    uint32_t row = index;
    const int head = first_head + static_cast<int>(p.block_heads.DivMod(row));
    const int t = first + static_cast<int>(row);
    float values[kTaps] = {};
    if (static_cast<unsigned>(t) < static_cast<unsigned>(p.time) && head < p.heads) {
      const int64_t at = offset + (int64_t{t} * p.heads + head) * p.taps;
      jaxops::cuda::WithElements(call.weight, call.weight_dtype, [&](const auto* weight) {
#pragma unroll
        for (int k = 0; k < kTaps; ++k) {
          if (k < p.taps) values[k] = static_cast<float>(Widen(weight[at + k]));
        }
      });
      if (call.geometry.normalize) {
        float max = values[0];
#pragma unroll
        for (int k = 1; k < kTaps; ++k) {
          if (k < p.taps) max = values[k] > max ? values[k] : max;
        }
        float sum = 0;
#pragma unroll
        for (int k = 0; k < kTaps; ++k) {
          values[k] = k < p.taps ? expf(values[k] - max) : 0;
          sum += values[k];
        }
        const float scale = 1.0f / sum;
#pragma unroll
        for (int k = 0; k < kTaps; ++k) values[k] *= scale;
      }
    }
#pragma unroll
    for (int k = 0; k < kTaps; ++k) to[index * kTaps + k] = values[k];
  }
}

// A copy of a row whose widened values the compiler does not keep: it would keep those of all rows,
// which need twice the registers, because several steps read them.
template <typename T, int kVector>
__device__ __forceinline__ Vector<T, kVector> ToWiden(const Vector<T, kVector>& row) {
  uint4 words;
  memcpy(&words, &row, sizeof(row));
  asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
  Vector<T, kVector> copy;
  memcpy(&copy, &words, sizeof(copy));
  return copy;
}

// Adds the rows that the bits of `taps` name, each times its weight.
template <typename T, int kTaps, int kVector>
__device__ __forceinline__ void AddTaps(float (&sums)[kVector], uint32_t taps,
                                        const Vector<T, kVector>* rows,
                                        const float (&weights)[kTaps]) {
#pragma unroll
  for (int k = 0; k < kTaps; ++k) {
    if (taps >> k & 1) {
      const auto row = ToWiden(rows[k]);
#pragma unroll
      for (int v = 0; v < kVector; ++v) sums[v] = fmaf(weights[k], Widen(row.values[v]), sums[v]);
    }
  }
}

template <typename T, int kTaps>
__global__ void __launch_bounds__(kMaxThreads, kTaps == 4 ? 5 : 3)
    DynamicConvShort(const __grid_constant__ ShortParams p) {
  constexpr int kVector = kVectorElements<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  const Forward& call = p.call;
  uint32_t block = blockIdx.x;
  const int first_channel = static_cast<int>(p.channel_blocks.DivMod(block)) * blockDim.x * kVector;
  const int first = static_cast<int>(p.tiles.DivMod(block)) * p.run;
  const int64_t batch = block;
  const int channel = first_channel + threadIdx.x * kVector;
  const bool has_channel = channel < p.channels;
  const int block_heads = p.block_heads.divisor();
  const int head = static_cast<int>(p.of_lanes.Quotient(threadIdx.x));
  const T* const x = static_cast<const T*>(call.x) + call.batch.Offset(batch, Forward::kX);
  T* const y = static_cast<T*>(call.y) + call.batch.Offset(batch, Forward::kY);
  const T* const state = call.state == nullptr ? nullptr
                                               : static_cast<const T*>(call.state) +
                                                     call.batch.Offset(batch, Forward::kState);
  Segments segments{nullptr, p.time, state == nullptr ? 0 : -p.padding};
  if (call.starts != nullptr) {
    segments.starts = call.starts + call.batch.Offset(batch, Forward::kStarts);
  }
  const auto row = [&](int t) {
    Vector<T, kVector> loaded{};
    if (has_channel && t < p.time) {
      if (t >= 0) {
        loaded = LoadVector<kVector>(x + int64_t{t} * p.channels + channel);
      } else if (state != nullptr && t >= -p.padding) {
        loaded = LoadVector<kVector>(state + int64_t{t + p.padding} * p.channels + channel);
      }
    }
    return loaded;
  };
  // Step first + i + j reads with tap k what rows[j + k] has after i steps.
  Vector<T, kVector> rows[2 * kTaps];
#pragma unroll
  for (int j = 0; j < 2 * kTaps; ++j) rows[j] = row(first - p.padding + j);

  float* const probabilities = reinterpret_cast<float*>(shared);
  uint32_t* const taps = reinterpret_cast<uint32_t*>(probabilities + p.run * block_heads * kTaps);
  const int first_head = static_cast<int>(p.of_lanes.Quotient(first_channel / kVector));
  StageWeights<kTaps>(p, batch, first, first_head, probabilities);
  if (static_cast<int>(threadIdx.x) < p.run) {
    const int t = first + threadIdx.x;
    uint32_t bits = 0;
    for (int k = 0; t < p.time && k < p.taps; ++k) {
      bits |= uint32_t{segments.IsPair(t, t - p.padding + k)} << k;
    }
    taps[threadIdx.x] = bits;
  }
  __syncthreads();
  float bias[kVector] = {};
  if (call.bias != nullptr && has_channel) {
    const int64_t offset = call.batch.Offset(batch, Forward::kBias) + channel;
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      bias[v] = LoadAs<float>(call.bias, offset + v, call.bias_dtype);
    }
  }

  for (int i = 0; i < p.run && first + i < p.time; i += kTaps) {
    if (i > 0) {
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
        rows[j] = rows[j + kTaps];
        rows[j + kTaps] = row(first - p.padding + i + kTaps + j);
      }
    }
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      const int t = first + i + j;
      if (t >= p.time) break;
      const auto weights =
          LoadVector<kTaps>(probabilities + ((i + j) * block_heads + head) * kTaps);
      float sums[kVector] = {};
      AddTaps<T, kTaps, kVector>(sums, taps[i + j], rows + j, weights.values);
#pragma unroll
      for (int v = 0; v < kVector; ++v) sums[v] += bias[v];
      Activate(sums, call.activation);
      Vector<T, kVector> result;
#pragma unroll
      for (int v = 0; v < kVector; ++v) result.values[v] = Narrow<T>(sums[v]);
      if (has_channel) StoreVector(y + int64_t{t} * p.channels + channel, result);
    }
  }
}

bool IsAligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

}  // namespace

bool CanRunShort(const Forward& call) {
  return IsShort(call) && IsAligned(call.x) && IsAligned(call.y) && IsAligned(call.state);
}

cudaError_t LaunchShort(cudaStream_t stream, const Forward& call) {
  const Geometry& g = call.geometry;
  const ShortPlan plan(call);
  ShortParams params;
  params.call = call;
  params.time = static_cast<int>(g.time);
  params.channels = static_cast<int>(g.channels);
  params.heads = static_cast<int>(g.heads);
  params.taps = static_cast<int>(g.taps);
  params.padding = static_cast<int>(g.padding);
  params.run = plan.run;
  params.channel_blocks = FastDivider(plan.channel_blocks);
  params.tiles = FastDivider(plan.tiles);
  params.of_lanes = FastDivider(plan.lanes);
  params.block_heads = FastDivider(plan.block_heads);
  return DispatchFloat(call.dtype, [&](auto element) {
    return DispatchBool(plan.taps == 4, [&](auto has_few) {
      using T = decltype(element);
      if constexpr (std::is_same_v<T, double>) {
        return cudaErrorInvalidValue;
      } else {
        return jaxops::cuda::Launch(DynamicConvShort < T, has_few.value ? 4 : kMaxShortTaps >,
                                    plan.blocks, plan.threads, plan.bytes, stream, params);
      }
    });
  });
}

}  // namespace jaxops::dynamic_conv::cuda
