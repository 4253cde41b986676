// This header finds the entries of a volume that points read.
#ifndef JAXOPS_CUDA_TAPS_ENTRIES_CUH_
#define JAXOPS_CUDA_TAPS_ENTRIES_CUH_

#include <cstdint>
#include <type_traits>

#include "common/fast_divide.h"
#include "common/taps.h"
#include "cuda/common/launch.h"
#include "cuda/common/numeric.cuh"

namespace jaxops::taps::cuda {

inline constexpr int kThreads = 256;

// One axis of the volume. Calls of fewer than kMaxAxes axes have absent ones before theirs.
struct Axis {
  const void* weights = nullptr;  // null: the axis is absent
  int64_t size = 1;
  int64_t stride = 0;  // in elements
  int operand = 0;     // of the weights' batch strides
  int place = 0;       // of the axis among those of the indices
  int taps = 1;
};

struct Params {
  Axis axes[kMaxAxes];
  FastDivider64 by_row;    // threads per row of channels
  FastDivider64 by_entry;  // points per batch entry
  int64_t points;          // of all batch entries
  int64_t threads;
  int lanes;   // that share a point in the gradient of weights, a power of two
  void* sums;  // dvolume in the arithmetic type
  Call call;

  Params(const Call& args, int channels_of_thread)
      : by_row(args.geometry.width / channels_of_thread),
        by_entry(args.geometry.points),
        points(args.batch.size() * args.geometry.points),
        threads(points * by_row.divisor()),
        lanes(1),
        sums(args.dvolume),
        call(args) {
    const Geometry& geometry = args.geometry;
    int64_t stride = geometry.width;
    for (int a = geometry.axes - 1; a >= 0; --a) {
      axes[a + kMaxAxes - geometry.axes] = {
          args.weights[a], geometry.sizes[a], stride, Call::kWeights + a, a, geometry.taps};
      stride *= geometry.sizes[a];
    }
  }
};

// The entries that a point reads. kTaps is at least the number of taps.
template <typename A, int kTaps>
class Entries {
 public:
  int64_t entry;       // batch entry
  int64_t point;       // within the batch entry
  unsigned valid = 0;  // bit k: the volume has the entry of tap k along the last axis
  A last_weights[kTaps];

  __device__ __forceinline__ Entries(const Params& params, uint64_t index) : params_(params) {
    point = static_cast<int64_t>(params.by_entry.DivMod(index));
    entry = static_cast<int64_t>(index);
    const Axis& last = params.axes[kMaxAxes - 1];
    const Geometry& geometry = params.call.geometry;
    indices_ = params.call.indices + params.call.batch.Offset(entry, Call::kIndices) +
               point * geometry.axes * geometry.taps;
    const int32_t* indices = indices_ + last.place * last.taps;
    const A* weights = Weights(last);
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      int32_t at = -1;
      last_weights[k] = 0;
      if (k < last.taps) {
        at = indices[k];
        last_weights[k] = weights[k];
      }
      valid |= at >= 0 && at < last.size ? 1u << k : 0;
      last_indices_[k] = at;
    }
  }

  __device__ __forceinline__ bool IsValid(int k) const { return valid >> k & 1; }

  // The offset of tap k along the last axis, in elements.
  __device__ __forceinline__ int64_t LastOffset(int k) const {
    return last_indices_[k] * params_.axes[kMaxAxes - 1].stride;
  }

  // Calls visit(k0, k1, w0, w1, offset) for the taps of the axes before the last one of which the
  // volume has the entries.
  template <typename Visit>
  __device__ __forceinline__ void ForEachRow(Visit&& visit) const {
    const Axis &outer = params_.axes[0], &inner = params_.axes[1];
#pragma unroll 1
    for (int k0 = 0; k0 < outer.taps; ++k0) {
      int64_t of_outer = 0;
      A w0 = 1;
      if (!Find(outer, k0, of_outer, w0)) continue;
#pragma unroll 1
      for (int k1 = 0; k1 < inner.taps; ++k1) {
        int64_t offset = of_outer;
        A w1 = 1;
        if (Find(inner, k1, offset, w1)) visit(k0, k1, w0, w1, offset);
      }
    }
  }

 private:
  __device__ __forceinline__ const A* Weights(const Axis& axis) const {
    return static_cast<const A*>(axis.weights) + params_.call.batch.Offset(entry, axis.operand) +
           point * axis.taps;
  }

  // Returns whether the volume has the entry of tap k; then adds its offset and sets its weight. An
  // absent axis has one entry of weight 1.
  __device__ __forceinline__ bool Find(const Axis& axis, int k, int64_t& offset, A& weight) const {
    if (axis.weights == nullptr) return true;
    const int32_t at = indices_[axis.place * axis.taps + k];
    if (at < 0 || at >= axis.size) return false;
    offset += at * axis.stride;
    weight = Weights(axis)[k];
    return true;
  }

  const Params& params_;
  const int32_t* indices_;
  int32_t last_indices_[kTaps];
};

inline bool IsAligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % jaxops::cuda::kVectorBytes == 0;
}

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

// Calls run with an element, and as constants the channels that a thread has at once and a number
// of taps that is at least that of the call. `sums` is another array that is read or written by
// rows.
template <typename Run>
cudaError_t Dispatch(const Call& call, const void* sums, Run&& run) {
  return jaxops::cuda::DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kVector = jaxops::cuda::kVectorElements<T>;
    const bool has_vectors = call.geometry.width % kVector == 0 && IsAligned(call.volume) &&
                             IsAligned(call.cotangent) && IsAligned(call.out) && IsAligned(sums);
    return jaxops::cuda::DispatchBool(has_vectors, [&](auto vectors) {
      return jaxops::cuda::DispatchBool(call.geometry.taps <= 4, [&](auto few) {
        constexpr int kCount = decltype(vectors)::value ? kVector : 1;
        constexpr int kTaps = decltype(few)::value ? 4 : kMaxCudaTaps;
        return run(element, Constant<kCount>(), Constant<kTaps>());
      });
    });
  });
}

}  // namespace jaxops::taps::cuda

#endif  // JAXOPS_CUDA_TAPS_ENTRIES_CUH_
