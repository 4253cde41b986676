// These kernels compute lightweight convolution with segments and states for short filters without
// dilation in the NCT layout, whose rows are whole vectors: forward, and all gradients in one pass
// over x and g.
//
// A thread has a vector of steps. Two starts tell whether the windows of all its steps are inside
// of one segment, and only otherwise does the thread find out tap by tap which pairs take part. All
// channels share the starts: forward, a thread reads them once for several channels, and the warps
// of a block have other channels of the same steps.
#include "cuda/common/activation.cuh"
#include "cuda/lightweight_conv/backward.cuh"
#include "cuda/lightweight_conv/families.h"
#include "cuda/lightweight_conv/nct/taps.cuh"
#include "cuda/lightweight_conv/packed.cuh"

namespace jaxops::lightweight_conv::cuda::nct {
namespace {

using jaxops::cuda::Activate;

// VectorWindow has the steps from `first` on that the taps of a vector of steps meet. Vectors are
// loaded whole, and the steps before `first` are removed in registers, because a kernel for each
// distance from a vector would be many kernels.
template <typename T, int kTaps>
class VectorWindow {
 public:
  static constexpr int kVector = kVectorElements<T>;
  static constexpr int kCount = kVector + kTaps - 1;

  // Load starts to load the window from step `first` on, zero outside of [0, time).
  __device__ __forceinline__ void Load(const T* row, int first, int taps, int time) {
    const int skipped = first & (kVector - 1);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int t = first - skipped + i * kVector;
      const bool wanted = i * kVector < skipped + kVector + taps - 1;
      const auto vector = LoadIf<kVector>(
          wanted && static_cast<unsigned>(t) < static_cast<unsigned>(time), row + t, row);
      memcpy(words_ + 4 * i, &vector, sizeof(vector));
    }
  }

  // Read converts the window to `steps`. The distance of `first` from a vector is the same in all
  // threads. It is removed by moves of words, a power of two at a time.
  template <typename Acc>
  __device__ __forceinline__ void Read(Acc (&steps)[kCount], int first) const {
    uint32_t words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = words_[i];
    const int distance = (first & (kVector - 1)) * static_cast<int>(sizeof(T)) / 4;
    MoveIf<2>(distance & 2, words);
    MoveIf<1>(distance & 1, words);
    if constexpr (sizeof(T) == 2) {
      const int bits = first % 2 == 0 ? 0 : 16;
#pragma unroll
      for (int i = 0; i < kWords - 1; ++i) {
        words[i] = __funnelshift_r(words[i], words[i + 1], bits);
      }
    }
    constexpr int kItem = sizeof(T) == 2 ? 4 : sizeof(T);  // bytes of an item of whole words
    constexpr int kElements = kItem / sizeof(T);
#pragma unroll
    for (int i = 0; i < kCount; i += kElements) {
      T elements[kElements];
      memcpy(elements, words + i * sizeof(T) / 4, kItem);
#pragma unroll
      for (int e = 0; e < kElements && i + e < kCount; ++e) steps[i + e] = Widen(elements[e]);
    }
  }

 private:
  static constexpr int kVectors = (kVector - 1 + kCount + kVector - 1) / kVector;
  static constexpr int kWords = 4 * kVectors;

  template <int kDistance>
  __device__ __forceinline__ static void MoveIf(bool moves, uint32_t (&words)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords - kDistance; ++i) {
      words[i] = moves ? words[i + kDistance] : words[i];
    }
  }

  uint32_t words_[kWords] = {};
};

// VectorStarts has the starts of the first and the last step of the windows of a vector of steps.
template <int kVector>
class VectorStarts {
 public:
  // Load starts to load them for the windows from step `first` on.
  __device__ __forceinline__ void Load(const int32_t* starts, int first, int taps, int time) {
    const int last = first + kVector + taps - 2;
    is_inside_ = first >= 0 && last < time;
    if (starts == nullptr || !is_inside_) return;
    first_start_ = starts[first];
    last_start_ = starts[last];
  }

  // Returns whether the windows are inside of one segment.
  __device__ __forceinline__ bool AreWhole() const {
    return is_inside_ && first_start_ == last_start_;
  }

 private:
  bool is_inside_ = false;
  int first_start_ = 0, last_start_ = 0;
};

// FindVectorPairs returns the pairs of a vector of steps from t on as bits: pair (i, j) of step
// t + i and tap j is bit i * kTaps + j.
template <int kVector, int kTaps>
__device__ __forceinline__ uint64_t FindVectorPairs(const int32_t* starts, int t, int first,
                                                    int taps, int time) {
  static_assert(kVector * kTaps <= 64);
  uint64_t pairs = 0;
#pragma unroll 1
  for (int i = 0; i < kVector; ++i) {
    pairs |= uint64_t{FindPairs<kTaps>(starts, t + i, first + i, 1, taps, time)} << i * kTaps;
  }
  return pairs;
}

