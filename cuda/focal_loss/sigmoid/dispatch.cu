// The sigmoid focal loss: one pass over the logits for a sum, the gradient, or both.
//
// A batch entry is a run of elements that thread blocks share out; a thread takes neighbours.
// Labels and weights belong to rows. Neighbours are of one row where their number divides that of
// classes, as it usually does. Neighbours of two rows read the terms of both, and of
// rows shorter than an access the terms of each element; rows of one element are read like the
// elements. Batch entries that do not begin where an access may are taken element by element.
//
// Few rows have a target. Where neighbours share rows, they are all evaluated as if they were none,
// for which fewer instructions do, and targets apart, by warps that have any (Hard). A call of few
// elements is over before that would pay (FewElements). Elementwise results without weights need
// not even be looked up in rows: a block puts targets in their places when it is done with the rest
// (TargetsLast). Those of f32 of the usual kinds are bound by memory instead (SpreadElements).
//
// Long sums without weights are bound by instructions rather than memory. Where blocks can have
// their shared memory filled for them, they wait for no logits and look up no rows (StreamedSum).
#include <cstdint>
#include <cuda/ptx>

#include "common/fast_divide.h"
#include "cuda/focal_loss/launch.h"
#include "cuda/focal_loss/math.cuh"
#include "cuda/focal_loss/sum.cuh"

namespace jaxops::focal_loss::cuda {
namespace {

// Neighbours that a thread takes at a time, and those of which each may have a row of its own.
template <typename T>
constexpr int kInRow = std::is_same_v<T, double> ? 4 : 8;
constexpr int kShortRows = 4;

// Of FewElements: the most elements of a sum, or of results without one, the most threads of a
// block, and the elements that are worth a block of a sum. So few that the instructions of a thread
// last longer than those of all threads of a multiprocessor are taken by more threads.
constexpr int64_t kFewSummed = 1 << 15;
constexpr int64_t kFewAlone = 1 << 21;
constexpr int64_t kFewest = 1 << 17;
constexpr int kFewThreads = 1024;
constexpr int64_t kFewABlock = 640;

// Of TargetsLast: the threads of a block, the accesses of a thread, and the shortest rows, of which
// a block has fewer than threads.
constexpr int kLastThreads = 128;
constexpr int kLastPacks = 2;
constexpr int64_t kLastClasses = 20;

// Of SpreadElements: the threads of a block, and the accesses of a thread, for elements by the
// million or by the hundred million.
constexpr int kSpreadThreads = 128;
constexpr int kSpreadPacks = 2;
constexpr int kSpreadManyPacks = 4;

// From so many elements of 16 bits on, blocks last longer, because instructions bind them.
constexpr int64_t kManyElements = 1 << 26;

// Blocks of a sum at the most: they fill the largest devices twice.
constexpr int64_t kSumBlocks = 2112;

// Sums of so many elements go through shared memory, where rows are not enormous, nor so short that
// the warp that takes out their targets falls behind those that evaluate.
constexpr int64_t kStreamedElements = 1 << 24;
constexpr int64_t kFewestStreamed = 40;
constexpr int64_t kMostStreamed = 1 << 20;

// Stands for an exponent that is known only at run time.
constexpr int kRunTime = -1;

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

template <typename T, int kCount>
__device__ __forceinline__ Pack<T, kCount> LoadSome(const T* from, bool whole, int64_t left) {
  if (whole) return LoadPack<kCount>(from);
  Pack<T, kCount> pack;
#pragma unroll
  for (int k = 0; k < kCount; ++k) pack.values[k] = k < left ? from[k] : T{};
  return pack;
}

// Has an address of device memory indexed by one instruction, rather than made of its parts by four
// each time.
template <typename T>
__device__ __forceinline__ void KeepAddress(T*& address) {
  asm("" : "+l"(address));
  __builtin_assume(__isGlobal(address));
}

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

// Bit `at` where it is below `end`, or none.
__device__ __forceinline__ uint32_t BitBelow(uint32_t at, uint32_t end) {
  return at < end ? 1u << at : 0u;
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

// The same for targets between 0 and 1; `small` and `big` are the parts of y and 1 - y that weigh
// the less and the more probable of the two answers.
template <bool kSlope, typename A, int kCount>
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
    const double log_sum = power == Power::kAny ? log(static_cast<double>(sum)) : 0;
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
      const A share = big == 0 ? inverse : inverse * e[k] / (small * e[k] + big);
      const A by_entropy = inverse * (z[k] >= 0 ? big - small * e[k] : small * e[k] - big);
      slope[k] = scaled[k] * ((1 - 2 * y[k]) * gamma * (share * Finite(entropy[k])) + by_entropy);
    }
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
constexpr Digits kDigitsOf = sizeof(T) > 2 || kWant == Want::kSum ? Digits::kFull
                             : kWant == Want::kBoth               ? Digits::kHalfWithSum
                                                                  : Digits::kHalf;

template <typename T, Want kWant>
__device__ __forceinline__ T* Elements(const Params& p, int64_t offset) {
  return static_cast<T*>(kWant == Want::kLoss ? p.call.loss : p.call.gradient) + offset;
}

// Soft labels.
template <typename T, typename L, int kCount, Rows kRows, Want kWant>
__global__ void __launch_bounds__(kThreads) Soft(const __grid_constant__ Params p) {
  using A = Accumulator<T>;
  constexpr bool kSlope = kWant == Want::kGradient || kWant == Want::kBoth;
  constexpr bool kSums = kWant == Want::kSum || kWant == Want::kBoth;
  uint32_t block = blockIdx.x;
  const int64_t begin = p.splits.Peel(block) * p.per_block;
  const Entry<T, L> entry(p, block, begin);
  const int length = static_cast<int>(min(p.size - begin, p.per_block));
  const bool clustered = kSums && p.partials == nullptr;
  if (clustered) ArriveInCluster();
  A total = 0;

#pragma unroll 1
  for (int at = threadIdx.x * kCount; at < length; at += kThreads * kCount) {
    const int left = length - at;
    const bool whole = left >= kCount;
    const auto logits = LoadSome<T, kCount>(entry.logits + at, whole, left);
    const auto labels = LoadSome<L, kCount>(entry.labels + at, whole, left);
    uint32_t row = entry.skipped + at;
    const uint32_t position = p.classes.Peel(row);
    Row<A> terms[kCount];
    terms[0] = entry.ReadRow(row);
    if constexpr (kRows == Rows::kAny) {
#pragma unroll
      for (int k = 1; k < kCount; ++k) {
        terms[k] = entry.ReadRow(p.classes.Quotient(entry.skipped + min(at + k, length - 1)));
      }
    } else {
      const int boundary = static_cast<int>(min(p.classes.divisor() - position, uint32_t{kCount}));
      const Row<A> second = boundary < min(left, kCount) ? entry.ReadRow(row + 1) : terms[0];
#pragma unroll
      for (int k = 1; k < kCount; ++k) terms[k] = k < boundary ? terms[0] : second;
    }
    A z[kCount], loss[kCount], slope[kCount], factor[kCount], y[kCount];
    WidenAll(z, logits);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      y[k] = static_cast<A>(Widen(labels.values[k]));
      factor[k] = y[k] * terms[k].positive + (1 - y[k]) * terms[k].negative;
    }
    EvaluateSoft<kSlope>(loss, slope, z, y, factor, p.call.power, entry.gamma);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (k >= left) loss[k] = 0;
    }
    if constexpr (kWant != Want::kSum) {
      StoreSome<T, kCount>(Elements<T, kWant>(p, entry.elements + at), kSlope ? slope : loss, whole,
                           left);
    }
    if constexpr (kSums) total += SumOf(loss);
  }
  if constexpr (kSums) Finish(p, block, clustered, total);
}

