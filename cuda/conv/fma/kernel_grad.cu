// The kernel gradient of a convolution in true float32 or in float64, as a matrix product of
// multiply-adds over pixels.
//
// A row of the product is a tap and a channel, as one index, a column is an output, and the sum is
// over the pixels of all images: the transposed patches, which are never stored, times the
// cotangent. Both come to shared memory in chunks of as many pixels as 64 bytes have entries. Rows
// of the product have places, like pixels, and the sum of two places is the position of an entry of
// a patch.
//
// The blocks are too few to fill a GPU unless pixels are split. Each block then writes its part to
// a workspace and a second kernel adds the parts, always in the same order.
#include <type_traits>

#include "cuda/conv/add_parts.h"
#include "cuda/conv/fma/fma.cuh"
#include "cuda/conv/results.cuh"

namespace jaxops::conv::cuda {
namespace fma {
namespace {

struct Params {
  Images images;
  Pixels pixels;
  const char* cotangent;
  char* result;  // of each split, one after the other, or of the whole sum
  // Bytes between groups, between pixels of the cotangent, between rows of the result, and between
  // splits.
  int64_t image_group, output_group;
  int64_t cotangent_pixel;
  int64_t result_row, result_bytes;
  FastDivider channels;  // of a group
  FastDivider row_tiles, column_tiles;
  int rows, outputs;  // of the product
  int chunks, splits;
  bool image_units, output_units;  // whether copies and writes take whole units
  const int* flags;                // the kernel returns unless one of these is set
  int flag_count;                  // none: the kernel always computes
  Place tap[kMaxTaps];
};

// The part of a block's shared memory before the stages. A unit of a row has the place of its
// first entry.
template <typename Tile>
struct alignas(128) Head {
  Place rows[Tile::kRows];
  Place pixels[2 * kSet];  // of two sets
};

// A stage has the pixels of a chunk, first with the rows of the product and then with its columns.
// The pitch of both suits the reads of columns.
template <typename Tile>
constexpr int kImagePitch = Tile::kRows * static_cast<int>(sizeof(typename Tile::T)) + kUnitBytes;
template <typename Tile>
constexpr int kImageBytes = kChunk<typename Tile::T> * kImagePitch<Tile>;
template <typename Tile>
constexpr int kStageBytes = kImageBytes<Tile> + kChunk<typename Tile::T> * Tile::kPitch;
template <typename Tile>
constexpr int kSharedBytes = sizeof(Head<Tile>) + kStages * kStageBytes<Tile>;

template <typename Tile>
__device__ void FindRows(const Params& p, int first, Head<Tile>& head) {
  for (int i = threadIdx.x; i < Tile::kRows; i += Tile::kThreads) {
    uint32_t tap = min(first + i, p.rows - 1);
    const int channel = p.channels.DivMod(tap);
    head.rows[i] = p.tap[tap];
    head.rows[i].byte += blockIdx.y * p.image_group + channel * sizeof(typename Tile::T);
    if (first + i >= p.rows) head.rows[i].row = kNowhere;
  }
}

template <typename Tile>
__device__ void FindPixels(const Params& p, int set, Head<Tile>& head) {
  FindSet<Tile>(set, [&](int number, int at) {
    uint32_t image = min(number, p.pixels.count - 1);
    const int column = p.pixels.columns.DivMod(image);
    const int row = p.pixels.rows.DivMod(image);
    Place place = p.pixels.Of(p.images, image, row, column);
    if (number >= p.pixels.count) place.column = kNowhere;
    head.pixels[at] = place;
  });
}

// Copies kBytes of some rows of the product, a unit or an entry, of all pixels.
template <typename Tile, int kBytes>
__device__ __forceinline__ void CopyImages(const Params& p, const Head<Tile>& head, int chunk,
                                           uint32_t stage) {
  using T = typename Tile::T;
  constexpr int kEntries = kBytes / sizeof(T), kCopies = Tile::kRows / kEntries;
  ForOwn<kChunk<T> * kCopies, Tile::kThreads>([&](int i) {
    const int copy = i % kCopies, in_chunk = i / kCopies;
    const Place row = head.rows[copy * kEntries], pixel = head.pixels[InSets<T>(chunk) + in_chunk];
    CopyAsync<kBytes>(stage + in_chunk * kImagePitch<Tile> + copy * kBytes, p.images.data,
                      row.byte + pixel.byte, p.images.Has(pixel, row));
  });
}

// Copies kBytes of the columns, a unit or an entry, of `outputs` outputs from `cotangent` on.
template <typename Tile, int kBytes>
__device__ __forceinline__ void CopyCotangent(const Params& p, const char* cotangent, int outputs,
                                              int chunk, uint32_t stage) {
  using T = typename Tile::T;
  constexpr int kEntries = kBytes / sizeof(T), kCopies = Tile::kColumns / kEntries;
  ForOwn<kChunk<T> * kCopies, Tile::kThreads>([&](int i) {
    const int copy = i % kCopies, in_chunk = i / kCopies;
    const int pixel = chunk * kChunk<T> + in_chunk;
    CopyAsync<kBytes>(stage + in_chunk * Tile::kPitch + copy * kBytes, cotangent,
                      pixel * p.cotangent_pixel + copy * kBytes,
                      pixel < p.pixels.count && copy * kEntries < outputs);
  });
}

template <typename Tile, bool kImageUnits, bool kOutputUnits>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    KernelGradFma(const __grid_constant__ Params p) {
  using T = typename Tile::T;
  if (p.flag_count > 0 && !AnyIsSet(p.flags, p.flag_count)) return;
  extern __shared__ __align__(128) char shared[];
  Head<Tile>& head = *reinterpret_cast<Head<Tile>*>(shared);
  const char* stages = shared + sizeof(Head<Tile>);
  const uint32_t stage_address = SharedAddress(stages);

  // Neighbouring blocks share pixels, which they then find in the L2 cache.
  uint32_t split = blockIdx.x;
  const int first_row = p.row_tiles.DivMod(split) * Tile::kRows;
  const int first_column = p.column_tiles.DivMod(split) * Tile::kColumns;
  const int begin = static_cast<int>(int64_t{p.chunks} * split / p.splits);
  const int end = static_cast<int>(int64_t{p.chunks} * (split + 1) / p.splits);
  const char* cotangent =
      p.cotangent + blockIdx.y * p.output_group + first_column * static_cast<int>(sizeof(T));
  FindRows(p, first_row, head);
  const auto find = [&](int set) { FindPixels(p, set, head); };
  FindFirstSets<T>(begin, find);
  __syncthreads();

  const auto copy = [&](int chunk, int stage) {
    const uint32_t to = stage_address + stage * kStageBytes<Tile>;
    CopyImages<Tile, kImageUnits ? kUnitBytes : sizeof(T)>(p, head, chunk, to);
    CopyCotangent<Tile, kOutputUnits ? kUnitBytes : sizeof(T)>(
        p, cotangent, p.outputs - first_column, chunk, to + kImageBytes<Tile>);
  };
  for (int i = 0; i < kAhead; ++i) {
    if (begin + i < end) copy(begin + i, i);
    CommitCopies();
  }

  const Lane<Tile> lane;
  constexpr int kRowUnits = Tile::kThreadRows / kUnit<T>;  // of a thread
  const auto unit_row = [&](int i) {
    return lane.warp_row + (i * Tile::kLaneRows + lane.row) * kUnit<T>;
  };
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

    const char* left = stages + stage * kStageBytes<Tile>;
    const char* right = left + kImageBytes<Tile>;
    const auto load_rows = [&](int i, int k) {
      return Load<T>(left + k * kImagePitch<Tile> + unit_row(i) * static_cast<int>(sizeof(T)));
    };
    if constexpr (Tile::kOnTensorCores) {
      Unit<T> columns[2];
      LoadColumns(lane, right, columns);
      MultiplyChunk<Tile>(
          columns,
          [&](int i, double (&a)[4]) {
            const Unit<T> first = load_rows(i, lane.unit), second = load_rows(i, lane.unit + 1);
            a[0] = first.entry[0];
            a[1] = first.entry[1];
            a[2] = second.entry[0];
            a[3] = second.entry[1];
          },
          sums);
    } else {
#pragma unroll
      for (int k = 0; k < kChunk<T>; ++k) {
        Unit<T> a[kRowUnits], b[Tile::kThreadUnits];
#pragma unroll
        for (int i = 0; i < kRowUnits; ++i) a[i] = load_rows(i, k);
#pragma unroll
        for (int j = 0; j < Tile::kThreadUnits; ++j) {
          b[j] = Load<T>(right + k * Tile::kPitch + lane.Column(j) * kUnitBytes);
        }
#pragma unroll
        for (int i = 0; i < Tile::kThreadRows; ++i) {
          const T entry = a[i / kUnit<T>].entry[i % kUnit<T>];
#pragma unroll
          for (int j = 0; j < Tile::kThreadUnits; ++j) {
#pragma unroll
            for (int n = 0; n < kUnit<T>; ++n) sums[i][j].entry[n] += entry * b[j].entry[n];
          }
        }
      }
    }
    stage = stage == kAhead ? 0 : stage + 1;
  }

