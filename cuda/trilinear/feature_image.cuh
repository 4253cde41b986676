// This header copies the features of a block's cells to shared memory, and their gradients from
// shared memory.
#ifndef JAXOPS_CUDA_TRILINEAR_FEATURE_IMAGE_CUH_
#define JAXOPS_CUDA_TRILINEAR_FEATURE_IMAGE_CUH_

#include <cuda_pipeline.h>

#include <cstdint>
#include <cuda/ptx>

#include "cuda/trilinear/cells.cuh"

namespace jaxops::trilinear::cuda {

namespace ptx = ::cuda::ptx;

// ImageCells says which cells a block has and how their features lie in shared memory.
struct ImageCells {
  int64_t first;
  int cells;
  int pitch;  // bytes between two cells in shared memory
  // Without one copy for all cells, each thread with `copies` copies the cell `own`.
  int own = 0;
  bool copies = false;
};

// FeatureImage copies the features of a block's cells to shared memory, and their gradients from
// there. A block has one FeatureImage, also in shared memory, and all of the block's threads call
// each function; a block may omit Fetch and Await, or Store and AwaitStore. On GPUs with bulk
// copies, one copy moves all cells if the cells are contiguous in both memories.
class FeatureImage {
 public:
  // Fetch starts the copies to shared memory. kDense says that the features of all cells are
  // contiguous.
  template <bool kDense, typename T>
  __device__ __forceinline__ void Fetch(const Call& call, const ImageCells& of, void* to) {
    const int cell_bytes = kCorners * static_cast<int>(call.width * sizeof(T));
    const auto* features = static_cast<const T*>(call.features);
    const auto features_of = [&](int cell) {
      return features + (kDense ? (of.first + cell) * kCorners * call.width
                                : call.cells.Offset(of.first + cell, Call::kFeatures));
    };
    const bool whole = kDense && of.pitch == cell_bytes;
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(&arrived_, 1);
      ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    }
    // One thread does both, but racecheck attributes the compiled code to several threads.
    __syncwarp();
    if (threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &arrived_,
                                     of.cells * cell_bytes);
      if (whole) {
        ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, to, features_of(0),
                           of.cells * cell_bytes, &arrived_);
      }
    }
    if (whole) return;
    __syncthreads();
    if (of.copies) {
      ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global,
                         static_cast<unsigned char*>(to) + of.own * of.pitch, features_of(of.own),
                         cell_bytes, &arrived_);
    }
#else
    const int vectors = cell_bytes / kVectorBytes;
#pragma unroll 4
    for (int i = threadIdx.x; i < of.cells * vectors; i += blockDim.x) {
      const int cell = whole ? 0 : i / vectors;
      const int vector = i - cell * vectors;
      __pipeline_memcpy_async(
          static_cast<unsigned char*>(to) + cell * of.pitch + vector * kVectorBytes,
          features_of(cell) + vector * kVectorElements<T>, kVectorBytes);
    }
    __pipeline_commit();
#endif
  }

  __device__ __forceinline__ void Await() {
#if __CUDA_ARCH__ >= 900
    __syncthreads();
    while (!ptx::mbarrier_try_wait_parity(&arrived_, 0)) {
    }
#else
    __pipeline_wait_prior(0);
    __syncthreads();
#endif
  }

  // Store starts the copies of the gradients, which the threads have written to shared memory.
  template <typename T>
  __device__ __forceinline__ void Store(const Call& call, const ImageCells& of, const void* from) {
    const int cell_bytes = kCorners * static_cast<int>(call.width * sizeof(T));
    auto* to = static_cast<unsigned char*>(call.dfeatures) + of.first * cell_bytes;
    const auto* image = static_cast<const unsigned char*>(from);
    const bool whole = of.pitch == cell_bytes;
#if __CUDA_ARCH__ >= 900
    ptx::fence_proxy_async(ptx::space_shared);
    __syncthreads();
    if (whole ? threadIdx.x == 0 : of.copies) {
      const int cell = whole ? 0 : of.own;
      ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, to + cell * cell_bytes,
                         image + cell * of.pitch, whole ? of.cells * cell_bytes : cell_bytes);
    }
    ptx::cp_async_bulk_commit_group();
#else
    constexpr int kVector = kVectorElements<T>;
    const int vectors = cell_bytes / kVectorBytes;
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < of.cells * vectors; i += blockDim.x) {
      const int cell = whole ? 0 : i / vectors;
      const auto* vector = image + cell * of.pitch + (i - cell * vectors) * kVectorBytes;
      StoreVector(reinterpret_cast<T*>(to + i * kVectorBytes),
                  LoadVector<kVector>(reinterpret_cast<const T*>(vector)));
    }
#endif
  }

  // AwaitStore waits until the copies have read shared memory, which must stay allocated until
  // then.
  __device__ __forceinline__ void AwaitStore() {
#if __CUDA_ARCH__ >= 900
    ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>());
#endif
  }

 private:
  uint64_t arrived_;
};

}  // namespace jaxops::trilinear::cuda

#endif  // JAXOPS_CUDA_TRILINEAR_FEATURE_IMAGE_CUH_
