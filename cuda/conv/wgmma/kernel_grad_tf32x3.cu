// The kernel gradient of a convolution in true float32 on Hopper's tensor cores.
//
// An entry of float32 is the sum of three bf16 parts, whose products with the parts of another
// entry are exact. The kernel sums the six largest of the nine products of the parts; the other
// three are no larger than the rounding of float32. Tensor cores truncate a sum towards zero: the
// kernel therefore sums a step's products from zero on, small products first, and adds these sums
// in float32 with rounding.
//
// Stages are runs, as in wgmma/kernel_grad.cu, of each of the three parts, but a stage has a fixed
// number of steps wherever rows end, so that only the last stage of an image has places for no
// pixel. Segments of rows of float32 come to a ring of slots, from where some warps split them into
// the stages.
//
// An entry that is not finite has parts that are NaN, and so is every sum that met the entry, also
// a sum that the entry does not belong to. A block tells whether all its sums are finite; if any
// sum is not, the kernel of multiply-adds, which follows on the stream, computes the gradient
// again.
#include <utility>

#include "cuda/conv/wgmma/kernel_grad.cuh"

namespace jaxops::conv::cuda {
namespace kernel_grad {
namespace {

constexpr int kParts = 3;
// Entries are multiplied by kScale, and sums by one over its square: tensor cores flush the parts
// of numbers that are barely normal to zero.
constexpr float kScale = 1 << 24;
constexpr int kSplitters = 3;    // warps
constexpr int kMultipliers = 2;  // warpgroups
constexpr int kMaxOwn = 5;       // units of a multiplying warpgroup, at most
static_assert(kMultipliers * kMaxOwn >= kBlockUnits);
constexpr int kThreads = 128 * (kMultipliers + 1);

// A slot always belongs to the same warp, which can tell the fillings of the slot apart only if the
// warp waits for all of them.
constexpr int kMinSlots = kSplitters, kMaxSlots = 5 * kSplitters;
constexpr int kMaxPiece = 32;  // entries of a slot, at most

struct Barriers {
  uint64_t full[kMaxStages], empty[kMaxStages];
  uint64_t landed[kMaxSlots], taken[kMaxSlots];
  int spoiled;
};
constexpr int kSplitHead = 1024;
static_assert(sizeof(Barriers) <= kSplitHead);
constexpr int kSplitStages = kSharedBytes - kSplitHead - 1024;  // less the alignment of the stages

struct SplitParams : Params {
  int part_bytes;         // of a stage
  int slots, slot_bytes;  // slots of the ring
  int piece;  // entries of a slot, at most: entries of one row, or a number of whole rows
  int piece_rows;
  int after[kMaxPhases];  // entries of a stage after its pixels
  int* flags;             // for each block, whether any of its sums is not finite
};

// Calls `take` for every segment of float32 that a stage needs, of one row or of several short
// rows. The arguments are the phase, or -1 for the cotangent; the row; the column where the segment
// begins, and its begin and end in the stage; and where in the parts of a stage the row begins, in
// entries.
template <typename Take>
__device__ __forceinline__ void ForPieces(const SplitParams& p, uint32_t run, Take&& take) {
  const bool last = run + 1 == p.runs.divisor();
  const int first = run * p.steps * 16;
  const int pixels = (last ? p.last_steps : p.steps) * 16;
  for (int i = 0; i <= p.phases; ++i) {
    const bool of_image = i < p.phases;
    const int entries = pixels + (of_image ? p.after[i] : 0);
    const int begin = (of_image ? p.phase[i].begin : p.image_stage) / kRowBytes;
    int row = p.columns_of_row.Quotient(first);
    const int width = p.run_columns * p.piece_rows;
    for (int at = row * p.run_columns - first; at < entries; at += width, row += p.piece_rows) {
      for (int column = 0; column < width; column += p.piece) {
        const int from = max(column, -at);
        const int to = min(min(column + p.piece, width), entries - at);
        if (from < to) take(of_image ? i : -1, row, column, from, to, begin + at);
      }
    }
  }
}

// Fills slots, for one stage after the other.
[[maybe_unused]] __device__ void CopySlots(const SplitParams& p, const Item& item,
                                           Barriers& barriers, char* slots) {
  const bool copies = threadIdx.x % 32 == 0;
  Ring ring;
  // All lanes loop, so that the warp stays converged.
  for (int at = item.begin; at < item.end; ++at) {
    uint32_t strip = at;
    const uint32_t run = p.runs.DivMod(strip);
    uint32_t image = strip;
    strip = p.strips.DivMod(image);
    const int strip_column = strip * p.strip_width.divisor() + item.set.column;
    ForPieces(p, run, [&](int i, int row, int column, int, int, int) {
      uint64_t* landed = &barriers.landed[ring.stage];
      char* slot = slots + ring.stage * p.slot_bytes;
      Wait(&barriers.taken[ring.stage], ring.parity ^ 1);
      ring.Advance(p.slots);
      if (!copies) return;
      Expect(landed, p.slot_bytes);
      if (i >= 0) {
        const int32_t from[4] = {item.channel, strip_column + p.phase[i].column + column,
                                 item.set.row + p.phase[i].row + row, static_cast<int32_t>(image)};
        ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, slot, p.image_map + i,
                                  from, landed);
      } else {
        const int32_t from[5] = {item.column, column, static_cast<int32_t>(strip), row,
                                 static_cast<int32_t>(image)};
        ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, slot, &p.cotangent_map,
                                  from, landed);
      }
    });
  }
}

// Returns the nearest bf16 of two entries, and subtracts it from both.
__device__ __forceinline__ uint32_t TakePart(float& a, float& b) {
  const uint32_t part = PackPair<__nv_bfloat16>(a, b);
  a -= __uint_as_float(part << 16);
  b -= __uint_as_float(part & 0xFFFF0000);
  return part;
}

// Pairs of entries that are in flight at once.
constexpr int kTogether = 4;

// Splits slots in one of the splitting warps, which take turns at slots.
[[maybe_unused]] __device__ void SplitSlots(const SplitParams& p, const Item& item,
                                            Barriers& barriers, const char* slots, char* stages) {
  const int lane = threadIdx.x % 32;
  const uint32_t lane_bytes = lane % 16 * 8;
  uint32_t part_bytes = p.part_bytes;
  Keep(part_bytes);
  int turns = threadIdx.x / 32 - 1;  // turns until this warp's turn
  Ring ring, slot;
  for (int at = item.begin; at < item.end; ++at) {
    Wait(&barriers.empty[ring.stage], ring.parity ^ 1);
    char* stage = stages + ring.stage * kParts * p.part_bytes;
    uint32_t run = at;
    run = p.runs.DivMod(run);
    const auto split = [&](auto count, const char*& from, uint32_t& to) {
      constexpr int kCount = decltype(count)::value;
      float4 v[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) v[k] = *reinterpret_cast<const float4*>(from + k * 512);
      from += kCount * 512;
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        char* row = stage + (to + (lane_bytes ^ (to >> 3 & 0x70)));
        to += 2 * kRowBytes;
        v[k] = {v[k].x * kScale, v[k].y * kScale, v[k].z * kScale, v[k].w * kScale};
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          const uint32_t low = TakePart(v[k].x, v[k].y);
          *reinterpret_cast<uint2*>(row + i * part_bytes) = {low, TakePart(v[k].z, v[k].w)};
        }
      }
    };
    ForPieces(p, run, [&](int, int, int first, int column, int end, int begin) {
      if (turns == 0) {
        turns = kSplitters;
        column += lane / 16;
        const char* from =
            slots + slot.stage * p.slot_bytes + (column - first) * 256 + lane % 16 * 16;
        uint32_t to = (begin + column) * kRowBytes;
        int left = (end - column + 1) / 2;
        Wait(&barriers.landed[slot.stage], slot.parity);
        for (; left >= kTogether; left -= kTogether)
          split(std::integral_constant<int, kTogether>(), from, to);
        for (; left > 0; --left) split(std::integral_constant<int, 1>(), from, to);
        Release(&barriers.taken[slot.stage]);
      }
      --turns;
      slot.Advance(p.slots);
    });
    ptx::fence_proxy_async(ptx::space_shared);
    ptx::mbarrier_arrive(&barriers.full[ring.stage]);
    ring.Advance(p.ring);
  }
}

