// Code that finishes and writes the sums of the kernels of convolution, and adds parts of them.
#ifndef JAXOPS_CUDA_CONV_RESULTS_CUH_
#define JAXOPS_CUDA_CONV_RESULTS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/conv.h"
#include "cuda/common/activation.cuh"
#include "cuda/common/numeric.cuh"

namespace jaxops::conv::cuda {

// Applies the epilogue to sums of two rows and kColumns columns. Each of four neighbouring lanes
// has two columns in eight or, with kDealt, the columns that StoreDealt writes.
template <int kColumns, bool kDealt = false>
__device__ void Finish(const Epilogue& epilogue, float (&sums)[kColumns / 2], int64_t output,
                       int left) {
  if (epilogue.bias) {
    const float* of_all = static_cast<const float*>(epilogue.bias);
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = kDealt ? 8 * (j / 4 * 4 + lane) + 4 * i + j % 4 : 8 * j + 2 * lane + i;
        const float bias = column < left ? of_all[output + column] : 0;
        sums[4 * j + i] += bias;
        sums[4 * j + 2 + i] += bias;
      }
    }
  }
  jaxops::cuda::Activate(sums, epilogue.activation);
}

// Applies the epilogue to sums of neighbouring outputs, of which the first `left` exist.
template <typename Acc, int kCount>
__device__ __forceinline__ void Finish(const Epilogue& epilogue, int64_t output, int left,
                                       Acc (&sums)[kCount]) {
  if (epilogue.bias) {
    const Acc* bias = static_cast<const Acc*>(epilogue.bias) + output;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < left) sums[i] += bias[i];
    }
  }
  jaxops::cuda::Activate(sums, epilogue.activation);
}

// Applies the epilogue to several pixels. The usual call has no epilogue, and one branch skips all
// pixels then.
template <typename Acc, int kPixels, int kCount>
__device__ __forceinline__ void Finish(const Epilogue& epilogue, int64_t output, int left,
                                       Acc (&sums)[kPixels][kCount]) {
  if (!epilogue.bias && epilogue.activation == Activation::kNone) return;
#pragma unroll
  for (int i = 0; i < kPixels; ++i) Finish(epilogue, output, left, sums[i]);
}

template <typename T>
__device__ uint32_t PackPair(float a, float b) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// Writes a row of sums of which each of four neighbouring lanes has two columns in eight. For
// full-width accesses these lanes first exchange values, so that each lane has eight columns of
// every 32.
template <typename T, int kColumns>
__device__ void StoreRow(const float (&sums)[kColumns / 2], int half, T* to, int left) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < kColumns / 8; j += 4) {
    uint32_t v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = PackPair<T>(sums[4 * (j + i) + 2 * half], sums[4 * (j + i) + 2 * half + 1]);
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const uint32_t given = __shfl_xor_sync(~0u, lane & 1 ? v[i] : v[i + 1], 1);
      (lane & 1 ? v[i] : v[i + 1]) = given;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t given = __shfl_xor_sync(~0u, lane & 2 ? v[i] : v[i + 2], 2);
      (lane & 2 ? v[i] : v[i + 2]) = given;
    }
    const int column = 8 * (j + lane);
    if (to && column < left) *reinterpret_cast<uint4*>(to + column) = {v[0], v[1], v[2], v[3]};
  }
}

template <int kColumns>
__device__ void StoreRow(const float (&sums)[kColumns / 2], int half, float* to, int left) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const int column = 8 * j + 2 * lane;
    if (to && column < left) {
      *reinterpret_cast<float2*>(to + column) = {sums[4 * j + 2 * half],
                                                 sums[4 * j + 2 * half + 1]};
    }
  }
}

// Writes such a row in full-width accesses: neighbouring lanes exchange values, so that each lane
// has four columns of every 16.
template <int kColumns>
__device__ void StoreQuads(const float (&sums)[kColumns / 2], int half, float* to, int left) {
  const bool is_odd = threadIdx.x % 2;
#pragma unroll
  for (int j = 0; j < kColumns / 8; j += 2) {
    const float* first = sums + 4 * j + 2 * half;
    const float* second = first + 4;
    const float2 given = {__shfl_xor_sync(~0u, is_odd ? first[0] : second[0], 1),
                          __shfl_xor_sync(~0u, is_odd ? first[1] : second[1], 1)};
    const int column = 8 * (j + is_odd) + 4 * (threadIdx.x % 4 / 2);
    if (to && column < left) {
      *reinterpret_cast<float4*>(to + column) = {
          is_odd ? given.x : first[0], is_odd ? given.y : first[1], is_odd ? second[0] : given.x,
          is_odd ? second[1] : given.y};
    }
  }
}

__device__ inline float4 Add(const float4& a, const float4& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

template <typename T>
__device__ T Add(T a, T b) {
  return a + b;
}

template <typename Out>
__device__ void Store(Out* to, const float4& v) {
  if constexpr (std::is_same_v<Out, float>) {
    *reinterpret_cast<float4*>(to) = v;
  } else {
    *reinterpret_cast<uint2*>(to) = {PackPair<Out>(v.x, v.y), PackPair<Out>(v.z, v.w)};
  }
}

template <typename Out>
__device__ void Store(Out* to, jaxops::cuda::Accumulator<Out> v) {
  *to = jaxops::cuda::Narrow<Out>(v);
}

// Code that adds parts of a result, one entry or four a thread, always in the same order. With many
// parts the threads of a column of the block share the parts, each thread adds some of them, and
// one thread adds these sums.
constexpr int kAddThreads = 256;

// Returns the sum that the thread in the first row of a column of the block writes at `at`.
template <typename In>
__device__ __forceinline__ In SumOfParts(const In* __restrict__ from, int64_t at, int64_t count,
                                         int parts) {
  __shared__ In sums[kAddThreads];
  In sum{};
  if (at < count) {
#pragma unroll 8
    for (int k = threadIdx.y; k < parts; k += blockDim.y) sum = Add(sum, from[k * count + at]);
  }
  if (blockDim.y > 1) {
    sums[threadIdx.y * blockDim.x + threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0) return sum;
    for (int y = 1; y < blockDim.y; ++y) sum = Add(sum, sums[y * blockDim.x + threadIdx.x]);
  }
  return sum;
}

// Tells whether any of these flags is set. All threads of a block call this function and get the
// same answer.
__device__ __forceinline__ bool AnyIsSet(const int* flags, int count) {
  const int threads = blockDim.x * blockDim.y;
  int any = 0;
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < count; i += threads) any |= flags[i];
  return __syncthreads_or(any);
}

}  // namespace jaxops::conv::cuda

#endif  // JAXOPS_CUDA_CONV_RESULTS_CUH_
