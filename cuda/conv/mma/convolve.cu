// Convolution on every GPU with tensor cores from compute capability 8.0 on, by `mma.sync`: a
// matrix product whose left operand, the patches, is never stored.
//
// A block takes a tile of pixels by outputs. For some channels at a time, a row of at most 128
// bytes, the entries of the image that the windows of all its pixels touch come to shared memory
// once for all taps: an entry of a patch is then an address, and ldmatrix takes the fragments of
// the left operand from wherever the pixels of a tap lie. The kernel's part comes in chunks of four
// steps. All threads copy, some chunks ahead of their products; the entries of the next rows come
// in as many parts as there are chunks to spread the parts over. Blocks are small enough that
// several of them share a multiprocessor and fill each other's gaps.
//
// Operands of float32 are multiplied as TF32. Sums are computed in float32.
#include "cuda/conv/mma/mma.cuh"

namespace jaxops::conv::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kSteps = 4;  // of a chunk
constexpr int kAhead = 2;  // chunks in flight while one is multiplied
constexpr int kKernelStages = kAhead + 1;
constexpr int kChunkBytes = 32 * kSteps;  // bytes along the sum, for each output
static_assert(kChunkBytes == kRightBytes);

struct Params : Gather {
  const char* image;
  const char* kernel;
  char* result;
  int64_t result_image, result_row, result_column;  // entries between neighbours of the result
  int64_t kernel_row, kernel_matrix;
  int64_t image_group, kernel_group, result_group;  // entries between groups of channels
  int images, outputs, pixels;
  FastDivider column_tiles;
  int channel_blocks, last_steps;  // steps of a tap in the last block
  int step_shift, chunk_taps;      // steps of a tap, as a power of two; taps of a chunk
  int tap_groups, chunks;          // chunks of a group
  int groups_ahead, parts;         // entries of images: groups in flight, parts of a group
  int stage_rows, stage_bytes;
  bool is_wide;  // the result is f32
  Epilogue epilogue;
  Group group[kMaxTaps];
  int16_t matrix[kMaxTaps];  // of the kernel, by tap
  // The distance from the entry of a group's first tap and channel to the entry of a step, in a
  // stage.
  int4 step_bytes[kMaxTaps];
};

template <typename T_, int kWarpRows_, int kWarpColumns_, int kRows_, int kColumns_, bool kAcross_>
struct Tile {
  using T = T_;
  static constexpr bool kAcross = kAcross_;
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr int kWarpRows = kWarpRows_, kWarpColumns = kWarpColumns_;  // of a warp
  static constexpr int kRowBlocks = kWarpRows / 16, kColumnBlocks = kWarpColumns / 8;
  static constexpr int kRowWarps = kRows / kWarpRows;
  static_assert(kRowWarps * (kColumns / kWarpColumns) * 32 == kThreads);
  static_assert(kWarpColumns % 32 == 0);
};

// Copies the steps of a chunk that starts at a tap and a channel: (the sum, outputs) if kAcross,
// else (outputs, the sum).
template <typename Tile>
__device__ void CopyKernel(const Params& p, const char* kernel, int column, int tap, int taps_end,
                           int channel, uint32_t stage) {
  using T = typename Tile::T;
  constexpr int kItem = sizeof(T), kStep = kStepEntries<T>, kEntries = kCopyEntries<T>;
  const int step_mask = (1 << p.step_shift) - 1;
  if constexpr (Tile::kAcross) {
    constexpr int kRowCopies = Tile::kColumns * kItem / 16;
    constexpr int kPass = kThreads / kRowCopies;
    const int copy = threadIdx.x % kRowCopies, first = threadIdx.x / kRowCopies;
    const bool has_output = column + copy * kEntries < p.outputs;
    const char* from = kernel + int64_t{column + copy * kEntries} * kItem;
#pragma unroll
    for (int pass = 0; pass < kSteps * kStep / kPass; ++pass) {
      const int row = first + pass * kPass;
      const int step = row / kStep;
      const int t = tap + (step >> p.step_shift);
      const int c = channel + (step & step_mask) * kStep + row % kStep;
      const bool exists = has_output && t < taps_end && c < p.channels;
      const int64_t entry = exists ? p.matrix[t] * p.kernel_matrix + c * p.kernel_row : 0;
      const int to = row * kRowCopies + (copy ^ Right<Tile>::Mix(row));
      CopyAsync(stage + to * 16, exists ? from + entry * kItem : kernel, exists);
    }
  } else {
    constexpr int kPass = kThreads / 8;
    const int copy = threadIdx.x % 8, first = threadIdx.x / 8;
    const int step = copy / 2;
    const int t = tap + (step >> p.step_shift);
    const int c = channel + (step & step_mask) * kStep + copy % 2 * kEntries;
    const bool has_entry = t < taps_end && c < p.channels;
    const char* from =
        kernel + (has_entry ? p.matrix[t] * p.kernel_matrix + c : int64_t{0}) * kItem;
#pragma unroll
    for (int pass = 0; pass < Tile::kColumns / kPass; ++pass) {
      const int row = first + pass * kPass;
      const bool exists = has_entry && column + row < p.outputs;
      const int64_t entry = exists ? (column + row) * p.kernel_row : 0;
      const int to = row * 8 + (copy ^ Right<Tile>::Mix(row));
      CopyAsync(stage + to * 16, from + entry * kItem, exists);
    }
  }
}

