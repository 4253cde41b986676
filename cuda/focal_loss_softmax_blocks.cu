// The softmax focal loss of rows that a block, or the blocks of a cluster, have in their registers,
// and of still longer ones.
//
// Blocks of a multiprocessor take turns: one waits for a row while others sum up or write theirs.
// Rows too long for a cluster are read in one pass for the largest of the other logits and the sum
// of exponentials beside it; for the gradient, a second one finds them in the L2.
#include <cooperative_groups.h>

#include "cuda/focal_loss.h"
#include "cuda/focal_loss_softmax.cuh"

namespace jaxops::focal_loss::cuda {
namespace {

// Accesses of a thread to a row.
constexpr int kPacks = 8;
// Threads of all the blocks of a multiprocessor.
template <typename A>
constexpr int kResidentThreads = sizeof(A) == 8 ? 512 : 1024;
// Threads that share a row too long for a cluster: for the gradient many, which keeps those rows
// few that the L2 has to hold at a time.
template <bool kGradient>
constexpr int kStreamThreads = kGradient ? 1024 : 256;

// What the threads of a row need to write its gradient.
template <typename A>
struct RowTerms {
  A largest;
  A share;
  A slope;
};

template <int kCount, typename A>
__device__ __forceinline__ void AddOverLanes(SumOfExp<A>& value) {
#pragma unroll
  for (int lanes = kCount / 2; lanes > 0; lanes /= 2) {
    SumOfExp<A> other;
    other.largest = __shfl_xor_sync(~0u, value.largest, lanes);
    other.sum = __shfl_xor_sync(~0u, value.sum, lanes);
    value.Add(other);
  }
}

// The sum of a split, of its first thread.
template <typename A>
__device__ __forceinline__ void FinishRows(const SoftmaxParams& p, int64_t to, uint32_t split,
                                           A total) {
  if (p.call.sum == nullptr || threadIdx.x > 0) return;
  if (p.partials != nullptr) {
    static_cast<A*>(p.partials)[split] = total;
  } else {
    static_cast<A*>(p.call.sum)[to] = total;
  }
}

// The blocks of a cluster share rows, which they have in their registers.
template <typename T, int kBlockThreads, bool kGradient>
__global__ void __launch_bounds__(kBlockThreads, kResidentThreads<Accumulator<T>> / kBlockThreads)
    BlockRows(const __grid_constant__ SoftmaxParams p) {
  using A = Accumulator<T>;
  constexpr int kCount = kPackElements<T>;
  constexpr int kWarps = kBlockThreads / kWarp;
  __shared__ SumOfExp<A> of_warp[kWarps];
  __shared__ SumOfExp<A> of_block[2][kClusterBlocks];
  __shared__ RowTerms<A> terms;
  const Softmax& call = p.call;
  const int classes = static_cast<int>(call.classes);
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const unsigned blocks_per_row = p.blocks_per_row;
  const unsigned rank = blockIdx.x % blocks_per_row;
  uint32_t index = blockIdx.x / blocks_per_row;
  const int64_t begin = p.splits.Peel(index) * p.rows_per_split;
  const int64_t end = min(begin + p.rows_per_split, call.rows);
  const SoftmaxEntry<T> entry(call, index);
  T* const gradient = kGradient ? static_cast<T*>(call.gradient) + entry.result : nullptr;
  const bool alike = Misaligned(gradient) == Misaligned(entry.logits);
  const int stride = blocks_per_row * kBlockThreads * kCount;
  const int first = (rank * kBlockThreads + threadIdx.x) * kCount;
#if __CUDA_ARCH__ >= 900
  const auto cluster = cooperative_groups::this_cluster();
  // Nobody writes to the memory of a block that has not begun.
  if (blocks_per_row > 1) cluster.barrier_arrive();
  bool begun = blocks_per_row == 1;
#endif
  A total = 0;

#pragma unroll 1
  for (int64_t row = begin; row < end; ++row) {
    const T* logits = entry.logits + row * classes;
    const int at = first - Misaligned(logits);
    RowPacks<T, kPacks> packs;
    packs.LoadWhole(logits, classes, at, stride, kPacks);
    packs.LoadEdges(logits, classes, at, stride, kPacks);
    const int label = entry.labels[row];
    const bool known = label >= 0 && label < classes;
    A label_logit = 0, factor = 0;
    if (warp == 0) {
      if (known) label_logit = Widen(logits[label]);
      factor = entry.Factor(row);
    }
    packs.TakeOut(label, classes, at, stride, kPacks);
    SumOfExp<A> others;
    others.StartFrom(OverLanes<kWarp>(packs.FindLargest(kPacks), Max()));
    const A warp_largest = others.largest;
    others.sum = OverLanes<kWarp>(packs.SumExponentials(warp_largest, kPacks), Plus());
    if (lane == 0) of_warp[warp] = others;
    __syncthreads();
    if (warp == 0) {
      others = of_warp[lane % kWarps];
      AddOverLanes<kWarps>(others);
    }
#if __CUDA_ARCH__ >= 900
    if (blocks_per_row > 1) {
      if (!begun) cluster.barrier_wait();
      begun = true;
      // Blocks read one row's sums while the next row's arrive.
      SumOfExp<A>* of_blocks = of_block[(row - begin) % 2];
      if (warp == 0 && lane < blocks_per_row)
        cluster.map_shared_rank(of_blocks, lane)[rank] = others;
      cluster.sync();
      if (warp == 0) {
        others = of_blocks[lane % blocks_per_row];
        for (unsigned lanes = blocks_per_row / 2; lanes > 0; lanes /= 2) {
          SumOfExp<A> other;
          other.largest = __shfl_xor_sync(~0u, others.largest, lanes);
          other.sum = __shfl_xor_sync(~0u, others.sum, lanes);
          others.Add(other);
        }
      }
    }
#endif
    if (warp == 0) {
      A loss, slope;
      EvaluateRow(loss, slope, others, label_logit, call.power, entry.gamma);
      loss = known ? loss * factor : A(0);
      slope = known ? slope * factor : A(0);
      if (rank == 0 && lane == 0) {
        total += loss;
        if (call.loss != nullptr) static_cast<A*>(call.loss)[entry.result + row] = loss;
      }
      if (kGradient && lane == 0) {
        terms = {others.largest, known ? ShareOf(slope, others) : A(0), slope};
      }
    }
    __syncthreads();
    if constexpr (kGradient) {
      // Exponentials that took the place of logits are relative to the largest of the warp.
      const A share =
          packs.kKeeps ? terms.share * ExpOfDifference(warp_largest - terms.largest) : terms.share;
      packs.Store(gradient + row * classes, alike, share, terms.largest, terms.slope, label,
                  classes, at, stride, kPacks);
    }
  }
  if (rank == 0) FinishRows(p, entry.sum, blockIdx.x / blocks_per_row, total);
}

// Sums over the block, for all of its threads.
template <int kBlockThreads, typename A>
__device__ __forceinline__ void AddOverBlock(SumOfExp<A>& value) {
  constexpr int kWarps = kBlockThreads / kWarp;
  __shared__ SumOfExp<A> of_warp[kWarps];
  AddOverLanes<kWarp>(value);
  // Of the row before this one, all have read theirs.
  __syncthreads();
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = of_warp[threadIdx.x % kWarps];
  AddOverLanes<kWarps>(value);
}

// A block reads a row from memory whenever it needs it.
template <typename T, bool kGradient>
__global__ void __launch_bounds__(kStreamThreads<kGradient>, kGradient && sizeof(T) < 8 ? 2 : 1)
    StreamedRows(const __grid_constant__ SoftmaxParams p) {
  using A = Accumulator<T>;
  constexpr int kAhead = 2;
  constexpr int kThreads = kStreamThreads<kGradient>;
  constexpr int kStride = kThreads * kPackElements<T>;
  const Softmax& call = p.call;
  const int classes = static_cast<int>(call.classes);
  uint32_t index = blockIdx.x;
  const int64_t begin = p.splits.Peel(index) * p.rows_per_split;
  const int64_t end = min(begin + p.rows_per_split, call.rows);
  const SoftmaxEntry<T> entry(call, index);
  T* const gradient = kGradient ? static_cast<T*>(call.gradient) + entry.result : nullptr;
  const bool alike = Misaligned(gradient) == Misaligned(entry.logits);
  A total = 0;

#pragma unroll 1
  for (int64_t row = begin; row < end; ++row) {
    const T* logits = entry.logits + row * classes;
    const int first = static_cast<int>(threadIdx.x) * kPackElements<T> - Misaligned(logits);
    const int label = entry.labels[row];
    const bool known = label >= 0 && label < classes;
    RowPacks<T, kAhead> packs;
    const auto load = [&](int at) {
      packs.LoadWhole(logits, classes, at, kStride, kAhead);
      packs.LoadEdges(logits, classes, at, kStride, kAhead);
      packs.TakeOut(label, classes, at, kStride, kAhead);
    };
    SumOfExp<A> others;
    for (int at = first; at < classes; at += kAhead * kStride) {
      load(at);
      const SumOfExp<A> before = others;
      others.StartFrom(max(before.largest, packs.FindLargest(kAhead)));
      others.sum = fma(before.sum, ExpOfDifference(before.largest - others.largest),
                       packs.SumExponentials(others.largest, kAhead));
    }
    AddOverBlock<kThreads>(others);

    A loss, slope;
    EvaluateRow(loss, slope, others, known ? A(Widen(logits[label])) : A(0), call.power,
                entry.gamma);
    const A factor = entry.Factor(row);
    loss = known ? loss * factor : A(0);
    slope = known ? slope * factor : A(0);
    total += loss;
    if (call.loss != nullptr && threadIdx.x == 0) {
      static_cast<A*>(call.loss)[entry.result + row] = loss;
    }
    if constexpr (kGradient) {
      const A share = known ? ShareOf(slope, others) : A(0);
      for (int at = first; at < classes; at += kAhead * kStride) {
        load(at);
        if (packs.kKeeps) packs.SumExponentials(others.largest, kAhead);
        packs.Store(gradient + row * classes, alike, share, others.largest, slope, label, classes,
                    at, kStride, kAhead);
      }
    }
  }
  FinishRows(p, entry.sum, blockIdx.x, total);
}

// Splits of the rows of an entry: as many as there may be.
struct Splits {
  int64_t count;
  int64_t rows;  // of each
};

Splits SplitRows(const Softmax& call, int64_t most) {
  if (call.sum == nullptr) return {call.rows, 1};
  const int64_t rows = CeilDiv(call.rows, std::clamp<int64_t>(most, 1, call.rows));
  return {CeilDiv(call.rows, rows), rows};
}

template <typename T, int kBlockThreads>
cudaError_t LaunchBlocks(cudaStream_t stream, const SoftmaxParams& params, int64_t clusters) {
  const int64_t blocks = clusters * params.blocks_per_row;
  return DispatchBool(params.call.gradient != nullptr, [&](auto gradient) {
    const auto kernel = BlockRows<T, kBlockThreads, gradient.value>;
    return params.blocks_per_row > 1
               ? jaxops::cuda::LaunchClusters(kernel, blocks, params.blocks_per_row, kBlockThreads,
                                              0, stream, params)
               : jaxops::cuda::Launch(kernel, blocks, kBlockThreads, 0, stream, params);
  });
}

}  // namespace

cudaError_t LaunchBlockRows(cudaStream_t stream, const Softmax& call, int64_t most_splits,
                            void* partials) {
  return DispatchFloat(call.dtype, [&](auto logit) {
    using T = decltype(logit);
    const int64_t packs = PacksOfRow(call).count;
    const auto [splits, rows] = SplitRows(call, most_splits);
    const int64_t clusters = call.batch.size() * splits;
    const bool combines = call.sum != nullptr && splits > 1;
    SoftmaxParams params{call, FastDivider(splits), rows, combines ? partials : nullptr, kPacks, 1,
                         1};
    const auto launch = [&]() -> cudaError_t {
      if (packs <= 128 * kPacks) return LaunchBlocks<T, 128>(stream, params, clusters);
      if (packs <= 256 * kPacks) return LaunchBlocks<T, 256>(stream, params, clusters);
      int64_t blocks = 1;
      while (blocks * 512 * kPacks < packs) blocks *= 2;
      if (blocks == 1 || (blocks <= kClusterBlocks && jaxops::cuda::HasClusters())) {
        params.blocks_per_row = static_cast<int32_t>(blocks);
        return LaunchBlocks<T, 512>(stream, params, clusters);
      }
      return DispatchBool(call.gradient != nullptr, [&](auto gradient) {
        return jaxops::cuda::Launch(StreamedRows<T, gradient.value>, clusters,
                                    kStreamThreads<gradient.value>, 0, stream, params);
      });
    };
    const cudaError_t error = launch();
    if (error != cudaSuccess || !combines) return error;
    return CombineSums<Accumulator<T>>(stream, call, splits, partials);
  });
}

}  // namespace jaxops::focal_loss::cuda
