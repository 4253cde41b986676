// This header holds the code that the forward and backward kernels of lightweight convolution
// share: which thread owns which elements, and the loads of a segment of the sequence into
// registers or shared memory in both data formats.
//
// NTC: neighbouring threads own neighbouring channels, and each thread a segment of time steps, so
// that rows are read and written whole. With dilation d the sequence consists of d independent
// interleaved phases; a tile holds steps of one phase, for which dilation is only a row stride.
//
// NCT: a thread owns neighbouring time steps of one channel, and a row of threads one channel.
//
// Memory bounds short filters (up to kShortTaps): while a kernel computes, its next inputs are in
// flight to registers or to a ring in shared memory. Arithmetic bounds long filters, unless tensor
// cores multiply them.
#ifndef JAXOPS_CUDA_LIGHTWEIGHT_CONV_FILTERS_CUH_
#define JAXOPS_CUDA_LIGHTWEIGHT_CONV_FILTERS_CUH_

#include <cuda_pipeline.h>

#include <algorithm>

#include "common/fast_divide.h"
#include "common/lightweight_conv.h"
#include "common/lightweight_conv_choice.h"
#include "cuda/common/launch.h"
#include "cuda/common/numeric.cuh"
#include "cuda/lightweight_conv/calls.h"

namespace jaxops::lightweight_conv::cuda {

using jaxops::cuda::Accumulator;
using jaxops::cuda::DispatchBool;
using jaxops::cuda::DispatchFloat;
using jaxops::cuda::kVectorElements;
using jaxops::cuda::Launch;
using jaxops::cuda::LoadRaw;
using jaxops::cuda::LoadRawIf;
using jaxops::cuda::LoadVector;
using jaxops::cuda::Narrow;
using jaxops::cuda::Raw;
using jaxops::cuda::StoreAs;
using jaxops::cuda::Vector;
using jaxops::cuda::Widen;
using jaxops::cuda::WidenAll;
using jaxops::cuda::WithElements;

// --- NTC -----------------------------------------------------------------------------------------

inline constexpr int kNtcThreads = 256;

// DivideByDilation divides by a dilation, which is nearly always 1, rounding up.
__host__ __device__ inline int DivideByDilation(int n, int dilation) {
  return dilation == 1 ? n : (n + dilation - 1) / dilation;
}

// PhaseSteps counts the steps t < time with t % dilation == phase.
__host__ __device__ inline int PhaseSteps(int time, int dilation, int phase) {
  return DivideByDilation(time - phase, dilation);
}

// LoadIf loads a vector from `address` if `inside`, and otherwise returns zeros. The load is
// unconditional, from an address that is always valid, so that neighbouring loads do not wait for
// each other's branches.
template <int kCount, typename T>
__device__ __forceinline__ Vector<T, kCount> LoadIf(bool inside, const T* address, const T* good) {
  const Vector<T, kCount> vec = LoadVector<kCount>(inside ? address : good);
  return inside ? vec : Vector<T, kCount>{};
}

// ReadSteps loads one thread's kV channels at the time steps first, first + stride, ..., of which
// the first `count` are needed: zero outside [0, time). Steps that are entirely inside, as nearly
// all are, skip the checks.
template <int kCount, int kV, typename T>
__device__ __forceinline__ void ReadSteps(Vector<T, kV> (&steps)[kCount], const T* column,
                                          int first, int stride, int count, int time,
                                          int64_t channels) {
  if (first >= 0 && first + (kCount - 1) * stride < time) {
    const T* address = column + first * channels;
    const int64_t advance = stride * channels;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      steps[i] = LoadVector<kV>(address);
      address += advance;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int t = first + i * stride;
      const bool inside = i < count && static_cast<unsigned>(t) < static_cast<unsigned>(time);
      steps[i] = LoadIf<kV>(inside, column + t * channels, column);
    }
  }
}

template <int kV, typename T>
__device__ __forceinline__ void WriteStep(T* column, const Accumulator<T> (&values)[kV], int t,
                                          int64_t channels) {
  Vector<T, kV> vec;
#pragma unroll
  for (int v = 0; v < kV; ++v) vec.values[v] = Narrow<T>(values[v]);
  *reinterpret_cast<Vector<T, kV>*>(column + t * channels) = vec;
}

// The threads of a short filter's block are distributed with lanes over channels and groups over
// time.
struct ShortNtcTile {
  int lane_bits;  // log2 of the threads along channels

