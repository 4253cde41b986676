// The softmax focal loss of rows, and its gradient.
//
// With x the log-sum-exp of all logits but that of the label, minus that of the label, the loss is
// the function of one number that the sigmoid's is. A group of threads shares a row: one pass finds
// the largest of the other logits and the sum of exponentials beside it; for the gradient, a second
// one finds the row in a cache.
#include <cstdint>

#include "cuda/focal_loss.cuh"
#include "cuda/focal_loss.h"

namespace jaxops::focal_loss::cuda {
namespace {

struct Params {
  Softmax call;
  int64_t blocks;  // of a batch entry
};

// exp(x) for x <= 0 where it is a term of a sum beside one of 1, or a share of it.
__device__ __forceinline__ float ExpOfDifference(float x) { return Exp2Flushed(x * kLog2E); }
__device__ __forceinline__ double ExpOfDifference(double x) { return exp(x); }

// A running sum of exponentials, relative to the largest exponent.
template <typename A>
struct SumOfExp {
  A largest = -Largest<A>();
  A sum = 0;

  __device__ __forceinline__ void Add(const SumOfExp& other) {
    const A most = max(largest, other.largest);
    sum = sum * ExpOfDifference(largest - most) + other.sum * ExpOfDifference(other.largest - most);
    largest = most;
  }
};

// Sums over kLanes neighbouring threads, for all of them.
template <int kLanes, typename A>
__device__ __forceinline__ void SumOverGroup(SumOfExp<A>& value) {
#pragma unroll
  for (int lanes = min(kLanes, kWarp) / 2; lanes > 0; lanes /= 2) {
    SumOfExp<A> other;
    other.largest = __shfl_xor_sync(~0u, value.largest, lanes);
    other.sum = __shfl_xor_sync(~0u, value.sum, lanes);
    value.Add(other);
  }
  if constexpr (kLanes > kWarp) {
    static_assert(kLanes == kThreads);
    __shared__ SumOfExp<A> of_warp[kThreads / kWarp];
    if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
    __syncthreads();
    value = of_warp[0];
#pragma unroll
    for (int warp = 1; warp < kThreads / kWarp; ++warp) value.Add(of_warp[warp]);
  }
}

// Loss and slope of a row from what the label trails the others by.
template <typename A>
__device__ __forceinline__ void EvaluateRow(A& loss, A& slope, const SumOfExp<A>& others, A label,
                                            Power power, A gamma) {
  const A lead = others.largest - label;
  const A back = others.largest - lead;
  // What the subtraction lost; infinite logits have nothing to lose.
  const A lost = lead - lead == 0 ? (others.largest - (lead + back)) + (back - label) : A(0);
  const A tiny = std::is_same_v<A, float> ? A(FLT_MIN) : A(DBL_MIN);
  const A low = lost + log(others.sum < tiny ? tiny : others.sum);
  const A x = lead + low;
  const bool leads[1] = {x >= 0};
  const A shrunk = ExpOfNegative<true>(-abs(lead));
  const A e[1] = {leads[0] ? (lead >= 0 ? shrunk : 1 / shrunk) * (1 - lost) / others.sum
                           : shrunk * (1 + lost) * others.sum};
  const A positive[1] = {leads[0] ? x : A(0)};
  const A negative_high[1] = {leads[0] ? A(0) : lead};
  const A negative_low[1] = {leads[0] ? A(0) : low};
  A losses[1], slopes[1];
  Evaluate<true>(losses, slopes, e, leads, positive, negative_high, negative_low, power, gamma);
  loss = losses[0];
  slope = slopes[0];
}

// kLanes threads a row, which they read kCount logits at a time.
template <typename T, int kLanes, int kCount, bool kGradient>
__global__ void __launch_bounds__(kThreads) Rows(const __grid_constant__ Params p) {
  using A = Accumulator<T>;
  constexpr int kRows = kThreads / kLanes;
  const Softmax& call = p.call;
  const int64_t entry = blockIdx.x / p.blocks;
  const int64_t first = (blockIdx.x - entry * p.blocks) * kRows + threadIdx.x / kLanes;
  // Threads past the last row take part in the exchanges, with a row that is there.
  const bool inside = first < call.rows;
  const int64_t row = inside ? first : call.rows - 1;
  const int lane = threadIdx.x % kLanes;
  const int64_t classes = call.classes;
  const T* logits = static_cast<const T*>(call.logits) +
                    call.batch.Offset(entry, Softmax::kLogits) + row * classes;
  const int64_t label = call.labels[call.batch.Offset(entry, Softmax::kLabels) + row];
  const bool known = label >= 0 && label < classes;

  SumOfExp<A> others;
  for (int64_t i = lane * kCount; i < classes; i += kLanes * kCount) {
    const auto pack = LoadPack<kCount>(logits + i);
    A z[kCount];
    SumOfExp<A> some;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      z[k] = i + k == label ? -A(INFINITY) : A(Widen(pack.values[k]));
      some.largest = max(some.largest, z[k]);
    }
    // An infinite logit leads by a finite number and has an infinite exponential.
    some.largest = min(some.largest, Largest<A>());
#pragma unroll
    for (int k = 0; k < kCount; ++k) some.sum += ExpOfDifference(z[k] - some.largest);
    others.Add(some);
  }
  SumOverGroup<kLanes>(others);

