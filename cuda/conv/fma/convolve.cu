// Convolution in true float32 and in float64, and its input gradient, as a matrix product of
// multiply-adds whose left operand, the patches, is never stored.
//
// A block takes a tile of pixels by outputs. Taps and channels, the axes of the sum, are one index,
// so that no padding fills up channels. Entries of the sum come to shared memory in chunks of 64
// bytes; entries of patches come straight from the image. For that every pixel has a place and
// every entry of the sum has another, and adding the two tells where an entry of a patch is and
// whether it is in the image at all.
//
// A cluster of blocks shares a tile where there are few tiles: every block has a part of the sum,
// and the blocks add the parts in their shared memories, always in the same order.
#include <cmath>

#include "cuda/common/cluster.cuh"
#include "cuda/conv/fma/fma.cuh"
#include "cuda/conv/results.cuh"
#include "cuda/conv/tf32x3.cuh"

namespace jaxops::conv::cuda {
namespace fma {
namespace {

// The ways in which entries of the kernel come to shared memory.
enum class KernelCopies {
  kEntries,  // one by one
  kOutputs,  // by units of outputs
  kSteps,    // by units of entries of the sum
  // Copies by units of entries of the sum as well, in an input gradient of few channels that
  // computes all pixels between strides at once. A pixel of the product here is a cell of those
  // pixels, and a unit of columns has the channels of one pixel of the cell.
  kCells,
};

// The pixels of cells with the same remainders by the strides.
struct Remainder {
  int64_t result;          // bytes from the first pixel of the cell
  uint32_t rows, columns;  // cells that have such a pixel
};
constexpr int kMaxRemainders = 16;

struct Params {
  Images images;
  Pixels pixels;
  const char* kernel;
  char* result;
  // Bytes between groups, between channels and outputs of the kernel, and between pixels of the
  // result.
  int64_t image_group, kernel_group, result_group;
  int kernel_channel, kernel_output;
  int64_t result_image, result_row, result_column;
  FastDivider column_tiles;
  int outputs, columns;  // of the result; of the product
  int remainders;
  // The index of the sum counts `depth` entries in `chunks` chunks: channels of a block, the
  // fastest, taps, and blocks. Blocks are as small as they can be, because neighbouring taps then
  // find the entries of a block in the L1 cache.
  FastDivider block, taps;
  int depth, chunks;
  int parts;  // of the sum, one for each block of a cluster
  // Units are copied and written where these are true, else single entries.
  bool image_units, result_units;
  KernelCopies kernel_copies;
  Epilogue epilogue;
  const int* needed;  // see IsNeeded
  Place tap[kMaxTaps];
  // Bytes from the start of the kernel to the matrix of a tap. With cells there is an entry for a
  // tap and, the fastest, a remainder, negative where the remainder does not have the tap.
  int64_t matrix[kMaxTaps];
  Remainder remainder[kMaxRemainders];
};
static_assert(sizeof(Params) <= 4096);

// The part of a block's shared memory before the stages.
template <typename Tile>
struct alignas(128) Head {
  Place pixels[Tile::kRows];
  int64_t results[Tile::kRows];  // bytes; negative where no pixel exists
  // The steps of the sum in two sets: places in the image, and bytes in the kernel. The bytes count
  // to the tile's first output or, with cells, within a matrix, and are negative after the end.
  Place steps[2 * kSet];
  int64_t matrix_rows[2 * kSet];
};

// A stage has the rows of pixels, a chunk each, and after them the rows of the kernel's chunk.
// Where the kernel is copied by units of steps, these are columns of a chunk each.
template <typename Tile>
constexpr int kImageBytes = Tile::kRows * kChunkBytes;
template <typename Tile>
constexpr int kStageBytes = kImageBytes<Tile> + kChunk<typename Tile::T> * Tile::kPitch;
template <typename Tile>
constexpr int kSharedBytes = sizeof(Head<Tile>) + kStages * kStageBytes<Tile>;

// Blocks of a cluster can have parts of the sum where a part fits in the stages.
template <typename Tile>
constexpr bool kHasParts = Tile::kRows * Tile::kUnits * kUnitBytes <= kStages * kStageBytes<Tile>;
constexpr int kMaxParts = 8;

// Returns where a unit of a pixel's row is. Units of eight neighbouring pixels share no banks.
__device__ __forceinline__ int ImageUnit(int row, int unit) {
  return row * kChunkBytes + (unit ^ (row / 2 % 4)) * kUnitBytes;
}

// The order of columns of a chunk each in a stage: columns that lanes read together are neighbours,
// so that they share no banks either.
template <typename Tile>
struct ColumnOrder {
  static constexpr int kEntries = kUnit<typename Tile::T>;
  static constexpr int kLanes = Tile::kOnTensorCores ? 8 : Tile::kLaneColumns;

