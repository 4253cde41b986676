// What the kernels of the softmax focal loss share.
//
// With x the log-sum-exp of all logits but that of the label, minus that of the label, the loss is
// the function of one number that the sigmoid's is.
#ifndef JAXOPS_CUDA_FOCAL_LOSS_SOFTMAX_CUH_
#define JAXOPS_CUDA_FOCAL_LOSS_SOFTMAX_CUH_

#include <cstdint>

#include "common/fast_divide.h"
#include "cuda/focal_loss.cuh"
#include "cuda/focal_loss_sum.cuh"

namespace jaxops::focal_loss::cuda {

// The rows of a batch entry are cut into splits of neighbours, each for a block, or for the blocks
// that share its rows.
struct SoftmaxParams {
  Softmax call;
  FastDivider splits;
  int64_t rows_per_split;
  void* partials;  // null: no sum is wanted, or the blocks of an entry are a cluster
  int32_t packs;   // that a thread has of a row
  int32_t steps;   // of rows that are evaluated together
  int32_t blocks_per_row;
};

// One call in each way; `splits` and `partials` are those of LaunchSoftmax.
cudaError_t LaunchShortRows(cudaStream_t stream, const Softmax& call, int64_t splits,
                            void* partials);
cudaError_t LaunchLaneRows(cudaStream_t stream, const Softmax& call, int64_t splits,
                           void* partials);
cudaError_t LaunchBlockRows(cudaStream_t stream, const Softmax& call, int64_t splits,
                            void* partials);

// The widest accesses that the elements of a row may be parts of, and whether they always begin and
// end where accesses do.
struct PacksOfRow {
  int64_t count;
  bool whole;

  explicit PacksOfRow(const Softmax& call) {
    const int64_t elements = kPackBytes / jaxops::cuda::SizeOf(call.dtype);
    whole =
        call.classes % elements == 0 && reinterpret_cast<uintptr_t>(call.logits) % kPackBytes == 0;
    count = CeilDiv(call.classes + (whole ? 0 : elements - 1), elements);
  }
};

// Elements by which an array misses the alignment of the widest access.
template <typename T>
__device__ __forceinline__ int Misaligned(const T* array) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(array) % kPackBytes / sizeof(T));
}

// The operands of a batch entry.
template <typename T>
struct SoftmaxEntry {
  using A = Accumulator<T>;

  const T* logits;
  const int32_t* labels;
  const A* weight;
  A scale = 1;
  A gamma;
  int64_t result;
  int64_t sum;

  __device__ __forceinline__ SoftmaxEntry(const Softmax& call, uint32_t entry) {
    const auto offsets = call.batch.AllOffsets(entry);
    logits = static_cast<const T*>(call.logits) + offsets[Softmax::kLogits];
    labels = call.labels + offsets[Softmax::kLabels];
    weight = call.weight == nullptr
                 ? nullptr
                 : static_cast<const A*>(call.weight) + offsets[Softmax::kWeight];
    if (call.scale != nullptr) scale = static_cast<const A*>(call.scale)[offsets[Softmax::kScale]];
    gamma = static_cast<const A*>(call.gamma)[offsets[Softmax::kGamma]];
    result = offsets[Softmax::kResult];
    sum = offsets[Softmax::kSum];
  }

  __device__ __forceinline__ A Factor(int64_t row) const {
    return weight == nullptr ? scale : scale * weight[row];
  }
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

  // Where a sum may start from, given the largest exponent: an infinite logit leads by a finite
  // number and has an infinite exponential.
  __device__ __forceinline__ void StartFrom(A most) {
    largest = min(max(most, -Largest<A>()), Largest<A>());
  }
};

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
  const A shrunk = ExpOfMagnitude<true>(lead);
  // The others' sum exceeds 1 by so much that they lead, where no one of them does: a normal
  // number.
  const A e[1] = {leads[0] ? (lead >= 0 ? shrunk : Reciprocal(shrunk)) * (1 - lost) *
                                 Reciprocal(others.sum)
                           : shrunk * (1 + lost) * others.sum};
  const A positive[1] = {leads[0] ? x : A(0)};
  const A negative_high[1] = {leads[0] ? A(0) : lead};
  const A negative_low[1] = {leads[0] ? A(0) : low};
  const A factor[1] = {1};
  A losses[1], slopes[1];
  Evaluate<true>(losses, slopes, e, leads, positive, negative_high, negative_low, factor, power,
                 gamma);
  loss = losses[0];
  slope = slopes[0];
}

