// These kernels compute lightweight convolution without dilation in the NCT layout: the window of a
// filter is in registers.
#include "cuda/common/activation.cuh"
#include "cuda/lightweight_conv/backward.cuh"
#include "cuda/lightweight_conv/families.h"
#include "cuda/lightweight_conv/forward.cuh"

namespace jaxops::lightweight_conv::cuda::nct {
namespace {

using jaxops::cuda::Activate;

// A block of a long filter has this number of taps, whose window fits registers.
template <typename T>
constexpr int kWindowTaps = sizeof(T) == 8 ? 16 : 32;

// ShortNct is for rows of whole vectors.
template <typename T, int kTaps, int kShift>
__global__ void __launch_bounds__(kNctThreads) ShortNct(const __grid_constant__ ForwardParams p) {
  using Acc = Accumulator<T>;
  constexpr int kSteps = kVectorElements<T>;
  uint32_t block = blockIdx.x;
  const int row_threads = p.nct.threads_per_row();
  const int lane = threadIdx.x & (row_threads - 1);
  const int first_step = p.tiles.DivMod(block) * p.chunks * kFlight * row_threads * kSteps;
  const int channel =
      p.channel_blocks.DivMod(block) * p.nct.rows() + (threadIdx.x >> p.nct.row_bits);
  const int64_t batch = block;
  if (channel >= p.channels) return;

  const int64_t row = int64_t{channel} * p.time;
  const T* x = static_cast<const T*>(p.call.x) + p.call.batch.Offset(batch, Forward::kX) + row;
  T* y = static_cast<T*>(p.call.y) + p.call.batch.Offset(batch, Forward::kY) + row;
  Acc weight[kTaps][1], bias[1];
  p.ReadWeights(weight, batch, channel);
  p.ReadBias(bias, batch, channel);

#pragma unroll 1
  for (int chunk = 0; chunk < p.chunks; ++chunk) {
    const int t = first_step + (chunk * kFlight * row_threads + lane) * kSteps;
    const int ahead = row_threads * kSteps;
    if (t >= p.time) return;
    Window<T, kSteps + kTaps - 1, kShift> windows[kFlight];
#pragma unroll
    for (int f = 0; f < kFlight; ++f) windows[f].Load(x, t + f * ahead - p.padding, p.time);
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      Acc sums[kSteps];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) sums[i] = bias[0];
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        if (k < p.taps) {
#pragma unroll
          for (int i = 0; i < kSteps; ++i) sums[i] += weight[k][0] * windows[f][i + k];
        }
      }
      Activate(sums, p.call.activation);
      WriteSteps<T, kSteps, true>(y, sums, t + f * ahead, p.time);
    }
  }
}

// This is a ring of items in flight from memory to the lanes of one warp that share a channel. A
// lane owns a vector of steps of x; its window of g is that vector's steps of g and the vectors
// after them.
template <typename T, int kTaps, int kShift>
class NctRing {
 public:
  static constexpr int kVector = kVectorElements<T>;
  static constexpr int kStages = 4;
  static constexpr int kWindow = kVector + kTaps - 1;

  struct Storage;

  __device__ __forceinline__ NctRing(Storage& storage, const NctTile& tile)
      : storage_(storage),
        lanes_(min(tile.threads_per_row(), kWarp)),
        lane_(threadIdx.x & (lanes_ - 1)),
        x_vector_(threadIdx.x % kWarp),
        g_vector_(x_vector_ < lanes_ ? x_vector_ : x_vector_ + kBeyond) {}

  // Fetch starts to copy an item to a stage; t is the first step of this lane's vector of x. Steps
  // outside [0, time) arrive as zeros.
  __device__ __forceinline__ void Fetch(int stage, const T* x, const T* g, int t, int mirrored,
                                        int time) {
    const int base = t - mirrored - kSkip;
    Copy(&storage_.x[stage][x_vector_], lanes_, x, t, time);
    Copy(&storage_.g[stage][g_vector_], lanes_, g, base, time);
    if (lane_ < kBeyond) {
      Copy(&storage_.g[stage][g_vector_ + lanes_], kBeyond, g, base + lanes_ * kVector, time);
    }
  }

