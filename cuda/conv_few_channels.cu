// Convolution of images of few channels on Hopper: the first layer of a network.
//
// Forward, a row of the matrix product is a pixel, a column an output, and what is summed over are
// the pairs of entries of its window, row after row: 77 of 7 x 7 taps of RGB, of 80 that are
// multiplied. The kernel lies in shared memory in that order as long as a block lives.
//
// Of the gradient by the image there are too few channels to be the columns of a product, so all
// entries of a window's row are. A row of the product is a pixel of the cotangent. Every row of the
// kernel has its sums, which belong to one row of the image; a warpgroup walks down the cotangent
// and keeps those that further rows of it add to. What is complete it adds up along the row, where
// windows overlap, through shared memory.
#include <type_traits>

#include "cuda/conv_few_channels.cuh"

namespace jaxops::conv::cuda {
namespace {

// --- forward -------------------------------------------------------------------------------------

constexpr int kForwardWarpgroups = 2;
constexpr int kForwardThreads = 128 * kForwardWarpgroups;
// Rows of a warpgroup's product.
constexpr int kForwardRows = 128;
// Two blocks of a multiprocessor share its memory; copying of one hides behind the other.
constexpr int kForwardBlocks = 2;
constexpr int kForwardBytes = 112 * 1024;

struct ForwardParams : Tiling {
  const void* kernel;
  void* result;
  int outputs;
  int kernel_rows;
  int steps;  // of 8 pairs; even
  bool is_wide;
};

// Where a lane finds the pairs of a step, and which bits of them. There is an entry for one step
// more, because the next one's is read ahead.
using PairTable = int4;

template <int kColumns>
__device__ void FillForward(const ForwardParams& p, int column, char* matrix, PairTable* table) {
  for (int i = threadIdx.x; i < p.steps * 16 * kUnit; i += kForwardThreads) {
    const int row = i / kUnit, unit = i % kUnit;
    const int kernel_row = row / 2 / p.row_pairs;
    const int entry = row / 2 % p.row_pairs * 2 - p.lead + row % 2;
    const int output = column + unit * kUnit;
    uint4 v = {0, 0, 0, 0};
    if (kernel_row < p.kernel_rows && entry >= 0 && entry < p.row_entries && output < p.outputs) {
      const int64_t at = int64_t{kernel_row * p.row_entries + entry} * p.outputs + output;
      v = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.kernel) + at);
    }
    *reinterpret_cast<uint4*>(matrix + SwizzledUnit(row, unit)) = v;
  }
  for (int i = threadIdx.x; i < (p.steps + 1) * 4; i += kForwardThreads) {
    int at[2], mask[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int pair = i / 4 * 8 + 4 * k + i % 4;
      const int row = pair / p.row_pairs, in_row = pair % p.row_pairs;
      const bool exists = row < p.kernel_rows;
      const int entry = 2 * in_row - p.lead;
      at[k] = exists ? row * p.pitch + 4 * in_row : 0;
      mask[k] =
          (exists && entry >= 0 ? 0xFFFF : 0) | (exists && entry + 1 < p.row_entries ? ~0xFFFF : 0);
    }
    table[i] = {at[0], mask[0], at[1], mask[1]};
  }
}

