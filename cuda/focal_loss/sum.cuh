// Sums of a loss: over the threads of a block, over the blocks of a cluster, and by a second kernel
// over the blocks of longer ones. Their order is always the same.
#ifndef JAXOPS_CUDA_FOCAL_LOSS_SUM_CUH_
#define JAXOPS_CUDA_FOCAL_LOSS_SUM_CUH_

#include <cooperative_groups.h>

#include <cuda/ptx>

#include "cuda/focal_loss/math.cuh"

namespace jaxops::focal_loss::cuda {

// The blocks of a cluster, at most. A batch entry that has no more blocks sums them up itself,
// where blocks share memory; a second kernel sums more.
inline constexpr int64_t kClusterBlocks = 8;

template <typename A, int kCount>
__device__ __forceinline__ A SumOf(const A (&values)[kCount]) {
  A sum = values[0];
#pragma unroll
  for (int k = 1; k < kCount; ++k) sum += values[k];
  return sum;
}

// A thread's value summed over the block, by all of its threads; for the first one to use.
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

// The same for blocks of any number of warps.
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
// The barrier at which the first block of a cluster learns that the sums of the others have arrived
// in its shared memory.
__device__ __forceinline__ uint64_t* SumsArrived() {
  __shared__ uint64_t arrived;
  return &arrived;
}
#endif

// Tells the other blocks of the cluster that this one has begun, and can be sent their sums.
__device__ __forceinline__ void ArriveInCluster() {
#if __CUDA_ARCH__ >= 900
  namespace ptx = ::cuda::ptx;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(SumsArrived(), 1);
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
  }
  // Nothing but the barrier has to be seen by others, which the fence has seen to: an arrival that
  // released all that was written would wait for the memory of the device.
  ptx::barrier_cluster_arrive(ptx::sem_relaxed);
#endif
}

// Adds up what the first threads of the blocks of a cluster have, for that of the first block;
// after ArriveInCluster. Returns whether this thread is that one.
template <typename A>
__device__ __forceinline__ bool SumOverCluster(A& sum) {
#if __CUDA_ARCH__ >= 900
  namespace ptx = ::cuda::ptx;
  __shared__ A of_block[kClusterBlocks];
  const auto cluster = cooperative_groups::this_cluster();
  const unsigned rank = cluster.block_rank();
  // A block that was not launched in a cluster cannot send itself anything.
  if (cluster.num_blocks() == 1) return threadIdx.x == 0;
  ptx::barrier_cluster_wait(ptx::sem_acquire);
  if (threadIdx.x > 0) return false;
  ptx::st_async(cluster.map_shared_rank(of_block + rank, 0), sum,
                cluster.map_shared_rank(SumsArrived(), 0));
  if (rank > 0) return false;
  ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, SumsArrived(),
                                 cluster.num_blocks() * sizeof(A));
  while (!ptx::mbarrier_try_wait_parity(ptx::sem_acquire, ptx::scope_cluster, SumsArrived(), 0)) {
  }
  sum = of_block[0];
  for (unsigned block = 1; block < cluster.num_blocks(); ++block) sum += of_block[block];
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

// Partial sums that a thread reads at a time, and the threads of a block where they are many.
inline constexpr uint32_t kCombinedAhead = 16;
inline constexpr int kManyCombining = 1024;

// Adds up the partial sums of one batch entry a block.
template <typename A, int kBlockThreads, typename Call>
__global__ void __launch_bounds__(kBlockThreads)
    CombineSumsKernel(const __grid_constant__ PartialSums<Call> p) {
  const A* partials = static_cast<const A*>(p.partials) + int64_t{blockIdx.x} * p.splits;
  A sum = 0;
  // All reads are in flight together, which a loop with a condition for each would prevent.
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

// Makes the sum of a call of the partial sums of its blocks: (entries, splits), of which A is the
// type.
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