  template <typename Acc>
  __device__ __forceinline__ void Read(int stage, Acc (&window)[kWindow],
                                       Acc (&own)[kVector]) const {
    const Vector<T, kVector> x = storage_.x[stage][x_vector_];
#pragma unroll
    for (int i = 0; i < kVector; ++i) own[i] = Widen(x.values[i]);
    Vector<T, kVector> g[kBeyond + 1];
#pragma unroll
    for (int i = 0; i <= kBeyond; ++i) g[i] = storage_.g[stage][g_vector_ + i];
#pragma unroll
    for (int i = 0; i < kWindow; ++i) {
      window[i] = Widen(g[(i + kSkip) / kVector].values[(i + kSkip) % kVector]);
    }
  }

 private:
  static constexpr int kSkip = kShift == kUnaligned ? 0 : kShift;
  // A window has this number of vectors after its first.
  static constexpr int kBeyond = (kSkip + kWindow - 1) / kVector;

  // Copy starts to copy the vector at step t of each of `lanes` neighbouring lanes.
  __device__ __forceinline__ void Copy(Vector<T, kVector>* to, int lanes, const T* row, int t,
                                       int time) {
    if constexpr (kShift != kUnaligned) {
      const bool inside = static_cast<unsigned>(t) < static_cast<unsigned>(time);
      __pipeline_memcpy_async(to, inside ? row + t : row, 16, inside ? 0 : 16);
    } else {
      // Neighbouring lanes copy neighbouring steps, instead of each its own vector.
      T* elements = (to - lane_)->values + lane_;
      const int first = t - lane_ * kVector + lane_;
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        const int step = first + e * lanes;
        const bool inside = static_cast<unsigned>(step) < static_cast<unsigned>(time);
        elements[e * lanes] = LoadIf<1>(inside, row + step, row).values[0];
      }
    }
  }

  Storage& storage_;
  int lanes_;     // lanes of a warp that share a channel: at least half of the warp
  int lane_;      // index among these lanes
  int x_vector_;  // this lane's vector of x
  int g_vector_;  // the first vector of its window
};

template <typename T, int kTaps, int kShift>
struct NctRing<T, kTaps, kShift>::Storage {
  Vector<T, kVector> x[kStages][kWarp];
  Vector<T, kVector> g[kStages][kWarp + 2 * kBeyond];
};

// Shared memory holds the taps of a block's rows, kTaps per row, read once per block and as
// vectors.
template <typename Acc, int kTaps>
class StagedTaps {
 public:
  // tap(channel, j) is the tap with index j; the block has to synchronise after the call.
  template <typename Tap>
  __device__ void Stage(const NctTile& tile, int first_channel, int channels, const TapRange& taps,
                        Tap&& tap) {
    for (int i = threadIdx.x; i < tile.rows() * kTaps; i += kNctThreads) {
      const int channel = min(first_channel + i / kTaps, channels - 1);
      const int j = i % kTaps;
      taps_[i] = taps.Has(j) ? static_cast<Acc>(tap(channel, j)) : Acc(0);
    }
  }

  __device__ __forceinline__ void Read(Acc (&taps)[kTaps][1], int row) const {
    constexpr int kVector = 16 / sizeof(Acc);
#pragma unroll
    for (int j = 0; j < kTaps; j += kVector) {
      const auto vec = LoadVector<kVector>(taps_ + row * kTaps + j);
#pragma unroll
      for (int e = 0; e < kVector; ++e) taps[j + e][0] = vec.values[e];
    }
  }

 private:
  alignas(16) Acc taps_[kNctMaxRows * kTaps];
};

// This number of blocks per multiprocessor leaves registers for the sums and the window, but no
// spare ones.
template <typename Acc, int kTaps>
constexpr int kWindowBlocks = sizeof(Acc) * kTaps <= 16   ? 8
                              : sizeof(Acc) * kTaps <= 32 ? 6
                                                          : 4;

