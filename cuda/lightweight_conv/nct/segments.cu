// These kernels compute lightweight convolution in the NCT layout on segments of memory. A tile is
// a segment of one row, or several whole rows if they are short. Rows are contiguous in memory, so
// that a tile and the steps that its taps read are one segment, which is copied to shared memory
// and from there in aligned vectors for any length of a row. A thread computes parts of the tile,
// whose steps are `dilation` apart: their inputs are as far apart, and are read once for all taps.
#include "cuda/common/activation.cuh"
#include "cuda/common/async_copy.cuh"
#include "cuda/lightweight_conv/families.h"
#include "cuda/lightweight_conv/filters.cuh"
#include "cuda/lightweight_conv/nct/taps.cuh"

namespace jaxops::lightweight_conv::cuda::nct {
namespace {

using jaxops::cuda::Activate;
using jaxops::cuda::CommitCopies;
using jaxops::cuda::CopyAsyncPast;
using jaxops::cuda::kSharedOptInLimit;
using jaxops::cuda::SharedAddress;
using jaxops::cuda::StoreVector;
using jaxops::cuda::WaitCopies;

// A part has this number of steps, with which the parts of neighbouring threads lie in different
// banks for any dilation.
template <typename T>
constexpr int kPartSteps = sizeof(T) == 2 ? 10 : 5;

// The widest kernels have this number of taps; longer filters take several rounds or several
// blocks.
constexpr int kMaxTaps = 16;

// A tile has at most this number of bytes of a row.
constexpr int kTileBytes = 10240;

// Tile cuts the steps of a call into tiles and distributes the tiles' steps over threads.
struct Tile {
  int steps;     // of a row in a tile
  int rows;      // of a tile: one where a row is cut
  int row_bits;  // log2 of the threads that share a row
  int parts;     // of one row in a tile
  int tiles;     // of a row

  Tile(int64_t time, int64_t dilation, int part_steps, int max_steps) {
    tiles = static_cast<int>(CeilDiv(time, max_steps));
    const int64_t group = part_steps * dilation;  // steps of neighbouring parts
    const int64_t even = CeilDiv(time, tiles);
    steps = static_cast<int>(std::min(time, CeilDiv(even, group) * group));
    tiles = static_cast<int>(CeilDiv(time, steps));
    parts = static_cast<int>(CeilDiv(steps, group) * std::min<int64_t>(dilation, steps));
    row_bits = 4;
    static_assert(kNctMinRowThreads == 1 << 4);
    while ((1 << row_bits) < kNctThreads && (tiles > 1 || (1 << row_bits) < parts)) ++row_bits;
    rows = tiles > 1 ? 1 : kNctThreads >> row_bits;
  }
  __device__ int lanes() const { return 1 << row_bits; }
  __device__ int lane() const { return threadIdx.x & (lanes() - 1); }
  __device__ int row() const { return threadIdx.x >> row_bits; }
};

// A segment of `count` elements occupies this number of elements of shared memory for any begin.
template <typename T>
constexpr int64_t SegmentElements(int64_t count) {
  constexpr int kVector = kVectorElements<T>;
  return (count + 2 * kVector - 2) / kVector * kVector;
}

// Misalignment is the number of elements from the last multiple of 16 bytes before `address` to it.
template <typename T>
__device__ __forceinline__ int Misalignment(const T* address) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(address) % 16 / sizeof(T));
}

// FetchSegment starts to copy `count` elements of an array that ends at `array_end`; the first
// element arrives at shared[Misalignment(array)]. The first and the last 16 bytes bring
// neighbouring elements too, but none beyond the end.
template <typename T>
__device__ __forceinline__ void FetchSegment(T* shared, const T* array, int count,
                                             const T* array_end) {
  constexpr int kVector = kVectorElements<T>;
  const int before = Misalignment(array);
  const T* aligned = array - before;
  const int end = before + count;
  for (int at = threadIdx.x * kVector; at < end; at += kNctThreads * kVector) {
    if (aligned + at + kVector <= array_end) {
      CopyAsyncPast(SharedAddress(shared + at), reinterpret_cast<const char*>(aligned + at), true);
    } else {
      for (int e = at; e < end; ++e) shared[e] = aligned[e];
    }
  }
}