// Of class labels, kCount elements from `at` on: writes their results to `elements`, and returns
// the sum of their losses if it is wanted. What is plain has no weights, and no ignored rows.
template <typename T, int kCount, Rows kRows, Want kWant, bool kPlain = false>
__device__ __forceinline__ Accumulator<T> EvaluateNeighbours(const Params& p,
                                                             const Entry<T, int32_t>& entry,
                                                             T* elements, int at,
                                                             const Pack<T, kCount>& logits,
                                                             Power power) {
  using A = Accumulator<T>;
  constexpr bool kSlope = kWant == Want::kGradient || kWant == Want::kBoth;
  constexpr bool kSums = kWant == Want::kSum || kWant == Want::kBoth;
  constexpr Digits kDigits = kDigitsOf<T, kWant>;
  const bool has_ignored = !kPlain && p.call.has_ignored;
  T* const to = kWant == Want::kSum ? nullptr : elements + at;
  A z[kCount], loss[kCount], slope[kCount], factor[kCount];
  if constexpr (kCount > 1 && (kRows == Rows::kOne || kRows == Rows::kTwo)) {
    // The neighbours from the boundary on are of a second row.
    uint32_t row = entry.skipped + at;
    const uint32_t position = p.classes.Peel(row);
    const uint32_t boundary =
        kRows == Rows::kOne ? kCount : min(p.classes.divisor() - position, uint32_t{kCount});
    const Row<A> first = entry.template ReadRow<kPlain>(row);
    const Row<A> second = kRows == Rows::kOne
                              ? first
                              : entry.template ReadRow<kPlain>(row + (boundary < kCount ? 1 : 0));
    const bool first_ignored = has_ignored && first.label == p.call.ignored;
    const bool second_ignored = has_ignored && second.label == p.call.ignored;
    uint32_t target = first_ignored ? kCount : entry.Position(first.label) - position;
    uint32_t second_target = second_ignored ? kCount : entry.Position(second.label);
    const bool in_first = target < boundary;
    const bool in_second = kRows == Rows::kTwo && second_target < kCount - boundary;
    WidenAll(z, logits);
    const bool any = __any_sync(__activemask(), in_first || in_second);
    A total = 0;
    A of_target[2];
    if (any) {
      const auto evaluate = [&](uint32_t k, A its_factor, A& its_slope) {
        const A its_z[1] = {Widen(entry.logits[at + k])};
        const A factors[1] = {its_factor};
        const bool is_target[1] = {true};
        A its_loss[1], its_slopes[1];
        EvaluateHard<kSlope, true, kDigits>(its_loss, its_slopes, its_z, is_target, factors, power,
                                            entry.gamma);
        total += its_loss[0];
        its_slope = kSlope ? its_slopes[0] : its_loss[0];
        // Which has no loss.
        if constexpr (kSums) {
#pragma unroll
          for (int i = 0; i < kCount; ++i) z[i] = i == k ? A(-INFINITY) : z[i];
        }
      };
      if (in_first) evaluate(target, first.positive, of_target[0]);
      second_target += boundary;
      if (in_second) evaluate(second_target, second.positive, of_target[1]);
    }
    const auto evaluate = [&](auto&& factor_of) {
      const bool none[kCount] = {};
#pragma unroll
      for (int k = 0; k < kCount; ++k) factor[k] = factor_of(k);
      EvaluateHard<kSlope, false, kDigits>(loss, slope, z, none, factor, power, entry.gamma);
    };
    if (kRows == Rows::kOne || kPlain || !entry.weighted()) {
      evaluate([&](int) { return first.negative; });
    } else {
      evaluate([&](int k) { return k < boundary ? first.negative : second.negative; });
    }
    if (has_ignored) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const bool ignored = k < boundary ? first_ignored : second_ignored;
        loss[k] = ignored ? A(0) : loss[k];
        slope[k] = ignored ? A(0) : slope[k];
      }
    }
    if constexpr (kWant != Want::kSum) {
      StoreAll<T, kCount>(to, kSlope ? slope : loss);
      if (any) {
        if (in_first) to[target] = Narrow<T>(of_target[0]);
        if (in_second) to[second_target] = Narrow<T>(of_target[1]);
      }
    }
    return kSums ? total + SumOf(loss) : A(0);
  } else {
    Row<A> terms[kCount];
    bool target[kCount];
    if constexpr (kRows == Rows::kEach) {
      entry.ReadRows(terms, at);
#pragma unroll
      for (int k = 0; k < kCount; ++k) target[k] = entry.Position(terms[k].label) == 0;
    } else {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        uint32_t row = entry.skipped + at + k;
        const uint32_t position = p.classes.Peel(row);
        terms[k] = entry.ReadRow(row);
        target[k] = entry.Position(terms[k].label) == position;
      }
    }
    WidenAll(z, logits);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      factor[k] = target[k] ? terms[k].positive : terms[k].negative;
    }
    EvaluateHard<kSlope, true, kDigits>(loss, slope, z, target, factor, power, entry.gamma);
    if (has_ignored) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const bool ignored = terms[k].label == p.call.ignored;
        loss[k] = ignored ? A(0) : loss[k];
        slope[k] = ignored ? A(0) : slope[k];
      }
    }
    if constexpr (kWant != Want::kSum) StoreAll<T, kCount>(to, kSlope ? slope : loss);
    return kSums ? SumOf(loss) : A(0);
  }
}

