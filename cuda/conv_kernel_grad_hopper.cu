// The gradient of a convolution by its kernel on Hopper, as a matrix product over pixels.
//
// A row of the product is a tap and a channel, a column an output, and what is summed over are the
// pixels of all images: the patches, never made, transposed, times the cotangent. As in the forward
// product a bulk copy brings the rows of the image that the windows of some pixels touch, once for
// all taps, and an entry of a patch is an address; here ldmatrix transposes on the way. The
// cotangent of the same pixels is the right operand as it lies in shared memory.
//
// A block has 64 outputs, up to 64 channels and some of the taps, and a range of the pixels. There
// are too few such blocks to fill a GPU unless pixels are split. The blocks of a cluster are splits
// of the same sums, which they add up in each other's shared memory. Where a cluster is not enough,
// each writes its part to a workspace and a second kernel adds these. The order is always the same.
#include "cuda/conv_tiles.cuh"

namespace jaxops::conv::cuda {
namespace {

constexpr int kWarpgroups = 3;  // that multiply
// Blocks of 64 rows of the product that a warpgroup has at most. A block is 64, 32 or 16 channels
// of 1, 2 or 4 taps, so that a warp always has one tap.
constexpr int kMaxUnits = 3;
constexpr int kColumns = 64;  // outputs of a block
// Pixels of a stage, and rows of them: one lane of the warp that copies looks after each row.
constexpr int kPixels = 128;
constexpr int kMaxStageRows = 32;

constexpr int kBarrierBytes = 1024 - 128;
constexpr int kZeroBytes = 128;
constexpr int kTableBytes = kMaxStages * kPixels * 4;
constexpr int kHeadBytes = kBarrierBytes + kZeroBytes + kTableBytes;
static_assert(kHeadBytes % 1024 == 0);
constexpr int kStagesBytes = kSharedBytes - kHeadBytes - 1024;  // less what aligns the stages
// The sums of a block lie where stages were.
static_assert(kWarpgroups * kMaxUnits * 64 * kColumns * 4 <= kStagesBytes);

constexpr int kMaxCluster = 8;

struct Params : Layout {
  CUtensorMap image_map;
  CUtensorMap cotangent_map;
  void* result;  // of each cluster's part, one after the other, or of all
  int channels, outputs;
  int64_t size;  // entries of the result
  int channel_blocks, column_tiles, sets;
  int splits, cluster;                     // of an item; those of a cluster
  int stages;                              // in all, and what one has of pixels:
  int stage_rows, stage_pixels, steps;     // rows of them, all of them, and steps of 16
  int image_stage, cotangent_stage, ring;  // bytes of the parts of a stage; stages held
  bool is_wide;                            // the result is f32
  Group set[kMaxTaps];                     // taps that a block sums for
  int32_t tap[kMaxTaps];  // bytes from the entry of the set's least row and column, in a stage
};

// What one block sums.
struct Item {
  Group set;
  int channel, column;  // the first of its
  int rank, part;       // in the cluster; of the cluster
  int begin, end;       // stages

  __device__ explicit Item(const Params& p) {
    // Neighbours share pixels, which they then find in the L2 cache.
    const int items = p.channel_blocks * p.column_tiles * p.sets;
    rank = blockIdx.x % p.cluster;
    int item = blockIdx.x / p.cluster;
    part = item / items;
    item -= part * items;
    const int split = part * p.cluster + rank;
    set = p.set[item % p.sets];
    item /= p.sets;
    channel = item % p.channel_blocks * (p.row_bytes / 2);
    column = item / p.channel_blocks * kColumns;
    begin = static_cast<int>(int64_t{p.stages} * split / p.splits);
    end = static_cast<int>(int64_t{p.stages} * (split + 1) / p.splits);
  }