  __device__ static int Column(int place) {
    return place / (kLanes * kEntries) * (kLanes * kEntries) + place % kLanes * kEntries +
           place / kLanes % kEntries;
  }

  // Returns where a unit of the sum is for entry n of unit j of a lane.
  __device__ static int Unit(const Lane<Tile>& lane, int j, int n, int unit) {
    if constexpr (Tile::kLaneColumns == 1) {
      return ImageUnit((lane.warp_unit + j) * kEntries + n, unit);
    } else {
      const int first = (lane.warp_unit + j * kLanes) * kEntries + n * kLanes;
      return (first + lane.unit) * kChunkBytes +
             ((unit ^ (n % 2 * 2)) ^ (lane.unit / 2)) * kUnitBytes;
    }
  }
};

template <typename Tile>
__device__ void FindPixels(const Params& p, int first, Head<Tile>& head) {
  for (int i = threadIdx.x; i < Tile::kRows; i += Tile::kThreads) {
    const int number = first + i;
    uint32_t image = min(number, p.pixels.count - 1);
    const int column = p.pixels.columns.DivMod(image);
    const int row = p.pixels.rows.DivMod(image);
    const bool exists = number < p.pixels.count;
    head.pixels[i] = p.pixels.Of(p.images, image, row, column);
    head.pixels[i].byte += blockIdx.y * p.image_group;
    if (!exists) head.pixels[i].row = kNowhere;
    head.results[i] =
        exists ? image * p.result_image + row * p.result_row + column * p.result_column : -1;
  }
}

template <typename Tile, KernelCopies kCopies>
__device__ void FindSteps(const Params& p, int first_column, int set, Head<Tile>& head) {
  using T = typename Tile::T;
  FindSet<Tile>(set, [&](int step, int at) {
    // Steps after the end have the place of the first step, whose copies are as aligned as any.
    const bool exists = step < p.depth;
    uint32_t block = exists ? step : 0;
    int channel = p.block.DivMod(block);
    const int tap = p.taps.DivMod(block);
    channel += block * p.block.divisor();
    Place place = p.tap[tap];
    place.byte += channel * sizeof(T);
    if (!exists) place.column = kNowhere;
    head.steps[at] = place;
    int64_t row = blockIdx.y * p.kernel_group + int64_t{channel} * p.kernel_channel;
    if (kCopies != KernelCopies::kCells) {
      row += p.matrix[tap] + int64_t{first_column} * p.kernel_output;
    }
    head.matrix_rows[at] = exists ? row : -1;
  });
}

// Copies kBytes of some steps of the pixels' rows, a unit or an entry.
template <typename Tile, int kBytes>
__device__ __forceinline__ void CopyImages(const Params& p, const Head<Tile>& head, int chunk,
                                           uint32_t stage) {
  using T = typename Tile::T;
  constexpr int kCopies = kChunkBytes / kBytes, kEntries = kBytes / sizeof(T);
  constexpr int kApart = Tile::kThreads / kCopies;  // rows
  static_assert(Tile::kThreads % kCopies == 0 && Tile::kRows % kApart == 0);
  const int thread = ThreadAnew<Tile::kThreads>();
  const int copy = thread % kCopies, first = thread / kCopies;
  const auto place_of = [&](int row) {
    return stage + ImageUnit(row, copy * kBytes / kUnitBytes) + copy * kBytes % kUnitBytes;
  };
  const uint32_t to = place_of(first);
  const Place step = head.steps[InSets<T>(chunk) + copy * kEntries];
#pragma unroll 8
  for (int row = 0; row < Tile::kRows; row += kApart) {
    const Place pixel = head.pixels[first + row];
    CopyAsync<kBytes>(kApart % 8 == 0 ? to + row * kChunkBytes : place_of(first + row),
                      p.images.data + static_cast<int64_t>(step.byte + pixel.byte),
                      p.images.Has(pixel, step));
  }
}

// Copies kBytes of some rows of the kernel's matrices, a unit or an entry, of `outputs` outputs
// from the tile's first output on.
template <typename Tile, int kBytes>
__device__ __forceinline__ void CopyKernel(const Params& p, int outputs, const Head<Tile>& head,
                                           int chunk, uint32_t stage) {
  using T = typename Tile::T;
  constexpr int kSteps = kChunk<T>, kEntries = kBytes / sizeof(T);
  constexpr int kCopies = Tile::kColumns / kEntries;
  // Entries are next to each other in the kernel along outputs or, in the gradient, along channels.
  // Writes of eight neighbours at a time share no banks.
  constexpr int kAdjacent = kEntries > 1 ? 1 : 8;
  ForOwn<kSteps * kCopies, Tile::kThreads>([&](int i) {
    const int step = i % kAdjacent + i / (kAdjacent * kCopies) * kAdjacent;
    const int copy = i / kAdjacent % kCopies;
    const int64_t row = head.matrix_rows[InSets<T>(chunk) + step];
    const int64_t at = kEntries > 1 ? copy * kBytes : int64_t{copy} * p.kernel_output;
    CopyAsync<kBytes>(stage + step * Tile::kPitch + copy * kBytes, p.kernel, row + at,
                      row >= 0 && copy * kEntries < outputs);
  });
}

// Returns where the matrices of a chunk begin, for all remainders. The steps of a chunk have one
// tap.
__device__ __forceinline__ const int64_t* Matrices(const Params& p, int chunk) {
  uint32_t block = chunk;
  return p.matrix + p.taps.DivMod(block) * p.remainders;
}

// Copies units of steps of `outputs` columns from `first_column` on.
template <typename Tile, bool kCells>
__device__ __forceinline__ void CopyColumns(const Params& p, int first_column,
                                            const Head<Tile>& head, int chunk, uint32_t stage) {
  using T = typename Tile::T;
  constexpr int kCopies = kChunkBytes / kUnitBytes;
  const int64_t* matrices = kCells ? Matrices(p, chunk) : nullptr;
  ForOwn<Tile::kColumns * kCopies, Tile::kThreads>([&](int i) {
    const int copy = i % kCopies, place = i / kCopies;
    int column = ColumnOrder<Tile>::Column(place);
    int64_t row = head.matrix_rows[InSets<T>(chunk) + copy * kUnit<T>];
    bool exists = row >= 0;
    if constexpr (kCells) {
      const int remainder = (first_column + column) / kUnit<T>;
      column %= kUnit<T>;
      const int64_t matrix = remainder < p.remainders ? matrices[remainder] : -1;
      exists = exists && matrix >= 0 && column < p.outputs;
      row += matrix;
    } else {
      exists = exists && column < p.outputs - first_column;
    }
    CopyAsync<kUnitBytes>(stage + ImageUnit(place, copy), p.kernel,
                          row + int64_t{column} * p.kernel_output, exists);
  });
}

// Calls write(i, j, sums) for the units of this thread that its block finishes, with the sums of
// all blocks of the cluster. Each block has its own sums in `of_block`.
template <typename Tile, typename Sums, typename Write>
__device__ __forceinline__ void AddParts(const Params& p, const Sums& sums, char* of_block,
                                         Write&& write) {
#if __CUDA_ARCH__ >= 900
  using T = typename Tile::T;
  constexpr int kCount = Tile::kThreadRows * Tile::kThreadUnits;
  const auto at = [&](int i) { return (i * Tile::kThreads + threadIdx.x) * kUnitBytes; };
  WaitCopies<0>();
  __syncthreads();  // all threads have multiplied the last chunk
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    *reinterpret_cast<Unit<T>*>(of_block + at(i)) =
        sums[i / Tile::kThreadUnits][i % Tile::kThreadUnits];
  }
  namespace cluster = jaxops::cuda::cluster;
  cluster::Sync();
  for (int i = cluster::BlockRank(); i < kCount; i += p.parts) {
    Unit<T> parts[kMaxParts];
#pragma unroll
    for (int k = 0; k < kMaxParts; ++k) {
      if (k < p.parts) parts[k] = Load<T>(cluster::MapSharedRank(of_block, k) + at(i));
    }
    Unit<T> sum = parts[0];
#pragma unroll
    for (int k = 1; k < kMaxParts; ++k) {
#pragma unroll
      for (int n = 0; n < kUnit<T>; ++n) {
        if (k < p.parts) sum.entry[n] += parts[k].entry[n];
      }
    }
    write(i / Tile::kThreadUnits, i % Tile::kThreadUnits, sum);
  }
  cluster::Sync();  // no block ends while others read its memory
#endif
}

// Tells whether a block has so many threads that sums and operands fill the registers of each.
template <typename Tile>
constexpr bool kIsCrowded = Tile::kThreads * Tile::kBlocks >= 512 &&
                            Tile::kThreadRows * Tile::kThreadUnits >= 8 && Tile::kLaneColumns > 1;

template <typename Tile, bool kImageUnits, KernelCopies kCopies>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    ConvolveFma(const __grid_constant__ Params p) {
  using T = typename Tile::T;
  constexpr bool kCells = kCopies == KernelCopies::kCells;
  constexpr bool kColumnUnits = kCells || kCopies == KernelCopies::kSteps;
  if (!IsNeeded(p.needed)) return;
  extern __shared__ __align__(128) char shared[];
  Head<Tile>& head = *reinterpret_cast<Head<Tile>*>(shared);
  char* const stages = shared + sizeof(Head<Tile>);
  const uint32_t stage_address = SharedAddress(stages);

  uint32_t row_tile = blockIdx.x;
  int part = 0;
  if constexpr (kHasParts<Tile>) {
    part = row_tile % p.parts;
    row_tile /= p.parts;
  }
  const int first_column = p.column_tiles.DivMod(row_tile) * Tile::kColumns;
  const int begin = static_cast<int>(int64_t{p.chunks} * part / p.parts);
  const int end = static_cast<int>(int64_t{p.chunks} * (part + 1) / p.parts);
  FindPixels(p, row_tile * Tile::kRows, head);
  const auto find = [&](int set) { FindSteps<Tile, kCopies>(p, first_column, set, head); };
  if (p.chunks > 0) FindFirstSets<T>(begin, find);
  __syncthreads();

  const auto copy = [&](int chunk, int stage) {
    const uint32_t to = stage_address + stage * kStageBytes<Tile>;
    CopyImages<Tile, kImageUnits ? kUnitBytes : sizeof(T)>(p, head, chunk, to);
    if constexpr (kColumnUnits) {
      CopyColumns<Tile, kCells>(p, first_column, head, chunk, to + kImageBytes<Tile>);
    } else {
      CopyKernel<Tile, kCopies == KernelCopies::kOutputs ? kUnitBytes : sizeof(T)>(
          p, p.outputs - first_column, head, chunk, to + kImageBytes<Tile>);
    }
  };
  for (int i = 0; i < kAhead; ++i) {
    if (begin + i < end) copy(begin + i, i);
    CommitCopies();
  }

  Unit<T> sums[Tile::kThreadRows][Tile::kThreadUnits] = {};
  int stage = 0;
  for (int chunk = begin; chunk < end; ++chunk) {
    WaitCopies<kAhead - 1>();
    // The barrier tells that all threads have copied this chunk and multiplied the previous chunk,
    // whose stage is filled next.
    __syncthreads();
    if (chunk + kAhead < end) {
      copy(chunk + kAhead, stage == 0 ? kAhead : stage - 1);
      FindNextSet<T>(chunk, find);
    }
    CommitCopies();

    const Lane<Tile> lane;
    const char* left = stages + stage * kStageBytes<Tile>;
    const char* right = left + kImageBytes<Tile>;
    const auto load_row = [&](int i, int unit) {
      return Load<T>(left + ImageUnit(lane.warp_row + lane.row, unit) +
                     i * Tile::kLaneRows * kChunkBytes);
    };
    if constexpr (Tile::kOnTensorCores) {
      Unit<T> b[2];
      if constexpr (kColumnUnits) {
        const char* column = right + lane.warp_unit * kUnit<T> * kChunkBytes;
        const Unit<T> first = Load<T>(column + ImageUnit(lane.row, lane.unit / 2));
        const Unit<T> second = Load<T>(column + ImageUnit(8 + lane.row, lane.unit / 2));
        b[0] = {first.entry[0], second.entry[0]};
        b[1] = {first.entry[1], second.entry[1]};
      } else {
        LoadColumns(lane, right, b);
      }
      MultiplyChunk<Tile>(
          b,
          [&](int i, double (&a)[4]) {
            const Unit<T> first = load_row(2 * i, lane.unit / 2);
            const Unit<T> second = load_row(2 * i + 1, lane.unit / 2);
            a[0] = first.entry[0];
            a[1] = second.entry[0];
            a[2] = first.entry[1];
            a[3] = second.entry[1];
          },
          sums);
    } else {
      const int64_t* matrices =
          kCells ? Matrices(p, chunk) + first_column / kUnit<T> + lane.warp_unit : nullptr;
      // Unrolling this loop further moves entries from register to register, because sums and
      // operands fill the registers.
#pragma unroll(kIsCrowded<Tile>&& kCopies == KernelCopies::kSteps ? 1 : kChunkBytes / kUnitBytes)
      for (int u = 0; u < kChunkBytes / kUnitBytes; ++u) {
        Unit<T> a[Tile::kThreadRows];
#pragma unroll
        for (int i = 0; i < Tile::kThreadRows; ++i) a[i] = load_row(i, u);
        if constexpr (kColumnUnits) {
#pragma unroll
          for (int j = 0; j < Tile::kThreadUnits; ++j) {
            if constexpr (kCells) {
              const int remainder = first_column / kUnit<T> + lane.warp_unit + j;
              if (remainder >= p.remainders || matrices[j] < 0) continue;
            }
            Unit<T> b[kUnit<T>];
#pragma unroll
            for (int n = 0; n < kUnit<T>; ++n) {
              b[n] = Load<T>(right + ColumnOrder<Tile>::Unit(lane, j, n, u));
            }
#pragma unroll
            for (int n = 0; n < kUnit<T>; ++n) {
#pragma unroll
              for (int e = 0; e < kUnit<T>; ++e) {
#pragma unroll
                for (int i = 0; i < Tile::kThreadRows; ++i) {
                  sums[i][j].entry[n] += a[i].entry[e] * b[n].entry[e];
                }
              }
            }
          }
        } else {
#pragma unroll
          for (int e = 0; e < kUnit<T>; ++e) {
            Unit<T> b[Tile::kThreadUnits];
#pragma unroll
            for (int j = 0; j < Tile::kThreadUnits; ++j) {
              b[j] =
                  Load<T>(right + (u * kUnit<T> + e) * Tile::kPitch + lane.Column(j) * kUnitBytes);
            }
#pragma unroll
            for (int i = 0; i < Tile::kThreadRows; ++i) {
#pragma unroll
              for (int j = 0; j < Tile::kThreadUnits; ++j) {
#pragma unroll
                for (int n = 0; n < kUnit<T>; ++n) {
                  sums[i][j].entry[n] += a[i].entry[e] * b[j].entry[n];
                }
              }
            }
          }
        }
      }
    }
    stage = stage == kAhead ? 0 : stage + 1;
  }

  const Lane<Tile> lane;
  const auto write = [&](int i, int j, Unit<T>& unit) {
    const int row = lane.warp_row + i * Tile::kLaneRows + lane.row;
    int64_t offset = head.results[row];
    int column = first_column + lane.Column(j) * kUnit<T>;
    if (offset < 0) return;
    if constexpr (kCells) {
      const int remainder = column / kUnit<T>;
      if (remainder >= p.remainders) return;
      const Remainder& of_cell = p.remainder[remainder];
      if (head.pixels[row].row >= of_cell.rows || head.pixels[row].column >= of_cell.columns) {
        return;
      }
      offset += of_cell.result;
      column = 0;
    }
    T* to = reinterpret_cast<T*>(p.result + blockIdx.y * p.result_group + offset);
    Finish(p.epilogue, int64_t{blockIdx.y} * p.outputs + column, p.outputs - column, unit.entry);
    Store(to + column, unit, p.outputs - column, p.result_units);
  };
  if constexpr (kHasParts<Tile>) {
    if (p.parts > 1) {
      AddParts<Tile>(p, sums, stages, write);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < Tile::kThreadRows; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::kThreadUnits; ++j) write(i, j, sums[i][j]);
  }
}

// --- plans and launches on the host --------------------------------------------------------------

// The tile for products of cells.
template <typename T>
using CellTile = Tile<T, 2, 1, 32, 2, 4, 7, 240>;
template <typename Tile>
constexpr bool kIsOfCells = std::is_same_v<Tile, CellTile<typename Tile::T>>;

template <typename Tile>
cudaError_t LaunchTile(cudaStream_t stream, Params& p, int64_t groups) {
  const int64_t column_tiles = CeilDiv(p.columns, Tile::kColumns);
  const int64_t blocks = CeilDiv(p.pixels.count, Tile::kRows) * column_tiles * p.parts;
  if (blocks > INT32_MAX || groups > kMaxGroups) return cudaErrorNotSupported;
  p.column_tiles = FastDivider(column_tiles);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(groups));
  const auto launch = [&]<bool kImageUnits, KernelCopies kCopies>() {
    const auto kernel = &ConvolveFma<Tile, kImageUnits, kCopies>;
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<Tile>);
    if (error != cudaSuccess) return error;
    if (p.parts > 1) {
      return jaxops::cuda::LaunchClusters(kernel, grid, p.parts, Tile::kThreads, kSharedBytes<Tile>,
                                          stream, p);
    }
    kernel<<<grid, Tile::kThreads, kSharedBytes<Tile>, stream>>>(p);
    return cudaGetLastError();
  };
  if constexpr (kIsOfCells<Tile>) {
    return launch.template operator()<true, KernelCopies::kCells>();
  } else {
    switch (p.kernel_copies) {
      case KernelCopies::kSteps:
        return launch.template operator()<true, KernelCopies::kSteps>();
      case KernelCopies::kOutputs:
        return p.image_units ? launch.template operator()<true, KernelCopies::kOutputs>()
                             : launch.template operator()<false, KernelCopies::kOutputs>();
      default:
        return p.image_units ? launch.template operator()<true, KernelCopies::kEntries>()
                             : launch.template operator()<false, KernelCopies::kEntries>();
    }
  }
}

