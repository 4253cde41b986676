// This file chooses the kernel family of a sigmoid focal loss: one pass over the logits for a sum,
// the gradient, or both.
#include "cuda/common/dispatch.h"

#include "cuda/focal_loss/launch.h"
#include "cuda/focal_loss/sigmoid/families.h"

namespace jaxops::focal_loss::cuda {
namespace {

using jaxops::cuda::Always;
using jaxops::cuda::Family;
using jaxops::cuda::Table;

// FewElements takes sums of at most this number of elements, and elementwise results.
constexpr int64_t kMaxFewSummed = 1 << 15;
constexpr int64_t kMaxFewElementwise = 1 << 21;

// StreamedSum takes sums of at least this number of elements, with rows not so short that the warp
// that evaluates their targets falls behind the other warps.
constexpr int64_t kMinStreamed = 1 << 24;
constexpr int64_t kMinStreamedClasses = 40;

// A sum does not depend on the number of batch entries.
bool PrefersFewElements(const SigmoidCall& call, const Device& device) {
  return call.loss.sum != nullptr ? call.size() <= kMaxFewSummed && device.has_clusters()
                                  : call.size() <= kMaxFewElementwise;
}

// Instructions bound results of 16 bits, and results of f32 whose exponent needs a power of each
// element. If f32 rows are not whole vectors, TargetsLast saves two row look-ups per vector.
bool PrefersTargetsLast(const SigmoidCall& call, const Device&) {
  return call.loss.dtype != DType::kF32 || call.loss.classes % 4 != 0 ||
         call.loss.power == Power::kAny;
}

bool PrefersStreamedSum(const SigmoidCall& call, const Device&) {
  return call.size() >= kMinStreamed && call.loss.classes >= kMinStreamedClasses;
}

constexpr Family<SigmoidCall> kFamilies[] = {
    // Small calls end before any other design gains. The gradient of (900, 91) f32 takes 1.28 µs on
    // an H200.
    {"few", CanRunFewElements, PrefersFewElements, LaunchFewElements},
    // Few rows have a target, so all elements are evaluated as if they were none, which takes fewer
    // instructions and no row look-ups; then a block writes the targets. The gradient of (1534176,
    // 80) bf16 takes 121 to 129 µs on an H200, for which memory alone takes 116.
    {"targets_last", CanRunTargetsLast, PrefersTargetsLast, LaunchTargetsLast},
    // Memory bounds f32. The gradient of (191772, 80) took 32.7 µs without this family on an H200,
    // and 30.8 with it.
    {"spread", CanRunSpreadElements, Always<SigmoidCall>, LaunchSpreadElements},
    // Instructions bound long sums. Blocks whose shared memory another warp fills wait for no
    // logits and look up no rows. (1534176, 80) f32 takes 128 µs on an H200.
    {"streamed", CanRunStreamedSum, PrefersStreamedSum, LaunchStreamedSum},
    // The family runs all class ids: warps that have targets evaluate them separately.
    {"hard", CanRunHard, Always<SigmoidCall>, LaunchHard},
    // The family runs all soft labels: every element has a target of its own.
    {"soft", CanRunSoft, Always<SigmoidCall>, LaunchSoft},
};

const Table<SigmoidCall> kTable("sigmoid_focal_loss", "loss and gradient", kFamilies);

}  // namespace

cudaError_t LaunchSigmoid(cudaStream_t stream, const Sigmoid& loss, int64_t splits,
                          void* partials) {
  const SigmoidCall call{loss, splits, partials};
  if (call.entries() == 0) return cudaSuccess;
  if (call.size() == 0) {
    const size_t scalar = loss.dtype == DType::kF64 ? sizeof(double) : sizeof(float);
    return loss.sum == nullptr ? cudaSuccess
                               : cudaMemsetAsync(loss.sum, 0, call.entries() * scalar, stream);
  }
  return kTable.Run(stream, call);
}

}  // namespace jaxops::focal_loss::cuda