// --- forward -------------------------------------------------------------------------------------

constexpr int kMaxChannels = 8;  // of a thread

struct ForwardParams {
  Forward call;
  States states;
  int time, channels, taps, padding;
  int per_thread;  // channels of a thread
  NctTile tile;
  FastDivider tiles, channel_blocks;
  FastDivider depth;  // channels of a head
};

template <typename T, int kTaps>
__global__ void __launch_bounds__(kNctThreads, 5)
    PackedNctForward(const __grid_constant__ ForwardParams p) {
  using Acc = Accumulator<T>;
  using Window = VectorWindow<T, kTaps>;
  constexpr int kVector = Window::kVector;
  __shared__ Acc filters[kMaxChannels * kNctMaxRows][kTaps];
  const Forward& call = p.call;
  uint32_t block = blockIdx.x;
  const int lane = threadIdx.x & (p.tile.threads_per_row() - 1);
  const int t = (p.tiles.DivMod(block) * p.tile.threads_per_row() + lane) * kVector;
  const int block_channels = p.per_thread * p.tile.rows();
  const int first_channel = p.channel_blocks.DivMod(block) * block_channels;
  const int64_t batch = block;
  WithElements(call.weight, call.weight_dtype, [&](const auto* weights) {
    const auto* first = weights + call.batch.Offset(batch, Forward::kWeight);
    for (int i = threadIdx.x; i < block_channels * kTaps; i += kNctThreads) {
      const int channel = min(first_channel + i / kTaps, p.channels - 1);
      const int k = i % kTaps;
      if (k >= p.taps) continue;
      const int tap = call.flip_taps ? p.taps - 1 - k : k;
      filters[i / kTaps][k] =
          static_cast<Acc>(Widen(first[int64_t{p.depth.Quotient(channel)} * p.taps + tap]));
    }
  });
  __syncthreads();
  if (t >= p.time) return;

  const int32_t* starts = nullptr;
  if (call.starts != nullptr) starts = call.starts + call.batch.Offset(batch, Forward::kStarts);
  const int first = t - p.padding;
  VectorStarts<kVector> ends;
  ends.Load(starts, first, p.taps, p.time);
  const T* x = static_cast<const T*>(call.x) + call.batch.Offset(batch, Forward::kX);
  T* y = static_cast<T*>(call.y) + call.batch.Offset(batch, Forward::kY);
  int index = threadIdx.x >> p.tile.row_bits;  // among the block's channels
  const int count = min(block_channels, p.channels - first_channel);
  if (index >= count) return;
  const auto load = [&](Window& window, int index) {
    if (index >= count) return;
    window.Load(x + int64_t{first_channel + index} * p.time, first, p.taps, p.time);
  };
  Window window, next;
  load(window, index);
  load(next, index + p.tile.rows());
  const bool is_whole = ends.AreWhole();
  uint64_t pairs = 0;
  if (!is_whole) pairs = FindVectorPairs<kVector, kTaps>(starts, t, first, p.taps, p.time);

#pragma unroll 1
  while (index < count) {
    const int channel = first_channel + index;
    Acc steps[Window::kCount];
    window.Read(steps, first);
    const Acc(&filter)[kTaps] = filters[index];
    index += p.tile.rows();
    window = next;
    load(next, index + p.tile.rows());
    Acc bias = 0;
    if (call.bias != nullptr) {
      const int64_t at = call.batch.Offset(batch, Forward::kBias) + channel;
      WithElements(call.bias, call.bias_dtype,
                   [&](const auto* biases) { bias = static_cast<Acc>(Widen(biases[at])); });
    }
    Acc sums[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) sums[i] = bias;
    if (is_whole) {
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        if (k < p.taps) {
          const Acc weight = filter[k];
#pragma unroll
          for (int i = 0; i < kVector; ++i) sums[i] += weight * steps[i + k];
        }
      }
    } else {
      if (call.state != nullptr) {
        const int64_t offset = call.batch.Offset(batch, Forward::kState);
#pragma unroll 1
        for (int i = 0; i < min(kVector, p.padding - t); ++i) {
          Acc sum = bias;
          p.states.ForEachTap<1, Acc>(
              nullptr, offset, t + i, starts == nullptr ? -p.padding : starts[t + i], channel,
              [&](int k, const Acc(&row)[1]) { sum += filter[k] * row[0]; });
          // Registers have no index that is known only at run time.
#pragma unroll
          for (int r = 0; r < kVector; ++r) sums[r] = r == i ? sum : sums[r];
        }
      }
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        if (k < p.taps) {
          const Acc weight = filter[k];
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            if (pairs >> (i * kTaps + k) & 1) sums[i] += weight * steps[i + k];
          }
        }
      }
    }
    Activate(sums, call.activation);
    WriteSteps<T, kVector, true>(y + int64_t{channel} * p.time, sums, t, p.time);
  }
}

