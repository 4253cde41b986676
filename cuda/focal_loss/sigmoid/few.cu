// This kernel computes the sigmoid focal loss of few elements.
#include "cuda/focal_loss/sigmoid/elements.cuh"

namespace jaxops::focal_loss::cuda {
namespace {

constexpr int kMaxThreads = 1024;
// Elementwise results of at most this size have more threads with half as many elements each,
// because the latency of one thread's instructions exceeds the time of all threads of a
// multiprocessor.
constexpr int64_t kMaxHalved = 1 << 17;
// A block of a sum is worth this number of elements.
constexpr int64_t kSummedABlock = 640;

__device__ __forceinline__ uint32_t BitBelow(uint32_t at, uint32_t end) {
  return at < end ? 1u << at : 0u;
}

// FewBatchedParams adds a batch to FewParams.
struct FewBatchedParams : FewParams {
  FastDivider splits;
  BatchMap<Sigmoid::kOperands> batch;

  FewBatchedParams(const Sigmoid& call, int64_t per_block, int64_t splits)
      : FewParams(call, per_block), splits(splits), batch(call.batch) {}
};

// FewElements is for class labels without weights and few elements, whose time is latency: no load
// waits for another load. Neighbours lie in at most two rows. The blocks of a batch entry form a
// cluster if a sum is wanted.
template <typename T, int kCount, Want kWant, int kPower, typename Params>
__global__ void __launch_bounds__(kMaxThreads) FewElements(const __grid_constant__ Params p) {
  using A = Accumulator<T>;
  constexpr bool kBatched = std::is_same_v<Params, FewBatchedParams>;
  constexpr bool kSlope = kWant == Want::kGradient || kWant == Want::kBoth;
  constexpr bool kSums = kWant == Want::kSum || kWant == Want::kBoth;
  if constexpr (kSums) ArriveInCluster();
  uint32_t entry = blockIdx.x;
  uint32_t block = blockIdx.x;
  const T* logits = static_cast<const T*>(p.logits);
  const int32_t* labels = p.labels;
  const int32_t* class_ids = p.class_ids;
  const A* scales = static_cast<const A*>(p.scale);
  const A* parameters = static_cast<const A*>(p.parameters);
  T* elements = static_cast<T*>(p.elements);
  A* sum = static_cast<A*>(p.sum);
  if constexpr (kBatched) {
    block = p.splits.DivMod(entry);
    const auto offsets = p.batch.AllOffsets(entry);
    logits += offsets[Sigmoid::kLogits];
    labels += offsets[Sigmoid::kLabels];
    class_ids += offsets[Sigmoid::kClassIds];
    scales += offsets[Sigmoid::kScale];
    parameters += offsets[Sigmoid::kParameters];
    elements += offsets[Sigmoid::kElements];
    sum += offsets[Sigmoid::kSum];
  }
  const auto power = kPower == kRunTime ? p.power : static_cast<Power>(kPower);
  struct Read {
    Vector<T, kCount> logits;
    uint32_t position;
    uint32_t boundary;
    int32_t first;
    int32_t second;
  };
  // Threads beyond the end read the last elements, which is faster than a branch.
  const auto read = [&](uint32_t at) {
    Read result;
    uint32_t row = min(at, p.size - kCount);
    result.logits = LoadVector<kCount>(logits + row);
    result.position = p.classes.DivMod(row);
    result.boundary = min(p.classes.divisor() - result.position, uint32_t{kCount});
    result.first = labels[row];
    result.second = labels[row + (result.boundary < kCount ? 1 : 0)];
    return result;
  };
  const uint32_t begin = block * p.per_block;
  const uint32_t end = min(p.size, begin + p.per_block);
  const uint32_t stride = blockDim.x * kCount;
  uint32_t at = begin + threadIdx.x * kCount;
  Read next = read(at);
  const A gamma = parameters[0];
  const A negative = scales[0] * parameters[1];
  const A positive = scales[0] * parameters[2];
  const auto first_class = static_cast<uint32_t>(class_ids[0] - kFirstClassId);
  A total = 0;
#pragma unroll 1
  while (at < end) {
    const Read own = next;
    if (kSums && at + stride < end) next = read(at + stride);
    const uint32_t boundary = own.boundary;
    const uint32_t targets = BitBelow(own.first - first_class - own.position, boundary) |
                             BitBelow(own.second - first_class, kCount - boundary) << boundary;
    A z[kCount], loss[kCount], slope[kCount], factor[kCount];
    bool target[kCount];
    WidenVector(z, own.logits);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      target[k] = targets >> k & 1;
      factor[k] = target[k] ? positive : negative;
    }
    EvaluateHard<kSlope, true, kDigitsOf<T, kWant>>(loss, slope, z, target, factor, power, gamma);
    if constexpr (kWant != Want::kSum) StoreAll<T, kCount>(elements + at, kSlope ? slope : loss);
    if constexpr (!kSums) return;
    total += SumOf(loss);
    at += stride;
  }
  if constexpr (kSums) {
    total = SumOverAnyBlock(total);
    if (SumOverCluster(total)) *sum = total;
  }
}

// Plan says how many elements a thread takes at a time, and how blocks divide a batch entry.
struct Plan {
  int vector = kShortRows;
  int threads = 128;
  int64_t splits;
  int64_t per_block;

