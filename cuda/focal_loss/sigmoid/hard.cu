// This kernel computes the sigmoid focal loss of class labels.
#include "cuda/focal_loss/sigmoid/elements.cuh"

namespace jaxops::focal_loss::cuda {
namespace {

// KeepAddress makes the compiler index an address of device memory by one instruction, rather than
// compute it from its parts by four instructions each time.
template <typename T>
__device__ __forceinline__ void KeepAddress(T*& address) {
  asm("" : "+l"(address));
  __builtin_assume(__isGlobal(address));
}

// EvaluateNeighbours evaluates kCount elements from `at` on, writes their results to `elements`,
// and returns the sum of their losses if it is wanted. Unweighted rows have no weights, and none is
// ignored.
template <typename T, int kCount, Rows kRows, Want kWant, bool kUnweighted = false>
__device__ __forceinline__ Accumulator<T> EvaluateNeighbours(const SigmoidParams& p,
                                                             const Entry<T, int32_t>& entry,
                                                             T* elements, int at,
                                                             const Vector<T, kCount>& logits,
                                                             Power power) {
  using A = Accumulator<T>;
  constexpr bool kSlope = kWant == Want::kGradient || kWant == Want::kBoth;
  constexpr bool kSums = kWant == Want::kSum || kWant == Want::kBoth;
  constexpr Digits kDigits = kDigitsOf<T, kWant>;
  const bool has_ignored = !kUnweighted && p.call.has_ignored;
  T* const to = kWant == Want::kSum ? nullptr : elements + at;
  A z[kCount], loss[kCount], slope[kCount], factor[kCount];
  if constexpr (kCount > 1 && (kRows == Rows::kOne || kRows == Rows::kTwo)) {
    // The elements from the boundary on lie in a second row.
    uint32_t row = entry.skipped + at;
    const uint32_t position = p.classes.DivMod(row);
    const uint32_t boundary =
        kRows == Rows::kOne ? kCount : min(p.classes.divisor() - position, uint32_t{kCount});
    const Row<A> first = entry.template ReadRow<kUnweighted>(row);
    const Row<A> second =
        kRows == Rows::kOne
            ? first
            : entry.template ReadRow<kUnweighted>(row + (boundary < kCount ? 1 : 0));
    const bool first_ignored = has_ignored && first.label == p.call.ignored;
    const bool second_ignored = has_ignored && second.label == p.call.ignored;
    uint32_t target = first_ignored ? kCount : entry.Position(first.label) - position;
    uint32_t second_target = second_ignored ? kCount : entry.Position(second.label);
    const bool in_first = target < boundary;
    const bool in_second = kRows == Rows::kTwo && second_target < kCount - boundary;
    WidenVector(z, logits);
    const bool any = __any_sync(__activemask(), in_first || in_second);
    A total = 0;
    A of_target[2];
    if (any) {
      const auto evaluate = [&](uint32_t k, A its_factor, A& its_slope) {
        const A its_z[1] = {Widen(entry.logits[at + k])};
        const A factors[1] = {its_factor};
        const bool is_target[1] = {true};
        A its_loss[1], its_slopes[1];
        EvaluateHard<kSlope, true, kDigits>(its_loss, its_slopes, its_z, is_target, factors, power,
                                            entry.gamma);
        total += its_loss[0];
        its_slope = kSlope ? its_slopes[0] : its_loss[0];
        // An element without loss replaces the target.
        if constexpr (kSums) {
#pragma unroll
          for (int i = 0; i < kCount; ++i) z[i] = i == k ? A(-INFINITY) : z[i];
        }
      };
      if (in_first) evaluate(target, first.positive, of_target[0]);
      second_target += boundary;
      if (in_second) evaluate(second_target, second.positive, of_target[1]);
    }
    const auto evaluate = [&](auto&& factor_of) {
      const bool none[kCount] = {};
#pragma unroll
      for (int k = 0; k < kCount; ++k) factor[k] = factor_of(k);
      EvaluateHard<kSlope, false, kDigits>(loss, slope, z, none, factor, power, entry.gamma);
    };
    if (kRows == Rows::kOne || kUnweighted || !entry.weighted()) {
      evaluate([&](int) { return first.negative; });
    } else {
      evaluate([&](int k) { return k < boundary ? first.negative : second.negative; });
    }
    if (has_ignored) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const bool ignored = k < boundary ? first_ignored : second_ignored;
        loss[k] = ignored ? A(0) : loss[k];
        slope[k] = ignored ? A(0) : slope[k];
      }
    }
    if constexpr (kWant != Want::kSum) {
      StoreAll<T, kCount>(to, kSlope ? slope : loss);
      if (any) {
        if (in_first) to[target] = Narrow<T>(of_target[0]);
        if (in_second) to[second_target] = Narrow<T>(of_target[1]);
      }
    }
    return kSums ? total + SumOf(loss) : A(0);
  } else {
    Row<A> terms[kCount];
    bool target[kCount];
    if constexpr (kRows == Rows::kEach) {
      entry.ReadRows(terms, at);
#pragma unroll
      for (int k = 0; k < kCount; ++k) target[k] = entry.Position(terms[k].label) == 0;
    } else {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        uint32_t row = entry.skipped + at + k;
        const uint32_t position = p.classes.DivMod(row);
        terms[k] = entry.ReadRow(row);
        target[k] = entry.Position(terms[k].label) == position;
      }
    }
    WidenVector(z, logits);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      factor[k] = target[k] ? terms[k].positive : terms[k].negative;
    }
    EvaluateHard<kSlope, true, kDigits>(loss, slope, z, target, factor, power, entry.gamma);
    if (has_ignored) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const bool ignored = terms[k].label == p.call.ignored;
        loss[k] = ignored ? A(0) : loss[k];
        slope[k] = ignored ? A(0) : slope[k];
      }
    }
    if constexpr (kWant != Want::kSum) StoreAll<T, kCount>(to, kSlope ? slope : loss);
    return kSums ? SumOf(loss) : A(0);
  }
}

