// Convolution in true float32 and in float64, and its gradient by the image, as a matrix product
// of multiply-adds whose left operand, the patches, is never made.
//
// A block takes a tile of pixels by outputs. What is summed over, taps and channels, is one index:
// few channels, or odd ones, are not filled up. Its entries come to shared memory in chunks of 64
// bytes, those of patches straight from where they are in the image. For that every pixel has a
// place and every entry of the sum another, and where an entry of a patch is, and whether it is in
// the image at all, is a matter of adding the two.
#include "cuda/conv_fma.cuh"
#include "cuda/conv_results.cuh"

namespace jaxops::conv::cuda {
namespace fma {
namespace {

struct Params {
  Images images;
  Pixels pixels;
  const char* kernel;
  char* result;
  // Bytes between groups; between channels and outputs of the kernel; between pixels of the result.
  int64_t image_group, kernel_group, result_group;
  int64_t kernel_channel, kernel_output;
  int64_t result_image, result_row, result_column;
  FastDivider column_tiles;
  int outputs;
  // The index of the sum, of so many entries in so many chunks: channels of a block, the fastest,
  // taps, and blocks. Blocks are small where they can be, because neighbouring taps then find the
  // entries of a block in the L1 cache.
  FastDivider block, taps;
  int depth, chunks;
  // Whether these are copied, and written, by units, else by entries.
  bool image_units, kernel_units, result_units;
  Epilogue epilogue;
  Place tap[kMaxTaps];
  int64_t matrix[kMaxTaps];  // bytes from the start of the kernel to the matrix of a tap
};

// What a block has in shared memory beside stages.
template <typename Tile>
struct alignas(128) Head {
  Place pixels[Tile::kRows];
  int64_t results[Tile::kRows];  // bytes; negative where there is no pixel
  // Those of two sets: what is summed over, in the image and in the kernel, there bytes to the
  // tile's first output, negative after the end.
  Place steps[2 * kSet];
  int64_t matrix_rows[2 * kSet];
};

// A stage has the rows of pixels, of a chunk each, and after them those of the chunk, of columns.
template <typename Tile>
constexpr int kImageBytes = Tile::kRows * kChunkBytes;
template <typename Tile>
constexpr int kStageBytes = kImageBytes<Tile> + kChunk<typename Tile::T> * Tile::kPitch;
template <typename Tile>
constexpr int kSharedBytes = sizeof(Head<Tile>) + kStages * kStageBytes<Tile>;

// Where a unit of a pixel's row is: units of eight neighbouring pixels have no banks in common.
__device__ __forceinline__ int ImageUnit(int row, int unit) {
  return row * kChunkBytes + (unit ^ (row / 2 % 4)) * kUnitBytes;
}

template <typename Tile>
__device__ void FindPixels(const Params& p, int first, Head<Tile>& head) {
  for (int i = threadIdx.x; i < Tile::kRows; i += Tile::kThreads) {
    const int number = first + i;
    uint32_t image = min(number, p.pixels.count - 1);
    const int column = p.pixels.columns.Peel(image);
    const int row = p.pixels.rows.Peel(image);
    const bool exists = number < p.pixels.count;
    head.pixels[i] = p.pixels.Of(p.images, image, row, column);
    head.pixels[i].byte += blockIdx.y * p.image_group;
    if (!exists) head.pixels[i].row = kNowhere;
    head.results[i] =
        exists ? image * p.result_image + row * p.result_row + column * p.result_column : -1;
  }
}

template <typename Tile>
__device__ void FindSteps(const Params& p, int first_column, int set, Head<Tile>& head) {
  using T = typename Tile::T;
  FindSet<Tile>(set, [&](int step, int at) {
    uint32_t block = min(step, p.depth - 1);
    int channel = p.block.Peel(block);
    const int tap = p.taps.Peel(block);
    channel += block * p.block.divisor();
    Place place = p.tap[tap];
    place.byte += channel * sizeof(T);
    if (step >= p.depth) place.column = kNowhere;
    head.steps[at] = place;
    const int64_t row = p.matrix[tap] + blockIdx.y * p.kernel_group + channel * p.kernel_channel +
                        first_column * p.kernel_output;
    head.matrix_rows[at] = step < p.depth ? row : -1;
  });
}

// Copies kBytes of some steps of the pixels' rows, a unit or an entry.
template <typename Tile, int kBytes>
__device__ __forceinline__ void CopyImages(const Params& p, const Head<Tile>& head, int chunk,
                                           uint32_t stage) {
  using T = typename Tile::T;
  constexpr int kCopies = kChunkBytes / kBytes, kEntries = kBytes / sizeof(T);
  static_assert(Tile::kThreads % kCopies == 0);
  const int copy = threadIdx.x % kCopies;
  const Place step = head.steps[InSets<T>(chunk) + copy * kEntries];
  ForOwn<Tile::kRows * kCopies, Tile::kThreads>([&](int i) {
    const int row = i / kCopies;
    const Place pixel = head.pixels[row];
    const uint32_t to =
        stage + ImageUnit(row, copy * kBytes / kUnitBytes) + copy * kBytes % kUnitBytes;
    CopyAsync<kBytes>(to, p.images.data, step.byte + pixel.byte, p.images.Has(pixel, step));
  });
}

// Copies kBytes of some rows of the kernel's matrices, a unit or an entry, of which there are
// `outputs` from the tile's first one on.
template <typename Tile, int kBytes>
__device__ __forceinline__ void CopyKernel(const Params& p, int outputs, const Head<Tile>& head,
                                           int chunk, uint32_t stage) {
  using T = typename Tile::T;
  constexpr int kSteps = kChunk<T>, kEntries = kBytes / sizeof(T);
  constexpr int kCopies = Tile::kColumns / kEntries;
  // Entries are beside each other in the kernel along outputs or, in the gradient, along channels.
  // Of eight of these at a time writes have no banks in common.
  constexpr int kBeside = kEntries > 1 ? 1 : 8;
  ForOwn<kSteps * kCopies, Tile::kThreads>([&](int i) {
    const int step = i % kBeside + i / (kBeside * kCopies) * kBeside;
    const int copy = i / kBeside % kCopies;
    const int64_t row = head.matrix_rows[InSets<T>(chunk) + step];
    const int64_t at = kEntries > 1 ? copy * kBytes : copy * p.kernel_output;
    CopyAsync<kBytes>(stage + step * Tile::kPitch + copy * kBytes, p.kernel, row + at,
                      row >= 0 && copy * kEntries < outputs);
  });
}

template <typename Tile, bool kImageUnits, bool kKernelUnits>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    Convolve(const __grid_constant__ Params p) {
  using T = typename Tile::T;
  extern __shared__ __align__(128) char shared[];
  Head<Tile>& head = *reinterpret_cast<Head<Tile>*>(shared);
  const char* stages = shared + sizeof(Head<Tile>);
  const uint32_t stage_address = SharedAddress(stages);

  uint32_t row_tile = blockIdx.x;
  const int first_column = p.column_tiles.Peel(row_tile) * Tile::kColumns;
  FindPixels(p, row_tile * Tile::kRows, head);
  const auto find = [&](int set) { FindSteps(p, first_column, set, head); };
  if (p.chunks > 0) FindFirstSets<T>(0, find);
  __syncthreads();

  const auto copy = [&](int chunk, int stage) {
    const uint32_t to = stage_address + stage * kStageBytes<Tile>;
    CopyImages<Tile, kImageUnits ? kUnitBytes : sizeof(T)>(p, head, chunk, to);
    CopyKernel<Tile, kKernelUnits ? kUnitBytes : sizeof(T)>(p, p.outputs - first_column, head,
                                                            chunk, to + kImageBytes<Tile>);
  };
  for (int i = 0; i < kAhead; ++i) {
    if (i < p.chunks) copy(i, i);
    CommitCopies();
  }

  Unit<T> sums[Tile::kThreadRows][Tile::kThreadUnits] = {};
  int stage = 0;
  for (int chunk = 0; chunk < p.chunks; ++chunk) {
    WaitCopies<kAhead - 1>();
    // All have copied this chunk, and multiplied the one before it, whose stage is next.
    __syncthreads();
    if (chunk + kAhead < p.chunks) {
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
      MultiplyChunk(
          lane, right,
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
#pragma unroll
      for (int u = 0; u < kChunkBytes / kUnitBytes; ++u) {
        Unit<T> a[Tile::kThreadRows];
#pragma unroll
        for (int i = 0; i < Tile::kThreadRows; ++i) a[i] = load_row(i, u);
#pragma unroll
        for (int e = 0; e < kUnit<T>; ++e) {
          Unit<T> b[Tile::kThreadUnits];
#pragma unroll
          for (int j = 0; j < Tile::kThreadUnits; ++j) {
            b[j] = Load<T>(right + (u * kUnit<T> + e) * Tile::kPitch + lane.Column(j) * kUnitBytes);
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
    stage = stage == kAhead ? 0 : stage + 1;
  }

  const Lane<Tile> lane;
#pragma unroll
  for (int i = 0; i < Tile::kThreadRows; ++i) {
    const int64_t offset = head.results[lane.warp_row + i * Tile::kLaneRows + lane.row];
    if (offset < 0) continue;
    T* to = reinterpret_cast<T*>(p.result + blockIdx.y * p.result_group + offset);
#pragma unroll
    for (int j = 0; j < Tile::kThreadUnits; ++j) {
      const int column = first_column + lane.Column(j) * kUnit<T>;
      Finish(p.epilogue, int64_t{blockIdx.y} * p.outputs + column, p.outputs - column,
             sums[i][j].entry);
      Store(to + column, sums[i][j], p.outputs - column, p.result_units);
    }
  }
}

// --- what the host decides -----------------------------------------------------------------------

template <typename Tile>
int64_t CountTiles(const Params& p) {
  return CeilDiv(p.pixels.count, Tile::kRows) * CeilDiv(p.outputs, Tile::kColumns);
}

template <typename Tile>
int64_t EstimateCycles(const Params& p, int64_t groups, int processors) {
  return Cycles<Tile>(CeilDiv(CountTiles<Tile>(p) * groups, processors), p.chunks);
}

template <typename Tile>
cudaError_t LaunchTile(cudaStream_t stream, Params& p, int64_t groups) {
  const int64_t tiles = CountTiles<Tile>(p);
  if (tiles > INT32_MAX || groups > UINT16_MAX) return cudaErrorNotSupported;
  p.column_tiles = FastDivider(CeilDiv(p.outputs, Tile::kColumns));
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(groups));
  return DispatchBool(p.image_units, [&](auto image_units) {
    return DispatchBool(p.kernel_units, [&](auto kernel_units) {
      const auto kernel =
          &Convolve<Tile, decltype(image_units)::value, decltype(kernel_units)::value>;
      const cudaError_t error = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<Tile>);
      if (error != cudaSuccess) return error;
      kernel<<<grid, Tile::kThreads, kSharedBytes<Tile>, stream>>>(p);
      return cudaGetLastError();
    });
  });
}

// Launches the tiles that are done first; ties go to what comes first.
template <typename... Tiles>
cudaError_t LaunchFirstDone(cudaStream_t stream, Params& p, int64_t groups) {
  int processors = 0;
  const cudaError_t error = jaxops::cuda::CountProcessors(&processors);
  if (error != cudaSuccess) return error;
  const int64_t cycles[] = {EstimateCycles<Tiles>(p, groups, processors)...};
  cudaError_t (*const launches[])(cudaStream_t, Params&, int64_t) = {&LaunchTile<Tiles>...};
  return launches[std::min_element(std::begin(cycles), std::end(cycles)) - cycles](stream, p,
                                                                                   groups);
}

// The channels and outputs of the kernel, and its groups, are so many entries apart.
template <typename T>
cudaError_t Launch(cudaStream_t stream, const Sum& sum, int64_t kernel_channel,
                   int64_t kernel_output, int64_t kernel_group) {
  constexpr int64_t kItem = sizeof(T);
  const int64_t all_channels = sum.groups * sum.channels, all_outputs = sum.groups * sum.outputs;
  const int64_t pixels = sum.images * sum.rows * sum.columns;
  // So that tiles and chunks after the end, too, are counted in 32 bits.
  constexpr int64_t kMost = INT32_MAX - 4096;
  if (pixels > kMost || sum.taps * sum.channels > kMost || all_channels * kItem > kMost ||
      all_outputs * kItem > kMost) {
    return cudaErrorNotSupported;
  }
  Params p{};
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

  p.outputs = static_cast<int>(sum.outputs);
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
  for (int t = 0; t < sum.taps; ++t) {
    p.tap[t] = p.images.Of(sum.tap[t]);
    p.matrix[t] = sum.tap[t].matrix * sum.channels * all_outputs * kItem;
  }
  p.kernel = static_cast<const char*>(sum.kernel);
  p.kernel_channel = kernel_channel * kItem;
  p.kernel_output = kernel_output * kItem;
  p.kernel_group = kernel_group * kItem;
  p.kernel_units = kernel_output == 1 && AreUnits<T>(sum.kernel, all_outputs, sum.outputs);
  // Tiles of 64 bytes of outputs or more, and of a single unit for results of few.
  return LaunchFirstDone<Tile<T, 2, 4, 8, 8, 2, 2, 115>, Tile<T, 2, 2, 8, 8, 2, 4, 120>,
                         Tile<T, 2, 2, 8, 4, 2, 5, 135>, Tile<T, 4, 1, 8, 4, 1, 6, 160>,
                         Tile<T, 2, 1, 32, 4, 1, 3, 200>>(stream, p, sum.groups);
}

cudaError_t Launch(cudaStream_t stream, DType dtype, const Sum& sum, int64_t kernel_channel,
                   int64_t kernel_output, int64_t kernel_group) {
  const auto launch = dtype == DType::kF64 ? &Launch<double> : &Launch<float>;
  return launch(stream, sum, kernel_channel, kernel_output, kernel_group);
}

}  // namespace
}  // namespace fma

cudaError_t LaunchForwardFma(cudaStream_t stream, const Call& call) {
  return LaunchForwardSum(call, [&](const Sum& sum) {
    return fma::Launch(stream, call.dtype, sum, call.outputs, 1, sum.outputs);
  });
}

cudaError_t LaunchInputGradFma(cudaStream_t stream, const Call& call) {
  return LaunchInputGradSums(call, [&](const Sum& sum) {
    return fma::Launch(stream, call.dtype, sum, 1, call.outputs, sum.channels);
  });
}

}  // namespace jaxops::conv::cuda
