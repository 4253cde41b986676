// Lightweight convolution, backward: dx, dweight and dbias from x, weight and g.
//
// With taps flipped (j = taps - 1 - k) and padding mirrored, both gradients read g through the same
// window:
//
//   dx[s]      = sum_j weight[taps - 1 - j] * g[s + j * dilation - mirrored]
//   dweight[j] = sum_s x[s] * g[s + j * dilation - mirrored]
//
// so filters whose taps fit registers get both in one pass over x and g. A block keeps its channels
// and walks over tiles of time and batch with the sums of its taps in registers; every block writes
// its partial sums, and a second kernel adds them in a fixed order. Longer filters are cut into
// groups of taps, and their input gradient, which is bound by arithmetic, is a forward convolution.
//
// Pairs (s, j) whose g lies outside the sequence are left out, not multiplied by zero: a NaN in x
// must not reach taps that never met it.
#include "cuda/lightweight_conv/filters.cuh"
#include "cuda/lightweight_conv/launch.h"

namespace jaxops::lightweight_conv::cuda {
namespace {

// Taps of one block of a long filter: in NCT, undilated, those whose window fits registers.
constexpr int kStagedTaps = 16;
template <typename T>
constexpr int kWindowTaps = sizeof(T) == 8 ? 16 : 32;
// Time steps of one thread in a tile.
constexpr int kSteps = 8;

// Taps from `first` on, `count` of the ones that a kernel has registers for.
struct TapRange {
  int first, count;

  // Calls take(tap) for each. Blocks of taps that all take part share one branch.
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
  int lead;           // taps left out at the front so that windows begin at whole packs (NCT)
  bool whole;         // a block makes all of a filter's sum, and no partial ones (NCT)
  ShortNtcTile ntc;
  NctTile nct;
  void* partials;  // (kept, splits, taps + 1, channels)

  BackwardParams(const Backward& backward, int64_t split_count, void* partial_sums,
                 int ntc_channels, int nct_steps)
      : call(backward),
        time(static_cast<int>(backward.geometry.time)),
        channels(static_cast<int>(backward.geometry.channels)),
        taps(static_cast<int>(backward.geometry.taps)),
        dilation(static_cast<int>(backward.geometry.dilation)),
        mirrored(static_cast<int>(Mirrored(backward.geometry))),
        splits(split_count),
        depth(backward.geometry.channels / backward.geometry.heads),
        lead(0),
        whole(false),
        ntc(backward.geometry.channels, ntc_channels),
        nct(backward.geometry.time, nct_steps),
        partials(partial_sums) {}

  // Cuts the work into tiles of `tile_steps` time steps and blocks of `block_channels` channels and
  // `group_taps` taps; returns the number of blocks to launch.
  int64_t Cut(int64_t steps, int64_t phase_count, int64_t tile_steps, int64_t block_channels,
              int64_t group_taps) {
    const int64_t tile_count = CeilDiv(steps, tile_steps);
    const int64_t groups = CeilDiv(taps + lead, group_taps);
    const int64_t blocks = CeilDiv(channels, block_channels);
    tiles = FastDivider(tile_count);
    phases = FastDivider(phase_count);
    tap_groups = FastDivider(groups);
    channel_blocks = FastDivider(blocks);
    const int64_t all_items = call.summed.size() * phase_count * tile_count;
    items = static_cast<uint32_t>(all_items);
    // More than are counted in 32 bits are more blocks than can be launched.
    return all_items > INT32_MAX ? INT64_MAX
                                 : call.kept.size() * splits.divisor() * blocks * groups;
  }

  // Reads kTaps flipped taps of kV neighbouring channels, zero beyond the filter's length.
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

// One block's share of the work.
struct Share {
  int first_tap;  // flipped
  int channel_block;
  uint32_t split;
  int64_t kept;

  __device__ Share(const BackwardParams& p, int group_taps) {
    // Groups of taps vary fastest: the blocks that read the same data run together.
    uint32_t block = blockIdx.x;
    first_tap = p.tap_groups.Peel(block) * group_taps;
    channel_block = p.channel_blocks.Peel(block);
    split = p.splits.Peel(block);
    kept = block;
  }

  // The block's rows of partial sums, one a tap and last the bias's.
  template <typename T>
  __device__ Accumulator<T>* PartialSums(const BackwardParams& p) const {
    const int64_t row = (kept * p.splits.divisor() + split) * (p.taps + 1);
    return static_cast<Accumulator<T>*>(p.partials) + row * p.channels;
  }
};

// One tile of one phase of one summed batch entry.
struct Item {
  int tile;
  int phase;
  int64_t summed;