// Tells whether clusters can be launched: the device code, too, may be for GPUs without clusters.
bool CanLaunchClusters() {
  cudaFuncAttributes attributes{};
  const auto kernel = &ConvolveFma<CellTile<float>, true, KernelCopies::kCells>;
  return jaxops::cuda::HasClusters() && cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess &&
         attributes.ptxVersion >= 90;
}

// The cuts of a sum: tiles, and parts of each.
struct Plan {
  cudaError_t (*launch)(cudaStream_t, Params&, int64_t groups);
  int parts;
  int64_t cycles;  // estimated
};

// Replaces `plan` by the fastest plan with these tiles, if that is faster.
template <typename Tile>
void Consider(Plan& plan, const Params& p, int64_t groups, int processors, bool has_parts) {
  // Cycles measured on an H200, like the percentages of tiles: kBlockCycles before the first
  // product and after the last, kChunkCycles as a minimum for a chunk, and kAddedPerCycle bytes of
  // all blocks for adding parts.
  constexpr int64_t kBlockCycles = 6000, kChunkCycles = 560;
  constexpr int64_t kAddedPerCycle = 9;
  const int64_t tiles =
      CeilDiv(p.pixels.count, Tile::kRows) * CeilDiv(p.columns, Tile::kColumns) * groups;
  const int most =
      kHasParts<Tile> && has_parts ? std::clamp(std::min(p.chunks, processors), 1, kMaxParts) : 1;
  for (const int parts : {1, 2, 3, 4, 6, 8}) {
    if (parts > most) break;
    const int64_t load = CeilDiv(tiles * parts, processors), chunks = CeilDiv(p.chunks, parts);
    const int64_t turns = CeilDiv(load, Tile::kBlocks);
    // Not std::pow, which needs glibc 2.29: wheels are for older ones.
    const double warps = static_cast<double>(Warps<Tile>(load));
    const double few_warps = 960 / (warps * std::sqrt(warps));
    const int64_t products =
        ProductCycles<Tile>(load, chunks, Tile::kPercent + static_cast<int64_t>(few_warps));
    const int64_t added = load * Tile::kRows * Tile::kUnits * kUnitBytes;
    const int64_t cycles = std::max(products, turns * chunks * kChunkCycles) +
                           turns * kBlockCycles + (parts > 1 ? added / kAddedPerCycle : 0);
    if (!plan.launch || cycles < plan.cycles) plan = {&LaunchTile<Tile>, parts, cycles};
  }
}

