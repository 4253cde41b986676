// This kernel computes the softmax focal loss of few short rows, whose time is latency alone.
//
// All elements are read at once, element by element for any number of classes, and the code is
// small, because a kernel this short also waits for its instructions.
#include "cuda/focal_loss/launch.h"
#include "cuda/focal_loss/softmax/rows.cuh"

namespace jaxops::focal_loss::cuda {
namespace {

constexpr int kMaxClasses = 128;
// Calls of at most this number of elements have a warp for each row.
constexpr int64_t kMaxWarpRowElements = 1 << 17;
// Without a sum, small blocks reach many multiprocessors.
constexpr int kSmallBlock = 128;
// Otherwise a row has this number of lanes, fewer for a sum because a sum has one cluster, or few
// partial sums.
constexpr int kFewLanes = 16;
constexpr int kSumLanes = 8;

// kRunTime stands for an exponent that is known only at run time.
constexpr int kRunTime = -1;

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

// These are the parameters of other calls.
struct FewRowsParams : FewRowsAlone {
  FastDivider splits;
  void* sum;
  void* partials;
  BatchMap<Softmax::kOperands> batch;
};

// A row has kLanes lanes, which have elements kLanes apart.
template <typename T, int kBlockThreads, int kLanes, bool kGradient, int kPower, typename Params>
__global__ void __launch_bounds__(kBlockThreads) FewRows(const __grid_constant__ Params p) {
  constexpr bool kAlone = std::is_same_v<Params, FewRowsAlone>;
  using A = Accumulator<T>;
  constexpr int kSlots = kMaxClasses / kLanes;
  const int classes = p.classes;
  const int lane = threadIdx.x % kLanes;
  uint32_t split = blockIdx.x;
  const T* logits = static_cast<const T*>(p.logits);
  const int32_t* labels = p.labels;
  const A* scale_of = static_cast<const A*>(p.scale);
  const A* gamma_of = static_cast<const A*>(p.gamma);
  const A* weights = static_cast<const A*>(p.weight);
  int64_t result = 0, sum = 0;
  if constexpr (!kAlone) {
    if (p.sum != nullptr && p.partials == nullptr) ArriveInCluster();
    uint32_t block = blockIdx.x;
    split = p.splits.DivMod(block);
    const auto offsets = p.batch.AllOffsets(block);
    logits += offsets[Softmax::kLogits];
    labels += offsets[Softmax::kLabels];
    if (scale_of != nullptr) scale_of += offsets[Softmax::kScale];
    gamma_of += offsets[Softmax::kGamma];
    if (weights != nullptr) weights += offsets[Softmax::kWeight];
    result = offsets[Softmax::kResult];
    sum = offsets[Softmax::kSum];
  }

  // No load waits for another. Lanes without a row read the last one.
  constexpr int kBlockRows = kBlockThreads / kLanes;
  const int row = static_cast<int>(split) * kBlockRows + threadIdx.x / kLanes;
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
  A loss, slope;
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
  if constexpr (!kAlone) {
    if (p.sum != nullptr) {
      FinishSum<kBlockThreads>(p.partials, static_cast<A*>(p.sum) + sum, lane == 0 ? loss : A(0));
    }
  }
}

struct Plan {
  int threads;  // per block
  int lanes;    // per row
  RowSplits splits;

  Plan(const SoftmaxCall& call, const Device& device)
      : threads(call.loss.sum == nullptr ? kSmallBlock : kThreads),
        lanes(ChooseLanes(call, device)),
        // A block takes no more rows than its threads handle at a time, for any number of blocks.
        splits(call.loss, device, threads / lanes, INT32_MAX, 1, INT32_MAX) {}

 private:
  static int ChooseLanes(const SoftmaxCall& call, const Device& device) {
    if (call.loss.sum == nullptr) {
      return call.entries() * call.size() <= kMaxWarpRowElements ? kWarp : kFewLanes;
    }
    const bool is_cluster =
        call.loss.rows <= kClusterBlocks * kThreads / kWarp && device.has_clusters();
    return is_cluster ? kWarp : kSumLanes;
  }
};

template <typename T, int kBlockThreads, int kLanes>
cudaError_t Launch(cudaStream_t stream, const SoftmaxCall& call, const RowSplits& splits) {
  const Softmax& loss = call.loss;
  const FewRowsAlone alone{static_cast<int32_t>(loss.rows),
                           static_cast<int32_t>(loss.classes),
                           loss.logits,
                           loss.labels,
                           loss.scale,
                           loss.gamma,
                           loss.weight,
                           loss.gradient,
                           loss.loss,
                           loss.power};
  return DispatchBool(loss.gradient != nullptr, [&](auto gradient) {
    if constexpr (kBlockThreads == kSmallBlock) {
      if (call.entries() == 1) {
        const auto launch = [&](auto power) {
          return jaxops::cuda::Launch(
              FewRows<T, kBlockThreads, kLanes, gradient.value, power.value, FewRowsAlone>,
              splits.count, kBlockThreads, 0, stream, alone);
        };
        // The exponent of the paper needs less code.
        return loss.power == Power::kTwo
                   ? launch(std::integral_constant<int, static_cast<int>(Power::kTwo)>())
                   : launch(std::integral_constant<int, kRunTime>());
      }
    }
    return LaunchSplits<Accumulator<T>>(
        FewRows<T, kBlockThreads, kLanes, gradient.value, kRunTime, FewRowsParams>, kBlockThreads,
        splits, stream, call, FewRowsParams{alone, {}, loss.sum, nullptr, loss.batch});
  });
}

}  // namespace

bool CanRunFewRows(const SoftmaxCall& call, const Device& device) {
  const Softmax& loss = call.loss;
  // Positions in a batch entry have 32 bits. Lanes may look beyond its end.
  if (loss.classes > kMaxClasses || call.size() > INT32_MAX - kMaxClasses) return false;
  // A cluster needs no partial sums, but has no more rows than blocks with partial sums have.
  if (loss.sum != nullptr && CeilDiv(loss.rows, kThreads / kSumLanes) > call.splits) return false;
  return Plan(call, device).splits.IsGrid(call);
}

cudaError_t LaunchFewRows(cudaStream_t stream, const SoftmaxCall& call, const Device& device) {
  const Plan plan(call, device);
  return DispatchFloat(call.loss.dtype, [&](auto logit) {
    using T = decltype(logit);
    if (plan.threads == kSmallBlock) {
      return plan.lanes == kWarp ? Launch<T, kSmallBlock, kWarp>(stream, call, plan.splits)
                                 : Launch<T, kSmallBlock, kFewLanes>(stream, call, plan.splits);
    }
    return plan.lanes == kWarp ? Launch<T, kThreads, kWarp>(stream, call, plan.splits)
                               : Launch<T, kThreads, kSumLanes>(stream, call, plan.splits);
  });
}

}  // namespace jaxops::focal_loss::cuda
