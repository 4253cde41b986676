// This header holds the code that the backward kernels without tensor cores share: dx, dweight and
// dbias from x, weight and g.
//
// With taps flipped (j = taps - 1 - k) and padding mirrored, both gradients read g through the same
// window:
//
//   dx[s]      = sum_j weight[taps - 1 - j] * g[s + j * dilation - mirrored]
//   dweight[j] = sum_s x[s] * g[s + j * dilation - mirrored]
//
// Filters whose taps fit registers therefore compute both in one pass over x and g. A block keeps
// its channels and loops over tiles of time and batch with the sums of its taps in registers; every
// block writes its partial sums, and a second kernel adds them in a fixed order. Longer filters are
// cut into groups of taps, and their input gradient, which arithmetic bounds, is a forward
// convolution.
//
// Pairs (s, j) whose g lies outside the sequence are left out instead of multiplied by zero: a NaN
// in x must not reach taps with which it forms no pair.
#ifndef JAXOPS_CUDA_LIGHTWEIGHT_CONV_BACKWARD_CUH_
#define JAXOPS_CUDA_LIGHTWEIGHT_CONV_BACKWARD_CUH_

#include "cuda/lightweight_conv/filters.cuh"

namespace jaxops::lightweight_conv::cuda {

// A block of a long filter has this number of taps.
inline constexpr int kStagedTaps = 16;
// A thread has this number of time steps of a tile.
inline constexpr int kSteps = 8;

// TapRange names the taps from `first` on, `count` of the taps for which a kernel has registers.
struct TapRange {
  int first, count;

  // ForEach calls take(tap) for each tap. Blocks in which all taps take part share one branch.
  template <int kTaps, typename Take>
  __device__ __forceinline__ void ForEach(Take&& take) const {
    constexpr int kBlock = kTaps < kShortTaps ? kTaps : kShortTaps;
#pragma unroll
    for (int block = 0; block < kTaps; block += kBlock) {
      if (first <= block && block + kBlock <= first + count) {
#pragma unroll
        for (int j = 0; j < kBlock; ++j) take(block + j);
      } else if (block < first + count) {
#pragma unroll
        for (int j = 0; j < kBlock; ++j) {
          if (Has(block + j)) take(block + j);
        }
      }
    }
  }
  __device__ bool Has(int tap) const {
    return static_cast<unsigned>(tap - first) < static_cast<unsigned>(count);
  }
};

// BackwardPlan cuts the work of such a kernel into tiles of `tile_steps` time steps, and into
// blocks of `block_channels` channels and `group_taps` taps.
struct BackwardPlan {
  int64_t tiles;  // of one phase (NTC) or of one row (NCT)
  int64_t phases, tap_groups, channel_blocks;
  int64_t splits;      // blocks that share the sum of one set of channels
  int64_t items;       // tiles of every phase of every summed batch entry
  int64_t blocks;      // blocks of the grid
  int lead;            // taps left out at the front so that windows begin at whole vectors (NCT)
  bool whole = false;  // a block computes a filter's whole sum, without partial sums (NCT)
  size_t shared_bytes = 0;

  BackwardPlan(const Backward& call, int64_t split_count, int64_t phase_count, int64_t tile_steps,
               int64_t block_channels, int64_t group_taps, int first_taps = 0)
      : phases(phase_count), splits(split_count), lead(first_taps) {
    const Geometry& g = call.geometry;
    const int64_t steps = phases == 1 ? g.time : CeilDiv(g.time, g.dilation);
    tiles = CeilDiv(steps, tile_steps);
    tap_groups = CeilDiv(g.taps + lead, group_taps);
    channel_blocks = CeilDiv(g.channels, block_channels);
    items = call.summed.size() * phases * tiles;
    blocks = call.kept.size() * splits * channel_blocks * tap_groups;
  }