  __device__ Item(const BackwardParams& p, uint32_t index) {
    tile = p.tiles.Peel(index);
    phase = p.phases.Peel(index);
    summed = index;
  }

  // The array of `operand` that the item belongs to, from the first one of its kept entry.
  template <typename T>
  __device__ T* At(const BackwardParams& p, T* first, int operand) const {
    return first + p.call.summed.Offset(summed, operand);
  }
};

// The arrays of one kept batch entry.
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

// Which of a thread's pairs (step i, tap j) take part: steps before `steps`, and entries i + j of
// the window in [low, high).
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

// Adds the pairs of one thread's steps and taps. `x` and `window` are read through functions of
// (index, channel) so that they may stay in the form in which they were loaded.
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

// Pairs that do not take part have a zero on one side, which is harmless beside finite numbers;
// only where a number is not finite must they be told apart one by one.
template <int kCount, int kTaps, int kV, typename Acc, typename X, typename Window>
__device__ __forceinline__ void Correlate(Acc (&dweight)[kTaps][kV], X&& x, Window&& window,
                                          const TapRange& taps, const Inside& inside) {
  bool plain = inside.All(kCount, kCount + taps.first + taps.count - 1);
  if (!plain) {
    Acc probe = 0;
#pragma unroll
    for (int v = 0; v < kV; ++v) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) probe += Acc(0) * x(i, v);
#pragma unroll
      for (int i = 0; i < kCount + kTaps - 1; ++i) probe += Acc(0) * window(i, v);
    }
    plain = probe == Acc(0);
  }
  if (plain) {
    AddPairs<true, kCount>(dweight, x, window, taps, inside);
  } else {
    AddPairs<false, kCount>(dweight, x, window, taps, inside);
  }
}

// Sums each thread's values over the block's threads that own the same channels, `stride` apart in
// the block, in order. `shared` holds kCount * kV values a thread; total(i, v, lane, sum) takes one
// sum for each value of each of the first `stride` threads.
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

// --- short filters -------------------------------------------------------------------------------

// NTC, of an odd number of channels of 2 bytes.
template <typename T>
__global__ void __launch_bounds__(kNtcThreads, 2)
    UnpackedNtcBackward(const __grid_constant__ BackwardParams p) {
  using Acc = Accumulator<T>;
  constexpr int kV = 1;
  constexpr int kTaps = kShortTaps;
  constexpr int kWindow = kSteps + kTaps - 1;
  __shared__ Acc shared[kTaps * kV * kNtcThreads];
  const Share share(p, kTaps);
  const TapRange taps = {0, p.taps};
  const Arrays<T> arrays(p, share.kept);
  const int lanes = p.ntc.lanes();
  const int lane = threadIdx.x & (lanes - 1);
  const int group = threadIdx.x >> p.ntc.lane_bits;
  const int groups = p.ntc.groups();
  const int channel = (share.channel_block * lanes + lane) * kV;
  const bool wants_dx = p.call.dx != nullptr;
  const bool wants_dbias = p.call.dbias != nullptr;

  Acc weight[kTaps][kV] = {};
  Acc dweight[kTaps][kV] = {};
  Acc dbias[1][kV] = {};
  if (channel < p.channels) {
    if (wants_dx) p.ReadWeights(weight, share.kept, channel);
#pragma unroll 1
    for (uint32_t index = share.split; index < p.items; index += p.splits.divisor()) {
      const Item item(p, index);
      const int step = (item.tile * groups + group) * kSteps;
      const int steps = PhaseSteps(p.time, p.dilation, item.phase) - step;
      if (steps <= 0) continue;
      const T* x = item.At(p, arrays.x, Backward::kX) + channel;
      const T* g = item.At(p, arrays.g, Backward::kG) + channel;
      const int first = item.phase + step * p.dilation;
      const int origin = first - p.mirrored;
      Pack<T, kV> window[kWindow];
      Pack<T, kV> own[kSteps];
      ReadSteps(window, g, origin, p.dilation, kSteps + p.taps - 1, p.time, p.channels);
      ReadSteps(own, x, first, p.dilation, kSteps, p.time, p.channels);
      const auto own_at = [&](int i, int v) { return Widen(own[i].values[v]); };
      const auto window_at = [&](int i, int v) { return Widen(window[i].values[v]); };
      const Inside inside(steps, origin, p.dilation, p.time);
      // Few warps are at an end of the sequence, and Correlate would cost all of them registers.
      if (inside.All(kSteps, kSteps + p.taps - 1)) {
        AddPairs<true, kSteps>(dweight, own_at, window_at, taps, inside);
      } else {
        AddPairs<false, kSteps>(dweight, own_at, window_at, taps, inside);
      }
      if (wants_dx) {
        T* dx = item.At(p, arrays.dx, Backward::kDx) + channel;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          if (i < steps) {
            Acc sums[kV] = {};
#pragma unroll
            for (int j = 0; j < kTaps; ++j) {
              if (j < p.taps) {
#pragma unroll
                for (int v = 0; v < kV; ++v) sums[v] += weight[j][v] * window_at(i + j, v);
              }
            }
            WriteStep<kV>(dx, sums, first + i * p.dilation, p.channels);
          }
        }
      }
      if (wants_dbias) {
        // Under dilation a step's own g need not be in the window; the cache still has it.
        ReadSteps(own, g, first, p.dilation, kSteps, p.time, p.channels);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
#pragma unroll
          for (int v = 0; v < kV; ++v) dbias[0][v] += own_at(i, v);
        }
      }
    }
  }
  Acc* partials = share.PartialSums<T>(p);
  const int first_channel = share.channel_block * lanes * kV;
  ReduceGroups(shared, dweight, lanes, [&](int j, int v, int lane, Acc sum) {
    const int channel = first_channel + lane * kV + v;
    if (j < p.taps && channel < p.channels) {
      partials[int64_t{p.taps - 1 - j} * p.channels + channel] = sum;
    }
  });
  if (wants_dbias) {
    ReduceGroups(shared, dbias, lanes, [&](int, int v, int lane, Acc sum) {
      const int channel = first_channel + lane * kV + v;
      if (channel < p.channels) partials[int64_t{p.taps} * p.channels + channel] = sum;
    });
  }
}

