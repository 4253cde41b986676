// The softmax focal loss of few short rows, where nothing but latency counts.
//
// All is read at once, element by element whatever the number of classes, and by little code,
// because a kernel this short waits for its instructions too.
#include "cuda/focal_loss.h"
#include "cuda/focal_loss_softmax.cuh"

namespace jaxops::focal_loss::cuda {
namespace {

constexpr int kMostClasses = 128;
// So few elements are few, and so few that there may be a warp for each row.
constexpr int64_t kFewElements = 3 << 17;
constexpr int64_t kVeryFewElements = 1 << 17;
// Without a sum, small blocks for many multiprocessors.
constexpr int kSmallBlock = 128;
// Lanes of a row otherwise, the fewer for a sum because it has one cluster, or few partial sums.
constexpr int kFewLanes = 16;
constexpr int kSumLanes = 8;

// kLanes lanes a row, of which they have elements kLanes apart.
template <typename T, int kBlockThreads, int kLanes, bool kGradient>
__global__ void __launch_bounds__(kBlockThreads) FewRows(const __grid_constant__ SoftmaxParams p) {
  using A = Accumulator<T>;
  constexpr int kSlots = kMostClasses / kLanes;
  const Softmax& call = p.call;
  const int classes = static_cast<int>(call.classes);
  const int lane = threadIdx.x % kLanes;
  uint32_t block = blockIdx.x;
  const int64_t row = p.splits.Peel(block) * p.rows_per_split + threadIdx.x / kLanes;
  const bool sums = call.sum != nullptr;
  if (sums && p.partials == nullptr) ArriveInCluster();
  SoftmaxEntry<T> entry(call, block);

  // Nothing waits for anything here. Lanes without a row read what there is of the last one.
  const bool exists = row < call.rows;
  const int64_t read_row = min(row, call.rows - 1);
  const T* logits = entry.logits + read_row * classes;
  const int label = entry.labels[read_row];
  A z[kSlots];
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    const int i = lane + s * kLanes;
    z[s] = i < classes ? A(Widen(logits[i])) : -A(INFINITY);
  }
  A weight = entry.Weight(read_row);
  ReadNow(weight);
  ReadNow(entry.scale);
  ReadNow(entry.gamma);

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
  EvaluateRow(loss, slope, others, hit, call.power, entry.gamma);
  const A factor = entry.scale * weight;
  loss = known ? loss * factor : A(0);
  if constexpr (kGradient) {
    slope = known ? slope * factor : A(0);
    const A share = known ? ShareOf(slope, others) : A(0);
    T* gradient = static_cast<T*>(call.gradient) + entry.result + read_row * classes;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int i = lane + s * kLanes;
      const A value = i == label ? -slope : share * z[s];
      if (exists && i < classes) gradient[i] = Narrow<T>(value);
    }
  } else if (call.loss != nullptr && exists && lane == 0) {
    static_cast<A*>(call.loss)[entry.result + row] = loss;
  }
  if (sums) FinishSum<kBlockThreads>(p, entry.sum, lane == 0 ? loss : A(0));
}

template <typename T, int kBlockThreads, int kLanes>
cudaError_t Launch(cudaStream_t stream, const Softmax& call, void* partials) {
  // A block takes no more rows than that, however many blocks there are.
  const RowSplits splits(call, kBlockThreads / kLanes, INT32_MAX, 1, INT32_MAX);
  return DispatchBool(call.gradient != nullptr, [&](auto gradient) {
    return LaunchSplits<Accumulator<T>>(FewRows<T, kBlockThreads, kLanes, gradient.value>,
                                        kBlockThreads, splits, stream, SoftmaxParams{call},
                                        partials);
  });
}

}  // namespace

bool AreFewRows(const Softmax& call, int64_t splits) {
  if (call.classes > kMostClasses) return false;
  const int64_t elements = call.rows * call.classes;
  if (call.sum == nullptr) return call.batch.size() * elements <= kFewElements;
  return elements <= kFewElements && CeilDiv(call.rows, kThreads / kSumLanes) <= splits;
}

cudaError_t LaunchFewRows(cudaStream_t stream, const Softmax& call, void* partials) {
  return DispatchFloat(call.dtype, [&](auto logit) {
    using T = decltype(logit);
    if (call.sum == nullptr) {
      return call.batch.size() * call.rows * call.classes <= kVeryFewElements
                 ? Launch<T, kSmallBlock, kWarp>(stream, call, partials)
                 : Launch<T, kSmallBlock, kFewLanes>(stream, call, partials);
    }
    if (call.rows <= kClusterBlocks * kThreads / kWarp && jaxops::cuda::HasClusters()) {
      return Launch<T, kThreads, kWarp>(stream, call, partials);
    }
    return Launch<T, kThreads, kSumLanes>(stream, call, partials);
  });
}

}  // namespace jaxops::focal_loss::cuda
