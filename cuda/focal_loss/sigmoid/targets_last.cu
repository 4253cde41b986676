// This kernel computes the sigmoid focal loss, elementwise and without weights, of rows that are
// not short.
#include "cuda/focal_loss/sigmoid/elements.cuh"

namespace jaxops::focal_loss::cuda {
namespace {

constexpr int kBlockThreads = 128;
// A thread has this number of vectors.
constexpr int kVectors = 2;

// TargetsLast is for class labels without weights: results without a sum, in one batch entry. All
// elements are written as if they were no targets, without any use of rows; then each of the first
// threads has a row, and writes its target if that is among the elements of the block.
template <typename T, Want kWant, int kPower>
__global__ void __launch_bounds__(kBlockThreads) TargetsLast(const __grid_constant__ FewParams p) {
  constexpr bool kSlope = kWant == Want::kGradient;
  constexpr int kCount = kVectorElements<T>;
  constexpr uint32_t kStride = kBlockThreads * kCount;
  constexpr uint32_t kElements = kVectors * kStride;
  static_assert(kElements / kMinTargetsLastClasses + 2 <= kBlockThreads);
  constexpr Digits kDigits = kDigitsOf<T, kWant>;
  constexpr auto power = static_cast<Power>(kPower);
  const uint32_t begin = blockIdx.x * kElements;
  const uint32_t length = min(p.size - begin, kElements);
  const T* logits = static_cast<const T*>(p.logits) + begin;
  T* elements = static_cast<T*>(p.elements) + begin;
  const uint32_t own = threadIdx.x * kCount;
  Vector<T, kCount> vectors[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (own + i * kStride < length) vectors[i] = LoadVector<kCount>(logits + own + i * kStride);
  }
  uint32_t row = begin;
  const uint32_t skipped = p.classes.DivMod(row);
  const uint32_t rows = p.classes.Quotient(begin + length - 1) - row + 1;
  const bool has_row = threadIdx.x < rows;
  const int32_t label = has_row ? p.labels[row + threadIdx.x] : 0;
  const auto* parameters = static_cast<const float*>(p.parameters);
  const float scale = *static_cast<const float*>(p.scale);
  const float gamma = parameters[0];
  const float negative = scale * parameters[1];
  const float positive = scale * parameters[2];
  const uint32_t position = label - static_cast<uint32_t>(p.class_ids[0] - kFirstClassId);
  // A position before the block wraps to a large number.
  const uint32_t target = threadIdx.x * p.classes.divisor() - skipped + position;
  const bool has_target = has_row && position < p.classes.divisor() && target < length;
  const float its_z[1] = {has_target ? Widen(logits[target]) : 0.0f};
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (own + i * kStride >= length) break;
    float z[kCount], loss[kCount], slope[kCount], factor[kCount];
    const bool none[kCount] = {};
    WidenVector(z, vectors[i]);
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

template <typename T>
cudaError_t Launch(cudaStream_t stream, const SigmoidCall& call) {
  constexpr int64_t kPerBlock = kBlockThreads * kVectors * kVectorElements<T>;
  return DispatchPower(call.loss.power, [&](auto power) {
    return DispatchBool(call.loss.gradient != nullptr, [&](auto gradient) {
      constexpr Want kWanted = gradient.value ? Want::kGradient : Want::kLoss;
      return jaxops::cuda::Launch(TargetsLast<T, kWanted, power.value>,
                                  CeilDiv(call.size(), kPerBlock), kBlockThreads, 0, stream,
                                  FewParams(call.loss, kPerBlock));
    });
  });
}

}  // namespace

bool CanRunTargetsLast(const SigmoidCall& call, const Device&) {
  const Sigmoid& loss = call.loss;
  return IsUnweighted(loss) && loss.sum == nullptr && call.entries() == 1 &&
         loss.classes >= kMinTargetsLastClasses && call.size() <= INT32_MAX &&
         call.size() % (kVectorBytes / jaxops::cuda::SizeOf(loss.dtype)) == 0;
}

cudaError_t LaunchTargetsLast(cudaStream_t stream, const SigmoidCall& call, const Device&) {
  return DispatchUpToF32(call.loss.dtype,
                         [&](auto logit) { return Launch<decltype(logit)>(stream, call); });
}

}  // namespace jaxops::focal_loss::cuda
