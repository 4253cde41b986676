// The softmax focal loss of rows that a warp, or a part of one, has in its registers.
//
// Lanes read the logits of their rows once, by wide accesses straight from memory, and wait for no
// other warp. To evaluate a row takes hundreds of instructions; each lane does it for a row of its
// own, of the several that the lanes of a row have in turns.
#include "cuda/focal_loss.h"
#include "cuda/focal_loss_softmax.cuh"

namespace jaxops::focal_loss::cuda {
namespace {

// Blocks of a multiprocessor, by the registers that the rows of a thread take.
template <typename A, int kPacks, int kBatch>
constexpr int kResident = kPacks * kBatch >= 16 || sizeof(A) == 8 ? 2
                          : kPacks * kBatch >= 10                 ? 3
                                                                  : 4;

// kLanes lanes a row, up to kPacks accesses of each, kBatch rows at a time.
template <typename T, int kLanes, int kPacks, int kBatch, bool kGradient>
__global__ void __launch_bounds__(kThreads, kResident<Accumulator<T>, kPacks, kBatch>)
    LaneRows(const __grid_constant__ SoftmaxParams p) {
  using A = Accumulator<T>;
  static_assert(kBatch <= kLanes);
  constexpr int kCount = kPackElements<T>;
  constexpr int kGroups = kWarp / kLanes;
  constexpr int kStride = kLanes * kCount;
  const Softmax& call = p.call;
  const int classes = static_cast<int>(call.classes);
  const int lane = threadIdx.x % kLanes;
  const int group = threadIdx.x % kWarp / kLanes;
  const int steps = kGradient ? 1 : p.steps;
  const int tile_rows = kGroups * kBatch * steps;

  uint32_t block = blockIdx.x;
  const int64_t begin = p.splits.Peel(block) * p.rows_per_split;
  const int64_t end = min(begin + p.rows_per_split, call.rows);
  const bool sums = call.sum != nullptr;
  if (sums && p.partials == nullptr) ArriveInCluster();
  const SoftmaxEntry<T> entry(call, block);
  T* const gradient = kGradient ? static_cast<T*>(call.gradient) + entry.result : nullptr;
  const bool alike = Misaligned(gradient) == Misaligned(entry.logits);
  A total = 0;

#pragma unroll 1
  for (int64_t tile = begin + threadIdx.x / kWarp * tile_rows; tile < end;
       tile += blockDim.x / kWarp * tile_rows) {
    const int64_t own_row = tile + lane * kGroups + group;
    int own_label = -1;
    A factor = 0;
    if (lane < kBatch * steps && own_row < end) {
      own_label = entry.labels[own_row];
      factor = entry.Factor(own_row);
    }
    const bool known = own_label >= 0 && own_label < classes;
    A label_logit = 0;
    SumOfExp<A> own;
    RowPacks<T, kPacks> rows[kBatch];
    SumOfExp<A> others[kBatch];
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const int64_t first = tile + step * kBatch * kGroups + group;
      const T* logits[kBatch];
      int at[kBatch], length[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int64_t row = first + b * kGroups;
        logits[b] = entry.logits + row * classes;
        at[b] = lane * kCount - Misaligned(logits[b]);
        length[b] = row < end ? classes : 0;
        rows[b].LoadWhole(logits[b], length[b], at[b], kStride, p.packs);
      }
      if (step == 0 && known) label_logit = Widen(entry.logits[own_row * classes + own_label]);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        rows[b].LoadEdges(logits[b], length[b], at[b], kStride, p.packs);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int place = step * kBatch + b;
        const int label = __shfl_sync(~0u, own_label, place, kLanes);
        rows[b].TakeOut(label, length[b], at[b], kStride, p.packs);
        others[b].StartFrom(OverLanes<kLanes>(rows[b].FindLargest(p.packs), Max()));
        others[b].sum =
            OverLanes<kLanes>(rows[b].SumExponentials(others[b].largest, p.packs), Plus());
        if (lane == place) own = others[b];
      }
    }
    A loss, slope;
    EvaluateRow(loss, slope, own, label_logit, call.power, entry.gamma);
    if (known) total += loss * factor;
    if constexpr (!kGradient) {
      if (call.loss != nullptr && lane < kBatch * steps && own_row < end) {
        static_cast<A*>(call.loss)[entry.result + own_row] = known ? loss * factor : A(0);
      }
    } else {
      slope = known ? slope * factor : A(0);
      const A share = known ? ShareOf(slope, own) : A(0);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int64_t row = tile + b * kGroups + group;
        const int label = __shfl_sync(~0u, own_label, b, kLanes);
        const A row_share = __shfl_sync(~0u, share, b, kLanes);
        const A row_slope = __shfl_sync(~0u, slope, b, kLanes);
        const int64_t offset = row * classes;
        rows[b].Store(gradient + offset, alike, row_share, others[b].largest, row_slope, label,
                      row < end ? classes : 0, lane * kCount - Misaligned(entry.logits + offset),
                      kStride, p.packs);
      }
    }
  }
  if (sums) FinishSum(p, entry.sum, total);
}

