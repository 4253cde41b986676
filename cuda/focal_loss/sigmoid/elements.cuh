// What the kernels of the sigmoid focal loss share.
//
// A batch entry is a run of elements that thread blocks share out; a thread takes neighbours.
// Labels and weights belong to rows. Neighbours are of one row where their number divides that of
// classes, as it usually does. Neighbours of two rows read the terms of both, and of
// rows shorter than an access the terms of each element; rows of one element are read like the
// elements. Batch entries that do not begin where an access may are taken element by element.
#ifndef JAXOPS_CUDA_FOCAL_LOSS_SIGMOID_ELEMENTS_CUH_
#define JAXOPS_CUDA_FOCAL_LOSS_SIGMOID_ELEMENTS_CUH_

#include <cstdint>

#include "common/fast_divide.h"
#include "cuda/focal_loss/launch.h"
#include "cuda/focal_loss/math.cuh"
#include "cuda/focal_loss/sum.cuh"

namespace jaxops::focal_loss::cuda {

// Neighbours that a thread takes at a time, and those of which each may have a row of its own.
template <typename T>
inline constexpr int kInRow = std::is_same_v<T, double> ? 4 : 8;
inline constexpr int kShortRows = 4;

// From so many elements of 16 bits on, blocks last longer, because instructions bind them.
inline constexpr int64_t kManyElements = 1 << 26;

// Stands for an exponent that is known only at run time.
inline constexpr int kRunTime = -1;

enum class Want { kLoss, kSum, kGradient, kBoth };

// The rows of a thread's neighbours: always one, up to two, any number of them, or one each.
enum class Rows { kOne, kTwo, kAny, kEach };

struct Params {
  Sigmoid call;
  int64_t size;  // elements of a batch entry
  int64_t per_block;
  FastDivider splits;
  FastDivider classes;
  FastDivider64 rows;  // the same, of a whole batch entry
  void* partials;      // null: the blocks of an entry are a cluster
};

// What the elements of one row have in common.
template <typename A>
struct Row {
  int32_t label;
  A negative;  // factors of negative and positive targets
  A positive;
};

// A part of a batch entry, from the row that the element `begin` is in; L is the type of labels,
// int32_t for classes.
template <typename T, typename L>
class Entry {
 public:
  using A = Accumulator<T>;

  __device__ __forceinline__ Entry(const Params& p, uint32_t entry, int64_t begin) : p_(p) {
    const auto offsets = p.call.batch.AllOffsets(entry);
    const A scale = static_cast<const A*>(p.call.scale)[offsets[Sigmoid::kScale]];
    const A* parameters = static_cast<const A*>(p.call.parameters) + offsets[Sigmoid::kParameters];
    gamma = parameters[0];
    negative_ = scale * parameters[1];
    positive_ = scale * parameters[2];
    const auto first_row = static_cast<int64_t>(p.rows.Quotient(begin));
    skipped = static_cast<uint32_t>(begin - first_row * p.call.classes);
    logits = static_cast<const T*>(p.call.logits) + offsets[Sigmoid::kLogits] + begin;
    labels = static_cast<const L*>(p.call.labels) + offsets[Sigmoid::kLabels];
    if constexpr (std::is_same_v<L, int32_t>) {
      first_class_ = p.call.class_ids[offsets[Sigmoid::kClassIds]] - kFirstClassId;
      labels += first_row;
    } else {
      labels += begin;
    }
    weight_ = p.call.weight == nullptr
                  ? nullptr
                  : static_cast<const A*>(p.call.weight) + offsets[Sigmoid::kWeight] + first_row;
    elements = offsets[Sigmoid::kElements] + begin;
  }

  template <bool kPlain = false>
  __device__ __forceinline__ Row<A> ReadRow(uint32_t row) const {
    Row<A> terms{0, negative_, positive_};
    if constexpr (std::is_same_v<L, int32_t>) terms.label = labels[row];
    if (!kPlain && weight_ != nullptr) {
      const A weight = weight_[row];
      terms.negative *= weight;
      terms.positive *= weight;
    }
    return terms;
  }