template <typename T, int kColumns, bool kOdd>
__global__ void __launch_bounds__(kForwardThreads, kForwardBlocks)
    ConvolveFew(const __grid_constant__ ForwardParams p) {
#if JAXOPS_HAS_WGMMA
  extern __shared__ char shared[];
  char* matrix = shared + (1024 - SharedAddress(shared) % 1024) % 1024;
  auto* table = reinterpret_cast<PairTable*>(matrix + p.steps * 16 * kMatrixRowBytes);
  char* stages = reinterpret_cast<char*>(table + (p.steps + 1) * 4);
  const int stage_bytes = p.stage_bytes();
  const int column = blockIdx.y * kColumns;
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 % 4 * 16;

  CopyWindows(p, p.Find(blockIdx.x), stages);
  CopiesCommit();
  FillForward<kColumns>(p, column, matrix, table);
  const uint64_t b = At(MatrixDescriptor(0, 1024, kMatrixRowBytes), SharedAddress(matrix));
  const PairTable* lane_table = table + lane % 4;

  int buffer = 0;
  for (int number = blockIdx.x; number < p.tiles; number += gridDim.x, buffer ^= 1) {
    const int next = number + gridDim.x;
    if (next < p.tiles) CopyWindows(p, p.Find(next), stages + (buffer ^ 1) * stage_bytes);
    CopiesCommit();
    CopiesWait<1>();
    __syncthreads();

    const Tile tile = p.Find(number);
    const uint32_t stage = SharedAddress(stages) + buffer * stage_bytes;
    const int pixels = tile.rows * static_cast<int>(p.tile_columns.divisor());
#pragma unroll 1
    for (int begin = warpgroup * kForwardRows; begin < pixels;
         begin += kForwardWarpgroups * kForwardRows) {
      // Of 16 rows a lane has those of its number by 4, and the eighth after; twice, 64 rows apart.
      uint32_t window[2][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t row = min(begin + warp_row + 64 * (i / 2) + 8 * (i % 2) + lane / 4, pixels - 1);
        const int in_row = p.tile_columns.Peel(row);
        window[i / 2][i % 2] = stage + p.WindowBytes(row, in_row);
      }
      float sums[2][kColumns / 2];
      uint32_t fragments[2][2][4];
      PairTable next = lane_table[0];
#pragma unroll 1
      for (int step = 0; step < p.steps; step += 2) {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          const PairTable at = next;
          next = lane_table[(step + s + 1) * 4];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            fragments[s][i][0] = LoadPair<kOdd>(window[i][0] + at.x) & at.y;
            fragments[s][i][1] = LoadPair<kOdd>(window[i][1] + at.x) & at.y;
            fragments[s][i][2] = LoadPair<kOdd>(window[i][0] + at.z) & at.w;
            fragments[s][i][3] = LoadPair<kOdd>(window[i][1] + at.z) & at.w;
          }
          const uint64_t b_step = b + (step + s) * (16 * kMatrixRowBytes / 16);
          ProductsBegin();
          Multiply<T, kColumns, true>(sums[0], fragments[s][0], b_step, step + s);
          Multiply<T, kColumns, true>(sums[1], fragments[s][1], b_step, step + s);
          ProductsCommit();
          ProductsWait<1>();
        }
      }
      ProductsWait<0>();

#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t row = begin + warp_row + 64 * (i / 2) + 8 * (i % 2) + lane / 4;
        const bool is_in_tile = row < pixels;
        const int in_row = p.tile_columns.Peel(row);
        const bool exists = is_in_tile && in_row < tile.columns;
        const int64_t pixel =
            (tile.image * p.out_rows + tile.row + row) * p.out_columns + tile.column + in_row;
        const int64_t offset = pixel * p.outputs + column;
        const int left = p.outputs - column;
        if (p.is_wide) {
          StoreRow<kColumns>(sums[i / 2], i % 2,
                             exists ? static_cast<float*>(p.result) + offset : nullptr, left);
        } else {
          StoreRow<T, kColumns>(sums[i / 2], i % 2,
                                exists ? static_cast<T*>(p.result) + offset : nullptr, left);
        }
      }
    }
    __syncthreads();
  }
#endif
}

template <typename T, int kColumns>
cudaError_t LaunchForwardFew(cudaStream_t stream, const ForwardParams& p, int bytes,
                             int processors) {
  auto* kernel = p.HasOdd() ? &ConvolveFew<T, kColumns, true> : &ConvolveFew<T, kColumns, false>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kForwardBytes);
  if (error != cudaSuccess) return error;
  const unsigned beside = static_cast<unsigned>(CeilDiv(p.outputs, kColumns));
  const unsigned blocks = std::max(1u, kForwardBlocks * processors / beside);
  const dim3 grid(std::min<unsigned>(p.tiles, blocks), beside);
  kernel<<<grid, kForwardThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

// --- by the image --------------------------------------------------------------------------------

// A block is a warpgroup.
constexpr int kGradThreads = 128;
// Pixels of the cotangent that are beside each other in a product.
constexpr int kGradColumns = 64;
// Outputs whose products are one batch: lanes have 16 each of a pixel's.
constexpr int kSlab = 64;

