// This kernel computes elementwise results of the sigmoid focal loss of soft labels that are
// floats, and gradients with their sums.
#include "cuda/focal_loss/sigmoid/elements.cuh"

namespace jaxops::focal_loss::cuda {
namespace {

// Soft is the kernel for soft labels.
template <typename T, typename L, int kCount, Rows kRows, Want kWant>
__global__ void __launch_bounds__(kThreads) Soft(const __grid_constant__ SigmoidParams p) {
  using A = Accumulator<T>;
  constexpr bool kSlope = kWant == Want::kGradient || kWant == Want::kBoth;
  constexpr bool kSums = kWant == Want::kBoth;
  uint32_t block = blockIdx.x;
  const int64_t begin = p.splits.DivMod(block) * p.per_block;
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
    const uint32_t position = p.classes.DivMod(row);
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
    WidenVector(z, logits);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      y[k] = static_cast<A>(Widen(labels.values[k]));
      factor[k] = y[k] * terms[k].positive + (1 - y[k]) * terms[k].negative;
    }
    EvaluateSoft<kSlope, TargetValues::kAny>(loss, slope, z, y, factor, p.call.power, entry.gamma);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (k >= left) loss[k] = 0;
    }
    StoreSome<T, kCount>(Elements<T, kWant>(p, entry.elements + at), kSlope ? slope : loss, whole,
                         left);
    if constexpr (kSums) total += SumOf(loss);
  }
  if constexpr (kSums) Finish(p, block, clustered, total);
}

struct Plan {
  int vector;  // neighbours per thread
  Rows rows;   // of a vector
  Segments segments;

  Plan(const SigmoidCall& call, const Device& device)
      : Plan(call, device, kVectorBytes / jaxops::cuda::SizeOf(call.loss.dtype)) {}

 private:
  Plan(const SigmoidCall& call, const Device& device, int width)
      : vector(IsAligned(call, width) ? width : 1),
        rows(vector > 1 && call.loss.classes >= width ? Rows::kTwo : Rows::kAny),
        segments(call, device, width, kThreads * vector) {}
};

template <typename T, typename L, int kCount, Rows kRows>
cudaError_t Launch(cudaStream_t stream, const SigmoidCall& call, const Segments& segments) {
  return DispatchWant(call.loss, [&](auto want) -> cudaError_t {
    if constexpr (want.value == Want::kSum) {
      return cudaErrorInvalidValue;
    } else {
      return LaunchSegments<Accumulator<T>>(Soft<T, L, kCount, kRows, want.value>, stream, call,
                                            segments);
    }
  });
}

template <typename T, typename L>
cudaError_t Launch(cudaStream_t stream, const SigmoidCall& call, const Plan& plan) {
  const Segments& segments = plan.segments;
  constexpr int kWidth = kVectorElements<T>;
  if (plan.rows == Rows::kTwo) return Launch<T, L, kWidth, Rows::kTwo>(stream, call, segments);
  return plan.vector == 1 ? Launch<T, L, 1, Rows::kAny>(stream, call, segments)
                          : Launch<T, L, kWidth, Rows::kAny>(stream, call, segments);
}

}  // namespace

// For others nothing is compiled.
bool CanRunSoft(const SigmoidCall& call, const Device& device) {
  const Sigmoid& loss = call.loss;
  return loss.soft && loss.target_type != TargetType::kBool && !IsSumAlone(loss) &&
         Plan(call, device).segments.IsIndexable(call);
}

cudaError_t LaunchSoft(cudaStream_t stream, const SigmoidCall& call, const Device& device) {
  const Plan plan(call, device);
  return DispatchFloat(call.loss.dtype, [&](auto logit) {
    using T = decltype(logit);
    return call.loss.target_type == TargetType::kLogits
               ? Launch<T, T>(stream, call, plan)
               : Launch<T, Accumulator<T>>(stream, call, plan);
  });
}

}  // namespace jaxops::focal_loss::cuda