  char* result = p.result + split * p.result_bytes + blockIdx.y * p.output_group;
#pragma unroll
  for (int i = 0; i < Tile::kThreadRows; ++i) {
    const int row = first_row + unit_row(i / kUnit<T>) + i % kUnit<T>;
    if (row >= p.rows) continue;
    T* to = reinterpret_cast<T*>(result + row * p.result_row);
#pragma unroll
    for (int j = 0; j < Tile::kThreadUnits; ++j) {
      const int column = first_column + lane.Column(j) * kUnit<T>;
      Store(to + column, sums[i][j], p.outputs - column, kOutputUnits);
    }
  }
}

// --- plans and launches on the host --------------------------------------------------------------

template <typename Tile>
cudaError_t LaunchTile(cudaStream_t stream, Params& p, int64_t groups) {
  p.row_tiles = FastDivider(CeilDiv(p.rows, Tile::kRows));
  p.column_tiles = FastDivider(CeilDiv(p.outputs, Tile::kColumns));
  const int64_t blocks = int64_t{p.row_tiles.divisor()} * p.column_tiles.divisor() * p.splits;
  if (blocks > INT32_MAX || groups > kMaxGroups) return cudaErrorNotSupported;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(groups));
  return DispatchBool(p.image_units, [&](auto image_units) {
    return DispatchBool(p.output_units, [&](auto output_units) {
      const auto kernel =
          &KernelGradFma<Tile, decltype(image_units)::value, decltype(output_units)::value>;
      const cudaError_t error = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<Tile>);
      if (error != cudaSuccess) return error;
      kernel<<<grid, Tile::kThreads, kSharedBytes<Tile>, stream>>>(p);
      return cudaGetLastError();
    });
  });
}