  // Blocks of 64 rows of the product.
  __device__ int Units(const Params& p) const {
    return ((set.end - set.begin) * (p.row_bytes / 2) + 63) / 64;
  }
};

struct Barriers {
  uint64_t full[kMaxStages], empty[kMaxStages];
};
static_assert(sizeof(Barriers) <= kBarrierBytes);

// Fills stages, and for each a table of the addresses where the windows of its pixels begin: -1
// where there is no pixel, beside the last column of the last strip and after the last row.
__device__ void CopyStages(const Params& p, const Item& item, Barriers& barriers, int32_t* tables,
                           char* stages) {
  const int lane = threadIdx.x % 32;
  int row_of[kPixels / 32], column_of[kPixels / 32];
#pragma unroll
  for (int k = 0; k < kPixels / 32; ++k) {
    const int pixel = lane + 32 * k;
    const bool exists = pixel < p.stage_pixels;
    uint32_t row = pixel;
    const int column = p.strip_width.Peel(row);
    row_of[k] = exists ? row : 0;
    column_of[k] = exists ? column : INT32_MAX;
  }

  Ring ring;
  for (int at = item.begin; at < item.end; ++at) {
    const int first = at * p.stage_rows;
    const Rows rows(p, first, first + p.stage_rows - 1);
    // The row of pixels of this lane.
    uint32_t pixel_image = first + lane;
    const int pixel_row = p.rows.Peel(pixel_image);
    const int pixel_strip = pixel_image;
    const int pixel_column = p.strips.Peel(pixel_image) * p.strip_width.divisor();
    const int bytes = rows.Of(p, pixel_strip, pixel_row) * p.pitch;
    const int left = p.columns - pixel_column;

    Wait(&barriers.empty[ring.stage], ring.parity ^ 1);
    char* image_stage = stages + ring.stage * (p.image_stage + p.cotangent_stage);
    const int stage_address = static_cast<int>(SharedAddress(image_stage));
    int32_t* table = tables + ring.stage * kPixels;
#pragma unroll
    for (int k = 0; k < kPixels / 32; ++k) {
      const int row_bytes = __shfl_sync(~0u, bytes, row_of[k]);
      const int row_left = __shfl_sync(~0u, left, row_of[k]);
      table[lane + 32 * k] =
          column_of[k] < row_left ? stage_address + row_bytes + column_of[k] * p.column_bytes : -1;
    }
    // Every lane releases what it wrote of the table.
    uint64_t* full = &barriers.full[ring.stage];
    if (lane == 0) {
      Expect(full, rows.count * p.copy_bytes + p.stage_pixels * 2 * kColumns);
    } else {
      ptx::mbarrier_arrive(full);
    }
    __syncwarp();

    if (lane < p.stage_rows) {
      const int32_t from[4] = {item.column, pixel_column, pixel_row,
                               static_cast<int32_t>(pixel_image)};
      const int to = p.image_stage + lane * p.strip_width.divisor() * 2 * kColumns;
      ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, image_stage + to,
                                &p.cotangent_map, from, full);
    }
    CopyRows(p, p.image_map, rows, item.set, item.channel, image_stage, full);
    ring.Advance(p.ring);
  }
}

// Has the compiler keep a value in a register instead of computing it again for every use.
__device__ inline void Keep(uint32_t& value) { asm volatile("" : "+r"(value)); }

// a, or b where `sign` is negative: a selection that the compiler does not make a branch of.
__device__ inline uint32_t SelectBySign(int32_t sign, uint32_t a, uint32_t b) {
  uint32_t selected;
  asm("slct.b32.s32 %0, %1, %2, %3;" : "=r"(selected) : "r"(a), "r"(b), "r"(sign));
  return selected;
}

// Where a block leaves an entry of its sums. Columns are mixed so that neither the rows that a warp
// writes at once nor those that it reads have the same banks.
__device__ int SumBytes(int row, int column) {
  return row * kColumns * 4 + (column * 4 ^ row % 4 * 32);
}

// Sums kUnits blocks of 64 rows of the product from `first` on, by one of the warpgroups that have
// `threads` threads, and leaves the sums where stages were.
template <typename T, int kUnits>
__device__ void MultiplyUnits(const Params& p, const Item& item, int first, int threads,
                              Barriers& barriers, const int32_t* tables, uint32_t zeros,
                              char* stages) {
  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 % 4 * 16;
  const int channels = p.row_bytes / 2;
  // An exclusive or of these bits of an address, shifted, swizzles it: stages are aligned.
  uint32_t swizzle = Swizzle::OfRows(p.row_bytes).mask << 4;
  const uint64_t descriptor = MatrixDescriptor(1024, 1024, 128);

  // Lanes give the addresses of 8 pixels and 8 channels each, in the order of the four matrices:
  // channels first.
  const int lane_pixel = lane / 16 * 8 + lane % 8;
  uint32_t tap[kUnits];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    // Rows after the last tap repeat it, and are not stored.
    const int at = item.set.begin + ((first + u) * 64 + warp_row) / channels;
    tap[u] = p.tap[min(at, item.set.end - 1)] + warp_row % channels * 2 + lane / 8 % 2 * 16;
    Keep(tap[u]);
  }
  Keep(swizzle);
  Keep(zeros);
  const uint32_t first_stage = SharedAddress(stages);

