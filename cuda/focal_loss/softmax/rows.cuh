// This header holds the code that the kernels of the softmax focal loss share.
//
// With x the log-sum-exp of all logits except the label's, minus the label's logit, the loss is the
// same function of x as the sigmoid's.
#ifndef JAXOPS_CUDA_FOCAL_LOSS_SOFTMAX_ROWS_CUH_
#define JAXOPS_CUDA_FOCAL_LOSS_SOFTMAX_ROWS_CUH_

#include <cstdint>
#include <tuple>
#include <utility>

#include "common/fast_divide.h"
#include "cuda/focal_loss/math.cuh"
#include "cuda/focal_loss/softmax/families.h"
#include "cuda/focal_loss/sum.cuh"

namespace jaxops::focal_loss::cuda {

// SoftmaxParams cuts the rows of a batch entry into splits of neighbours, each for a block, or for
// the blocks that share its rows.
struct SoftmaxParams {
  Softmax call;
  FastDivider splits;
  int64_t rows_per_split;
  void* partials;   // null: no sum is wanted, or an entry is one block or a cluster of them
  int32_t vectors;  // per thread and row, at most
  bool whole;       // rows are whole aligned vectors
  int32_t steps;    // rows that are evaluated together, in steps
  int32_t blocks_per_row;
};

// RowSplits divides the rows of an entry among blocks that take `step` rows at a time, and up to
// `max_steps` times if there are enough rows; `resident` blocks run on a multiprocessor.
struct RowSplits {
  int64_t count;
  int64_t steps;   // per block
  int64_t rows;    // per block
  bool clustered;  // a cluster computes the sum

  RowSplits(const Softmax& loss, const Device& device, int64_t step, int64_t resident,
            int64_t max_steps, int64_t max_splits) {
    const bool sums = loss.sum != nullptr;
    // The number of blocks is that which the 132 multiprocessors of an H100 or H200 run at a time,
    // or a multiple of it: a block has costs of its own. The order of additions must not depend on
    // the number of entries.
    const int64_t all = CeilDiv(loss.rows, step) * (sums ? 1 : loss.batch.size());
    steps = std::min<int64_t>(CeilDiv(all, 132 * resident), max_steps);
    if (sums) {
      steps = std::max(steps, CeilDiv(CeilDiv(loss.rows, step), std::max<int64_t>(max_splits, 1)));
    }
    rows = steps * step;
    count = CeilDiv(loss.rows, rows);
    clustered = sums && (count == 1 || (count <= kClusterBlocks && device.has_clusters()));
  }

  // IsGrid says whether a grid can have all blocks.
  bool IsGrid(const SoftmaxCall& call) const { return call.entries() * count <= INT32_MAX; }
};

// LaunchSplits launches a kernel for all splits, and the kernel that adds their partial sums.
template <typename A, typename Params>
cudaError_t LaunchSplits(void (*kernel)(Params), int threads, const RowSplits& splits,
                         cudaStream_t stream, const SoftmaxCall& call, Params params,
                         size_t shared_bytes = 0) {
  params.splits = FastDivider(splits.count);
  params.partials = splits.clustered ? nullptr : call.partials;
  const int64_t blocks = call.entries() * splits.count;
  cudaError_t error = cudaSuccess;
  if (splits.clustered && splits.count > 1) {
    if (shared_bytes > jaxops::cuda::kSharedWithoutOptIn) {
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   jaxops::cuda::kSharedOptInLimit);
      if (error != cudaSuccess) return error;
    }
    error = jaxops::cuda::LaunchClusters(kernel, blocks, splits.count, threads, shared_bytes,
                                         stream, params);
  } else {
    error = jaxops::cuda::Launch(kernel, blocks, threads, shared_bytes, stream, params);
  }
  if (error != cudaSuccess || call.loss.sum == nullptr || splits.clustered) return error;
  return CombineSums<A>(stream, call.loss, splits.count, call.partials);
}

// RowSegments divides the rows of an entry among blocks, or clusters of blocks, that take one row
// at a time: no more than there are partial sums.
struct RowSegments {
  int64_t rows;   // per segment
  int64_t count;  // per entry

  explicit RowSegments(const SoftmaxCall& call)
      : rows(call.loss.sum == nullptr
                 ? 1
                 : CeilDiv(call.loss.rows, std::clamp<int64_t>(call.splits, 1, call.loss.rows))),
        count(CeilDiv(call.loss.rows, rows)) {}
};