// Hard is the kernel for class labels.
template <typename T, int kCount, Rows kRows, Want kWant, int kPower>
__global__ void __launch_bounds__(kThreads) Hard(const __grid_constant__ SigmoidParams p) {
  using A = Accumulator<T>;
  constexpr bool kSums = kWant == Want::kSum || kWant == Want::kBoth;
  constexpr bool kByInstructions = sizeof(T) == 2 && kCount == kInRow<T> && kWant != Want::kSum;
  const Power power = kPower == kRunTime ? p.call.power : static_cast<Power>(kPower);
  uint32_t block = blockIdx.x;
  const int64_t begin = p.splits.DivMod(block) * p.per_block;
  Entry<T, int32_t> entry(p, block, begin);
  const int length = static_cast<int>(min(p.size - begin, p.per_block));
  const bool clustered = kSums && p.partials == nullptr;
  if (clustered) ArriveInCluster();
  A total = 0;
  T* elements = kWant == Want::kSum ? nullptr : Elements<T, kWant>(p, entry.elements);
  if constexpr (kByInstructions) {
    KeepAddress(elements);
    KeepAddress(entry.logits);
    KeepAddress(entry.labels);
  }
  const int whole = length / kCount * kCount;
  const auto evaluate = [&](auto unweighted) {
#pragma unroll 1
    for (int at = threadIdx.x * kCount; at < whole; at += kThreads * kCount) {
      const auto logits = LoadVector<kCount>(entry.logits + at);
      total += EvaluateNeighbours<T, kCount, kRows, kWant, unweighted.value>(p, entry, elements, at,
                                                                             logits, power);
    }
  };
  // Instructions bound results of 16 bits, and weights and ignored rows take many.
  if (kByInstructions && !entry.weighted() && !p.call.has_ignored) {
    evaluate(std::true_type());
  } else {
    evaluate(std::false_type());
  }
  // The elements of a batch entry need not be a multiple of kCount.
  const int at = whole + static_cast<int>(threadIdx.x);
  if (kRows != Rows::kOne && at < length) {
    total += EvaluateNeighbours<T, 1, Rows::kAny, kWant>(p, entry, elements, at,
                                                         LoadVector<1>(entry.logits + at), power);
  }
  if constexpr (kSums) Finish(p, block, clustered, total);
}

struct Plan {
  int vector;  // neighbours per thread
  Rows rows;   // of a vector
  Segments segments;

  Plan(const SigmoidCall& call, const Device& device)
      : Plan(call, device, call.loss.dtype == DType::kF64 ? kInRow<double> : kInRow<float>,
             call.loss.classes) {}

 private:
  Plan(const SigmoidCall& call, const Device& device, int width, int64_t classes)
      : vector(!IsAligned(call, width)            ? 1
               : classes >= width || classes == 1 ? width
                                                  : kShortRows),
        rows(vector == 1            ? Rows::kAny
             : classes % width == 0 ? Rows::kOne
             : classes == 1         ? Rows::kEach
             : classes >= width     ? Rows::kTwo
                                    : Rows::kAny),
        segments(call, device, width, kThreads * vector) {}
};

// The exponent is a template argument: if several neighbours lie in one row, any exponent that
// needs no power; otherwise and in f64 only the exponent of the paper.
template <typename T, int kCount, Rows kRows>
cudaError_t Launch(cudaStream_t stream, const SigmoidCall& call, const Segments& segments) {
  const auto launch = [&](auto power) {
    return DispatchWant(call.loss, [&](auto want) {
      return LaunchSegments<Accumulator<T>>(Hard<T, kCount, kRows, want.value, power.value>, stream,
                                            call, segments);
    });
  };
  if constexpr (kRows == Rows::kOne && kCount > 1 && !std::is_same_v<T, double>) {
    return DispatchPower(call.loss.power, launch);
  }
  if (call.loss.power == Power::kTwo) {
    return launch(std::integral_constant<int, static_cast<int>(Power::kTwo)>());
  }
  return launch(std::integral_constant<int, kRunTime>());
}

template <typename T>
cudaError_t Launch(cudaStream_t stream, const SigmoidCall& call, const Plan& plan) {
  const Segments& segments = plan.segments;
  switch (plan.rows) {
    case Rows::kOne:
      return Launch<T, kInRow<T>, Rows::kOne>(stream, call, segments);
    case Rows::kEach:
      return Launch<T, kInRow<T>, Rows::kEach>(stream, call, segments);
    case Rows::kTwo:
      return Launch<T, kInRow<T>, Rows::kTwo>(stream, call, segments);
    case Rows::kAny:
      break;
  }
  return plan.vector == 1 ? Launch<T, 1, Rows::kAny>(stream, call, segments)
                          : Launch<T, kShortRows, Rows::kAny>(stream, call, segments);
}

}  // namespace

bool CanRunHard(const SigmoidCall& call, const Device& device) {
  return !call.loss.soft && Plan(call, device).segments.IsIndexable(call);
}

cudaError_t LaunchHard(cudaStream_t stream, const SigmoidCall& call, const Device& device) {
  const Plan plan(call, device);
  return DispatchFloat(call.loss.dtype,
                       [&](auto logit) { return Launch<decltype(logit)>(stream, call, plan); });
}

}  // namespace jaxops::focal_loss::cuda