// --- backward ------------------------------------------------------------------------------------

template <typename T, int kTaps>
__global__ void __launch_bounds__(kNctThreads, (sizeof(T) == 8 ? 4 : 5) - (kTaps > 4))
    PackedNctBackward(const __grid_constant__ BackwardParams p) {
  using Acc = Accumulator<T>;
  using Window = VectorWindow<T, kTaps>;
  constexpr int kVector = Window::kVector;
  const Share share(p, kTaps);
  const Arrays<T> arrays(p, share.kept);
  const int32_t* kept_starts = p.call.starts + p.call.kept.Offset(share.kept, Backward::kStarts);
  const int lane = threadIdx.x & (p.nct.threads_per_row() - 1);
  const int first_channel = share.channel_block * p.nct.rows();
  const int channel = first_channel + (threadIdx.x >> p.nct.row_bits);
  // Threads beyond the last channel stay, because the block synchronises.
  const int time = channel < p.channels ? p.time : 0;
  const int64_t row = time == 0 ? 0 : int64_t{channel} * p.time;
  const bool wants_dx = p.call.dx != nullptr;
  const bool wants_dbias = p.call.dbias != nullptr;

  Window window;
  Vector<T, kVector> own_vector;
  VectorStarts<kVector> ends;
  const auto load = [&](uint32_t index) {
    if (index >= p.items) return;
    const Item item(p, index);
    const int t = (item.tile * p.nct.threads_per_row() + lane) * kVector;
    if (t >= time) return;
    const int first = t - p.mirrored;
    own_vector = LoadVector<kVector>(item.At(p, arrays.x, Backward::kX) + row + t);
    window.Load(item.At(p, arrays.g, Backward::kG) + row, first, p.taps, time);
    ends.Load(item.At(p, kept_starts, Backward::kStarts), first, p.taps, time);
  };
  load(share.split);

  Acc weight[kTaps][1] = {};
  Acc dweight[kTaps][1] = {};
  Acc dbias[1][1] = {};
  if (wants_dx && time > 0) p.ReadWeights(weight, share.kept, channel);
#pragma unroll 1
  for (uint32_t index = share.split; index < p.items; index += p.splits.divisor()) {
    const Item item(p, index);
    const int t = (item.tile * p.nct.threads_per_row() + lane) * kVector;
    const int first = t - p.mirrored;
    Acc steps[Window::kCount], own[kVector];
    window.Read(steps, first);
#pragma unroll
    for (int i = 0; i < kVector; ++i) own[i] = Widen(own_vector.values[i]);
    const bool is_whole = ends.AreWhole();
    load(index + p.splits.divisor());
    if (t >= time) continue;
    if (wants_dbias) {
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
        if (j == p.mirrored) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) dbias[0][0] += steps[i + j];
        }
      }
    }
    Acc sums[kVector] = {};
    const auto work = [&](auto all, uint64_t pairs) {
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
        if (j < p.taps) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            if (all.value || (pairs >> (i * kTaps + j) & 1)) {
              dweight[j][0] += own[i] * steps[i + j];
              sums[i] += weight[j][0] * steps[i + j];
            }
          }
        }
      }
    };
    if (is_whole) {
      work(std::true_type{}, 0);
    } else {
      const int32_t* starts = item.At(p, kept_starts, Backward::kStarts);
      work(std::false_type{}, FindVectorPairs<kVector, kTaps>(starts, t, first, p.taps, time));
    }
    if (wants_dx) {
      WriteSteps<T, kVector, true>(item.At(p, arrays.dx, Backward::kDx) + row, sums, t, time);
    }
  }

  Acc* partials = share.PartialSums<T>(p);
  ReduceRows(dweight, p.nct.row_bits, [&](int j, int row, Acc sum) {
    if (j < p.taps) {
      WriteRowSum(p, partials, share.kept, p.taps - 1 - j, first_channel + row, sum);
    }
  });
  if (wants_dbias) {
    ReduceRows(dbias, p.nct.row_bits, [&](int, int row, Acc sum) {
      WriteRowSum(p, partials, share.kept, p.taps, first_channel + row, sum);
    });
  }
}