// Sums kUnits blocks of 64 rows of the product from `first` on, a tap each, in one of the
// warpgroups, which have `threads` threads together, and writes the sums over the stages.
template <int kUnits>
__device__ void MultiplyParts(const SplitParams& p, const Item& item, int first, int threads,
                              Barriers& barriers, char* stages) {
  using T = __nv_bfloat16;
  const int lane = threadIdx.x % 32;
  const int warp_output = threadIdx.x / 32 % 4 * 16;
  const uint64_t descriptor = MatrixDescriptor(1024, 1024, 128);
  // Lanes give the addresses of 8 pixels and 8 outputs each, outputs first.
  const uint32_t lane_bytes =
      (lane / 16 * 8 + lane % 8) * 2 * kColumns + warp_output * 2 + lane / 8 % 2 * 16;
  uint32_t lane_cotangent =
      (lane_bytes ^ Swizzle{7}(lane_bytes)) + p.image_stage + SharedAddress(stages);
  const uint32_t part_bytes = p.part_bytes;
  uint32_t tap[kUnits];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    tap[u] = (p.tap[item.set.begin + first + u] + SharedAddress(stages)) >> 4;
    Keep(tap[u]);
  }
  Keep(lane_cotangent);

  float sums[kUnits][kColumns / 2] = {};
  float added[kColumns / 2];
  Ring ring;
  uint32_t strip = item.begin;
  int run = p.runs.DivMod(strip);
  for (int at = item.begin; at < item.end; ++at) {
    const int runs = p.runs.divisor();
    int left = ++run == runs ? p.last_steps : p.steps;
    if (run == runs) run = 0;
    Wait(&barriers.full[ring.stage], ring.parity);
    uint32_t cotangent = lane_cotangent + ring.stage * kParts * part_bytes;
    uint32_t entries = ring.stage * kParts * part_bytes >> 4;
#pragma unroll 1
    for (; left > 0; --left) {
      uint32_t a[kParts][4];
#pragma unroll
      for (int i = 0; i < kParts; ++i) LoadTransposed(a[i], cotangent + i * part_bytes);
      // An address is in the lower half of a descriptor and has no carry to the upper half.
      uint32_t b_low = static_cast<uint32_t>(descriptor) + entries + tap[0];
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const auto b = [&](int part) {
          return (descriptor & 0xFFFFFFFF00000000) | (b_low + part * (part_bytes >> 4));
        };
        ProductsBegin();
        Multiply<T, kColumns, true>(added, a[2], b(0), 0);
        Multiply<T, kColumns, true>(added, a[0], b(2), 1);
        Multiply<T, kColumns, true>(added, a[1], b(1), 1);
        Multiply<T, kColumns, true>(added, a[1], b(0), 1);
        Multiply<T, kColumns, true>(added, a[0], b(1), 1);
        Multiply<T, kColumns, true>(added, a[0], b(0), 1);
        ProductsCommit();
        // The next address is computed while these products are in flight.
        b_low = static_cast<uint32_t>(descriptor) + entries + tap[u + 1 < kUnits ? u + 1 : u];
        Keep(b_low);
        ProductsWait<0>();
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) {
          asm volatile("" : "+f"(added[i]));  // forbids an earlier read
          sums[u][i] += added[i];
        }
      }
      cotangent += 16 * 2 * kColumns;
      entries += 16 * 128 >> 4;
    }
    Release(&barriers.empty[ring.stage]);
    ring.Advance(p.ring);
  }

  __barrier_sync_count(1, threads);  // no product of any warpgroup reads a stage any more
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const int row = (first + u) * 64 + i / 4 * 8 + lane % 4 * 2 + i % 2;
      const int column = warp_output + i / 2 % 2 * 8 + lane / 4;
      *reinterpret_cast<float*>(stages + SumBytes<true>(row, column)) =
          sums[u][i] * (1 / (kScale * kScale));
    }
  }
}

