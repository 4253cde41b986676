// Convolution on Hopper as a matrix product whose left operand, the patches, is never stored.
//
// A block takes tiles of kRows pixels by kColumns outputs. For 16 to 64 channels at a time a bulk
// copy brings the rows of the image that the windows of all its pixels touch, once for all taps: an
// entry of a patch is then an address, and ldmatrix takes the fragments of the left operand from
// wherever the pixels of a tap lie. Another bulk copy brings the kernel's part for a tap and these
// channels, which is the right operand as it lies in shared memory. Two warps only copy, ahead of
// the warpgroups that multiply, through two rings of stages.
//
// The input gradient is the same sum over the cotangent with taps mirrored and the kernel
// transposed. With strides it is several such sums, up to kMaxSums of which are one launch.
#ifndef JAXOPS_CUDA_CONV_WGMMA_CONVOLVE_CUH_
#define JAXOPS_CUDA_CONV_WGMMA_CONVOLVE_CUH_

#include <span>

#include "cuda/conv/tf32x3.cuh"
#include "cuda/conv/tiles.cuh"

namespace jaxops::conv::cuda {
namespace tiled {

// Entries of float32, each multiplied as two parts of TF32. Kernel entries are already split, and
// the matrices of low parts come after all matrices of high parts.
struct FloatPair {
  float entry;
};
template <typename T>
inline constexpr bool kIsPaired = std::is_same_v<T, FloatPair>;
// The number of parts of an operand for each entry.
template <typename T>
inline constexpr int kEntryParts = kIsPaired<T> ? 2 : 1;

// Steps of a chunk of a group: a step is 16 channels of a tap. A chunk has several taps if a tap
// has fewer steps than a chunk.
inline constexpr int kSteps = 4;
inline constexpr int kBarrierBytes = 1024;
inline constexpr int kMaxLogSplits = 3;  // clusters have at most 8 blocks
inline constexpr int kStagesBytes =
    kSharedBytes - kBarrierBytes - 1024;  // less the alignment of the stages

// The sums of one launch. Input gradients alone have several; those of split entries also launch
// each on its own.
inline constexpr int kMaxSums = 8;
template <typename T, bool kAcross>
inline constexpr int kSums = kAcross || kIsPaired<T> ? 1 : kMaxSums;

// What the sums of a launch share: an array has the entries of all of them, one sum after the
// other. Together these have no more taps than the window, because each tap is in one sum.
struct Common {
  CUtensorMap kernel_map;
  int log_splits;  // log2 of the blocks of a cluster that share the sum of a tile
  bool is_wide;    // the result is f32
  // For split entries: the distance from a matrix of the kernel to its low part, in matrices, and
  // the flag to set where a sum is not finite.
  int low_matrices;
  int* flag;
  Epilogue epilogue;
  Group group[kMaxTaps];
  int16_t matrix[kMaxTaps];  // of the kernel, by tap
  // The distance from the entry of a group's first tap and channel to the entry of a step, in a
  // stage. A chunk has one tap or several.
  int4 step_bytes[kMaxTaps];
  int16_t first_chunk[kMaxTaps], end_chunk[kMaxTaps];  // of a group, counted from those of its sum
};

struct SumParams : Layout {
  CUtensorMap image_map;
  void* result;
  int64_t result_image, result_row, result_column;  // entries between neighbours of the result
  int outputs, pixels, tiles;
  FastDivider column_tiles;
  int channel_blocks, last_steps;  // steps of a tap in the last block
  int chunk_taps;
  FastDivider chunks;                                          // of a block of channels
  int image_stage, image_stages, kernel_stage, kernel_stages;  // bytes of a stage; number of stages
  int first_group, end_group, first_tap;
  bool has_taps;
};

template <int kCount>
struct Params {
  Common common;
  SumParams sum[kCount];
};

// A block's part of the sum of a tile, in chunks of all blocks of channels. A block that has the
// whole sum needs none of this at run time.
template <bool kSplit>
struct Part {
  int first, end;

  __device__ Part(const Common& common, const SumParams& p) {
    const int chunks = p.channel_blocks * static_cast<int>(p.chunks.divisor());
    const int rank = blockIdx.x & ((1 << common.log_splits) - 1);
    first = chunks * rank >> common.log_splits;
    end = chunks * (rank + 1) >> common.log_splits;
  }

  __device__ bool HasChunk(const SumParams& p, int block, int chunk) const {
    const int number = block * static_cast<int>(p.chunks.divisor()) + chunk;
    return !kSplit || (number >= first && number < end);
  }

  // FirstBlock and EndBlock bound the blocks of channels that the part touches.
  __device__ int FirstBlock(const SumParams& p) const {
    return kSplit ? p.chunks.Quotient(first) : 0;
  }
  __device__ int EndBlock(const SumParams& p) const {
    return kSplit ? p.chunks.Quotient(end - 1) + 1 : p.channel_blocks;
  }

