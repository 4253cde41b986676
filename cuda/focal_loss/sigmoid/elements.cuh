// Code that the kernels of the sigmoid focal loss share.
//
// Thread blocks share out the elements of a batch entry; a thread takes a vector of neighbours.
// Labels and weights belong to rows. A vector is of one row where its size divides the number of
// classes, as it usually does. Vectors of two rows read the terms of both; where rows are shorter
// than a vector, they read the terms of each element. Labels of rows of one element are read in
// vectors, too. Batch entries that do not begin where a vector may are taken element by element.
#ifndef JAXOPS_CUDA_FOCAL_LOSS_SIGMOID_ELEMENTS_CUH_
#define JAXOPS_CUDA_FOCAL_LOSS_SIGMOID_ELEMENTS_CUH_

#include <cstdint>

#include "common/fast_divide.h"
#include "cuda/focal_loss/math.cuh"
#include "cuda/focal_loss/sigmoid/families.h"
#include "cuda/focal_loss/sum.cuh"

namespace jaxops::focal_loss::cuda {

// Neighbours that a thread takes at a time, and those of which each may have a row of its own.
template <typename T>
inline constexpr int kInRow = std::is_same_v<T, double> ? 4 : 8;
inline constexpr int kShortRows = 4;

// The number of elements from which elementwise results are worth longer blocks.
inline constexpr int64_t kManyElements = 1 << 26;

// Stands for an exponent that is known only at run time.
inline constexpr int kRunTime = -1;

enum class Want { kLoss, kSum, kGradient, kBoth };

// The rows of a thread's neighbours: always one, up to two, any number of them, or one each.
enum class Rows { kOne, kTwo, kAny, kEach };

struct SigmoidParams {
  Sigmoid call;
  int64_t size;  // elements of a batch entry
  int64_t per_block;
  FastDivider splits;
  FastDivider classes;
  FastDivider64 rows;  // the same, of a whole batch entry
  void* partials;      // null: the blocks of an entry are a cluster
};

// The terms that the elements of one row have in common.
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