// LaunchSegments calls `launch` with parameters and the number of segments of all entries, and then
// adds up their partial sums.
template <typename A, typename Launcher>
cudaError_t LaunchSegments(const RowSegments& segments, cudaStream_t stream,
                           const SoftmaxCall& call, Launcher&& launch) {
  const bool combines = call.loss.sum != nullptr && segments.count > 1;
  SoftmaxParams params{call.loss, FastDivider(segments.count), segments.rows,
                       combines ? call.partials : nullptr};
  params.whole = RowVectors(call.loss).whole;
  const cudaError_t error = launch(params, call.entries() * segments.count);
  if (error != cudaSuccess || !combines) return error;
  return CombineSums<A>(stream, call.loss, segments.count, call.partials);
}

// From this number of rows on, two lanes per row are enough threads.
inline constexpr int64_t kManyRows = 1 << 17;

// RowLanes has the number of lanes that share a row, and the maximum number of vectors of each
// lane.
struct RowLanes {
  int count;
  int vectors;

  explicit RowLanes(const Softmax& loss) {
    const RowVectors row(loss);
    const auto choose = [&]() -> std::pair<int, int> {
      if (row.count <= 2 && row.whole) return {1, 2};
      // A warp has as many rows of 2-byte logits as its registers hold after widening.
      if (jaxops::cuda::SizeOf(loss.dtype) == 2 && row.count <= 10 && loss.rows >= kManyRows) {
        return {2, 5};
      }
      if (row.count <= 8) return {4, 2};
      if (row.count <= 12) return {4, 3};
      if (row.count <= 20) return {4, 5};
      if (row.count <= 24) return {4, 6};
      if (row.count <= 48) return {8, 6};
      if (row.count <= 64) return {16, 4};
      if (row.count <= 128) return {32, 4};
      if (row.count <= 256) return {32, 8};
      if (row.count <= 320) return {32, 10};
      return {32, 16};
    };
    std::tie(count, vectors) = choose();
  }
};

// DispatchLanes calls `function` with these numbers as constants.
template <typename Function>
cudaError_t DispatchLanes(const RowLanes& lanes, Function&& function) {
  cudaError_t error = cudaErrorInvalidValue;
  const auto is = [&]<int kLanes, int kVectors>(std::integer_sequence<int, kLanes, kVectors>) {
    if (lanes.count != kLanes || lanes.vectors != kVectors) return false;
    error =
        function(std::integral_constant<int, kLanes>(), std::integral_constant<int, kVectors>());
    return true;
  };
  using std::integer_sequence;
  is(integer_sequence<int, 1, 2>()) || is(integer_sequence<int, 2, 5>()) ||
      is(integer_sequence<int, 4, 2>()) || is(integer_sequence<int, 4, 3>()) ||
      is(integer_sequence<int, 4, 5>()) || is(integer_sequence<int, 4, 6>()) ||
      is(integer_sequence<int, 8, 6>()) || is(integer_sequence<int, 16, 4>()) ||
      is(integer_sequence<int, 32, 4>()) || is(integer_sequence<int, 32, 8>()) ||
      is(integer_sequence<int, 32, 10>()) || is(integer_sequence<int, 32, 16>());
  return error;
}

// Misaligned returns the number of elements from an aligned address to the array.
template <typename T>
__device__ __forceinline__ int Misaligned(const T* array) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(array) % kVectorBytes / sizeof(T));
}

// ReadNow makes the compiler read a value here, rather than at its first use.
__device__ __forceinline__ void ReadNow(float& value) { asm volatile("" : "+f"(value)); }
__device__ __forceinline__ void ReadNow(double& value) { asm volatile("" : "+d"(value)); }

// SoftmaxEntry has the operands of a batch entry.
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

  // Weight returns the weight of a row; the caller multiplies by the scale after all reads are in
  // flight.
  __device__ __forceinline__ A Weight(int64_t row) const {
    return weight == nullptr ? A(1) : weight[row];
  }
};

// ExpOfDifference returns exp(x) for x <= 0 as a term of a sum that has a term of 1, or as a share
// of it.
__device__ __forceinline__ float ExpOfDifference(float x) { return Exp2Flushed(x * kLog2E); }
__device__ __forceinline__ double ExpOfDifference(double x) { return exp(x); }

// SumOfExp is a running sum of exponentials, relative to the largest exponent.
template <typename A>
struct SumOfExp {
  A largest = -Largest<A>();
  A sum = 0;

  __device__ __forceinline__ void Add(const SumOfExp& other) {
    const A most = max(largest, other.largest);
    sum = sum * ExpOfDifference(largest - most) + other.sum * ExpOfDifference(other.largest - most);
    largest = most;
  }