// The slope divided among the others, times the exponential of each.
template <typename A>
__device__ __forceinline__ A ShareOf(A slope, const SumOfExp<A>& others) {
  return others.sum == 0 ? A(0) : slope / others.sum;
}

// Combines the values of kLanes neighbouring threads of a warp, for all of them.
template <int kLanes, typename A, typename Combine>
__device__ __forceinline__ A OverLanes(A value, Combine&& combine) {
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
    value = combine(value, __shfl_xor_sync(~0u, value, lanes));
  }
  return value;
}

struct Max {
  template <typename A>
  __device__ __forceinline__ A operator()(A a, A b) const {
    return max(a, b);
  }
};

struct Plus {
  template <typename A>
  __device__ __forceinline__ A operator()(A a, A b) const {
    return a + b;
  }
};

// As many elements as one access takes, in registers: those of 2 bytes in pairs, as the compiler
// would put arrays of them into memory.
template <typename T>
struct RegisterPack {
  using A = Accumulator<T>;
  using Word = std::conditional_t<sizeof(T) == 2, uint32_t, T>;
  static constexpr bool kPairs = sizeof(T) == 2;
  static constexpr int kCount = kPackElements<T>;
  static constexpr int kWords = kPackBytes / sizeof(Word);

  Word words[kWords];

  // One element for each of a word.
  static __device__ __forceinline__ Word Repeat(T value) {
    if constexpr (kPairs) {
      uint16_t bits;
      memcpy(&bits, &value, sizeof(bits));
      return bits * 0x10001u;
    } else {
      return value;
    }
  }

  __device__ __forceinline__ void Fill(A value) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = Repeat(Narrow<T>(value));
  }

  __device__ __forceinline__ void Load(const T* from) {
    const auto pack = *reinterpret_cast<const Pack<Word, kWords>*>(from);
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = pack.values[w];
  }

  __device__ __forceinline__ void Store(T* to) const {
    Pack<Word, kWords> pack;
#pragma unroll
    for (int w = 0; w < kWords; ++w) pack.values[w] = words[w];
    jaxops::cuda::StorePack(reinterpret_cast<Word*>(to), pack);
  }

  // Replaces element `at` by that of the word.
  __device__ __forceinline__ void Replace(int at, Word by) {
    if constexpr (kPairs) {
      const uint32_t bytes = at % 2 == 0 ? 0x3254 : 0x5410;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        words[w] = __byte_perm(words[w], by, w == at / 2 ? bytes : 0x3210);
      }
    } else {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        if (w == at) words[w] = by;
      }
    }
  }

  __device__ __forceinline__ T Get(int k) const {
    if constexpr (kPairs) {
      const auto bits = static_cast<uint16_t>(words[k / 2] >> (k % 2 * 16));
      T value;
      memcpy(&value, &bits, sizeof(bits));
      return value;
    } else {
      return words[k];
    }
  }

  __device__ __forceinline__ void Widen(A (&wide)[kCount]) const {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        wide[2 * w] = __uint_as_float(words[w] << 16);
        wide[2 * w + 1] = __uint_as_float(words[w] & 0xffff0000);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kCount; ++k) wide[k] = jaxops::cuda::Widen(Get(k));
    }
  }

  __device__ __forceinline__ void Set(const A (&wide)[kCount]) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
            : "=r"(words[w])
            : "f"(wide[2 * w + 1]), "f"(wide[2 * w]));
      } else if constexpr (kPairs) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;"
            : "=r"(words[w])
            : "f"(wide[2 * w + 1]), "f"(wide[2 * w]));
      } else {
        words[w] = wide[w];
      }
    }
  }

  // Takes the larger of each two elements.
  __device__ __forceinline__ void Max(const RegisterPack& other) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        asm("max.bf16x2 %0, %0, %1;" : "+r"(words[w]) : "r"(other.words[w]));
      } else if constexpr (kPairs) {
        asm("max.f16x2 %0, %0, %1;" : "+r"(words[w]) : "r"(other.words[w]));
      } else {
        words[w] = max(words[w], other.words[w]);
      }
    }
  }
};

