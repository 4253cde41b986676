// This kernel computes the softmax focal loss of rows of few logits.
//
// A thread takes a row. A warp copies its rows, which are contiguous in memory, to shared memory by
// vectors while it evaluates the previous rows; gradients are written through shared memory as
// well.
#include <cuda_pipeline.h>

#include "cuda/focal_loss/launch.h"
#include "cuda/focal_loss/softmax/rows.cuh"

namespace jaxops::focal_loss::cuda {
namespace {

constexpr int kWarps = kThreads / kWarp;
constexpr int kMaxClasses = 8;
// A block has this number of steps.
constexpr int64_t kSumSteps = 8;
constexpr int64_t kGradientSteps = 2;
// A multiprocessor has this number of blocks.
template <typename A>
constexpr int kResident = sizeof(A) == 8 ? 3 : 5;

// StageRows copies `count` elements from an array to shared memory, asynchronously, with the same
// misalignment to 16 bytes in both.
template <typename T>
__device__ __forceinline__ void StageRows(T* shared, const T* array, int count) {
  constexpr int kVector = kVectorElements<T>;
  const int lane = threadIdx.x % kWarp;
  const int head = min(count, (kVector - Misaligned(array)) % kVector);
  const int vectors = (count - head) / kVector;
  for (int i = lane; i < vectors; i += kWarp) {
    __pipeline_memcpy_async(shared + head + i * kVector, array + head + i * kVector, kVectorBytes);
  }
  const int tail = head + vectors * kVector;
  for (int i = lane; i < head + count - tail; i += kWarp) {
    const int at = i < head ? i : i - head + tail;
    shared[at] = array[at];
  }
}

// WriteRows copies `count` elements back.
template <typename T>
__device__ __forceinline__ void WriteRows(T* array, const T* shared, int count) {
  constexpr int kVector = kVectorElements<T>;
  const int lane = threadIdx.x % kWarp;
  const int misaligned = Misaligned(array);
  const int head = min(count, (kVector - misaligned) % kVector);
  const int vectors = Misaligned(shared) == misaligned ? (count - head) / kVector : 0;
  for (int i = lane; i < vectors; i += kWarp) {
    *reinterpret_cast<uint4*>(array + head + i * kVector) =
        *reinterpret_cast<const uint4*>(shared + head + i * kVector);
  }
  const int tail = head + vectors * kVector;
  for (int i = lane; i < head + count - tail; i += kWarp) {
    const int at = i < head ? i : i - head + tail;
    array[at] = shared[at];
  }
}

// RowTile is the neighbouring rows of a warp, with the label and the weight of the lane's own row.
template <typename T>
struct RowTile {
  using A = Accumulator<T>;

  const T* logits;
  int64_t first;
  int rows;
  int label = -1;
  A weight = 0;