struct InputGradParams {
  const uint16_t* cotangent;
  const void* kernel;
  void* result;
  int64_t images, out_rows, out_columns, in_rows, in_entries;
  int outputs, slabs;
  int stride, low;      // of rows
  int pixel_entries;    // between the windows of neighbouring pixels
  int64_t low_entries;  // before a row's first
  int row_entries;      // of a window
  // The image is cut into cells of `stride` rows by `pixel_entries` entries, which begin where
  // windows do. So many cells before a cell have windows that reach it.
  int halo_rows, halo_columns;
  int64_t first_row, end_row, first_column, end_column;  // cells
  int strip_columns, chunk_rows;                         // cells of a block
  FastDivider strips, chunks;
  FastDivider cell;                   // entries
  int thread_pixels, thread_entries;  // of a row between those of a thread
  bool is_wide;
};

template <int kRowColumns>
constexpr int kSumPitch = kRowColumns % 16 == 0 ? kRowColumns + 8 : kRowColumns;

// The kernel in shared memory: for each slab of outputs and each of its rows a matrix whose rows
// are entries of the window, along the sum. Where the output of a lane's register comes in the sum
// is as the lane has it from memory: see LoadCotangent.
template <int kKernelRows, int kRowColumns>
__device__ void FillInputGrad(const InputGradParams& p, char* matrices) {
  const int rows = p.slabs * kKernelRows * kRowColumns;
  for (int i = threadIdx.x; i < rows * (kSlab / 2); i += kGradThreads) {
    const int pair = i % (kSlab / 2), row = i / (kSlab / 2);
    const int entry = row % kRowColumns;
    const int kernel_row = row / kRowColumns % kKernelRows;
    const int output = row / kRowColumns / kKernelRows * kSlab + 2 * pair;
    uint32_t v = 0;
    if (entry < p.row_entries && output < p.outputs) {
      const int64_t at = int64_t{kernel_row * p.row_entries + entry} * p.outputs + output;
      v = *reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(p.kernel) + at);
    }
    // 16 outputs of a lane are 2 pairs in each of 4 steps.
    const int lane = pair / 8, step = pair / 2 % 4, half = pair % 2;
    const int bytes = 4 * (8 * step + 4 * half + lane);
    *reinterpret_cast<uint32_t*>(matrices + SwizzledUnit(row, bytes / kUnitBytes) +
                                 bytes % kUnitBytes) = v;
  }
}

// A lane's outputs of its two pixels of the cotangent: 16 neighbours of a slab, the left operand of
// four steps.
__device__ inline void LoadCotangent(uint32_t (&to)[2][8], const InputGradParams& p,
                                     int64_t cotangent_row, int64_t column, int slab) {
  const int lane = threadIdx.x % 32;
  const int output = slab * kSlab + lane % 4 * 16;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t at = column + threadIdx.x / 32 * 16 + lane / 4 + 8 * i;
    const bool exists = at >= 0 && at < p.out_columns;
    const uint16_t* from =
        p.cotangent + (cotangent_row * p.out_columns + (exists ? at : 0)) * p.outputs + output;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      uint4 v = {0, 0, 0, 0};
      if (exists && output + kUnit * k < p.outputs) {
        v = *reinterpret_cast<const uint4*>(from + kUnit * k);
      }
      to[i][4 * k] = v.x;
      to[i][4 * k + 1] = v.y;
      to[i][4 * k + 2] = v.z;
      to[i][4 * k + 3] = v.w;
    }
  }
}

template <typename T>
__device__ void StoreEntry(T* to, float v) {
  if constexpr (std::is_same_v<T, float>) {
    *to = v;
  } else if constexpr (std::is_same_v<T, __half>) {
    *to = __float2half_rn(v);
  } else {
    *to = __float2bfloat16_rn(v);
  }
}

// Makes row `stride` the first one, and those after the last zeros.
template <int kRows, int kRowColumns, int kStride = 1>
__device__ void ShiftRows(float (&sums)[kRows][kRowColumns / 2], int stride) {
  if constexpr (kStride < kRows) {
    if (stride > kStride) {
      ShiftRows<kRows, kRowColumns, kStride + 1>(sums, stride);
      return;
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int j = 0; j < kRowColumns / 2; ++j) {
      sums[r][j] = r + kStride < kRows ? sums[r + kStride < kRows ? r + kStride : r][j] : 0;
    }
  }
}

