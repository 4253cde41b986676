// This kernel computes the softmax focal loss of rows that are too long for a warp, or, if only f32
// gradients are wanted, so long that two or four warps are faster.
//
// For the gradient, with or without a sum, a block or the blocks of a cluster keep a row in
// registers. The blocks of a multiprocessor overlap: one waits for a row while others sum or write
// theirs.
#include "cuda/common/cluster.cuh"
#include "cuda/focal_loss/launch.h"
#include "cuda/focal_loss/softmax/rows.cuh"

namespace jaxops::focal_loss::cuda {
namespace {

// A thread has this number of vectors of a long row.
constexpr int kManyVectors = 8;
// The resident blocks of a multiprocessor have this number of threads in all.
constexpr int kResidentThreads = 1024;

// RowTerms holds the terms with which the threads of a row write its gradient.
template <typename A>
struct RowTerms {
  A largest;
  A share;
  A slope;
};

// The blocks of a cluster share rows and keep them in registers.
template <typename T, int kBlockThreads, int kVectors>
__global__ void __launch_bounds__(kBlockThreads, kResidentThreads / kBlockThreads)
    BlockRows(const __grid_constant__ SoftmaxParams p) {
  using A = Accumulator<T>;
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
  const int64_t begin = p.splits.DivMod(index) * p.rows_per_split;
  const int64_t end = min(begin + p.rows_per_split, call.rows);
  const SoftmaxEntry<T> entry(call, index);
  T* const gradient = static_cast<T*>(call.gradient) + entry.result;
  const bool alike = Misaligned(gradient) == Misaligned(entry.logits);
  // A block has a segment of a row.
  const int thread = rank * kBlockThreads * kVectors + threadIdx.x;
#if __CUDA_ARCH__ >= 900
  namespace cluster = jaxops::cuda::cluster;
  // No block may write to the shared memory of a block that has not begun.
  if (blocks_per_row > 1) cluster::Arrive();
  bool begun = blocks_per_row == 1;
#endif
  A total = 0;

#pragma unroll 1
  for (int64_t row = begin; row < end; ++row) {
    const T* logits = entry.logits + row * classes;
    RowPart<T, kVectors, 1, sizeof(T) != 2> part(logits, classes, thread, kBlockThreads, kVectors,
                                                 p.whole);
    const int label = entry.labels[row];
    const bool known = label >= 0 && label < classes;
    A label_logit = 0, weight = 0;
    if (warp == 0) {
      if (known) label_logit = Widen(logits[label]);
      weight = entry.Weight(row);
    }
    part.TakeOut(label, known);
    SumOfExp<A> others;
    others.StartFrom(LargestOfLanes<kWarp>(part.FindLargest()));
    const A warp_largest = others.largest;
    others.sum = OverLanes<kWarp>(part.SumExponentials(warp_largest), Plus());
    if (lane == 0) of_warp[warp] = others;
    __syncthreads();
    if (warp == 0) {
      others = of_warp[lane % kWarps];
      AddOverLanes<kWarps>(others);
    }
#if __CUDA_ARCH__ >= 900
    if (blocks_per_row > 1) {
      if (!begun) cluster::Wait();
      begun = true;
      // Blocks read one row's sums while the next row's arrive.
      SumOfExp<A>* of_blocks = of_block[(row - begin) % 2];
      if (warp == 0 && lane < blocks_per_row) {
        cluster::MapSharedRank(of_blocks, lane)[rank] = others;
      }
      cluster::Sync();
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
      const A factor = entry.scale * weight;
      if (known) total += loss * factor;
      slope = known ? slope * factor : A(0);
      if (lane == 0) terms = {others.largest, known ? ShareOf(slope, others) : A(0), slope};
    }
    __syncthreads();
    // Exponentials are relative to the largest exponent of the warp.
    const A share = terms.share * ExpOfDifference(warp_largest - terms.largest);
    part.Store(gradient + row * classes, alike, share, warp_largest, terms.slope, label);
  }
  if (rank == 0) FinishRows(p, entry.sum, blockIdx.x / blocks_per_row, total);
}

struct Plan {
  RowSegments segments;
  int threads = 1024;  // per block
  int vectors = kManyVectors;
  int64_t blocks_per_row = 1;

  explicit Plan(const SoftmaxCall& call) : segments(call) {
    const int64_t count = RowVectors(call.loss).count;
    const auto choose = [&](int its_threads, int its_vectors) {
      if (count > its_threads * its_vectors) return false;
      threads = its_threads;
      vectors = its_vectors;
      return true;
    };
    const bool is_f32 = call.loss.dtype == DType::kF32;
    if (is_f32 && (choose(64, 4) || choose(64, 6) || choose(128, 4))) return;
    if (choose(128, kManyVectors) || choose(256, kManyVectors) || choose(512, kManyVectors)) return;
    while (blocks_per_row * threads * kManyVectors < count) blocks_per_row *= 2;
  }
};

template <typename T, int kBlockThreads, int kVectors = kManyVectors>
cudaError_t Launch(cudaStream_t stream, const SoftmaxCall& call, const Plan& plan) {
  const auto kernel = BlockRows<T, kBlockThreads, kVectors>;
  const auto launch = [&](SoftmaxParams& params, int64_t clusters) {
    params.blocks_per_row = static_cast<int32_t>(plan.blocks_per_row);
    const int64_t blocks = clusters * plan.blocks_per_row;
    return plan.blocks_per_row > 1
               ? jaxops::cuda::LaunchClusters(kernel, blocks, params.blocks_per_row, kBlockThreads,
                                              0, stream, params)
               : jaxops::cuda::Launch(kernel, blocks, kBlockThreads, 0, stream, params);
  };
  return LaunchSegments<Accumulator<T>>(plan.segments, stream, call, launch);
}

}  // namespace

bool CanRunBlockRows(const SoftmaxCall& call, const Device& device) {
  if (call.loss.gradient == nullptr) return false;
  const Plan plan(call);
  const bool fits =
      plan.blocks_per_row == 1 || (plan.blocks_per_row <= kClusterBlocks && device.has_clusters());
  return fits && call.entries() * plan.segments.count * plan.blocks_per_row <= INT32_MAX;
}

cudaError_t LaunchBlockRows(cudaStream_t stream, const SoftmaxCall& call, const Device&) {
  const Plan plan(call);
  return DispatchFloat(call.loss.dtype, [&](auto logit) {
    using T = decltype(logit);
    if constexpr (std::is_same_v<T, float>) {
      if (plan.vectors == 4) {
        return plan.threads == 64 ? Launch<T, 64, 4>(stream, call, plan)
                                  : Launch<T, 128, 4>(stream, call, plan);
      }
      if (plan.vectors == 6) return Launch<T, 64, 6>(stream, call, plan);
    }
    switch (plan.threads) {
      case 128:
        return Launch<T, 128>(stream, call, plan);
      case 256:
        return Launch<T, 256>(stream, call, plan);
      case 512:
        return Launch<T, 512>(stream, call, plan);
      default:
        return Launch<T, 1024>(stream, call, plan);
    }
  });
}

}  // namespace jaxops::focal_loss::cuda
