// This header holds the code that the kernels of the sigmoid focal loss share.
//
// Thread blocks divide the elements of a batch entry; a thread takes a vector of neighbouring
// elements. Labels and weights belong to rows. A vector lies in one row if its size divides the
// number of classes, as is usual. Vectors in two rows read the terms of both; if rows are shorter
// than a vector, each element reads its own terms. Labels of rows of one element are read in
// vectors, too. Batch entries that are not aligned to vectors are processed element by element.
#ifndef JAXOPS_CUDA_FOCAL_LOSS_SIGMOID_ELEMENTS_CUH_
#define JAXOPS_CUDA_FOCAL_LOSS_SIGMOID_ELEMENTS_CUH_

#include <cstdint>

#include "common/fast_divide.h"
#include "cuda/focal_loss/math.cuh"
#include "cuda/focal_loss/sigmoid/families.h"
#include "cuda/focal_loss/sum.cuh"

namespace jaxops::focal_loss::cuda {

// A thread takes the first number of neighbours at a time, and the second if each may have a row of
// its own.
template <typename T>
inline constexpr int kInRow = std::is_same_v<T, double> ? 4 : 8;
inline constexpr int kShortRows = 4;

// From this number of elements on, elementwise results gain by longer blocks.
inline constexpr int64_t kManyElements = 1 << 26;

// kRunTime stands for an exponent that is known only at run time.
inline constexpr int kRunTime = -1;

enum class Want { kLoss, kSum, kGradient, kBoth };

// Rows says in how many rows a thread's neighbours lie: one, at most two, any number, or one each.
enum class Rows { kOne, kTwo, kAny, kEach };

struct SigmoidParams {
  Sigmoid call;
  int64_t size;  // elements of a batch entry
  int64_t per_block;
  FastDivider splits;
  FastDivider classes;
  FastDivider64 rows;  // classes of a whole batch entry
  void* partials;      // null: the blocks of an entry are a cluster
};

// Row holds the terms that the elements of one row share.
template <typename A>
struct Row {
  int32_t label;
  A negative;  // factors of negative and positive targets
  A positive;
};

// Entry is a part of a batch entry, from the row of the element `begin` on; L is the type of
// labels: int32_t for classes, uint8_t for booleans.
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

  // ReadRows reads the rows of neighbours that have one row each, with the factor that applies to
  // each element.
  template <int kCount>
  __device__ __forceinline__ void ReadRows(Row<A> (&rows)[kCount], int row) const {
    const auto own = LoadVector<kCount>(labels + row);
    Vector<A, kCount> weights;
#pragma unroll
    for (int k = 0; k < kCount; ++k) weights.values[k] = 1;
    if (weight_ != nullptr) weights = LoadVector<kCount>(weight_ + row);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const A factor = weights.values[k] * (Position(own.values[k]) == 0 ? positive_ : negative_);
      rows[k] = {own.values[k], factor, factor};
    }
  }

  // Position returns the position of a label in its row, or a number that is not less than the
  // number of classes. The difference may wrap, but never to a valid position, because no class id
  // overflows.
  __device__ __forceinline__ uint32_t Position(int32_t label) const {
    return static_cast<uint32_t>(label) - static_cast<uint32_t>(first_class_);
  }

  __device__ __forceinline__ bool weighted() const { return weight_ != nullptr; }
  // These are the factors of elements without weights.
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
  Vector<T, kCount> vector;
#pragma unroll
  for (int k = 0; k < kCount; ++k) vector.values[k] = Narrow<T>(values[k]);
  *reinterpret_cast<Vector<T, kCount>*>(to) = vector;
}

// LoadSome and StoreSome access all neighbours, or the first `left` of them.
template <typename T, int kCount>
__device__ __forceinline__ Vector<T, kCount> LoadSome(const T* from, bool whole, int64_t left) {
  if (whole) return LoadVector<kCount>(from);
  Vector<T, kCount> vector;
#pragma unroll
  for (int k = 0; k < kCount; ++k) vector.values[k] = k < left ? from[k] : T{};
  return vector;
}

template <typename T, int kCount>
__device__ __forceinline__ void StoreSome(T* to, const Accumulator<T> (&values)[kCount], bool whole,
                                          int64_t left) {
  if (whole) {
    StoreAll<T, kCount>(to, values);
    return;
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    if (k < left) to[k] = Narrow<T>(values[k]);
  }
}

// Leads says whether x is positive, without an f64 instruction; the answer for zero is arbitrary.
__device__ __forceinline__ bool Leads(float x) { return x >= 0; }
__device__ __forceinline__ bool Leads(double x) { return __double2hiint(x) >= 0; }