template <typename Tile, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) ConvolveMma(const __grid_constant__ Params p) {
  using T = typename Tile::T;
  constexpr int kItem = sizeof(T);
  extern __shared__ __align__(1024) char shared[];
  const uint32_t kernel_stages = SharedAddress(shared);
  const uint32_t image_stages = kernel_stages + kKernelStages * Tile::kColumns * kChunkBytes;
  StageRow* table = reinterpret_cast<StageRow*>(
      shared + kKernelStages * Tile::kColumns * kChunkBytes + (p.groups_ahead + 1) * p.stage_bytes);

  uint32_t row_tile = blockIdx.x;
  const int column = p.column_tiles.DivMod(row_tile) * Tile::kColumns;
  const int begin = row_tile * Tile::kRows;
  const int end = min(begin + Tile::kRows, p.pixels);
  const Rows rows(p, p.strip_width.Quotient(begin), p.strip_width.Quotient(end - 1));
  const char* image = p.image + blockIdx.y * p.image_group * kItem;
  const char* kernel = p.kernel + blockIdx.y * p.kernel_group * kItem;

  for (int i = threadIdx.x; i < rows.count; i += kThreads) {
    table[i] = FindRow(p, rows, p.images, i);
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp % Tile::kRowWarps * Tile::kWarpRows;
  const int warp_column = warp / Tile::kRowWarps * Tile::kWarpColumns;
  const auto find = [&](uint32_t number) {
    const int pixel_column = p.strip_width.DivMod(number);
    const int pixel_row = p.rows.DivMod(number);
    return int3{static_cast<int>(number), pixel_row, pixel_column};
  };
  uint32_t base[Tile::kRowBlocks];
#pragma unroll
  for (int i = 0; i < Tile::kRowBlocks; ++i) {
    // Rows after the last pixel repeat it, and are not stored.
    const int3 at = find(min(begin + warp_row + 16 * i + lane % 16, end - 1));
    base[i] = rows.Of(p, at.x, at.y) * p.pitch + at.z * p.column_bytes + lane / 16 * 16;
  }
  __syncthreads();

  const Swizzle swizzle = Swizzle::OfRows(p.row_bytes);
  const int all_groups = p.channel_blocks * p.tap_groups;
  const int all_chunks = all_groups * p.chunks;
  // The next copies: a chunk of the kernel, and a group's entries of the image.
  int kernel_chunk = 0, kernel_in_group = 0, kernel_group = 0, kernel_channel = 0, kernel_stage = 0;
  const auto copy_kernel = [&] {
    if (kernel_chunk < all_chunks) {
      const Group& group = p.group[kernel_group];
      CopyKernel<Tile>(p, kernel, column, group.begin + kernel_in_group * p.chunk_taps, group.end,
                       kernel_channel, kernel_stages + kernel_stage * Tile::kColumns * kChunkBytes);
      if (++kernel_in_group == p.chunks) {
        kernel_in_group = 0;
        if (++kernel_group == p.tap_groups) {
          kernel_group = 0;
          kernel_channel += p.row_bytes / kItem;
        }
      }
      kernel_stage = kernel_stage + 1 == kKernelStages ? 0 : kernel_stage + 1;
      ++kernel_chunk;
    }
  };
  int image_group = 0, image_tap_group = 0, image_channel = 0, image_stage = 0;
  const auto copy_image = [&](int part, int parts) {
    if (image_group < all_groups) {
      const Group& group = p.group[image_tap_group];
      const uint32_t to = image_stages + image_stage * p.stage_bytes;
      const int shift = p.step_shift + 1;
      const int count = rows.count * p.copied.divisor() << shift;
      for (int i = part * kThreads + threadIdx.x; i < count; i += parts * kThreads) {
        const int copy = i & ((1 << shift) - 1);
        uint32_t stage_row = i >> shift;
        const int stage_column = p.copied.DivMod(stage_row);
        const StageRow from = table[stage_row];
        const int row = from.row + group.row;
        const int image_column = from.column + group.column + stage_column * p.copy_step;
        const int channel = image_channel + copy * kCopyEntries<T>;
        const bool exists = static_cast<uint32_t>(row) < p.in_rows &&
                            static_cast<uint32_t>(image_column) < p.in_columns &&
                            channel < p.channels;
        const int64_t pixel = int64_t{from.first_row + row} * p.in_columns + image_column;
        const uint32_t entry = stage_row * p.pitch + stage_column * p.row_bytes + copy * 16;
        CopyAsync(to + (entry ^ swizzle(entry)),
                  exists ? image + (pixel * p.in_pixel + channel) * kItem : image, exists);
      }
      if (part + 1 == parts) {
        if (++image_tap_group == p.tap_groups) {
          image_tap_group = 0;
          image_channel += p.row_bytes / kItem;
        }
        image_stage = image_stage == p.groups_ahead ? 0 : image_stage + 1;
        ++image_group;
      }
    }
  };

  for (int i = 0; i < p.groups_ahead; ++i) copy_image(0, 1);
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    copy_kernel();
    CommitCopies();
  }

  float sums[Tile::kRowBlocks][Tile::kWarpColumns / 2] = {};
  const Right<Tile> right(warp_column);
  uint32_t image_from = image_stages, kernel_from = kernel_stages;
  int in_group = 0, tap_group = 0, block = 0;
  for (int chunk = 0; chunk < all_chunks; ++chunk) {
    WaitCopies<kAhead - 1>();
    // The barrier tells that all threads have copied this chunk and multiplied the previous chunk,
    // whose stage is filled next.
    __syncthreads();
    copy_kernel();
    if (in_group < p.parts) copy_image(in_group, p.parts);
    CommitCopies();

    const Group& group = p.group[tap_group];
    const int4 step_bytes = p.step_bytes[tap_group * p.chunks + in_group];
    const int taps = min(p.chunk_taps, group.end - group.begin - in_group * p.chunk_taps);
    const int steps =
        p.chunk_taps == 1 && block + 1 == p.channel_blocks ? p.last_steps : taps << p.step_shift;
    const int at[kSteps] = {step_bytes.x, step_bytes.y, step_bytes.z, step_bytes.w};
    uint32_t a[2][Tile::kRowBlocks][4], b[2][Tile::kColumnBlocks][2];
    const auto load = [&](int i) {
#pragma unroll
      for (int r = 0; r < Tile::kRowBlocks; ++r) {
        const uint32_t entry = base[r] + at[i];
        LoadMatrices(a[i % 2][r], image_from + (entry ^ swizzle(entry)));
      }
      right.Load(b[i % 2], kernel_from, i);
    };
    const auto multiply = [&](int i) {
#pragma unroll
      for (int r = 0; r < Tile::kRowBlocks; ++r) {
#pragma unroll
        for (uint32_t& entry : a[i % 2][r]) entry = Operand<T>(entry);
      }
#pragma unroll
      for (int c = 0; c < Tile::kColumnBlocks; ++c) {
#pragma unroll
        for (int r = 0; r < Tile::kRowBlocks; ++r) {
          MultiplyStep<T>(&sums[r][4 * c], a[i % 2][r], b[i % 2][c][0], b[i % 2][c][1]);
        }
      }
    };
    // All steps of a whole chunk are one sequence of instructions.
    if (steps == kSteps) {
      load(0);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (i + 1 < kSteps) load(i + 1);
        multiply(i);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kSteps - 1; ++i) {
        if (i < steps) {
          load(i);
          multiply(i);
        }
      }
    }

    kernel_from += Tile::kColumns * kChunkBytes;
    if (kernel_from == image_stages) kernel_from = kernel_stages;
    if (++in_group == p.chunks) {
      in_group = 0;
      image_from += p.stage_bytes;
      if (image_from == image_stages + (p.groups_ahead + 1) * p.stage_bytes) {
        image_from = image_stages;
      }
      if (++tap_group == p.tap_groups) {
        tap_group = 0;
        ++block;
      }
    }
  }

  const int left = p.outputs - column - warp_column;