// --- launches ------------------------------------------------------------------------------------

// Warps of a block have channels of their own, up to 32 threads each.
constexpr int kRowBits = 5;

int CountVectorElements(DType dtype) { return 16 / jaxops::cuda::SizeOf(dtype); }

struct ForwardPlan {
  NctTile tile;
  int64_t tiles, per_thread, channel_blocks, blocks;

  explicit ForwardPlan(const Forward& call)
      : tile(call.geometry.time, CountVectorElements(call.dtype)) {
    const Geometry& g = call.geometry;
    tile.row_bits = std::min(tile.row_bits, kRowBits);
    tiles = CeilDiv(g.time, tile.threads_per_row() * CountVectorElements(call.dtype));
    // A thread gets more channels only when there are enough threads for every device.
    const int64_t single = call.batch.size() * tiles * CeilDiv(g.channels, tile.rows());
    per_thread = std::clamp<int64_t>(single / (int64_t{1} << 12), 1, kMaxChannels);
    channel_blocks = CeilDiv(g.channels, per_thread * tile.rows());
    blocks = call.batch.size() * tiles * channel_blocks;
  }
};

NctTile MakeTile(const Gradients& gradients) {
  const Backward& call = gradients.call;
  NctTile tile(call.geometry.time, CountVectorElements(call.dtype));
  const int max_bits = tile.row_bits;
  tile.row_bits = std::min(max_bits, kRowBits);
  const auto count_blocks = [&] {
    return call.kept.size() * gradients.splits * CeilDiv(call.geometry.channels, tile.rows());
  };
  while (tile.row_bits < max_bits && count_blocks() < 2 * kBusyBlocks) ++tile.row_bits;
  return tile;
}

BackwardPlan MakePlan(const Gradients& gradients, const NctTile& tile) {
  const Backward& call = gradients.call;
  return BackwardPlan(call, gradients.splits, 1,
                      tile.threads_per_row() * CountVectorElements(call.dtype), tile.rows(),
                      kShortTaps);
}

template <typename T, int kTaps>
cudaError_t LaunchBackward(cudaStream_t stream, const Gradients& gradients) {
  const NctTile tile = MakeTile(gradients);
  const BackwardPlan plan = MakePlan(gradients, tile);
  BackwardParams params(gradients.call, plan, gradients.partials, 1, 1);
  params.nct = tile;
  return Launch(PackedNctBackward<T, kTaps>, plan.blocks, kNctThreads, 0, stream, params);
}

bool CanRun(const Geometry& g, DType dtype) {
  return g.data_format == DataFormat::kNCT && g.taps <= kShortTaps && g.dilation == 1 &&
         RowsAligned(g.time, dtype, 16);
}

}  // namespace

bool CanRunPacked(const Forward& call, const Device&) {
  return CanRun(call.geometry, call.dtype) && ForwardPlan(call).blocks <= kMaxBlocks;
}
bool CanRunPacked(const Gradients& gradients, const Device&) {
  const Backward& call = gradients.call;
  return CanRun(call.geometry, call.dtype) && MakePlan(gradients, MakeTile(gradients)).CanLaunch();
}

cudaError_t LaunchPacked(cudaStream_t stream, const Forward& call, const Device&) {
  const Geometry& g = call.geometry;
  const ForwardPlan plan(call);
  const ForwardParams params{.call = call,
                             .states = States(call),
                             .time = static_cast<int>(g.time),
                             .channels = static_cast<int>(g.channels),
                             .taps = static_cast<int>(g.taps),
                             .padding = static_cast<int>(g.padding),
                             .per_thread = static_cast<int>(plan.per_thread),
                             .tile = plan.tile,
                             .tiles = FastDivider(plan.tiles),
                             .channel_blocks = FastDivider(plan.channel_blocks),
                             .depth = FastDivider(g.channels / g.heads)};
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    return g.taps <= 4 ? Launch(PackedNctForward<T, 4>, plan.blocks, kNctThreads, 0, stream, params)
                       : Launch(PackedNctForward<T, kShortTaps>, plan.blocks, kNctThreads, 0,
                                stream, params);
  });
}

cudaError_t LaunchPacked(cudaStream_t stream, const Gradients& gradients, const Device&) {
  const Backward& call = gradients.call;
  const cudaError_t error = DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    return call.geometry.taps <= 4 ? LaunchBackward<T, 4>(stream, gradients)
                                   : LaunchBackward<T, kShortTaps>(stream, gradients);
  });
  if (error != cudaSuccess) return error;
  return AddPartialSums(stream, call, {gradients.partials, gradients.splits});
}

}  // namespace jaxops::lightweight_conv::cuda::nct