__global__ void __launch_bounds__(kThreads, 1) SumParts(const __grid_constant__ SplitParams p) {
#if JAXOPS_HAS_WGMMA
  extern __shared__ char shared[];
  char* aligned = shared + (1024 - SharedAddress(shared) % 1024) % 1024;
  Barriers& barriers = *reinterpret_cast<Barriers*>(aligned);
  char* stages = aligned + kSplitHead;
  char* slots = stages + p.ring * kParts * p.part_bytes;
  const Item item(p);
  const int units = item.Units(p);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (warp == 0) {
    if (lane < p.ring) {
      ptx::mbarrier_init(barriers.full + lane, 32 * kSplitters);
      ptx::mbarrier_init(barriers.empty + lane, 4 * min(units, kMultipliers));
    }
    if (lane < p.slots) {
      ptx::mbarrier_init(barriers.landed + lane, 1);
      ptx::mbarrier_init(barriers.taken + lane, 1);
    }
    if (lane == 0) barriers.spoiled = 0;
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    ptx::fence_proxy_async(ptx::space_shared);
  }
  __syncthreads();

  if (threadIdx.x < 128) {
    GiveRegisters<56>();
    if (warp == 0) {
      CopySlots(p, item, barriers, slots);
    } else {
      SplitSlots(p, item, barriers, slots, stages);
    }
    __syncwarp();
    // The barriers of a cluster count all threads.
    SyncCluster();
  } else {
    TakeRegisters<224>();
    // Units are shared out evenly; a warpgroup without units has no work.
    const int warpgroup = threadIdx.x / 128 - 1;
    const int least = units / kMultipliers, more = units % kMultipliers;
    const int first = warpgroup * least + min(warpgroup, more);
    const int own = least + (warpgroup < more);
    const auto multiply = [&](auto before) {
      constexpr int kUnits = decltype(before)::value + 1;
      if (own == kUnits) {
        MultiplyParts<kUnits>(p, item, first, 128 * min(units, kMultipliers), barriers, stages);
      }
    };
    [&]<int... kIndices>(std::integer_sequence<int, kIndices...>) {
      (multiply(std::integral_constant<int, kIndices>()), ...);
    }(std::make_integer_sequence<int, kMaxOwn>());
    SyncCluster();
    if (!AddCluster<float, true, 128 * kMultipliers>(p, item, units, stages)) barriers.spoiled = 1;
  }
  SyncCluster();  // no block ends while others read its sums
  if (threadIdx.x == 0) p.flags[blockIdx.x] = barriers.spoiled;
#endif
}