__device__ __forceinline__ float Positive(float x, bool) { return max(x, 0.0f); }
__device__ __forceinline__ double Positive(double x, bool leads) { return leads ? x : 0; }

// EvaluateHard computes the loss and the slope of kCount elements for integer labels, times their
// factors. If kTargets is not set, no element is a target.
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

// Boolean targets have the type of a byte.
template <typename L>
inline constexpr bool kIsBool = std::is_same_v<L, uint8_t>;

template <typename A, typename L>
__device__ __forceinline__ A ReadTarget(L target) {
  if constexpr (kIsBool<L>) {
    return target != 0 ? A(1) : A(0);
  } else {
    return static_cast<A>(Widen(target));
  }
}

// EvaluateSoft computes the loss and the slope for targets between 0 and 1; `small` and `big` are
// the parts of y and 1 - y that weigh the less and the more probable of the two answers. Targets 0
// and 1 need neither a logarithm nor a division, and have the same bits without; with kBinary there
// are no others.
template <bool kSlope, bool kBinary, typename A, int kCount>
__device__ __forceinline__ void EvaluateSoft(A (&loss)[kCount], A (&slope)[kCount],
                                             const A (&z)[kCount], const A (&y)[kCount],
                                             const A (&factor)[kCount], Power power, A gamma) {
  A e[kCount], scaled[kCount], entropy[kCount], log_high[kCount], log_low[kCount];
  ExpOfMagnitude(e, z, power);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const A small = z[k] >= 0 ? y[k] : 1 - y[k];
    const A big = z[k] >= 0 ? 1 - y[k] : y[k];
    const A sum = small * e[k] + big;
    const A inverse = Reciprocal(1 + e[k]);
    const A log1p = Log1p(e[k], inverse * e[k], A(0));
    scaled[k] = inverse * sum;
    entropy[k] = log1p + (big == 0 ? A(0) : big * abs(z[k]));
    const bool has_log = !kBinary && power == Power::kAny && small != 0 && big != 0;
    const double log_sum = has_log ? log(static_cast<double>(sum)) : 0;
    log_high[k] = big == 0 ? -abs(z[k]) : static_cast<A>(log_sum);
    log_low[k] = (big == 0 ? A(0) : static_cast<A>(log_sum - log_high[k])) - log1p;
  }
  RaiseToGamma(scaled, log_high, log_low, power, gamma);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    scaled[k] *= factor[k];
    loss[k] = scaled[k] * entropy[k];
    if constexpr (kSlope) {
      const A inverse = Reciprocal(1 + e[k]);
      const A small = z[k] >= 0 ? y[k] : 1 - y[k];
      const A big = z[k] >= 0 ? 1 - y[k] : y[k];
      const A rest = inverse * e[k];
      const A share = big == 0 ? inverse : kBinary ? rest : rest / (small * e[k] + big);
      const A by_entropy = inverse * (z[k] >= 0 ? big - small * e[k] : small * e[k] - big);
      slope[k] = scaled[k] * ((1 - 2 * y[k]) * gamma * (share * Finite(entropy[k])) + by_entropy);
    }
  }
}

// Finish adds the sum of a block to the sums of its batch entry.
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

// A sum has the digits of f32 for any type of logits.
template <typename T, Want kWant>
inline constexpr Digits kDigitsOf = sizeof(T) > 2 || kWant == Want::kSum ? Digits::kFull
                                    : kWant == Want::kBoth               ? Digits::kHalfWithSum
                                                                         : Digits::kHalf;

template <typename T, Want kWant>
__device__ __forceinline__ T* Elements(const SigmoidParams& p, int64_t offset) {
  return static_cast<T*>(kWant == Want::kLoss ? p.call.loss : p.call.gradient) + offset;
}

// FewParams holds the parameters of FewElements, TargetsLast and SpreadElements. Constants arrive
// by lines of 64 bytes, of which the second begins with `scale`, and a kernel of only a few loads
// waits for each line. The members are therefore in the order of their use.
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

inline Want WantOf(const Sigmoid& call) {
  if (call.gradient != nullptr) return call.sum != nullptr ? Want::kBoth : Want::kGradient;
  return call.sum != nullptr ? Want::kSum : Want::kLoss;
}