// Decides between tiles; ties go to the first.
template <typename... Tiles>
Plan FirstDone(const Params& p, int64_t groups, int processors, bool has_parts) {
  Plan plan{};
  (Consider<Tiles>(plan, p, groups, processors, has_parts), ...);
  return plan;
}

// Tiles have at least 64 bytes of outputs, or one or two units for results with fewer outputs.
// Tensor cores multiply the first three tiles of float64.
template <typename T>
Plan Decide(const Params& p, int64_t groups, int processors, bool has_parts) {
  if constexpr (sizeof(T) == 8) {
    return FirstDone<Tile<T, 2, 4, 8, 8, 2, 2, 185>, Tile<T, 2, 2, 8, 8, 2, 4, 200>,
                     Tile<T, 2, 2, 8, 4, 2, 5, 230>, Tile<T, 2, 2, 8, 4, 1, 6, 230>,
                     Tile<T, 4, 1, 8, 4, 1, 6, 275>, Tile<T, 2, 2, 8, 2, 1, 6, 265>,
                     Tile<T, 4, 1, 32, 2, 2, 4, 300>, Tile<T, 2, 1, 32, 4, 1, 3, 1000>>(
        p, groups, processors, has_parts);
  } else {
    return FirstDone<Tile<T, 1, 8, 8, 16, 2, 1, 115>, Tile<T, 2, 4, 8, 8, 2, 2, 155>,
                     Tile<T, 2, 2, 8, 8, 2, 4, 150>, Tile<T, 2, 2, 8, 4, 2, 5, 165>,
                     Tile<T, 2, 2, 8, 4, 1, 6, 230>, Tile<T, 4, 1, 8, 4, 1, 6, 275>,
                     Tile<T, 2, 2, 8, 2, 1, 6, 265>, Tile<T, 4, 1, 32, 2, 2, 4, 300>,
                     Tile<T, 2, 1, 32, 4, 1, 3, 1000>>(p, groups, processors, has_parts);
  }
}