// A ring of items on their way from memory to those lanes of one warp that share a channel. A lane
// owns a pack of steps of x; its window of g is its own pack and the ones after it.
template <typename T, int kTaps, int kShift>
class NctRing {
 public:
  static constexpr int kPack = kPackElements<T>;
  static constexpr int kStages = 4;
  static constexpr int kWindow = kPack + kTaps - 1;

  struct Storage;

  __device__ __forceinline__ NctRing(Storage& storage, const NctTile& tile)
      : storage_(storage),
        lanes_(min(tile.threads_per_row(), kWarp)),
        lane_(threadIdx.x & (lanes_ - 1)),
        x_pack_(threadIdx.x % kWarp),
        g_pack_(x_pack_ < lanes_ ? x_pack_ : x_pack_ + kBeyond) {}

  // Starts to copy an item to a stage; t is the first step of this lane's pack of x. What lies
  // outside [0, time) arrives as zeros.
  __device__ __forceinline__ void Fetch(int stage, const T* x, const T* g, int t, int mirrored,
                                        int time) {
    const int base = t - mirrored - kSkip;
    Copy(&storage_.x[stage][x_pack_], lanes_, x, t, time);
    Copy(&storage_.g[stage][g_pack_], lanes_, g, base, time);
    if (lane_ < kBeyond) {
      Copy(&storage_.g[stage][g_pack_ + lanes_], kBeyond, g, base + lanes_ * kPack, time);
    }
  }

  template <typename Acc>
  __device__ __forceinline__ void Read(int stage, Acc (&window)[kWindow], Acc (&own)[kPack]) const {
    const Pack<T, kPack> x = storage_.x[stage][x_pack_];
#pragma unroll
    for (int i = 0; i < kPack; ++i) own[i] = Widen(x.values[i]);
    Pack<T, kPack> g[kBeyond + 1];
#pragma unroll
    for (int i = 0; i <= kBeyond; ++i) g[i] = storage_.g[stage][g_pack_ + i];
#pragma unroll
    for (int i = 0; i < kWindow; ++i) {
      window[i] = Widen(g[(i + kSkip) / kPack].values[(i + kSkip) % kPack]);
    }
  }

 private:
  static constexpr int kSkip = kShift == kUnaligned ? 0 : kShift;
  // Packs of a window after its first.
  static constexpr int kBeyond = (kSkip + kWindow - 1) / kPack;

  // The pack at step t of each of `lanes` neighbouring lanes.
  __device__ __forceinline__ void Copy(Pack<T, kPack>* to, int lanes, const T* row, int t,
                                       int time) {
    if constexpr (kShift != kUnaligned) {
      const bool inside = static_cast<unsigned>(t) < static_cast<unsigned>(time);
      __pipeline_memcpy_async(to, inside ? row + t : row, 16, inside ? 0 : 16);
    } else {
      // Neighbouring lanes copy neighbouring steps, not each its own pack.
      T* elements = (to - lane_)->values + lane_;
      const int first = t - lane_ * kPack + lane_;
#pragma unroll
      for (int e = 0; e < kPack; ++e) {
        const int step = first + e * lanes;
        const bool inside = static_cast<unsigned>(step) < static_cast<unsigned>(time);
        elements[e * lanes] = LoadIf<1>(inside, row + step, row).values[0];
      }
    }
  }