// The cuts of a call: tiles, and splits of the sum over pixels.
struct Plan {
  cudaError_t (*launch)(cudaStream_t, Params&, int64_t);
  int splits;
  int64_t cycles;  // estimated
};

// Replaces `plan` by the fastest plan with these tiles, if that is faster. Pixels are split so that
// every processor has some blocks, into as few parts as that takes.
template <typename Tile>
void Consider(Plan& plan, const Params& p, int64_t groups, int64_t all_outputs, bool in_units,
              int processors) {
  constexpr int64_t kMaxBlocks = 4;       // of a processor
  constexpr int64_t kBlockCycles = 2000;  // before the first product and after the last
  constexpr int64_t kAddCycles = 4000, kAddedPerCycle = 600;  // bytes
  constexpr int64_t kEntryPercent = 130;                      // where entries are copied one by one
  const int64_t tiles = CeilDiv(p.rows, Tile::kRows) * CeilDiv(p.outputs, Tile::kColumns) * groups;
  for (int64_t blocks = 1; blocks <= kMaxBlocks; ++blocks) {
    const int64_t splits = std::clamp<int64_t>(blocks * processors / tiles, 1, p.chunks);
    const int64_t added = splits * p.rows * all_outputs * sizeof(typename Tile::T);
    const int64_t load = CeilDiv(tiles * splits, processors);
    const int64_t percent = Tile::kPercent + 400 / Warps<Tile>(load);
    const int64_t cycles = ProductCycles<Tile>(load, CeilDiv(p.chunks, splits),
                                               in_units ? percent : percent * kEntryPercent / 100) +
                           CeilDiv(load, Tile::kBlocks) * kBlockCycles +
                           (splits > 1 ? kAddCycles + added / kAddedPerCycle : 0);
    if (!plan.launch || cycles < plan.cycles) {
      plan = {&LaunchTile<Tile>, static_cast<int>(splits), cycles};
    }
  }
}

template <typename... Tiles>
Plan FirstDone(const Params& p, int64_t groups, int64_t all_outputs, bool in_units,
               int processors) {
  Plan plan{};
  (Consider<Tiles>(plan, p, groups, all_outputs, in_units, processors), ...);
  return plan;
}