  // Tells whether any chunk of the group is in the part.
  __device__ bool HasGroup(const Common& common, const SumParams& p, int block, int group) const {
    const int before = block * static_cast<int>(p.chunks.divisor());
    return !kSplit ||
           (before + common.end_chunk[group] > first && before + common.first_chunk[group] < end);
  }

  // FirstTile and TileStep tell the tiles of the block; blocks of a cluster have the same tiles.
  __device__ static int FirstTile(const Common& common) {
    return kSplit ? blockIdx.x >> common.log_splits : blockIdx.x;
  }
  __device__ static int TileStep(const Common& common) {
    return kSplit ? gridDim.x >> common.log_splits : gridDim.x;
  }
};

// A pixel by its strip, row and column.
struct Pixel {
  uint32_t strip, row, column;

  __device__ Pixel(const SumParams& p, uint32_t number) {
    column = p.strip_width.DivMod(number);
    row = p.rows.DivMod(number);
    strip = number;
  }
};

struct Barriers {
  uint64_t image_full[kMaxStages], image_empty[kMaxStages];
  uint64_t kernel_full[kMaxStages], kernel_empty[kMaxStages];
};
static_assert(sizeof(Barriers) <= kBarrierBytes);

template <typename T, int kRows, bool kSplit>
__device__ void CopyImages(const Common& common, const SumParams& p, Barriers& barriers,
                           char* stages) {
  constexpr int kItem = sizeof(T);
  const int lane = threadIdx.x % 32;
  const Part<kSplit> part(common, p);
  Ring ring;
  for (int tile = part.FirstTile(common); tile < p.tiles; tile += part.TileStep(common)) {
    const int begin = p.column_tiles.Quotient(tile) * kRows;
    const int end = min(begin + kRows, p.pixels);
    const Rows rows(p, p.strip_width.Quotient(begin), p.strip_width.Quotient(end - 1));
    for (int block = part.FirstBlock(p); block < part.EndBlock(p); ++block) {
      for (int g = p.first_group; g < p.end_group; ++g) {
        if (!part.HasGroup(common, p, block, g)) continue;
        Wait(&barriers.image_empty[ring.stage], ring.parity ^ 1);
        uint64_t* full = &barriers.image_full[ring.stage];
        if (lane == 0) Expect(full, rows.count * p.copy_bytes);
        __syncwarp();
        char* stage = stages + ring.stage * p.image_stage;
        CopyRows(p, p.image_map, rows, common.group[g], block * (p.row_bytes / kItem), stage, full);
        ring.Advance(p.image_stages);
      }
    }
  }
}

// The columns of the kernel's part in a stage. A row across the sum of a swizzled matrix has at
// least 64.
template <int kColumns, bool kAcross>
inline constexpr int kKernelColumns = kAcross && kColumns < 64 ? 64 : kColumns;

template <typename T, int kColumns, bool kAcross, bool kSplit>
__device__ void CopyKernels(const Common& common, const SumParams& p, Barriers& barriers,
                            char* stages) {
  if (threadIdx.x % 32 != 0) return;
  const Part<kSplit> part(common, p);
  Ring ring;
  const int tap_bytes = kKernelColumns<kColumns, kAcross> * p.row_bytes;
  constexpr int kEntryParts = tiled::kEntryParts<T>;
  for (int tile = part.FirstTile(common); tile < p.tiles; tile += part.TileStep(common)) {
    uint32_t column = tile;
    column = p.column_tiles.DivMod(column) * kColumns;
    for (int block = part.FirstBlock(p); block < part.EndBlock(p); ++block) {
      const int channel = block * (p.row_bytes / static_cast<int>(sizeof(T)));
      int chunk = 0;
      for (int g = p.first_group; g < p.end_group; ++g) {
        const int end = common.group[g].end;
        for (int begin = common.group[g].begin; begin < end; begin += p.chunk_taps, ++chunk) {
          if (!part.HasChunk(p, block, chunk)) continue;
          const int taps = min(p.chunk_taps, end - begin);
          Wait(&barriers.kernel_empty[ring.stage], ring.parity ^ 1);
          uint64_t* full = &barriers.kernel_full[ring.stage];
          // Chunks of split entries are always whole: taps that do not exist are zeros.
          const int copied = kIsPaired<T> ? p.chunk_taps : taps;
          Expect(full, kEntryParts * copied * tap_bytes);
#pragma unroll
          for (int k = 0; k < kEntryParts; ++k) {
            char* to = stages + ring.stage * p.kernel_stage + k * (p.kernel_stage / kEntryParts);
            for (int t = begin; t < begin + copied; ++t) {
              const int matrix = kIsPaired<T> && t >= end
                                     ? 2 * common.low_matrices
                                     : common.matrix[t] + k * common.low_matrices;
              constexpr int kParts = kAcross ? kKernelColumns<kColumns, kAcross> / 64 : 1;
#pragma unroll
              for (int i = 0; i < kParts; ++i) {
                const int at_column = column + 64 * i;
                const int32_t at[3] = {kAcross ? at_column : channel, kAcross ? channel : at_column,
                                       matrix};
                ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, to,
                                          &common.kernel_map, at, full);
                to += tap_bytes / kParts;
              }
            }
          }
          ring.Advance(p.kernel_stages);
        }
      }
    }
  }
}

// Finishes and writes a warp's sums of 16 rows of a tile that begins at pixel `begin`.
template <typename T, int kColumns>
__device__ void StoreSums(const Common& common, const SumParams& p, float (&sums)[kColumns / 2],
                          int begin, int row, int column) {
  const int left = p.outputs - column;
  if constexpr (kIsPaired<T>) {
    if (!AreFinite(sums)) *common.flag = 1;
  }
  Finish<kColumns>(common.epilogue, sums, column, left);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int number = begin + row + 8 * half + static_cast<int>(threadIdx.x % 32 / 4);
    const Pixel pixel(p, number);
    const int image_number = p.strips.Quotient(pixel.strip);
    const int strip = pixel.strip - image_number * p.strips.divisor();
    const int in_row = strip * p.strip_width.divisor() + pixel.column;
    const bool exists = number < p.pixels && in_row < p.columns;
    const int64_t offset = image_number * p.result_image + pixel.row * p.result_row +
                           in_row * p.result_column + column;
    if constexpr (kIsPaired<T>) {
      StoreQuads<kColumns>(sums, half, exists ? static_cast<float*>(p.result) + offset : nullptr,
                           left);
    } else if (std::is_same_v<T, float> || common.is_wide) {
      StoreRow<kColumns>(sums, half, exists ? static_cast<float*>(p.result) + offset : nullptr,
                         left);
    } else if constexpr (!std::is_same_v<T, float>) {
      StoreRow<T, kColumns>(sums, half, exists ? static_cast<T*>(p.result) + offset : nullptr,
                            left);
    }
  }
}