  explicit Plan(const SigmoidCall& call) {
    const int64_t size = call.size();
    if (call.loss.sum == nullptr) {
      if (size <= kMaxHalved) {
        vector = kShortRows / 2;
        threads = 256;
      }
      per_block = vector * threads;
      splits = CeilDiv(size, per_block);
    } else {
      constexpr int64_t kUnit = kShortRows * kWarp;
      splits = std::min(CeilDiv(size, kSummedABlock), kClusterBlocks);
      per_block = CeilDiv(CeilDiv(size, splits), kUnit) * kUnit;
      threads = static_cast<int>(std::min<int64_t>(per_block / kShortRows, kMaxThreads));
    }
  }
};

template <typename T>
cudaError_t Launch(cudaStream_t stream, const SigmoidCall& call, const Plan& plan) {
  const Sigmoid& loss = call.loss;
  const auto launch = [&](auto count, auto want, auto power, const auto& params) {
    const auto kernel =
        FewElements<T, count.value, want.value, power.value, std::remove_cvref_t<decltype(params)>>;
    const int64_t blocks = call.entries() * plan.splits;
    return loss.sum != nullptr && plan.splits > 1
               ? jaxops::cuda::LaunchClusters(kernel, blocks, static_cast<unsigned>(plan.splits),
                                              plan.threads, 0, stream, params)
               : jaxops::cuda::Launch(kernel, blocks, plan.threads, 0, stream, params);
  };
  const FewParams alone(loss, plan.per_block);
  const auto with_power = [&](auto power) {
    return DispatchWant(loss, [&](auto want) {
      constexpr std::integral_constant<int, kShortRows> kAll;
      constexpr std::integral_constant<int, kShortRows / 2> kHalf;
      if constexpr (want.value == Want::kSum || want.value == Want::kBoth) {
        return call.entries() > 1
                   ? launch(kAll, want, power, FewBatchedParams(loss, plan.per_block, plan.splits))
                   : launch(kAll, want, power, alone);
      } else {
        return plan.vector == kHalf.value ? launch(kHalf, want, power, alone)
                                          : launch(kAll, want, power, alone);
      }
    });
  };
  return loss.power == Power::kTwo
             ? with_power(std::integral_constant<int, static_cast<int>(Power::kTwo)>())
             : with_power(std::integral_constant<int, kRunTime>());
}

}  // namespace

bool CanRunFewElements(const SigmoidCall& call, const Device& device) {
  const Sigmoid& loss = call.loss;
  // Vectors lie in at most two rows, and in one batch entry.
  if (!IsUnweighted(loss) || loss.classes < kShortRows || call.size() % kShortRows != 0 ||
      call.size() > INT32_MAX) {
    return false;
  }
  if (loss.sum == nullptr) return call.entries() == 1;
  const Plan plan(call);
  return (plan.splits == 1 || device.has_clusters()) && call.entries() * plan.splits <= INT32_MAX;
}

cudaError_t LaunchFewElements(cudaStream_t stream, const SigmoidCall& call, const Device&) {
  return DispatchUpToF32(call.loss.dtype, [&](auto logit) {
    return Launch<decltype(logit)>(stream, call, Plan(call));
  });
}

}  // namespace jaxops::focal_loss::cuda