// Writes the sums of a row of the kernel to shared memory.
template <int kRowColumns>
__device__ void WriteSums(const float (&sums)[kRowColumns / 2], float* buffer) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int pixel = threadIdx.x / 32 * 16 + 8 * half + lane / 4;
    float* to = buffer + pixel * kSumPitch<kRowColumns> + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kRowColumns / 8; ++j) {
      *reinterpret_cast<float2*>(to + 8 * j) = {sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]};
    }
  }
}

// Adds up two rows where windows overlap, and writes those that the image has: `end` entries but
// for the first `begin`. The first is that of the first pixel's window, and entry `first` of the
// image's row. An entry is in kHalo windows, or in one more; any number of them if that is -1. A
// thread has kWidth neighbours, of one pixel.
template <int kHalo, int kWidth, int kPitch, typename T>
__device__ __forceinline__ void StoreImageRows(const InputGradParams& p, const float* buffer,
                                               int begin, int end, int64_t first, T* row,
                                               const bool (&exists)[2]) {
  using Few = std::conditional_t<kWidth == 2, float2, float>;
  const int pixel_entries = p.pixel_entries, row_entries = p.row_entries;
  const int window = pixel_entries - kPitch;
  // A thread's entries are so many pixels and entries apart.
  const int thread_pixels = p.thread_pixels * kWidth, thread_entries = p.thread_entries * kWidth;
  const int advance = thread_pixels * kPitch + thread_entries;
  uint32_t pixel = begin + kWidth * threadIdx.x;
  int entry = p.cell.Peel(pixel);
  const float* from = buffer + pixel * kPitch + entry;
  // Of those in the image.
  const auto low = static_cast<int>(max(-first, int64_t{0}));
  const auto high = static_cast<int>(min(p.in_entries - first, int64_t{INT32_MAX}));
  row += first;
  for (int i = begin + kWidth * threadIdx.x; i < end; i += kWidth * kGradThreads) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!exists[r]) continue;
      const float* term = from + r * kGradColumns * kPitch;
      float sum[kWidth] = {};
      const auto add = [&](const float* terms, int at) {
        const Few few = *reinterpret_cast<const Few*>(terms);
        const float* v = reinterpret_cast<const float*>(&few);
        // The entry after the window's last is nothing, times what may be NaN.
#pragma unroll
        for (int w = 0; w < kWidth; ++w) sum[w] += at + w < row_entries ? v[w] : 0;
      };
      if constexpr (kHalo >= 0) {
#pragma unroll
        for (int k = 0; k < kHalo; ++k) add(term + k * window, 0);
        const int last = entry + kHalo * pixel_entries;
        if (last < row_entries) add(term + kHalo * window, last);
      } else {
        for (int k = entry; k < row_entries; k += pixel_entries, term += window) add(term, k);
      }
      T* to = row + r * p.in_entries + i;
      if constexpr (kWidth == 2 && sizeof(T) == 2) {
        if (reinterpret_cast<uintptr_t>(to) % 4 == 0 && i >= low && i + 1 < high) {
          *reinterpret_cast<uint32_t*>(to) = Pack<T>(sum[0], sum[1]);
          continue;
        }
      }
#pragma unroll
      for (int w = 0; w < kWidth; ++w) {
        if (i + w >= low && i + w < high) StoreEntry(to + w, sum[w]);
      }
    }
    entry += thread_entries;
    from += advance;
    while (entry >= pixel_entries) {
      entry -= pixel_entries;
      from -= window;
    }
  }
}