  Storage& storage_;
  int lanes_;   // lanes of a warp that share a channel: half of them at the least
  int lane_;    // among them
  int x_pack_;  // this lane's pack of x
  int g_pack_;  // the first pack of its window
};

template <typename T, int kTaps, int kShift>
struct NctRing<T, kTaps, kShift>::Storage {
  Pack<T, kPack> x[kStages][kWarp];
  Pack<T, kPack> g[kStages][kWarp + 2 * kBeyond];
};

// The taps of a block's rows, kTaps a row, in shared memory: read once a block, and as packs.
template <typename Acc, int kTaps>
class StagedTaps {
 public:
  // tap(channel, j) is the tap in place j; the block has to synchronise after this.
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
    constexpr int kPack = 16 / sizeof(Acc);
#pragma unroll
    for (int j = 0; j < kTaps; j += kPack) {
      const auto pack = LoadPack<kPack>(taps_ + row * kTaps + j);
#pragma unroll
      for (int e = 0; e < kPack; ++e) taps[j + e][0] = pack.values[e];
    }
  }

 private:
  alignas(16) Acc taps_[kNctMaxRows * kTaps];
};

// Blocks of a multiprocessor that leave registers for the sums and the window, but none to waste.
template <typename Acc, int kTaps>
constexpr int kWindowBlocks = sizeof(Acc) * kTaps <= 16   ? 8
                              : sizeof(Acc) * kTaps <= 32 ? 6
                                                          : 4;

// Filters whose window fits registers, with the input gradient, and groups of taps of longer ones.
template <typename T, int kTaps, int kShift>
__global__ void __launch_bounds__(kNctThreads, kWindowBlocks<Accumulator<T>, kTaps>)
    WindowNct(const __grid_constant__ BackwardParams p) {
  using Acc = Accumulator<T>;
  using Ring = NctRing<T, kTaps, kShift>;
  constexpr int kCount = kPackElements<T>;
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
  // Threads beyond the last channel keep their warp company.
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
    // Converted once, though every element meets several taps.
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
      // Long filters leave no registers to keep their taps in.
      if constexpr (kTaps > kShortTaps) staged.Read(weight, tile_row);
      Acc sums[kCount] = {};
      taps.ForEach<kTaps>([&](int j) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) sums[i] += weight[j][0] * window[i + j];
      });
      WriteRun<T, kCount, kShift != kUnaligned>(item.At(p, arrays.dx, Backward::kDx) + row, sums, t,
                                                time);
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

// --- long filters --------------------------------------------------------------------------------