#pragma unroll
  for (int i = 0; i < Tile::kRowBlocks; ++i) {
    Finish<Tile::kWarpColumns, std::is_same_v<T, float>>(
        p.epilogue, sums[i], int64_t{blockIdx.y} * p.outputs + column + warp_column, left);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int number = begin + warp_row + 16 * i + 8 * half + lane / 4;
      const int3 at = find(number);
      const int image_number = p.strips.Quotient(at.x);
      const int strip = at.x - image_number * p.strips.divisor();
      const int in_row = strip * p.strip_width.divisor() + at.z;
      const bool exists = number < end && in_row < p.columns;
      const int64_t offset = image_number * p.result_image + at.y * p.result_row +
                             in_row * p.result_column + blockIdx.y * p.result_group + column +
                             warp_column;
      if constexpr (std::is_same_v<T, float>) {
        if (exists) {
          StoreDealt<Tile::kWarpColumns>(sums[i], half, reinterpret_cast<float*>(p.result) + offset,
                                         left);
        }
      } else if (p.is_wide) {
        StoreRow<Tile::kWarpColumns>(
            sums[i], half, exists ? reinterpret_cast<float*>(p.result) + offset : nullptr, left);
      } else {
        StoreRow<T, Tile::kWarpColumns>(
            sums[i], half, exists ? reinterpret_cast<T*>(p.result) + offset : nullptr, left);
      }
    }
  }
}

