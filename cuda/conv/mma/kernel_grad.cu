// The kernel gradient of a convolution by `mma.sync`, as a matrix product over pixels.
//
// A row of the product is a tap and a channel, a column is an output, and the sum is over the
// pixels of all images: the transposed patches, which are never stored, times the cotangent. As in
// the forward product the entries of the image that the windows of some pixels touch come to shared
// memory once for all taps, and an entry of a patch is an address. Copies of 16 bytes, of any tap,
// are packed into rows, so that few channels waste no rows.
//
// The blocks are too few to fill a GPU unless pixels are split. Each block then writes its part to
// a workspace and a second kernel adds the parts, always in the same order.
#include "cuda/conv/add_parts.h"
#include "cuda/conv/mma/mma.cuh"

namespace jaxops::conv::cuda {
namespace {

constexpr int kRowWarps = 3, kColumnWarps = 2;
constexpr int kThreads = 32 * kRowWarps * kColumnWarps;
constexpr int kBlocks = 2;  // blocks of a multiprocessor
// A unit is 32 rows of the product; a warp has at most kMaxUnits of them.
constexpr int kMaxUnits = 3;
constexpr int kColumns = 64;  // outputs of a block
constexpr int kSlab = 32;     // channels that are next to each other in a stage
constexpr int kPixels = 64;   // of a stage, at most
constexpr int kMaxStageRows = 128;
constexpr int kAhead = 2;  // stages in flight while one is multiplied
constexpr int kStages = kAhead + 1;

// Copies of 16 bytes of a unit.
template <typename T>
constexpr int kUnitCopies = 32 / kCopyEntries<T>;

// The pixels and rows of a stage.
struct Table {
  int2 pixels[kPixels];  // begin of the window and of the cotangent in the stage, or -1
  StageRow rows[kMaxStageRows];
  int copies;  // of 16 bytes of a slab
  int unused[3];
};
constexpr int kTables = kAhead + 2;
constexpr int kZeroBytes = 1024 - kTables * sizeof(Table) % 1024;
constexpr int kHeadBytes = kTables * sizeof(Table) + kZeroBytes;
static_assert(kHeadBytes % 1024 == 0 && kZeroBytes >= 16);

struct Params : Gather {
  const char* image;
  const char* cotangent;
  char* result;                    // of each split, one after the other, or of the whole sum
  int64_t out_pixel;               // entries between pixels of the cotangent
  int64_t matrix;                  // entries between taps of the kernel
  int64_t size;                    // entries of the result
  int images, outputs;             // outputs of a group
  int slabs, slab_sets, tap_sets;  // slabs of a block; blocks of them, and of taps
  int row_shift;                   // copies of a row, as a power of two
  int slab_copies;                 // of a pixel in a slab
  FastDivider copies;              // of a pixel in all slabs of a block
  int column_tiles, splits;
  int stages;                           // total number; the pixels of a stage:
  int stage_rows, stage_pixels, steps;  // rows of pixels, all pixels, and steps
  int plane_bytes, stage_bytes;         // of a slab; of a stage
  bool is_wide;                         // the result is f32
  Group set[kMaxTaps];                  // taps that a block sums for
  int32_t tap[kMaxTaps];                // bytes from the entry of the set's lowest row and column
};

// The right operand of a warp: cotangents.
template <typename T_>
struct Tile {
  using T = T_;
  static constexpr bool kAcross = true;
  static constexpr int kColumns = cuda::kColumns;
  static constexpr int kWarpColumns = kColumns / kColumnWarps;
};

// The part of the sums that one block computes.
struct Item {
  Group set;
  int slab, column;  // the first of the block
  int group, split;
  int begin, end;  // stages

  __device__ explicit Item(const Params& p) {
    // Neighbouring blocks share pixels, which they then find in the L2 cache.
    int item = blockIdx.x;
    set = p.set[item % p.tap_sets];
    item /= p.tap_sets;
    slab = item % p.slab_sets * p.slabs;
    item /= p.slab_sets;
    column = item % p.column_tiles * kColumns;
    split = item / p.column_tiles;
    group = blockIdx.y;
    begin = static_cast<int>(int64_t{p.stages} * split / p.splits);
    end = static_cast<int>(int64_t{p.stages} * (split + 1) / p.splits);
  }
};

// The position of 16 bytes of a row of the product, by their number in a block.
struct Place {
  int tap, slab, copy;