// Two tiles are in shared memory: the next one arrives while the block works on the present one.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kNtcThreads)
    LongNtcBackward(const __grid_constant__ BackwardParams p) {
  using Acc = Accumulator<T>;
  constexpr int kV = kLaneChannels<T>;
  constexpr int kChannels = kBlockChannels<T>;
  constexpr int kTileSteps = kNtcWarps * kSteps;
  constexpr int kWindow = kSteps + kStagedTaps - 1;
  constexpr int kWindowRows = kTileSteps + kStagedTaps - 1;
  constexpr int kStageElements = (kWindowRows + kTileSteps) * kChannels;
  extern __shared__ __align__(16) unsigned char shared[];
  T* stages = reinterpret_cast<T*>(shared);

  const Share share(p, kStagedTaps);
  const Arrays<T> arrays(p, share.kept);
  const int taps = min(kStagedTaps, p.taps - share.first_tap);
  const int first_channel = share.channel_block * kChannels;
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int channel = first_channel + lane * kV;
  const bool wants_dbias = p.call.dbias != nullptr && share.first_tap == 0;

  const auto stage = [&](uint32_t index, int buffer) {
    if (index < p.items) {
      const Item item(p, index);
      const int first = item.phase + item.tile * kTileSteps * p.dilation;
      T* window = stages + buffer * kStageElements;
      StageRows<T, kAligned>(window, item.At(p, arrays.g, Backward::kG),
                             first + share.first_tap * p.dilation - p.mirrored, p.dilation,
                             kWindowRows, p.time, p.channels, first_channel);
      StageRows<T, kAligned>(window + kWindowRows * kChannels, item.At(p, arrays.x, Backward::kX),
                             first, p.dilation, kTileSteps, p.time, p.channels, first_channel);
    }
    __pipeline_commit();
  };

  Acc dweight[kStagedTaps][kV] = {};
  Acc dbias[1][kV] = {};
  stage(share.split, 0);
  int buffer = 0;
#pragma unroll 1
  for (uint32_t index = share.split; index < p.items; index += p.splits.divisor(), buffer ^= 1) {
    stage(index + p.splits.divisor(), buffer ^ 1);
    __pipeline_wait_prior(1);
    __syncthreads();
    const Item item(p, index);
    const T* rows = stages + buffer * kStageElements;
    const int step = item.tile * kTileSteps + warp * kSteps;
    const int first = item.phase + step * p.dilation;
    const int steps = PhaseSteps(p.time, p.dilation, item.phase) - step;
    Acc window[kWindow][kV], own[kSteps][kV];
#pragma unroll
    for (int i = 0; i < kWindow; ++i) ReadRow<T>(window[i], rows, warp * kSteps + i);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) ReadRow<T>(own[i], rows, kWindowRows + warp * kSteps + i);
    const auto own_at = [&](int i, int v) { return own[i][v]; };
    const auto window_at = [&](int i, int v) { return window[i][v]; };
    Correlate<kSteps>(
        dweight, own_at, window_at, TapRange{0, taps},
        Inside(steps, first + share.first_tap * p.dilation - p.mirrored, p.dilation, p.time));
    if (wants_dbias) {
      const T* g = item.At(p, arrays.g, Backward::kG);
      for (int i = 0; i < min(steps, kSteps); ++i) {
        const int64_t at = int64_t{first + i * p.dilation} * p.channels + channel;
#pragma unroll
        for (int v = 0; v < kV; ++v) {
          if (channel + v < p.channels) dbias[0][v] += Widen(g[at + v]);
        }
      }
    }
    __syncthreads();
  }

  __pipeline_wait_prior(0);
  Acc* sums = reinterpret_cast<Acc*>(shared);
  Acc* partials = share.PartialSums<T>(p);
  ReduceGroups(sums, dweight, kWarp, [&](int j, int v, int lane, Acc sum) {
    const int channel = first_channel + lane * kV + v;
    if (j < taps && channel < p.channels) {
      partials[int64_t{p.taps - 1 - share.first_tap - j} * p.channels + channel] = sum;
    }
  });
  if (wants_dbias) {
    ReduceGroups(sums, dbias, kWarp, [&](int, int v, int lane, Acc sum) {
      const int channel = first_channel + lane * kV + v;
      if (channel < p.channels) partials[int64_t{p.taps} * p.channels + channel] = sum;
    });
  }
}

// Dilated too far for tiles in shared memory: neighbouring threads take neighbouring steps and read
// g through the cache.
template <typename T>
__global__ void __launch_bounds__(kNctThreads)
    DilatedNctBackward(const __grid_constant__ BackwardParams p) {
  using Acc = Accumulator<T>;
  const Share share(p, kStagedTaps);
  const Arrays<T> arrays(p, share.kept);
  const int taps = min(kStagedTaps, p.taps - share.first_tap);
  const int row_threads = p.nct.threads_per_row();
  const int first_channel = share.channel_block * p.nct.rows();
  const int lane = threadIdx.x & (row_threads - 1);
  const int channel = first_channel + (threadIdx.x >> p.nct.row_bits);
  const int row_time = channel < p.channels ? p.time : 0;
  const int64_t row = row_time == 0 ? 0 : int64_t{channel} * p.time;
  const bool wants_dbias = p.call.dbias != nullptr && share.first_tap == 0;

  Acc dweight[kStagedTaps][1] = {};
  Acc dbias[1][1] = {};
#pragma unroll 1
  for (uint32_t index = share.split; index < p.items; index += p.splits.divisor()) {
    const Item item(p, index);
    const T* g = item.At(p, arrays.g, Backward::kG) + row;
    const T* x = item.At(p, arrays.x, Backward::kX) + row;
    for (int i = 0; i < kRun; ++i) {
      const int step = (item.tile * kRun + i) * row_threads + lane;
      if (step >= row_time) break;
      const Acc own = Widen(x[step]);
#pragma unroll
      for (int j = 0; j < kStagedTaps; ++j) {
        const int t = step + (share.first_tap + j) * p.dilation - p.mirrored;
        if (j < taps && static_cast<unsigned>(t) < static_cast<unsigned>(p.time)) {
          dweight[j][0] += own * Widen(g[t]);
        }
      }
      if (wants_dbias) dbias[0][0] += Widen(g[step]);
    }
  }
  Acc* partials = share.PartialSums<T>(p);
  ReduceRows(dweight, p.nct.row_bits, [&](int j, int row, Acc sum) {
    if (j < taps && first_channel + row < p.channels) {
      partials[int64_t{p.taps - 1 - share.first_tap - j} * p.channels + first_channel + row] = sum;
    }
  });
  if (wants_dbias) {
    ReduceRows(dbias, p.nct.row_bits, [&](int, int row, Acc sum) {
      if (first_channel + row < p.channels) {
        partials[int64_t{p.taps} * p.channels + first_channel + row] = sum;
      }
    });
  }
}