  ShortNtcTile(int64_t channels, int per_thread) : lane_bits(0) {
    while (lane_bits < 5 && (int64_t{per_thread} << lane_bits) < channels) ++lane_bits;
  }
  __host__ __device__ int lanes() const { return 1 << lane_bits; }
  __host__ __device__ int groups() const { return kNtcThreads >> lane_bits; }
};

// In long filters a warp has 32 neighbouring channels, or pairs of channels for 2-byte types.
inline constexpr int kNtcWarps = kNtcThreads / kWarp;

template <typename T>
inline constexpr int kLaneChannels = sizeof(T) == 2 ? 2 : 1;

template <typename T>
inline constexpr int kBlockChannels = kWarp * kLaneChannels<T>;

// StageRows copies `rows` rows of kBlockChannels channels of a (time, channels) array to shared
// memory. Row i is time step first + i * stride, zero outside [0, time). The copy is asynchronous,
// and the caller commits it.
template <typename T, bool kAligned>
__device__ __forceinline__ void StageRows(T* shared, const T* array, int first, int stride,
                                          int rows, int time, int channels, int first_channel) {
  constexpr int kChannels = kBlockChannels<T>;
  if constexpr (kAligned) {
    constexpr int kVectors = kChannels / kVectorElements<T>;
    const int channel = threadIdx.x % kVectors * kVectorElements<T>;
    const bool wanted = first_channel + channel < channels;
    const T* column = array + first_channel + channel;
    for (int row = threadIdx.x / kVectors; row < rows; row += kNtcThreads / kVectors) {
      const int t = first + row * stride;
      const bool inside = wanted && static_cast<unsigned>(t) < static_cast<unsigned>(time);
      __pipeline_memcpy_async(shared + row * kChannels + channel,
                              inside ? column + int64_t{t} * channels : array, 16, inside ? 0 : 16);
    }
  } else {
    const int channel = threadIdx.x % kChannels;
    const bool wanted = first_channel + channel < channels;
    const T* column = array + first_channel + channel;
    for (int row = threadIdx.x / kChannels; row < rows; row += kNtcThreads / kChannels) {
      const int t = first + row * stride;
      const bool inside = wanted && static_cast<unsigned>(t) < static_cast<unsigned>(time);
      shared[row * kChannels + channel] = inside ? column[int64_t{t} * channels] : T{};
    }
  }
}

// ReadRow reads one thread's channels of a staged row.
template <typename T>
__device__ __forceinline__ void ReadRow(Accumulator<T> (&values)[kLaneChannels<T>], const T* shared,
                                        int row) {
  const auto vec = LoadVector<kLaneChannels<T>>(shared + row * kBlockChannels<T> +
                                                (threadIdx.x % kWarp) * kLaneChannels<T>);
#pragma unroll
  for (int v = 0; v < kLaneChannels<T>; ++v) values[v] = Widen(vec.values[v]);
}

// --- NCT -----------------------------------------------------------------------------------------

inline constexpr int kNctMaxRows = kNctThreads / kNctMinRowThreads;

// The threads of a block are distributed over channels and time.
struct NctTile {
  int row_bits;  // log2 of the threads that share a channel

  // Kernels that add the values of a row's threads need kNctMinRowThreads of them.
  static constexpr int kMinSummedRowBits = 4;
  static_assert(kNctMinRowThreads == 1 << kMinSummedRowBits);

  NctTile(int64_t time, int per_thread, int min_row_bits = kMinSummedRowBits)
      : row_bits(min_row_bits) {
    while ((1 << row_bits) < kNctThreads && (int64_t{per_thread} << row_bits) < time) ++row_bits;
  }
  __host__ __device__ int threads_per_row() const { return 1 << row_bits; }
  __host__ __device__ int rows() const { return kNctThreads >> row_bits; }
};

// The value marks rows that do not start at multiples of 16 bytes, in place of a shift known at
// compile time.
inline constexpr int kUnaligned = -1;