// This function copies back: the first element is at shared[Misalignment(array)].
template <typename T>
__device__ __forceinline__ void WriteSegment(T* array, const T* shared, int count) {
  constexpr int kVector = kVectorElements<T>;
  const int before = Misalignment(array);
  T* aligned = array - before;
  const int end = before + count;
  for (int at = threadIdx.x * kVector; at < end; at += kNctThreads * kVector) {
    if (at >= before && at + kVector <= end) {
      StoreVector(aligned + at, LoadVector<kVector>(shared + at));
    } else {
      for (int e = max(at, before); e < min(at + kVector, end); ++e) aligned[e] = shared[e];
    }
  }
}

// --- forward -------------------------------------------------------------------------------------

// ArrayElements counts the elements of the array of `operand`, with `entry` per batch entry.
template <int kOperands>
int64_t ArrayElements(const BatchMap<kOperands>& batch, int operand, int64_t entry) {
  for (int d = 0; d < batch.rank(); ++d) entry += (batch.size(d) - 1) * batch.stride(d, operand);
  return entry;
}

struct ForwardParams {
  Forward call;
  int64_t elements_x;  // of the array
  int time, channels, taps, padding, dilation;
  int fetched;  // elements of shared memory for the steps that a tile reads
  FastDivider tiles;
  FastDivider channel_blocks;
  FastDivider depth;
  FastDivider phases;  // the dilation
  Tile tile;
};

template <typename T, int kTaps>
__global__ void __launch_bounds__(kNctThreads)
    RunsForward(const __grid_constant__ ForwardParams p) {
  using Acc = Accumulator<T>;
  constexpr int kCount = kPartSteps<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  T* fetched = reinterpret_cast<T*>(shared);
  T* made = fetched + p.fetched;

  uint32_t block = blockIdx.x;
  const int first_step = p.tiles.DivMod(block) * p.tile.steps;
  const int first_row = p.channel_blocks.DivMod(block) * p.tile.rows;
  const auto offsets = p.call.batch.AllOffsets(block);
  const int rows = min(p.tile.rows, p.channels - first_row);
  const int end_step = min(first_step + p.tile.steps, p.time);
  // These are the steps of a row that the tile's taps read.
  const int low = max(0, first_step - p.padding);
  const int high = min(p.time, end_step + (p.taps - 1) * p.dilation - p.padding);
  const int64_t row_offset = int64_t{first_row} * p.time;
  const T* x = static_cast<const T*>(p.call.x) + offsets[Forward::kX] + row_offset + low;
  T* y = static_cast<T*>(p.call.y) + offsets[Forward::kY] + row_offset + first_step;
  FetchSegment(fetched, x, (rows - 1) * p.time + high - low,
               static_cast<const T*>(p.call.x) + p.elements_x);
  CommitCopies();

  const int row = p.tile.row();
  const int channel = first_row + row;
  const int64_t filter = offsets[Forward::kWeight] + int64_t{p.depth.Quotient(channel)} * p.taps;
  const auto read_taps = [&](Acc(&weight)[kTaps], int first) {
    ReadTaps(weight, p.call.weight, p.call.weight_dtype, filter, first, p.taps, p.call.flip_taps);
  };
  Acc weight[kTaps], bias = 0;
  if (row < rows) {
    read_taps(weight, 0);
    if (p.call.bias != nullptr) {
      const int64_t at = offsets[Forward::kBias] + channel;
      WithElements(p.call.bias, p.call.bias_dtype,
                   [&](const auto* biases) { bias = static_cast<Acc>(Widen(biases[at])); });
    }
  }
  WaitCopies<0>();
  __syncthreads();
  if (row < rows) {
    const int row_at = Misalignment(x) + row * p.time - low;  // step 0 of the row
    T* out = made + Misalignment(y) + row * p.time - first_step;
#pragma unroll 1
    for (int part = p.tile.lane(); part < p.tile.parts; part += p.tile.lanes()) {
      const int group = p.phases.Quotient(part);
      const int start = first_step + part + group * (kCount - 1) * p.dilation;
      if (start >= end_step) continue;
      Acc sums[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[i] = bias;
      int first_tap = 0;
#pragma unroll 1
      do {
        if (kTaps == kMaxTaps && p.taps > kTaps) read_taps(weight, first_tap);
        constexpr int kWindow = kCount + kTaps - 1;
        const int origin = start + first_tap * p.dilation - p.padding;
        Acc window[kWindow];
        if (origin >= low && origin + (kWindow - 1) * p.dilation < high) {
          const T* from = fetched + row_at + origin;
#pragma unroll
          for (int e = 0; e < kWindow; ++e) window[e] = Widen(from[e * p.dilation]);
        } else {
#pragma unroll
          for (int e = 0; e < kWindow; ++e) {
            const int t = origin + e * p.dilation;
            window[e] = t >= low && t < high ? Widen(fetched[row_at + t]) : Acc(0);
          }
        }
        const int taps = p.taps - first_tap;
#pragma unroll
        for (int k = 0; k < kTaps; ++k) {
          if (k < taps) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) sums[i] += weight[k] * window[i + k];
          }
        }
        first_tap += kTaps;
      } while (kTaps == kMaxTaps && first_tap < p.taps);
      Activate(sums, p.call.activation);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int t = start + i * p.dilation;
        if (t < end_step) out[t] = Narrow<T>(sums[i]);
      }
    }
  }
  __syncthreads();
  WriteSegment(y, made, (rows - 1) * p.time + end_step - first_step);
}