// Class labels.
template <typename T, int kCount, Rows kRows, Want kWant, int kPower>
__global__ void __launch_bounds__(kThreads) Hard(const __grid_constant__ Params p) {
  using A = Accumulator<T>;
  constexpr bool kSums = kWant == Want::kSum || kWant == Want::kBoth;
  constexpr bool kByInstructions = sizeof(T) == 2 && kCount == kInRow<T> && kWant != Want::kSum;
  const Power power = kPower == kRunTime ? p.call.power : static_cast<Power>(kPower);
  uint32_t block = blockIdx.x;
  const int64_t begin = p.splits.Peel(block) * p.per_block;
  Entry<T, int32_t> entry(p, block, begin);
  const int length = static_cast<int>(min(p.size - begin, p.per_block));
  const bool clustered = kSums && p.partials == nullptr;
  if (clustered) ArriveInCluster();
  A total = 0;
  T* elements = kWant == Want::kSum ? nullptr : Elements<T, kWant>(p, entry.elements);
  if constexpr (kByInstructions) {
    KeepAddress(elements);
    KeepAddress(entry.logits);
    KeepAddress(entry.labels);
  }
  const int whole = length / kCount * kCount;
  const auto walk = [&](auto plain) {
#pragma unroll 1
    for (int at = threadIdx.x * kCount; at < whole; at += kThreads * kCount) {
      const auto logits = LoadPack<kCount>(entry.logits + at);
      total += EvaluateNeighbours<T, kCount, kRows, kWant, plain.value>(p, entry, elements, at,
                                                                        logits, power);
    }
  };
  // Those of 16 bits are bound by instructions, of which weights and ignored rows take many.
  if (kByInstructions && !entry.weighted() && !p.call.has_ignored) {
    walk(std::true_type());
  } else {
    walk(std::false_type());
  }
  // The elements of a batch entry need not be a multiple of kCount.
  const int at = whole + static_cast<int>(threadIdx.x);
  if (kRows != Rows::kOne && at < length) {
    total += EvaluateNeighbours<T, 1, Rows::kAny, kWant>(p, entry, elements, at,
                                                         LoadPack<1>(entry.logits + at), power);
  }
  if constexpr (kSums) Finish(p, block, clustered, total);
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

// And of batches.
struct FewBatchedParams : FewParams {
  FastDivider splits;
  BatchMap<Sigmoid::kOperands> batch;

  FewBatchedParams(const Sigmoid& call, int64_t per_block, int64_t splits)
      : FewParams(call, per_block), splits(splits), batch(call.batch) {}
};

// Class labels, without weights, of so few elements that time passes waiting: nothing that is read
// waits for anything else that is read. Neighbours are of up to two rows. The blocks of a batch
// entry are a cluster where there is a sum.
template <typename T, int kCount, Want kWant, int kPower, typename Params>
__global__ void __launch_bounds__(kFewThreads) FewElements(const __grid_constant__ Params p) {
  using A = Accumulator<T>;
  constexpr bool kBatched = std::is_same_v<Params, FewBatchedParams>;
  constexpr bool kSlope = kWant == Want::kGradient || kWant == Want::kBoth;
  constexpr bool kSums = kWant == Want::kSum || kWant == Want::kBoth;
  if constexpr (kSums) ArriveInCluster();
  uint32_t entry = blockIdx.x;
  uint32_t block = blockIdx.x;
  const T* logits = static_cast<const T*>(p.logits);
  const int32_t* labels = p.labels;
  const int32_t* class_ids = p.class_ids;
  const A* scales = static_cast<const A*>(p.scale);
  const A* parameters = static_cast<const A*>(p.parameters);
  T* elements = static_cast<T*>(p.elements);
  A* sum = static_cast<A*>(p.sum);
  if constexpr (kBatched) {
    block = p.splits.Peel(entry);
    const auto offsets = p.batch.AllOffsets(entry);
    logits += offsets[Sigmoid::kLogits];
    labels += offsets[Sigmoid::kLabels];
    class_ids += offsets[Sigmoid::kClassIds];
    scales += offsets[Sigmoid::kScale];
    parameters += offsets[Sigmoid::kParameters];
    elements += offsets[Sigmoid::kElements];
    sum += offsets[Sigmoid::kSum];
  }
  const auto power = kPower == kRunTime ? p.power : static_cast<Power>(kPower);
  struct Read {
    Pack<T, kCount> logits;
    uint32_t position;
    uint32_t boundary;
    int32_t first;
    int32_t second;
  };
  // Threads beyond the end read what others do, which is sooner done than to ask.
  const auto read = [&](uint32_t at) {
    Read result;
    uint32_t row = min(at, p.size - kCount);
    result.logits = LoadPack<kCount>(logits + row);
    result.position = p.classes.Peel(row);
    result.boundary = min(p.classes.divisor() - result.position, uint32_t{kCount});
    result.first = labels[row];
    result.second = labels[row + (result.boundary < kCount ? 1 : 0)];
    return result;
  };
  const uint32_t begin = block * p.per_block;
  const uint32_t end = min(p.size, begin + p.per_block);
  const uint32_t stride = blockDim.x * kCount;
  uint32_t at = begin + threadIdx.x * kCount;
  Read next = read(at);
  const A gamma = parameters[0];
  const A negative = scales[0] * parameters[1];
  const A positive = scales[0] * parameters[2];
  const auto first_class = static_cast<uint32_t>(class_ids[0] - kFirstClassId);
  A total = 0;
#pragma unroll 1
  while (at < end) {
    const Read own = next;
    if (kSums && at + stride < end) next = read(at + stride);
    const uint32_t boundary = own.boundary;
    const uint32_t targets = BitBelow(own.first - first_class - own.position, boundary) |
                             BitBelow(own.second - first_class, kCount - boundary) << boundary;
    A z[kCount], loss[kCount], slope[kCount], factor[kCount];
    bool target[kCount];
    WidenAll(z, own.logits);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      target[k] = targets >> k & 1;
      factor[k] = target[k] ? positive : negative;
    }
    EvaluateHard<kSlope, true, kDigitsOf<T, kWant>>(loss, slope, z, target, factor, power, gamma);
    if constexpr (kWant != Want::kSum) StoreAll<T, kCount>(elements + at, kSlope ? slope : loss);
    if constexpr (!kSums) return;
    total += SumOf(loss);
    at += stride;
  }
  if constexpr (kSums) {
    total = SumOverAnyBlock(total);
    if (SumOverCluster(total)) *sum = total;
  }
}