  __device__ Place(const Params& p, const Item& item, int number) {
    const int in_tap = number % p.copies.divisor();
    tap = item.set.begin + number / p.copies.divisor();
    slab = in_tap / p.slab_copies;
    copy = in_tap % p.slab_copies;
  }
};

// Swizzles the addresses of entries in a stage so that a load meets every bank once: for float32 a
// load has four pixels of 32 bytes, for 16-bit types eight of 16.
template <typename T>
struct Mix {
  static constexpr int kBytes = std::is_same_v<T, float> ? 32 : 16;
  uint32_t mask;

  __device__ explicit Mix(int row_bytes) : mask(max(row_bytes / kBytes, 1) - 1) {}
  __device__ uint32_t operator()(uint32_t entry) const {
    return entry ^ ((entry >> 7) & mask) * kBytes;
  }
};

__device__ void FillTable(const Params& p, int stage, Table& table) {
  const int first = stage * p.stage_rows;
  const Rows rows(p, first, first + p.stage_rows - 1);
  if (threadIdx.x == 0) table.copies = rows.count * p.copied.divisor() << p.row_shift;
  if (threadIdx.x < kPixels) {
    uint32_t pixel_row = threadIdx.x;
    const int pixel_column = p.strip_width.DivMod(pixel_row);
    uint32_t image = first + pixel_row;
    const int row = p.rows.DivMod(image);
    const int all_strips = image;
    const int column = p.strips.DivMod(image) * p.strip_width.divisor() + pixel_column;
    const bool exists = threadIdx.x < p.stage_pixels && image < p.images && column < p.columns;
    const int entry = rows.Of(p, all_strips, row) * p.pitch + pixel_column * p.column_bytes;
    const int pixel = (image * p.rows.divisor() + row) * p.columns + column;
    table.pixels[threadIdx.x] = exists ? int2{entry, pixel} : int2{-1, -1};
  } else {
    for (int i = threadIdx.x - kPixels; i < rows.count; i += kThreads - kPixels) {
      table.rows[i] = FindRow(p, rows, p.images, i);
    }
  }
}

// Calls `of_image` or `of_cotangent` for each of this thread's 16-byte copies of a stage: for the
// image with the slab and the number of the copy, for the cotangent with the pixel and the number.
template <typename T, typename OfImage, typename OfCotangent>
__device__ void ForOwnCopies(const Params& p, const Table& table, OfImage&& of_image,
                             OfCotangent&& of_cotangent) {
  for (int slab = 0; slab < p.slabs; ++slab) {
#pragma unroll 2
    for (int i = threadIdx.x; i < table.copies; i += kThreads) of_image(slab, i);
  }
  constexpr int kRowCopies = kColumns * sizeof(T) / 16;
  static_assert(kThreads % kRowCopies == 0);
#pragma unroll 2
  for (int k = threadIdx.x / kRowCopies; k < p.steps * kStepEntries<T>;
       k += kThreads / kRowCopies) {
    of_cotangent(k, k * kRowCopies + (threadIdx.x % kRowCopies ^ Right<Tile<T>>::Mix(k)));
  }
}

template <typename T>
__device__ void CopyStage(const Params& p, const Item& item, const Table& table, uint32_t to) {
  constexpr int kItem = sizeof(T), kEntries = kCopyEntries<T>;
  const Mix<T> mix(p.row_bytes);
  const char* image = p.image + item.group * p.channels * kItem;
  const int column = item.column + threadIdx.x % (kColumns / kEntries) * kEntries;
  const char* cotangent = p.cotangent + (item.group * p.outputs + column) * kItem;
  ForOwnCopies<T>(
      p, table,
      [&](int slab, int i) {
        const int copy = mix(i * 16) / 16 & ((1 << p.row_shift) - 1);
        uint32_t stage_row = i >> p.row_shift;
        const int stage_column = p.copied.DivMod(stage_row);
        const StageRow from = table.rows[stage_row];
        const int row = from.row + item.set.row;
        const int in_column = from.column + item.set.column + stage_column * p.copy_step;
        const int channel = (item.slab + slab) * kSlab + copy * kEntries;
        const bool exists = static_cast<uint32_t>(row) < p.in_rows &&
                            static_cast<uint32_t>(in_column) < p.in_columns && channel < p.channels;
        const int64_t pixel = int64_t{from.first_row + row} * p.in_columns + in_column;
        CopyAsync(to + slab * p.plane_bytes + i * 16,
                  exists ? image + (pixel * p.in_pixel + channel) * kItem : image, exists);
      },
      [&](int k, int i) {
        const int pixel = table.pixels[k].y;
        const bool exists = column < p.outputs && pixel >= 0;
        CopyAsync(to + p.slabs * p.plane_bytes + i * 16,
                  exists ? cotangent + pixel * p.out_pixel * kItem : p.cotangent, exists);
      });
}

// Rounds this thread's copies before other threads see them: once instead of for every tap.
template <typename T>
__device__ void RoundStage(const Params& p, const Table& table, uint32_t stage) {
  if constexpr (std::is_same_v<T, float>) {
    const auto round = [](uint32_t address) {
      const uint4 v = LoadShared(address);
      StoreShared(address, {Operand<T>(v.x), Operand<T>(v.y), Operand<T>(v.z), Operand<T>(v.w)});
    };
    ForOwnCopies<T>(
        p, table, [&](int slab, int i) { round(stage + slab * p.plane_bytes + i * 16); },
        [&](int, int i) { round(stage + p.slabs * p.plane_bytes + i * 16); });
  }
}

// Sums kUnits units of 32 rows of the product from `first` on; a warp without units only copies.
template <typename T, int kUnits>
__device__ void SumUnits(const Params& p, const Item& item, int first, Table* tables,
                         uint32_t zeros, uint32_t stages) {
  constexpr bool kIsFloat = std::is_same_v<T, float>;
  constexpr int kLaneUnits = kIsFloat ? 1 : 2;  // addresses of a lane for a unit
  const int lane = threadIdx.x % 32;
  const int warp_column = threadIdx.x / 32 % kColumnWarps * (kColumns / kColumnWarps);
  const Mix<T> mix(p.row_bytes);
  const int last = (item.set.end - item.set.begin) * p.copies.divisor() - 1;
  uint32_t at[kUnits > 0 ? kUnits : 1][kLaneUnits];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
#pragma unroll
    for (int i = 0; i < kLaneUnits; ++i) {
      // Rows after the last repeat it, and are not stored.
      const int number =
          (first + u) * kUnitCopies<T> + (kIsFloat ? lane / 4 : 2 * i + lane / 8 % 2);
      const Place place(p, item, min(number, last));
      at[u][i] = place.slab * p.plane_bytes + p.tap[place.tap] + place.copy * 16;
    }
  }
  const Right<Tile<T>> right(warp_column);
  const int lane_pixel = kIsFloat ? lane % 4 : lane % 8 + lane / 16 * 8;