  bool CanLaunch() const { return items <= INT32_MAX && blocks <= kMaxBlocks; }
};

struct BackwardParams {
  Backward call;
  int time, channels, taps, dilation;
  int mirrored;       // padding of the flipped taps
  uint32_t items;     // tiles of every phase of every summed batch entry
  FastDivider tiles;  // tiles of one phase (NTC) or of one row (NCT)
  FastDivider phases;
  FastDivider splits;          // blocks that share the sum of one set of channels
  FastDivider channel_blocks;  // blocks of channels
  FastDivider tap_groups;
  FastDivider depth;  // channels of a head
  int lead;           // taps left out at the front so that windows begin at whole vectors (NCT)
  bool whole;         // a block computes a filter's whole sum, without partial sums (NCT)
  ShortNtcTile ntc;
  NctTile nct;
  void* partials;  // (kept, splits, taps + 1, channels)

  BackwardParams(const Backward& backward, const BackwardPlan& plan, void* partial_sums,
                 int ntc_channels, int nct_steps)
      : call(backward),
        time(static_cast<int>(backward.geometry.time)),
        channels(static_cast<int>(backward.geometry.channels)),
        taps(static_cast<int>(backward.geometry.taps)),
        dilation(static_cast<int>(backward.geometry.dilation)),
        mirrored(static_cast<int>(Mirrored(backward.geometry))),
        items(static_cast<uint32_t>(plan.items)),
        tiles(plan.tiles),
        phases(plan.phases),
        splits(plan.splits),
        channel_blocks(plan.channel_blocks),
        tap_groups(plan.tap_groups),
        depth(backward.geometry.channels / backward.geometry.heads),
        lead(plan.lead),
        whole(plan.whole),
        ntc(backward.geometry.channels, ntc_channels),
        nct(backward.geometry.time, nct_steps),
        partials(partial_sums) {}

  // ReadWeights reads kTaps flipped taps of kV neighbouring channels, zero beyond the filter's
  // length.
  template <int kTaps, int kV, typename Acc>
  __device__ void ReadWeights(Acc (&weight)[kTaps][kV], int64_t kept, int channel) const {
    const int64_t base = call.kept.Offset(kept, Backward::kWeight);
    WithElements(call.weight, call.weight_dtype, [&](const auto* weights) {
#pragma unroll
      for (int v = 0; v < kV; ++v) {
        const auto* filter = weights + base + int64_t{depth.Quotient(channel + v)} * taps;
#pragma unroll
        for (int j = 0; j < kTaps; ++j) {
          weight[j][v] = j < taps ? static_cast<Acc>(Widen(filter[taps - 1 - j])) : Acc(0);
        }
      }
    });
  }
};

// This is one block's share of the work.
struct Share {
  int first_tap;  // flipped
  int channel_block;
  uint32_t split;
  int64_t kept;

  __device__ Share(const BackwardParams& p, int group_taps) {
    // Groups of taps vary fastest, so that blocks that read the same data are resident together.
    uint32_t block = blockIdx.x;
    first_tap = p.tap_groups.DivMod(block) * group_taps;
    channel_block = p.channel_blocks.DivMod(block);
    split = p.splits.DivMod(block);
    kept = block;
  }

  // These are the block's rows of partial sums, one per tap and after them that of the bias.
  template <typename T>
  __device__ Accumulator<T>* PartialSums(const BackwardParams& p) const {
    const int64_t row = (kept * p.splits.divisor() + split) * (p.taps + 1);
    return static_cast<Accumulator<T>*>(p.partials) + row * p.channels;
  }
};

// An item is one tile of one phase of one summed batch entry.
struct Item {
  int tile;
  int phase;
  int64_t summed;

  __device__ Item(const BackwardParams& p, uint32_t index) {
    tile = p.tiles.DivMod(index);
    phase = p.phases.DivMod(index);
    summed = index;
  }

  // At returns the item's array of `operand`, given the `first` array of its kept entry.
  template <typename T>
  __device__ T* At(const BackwardParams& p, T* first, int operand) const {
    return first + p.call.summed.Offset(summed, operand);
  }
};

// These are the arrays of one kept batch entry.
template <typename T>
struct Arrays {
  const T* x;
  const T* g;
  T* dx;