// Steps of rows before they are evaluated: few for rows that keep a warp busy for long, as their
// number is what warps differ in at the end.
constexpr int kMostSteps = 8;
// Blocks of a sum that the blocks of one cluster do in turns, rather than need a second kernel.
constexpr int64_t kMostTurns = 4;
// Results of so few elements are made by blocks of few threads, which fill more multiprocessors.
constexpr int64_t kFewElements = 1 << 18;
constexpr int kFewThreads = 64;

template <typename T, int kLanes, int kPacks, int kBatch>
cudaError_t Launch(cudaStream_t stream, const Softmax& call, int64_t most_splits, void* partials) {
  constexpr int kStepRows = kWarp / kLanes * kBatch;
  const bool sums = call.sum != nullptr;
  const bool few = !sums && call.batch.size() * call.rows * call.classes <= kFewElements;
  const int threads = few ? kFewThreads : kThreads;
  // One row a lane, where the rows are many.
  int64_t steps = call.gradient != nullptr ? 1 : std::min(kLanes / kBatch, kMostSteps);
  int64_t block_rows = threads / kWarp * kStepRows;
  int64_t splits = CeilDiv(call.rows, block_rows);
  bool clustered = false;
  if (sums) {
    most_splits = std::max<int64_t>(most_splits, 1);
    clustered =
        splits == 1 || (splits <= kClusterBlocks * kMostTurns && jaxops::cuda::HasClusters());
    if (clustered) most_splits = kClusterBlocks;
  }
  if (splits < 1024) {
    steps = std::clamp<int64_t>(splits / (clustered ? kClusterBlocks : 264), 1, steps);
  }
  block_rows *= steps;
  splits = CeilDiv(call.rows, block_rows);
  if (sums && splits > most_splits) {
    block_rows *= CeilDiv(splits, most_splits);
    splits = CeilDiv(call.rows, block_rows);
  }
  const int64_t blocks = call.batch.size() * splits;
  const SoftmaxParams params{call,
                             FastDivider(splits),
                             block_rows,
                             clustered ? nullptr : partials,
                             static_cast<int32_t>(CeilDiv(PacksOfRow(call).count, kLanes)),
                             static_cast<int32_t>(steps),
                             1};
  const auto launch = [&](auto kernel) {
    return clustered && splits > 1
               ? jaxops::cuda::LaunchClusters(kernel, blocks, splits, threads, 0, stream, params)
               : jaxops::cuda::Launch(kernel, blocks, threads, 0, stream, params);
  };
  const cudaError_t error = DispatchBool(call.gradient != nullptr, [&](auto gradient) {
    return launch(LaneRows<T, kLanes, kPacks, kBatch, gradient.value>);
  });
  if (error != cudaSuccess || !sums || clustered) return error;
  return CombineSums<Accumulator<T>>(stream, call, splits, partials);
}

}  // namespace

cudaError_t LaunchLaneRows(cudaStream_t stream, const Softmax& call, int64_t splits,
                           void* partials) {
  return DispatchFloat(call.dtype, [&](auto logit) {
    using T = decltype(logit);
    const int64_t packs = PacksOfRow(call).count;
    const auto launch = [&](auto lanes, auto most, auto batch) {
      return Launch<T, lanes.value, most.value, batch.value>(stream, call, splits, partials);
    };
    using std::integral_constant;
    constexpr auto k1 = integral_constant<int, 1>();
    constexpr auto k2 = integral_constant<int, 2>();
    constexpr auto k3 = integral_constant<int, 3>();
    constexpr auto k4 = integral_constant<int, 4>();
    constexpr auto k6 = integral_constant<int, 6>();
    constexpr auto k8 = integral_constant<int, 8>();
    constexpr auto k16 = integral_constant<int, 16>();
    constexpr auto k32 = integral_constant<int, 32>();
    const bool few = call.rows * call.classes <= kFewElements;
    if (packs <= 2 && PacksOfRow(call).whole) return launch(k1, k2, k1);
    if (packs <= 12 && !few) return launch(k4, k3, k4);
    if (packs <= 24 && !few) return launch(k4, k6, k2);
    if (packs <= 64) return launch(k8, k8, k1);
    if (packs <= 128) return launch(k16, k8, k1);
    if (packs <= 256) return launch(k32, k8, k1);
    return launch(k32, k16, k1);
  });
}

}  // namespace jaxops::focal_loss::cuda
