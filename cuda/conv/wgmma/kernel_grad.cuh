// Code that the kernels of the kernel gradient on Hopper share: how blocks share out the sums, how
// pixels are cut into runs, and how the blocks of a cluster add their sums.
#ifndef JAXOPS_CUDA_CONV_WGMMA_KERNEL_GRAD_CUH_
#define JAXOPS_CUDA_CONV_WGMMA_KERNEL_GRAD_CUH_

#include <cfloat>

#include "cuda/conv/tiles.cuh"

namespace jaxops::conv::cuda::kernel_grad {

constexpr int kWarpgroups = 3;  // warpgroups that multiply
// A unit is a block of 64 rows of the product; a warpgroup has at most kMaxUnits of them. A unit is
// 64, 32 or 16 channels of 1, 2 or 4 taps, so that a warp always has one tap.
constexpr int kMaxUnits = 3;
constexpr int kBlockUnits = kWarpgroups * kMaxUnits;
constexpr int kColumns = 64;  // outputs of a block
// Rows of a stage have at most 128 bytes; further channels or outputs are in a plane of their own.
constexpr int kRowBytes = 128;
template <typename T>
constexpr int kColumnPlanes = kColumns * sizeof(T) / kRowBytes;
template <typename T>
constexpr int kStepPixels = 32 / sizeof(T);  // pixels that an instruction sums over
// These warps transpose cotangents of float32.
constexpr int kTransposers = 3;
// A stage has at most kPixels pixels and kMaxStageRows rows: one lane of the warp that copies
// handles each row.
constexpr int kPixels = 128;
constexpr int kMaxStageRows = 32;

constexpr int kBarrierBytes = 1024 - 128;
constexpr int kZeroBytes = 128;
constexpr int kTableBytes = kMaxStages * kPixels * 4;
constexpr int kHeadBytes = kBarrierBytes + kZeroBytes + kTableBytes;
static_assert(kHeadBytes % 1024 == 0);
constexpr int kStagesBytes = kSharedBytes - kHeadBytes - 1024;  // less the alignment of the stages
// The sums of a block take the place of the stages.
static_assert(kBlockUnits * 64 * (kColumns + 8) * 4 <= kStagesBytes);

// A phase of runs with strides: the entries of the image that are whole strides apart from each
// other are an image without strides. A tap finds all of its entries in one phase.
struct Phase {
  int32_t in_row, in_column;  // the first entry of the image
  int32_t row, column;   // of the phase, relative to the set: where a stage of the phase begins
  int32_t rows;          // of a stage
  int32_t begin, bytes;  // in a stage; bytes that are copied
};
constexpr int kMaxPhases = 4;

struct Params : Layout {
  CUtensorMap image_map[kMaxPhases];
  CUtensorMap cotangent_map;
  void* result;  // of each cluster's part, one after the other, or of the whole sum
  int channels, outputs;
  int block, planes, plane_bytes;  // channels of a block; planes of them in a stage
  int64_t size;                    // entries of the result
  int channel_blocks, column_tiles, sets;
  int splits, cluster;                     // of an item; splits of a cluster
  int stages;                              // total number; the pixels of a stage:
  int stage_rows, stage_pixels, steps;     // rows of pixels, all pixels, and steps
  int image_stage, cotangent_stage, ring;  // bytes of the parts of a stage; stages held
  int image_bytes, cotangent_bytes;        // bytes of these parts that copies write
  bool is_wide;                            // the result is f32
  bool has_runs;                           // stages are runs:
  FastDivider runs;                        // runs of a strip
  int last_steps;                          // of the last run of a strip
  int run_columns;                         // entries of a row of a stage
  int phases;
  Phase phase[kMaxPhases];
  const void* image;  // for runs, which search for entries that are not finite
  const void* cotangent;
  int image_rows, image_columns, row_low, column_low, row_dilation, column_dilation, tap_columns;
  Group set[kMaxTaps];    // taps that a block sums for
  int32_t tap[kMaxTaps];  // bytes from the entry of the set's lowest row and column, in a stage
  FastDivider columns_of_row;  // run_columns as a divisor
};

// The sums of one block.
struct Item {
  Group set;
  int channel, column;  // the first of the block
  int rank, part;       // the rank in the cluster; the part of the cluster
  int begin, end;       // stages