// Adds the sums of a tile over the blocks of a cluster and writes them, each block its share. The
// sums pass through the stages, which no copy writes any more.
template <typename T, int kWarpgroups, int kBlocks, int kColumns>
__device__ void StoreSplit(const Common& common, const SumParams& p,
                           const float (&sums)[kBlocks][kColumns / 2], char* stages, int begin,
                           int column) {
  constexpr int kWarps = 4 * kWarpgroups;
  constexpr int kPieces = kBlocks * kColumns / 32;  // segments of a warp, of 32 columns each
  static_assert(kWarps * kPieces * 2048 <= kStagesBytes);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
  // Products of other warpgroups may still use the stages.
  asm volatile("bar.sync 1, %0;" ::"n"(32 * kWarps) : "memory");
  float4* own = reinterpret_cast<float4*>(stages) + warp * kPieces * 128 + lane;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
      const float* four = sums[b] + 4 * i;
      own[(b * (kColumns / 8) + i) * 32] = {four[0], four[1], four[2], four[3]};
    }
  }
  SyncCluster();
  const auto add = [&](auto count) {
    constexpr int kSplits = decltype(count)::value;
    for (int piece = warp * kSplits + blockIdx.x % kSplits; piece < kWarps * kPieces;
         piece += kWarps * kSplits) {
      const uint32_t address = SharedAddress(stages) + piece * 2048 + lane * 16;
      // All loads are in flight at once, because other blocks' memory has a long latency.
      float4 parts[kSplits][4];
#pragma unroll
      for (int k = 0; k < 4 * kSplits; ++k) {
        parts[k / 4][k % 4] = LoadOfBlock(address + k % 4 * 512, k / 4);
      }
      float all[16];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float4 sum = parts[0][i];
#pragma unroll
        for (int k = 1; k < kSplits; ++k) sum = Add(sum, parts[k][i]);
        all[4 * i] = sum.x;
        all[4 * i + 1] = sum.y;
        all[4 * i + 2] = sum.z;
        all[4 * i + 3] = sum.w;
      }
      const int of_warp = piece / kPieces, block = piece % kPieces / (kColumns / 32);
      const int row = of_warp / 4 * 64 * kBlocks + 64 * block + of_warp % 4 * 16;
      StoreSums<T, 32>(common, p, all, begin, row, column + piece % (kColumns / 32) * 32);
    }
  };
  switch (common.log_splits) {
    case 1:
      add(std::integral_constant<int, 2>{});
      break;
    case 2:
      add(std::integral_constant<int, 4>{});
      break;
    default:
      add(std::integral_constant<int, 1 << kMaxLogSplits>{});
  }
  // No block ends while others read its memory. Copies are complete: barriers do not wait for them.
  SyncCluster();
}