// --- the sum of the partial sums -----------------------------------------------------------------

struct AddParams {
  const void* partials;
  void *dweight, *dbias;
  int splits, taps, heads, channels;
  int row;  // sums of a head that are side by side
  DType weight_dtype, bias_dtype;
  FastDivider row_divider;
  int64_t kept;
};

// Adds kWarp neighbouring entries of dweight for one tap, or of dbias, whose splits a block's warps
// share out; if kDeep is set, one entry of dweight, which has many sums. The grid is over columns,
// over taps and last the bias, and over kept entries.
template <typename Acc, bool kDeep>
__global__ void __launch_bounds__(kNtcThreads) AddPartials(const __grid_constant__ AddParams p) {
  constexpr int kBatch = 8;  // loads of a thread that are in flight together
  __shared__ Acc shared[kNtcThreads];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int64_t split_size = int64_t{p.taps + 1} * p.channels;
  for (int64_t kept = blockIdx.z; kept < p.kept; kept += gridDim.z) {
    for (int tap = blockIdx.y; tap < p.taps + (p.dbias != nullptr); tap += gridDim.y) {
      const bool is_weight = tap < p.taps;
      const bool deep = kDeep && is_weight;
      const int width = is_weight ? p.heads : p.channels;
      const int row = is_weight ? p.row : 1;
      const int first_column = deep ? blockIdx.x : blockIdx.x * kWarp;
      if (first_column >= width) continue;
      const int column = deep ? first_column : first_column + lane;
      const Acc* first = static_cast<const Acc*>(p.partials) + kept * p.splits * split_size +
                         int64_t{tap} * p.channels + int64_t{column} * row;
      Acc total = 0;
      if (deep) {
        const uint32_t count = static_cast<uint32_t>(row) * p.splits;
        for (uint32_t i = threadIdx.x; i < count; i += kBatch * kNtcThreads) {
          Acc values[kBatch];
#pragma unroll
          for (int b = 0; b < kBatch; ++b) {
            uint32_t split = i + b * kNtcThreads;
            const bool exists = split < count;
            const int at = p.row_divider.Peel(split);
            values[b] = exists ? first[split * split_size + at] : Acc(0);
          }
#pragma unroll
          for (int b = 0; b < kBatch; ++b) total += values[b];
        }
      } else if (column < width) {
        for (int i = 0; i < row; ++i) {
          for (int split = warp; split < p.splits; split += kBatch * kNtcWarps) {
            Acc values[kBatch];
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
              const int other = split + b * kNtcWarps;
              values[b] = other < p.splits ? first[other * split_size + i] : Acc(0);
            }
#pragma unroll
            for (int b = 0; b < kBatch; ++b) total += values[b];
          }
        }
      }
      __syncthreads();
      shared[threadIdx.x] = total;
      __syncthreads();
      if (warp > 0) continue;
      total = 0;
#pragma unroll
      for (int w = 0; w < kNtcWarps; ++w) total += shared[w * kWarp + lane];
      if (deep) {
#pragma unroll
        for (int distance = kWarp / 2; distance > 0; distance /= 2) {
          total += __shfl_xor_sync(0xffffffff, total, distance);
        }
        if (lane > 0) continue;
      }
      if (column >= width) continue;
      if (is_weight) {
        StoreAs(p.dweight, (kept * p.heads + column) * p.taps + tap, p.weight_dtype, total);
      } else {
        StoreAs(p.dbias, kept * p.channels + column, p.bias_dtype, total);
      }
    }
  }
}

// --- launches ------------------------------------------------------------------------------------

template <typename T>
cudaError_t LaunchUnpackedNtc(cudaStream_t stream, const Backward& call, int64_t splits,
                              void* partials) {
  BackwardParams params(call, splits, partials, 1, 1);
  const int64_t blocks = params.Cut(
      PhaseSteps(params.time, params.dilation, 0), std::min(params.dilation, params.time),
      int64_t{kSteps} * params.ntc.groups(), params.ntc.lanes(), kShortTaps);
  return Launch(UnpackedNtcBackward<T>, blocks, kNtcThreads, 0, stream, params);
}