// --- plans and launches on the host --------------------------------------------------------------

// Sizes of tiles: of a warp, and of the block of four warps.
struct Shape {
  int warp_rows, warp_columns, rows, columns;
  int blocks;  // blocks of a multiprocessor, limited by registers
  // The time of a product in percent of the time of the tensor cores: shared memory bounds small
  // tiles of warps.
  int percent;
};
constexpr Shape kShapes[] = {{64, 64, 128, 128, 2, 100},
                             {64, 32, 128, 64, 3, 110},
                             {32, 32, 64, 64, 4, 140},
                             {32, 32, 128, 32, 4, 140}};

// Estimated rates: the entries of a step that a multiprocessor multiplies in a cycle, the bytes
// that arrive in a cycle, and the cycles of a tile's other work.
constexpr int64_t kStepsPerCycle = 75, kBytesPerCycle = 24, kTileCycles = 6000;

int SharedBytes(const Params& p, const Shape& shape) {
  return kKernelStages * shape.columns * kChunkBytes + (p.groups_ahead + 1) * p.stage_bytes +
         p.stage_rows * static_cast<int>(sizeof(StageRow));
}

// Fills in how the sum is cut up with tiles of this shape, rows of `row_bytes` bytes and strips of
// about `width` pixels; returns false where the tile does not fit.
bool Plan(Params& p, const Sum& sum, const Shape& shape, int item, int row_bytes, int64_t width,
          Grouping grouping) {
  p.CutColumns(sum.rows, sum.columns, sum.stride_row, sum.stride_column, width);
  const int strip_width = p.strip_width.divisor(), rows = p.rows.divisor();
  const int64_t pixels = sum.images * p.strips.divisor() * rows * strip_width;
  if (pixels > INT32_MAX - 1024) return false;
  p.pixels = static_cast<int>(pixels);
  p.column_tiles = FastDivider(CeilDiv(sum.outputs, shape.columns));

  p.row_bytes = row_bytes;
  const int block = row_bytes / item, step = 32 / item;
  p.channel_blocks = static_cast<int>(CeilDiv(sum.channels, block));
  p.last_steps = static_cast<int>(CeilDiv(sum.channels - (p.channel_blocks - 1) * block, step));
  p.step_shift = row_bytes == 128 ? 2 : row_bytes == 64 ? 1 : 0;
  p.chunk_taps = kSteps >> p.step_shift;
  p.tap_groups = FillGroups(p.group, sum.tap, sum.taps, grouping);
  if (!p.LayRows(sum.tap, p.group, p.tap_groups)) return false;
  const int group_taps = p.tap_groups > 0 ? sum.taps / p.tap_groups : 0;
  p.chunks = static_cast<int>(CeilDiv(group_taps, p.chunk_taps));

  const bool aligned = shape.rows % strip_width == 0;
  const int pixel_rows = Touched(shape.rows, strip_width, aligned);
  const int64_t stage_rows = p.StageRows(pixel_rows, Touched(pixel_rows, rows, aligned));
  if (stage_rows > kMaxTableRows) return false;
  p.stage_rows = static_cast<int>(stage_rows);
  // Copies of the last entries of a group start as long before the first product with them as
  // copies of the kernel.
  p.groups_ahead = p.chunks > 0 ? static_cast<int>(CeilDiv(kAhead, p.chunks)) : 0;
  p.parts = std::min(p.chunks, p.groups_ahead * p.chunks - kAhead + 1);
  // Rows of a stage get the same distance as their pixels in the tile, where there is room for
  // that, so that they share no banks.
  const int apart = strip_width * p.column_bytes;
  for (const bool is_apart : {true, false}) {
    p.pitch = p.copy_bytes + (is_apart ? ((apart - p.copy_bytes) % 1024 + 1024) % 1024 : 0);
    const int64_t bytes = CeilDiv(stage_rows * p.pitch, 1024) * 1024;
    if (bytes > kMmaSharedBytes) continue;
    p.stage_bytes = static_cast<int>(bytes);
    const int available = is_apart ? 226 * 1024 / shape.blocks - 1024 : kMmaSharedBytes;
    if (SharedBytes(p, shape) <= std::min(available, kMmaSharedBytes)) return true;
  }
  return false;
}

