// This kernel computes long sums of the sigmoid focal loss.
#include <cuda/ptx>

#include "cuda/focal_loss/sigmoid/elements.cuh"

namespace jaxops::focal_loss::cuda {
namespace {

namespace ptx = ::cuda::ptx;

// These are the threads that evaluate tiles, the elements of a tile, the tiles in shared memory at
// a time, and the blocks of a multiprocessor, which fill its shared memory.
constexpr int kEvaluators = 128;
constexpr int kTile = 32 * kEvaluators;
constexpr int kStages = 3;
template <typename T>
constexpr int kStreamingBlocks = 192 * 1024 / (kStages * kTile * sizeof(T));
// Row positions have 32 bits.
constexpr int64_t kMaxClasses = 1 << 20;

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void Wait(uint64_t* barrier, uint32_t parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// Turn is a stage in the ring of tiles, and the parity of the phase of its barriers.
struct Turn {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};
#endif

// StreamedSum sums a part of a batch entry with class labels and rows without weights. Tiles of it
// arrive in shared memory by bulk copies. One warp replaces the targets in a tile, at most one per
// row, by elements without loss, and evaluates them; the other warps evaluate the tile and need
// neither labels nor rows.
template <typename T, int kPower>
__global__ void __launch_bounds__(kEvaluators + kWarp, kStreamingBlocks<T>)
    StreamedSum(const __grid_constant__ SigmoidParams p) {
#if __CUDA_ARCH__ >= 900
  using A = Accumulator<T>;
  constexpr int kVector = kVectorElements<T>;
  constexpr Power kThePower = static_cast<Power>(kPower);
  extern __shared__ __align__(128) unsigned char shared[];
  // The barriers say that a tile has arrived, that its targets are replaced, and that no thread
  // needs it any longer.
  __shared__ uint64_t full[kStages], ready[kStages], empty[kStages];
  const int lane = threadIdx.x % kWarp;
  const auto tile_of = [&](int stage) { return reinterpret_cast<T*>(shared) + stage * kTile; };
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(full + i, 1);
      ptx::mbarrier_init(ready + i, kWarp);
      ptx::mbarrier_init(empty + i, kEvaluators);
    }
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
  }
  uint32_t block = blockIdx.x;
  const int64_t begin = p.splits.DivMod(block) * p.per_block;
  const Entry<T, int32_t> entry(p, block, begin);
  const int length = static_cast<int>(min(p.size - begin, p.per_block));
  __syncthreads();

  Turn turn;
  A total = 0;
  if (threadIdx.x >= kEvaluators) {
    int fetched = 0;
    const auto fetch = [&](int stage) {
      if (fetched >= length) return;
      if (lane == 0) {
        const uint32_t bytes =
            min(length - fetched, kTile) * sizeof(T) / kVectorBytes * kVectorBytes;
        ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared,
                                       full + stage, bytes);
        if (bytes > 0) {
          ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, tile_of(stage),
                             entry.logits + fetched, bytes, full + stage);
        }
      }
      fetched += kTile;
    };
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) fetch(stage);

    // Each lane has a row of a group, whose target may be in a later tile than its first element.
    // The label of its row of the next group is in flight.
    const int group = kWarp * static_cast<int>(p.classes.divisor());
    const int skipped = static_cast<int>(entry.skipped);
    int row_begin = lane * static_cast<int>(p.classes.divisor()) - skipped;
    int group_end = group - skipped;
    const int32_t* labels = entry.labels + lane;
    int32_t label = 0;
    int target;
    A target_logit[1] = {INFINITY};
    const auto next_group = [&] {
      const uint32_t position = entry.Position(label);
      target = position < p.classes.divisor() ? row_begin + static_cast<int>(position) : -1;
      row_begin += group;
      labels += kWarp;
      if (row_begin < length) label = *labels;
    };
    const auto add_targets = [&] {
      if (target_logit[0] == A(INFINITY)) return;
      A loss[1], slope[1];
      const bool is_target[1] = {true};
      const A factor[1] = {entry.positive()};
      EvaluateHard<false, true>(loss, slope, target_logit, is_target, factor, kThePower,
                                entry.gamma);
      total += loss[0];
      target_logit[0] = INFINITY;
    };
    if (row_begin < length) label = *labels;
    next_group();
