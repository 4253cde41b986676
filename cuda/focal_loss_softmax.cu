// The softmax focal loss of rows, and its gradient.
//
// With x the log-sum-exp of all logits but that of the label, minus that of the label, the loss is
// the function of one number that the sigmoid's is.
//
// Short rows (StagedRows): a block brings neighbouring rows, which are one run of memory, to shared
// memory by wide accesses whatever the number of classes. A few lanes share a row; then a thread a
// row makes loss and slope of what they found; a gradient goes back the way the logits came.
//
// Long rows (StreamedRows): a block shares a row, in one pass over it for the largest of the other
// logits and the sum of exponentials beside it; for the gradient, a second one finds it in the L2.
#include <cuda_pipeline.h>

#include <cstdint>

#include "common/fast_divide.h"
#include "cuda/focal_loss.cuh"
#include "cuda/focal_loss.h"

namespace jaxops::focal_loss::cuda {
namespace {

// Rows of at most so many bytes are staged for 4 lanes, where there are many rows, for a warp, or
// for a block.
constexpr int64_t kFewLanesBytes = 768;
constexpr int64_t kWarpBytes = 8192;
constexpr int64_t kStagedBytes = 65536;
// Fewer rows leave lanes idle, which then had better share them.
constexpr int64_t kManyRows = 16384;
// Blocks get several tiles of rows once there are so many blocks, and two tiles fit so many bytes.
constexpr int64_t kEnoughBlocks = 2048;
constexpr int64_t kMostTiles = 8;
constexpr int64_t kRingBytes = 49152;
// Threads that share a longer row: for the gradient many, which keeps those rows few that the L2
// has to hold at a time.
template <bool kGradient>
constexpr int kStreamThreads = kGradient ? 1024 : 256;

struct Params {
  Softmax call;
  FastDivider tiles;  // of a batch entry
  uint32_t tile_count;
  uint32_t tiles_per_block;
  uint32_t stage_bytes;
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
  const A e[1] = {leads[0] ? (lead >= 0 ? shrunk : 1 / shrunk) * (1 - lost) / others.sum
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

// Copies `count` elements from an array to shared memory, where they begin as far from a multiple
// of 16 bytes as there. The copy is asynchronous.
template <typename T>
__device__ __forceinline__ void StageRun(T* shared, const T* array, int count) {
  constexpr int kPack = kPackElements<T>;
  const int misaligned = reinterpret_cast<uintptr_t>(array) % 16 / sizeof(T);
  const int head = min(count, (kPack - misaligned) % kPack);
  const int packs = (count - head) / kPack;
  for (int i = threadIdx.x; i < packs; i += kThreads) {
    __pipeline_memcpy_async(shared + head + i * kPack, array + head + i * kPack, 16);
  }
  const int tail = head + packs * kPack;
  for (int i = threadIdx.x; i < head + count - tail; i += kThreads) {
    const int at = i < head ? i : i - head + tail;
    shared[at] = array[at];
  }
}

// The way back.
template <typename T>
__device__ __forceinline__ void WriteRun(T* array, const T* shared, int count) {
  constexpr int kPack = kPackElements<T>;
  const int misaligned = reinterpret_cast<uintptr_t>(array) % 16 / sizeof(T);
  const bool alike = reinterpret_cast<uintptr_t>(shared) % 16 / sizeof(T) == misaligned;
  const int head = min(count, (kPack - misaligned) % kPack);
  const int packs = alike ? (count - head) / kPack : 0;
  for (int i = threadIdx.x; i < packs; i += kThreads) {
    *reinterpret_cast<uint4*>(array + head + i * kPack) =
        *reinterpret_cast<const uint4*>(shared + head + i * kPack);
  }
  const int tail = head + packs * kPack;
  for (int i = threadIdx.x; i < head + count - tail; i += kThreads) {
    const int at = i < head ? i : i - head + tail;
    array[at] = shared[at];
  }
}

// Rows of few lanes do better with more blocks than with more tiles for each.
template <int kLanes>
constexpr bool kHasRing = kLanes >= kWarp;

// What the lanes of a row and the thread that evaluates it tell each other.
template <typename A>
struct RowTerms {
  SumOfExp<A> others;
  A label;       // its logit, and then its gradient
  int position;  // of the label; negative: none
};

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

// Combines the values of kLanes neighbouring threads, which are a part of a warp or the block, for
// all of them.
template <int kLanes, typename A, typename Combine>
__device__ __forceinline__ A OverLanes(A value, Combine&& combine) {
#pragma unroll
  for (int lanes = min(kLanes, kWarp) / 2; lanes > 0; lanes /= 2) {
    value = combine(value, __shfl_xor_sync(~0u, value, lanes));
  }
  if constexpr (kLanes > kWarp) {
    static_assert(kLanes == kThreads);
    __shared__ A of_warp[kThreads / kWarp];
    __syncthreads();
    if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
    __syncthreads();
    value = of_warp[0];
#pragma unroll
    for (int warp = 1; warp < kThreads / kWarp; ++warp) value = combine(value, of_warp[warp]);
  }
  return value;
}

// Waits for the threads of a row.
template <int kLanes>
__device__ __forceinline__ void SyncRow() {
  if constexpr (kLanes > kWarp) {
    __syncthreads();
  } else {
    __syncwarp();
  }
}

// Blocks of a multiprocessor, which wait for memory in turns.
template <typename A, int kLanes>
constexpr int kStagedBlocks = sizeof(A) == 8   ? 4
                              : kLanes < kWarp ? 6
                                               : 5;

// The largest of some logits, in their own type, which for 2-byte ones compares two at a time.
template <typename T, int kCount>
struct LargestOf {
  Pack<T, kCount> values;

  __device__ __forceinline__ LargestOf() {
#pragma unroll
    for (int k = 0; k < kCount; ++k) values.values[k] = Narrow<T>(-Accumulator<T>(INFINITY));
  }

  __device__ __forceinline__ void Add(const Pack<T, kCount>& other) {
    if constexpr (sizeof(T) == 2 && kCount > 1) {
      using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
      auto* pairs = reinterpret_cast<Pair*>(&values);
      const auto* others = reinterpret_cast<const Pair*>(&other);
#pragma unroll
      for (int k = 0; k < kCount / 2; ++k) pairs[k] = __hmax2(pairs[k], others[k]);
    } else {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        values.values[k] = Narrow<T>(max(Widen(values.values[k]), Widen(other.values[k])));
      }
    }
  }

  __device__ __forceinline__ Accumulator<T> Get() const {
    Accumulator<T> largest = Widen(values.values[0]);
#pragma unroll
    for (int k = 1; k < kCount; ++k) largest = max(largest, Widen(values.values[k]));
    return largest;
  }
};

// Neighbouring rows of one batch entry, and what the thread of each needs to evaluate it.
template <typename T, int kRows>
struct RowTile {
  using A = Accumulator<T>;