  float sums[kUnits][kColumns / 2] = {};
  uint32_t fragments[2][kUnits][4];
  int step = 0;
  int done = -1;  // the stage before this one, if products under way still use it
  Ring ring;
  const int32_t* table = nullptr;
  uint64_t b = 0;
  const auto multiply = [&](uint32_t (&a)[kUnits][4]) {
    if (step == 0) {
      Wait(&barriers.full[ring.stage], ring.parity);
      table = tables + ring.stage * kPixels + lane_pixel;
      b = At(descriptor,
             first_stage + ring.stage * (p.image_stage + p.cotangent_stage) + p.image_stage);
    }
    const int pixel = *table;
    table += 16;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      // Pixels that do not exist are zeros. Their cotangents are too, but what is in a stage in
      // their place need not be finite.
      const uint32_t entry = pixel + tap[u];
      LoadTransposed(a[u], SelectBySign(pixel, entry ^ (entry >> 3 & swizzle), zeros));
    }
    ProductsBegin();
#pragma unroll
    for (int u = 0; u < kUnits; ++u) Multiply<T, kColumns, true>(sums[u], a[u], b, 1);
    ProductsCommit();
    // Those of the step before are done.
    ProductsWait<1>();
    if (step == 0 && done >= 0) ptx::mbarrier_arrive(&barriers.empty[done]);
    b += 16 * 2 * kColumns >> 4;
    if (++step == p.steps) {
      step = 0;
      done = ring.stage;
      ring.Advance(p.ring);
    }
  };
  // Fragments of a step are loaded while those of the step before are multiplied.
  for (int left = (item.end - item.begin) * p.steps; left > 0; left -= 2) {
    multiply(fragments[0]);
    if (left == 1) break;
    multiply(fragments[1]);
  }
  ProductsWait<0>();

  __barrier_sync_count(1, threads);  // no product of any warpgroup reads a stage any more
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; i += 2) {
      const int row = (first + u) * 64 + warp_row + i / 2 % 2 * 8 + lane / 4;
      const int column = i / 4 * 8 + lane % 4 * 2;
      *reinterpret_cast<float2*>(stages + SumBytes(row, column)) = {sums[u][i], sums[u][i + 1]};
    }
  }
}