#pragma unroll 1
    for (int at = 0; at < length; at += kTile, turn.Advance()) {
      const int end = min(at + kTile, length);
      T* tile = tile_of(turn.stage);
      // Copies have whole vectors, and so have the reads of the last tile.
      const int copied = end / kVector * kVector;
      if (copied < end && lane < kVector) {
        const int i = copied + lane;
        tile[i - at] = i < end ? entry.logits[i] : Narrow<T>(-INFINITY);
      }
      __syncwarp();
      Wait(full + turn.stage, turn.parity);
#pragma unroll 1
      while (true) {
        if (target >= at && target < end) {
          target_logit[0] = Widen(tile[target - at]);
          tile[target - at] = Narrow<T>(-INFINITY);
        }
        if (group_end > end) break;
        add_targets();
        next_group();
        group_end += group;
      }
      ptx::mbarrier_arrive(ready + turn.stage);
      // The previous tile has been read, or soon will be.
      if (at > 0 && fetched < length) {
        const bool first = turn.stage == 0;
        const int stage = first ? kStages - 1 : turn.stage - 1;
        Wait(empty + stage, first ? turn.parity ^ 1 : turn.parity);
        ptx::fence_proxy_async(ptx::space_shared);
        fetch(stage);
      }
    }
    add_targets();
  } else {
    const auto add = [&](auto&& vector) {
      A z[kVector], loss[kVector], slope[kVector], factor[kVector];
      const bool target[kVector] = {};
      WidenVector(z, vector);
#pragma unroll
      for (int k = 0; k < kVector; ++k) factor[k] = entry.negative();
      EvaluateHard<false, false>(loss, slope, z, target, factor, kThePower, entry.gamma);
#pragma unroll
      for (int k = 0; k < kVector; ++k) total += loss[k];
    };
#pragma unroll 1
    for (int at = 0; at < length; at += kTile, turn.Advance()) {
      const T* own = tile_of(turn.stage) + threadIdx.x * kVector;
      constexpr int kStride = kEvaluators * kVector;
      constexpr int kVectors = kTile / kStride;
      Wait(ready + turn.stage, turn.parity);
      if (length - at >= kTile) {
        Vector<T, kVector> vectors[kVectors];
#pragma unroll
        for (int i = 0; i < kVectors; ++i) vectors[i] = LoadVector<kVector>(own + i * kStride);
        ptx::mbarrier_arrive(empty + turn.stage);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) add(vectors[i]);
      } else {
        // No other tile follows the last one.
#pragma unroll 1
        for (int i = threadIdx.x * kVector; i < length - at; i += kStride) {
          add(LoadVector<kVector>(own));
          own += kStride;
        }
      }
    }
  }
  const A sum = SumOverBlock<kEvaluators + kWarp>(total);
  if (threadIdx.x == 0) static_cast<A*>(p.partials)[blockIdx.x] = sum;
#endif
}

// The splits divide a batch entry among blocks. Vectors of a block's logits do not cross its end.
struct Plan {
  static constexpr int kUnit = kInRow<float>;

  int64_t splits;
  int64_t per_block;

  explicit Plan(const SigmoidCall& call) {
    const int resident =
        call.loss.dtype == DType::kF32 ? kStreamingBlocks<float> : kStreamingBlocks<__half>;
    // The number of blocks is that which the 132 multiprocessors of an H100 or H200 run at a time.
    splits = std::min<int64_t>(call.splits, 132 * resident);
    per_block = CeilDiv(CeilDiv(call.size(), splits), kUnit) * kUnit;
    splits = CeilDiv(call.size(), per_block);  // no block begins beyond the end
  }
};

template <typename T>
cudaError_t Launch(cudaStream_t stream, const SigmoidCall& call, const Plan& plan) {
  const SigmoidParams params = MakeParams(call, plan.splits, plan.per_block, call.partials);
  const cudaError_t error = DispatchPower(call.loss.power, [&](auto power) {
    return jaxops::cuda::Launch(StreamedSum<T, power.value>, call.entries() * plan.splits,
                                kEvaluators + kWarp, kStages * kTile * sizeof(T), stream, params);
  });
  return error != cudaSuccess ? error
                              : CombineSums<float>(stream, call.loss, plan.splits, call.partials);
}

}  // namespace

bool CanRunStreamedSum(const SigmoidCall& call, const Device& device) {
  const Sigmoid& loss = call.loss;
  if (!IsUnweighted(loss) || loss.sum == nullptr || loss.gradient != nullptr ||
      loss.classes > kMaxClasses || !IsAligned(call, Plan::kUnit) || !device.has_clusters()) {
    return false;
  }
  const Plan plan(call);
  // The labels of rows are read a few groups of rows ahead.
  return plan.per_block + 4 * kWarp * loss.classes <= INT32_MAX &&
         call.entries() * plan.splits <= INT32_MAX;
}

cudaError_t LaunchStreamedSum(cudaStream_t stream, const SigmoidCall& call, const Device&) {
  return DispatchUpToF32(call.loss.dtype, [&](auto logit) {
    return Launch<decltype(logit)>(stream, call, Plan(call));
  });
}

}  // namespace jaxops::focal_loss::cuda
