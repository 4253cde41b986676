// Instructions of Hopper (sm_90a) that CCCL does not wrap: matrix products of a warpgroup, and
// shared memory as the bulk copies swizzle it.
#ifndef JAXOPS_CUDA_COMMON_HOPPER_CUH_
#define JAXOPS_CUDA_COMMON_HOPPER_CUH_

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cuda/ptx>
#include <type_traits>

#include "cuda/common/async_copy.cuh"
#include "cuda/common/warp_matrix.cuh"

// Only code for sm_90a itself has these instructions. Kernels are empty for other GPUs, and not
// launched there.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define JAXOPS_HAS_WGMMA 1
#else
#define JAXOPS_HAS_WGMMA 0
#endif

namespace jaxops::cuda::hopper {

namespace ptx = ::cuda::ptx;
using jaxops::cuda::LoadMatrices;
using jaxops::cuda::LoadTransposed;
using jaxops::cuda::SharedAddress;

// The maximum of shared memory of a block.
constexpr int kSharedBytes = 227 * 1024;

// Waits for the completion of the phase of a barrier with this parity.
__device__ inline void Wait(uint64_t* barrier, uint32_t parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// Waits until all threads of the cluster have arrived and see each other's writes.
__device__ inline void SyncCluster() {
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
}

// Loads entries at an address of shared memory of the block with this rank in the cluster.
__device__ inline float4 LoadOfBlock(uint32_t address, uint32_t rank) {
  float4 v;
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}\n"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(address), "r"(rank)
      : "memory");
  return v;
}

