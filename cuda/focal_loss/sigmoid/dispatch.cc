// This file chooses the kernel family of a sigmoid focal loss: one pass over the logits for a sum,
// the gradient, or both.
#include "cuda/common/dispatch.h"

#include <array>

#include "cuda/focal_loss/as_one_entry.h"
#include "cuda/focal_loss/launch.h"
#include "cuda/focal_loss/sigmoid/families.h"

namespace jaxops::focal_loss::cuda {
namespace {

using jaxops::cuda::Always;
using jaxops::cuda::Family;
using jaxops::cuda::Table;

// From this number of entries on, of at most the second number of elements, lanes of a warp for
// each are faster than a block.
constexpr int64_t kManySmallEntries = 512;
constexpr int64_t kMaxSmallEntry = 512;

// FewElements takes sums of at most this number of elements, and elementwise results. The sum of
// (2000, 20) f32 takes 2.9 µs by it, and 3.3 by Hard.
constexpr int64_t kMaxFewSummed = 5 << 13;
constexpr int64_t kMaxFewElementwise = 1 << 19;
constexpr int64_t kMaxFewOfFewClasses = 1 << 21;  // classes too few for TargetsLast

// StreamedSum takes sums of at least this number of elements, with rows not so short that the warp
// that evaluates their targets falls behind the other warps.
constexpr int64_t kMinStreamed = 1 << 20;
constexpr int64_t kMinStreamedF32 = 1 << 21;
constexpr int64_t kMinStreamedClasses = 40;

constexpr int64_t kManyF32Elements = 1 << 26;

bool PrefersManyEntries(const SigmoidCall& call, const Device&) {
  return call.entries() >= kManySmallEntries && call.size() <= kMaxSmallEntry;
}

// The sum of an entry is the same for any number of entries below kManySmallEntries.
bool PrefersFewElements(const SigmoidCall& call, const Device& device) {
  return call.loss.sum != nullptr
             ? call.size() <= kMaxFewSummed && device.has_clusters()
             : call.size() <= (call.loss.classes >= kMinTargetsLastClasses ? kMaxFewElementwise
                                                                           : kMaxFewOfFewClasses);
}

// Vectors in two rows are faster by Hard.
bool PrefersSpreadElements(const SigmoidCall& call, const Device&) {
  return call.loss.classes == 1 || call.loss.classes % 4 == 0;
}

// SpreadElements keeps f32 elements in whole vectors from this number on, for which TargetsLast was
// not measured against it.
bool PrefersTargetsLast(const SigmoidCall& call, const Device&) {
  return call.loss.dtype != DType::kF32 || call.loss.classes % 4 != 0 ||
         call.loss.power == Power::kAny || call.size() < kManyF32Elements;
}

bool PrefersStreamedSum(const SigmoidCall& call, const Device&) {
  return call.size() >= (call.loss.dtype == DType::kF32 ? kMinStreamedF32 : kMinStreamed) &&
         call.loss.classes >= kMinStreamedClasses;
}

constexpr Family<SigmoidCall> kFamilies[] = {
    // Some lanes have an entry: the sums of (300000, 1, 10) f32 took 682 µs on an H200 with a block
    // for each.
    {"entries", CanRunManyEntries, PrefersManyEntries, LaunchManyEntries},
    // Small calls end before any other design gains. The gradient of (900, 91) f32 takes 1.28 µs on
    // an H200.
    {"few", CanRunFewElements, PrefersFewElements, LaunchFewElements},
    // Few rows have a target, so all elements are evaluated as if they were none, which takes fewer
    // instructions and no row look-ups; then a block writes the targets. The gradient of (1534176,
    // 80) bf16 takes 121 to 129 µs on an H200, for which memory alone takes 116.
    {"targets_last", CanRunTargetsLast, PrefersTargetsLast, LaunchTargetsLast},
    // Memory bounds f32 of few classes. The gradient of (16777216, 1) takes 47.3 µs on an H200, and
    // 51.0 without this family.
    {"spread", CanRunSpreadElements, PrefersSpreadElements, LaunchSpreadElements},
    // Instructions bound long sums. Blocks whose shared memory another warp fills wait for no
    // logits and look up no rows. (1534176, 80) f32 takes 128 µs on an H200.
    {"streamed", CanRunStreamedSum, PrefersStreamedSum, LaunchStreamedSum},
    // The family runs all class ids: warps that have targets evaluate them separately.
    {"hard", CanRunHard, Always<SigmoidCall>, LaunchHard},
    // Every element has a target of its own, and booleans are read as bytes: the gradient of
    // (191772, 80) f32 takes 36.6 µs on an H200, and took 86.1 after a pass that made them floats.
    {"soft", CanRunSoft, Always<SigmoidCall>, LaunchSoft},
};

const Table<SigmoidCall> kTable("sigmoid_focal_loss", "loss and gradient", kFamilies);

}  // namespace

cudaError_t LaunchSigmoid(cudaStream_t stream, const Sigmoid& loss, int64_t splits,
                          void* partials) {
  const int64_t size = loss.rows * loss.classes;
  std::array<int64_t, Sigmoid::kOperands> strides =
      {};  // of scalars and class ids, which entries share
  strides[Sigmoid::kLogits] = strides[Sigmoid::kElements] = size;
  strides[Sigmoid::kLabels] = loss.soft ? size : loss.rows;
  strides[Sigmoid::kWeight] = loss.weight == nullptr ? kAnyStride : loss.rows;
  strides[Sigmoid::kSum] = kAnyStride;
  if (const auto flat = AsOneEntry(loss, strides)) {
    return LaunchSigmoid(stream, *flat, splits, partials);
  }
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