// Fills in everything but addresses, from sizes and the number of processors alone; the plan has no
// launch where sizes are too large.
template <typename T>
Plan Decide(Params& p, const Call& call, int processors) {
  constexpr int64_t kItem = sizeof(T);
  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  const int64_t channels = call.channels / call.groups, outputs = call.outputs / call.groups;
  const int64_t pixels = call.images * h.out * w.out, taps = h.taps * w.taps;
  // The bound leaves room for counting tiles and chunks after the end in 32 bits.
  constexpr int64_t kMaxIndex = INT32_MAX - 4096;
  if (taps > kMaxTaps || pixels > kMaxIndex || taps * channels > kMaxIndex ||
      call.channels * kItem > kMaxIndex || call.outputs * kItem > kMaxIndex) {
    return {};
  }
  p.images.rows = static_cast<uint32_t>(h.in);
  p.images.columns = static_cast<uint32_t>(w.in);
  p.images.pixel_bytes = static_cast<int>(call.channels * kItem);
  p.images.row_bytes = w.in * p.images.pixel_bytes;
  p.images.image_bytes = h.in * p.images.row_bytes;
  p.image_group = channels * kItem;

  p.pixels.rows = FastDivider(h.out);
  p.pixels.columns = FastDivider(w.out);
  p.pixels.stride_row = static_cast<uint32_t>(h.stride);
  p.pixels.stride_column = static_cast<uint32_t>(w.stride);
  p.pixels.count = static_cast<int>(pixels);

  p.output_group = outputs * kItem;
  p.cotangent_pixel = p.result_row = call.outputs * kItem;
  p.result_bytes = taps * channels * p.result_row;
  p.channels = FastDivider(channels);
  p.rows = static_cast<int>(taps * channels);
  p.outputs = static_cast<int>(outputs);
  p.chunks = static_cast<int>(CeilDiv(pixels, kChunk<T>));
  Tap tap[kMaxTaps];
  FillTaps(tap, call);
  for (int t = 0; t < taps; ++t) p.tap[t] = p.images.Of(tap[t]);
  const bool in_units = channels % kUnit<T> == 0 && outputs % kUnit<T> == 0;
  const Plan plan = FirstDone<Tile<T, 2, 4, 8, 8, 2, 2, 115>, Tile<T, 2, 2, 8, 8, 2, 4, 120>,
                              Tile<T, 2, 2, 8, 4, 2, 5, 135>,
                              Tile<T, 4, 1, 8, 4, 1, 6, std::is_same_v<T, float> ? 295 : 160>>(
      p, call.groups, call.outputs, in_units, processors);
  p.splits = plan.splits;
  return plan;
}

int64_t PartBytes(const Params& p) { return p.splits > 1 ? p.splits * p.result_bytes : 0; }

// Launches all kernels but the one that adds the `parts` parts.
template <typename T>
cudaError_t LaunchParts(cudaStream_t stream, const Call& call, Space workspace, int processors,
                        const int* flags, int flag_count, int* parts) {
  Params p{};
  const Plan plan = Decide<T>(p, call, processors);
  if (!plan.launch) return cudaErrorNotSupported;
  if (workspace.bytes < PartBytes(p)) return cudaErrorInvalidValue;
  p.flags = flags;
  p.flag_count = flag_count;
  *parts = p.splits;
  void* result = p.splits == 1 ? call.result : workspace.data;
  p.images.data = static_cast<const char*>(call.image);
  p.cotangent = static_cast<const char*>(call.cotangent);
  p.result = static_cast<char*>(result);
  const int64_t channels = call.channels / call.groups;
  p.image_units = AreUnits<T>(call.image, call.channels, channels);
  p.output_units = AreUnits<T>(call.cotangent, call.outputs, p.outputs) &&
                   AreUnits<T>(result, call.outputs, p.outputs);
  return plan.launch(stream, p, call.groups);
}

template <typename T>
cudaError_t Launch(cudaStream_t stream, const Call& call, Space workspace, int processors) {
  int parts = 0;
  const cudaError_t error = LaunchParts<T>(stream, call, workspace, processors, nullptr, 0, &parts);
  if (error != cudaSuccess || parts == 1) return error;
  const int64_t size =
      call.dims[0].taps * call.dims[1].taps * (call.channels / call.groups) * call.outputs;
  return LaunchAddParts(stream, workspace.data, call.result, call.result_dtype, size, parts);
}

template <typename T>
int64_t Workspace(const Call& call, int processors) {
  Params p{};
  const Plan plan = Decide<T>(p, call, processors);
  return plan.launch ? PartBytes(p) : 0;
}

}  // namespace
}  // namespace fma

int64_t KernelGradFmaWorkspace(const Call& call, int processors) {
  return call.dtype == DType::kF64 ? fma::Workspace<double>(call, processors)
                                   : fma::Workspace<float>(call, processors);
}

int64_t KernelGradFmaCycles(const Call& call, int processors) {
  fma::Params p{};
  const fma::Plan plan = fma::Decide<float>(p, call, processors);
  return plan.launch ? plan.cycles : INT64_MAX;
}

cudaError_t LaunchKernelGradFmaParts(cudaStream_t stream, const Call& call, Space workspace,
                                     int processors, const int* flags, int flag_count, int* parts) {
  return fma::LaunchParts<float>(stream, call, workspace, processors, flags, flag_count, parts);
}

cudaError_t LaunchKernelGradFma(cudaStream_t stream, const Call& call, Space workspace,
                                int processors) {
  return call.dtype == DType::kF64 ? fma::Launch<double>(stream, call, workspace, processors)
                                   : fma::Launch<float>(stream, call, workspace, processors);
}

}  // namespace jaxops::conv::cuda
