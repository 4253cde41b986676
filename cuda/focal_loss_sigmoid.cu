// The sigmoid focal loss: one pass over the logits for a sum, the gradient, or both.
//
// A batch entry is a run of elements that thread blocks share out; a thread takes neighbours.
// Labels and weights belong to rows. Neighbours are of one row where their number divides that of
// classes, as it usually does. Neighbours of two rows read the terms of both, and of
// rows shorter than an access the terms of each element; rows of one element are read like the
// elements. Batch entries that do not begin where an access may are taken element by element, and
// so are gradients too small to give every thread of the device more than one.
//
// Long sums without weights are bound by instructions rather than memory. Where blocks can have
// their shared memory filled for them, they wait for no logits and look up no rows (StreamedSum).
#include <cstdint>
#include <cuda/ptx>

#include "common/fast_divide.h"
#include "cuda/focal_loss.cuh"
#include "cuda/focal_loss.h"
#include "cuda/focal_loss_sum.cuh"

namespace jaxops::focal_loss::cuda {
namespace {

// Neighbours that a thread takes at a time, and those of which each may have a row of its own.
constexpr int kInRow = 8;
constexpr int kShortRows = 4;

// Results of so few elements in all are made by threads of one element each.
constexpr int64_t kFewElements = 1 << 17;

// Blocks of a sum at the most: they fill the largest devices twice.
constexpr int64_t kSumBlocks = 2112;

// Sums of so many elements go through shared memory, where rows are not enormous, nor so short that
// the warp that takes out their targets falls behind those that evaluate.
constexpr int64_t kStreamedElements = 1 << 24;
constexpr int64_t kFewestStreamed = 40;
constexpr int64_t kMostStreamed = 1 << 20;

// Stands for an exponent that is known only at run time.
constexpr int kRunTime = -1;

enum class Want { kLoss, kSum, kGradient };

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
      first_class_ = p.call.class_ids[offsets[Sigmoid::kClassIds]];
      labels += first_row;
    } else {
      labels += begin;
    }
    weight_ = p.call.weight == nullptr
                  ? nullptr
                  : static_cast<const A*>(p.call.weight) + offsets[Sigmoid::kWeight] + first_row;
    elements = offsets[Sigmoid::kElements] + begin;
  }

  __device__ __forceinline__ Row<A> ReadRow(uint32_t row) const {
    Row<A> terms{0, negative_, positive_};
    if constexpr (std::is_same_v<L, int32_t>) terms.label = labels[row];
    if (weight_ != nullptr) {
      const A weight = weight_[row];
      terms.negative *= weight;
      terms.positive *= weight;
    }
    return terms;
  }

  // The rows of neighbours that have one each, with the factor of what the element is.
  template <int kCount>
  __device__ __forceinline__ void ReadRows(Row<A> (&rows)[kCount], int row, bool whole,
                                           int64_t left) const {
    const auto own = LoadSome<int32_t, kCount>(labels + row, whole, left);
    Pack<A, kCount> weights;
#pragma unroll
    for (int k = 0; k < kCount; ++k) weights.values[k] = 1;
    if (weight_ != nullptr) weights = LoadSome<A, kCount>(weight_ + row, whole, left);
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

// Bit `at` where it is below `end`, or none.
__device__ __forceinline__ uint32_t BitBelow(uint32_t at, uint32_t end) {
  return at < end ? 1u << at : 0u;
}

// Loss and slope of kCount elements for integer labels times their factors. Targets are among them
// only if kTargets.
template <bool kSlope, bool kTargets, typename A, int kCount>
__device__ __forceinline__ void EvaluateHard(A (&loss)[kCount], A (&slope)[kCount],
                                             const A (&z)[kCount], const bool (&target)[kCount],
                                             const A (&factor)[kCount], Power power, A gamma) {
  A x[kCount], e[kCount], positive[kCount], negative[kCount];
  const A zeros[kCount] = {};
  bool leads[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    x[k] = kTargets && target[k] ? -z[k] : z[k];
    leads[k] = x[k] >= 0;
    positive[k] = max(x[k], A(0));
    negative[k] = min(x[k], A(0));
  }
  ExpOfMagnitude(e, z, power);
  Evaluate<kSlope>(loss, slope, e, leads, positive, negative, zeros, factor, power, gamma);
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

template <typename T, typename L, int kCount, Rows kRows, Want kWant, int kPower>
__global__ void __launch_bounds__(kThreads) Elementwise(const __grid_constant__ Params p) {
  using A = Accumulator<T>;
  constexpr bool kSlope = kWant == Want::kGradient;
  constexpr bool kHard = std::is_same_v<L, int32_t>;
  // One row takes whole accesses, or single elements.
  constexpr bool kWhole = kRows == Rows::kOne;
  const Power power = kPower == kRunTime ? p.call.power : static_cast<Power>(kPower);

  uint32_t block = blockIdx.x;
  const int64_t begin = p.splits.Peel(block) * p.per_block;
  const Entry<T, L> entry(p, block, begin);
  const int length = static_cast<int>(min(p.size - begin, p.per_block));
  const bool clustered = kWant != Want::kLoss && p.call.sum != nullptr && p.partials == nullptr;
  if (clustered) ArriveInCluster();
  A total = 0;

#pragma unroll 1
  for (int at = threadIdx.x * kCount; at < length; at += kThreads * kCount) {
    const int left = length - at;
    const bool whole = kWhole || left >= kCount;
    const auto logits = LoadSome<T, kCount>(entry.logits + at, whole, left);
    // The terms of each element, and which of them are targets.
    Row<A> terms[kCount];
    bool target[kCount];
    bool has_target = true;
    if constexpr (kRows == Rows::kEach) {
      entry.ReadRows(terms, at, whole, left);
#pragma unroll
      for (int k = 0; k < kCount; ++k) target[k] = entry.Position(terms[k].label) == 0;
    } else {
      uint32_t row = entry.skipped + at;
      const uint32_t position = p.classes.Peel(row);
      const Row<A> first = entry.ReadRow(row);
      if constexpr (kRows == Rows::kAny) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          uint32_t own_row = entry.skipped + min(at + k, length - 1);
          const uint32_t own_position = k == 0 ? position : p.classes.Peel(own_row);
          terms[k] = k == 0 ? first : entry.ReadRow(own_row);
          target[k] = entry.Position(terms[k].label) == own_position;
        }
      } else {
        // The neighbours from here on are of the next row, which the last ones may not have.
        const uint32_t boundary =
            kRows == Rows::kOne ? kCount : min(p.classes.divisor() - position, uint32_t{kCount});
        Row<A> second = first;
        uint32_t targets = BitBelow(entry.Position(first.label) - position, boundary);
        if (kRows == Rows::kTwo && boundary < static_cast<uint32_t>(min(left, kCount))) {
          second = entry.ReadRow(row + 1);
          targets |= BitBelow(entry.Position(second.label), kCount - boundary) << boundary;
        }
        has_target = targets != 0;
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          terms[k] = k < boundary ? first : second;
          target[k] = targets >> k & 1;
        }
      }
    }
    A z[kCount], loss[kCount], slope[kCount], factor[kCount];
    WidenAll(z, logits);

    if constexpr (kHard) {
      const auto evaluate = [&](auto has_targets) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          factor[k] = has_targets.value && target[k] ? terms[k].positive : terms[k].negative;
        }
        EvaluateHard<kSlope, has_targets.value>(loss, slope, z, target, factor, power, entry.gamma);
      };
      // Most rows have no target, and the rows of a warp are few. Without one, the same results
      // take fewer instructions.
      constexpr bool kVote = kPower == static_cast<int>(Power::kTwo) && kCount == kInRow &&
                             (kRows == Rows::kOne || kRows == Rows::kTwo);
      if (!kVote || __any_sync(__activemask(), has_target)) {
        evaluate(std::true_type());
      } else {
        evaluate(std::false_type());
      }
      if (p.call.has_ignored) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          const bool ignored = terms[k].label == p.call.ignored;
          loss[k] = ignored ? A(0) : loss[k];
          slope[k] = ignored ? A(0) : slope[k];
        }
      }
    } else {
      const auto labels = LoadSome<L, kCount>(entry.labels + at, whole, left);
      A y[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        y[k] = static_cast<A>(Widen(labels.values[k]));
        factor[k] = y[k] * terms[k].positive + (1 - y[k]) * terms[k].negative;
      }
      EvaluateSoft<kSlope>(loss, slope, z, y, factor, power, entry.gamma);
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (!kWhole && k >= left) loss[k] = 0;
    }
    const int64_t to = entry.elements + at;
    if constexpr (kWant == Want::kLoss) {
      StoreSome<T, kCount>(static_cast<T*>(p.call.loss) + to, loss, whole, left);
    }
    if constexpr (kWant == Want::kGradient) {
      StoreSome<T, kCount>(static_cast<T*>(p.call.gradient) + to, slope, whole, left);
    }
    if constexpr (kWant != Want::kLoss) total += SumOf(loss);
  }
  if constexpr (kWant != Want::kLoss) {
    if (p.call.sum == nullptr) return;
    A sum = SumOverBlock(total);
    if (!clustered) {
      if (threadIdx.x == 0) static_cast<A*>(p.partials)[blockIdx.x] = sum;
    } else if (SumOverCluster(sum)) {
      static_cast<A*>(p.call.sum)[p.call.batch.AllOffsets(block)[Sigmoid::kSum]] = sum;
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

template <typename T, typename L, int kCount, Rows kRows, int kPower>
cudaError_t LaunchElements(cudaStream_t stream, const Params& params, int64_t blocks) {
  const Sigmoid& call = params.call;
  const auto launch = [&](auto kernel) {
    const uint32_t splits = params.splits.divisor();
    return call.sum != nullptr && params.partials == nullptr && splits > 1
               ? jaxops::cuda::LaunchClusters(kernel, blocks, splits, kThreads, 0, stream, params)
               : Launch(kernel, blocks, stream, params);
  };
  if (call.gradient != nullptr) {
    return launch(Elementwise<T, L, kCount, kRows, Want::kGradient, kPower>);
  }
  if (call.sum != nullptr) return launch(Elementwise<T, L, kCount, kRows, Want::kSum, kPower>);
  return launch(Elementwise<T, L, kCount, kRows, Want::kLoss, kPower>);
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
// one row any that needs no power, elsewhere only that of the paper.
template <typename T, int kCount, Rows kRows>
cudaError_t LaunchHard(cudaStream_t stream, const Params& params, int64_t blocks) {
  const auto launch = [&](auto power) {
    return LaunchElements<T, int32_t, kCount, kRows, power.value>(stream, params, blocks);
  };
  if constexpr (kRows == Rows::kOne && kCount > 1) return DispatchPower(params.call.power, launch);
  if (params.call.power == Power::kTwo) {
    return launch(std::integral_constant<int, static_cast<int>(Power::kTwo)>());
  }
  return launch(std::integral_constant<int, kRunTime>());
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
    constexpr bool kHard = std::is_same_v<L, int32_t> && !std::is_same_v<T, double>;
    constexpr int kMany = kHard ? kInRow : kPackElements<T>;
    constexpr int kFew = kHard ? kShortRows : kPackElements<T>;
    const bool many = call.classes >= kMany;
    const bool one_row = kHard && call.classes % kMany == 0;
    const bool few = kHard && call.sum == nullptr && entries * size <= kFewElements;
    const bool each = kHard && call.classes == 1;
    const bool aligned = !few && (entries == 1 || size % kMany == 0);
    const int64_t stride = kThreads * (!aligned ? 1 : many || each ? kMany : kFew);
    const bool streamed = Streams(call, aligned);
    // Enough work a thread to make up for what a block costs, once there are blocks for the whole
    // device.
    const auto fill = [&](int64_t elements, int64_t most) {
      return CeilDiv(size, stride * std::clamp<int64_t>(elements / (stride * 1024), 1, most));
    };
    if (call.sum == nullptr) {
      splits = fill(entries * size, few ? 1 : 4);
    } else if (streamed) {
      // As many as the 132 multiprocessors of an H100 or H200 run at a time.
      splits = std::min<int64_t>(splits, 132 * kStreamingBlocks<T>);
    } else if (call.gradient != nullptr && one_row && sizeof(T) == sizeof(float)) {
      // Bound by memory, which short blocks keep busier to the end; the others by instructions. The
      // order of additions must not depend on how many entries there are.
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
        return LaunchHard<T, 1, Rows::kOne>(stream, params, blocks);
      } else {
        if (aligned && many) {
          return LaunchElements<T, L, kMany, Rows::kTwo, kRunTime>(stream, params, blocks);
        }
        if (aligned) {
          return LaunchElements<T, L, kFew, Rows::kAny, kRunTime>(stream, params, blocks);
        }
        return LaunchElements<T, L, 1, Rows::kOne, kRunTime>(stream, params, blocks);
      }
    };
    const cudaError_t error = launch();
    if (error != cudaSuccess || call.sum == nullptr || clustered) return error;
    return CombineSums<Accumulator<T>>(stream, call, splits, partials);
  });
}

}  // namespace jaxops::focal_loss::cuda
