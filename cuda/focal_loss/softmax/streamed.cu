// This kernel computes the softmax focal loss of rows that do not fit registers: they are read
// twice for the gradient, and once for a sum alone.
#include "cuda/focal_loss/launch.h"
#include "cuda/focal_loss/softmax/rows.cuh"

namespace jaxops::focal_loss::cuda {
namespace {

// This number of threads shares a row too long for a cluster. For the gradient there are many, so
// that the L2 cache has to hold few rows at a time.
template <bool kGradient>
constexpr int kStreamThreads = kGradient ? 1024 : 256;
// A thread has this number of vectors in flight.
template <bool kGradient>
constexpr int kStreamAhead = kGradient ? 2 : 4;

// AddOverBlock sums over the block, for all of its threads.
template <int kBlockThreads, typename A>
__device__ __forceinline__ void AddOverBlock(SumOfExp<A>& value) {
  constexpr int kWarps = kBlockThreads / kWarp;
  __shared__ SumOfExp<A> of_warp[kWarps];
  AddOverLanes<kWarp>(value);
  // All threads have read the sums of the previous row.
  __syncthreads();
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = of_warp[threadIdx.x % kWarps];
  AddOverLanes<kWarps>(value);
}

// A multiprocessor has two blocks of a gradient if it has the threads.
template <typename T, bool kGradient>
constexpr int kStreamBlocks =
    kGradient && sizeof(T) < 8 &&
            2 * kStreamThreads<kGradient> <= jaxops::cuda::kMultiprocessorThreads
        ? 2
        : 1;

// A block reads a row from memory each time that it needs the row.
template <typename T, bool kGradient>
__global__ void __launch_bounds__(kStreamThreads<kGradient>, kStreamBlocks<T, kGradient>)
    StreamedRows(const __grid_constant__ SoftmaxParams p) {
  using A = Accumulator<T>;
  constexpr int kAhead = kStreamAhead<kGradient>;
  constexpr int kThreads = kStreamThreads<kGradient>;
  using Part = RowPart<T, kAhead, 1, kGradient>;
  const Softmax& call = p.call;
  const int classes = static_cast<int>(call.classes);
  uint32_t index = blockIdx.x;
  const int64_t begin = p.splits.DivMod(index) * p.rows_per_split;
  const int64_t end = min(begin + p.rows_per_split, call.rows);
  const SoftmaxEntry<T> entry(call, index);
  A total = 0;

#pragma unroll 1
  for (int64_t row = begin; row < end; ++row) {
    const T* logits = entry.logits + row * classes;
    const int label = entry.labels[row];
    const bool known = label >= 0 && label < classes;
    const auto part_of = [&](int thread) {
      Part part(logits, classes, thread, kThreads, kAhead, p.whole);
      part.TakeOut(label, known);
      return part;
    };
    SumOfExp<A> others;
    for (int thread = threadIdx.x; thread <= classes / Part::kCount; thread += kAhead * kThreads) {
      Part part = part_of(thread);
      const SumOfExp<A> before = others;
      others.StartFrom(max(before.largest, part.FindLargest()));
      others.sum = fma(before.sum, ExpOfDifference(before.largest - others.largest),
                       part.SumExponentials(others.largest));
    }
    AddOverBlock<kThreads>(others);

    A loss, slope;
    EvaluateRow(loss, slope, others, known ? A(Widen(logits[label])) : A(0), call.power,
                entry.gamma);
    const A factor = entry.scale * entry.Weight(row);
    loss = known ? loss * factor : A(0);
    total += loss;
    if constexpr (!kGradient) {
      if (call.loss != nullptr && threadIdx.x == 0) {
        static_cast<A*>(call.loss)[entry.result + row] = loss;
      }
    } else {
      slope = known ? slope * factor : A(0);
      const A share = known ? ShareOf(slope, others) : A(0);
      T* gradient = static_cast<T*>(call.gradient) + entry.result;
      const bool alike = Misaligned(gradient) == Misaligned(entry.logits);
      for (int thread = threadIdx.x; thread <= classes / Part::kCount;
           thread += kAhead * kThreads) {
        Part part = part_of(thread);
        part.SumExponentials(others.largest);
        part.Store(gradient + row * classes, alike, share, others.largest, slope, label);
      }
    }
  }
  FinishRows(p, entry.sum, blockIdx.x, total);
}

}  // namespace

bool CanRunStreamedRows(const SoftmaxCall& call, const Device&) {
  const RowVectors row(call.loss);
  // A thread has one of the elements before and after the vectors of a row, and takes part if there
  // is a vector for it or for the previous thread.
  const int64_t max_edges =
      row.whole ? 0 : 2 * (kVectorBytes / jaxops::cuda::SizeOf(call.loss.dtype) - 1);
  // Positions in a row have 32 bits, and threads go beyond its end.
  return row.count + 1 >= max_edges && call.loss.classes <= INT32_MAX - (1 << 20) &&
         call.entries() * RowSegments(call).count <= INT32_MAX;
}

cudaError_t LaunchStreamedRows(cudaStream_t stream, const SoftmaxCall& call, const Device&) {
  return DispatchFloat(call.loss.dtype, [&](auto logit) {
    using T = decltype(logit);
    return DispatchBool(call.loss.gradient != nullptr, [&](auto gradient) {
      const auto launch = [&](SoftmaxParams& params, int64_t blocks) {
        return jaxops::cuda::Launch(StreamedRows<T, gradient.value>, blocks,
                                    kStreamThreads<gradient.value>, 0, stream, params);
      };
      return LaunchSegments<Accumulator<T>>(RowSegments(call), stream, call, launch);
    });
  });
}

}  // namespace jaxops::focal_loss::cuda