// Adds the sums of the blocks of a cluster, in the order of their ranks, and writes them: each
// block does so for some of the rows.
template <typename T>
__device__ void AddCluster(const Params& p, const Item& item, int units, uint32_t sums) {
  const int channels = p.row_bytes / 2;
  const int share = units * 64 * (kColumns / 4) / p.cluster;
  for (int i = threadIdx.x - 128; i < share; i += 128 * kWarpgroups) {
    const int row = (item.rank * share + i) / (kColumns / 4);
    const int column = i % (kColumns / 4) * 4;
    const uint32_t at = sums + SumBytes(row, column);
    float4 v[kMaxCluster];
#pragma unroll
    for (int k = 0; k < kMaxCluster; ++k) {
      if (k < p.cluster) v[k] = LoadOfBlock(at, k);
    }
#pragma unroll
    for (int k = 1; k < kMaxCluster; ++k) {
      if (k < p.cluster) v[0] = Add(v[0], v[k]);
    }
    const int tap = item.set.begin + row / channels;
    const int channel = item.channel + row % channels;
    const int output = item.column + column;
    if (tap >= item.set.end || channel >= p.channels || output >= p.outputs) continue;
    const int64_t offset =
        item.part * p.size + (int64_t{tap} * p.channels + channel) * p.outputs + output;
    if (p.is_wide) {
      Store(static_cast<float*>(p.result) + offset, v[0]);
    } else {
      Store(static_cast<T*>(p.result) + offset, v[0]);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(128 * (kWarpgroups + 1), 1)
    SumPixels(const __grid_constant__ Params p) {
#if JAXOPS_HAS_WGMMA
  extern __shared__ char shared[];
  char* aligned = shared + (1024 - SharedAddress(shared) % 1024) % 1024;
  Barriers& barriers = *reinterpret_cast<Barriers*>(aligned);
  char* zeros = aligned + kBarrierBytes;
  int32_t* tables = reinterpret_cast<int32_t*>(zeros + kZeroBytes);
  char* stages = aligned + kHeadBytes;
  const Item item(p);
  const int units = item.Units(p);

  if (threadIdx.x == 0) {
    for (int i = 0; i < p.ring; ++i) {
      ptx::mbarrier_init(barriers.full + i, 32);
      ptx::mbarrier_init(barriers.empty + i, 128 * min(units, kWarpgroups));
    }
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
  }
  // No copy writes the cotangents of the pixels that fill up the last step of a stage.
  const auto clear = [](char* from, int bytes) {
    for (int i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16) {
      *reinterpret_cast<uint4*>(from + i) = {0, 0, 0, 0};
    }
  };
  clear(zeros, kZeroBytes);
  const int copied = p.stage_pixels * 2 * kColumns;
  for (int i = 0; i < p.ring; ++i) {
    clear(stages + i * (p.image_stage + p.cotangent_stage) + p.image_stage + copied,
          p.cotangent_stage - copied);
  }
  // What was written is read by products.
  ptx::fence_proxy_async(ptx::space_shared);
  __syncthreads();

  if (threadIdx.x < 128) {
    GiveRegisters<56>();
    if (threadIdx.x / 32 == 0) CopyStages(p, item, barriers, tables, stages);
    // The barriers of a cluster count all threads.
    SyncCluster();
    SyncCluster();
  } else {
    TakeRegisters<152>();
    // Units are shared out evenly; a warpgroup without any has nothing to do.
    const int warpgroup = threadIdx.x / 128 - 1;
    const int least = units / kWarpgroups, more = units % kWarpgroups;
    const int first = warpgroup * least + min(warpgroup, more);
    const auto multiply = [&](auto count) {
      MultiplyUnits<T, decltype(count)::value>(p, item, first, 128 * min(units, kWarpgroups),
                                               barriers, tables, SharedAddress(zeros), stages);
    };
    switch (least + (warpgroup < more)) {
      case 1:
        multiply(std::integral_constant<int, 1>());
        break;
      case 2:
        multiply(std::integral_constant<int, 2>());
        break;
      case 3:
        multiply(std::integral_constant<int, 3>());
        break;
      default:
        break;
    }
    SyncCluster();
    AddCluster<T>(p, item, units, SharedAddress(stages));
    SyncCluster();  // no block leaves while others read its sums
  }
#endif
}

// --- what the host decides -----------------------------------------------------------------------

// Fills in how the sum is cut up with this many rows of pixels in a stage; false where it does not
// fit. The strips are known.
bool Plan(Params& p, const Tap* tap, int taps, int row_taps, Grouping grouping, int stage_rows) {
  const int block = p.row_bytes / 2;

  // As few sets as there can be, of about as many taps.
  const int most = grouping == Grouping::kAll ? taps : grouping == Grouping::kRow ? row_taps : 1;
  const int64_t units = CeilDiv(most * block, 64);
  const int64_t parts = CeilDiv(units, kWarpgroups * kMaxUnits);
  const int64_t per_set = std::min<int64_t>(most, CeilDiv(units, parts) * (64 / block));
  p.sets = FillGroups(p.set, tap, taps, grouping, per_set);
  if (!p.LayRows(tap, p.set, p.sets)) return false;
  p.stage_rows = stage_rows;
  p.stage_pixels = stage_rows * p.strip_width.divisor();
  p.steps = static_cast<int>(CeilDiv(p.stage_pixels, 16));
  p.cotangent_stage = p.steps * 16 * 2 * kColumns;
  const int64_t image_stage = p.StageBytes(stage_rows, Touched(stage_rows, p.rows.divisor(), true));
  if (2 * (image_stage + p.cotangent_stage) > kStagesBytes) return false;
  p.image_stage = static_cast<int>(image_stage);
  p.ring = std::min(kMaxStages, kStagesBytes / (p.image_stage + p.cotangent_stage));
  for (int s = 0; s < p.sets; ++s) {
    for (int t = p.set[s].begin; t < p.set[s].end; ++t) {
      p.tap[t] = p.TapBytes(tap[t], p.set[s]);
    }
  }
  return true;
}

// Decides all but addresses, from sizes and the number of processors alone.
bool Plan(Params& p, const Call& call, int processors) {
  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  if (h.taps * w.taps > kMaxTaps || call.groups != 1 || call.channels % 8 || call.outputs % 8) {
    return false;
  }
  if (call.images * h.out * w.out * h.taps * w.taps * call.channels * call.outputs == 0) {
    return false;
  }
  p.channels = static_cast<int>(call.channels);
  p.outputs = static_cast<int>(call.outputs);
  p.size = h.taps * w.taps * call.channels * call.outputs;
  p.CutColumns(h.out, w.out, h.stride, w.stride);
  const int64_t pixel_rows = call.images * p.strips.divisor() * h.out;
  if (pixel_rows > INT32_MAX - 1024) return false;
  const int block = ChannelBlock(call.channels);
  p.row_bytes = 2 * block;
  p.channel_blocks = static_cast<int>(CeilDiv(call.channels, block));
  p.column_tiles = static_cast<int>(CeilDiv(call.outputs, kColumns));

  // The rows of a stage that waste least of its last step; of these as many as may be. Fewer are
  // better than taps apart, if they do not waste much more.
  struct Choice {
    int rows, steps;
  };
  Choice choices[kMaxStageRows];
  int count = 0;
  const int strip_width = p.strip_width.divisor();
  for (int rows = 1;
       rows <= std::min<int64_t>(kMaxStageRows, pixel_rows) && rows * strip_width <= kPixels;
       ++rows) {
    choices[count++] = {rows, static_cast<int>(CeilDiv(rows * strip_width, 16))};
  }
  std::sort(choices, choices + count, [](const Choice& a, const Choice& b) {
    const int difference = a.rows * b.steps - b.rows * a.steps;
    return difference != 0 ? difference > 0 : a.rows > b.rows;
  });
  Tap tap[kMaxTaps];
  const int taps = FillTaps(tap, call);
  bool fits = false;
  for (const bool any : {false, true}) {
    for (const Grouping grouping : {Grouping::kAll, Grouping::kRow, Grouping::kTap}) {
      for (int i = 0; i < count && !fits; ++i) {
        const bool wastes =
            4 * choices[i].rows * choices[0].steps < 3 * choices[0].rows * choices[i].steps;
        fits = (any || !wastes) &&
               Plan(p, tap, taps, static_cast<int>(w.taps), grouping, choices[i].rows);
      }
    }
  }
  if (!fits) return false;
  p.stages = static_cast<int>(CeilDiv(pixel_rows, p.stage_rows));

  // The clusters and splits that are done first, in estimated cycles: of a stage and of what a
  // block has to do besides, and for writing and adding the parts of several clusters. A few splits
  // are enough where there are many items. Clusters of 4 and 8 do not reach all processors: of an
  // H200's 132, 120 at once.
  constexpr int64_t kUnitCycles = 50, kBlockCycles = 8000, kAddCycles = 4000, kAddedPerCycle = 250;
  const int64_t items = int64_t{p.channel_blocks} * p.column_tiles * p.sets;
  if (items > INT32_MAX / 8) return false;
  int64_t units = 1;
  for (int s = 0; s < p.sets; ++s) {
    units = std::max(units, CeilDiv((p.set[s].end - p.set[s].begin) * block, 64));
  }
  const int64_t stage_cycles = p.steps * units * kUnitCycles;
  p.splits = 0;
  int64_t least = 0;
  for (int cluster = kMaxCluster; cluster >= 1; cluster /= 2) {
    const int64_t blocks = cluster > 2 ? std::max(1, processors * 10 / 11) : processors;
    for (int64_t splits = cluster;
         splits <= p.stages && (splits == 1 || items * splits <= int64_t{4} * processors);
         splits += cluster) {
      const int64_t parts = splits / cluster;
      const int64_t cost = CeilDiv(items * splits, blocks) *
                               (CeilDiv(p.stages, splits) * stage_cycles + kBlockCycles) +
                           (parts > 1 ? kAddCycles + parts * p.size / kAddedPerCycle : 0);
      if (p.splits == 0 || cost < least) {
        p.splits = static_cast<int>(splits);
        p.cluster = cluster;
        least = cost;
      }
    }
  }
  return true;
}

template <typename T>
cudaError_t Launch(cudaStream_t stream, const Params& p, const Call& call) {
  cudaError_t error = cudaFuncSetAttribute(
      &SumPixels<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  const int64_t blocks = int64_t{p.channel_blocks} * p.column_tiles * p.sets * p.splits;
  error = jaxops::cuda::LaunchClusters(&SumPixels<T>, blocks, p.cluster, 128 * (kWarpgroups + 1),
                                       kSharedBytes, stream, p);
  if (error != cudaSuccess || p.splits == p.cluster) return error;
  return LaunchAddParts(stream, p.result, call.result, call.result_dtype, p.size,
                        p.splits / p.cluster);
}

}  // namespace

int64_t KernelGradWorkspace(const Call& call, int processors) {
  Params p{};
  if (!Plan(p, call, processors) || p.splits == p.cluster) return 0;
  return p.splits / p.cluster * p.size * 4;
}

cudaError_t LaunchKernelGrad(cudaStream_t stream, const Call& call, void* workspace,
                             int processors) {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error != cudaSuccess) return error;
  Params p{};
  if (major != 9 || !Plan(p, call, processors)) return cudaErrorNotSupported;
  const bool one_part = p.splits == p.cluster;
  p.result = one_part ? call.result : workspace;
  p.is_wide = !one_part || call.result_dtype == DType::kF32;

  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  error = MapRows(p.image_map, p, call.dtype, call.image, {call.channels, w.in, h.in, call.images});
  if (error != cudaSuccess) return error;
  error =
      Map<4>(p.cotangent_map, call.dtype, call.cotangent, {call.outputs, w.out, h.out, call.images},
             {kColumns, p.strip_width.divisor(), 1, 1}, {1, 1, 1, 1}, 2 * kColumns);
  if (error != cudaSuccess) return error;
  return call.dtype == DType::kF16 ? Launch<__half>(stream, p, call)
                                   : Launch<__nv_bfloat16>(stream, p, call);
}

}  // namespace jaxops::conv::cuda
