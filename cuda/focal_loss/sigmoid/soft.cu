// This kernel computes the sigmoid focal loss of soft labels: floats or booleans.
#include <algorithm>

#include "cuda/focal_loss/sigmoid/elements.cuh"

namespace jaxops::focal_loss::cuda {
namespace {

// ReadFactors sets the factors of kCount neighbours from `at` on, of which `left` exist: a target
// mixes those of its row.
template <typename A, typename T, typename L, int kCount>
__device__ __forceinline__ void ReadFactors(A (&factor)[kCount], const SigmoidParams& p,
                                            const Entry<T, L>& entry, int at, int left,
                                            const A (&y)[kCount]) {
  uint32_t row = entry.skipped + at;
  const uint32_t position = p.classes.DivMod(row);
  const Row<A> first = entry.ReadRow(row);
  if (p.classes.divisor() >= kCount) {
    // The elements from the boundary on lie in a second row.
    const int boundary = static_cast<int>(min(p.classes.divisor() - position, uint32_t{kCount}));
    const Row<A> second = boundary < min(left, kCount) ? entry.ReadRow(row + 1) : first;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const Row<A>& terms = k < boundary ? first : second;
      factor[k] = y[k] * terms.positive + (1 - y[k]) * terms.negative;
    }
  } else {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const uint32_t element = entry.skipped + at + min(k, left - 1);
      const Row<A> terms = k == 0 ? first : entry.ReadRow(p.classes.Quotient(element));
      factor[k] = y[k] * terms.positive + (1 - y[k]) * terms.negative;
    }
  }
}

// VectorElements returns how many neighbours a thread takes at a time. Gradients of floats have
// few, because wider vectors need too many registers: with 8 that of (191772, 80) bf16 takes 76.2
// µs on an H200, with 4 it takes 61.0.
constexpr int VectorElements(int logit_bytes, bool is_bool, Want want) {
  const int vector = kVectorBytes / logit_bytes;
  if (is_bool || want == Want::kSum) return std::max(vector, logit_bytes == 8 ? 4 : 8);
  return want == Want::kLoss ? vector : std::min(vector, 4);
}

// Soft is the kernel for labels of type L.
template <typename T, typename L, int kCount, Want kWant, int kPower>
__global__ void __launch_bounds__(kThreads) Soft(const __grid_constant__ SigmoidParams p) {
  using A = Accumulator<T>;
  constexpr bool kSlope = kWant == Want::kGradient || kWant == Want::kBoth;
  constexpr bool kSums = kWant == Want::kSum || kWant == Want::kBoth;
  const Power power = kPower == kRunTime ? p.call.power : static_cast<Power>(kPower);
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
    A z[kCount], loss[kCount], slope[kCount], factor[kCount], y[kCount];
    WidenVector(z, logits);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      y[k] = ReadTarget<A>(labels.values[k]);
      factor[k] = y[k] * entry.positive() + (1 - y[k]) * entry.negative();
    }
    if (entry.weighted()) ReadFactors(factor, p, entry, at, left, y);
    EvaluateSoft<kSlope, kIsBool<L>>(loss, slope, z, y, factor, power, entry.gamma);
    if constexpr (kWant != Want::kSum) {
      StoreSome<T, kCount>(Elements<T, kWant>(p, entry.elements + at), kSlope ? slope : loss, whole,
                           left);
    }
    if constexpr (kSums) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        if (k >= left) loss[k] = 0;
      }
      total += SumOf(loss);
    }
  }
  if constexpr (kSums) Finish(p, block, clustered, total);
}

struct Plan {
  bool has_vectors;
  Segments segments;

  Plan(const SigmoidCall& call, const Device& device)
      : Plan(call, device, VectorElements(LogitBytes(call), IsBool(call), WantOf(call.loss))) {}

 private:
  static int LogitBytes(const SigmoidCall& call) {
    return static_cast<int>(jaxops::cuda::SizeOf(call.loss.dtype));
  }
  static bool IsBool(const SigmoidCall& call) { return call.loss.target_type == TargetType::kBool; }

  // A vector of booleans is one access; others are several of kVectorBytes.
  static int AlignedElements(const SigmoidCall& call, int width) {
    return IsBool(call) ? width : std::min<int>(width, kVectorBytes / LogitBytes(call));
  }

  Plan(const SigmoidCall& call, const Device& device, int width)
      : has_vectors(IsAligned(call, AlignedElements(call, width))),
        segments(call, device, width, kThreads * (has_vectors ? width : 1)) {}
};

// The exponent of the paper is a template argument for vectors.
template <typename T, typename L>
cudaError_t Launch(cudaStream_t stream, const SigmoidCall& call, const Plan& plan) {
  return DispatchWant(call.loss, [&](auto want) -> cudaError_t {
    constexpr Want kWant = want.value;
    constexpr int kTwo = static_cast<int>(Power::kTwo);
    constexpr int kCount = VectorElements(sizeof(T), kIsBool<L>, kWant);
    const auto launch = [&](auto kernel) {
      return LaunchSegments<Accumulator<T>>(kernel, stream, call, plan.segments);
    };
    if (!plan.has_vectors) return launch(Soft<T, L, 1, kWant, kRunTime>);
    return call.loss.power == Power::kTwo ? launch(Soft<T, L, kCount, kWant, kTwo>)
                                          : launch(Soft<T, L, kCount, kWant, kRunTime>);
  });
}

}  // namespace

bool CanRunSoft(const SigmoidCall& call, const Device& device) {
  return call.loss.soft && Plan(call, device).segments.IsIndexable(call);
}

cudaError_t LaunchSoft(cudaStream_t stream, const SigmoidCall& call, const Device& device) {
  const Plan plan(call, device);
  return DispatchFloat(call.loss.dtype, [&](auto logit) {
    using T = decltype(logit);
    return DispatchTargets<T>(call.loss.target_type, [&](auto target) {
      return Launch<T, decltype(target)>(stream, call, plan);
    });
  });
}

}  // namespace jaxops::focal_loss::cuda