  // The rows of neighbours that have one each, with the factor of what the element is.
  template <int kCount>
  __device__ __forceinline__ void ReadRows(Row<A> (&rows)[kCount], int row) const {
    const auto own = LoadPack<kCount>(labels + row);
    Pack<A, kCount> weights;
#pragma unroll
    for (int k = 0; k < kCount; ++k) weights.values[k] = 1;
    if (weight_ != nullptr) weights = LoadPack<kCount>(weight_ + row);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const A factor = weights.values[k] * (Position(own.values[k]) == 0 ? positive_ : negative_);
      rows[k] = {own.values[k], factor, factor};
    }
  }

  // Of a label in its row, or some larger number. The difference wraps, but where it is less than
  // the number of classes, the label is what it would be without, because no class id overflows.
  __device__ __forceinline__ uint32_t Position(int32_t label) const {
    return static_cast<uint32_t>(label) - static_cast<uint32_t>(first_class_);
  }

  __device__ __forceinline__ bool weighted() const { return weight_ != nullptr; }
  // Factors of elements without weights.
  __device__ __forceinline__ A negative() const { return negative_; }
  __device__ __forceinline__ A positive() const { return positive_; }

  const T* logits;
  const L* labels;
  A gamma;
  int64_t elements;  // offset of elementwise results
  uint32_t skipped;  // elements of the first row before `begin`

 private:
  const Params& p_;
  const A* weight_;
  A negative_;
  A positive_;
  int32_t first_class_ = 0;
};

template <typename T, int kCount>
__device__ __forceinline__ void StoreAll(T* to, const Accumulator<T> (&values)[kCount]) {
  Pack<T, kCount> pack;
#pragma unroll
  for (int k = 0; k < kCount; ++k) pack.values[k] = Narrow<T>(values[k]);
  *reinterpret_cast<Pack<T, kCount>*>(to) = pack;
}

// Whether x leads, by an instruction that is not one of f64; zero may or may not.
__device__ __forceinline__ bool Leads(float x) { return x >= 0; }
__device__ __forceinline__ bool Leads(double x) { return __double2hiint(x) >= 0; }

__device__ __forceinline__ float Positive(float x, bool) { return max(x, 0.0f); }
__device__ __forceinline__ double Positive(double x, bool leads) { return leads ? x : 0; }

// Loss and slope of kCount elements for integer labels times their factors. Targets are among them
// only if kTargets.
template <bool kSlope, bool kTargets, Digits kDigits = Digits::kFull, typename A, int kCount>
__device__ __forceinline__ void EvaluateHard(A (&loss)[kCount], A (&slope)[kCount],
                                             const A (&z)[kCount], const bool (&target)[kCount],
                                             const A (&factor)[kCount], Power power, A gamma) {
  A x[kCount], e[kCount], positive[kCount], negative[kCount];
  const A zeros[kCount] = {};
  bool leads[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    x[k] = kTargets && target[k] ? -z[k] : z[k];
    leads[k] = Leads(x[k]);
    positive[k] = Positive(x[k], leads[k]);
    negative[k] = min(x[k], A(0));
  }
  ExpOfMagnitude<kDigits>(e, z, power);
  Evaluate<kSlope, kDigits>(loss, slope, e, leads, positive, negative, zeros, factor, power, gamma);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    slope[k] = kTargets && target[k] ? -slope[k] : slope[k];
  }
}

// Adds the sum of a block to those of its batch entry.
template <typename A>
__device__ __forceinline__ void Finish(const Params& p, uint32_t entry, bool clustered, A total) {
  A sum = SumOverBlock(total);
  if (!clustered) {
    if (threadIdx.x == 0) static_cast<A*>(p.partials)[blockIdx.x] = sum;
  } else if (SumOverCluster(sum)) {
    static_cast<A*>(p.call.sum)[p.call.batch.AllOffsets(entry)[Sigmoid::kSum]] = sum;
  }
}

// A sum has the digits of f32 whatever the logits have.
template <typename T, Want kWant>
inline constexpr Digits kDigitsOf = sizeof(T) > 2 || kWant == Want::kSum ? Digits::kFull
                                    : kWant == Want::kBoth               ? Digits::kHalfWithSum
                                                                         : Digits::kHalf;

template <typename T, Want kWant>
__device__ __forceinline__ T* Elements(const Params& p, int64_t offset) {
  return static_cast<T*>(kWant == Want::kLoss ? p.call.loss : p.call.gradient) + offset;
}