// Class labels, without weights: results without a sum, in one batch entry. All elements are
// written as if they were no targets, without a look at rows; then each of the first threads has a
// row, and writes its target if that is among the elements of the block.
template <typename T, Want kWant, int kPower>
__global__ void __launch_bounds__(kLastThreads) TargetsLast(const __grid_constant__ FewParams p) {
  constexpr bool kSlope = kWant == Want::kGradient;
  constexpr int kCount = kPackElements<T>;
  constexpr uint32_t kStride = kLastThreads * kCount;
  constexpr uint32_t kElements = kLastPacks * kStride;
  static_assert(kElements / kLastClasses + 2 <= kLastThreads);
  constexpr Digits kDigits = kDigitsOf<T, kWant>;
  constexpr auto power = static_cast<Power>(kPower);
  const uint32_t begin = blockIdx.x * kElements;
  const uint32_t length = min(p.size - begin, kElements);
  const T* logits = static_cast<const T*>(p.logits) + begin;
  T* elements = static_cast<T*>(p.elements) + begin;
  const uint32_t own = threadIdx.x * kCount;
  Pack<T, kCount> packs[kLastPacks];
#pragma unroll
  for (int i = 0; i < kLastPacks; ++i) {
    if (own + i * kStride < length) packs[i] = LoadPack<kCount>(logits + own + i * kStride);
  }
  uint32_t row = begin;
  const uint32_t skipped = p.classes.Peel(row);
  const uint32_t rows = p.classes.Quotient(begin + length - 1) - row + 1;
  const bool has_row = threadIdx.x < rows;
  const int32_t label = has_row ? p.labels[row + threadIdx.x] : 0;
  const auto* parameters = static_cast<const float*>(p.parameters);
  const float scale = *static_cast<const float*>(p.scale);
  const float gamma = parameters[0];
  const float negative = scale * parameters[1];
  const float positive = scale * parameters[2];
  const uint32_t position = label - static_cast<uint32_t>(p.class_ids[0] - kFirstClassId);
  // What is before the block wraps.
  const uint32_t target = threadIdx.x * p.classes.divisor() - skipped + position;
  const bool has_target = has_row && position < p.classes.divisor() && target < length;
  const float its_z[1] = {has_target ? Widen(logits[target]) : 0.0f};
#pragma unroll
  for (int i = 0; i < kLastPacks; ++i) {
    if (own + i * kStride >= length) break;
    float z[kCount], loss[kCount], slope[kCount], factor[kCount];
    const bool none[kCount] = {};
    WidenAll(z, packs[i]);
#pragma unroll
    for (int k = 0; k < kCount; ++k) factor[k] = negative;
    EvaluateHard<kSlope, false, kDigits>(loss, slope, z, none, factor, power, gamma);
    StoreAll<T, kCount>(elements + own + i * kStride, kSlope ? slope : loss);
  }
  __syncthreads();
  if (!has_target) return;
  const bool is_target[1] = {true};
  const float factors[1] = {positive};
  float its_loss[1], its_slope[1];
  EvaluateHard<kSlope, true, kDigits>(its_loss, its_slope, its_z, is_target, factors, power, gamma);
  elements[target] = Narrow<T>(kSlope ? its_slope[0] : its_loss[0]);
}

