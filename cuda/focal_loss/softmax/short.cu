// This kernel computes the softmax focal loss of rows of few logits.
//
// A thread takes a row. A warp copies its rows, which are contiguous in memory, to shared memory by
// vectors while it evaluates the previous rows; gradients are written through shared memory as
// well. If every batch entry has at most a warp's rows, a warp takes whole entries and adds up
// their losses.
#include <cuda_pipeline.h>

#include "cuda/focal_loss/launch.h"
#include "cuda/focal_loss/softmax/rows.cuh"

namespace jaxops::focal_loss::cuda {
namespace {

constexpr int kWarps = kThreads / kWarp;
// Rows have at most this number of bytes: three blocks of a multiprocessor then have shared memory.
constexpr int64_t kMaxRowBytes = 128;
// Registers keep at most this number of exponentials: gradients of (300000, 7) f32 take 8.7 µs on
// an H200, and 10.1 with exponentials in shared memory.
constexpr int kMaxKept = 8;
// A block has this number of steps, for a sum alone and for other results: the sums of (300000, 4,
// 10) f32, which warps make, take 26.4 µs with 2, and 29.1 with 8.
constexpr int64_t kSumSteps = 8;
constexpr int64_t kSteps = 2;
// A multiprocessor has this number of blocks: gradients of (300000, 21) f32 took 19.2 µs with 4,
// and 21.3 with 5, in a form of the kernel that took classes four at a time.
template <typename A, bool kGradient>
constexpr int kResident = sizeof(A) == 8 ? 3
                          : kGradient    ? 4
                                         : 5;

struct ShortParams : SoftmaxParams {
  int32_t tile_rows;  // of a warp
  int32_t stage;      // elements of a tile in shared memory
  FastDivider rows_of_entry;
  void* entry_sums;  // null: entries are not summed by a warp
};

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
                                     int classes, int tile_rows, T* shared)
      : logits(entry.logits + first * classes),
        first(first),
        rows(static_cast<int>(min(end - first, int64_t{tile_rows}))) {
    StageRows(shared + Misaligned(logits), logits, rows * classes);
    const int lane = threadIdx.x % kWarp;
    if (lane >= rows) return;
    label = entry.labels[first + lane];
    weight = entry.Weight(first + lane);
  }
};

// SumEntries writes the sums of the entries of a tile, whose lanes have the losses of their rows.
template <typename A>
__device__ __forceinline__ void SumEntries(const ShortParams& p, int64_t first, int rows, A loss) {
  const int lane = threadIdx.x % kWarp;
  const int rows_of_entry = static_cast<int>(p.rows_of_entry.divisor());
  A sum = 0;
#pragma unroll 1
  for (int row = 0; row < rows_of_entry; ++row) {
    sum += __shfl_sync(~0u, loss, (lane * rows_of_entry + row) % kWarp);
  }
  uint32_t entry = static_cast<uint32_t>(first);
  p.rows_of_entry.DivMod(entry);
  if (lane * rows_of_entry < rows) static_cast<A*>(p.entry_sums)[entry + lane] = sum;
}

// ForEachClass calls `function` with every class. A number of classes that has no maximum is given
// as kMaxClasses 0.
template <int kMaxClasses, typename Function>
__device__ __forceinline__ void ForEachClass(int classes, Function&& function) {
  if constexpr (kMaxClasses > 0) {
#pragma unroll
    for (int k = 0; k < kMaxClasses; ++k) {
      if (k < classes) function(k);
    }
  } else {
#pragma unroll 4
    for (int k = 0; k < classes; ++k) function(k);
  }
}