template <typename T>
cudaError_t LaunchNtc(cudaStream_t stream, const Backward& call, int64_t splits, void* partials) {
  const Geometry& g = call.geometry;
  if (g.taps <= kShortTaps) {
    // Packs of 4 bytes fit all others.
    if constexpr (sizeof(T) == 2) return LaunchUnpackedNtc<T>(stream, call, splits, partials);
    return cudaErrorInvalidValue;
  }
  BackwardParams params(call, splits, partials, 1, 1);
  constexpr int kTileSteps = kNtcWarps * kSteps;
  const int64_t blocks = params.Cut(PhaseSteps(params.time, params.dilation, 0),
                                    std::min(params.dilation, params.time), kTileSteps,
                                    kBlockChannels<T>, kStagedTaps);
  const size_t stages = 2 * (2 * kTileSteps + kStagedTaps - 1) * kBlockChannels<T> * sizeof(T);
  const size_t sums = kStagedTaps * kLaneChannels<T> * kNtcThreads * sizeof(Accumulator<T>);
  return DispatchBool(RowsAligned(g.channels, call.dtype, 16), [&](auto aligned) {
    return Launch(LongNtcBackward<T, aligned.value>, blocks, kNtcThreads, std::max(stages, sums),
                  stream, params);
  });
}

// Empty taps at the front of a long filter that move its windows to the beginning of a pack: fewer
// kernels to compile than one for every shift.
template <typename T>
int Lead(const Backward& call) {
  const Geometry& g = call.geometry;
  return g.taps <= kShortTaps ? 0 : std::max(0, WindowShift<T>(g.time, call.dtype, Mirrored(g)));
}

template <typename T, int kTaps>
cudaError_t LaunchWindowNct(cudaStream_t stream, const Backward& call, int64_t* splits,
                            void* partials) {
  const Geometry& g = call.geometry;
  const NctTile tile(g.time, kPackElements<T>);
  // Channels that keep the device busy need not be split, and then, each with a filter of its own,
  // nobody to add their sums. With more taps fewer blocks run at once, and more of them even out.
  const int64_t busy = call.kept.size() * CeilDiv(g.channels, tile.rows());
  if (kTaps <= 4 && busy >= kBusyBlocks) *splits = 1;
  BackwardParams params(call, *splits, partials, 1, kPackElements<T>);
  params.lead = Lead<T>(call);
  params.whole = *splits == 1 && g.channels == g.heads;
  if (params.whole) *splits = 0;
  const int64_t blocks =
      params.Cut(params.time, 1, int64_t{kPackElements<T>} * params.nct.threads_per_row(),
                 params.nct.rows(), kTaps);
  const auto launch = [&](auto shift) {
    return Launch(WindowNct<T, kTaps, shift.value>, blocks, kNctThreads, 0, stream, params);
  };
  const int shift = WindowShift<T>(params.time, call.dtype, params.mirrored);
  if constexpr (kTaps <= kShortTaps) {
    return DispatchShift<T>(shift, launch);
  } else {
    return shift == kUnaligned ? launch(std::integral_constant<int, kUnaligned>{})
                               : launch(std::integral_constant<int, 0>{});
  }
}

template <typename T>
cudaError_t LaunchDilatedNct(cudaStream_t stream, const Backward& call, int64_t splits,
                             void* partials) {
  BackwardParams params(call, splits, partials, 1, kRun);
  const int64_t blocks = params.Cut(params.time, 1, int64_t{kRun} * params.nct.threads_per_row(),
                                    params.nct.rows(), kStagedTaps);
  return Launch(DilatedNctBackward<T>, blocks, kNctThreads, 0, stream, params);
}

template <typename T>
cudaError_t LaunchNct(cudaStream_t stream, const Backward& call, int64_t* splits, void* partials) {
  const Geometry& g = call.geometry;
  if (ServesNct(call)) return LaunchServedNct(stream, call, splits, partials);
  if (g.dilation > 1) return LaunchDilatedNct<T>(stream, call, *splits, partials);
  if (g.taps <= 4) return LaunchWindowNct<T, 4>(stream, call, splits, partials);
  if (g.taps <= kShortTaps) return LaunchWindowNct<T, kShortTaps>(stream, call, splits, partials);
  if (Lead<T>(call) + g.taps <= 16) return LaunchWindowNct<T, 16>(stream, call, splits, partials);
  return LaunchWindowNct<T, kWindowTaps<T>>(stream, call, splits, partials);
}

// Whether the kernel that makes the filter gradient makes the input gradient too.
template <typename T>
bool SharesKernel(const Backward& call) {
  const Geometry& g = call.geometry;
  if (g.data_format == DataFormat::kNTC) return g.taps <= kShortTaps;
  if (ServesNct(call)) return MakesInputGradNct(call);
  return g.dilation == 1 && Lead<T>(call) + g.taps <= kWindowTaps<T>;
}