template <typename T, int kKernelRows, int kRowColumns>
__global__ void __launch_bounds__(kGradThreads, kKernelRows* kRowColumns <= 168 ? 3 : 2)
    InputGradFew(const __grid_constant__ InputGradParams p) {
#if JAXOPS_HAS_WGMMA
  extern __shared__ char shared[];
  char* matrices = shared + (1024 - SharedAddress(shared) % 1024) % 1024;
  constexpr int kMatrixBytes = kRowColumns * kMatrixRowBytes;
  // Sums of two rows of the image, twice.
  constexpr int kBufferSize = 2 * kGradColumns * kSumPitch<kRowColumns>;
  auto* buffers = reinterpret_cast<float*>(matrices + p.slabs * kKernelRows * kMatrixBytes);

  uint32_t rest = blockIdx.x;
  const int64_t strip = p.strips.Peel(rest), chunk = p.chunks.Peel(rest);
  const int64_t image = rest;
  const int64_t first_column = p.first_column + strip * p.strip_columns;
  const int cells = static_cast<int>(min(int64_t{p.strip_columns}, p.end_column - first_column));
  const int64_t column = first_column - p.halo_columns;
  const int halo_entries = p.halo_columns * p.pixel_entries;
  const int64_t first_entry = column * p.pixel_entries - p.low_entries;
  const int64_t begin = p.first_row + chunk * p.chunk_rows;
  const int64_t end = min(begin + p.chunk_rows, p.end_row);
  // Rows of the cotangent that reach these cells.
  const int64_t first = begin - p.halo_rows;
  const int64_t from = max(first, int64_t{0}), to = min(end, p.out_rows);

  uint32_t next[2][8];
  if (from < to) LoadCotangent(next, p, image * p.out_rows + from, column, 0);
  FillInputGrad<kKernelRows, kRowColumns>(p, matrices);
  ptx::fence_proxy_async(ptx::space_shared);
  __syncthreads();
  const uint64_t b = At(MatrixDescriptor(16, 1024, kMatrixRowBytes), SharedAddress(matrices));

  float sums[kKernelRows][kRowColumns / 2] = {};
  int buffer = 0;
#pragma unroll 1
  for (int64_t row = first; row < end; ++row) {
    if (row >= from && row < to) {
#pragma unroll 1
      for (int slab = 0; slab < p.slabs; ++slab) {
        uint32_t fragments[4][4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          fragments[k][0] = next[0][2 * k];
          fragments[k][1] = next[1][2 * k];
          fragments[k][2] = next[0][2 * k + 1];
          fragments[k][3] = next[1][2 * k + 1];
        }
        const bool is_last = slab + 1 == p.slabs;
        if (!is_last || row + 1 < to) {
          LoadCotangent(next, p, image * p.out_rows + row + is_last, column,
                        is_last ? 0 : slab + 1);
        }
        const uint64_t b_slab = b + slab * kKernelRows * (kMatrixBytes / 16);
        ProductsBegin();
#pragma unroll
        for (int r = 0; r < kKernelRows; ++r) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            Multiply<T, kRowColumns, false>(sums[r], fragments[k],
                                            b_slab + r * (kMatrixBytes / 16) + 2 * k, 1);
          }
        }
        ProductsCommit();
        ProductsWait<0>();
      }
    }
    // The rows of this cell get nothing from further rows of the cotangent.
#pragma unroll 1
    for (int i = 0; i < p.stride && row >= begin; i += 2) {
      const int64_t in_row = row * p.stride - p.low + i;
      const bool exists[2] = {
          in_row >= 0 && in_row < p.in_rows,
          i + 1 < p.stride && in_row + 1 >= 0 && in_row + 1 < p.in_rows,
      };
      // Not the buffer that threads may still be reading.
      float* sums_of_rows = buffers + buffer * kBufferSize;
      buffer ^= 1;
      if (i + 1 >= kKernelRows) {
        const float none[kRowColumns / 2] = {};
        WriteSums<kRowColumns>(none, sums_of_rows);
        WriteSums<kRowColumns>(none, sums_of_rows + kBufferSize / 2);
      }
#pragma unroll
      for (int r = 0; r < kKernelRows; ++r) {
        if (r == i) WriteSums<kRowColumns>(sums[r], sums_of_rows);
        if (r == i + 1) WriteSums<kRowColumns>(sums[r], sums_of_rows + kBufferSize / 2);
      }
      __syncthreads();
      const auto store = [&](auto halo, auto width, auto* result) {
        StoreImageRows<halo.value, width.value, kSumPitch<kRowColumns>>(
            p, sums_of_rows, halo_entries, halo_entries + cells * p.pixel_entries, first_entry,
            result + (image * p.in_rows + in_row) * p.in_entries, exists);
      };
      using std::integral_constant;
      const bool is_even = p.pixel_entries % 2 == 0;
      if (p.is_wide) {
        store(integral_constant<int, -1>(), integral_constant<int, 1>(),
              static_cast<float*>(p.result));
      } else if (is_even && p.halo_columns == 1) {
        store(integral_constant<int, 1>(), integral_constant<int, 2>(), static_cast<T*>(p.result));
      } else if (is_even && p.halo_columns == 2) {
        store(integral_constant<int, 2>(), integral_constant<int, 2>(), static_cast<T*>(p.result));
      } else if (is_even && p.halo_columns == 3) {
        store(integral_constant<int, 3>(), integral_constant<int, 2>(), static_cast<T*>(p.result));
      } else if (is_even) {
        store(integral_constant<int, -1>(), integral_constant<int, 2>(), static_cast<T*>(p.result));
      } else {
        store(integral_constant<int, -1>(), integral_constant<int, 1>(), static_cast<T*>(p.result));
      }
    }
    ShiftRows<kKernelRows, kRowColumns>(sums, p.stride);
  }