// Exponentials stay in registers if the number of classes has a maximum, or otherwise, if they have
// the type of logits, in shared memory.
template <typename T, bool kGradient, int kMaxClasses>
__global__ void __launch_bounds__(kThreads, kResident<Accumulator<T>, kGradient>)
    ShortRows(const __grid_constant__ ShortParams p) {
  using A = Accumulator<T>;
  constexpr bool kInPlace = kGradient && kMaxClasses == 0 && std::is_same_v<T, A>;
  extern __shared__ __align__(kVectorBytes) unsigned char shared[];
  const Softmax& call = p.call;
  const int classes = static_cast<int>(call.classes);
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  T* const stages = reinterpret_cast<T*>(shared) + warp * 2 * p.stage;

  uint32_t block = blockIdx.x;
  const int64_t begin = p.splits.DivMod(block) * p.rows_per_split;
  const int64_t end = min(begin + p.rows_per_split, call.rows);
  const bool sums = call.sum != nullptr;
  if (sums && p.partials == nullptr) ArriveInCluster();
  const SoftmaxEntry<T> entry(call, block);
  A total = 0;

  int64_t first = begin + warp * p.tile_rows;
  if (first < end) {
    RowTile<T> next(entry, first, end, classes, p.tile_rows, stages);
    __pipeline_commit();
    int stage = 0;
#pragma unroll 1
    while (true) {
      const RowTile<T> tile = next;
      T* const staged = stages + stage * p.stage + Misaligned(tile.logits);
      stage ^= 1;
      first += kWarps * p.tile_rows;
      if (first < end) {
        next = RowTile<T>(entry, first, end, classes, p.tile_rows, stages + stage * p.stage);
      }
      __pipeline_commit();
      __pipeline_wait_prior(1);
      __syncwarp();

      T* const own = staged + lane * classes;
      // Lanes without a row, or with an unknown label, do what the others do; the results are lost.
      const bool known = tile.label >= 0 && tile.label < classes;
      A label_logit = 0;
      if (known) {
        label_logit = Widen(own[tile.label]);
        own[tile.label] = Narrow<T>(-A(INFINITY));
      }
      SumOfExp<A> others;
      A largest = -A(INFINITY);
      ForEachClass<kMaxClasses>(classes, [&](int k) { largest = max(largest, A(Widen(own[k]))); });
      others.StartFrom(largest);
      A kept[kMaxClasses > 0 ? kMaxClasses : 1];
      ForEachClass<kMaxClasses>(classes, [&](int k) {
        const A z = ExpOfDifference(Widen(own[k]) - others.largest);
        others.sum += z;
        if constexpr (kMaxClasses > 0) kept[k] = z;
        if constexpr (kInPlace) own[k] = z;
      });
      A loss, slope;
      EvaluateRow(loss, slope, others, label_logit, call.power, entry.gamma);
      const A factor = entry.scale * tile.weight;
      loss = known ? loss * factor : A(0);
      total += loss;
      if (p.entry_sums != nullptr) SumEntries(p, tile.first, tile.rows, loss);
      if (!kGradient && call.loss != nullptr && lane < tile.rows) {
        static_cast<A*>(call.loss)[entry.result + tile.first + lane] = loss;
      }
      if constexpr (kGradient) {
        slope = known ? slope * factor : A(0);
        const A share = known ? ShareOf(slope, others) : A(0);
        ForEachClass<kMaxClasses>(classes, [&](int k) {
          A z;
          if constexpr (kMaxClasses > 0) {
            z = kept[k];
          } else {
            z = kInPlace ? A(own[k]) : ExpOfDifference(Widen(own[k]) - others.largest);
          }
          own[k] = Narrow<T>(known ? share * z : A(0));
        });
        if (known) own[tile.label] = Narrow<T>(-slope);
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

int64_t RowBytes(const Softmax& loss) {
  return loss.classes * static_cast<int64_t>(jaxops::cuda::SizeOf(loss.dtype));
}

// Plan has a call without a batch where a warp sums whole entries.
struct Plan {
  Softmax loss;
  int64_t tile_rows = kWarp;
  RowSplits splits;

  Plan(const SoftmaxCall& call, const Device& device)
      : loss(call.loss), splits(Divide(call, device)) {}

 private:
  RowSplits Divide(const SoftmaxCall& call, const Device& device) {
    if (SumsShortEntries(call)) {
      tile_rows = kWarp / loss.rows * loss.rows;
      loss.rows *= call.entries();
      loss.batch = {};
      loss.sum = nullptr;
    }
    const bool is_f64 = loss.dtype == DType::kF64;
    const int resident = loss.gradient != nullptr
                             ? (is_f64 ? kResident<double, true> : kResident<float, true>)
                             : (is_f64 ? kResident<double, false> : kResident<float, false>);
    const bool sums_alone = loss.sum != nullptr && loss.gradient == nullptr;
    return RowSplits(loss, device, kWarps * tile_rows, resident, sums_alone ? kSumSteps : kSteps,
                     call.splits);
  }
};

}  // namespace

bool SumsShortEntries(const SoftmaxCall& call) {
  const Softmax& loss = call.loss;
  const auto& batch = loss.batch;
  const auto has_stride = [&](Softmax::Operand operand, int64_t stride) {
    return batch.stride(0, operand) == stride;
  };
  return loss.sum != nullptr && batch.rank() == 1 && loss.rows <= kWarp &&
         RowBytes(loss) <= kMaxRowBytes && call.entries() * loss.rows <= INT32_MAX &&
         has_stride(Softmax::kLogits, call.size()) && has_stride(Softmax::kLabels, loss.rows) &&
         has_stride(Softmax::kGamma, 0) && has_stride(Softmax::kSum, 1) &&
         (loss.scale == nullptr || has_stride(Softmax::kScale, 0)) &&
         (loss.weight == nullptr || has_stride(Softmax::kWeight, loss.rows)) &&
         (loss.gradient == nullptr || has_stride(Softmax::kResult, call.size()));
}

bool CanRunShortRows(const SoftmaxCall& call, const Device& device) {
  if (RowBytes(call.loss) > kMaxRowBytes) return false;
  const Plan plan(call, device);
  return plan.splits.IsGrid({plan.loss, call.splits, call.partials});
}

cudaError_t LaunchShortRows(cudaStream_t stream, const SoftmaxCall& call, const Device& device) {
  const Plan plan(call, device);
  const SoftmaxCall planned{plan.loss, call.splits, call.partials};
  ShortParams params{{plan.loss}};
  params.rows_per_split = plan.splits.rows;
  params.tile_rows = static_cast<int32_t>(plan.tile_rows);
  params.rows_of_entry = FastDivider(call.loss.rows <= kWarp ? call.loss.rows : 1);
  params.entry_sums = SumsShortEntries(call) ? call.loss.sum : nullptr;
  return DispatchFloat(call.loss.dtype, [&](auto logit) {
    using T = decltype(logit);
    // The first row may be misaligned.
    params.stage = static_cast<int32_t>(kWarp * call.loss.classes + kVectorElements<T>);
    const size_t shared_bytes = size_t{2} * kWarps * params.stage * sizeof(T);
    const auto launch = [&](auto kernel) {
      return LaunchSplits<Accumulator<T>>(kernel, kThreads, plan.splits, stream, planned, params,
                                          shared_bytes);
    };
    if (call.loss.gradient == nullptr) return launch(ShortRows<T, false, 0>);
    return call.loss.classes <= kMaxKept ? launch(ShortRows<T, true, kMaxKept>)
                                         : launch(ShortRows<T, true, 0>);
  });
}

}  // namespace jaxops::focal_loss::cuda
