// This kernel computes the softmax focal loss of many rows of 2-byte logits that are whole aligned
// vectors.
//
// Memory bounds these calls as long as nothing else takes long. A warp reads all it needs of a row
// at once, the label's logit together with the others, and has no parameters that only a batch
// needs. Short blocks write a gradient, and read and write in order; for a loss, a block reads rows
// ahead. If few lanes share a row, the vectors that a warp reads together would be far apart: the
// warp reads neighbouring vectors instead, and exchanges rows through shared memory.
//
// The lanes of a row are those of LaneRows and add up its terms in the same order, so that the
// gradient and the loss of a row are the same, bit for bit.
#include "cuda/focal_loss/launch.h"
#include "cuda/focal_loss/softmax/rows.cuh"

namespace jaxops::focal_loss::cuda {
namespace {

// A row has at most this number of vectors.
constexpr int64_t kMaxVectors = 256;

// A sum has a partial sum per block, so larger blocks have fewer of them.
template <bool kSums>
constexpr int kBlockThreads = kSums ? 256 : 64;
// The resident blocks of a multiprocessor have this number of threads in all.
constexpr int kResidentThreads = 1024;
// A block that computes no gradient has this number of steps.
constexpr int64_t kLossSteps = 8;

// Rows of at most this number of lanes are exchanged.
constexpr int kMaxExchanged = 4;

// These are the parameters of a call without batch.
struct WholeRowsAlone {
  int32_t rows;
  int32_t classes;
  const void* logits;
  const int32_t* labels;
  const void* scale;
  const void* gamma;
  const void* weight;
  void* gradient;
  void* loss;
  void* partials;  // of a sum
  Power power;
  int32_t steps;  // per block
};

// These are the parameters of other calls.
struct WholeRowsBatch : WholeRowsAlone {
  FastDivider splits;
  BatchMap<Softmax::kOperands> batch;
};

// WholeEntry has the operands of a batch entry, and the number of the block in it.
template <typename T>
struct WholeEntry {
  const T* logits;
  const int32_t* labels;
  const float* scale;  // null: 1
  const float* gamma;
  const float* weight;  // null: 1
  int64_t result = 0;
  uint32_t split = blockIdx.x;

  template <typename Params>
  __device__ __forceinline__ explicit WholeEntry(const Params& p)
      : logits(static_cast<const T*>(p.logits)),
        labels(p.labels),
        scale(static_cast<const float*>(p.scale)),
        gamma(static_cast<const float*>(p.gamma)),
        weight(static_cast<const float*>(p.weight)) {
    if constexpr (std::is_same_v<Params, WholeRowsBatch>) {
      uint32_t entry = blockIdx.x;
      split = p.splits.DivMod(entry);
      const auto offsets = p.batch.AllOffsets(entry);
      logits += offsets[Softmax::kLogits];
      labels += offsets[Softmax::kLabels];
      gamma += offsets[Softmax::kGamma];
      if (scale != nullptr) scale += offsets[Softmax::kScale];
      if (weight != nullptr) weight += offsets[Softmax::kWeight];
      result = offsets[Softmax::kResult];
    }
  }

  __device__ __forceinline__ float Factor(int row) const {
    return (scale == nullptr ? 1.0f : *scale) * (weight == nullptr ? 1.0f : weight[row]);
  }
};

// WholeRow is one thread's part of a row that kLanes threads share, up to kVectors vectors.
template <typename T, int kLanes, int kVectors>
struct WholeRow {
  static constexpr int kCount = kVectorElements<T>;
  static constexpr int kGroups = kWarp / kLanes;
  static constexpr bool kExchanges = kLanes <= kMaxExchanged;
  // A warp has this number of elements of shared memory.
  static constexpr int kTile = kExchanges ? kWarp * kVectors * kCount : 0;

  RegisterVector<T> vectors[kVectors];

  static __device__ __forceinline__ int Lane() { return threadIdx.x % kLanes; }
  static __device__ __forceinline__ int WarpLane() { return threadIdx.x % kWarp; }
  static __device__ __forceinline__ int Group() { return WarpLane() / kLanes; }
  // At returns the position of the thread's vector j in its row, and InRows that in the rows of the
  // warp, which applies if rows are exchanged.
  static __device__ __forceinline__ int At(int j) { return (Lane() + j * kLanes) * kCount; }
  static __device__ __forceinline__ int InRows(int j) { return (WarpLane() + j * kWarp) * kCount; }
  // CountElements counts the elements of all rows of the warp, if this thread has row `row` of
  // `rows`.
  static __device__ __forceinline__ int CountElements(int row, int rows, int classes) {
    return min(rows - (row - Group()), kGroups) * classes;
  }