// --- backward ------------------------------------------------------------------------------------

struct BackwardParams {
  Backward call;
  int64_t elements_x, elements_g;  // of the arrays
  int time, channels, taps, dilation;
  int mirrored;              // padding of the flipped taps
  int own_tap;               // tap at which a step meets its own g, or -1
  uint32_t items;            // tiles of every summed batch entry
  int fetched_x, fetched_g;  // elements of shared memory for the steps that a tile reads
  FastDivider tiles;
  FastDivider splits;
  FastDivider channel_blocks;
  FastDivider tap_groups;
  FastDivider depth;
  FastDivider phases;  // the dilation
  Tile tile;
  bool whole;      // a block computes a filter's whole sum, without partial sums
  void* partials;  // (kept, splits, taps + 1, channels)
};

// This number of blocks per multiprocessor leaves registers for the sums and the window, but no
// spare ones.
template <typename Acc, int kTaps>
constexpr int kResidentBlocks = sizeof(Acc) * kTaps <= 16   ? 6
                                : sizeof(Acc) * kTaps <= 32 ? 5
                                                            : 4;

constexpr int kStages = 2;

template <typename T, int kTaps>
__global__ void __launch_bounds__(kNctThreads, kResidentBlocks<Accumulator<T>, kTaps>)
    RunsBackward(const __grid_constant__ BackwardParams p) {
  using Acc = Accumulator<T>;
  constexpr int kCount = kPartSteps<T>;
  constexpr int kWindow = kCount + kTaps - 1;
  extern __shared__ __align__(16) unsigned char shared[];
  const int stage_elements = p.fetched_x + p.fetched_g;
  T* stages = reinterpret_cast<T*>(shared);
  T* made = stages + kStages * stage_elements;

  uint32_t block = blockIdx.x;
  const int first_tap = p.tap_groups.DivMod(block) * kTaps;  // flipped
  const int first_row = p.channel_blocks.DivMod(block) * p.tile.rows;
  const uint32_t split = p.splits.DivMod(block);
  const uint32_t kept = block;
  const auto offsets = p.call.kept.AllOffsets(kept);
  const int taps = min(kTaps, p.taps - first_tap);
  const int rows = min(p.tile.rows, p.channels - first_row);
  const int64_t row_offset = int64_t{first_row} * p.time;
  const T* x = static_cast<const T*>(p.call.x) + offsets[Backward::kX] + row_offset;
  const T* g = static_cast<const T*>(p.call.g) + offsets[Backward::kG] + row_offset;
  T* dx = static_cast<T*>(p.call.dx) + offsets[Backward::kDx] + row_offset;
  const bool wants_dx = p.call.dx != nullptr && p.tap_groups.divisor() == 1;
  const bool wants_dbias = p.call.dbias != nullptr && first_tap == 0;
  // The distance is from a step to the first step of its window.
  const int before = p.mirrored - first_tap * p.dilation;

  struct Extent {
    typename BatchMap<Backward::kOperands>::Offsets offsets;
    int first, end;  // the tile's steps of a row
    int low, high;   // the steps of a row of g that the tile's taps read
  };
  const auto extent_of = [&](uint32_t index) {
    Extent extent;
    extent.first = p.tiles.DivMod(index) * p.tile.steps;
    extent.end = min(extent.first + p.tile.steps, p.time);
    extent.low = min(max(0, extent.first - before), p.time);
    extent.high = max(extent.low, min(p.time, extent.end + (taps - 1) * p.dilation - before));
    extent.offsets = p.call.summed.AllOffsets(index);
    return extent;
  };
  const auto x_of = [&](const Extent& extent) {
    return x + extent.offsets[Backward::kX] + extent.first;
  };
  const auto g_of = [&](const Extent& extent) {
    return g + extent.offsets[Backward::kG] + extent.low;
  };
  uint32_t ahead = split;
  const auto fetch = [&](int stage) {
    if (ahead < p.items) {
      const Extent extent = extent_of(ahead);
      const int between = (rows - 1) * p.time;
      T* to = stages + stage * stage_elements;
      FetchSegment(to, x_of(extent), between + extent.end - extent.first,
                   static_cast<const T*>(p.call.x) + p.elements_x);
      if (extent.high > extent.low) {
        FetchSegment(to + p.fetched_x, g_of(extent), between + extent.high - extent.low,
                     static_cast<const T*>(p.call.g) + p.elements_g);
      }
    }
    CommitCopies();
    ahead += p.splits.divisor();
  };
  for (int stage = 0; stage < kStages - 1; ++stage) fetch(stage);

  const int row = p.tile.row();
  const int channel = first_row + row;
  Acc weight[kTaps];
  if (wants_dx && row < rows) {
    ReadTaps(weight, p.call.weight, p.call.weight_dtype,
             offsets[Backward::kWeight] + int64_t{p.depth.Quotient(channel)} * p.taps, 0, p.taps,
             true);
  }
  Acc dweight[kTaps][1] = {};
  Acc dbias[1][1] = {};
  int stage = 0;
#pragma unroll 1
  for (uint32_t index = split; index < p.items; index += p.splits.divisor()) {
    WaitCopies<kStages - 2>();
    // All threads have finished with the previous contents of the stage and with the previous
    // item's results.
    __syncthreads();
    fetch(stage == 0 ? kStages - 1 : stage - 1);
    const Extent extent = extent_of(index);
    T* dx_segment = wants_dx ? dx + extent.offsets[Backward::kDx] + extent.first : nullptr;
    if (row < rows) {
      const T* x_row = stages + stage * stage_elements + Misalignment(x_of(extent)) + row * p.time -
                       extent.first;
      const T* g_row = stages + stage * stage_elements + p.fetched_x + Misalignment(g_of(extent)) +
                       row * p.time - extent.low;
      T* dx_row = made + Misalignment(dx_segment) + row * p.time - extent.first;
#pragma unroll 1
      for (int part = p.tile.lane(); part < p.tile.parts; part += p.tile.lanes()) {
        const int group = p.phases.Quotient(part);
        const int start = extent.first + part + group * (kCount - 1) * p.dilation;
        if (start >= extent.end) continue;
        const int origin = start - before;
        Acc own[kCount], window[kWindow];
        bool is_simple = start + (kCount - 1) * p.dilation < extent.end && origin >= extent.low &&
                         origin + (kWindow - 1) * p.dilation < extent.high;
        uint32_t own_inside = 0, window_inside = 0;
        if (is_simple) {
#pragma unroll
          for (int i = 0; i < kCount; ++i) own[i] = Widen(x_row[start + i * p.dilation]);
#pragma unroll
          for (int e = 0; e < kWindow; ++e) window[e] = Widen(g_row[origin + e * p.dilation]);
        } else {
          Acc probe = 0;
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            const int t = start + i * p.dilation;
            const bool inside = t < extent.end;
            own[i] = inside ? Widen(x_row[t]) : Acc(0);
            own_inside |= uint32_t{inside} << i;
            probe += Acc(0) * own[i];
          }
#pragma unroll
          for (int e = 0; e < kWindow; ++e) {
            const int t = origin + e * p.dilation;
            const bool inside = t >= extent.low && t < extent.high;
            window[e] = inside ? Widen(g_row[t]) : Acc(0);
            window_inside |= uint32_t{inside} << e;
            probe += Acc(0) * window[e];
          }
          // Pairs outside the sequence have a zero on one side, which is harmless if the other side
          // is finite.
          is_simple = probe == Acc(0);
        }
        if (is_simple) {
#pragma unroll
          for (int j = 0; j < kTaps; ++j) {
            if (j < taps) {
#pragma unroll
              for (int i = 0; i < kCount; ++i) dweight[j][0] += own[i] * window[i + j];
            }
          }
        } else {
#pragma unroll
          for (int j = 0; j < kTaps; ++j) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
              if (j < taps && own_inside >> i & window_inside >> (i + j) & 1) {
                dweight[j][0] += own[i] * window[i + j];
              }
            }
          }
        }
        if (wants_dx) {
          Acc sums[kCount] = {};
#pragma unroll
          for (int j = 0; j < kTaps; ++j) {
            if (j < taps) {
#pragma unroll
              for (int i = 0; i < kCount; ++i) sums[i] += weight[j] * window[i + j];
            }
          }
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            const int t = start + i * p.dilation;
            if (t < extent.end) dx_row[t] = Narrow<T>(sums[i]);
          }
        }
        if (wants_dbias && p.own_tap >= 0 && start + (kCount - 1) * p.dilation < extent.end) {
#pragma unroll
          for (int j = 0; j < kTaps; ++j) {
            if (j == p.own_tap) {
#pragma unroll
              for (int i = 0; i < kCount; ++i) dbias[0][0] += window[i + j];
            }
          }
        } else if (wants_dbias) {
          // All taps together reach every step's own g, but those of one group need not.
          const T* own_g = p.tap_groups.divisor() == 1
                               ? g_row
                               : g_of(extent) + int64_t{row} * p.time - extent.low;
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            const int t = start + i * p.dilation;
            if (t < extent.end) dbias[0][0] += Widen(own_g[t]);
          }
        }
      }
    }
    if (wants_dx) {
      __syncthreads();
      WriteSegment(dx_segment, made, (rows - 1) * p.time + extent.end - extent.first);
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  Acc* partials = static_cast<Acc*>(p.partials) +
                  (int64_t{kept} * p.splits.divisor() + split) * (p.taps + 1) * p.channels;
  const auto write = [&](int tap, int row, Acc sum) {
    if (row < rows) WriteRowSum(p, partials, kept, tap, first_row + row, sum);
  };
  ReduceRows(dweight, p.tile.row_bits, [&](int j, int row, Acc sum) {
    if (j < taps) write(p.taps - 1 - first_tap - j, row, sum);
  });
  if (wants_dbias) {
    ReduceRows(dbias, p.tile.row_bits, [&](int, int row, Acc sum) { write(p.taps, row, sum); });
  }
}