template <typename T, int kWarpgroups, int kBlocks, int kColumns, bool kAcross, bool kSplit>
__device__ void MultiplyTiles(const Common& common, const SumParams& p, Barriers& barriers,
                              char* stages, uint32_t image_stages, uint32_t kernel_stages) {
  constexpr int kRows = 64 * kWarpgroups * kBlocks;
  // The products of a chunk are issued in two halves, so that the fragments of one half are loaded
  // while the other half is multiplied. The halves are halves of the rows or, with one block of
  // rows, of the steps.
  constexpr int kHalf = kBlocks == 2 ? kSteps : kSteps / 2;
  const int lane = threadIdx.x % 32;
  const int warp_row = (threadIdx.x / 128 - 1) * 64 * kBlocks + threadIdx.x / 32 % 4 * 16;
  const Swizzle swizzle = Swizzle::OfRows(p.row_bytes);
  const uint64_t descriptor = kAcross ? MatrixDescriptor(64 * p.row_bytes, 1024, 128)
                                      : MatrixDescriptor(16, 8 * p.row_bytes, p.row_bytes);
  const int tap_steps = p.row_bytes / 32;
  uint32_t matrix_step[kSteps];  // in units of descriptors, 16 bytes
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    matrix_step[i] = (i / tap_steps * kKernelColumns<kColumns, kAcross> * p.row_bytes +
                      i % tap_steps * (kAcross ? 16 * 128 : 32)) /
                     16;
  }

  const Part<kSplit> part(common, p);
  Ring image, kernel;
  for (int tile = part.FirstTile(common); tile < p.tiles; tile += part.TileStep(common)) {
    uint32_t row_tile = tile;
    const int column = p.column_tiles.DivMod(row_tile) * kColumns;
    const int begin = row_tile * kRows;
    const int end = min(begin + kRows, p.pixels);
    const Rows rows(p, p.strip_width.Quotient(begin), p.strip_width.Quotient(end - 1));
    uint32_t base[kBlocks];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      // Rows after the last pixel repeat it, and are not stored.
      const Pixel pixel(p, min(begin + warp_row + 64 * b + lane % 16, end - 1));
      base[b] = rows.Of(p, pixel.strip, pixel.row) * p.pitch + pixel.column * p.column_bytes +
                lane / 16 * 16;
    }

    float sums[kBlocks][kColumns / 2];
    uint32_t fragments[2][kHalf][kEntryParts<T>][4];
    int add = 0;
    // Tensor cores sum half a chunk of split entries, and this sum is added while the other half is
    // multiplied. With many columns, whose halves do not fit in registers, tensor cores sum a whole
    // chunk, which is added while other warpgroups multiply.
    constexpr bool kHasHalves = kColumns < 128;
    float parts[kHasHalves ? 2 : 1][kIsPaired<T> ? kColumns / 2 : 1];
    bool has_part = false;  // the last part of the previous chunk
    const auto add_part = [&](int half) {
#pragma unroll
      for (int i = 0; i < (kIsPaired<T> ? kColumns / 2 : 0); ++i) {
        sums[kBlocks == 2 ? half : 0][i] += parts[kHasHalves ? half : 0][i];
      }
    };
    if constexpr (kIsPaired<T>) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (float& sum : sums[b]) sum = 0;
      }
    }
    int done_image = -1, done_kernel = -1;  // stages that products in flight still use
    // One lane releases stages for its warp: products involve the whole warp, and have read the
    // data of all its lanes.
    const auto release = [&] {
      if (lane == 0) {
        if (done_image >= 0) ptx::mbarrier_arrive(&barriers.image_empty[done_image]);
        if (done_kernel >= 0) ptx::mbarrier_arrive(&barriers.kernel_empty[done_kernel]);
      }
      done_image = done_kernel = -1;
    };
    for (int block = part.FirstBlock(p); block < part.EndBlock(p); ++block) {
      const int block_steps = block + 1 == p.channel_blocks ? p.last_steps : tap_steps;
      int chunk = 0;
      for (int g = p.first_group; g < p.end_group; ++g) {
        const int taps_end = common.group[g].end;
        if (!part.HasGroup(common, p, block, g)) {
          chunk = common.end_chunk[g];
          continue;
        }
        Wait(&barriers.image_full[image.stage], image.parity);
        const uint32_t image_stage = image_stages + image.stage * p.image_stage;
        for (int t = common.group[g].begin; t < taps_end; t += p.chunk_taps, ++chunk) {
          if (!part.HasChunk(p, block, chunk)) continue;
          const int4 step_bytes = common.step_bytes[p.first_tap + chunk];
          const int steps = min(p.chunk_taps, taps_end - t) * block_steps;
          Wait(&barriers.kernel_full[kernel.stage], kernel.parity);
          const uint64_t b = At(descriptor, kernel_stages + kernel.stage * p.kernel_stage);
          // All steps of a whole chunk are one sequence of instructions.
          const auto multiply = [&](auto whole) {
            constexpr bool kWhole = decltype(whole)::value;
            const int at[kSteps] = {step_bytes.x, step_bytes.y, step_bytes.z, step_bytes.w};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int row_block = kBlocks == 2 ? half : 0;
              const int first = kBlocks == 2 ? 0 : half * kHalf;
#pragma unroll
              for (int i = 0; i < kHalf; ++i) {
                if (kWhole || first + i < steps) {
                  const uint32_t entry = base[row_block] + at[first + i];
                  LoadMatrices(fragments[half][i][0], image_stage + (entry ^ swizzle(entry)));
                }
              }
              if constexpr (kIsPaired<T>) {
                if (!kHasHalves && half == 0) continue;
                const int first_half = kHasHalves ? half : 0;
                // Products in flight between chunks complete before they are added: the compiler
                // would otherwise wait for every single product.
                if (first_half == 0) ProductsWait<0>();
                if (!kHasHalves && has_part) add_part(0);
#pragma unroll
                for (int h = first_half; h <= half; ++h) {
#pragma unroll
                  for (int i = 0; i < kHalf; ++i) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                      const SplitEntry split = SplitFloat32(fragments[h][i][0][e]);
                      fragments[h][i][0][e] = split.high;
                      fragments[h][i][1][e] = split.low;
                    }
                  }
                }
                ProductsBegin();
                // Small products come first.
#pragma unroll
                for (int k = 0; k < 3; ++k) {
#pragma unroll
                  for (int h = first_half; h <= half; ++h) {
#pragma unroll
                    for (int i = 0; i < kHalf; ++i) {
                      const int step = kBlocks == 2 ? i : h * kHalf + i;
                      const uint64_t low = k == 1 ? p.kernel_stage / kEntryParts<T> / 16 : 0;
                      Multiply<float, kColumns, kAcross>(
                          parts[kHasHalves ? half : 0], fragments[h][i][k == 0],
                          b + matrix_step[step] + low, k | (h - first_half) | i);
                    }
                  }
                }
                ProductsCommit();
                if (kHasHalves && half == 1) {
                  ProductsWait<1>();
                  add_part(0);
                } else if (kHasHalves && has_part) {
                  add_part(1);
                }
                has_part = true;
              } else {
#pragma unroll
                for (int i = 0; i < kHalf; ++i) {
#pragma unroll
                  for (uint32_t& entry : fragments[half][i][0]) entry = Operand<T>(entry);
                }
                ProductsBegin();
#pragma unroll
                for (int i = 0; i < kHalf; ++i) {
                  if (kWhole || first + i < steps) {
                    Multiply<T, kColumns, kAcross>(sums[row_block], fragments[half][i][0],
                                                   b + matrix_step[first + i], add | (first + i));
                  }
                }
                ProductsCommit();
                ProductsWait<1>();
              }
              // The products of the previous chunk are done.
              if (half == 0 || (kIsPaired<T> && !kHasHalves)) release();
            }
          };
          if (kIsPaired<T> || steps == kSteps) {
            multiply(std::true_type{});
          } else if constexpr (!kIsPaired<T>) {
            multiply(std::false_type{});
          }
          add = 1;
          done_kernel = kernel.stage;
          kernel.Advance(p.kernel_stages);
        }
        done_image = image.stage;
        image.Advance(p.image_stages);
      }
    }
    ProductsWait<0>();
    release();
    if constexpr (kIsPaired<T>) {
      if (has_part) add_part(1);
    }

    if constexpr (kSplit) {
      StoreSplit<T, kWarpgroups, kBlocks, kColumns>(common, p, sums, stages, begin, column);
      return;  // a cluster has one tile
    } else {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        if (!p.has_taps) {
#pragma unroll
          for (float& sum : sums[b]) sum = 0;
        }
        StoreSums<T, kColumns>(common, p, sums[b], begin, warp_row + 64 * b, column);
      }
    }
  }
}

