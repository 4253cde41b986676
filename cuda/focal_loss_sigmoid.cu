// The sigmoid focal loss: one pass over the logits for a sum, the gradient, or both.
//
// A batch entry is a run of elements that thread blocks share out; a thread takes neighbours.
// Labels and weights belong to rows. Neighbours are of one row where their number divides that of
// classes, as it usually does. Neighbours of two rows read the terms of both, and of
// rows shorter than an access the terms of each element. Batch entries that do not begin where an
// access may are taken element by element.
#include <cstdint>

#include "common/fast_divide.h"
#include "cuda/focal_loss.cuh"
#include "cuda/focal_loss.h"

namespace jaxops::focal_loss::cuda {
namespace {

// Neighbours that a thread takes at a time, and those of which each may have a row of its own.
constexpr int kInRow = 8;
constexpr int kShortRows = 4;

// Stands for an exponent that is known only at run time.
constexpr int kRunTime = -1;

enum class Want { kLoss, kSum, kGradient };

// The rows of a thread's neighbours: always one, up to two, or any number of them.
enum class Rows { kOne, kTwo, kAny };

struct Params {
  Sigmoid call;
  int64_t size;  // elements of a batch entry
  int64_t per_block;
  FastDivider splits;
  FastDivider classes;
  FastDivider64 rows;  // the same, of a whole batch entry
  void* partials;
};

// What the elements of one row have in common.
template <typename A>
struct Row {
  int target;  // the position of its label in the row
  bool ignored;
  A negative;  // factors of negative and positive targets
  A positive;
};

// One batch entry; L is the type of labels, int32_t for classes.
template <typename T, typename L>
class Entry {
 public:
  using A = Accumulator<T>;

  __device__ Entry(const Params& p, int64_t entry) : p_(p) {
    const auto offset = [&](Sigmoid::Operand operand) {
      return p.call.batch.Offset(entry, operand);
    };
    const A scale = static_cast<const A*>(p.call.scale)[offset(Sigmoid::kScale)];
    const A* parameters = static_cast<const A*>(p.call.parameters) + offset(Sigmoid::kParameters);
    gamma = parameters[0];
    negative_ = scale * parameters[1];
    positive_ = scale * parameters[2];
    first_class_ = p.call.class_ids[offset(Sigmoid::kClassIds)];
    logits = static_cast<const T*>(p.call.logits) + offset(Sigmoid::kLogits);
    labels = static_cast<const L*>(p.call.labels) + offset(Sigmoid::kLabels);
    weight_ = p.call.weight == nullptr
                  ? nullptr
                  : static_cast<const A*>(p.call.weight) + offset(Sigmoid::kWeight);
    elements = offset(Sigmoid::kElements);
  }

  __device__ __forceinline__ Row<A> ReadRow(int64_t row) const {
    Row<A> terms{-1, false, negative_, positive_};
    if constexpr (std::is_same_v<L, int32_t>) {
      const int32_t label = labels[row];
      // Not a subtraction, which could overflow into the row.
      const bool inside = label >= first_class_ &&
                          static_cast<uint32_t>(label - first_class_) < p_.classes.divisor();
      terms.target = inside ? label - first_class_ : -1;
      terms.ignored = p_.call.has_ignored && label == p_.call.ignored;
    }
    if (weight_ != nullptr) {
      const A weight = weight_[row];
      terms.negative *= weight;
      terms.positive *= weight;
    }
    return terms;
  }

  const T* logits;
  const L* labels;
  A gamma;
  int64_t elements;  // offset of elementwise results