// Returns the estimated cycles until all tiles are done.
int64_t Cost(const Params& p, const Sum& sum, const Shape& shape, int processors) {
  const int64_t chunks = int64_t{p.channel_blocks} * p.tap_groups * p.chunks;
  const int64_t products = chunks * kSteps * shape.rows * shape.columns / kStepsPerCycle;
  const int64_t bytes = int64_t{p.channel_blocks} * p.tap_groups * p.stage_rows * p.copy_bytes +
                        chunks * shape.columns * kChunkBytes;
  const int64_t tiles = CeilDiv(p.pixels, shape.rows) * p.column_tiles.divisor() * sum.groups;
  // Fewer blocks leave gaps.
  const int blocks = std::min(shape.blocks, 226 * 1024 / (SharedBytes(p, shape) + 1024));
  const int64_t cycles =
      std::max(products * (shape.percent + 100 / (blocks * blocks)) / 100, bytes / kBytesPerCycle);
  return CeilDiv(tiles, processors) * (cycles + kTileCycles / blocks);
}

template <typename Tile, int kBlocks>
cudaError_t LaunchTile(cudaStream_t stream, const Params& p, const Shape& shape, int64_t groups) {
  auto* kernel = &ConvolveMma<Tile, kBlocks>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMmaSharedBytes);
  if (error != cudaSuccess) return error;
  const int64_t tiles = CeilDiv(p.pixels, Tile::kRows) * p.column_tiles.divisor();
  if (tiles > INT32_MAX || groups > kMaxGroups) return cudaErrorNotSupported;
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(groups));
  kernel<<<grid, kThreads, SharedBytes(p, shape), stream>>>(p);
  return cudaGetLastError();
}

template <typename T, bool kAcross>
cudaError_t LaunchShape(cudaStream_t stream, const Params& p, const Shape& shape, int64_t groups) {
  if (shape.columns == 128) {
    return LaunchTile<Tile<T, 64, 64, 128, 128, kAcross>, 2>(stream, p, shape, groups);
  }
  if (shape.columns == 32) {
    return LaunchTile<Tile<T, 32, 32, 128, 32, kAcross>, 4>(stream, p, shape, groups);
  }
  if (shape.rows == 128) {
    return LaunchTile<Tile<T, 64, 32, 128, 64, kAcross>, 3>(stream, p, shape, groups);
  }
  return LaunchTile<Tile<T, 32, 32, 64, 64, kAcross>, 4>(stream, p, shape, groups);
}

// The parameters of a sum without addresses; the shape is null where none fits.
struct SumPlan {
  const Shape* shape;
  Params params;
};