  uint32_t entry;
  int64_t first;
  int rows;
  int label = -1;
  A gamma = 0, cotangent = 0;

  __device__ __forceinline__ RowTile(const Params& p, uint32_t index) {
    first = int64_t{p.tiles.Peel(index)} * kRows;
    entry = index;
    rows = static_cast<int>(min(p.call.rows - first, int64_t{kRows}));
  }

  __device__ __forceinline__ void ReadTerms(const Softmax& call) {
    if (threadIdx.x >= rows) return;
    const int64_t row = first + threadIdx.x;
    const auto offsets = call.batch.AllOffsets(entry);
    label = call.labels[offsets[Softmax::kLabels] + row];
    gamma = static_cast<const A*>(call.gamma)[offsets[Softmax::kGamma]];
    if (call.gradient == nullptr) return;
    cotangent = static_cast<const A*>(call.cotangent)[offsets[Softmax::kCotangent] + row];
  }

  __device__ __forceinline__ const T* Logits(const Softmax& call) const {
    return static_cast<const T*>(call.logits) + call.batch.AllOffsets(entry)[Softmax::kLogits] +
           first * call.classes;
  }
};

// kLanes threads a row, which they read kCount logits at a time. A block has a tile of rows, or
// several if kHasRing; then the next one arrives while it works on the present one.
template <typename T, int kLanes, int kCount, bool kGradient>
__global__ void __launch_bounds__(kThreads, kStagedBlocks<Accumulator<T>, kLanes>)
    StagedRows(const __grid_constant__ Params p) {
  using A = Accumulator<T>;
  constexpr int kRows = kThreads / kLanes;
  using Tile = RowTile<T, kRows>;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ RowTerms<A> terms_of[kRows];
  const Softmax& call = p.call;
  const int classes = static_cast<int>(call.classes);
  const int row = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  RowTerms<A>& terms = terms_of[row];

  const auto place = [&](const T* logits, int stage) {
    return reinterpret_cast<T*>(shared + stage * p.stage_bytes) +
           reinterpret_cast<uintptr_t>(logits) % 16 / sizeof(T);
  };
  const auto fetch = [&](Tile& tile, int stage) {
    const T* logits = tile.Logits(call);
    StageRun(place(logits, stage), logits, tile.rows * classes);
    tile.ReadTerms(call);
  };
  const uint32_t end_tile = min((blockIdx.x + 1) * p.tiles_per_block, p.tile_count);
  uint32_t index = blockIdx.x * p.tiles_per_block;
  Tile next(p, index);
  fetch(next, 0);
  __pipeline_commit();
  int stage = 0;
#pragma unroll 1
  for (; index < end_tile; ++index) {
    const Tile tile = next;
    if (kHasRing<kLanes> && index + 1 < end_tile) {
      next = Tile(p, index + 1);
      fetch(next, stage ^ 1);
    }
    __pipeline_commit();
    if (threadIdx.x < tile.rows) {
      terms_of[threadIdx.x].position = tile.label < classes ? tile.label : -1;
    }
    __pipeline_wait_prior(1);
    __syncthreads();

    T* staged = place(tile.Logits(call), stage);
    T* own = staged + row * classes;
    const int end = row < tile.rows ? classes : 0;
    const int label = row < tile.rows ? terms.position : -1;
    if (lane == 0) {
      terms.label = label < 0 ? A(0) : A(Widen(own[label]));
      // The others' sum goes over the whole row.
      if (label >= 0) own[label] = Narrow<T>(-A(INFINITY));
    }
    SyncRow<kLanes>();
    LargestOf<T, kCount> largest_of;
    for (int i = lane * kCount; i < end; i += kLanes * kCount) {
      largest_of.Add(LoadPack<kCount>(own + i));
    }
    SumOfExp<A> others;
    others.largest = max(others.largest, OverLanes<kLanes>(largest_of.Get(), Max()));
    // An infinite logit leads by a finite number and has an infinite exponential.
    others.largest = min(others.largest, Largest<A>());
    for (int i = lane * kCount; i < end; i += kLanes * kCount) {
      A z[kCount];
      WidenAll(z, LoadPack<kCount>(own + i));
#pragma unroll
      for (int k = 0; k < kCount; ++k) others.sum += ExpOfDifference(z[k] - others.largest);
    }
    others.sum = OverLanes<kLanes>(others.sum, Plus());
    if (lane == 0) terms.others = others;
    __syncthreads();

    const int64_t result = call.batch.AllOffsets(tile.entry)[Softmax::kResult];
    if (threadIdx.x < tile.rows) {
      RowTerms<A>& terms = terms_of[threadIdx.x];
      A loss, slope;
      EvaluateRow(loss, slope, terms.others, terms.label, call.power, tile.gamma);
      if constexpr (!kGradient) {
        static_cast<A*>(call.loss)[result + tile.first + threadIdx.x] =
            terms.position < 0 ? A(0) : loss;
      } else {
        slope *= tile.cotangent;
        terms.label = -slope;
        terms.others.sum = terms.others.sum == 0 ? A(0) : slope / terms.others.sum;
      }
    }
    if constexpr (kGradient) {
      __syncthreads();
      const A share = terms.others.sum;
      for (int i = lane * kCount; i < end; i += kLanes * kCount) {
        A z[kCount];
        WidenAll(z, LoadPack<kCount>(own + i));
        Pack<T, kCount> values;
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          const A value = share * ExpOfDifference(z[k] - others.largest);
          values.values[k] = Narrow<T>(label < 0 ? A(0) : value);
        }
        *reinterpret_cast<Pack<T, kCount>*>(own + i) = values;
      }
      SyncRow<kLanes>();
      if (lane == 0 && label >= 0) own[label] = Narrow<T>(terms.label);
      __syncthreads();
      WriteRun(static_cast<T*>(call.gradient) + result + tile.first * classes, staged,
               tile.rows * classes);
    }
    if (!kHasRing<kLanes>) break;
    stage ^= 1;
    __syncthreads();
  }
}

// Sums over the block, for all of its threads.
template <int kBlockThreads, typename A>
__device__ __forceinline__ void SumOverBlock(SumOfExp<A>& value) {
  constexpr int kWarps = kBlockThreads / kWarp;
  __shared__ SumOfExp<A> of_warp[kWarps];
  const auto over_lanes = [&](int count) {
#pragma unroll
    for (int lanes = count / 2; lanes > 0; lanes /= 2) {
      SumOfExp<A> other;
      other.largest = __shfl_xor_sync(~0u, value.largest, lanes);
      other.sum = __shfl_xor_sync(~0u, value.sum, lanes);
      value.Add(other);
    }
  };
  over_lanes(kWarp);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = of_warp[threadIdx.x % kWarps];
  over_lanes(kWarps);
}

// A block a row, which reads kCount logits at a time.
template <typename T, int kCount, bool kGradient>
__global__ void __launch_bounds__(kStreamThreads<kGradient>, kGradient && sizeof(T) < 8 ? 2 : 1)
    StreamedRows(const __grid_constant__ Params p) {
  using A = Accumulator<T>;
  constexpr int kStride = kStreamThreads<kGradient> * kCount;
  const Softmax& call = p.call;
  uint32_t index = blockIdx.x;
  const int64_t row = p.tiles.Peel(index);
  const auto offsets = call.batch.AllOffsets(index);
  const int classes = static_cast<int>(call.classes);
  const T* logits = static_cast<const T*>(call.logits) + offsets[Softmax::kLogits] + row * classes;
  const int label = call.labels[offsets[Softmax::kLabels] + row];
  const bool known = label >= 0 && label < classes;

  SumOfExp<A> others;
  for (int i = threadIdx.x * kCount; i < classes; i += kStride) {
    const int hit = label - i;
    A z[kCount];
    WidenAll(z, LoadPack<kCount>(logits + i));
    A largest = others.largest;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      z[k] = k == hit ? -A(INFINITY) : z[k];
      largest = max(largest, z[k]);
    }
    // An infinite logit leads by a finite number and has an infinite exponential.
    largest = min(largest, Largest<A>());
    A sum = 0;
#pragma unroll
    for (int k = 0; k < kCount; ++k) sum += ExpOfDifference(z[k] - largest);
    others.sum = fma(others.sum, ExpOfDifference(others.largest - largest), sum);
    others.largest = largest;
  }
  SumOverBlock<kStreamThreads<kGradient>>(others);

