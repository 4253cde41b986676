// This header holds the kernel of the softmax focal loss for few short rows, whose time is latency
// alone, and for many batch entries of few rows each.
//
// All elements are read at once, element by element for any number of classes, and the code is
// small, because a kernel this short also waits for its instructions.
#ifndef JAXOPS_CUDA_FOCAL_LOSS_SOFTMAX_FEW_CUH_
#define JAXOPS_CUDA_FOCAL_LOSS_SOFTMAX_FEW_CUH_

#include "cuda/focal_loss/softmax/rows.cuh"

namespace jaxops::focal_loss::cuda {

inline constexpr int kMaxFewClasses = 128;

// kRunTime stands for an exponent that is known only at run time.
inline constexpr int kRunTime = -1;

// These are the parameters of a call without batch and sum. Constants arrive by lines of 64 bytes,
// of which the second begins with `gradient`, and the kernel waits for each line. The members are
// therefore in the order of their use.
struct FewRowsAlone {
  int32_t rows;
  int32_t classes;
  const void* logits;
  const int32_t* labels;
  const void* scale;
  const void* gamma;
  const void* weight;
  void* gradient;
  void* loss;
  Power power;
};

// These are the parameters of other calls of few rows.
struct FewRowsParams : FewRowsAlone {
  FastDivider splits;
  void* sum;
  void* partials;
  BatchMap<Softmax::kOperands> batch;
};

// These are the parameters of many entries. A block has all rows of some entries.
struct ManyEntriesParams : FewRowsAlone {
  FastDivider rows_of_entry;
  uint32_t per_block;  // entries
  uint32_t entries;
  void* sum;
  BatchMap<Softmax::kOperands> batch;
};

// A lane has at most this number of elements of a row.
template <typename Params, int kLanes>
inline constexpr int kSlotsOf = kMaxFewClasses / kLanes;
template <int kLanes>
inline constexpr int kSlotsOf<ManyEntriesParams, kLanes> = kLanes == 4   ? 4
                                                           : kLanes == 8 ? 16
                                                                         : 32;

// A row has kLanes lanes, which have elements kLanes apart.
template <typename T, int kBlockThreads, int kLanes, bool kGradient, int kPower, typename Params>
__global__ void __launch_bounds__(kBlockThreads) FewRows(const __grid_constant__ Params p) {
  constexpr bool kAlone = std::is_same_v<Params, FewRowsAlone>;
  constexpr bool kManyEntries = std::is_same_v<Params, ManyEntriesParams>;
  using A = Accumulator<T>;
  constexpr int kSlots = kSlotsOf<Params, kLanes>;
  const int classes = p.classes;
  const int lane = threadIdx.x % kLanes;
  uint32_t split = blockIdx.x;
  const T* logits = static_cast<const T*>(p.logits);
  const int32_t* labels = p.labels;
  const A* scale_of = static_cast<const A*>(p.scale);
  const A* gamma_of = static_cast<const A*>(p.gamma);
  const A* weights = static_cast<const A*>(p.weight);
  constexpr int kBlockRows = kBlockThreads / kLanes;
  int64_t result = 0, sum = 0;
  int row = 0;
  if constexpr (!kAlone) {
    uint32_t entry = blockIdx.x;
    if constexpr (kManyEntries) {
      uint32_t of_block = threadIdx.x / kLanes;
      row = static_cast<int>(p.rows_of_entry.DivMod(of_block));
      entry = blockIdx.x * p.per_block + of_block;
      if (of_block >= p.per_block || entry >= p.entries) {
        row = p.rows;  // no row
        entry = p.entries - 1;
      }
    } else {
      if (p.sum != nullptr && p.partials == nullptr) ArriveInCluster();
      split = p.splits.DivMod(entry);
    }
    const auto offsets = p.batch.AllOffsets(entry);
    logits += offsets[Softmax::kLogits];
    labels += offsets[Softmax::kLabels];
    if (scale_of != nullptr) scale_of += offsets[Softmax::kScale];
    gamma_of += offsets[Softmax::kGamma];
    if (weights != nullptr) weights += offsets[Softmax::kWeight];
    result = offsets[Softmax::kResult];
    sum = offsets[Softmax::kSum];
  }

  if constexpr (!kManyEntries) row = static_cast<int>(split) * kBlockRows + threadIdx.x / kLanes;
  A loss, slope;
  A total = 0;
  // An entry has more rows than a block takes at a time only if it has the block to itself.
#pragma unroll 1
  for (int begin = 0;; begin += kBlockRows, row += kBlockRows) {
    // No load waits for another. Lanes without a row read the last one.
    const bool exists = row < p.rows;
    const int read_row = min(row, p.rows - 1);
    const int label = labels[read_row];
    const int first = read_row * classes + lane;
    A z[kSlots];
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const bool has = lane + s * kLanes < classes;
      z[s] = has ? A(Widen(logits[first + s * kLanes])) : -A(INFINITY);
    }
    A gamma = *gamma_of;
    A scale = scale_of == nullptr ? A(1) : *scale_of;
    A weight = weights == nullptr ? A(1) : weights[read_row];
    ReadNow(weight);
    ReadNow(scale);
    ReadNow(gamma);

    const bool known = exists && label >= 0 && label < classes;
    A hit = 0;
    A largest = -A(INFINITY);
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const bool is_label = lane + s * kLanes == label;
      hit = is_label ? z[s] : hit;
      z[s] = is_label || !known ? -A(INFINITY) : z[s];
      largest = max(largest, z[s]);
    }
    hit = __shfl_sync(~0u, hit, label % kLanes, kLanes);
    SumOfExp<A> others;
    others.StartFrom(LargestOfLanes<kLanes>(largest));
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      z[s] = ExpOfDifference(z[s] - others.largest);
      others.sum += z[s];
    }
    others.sum = OverLanes<kLanes>(others.sum, Plus());
    EvaluateRow(loss, slope, others, hit, kPower == kRunTime ? p.power : static_cast<Power>(kPower),
                gamma);
    const A factor = scale * weight;
    loss = known ? loss * factor : A(0);
    if constexpr (kGradient) {
      slope = known ? slope * factor : A(0);
      const A share = known ? ShareOf(slope, others) : A(0);
      T* gradient = static_cast<T*>(p.gradient) + result;
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        const int i = lane + s * kLanes;
        const A value = i == label ? -slope : share * z[s];
        if (exists && i < classes) gradient[first + s * kLanes] = Narrow<T>(value);
      }
    } else if (p.loss != nullptr && exists && lane == 0) {
      static_cast<A*>(p.loss)[result + row] = loss;
    }
    if constexpr (!kManyEntries) break;
    total += loss;
    if (begin + kBlockRows >= p.rows) break;
  }
  if constexpr (kManyEntries) {
    if (p.sum == nullptr) return;
    __shared__ A losses[kBlockRows];
    if (lane == 0) losses[threadIdx.x / kLanes] = total;
    __syncthreads();
    const uint32_t entry = blockIdx.x * p.per_block + threadIdx.x;
    if (threadIdx.x >= p.per_block || entry >= p.entries) return;
    const int count = min(p.rows, kBlockRows);
    A of_entry = 0;
    for (int i = 0; i < count; ++i) of_entry += losses[threadIdx.x * count + i];
    static_cast<A*>(p.sum)[p.batch.AllOffsets(entry)[Softmax::kSum]] = of_entry;
  } else if constexpr (!kAlone) {
    if (p.sum != nullptr) {
      FinishSum<kBlockThreads>(p.partials, static_cast<A*>(p.sum) + sum, lane == 0 ? loss : A(0));
    }
  }
}

}  // namespace jaxops::focal_loss::cuda

#endif  // JAXOPS_CUDA_FOCAL_LOSS_SOFTMAX_FEW_CUH_