  // StartFrom bounds the largest exponent, from which a sum starts: an infinite logit then leads by
  // a finite number and has an infinite exponential.
  __device__ __forceinline__ void StartFrom(A most) {
    largest = min(max(most, -Largest<A>()), Largest<A>());
  }
};

// EvaluateRow computes the loss and the slope of a row from the lead of the other logits over the
// label's.
template <typename A>
__device__ __forceinline__ void EvaluateRow(A& loss, A& slope, const SumOfExp<A>& others, A label,
                                            Power power, A gamma) {
  const A lead = others.largest - label;
  const A back = others.largest - lead;
  // The subtraction lost this part. Infinite logits lose nothing, and if the label leads by so much
  // that the loss vanishes, the subtraction would lose the whole label.
  const bool loses = lead > -kFar && lead <= Largest<A>();
  const A lost = loses ? (others.largest - (lead + back)) + (back - label) : A(0);
  const A tiny = std::is_same_v<A, float> ? A(FLT_MIN) : A(DBL_MIN);
  const A low = lost + log(others.sum < tiny ? tiny : others.sum);
  const A x = lead + low;
  const bool leads[1] = {x >= 0};
  const A shrunk = ExpOfMagnitude<true>(lead);
  // The sum of the others exceeds 1 so much that together they lead, though none of them does
  // alone: the result is a normal number.
  const A e[1] = {leads[0] ? (lead >= 0 ? shrunk : Reciprocal(shrunk)) * (1 - lost) *
                                 Reciprocal(Finite(others.sum))
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

// ShareOf divides the slope among the others; the caller multiplies by the exponential of each.
template <typename A>
__device__ __forceinline__ A ShareOf(A slope, const SumOfExp<A>& others) {
  return others.sum == 0 ? A(0) : slope / others.sum;
}

// OverLanes combines the values of kLanes neighbouring threads of a warp, for all of them.
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

// LargestOfLanes returns the largest value of some lanes of a warp, or a NaN.
template <int kLanes, typename A>
__device__ __forceinline__ A LargestOfLanes(A value) {
  if constexpr (kLanes == kWarp && std::is_same_v<A, float>) {
    // One instruction compares integers, but the integers of negative numbers are in reverse order.
    const auto order = [](int bits) { return bits ^ (bits >> 31 & INT32_MAX); };
    return __int_as_float(order(__reduce_max_sync(~0u, order(__float_as_int(value)))));
  } else {
    return OverLanes<kLanes>(value, Max());
  }
}

struct Plus {
  template <typename A>
  __device__ __forceinline__ A operator()(A a, A b) const {
    return a + b;
  }
};

// RegisterVector is a vector in registers. Elements of 2 bytes stay in pairs, because the compiler
// would put arrays of them into memory.
template <typename T>
struct RegisterVector {
  using A = Accumulator<T>;
  using Word = std::conditional_t<sizeof(T) == 2, uint32_t, T>;
  static constexpr bool kPairs = sizeof(T) == 2;
  static constexpr int kCount = kVectorElements<T>;
  static constexpr int kWords = kVectorBytes / sizeof(Word);

  Word words[kWords];

  // Repeat puts one element into each position of a Word.
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
    const auto vector = *reinterpret_cast<const Vector<Word, kWords>*>(from);
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = vector.values[w];
  }

  __device__ __forceinline__ void Store(T* to) const {
    Vector<Word, kWords> vector;
#pragma unroll
    for (int w = 0; w < kWords; ++w) vector.values[w] = words[w];
    jaxops::cuda::StoreVector(reinterpret_cast<Word*>(to), vector);
  }

  // Stage stores the vector to shared memory.
  __device__ __forceinline__ void Stage(T* to) const {
    Vector<Word, kWords> vector;
#pragma unroll
    for (int w = 0; w < kWords; ++w) vector.values[w] = words[w];
    *reinterpret_cast<Vector<Word, kWords>*>(to) = vector;
  }

  // Place is the position of an element, from its distance to the first one.
  struct Place {
    int word;
    uint32_t bytes;  // byte selector for a Word of a pair and its replacement

    __device__ __forceinline__ explicit Place(int element)
        : word(kPairs ? element >> 1 : element), bytes(element % 2 == 0 ? 0x3254 : 0x5410) {}
  };

  // Replace replaces the element at that place, if it is in this vector, by that of the Word.
  __device__ __forceinline__ void Replace(const Place& place, Word by) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if constexpr (kPairs) {
        asm("{\n.reg .pred here;\nsetp.eq.s32 here, %1, %2;\n@here prmt.b32 %0, %0, %3, %4;\n}"
            : "+r"(words[w])
            : "r"(place.word), "r"(w), "r"(by), "r"(place.bytes));
      } else {
        if (w == place.word) words[w] = by;
      }
    }
  }

  // TakeOut returns element k, and replaces it by negative infinity.
  __device__ __forceinline__ A TakeOut(int k) {
    static_assert(kPairs);
    const Place place(k);
    RegisterVector was;
    uint32_t pair = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) pair = w == place.word ? words[w] : pair;
    Replace(place, Repeat(Narrow<T>(-A(INFINITY))));
    was.words[0] = k % 2 == 0 ? pair : pair >> 16;
    return jaxops::cuda::Widen(was.Get(0));
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

  // Forget makes the compiler compute values from the elements again, rather than keep them in
  // registers.
  __device__ __forceinline__ void Forget() {
    static_assert(kPairs);
#pragma unroll
    for (int w = 0; w < kWords; ++w) asm volatile("" : "+r"(words[w]));
  }

  // Max takes the larger of each two elements.
  __device__ __forceinline__ void Max(const RegisterVector& other) {
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

// RowShape divides a row into vectors, its body, and the elements before and after them.
template <typename T>
struct RowShape {
  static constexpr int kCount = kVectorElements<T>;

  int head = 0;
  int body;

  __device__ __forceinline__ RowShape(const T* row, int classes, bool whole) {
    if (!whole) head = min(classes, (kCount - Misaligned(row)) % kCount);
    body = (classes - head) / kCount * kCount;
  }

  // Edge returns the position of one of these elements in the row.
  __device__ __forceinline__ int Edge(int index) const {
    return index < head ? index : index + body;
  }
};

// RowPart is one thread's part of a row that `threads` threads share: at most kVectors vectors of
// the row's body, of which `count` may exist, and kEdges of the other elements, of which `whole`
// rows have none. Missing elements are negative infinity. Exponentials are kept for the gradient if
// kKeeps.
template <typename T, int kVectors, int kEdges, bool kKeeps>
struct RowPart {
  using A = Accumulator<T>;
  static constexpr int kCount = kVectorElements<T>;
  static constexpr bool kInPlace = kKeeps && std::is_same_v<T, A>;
  static constexpr bool kApart = kKeeps && !kInPlace;

  RegisterVector<T> vectors[kVectors];
  A edges[kEdges];
  A kept[kApart ? kVectors : 1][kApart ? kCount : 1];
  RowShape<T> shape;
  int classes;
  int thread;
  int threads;
  int count;
  bool whole;

  __device__ __forceinline__ RowPart(const T* row, int classes, int thread, int threads, int count,
                                     bool whole)
      : shape(row, classes, whole),
        classes(classes),
        thread(thread),
        threads(threads),
        count(count),
        whole(whole) {
    const T* body = row + shape.head + thread * kCount;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      vectors[j].Fill(-A(INFINITY));
      if (Has(j)) vectors[j].Load(body + j * threads * kCount);
    }
#pragma unroll
    for (int i = 0; i < kEdges; ++i) edges[i] = -A(INFINITY);
    if (whole) return;
#pragma unroll
    for (int i = 0; i < kEdges; ++i) {
      const int index = thread + i * threads;
      if (index < classes - shape.body) edges[i] = Widen(row[shape.Edge(index)]);
    }
  }

  __device__ __forceinline__ bool Has(int j) const {
    return thread * kCount + j * threads * kCount < shape.body;
  }
  // Skips says whether no thread has vector j or a later one; small vector counts skip the check.
  __device__ __forceinline__ bool Skips(int j) const { return kVectors >= 8 && j >= count; }

  using Place = typename RegisterVector<T>::Place;

  // ReplaceIn replaces the element at a place relative to the thread's first one, if it is in
  // vector j.
  __device__ __forceinline__ void ReplaceIn(int j, RegisterVector<T>& vector, Place place,
                                            T by) const {
    place.word -= j * threads * RegisterVector<T>::kWords;
    // If many threads share a row, most vectors of a warp have no label.
    if (threads < 16 || (place.word >= 0 && place.word < RegisterVector<T>::kWords)) {
      vector.Replace(place, RegisterVector<T>::Repeat(by));
    }
  }

  // TakeOut takes the label out, or all elements if there is no such class.
  __device__ __forceinline__ void TakeOut(int label, bool known) {
    if (!known) {
      // This case is rare, so it takes a branch, instead of selections in every row.
      asm volatile("");
#pragma unroll
      for (int j = 0; j < kVectors; ++j) vectors[j].Fill(-A(INFINITY));
#pragma unroll
      for (int i = 0; i < kEdges; ++i) edges[i] = -A(INFINITY);
    }
    const Place hit(label - shape.head - thread * kCount);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (Skips(j)) break;
      ReplaceIn(j, vectors[j], hit, Narrow<T>(-A(INFINITY)));
    }
    if (whole) return;
#pragma unroll
    for (int i = 0; i < kEdges; ++i) {
      if (shape.Edge(thread + i * threads) == label) edges[i] = -A(INFINITY);
    }
  }

  __device__ __forceinline__ A FindLargest() const {
    RegisterVector<T> most = vectors[0];
#pragma unroll
    for (int j = 1; j < kVectors; ++j) {
      if (Skips(j)) break;
      most.Max(vectors[j]);
    }
    A z[kCount];
    most.Widen(z);
    A largest = z[0];
#pragma unroll
    for (int k = 1; k < kCount; ++k) largest = max(largest, z[k]);
    if (whole) return largest;
#pragma unroll
    for (int i = 0; i < kEdges; ++i) largest = max(largest, edges[i]);
    return largest;
  }

  __device__ __forceinline__ A SumExponentials(A largest) {
    A sums[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (Skips(j)) break;
      A z[kCount];
      vectors[j].Widen(z);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        z[k] = ExpOfDifference(z[k] - largest);
        sums[k % 2] += z[k];
        if constexpr (kApart) kept[j][k] = z[k];
      }
      if constexpr (kInPlace) vectors[j].Set(z);
    }
    if (!whole) {
#pragma unroll
      for (int i = 0; i < kEdges; ++i) {
        edges[i] = ExpOfDifference(edges[i] - largest);
        sums[0] += edges[i];
      }
    }
    return sums[0] + sums[1];
  }

  // Store writes the gradient from each other class's share of the slope, with exponentials
  // relative to `largest`, kept or computed again. `gradient` is the begin of the row's gradient,
  // and has the alignment of the row if `alike`.
  __device__ __forceinline__ void Store(T* gradient, bool alike, A share, A largest, A slope,
                                        int label) {
    T* body = gradient + shape.head + thread * kCount;
    const Place hit(label - shape.head - thread * kCount);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (Skips(j)) break;
      if constexpr (!kKeeps) vectors[j].Forget();
      A z[kCount];
      vectors[j].Widen(z);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        if constexpr (kApart) {
          z[k] = share * kept[j][k];
        } else {
          z[k] = share * (kInPlace ? z[k] : ExpOfDifference(z[k] - largest));
        }
      }
      RegisterVector<T> values;
      values.Set(z);
      ReplaceIn(j, values, hit, Narrow<T>(-slope));
      if (!Has(j)) continue;
      T* to = body + j * threads * kCount;
      if (alike) {
        values.Store(to);
      } else {
#pragma unroll
        for (int k = 0; k < kCount; ++k) to[k] = values.Get(k);
      }
    }
    if (whole) return;