  A loss, slope;
  const A gamma = static_cast<const A*>(call.gamma)[offsets[Softmax::kGamma]];
  EvaluateRow(loss, slope, others, known ? A(Widen(logits[label])) : A(0), call.power, gamma);
  const int64_t result = offsets[Softmax::kResult];
  if constexpr (!kGradient) {
    if (threadIdx.x == 0) static_cast<A*>(call.loss)[result + row] = known ? loss : A(0);
  } else {
    slope *= static_cast<const A*>(call.cotangent)[offsets[Softmax::kCotangent] + row];
    const A share = others.sum == 0 ? A(0) : slope / others.sum;
    T* gradient = static_cast<T*>(call.gradient) + result + row * classes;
    for (int i = threadIdx.x * kCount; i < classes; i += kStride) {
      const int hit = label - i;
      A z[kCount];
      WidenAll(z, LoadPack<kCount>(logits + i));
      Pack<T, kCount> values;
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const A value = share * ExpOfDifference(z[k] - others.largest);
        values.values[k] = Narrow<T>(!known ? A(0) : k == hit ? -slope : value);
      }
      *reinterpret_cast<Pack<T, kCount>*>(gradient + i) = values;
    }
  }
}

template <typename T, int kLanes, int kCount>
cudaError_t LaunchStaged(cudaStream_t stream, const Softmax& call) {
  constexpr int kRows = kThreads / kLanes;
  const int64_t tiles = CeilDiv(call.rows, kRows);
  const int64_t count = call.batch.size() * tiles;
  if (count > INT32_MAX) return cudaErrorInvalidConfiguration;
  // And what the first row may be misaligned by.
  const int64_t stage_bytes = CeilDiv(kRows * call.classes * sizeof(T), 16) * 16 + 16;
  // Enough blocks for every device first, then more tiles for each; but not where two take the room
  // of other blocks.
  const bool ring = kHasRing<kLanes> && 2 * stage_bytes <= kRingBytes;
  const int64_t per_block = ring ? std::clamp<int64_t>(count / kEnoughBlocks, 1, kMostTiles) : 1;
  const Params params{call, FastDivider(tiles), static_cast<uint32_t>(count),
                      static_cast<uint32_t>(per_block), static_cast<uint32_t>(stage_bytes)};
  return DispatchBool(call.gradient != nullptr, [&](auto gradient) {
    return jaxops::cuda::Launch(StagedRows<T, kLanes, kCount, gradient.value>,
                                CeilDiv(count, per_block), kThreads,
                                (per_block > 1 ? 2 : 1) * stage_bytes, stream, params);
  });
}