// What FewElements, TargetsLast and SpreadElements are told of a call. Constants arrive by lines of
// 64 bytes, of which the second begins with `scale`, and a kernel that lasts no longer than a few
// loads waits for each: what is read first comes first.
struct FewParams {
  uint32_t size;  // elements of a batch entry
  uint32_t per_block;
  FastDivider classes;
  Power power;
  const void* logits;
  const int32_t* labels;
  const int32_t* class_ids;
  const void* scale;
  const void* parameters;
  void* elements;
  void* sum;

  FewParams(const Sigmoid& call, int64_t per_block)
      : size(static_cast<uint32_t>(call.rows * call.classes)),
        per_block(static_cast<uint32_t>(per_block)),
        classes(call.classes),
        power(call.power),
        logits(call.logits),
        labels(static_cast<const int32_t*>(call.labels)),
        class_ids(call.class_ids),
        scale(call.scale),
        parameters(call.parameters),
        elements(call.gradient != nullptr ? call.gradient : call.loss),
        sum(call.sum) {}
};

// Calls `function` with what the call wants as a constant.
template <typename Function>
cudaError_t DispatchWant(const Sigmoid& call, Function&& function) {
  const auto with = [&](auto want) { return function(want); };
  if (call.gradient != nullptr) {
    return call.sum != nullptr ? with(std::integral_constant<Want, Want::kBoth>())
                               : with(std::integral_constant<Want, Want::kGradient>());
  }
  return call.sum != nullptr ? with(std::integral_constant<Want, Want::kSum>())
                             : with(std::integral_constant<Want, Want::kLoss>());
}

inline cudaError_t LaunchBlocks(void (*kernel)(Params), cudaStream_t stream, const Params& params,
                                int64_t blocks) {
  const uint32_t splits = params.splits.divisor();
  return params.call.sum != nullptr && params.partials == nullptr && splits > 1
             ? jaxops::cuda::LaunchClusters(kernel, blocks, splits, kThreads, 0, stream, params)
             : Launch(kernel, blocks, stream, params);
}

// Calls `function` with the code of the exponent as a constant.
template <typename Function>
cudaError_t DispatchPower(Power power, Function&& function) {
  const auto call = [&](auto code) {
    return function(std::integral_constant<int, static_cast<int>(code.value)>());
  };
  switch (power) {
    case Power::kZero:
      return call(std::integral_constant<Power, Power::kZero>());
    case Power::kHalf:
      return call(std::integral_constant<Power, Power::kHalf>());
    case Power::kOne:
      return call(std::integral_constant<Power, Power::kOne>());
    case Power::kTwo:
      return call(std::integral_constant<Power, Power::kTwo>());
    case Power::kAny:
      break;
  }
  return call(std::integral_constant<Power, Power::kAny>());
}

// Of StreamedSum: threads that evaluate tiles, elements of a tile, tiles in shared memory at a
// time, and blocks of a multiprocessor, whose shared memory they fill.
inline constexpr int kEvaluators = 128;
inline constexpr int kTile = 32 * kEvaluators;
inline constexpr int kStages = 3;
template <typename T>
inline constexpr int kStreamingBlocks = 192 * 1024 / (kStages * kTile * sizeof(T));

// The launchers of each kernel.
bool AreFew(const Sigmoid& call);
cudaError_t LaunchFew(cudaStream_t stream, const Sigmoid& call);
bool AreTargetsLast(const Sigmoid& call);
cudaError_t LaunchTargetsLast(cudaStream_t stream, const Sigmoid& call);
bool AreSpread(const Sigmoid& call);
cudaError_t LaunchSpread(cudaStream_t stream, const Sigmoid& call);
bool Streams(const Sigmoid& call, bool aligned);
cudaError_t LaunchStreamed(cudaStream_t stream, const Params& params, int64_t blocks);
cudaError_t LaunchHard(cudaStream_t stream, const Params& params, int64_t blocks, bool aligned);
cudaError_t LaunchSoft(cudaStream_t stream, const Params& params, int64_t blocks, bool aligned);

}  // namespace jaxops::focal_loss::cuda

#endif  // JAXOPS_CUDA_FOCAL_LOSS_SIGMOID_ELEMENTS_CUH_