// Plans a sum. `kernel_row` and `kernel_group` are the entries between rows of the kernel and
// between its groups.
SumPlan MakePlan(const Sum& sum, const Call& call, int64_t kernel_row, int64_t kernel_group,
                 int processors) {
  const int item = ItemBytes(call.dtype);
  if (sum.channels % (16 / item) || sum.outputs % (16 / item)) return {};
  if (sum.images * sum.image_rows * sum.image_columns > INT32_MAX) return {};

  Params params{}, best;
  params.result_image = sum.result_image;
  params.result_row = sum.result_row;
  params.result_column = sum.result_column;
  params.kernel_row = kernel_row;
  params.kernel_matrix = sum.groups * sum.channels * sum.outputs;
  params.kernel_group = kernel_group;
  params.image_group = sum.channels;
  params.result_group = sum.outputs;
  params.in_rows = static_cast<int>(sum.image_rows);
  params.in_columns = static_cast<int>(sum.image_columns);
  params.in_pixel = sum.groups * sum.channels;
  params.channels = static_cast<int>(sum.channels);
  params.images = static_cast<int>(sum.images);
  params.outputs = static_cast<int>(sum.outputs);
  params.is_wide = call.result_dtype == DType::kF32;
  for (int t = 0; t < sum.taps; ++t) params.matrix[t] = static_cast<int16_t>(sum.tap[t].matrix);

  // The fastest shape is chosen; ties go to the first.
  const Shape* chosen = nullptr;
  int64_t least = 0;
  for (const Shape& shape : kShapes) {
    // Tiles are skipped if half of each would have no columns.
    if (shape.columns > 32 && sum.outputs <= shape.columns / 2) continue;
    for (const int row_bytes : {128, 64, 32}) {
      // Rows are skipped if half of each would have no channels.
      if (row_bytes > 32 && sum.channels * item <= row_bytes / 2) continue;
      for (const Grouping grouping : {Grouping::kAll, Grouping::kRow, Grouping::kTap}) {
        for (const int64_t width : {64, 32, 16, 8}) {
          if (width < 64 && sum.columns <= width) continue;
          if (!Plan(params, sum, shape, item, row_bytes, width, grouping)) continue;
          const int64_t cost = Cost(params, sum, shape, processors);
          if (!chosen || cost < least) {
            chosen = &shape;
            best = params;
            least = cost;
          }
        }
      }
    }
  }
  if (!chosen) return {};
  for (int g = 0; g < best.tap_groups; ++g) {
    const Group& group = best.group[g];
    for (int i = 0; i < best.chunks; ++i) {
      int bytes[kSteps] = {};
      for (int s = 0; s < kSteps; ++s) {
        const int t = group.begin + i * best.chunk_taps + (s >> best.step_shift);
        if (t >= group.end) break;
        bytes[s] = best.TapBytes(sum.tap[t], group) + (s & ((1 << best.step_shift) - 1)) * 32;
      }
      best.step_bytes[g * best.chunks + i] = {bytes[0], bytes[1], bytes[2], bytes[3]};
    }
  }
  return {chosen, best};
}

struct ForwardPlans;
struct InputGradPlans;

// Launches a sum. A row of the kernel holds outputs if kAcross, and else channels.
template <bool kAcross, typename Plans>
cudaError_t Launch(cudaStream_t stream, const Sum& sum, const Call& call, int64_t kernel_row,
                   int64_t kernel_group) {
  int processors = 0;
  const cudaError_t error = jaxops::cuda::CountProcessors(&processors);
  if (error != cudaSuccess) return error;
  const auto plan = KeptPlan<Plans>(PlanKey(call, processors, sum.number), [&] {
    return MakePlan(sum, call, kernel_row, kernel_group, processors);
  });
  if (!plan->shape) return cudaErrorNotSupported;
  Params params = plan->params;
  params.image = static_cast<const char*>(sum.image);
  params.kernel = static_cast<const char*>(sum.kernel);
  params.result = static_cast<char*>(sum.result);
  params.epilogue = sum.epilogue;
  if (call.dtype == DType::kF16) {
    return LaunchShape<__half, kAcross>(stream, params, *plan->shape, sum.groups);
  }
  if (call.dtype == DType::kBF16) {
    return LaunchShape<__nv_bfloat16, kAcross>(stream, params, *plan->shape, sum.groups);
  }
  if constexpr (!kAcross) {
    if (call.dtype == DType::kF32) {
      return LaunchShape<float, kAcross>(stream, params, *plan->shape, sum.groups);
    }
  }
  return cudaErrorNotSupported;
}

}  // namespace

cudaError_t LaunchForwardMma(cudaStream_t stream, const Call& call) {
  return LaunchForwardSum(call, [&](const Sum& sum) {
    return call.dtype == DType::kF32
               ? Launch<false, ForwardPlans>(stream, sum, call, sum.channels,
                                             sum.outputs * sum.channels)
               : Launch<true, ForwardPlans>(stream, sum, call, call.outputs, sum.outputs);
  });
}

cudaError_t LaunchInputGradMma(cudaStream_t stream, const Call& call) {
  return LaunchInputGradSums(call, [&](const Sum& sum) {
    return Launch<false, InputGradPlans>(stream, sum, call, call.outputs, sum.channels);
  });
}

}  // namespace jaxops::conv::cuda
