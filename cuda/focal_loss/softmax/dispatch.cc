// This file chooses the kernel family of a softmax focal loss: one pass over the logits for a sum,
// the gradient, or both, unless rows are too long for that.
#include "cuda/common/dispatch.h"

#include <array>

#include "cuda/focal_loss/as_one_entry.h"
#include "cuda/focal_loss/launch.h"
#include "cuda/focal_loss/softmax/families.h"

namespace jaxops::focal_loss::cuda {
namespace {

using jaxops::cuda::Always;
using jaxops::cuda::Family;
using jaxops::cuda::Table;

// From this number of entries on, blocks of several entries end before those of a part of one: sums
// of (256, 30, 91) f32 take 3.1 µs on an H200, and 5.7 by FewRows.
constexpr int64_t kManyEntries = 128;
// A block that has more rows of an entry than it takes at a time runs them if rows have at most
// this number of classes: sums of (256, 100, 10) f32 take 3.1 µs, and 3.6 by LaneRows, those of
// (256, 64, 80) 4.1, and 3.6. With 1000 classes either is faster, by up to 18 %: sums of (256, 60,
// 1000) take 19.5 µs, and 23.1 by LaneRows, with gradients 36.7, and 35.0.
constexpr int64_t kMaxClassesOfRounds = 16;
// FewRows takes at most this number of logits, and sums of less than kManyEntries entries: those of
// (512, 64, 80) f32 take 17.9 µs by it, and 4.8 by LaneRows.
constexpr int64_t kMaxFewLogits = 3 << 17;
// WholeRows takes at least this number of logits of a batch entry.
constexpr int64_t kMinWholeLogits = 1 << 22;
// If only f32 gradients are wanted, LaneRows takes rows of at most this number of vectors: 16
// longer rows of two warps each keep the memory of a multiprocessor busy.
constexpr int64_t kMaxLaneVectorsOfGradient = 224;

bool PrefersShortRows(const SoftmaxCall& call, const Device&) {
  return !RowVectors(call.loss).whole;
}

bool PrefersManyEntries(const SoftmaxCall& call, const Device& device) {
  // Sums of (500, 20, 10) f32 take 2.3 µs by this family, and 3.0 by ShortRows, those of
  // (4000, 20, 10) 6.1, and 5.1.
  const bool is_short = SumsShortEntries(call) && PrefersShortRows(call, device);
  if (is_short && call.entries() * call.size() > kMaxFewLogits) return false;
  return call.entries() >= kManyEntries &&
         (call.loss.rows <= EntryRows(call) || call.loss.classes <= kMaxClassesOfRounds);
}

// The sum of an entry is the same for any number of entries below kManyEntries.
bool PrefersFewRows(const SoftmaxCall& call, const Device&) {
  if (call.loss.sum == nullptr) return call.entries() * call.size() <= kMaxFewLogits;
  return call.entries() < kManyEntries && call.size() <= kMaxFewLogits;
}

// Losses of a batch without a sum are those that LaneRows computes, bit for bit.
bool PrefersWholeRows(const SoftmaxCall& call, const Device&) {
  return call.size() >= kMinWholeLogits && (call.loss.sum != nullptr || call.entries() == 1);
}

bool PrefersLaneRows(const SoftmaxCall& call, const Device&) {
  const Softmax& loss = call.loss;
  const bool is_f32_gradient =
      loss.dtype == DType::kF32 && loss.gradient != nullptr && loss.sum == nullptr;
  return !is_f32_gradient || RowVectors(loss).count <= kMaxLaneVectorsOfGradient;
}

constexpr Family<SoftmaxCall> kFamilies[] = {
    // A block has several entries: the sums of (300000, 1, 10) f32 took 1026 µs on an H200 with a
    // block for each.
    {"entries", CanRunManyEntries, PrefersManyEntries, LaunchManyEntries},
    // Latency bounds calls of few elements. The gradient of (900, 91) f32 took 1.79 µs without this
    // family on an H200, and 1.52 with it.
    {"few", CanRunFewRows, PrefersFewRows, LaunchFewRows},
    // A thread has a row, which passes through shared memory in vectors. The losses of (300000, 10)
    // f32 take 8.8 µs on an H200, and 16 by LaneRows.
    {"short", CanRunShortRows, PrefersShortRows, LaunchShortRows},
    // Memory bounds these calls: a warp reads all it needs of a row at once. Value and gradient of
    // (1534176, 80) bf16 take 121 µs on an H200.
    {"whole", CanRunWholeRows, PrefersWholeRows, LaunchWholeRows},
    // The lanes of a row keep it in registers between the sum and the gradient. The sum of
    // (65536, 1000) f32 takes 66.8 µs on an H200.
    {"lanes", CanRunLaneRows, PrefersLaneRows, LaunchLaneRows},
    // Two warps or more keep a row in registers, which on an H200 reduced the gradient of (65536,
    // 1000) f32 from 129 to 125.5 µs, of (32768, 1800) from 123.4 to 115, and of (128, 1000) from
    // 3.7 to 2.75.
    {"blocks", CanRunBlockRows, Always<SoftmaxCall>, LaunchBlockRows},
    // Registers cannot hold these rows, which are read twice for a gradient, and once for a sum or
    // losses. The family runs all rows that are too long for LaneRows.
    {"streamed", CanRunStreamedRows, Always<SoftmaxCall>, LaunchStreamedRows},
};

const Table<SoftmaxCall> kTable("softmax_focal_loss", "loss and gradient", kFamilies);

}  // namespace

cudaError_t LaunchSoftmax(cudaStream_t stream, const Softmax& loss, int64_t splits,
                          void* partials) {
  const int64_t size = loss.rows * loss.classes;
  std::array<int64_t, Softmax::kOperands> strides = {};  // of scalars, which entries share
  strides[Softmax::kLogits] = size;
  strides[Softmax::kLabels] = loss.rows;
  strides[Softmax::kScale] = loss.scale == nullptr ? kAnyStride : 0;
  strides[Softmax::kWeight] = loss.weight == nullptr ? kAnyStride : loss.rows;
  strides[Softmax::kResult] = loss.gradient != nullptr ? size : loss.rows;
  strides[Softmax::kSum] = kAnyStride;
  if (const auto flat = AsOneEntry(loss, strides)) {
    return LaunchSoftmax(stream, *flat, splits, partials);
  }
  const SoftmaxCall call{loss, splits, partials};
  if (call.entries() == 0) return cudaSuccess;
  if (call.size() == 0) {
    const size_t scalar = loss.dtype == DType::kF64 ? sizeof(double) : sizeof(float);
    if (loss.sum != nullptr) {
      const cudaError_t error = cudaMemsetAsync(loss.sum, 0, call.entries() * scalar, stream);
      if (error != cudaSuccess) return error;
    }
    return loss.loss == nullptr
               ? cudaSuccess
               : cudaMemsetAsync(loss.loss, 0, call.entries() * loss.rows * scalar, stream);
  }
  return kTable.Run(stream, call);
}

}  // namespace jaxops::focal_loss::cuda
