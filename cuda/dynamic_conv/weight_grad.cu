// The kernel of the gradient of the weights of dynamic convolution.
//
// A block has 16 steps of a head. Their cotangents and the rows of x that their taps read lie in
// shared memory, 32 channels at a time. A thread multiplies 4 steps and 4 rows, of which the pairs
// on a diagonal belong to one tap; several threads share the channels of such a square if taps are
// few. The cotangent of a softmax needs a sum over all taps first: filters that are longer than a
// chunk are computed twice.
#include "cuda/dynamic_conv/families.h"
#include "cuda/dynamic_conv/weights.cuh"

namespace jaxops::dynamic_conv::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kTile = 16;  // steps of a block
constexpr int kSquare = 4;
constexpr int kChannels = 32;  // in shared memory at once
constexpr int kPitch = kChannels + 4;
constexpr int kMaxChunk = 64;             // taps at once
constexpr int kLanes = kThreads / kTile;  // threads of a row of weights

JAXOPS_HOST_DEVICE constexpr int CountWindowRows(int chunk) { return kTile + chunk + kSquare; }

struct WeightGradParams {
  Backward call;
  const void* scales;
  int time, channels, heads, taps, padding, dilation, depth;
  int chunk;
  int parts_bits;  // log2 of the threads that share a square
  FastDivider of_heads, tiles, phases;
};

template <typename T, bool kNct>
__global__ void __launch_bounds__(kThreads)
    DynamicConvWeightGrad(const __grid_constant__ WeightGradParams p) {
  using Acc = Accumulator<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  const Backward& call = p.call;
  uint32_t block = blockIdx.x;
  const int head = p.of_heads.DivMod(block);
  const int tile_step = p.tiles.DivMod(block) * kTile;
  const int phase = p.phases.DivMod(block);
  const int64_t batch = block;
  const T* const x = static_cast<const T*>(call.x) + call.batch.Offset(batch, Backward::kX);
  const T* const g = static_cast<const T*>(call.g) + call.batch.Offset(batch, Backward::kG);
  Segments segments{nullptr, p.time, 0};
  if (call.starts != nullptr) {
    segments.starts = call.starts + call.batch.Offset(batch, Backward::kStarts);
  }
  const Weights<Acc> weights(call, p.scales, batch);
  const int64_t dweight = call.batch.Offset(batch, Backward::kDWeight);
  const bool is_softmax = call.geometry.normalize;

  Acc* const own = reinterpret_cast<Acc*>(shared);
  Acc* const window = own + kTile * kPitch;
  Acc* const pairs = window + CountWindowRows(p.chunk) * kPitch;

  const auto time_of = [&](int step) { return phase + (tile_step + step) * p.dilation; };
  // Stage copies `rows` rows, from time `first` on, of the channels from `channel` on of the head.
  const auto stage = [&](Acc* to, const T* array, int first, int rows, int channel) {
    const int count = min(kChannels, p.depth - channel);
    for (int index = threadIdx.x; index < rows * kChannels; index += kThreads) {
      const int row = kNct ? index % rows : index / kChannels;
      const int c = kNct ? index / rows : index % kChannels;
      const int t = first + row * p.dilation;
      Acc value = 0;
      if (c < count && static_cast<unsigned>(t) < static_cast<unsigned>(p.time)) {
        const int64_t of_array = int64_t{head} * p.depth + channel + c;
        value = Widen(array[kNct ? of_array * p.time + t : int64_t{t} * p.channels + of_array]);
      }
      to[row * kPitch + c] = value;
    }
  };

  const int parts = 1 << p.parts_bits;
  const int job = threadIdx.x >> p.parts_bits, part = threadIdx.x & (parts - 1);
  const int first_row = job % (kTile / kSquare) * kSquare;
  const int first_column = first_row + job / (kTile / kSquare) * kSquare;

  // Computes the sums of a chunk of taps, as pairs (step, tap).
  const auto correlate = [&](int first_tap, int taps) {
    const bool has_job = first_column - first_row < taps + kSquare - 1;
    const int rows = (kTile + taps - 1 + kSquare - 1) / kSquare * kSquare;
    Acc sums[kSquare][kSquare] = {};
    for (int channel = 0; channel < p.depth; channel += kChannels) {
      __syncthreads();
      stage(own, g, time_of(0), kTile, channel);
      stage(window, x, time_of(first_tap) - p.padding, rows, channel);
      __syncthreads();
      if (!has_job) continue;
      for (int c = part * kSquare; c < kChannels; c += parts * kSquare) {
        Vector<Acc, kSquare> left[kSquare], right[kSquare];
#pragma unroll
        for (int i = 0; i < kSquare; ++i) {
          left[i] = LoadVector<kSquare>(own + (first_row + i) * kPitch + c);
          right[i] = LoadVector<kSquare>(window + (first_column + i) * kPitch + c);
        }
#pragma unroll
        for (int i = 0; i < kSquare; ++i) {
#pragma unroll
          for (int j = 0; j < kSquare; ++j) {
#pragma unroll
            for (int v = 0; v < kSquare; ++v) {
              sums[i][j] = fma(left[i].values[v], right[j].values[v], sums[i][j]);
            }
          }
        }
      }
    }
    for (int distance = parts / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int i = 0; i < kSquare; ++i) {
#pragma unroll
        for (int j = 0; j < kSquare; ++j) {
          sums[i][j] += __shfl_xor_sync(0xffffffff, sums[i][j], distance);
        }
      }
    }
    if (has_job && part == 0) {
#pragma unroll
      for (int i = 0; i < kSquare; ++i) {
#pragma unroll
        for (int j = 0; j < kSquare; ++j) {
          const int step = first_row + i, tap = first_column + j - step;
          if (tap < 0 || tap >= taps) continue;
          const int t = time_of(step), s = time_of(step + first_tap + tap) - p.padding;
          const bool is_pair = t < p.time && s >= 0 && segments.IsPair(t, s);
          pairs[step * p.chunk + tap] = is_pair ? sums[i][j] : Acc(0);
        }
      }
    }
    __syncthreads();
  };

  // Threads of a row of weights are neighbours.
  const int step = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const bool has_step = time_of(step) < p.time;
  const int64_t row = int64_t{has_step ? time_of(step) : 0} * p.heads + head;
  Acc dot = 0;
  const auto add_products = [&](int first_tap, int taps) {
    for (int k = lane; k < taps; k += kLanes) {
      dot += weights.At(row, first_tap + k) * pairs[step * p.chunk + k];
    }
  };
  const bool is_twice = is_softmax && p.taps > p.chunk;
  if (is_twice) {
    for (int first_tap = 0; first_tap < p.taps; first_tap += p.chunk) {
      const int taps = min(p.chunk, p.taps - first_tap);
      correlate(first_tap, taps);
      add_products(first_tap, taps);
    }
  }
  for (int first_tap = 0; first_tap < p.taps; first_tap += p.chunk) {
    const int taps = min(p.chunk, p.taps - first_tap);
    correlate(first_tap, taps);
    if (is_softmax && first_tap == 0) {
      if (!is_twice) add_products(0, taps);
#pragma unroll
      for (int distance = kLanes / 2; distance > 0; distance /= 2) {
        dot += __shfl_xor_sync(0xffffffff, dot, distance);
      }
    }
    if (!has_step) continue;
    for (int k = lane; k < taps; k += kLanes) {
      Acc value = pairs[step * p.chunk + k];
      if (is_softmax) value = weights.At(row, first_tap + k) * (value - dot);
      StoreAs(call.dweight, dweight + row * p.taps + first_tap + k, call.dweight_dtype, value);
    }
  }
}

}  // namespace

