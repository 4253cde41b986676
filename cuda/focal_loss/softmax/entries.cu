// This file launches the kernel of the softmax focal loss for many batch entries of few rows each.
// A block has as many whole entries as it has groups of lanes for: with one each, the costs of
// blocks exceed all others.
#include "cuda/focal_loss/launch.h"
#include "cuda/focal_loss/softmax/few.cuh"

namespace jaxops::focal_loss::cuda {
namespace {

constexpr int64_t kMaxClasses = 1024;

// A group of lanes has at most this number of rows, one after the other.
constexpr int64_t kMaxRounds = 8;

// A row has the least of these numbers of lanes that have registers for it.
int64_t LanesOf(const SoftmaxCall& call) {
  return call.loss.classes <= 16 ? 4 : call.loss.classes <= 128 ? 8 : kWarp;
}

int64_t EntriesOfBlock(const SoftmaxCall& call) {
  return std::max<int64_t>(1, EntryRows(call) / call.loss.rows);
}

template <typename T, int kLanes>
cudaError_t Launch(cudaStream_t stream, const SoftmaxCall& call) {
  const Softmax& loss = call.loss;
  const int64_t per_block = EntriesOfBlock(call);
  ManyEntriesParams params{
      {static_cast<int32_t>(loss.rows), static_cast<int32_t>(loss.classes), loss.logits,
       loss.labels, loss.scale, loss.gamma, loss.weight, loss.gradient, loss.loss, loss.power},
      // Rows of an entry that has the block to itself are counted by groups.
      FastDivider(std::min(loss.rows, EntryRows(call))),
      static_cast<uint32_t>(per_block),
      static_cast<uint32_t>(call.entries()),
      loss.sum,
      loss.batch};
  return DispatchBool(loss.gradient != nullptr, [&](auto gradient) {
    return jaxops::cuda::Launch(
        FewRows<T, kThreads, kLanes, gradient.value, kRunTime, ManyEntriesParams>,
        CeilDiv(call.entries(), per_block), kThreads, 0, stream, params);
  });
}

}  // namespace

int64_t EntryRows(const SoftmaxCall& call) { return kThreads / LanesOf(call); }

bool CanRunManyEntries(const SoftmaxCall& call, const Device&) {
  return call.loss.classes <= kMaxClasses && call.loss.rows <= kMaxRounds * EntryRows(call) &&
         call.entries() <= INT32_MAX;
}

cudaError_t LaunchManyEntries(cudaStream_t stream, const SoftmaxCall& call, const Device&) {
  return DispatchFloat(call.loss.dtype, [&](auto logit) {
    using T = decltype(logit);
    switch (LanesOf(call)) {
      case 4:
        return Launch<T, 4>(stream, call);
      case 8:
        return Launch<T, 8>(stream, call);
      default:
        return Launch<T, kWarp>(stream, call);
    }
  });
}

}  // namespace jaxops::focal_loss::cuda