// The registers of a thread that copies and of a thread that multiplies; both together are the
// registers of the kernel. A single warpgroup has enough.
[[maybe_unused]] constexpr int kCopyingRegisters = 56;
template <int kWarpgroups>
inline constexpr int kMultiplyingRegisters = kWarpgroups == 4   ? 104
                                             : kWarpgroups == 3 ? 152
                                                                : 224;

template <typename T, int kWarpgroups, int kBlocks, int kColumns, bool kAcross, bool kSplit>
__global__ void __launch_bounds__(128 * (kWarpgroups + 1), 1)
    ConvolveWgmma(const __grid_constant__ Params<kSums<T, kAcross>> params) {
#if JAXOPS_HAS_WGMMA
  const Common& common = params.common;
  const SumParams& p = params.sum[kSums<T, kAcross> == 1 ? 0 : blockIdx.y];
  extern __shared__ char shared[];
  char* aligned = shared + (1024 - SharedAddress(shared) % 1024) % 1024;
  Barriers& barriers = *reinterpret_cast<Barriers*>(aligned);
  char* image_stages = aligned + kBarrierBytes;
  char* kernel_stages = image_stages + p.image_stages * p.image_stage;
  if (threadIdx.x == 0) {
    const auto init = [](uint64_t* full, uint64_t* empty, int count) {
      for (int i = 0; i < count; ++i) {
        ptx::mbarrier_init(full + i, 1);
        ptx::mbarrier_init(empty + i, 4 * kWarpgroups);
      }
    };
    init(barriers.image_full, barriers.image_empty, p.image_stages);
    init(barriers.kernel_full, barriers.kernel_empty, p.kernel_stages);
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    ptx::fence_proxy_async(ptx::space_shared);
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    if constexpr (kWarpgroups > 1) GiveRegisters<kCopyingRegisters>();
    if (threadIdx.x / 32 == 0) {
      CopyImages<T, 64 * kWarpgroups * kBlocks, kSplit>(common, p, barriers, image_stages);
    } else if (threadIdx.x / 32 == 1) {
      CopyKernels<T, kColumns, kAcross, kSplit>(common, p, barriers, kernel_stages);
    }
  } else {
    if constexpr (kWarpgroups > 1) TakeRegisters<kMultiplyingRegisters<kWarpgroups>>();
    MultiplyTiles<T, kWarpgroups, kBlocks, kColumns, kAcross, kSplit>(
        common, p, barriers, image_stages, SharedAddress(image_stages),
        SharedAddress(kernel_stages));
  }
#endif
}