template <typename T>
Plan DecideCells(const Params& p, int64_t groups, int processors) {
  return FirstDone<CellTile<T>>(p, groups, processors, CanLaunchClusters());
}

// How the matrices of a kernel lie in memory: entries from one channel, output or group to the
// next.
struct KernelSteps {
  int64_t channel, output, group;
};

// Fills in everything that does not depend on taps; returns false if sizes are too large.
template <typename T>
bool Fill(Params& p, const Sum& sum, const KernelSteps& kernel) {
  constexpr int64_t kItem = sizeof(T);
  const int64_t all_channels = sum.groups * sum.channels, all_outputs = sum.groups * sum.outputs;
  const int64_t pixels = sum.images * sum.rows * sum.columns;
  // The bound leaves room for counting tiles and chunks after the end in 32 bits.
  constexpr int64_t kMaxIndex = INT32_MAX - 4096;
  if (pixels > kMaxIndex || sum.taps * sum.channels > kMaxIndex ||
      all_channels * kItem > kMaxIndex || all_outputs * kItem > kMaxIndex) {
    return false;
  }
  p.images.data = static_cast<const char*>(sum.image);
  p.images.rows = static_cast<uint32_t>(sum.image_rows);
  p.images.columns = static_cast<uint32_t>(sum.image_columns);
  p.images.pixel_bytes = static_cast<int>(all_channels * kItem);
  p.images.row_bytes = sum.image_columns * p.images.pixel_bytes;
  p.images.image_bytes = sum.image_rows * p.images.row_bytes;
  p.image_group = sum.channels * kItem;
  p.image_units = AreUnits<T>(sum.image, all_channels, sum.channels);

  p.pixels.rows = FastDivider(sum.rows);
  p.pixels.columns = FastDivider(sum.columns);
  p.pixels.stride_row = static_cast<uint32_t>(sum.stride_row);
  p.pixels.stride_column = static_cast<uint32_t>(sum.stride_column);
  p.pixels.count = static_cast<int>(pixels);

  p.outputs = p.columns = static_cast<int>(sum.outputs);
  p.result = static_cast<char*>(sum.result);
  p.epilogue = sum.epilogue;
  p.result_group = sum.outputs * kItem;
  p.result_image = sum.result_image * kItem;
  p.result_row = sum.result_row * kItem;
  p.result_column = sum.result_column * kItem;
  p.result_units = AreUnits<T>(sum.result, all_outputs, sum.outputs);

  const int64_t block = sum.channels % kChunk<T> == 0 ? kChunk<T> : sum.channels;
  p.block = FastDivider(block);
  p.taps = FastDivider(std::max(sum.taps, 1));
  p.depth = static_cast<int>(sum.taps * sum.channels);
  p.chunks = static_cast<int>(CeilDiv(p.depth, kChunk<T>));
  for (int t = 0; t < sum.taps; ++t) p.tap[t] = p.images.Of(sum.tap[t]);
  p.kernel = static_cast<const char*>(sum.kernel);
  p.kernel_channel = static_cast<int>(kernel.channel * kItem);
  p.kernel_output = static_cast<int>(kernel.output * kItem);
  p.kernel_group = kernel.group * kItem;
  // The kernel's channels or outputs, whichever the kernel has for all groups, must be whole units.
  const bool are_steps =
      kernel.channel == 1 && p.image_units && AreUnits<T>(sum.kernel, all_channels, sum.channels);
  const bool are_outputs = kernel.output == 1 && AreUnits<T>(sum.kernel, all_outputs, sum.outputs);
  p.kernel_copies = are_outputs ? KernelCopies::kOutputs
                    : are_steps ? KernelCopies::kSteps
                                : KernelCopies::kEntries;
  return true;
}