// Load loads steps first to first + kCount of a row of whole vectors, zero outside [0, time),
// without conversion. The shift, first modulo the size of a vector, is the same for all threads and
// known at compile time.
template <typename T, int kCount, int kShift>
class Window {
 public:
  __device__ __forceinline__ void Load(const T* row, int first, int time) {
    const int base = first - kShift;
    if (base >= 0 && base + kVectors * kVector <= time) {
#pragma unroll
      for (int p = 0; p < kVectors; ++p)
        vectors_[p] = LoadVector<kVector>(row + base + p * kVector);
    } else {
#pragma unroll
      for (int p = 0; p < kVectors; ++p) {
        const int t = base + p * kVector;
        const bool inside = static_cast<unsigned>(t) < static_cast<unsigned>(time);
        vectors_[p] = LoadIf<kVector>(inside, row + t, row);
      }
    }
  }

  __device__ __forceinline__ Accumulator<T> operator[](int i) const {
    return Widen(vectors_[(i + kShift) / kVector].values[(i + kShift) % kVector]);
  }

 private:
  static constexpr int kVector = kVectorElements<T>;
  static constexpr int kVectors = (kShift + kCount + kVector - 1) / kVector;
  Vector<T, kVector> vectors_[kVectors];
};

// A thread of a short filter has this number of segments in flight.
inline constexpr int kFlight = 2;

// WriteSteps writes kCount steps from t on, a multiple of a vector; steps beyond the end are not
// written.
template <typename T, int kCount, bool kAligned>
__device__ __forceinline__ void WriteSteps(T* row, const Accumulator<T> (&values)[kCount], int t,
                                           int time) {
  if constexpr (kAligned) {
    constexpr int kVector = kVectorElements<T>;
#pragma unroll
    for (int p = 0; p < kCount; p += kVector) {
      if (t + p >= time) return;
      Vector<T, kVector> vec;
#pragma unroll
      for (int e = 0; e < kVector; ++e) vec.values[e] = Narrow<T>(values[p + e]);
      *reinterpret_cast<Vector<T, kVector>*>(row + t + p) = vec;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (t + i < time) row[t + i] = Narrow<T>(values[i]);
    }
  }
}

// In long filters a thread owns kThreadSteps neighbouring steps. Shared memory holds the
// accumulation type, because each element is converted once but read by many taps, with one element
// of padding after every kThreadSteps, so that threads access different banks.
inline constexpr int kThreadSteps = 8;

__host__ __device__ constexpr int Skew(int position) { return position + position / kThreadSteps; }

// StageColumns copies `length` steps from `first` on of each of the block's channels, zero outside
// [0, time).
template <typename T, bool kAligned>
__device__ __forceinline__ void StageColumns(Accumulator<T>* shared, int pitch, const T* array,
                                             int first, int length, const NctTile& tile, int time,
                                             int channels, int first_channel) {
  constexpr int kVector = kAligned ? kVectorElements<T> : 1;
  const int row = threadIdx.x >> tile.row_bits;
  const int lane = threadIdx.x & (tile.threads_per_row() - 1);
  const int channel = first_channel + row;
  const T* source = array + int64_t{channel} * time;
  Accumulator<T>* out = shared + row * pitch;
  // Vectors start at multiples of their size in the array, so the first may begin before `first`.
  const int before = first & (kVector - 1);
  for (int start = lane * kVector - before; start < length;
       start += tile.threads_per_row() * kVector) {
    const int t = first + start;
    Vector<T, kVector> vec = {};
    if (channel < channels && static_cast<unsigned>(t) < static_cast<unsigned>(time)) {
      vec = LoadVector<kVector>(source + t);
    }
    if (start >= 0 && start + kVector <= length) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) out[Skew(start + e)] = Widen(vec.values[e]);
    } else {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        const int position = start + e;
        if (position >= 0 && position < length) out[Skew(position)] = Widen(vec.values[e]);
      }
    }
  }
}

// FoldLanes adds kCount values of each of 2 * kDistance neighbouring lanes, a power of two of both.
// In every step, lanes exchange half of their values, so that a step costs half of the one before;
// at the end this lane has the sums of kFolded values, from `first` on.
template <int kCount, int kDistance>
inline constexpr int kFolded = std::max(1, kCount / (2 * kDistance));