// --- plans and launches on the host --------------------------------------------------------------

// Sizes of tiles: warpgroups, blocks of 64 rows of a warpgroup, and columns.
struct Shape {
  int warpgroups, blocks, columns;
  // The time of a product in percent of the time of the tensor cores: shared memory bounds tiles
  // with few columns, and the work for each tile bounds tiles with few rows. Measured on an H200.
  int percent;
  int rows() const { return 64 * warpgroups * blocks; }
};

// Cycles of a tile other than its products; measured on an H200.
inline constexpr int64_t kTileCycles = 5000;
// Cycles of the copy of a row of pixels, if entries are split. Measured on an H200.
inline constexpr int64_t kCopyCycles = 130;

// The minimum of chunks of a block in a cluster that shares the sum of a tile.
inline constexpr int kMinChunks = 2;

// Returns the cycles that sharing adds to a tile, which grow with the tile; measured on an H200.
inline int64_t SplitCycles(const Shape& shape) {
  return 1400 + shape.rows() * shape.columns * 3 / 16;
}

// Returns how many clusters of `splits` blocks are resident at once. A cluster has its
// multiprocessors in one part of the GPU, and parts differ in size: clusters of more than two
// blocks may leave an eighth of the multiprocessors over.
inline int64_t ClustersAtOnce(int processors, int splits) {
  return (splits > 2 ? processors * 7 / 8 : processors) / splits;
}