// Adds the parts of the result in the workspace: the parts of the kernel above, or of the kernel
// that computed the result again because a flag is set. Without parts the result is already
// complete.
__global__ void __launch_bounds__(kAddThreads)
    AddEither(const float4* __restrict__ from, float* __restrict__ to, int64_t count, int parts,
              int parts_anew, const int* flags, int flag_count) {
  const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  float4 sum = SumOfParts(from, at, count, parts);
  // The flags are read while the loads of the usual case are in flight.
  if (AnyIsSet(flags, flag_count)) {
    parts = parts_anew;
    sum = SumOfParts(from, at, count, parts);
  }
  if (parts > 0 && at < count && threadIdx.y == 0) Store(to + 4 * at, sum);
}

// --- plans and launches on the host --------------------------------------------------------------

// Fills in how the sum is cut up into runs of `steps` steps, of strips of this width, except the
// offsets of taps; returns false where the runs do not fit. The sets and phases are known.
bool LayPieces(SplitParams& p, const Call& call, const RunSpans& spans, int width, int steps) {
  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  const int64_t columns = RunColumns(spans, call, width);
  int64_t image_stage = 0, entries = 0;
  for (int i = 0; i < p.phases; ++i) {
    const int64_t after = (spans.most[i].rows - 1) * columns + spans.most[i].columns - 1;
    if (after > kSplitStages) return false;
    p.after[i] = static_cast<int>(after);
    p.phase[i].begin = static_cast<int>(image_stage);
    entries += steps * 16 + after;
    image_stage += CeilDiv((steps * 16 + after) * kRowBytes, 1024) * 1024;
  }
  const int64_t cotangent_stage = steps * 16 * kRowBytes;
  const int64_t part = image_stage + cotangent_stage;
  const int64_t piece_rows = std::max<int64_t>(1, kMaxPiece / columns);
  const int64_t piece =
      piece_rows > 1 ? columns * piece_rows : CeilDiv(columns, CeilDiv(columns, kMaxPiece));
  const int64_t slot = piece * 4 * kColumns;
  const int64_t left = kSplitStages - kMinSlots * slot;
  if (2 * kParts * part > left) return false;
  p.ring = static_cast<int>(std::min<int64_t>(kMaxStages, left / (kParts * part)));
  p.part_bytes = static_cast<int>(part);
  p.piece = static_cast<int>(piece);
  p.piece_rows = static_cast<int>(piece_rows);
  p.slot_bytes = static_cast<int>(slot);
  p.slots = static_cast<int>(
      std::min<int64_t>(kMaxSlots, (kSplitStages - p.ring * kParts * part) / slot) / kSplitters *
      kSplitters);

  p.rows = FastDivider(h.out);
  p.columns = static_cast<int>(w.out);
  p.strips = FastDivider(w.out / width);
  // Columns of a strip are counted in 32 bits.
  if (h.out * columns > INT32_MAX / 2) return false;
  p.strip_width = FastDivider(width);
  p.columns_of_row = FastDivider(columns);
  p.run_columns = static_cast<int>(columns);
  const int64_t all_steps = CeilDiv(h.out * columns, 16);
  p.runs = FastDivider(CeilDiv(all_steps, steps));
  p.steps = steps;
  p.last_steps = static_cast<int>(all_steps - (int64_t{p.runs.divisor()} - 1) * steps);
  p.stages = static_cast<int>(call.images * p.strips.divisor() * p.runs.divisor());
  p.image_stage = static_cast<int>(image_stage);
  p.cotangent_stage = static_cast<int>(cotangent_stage);
  p.image_bytes = static_cast<int>(entries * 4 * kColumns);
  p.cotangent_bytes = steps * 16 * 4 * kColumns;
  return true;
}