#endif
}

int64_t FloorDiv(int64_t a, int64_t b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

template <typename T, int kKernelRows, int kRowColumns>
cudaError_t LaunchInputGradFew(cudaStream_t stream, InputGradParams& p, int processors) {
  auto* kernel = &InputGradFew<T, kKernelRows, kRowColumns>;
  const int bytes = 1024 + p.slabs * kKernelRows * kRowColumns * kMatrixRowBytes +
                    2 * 2 * kGradColumns * kSumPitch<kRowColumns> * 4;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  int of_processor = 0;
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_processor, kernel, kGradThreads, bytes);
  if (error != cudaSuccess) return error;
  if (of_processor == 0) return cudaErrorNotSupported;

  // Chunks of rows that are done first: each goes through the rows before it that reach it too.
  const int64_t rows = p.end_row - p.first_row;
  const int64_t walks = p.images * p.strips.divisor();
  int64_t least = INT64_MAX;
  for (int64_t count = 1; count <= std::min<int64_t>(rows, 64); ++count) {
    const int64_t chunk = CeilDiv(rows, count);
    const int64_t cost =
        CeilDiv(walks * CeilDiv(rows, chunk), of_processor * processors) * (chunk + p.halo_rows);
    if (cost < least) {
      least = cost;
      p.chunk_rows = static_cast<int>(chunk);
    }
  }
  p.chunks = FastDivider(CeilDiv(rows, p.chunk_rows));
  const int64_t blocks = walks * p.chunks.divisor();
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  kernel<<<static_cast<unsigned>(blocks), kGradThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

// Registers hold the sums of all rows of the kernel, so there is a kernel for every number of them.
template <typename T, int kKernelRows = 1>
cudaError_t LaunchInputGradFew(cudaStream_t stream, InputGradParams& p, int64_t kernel_rows,
                               int processors) {
  if constexpr (kKernelRows < kMostFewTapRows) {
    if (kernel_rows > kKernelRows) {
      return LaunchInputGradFew<T, kKernelRows + 1>(stream, p, kernel_rows, processors);
    }
  }
  constexpr int kFewEntries = 16;
  return p.row_entries <= kFewEntries
             ? LaunchInputGradFew<T, kKernelRows, kFewEntries>(stream, p, processors)
             : LaunchInputGradFew<T, kKernelRows, kMostFewRowEntries>(stream, p, processors);
}

}  // namespace

