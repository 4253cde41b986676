// This kernel computes the softmax focal loss of rows that fit the registers of a warp, or of a
// part of one.
//
// Lanes read the logits of their rows once, by vectors directly from memory, and wait for no other
// warp. The evaluation of a row takes more than a hundred instructions; the lanes of a group take
// several rows in turn, and each lane evaluates one of them.
#include "cuda/focal_loss/launch.h"
#include "cuda/focal_loss/softmax/rows.cuh"

namespace jaxops::focal_loss::cuda {
namespace {

// Exponentials of 2-byte logits are kept if they take few registers.
template <typename T, int kVectors>
constexpr bool kKeepsExponentials = sizeof(T) > 2 || kVectors <= 4;

// A block has at most this number of steps, and a warp before its rows are evaluated.
constexpr int64_t kMaxSteps = 8;

// A row has at most this number of vectors.
constexpr int64_t kMaxVectors = 512;

// The registers of a row determine the number of blocks per multiprocessor.
constexpr int ResidentBlocks(bool is_f64, int vectors) {
  return is_f64 && vectors >= 16 ? 1 : is_f64 || vectors >= 16 ? 2 : vectors >= 10 ? 3 : 4;
}

// A row has kLanes lanes, up to kVectors vectors each.
template <typename T, int kLanes, int kVectors, bool kGradient>
__global__ void __launch_bounds__(kThreads, ResidentBlocks(sizeof(T) == 8, kVectors))
    LaneRows(const __grid_constant__ SoftmaxParams p) {
  using A = Accumulator<T>;
  constexpr int kGroups = kWarp / kLanes;
  constexpr int kEdges = (2 * kVectorElements<T> - 2 + kLanes - 1) / kLanes;
  using Row = RowPart<T, kVectors, kEdges, kGradient && kKeepsExponentials<T, kVectors>>;
  const Softmax& call = p.call;
  const int classes = static_cast<int>(call.classes);
  const int lane = threadIdx.x % kLanes;
  const int group = threadIdx.x % kWarp / kLanes;
  const int steps = kGradient ? 1 : p.steps;
  const int tile_rows = kGroups * steps;

  uint32_t block = blockIdx.x;
  const int64_t begin = p.splits.DivMod(block) * p.rows_per_split;
  const int64_t end = min(begin + p.rows_per_split, call.rows);
  const bool sums = call.sum != nullptr;
  if (sums && p.partials == nullptr) ArriveInCluster();
  const SoftmaxEntry<T> entry(call, block);
  A total = 0;

#pragma unroll 1
  for (int64_t tile = begin + threadIdx.x / kWarp * tile_rows; tile < end;
       tile += kThreads / kWarp * tile_rows) {
    // The rows of neighbouring groups are neighbours; a lane evaluates one row of its group.
    const int64_t own_row = tile + lane * kGroups + group;
    const bool has_row = lane < steps && own_row < end;
    int own_label = -1;
    A weight = 0;
    if (has_row) {
      own_label = entry.labels[own_row];
      weight = entry.Weight(own_row);
    }
    const bool known = own_label >= 0 && own_label < classes;
    A label_logit = 0;
    SumOfExp<A> own;
    const auto sum_up = [&](Row& row, int step) {
      if (step == 0 && known) label_logit = Widen(entry.logits[own_row * classes + own_label]);
      const int label = __shfl_sync(~0u, own_label, step, kLanes);
      row.TakeOut(label, label >= 0 && label < classes);
      SumOfExp<A> others;
      others.StartFrom(LargestOfLanes<kLanes>(row.FindLargest()));
      others.sum = OverLanes<kLanes>(row.SumExponentials(others.largest), Plus());
      if (lane == step) own = others;
    };
    const auto row_of = [&](int64_t row) {
      return Row(entry.logits + row * classes, row < end ? classes : 0, lane, kLanes, p.vectors,
                 p.whole);
    };
    A loss, slope;
    if constexpr (!kGradient) {
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        Row row = row_of(tile + step * kGroups + group);
        sum_up(row, step);
      }
      EvaluateRow(loss, slope, own, label_logit, call.power, entry.gamma);
      loss *= entry.scale * weight;
      if (call.loss != nullptr && has_row) {
        static_cast<A*>(call.loss)[entry.result + own_row] = known ? loss : A(0);
      }
    } else {
      const int64_t first = tile + group;
      Row row = row_of(first);
      sum_up(row, 0);
      EvaluateRow(loss, slope, own, label_logit, call.power, entry.gamma);
      const A factor = entry.scale * weight;
      loss *= factor;
      slope = known ? slope * factor : A(0);
      const A share = known ? ShareOf(slope, own) : A(0);
      T* gradient = static_cast<T*>(call.gradient) + entry.result;
      const bool alike = Misaligned(gradient) == Misaligned(entry.logits);
      row.Store(gradient + first * classes, alike, __shfl_sync(~0u, share, 0, kLanes),
                __shfl_sync(~0u, own.largest, 0, kLanes), __shfl_sync(~0u, slope, 0, kLanes),
                __shfl_sync(~0u, own_label, 0, kLanes));
    }
    if (known) total += loss;
  }
  if (sums) FinishSum(p.partials, static_cast<A*>(call.sum) + entry.sum, total);
}

struct Plan {
  RowLanes lanes;
  RowSplits splits;
  int steps;  // of a warp before its rows are evaluated

  Plan(const SoftmaxCall& call, const Device& device)
      : lanes(call.loss),
        splits(call.loss, device, kThreads / lanes.count,
               ResidentBlocks(call.loss.dtype == DType::kF64, lanes.vectors), MaxSteps(call.loss),
               call.splits),
        // The number is the same each time, and at most one row per lane.
        steps(static_cast<int>(CeilDiv(
            splits.steps, CeilDiv(splits.steps, std::min<int64_t>(lanes.count, kMaxSteps))))) {}

 private:
  // Blocks of few rows write a gradient in order.
  static int64_t MaxSteps(const Softmax& loss) {
    if (loss.gradient == nullptr) return kMaxSteps;
    return jaxops::cuda::SizeOf(loss.dtype) == 2 ? 2 : 1;
  }
};

}  // namespace

bool CanRunLaneRows(const SoftmaxCall& call, const Device& device) {
  return RowVectors(call.loss).count <= kMaxVectors && Plan(call, device).splits.IsGrid(call);
}

cudaError_t LaunchLaneRows(cudaStream_t stream, const SoftmaxCall& call, const Device& device) {
  const Plan plan(call, device);
  const RowVectors row(call.loss);
  SoftmaxParams params{call.loss};
  params.rows_per_split = plan.splits.rows;
  params.vectors = static_cast<int32_t>(CeilDiv(row.count, plan.lanes.count));
  params.whole = row.whole;
  params.steps = plan.steps;
  return DispatchFloat(call.loss.dtype, [&](auto logit) {
    using T = decltype(logit);
    return DispatchLanes(plan.lanes, [&](auto lanes, auto vectors) {
      return DispatchBool(call.loss.gradient != nullptr, [&](auto gradient) {
        return LaunchSplits<Accumulator<T>>(LaneRows<T, lanes.value, vectors.value, gradient.value>,
                                            kThreads, plan.splits, stream, call, params);
      });
    });
  });
}

}  // namespace jaxops::focal_loss::cuda
