// What the forward and the backward kernels of the lightweight convolution share: how a stretch of
// the sequence is brought into shared memory in either data format.
//
// NTC: a warp is 32 neighbouring channels (pairs of them for 2-byte types) and each thread owns a
// run of time steps, so that rows are read and written 128 bytes at a time. With dilation d the
// sequence falls apart into d interleaved phases that never meet; a tile holds steps of one phase,
// which makes dilation a row stride and nothing else.
//
// NCT: a thread owns kRun neighbouring time steps of one channel, a row of threads one channel.
// Shared memory is skewed by one word in every kRun, so that threads kRun words apart hit different
// banks. It holds the accumulation type: its elements are converted once, though read by many taps.
#ifndef JAXOPS_CUDA_LIGHTWEIGHT_CONV_CUH_
#define JAXOPS_CUDA_LIGHTWEIGHT_CONV_CUH_

#include <cuda_pipeline.h>

#include <algorithm>

#include "common/lightweight_conv.h"
#include "cuda/numeric.cuh"

namespace jaxops::lightweight_conv::cuda {

using jaxops::cuda::Accumulator;
using jaxops::cuda::DispatchBool;
using jaxops::cuda::DispatchFloat;
using jaxops::cuda::LoadAs;
using jaxops::cuda::LoadPack;
using jaxops::cuda::Narrow;
using jaxops::cuda::Pack;
using jaxops::cuda::StoreAs;
using jaxops::cuda::Widen;

inline constexpr int kWarp = 32;

// --- NTC -----------------------------------------------------------------------------------------

inline constexpr int kNtcWarps = 8;
inline constexpr int kNtcThreads = kNtcWarps * kWarp;

// Neighbouring channels of one thread: at least four bytes.
template <typename T>
inline constexpr int kLaneChannels = sizeof(T) == 2 ? 2 : 1;

template <typename T>
inline constexpr int kBlockChannels = kWarp * kLaneChannels<T>;

// The number of steps t < time with t % dilation == phase.
__host__ __device__ inline int64_t PhaseSteps(int64_t time, int64_t dilation, int64_t phase) {
  return (time - phase + dilation - 1) / dilation;
}

// Copies `rows` rows of kBlockChannels channels of a (time, channels) array into shared memory. Row
// i is time step first + i * stride, zero outside [0, time). The copy is asynchronous: commit it.
template <typename T, bool kAligned>
__device__ __forceinline__ void StageRows(T* shared, const T* array, int64_t first, int64_t stride,
                                          int rows, int64_t time, int64_t channels,
                                          int64_t first_channel) {
  constexpr int kChannels = kBlockChannels<T>;
  if constexpr (kAligned) {
    constexpr int kPackElements = 16 / sizeof(T);
    constexpr int kPacks = kChannels / kPackElements;
    for (int i = threadIdx.x; i < rows * kPacks; i += kNtcThreads) {
      const int row = i / kPacks;
      const int channel = (i % kPacks) * kPackElements;
      const int64_t t = first + row * stride;
      const bool inside = t >= 0 && t < time && first_channel + channel < channels;
      const T* source = inside ? array + t * channels + first_channel + channel : array;
      __pipeline_memcpy_async(shared + row * kChannels + channel, source, 16, inside ? 0 : 16);
    }
  } else {
    for (int i = threadIdx.x; i < rows * kChannels; i += kNtcThreads) {
      const int row = i / kChannels;
      const int channel = i % kChannels;
      const int64_t t = first + row * stride;
      const bool inside = t >= 0 && t < time && first_channel + channel < channels;
      shared[i] = inside ? array[t * channels + first_channel + channel] : T{};
    }
  }
}

// One thread's channels of a staged row.
template <typename T>
__device__ __forceinline__ void ReadRow(Accumulator<T> (&values)[kLaneChannels<T>], const T* shared,
                                        int row) {
  const auto pack = LoadPack<kLaneChannels<T>>(shared + row * kBlockChannels<T> +
                                               (threadIdx.x % kWarp) * kLaneChannels<T>);
#pragma unroll
  for (int v = 0; v < kLaneChannels<T>; ++v) values[v] = Widen(pack.values[v]);
}

// Writes one thread's channels of a row; kAligned promises that they are all inside.
template <typename T, bool kAligned>
__device__ __forceinline__ void WriteRow(T* row, const Accumulator<T> (&values)[kLaneChannels<T>],
                                         int64_t channel, int64_t channels) {
  if constexpr (kAligned) {
    if (channel >= channels) return;
    Pack<T, kLaneChannels<T>> pack;
#pragma unroll
    for (int v = 0; v < kLaneChannels<T>; ++v) pack.values[v] = Narrow<T>(values[v]);
    *reinterpret_cast<Pack<T, kLaneChannels<T>>*>(row + channel) = pack;
  } else {
#pragma unroll
    for (int v = 0; v < kLaneChannels<T>; ++v) {
      if (channel + v < channels) row[channel + v] = Narrow<T>(values[v]);
    }
  }
}

// --- NCT -----------------------------------------------------------------------------------------

inline constexpr int kNctThreads = 128;
inline constexpr int kRun = 8;  // neighbouring time steps of one thread

__host__ __device__ constexpr int Skew(int position) { return position + position / kRun; }

// How the threads of a block are dealt out over channels and time.
struct NctTile {
  int threads_per_row;  // a power of two, 16 to kNctThreads

