// This file launches the kernel of the softmax focal loss for few short rows.
#include "cuda/focal_loss/launch.h"
#include "cuda/focal_loss/softmax/few.cuh"

namespace jaxops::focal_loss::cuda {
namespace {

// Calls of at most this number of elements have a warp for each row.
constexpr int64_t kMaxWarpRowElements = 1 << 17;
// Without a sum, small blocks reach many multiprocessors.
constexpr int kSmallBlock = 128;
// Otherwise a row has this number of lanes, fewer for a sum because a sum has one cluster, or few
// partial sums.
constexpr int kFewLanes = 16;
constexpr int kSumLanes = 8;

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
  if (loss.classes > kMaxFewClasses || call.size() > INT32_MAX - kMaxFewClasses) return false;
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