 private:
  const Params& p_;
  const A* weight_;
  A negative_;
  A positive_;
  int32_t first_class_;
};

template <typename T, int kCount>
__device__ __forceinline__ Pack<T, kCount> LoadSome(const T* from, bool whole, int64_t left) {
  if (whole) return LoadPack<kCount>(from);
  Pack<T, kCount> pack;
#pragma unroll
  for (int k = 0; k < kCount; ++k) pack.values[k] = k < left ? from[k] : T{};
  return pack;
}

template <typename T, int kCount>
__device__ __forceinline__ void StoreSome(T* to, const Accumulator<T> (&values)[kCount], bool whole,
                                          int64_t left) {
  Pack<T, kCount> pack;
#pragma unroll
  for (int k = 0; k < kCount; ++k) pack.values[k] = Narrow<T>(values[k]);
  if (whole) {
    *reinterpret_cast<Pack<T, kCount>*>(to) = pack;
    return;
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    if (k < left) to[k] = pack.values[k];
  }
}

// Loss and slope of kCount elements for integer labels, unscaled; factors and targets are known.
template <bool kSlope, typename A, int kCount>
__device__ __forceinline__ void EvaluateHard(A (&loss)[kCount], A (&slope)[kCount],
                                             const A (&z)[kCount], const bool (&target)[kCount],
                                             Power power, A gamma) {
  A x[kCount], e[kCount], positive[kCount], negative[kCount];
  const A zeros[kCount] = {};
  bool leads[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    x[k] = target[k] ? -z[k] : z[k];
    leads[k] = x[k] >= 0;
    positive[k] = max(x[k], A(0));
    negative[k] = min(x[k], A(0));
  }
  ExpOfMagnitude(e, x, power);
  Evaluate<kSlope>(loss, slope, e, leads, positive, negative, zeros, power, gamma);
#pragma unroll
  for (int k = 0; k < kCount; ++k) slope[k] = target[k] ? -slope[k] : slope[k];
}

// The same for targets between 0 and 1; `small` and `big` are the parts of y and 1 - y that weigh
// the less and the more probable of the two answers.
template <bool kSlope, typename A, int kCount>
__device__ __forceinline__ void EvaluateSoft(A (&loss)[kCount], A (&slope)[kCount],
                                             const A (&z)[kCount], const A (&y)[kCount],
                                             Power power, A gamma) {
  A e[kCount], scaled[kCount], entropy[kCount], log_high[kCount], log_low[kCount];
  ExpOfMagnitude(e, z, power);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const A small = z[k] >= 0 ? y[k] : 1 - y[k];
    const A big = z[k] >= 0 ? 1 - y[k] : y[k];
    const A sum = small * e[k] + big;
    const A log1p = Log1p(e[k], A(0));
    scaled[k] = Reciprocal(1 + e[k]) * sum;
    entropy[k] = log1p + (big == 0 ? A(0) : big * abs(z[k]));
    const double log_sum = power == Power::kAny ? log(static_cast<double>(sum)) : 0;
    log_high[k] = big == 0 ? -abs(z[k]) : static_cast<A>(log_sum);
    log_low[k] = (big == 0 ? A(0) : static_cast<A>(log_sum - log_high[k])) - log1p;
  }
  RaiseToGamma(scaled, log_high, log_low, power, gamma);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    loss[k] = scaled[k] * entropy[k];
    if constexpr (kSlope) {
      const A inverse = Reciprocal(1 + e[k]);
      const A small = z[k] >= 0 ? y[k] : 1 - y[k];
      const A big = z[k] >= 0 ? 1 - y[k] : y[k];
      const A share = big == 0 ? inverse : inverse * e[k] / (small * e[k] + big);
      const A by_entropy = inverse * (z[k] >= 0 ? big - small * e[k] : small * e[k] - big);
      slope[k] = scaled[k] * ((1 - 2 * y[k]) * gamma * (share * Finite(entropy[k])) + by_entropy);
    }
  }
}

// Sums neighbours first, which loses the least.
template <typename A, int kCount>
__device__ __forceinline__ A SumOf(const A (&values)[kCount]) {
  if constexpr (kCount == 1) {
    return values[0];
  } else {
    A halves[kCount / 2];
#pragma unroll
    for (int k = 0; k < kCount / 2; ++k) halves[k] = values[2 * k] + values[2 * k + 1];
    return SumOf(halves);
  }
}