// WindowNct runs filters whose window fits registers, with the input gradient, and groups of taps
// of longer filters.
template <typename T, int kTaps, int kShift>
__global__ void __launch_bounds__(kNctThreads, kWindowBlocks<Accumulator<T>, kTaps>)
    WindowNct(const __grid_constant__ BackwardParams p) {
  using Acc = Accumulator<T>;
  using Ring = NctRing<T, kTaps, kShift>;
  constexpr int kCount = kVectorElements<T>;
  __shared__ typename Ring::Storage storage[kNctThreads / kWarp];
  __shared__ StagedTaps<Acc, kTaps> staged;
  const Share share(p, kTaps);
  const int skipped = max(0, p.lead - share.first_tap);
  const TapRange taps = {skipped, min(kTaps, p.taps + p.lead - share.first_tap) - skipped};
  const Arrays<T> arrays(p, share.kept);
  const int row_lane = threadIdx.x & (p.nct.threads_per_row() - 1);
  const int tile_row = threadIdx.x >> p.nct.row_bits;
  const int first_channel = share.channel_block * p.nct.rows();
  const int channel = first_channel + tile_row;
  // Threads beyond the last channel stay, because the warp synchronises.
  const int time = channel < p.channels ? p.time : 0;
  const int64_t row = time == 0 ? 0 : int64_t{channel} * p.time;
  const T* x = arrays.x + row;
  const T* g = arrays.g + row;
  const bool wants_dx = p.call.dx != nullptr && p.tap_groups.divisor() == 1;
  const int before = p.mirrored + p.lead - share.first_tap;  // from a step to its window
  // The tap at which a step meets its own g belongs to one group.
  const bool wants_dbias = p.call.dbias != nullptr && before >= 0 && before < kTaps;
  const auto first_step = [&](const Item& item) {
    return (item.tile * p.nct.threads_per_row() + row_lane) * kCount;
  };

  Ring ring(storage[threadIdx.x / kWarp], p.nct);
  uint32_t ahead = share.split;
  const auto fetch = [&](int stage) {
    if (ahead < p.items) {
      const Item item(p, ahead);
      ring.Fetch(stage, item.At(p, x, Backward::kX), item.At(p, g, Backward::kG), first_step(item),
                 before, time);
    }
    __pipeline_commit();
    ahead += p.splits.divisor();
  };
  for (int stage = 0; stage < Ring::kStages - 1; ++stage) fetch(stage);

  Acc weight[kTaps][1] = {};
  Acc dweight[kTaps][1] = {};
  Acc dbias[1][1] = {};
  if constexpr (kTaps <= kShortTaps) {
    if (wants_dx && time > 0) p.ReadWeights(weight, share.kept, channel);
  } else if (wants_dx) {
    WithElements(p.call.weight, p.call.weight_dtype, [&](const auto* weights) {
      const auto* filters = weights + p.call.kept.Offset(share.kept, Backward::kWeight);
      staged.Stage(p.nct, first_channel, p.channels, taps, [&](int channel, int j) {
        const int tap = p.taps - 1 - (j - p.lead);
        return Widen(filters[int64_t{p.depth.Quotient(channel)} * p.taps + tap]);
      });
    });
    __syncthreads();
  }
  int stage = 0;
#pragma unroll 1
  for (uint32_t index = share.split; index < p.items; index += p.splits.divisor()) {
    __pipeline_wait_prior(Ring::kStages - 2);
    __syncwarp();
    // The vector is converted once, though every element meets several taps.
    Acc window[Ring::kWindow], own[kCount];
    ring.Read(stage, window, own);
    fetch((stage + Ring::kStages - 1) % Ring::kStages);
    stage = (stage + 1) % Ring::kStages;

    const Item item(p, index);
    const int t = first_step(item);
    if (t >= time) continue;
    if (wants_dbias) {
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
        if (j == before) {
#pragma unroll
          for (int i = 0; i < kCount; ++i) dbias[0][0] += window[i + j];
        }
      }
    }
    const auto own_at = [&](int i, int) { return own[i]; };
    const auto window_at = [&](int i, int) { return window[i]; };
    Correlate<kCount>(dweight, own_at, window_at, taps, Inside(time - t, t - before, 1, time));
    if (wants_dx) {
      // Long filters fill the registers, and read their taps from shared memory.
      if constexpr (kTaps > kShortTaps) staged.Read(weight, tile_row);
      Acc sums[kCount] = {};
      taps.ForEach<kTaps>([&](int j) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) sums[i] += weight[j][0] * window[i + j];
      });
      WriteSteps<T, kCount, kShift != kUnaligned>(item.At(p, arrays.dx, Backward::kDx) + row, sums,
                                                  t, time);
    }
  }
  Acc* partials = share.PartialSums<T>(p);
  ReduceRows(dweight, p.nct.row_bits, [&](int j, int row, Acc sum) {
    const int channel = first_channel + row;
    if (!taps.Has(j) || channel >= p.channels) return;
    const int tap = p.taps - 1 - (share.first_tap + j - p.lead);
    if (p.whole) {
      StoreAs(p.call.dweight, (share.kept * p.channels + channel) * p.taps + tap,
              p.call.weight_dtype, sum);
    } else {
      partials[int64_t{tap} * p.channels + channel] = sum;
    }
  });
  if (wants_dbias) {
    ReduceRows(dbias, p.nct.row_bits, [&](int, int row, Acc sum) {
      const int channel = first_channel + row;
      if (channel >= p.channels) return;
      if (p.whole) {
        StoreAs(p.call.dbias, share.kept * p.channels + channel, p.call.bias_dtype, sum);
      } else {
        partials[int64_t{p.taps} * p.channels + channel] = sum;
      }
    });
  }
}