// Fills in how the sum is cut up with tiles of this shape, and its entries of the arrays, from
// p.first_group and p.first_tap on; returns false where the tile does not fit.
inline bool Plan(Common& common, SumParams& p, const Sum& sum, int item, int entry_parts,
                 const Shape& shape, Grouping grouping) {
  p.CutColumns(sum.rows, sum.columns, sum.stride_row, sum.stride_column);
  const int strip_width = p.strip_width.divisor(), rows = p.rows.divisor();
  p.outputs = static_cast<int>(sum.outputs);
  const int64_t pixels = sum.images * p.strips.divisor() * rows * strip_width;
  if (pixels > INT32_MAX - 1024) return false;
  p.pixels = static_cast<int>(pixels);
  const int64_t column_tiles = CeilDiv(sum.outputs, shape.columns);
  p.column_tiles = FastDivider(column_tiles);
  const int64_t tiles = CeilDiv(pixels, shape.rows()) * column_tiles;
  if (tiles > INT32_MAX) return false;
  p.tiles = static_cast<int>(tiles);

  Group* const groups = common.group + p.first_group;
  const int count = FillGroups(groups, sum.tap, sum.taps, grouping);
  p.end_group = p.first_group + count;

  // Channels are counted in 2 bytes: a channel of float32 counts as two.
  const int64_t channels = sum.channels * item / 2;
  int block = ChannelBlock(channels);
  if (entry_parts > 1 && sum.taps > 0) {
    // Chunks are whole here: smaller blocks of channels, whose copies are slower, are used where
    // they save chunks.
    const auto chunks = [&](int size) {
      int64_t chunks = 0;
      for (int g = 0; g < count; ++g) {
        chunks += CeilDiv(groups[g].end - groups[g].begin, 64 / size);
      }
      return chunks * CeilDiv(channels, size);
    };
    for (const int size : {32, 16}) {
      if (size < block && 8 * chunks(size) <= 7 * chunks(block)) block = size;
    }
  }
  p.channel_blocks = static_cast<int>(CeilDiv(channels, block));
  p.last_steps = static_cast<int>(CeilDiv(channels - (p.channel_blocks - 1) * block, 16));
  p.row_bytes = 2 * block;
  p.chunk_taps = 64 / block;

  if (!p.LayRows(sum.tap, groups, count)) return false;

  const bool aligned = shape.rows() % strip_width == 0;
  const int pixel_rows = Touched(shape.rows(), strip_width, true);
  const int64_t image_stage = p.StageBytes(pixel_rows, Touched(pixel_rows, rows, aligned));
  p.kernel_stage = entry_parts * std::max(64, shape.columns) * 128;
  if (2 * image_stage + 3 * p.kernel_stage > kStagesBytes) return false;
  p.image_stage = static_cast<int>(image_stage);
  // A stage of the image lasts for the chunks of a group, each of which has a stage of the kernel.
  p.image_stages = 2;
  p.kernel_stages = 3;
  const int per_image = static_cast<int>(CeilDiv(sum.taps, std::max(1, count * p.chunk_taps)));
  while (true) {
    const int free =
        kStagesBytes - p.image_stages * p.image_stage - p.kernel_stages * p.kernel_stage;
    if (p.image_stages * per_image < p.kernel_stages && p.image_stage <= free &&
        p.image_stages < kMaxStages) {
      ++p.image_stages;
    } else if (p.kernel_stage <= free && p.kernel_stages < kMaxStages) {
      ++p.kernel_stages;
    } else {
      break;
    }
  }

  int chunk = 0;
  for (int g = 0; g < count; ++g) {
    Group& group = groups[g];
    common.first_chunk[p.first_group + g] = static_cast<int16_t>(chunk);
    for (int t = group.begin; t < group.end; t += p.chunk_taps, ++chunk) {
      int bytes[kSteps] = {};
      for (int i = 0; i < kSteps; ++i) {
        const int tap_steps = kSteps / p.chunk_taps;
        if (t + i / tap_steps >= group.end) break;
        bytes[i] = p.TapBytes(sum.tap[t + i / tap_steps], group) + i % tap_steps * 32;
      }
      common.step_bytes[p.first_tap + chunk] = {bytes[0], bytes[1], bytes[2], bytes[3]};
    }
    common.end_chunk[p.first_group + g] = static_cast<int16_t>(chunk);
    group.begin = static_cast<int16_t>(group.begin + p.first_tap);
    group.end = static_cast<int16_t>(group.end + p.first_tap);
  }
  p.chunks = FastDivider(std::max(1, chunk));
  for (int t = 0; t < sum.taps; ++t) {
    common.matrix[p.first_tap + t] = static_cast<int16_t>(sum.tap[t].matrix);
  }
  p.has_taps = sum.taps > 0;
  return true;
}

// The parameters of some sums without addresses; the shape is null where none fits.
template <int kCount>
struct SumsPlan {
  const Shape* shape;
  int64_t cycles;
  int sums;
  Params<kCount> params;
};

template <typename T, int kWarpgroups, int kBlocks, int kColumns, bool kAcross, bool kSplit = false>
cudaError_t LaunchTiles(cudaStream_t stream, const Params<kSums<T, kAcross>>& params, int sums,
                        int processors) {
  auto* kernel = &ConvolveWgmma<T, kWarpgroups, kBlocks, kColumns, kAcross, kSplit>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  constexpr int kThreads = 128 * (kWarpgroups + 1);
  int tiles = 0;
  for (int i = 0; i < sums; ++i) tiles = std::max(tiles, params.sum[i].tiles);
  if constexpr (kSplit) {
    const int64_t blocks = int64_t{tiles} << params.common.log_splits;
    if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
    return jaxops::cuda::LaunchClusters(
        kernel, dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(sums)),
        1u << params.common.log_splits, kThreads, kSharedBytes, stream, params);
  }
  const dim3 grid(static_cast<unsigned>(std::min(tiles, processors)), static_cast<unsigned>(sums));
  kernel<<<grid, kThreads, kSharedBytes, stream>>>(params);
  return cudaGetLastError();
}