template <typename T, typename L, int kCount, Rows kRows, Want kWant, int kPower>
__global__ void __launch_bounds__(kThreads) Elementwise(const __grid_constant__ Params p) {
  using A = Accumulator<T>;
  constexpr bool kSlope = kWant == Want::kGradient;
  // One row takes whole accesses, or single elements.
  constexpr bool kWhole = kRows == Rows::kOne;
  const Power power = kPower == kRunTime ? p.call.power : static_cast<Power>(kPower);

  uint32_t block = blockIdx.x;
  const int64_t begin = p.splits.Peel(block) * p.per_block;
  const Entry<T, L> entry(p, block);
  const int length = static_cast<int>(min(p.size - begin, p.per_block));
  // Rows are counted from the one that the block begins in.
  const auto first_row = static_cast<int64_t>(p.rows.Quotient(begin));
  const uint32_t skipped = static_cast<uint32_t>(begin - first_row * p.call.classes);
  A total = 0;

  for (int at = threadIdx.x * kCount; at < length; at += kThreads * kCount) {
    const int left = length - at;
    const bool whole = kWhole || left >= kCount;
    const auto logits = LoadSome<T, kCount>(entry.logits + begin + at, whole, left);
    uint32_t row = skipped + at;
    const int position = p.classes.Peel(row);
    // The neighbours from here on are of the next row, which the last ones may not have.
    const int boundary = static_cast<int>(p.classes.divisor()) - position;
    Row<A> first = entry.ReadRow(first_row + row);
    first.target -= position;
    Row<A> second = first;
    if (kRows == Rows::kTwo && boundary < min(left, kCount)) {
      second = entry.ReadRow(first_row + row + 1);
      second.target += second.target < 0 ? 0 : boundary;
    }
    // The terms of each element, with the target as its index among the neighbours.
    Row<A> terms[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      terms[k] = kRows == Rows::kTwo && k >= boundary ? second : first;
      if (kRows == Rows::kAny && k > 0) {
        uint32_t own_row = skipped + min(at + k, length - 1);
        const int own_position = p.classes.Peel(own_row);
        terms[k] = entry.ReadRow(first_row + own_row);
        terms[k].target += terms[k].target < 0 ? 0 : k - own_position;
      }
    }
    A z[kCount], loss[kCount], slope[kCount], factor[kCount];
    WidenAll(z, logits);

    if constexpr (std::is_same_v<L, int32_t>) {
      bool target[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        target[k] = terms[k].target == k;
        factor[k] = target[k] ? terms[k].positive : terms[k].negative;
      }
      EvaluateHard<kSlope>(loss, slope, z, target, power, entry.gamma);
      if (p.call.has_ignored) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          loss[k] = terms[k].ignored ? A(0) : loss[k];
          slope[k] = terms[k].ignored ? A(0) : slope[k];
          factor[k] = terms[k].ignored ? A(0) : factor[k];
        }
      }
    } else {
      const auto labels = LoadSome<L, kCount>(entry.labels + begin + at, whole, left);
      A y[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        y[k] = static_cast<A>(Widen(labels.values[k]));
        factor[k] = y[k] * terms[k].positive + (1 - y[k]) * terms[k].negative;
      }
      EvaluateSoft<kSlope>(loss, slope, z, y, power, entry.gamma);
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      loss[k] *= factor[k];
      slope[k] *= factor[k];
      if (!kWhole && k >= left) loss[k] = 0;
    }
    const int64_t to = entry.elements + begin + at;
    if constexpr (kWant == Want::kLoss) {
      StoreSome<T, kCount>(static_cast<T*>(p.call.loss) + to, loss, whole, left);
    }
    if constexpr (kWant == Want::kGradient) {
      StoreSome<T, kCount>(static_cast<T*>(p.call.gradient) + to, slope, whole, left);
    }
    if constexpr (kWant != Want::kLoss) total += SumOf(loss);
  }
  if constexpr (kWant != Want::kLoss) {
    if (p.partials == nullptr) return;
    const A sum = SumOverBlock(total);
    if (threadIdx.x == 0) static_cast<A*>(p.partials)[blockIdx.x] = sum;
  }
}

// Adds up the partial sums of one batch entry a block.
template <typename A>
__global__ void __launch_bounds__(kThreads) CombineSums(const __grid_constant__ Params p) {
  const uint32_t splits = p.splits.divisor();
  const A* partials = static_cast<const A*>(p.partials) + int64_t{blockIdx.x} * splits;
  A sum = 0;
  for (uint32_t i = threadIdx.x; i < splits; i += kThreads) sum += partials[i];
  sum = SumOverBlock(sum);
  if (threadIdx.x == 0) {
    static_cast<A*>(p.call.sum)[p.call.batch.Offset(blockIdx.x, Sigmoid::kSum)] = sum;
  }
}

template <typename T, typename L, int kCount, Rows kRows, int kPower>
cudaError_t LaunchElements(cudaStream_t stream, const Params& params, int64_t blocks) {
  const Sigmoid& call = params.call;
  if (call.gradient != nullptr) {
    return Launch(Elementwise<T, L, kCount, kRows, Want::kGradient, kPower>, blocks, stream,
                  params);
  }
  if (call.sum != nullptr) {
    return Launch(Elementwise<T, L, kCount, kRows, Want::kSum, kPower>, blocks, stream, params);
  }
  return Launch(Elementwise<T, L, kCount, kRows, Want::kLoss, kPower>, blocks, stream, params);
}