// --- launches ------------------------------------------------------------------------------------

template <typename T>
Tile TileOf(const Geometry& g) {
  return Tile(g.time, g.dilation, kPartSteps<T>, kTileBytes / sizeof(T));
}

struct Plan {
  Tile tile;
  int max_taps;  // of the kernel, its template argument
  int64_t tap_groups, channel_blocks;
  int64_t splits = 1;        // blocks that share the sum of one set of channels
  int64_t items = 0;         // backward, tiles of every summed batch entry
  bool whole = false;        // a block computes a filter's whole sum, without partial sums
  int64_t tile_elements;     // of shared memory for a tile
  int64_t reached_elements;  // of shared memory for the steps that the tile's taps read
  int64_t shared_bytes = 0;
  int64_t blocks = 0;  // of the grid

  bool CanLaunch() const {
    return shared_bytes <= kSharedOptInLimit && items <= INT32_MAX && blocks <= kMaxBlocks;
  }
};

// Shared memory holds the inputs of `reached_taps` taps.
template <typename T>
Plan CutTiles(const Geometry& g, int64_t reached_taps) {
  Plan plan{TileOf<T>(g)};
  const Tile& tile = plan.tile;
  const int64_t reached = std::min<int64_t>(g.time, tile.steps + (reached_taps - 1) * g.dilation);
  plan.max_taps = g.taps <= 4 ? 4 : g.taps <= kShortTaps ? kShortTaps : kMaxTaps;
  plan.tap_groups = CeilDiv(g.taps, plan.max_taps);
  plan.channel_blocks = CeilDiv(g.channels, tile.rows);
  plan.tile_elements = SegmentElements<T>((tile.rows - 1) * g.time + tile.steps);
  plan.reached_elements = SegmentElements<T>((tile.rows - 1) * g.time + reached);
  return plan;
}