  __device__ __forceinline__ Entry(const SigmoidParams& p, uint32_t entry, int64_t begin) : p_(p) {
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

  template <bool kUnweighted = false>
  __device__ __forceinline__ Row<A> ReadRow(uint32_t row) const {
    Row<A> terms{0, negative_, positive_};
    if constexpr (std::is_same_v<L, int32_t>) terms.label = labels[row];
    if (!kUnweighted && weight_ != nullptr) {
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

  // The position of a label in its row, or some larger number. The difference wraps, but where it
  // is less than the number of classes, it is right, because no class id overflows.
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
  const SigmoidParams& p_;
  const A* weight_;
  A negative_;
  A positive_;
  int32_t first_class_ = 0;
};

template <typename T, int kCount>
__device__ __forceinline__ void StoreAll(T* to, const Accumulator<T> (&values)[kCount]) {
  Pack<T, kCount> vector;
#pragma unroll
  for (int k = 0; k < kCount; ++k) vector.values[k] = Narrow<T>(values[k]);
  *reinterpret_cast<Pack<T, kCount>*>(to) = vector;
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
__device__ __forceinline__ void Finish(const SigmoidParams& p, uint32_t entry, bool clustered,
                                       A total) {
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
__device__ __forceinline__ T* Elements(const SigmoidParams& p, int64_t offset) {
  return static_cast<T*>(kWant == Want::kLoss ? p.call.loss : p.call.gradient) + offset;
}

// The parameters of FewElements, TargetsLast and SpreadElements. Constants arrive by lines of
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

// Whether rows have class ids of logits other than f64, and neither weights nor ignored rows.
inline bool IsUnweighted(const Sigmoid& loss) {
  return !loss.soft && loss.dtype != DType::kF64 && loss.weight == nullptr && !loss.has_ignored;
}

// Whether each batch entry begins where a vector of this size may.
inline bool IsAligned(const SigmoidCall& call, int elements) {
  return call.entries() == 1 || call.size() % elements == 0;
}

// How the blocks of Hard and Soft share out a batch entry: a segment of neighbours each. The order
// of a sum's additions must not depend on how many entries there are.
struct Segments {
  int64_t count;     // of a batch entry
  int64_t elements;  // of each but the last
  bool clustered;    // the blocks of an entry add up its sum

  // Threads have vectors of `width` elements at most, and blocks take `stride` elements a step.
  Segments(const SigmoidCall& call, const Device& device, int width, int64_t stride) {
    // The blocks of an entry, at most: they fill the largest devices twice.
    constexpr int64_t kMaxSumBlocks = 2112;
    const Sigmoid& loss = call.loss;
    const int64_t size = call.size();
    // Enough work a thread to make up for what a block costs, once there are blocks for the whole
    // device.
    const auto fill = [&](int64_t elements, int64_t max_steps) {
      return CeilDiv(size, stride * std::clamp<int64_t>(elements / (stride * 1024), 1, max_steps));
    };
    const bool is_f32 = loss.dtype == DType::kF32, is_f64 = loss.dtype == DType::kF64;
    if (loss.sum == nullptr) {
      const int64_t all = call.entries() * size;
      // Memory is kept busier to the end by short blocks, which cost instructions.
      const bool by_memory = is_f32 && loss.classes >= width && loss.power != Power::kAny;
      const bool by_instructions = !is_f32 && !is_f64 && all >= kManyElements;
      count = fill(all, by_memory ? 2 : by_instructions ? 8 : 4);
    } else if (is_f64 ||
               (is_f32 && loss.gradient != nullptr && !loss.soft && loss.classes % width == 0)) {
      // Bound by memory, or by instructions of which a block has many: short ones end more evenly.
      count = std::min(call.splits, fill(size, 4));
    } else {
      count = std::min(call.splits, kMaxSumBlocks);
    }
    elements = CeilDiv(CeilDiv(size, count), stride) * stride;
    clustered = count == 1 || (count <= kClusterBlocks && device.has_clusters());
  }

  // Whether blocks and elements have indices of 32 bits.
  bool IsIndexable(const SigmoidCall& call) const {
    return elements + call.loss.classes <= INT32_MAX && call.entries() * count <= INT32_MAX;
  }
};

inline SigmoidParams MakeParams(const SigmoidCall& call, int64_t splits, int64_t per_block,
                                void* partials) {
  return {call.loss,
          call.size(),
          per_block,
          FastDivider(splits),
          FastDivider(call.loss.classes),
          FastDivider64(call.loss.classes),
          partials};
}

// Launches a kernel for all segments, and what its partial sums need to become the sum, of type A.
template <typename A>
cudaError_t LaunchSegments(void (*kernel)(SigmoidParams), cudaStream_t stream,
                           const SigmoidCall& call, const Segments& segments) {
  const bool clustered = segments.clustered;
  const SigmoidParams params =
      MakeParams(call, segments.count, segments.elements, clustered ? nullptr : call.partials);
  const bool sums = call.loss.sum != nullptr;
  const int64_t blocks = call.entries() * segments.count;
  const cudaError_t error = sums && clustered && segments.count > 1
                                ? jaxops::cuda::LaunchClusters(kernel, blocks, segments.count,
                                                               kThreads, 0, stream, params)
                                : Launch(kernel, blocks, stream, params);
  if (error != cudaSuccess || !sums || clustered) return error;
  return CombineSums<A>(stream, call.loss, segments.count, call.partials);
}

// Calls `function` with a value of the type of logits, which is not f64.
template <typename Function>
cudaError_t DispatchUpToF32(DType dtype, Function&& function) {
  return DispatchFloat(dtype, [&](auto logit) -> cudaError_t {
    if constexpr (std::is_same_v<decltype(logit), double>) {
      return cudaErrorInvalidValue;
    } else {
      return function(logit);
    }
  });
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

}  // namespace jaxops::focal_loss::cuda

#endif  // JAXOPS_CUDA_FOCAL_LOSS_SIGMOID_ELEMENTS_CUH_