// Fills in the matrices of taps.
template <typename T>
void FillMatrices(Params& p, const Sum& sum) {
  const int64_t bytes = sum.channels * sum.groups * sum.outputs * static_cast<int64_t>(sizeof(T));
  for (int t = 0; t < sum.taps; ++t) p.matrix[t] = sum.tap[t].matrix * bytes;
}

cudaError_t LaunchPlan(cudaStream_t stream, Params& p, const Plan& plan, int64_t groups) {
  p.parts = plan.parts;
  return plan.launch(stream, p, groups);
}

struct ForwardPlans;
struct InputGradPlans;

template <typename T, typename Plans>
cudaError_t Launch(cudaStream_t stream, const Call& call, const Sum& sum, const KernelSteps& kernel,
                   const int* needed) {
  int processors = 0;
  const cudaError_t error = jaxops::cuda::CountProcessors(&processors);
  if (error != cudaSuccess) return error;
  Params p{};
  if (!Fill<T>(p, sum, kernel)) return cudaErrorNotSupported;
  FillMatrices<T>(p, sum);
  p.needed = needed;
  const bool has_parts = CanLaunchClusters();
  const auto plan = KeptPlan<Plans>(PlanKey(call, processors, 2 * sum.number + has_parts), [&] {
    return Decide<T>(p, sum.groups, processors, has_parts);
  });
  return LaunchPlan(stream, p, *plan, sum.groups);
}