// DispatchValue calls `function` with the value, which is one of these, as a constant.
template <auto kFirst, auto... kRest, typename Function>
cudaError_t DispatchValue(decltype(kFirst) value, Function&& function) {
  if constexpr (sizeof...(kRest) > 0) {
    if (value != kFirst) return DispatchValue<kRest...>(value, function);
  }
  return function(std::integral_constant<decltype(kFirst), kFirst>());
}

// DispatchWant calls `function` with the wanted results of the call as a constant.
template <typename Function>
cudaError_t DispatchWant(const Sigmoid& call, Function&& function) {
  return DispatchValue<Want::kBoth, Want::kGradient, Want::kSum, Want::kLoss>(WantOf(call),
                                                                              function);
}

// IsUnweighted says whether rows have class ids of logits other than f64, and neither weights nor
// ignored rows.
inline bool IsUnweighted(const Sigmoid& loss) {
  return !loss.soft && loss.dtype != DType::kF64 && loss.weight == nullptr && !loss.has_ignored;
}

// IsAligned says whether each batch entry is aligned to vectors of this size.
inline bool IsAligned(const SigmoidCall& call, int elements) {
  return call.entries() == 1 || call.size() % elements == 0;
}

// From this number of entries on, one block of Hard or Soft has all elements of an entry, if they
// are at most the second number.
inline constexpr int64_t kManyEntries = 1024;
inline constexpr int64_t kMaxEntryOfBlock = 1 << 14;

// Segments divides a batch entry among the blocks of these, a segment of neighbours each.
// The order of a sum's additions is the same for any number of entries below kManyEntries.
struct Segments {
  int64_t count;     // per batch entry
  int64_t elements;  // per segment except the last
  bool clustered;    // the blocks of an entry add up its sum

  // Threads have vectors of at most `width` elements, and blocks take `stride` elements per step.
  Segments(const SigmoidCall& call, const Device& device, int width, int64_t stride) {
    // An entry has at most this number of blocks, which fill the largest devices twice.
    constexpr int64_t kMaxSumBlocks = 2112;
    const Sigmoid& loss = call.loss;
    const int64_t size = call.size();
    // Once there are blocks for the whole device, threads get enough work to outweigh the cost of a
    // block.
    const auto fill = [&](int64_t elements, int64_t max_steps) {
      return CeilDiv(size, stride * std::clamp<int64_t>(elements / (stride * 1024), 1, max_steps));
    };
    const bool is_f32 = loss.dtype == DType::kF32, is_f64 = loss.dtype == DType::kF64;
    if (call.entries() >= kManyEntries && size <= kMaxEntryOfBlock) {
      count = 1;
    } else if (loss.sum == nullptr) {
      const int64_t all = call.entries() * size;
      // Short blocks keep memory busier until the end, but cost instructions.
      const bool by_memory = is_f32 && loss.classes >= width && loss.power != Power::kAny;
      const bool by_instructions = !is_f32 && !is_f64 && all >= kManyElements;
      count = fill(all, by_memory ? 2 : by_instructions ? 8 : 4);
    } else if (is_f64 ||
               (is_f32 && loss.gradient != nullptr && !loss.soft && loss.classes % width == 0)) {
      // Memory bounds these calls, or the many instructions per block do; short blocks end more
      // evenly.
      count = std::min(call.splits, fill(size, 4));
    } else {
      count = std::min(call.splits, kMaxSumBlocks);
    }
    elements = CeilDiv(CeilDiv(size, count), stride) * stride;
    clustered = count == 1 || (count <= kClusterBlocks && device.has_clusters());
  }

  // IsIndexable says whether 32 bits hold the indices of blocks and elements.
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

// LaunchSegments launches a kernel for all segments, and the kernel that adds the partial sums of
// type A.
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

// DispatchUpToF32 calls `function` with a value of the type of logits, which is not f64.
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

// DispatchTargets calls `function` with a value of the type of soft labels of logits of type T.
template <typename T, typename Function>
cudaError_t DispatchTargets(TargetType type, Function&& function) {
  if (type == TargetType::kBool) return function(uint8_t());
  return type == TargetType::kLogits ? function(T()) : function(Accumulator<T>());
}

// DispatchPower calls `function` with the code of the exponent as a constant.
template <typename Function>
cudaError_t DispatchPower(Power power, Function&& function) {
  return DispatchValue<Power::kZero, Power::kHalf, Power::kOne, Power::kTwo, Power::kAny>(
      power, [&](auto code) {
        return function(std::integral_constant<int, static_cast<int>(code.value)>());
      });
}

}  // namespace jaxops::focal_loss::cuda

#endif  // JAXOPS_CUDA_FOCAL_LOSS_SIGMOID_ELEMENTS_CUH_