  float sums[kUnits > 0 ? kUnits : 1][2][kColumns / kColumnWarps / 2] = {};
  int slot = 0, table = 0;
  for (int stage = item.begin; stage < item.end; ++stage) {
    WaitCopies<kAhead - 1>();
    RoundStage<T>(p, tables[table], stages + slot * p.stage_bytes);
    // The barrier tells that all threads have copied this stage and multiplied the previous stage,
    // whose place is filled next. Warps with other numbers of units wait in code of their own,
    // which __syncthreads does not allow.
    __barrier_sync_count(1, kThreads);
    if (stage + kAhead < item.end) {
      CopyStage<T>(p, item, tables[(table + kAhead) % kTables],
                   stages + (slot + kAhead) % kStages * p.stage_bytes);
    }
    CommitCopies();
    if (stage + kAhead + 1 < item.end) {
      FillTable(p, stage + kAhead + 1, tables[(table + kAhead + 1) % kTables]);
    }

    if constexpr (kUnits > 0) {
      const uint32_t image = stages + slot * p.stage_bytes;
      const uint32_t cotangents = image + p.slabs * p.plane_bytes;
      const int2* pixels = tables[table].pixels + lane_pixel;
      constexpr int kPixelsOfLane = kIsFloat ? 2 : 1;
      int next[kPixelsOfLane];
      const auto find = [&](int step) {
#pragma unroll
        for (int k = 0; k < kPixelsOfLane; ++k) {
          next[k] = pixels[step * kStepEntries<T> + 4 * k].x;
        }
      };
      find(0);
      for (int step = 0; step < p.steps; ++step) {
        int begin[kPixelsOfLane];
#pragma unroll
        for (int k = 0; k < kPixelsOfLane; ++k) begin[k] = next[k];
        find(min(step + 1, p.steps - 1));
        uint32_t b[Right<Tile<T>>::kBlocks][2];
        right.Load(b, cotangents, step);
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          uint32_t a[2][4];
          const auto address = [&](int k, int i) {
            return begin[k] < 0 ? zeros : image + mix(begin[k] + at[u][i]);
          };
          if constexpr (kIsFloat) {
            // A lane's four channels are rows g and g + 8 of two blocks of rows.
#pragma unroll
            for (int k = 0; k < 2; ++k) {
              const uint4 v = LoadShared(address(k, 0));
              a[0][2 * k] = v.x;
              a[0][2 * k + 1] = v.y;
              a[1][2 * k] = v.z;
              a[1][2 * k + 1] = v.w;
            }
          } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) LoadTransposed(a[i], address(0, i));
          }
#pragma unroll
          for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < Right<Tile<T>>::kBlocks; ++j) {
              MultiplyStep<T>(&sums[u][i][4 * j], a[i], b[j][0], b[j][1]);
            }
          }
        }
      }
    }
    slot = slot + 1 == kStages ? 0 : slot + 1;
    table = table + 1 == kTables ? 0 : table + 1;
  }

  const int left = p.outputs - item.column - warp_column;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int number = (first + u) * kUnitCopies<T> + (kIsFloat ? lane / 4 : 2 * i + half);
        const Place place(p, item, min(number, last));
        const int channel = (item.slab + place.slab) * kSlab + place.copy * kCopyEntries<T> +
                            (kIsFloat ? 2 * i + half : lane / 4);
        const bool exists = number <= last && channel < p.channels;
        const int64_t offset = item.split * p.size + place.tap * p.matrix + channel * p.out_pixel +
                               item.group * p.outputs + item.column + warp_column;
        constexpr int kWidth = kColumns / kColumnWarps;
        if constexpr (kIsFloat) {
          if (exists) {
            StoreDealt<kWidth>(sums[u][i], half, reinterpret_cast<float*>(p.result) + offset, left);
          }
        } else if (p.is_wide) {
          StoreRow<kWidth>(sums[u][i], half,
                           exists ? reinterpret_cast<float*>(p.result) + offset : nullptr, left);
        } else {
          StoreRow<T, kWidth>(sums[u][i], half,
                              exists ? reinterpret_cast<T*>(p.result) + offset : nullptr, left);
        }
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocks)
    KernelGradMma(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char shared[];
  Table* tables = reinterpret_cast<Table*>(shared);
  char* zeros = shared + kTables * sizeof(Table);
  const uint32_t stages = SharedAddress(shared) + kHeadBytes;
  const Item item(p);
  if (threadIdx.x < 16) zeros[threadIdx.x] = 0;
  for (int i = 0; i <= kAhead; ++i) {
    if (item.begin + i < item.end) FillTable(p, item.begin + i, tables[i]);
  }
  __syncthreads();
  for (int i = 0; i < kAhead; ++i) {
    if (item.begin + i < item.end) {
      CopyStage<T>(p, item, tables[i], stages + i * p.stage_bytes);
    }
    CommitCopies();
  }

  // Units are shared out evenly.
  const int copies = (item.set.end - item.set.begin) * p.copies.divisor();
  const int units = (copies + kUnitCopies<T> - 1) / kUnitCopies<T>;
  const int warp = threadIdx.x / 32 / kColumnWarps;
  const int least = units / kRowWarps, more = units % kRowWarps;
  const int first = warp * least + min(warp, more);
  const auto sum = [&](auto count) {
    SumUnits<T, decltype(count)::value>(p, item, first, tables, SharedAddress(zeros), stages);
  };
  switch (least + (warp < more)) {
    case 0:
      return sum(std::integral_constant<int, 0>());
    case 1:
      return sum(std::integral_constant<int, 1>());
    case 2:
      return sum(std::integral_constant<int, 2>());
    default:
      return sum(std::integral_constant<int, 3>());
  }
}