template <int kCount, int kDistance, typename Acc, int kSize>
__device__ __forceinline__ void FoldLanes(Acc (&values)[kSize], int& first) {
  const bool upper = threadIdx.x & kDistance;
  if constexpr (kCount > 1) {
    constexpr int kKept = kCount / 2;
    if (upper) first += kKept;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const Acc kept = upper ? values[i + kKept] : values[i];
      const Acc given = upper ? values[i] : values[i + kKept];
      values[i] = kept + __shfl_xor_sync(0xffffffff, given, kDistance);
    }
    if constexpr (kDistance > 1) FoldLanes<kKept, kDistance / 2>(values, first);
  } else {
    values[0] += __shfl_xor_sync(0xffffffff, values[0], kDistance);
    if constexpr (kDistance > 1) FoldLanes<1, kDistance / 2>(values, first);
  }
}

// ReduceRows sums each thread's values over the 2^row_bits threads of a row, in an order that
// depends only on their number; total(i, row, sum) receives each sum.
template <int kCount, typename Acc, typename Total>
__device__ __forceinline__ void ReduceRows(const Acc (&thread_values)[kCount][1], int row_bits,
                                           Total&& total) {
  constexpr int kHalf = kWarp / 2;
  static_assert(kHalf == kNctMinRowThreads);
  const int row_threads = 1 << row_bits;
  __shared__ Acc shared[kNctMaxRows * kCount];
  Acc values[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = thread_values[i][0];
  int first = 0;
  FoldLanes<kCount, kHalf / 2>(values, first);
  // A row is half a warp, or both halves of a warp belong to one row.
  const bool whole = row_threads >= kWarp;
  const int part = threadIdx.x / (whole ? kWarp : kHalf);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kFolded<kCount, kHalf / 2>; ++i) {
    const Acc other = __shfl_xor_sync(0xffffffff, values[i], kHalf);
    shared[part * kCount + first + i] = whole ? values[i] + other : values[i];
  }
  __syncthreads();
  const int parts = CeilDiv(row_threads, kWarp);
  for (int i = threadIdx.x; i < kCount * (kNctThreads >> row_bits); i += kNctThreads) {
    const int row = i / kCount;
    const int value = i % kCount;
    Acc sum = 0;
    for (int p = 0; p < parts; ++p) sum += shared[(row * parts + p) * kCount + value];
    total(value, row, sum);
  }
}

// --- host ----------------------------------------------------------------------------------------

// WindowShift returns the shift within a vector of windows that begin `padding` steps before a
// vector, or kUnaligned for rows that are not whole vectors.
template <typename T>
int WindowShift(int64_t time, DType dtype, int64_t padding) {
  if (!RowsAligned(time, dtype, 16)) return kUnaligned;
  constexpr int kVector = kVectorElements<T>;
  return static_cast<int>((kVector - padding % kVector) % kVector);
}

// DispatchShift calls `function` with the shift of rows of whole vectors as a constant.
template <typename T, typename Function>
cudaError_t DispatchShift(int shift, Function&& function) {
  cudaError_t error = cudaErrorInvalidValue;
  const auto call_if = [&](auto candidate) {
    if (shift == candidate.value) error = function(candidate);
  };
  [&]<int... kShifts>(std::integer_sequence<int, kShifts...>) {
    (call_if(std::integral_constant<int, kShifts>{}), ...);
  }(std::make_integer_sequence<int, kVectorElements<T>>{});
  return error;
}

// DispatchTaps calls `function` with a number of taps from kMin to kMax as a constant.
template <int kMin, int kMax, typename Function>
cudaError_t DispatchTaps(int64_t taps, Function&& function) {
  cudaError_t error = cudaErrorInvalidValue;
  const auto call_if = [&](auto candidate) {
    if (taps == candidate.value) error = function(candidate);
  };
  [&]<int... kMore>(std::integer_sequence<int, kMore...>) {
    (call_if(std::integral_constant<int, kMin + kMore>{}), ...);
  }(std::make_integer_sequence<int, kMax - kMin + 1>{});
  return error;
}

// PartialSums describes the sums over time that the blocks of a backward kernel write: (kept,
// splits, taps + 1, channels), and the last tap is the bias. If vectors of neighbouring channels
// are summed together, the row of a tap is shorter by that factor, and ends early.
struct PartialSums {
  void* sums;
  int64_t splits;
  int channels = 1;  // of a sum
};

// AddPartialSums launches the kernel that adds the partial sums.
cudaError_t AddPartialSums(cudaStream_t stream, const Backward& call, const PartialSums& partials);

}  // namespace jaxops::lightweight_conv::cuda

#endif  // JAXOPS_CUDA_LIGHTWEIGHT_CONV_FILTERS_CUH_