  A loss, slope;
  const A gamma = static_cast<const A*>(call.gamma)[call.batch.Offset(entry, Softmax::kGamma)];
  EvaluateRow(loss, slope, others, known ? A(Widen(logits[label])) : A(0), call.power, gamma);
  if (!inside) return;
  const int64_t result = call.batch.Offset(entry, Softmax::kResult);
  if constexpr (!kGradient) {
    if (lane == 0) static_cast<A*>(call.loss)[result + row] = known ? loss : A(0);
  } else {
    slope *=
        static_cast<const A*>(call.cotangent)[call.batch.Offset(entry, Softmax::kCotangent) + row];
    const A share = others.sum == 0 ? A(0) : slope / others.sum;
    T* gradient = static_cast<T*>(call.gradient) + result + row * classes;
    for (int64_t i = lane * kCount; i < classes; i += kLanes * kCount) {
      const auto pack = LoadPack<kCount>(logits + i);
      Pack<T, kCount> values;
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const A value = share * ExpOfDifference(A(Widen(pack.values[k])) - others.largest);
        values.values[k] = Narrow<T>(!known ? A(0) : i + k == label ? -slope : value);
      }
      *reinterpret_cast<Pack<T, kCount>*>(gradient + i) = values;
    }
  }
}

template <typename T, int kLanes, int kCount>
cudaError_t LaunchRows(cudaStream_t stream, const Softmax& call) {
  const Params params{call, CeilDiv(call.rows, kThreads / kLanes)};
  const int64_t blocks = call.batch.size() * params.blocks;
  if (call.gradient != nullptr) {
    return Launch(Rows<T, kLanes, kCount, true>, blocks, stream, params);
  }
  return Launch(Rows<T, kLanes, kCount, false>, blocks, stream, params);
}

}  // namespace

cudaError_t LaunchSoftmax(cudaStream_t stream, const Softmax& call) {
  const int64_t entries = call.batch.size();
  if (entries == 0 || call.rows == 0) return cudaSuccess;
  if (call.classes == 0) {
    const size_t bytes =
        entries * call.rows * (call.dtype == DType::kF64 ? sizeof(double) : sizeof(float));
    return call.loss == nullptr ? cudaSuccess : cudaMemsetAsync(call.loss, 0, bytes, stream);
  }
  return DispatchFloat(call.dtype, [&](auto logit) {
    using T = decltype(logit);
    constexpr int kPack = kPackElements<T>;
    // Every row begins where an access of that size may.
    return DispatchBool(call.classes % kPack == 0, [&](auto packs) {
      constexpr int kCount = packs.value ? kPack : 1;
      if (call.classes <= 16 * kCount) return LaunchRows<T, 4, kCount>(stream, call);
      if (call.classes <= 1024) return LaunchRows<T, kWarp, kCount>(stream, call);
      return LaunchRows<T, kThreads, kCount>(stream, call);
    });
  });
}

}  // namespace jaxops::focal_loss::cuda