cudaError_t LaunchWeightGrad(cudaStream_t stream, const Backward& call, void* scales) {
  const Geometry& g = call.geometry;
  WeightGradParams params;
  params.call = call;
  params.scales = scales;
  params.time = static_cast<int>(g.time);
  params.channels = static_cast<int>(g.channels);
  params.heads = static_cast<int>(g.heads);
  params.taps = static_cast<int>(g.taps);
  params.padding = static_cast<int>(g.padding);
  params.dilation = static_cast<int>(g.dilation);
  params.depth = static_cast<int>(g.channels / g.heads);
  params.chunk = static_cast<int>(std::min<int64_t>(g.taps, kMaxChunk));
  const int64_t jobs = kTile / kSquare * CeilDiv(params.chunk + kSquare - 1, kSquare);
  params.parts_bits = 0;
  while ((jobs << (params.parts_bits + 1)) <= kThreads &&
         kSquare << (params.parts_bits + 1) <= kChannels) {
    ++params.parts_bits;
  }
  const int64_t phases = std::min(g.dilation, g.time);
  const int64_t tiles = CeilDiv(CeilDiv(g.time, phases), kTile);
  params.of_heads = FastDivider(g.heads);
  params.tiles = FastDivider(tiles);
  params.phases = FastDivider(phases);
  const int64_t blocks = call.batch.size() * phases * tiles * g.heads;
  const int64_t items =
      (kTile + CountWindowRows(params.chunk)) * kPitch + int64_t{kTile} * params.chunk;
  const int64_t bytes = items * (call.dtype == DType::kF64 ? 8 : 4);
  return DispatchFloat(call.dtype, [&](auto element) {
    return DispatchBool(g.data_format == DataFormat::kNCT, [&](auto is_nct) {
      return jaxops::cuda::Launch(DynamicConvWeightGrad<decltype(element), is_nct.value>, blocks,
                                  kThreads, bytes, stream, params);
    });
  });
}

}  // namespace jaxops::dynamic_conv::cuda