// Computes the gradient of all pixels between strides at once, if each has few channels.
// LaunchInputGradSums has a sum for each remainder by the strides; here the remainders are columns
// of one product, whose taps are the taps of any remainder. Units of columns skip taps that they do
// not have.
template <typename T>
cudaError_t LaunchCells(cudaStream_t stream, const Call& call, const KernelSteps& kernel,
                        const int* needed, bool& is_done) {
  constexpr int64_t kItem = sizeof(T);
  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  const int64_t channels = call.channels / call.groups, outputs = call.outputs / call.groups;
  const int64_t remainders = std::min(h.stride, h.in) * std::min(w.stride, w.in);
  if (remainders < 2 || remainders > kMaxRemainders || channels > kUnit<T> ||
      outputs % kChunk<T> != 0 || !AreUnits<T>(call.kernel, call.outputs, outputs)) {
    return cudaSuccess;
  }
  Sum cells{};
  int64_t matrix[kMaxTaps];
  Remainder remainder[kMaxRemainders];
  int count = 0;
  bool fits = true;
  const cudaError_t error = LaunchInputGradSums(call, [&](const Sum& sum) {
    // The first remainder has the maximum of rows and columns.
    if (count == 0) {
      cells = sum;
      cells.taps = 0;
    }
    remainder[count] = {
        static_cast<const char*>(sum.result) - static_cast<const char*>(call.result),
        static_cast<uint32_t>(sum.rows), static_cast<uint32_t>(sum.columns)};
    for (int t = 0; t < sum.taps && fits; ++t) {
      const auto is_same = [&](const Tap& tap) {
        return tap.row == sum.tap[t].row && tap.column == sum.tap[t].column;
      };
      const int at =
          static_cast<int>(std::find_if(cells.tap, cells.tap + cells.taps, is_same) - cells.tap);
      if (at == cells.taps) {
        fits = (at + 1) * remainders <= kMaxTaps;
        if (!fits) break;
        cells.tap[cells.taps++] = sum.tap[t];
        std::fill_n(matrix + at * remainders, remainders, -1);
      }
      matrix[at * remainders + count] = sum.tap[t].matrix * outputs * call.channels * kItem;
    }
    ++count;
    return cudaSuccess;
  });
  if (error != cudaSuccess || !fits || cells.taps == 0) return error;
  Params p{};
  int processors = 0;
  const cudaError_t counted = jaxops::cuda::CountProcessors(&processors);
  if (counted != cudaSuccess) return counted;
  if (!Fill<T>(p, cells, kernel) || !p.image_units) return cudaSuccess;
  p.needed = needed;
  p.remainders = count;
  p.columns = count * kUnit<T>;
  p.kernel_copies = KernelCopies::kCells;
  std::copy_n(matrix, cells.taps * count, p.matrix);
  std::copy_n(remainder, count, p.remainder);
  is_done = true;
  return LaunchPlan(stream, p, DecideCells<T>(p, call.groups, processors), call.groups);
}