// --- plans and launches on the host --------------------------------------------------------------

// Estimates: the bytes that arrive at a multiprocessor in a cycle, and the cycles of a product of a
// unit, a step and the columns of a block.
constexpr int64_t kBytesPerCycle = 24, kUnitCycles = 30;

// Fills in the sets of taps of blocks, and strips of about `width` pixels; returns false where the
// sets do not fit. `copies` returns the copies of a block.
bool LayStrips(Params& p, const Call& call, const Tap* tap, int taps, int item, Grouping grouping,
               int64_t width, int64_t* copies) {
  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  p.CutColumns(h.out, w.out, h.stride, w.stride, width);

  // Sets of taps are as few as possible, with about the same number of taps each, and then sets of
  // slabs likewise.
  const int unit_copies = 2 * item;
  const int max_copies = kRowWarps * kMaxUnits * unit_copies;
  const int64_t most = grouping == Grouping::kAll ? taps : grouping == Grouping::kRow ? w.taps : 1;
  const int64_t parts = CeilDiv(most * p.slab_copies, max_copies);
  const int64_t per_set = CeilDiv(most, parts);
  p.tap_sets = FillGroups(p.set, tap, taps, grouping, per_set);
  const int64_t all_slabs = CeilDiv(p.channels, kSlab);
  const int64_t slab_sets =
      CeilDiv(all_slabs, std::max<int64_t>(1, max_copies / (per_set * p.slab_copies)));
  p.slabs = static_cast<int>(CeilDiv(all_slabs, slab_sets));
  p.slab_sets = static_cast<int>(CeilDiv(all_slabs, p.slabs));
  p.copies = FastDivider(p.slabs * p.slab_copies);
  *copies = per_set * p.copies.divisor();
  return p.LayRows(tap, p.set, p.tap_sets);
}