  __device__ explicit Item(const Params& p) {
    // Neighbouring blocks share pixels, which they then find in the L2 cache.
    const int items = p.channel_blocks * p.column_tiles * p.sets;
    rank = blockIdx.x % p.cluster;
    int item = blockIdx.x / p.cluster;
    part = item / items;
    item -= part * items;
    const int split = part * p.cluster + rank;
    set = p.set[item % p.sets];
    item /= p.sets;
    channel = item % p.channel_blocks * p.block;
    column = item / p.channel_blocks * kColumns;
    begin = static_cast<int>(int64_t{p.stages} * split / p.splits);
    end = static_cast<int>(int64_t{p.stages} * (split + 1) / p.splits);
  }

#if JAXOPS_HAS_WGMMA
  // Returns the number of blocks of 64 rows of the product.
  __device__ int Units(const Params& p) const {
    return ((set.end - set.begin) * p.block + 63) / 64;
  }
#endif
};

// Makes the compiler keep a value in a register instead of computing it again for every use.
[[maybe_unused]] __device__ inline void Keep(uint32_t& value) { asm volatile("" : "+r"(value)); }

// Releases a stage that all lanes of the warp have read.
[[maybe_unused]] __device__ inline void Release(uint64_t* empty) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty);
}

// Returns where a block stores an entry of its sums. Rows are padded so that the entries that a
// warp writes at once are in different banks.
template <bool kRuns>
__device__ int SumBytes(int row, int column) {
  return row * (kColumns * 4 + (kRuns ? 16 : 32)) + column * 4;
}

// Adds the sums of the 1, 2, 4 or 8 blocks of a cluster and writes the result; returns whether the
// sums that this thread wrote are finite. Each block does so for some of the rows, in the order of
// the ranks from its own rank on, so that no two blocks read from one block at a time.
template <typename T, bool kRuns, int kThreads = 128 * kWarpgroups>
__device__ bool AddCluster(const Params& p, const Item& item, int units, const char* sums) {
  const uint32_t address = SharedAddress(sums);
  constexpr int kTogether = 4;  // rows of a thread whose entries are in flight at once
  constexpr int kApart = kThreads / (kColumns / 4);
  const int channels = p.block;
  const int thread = threadIdx.x - (blockDim.x - kThreads);
  const int column = thread % (kColumns / 4) * 4;
  const int output = item.column + column;
  const int end = units * 64 * (item.rank + 1) / p.cluster;
  bool are_finite = true;
  for (int begin = units * 64 * item.rank / p.cluster + thread / (kColumns / 4); begin < end;
       begin += kTogether * kApart) {
    // A block reads its own sums faster with plain shared addresses than with addresses of the
    // cluster.
    float4 sum[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      // Rows after the last repeat it, and are not stored.
      const int row = min(begin + i * kApart, end - 1);
      sum[i] = *reinterpret_cast<const float4*>(sums + SumBytes<kRuns>(row, column));
    }
#pragma unroll 2
    for (int k = 1; k < p.cluster; ++k) {
      const int rank = (item.rank + k) & (p.cluster - 1);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int row = min(begin + i * kApart, end - 1);
        sum[i] = Add(sum[i], LoadOfBlock(address + SumBytes<kRuns>(row, column), rank));
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int row = begin + i * kApart;
      const int tap = item.set.begin + row / channels;
      const int channel = item.channel + row % channels;
      if (row >= end || tap >= item.set.end || channel >= p.channels || output >= p.outputs)
        continue;
      const int64_t offset =
          item.part * p.size + (int64_t{tap} * p.channels + channel) * p.outputs + output;
      are_finite &= fabsf(sum[i].x) <= FLT_MAX && fabsf(sum[i].y) <= FLT_MAX &&
                    fabsf(sum[i].z) <= FLT_MAX && fabsf(sum[i].w) <= FLT_MAX;
      if (p.is_wide) {
        Store(static_cast<float*>(p.result) + offset, sum[i]);
      } else {
        Store(static_cast<T*>(p.result) + offset, sum[i]);
      }
    }
  }
  return are_finite;
}

// --- plans and launches on the host --------------------------------------------------------------

// Fills in the smallest possible number of sets, with about the same number of taps each.
inline void FillSets(Params& p, const Tap* tap, int taps, int row_taps, Grouping grouping) {
  const int block = p.block;
  const int most = grouping == Grouping::kAll ? taps : grouping == Grouping::kRow ? row_taps : 1;
  const int64_t units = CeilDiv(most * block, 64);
  const int64_t parts = CeilDiv(units, kBlockUnits);
  const int64_t per_set = std::min<int64_t>(most, CeilDiv(units, parts) * (64 / block));
  p.sets = FillGroups(p.set, tap, taps, grouping, per_set);
}

