// This kernel sums the partial sums that the blocks of a backward kernel write.
#include "cuda/lightweight_conv/filters.cuh"

namespace jaxops::lightweight_conv::cuda {
namespace {

struct AddParams {
  const void* partials;
  void *dweight, *dbias;
  int splits, taps, heads, channels;
  int row;  // contiguous sums of a head
  DType weight_dtype, bias_dtype;
  FastDivider row_divider;
  int64_t kept;
};

// AddPartials adds the splits of kWarp neighbouring entries of dweight for one tap, or of dbias;
// the warps of a block share the splits. If kDeep, a block has one entry of dweight, which has many
// sums. The grid is over columns, over taps and after them the bias, and over kept entries.
template <typename Acc, bool kDeep>
__global__ void __launch_bounds__(kNtcThreads) AddPartials(const __grid_constant__ AddParams p) {
  constexpr int kBatch = 8;  // loads of a thread that are in flight
  __shared__ Acc shared[kNtcThreads];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int64_t split_size = int64_t{p.taps + 1} * p.channels;
  for (int64_t kept = blockIdx.z; kept < p.kept; kept += gridDim.z) {
    for (int tap = blockIdx.y; tap < p.taps + (p.dbias != nullptr); tap += gridDim.y) {
      const bool is_weight = tap < p.taps;
      const bool deep = kDeep && is_weight;
      const int width = is_weight ? p.heads : p.channels;
      const int row = is_weight ? p.row : 1;
      const int first_column = deep ? blockIdx.x : blockIdx.x * kWarp;
      if (first_column >= width) continue;
      const int column = deep ? first_column : first_column + lane;
      const Acc* first = static_cast<const Acc*>(p.partials) + kept * p.splits * split_size +
                         int64_t{tap} * p.channels + int64_t{column} * row;
      Acc total = 0;
      if (deep) {
        const uint32_t count = static_cast<uint32_t>(row) * p.splits;
        for (uint32_t i = threadIdx.x; i < count; i += kBatch * kNtcThreads) {
          Acc values[kBatch];
#pragma unroll
          for (int b = 0; b < kBatch; ++b) {
            uint32_t split = i + b * kNtcThreads;
            const bool exists = split < count;
            const int at = p.row_divider.DivMod(split);
            values[b] = exists ? first[split * split_size + at] : Acc(0);
          }
#pragma unroll
          for (int b = 0; b < kBatch; ++b) total += values[b];
        }
      } else if (column < width) {
        for (int i = 0; i < row; ++i) {
          for (int split = warp; split < p.splits; split += kBatch * kNtcWarps) {
            Acc values[kBatch];
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
              const int other = split + b * kNtcWarps;
              values[b] = other < p.splits ? first[other * split_size + i] : Acc(0);
            }
#pragma unroll
            for (int b = 0; b < kBatch; ++b) total += values[b];
          }
        }
      }
      __syncthreads();
      shared[threadIdx.x] = total;
      __syncthreads();
      if (warp > 0) continue;
      total = 0;
#pragma unroll
      for (int w = 0; w < kNtcWarps; ++w) total += shared[w * kWarp + lane];
      if (deep) {
#pragma unroll
        for (int distance = kWarp / 2; distance > 0; distance /= 2) {
          total += __shfl_xor_sync(0xffffffff, total, distance);
        }
        if (lane > 0) continue;
      }
      if (column >= width) continue;
      if (is_weight) {
        StoreAs(p.dweight, (kept * p.heads + column) * p.taps + tap, p.weight_dtype, total);
      } else {
        StoreAs(p.dbias, kept * p.channels + column, p.bias_dtype, total);
      }
    }
  }
}

template <typename T>
cudaError_t LaunchAddPartials(cudaStream_t stream, const Backward& call,
                              const PartialSums& partials) {
  const Geometry& g = call.geometry;
  AddParams params{};
  params.partials = partials.sums;
  params.dweight = call.dweight;
  params.dbias = call.dbias;
  params.splits = static_cast<int>(partials.splits);
  params.taps = static_cast<int>(g.taps);
  params.heads = static_cast<int>(g.heads);
  params.channels = static_cast<int>(g.channels);
  params.row = static_cast<int>(g.channels / g.heads / partials.channels);
  params.row_divider = FastDivider(params.row);
  params.weight_dtype = call.weight_dtype;
  params.bias_dtype = call.bias_dtype;
  params.kept = call.kept.size();
  // A block for each entry costs more than it saves if it has a small part of an entry's threads to
  // keep busy: 131072 blocks of 16 sums took 240 us for (2,4096,1024,128,1023) bf16 NCT.
  const int64_t sums = params.row * partials.splits;
  const bool deep = params.row >= 8 && sums <= INT32_MAX &&
                    (sums >= kNtcThreads || g.heads * g.taps <= kNtcThreads * sums);
  const int64_t biases = call.dbias == nullptr ? 0 : CeilDiv(g.channels, kWarp);
  const dim3 grid(static_cast<unsigned>(std::max(deep ? g.heads : CeilDiv(g.heads, kWarp), biases)),
                  static_cast<unsigned>(std::min(kMaxGridBlocks, g.taps + (call.dbias != nullptr))),
                  static_cast<unsigned>(std::min(kMaxGridBlocks, params.kept)));
  if (deep) {
    AddPartials<Accumulator<T>, true><<<grid, kNtcThreads, 0, stream>>>(params);
  } else {
    AddPartials<Accumulator<T>, false><<<grid, kNtcThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t AddPartialSums(cudaStream_t stream, const Backward& call, const PartialSums& partials) {
  return DispatchFloat(call.dtype, [&](auto element) {
    return LaunchAddPartials<decltype(element)>(stream, call, partials);
  });
}

}  // namespace jaxops::lightweight_conv::cuda
