// The cluster of blocks that a thread belongs to, by the built-in functions that
// cooperative_groups.h wraps: a file with that header alone takes nvcc 13.0 8.4 s of CPU time, an
// empty one 1.8 s.
#ifndef JAXOPS_CUDA_COMMON_CLUSTER_CUH_
#define JAXOPS_CUDA_COMMON_CLUSTER_CUH_

#if __CUDA_ARCH__ >= 900

namespace jaxops::cuda::cluster {

__device__ __forceinline__ unsigned NumBlocks() { return __clusterSizeInBlocks(); }

// The position of this block in its cluster.
__device__ __forceinline__ unsigned BlockRank() { return __clusterRelativeBlockRank(); }

// The address of what `shared` is in this block, in the shared memory of the block with this rank.
template <typename T>
__device__ __forceinline__ T* MapSharedRank(T* shared, int rank) {
  return static_cast<T*>(__cluster_map_shared_rank(shared, rank));
}

// Wait returns when all threads of the cluster have called Arrive. Their writes before that are
// visible then.
__device__ __forceinline__ void Arrive() { __cluster_barrier_arrive(); }
__device__ __forceinline__ void Wait() { __cluster_barrier_wait(); }

__device__ __forceinline__ void Sync() {
  Arrive();
  Wait();
}

}  // namespace jaxops::cuda::cluster

#endif  // __CUDA_ARCH__ >= 900

#endif  // JAXOPS_CUDA_COMMON_CLUSTER_CUH_