  __device__ Arrays(const BackwardParams& p, int64_t kept)
      : x(static_cast<const T*>(p.call.x) + p.call.kept.Offset(kept, Backward::kX)),
        g(static_cast<const T*>(p.call.g) + p.call.kept.Offset(kept, Backward::kG)),
        dx(static_cast<T*>(p.call.dx) + p.call.kept.Offset(kept, Backward::kDx)) {}
};

// Inside says which of a thread's pairs (step i, tap j) take part: steps before `steps`, and
// entries i + j of the window in [low, high).
struct Inside {
  int steps, low, high;

  // The window's entry e is time step origin + e * dilation.
  __device__ Inside(int steps_left, int origin, int dilation, int time)
      : steps(steps_left),
        low(origin >= 0 ? 0 : DivideByDilation(-origin, dilation)),
        high(origin >= time ? 0 : DivideByDilation(time - origin, dilation)) {}

  __device__ bool All(int count, int window) const {
    return steps >= count && low == 0 && high >= window;
  }
  __device__ bool Pair(int i, int entry) const { return i < steps && entry >= low && entry < high; }
};

// AddPairs adds the pairs of one thread's steps and taps. `x` and `window` are read through
// functions of (index, channel), so that values may stay as they were loaded.
template <bool kAll, int kCount, int kTaps, int kV, typename Acc, typename X, typename Window>
__device__ __forceinline__ void AddPairs(Acc (&dweight)[kTaps][kV], X&& x, Window&& window,
                                         const TapRange& taps, const Inside& inside) {
  taps.ForEach<kTaps>([&](int j) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (kAll || inside.Pair(i, i + j)) {
#pragma unroll
        for (int v = 0; v < kV; ++v) dweight[j][v] += x(i, v) * window(i + j, v);
      }
    }
  });
}

// Pairs outside the sequence have a zero on one side, which is harmless if the other side is
// finite; only otherwise must pairs be selected one by one.
template <int kCount, int kTaps, int kV, typename Acc, typename X, typename Window>
__device__ __forceinline__ void Correlate(Acc (&dweight)[kTaps][kV], X&& x, Window&& window,
                                          const TapRange& taps, const Inside& inside) {
  bool is_simple = inside.All(kCount, kCount + taps.first + taps.count - 1);
  if (!is_simple) {
    Acc probe = 0;
#pragma unroll
    for (int v = 0; v < kV; ++v) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) probe += Acc(0) * x(i, v);
#pragma unroll
      for (int i = 0; i < kCount + kTaps - 1; ++i) probe += Acc(0) * window(i, v);
    }
    is_simple = probe == Acc(0);
  }
  if (is_simple) {
    AddPairs<true, kCount>(dweight, x, window, taps, inside);
  } else {
    AddPairs<false, kCount>(dweight, x, window, taps, inside);
  }
}

// ReduceGroups sums each thread's values over the block's threads that own the same channels,
// `stride` apart in the block, in a fixed order. `shared` holds kCount * kV values per thread;
// total(i, v, lane, sum) receives one sum for each value of each of the first `stride` threads.
template <int kCount, int kV, typename Acc, typename Total>
__device__ __forceinline__ void ReduceGroups(Acc* shared, const Acc (&values)[kCount][kV],
                                             int stride, Total&& total) {
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int v = 0; v < kV; ++v) shared[(i * kV + v) * kNtcThreads + threadIdx.x] = values[i][v];
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < kCount * kV * stride; i += kNtcThreads) {
    const int value = i / stride;
    const int lane = i - value * stride;
    const Acc* own = shared + value * kNtcThreads + lane;
    Acc sum = 0;
#pragma unroll 4
    for (int other = 0; other < kNtcThreads; other += stride) sum += own[other];
    total(value / kV, value % kV, lane, sum);
  }
}

}  // namespace jaxops::lightweight_conv::cuda

#endif  // JAXOPS_CUDA_LIGHTWEIGHT_CONV_BACKWARD_CUH_