// Returns the units of the largest set.
inline int64_t Units(const Params& p) {
  int64_t units = 1;
  for (int s = 0; s < p.sets; ++s) {
    units = std::max(units, CeilDiv((p.set[s].end - p.set[s].begin) * p.block, 64));
  }
  return units;
}

// The cost of clusters of a size, measured on an H200.
struct ClusterCost {
  int size;
  // Clusters of this size reach `reached` of every 11 processors at once: clusters of 4 and 8 reach
  // 120 of 132.
  int reached;
  int unit_cycles;  // to add a unit of the blocks' sums, in each other's shared memory
};
constexpr ClusterCost kClusters[] = {{1, 11, 0}, {2, 11, 50}, {4, 10, 650}, {8, 10, 1200}};

// Decides on the clusters and splits that finish first, and returns when, in estimated cycles: of
// stages, of a block's other work, and of writing and adding the parts of several clusters. The
// last stage of a strip's runs takes `last_less` cycles less. The function returns INT64_MAX where
// no choice finishes before `limit`, which usually is known without a search.
inline int64_t Split(Params& p, int processors, int64_t stage_cycles, int64_t last_less,
                     int64_t limit) {
  constexpr int64_t kBlockCycles = 6000, kFirstBytesPerCycle = 24, kAddCycles = 4000,
                    kAddedPerCycle = 500;
  const int64_t items = int64_t{p.channel_blocks} * p.column_tiles * p.sets;
  const int64_t units = Units(p);
  const int64_t first_cycles =
      kBlockCycles + (p.image_bytes + p.cotangent_bytes) / kFirstBytesPerCycle;
  // This bound counts the cycles of all stages, as if no processor waited for others.
  const double all_cycles =
      static_cast<double>(p.stages * stage_cycles - p.stages / p.runs.divisor() * last_less);
  if (items * all_cycles / processors + first_cycles >= static_cast<double>(limit)) {
    return INT64_MAX;
  }
  int64_t least = limit;
  for (const ClusterCost& cluster : kClusters) {
    const int64_t blocks = std::max(1, processors * cluster.reached / 11);
    const int64_t block_cycles = first_cycles + units * cluster.unit_cycles;
    // The candidates are the number of splits that fills some waves, and fewer splits that finish
    // as soon.
    int64_t last = 0;
    for (int waves = 0; waves <= 4; ++waves) {
      const int64_t most =
          std::min<int64_t>(p.stages, std::max<int64_t>(1, blocks * waves / items));
      if (most < cluster.size || most == last) continue;
      last = most;
      const int64_t full = most / cluster.size * cluster.size;
      const int64_t parts = CeilDiv(CeilDiv(p.stages, CeilDiv(p.stages, full)), cluster.size);
      const int64_t splits = parts * cluster.size;
      const int64_t stages = CeilDiv(p.stages, splits);
      const int64_t sum_cycles = stages * stage_cycles - stages / p.runs.divisor() * last_less;
      const int64_t cost = CeilDiv(items * splits, blocks) * (sum_cycles + block_cycles) +
                           (parts > 1 ? kAddCycles + parts * p.size / kAddedPerCycle : 0);
      if (cost < least) {
        p.splits = static_cast<int>(splits);
        p.cluster = cluster.size;
        least = cost;
      }
    }
  }
  return least < limit ? least : INT64_MAX;
}

// Returns the rows and columns that the taps of a set in a phase span.
inline Span SpanOf(const Params& p, const Tap* tap, const int* phase_of, int phase, int set) {
  Span span;
  for (int t = p.set[set].begin; t < p.set[set].end; ++t) {
    if (phase_of[t] != phase) continue;
    span.rows = std::max(span.rows, tap[t].row - p.set[set].row - p.phase[phase].row + 1);
    span.columns =
        std::max(span.columns, tap[t].column - p.set[set].column - p.phase[phase].column + 1);
  }
  return span;
}

// Bounds that hold for the runs of any set.
struct RunSpans {
  Span most[kMaxPhases];  // the maximum of rows, and the maximum of columns
  int64_t columns = 1;    // the maximum of all phases
  int64_t of_whole_rows;  // from one row to the next where a strip is a whole row
};