// Class labels, without weights: results of f32 without a sum, in one batch entry of many elements.
// Memory bounds them, and is used best where each access of a warp is to neighbours: those of a
// thread are apart, and all under way before anything is waited for.
template <int kPacks, Rows kRows, Want kWant, int kPower>
__global__ void __launch_bounds__(kSpreadThreads)
    SpreadElements(const __grid_constant__ FewParams p) {
  constexpr bool kSlope = kWant == Want::kGradient;
  constexpr int kCount = kPackElements<float>;
  constexpr uint32_t kStride = kSpreadThreads * kCount;
  constexpr auto power = static_cast<Power>(kPower);
  const float* logits = static_cast<const float*>(p.logits);
  float* elements = static_cast<float*>(p.elements);
  const uint32_t begin = blockIdx.x * (kPacks * kStride) + threadIdx.x * kCount;
  Pack<float, kCount> packs[kPacks];
  // The labels of the row that a pack begins in and of the next, or of each element.
  Pack<int32_t, kRows == Rows::kEach ? kCount : 2> rows[kPacks];
  uint32_t positions[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const uint32_t at = begin + i * kStride;
    if (at >= p.size) break;
    packs[i] = LoadPack<kCount>(logits + at);
    if constexpr (kRows == Rows::kEach) {
      rows[i] = LoadPack<kCount>(p.labels + at);
    } else {
      uint32_t row = at;
      positions[i] = p.classes.Peel(row);
      rows[i].values[0] = p.labels[row];
      if constexpr (kRows == Rows::kTwo) {
        const bool one = positions[i] + kCount <= p.classes.divisor();
        rows[i].values[1] = p.labels[row + (one ? 0 : 1)];
      }
    }
  }
  const auto* parameters = static_cast<const float*>(p.parameters);
  const float scale = *static_cast<const float*>(p.scale);
  const float gamma = parameters[0];
  const float negative = scale * parameters[1];
  const float positive = scale * parameters[2];
  const auto first_class = static_cast<uint32_t>(p.class_ids[0] - kFirstClassId);
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const uint32_t at = begin + i * kStride;
    if (at >= p.size) break;
    float z[kCount], loss[kCount], slope[kCount], factor[kCount];
    WidenAll(z, packs[i]);
    if constexpr (kRows == Rows::kEach) {
      bool target[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        target[k] = static_cast<uint32_t>(rows[i].values[k]) == first_class;
        factor[k] = target[k] ? positive : negative;
      }
      EvaluateHard<kSlope, true>(loss, slope, z, target, factor, power, gamma);
      StoreAll<float, kCount>(elements + at, kSlope ? slope : loss);
    } else {
      const uint32_t boundary =
          kRows == Rows::kOne ? kCount : min(p.classes.divisor() - positions[i], uint32_t{kCount});
      // Places of targets in the pack, if they are less than its size.
      const uint32_t first = rows[i].values[0] - first_class - positions[i];
      const uint32_t second = kRows == Rows::kTwo ? rows[i].values[1] - first_class : kCount;
      const bool in_first = first < boundary;
      const bool in_second = kRows == Rows::kTwo && second < kCount - boundary;
      const bool any = __any_sync(__activemask(), in_first || in_second);
      float of_target[2];
      if (any) {
        const auto evaluate = [&](uint32_t k) {
          const float its_z[1] = {logits[at + k]};
          const float factors[1] = {positive};
          const bool is_target[1] = {true};
          float its_loss[1], its_slope[1];
          EvaluateHard<kSlope, true>(its_loss, its_slope, its_z, is_target, factors, power, gamma);
          return kSlope ? its_slope[0] : its_loss[0];
        };
        if (in_first) of_target[0] = evaluate(first);
        if (in_second) of_target[1] = evaluate(boundary + second);
      }
      const bool none[kCount] = {};
#pragma unroll
      for (int k = 0; k < kCount; ++k) factor[k] = negative;
      EvaluateHard<kSlope, false>(loss, slope, z, none, factor, power, gamma);
      StoreAll<float, kCount>(elements + at, kSlope ? slope : loss);
      if (any) {
        if (in_first) elements[at + first] = of_target[0];
        if (in_second) elements[at + boundary + second] = of_target[1];
      }
    }
  }
}

namespace ptx = ::cuda::ptx;

// Of StreamedSum: threads that evaluate tiles, elements of a tile, tiles in shared memory at a
// time, and blocks of a multiprocessor, whose shared memory they fill.
constexpr int kEvaluators = 128;
constexpr int kTile = 32 * kEvaluators;
constexpr int kStages = 3;
template <typename T>
constexpr int kStreamingBlocks = 192 * 1024 / (kStages * kTile * sizeof(T));

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void Wait(uint64_t* barrier, uint32_t parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// A place in the ring of tiles, and the parity of the barriers' phase there.
struct Turn {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};
#endif

// The sum of a part of a batch entry whose rows have no weights, for class labels. Tiles of it come
// to shared memory by bulk copies. One warp takes the targets out of a tile, of which a row has at
// most one, and leaves an element without loss in their places; the others evaluate what there is
// and need to know neither labels nor rows.
template <typename T, int kPower>
__global__ void __launch_bounds__(kEvaluators + kWarp, kStreamingBlocks<T>)
    StreamedSum(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
  using A = Accumulator<T>;
  constexpr int kPack = kPackElements<T>;
  constexpr Power kThePower = static_cast<Power>(kPower);
  extern __shared__ __align__(128) unsigned char shared[];
  // A tile has arrived, its targets have been taken out, and nobody needs it any longer.
  __shared__ uint64_t full[kStages], ready[kStages], empty[kStages];
  const int lane = threadIdx.x % kWarp;
  const auto tile_of = [&](int stage) { return reinterpret_cast<T*>(shared) + stage * kTile; };
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(full + i, 1);
      ptx::mbarrier_init(ready + i, kWarp);
      ptx::mbarrier_init(empty + i, kEvaluators);
    }
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
  }
  uint32_t block = blockIdx.x;
  const int64_t begin = p.splits.Peel(block) * p.per_block;
  const Entry<T, int32_t> entry(p, block, begin);
  const int length = static_cast<int>(min(p.size - begin, p.per_block));
  __syncthreads();

  Turn turn;
  A total = 0;
  if (threadIdx.x >= kEvaluators) {
    int fetched = 0;
    const auto fetch = [&](int stage) {
      if (fetched >= length) return;
      if (lane == 0) {
        const uint32_t bytes = min(length - fetched, kTile) * sizeof(T) / kPackBytes * kPackBytes;
        ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared,
                                       full + stage, bytes);
        if (bytes > 0) {
          ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, tile_of(stage),
                             entry.logits + fetched, bytes, full + stage);
        }
      }
      fetched += kTile;
    };
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) fetch(stage);

    // Each lane has a row of a group, whose target may be in a later tile than its first element.
    // The label of its row of the next group is on its way.
    const int group = kWarp * static_cast<int>(p.classes.divisor());
    const int skipped = static_cast<int>(entry.skipped);
    int row_begin = lane * static_cast<int>(p.classes.divisor()) - skipped;
    int group_end = group - skipped;
    const int32_t* labels = entry.labels + lane;
    int32_t label = 0;
    int target;
    A target_logit[1] = {INFINITY};
    const auto next_group = [&] {
      const uint32_t position = entry.Position(label);
      target = position < p.classes.divisor() ? row_begin + static_cast<int>(position) : -1;
      row_begin += group;
      labels += kWarp;
      if (row_begin < length) label = *labels;
    };
    const auto add_targets = [&] {
      if (target_logit[0] == A(INFINITY)) return;
      A loss[1], slope[1];
      const bool is_target[1] = {true};
      const A factor[1] = {entry.positive()};
      EvaluateHard<false, true>(loss, slope, target_logit, is_target, factor, kThePower,
                                entry.gamma);
      total += loss[0];
      target_logit[0] = INFINITY;
    };
    if (row_begin < length) label = *labels;
    next_group();