// Fills in stages of `stage_rows` rows of strips, which are known, except the offsets of taps;
// returns the estimated cycles of the stages of a block on a multiprocessor of its own, or 0 where
// the stages do not fit.
int64_t LayStages(Params& p, const Call& call, int item, int64_t copies, int stage_rows) {
  const int strip_width = p.strip_width.divisor();
  const int64_t pixel_rows = call.images * p.strips.divisor() * call.dims[0].out;
  if (pixel_rows * strip_width > INT32_MAX - 1024) return 0;
  p.stage_rows = stage_rows;
  p.stage_pixels = stage_rows * strip_width;
  p.steps = static_cast<int>(CeilDiv(p.stage_pixels, 32 / item));
  p.stages = static_cast<int>(CeilDiv(pixel_rows, stage_rows));
  const int64_t rows = p.StageRows(stage_rows, Touched(stage_rows, p.rows.divisor(), true));
  if (rows > kMaxStageRows) return 0;
  const int64_t plane = CeilDiv(rows * p.pitch, 1024) * 1024;
  const int64_t cotangents = p.steps * 32 * kColumns;
  const int64_t stage = p.slabs * plane + cotangents;
  if (kHeadBytes + kStages * stage > kMmaSharedBytes) return 0;
  p.plane_bytes = static_cast<int>(plane);
  p.stage_bytes = static_cast<int>(stage);
  const int64_t units = CeilDiv(copies, 2 * item);
  const int64_t unit_rounds = CeilDiv(units, kRowWarps) * kRowWarps;
  const int64_t bytes = p.slabs * rows * p.copied.divisor() * p.slab_copies * 16 + cotangents;
  return p.stages * std::max(p.steps * unit_rounds * kUnitCycles, bytes / kBytesPerCycle);
}