template <typename T>
Plan MakePlan(const Forward& call) {
  const Geometry& g = call.geometry;
  Plan plan = CutTiles<T>(g, g.taps);
  plan.shared_bytes = (plan.reached_elements + plan.tile_elements) * sizeof(T);
  plan.blocks = call.batch.size() * plan.tile.tiles * plan.channel_blocks;
  return plan;
}

template <typename T>
Plan MakePlan(const Gradients& gradients) {
  const Backward& call = gradients.call;
  const Geometry& g = call.geometry;
  Plan plan = CutTiles<T>(g, std::min<int64_t>(g.taps, kMaxTaps));
  const int64_t blocks = call.kept.size() * plan.channel_blocks * plan.tap_groups;
  plan.items = call.summed.size() * plan.tile.tiles;
  plan.splits = blocks >= kBusyBlocks ? 1 : std::min(gradients.splits, plan.items);
  plan.whole = plan.splits == 1 && g.channels == g.heads;
  plan.shared_bytes =
      (kStages * plan.reached_elements + (kStages + 1) * plan.tile_elements) * sizeof(T);
  plan.blocks = blocks * plan.splits;
  return plan;
}

// DispatchTaps calls function(taps) with the template argument of a plan.
template <typename Function>
cudaError_t DispatchTaps(const Plan& plan, Function&& function) {
  if (plan.max_taps == 4) return function(std::integral_constant<int, 4>{});
  if (plan.max_taps == kShortTaps) return function(std::integral_constant<int, kShortTaps>{});
  return function(std::integral_constant<int, kMaxTaps>{});
}

}  // namespace