template <typename T>
cudaError_t LaunchForward(cudaStream_t stream, const Call& call, const int* needed) {
  return LaunchForwardSum(call, [&](const Sum& sum) {
    return Launch<T, ForwardPlans>(stream, call, sum, {call.outputs, 1, sum.outputs}, needed);
  });
}

template <typename T>
cudaError_t LaunchInputGrad(cudaStream_t stream, const Call& call, const int* needed) {
  const KernelSteps kernel = {1, call.outputs, call.outputs / call.groups};
  bool is_done = false;
  const cudaError_t error = LaunchCells<T>(stream, call, kernel, needed, is_done);
  if (error != cudaSuccess || is_done) return error;
  return LaunchInputGradSums(call, [&](const Sum& sum) {
    return Launch<T, InputGradPlans>(stream, call, sum, kernel, needed);
  });
}

}  // namespace
}  // namespace fma

int64_t FmaCycles(const Sum& sum, bool is_input_grad, int processors) {
  const fma::KernelSteps kernel = is_input_grad ? fma::KernelSteps{1, sum.channels, sum.channels}
                                                : fma::KernelSteps{sum.outputs, 1, sum.outputs};
  fma::Params p{};
  if (!fma::Fill<float>(p, sum, kernel)) return 0;
  return fma::Decide<float>(p, sum.groups, processors, true).cycles;
}

cudaError_t LaunchForwardFma(cudaStream_t stream, const Call& call, const int* needed) {
  return call.dtype == DType::kF64 ? fma::LaunchForward<double>(stream, call, needed)
                                   : fma::LaunchForward<float>(stream, call, needed);
}

cudaError_t LaunchInputGradFma(cudaStream_t stream, const Call& call, const int* needed) {
  return call.dtype == DType::kF64 ? fma::LaunchInputGrad<double>(stream, call, needed)
                                   : fma::LaunchInputGrad<float>(stream, call, needed);
}

}  // namespace jaxops::conv::cuda