// Decides everything but addresses, from sizes and the number of processors alone.
bool Plan(Params& p, const Call& call, int processors) {
  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  const int item = call.dtype == DType::kF32 ? 4 : 2;
  const int64_t channels = call.channels / call.groups, outputs = call.outputs / call.groups;
  const int entries = 16 / item;
  if (h.taps * w.taps > kMaxTaps || channels % entries || outputs % entries ||
      call.groups > UINT16_MAX) {
    return false;
  }
  if (call.images * h.out * w.out * h.taps * w.taps * channels * outputs == 0) return false;
  if (call.images * std::max(h.in * w.in, h.out * w.out) > INT32_MAX) return false;
  p.in_rows = static_cast<int>(h.in);
  p.in_columns = static_cast<int>(w.in);
  p.in_pixel = call.channels;
  p.out_pixel = call.outputs;
  p.matrix = channels * call.outputs;
  p.size = h.taps * w.taps * p.matrix;
  p.images = static_cast<int>(call.images);
  p.channels = static_cast<int>(channels);
  p.outputs = static_cast<int>(outputs);
  p.column_tiles = static_cast<int>(CeilDiv(outputs, kColumns));
  // The length of a row is a power of two, as small as the channels allow.
  p.slab_copies = static_cast<int>(std::min<int64_t>(kSlab, channels) / entries);
  p.row_shift = 0;
  while (1 << p.row_shift < p.slab_copies) ++p.row_shift;
  p.row_bytes = 16 << p.row_shift;

  Tap tap[kMaxTaps];
  const int taps = FillTaps(tap, call);
  Params trial = p;
  int64_t least = 0;
  for (const Grouping grouping : {Grouping::kAll, Grouping::kRow, Grouping::kTap}) {
    for (const int64_t width : {64, 32, 16, 8}) {
      if (width < 64 && w.out <= width) continue;
      int64_t copies;
      if (!LayStrips(trial, call, tap, taps, item, grouping, width, &copies)) continue;
      for (int rows = 1; rows * static_cast<int>(trial.strip_width.divisor()) <= kPixels; ++rows) {
        const int64_t cycles = LayStages(trial, call, item, copies, rows);
        if (cycles == 0) continue;
        const int64_t cost = cycles * trial.tap_sets * trial.slab_sets;
        if (least == 0 || cost < least) {
          p = trial;
          least = cost;
        }
      }
    }
  }
  if (least == 0) return false;
  for (int s = 0; s < p.tap_sets; ++s) {
    for (int t = p.set[s].begin; t < p.set[s].end; ++t) p.tap[t] = p.TapBytes(tap[t], p.set[s]);
  }

  // The chosen splits finish first, in estimated cycles of stages, of a block's other work, and of
  // writing and adding the parts. The search tries only a few splits where there are many blocks.
  constexpr int64_t kBlockCycles = 6000, kAddCycles = 4000, kAddedPerCycle = 250;
  const int64_t items = int64_t{p.tap_sets} * p.slab_sets * p.column_tiles * call.groups;
  const int64_t stage_cycles =
      std::max<int64_t>(1, least / (int64_t{p.tap_sets} * p.slab_sets) / p.stages);
  p.splits = 0;
  for (int64_t splits = 1;
       splits <= p.stages && (splits == 1 || items * splits <= int64_t{4} * processors); ++splits) {
    const int64_t cost = CeilDiv(items * splits, kBlocks * processors) *
                             (CeilDiv(p.stages, splits) * stage_cycles * kBlocks + kBlockCycles) +
                         (splits > 1 ? kAddCycles + splits * p.size / kAddedPerCycle : 0);
    if (p.splits == 0 || cost < least) {
      p.splits = static_cast<int>(splits);
      least = cost;
    }
  }
  return items / call.groups * p.splits <= INT32_MAX;
}

auto PlanOf(const Call& call, int processors) {
  return KeptParams<Params>(PlanKey(call, processors),
                            [&](Params& p) { return Plan(p, call, processors); });
}

int64_t PartBytes(const Params& p) { return p.splits > 1 ? p.splits * p.size * 4 : 0; }

template <typename T>
cudaError_t Launch(cudaStream_t stream, const Params& p, const Call& call) {
  cudaError_t error = cudaFuncSetAttribute(
      &KernelGradMma<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kMmaSharedBytes);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(p.tap_sets * p.slab_sets * p.column_tiles * p.splits),
                  static_cast<unsigned>(call.groups));
  KernelGradMma<T><<<grid, kThreads, kHeadBytes + kStages * p.stage_bytes, stream>>>(p);
  error = cudaGetLastError();
  if (error != cudaSuccess || p.splits == 1) return error;
  return LaunchAddParts(stream, p.result, call.result, call.result_dtype, p.size, p.splits);
}

}  // namespace

int64_t KernelGradMmaWorkspace(const Call& call, int processors) {
  const auto plan = PlanOf(call, processors);
  return plan->has_value() ? PartBytes(**plan) : 0;
}

cudaError_t LaunchKernelGradMma(cudaStream_t stream, const Call& call, Space workspace,
                                int processors) {
  const auto plan = PlanOf(call, processors);
  if (!plan->has_value()) return cudaErrorNotSupported;
  Params p = **plan;
  if (workspace.bytes < PartBytes(p)) return cudaErrorInvalidValue;
  p.image = static_cast<const char*>(call.image);
  p.cotangent = static_cast<const char*>(call.cotangent);
  p.result = static_cast<char*>(p.splits == 1 ? call.result : workspace.data);
  p.is_wide = p.splits > 1 || call.result_dtype == DType::kF32;
  switch (call.dtype) {
    case DType::kF16:
      return Launch<__half>(stream, p, call);
    case DType::kBF16:
      return Launch<__nv_bfloat16>(stream, p, call);
    case DType::kF32:
      return Launch<float>(stream, p, call);
    default:
      return cudaErrorNotSupported;
  }
}

}  // namespace jaxops::conv::cuda