// Prefetches a map of bulk copies before the first copy needs it.
__device__ inline void PrefetchMap(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// GiveRegisters releases registers of this warpgroup; TakeRegisters takes registers that others
// released.
template <int kCount>
__device__ inline void GiveRegisters() {
#if JAXOPS_HAS_WGMMA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}
template <int kCount>
__device__ inline void TakeRegisters() {
#if JAXOPS_HAS_WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

// Rows of 32, 64 or 128 bytes as bulk copies swizzle them: the position of 16 bytes in a row
// depends on the address, in steps of 128 bytes.
struct Swizzle {
  uint32_t mask;

  __device__ static Swizzle OfRows(uint32_t row_bytes) { return {row_bytes / 16 - 1}; }

  // Returns the value that an exclusive or combines with the number of the 16 bytes within a row.
  __device__ uint32_t operator()(uint32_t row_address) const {
    return ((row_address >> 7) & mask) << 4;
  }
};

// --- products of a warpgroup ---------------------------------------------------------------------

// Describes a swizzled matrix in shared memory for products. `leading` and `stride` are the bytes
// between its parts. If rows lie along the sum, 8 rows are `stride` apart; if rows lie across it,
// 64 columns are `leading` apart, and 8 rows `stride`.
__device__ inline uint64_t MatrixDescriptor(uint32_t leading, uint32_t stride, uint32_t row_bytes) {
  const uint64_t layout = row_bytes == 128 ? 1 : row_bytes == 64 ? 2 : 3;
  return uint64_t{leading >> 4} << 16 | uint64_t{stride >> 4} << 32 | layout << 62;
}
__device__ inline uint64_t At(uint64_t descriptor, uint32_t address) {
  return descriptor | ((address & 0x3FFFF) >> 4);
}

__device__ inline void ProductsBegin() {
#if JAXOPS_HAS_WGMMA
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ inline void ProductsCommit() {
#if JAXOPS_HAS_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Waits until at most kGroups committed groups of products are in flight.
template <int kGroups>
__device__ inline void ProductsWait() {
#if JAXOPS_HAS_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
#endif
}

// clang-format off
#define JAXOPS_SUMS8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
  "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define JAXOPS_SUMS32(d, i) \
  JAXOPS_SUMS8(d, i), JAXOPS_SUMS8(d, i + 8), JAXOPS_SUMS8(d, i + 16), JAXOPS_SUMS8(d, i + 24)
#define JAXOPS_TEN(t) \
  "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define JAXOPS_SUMS4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define JAXOPS_FIRST4 "%0, %1, %2, %3"
#define JAXOPS_FIRST8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define JAXOPS_FIRST12 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11"
#define JAXOPS_FIRST16 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define JAXOPS_FIRST32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, " JAXOPS_TEN(1) JAXOPS_TEN(2) "%30, %31"
#define JAXOPS_FIRST64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, " JAXOPS_TEN(1) JAXOPS_TEN(2) JAXOPS_TEN(3) \
  JAXOPS_TEN(4) JAXOPS_TEN(5) "%60, %61, %62, %63"
#define JAXOPS_PRODUCT(shape, type, sums, a0, a1, a2, a3, b, adds, across, ...) \
  asm volatile( \
      "{\n.reg .pred p;\nsetp.ne.b32 p, " adds ", 0;\n" \
      "wgmma.mma_async.sync.aligned." shape ".f32." type "." type " {" sums "}, " \
      "{" a0 ", " a1 ", " a2 ", " a3 "}, " b ", p, 1, 1, " across ";\n}\n" \
      : __VA_ARGS__ \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_descriptor), "r"(add), \
        "n"(kAcross ? 1 : 0))
// JAXOPS_TF32_PRODUCT is the same for TF32, which allows no rows across the sum.
#define JAXOPS_TF32_PRODUCT(shape, sums, a0, a1, a2, a3, b, adds, ...) \
  asm volatile( \
      "{\n.reg .pred p;\nsetp.ne.b32 p, " adds ", 0;\n" \
      "wgmma.mma_async.sync.aligned." shape ".f32.tf32.tf32 {" sums "}, " \
      "{" a0 ", " a1 ", " a2 ", " a3 "}, " b ", p, 1, 1;\n}\n" \
      : __VA_ARGS__ \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_descriptor), "r"(add))
// clang-format on

// Computes sums (+)= a b for 64 rows, a step of 32 bytes and kColumns columns. `a` is in the
// registers of a warpgroup in the layout of LoadMatrices, and `b` in shared memory, with rows
// across the sum if kAcross. Products of float32 use only the upper bits, which TF32 has.
template <typename T, int kColumns, bool kAcross>
__device__ inline void Multiply(float (&sums)[kColumns / 2], const uint32_t (&a)[4],
                                uint64_t b_descriptor, int add) {
  static_assert(kColumns == 8 || kColumns == 16 || kColumns == 24 || kColumns == 32 ||
                kColumns == 64 || kColumns == 128);
#if JAXOPS_HAS_WGMMA
  if constexpr (std::is_same_v<T, float>) {
    static_assert(!kAcross && kColumns >= 32);
    if constexpr (kColumns == 32) {
      JAXOPS_TF32_PRODUCT("m64n32k8", JAXOPS_FIRST16, "%16", "%17", "%18", "%19", "%20", "%21",
                          JAXOPS_SUMS8(sums, 0), JAXOPS_SUMS8(sums, 8));
    } else if constexpr (kColumns == 64) {
      JAXOPS_TF32_PRODUCT("m64n64k8", JAXOPS_FIRST32, "%32", "%33", "%34", "%35", "%36", "%37",
                          JAXOPS_SUMS32(sums, 0));
    } else {
      JAXOPS_TF32_PRODUCT("m64n128k8", JAXOPS_FIRST64, "%64", "%65", "%66", "%67", "%68", "%69",
                          JAXOPS_SUMS32(sums, 0), JAXOPS_SUMS32(sums, 32));
    }
  } else if constexpr (kColumns == 8 && std::is_same_v<T, __half>) {
    JAXOPS_PRODUCT("m64n8k16", "f16", JAXOPS_FIRST4, "%4", "%5", "%6", "%7", "%8", "%9", "%10",
                   JAXOPS_SUMS4(sums, 0));
  } else if constexpr (kColumns == 8) {
    JAXOPS_PRODUCT("m64n8k16", "bf16", JAXOPS_FIRST4, "%4", "%5", "%6", "%7", "%8", "%9", "%10",
                   JAXOPS_SUMS4(sums, 0));
  } else if constexpr (kColumns == 16 && std::is_same_v<T, __half>) {
    JAXOPS_PRODUCT("m64n16k16", "f16", JAXOPS_FIRST8, "%8", "%9", "%10", "%11", "%12", "%13", "%14",
                   JAXOPS_SUMS8(sums, 0));
  } else if constexpr (kColumns == 16) {
    JAXOPS_PRODUCT("m64n16k16", "bf16", JAXOPS_FIRST8, "%8", "%9", "%10", "%11", "%12", "%13",
                   "%14", JAXOPS_SUMS8(sums, 0));
  } else if constexpr (kColumns == 24 && std::is_same_v<T, __half>) {
    JAXOPS_PRODUCT("m64n24k16", "f16", JAXOPS_FIRST12, "%12", "%13", "%14", "%15", "%16", "%17",
                   "%18", JAXOPS_SUMS8(sums, 0), JAXOPS_SUMS4(sums, 8));
  } else if constexpr (kColumns == 24) {
    JAXOPS_PRODUCT("m64n24k16", "bf16", JAXOPS_FIRST12, "%12", "%13", "%14", "%15", "%16", "%17",
                   "%18", JAXOPS_SUMS8(sums, 0), JAXOPS_SUMS4(sums, 8));
  } else if constexpr (kColumns == 32 && std::is_same_v<T, __half>) {
    JAXOPS_PRODUCT("m64n32k16", "f16", JAXOPS_FIRST16, "%16", "%17", "%18", "%19", "%20", "%21",
                   "%22", JAXOPS_SUMS8(sums, 0), JAXOPS_SUMS8(sums, 8));
  } else if constexpr (kColumns == 32) {
    JAXOPS_PRODUCT("m64n32k16", "bf16", JAXOPS_FIRST16, "%16", "%17", "%18", "%19", "%20", "%21",
                   "%22", JAXOPS_SUMS8(sums, 0), JAXOPS_SUMS8(sums, 8));
  } else if constexpr (kColumns == 64 && std::is_same_v<T, __half>) {
    JAXOPS_PRODUCT("m64n64k16", "f16", JAXOPS_FIRST32, "%32", "%33", "%34", "%35", "%36", "%37",
                   "%38", JAXOPS_SUMS32(sums, 0));
  } else if constexpr (kColumns == 64) {
    JAXOPS_PRODUCT("m64n64k16", "bf16", JAXOPS_FIRST32, "%32", "%33", "%34", "%35", "%36", "%37",
                   "%38", JAXOPS_SUMS32(sums, 0));
  } else if constexpr (std::is_same_v<T, __half>) {
    JAXOPS_PRODUCT("m64n128k16", "f16", JAXOPS_FIRST64, "%64", "%65", "%66", "%67", "%68", "%69",
                   "%70", JAXOPS_SUMS32(sums, 0), JAXOPS_SUMS32(sums, 32));
  } else {
    JAXOPS_PRODUCT("m64n128k16", "bf16", JAXOPS_FIRST64, "%64", "%65", "%66", "%67", "%68", "%69",
                   "%70", JAXOPS_SUMS32(sums, 0), JAXOPS_SUMS32(sums, 32));
  }
#endif
}

#undef JAXOPS_TF32_PRODUCT
#undef JAXOPS_PRODUCT
#undef JAXOPS_FIRST64
#undef JAXOPS_FIRST32
#undef JAXOPS_FIRST16
#undef JAXOPS_FIRST12
#undef JAXOPS_FIRST8
#undef JAXOPS_FIRST4
#undef JAXOPS_TEN
#undef JAXOPS_SUMS32
#undef JAXOPS_SUMS8
#undef JAXOPS_SUMS4

}  // namespace jaxops::cuda::hopper

#endif  // JAXOPS_CUDA_COMMON_HOPPER_CUH_