#pragma unroll 1
    for (int at = 0; at < length; at += kTile, turn.Advance()) {
      const int end = min(at + kTile, length);
      T* tile = tile_of(turn.stage);
      // Copies are of whole accesses, and so are the reads of the last tile.
      const int copied = end / kPack * kPack;
      if (copied < end && lane < kPack) {
        const int i = copied + lane;
        tile[i - at] = i < end ? entry.logits[i] : Narrow<T>(-INFINITY);
      }
      __syncwarp();
      Wait(full + turn.stage, turn.parity);
#pragma unroll 1
      while (true) {
        if (target >= at && target < end) {
          target_logit[0] = Widen(tile[target - at]);
          tile[target - at] = Narrow<T>(-INFINITY);
        }
        if (group_end > end) break;
        add_targets();
        next_group();
        group_end += group;
      }
      ptx::mbarrier_arrive(ready + turn.stage);
      // The tile before this one has been read, or soon will be.
      if (at > 0 && fetched < length) {
        const bool first = turn.stage == 0;
        const int stage = first ? kStages - 1 : turn.stage - 1;
        Wait(empty + stage, first ? turn.parity ^ 1 : turn.parity);
        ptx::fence_proxy_async(ptx::space_shared);
        fetch(stage);
      }
    }
    add_targets();
  } else {
    const auto add = [&](auto&& pack) {
      A z[kPack], loss[kPack], slope[kPack], factor[kPack];
      const bool target[kPack] = {};
      WidenAll(z, pack);
#pragma unroll
      for (int k = 0; k < kPack; ++k) factor[k] = entry.negative();
      EvaluateHard<false, false>(loss, slope, z, target, factor, kThePower, entry.gamma);
#pragma unroll
      for (int k = 0; k < kPack; ++k) total += loss[k];
    };
#pragma unroll 1
    for (int at = 0; at < length; at += kTile, turn.Advance()) {
      const T* own = tile_of(turn.stage) + threadIdx.x * kPack;
      constexpr int kStride = kEvaluators * kPack;
      constexpr int kPacks = kTile / kStride;
      Wait(ready + turn.stage, turn.parity);
      if (length - at >= kTile) {
        Pack<T, kPack> packs[kPacks];
#pragma unroll
        for (int i = 0; i < kPacks; ++i) packs[i] = LoadPack<kPack>(own + i * kStride);
        ptx::mbarrier_arrive(empty + turn.stage);
#pragma unroll
        for (int i = 0; i < kPacks; ++i) add(packs[i]);
      } else {
        // The last tile, which no other follows.
#pragma unroll 1
        for (int i = threadIdx.x * kPack; i < length - at; i += kStride) {
          add(LoadPack<kPack>(own));
          own += kStride;
        }
      }
    }
  }
  const A sum = SumOverBlock<kEvaluators + kWarp>(total);
  if (threadIdx.x == 0) static_cast<A*>(p.partials)[blockIdx.x] = sum;
#endif
}

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

cudaError_t LaunchBlocks(void (*kernel)(Params), cudaStream_t stream, const Params& params,
                         int64_t blocks) {
  const uint32_t splits = params.splits.divisor();
  return params.call.sum != nullptr && params.partials == nullptr && splits > 1
             ? jaxops::cuda::LaunchClusters(kernel, blocks, splits, kThreads, 0, stream, params)
             : Launch(kernel, blocks, stream, params);
}