  // Read reads row `row` or, without such a row, nothing.
  __device__ __forceinline__ void Read(const T* logits, int row, int rows, int classes) {
    const int elements = CountElements(row, rows, classes);
    logits += int64_t{kExchanges ? row - Group() : row} * classes;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      vectors[j].Fill(-INFINITY);
      if constexpr (kExchanges) {
        if (InRows(j) < elements) vectors[j].Load(logits + InRows(j));
      } else {
        if (row < rows && At(j) < classes) vectors[j].Load(logits + At(j));
      }
    }
  }

  // TakeOut exchanges rows if needed, takes the label out, and returns its logit. Without such a
  // class, all elements are taken out.
  __device__ __forceinline__ float TakeOut(T* tile, int label, bool known, int classes) {
    float logit = 0;
    if constexpr (kExchanges) {
      T* const own = tile + Group() * classes;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) vectors[j].Stage(tile + InRows(j));
      __syncwarp();
      if (known) logit = Widen(own[label]);
      __syncwarp();
      if (HasLabel(label, known)) own[label] = Narrow<T>(-INFINITY);
      // The vectors below are of another type, and must not be read earlier.
      asm volatile("" ::: "memory");
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        vectors[j].Fill(-INFINITY);
        if (At(j) < classes) vectors[j].Load(own + At(j));
      }
    } else {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        // Most vectors of a warp have no label.
        const int k = label - At(j);
        if (known && k >= 0 && k < kCount) logit = vectors[j].TakeOut(k);
      }
      logit = __shfl_sync(~0u, logit, label / kCount % kLanes, kLanes);
    }
    if (!known) {
      // This case is rare, so it takes a branch, instead of selections in every row.
      asm volatile("");
#pragma unroll
      for (int j = 0; j < kVectors; ++j) vectors[j].Fill(-INFINITY);
    }
    return logit;
  }

  static __device__ __forceinline__ bool HasLabel(int label, bool known) {
    return known && label / kCount % kLanes == Lane();
  }

  // The sum of the row may start from this exponent.
  __device__ __forceinline__ SumOfExp<float> FindLargest() const {
    RegisterVector<T> most = vectors[0];
#pragma unroll
    for (int j = 1; j < kVectors; ++j) most.Max(vectors[j]);
    float z[kCount];
    most.Widen(z);
    float largest = z[0];
#pragma unroll
    for (int k = 1; k < kCount; ++k) largest = max(largest, z[k]);
    SumOfExp<float> others;
    others.StartFrom(LargestOfLanes<kLanes>(largest));
    return others;
  }

  __device__ __forceinline__ void MakeExponentials(float (&z)[kCount], int j, float largest) const {
    vectors[j].Widen(z);
#pragma unroll
    for (int k = 0; k < kCount; ++k) z[k] = ExpOfDifference(z[k] - largest);
  }
};

template <typename T, int kLanes, int kVectors, bool kSums, typename Params>
__global__ void __launch_bounds__(kBlockThreads<kSums>, kResidentThreads / kBlockThreads<kSums>)
    WholeGradients(const __grid_constant__ Params p) {
  using Row = WholeRow<T, kLanes, kVectors>;
  constexpr int kThreads = kBlockThreads<kSums>;
  constexpr int kCount = Row::kCount;
  // These exponentials take few registers.
  constexpr bool kKeeps = kVectors <= 4;
  __shared__ __align__(kVectorBytes) T shared[kThreads / kWarp * Row::kTile + kCount];
  T* const tile = shared + threadIdx.x / kWarp * Row::kTile;
  const int classes = p.classes;
  const WholeEntry<T> entry(p);
  // Blocks of a batch have several steps if there would be too many partial sums.
  const int steps = std::is_same_v<Params, WholeRowsBatch> ? p.steps : 1;
  constexpr int kRows = kThreads / kLanes;
  int row = static_cast<int>(entry.split) * steps * kRows + static_cast<int>(threadIdx.x) / kLanes;
  float total = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step, row += kRows) {
    const bool exists = row < p.rows;
    const int read_row = min(row, p.rows - 1);
    // The label comes last, because otherwise the compiler places its first use before the other
    // reads.
    Row own;
    own.Read(entry.logits, row, p.rows, classes);
    const int label = entry.labels[read_row];
    const float gamma = *entry.gamma;
    const float factor = entry.Factor(read_row);

    const bool known = exists && label >= 0 && label < classes;
    const float label_logit = own.TakeOut(tile, label, known, classes);
    SumOfExp<float> others = own.FindLargest();
    float kept[kKeeps ? kVectors : 1][kCount];
    float sums[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float (&z)[kCount] = kept[kKeeps ? j : 0];
      own.MakeExponentials(z, j, others.largest);
#pragma unroll
      for (int k = 0; k < kCount; ++k) sums[k % 2] += z[k];
    }
    others.sum = OverLanes<kLanes>(sums[0] + sums[1], Plus());
    float loss, slope;
    EvaluateRow(loss, slope, others, label_logit, p.power, gamma);
    if (kSums && known && Row::Lane() == 0) total += loss * factor;
    slope = known ? slope * factor : 0.0f;
    const float share = known ? ShareOf(slope, others) : 0.0f;

    T* const gradient = static_cast<T*>(p.gradient) + entry.result +
                        int64_t{Row::kExchanges ? row - Row::Group() : row} * classes;
    T* const to = Row::kExchanges ? tile + Row::Group() * classes : gradient;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float (&z)[kCount] = kept[kKeeps ? j : 0];
      if constexpr (!kKeeps) {
        own.vectors[j].Forget();
        own.MakeExponentials(z, j, others.largest);
      }
#pragma unroll
      for (int k = 0; k < kCount; ++k) z[k] *= share;
      RegisterVector<T> values;
      values.Set(z);
      if constexpr (Row::kExchanges) {
        if (Row::At(j) < classes) values.Stage(to + Row::At(j));
      } else {
        if (exists && Row::At(j) < classes) values.Store(to + Row::At(j));
      }
    }
    // The vectors above are of another type, and must not be written later.
    asm volatile("" ::: "memory");
    if (Row::HasLabel(label, known)) to[label] = Narrow<T>(-slope);
    if constexpr (Row::kExchanges) {
      const int elements = Row::CountElements(row, p.rows, classes);
      __syncwarp();
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        if (Row::InRows(j) >= elements) break;
        RegisterVector<T> values;
        values.Load(tile + Row::InRows(j));
        values.Store(gradient + Row::InRows(j));
      }
      // The next rows replace these.
      if (steps > 1) __syncwarp();
    }
  }
  if constexpr (kSums) {
    total = SumOverBlock<kThreads>(total);
    if (threadIdx.x == 0) static_cast<float*>(p.partials)[blockIdx.x] = total;
  }
}