template <typename T>
ForwardPlan MakePlan(const Forward& call) {
  const Geometry& g = call.geometry;
  constexpr int64_t kSteps = kFlight * kVectorElements<T>;
  const NctTile tile(g.time, kSteps);
  ForwardPlan plan;
  plan.chunks = ShortChunks(call.batch.size() * g.channels * CeilDiv(g.time, kSteps), 4);
  plan.tiles = CeilDiv(g.time, tile.threads_per_row() * kSteps * plan.chunks);
  plan.channel_blocks = CeilDiv(g.channels, tile.rows());
  plan.blocks = call.batch.size() * plan.tiles * plan.channel_blocks;
  return plan;
}

// Empty taps at the front of a long filter move its windows to the beginning of a vector, so that
// fewer kernels are compiled than one per shift.
template <typename T>
int Lead(const Backward& call) {
  const Geometry& g = call.geometry;
  return g.taps <= kShortTaps ? 0 : std::max(0, WindowShift<T>(g.time, call.dtype, Mirrored(g)));
}

// KernelTaps returns the taps of the kernel for a filter, or the maximum for which it has
// registers.
template <typename T>
int KernelTaps(const Backward& call) {
  const int64_t taps = Lead<T>(call) + call.geometry.taps;
  return taps <= 4 ? 4 : taps <= kShortTaps ? kShortTaps : taps <= 16 ? 16 : kWindowTaps<T>;
}

template <typename T>
BackwardPlan MakePlan(const Gradients& gradients) {
  const Backward& call = gradients.call;
  const Geometry& g = call.geometry;
  const NctTile tile(g.time, kVectorElements<T>);
  const int taps = KernelTaps<T>(call);
  // Channels that keep the device busy need no splits, and channels with a filter each then have no
  // partial sums to add. With more taps, fewer blocks are resident, and more of them balance the
  // load.
  const int64_t busy = call.kept.size() * CeilDiv(g.channels, tile.rows());
  const int64_t splits = taps <= 4 && busy >= kBusyBlocks ? 1 : gradients.splits;
  BackwardPlan plan(call, splits, 1, int64_t{kVectorElements<T>} * tile.threads_per_row(),
                    tile.rows(), taps, Lead<T>(call));
  plan.whole = splits == 1 && g.channels == g.heads;
  return plan;
}