template <typename T, typename L, int kCount, Rows kRows>
cudaError_t LaunchSoft(cudaStream_t stream, const Params& params, int64_t blocks) {
  return DispatchWant(params.call, [&](auto want) {
    return LaunchBlocks(Soft<T, L, kCount, kRows, want.value>, stream, params, blocks);
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

// Class labels: the exponent is known when the kernel is compiled, where several neighbours are of
// one row any that needs no power, elsewhere and in f64 only that of the paper.
template <typename T, int kCount, Rows kRows>
cudaError_t LaunchHard(cudaStream_t stream, const Params& params, int64_t blocks) {
  const auto launch = [&](auto power) {
    return DispatchWant(params.call, [&](auto want) {
      return LaunchBlocks(Hard<T, kCount, kRows, want.value, power.value>, stream, params, blocks);
    });
  };
  if constexpr (kRows == Rows::kOne && kCount > 1 && !std::is_same_v<T, double>) {
    return DispatchPower(params.call.power, launch);
  }
  if (params.call.power == Power::kTwo) {
    return launch(std::integral_constant<int, static_cast<int>(Power::kTwo)>());
  }
  return launch(std::integral_constant<int, kRunTime>());
}

// Whether a call is made by FewElements; where there is a sum, independent of the number of
// entries.
bool AreFew(const Sigmoid& call) {
  const int64_t size = call.rows * call.classes;
  const bool few = call.sum != nullptr ? size <= kFewSummed && jaxops::cuda::HasClusters()
                                       : call.batch.size() == 1 && size <= kFewAlone;
  return few && call.weight == nullptr && !call.has_ignored && call.classes >= kShortRows &&
         size % kShortRows == 0;
}

template <typename T>
cudaError_t LaunchFew(cudaStream_t stream, const Sigmoid& call) {
  const int64_t size = call.rows * call.classes;
  const bool fewest = call.sum == nullptr && size <= kFewest;
  int64_t threads = fewest ? 256 : 128;
  int64_t per_block = (fewest ? kShortRows / 2 : kShortRows) * threads;
  int64_t splits = CeilDiv(size, per_block);
  if (call.sum != nullptr) {
    constexpr int64_t kUnit = kShortRows * kWarp;
    splits = std::min(CeilDiv(size, kFewABlock), kClusterBlocks);
    per_block = CeilDiv(CeilDiv(size, splits), kUnit) * kUnit;
    threads = std::min<int64_t>(per_block / kShortRows, kFewThreads);
  }
  const auto launch = [&](auto count, auto want, auto power, const auto& params) {
    const auto kernel =
        FewElements<T, count.value, want.value, power.value, std::remove_cvref_t<decltype(params)>>;
    const int64_t blocks = call.batch.size() * splits;
    return call.sum != nullptr && splits > 1
               ? jaxops::cuda::LaunchClusters(kernel, blocks, static_cast<unsigned>(splits),
                                              static_cast<int>(threads), 0, stream, params)
               : jaxops::cuda::Launch(kernel, blocks, static_cast<int>(threads), 0, stream, params);
  };
  const FewParams alone(call, per_block);
  const auto with_power = [&](auto power) {
    return DispatchWant(call, [&](auto want) {
      constexpr std::integral_constant<int, kShortRows> kAll;
      constexpr std::integral_constant<int, kShortRows / 2> kHalf;
      if constexpr (want.value == Want::kSum || want.value == Want::kBoth) {
        return call.batch.size() > 1
                   ? launch(kAll, want, power, FewBatchedParams(call, per_block, splits))
                   : launch(kAll, want, power, alone);
      } else {
        return fewest ? launch(kHalf, want, power, alone) : launch(kAll, want, power, alone);
      }
    });
  };
  return call.power == Power::kTwo
             ? with_power(std::integral_constant<int, static_cast<int>(Power::kTwo)>())
             : with_power(std::integral_constant<int, kRunTime>());
}

// Whether a call is made by TargetsLast: results of 16 bits, and those of f32 that SpreadElements
// is no better for.
template <typename T>
bool AreTargetsLast(const Sigmoid& call) {
  const int64_t size = call.rows * call.classes;
  constexpr int kCount = kPackElements<T>;
  const bool better = sizeof(T) == 2 || call.classes % kCount != 0 || call.power == Power::kAny;
  return better && call.sum == nullptr && call.batch.size() == 1 && call.weight == nullptr &&
         !call.has_ignored && size % kCount == 0 && call.classes >= kLastClasses &&
         size < int64_t{1} << 31;
}

template <typename T>
cudaError_t LaunchTargetsLast(cudaStream_t stream, const Sigmoid& call) {
  constexpr int64_t kPerBlock = kLastThreads * kLastPacks * kPackElements<T>;
  return DispatchPower(call.power, [&](auto power) {
    return DispatchBool(call.gradient != nullptr, [&](auto gradient) {
      constexpr Want kWanted = gradient.value ? Want::kGradient : Want::kLoss;
      return jaxops::cuda::Launch(TargetsLast<T, kWanted, power.value>,
                                  CeilDiv(call.rows * call.classes, kPerBlock), kLastThreads, 0,
                                  stream, FewParams(call, kPerBlock));
    });
  });
}

// Whether a call that is not of few elements is made by SpreadElements. An exponent that needs a
// power of each element makes instructions count, of which neighbours of a thread take fewer.
bool AreSpread(const Sigmoid& call) {
  const int64_t size = call.rows * call.classes;
  constexpr int kCount = kPackElements<float>;
  return call.sum == nullptr && call.batch.size() == 1 && call.power != Power::kAny &&
         call.weight == nullptr && !call.has_ignored && size % kCount == 0 &&
         (call.classes >= kCount || call.classes == 1) && size < int64_t{1} << 31;
}

cudaError_t LaunchSpread(cudaStream_t stream, const Sigmoid& call) {
  constexpr int kCount = kPackElements<float>;
  const int64_t size = call.rows * call.classes;
  const auto launch = [&](auto packs, auto rows, auto want, auto power) {
    constexpr int64_t kPerBlock = packs.value * kSpreadThreads * kCount;
    return jaxops::cuda::Launch(SpreadElements<packs.value, rows.value, want.value, power.value>,
                                CeilDiv(size, kPerBlock), kSpreadThreads, 0, stream,
                                FewParams(call, kPerBlock));
  };
  const auto with_rows = [&](auto rows, auto want, auto power) {
    return size >= kManyElements
               ? launch(std::integral_constant<int, kSpreadManyPacks>(), rows, want, power)
               : launch(std::integral_constant<int, kSpreadPacks>(), rows, want, power);
  };
  return DispatchPower(call.power, [&](auto power) {
    if constexpr (power.value == static_cast<int>(Power::kAny)) {
      return cudaErrorInvalidValue;
    } else {
      return DispatchBool(call.gradient != nullptr, [&](auto gradient) {
        constexpr std::integral_constant<Want, gradient.value ? Want::kGradient : Want::kLoss>
            kWanted;
        if (call.classes == 1) {
          return with_rows(std::integral_constant<Rows, Rows::kEach>(), kWanted, power);
        }
        return call.classes % kCount == 0
                   ? with_rows(std::integral_constant<Rows, Rows::kOne>(), kWanted, power)
                   : with_rows(std::integral_constant<Rows, Rows::kTwo>(), kWanted, power);
      });
    }
  });
}

// Whether a sum is made by StreamedSum: of one device, that depends on shapes alone.
bool Streams(const Sigmoid& call, bool aligned) {
  const bool sum_alone = call.sum != nullptr && call.gradient == nullptr;
  const bool classes = call.classes >= kFewestStreamed && call.classes <= kMostStreamed;
  const bool hard = !call.soft && call.dtype != DType::kF64;
  return sum_alone && hard && aligned && classes && call.weight == nullptr && !call.has_ignored &&
         call.rows * call.classes >= kStreamedElements && jaxops::cuda::HasClusters();
}

template <typename T>
cudaError_t LaunchStreamed(cudaStream_t stream, const Params& params, int64_t blocks) {
  return DispatchPower(params.call.power, [&](auto power) {
    return jaxops::cuda::Launch(StreamedSum<T, power.value>, blocks, kEvaluators + kWarp,
                                kStages * kTile * sizeof(T), stream, params);
  });
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
    if constexpr (std::is_same_v<L, int32_t> && !std::is_same_v<T, double>) {
      if (AreFew(call)) return LaunchFew<T>(stream, call);
      if (AreTargetsLast<T>(call)) return LaunchTargetsLast<T>(stream, call);
      if (std::is_same_v<T, float> && AreSpread(call)) return LaunchSpread(stream, call);
    }
    constexpr bool kHard = std::is_same_v<L, int32_t>;
    constexpr int kMany = kHard ? kInRow<T> : kPackElements<T>;
    constexpr int kFew = kHard ? kShortRows : kPackElements<T>;
    const bool many = call.classes >= kMany;
    const bool one_row = kHard && call.classes % kMany == 0;
    const bool each = kHard && call.classes == 1;
    const bool aligned = entries == 1 || size % kMany == 0;
    const int64_t stride = kThreads * (!aligned ? 1 : many || each ? kMany : kFew);
    const bool streamed = Streams(call, aligned);
    // Enough work a thread to make up for what a block costs, once there are blocks for the whole
    // device.
    const auto fill = [&](int64_t elements, int64_t most) {
      return CeilDiv(size, stride * std::clamp<int64_t>(elements / (stride * 1024), 1, most));
    };
    if (call.sum == nullptr) {
      // Memory is kept busier to the end by short blocks, which cost instructions.
      const bool by_memory = sizeof(T) == sizeof(float) && many && call.power != Power::kAny;
      const bool by_instructions = sizeof(T) < sizeof(float) && entries * size >= kManyElements;
      splits = fill(entries * size, by_memory ? 2 : by_instructions ? 8 : 4);
    } else if (streamed) {
      // As many as the 132 multiprocessors of an H100 or H200 run at a time.
      splits = std::min<int64_t>(splits, 132 * kStreamingBlocks<T>);
    } else if (sizeof(T) == sizeof(double) ||
               (call.gradient != nullptr && one_row && sizeof(T) == sizeof(float))) {
      // Bound by memory, or by instructions of which a block has many: short ones end more evenly.
      // The order of additions must not depend on how many entries there are.
      splits = std::min(splits, fill(size, 4));
    } else {
      splits = std::min(splits, kSumBlocks);
    }
    // Of a tile, blocks share accesses alone.
    const int64_t unit = streamed ? kMany : stride;
    const int64_t per_block = CeilDiv(CeilDiv(size, splits), unit) * unit;
    const int64_t blocks = entries * splits;
    if (per_block + call.classes > INT32_MAX) return cudaErrorInvalidValue;
    const bool clustered = splits == 1 || (splits <= kClusterBlocks && jaxops::cuda::HasClusters());
    const Params params{call,
                        size,
                        per_block,
                        FastDivider(splits),
                        FastDivider(call.classes),
                        FastDivider64(call.classes),
                        clustered ? nullptr : partials};
    const auto launch = [&]() -> cudaError_t {
      if constexpr (kHard) {
        if (streamed) return LaunchStreamed<T>(stream, params, blocks);
        if (aligned && one_row) return LaunchHard<T, kMany, Rows::kOne>(stream, params, blocks);
        if (aligned && each) return LaunchHard<T, kMany, Rows::kEach>(stream, params, blocks);
        if (aligned && many) return LaunchHard<T, kMany, Rows::kTwo>(stream, params, blocks);
        if (aligned) return LaunchHard<T, kFew, Rows::kAny>(stream, params, blocks);
        return LaunchHard<T, 1, Rows::kAny>(stream, params, blocks);
      } else {
        if (aligned && many) return LaunchSoft<T, L, kMany, Rows::kTwo>(stream, params, blocks);
        if (aligned) return LaunchSoft<T, L, kFew, Rows::kAny>(stream, params, blocks);
        return LaunchSoft<T, L, 1, Rows::kAny>(stream, params, blocks);
      }
    };
    const cudaError_t error = launch();
    if (error != cudaSuccess || call.sum == nullptr || clustered) return error;
    return CombineSums<Accumulator<T>>(stream, call, splits, partials);
  });
}

}  // namespace jaxops::focal_loss::cuda