bool CanRunSegments(const Forward& call, const Device&) {
  return call.geometry.data_format == DataFormat::kNCT &&
         DispatchFloat(call.dtype,
                       [&](auto element) { return MakePlan<decltype(element)>(call).CanLaunch(); });
}

bool CanRunSegments(const Gradients& gradients, const Device&) {
  return gradients.call.geometry.data_format == DataFormat::kNCT &&
         DispatchFloat(gradients.call.dtype, [&](auto element) {
           return MakePlan<decltype(element)>(gradients).CanLaunch();
         });
}

bool ComputesInputGradSegments(const Backward& call) { return call.geometry.taps <= kMaxTaps; }

int64_t CountSegmentSteps(const Geometry& g, DType dtype) {
  return DispatchFloat(dtype, [&](auto element) {
    using T = decltype(element);
    const Tile tile = TileOf<T>(g);
    return int64_t{tile.parts} * tile.tiles * kPartSteps<T>;
  });
}

cudaError_t LaunchSegments(cudaStream_t stream, const Forward& call, const Device&) {
  const Geometry& g = call.geometry;
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    const Plan plan = MakePlan<T>(call);
    const ForwardParams p{.call = call,
                          .elements_x = ArrayElements(call.batch, Forward::kX, g.channels * g.time),
                          .time = static_cast<int>(g.time),
                          .channels = static_cast<int>(g.channels),
                          .taps = static_cast<int>(g.taps),
                          .padding = static_cast<int>(g.padding),
                          .dilation = static_cast<int>(g.dilation),
                          .fetched = static_cast<int>(plan.reached_elements),
                          .tiles = FastDivider(plan.tile.tiles),
                          .channel_blocks = FastDivider(plan.channel_blocks),
                          .depth = FastDivider(g.channels / g.heads),
                          .phases = FastDivider(g.dilation),
                          .tile = plan.tile};
    return DispatchTaps(plan, [&](auto taps) {
      return Launch(RunsForward<T, taps.value>, plan.blocks, kNctThreads, plan.shared_bytes, stream,
                    p);
    });
  });
}