// An entry after a row and an entry before the next row can be the same, if both are always
// padding.
inline RunSpans RunSpansOf(const Params& p, const Call& call, const Tap* tap, const int* phase_of) {
  const im2col::Window& w = call.dims[1];
  RunSpans spans;
  spans.of_whole_rows = w.out;
  for (int i = 0; i < p.phases; ++i) {
    const int64_t in = CeilDiv(w.in - p.phase[i].in_column, p.stride_column);
    Span& most = spans.most[i];
    for (int k = 0; k < p.sets; ++k) {
      const Span span = SpanOf(p, tap, phase_of, i, k);
      const int64_t before = std::max(0, -p.set[k].column - p.phase[i].column);
      const int64_t apart = w.out + span.columns - 1;
      spans.of_whole_rows =
          std::max({spans.of_whole_rows, apart - before, std::min(apart, in + before)});
      most = {std::max(most.rows, span.rows), std::max(most.columns, span.columns)};
    }
    spans.columns = std::max(spans.columns, most.columns);
  }
  return spans;
}

// Returns the distance from one row of a run to the next, in entries, for strips of this width.
inline int64_t RunColumns(const RunSpans& spans, const Call& call, int64_t width) {
  return width == call.dims[1].out ? spans.of_whole_rows : width + spans.columns - 1;
}

// Fills in where the entries of each tap begin in a stage of runs.
inline void PlaceTaps(Params& p, const Tap* tap, const int* phase_of) {
  for (int s = 0; s < p.sets; ++s) {
    for (int t = p.set[s].begin; t < p.set[s].end; ++t) {
      const Phase& phase = p.phase[phase_of[t]];
      const int64_t row = tap[t].row - p.set[s].row - phase.row;
      const int64_t column = tap[t].column - p.set[s].column - phase.column;
      p.tap[t] = static_cast<int32_t>(phase.begin + (row * p.run_columns + column) * kRowBytes);
    }
  }
}

// Finds the phases, and the phase and the position in the phase of each tap; returns false where
// runs cannot be used.
inline bool FillPhases(Params& p, const Call& call, const Tap* all_taps, int taps, Tap* tap,
                       int* phase_of) {
  if (p.stride_row * p.stride_column > kMaxPhases) return false;
  const int strides[kDims] = {p.stride_row, p.stride_column};
  for (int d = 0; d < kDims; ++d) {
    const im2col::Window& window = call.dims[d];
    if (window.taps > 1 && window.out < window.dilation) return false;
    if (strides[d] > 1 && window.dilation > 1) return false;
  }
  p.phases = 0;
  for (int t = 0; t < taps; ++t) {
    const int64_t in_row = (all_taps[t].row % p.stride_row + p.stride_row) % p.stride_row;
    const int64_t in_column =
        (all_taps[t].column % p.stride_column + p.stride_column) % p.stride_column;
    if (in_row >= call.dims[0].in || in_column >= call.dims[1].in) return false;
    int i = 0;
    while (i < p.phases && (p.phase[i].in_row != in_row || p.phase[i].in_column != in_column)) ++i;
    if (i == p.phases) {
      p.phase[p.phases++] = {static_cast<int32_t>(in_row), static_cast<int32_t>(in_column)};
    }
    phase_of[t] = i;
    tap[t] = {(all_taps[t].row - in_row) / p.stride_row,
              (all_taps[t].column - in_column) / p.stride_column, all_taps[t].matrix};
  }
  // Every entry that is copied must be in some window, because the entry is multiplied by zeros.
  for (int i = 0; i < p.phases; ++i) {
    int64_t row = INT32_MIN, column = INT32_MIN;
    for (int t = 0; t < taps; ++t) {
      if (phase_of[t] != i) continue;
      row = std::max(row, tap[t].row);
      column = std::max(column, tap[t].column);
    }
    const im2col::Window& h = call.dims[0];
    const im2col::Window& w = call.dims[1];
    if (h.out + row < CeilDiv(h.in - p.phase[i].in_row, p.stride_row) ||
        w.out + column < CeilDiv(w.in - p.phase[i].in_column, p.stride_column)) {
      return false;
    }
  }
  return true;
}

// Finds where stages of phases begin. Several phases have one set, and their stages begin at the
// first of their taps.
inline void PlacePhases(Params& p, const Tap* tap, int taps, const int* phase_of) {
  for (int i = 0; i < p.phases; ++i) {
    Phase& phase = p.phase[i];
    phase.row = phase.column = 0;
    if (p.phases == 1) return;
    phase.row = phase.column = INT32_MAX;
    for (int t = 0; t < taps; ++t) {
      if (phase_of[t] != i) continue;
      phase.row = std::min<int>(phase.row, tap[t].row - p.set[0].row);
      phase.column = std::min<int>(phase.column, tap[t].column - p.set[0].column);
    }
  }
}

}  // namespace jaxops::conv::cuda::kernel_grad

#endif  // JAXOPS_CUDA_CONV_WGMMA_KERNEL_GRAD_CUH_