template <typename T, int kCount>
cudaError_t LaunchStreamed(cudaStream_t stream, const Softmax& call) {
  const int64_t blocks = call.batch.size() * call.rows;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const Params params{call, FastDivider(call.rows), 0, 0, 0};
  return DispatchBool(call.gradient != nullptr, [&](auto gradient) {
    return jaxops::cuda::Launch(StreamedRows<T, kCount, gradient.value>, blocks,
                                kStreamThreads<gradient.value>, 0, stream, params);
  });
}

}  // namespace

cudaError_t LaunchSoftmax(cudaStream_t stream, const Softmax& call) {
  const int64_t entries = call.batch.size();
  if (entries == 0 || call.rows == 0) return cudaSuccess;
  if (call.classes > INT32_MAX - kStreamThreads<true> * 16) return cudaErrorInvalidValue;
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
      const int64_t row_bytes = call.classes * sizeof(T);
      if (call.classes <= 8) return LaunchStaged<T, 1, kCount>(stream, call);
      const bool many = entries * call.rows >= kManyRows;
      if (many && row_bytes <= kFewLanesBytes) return LaunchStaged<T, 4, kCount>(stream, call);
      if (row_bytes <= kWarpBytes) return LaunchStaged<T, kWarp, kCount>(stream, call);
      if (row_bytes <= kStagedBytes) return LaunchStaged<T, kThreads, kCount>(stream, call);
      return LaunchStreamed<T, kCount>(stream, call);
    });
  });
}

}  // namespace jaxops::focal_loss::cuda