cudaError_t LaunchForwardFew(cudaStream_t stream, const Call& call) {
  if (!HasFewChannels(call) || call.outputs % kUnit) return cudaErrorNotSupported;
  int processors = 0;
  const cudaError_t error = CountProcessors(&processors);
  if (error != cudaSuccess) return error;
  ForwardParams p{};
  p.kernel = call.kernel;
  p.result = call.result;
  p.outputs = static_cast<int>(call.outputs);
  p.kernel_rows = static_cast<int>(call.dims[0].taps);
  p.is_wide = call.result_dtype == DType::kF32;
  const auto bytes = [](const ForwardParams& p) {
    return 1024 + p.steps * 16 * kMatrixRowBytes +
           (p.steps + 1) * 4 * static_cast<int>(sizeof(PairTable)) + 2 * p.stage_bytes();
  };

  // The tiles that are done first, in estimated cycles: of products and of what is copied.
  constexpr int kMostColumns = 256, kMostRows = 16;
  constexpr int64_t kStepCycles = 80, kBlockCycles = 700, kUnitCycles = 3, kTileCycles = 2000;
  ForwardParams best{};
  int64_t least = INT64_MAX;
  for (int columns = kMostColumns; columns >= 16; columns /= 2) {
    for (int rows = 1; rows <= kMostRows; ++rows) {
      p.Cut(call, columns, rows);
      p.steps = static_cast<int>(CeilDiv(p.kernel_rows * p.row_pairs, 16) * 2);
      if (bytes(p) > kForwardBytes || p.tiles == INT32_MAX) break;
      const int64_t blocks =
          CeilDiv(p.tile_rows * p.tile_columns.divisor(), kForwardRows * kForwardWarpgroups) *
          kForwardWarpgroups;
      const int64_t cycles = blocks * (p.steps * kStepCycles + kBlockCycles) +
                             p.stage_bytes() / kUnitBytes * kUnitCycles + kTileCycles;
      const int64_t cost = CeilDiv(p.tiles, kForwardBlocks * processors) * cycles;
      if (cost < least) {
        least = cost;
        best = p;
      }
    }
  }
  if (least == INT64_MAX) return cudaErrorNotSupported;
  return DispatchShort(call.dtype, [&](auto type) {
    using T = decltype(type);
    return call.outputs <= 32 ? LaunchForwardFew<T, 32>(stream, best, bytes(best), processors)
                              : LaunchForwardFew<T, 64>(stream, best, bytes(best), processors);
  });
}

cudaError_t LaunchInputGradFew(cudaStream_t stream, const Call& call) {
  if (!HasFewChannels(call) || call.outputs % kUnit) return cudaErrorNotSupported;
  int processors = 0;
  const cudaError_t error = CountProcessors(&processors);
  if (error != cudaSuccess) return error;
  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  InputGradParams p{};
  p.cotangent = static_cast<const uint16_t*>(call.image);
  p.kernel = call.kernel;
  p.result = call.result;
  p.images = call.images;
  p.out_rows = h.out;
  p.out_columns = w.out;
  p.in_rows = h.in;
  p.in_entries = w.in * call.channels;
  p.outputs = static_cast<int>(call.outputs);
  p.slabs = static_cast<int>(CeilDiv(call.outputs, kSlab));
  p.stride = static_cast<int>(h.stride);
  p.low = static_cast<int>(h.low);
  p.pixel_entries = static_cast<int>(w.stride * call.channels);
  p.low_entries = w.low * call.channels;
  p.row_entries = static_cast<int>(w.taps * call.channels);
  p.halo_rows = static_cast<int>((h.taps - 1) / h.stride);
  p.halo_columns = static_cast<int>((w.taps - 1) / w.stride);
  p.first_row = FloorDiv(h.low, h.stride);
  p.end_row = FloorDiv(h.in - 1 + h.low, h.stride) + 1;
  p.first_column = FloorDiv(w.low, w.stride);
  p.end_column = FloorDiv(w.in - 1 + w.low, w.stride) + 1;
  const int64_t columns = p.end_column - p.first_column;
  const int64_t strips = CeilDiv(columns, kGradColumns - p.halo_columns);
  p.strip_columns = static_cast<int>(CeilDiv(columns, strips));
  p.strips = FastDivider(CeilDiv(columns, p.strip_columns));
  p.cell = FastDivider(p.pixel_entries);
  p.thread_pixels = kGradThreads / p.pixel_entries;
  p.thread_entries = kGradThreads % p.pixel_entries;
  p.is_wide = call.result_dtype == DType::kF32;
  return DispatchShort(call.dtype, [&](auto type) {
    using T = decltype(type);
    return LaunchInputGradFew<T>(stream, p, h.taps, processors);
  });
}

}  // namespace jaxops::conv::cuda