// WholeLosses computes the losses of rows, or their sum. The lanes of a row take several rows in
// turn, and each lane evaluates one of them.
template <typename T, int kLanes, int kVectors, typename Params>
__global__ void __launch_bounds__(kBlockThreads<true>, kResidentThreads / kBlockThreads<true>)
    WholeLosses(const __grid_constant__ Params p) {
  using Row = WholeRow<T, kLanes, kVectors>;
  constexpr int kThreads = kBlockThreads<true>;
  constexpr int kCount = Row::kCount;
  constexpr int kTurns = kLanes < kLossSteps ? kLanes : kLossSteps;
  __shared__ __align__(kVectorBytes) T shared[kThreads / kWarp * Row::kTile + kCount];
  T* const tile = shared + threadIdx.x / kWarp * Row::kTile;
  const int classes = p.classes;
  const WholeEntry<T> entry(p);
  constexpr int kRows = kThreads / kLanes;
  int row =
      static_cast<int>(entry.split) * p.steps * kRows + static_cast<int>(threadIdx.x) / kLanes;
  // Rows of few vectors are read while the previous rows are summed.
  constexpr bool kReadsAhead = kVectors <= 5;
  Row next;
  int next_label;
  const auto read = [&](int next_row) {
    next.Read(entry.logits, next_row, p.rows, classes);
    next_label = entry.labels[min(next_row, p.rows - 1)];
  };
  read(row);
  const float gamma = *entry.gamma;
  float total = 0;
  SumOfExp<float> others;
  float label_logit = 0;
  int own_row = p.rows;
  bool own_known = false;
  int turn = 0;
#pragma unroll 1
  for (int step = 0; step < p.steps; ++step, row += kRows) {
    Row copy;
    if constexpr (kReadsAhead) copy = next;
    Row& own = kReadsAhead ? copy : next;
    const int label = next_label;
    const bool known = row < p.rows && label >= 0 && label < classes;
    const float logit = own.TakeOut(tile, label, known, classes);
    SumOfExp<float> sum = own.FindLargest();
    // The next rows replace these.
    if constexpr (Row::kExchanges) __syncwarp();
    if (kReadsAhead && step + 1 < p.steps) read(row + kRows);
    float sums[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float z[kCount];
      own.MakeExponentials(z, j, sum.largest);
#pragma unroll
      for (int k = 0; k < kCount; ++k) sums[k % 2] += z[k];
    }
    sum.sum = OverLanes<kLanes>(sums[0] + sums[1], Plus());
    if (!kReadsAhead && step + 1 < p.steps) read(row + kRows);
    if (Row::Lane() == turn) {
      others = sum;
      label_logit = logit;
      own_row = row;
      own_known = known;
    }
    if (++turn < kTurns && step + 1 < p.steps) continue;
    turn = 0;
    if (own_row < p.rows) {
      float loss, slope;
      EvaluateRow(loss, slope, others, label_logit, p.power, gamma);
      loss = own_known ? loss * entry.Factor(own_row) : 0.0f;
      total += loss;
      if (p.loss != nullptr) static_cast<float*>(p.loss)[entry.result + own_row] = loss;
      own_row = p.rows;
    }
  }
  if (p.partials == nullptr) return;
  total = SumOverBlock<kThreads>(total);
  if (threadIdx.x == 0) static_cast<float*>(p.partials)[blockIdx.x] = total;
}