// Class labels: the exponent is known when the kernel is compiled, where neighbours are of one row
// any that needs no power, elsewhere only that of the paper.
template <typename T, int kCount, Rows kRows>
cudaError_t LaunchHard(cudaStream_t stream, const Params& params, int64_t blocks) {
  const auto launch = [&](auto power) {
    return LaunchElements<T, int32_t, kCount, kRows, power.value>(stream, params, blocks);
  };
  const auto launch_power = [&](auto power) {
    return launch(std::integral_constant<int, static_cast<int>(power.value)>());
  };
  if (params.call.power == Power::kTwo) {
    return launch_power(std::integral_constant<Power, Power::kTwo>());
  }
  if constexpr (kRows == Rows::kOne) {
    switch (params.call.power) {
      case Power::kZero:
        return launch_power(std::integral_constant<Power, Power::kZero>());
      case Power::kHalf:
        return launch_power(std::integral_constant<Power, Power::kHalf>());
      case Power::kOne:
        return launch_power(std::integral_constant<Power, Power::kOne>());
      default:
        return launch_power(std::integral_constant<Power, Power::kAny>());
    }
  }
  return launch(std::integral_constant<int, kRunTime>());
}

// Calls `function` with values of the type of logits and of that of labels.
template <typename Function>
cudaError_t DispatchTypes(const Sigmoid& call, Function&& function) {
  return DispatchFloat(call.dtype, [&](auto logit) {
    using T = decltype(logit);
    if (!call.soft) return function(logit, int32_t{});
    if (call.label_dtype == call.dtype) return function(logit, logit);
    return function(logit, Accumulator<T>{});
  });
}

}  // namespace

cudaError_t LaunchSigmoid(cudaStream_t stream, const Sigmoid& call, int64_t splits,
                          void* partials) {
  const int64_t entries = call.batch.size();
  const int64_t size = call.rows * call.classes;
  if (entries == 0) return cudaSuccess;
  if (size == 0) {
    const size_t bytes = entries * (call.dtype == DType::kF64 ? sizeof(double) : sizeof(float));
    return call.sum == nullptr ? cudaSuccess : cudaMemsetAsync(call.sum, 0, bytes, stream);
  }
  return DispatchTypes(call, [&](auto logit, auto label) {
    using T = decltype(logit);
    using L = decltype(label);
    constexpr bool kHard = std::is_same_v<L, int32_t> && !std::is_same_v<T, double>;
    constexpr int kMany = kHard ? kInRow : kPackElements<T>;
    constexpr int kFew = kHard ? kShortRows : kPackElements<T>;
    const bool many = call.classes >= kMany;
    const bool one_row = kHard && call.classes % kMany == 0;
    const bool aligned = entries == 1 || size % kMany == 0;
    const int64_t stride = kThreads * (!aligned ? 1 : many ? kMany : kFew);
    // Without a sum, enough work a thread to make up for what a block costs, once there are blocks
    // for the whole device.
    if (call.sum == nullptr) {
      splits = CeilDiv(size, stride * std::clamp<int64_t>(entries * size / (stride * 1024), 1, 4));
    }
    const int64_t per_block = CeilDiv(CeilDiv(size, splits), stride) * stride;
    const int64_t blocks = entries * splits;
    if (per_block + call.classes > INT32_MAX) return cudaErrorInvalidValue;
    const Params params{call,
                        size,
                        per_block,
                        FastDivider(splits),
                        FastDivider(call.classes),
                        FastDivider64(call.classes),
                        call.sum == nullptr ? nullptr : partials};
    const auto launch = [&]() -> cudaError_t {
      if constexpr (kHard) {
        if (one_row) return LaunchHard<T, kMany, Rows::kOne>(stream, params, blocks);
        if (aligned && many) return LaunchHard<T, kMany, Rows::kTwo>(stream, params, blocks);
        if (aligned) return LaunchHard<T, kFew, Rows::kAny>(stream, params, blocks);
      } else {
        if (aligned && many) {
          return LaunchElements<T, L, kMany, Rows::kTwo, kRunTime>(stream, params, blocks);
        }
        if (aligned) {
          return LaunchElements<T, L, kFew, Rows::kAny, kRunTime>(stream, params, blocks);
        }
      }
      return LaunchElements<T, L, 1, Rows::kOne, kRunTime>(stream, params, blocks);
    };
    const cudaError_t error = launch();
    if (error != cudaSuccess || call.sum == nullptr) return error;
    return Launch(CombineSums<Accumulator<T>>, entries, stream, params);
  });
}

}  // namespace jaxops::focal_loss::cuda
