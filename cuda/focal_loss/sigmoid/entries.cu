// This kernel computes the sigmoid focal loss of many small batch entries. Some lanes of a warp
// have an entry: with a block for each, the costs of blocks exceed all others.
#include "cuda/focal_loss/sigmoid/elements.cuh"

namespace jaxops::focal_loss::cuda {
namespace {

constexpr int64_t kMaxElements = 1024;  // of an entry
// Entries of at most the first number of elements have the second number of lanes, others a warp.
constexpr int64_t kMaxShortElements = 64;
constexpr int kShortLanes = 8;

// An entry has kLanes lanes, which take kCount elements at a time, kLanes apart; L is the type of
// labels, int32_t for classes.
template <typename T, typename L, int kLanes, int kCount, Want kWant>
__global__ void __launch_bounds__(kThreads) ManyEntries(const __grid_constant__ SigmoidParams p) {
  using A = Accumulator<T>;
  constexpr bool kHard = std::is_same_v<L, int32_t>;
  constexpr bool kSlope = kWant == Want::kGradient || kWant == Want::kBoth;
  constexpr bool kSums = kWant == Want::kSum || kWant == Want::kBoth;
  const uint32_t index = (blockIdx.x * kThreads + threadIdx.x) / kLanes;
  const bool exists = index < static_cast<uint32_t>(p.call.batch.size());
  const Entry<T, L> entry(p, exists ? index : 0, 0);
  const int size = exists ? static_cast<int>(p.size) : 0;
  const Power power = p.call.power;
  A total = 0;

#pragma unroll 1
  for (int at = static_cast<int>(threadIdx.x) % kLanes; at < size; at += kLanes * kCount) {
    A z[kCount], loss[kCount], slope[kCount], factor[kCount], y[kCount];
    bool target[kCount], counts[kCount];
    Row<A> terms[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const int element = at + k * kLanes;
      counts[k] = element < size;
      const int read = counts[k] ? element : at;
      uint32_t row = read;
      const uint32_t position = p.classes.DivMod(row);
      terms[k] = entry.ReadRow(row);
      z[k] = Widen(entry.logits[read]);
      if constexpr (kHard) {
        target[k] = entry.Position(terms[k].label) == position;
        factor[k] = target[k] ? terms[k].positive : terms[k].negative;
        counts[k] = counts[k] && !(p.call.has_ignored && terms[k].label == p.call.ignored);
      } else {
        y[k] = ReadTarget<A>(entry.labels[read]);
        factor[k] = y[k] * terms[k].positive + (1 - y[k]) * terms[k].negative;
      }
    }
    if constexpr (kHard) {
      EvaluateHard<kSlope, true, kDigitsOf<T, kWant>>(loss, slope, z, target, factor, power,
                                                      entry.gamma);
    } else {
      EvaluateSoft<kSlope, kIsBool<L>>(loss, slope, z, y, factor, power, entry.gamma);
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const int element = at + k * kLanes;
      if constexpr (kSlope) {
        if (element < size) {
          Elements<T, kWant>(p, entry.elements)[element] = Narrow<T>(counts[k] ? slope[k] : A(0));
        }
      }
      if constexpr (kSums) total += counts[k] ? loss[k] : A(0);
    }
  }
  if constexpr (kSums) {
#pragma unroll
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
      total += __shfl_xor_sync(~0u, total, lanes);
    }
    if (exists && threadIdx.x % kLanes == 0) {
      static_cast<A*>(p.call.sum)[p.call.batch.AllOffsets(index)[Sigmoid::kSum]] = total;
    }
  }
}

template <typename T, typename L, int kLanes, int kCount>
cudaError_t Launch(cudaStream_t stream, const SigmoidCall& call) {
  const SigmoidParams params = MakeParams(call, 1, call.size(), nullptr);
  const int64_t blocks = CeilDiv(call.entries(), kThreads / kLanes);
  return DispatchWant(call.loss, [&](auto want) {
    if constexpr (want.value == Want::kLoss) {
      return cudaErrorInvalidValue;
    } else {
      return jaxops::cuda::Launch(ManyEntries<T, L, kLanes, kCount, want.value>, blocks, kThreads,
                                  0, stream, params);
    }
  });
}

template <typename T, typename L>
cudaError_t Launch(cudaStream_t stream, const SigmoidCall& call) {
  return call.size() <= kMaxShortElements ? Launch<T, L, kShortLanes, 2>(stream, call)
                                          : Launch<T, L, kWarp, 4>(stream, call);
}

}  // namespace

bool CanRunManyEntries(const SigmoidCall& call, const Device&) {
  // 32 bits hold the index of a thread.
  return call.loss.loss == nullptr && call.size() <= kMaxElements &&
         call.entries() * kWarp <= INT32_MAX;
}

cudaError_t LaunchManyEntries(cudaStream_t stream, const SigmoidCall& call, const Device&) {
  return DispatchFloat(call.loss.dtype, [&](auto logit) {
    using T = decltype(logit);
    if (!call.loss.soft) return Launch<T, int32_t>(stream, call);
    return DispatchTargets<T>(call.loss.target_type, [&](auto target) {
      return Launch<T, decltype(target)>(stream, call);
    });
  });
}

}  // namespace jaxops::focal_loss::cuda