  explicit NctTile(int64_t time) : threads_per_row(16) {
    while (threads_per_row < kNctThreads && threads_per_row * kRun < time) threads_per_row *= 2;
  }
  __host__ __device__ int rows() const { return kNctThreads / threads_per_row; }
  __host__ __device__ int steps() const { return threads_per_row * kRun; }
};

// Copies `length` steps from `first` of each of the block's channels into skewed shared memory,
// zero outside [0, time).
template <typename T, bool kAligned>
__device__ __forceinline__ void StageColumns(Accumulator<T>* shared, int pitch, const T* array,
                                             int64_t first, int length, const NctTile& tile,
                                             int64_t time, int64_t channels,
                                             int64_t first_channel) {
  constexpr int kPackElements = kAligned ? 16 / sizeof(T) : 1;
  // Packs start at multiples of their size in the array, so the first may begin before `first`.
  const int before = static_cast<int>((first % kPackElements + kPackElements) % kPackElements);
  const int packs = (before + length + kPackElements - 1) / kPackElements;
  for (int i = threadIdx.x; i < tile.rows() * packs; i += kNctThreads) {
    const int row = i / packs;
    const int start = (i - row * packs) * kPackElements - before;
    const int64_t t = first + start;
    const int64_t channel = first_channel + row;
    Pack<T, kPackElements> pack = {};
    if (t >= 0 && t < time && channel < channels) {
      pack = LoadPack<kPackElements>(array + channel * time + t);
    }
    Accumulator<T>* out = shared + row * pitch;
#pragma unroll
    for (int e = 0; e < kPackElements; ++e) {
      const int position = start + e;
      if (position >= 0 && position < length) out[Skew(position)] = Widen(pack.values[e]);
    }
  }
}

// A thread's own run of steps straight from the array, zero outside.
template <typename T, bool kAligned>
__device__ __forceinline__ void ReadRun(Accumulator<T> (&values)[kRun], const T* row, int64_t t,
                                        int64_t time) {
  if constexpr (kAligned) {
    constexpr int kPackElements = 16 / sizeof(T);
#pragma unroll
    for (int p = 0; p < kRun; p += kPackElements) {
      Pack<T, kPackElements> pack = {};
      if (t + p < time) pack = LoadPack<kPackElements>(row + t + p);
#pragma unroll
      for (int e = 0; e < kPackElements; ++e) values[p + e] = Widen(pack.values[e]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRun; ++i) values[i] = t + i < time ? Widen(row[t + i]) : 0;
  }
}

template <typename T, bool kAligned>
__device__ __forceinline__ void WriteRun(T* row, const Accumulator<T> (&values)[kRun], int64_t t,
                                         int64_t time) {
  if constexpr (kAligned) {
    constexpr int kPackElements = 16 / sizeof(T);
#pragma unroll
    for (int p = 0; p < kRun; p += kPackElements) {
      if (t + p >= time) return;
      Pack<T, kPackElements> pack;
#pragma unroll
      for (int e = 0; e < kPackElements; ++e) pack.values[e] = Narrow<T>(values[p + e]);
      *reinterpret_cast<Pack<T, kPackElements>*>(row + t + p) = pack;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if (t + i < time) row[t + i] = Narrow<T>(values[i]);
    }
  }
}

// --- host ----------------------------------------------------------------------------------------

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Whether rows of the array's fastest dimension can be read 16 bytes at a time.
inline bool RowsAligned(int64_t row_elements, DType dtype) {
  return row_elements * jaxops::cuda::SizeOf(dtype) % 16 == 0;
}

// Lets a kernel use `bytes` of dynamic shared memory and launches it.
template <typename Params>
cudaError_t Launch(void (*kernel)(Params), int64_t blocks, int threads, size_t bytes,
                   cudaStream_t stream, const Params& params) {
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (bytes > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (error != cudaSuccess) return error;
  }
  kernel<<<static_cast<unsigned>(blocks), threads, bytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace jaxops::lightweight_conv::cuda

#endif  // JAXOPS_CUDA_LIGHTWEIGHT_CONV_CUH_