// Decides everything but addresses, from sizes and the number of processors alone, and returns the
// estimated cycles, or INT64_MAX where this kernel does not take the call.
int64_t Plan(SplitParams& p, const Call& call, int processors) {
  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  if (h.taps * w.taps > kMaxTaps || call.groups != 1 || call.channels % 4 || call.outputs % 4) {
    return INT64_MAX;
  }
  if (call.images * h.out * w.out * h.taps * w.taps * call.channels * call.outputs == 0) {
    return INT64_MAX;
  }
  const int64_t channel_blocks = CeilDiv(call.channels, 64);
  const int64_t column_tiles = CeilDiv(call.outputs, kColumns);
  if (channel_blocks * column_tiles * h.taps * w.taps > INT32_MAX / 8) return INT64_MAX;
  if (call.images * h.out * w.out > INT32_MAX / 16) return INT64_MAX;
  SplitParams q{};
  q.channels = static_cast<int>(call.channels);
  q.outputs = static_cast<int>(call.outputs);
  q.size = h.taps * w.taps * call.channels * call.outputs;
  q.block = 64;
  q.channel_blocks = static_cast<int>(channel_blocks);
  q.column_tiles = static_cast<int>(column_tiles);
  q.is_wide = true;
  // A single row or column has no neighbours.
  q.stride_row = static_cast<int>(h.out > 1 ? std::min<int64_t>(h.stride, kMaxPhases + 1) : 1);
  q.stride_column = static_cast<int>(w.out > 1 ? std::min<int64_t>(w.stride, kMaxPhases + 1) : 1);
  Tap all_taps[kMaxTaps], tap[kMaxTaps];
  int phase_of[kMaxTaps];
  const int taps = FillTaps(all_taps, call);
  if (!FillPhases(q, call, all_taps, taps, tap, phase_of)) return INT64_MAX;
  constexpr int64_t kRestCycles = 14000;  // measured: the work before and after the stages
  const int64_t limit = KernelGradFmaCycles(call, processors) - kRestCycles;
  int64_t least = limit;
  for (const Grouping grouping : {Grouping::kAll, Grouping::kRow, Grouping::kTap}) {
    FillSets(q, tap, taps, static_cast<int>(w.taps), grouping);
    // Several phases need all taps in one set.
    if (q.phases > 1 && q.sets > 1) break;
    PlacePhases(q, tap, taps, phase_of);
    const RunSpans spans = RunSpansOf(q, call, tap, phase_of);
    const int64_t units = Units(q);
    const auto consider = [&](int64_t width) {
      if (w.out % width != 0 || (w.taps > 1 && width < w.dilation)) return;
      for (int steps = 1; LayPieces(q, call, spans, static_cast<int>(width), steps); ++steps) {
        // The cycles are measured: the larger part of the time of six products of a unit, more
        // where a warpgroup has to wait for the products, and the time to split entries, which
        // tensor cores do not hide.
        const int64_t step_cycles =
            std::max<int64_t>(132 * units, CeilDiv(units, kMultipliers) * 200);
        const int64_t cycles =
            200 + steps * step_cycles + (q.image_bytes + q.cotangent_bytes) * 28 / (4 * kColumns);
        const int64_t last_less = (q.steps - q.last_steps) * step_cycles;
        const int64_t cost = Split(q, processors, cycles, last_less, least);
        if (cost < least) {
          least = cost;
          p = q;
        }
      }
    };
    // Equal strips are tried up to kMaxStrips of them. Narrower strips, at most kMaxNarrow pixels
    // wide, are tried at every width down to `narrowest`.
    constexpr int64_t kMaxStrips = 64, kMaxNarrow = 256;
    const int64_t narrowest = std::min<int64_t>(w.out, 16);
    for (int64_t strips = 1; strips <= kMaxStrips && w.out / strips >= narrowest; ++strips) {
      if (w.out % strips == 0) consider(w.out / strips);
    }
    int64_t width = std::min(kMaxNarrow, CeilDiv(w.out, kMaxStrips) - 1);
    for (; width >= narrowest; --width) consider(width);
  }
  if (least == limit) return INT64_MAX;
  PlaceTaps(p, tap, phase_of);
  return least;
}

