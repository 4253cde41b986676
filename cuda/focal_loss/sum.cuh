// This header sums a loss over the threads of a block, over the blocks of a cluster, and by a
// second kernel over the blocks of longer sums. The order of a sum is always the same.
#ifndef JAXOPS_CUDA_FOCAL_LOSS_SUM_CUH_
#define JAXOPS_CUDA_FOCAL_LOSS_SUM_CUH_

#include <cuda/ptx>

#include "cuda/common/cluster.cuh"
#include "cuda/focal_loss/math.cuh"

namespace jaxops::focal_loss::cuda {

// A cluster has at most this number of blocks. If a batch entry has no more blocks and the device
// has clusters, the cluster sums them; otherwise a second kernel does.
inline constexpr int64_t kClusterBlocks = 8;

template <typename A, int kCount>
__device__ __forceinline__ A SumOf(const A (&values)[kCount]) {
  A sum = values[0];
#pragma unroll
  for (int k = 1; k < kCount; ++k) sum += values[k];
  return sum;
}

// SumOverBlock returns a value summed over the block's threads, all of which must call it; only the
// first thread may use the result.
template <int kBlockThreads = kThreads, typename A>
__device__ __forceinline__ A SumOverBlock(A value) {
  __shared__ A of_warp[kBlockThreads / kWarp];
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    value += __shfl_xor_sync(~0u, value, lanes);
  }
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  A sum = 0;
#pragma unroll
  for (int warp = 0; warp < kBlockThreads / kWarp; ++warp) sum += of_warp[warp];
  return sum;
}

// SumOverAnyBlock is SumOverBlock for blocks of any number of warps.
template <typename A>
__device__ __forceinline__ A SumOverAnyBlock(A value) {
  __shared__ A of_warp[kWarp];
  const int warps = blockDim.x / kWarp;
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    value += __shfl_xor_sync(~0u, value, lanes);
  }
  if (warps == 1) return value;
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  if (threadIdx.x >= kWarp) return value;
  A sum = threadIdx.x < warps ? of_warp[threadIdx.x] : A(0);
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    sum += __shfl_xor_sync(~0u, sum, lanes);
  }
  return sum;
}

#if __CUDA_ARCH__ >= 900
// At this barrier, the first block of a cluster waits for the other blocks' sums to arrive in its
// shared memory.
__device__ __forceinline__ uint64_t* SumsArrived() {
  __shared__ uint64_t arrived;
  return &arrived;
}
#endif

// ArriveInCluster tells the other blocks of the cluster that this block has begun, so that they may
// send their sums.
__device__ __forceinline__ void ArriveInCluster() {
#if __CUDA_ARCH__ >= 900
  namespace ptx = ::cuda::ptx;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(SumsArrived(), 1);
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
  }
  // Only the barrier must be visible to the other blocks, and the fence ensures that: an arrival
  // that releases all writes would wait for global memory.
  ptx::barrier_cluster_arrive(ptx::sem_relaxed);
#endif
}

// SumOverCluster adds up the values of the first threads of a cluster's blocks, in the first thread
// of the first block. It must follow ArriveInCluster, and returns whether this thread has the sum.
template <typename A>
__device__ __forceinline__ bool SumOverCluster(A& sum) {
#if __CUDA_ARCH__ >= 900
  namespace cluster = jaxops::cuda::cluster;
  namespace ptx = ::cuda::ptx;
  __shared__ A of_block[kClusterBlocks];
  const unsigned rank = cluster::BlockRank();
  // A block that was not launched in a cluster cannot send to itself.
  if (cluster::NumBlocks() == 1) return threadIdx.x == 0;
  ptx::barrier_cluster_wait(ptx::sem_acquire);
  if (threadIdx.x > 0) return false;
  ptx::st_async(cluster::MapSharedRank(of_block + rank, 0), sum,
                cluster::MapSharedRank(SumsArrived(), 0));
  if (rank > 0) return false;
  ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, SumsArrived(),
                                 cluster::NumBlocks() * sizeof(A));
  while (!ptx::mbarrier_try_wait_parity(ptx::sem_acquire, ptx::scope_cluster, SumsArrived(), 0)) {
  }
  sum = of_block[0];
  for (unsigned block = 1; block < cluster::NumBlocks(); ++block) sum += of_block[block];
  return true;
#else
  return threadIdx.x == 0;
#endif
}

template <typename Call>
struct PartialSums {
  Call call;
  uint32_t splits;
  const void* partials;
};

// A thread has the first number of reads in flight; blocks have the second number of threads if
// partial sums are many.
inline constexpr uint32_t kCombinedAhead = 16;
inline constexpr int kManyCombining = 1024;

// Each block adds up the partial sums of one batch entry.
template <typename A, int kBlockThreads, typename Call>
__global__ void __launch_bounds__(kBlockThreads)
    CombineSumsKernel(const __grid_constant__ PartialSums<Call> p) {
  const A* partials = static_cast<const A*>(p.partials) + int64_t{blockIdx.x} * p.splits;
  A sum = 0;
  // All reads are in flight together, which a loop with a condition per read would prevent.
  constexpr uint32_t kAhead = kCombinedAhead;
  for (uint32_t begin = threadIdx.x; begin < p.splits; begin += kAhead * kBlockThreads) {
    A ahead[kAhead];
#pragma unroll
    for (uint32_t k = 0; k < kAhead; ++k) {
      const uint32_t i = begin + k * kBlockThreads;
      ahead[k] = i < p.splits ? partials[i] : A(0);
    }
    sum += SumOf(ahead);
  }
  sum = SumOverBlock<kBlockThreads>(sum);
  if (threadIdx.x == 0) {
    static_cast<A*>(p.call.sum)[p.call.batch.AllOffsets(blockIdx.x)[Call::kSum]] = sum;
  }
}

// CombineSums computes the sum of a call from the partial sums (entries, splits) of its blocks,
// which have type A.
template <typename A, typename Call>
cudaError_t CombineSums(cudaStream_t stream, const Call& call, int64_t splits,
                        const void* partials) {
  const PartialSums<Call> sums{call, static_cast<uint32_t>(splits), partials};
  const auto launch = [&](auto threads) {
    return jaxops::cuda::Launch(CombineSumsKernel<A, threads.value, Call>, call.batch.size(),
                                threads.value, 0, stream, sums);
  };
  return splits > int64_t{kCombinedAhead} * kThreads
             ? launch(std::integral_constant<int, kManyCombining>())
             : launch(std::integral_constant<int, kThreads>());
}

}  // namespace jaxops::focal_loss::cuda

#endif  // JAXOPS_CUDA_FOCAL_LOSS_SUM_CUH_