template <typename T, int kTaps>
cudaError_t LaunchShortNct(cudaStream_t stream, const Forward& call, const ForwardPlan& plan) {
  const ForwardParams params(call, plan, 1, kFlight * kVectorElements<T>);
  const int window_shift = WindowShift<T>(params.time, call.dtype, params.padding);
  return DispatchShift<T>(window_shift, [&](auto shift) {
    return Launch(ShortNct<T, kTaps, shift.value>, plan.blocks, kNctThreads, 0, stream, params);
  });
}

template <typename T, int kTaps>
cudaError_t LaunchWindowNct(cudaStream_t stream, const Gradients& gradients,
                            const BackwardPlan& plan) {
  const Backward& call = gradients.call;
  const BackwardParams params(call, plan, gradients.partials, 1, kVectorElements<T>);
  const auto launch = [&](auto shift) {
    return Launch(WindowNct<T, kTaps, shift.value>, plan.blocks, kNctThreads, 0, stream, params);
  };
  const int shift = WindowShift<T>(params.time, call.dtype, params.mirrored);
  if constexpr (kTaps <= kShortTaps) {
    return DispatchShift<T>(shift, launch);
  } else {
    return shift == kUnaligned ? launch(std::integral_constant<int, kUnaligned>{})
                               : launch(std::integral_constant<int, 0>{});
  }
}

// Windows of short filters begin at a shift, known at compile time, in rows of whole vectors.
bool CanRun(const Geometry& g, DType dtype) {
  return g.data_format == DataFormat::kNCT && g.dilation == 1 &&
         (g.taps > kShortTaps || RowsAligned(g.time, dtype, 16));
}

}  // namespace

bool CanRunWindow(const Forward& call, const Device&) {
  const Geometry& g = call.geometry;
  return CanRun(g, call.dtype) && g.taps <= kShortTaps &&
         DispatchFloat(call.dtype,
                       [&](auto element) { return MakePlan<decltype(element)>(call).CanLaunch(); });
}

bool CanRunWindow(const Gradients& gradients, const Device&) {
  const Backward& call = gradients.call;
  return CanRun(call.geometry, call.dtype) && DispatchFloat(call.dtype, [&](auto element) {
           return MakePlan<decltype(element)>(gradients).CanLaunch();
         });
}

bool ComputesInputGradWindow(const Backward& call) {
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    return Lead<T>(call) + call.geometry.taps <= kWindowTaps<T>;
  });
}

cudaError_t LaunchWindow(cudaStream_t stream, const Forward& call, const Device&) {
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    const ForwardPlan plan = MakePlan<T>(call);
    return call.geometry.taps <= 4 ? LaunchShortNct<T, 4>(stream, call, plan)
                                   : LaunchShortNct<T, kShortTaps>(stream, call, plan);
  });
}

cudaError_t LaunchWindow(cudaStream_t stream, const Gradients& gradients, const Device&) {
  const Backward& call = gradients.call;
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    const BackwardPlan plan = MakePlan<T>(gradients);
    const int taps = KernelTaps<T>(call);
    const cudaError_t error = taps == 4   ? LaunchWindowNct<T, 4>(stream, gradients, plan)
                              : taps == 8 ? LaunchWindowNct<T, 8>(stream, gradients, plan)
                              : taps == 16
                                  ? LaunchWindowNct<T, 16>(stream, gradients, plan)
                                  : LaunchWindowNct<T, kWindowTaps<T>>(stream, gradients, plan);
    if (error != cudaSuccess || plan.whole) return error;
    return AddPartialSums(stream, call, {gradients.partials, plan.splits});
  });
}

}  // namespace jaxops::lightweight_conv::cuda::nct