cudaError_t LaunchSegments(cudaStream_t stream, const Gradients& gradients, const Device&) {
  const Backward& call = gradients.call;
  const Geometry& g = call.geometry;
  const auto elements = [&](int operand) {
    return ArrayElements(call.summed, operand,
                         ArrayElements(call.kept, operand, g.channels * g.time));
  };
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    const Plan plan = MakePlan<T>(gradients);
    const int mirrored = static_cast<int>(Mirrored(g));
    const int dilation = static_cast<int>(g.dilation);
    const bool has_own_tap = plan.tap_groups == 1 && mirrored % dilation == 0;
    const BackwardParams p{.call = call,
                           .elements_x = elements(Backward::kX),
                           .elements_g = elements(Backward::kG),
                           .time = static_cast<int>(g.time),
                           .channels = static_cast<int>(g.channels),
                           .taps = static_cast<int>(g.taps),
                           .dilation = dilation,
                           .mirrored = mirrored,
                           .own_tap = has_own_tap ? mirrored / dilation : -1,
                           .items = static_cast<uint32_t>(plan.items),
                           .fetched_x = static_cast<int>(plan.tile_elements),
                           .fetched_g = static_cast<int>(plan.reached_elements),
                           .tiles = FastDivider(plan.tile.tiles),
                           .splits = FastDivider(plan.splits),
                           .channel_blocks = FastDivider(plan.channel_blocks),
                           .tap_groups = FastDivider(plan.tap_groups),
                           .depth = FastDivider(g.channels / g.heads),
                           .phases = FastDivider(g.dilation),
                           .tile = plan.tile,
                           .whole = plan.whole,
                           .partials = gradients.partials};
    const cudaError_t error = DispatchTaps(plan, [&](auto taps) {
      return Launch(RunsBackward<T, taps.value>, plan.blocks, kNctThreads, plan.shared_bytes,
                    stream, p);
    });
    if (error != cudaSuccess || plan.whole) return error;
    return AddPartialSums(stream, call, {gradients.partials, plan.splits});
  });
}

}  // namespace jaxops::lightweight_conv::cuda::nct