  // The constructor starts the copies of the logits to shared memory.
  __device__ __forceinline__ RowTile(const SoftmaxEntry<T>& entry, int64_t first, int64_t end,
                                     int classes, T* shared)
      : logits(entry.logits + first * classes),
        first(first),
        rows(static_cast<int>(min(end - first, int64_t{kWarp}))) {
    StageRows(shared + Misaligned(logits), logits, rows * classes);
    const int lane = threadIdx.x % kWarp;
    if (lane >= rows) return;
    label = entry.labels[first + lane];
    weight = entry.Weight(first + lane);
  }
};

template <typename T, bool kGradient>
__global__ void __launch_bounds__(kThreads, kResident<Accumulator<T>>)
    ShortRows(const __grid_constant__ SoftmaxParams p) {
  using A = Accumulator<T>;
  // The first row may be misaligned by this number of elements.
  constexpr int kStage = kWarp * kMaxClasses + kVectorElements<T>;
  __shared__ __align__(kVectorBytes) unsigned char shared[kWarps * 2 * kStage * sizeof(T)];
  const Softmax& call = p.call;
  const int classes = static_cast<int>(call.classes);
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  T* const stages = reinterpret_cast<T*>(shared) + warp * 2 * kStage;

  uint32_t block = blockIdx.x;
  const int64_t begin = p.splits.DivMod(block) * p.rows_per_split;
  const int64_t end = min(begin + p.rows_per_split, call.rows);
  const bool sums = call.sum != nullptr;
  if (sums && p.partials == nullptr) ArriveInCluster();
  const SoftmaxEntry<T> entry(call, block);
  A total = 0;

  int64_t first = begin + warp * kWarp;
  if (first < end) {
    RowTile<T> next(entry, first, end, classes, stages);
    __pipeline_commit();
    int stage = 0;
#pragma unroll 1
    while (true) {
      const RowTile<T> tile = next;
      T* const staged = stages + stage * kStage + Misaligned(tile.logits);
      stage ^= 1;
      first += kThreads;
      if (first < end) next = RowTile<T>(entry, first, end, classes, stages + stage * kStage);
      __pipeline_commit();
      __pipeline_wait_prior(1);
      __syncwarp();

      T* const own = staged + lane * classes;
      const bool known = tile.label >= 0 && tile.label < classes;
      A label_logit = 0;
      A z[kMaxClasses];
      SumOfExp<A> others;
#pragma unroll
      for (int k = 0; k < kMaxClasses; ++k) {
        z[k] = -A(INFINITY);
        if (k < classes && known) z[k] = Widen(own[k]);
        if (k == tile.label) {
          label_logit = z[k];
          z[k] = -A(INFINITY);
        }
        others.largest = max(others.largest, z[k]);
      }
      others.StartFrom(others.largest);
#pragma unroll
      for (int k = 0; k < kMaxClasses; ++k) {
        z[k] = ExpOfDifference(z[k] - others.largest);
        others.sum += z[k];
      }
      A loss, slope;
      EvaluateRow(loss, slope, others, label_logit, call.power, entry.gamma);
      const A factor = entry.scale * tile.weight;
      loss = known ? loss * factor : A(0);
      total += loss;
      if (!kGradient && call.loss != nullptr && lane < tile.rows) {
        static_cast<A*>(call.loss)[entry.result + tile.first + lane] = loss;
      }
      if constexpr (kGradient) {
        slope = known ? slope * factor : A(0);
        const A share = known ? ShareOf(slope, others) : A(0);
        if (lane < tile.rows) {
#pragma unroll
          for (int k = 0; k < kMaxClasses; ++k) {
            if (k < classes) own[k] = Narrow<T>(k == tile.label ? -slope : share * z[k]);
          }
        }
        __syncwarp();
        WriteRows(static_cast<T*>(call.gradient) + entry.result + tile.first * classes, staged,
                  tile.rows * classes);
      }
      if (first >= end) break;
      // The rows after the next ones replace these.
      __syncwarp();
    }
  }
  if (sums) FinishSum(p.partials, static_cast<A*>(call.sum) + entry.sum, total);
}

RowSplits PlanSplits(const SoftmaxCall& call, const Device& device) {
  return RowSplits(call.loss, device, kThreads,
                   call.loss.dtype == DType::kF64 ? kResident<double> : kResident<float>,
                   call.loss.gradient != nullptr ? kGradientSteps : kSumSteps, call.splits);
}

}  // namespace

bool CanRunShortRows(const SoftmaxCall& call, const Device& device) {
  return call.loss.classes <= kMaxClasses && PlanSplits(call, device).IsGrid(call);
}

cudaError_t LaunchShortRows(cudaStream_t stream, const SoftmaxCall& call, const Device& device) {
  const RowSplits splits = PlanSplits(call, device);
  SoftmaxParams params{call.loss};
  params.rows_per_split = splits.rows;
  return DispatchFloat(call.loss.dtype, [&](auto logit) {
    using T = decltype(logit);
    return DispatchBool(call.loss.gradient != nullptr, [&](auto gradient) {
      return LaunchSplits<Accumulator<T>>(ShortRows<T, gradient.value>, kThreads, splits, stream,
                                          call, params);
    });
  });
}

}  // namespace jaxops::focal_loss::cuda