auto PlanOf(const Call& call, int processors) {
  return KeptParams<SplitParams>(PlanKey(call, processors), [&](SplitParams& p) {
    return Plan(p, call, processors) != INT64_MAX;
  });
}

int Blocks(const SplitParams& p) { return p.channel_blocks * p.column_tiles * p.sets * p.splits; }

int64_t FlagBytes(const SplitParams& p) { return 4 * int64_t{Blocks(p)}; }

// Returns the bytes of the parts that are still to be added, of either kernel. The flags that tell
// whether sums are finite follow these bytes.
int64_t PartBytes(const SplitParams& p, const Call& call, int processors) {
  const int64_t parts = p.splits / p.cluster;
  return std::max(parts > 1 ? parts * p.size * 4 : 0, KernelGradFmaWorkspace(call, processors));
}

// Launches the kernel that computes the result again if it is not finite, and the kernel that adds
// parts.
cudaError_t LaunchRest(cudaStream_t stream, const SplitParams& p, const Call& call, Space workspace,
                       int processors) {
  const int parts = p.splits == p.cluster ? 0 : p.splits / p.cluster;
  Call anew = call;
  if (parts > 0) anew.result = workspace.data;  // if the result has no parts
  int parts_anew = 0;
  const cudaError_t error = LaunchKernelGradFmaParts(stream, anew, workspace, processors, p.flags,
                                                     Blocks(p), &parts_anew);
  if (error != cudaSuccess || (parts == 0 && parts_anew == 1)) return error;
  const int most = std::max(parts, parts_anew);
  const int adjacent = most >= 128 ? 8 : most >= 16 ? 32 : kAddThreads;
  const dim3 threads(adjacent, kAddThreads / adjacent);
  const int64_t count = p.size / 4;
  const int64_t blocks = CeilDiv(count, adjacent);
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  AddEither<<<static_cast<unsigned>(blocks), threads, 0, stream>>>(
      static_cast<const float4*>(workspace.data), static_cast<float*>(call.result), count, parts,
      parts_anew, p.flags, Blocks(p));
  return cudaGetLastError();
}

}  // namespace
}  // namespace kernel_grad