struct Plan {
  RowLanes lanes;
  bool sums;  // the blocks compute sums and losses
  RowSplits splits;

  Plan(const SoftmaxCall& call, const Device& device)
      : lanes(call.loss),
        sums(call.loss.sum != nullptr || call.loss.gradient == nullptr),
        splits(PlanSplits(call, device)) {}

  int threads() const { return sums ? kBlockThreads<true> : kBlockThreads<false>; }

 private:
  RowSplits PlanSplits(const SoftmaxCall& call, const Device& device) const {
    const bool has_gradient = call.loss.gradient != nullptr;
    // A block that computes a gradient takes no more rows at a time than it must.
    return RowSplits(call.loss, device, threads() / lanes.count,
                     has_gradient ? INT32_MAX : kResidentThreads / threads(),
                     has_gradient ? 1 : kLossSteps, call.splits);
  }
};

template <typename T, int kLanes, int kVectors>
cudaError_t Launch(cudaStream_t stream, const SoftmaxCall& call, const Plan& plan) {
  const Softmax& loss = call.loss;
  const bool has_sum = loss.sum != nullptr;
  const RowSplits& splits = plan.splits;
  const WholeRowsAlone alone{static_cast<int32_t>(loss.rows),
                             static_cast<int32_t>(loss.classes),
                             loss.logits,
                             loss.labels,
                             loss.scale,
                             loss.gamma,
                             loss.weight,
                             loss.gradient,
                             loss.loss,
                             has_sum ? call.partials : nullptr,
                             loss.power,
                             static_cast<int32_t>(splits.steps)};
  const auto launch = [&](auto gradient, auto summed) {
    const auto with = [&](const auto& params) {
      using Params = std::remove_cvref_t<decltype(params)>;
      const int64_t blocks = call.entries() * splits.count;
      if constexpr (gradient.value) {
        return jaxops::cuda::Launch(WholeGradients<T, kLanes, kVectors, summed.value, Params>,
                                    blocks, plan.threads(), 0, stream, params);
      } else {
        return jaxops::cuda::Launch(WholeLosses<T, kLanes, kVectors, Params>, blocks,
                                    plan.threads(), 0, stream, params);
      }
    };
    if constexpr (gradient.value && !summed.value) {
      return with(alone);
    } else {
      const bool is_alone = call.entries() == 1 && (!gradient.value || splits.steps == 1);
      return is_alone ? with(alone)
                      : with(WholeRowsBatch{alone, FastDivider(splits.count), loss.batch});
    }
  };
  constexpr std::true_type kYes;
  constexpr std::false_type kNo;
  const cudaError_t error = loss.gradient == nullptr ? launch(kNo, kYes)
                            : has_sum                ? launch(kYes, kYes)
                                                     : launch(kYes, kNo);
  return error != cudaSuccess || !has_sum
             ? error
             : CombineSums<float>(stream, loss, splits.count, call.partials);
}

}  // namespace

bool CanRunWholeRows(const SoftmaxCall& call, const Device& device) {
  const Softmax& loss = call.loss;
  const RowVectors row(loss);
  return jaxops::cuda::SizeOf(loss.dtype) == 2 && row.whole &&
         reinterpret_cast<uintptr_t>(loss.gradient) % kVectorBytes == 0 && row.count > 2 &&
         row.count <= kMaxVectors && loss.rows < int64_t{1} << 30 &&
         (loss.sum != nullptr || loss.gradient == nullptr || call.entries() == 1) &&
         Plan(call, device).splits.IsGrid(call);
}

cudaError_t LaunchWholeRows(cudaStream_t stream, const SoftmaxCall& call, const Device& device) {
  const Plan plan(call, device);
  const auto launch = [&](auto logit) {
    using T = decltype(logit);
    return DispatchLanes(plan.lanes, [&](auto lanes, auto vectors) -> cudaError_t {
      if constexpr (lanes.value >= 2 && lanes.value * vectors.value <= kMaxVectors) {
        return Launch<T, lanes.value, vectors.value>(stream, call, plan);
      } else {
        return cudaErrorInvalidValue;
      }
    });
  };
  return call.loss.dtype == DType::kBF16 ? launch(__nv_bfloat16{}) : launch(__half{});
}

}  // namespace jaxops::focal_loss::cuda