#pragma unroll
    for (int i = 0; i < kEdges; ++i) {
      const int at = shape.Edge(thread + i * threads);
      const A value = share * edges[i];
      if (thread + i * threads < classes - shape.body) {
        gradient[at] = Narrow<T>(at == label ? -slope : value);
      }
    }
  }
};

// FinishSum writes the sum of a block, a partial sum or a part of its cluster's sum.
template <int kBlockThreads = kThreads, typename A>
__device__ __forceinline__ void FinishSum(void* partials, A* to, A total) {
  A sum = SumOverBlock<kBlockThreads>(total);
  if (partials != nullptr) {
    if (threadIdx.x == 0) static_cast<A*>(partials)[blockIdx.x] = sum;
  } else if (SumOverCluster(sum)) {
    *to = sum;
  }
}

template <int kCount, typename A>
__device__ __forceinline__ void AddOverLanes(SumOfExp<A>& value) {
#pragma unroll
  for (int lanes = kCount / 2; lanes > 0; lanes /= 2) {
    SumOfExp<A> other;
    other.largest = __shfl_xor_sync(~0u, value.largest, lanes);
    other.sum = __shfl_xor_sync(~0u, value.sum, lanes);
    value.Add(other);
  }
}

// FinishRows writes the sum of a split, which its first thread has.
template <typename A>
__device__ __forceinline__ void FinishRows(const SoftmaxParams& p, int64_t to, uint32_t split,
                                           A total) {
  if (p.call.sum == nullptr || threadIdx.x > 0) return;
  if (p.partials != nullptr) {
    static_cast<A*>(p.partials)[split] = total;
  } else {
    static_cast<A*>(p.call.sum)[to] = total;
  }
}

}  // namespace jaxops::focal_loss::cuda

#endif  // JAXOPS_CUDA_FOCAL_LOSS_SOFTMAX_ROWS_CUH_