bool PrefersKernelGradTf32x3(const Call& call, int processors) {
  return kernel_grad::PlanOf(call, processors)->has_value();
}

int64_t KernelGradTf32x3Workspace(const Call& call, int processors) {
  const auto plan = kernel_grad::PlanOf(call, processors);
  if (!plan->has_value()) return 0;
  return kernel_grad::PartBytes(**plan, call, processors) + kernel_grad::FlagBytes(**plan);
}

cudaError_t LaunchKernelGradTf32x3(cudaStream_t stream, const Call& call, Space workspace,
                                   int processors) {
  using namespace kernel_grad;  // NOLINT: the file implements this namespace
  const auto plan = PlanOf(call, processors);
  if (!plan->has_value()) return cudaErrorNotSupported;
  SplitParams p = **plan;
  const int64_t part_bytes = PartBytes(p, call, processors);
  if (workspace.bytes < part_bytes + FlagBytes(p)) return cudaErrorInvalidValue;
  p.flags = reinterpret_cast<int*>(static_cast<char*>(workspace.data) + part_bytes);
  p.result = p.splits == p.cluster ? call.result : workspace.data;
  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  cudaError_t error = cudaSuccess;
  for (int i = 0; i < p.phases; ++i) {
    const Phase& phase = p.phase[i];
    const int64_t first = (phase.in_row * w.in + phase.in_column) * call.channels;
    const int64_t pitch = w.in * call.channels;
    error = Map<4>(p.image_map[i], call.dtype, static_cast<const char*>(call.image) + 4 * first,
                   {call.channels, CeilDiv(w.in - phase.in_column, p.stride_column),
                    CeilDiv(h.in - phase.in_row, p.stride_row), call.images},
                   {kColumns, p.piece / p.piece_rows, p.piece_rows, 1}, {1, 1, 1, 1}, 4 * kColumns,
                   {p.stride_column * call.channels, p.stride_row * pitch, h.in * pitch});
    if (error != cudaSuccess) return error;
  }
  // The map has a dimension for strips, so that pixels next to a strip are outside of its row, and
  // zeros.
  const int64_t width = p.strip_width.divisor();
  error =
      Map<5>(p.cotangent_map, call.dtype, call.cotangent,
             {call.outputs, width, w.out / width, h.out, call.images},
             {kColumns, p.piece / p.piece_rows, 1, p.piece_rows, 1}, {1, 1, 1, 1, 1}, 4 * kColumns);
  if (error != cudaSuccess) return error;
  error =
      cudaFuncSetAttribute(&SumParts, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  error = jaxops::cuda::LaunchClusters(&SumParts, int64_t{Blocks(p)}, p.cluster, kThreads,
                                       kSharedBytes, stream, p);
  if (error != cudaSuccess) return error;
  return LaunchRest(stream, p, call, workspace, processors);
}

}  // namespace jaxops::conv::cuda