// Returns the shape whose blocks finish first, and fills in how the sums are cut up. Ties go to
// large tiles, which read less, and to sums that clusters do not share. The shape is null where
// none fits. `least` is the estimated number of cycles.
template <int kEntryParts, int kCount, size_t kShapes, size_t kSharedShapes>
const Shape* Decide(Params<kCount>& best, int64_t& least, std::span<const Sum* const> sums,
                    int item, int processors, const Shape (&shapes)[kShapes],
                    const Shape (&shared_shapes)[kSharedShapes]) {
  Params<kCount> params{};
  Common& common = params.common;
  const int64_t outputs = sums[0]->outputs;
  const Shape* chosen = nullptr;
  // A multiprocessor computes 2048 products a cycle, or 1024 of TF32.
  const auto cycles = [&](const Sum& sum, const SumParams& p, const Shape& shape) {
    if (kEntryParts == 1) {
      const int64_t depth = sum.taps * sum.channels * item / 2;
      return shape.rows() * shape.columns * depth / 2048 * shape.percent / 100;
    }
    if (sum.taps == 0) return int64_t{0};
    const int64_t depth = int64_t{p.channel_blocks} * p.chunks.divisor() * 16 * kSteps;
    const int64_t products = shape.rows() * shape.columns * depth / 2048 * 3 * shape.percent / 100;
    const int64_t copies =
        int64_t{p.channel_blocks} * (p.end_group - p.first_group) * (p.image_stage / p.pitch);
    return std::max(products, copies * kCopyCycles);
  };
  // The tiles of all sums, the mean cycles of a tile, and the minimum of a sum's chunks.
  int64_t tiles = 0, tile_cycles = 0, chunks = 0;
  const auto plan = [&](const Shape& shape) {
    common.log_splits = 0;
    tiles = tile_cycles = 0;
    chunks = INT64_MAX;
    int group = 0, tap = 0;
    for (size_t i = 0; i < sums.size(); ++i) {
      const Sum& sum = *sums[i];
      SumParams& p = params.sum[i];
      p.first_group = group;
      p.first_tap = tap;
      const auto fits = [&](Grouping grouping) {
        return Plan(common, p, sum, item, kEntryParts, shape, grouping);
      };
      if (!fits(Grouping::kAll) && !fits(Grouping::kRow) && !fits(Grouping::kTap)) return false;
      group = p.end_group;
      tap += sum.taps;
      tiles += p.tiles;
      tile_cycles += p.tiles * cycles(sum, p, shape);
      const int64_t of_block = sum.taps > 0 ? p.chunks.divisor() : 0;
      chunks = std::min(chunks, of_block * p.channel_blocks);
    }
    tile_cycles /= tiles;
    return true;
  };
  const auto consider = [&](const Shape& shape, int64_t cost) {
    if (chosen && cost >= least) return;
    chosen = &shape;
    best = params;
    least = cost;
  };
  for (const Shape& shape : shapes) {
    // Tiles are skipped if half of each would have no columns.
    if ((shape.columns > 32 && outputs <= shape.columns / 2) || !plan(shape)) continue;
    consider(shape, CeilDiv(tiles, processors) * (tile_cycles + kTileCycles));
  }
  for (const Shape& shape : shared_shapes) {
    // No GPU has run clusters that have several sums.
    if (sums.size() > 1) break;
    if ((shape.columns > 64 && outputs <= shape.columns / 2) || !plan(shape)) continue;
    for (int log = 1; log <= kMaxLogSplits && chunks >> log >= kMinChunks; ++log) {
      const int64_t at_once = ClustersAtOnce(processors, 1 << log);
      if (at_once == 0) break;
      common.log_splits = log;
      consider(shape,
               CeilDiv(tiles, at_once) * ((tile_cycles >> log) + kTileCycles + SplitCycles(shape)));
    }
  }
  if (!chosen) return nullptr;
  for (size_t i = 0; i < sums.size(); ++i) {
    best.sum[i].result_image = sums[i]->result_image;
    best.sum[i].result_row = sums[i]->result_row;
    best.sum[i].result_column = sums[i]->result_column;
  }
  return chosen;
}

template <int kEntryParts, int kCount, size_t kShapes, size_t kSharedShapes>
SumsPlan<kCount> MakePlan(std::span<const Sum* const> sums, int item, int processors,
                          const Shape (&shapes)[kShapes],
                          const Shape (&shared_shapes)[kSharedShapes]) {
  SumsPlan<kCount> plan{};
  plan.sums = static_cast<int>(sums.size());
  plan.shape =
      Decide<kEntryParts>(plan.params, plan.cycles, sums, item, processors, shapes, shared_shapes);
  return plan;
}

}  // namespace tiled
}  // namespace jaxops::conv::cuda

#endif  // JAXOPS_CUDA_CONV_WGMMA_CONVOLVE_CUH_