// The packs that a thread has of a row, `stride` elements apart; the first begins `at` elements
// from the row's begin, which need not be aligned: the pack may begin before it, and another end
// after its end. Those elements, and what is beyond, read as negative infinity.
template <typename T, int kPacks>
struct RowPacks {
  static constexpr int kCount = kPackElements<T>;
  using A = Accumulator<T>;

  RegisterPack<T> packs[kPacks];

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int j = 0; j < kPacks; ++j) packs[j].Fill(-A(INFINITY));
  }

  static __device__ __forceinline__ bool IsWhole(int i, int classes) {
    return i >= 0 && i + kCount <= classes;
  }

  // What can be read by whole accesses.
  __device__ __forceinline__ void LoadWhole(const T* row, int classes, int at, int stride,
                                            int count) {
    Clear();
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      if (j >= count) break;
      const int i = at + j * stride;
      if (IsWhole(i, classes)) packs[j].Load(row + i);
    }
  }

  // The rest, of which rows that begin and end where packs do have nothing.
  __device__ __forceinline__ void LoadEdges(const T* row, int classes, int at, int stride,
                                            int count) {
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      if (j >= count) break;
      const int i = at + j * stride;
      if (i >= classes || IsWhole(i, classes)) continue;
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        if (i + k >= 0 && i + k < classes) packs[j].Replace(k, RegisterPack<T>::Repeat(row[i + k]));
      }
    }
  }

  // Takes the label out, or everything if there is no such class.
  __device__ __forceinline__ void TakeOut(int label, int classes, int at, int stride, int count) {
    if (label < 0 || label >= classes) Clear();
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      if (j >= count) break;
      const int hit = label - (at + j * stride);
      if (hit >= 0 && hit < kCount)
        packs[j].Replace(hit, RegisterPack<T>::Repeat(Narrow<T>(-A(INFINITY))));
    }
  }

  __device__ __forceinline__ A FindLargest(int count) const {
    RegisterPack<T> most = packs[0];
#pragma unroll
    for (int j = 1; j < kPacks; ++j) {
      if (j >= count) break;
      most.Max(packs[j]);
    }
    A z[kCount];
    most.Widen(z);
    A largest = z[0];
#pragma unroll
    for (int k = 1; k < kCount; ++k) largest = max(largest, z[k]);
    return largest;
  }

  // The sum of the exponentials, which take the place of the logits if there is room for them.
  static constexpr bool kKeeps = std::is_same_v<T, A>;
  __device__ __forceinline__ A SumExponentials(A largest, int count) {
    A sum = 0;
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      if (j >= count) break;
      A z[kCount];
      packs[j].Widen(z);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        z[k] = ExpOfDifference(z[k] - largest);
        sum += z[k];
      }
      if constexpr (kKeeps) packs[j].Set(z);
    }
    return sum;
  }

  // The gradient, from each other class's share of the slope; `gradient` is where that of the row
  // begins, and takes whole accesses where the row does if `alike`.
  __device__ __forceinline__ void Store(T* gradient, bool alike, A share, A largest, A slope,
                                        int label, int classes, int at, int stride,
                                        int count) const {
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      if (j >= count) break;
      const int i = at + j * stride;
      A z[kCount];
      packs[j].Widen(z);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        z[k] = share * (kKeeps ? z[k] : ExpOfDifference(z[k] - largest));
      }
      RegisterPack<T> values;
      values.Set(z);
      const int hit = label - i;
      if (hit >= 0 && hit < kCount) values.Replace(hit, RegisterPack<T>::Repeat(Narrow<T>(-slope)));
      if (alike && IsWhole(i, classes)) {
        values.Store(gradient + i);
      } else if (i < classes) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          if (i + k >= 0 && i + k < classes) gradient[i + k] = values.Get(k);
        }
      }
    }
  }
};

// The sum of a block, which is a partial one or a part of that of its cluster.
template <typename A>
__device__ __forceinline__ void FinishSum(const SoftmaxParams& p, int64_t to, A total) {
  A sum = SumOverBlock(total);
  if (p.partials != nullptr) {
    if (threadIdx.x == 0) static_cast<A*>(p.partials)[blockIdx.x] = sum;
  } else if (SumOverCluster(sum)) {
    static_cast<A*>(p.call.sum)[to] = sum;
  }
}

}  // namespace jaxops::focal_loss::cuda

#endif  // JAXOPS_CUDA_FOCAL_LOSS_SOFTMAX_CUH_
