// The input gradient of a convolution of few channels on Hopper.
//
// The channels are too few to be the columns of a product, so all entries of a window's row are. A
// row of the product is a pixel of the cotangent. Every row of the kernel has its sums, which
// belong to one row of the image; a warpgroup loops down the cotangent and keeps the sums that
// further rows of the cotangent add to. It adds complete sums along the row, where windows overlap,
// through shared memory.
#include <type_traits>

#include "cuda/conv/few_channels/few_channels.cuh"

namespace jaxops::conv::cuda {
namespace {

// A block is a warpgroup.
constexpr int kGradThreads = 128;
// Pixels of the cotangent that are next to each other in a product.
constexpr int kGradColumns = 64;
// Outputs of one batch of products: lanes have 16 outputs each of a pixel.
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
  // windows do. Windows that reach a cell begin at most this many cells before it.
  int halo_rows, halo_columns;
  int64_t first_row, end_row, first_column, end_column;  // cells
  int strip_columns, chunk_rows;                         // cells of a block
  FastDivider strips, chunks;
  FastDivider cell;                   // entries
  int thread_pixels, thread_entries;  // between a thread's entries of a row
  bool is_wide;
};

template <int kRowColumns>
constexpr int kSumPitch = kRowColumns % 16 == 0 ? kRowColumns + 8 : kRowColumns;

// Fills in the kernel in shared memory: for each slab of outputs and each of its rows a matrix
// whose rows are entries of the window, along the sum. The order of outputs in the sum is the order
// in which a lane loads the outputs, see LoadCotangent.
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

// Loads a lane's outputs of its two pixels of the cotangent: 16 neighbours of a slab, the left
// operand of four steps.
[[maybe_unused]] __device__ inline void LoadCotangent(uint32_t (&to)[2][8],
                                                      const InputGradParams& p,
                                                      int64_t cotangent_row, int64_t column,
                                                      int slab) {
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

// Makes row `stride` the first row, and fills up with rows of zeros.
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

// Adds up two rows where windows overlap, and writes the entries that the image has, from `begin`
// to `end`. Entry 0 is the first entry of the first pixel's window, and entry `first` of the
// image's row. An entry is in kHalo windows or in one more, or in any number of windows if kHalo is
// -1. A thread has kWidth neighbouring entries of one pixel.
template <int kHalo, int kWidth, int kPitch, typename T>
__device__ __forceinline__ void StoreImageRows(const InputGradParams& p, const float* buffer,
                                               int begin, int end, int64_t first, T* row,
                                               const bool (&exists)[2]) {
  using Few = std::conditional_t<kWidth == 2, float2, float>;
  const int pixel_entries = p.pixel_entries, row_entries = p.row_entries;
  const int window = pixel_entries - kPitch;
  // A thread's entries are this many pixels and entries apart.
  const int thread_pixels = p.thread_pixels * kWidth, thread_entries = p.thread_entries * kWidth;
  const int advance = thread_pixels * kPitch + thread_entries;
  uint32_t pixel = begin + kWidth * threadIdx.x;
  int entry = p.cell.DivMod(pixel);
  const float* from = buffer + pixel * kPitch + entry;
  // The bounds keep entries within the image.
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
        // The entry after the window's last is zero times something that may be NaN.
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
          *reinterpret_cast<uint32_t*>(to) = PackPair<T>(sum[0], sum[1]);
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
  // Sums of two rows of the image, in two buffers.
  constexpr int kBufferSize = 2 * kGradColumns * kSumPitch<kRowColumns>;
  auto* buffers = reinterpret_cast<float*>(matrices + p.slabs * kKernelRows * kMatrixBytes);

  uint32_t rest = blockIdx.x;
  const int64_t strip = p.strips.DivMod(rest), chunk = p.chunks.DivMod(rest);
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
    // No further row of the cotangent adds to the rows of this cell.
#pragma unroll 1
    for (int i = 0; i < p.stride && row >= begin; i += 2) {
      const int64_t in_row = row * p.stride - p.low + i;
      const bool exists[2] = {
          in_row >= 0 && in_row < p.in_rows,
          i + 1 < p.stride && in_row + 1 >= 0 && in_row + 1 < p.in_rows,
      };
      // Threads may still be reading the other buffer.
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
cudaError_t LaunchInputGradFewChannels(cudaStream_t stream, InputGradParams& p, int processors) {
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

  // The chosen chunks of rows finish first: each chunk also loops over the rows before it that
  // reach it.
  const int64_t rows = p.end_row - p.first_row;
  const int64_t loops = p.images * p.strips.divisor();
  int64_t least = INT64_MAX;
  for (int64_t count = 1; count <= std::min<int64_t>(rows, 64); ++count) {
    const int64_t chunk = CeilDiv(rows, count);
    const int64_t cost =
        CeilDiv(loops * CeilDiv(rows, chunk), of_processor * processors) * (chunk + p.halo_rows);
    if (cost < least) {
      least = cost;
      p.chunk_rows = static_cast<int>(chunk);
    }
  }
  p.chunks = FastDivider(CeilDiv(rows, p.chunk_rows));
  const int64_t blocks = loops * p.chunks.divisor();
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  kernel<<<static_cast<unsigned>(blocks), kGradThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

// Registers hold the sums of all rows of the kernel, so every number of rows has its own instance.
template <typename T, int kKernelRows = 1>
cudaError_t LaunchInputGradFewChannels(cudaStream_t stream, InputGradParams& p, int64_t kernel_rows,
                                       int processors) {
  if constexpr (kKernelRows < kMaxFewTapRows) {
    if (kernel_rows > kKernelRows) {
      return LaunchInputGradFewChannels<T, kKernelRows + 1>(stream, p, kernel_rows, processors);
    }
  }
  constexpr int kFewEntries = 16;
  return p.row_entries <= kFewEntries
             ? LaunchInputGradFewChannels<T, kKernelRows, kFewEntries>(stream, p, processors)
             : LaunchInputGradFewChannels<T, kKernelRows, kMaxFewRowEntries>(stream, p, processors);
}

}  // namespace

cudaError_t LaunchInputGradFewChannels(cudaStream_t stream, const Call& call) {
  if (!CanRunFewChannels(call) || call.outputs % kUnit) return cudaErrorNotSupported;
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
    return LaunchInputGradFewChannels<T>(stream, p, h.taps, processors);
  });
}

}  // namespace jaxops::conv::cuda