template <typename T>
cudaError_t LaunchAddPartials(cudaStream_t stream, const Backward& call,
                              const PartialSums& partials) {
  const Geometry& g = call.geometry;
  AddParams params{};
  params.partials = partials.sums;
  params.dweight = call.dweight;
  params.dbias = call.dbias;
  params.splits = static_cast<int>(partials.splits);
  params.taps = static_cast<int>(g.taps);
  params.heads = static_cast<int>(g.heads);
  params.channels = static_cast<int>(g.channels);
  params.row = static_cast<int>(g.channels / g.heads / partials.channels);
  params.row_divider = FastDivider(params.row);
  params.weight_dtype = call.weight_dtype;
  params.bias_dtype = call.bias_dtype;
  params.kept = call.kept.size();
  const bool deep = params.row >= 8 && params.row * partials.splits <= INT32_MAX;
  const int64_t biases = call.dbias == nullptr ? 0 : CeilDiv(g.channels, kWarp);
  const dim3 grid(
      static_cast<unsigned>(std::max(deep ? g.heads : CeilDiv(g.heads, kWarp), biases)),
      static_cast<unsigned>(std::min(kMostGridBlocks, g.taps + (call.dbias != nullptr))),
      static_cast<unsigned>(std::min(kMostGridBlocks, params.kept)));
  if (deep) {
    AddPartials<Accumulator<T>, true><<<grid, kNtcThreads, 0, stream>>>(params);
  } else {
    AddPartials<Accumulator<T>, false><<<grid, kNtcThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

// The input gradient as a forward convolution of g over every batch entry.
cudaError_t LaunchInputGrad(cudaStream_t stream, const Backward& call) {
  Forward forward{};
  forward.geometry = call.geometry;
  forward.geometry.padding = Mirrored(call.geometry);
  // The order of the entries does not matter, so kept and summed ones follow each other.
  const std::array<int, Forward::kOperands> operands = {Backward::kG, Backward::kWeight,
                                                        Backward::kWeight, Backward::kDx};
  if (!forward.batch.AppendFrom(call.kept, operands) ||
      !forward.batch.AppendFrom(call.summed, operands)) {
    return cudaErrorInvalidValue;
  }
  forward.dtype = call.dtype;
  forward.weight_dtype = call.weight_dtype;
  forward.bias_dtype = call.weight_dtype;
  forward.activation = Activation::kNone;
  forward.flip_taps = true;
  forward.x = call.g;
  forward.weight = call.weight;
  forward.bias = nullptr;
  forward.y = call.dx;
  return LaunchForward(stream, forward);
}

}  // namespace

cudaError_t LaunchBackward(cudaStream_t stream, const Backward& call, int64_t splits,
                           void* partials) {
  const Geometry& g = call.geometry;
  const int64_t kept = call.kept.size();
  if (kept == 0) return cudaSuccess;
  if (call.summed.size() == 0 || g.time == 0 || g.channels == 0) {
    const int64_t weights = kept * g.heads * g.taps * jaxops::cuda::SizeOf(call.weight_dtype);
    const cudaError_t error = cudaMemsetAsync(call.dweight, 0, weights, stream);
    if (error != cudaSuccess || call.dbias == nullptr) return error;
    const int64_t biases = kept * g.channels * jaxops::cuda::SizeOf(call.bias_dtype);
    return cudaMemsetAsync(call.dbias, 0, biases, stream);
  }
  if (!FitsKernels(g)) return cudaErrorInvalidValue;
  if (TakesMma(call)) {
    if (call.dx != nullptr && !MmaMakesInputGrad(call)) {
      const cudaError_t error = LaunchInputGrad(stream, call);
      if (error != cudaSuccess) return error;
    }
    return LaunchBackwardMma(stream, call, splits, partials);
  }
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    if (call.dx != nullptr && !SharesKernel<T>(call)) {
      const cudaError_t error = LaunchInputGrad(stream, call);
      if (error != cudaSuccess) return error;
    }
    PartialSums sums = {partials, splits};
    const cudaError_t error = g.data_format == DataFormat::kNCT
                                  ? LaunchNct<T>(stream, call, &sums.splits, partials)
                              : TakesShortNtc(call) ? LaunchShortNtc(stream, call, sums)
                                                    : LaunchNtc<T>(stream, call, splits, partials);
    return error != cudaSuccess || sums.splits == 0 ? error
                                                    : LaunchAddPartials<T>(stream, call, sums);
  });
}

}  // namespace jaxops::lightweight_conv::cuda
