// The kernel gradient of a depthwise convolution, on tensor cores.
//
// For a channel and a column of taps, the sum over columns c of x[i, c + tap] g[j, c], for 16 rows
// of x and 8 rows of the cotangent, is a matrix product C[i, j], and the gradient for tap row r is
// the sum of its entries C[j + r, j]. A warp therefore adds up C over the pixels of all images, one
// C for every column of taps, and reads their diagonals once at the end. The entries of C off these
// diagonals are wasted, and still the products take less time than on CUDA cores.
//
// A block has 16 channels. It loops over its part of the images in chunks of rows and columns,
// which it copies to shared memory so that columns are next to each other for every channel. A lane
// reads 8 neighbouring columns of a row of the sum over columns, whose order is free, and the
// columns after them that taps reach: all taps of a row are computed from registers.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/fast_divide.h"
#include "cuda/common/async_copy.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/numeric.cuh"
#include "cuda/common/warp_matrix.cuh"
#include "cuda/conv/add_parts.h"
#include "cuda/conv/families.h"

namespace jaxops::conv::cuda {
namespace {

using jaxops::cuda::CeilDiv;
using jaxops::cuda::CommitCopies;
using jaxops::cuda::CopyAsyncPast;
using jaxops::cuda::kWarp;
using jaxops::cuda::MultiplyStep;
using jaxops::cuda::Narrow;
using jaxops::cuda::SharedAddress;
using jaxops::cuda::WaitCopies;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBlocks = 2;  // blocks of a multiprocessor
constexpr int kChannels = 16;
constexpr int kOctet = 8;  // channels of an access
constexpr int kOctets = kChannels / kOctet;
constexpr int kWarpChannels = kChannels / kWarps;
constexpr int kTileRows = 8;  // of the cotangent
constexpr int kTiles = 2;     // of a chunk
constexpr int kMaxRows = kTiles * kTileRows, kMaxColumns = 32;
// The pitches count 32-bit words, of two columns each, from row to row. The pitch of x makes the
// accesses of eight lanes meet different banks, where neighbouring lanes have rows that are four
// apart.
constexpr int kImagePitch = 20, kCotangentPitch = 16;

// A plane has one channel. The padding of planes puts the channels that neighbouring lanes store
// into different halves of the banks.
constexpr int PlaneWords(int words) { return words + (16 - words % 32 + 32) % 32; }
constexpr int kImagePlane = PlaneWords((kTiles + 1) * kTileRows * kImagePitch);
constexpr int kCotangentPlane = PlaneWords(kTiles * kTileRows * kCotangentPitch);
constexpr int64_t kPlaneBytes = sizeof(uint32_t) * kChannels * (kImagePlane + kCotangentPlane);

// The part of an image that a block copies for a chunk: rows and pairs of columns from these on.
struct Window {
  int row, rows, pair, pairs;

  int64_t bytes() const { return int64_t{rows} * pairs * 2 * kChannels * 2; }
};

struct Params {
  const void* image;
  const void* cotangent;
  void* result;  // of each split, one after the other, or of the whole sum
  int image_rows, image_columns, rows, columns, low_row, low_column;
  int64_t channels, octets;
  int chunk_rows, chunk_columns;
  FastDivider64 row_chunks, column_chunks, groups;
  Window of_image, of_cotangent;
  int64_t items, splits, size;
  bool is_part, sums_are_f32;
};

struct Item {
  int64_t image;
  int row, column;  // the first of the cotangent

  __device__ Item(const Params& p, uint64_t number) {
    column = static_cast<int>(p.column_chunks.DivMod(number)) * p.chunk_columns;
    row = static_cast<int>(p.row_chunks.DivMod(number)) * p.chunk_rows;
    image = number;
  }
};

// Returns seen + 0 * entries, which remains zero if all entries are finite.
template <typename T>
__device__ __forceinline__ uint32_t See(uint32_t seen, uint32_t entries) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  Pair of_seen, of_entries, zeros;
  memcpy(&of_seen, &seen, sizeof(seen));
  memcpy(&of_entries, &entries, sizeof(entries));
  memset(&zeros, 0, sizeof(zeros));
  of_seen = __hfma2(of_entries, zeros, of_seen);
  memcpy(&seen, &of_seen, sizeof(seen));
  return seen;
}

// Starts to copy a window of 16 channels, of which `octets` exist, in the order of global memory.
// `row` and `column` are the position of the window's origin in the image. The copy has zeros
// outside of the image's rows and from `end_column` on.
__device__ __forceinline__ void CopyWindow(char* to, const Window& window, const char* image,
                                           int64_t pixel, int octets, int image_rows,
                                           int image_columns, int end_column, int row, int column) {
  constexpr int kStep = kThreads / kOctets;
  const int octet = threadIdx.x % kOctets, number = threadIdx.x / kOctets;
  const int columns = 2 * window.pairs;
  const int step_rows = kStep / columns, step_columns = kStep % columns;
  int r = number / columns, c = number % columns;
  row += window.row;
  column += 2 * window.pair;
  uint32_t at = SharedAddress(to) + threadIdx.x * 16;
  while (r < window.rows) {
    const bool exists = octet < octets &&
                        static_cast<uint32_t>(row + r) < static_cast<uint32_t>(image_rows) &&
                        static_cast<uint32_t>(column + c) < static_cast<uint32_t>(end_column);
    const int64_t from = (int64_t{row + r} * image_columns + column + c) * pixel + octet * 16;
    CopyAsyncPast(at, image + (exists ? from : 0), exists);
    at += kThreads * 16;
    r += step_rows;
    c += step_columns;
    if (c >= columns) {
      c -= columns;
      ++r;
    }
  }
}

// Moves a window to planes. `seen` becomes NaN if an entry is not finite.
template <typename T, int kPlane, int kPitch, bool kSees>
__device__ __forceinline__ void MoveToPlanes(uint32_t* planes, const char* from,
                                             const Window& window, uint32_t& seen) {
  constexpr int kStep = kThreads / kOctets;
  const int octet = threadIdx.x % kOctets, number = threadIdx.x / kOctets;
  const int step_rows = kStep / window.pairs, step_pairs = kStep % window.pairs;
  int r = number / window.pairs, pair = number % window.pairs;
  planes += octet * kPlane + window.row * kPitch + window.pair;
  from += (number * 2 * kOctets + octet) * 16;
#pragma unroll 1
  while (r < window.rows) {
    const uint4 first = *reinterpret_cast<const uint4*>(from);
    const uint4 second = *reinterpret_cast<const uint4*>(from + kOctets * 16);
    const uint32_t a[] = {first.x, first.y, first.z, first.w};
    const uint32_t b[] = {second.x, second.y, second.z, second.w};
    uint32_t* to = planes + r * kPitch + pair;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      to[4 * k * kPlane] = __byte_perm(a[k], b[k], 0x5410);
      to[(4 * k + 2) * kPlane] = __byte_perm(a[k], b[k], 0x7632);
      if constexpr (kSees) seen = See<T>(See<T>(seen, a[k]), b[k]);
    }
    from += kStep * 2 * kOctets * 16;
    r += step_rows;
    pair += step_pairs;
    if (pair >= window.pairs) {
      pair -= window.pairs;
      ++r;
    }
  }
}

// A row of x for a lane: the pairs of columns that begin with each of its own columns, and with the
// columns after them.
template <int kTaps>
struct RowPairs {
  uint32_t even[kTaps / 2 + 4], odd[kTaps / 2 + 3];

  __device__ __forceinline__ void Load(const uint32_t* from) {
    const uint4 a = *reinterpret_cast<const uint4*>(from);
    const uint4 b = *reinterpret_cast<const uint4*>(from + 4);
    const uint32_t all[] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < kTaps / 2 + 4; ++i) even[i] = all[i];
#pragma unroll
    for (int i = 0; i < kTaps / 2 + 3; ++i) odd[i] = __funnelshift_r(even[i], even[i + 1], 16);
  }

  __device__ __forceinline__ uint32_t Pair(int number, int tap) const {
    return tap % 2 ? odd[number + tap / 2] : even[number + tap / 2];
  }
};

template <typename T, int kTaps>
__global__ void __launch_bounds__(kThreads, kBlocks)
    SumDiagonals(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) uint32_t staged[];
  uint32_t* const of_image = staged;
  uint32_t* const of_cotangent = of_image + kChannels * kImagePlane;
  char* const image_window = reinterpret_cast<char*>(of_cotangent + kChannels * kCotangentPlane);
  char* const cotangent_window =
      image_window + p.of_image.rows * p.of_image.pairs * (2 * kOctets * 16);
  uint64_t left = blockIdx.x;
  // Blocks for the same pixels are next to each other.
  const int64_t first_octet = static_cast<int64_t>(p.groups.DivMod(left)) * kOctets;
  const int64_t split = left;
  const int octets = static_cast<int>(min(int64_t{kOctets}, p.octets - first_octet));
  const int64_t begin = p.items * split / p.splits, end = p.items * (split + 1) / p.splits;
  for (int i = threadIdx.x; i < kChannels * (kImagePlane + kCotangentPlane) / 4; i += kThreads) {
    reinterpret_cast<uint4*>(staged)[i] = {};
  }
  __syncthreads();

  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int quad = lane / 4, place = lane % 4;
  // The row of x, out of 8, of this lane.
  const int image_row = quad / 2 + quad % 2 * 4;
  // Planes of channels that are 8 apart are next to each other.
  const auto plane_of = [&](int j) {
    const int channel = warp * kWarpChannels + j;
    return channel % kOctet * kOctets + channel / kOctet;
  };
  const int64_t pixel = p.channels * int64_t{sizeof(T)};
  float sums[kWarpChannels][kTaps][4] = {};
  const auto copy = [&](int64_t number) {
    const Item item(p, number);
    const int columns = min(p.chunk_columns, p.columns - item.column);
    CopyWindow(image_window, p.of_image,
               static_cast<const char*>(p.image) + first_octet * 16 +
                   item.image * p.image_rows * p.image_columns * pixel,
               pixel, octets, p.image_rows, p.image_columns, p.image_columns, item.row - p.low_row,
               item.column - p.low_column);
    CopyWindow(cotangent_window, p.of_cotangent,
               static_cast<const char*>(p.cotangent) + first_octet * 16 +
                   item.image * p.rows * p.columns * pixel,
               pixel, octets, p.rows, p.columns, item.column + columns, item.row, item.column);
    CommitCopies();
  };
  if (begin < end) copy(begin);
  for (int64_t number = begin; number < end; ++number) {
    const Item item(p, number);
    const int rows = min(p.chunk_rows, p.rows - item.row);
    const int columns = min(p.chunk_columns, p.columns - item.column);
    WaitCopies<0>();
    __syncthreads();
    uint32_t seen = 0, unseen = 0;
    MoveToPlanes<T, kImagePlane, kImagePitch, true>(of_image, image_window, p.of_image, seen);
    MoveToPlanes<T, kCotangentPlane, kCotangentPitch, false>(of_cotangent, cotangent_window,
                                                             p.of_cotangent, unseen);
    const bool is_finite = !__syncthreads_or((seen & 0x7fff7fff) != 0);
    if (number + 1 < end) copy(number + 1);

    const auto multiply = [&](auto is_plain) {
      constexpr bool kIsPlain = decltype(is_plain)::value;
#pragma unroll
      for (int j = 0; j < kWarpChannels; ++j) {
        const uint32_t* x =
            of_image + plane_of(j) * kImagePlane + image_row * kImagePitch + 4 * place;
        const uint32_t* g =
            of_cotangent + plane_of(j) * kCotangentPlane + quad * kCotangentPitch + 4 * place;
        RowPairs<kTaps> upper, lower;
        upper.Load(x);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          if (tile * kTileRows >= rows) break;
          x += kTileRows * kImagePitch;
          lower.Load(x);
          const uint4 of_g = *reinterpret_cast<const uint4*>(g);
          g += kTileRows * kCotangentPitch;
          const uint32_t b[] = {of_g.x, of_g.y, of_g.z, of_g.w};
#pragma unroll
          for (int step = 0; step < 2; ++step) {
#pragma unroll
            for (int tap = 0; tap < kTaps; ++tap) {
              uint32_t a[] = {upper.Pair(2 * step, tap), lower.Pair(2 * step, tap),
                              upper.Pair(2 * step + 1, tap), lower.Pair(2 * step + 1, tap)};
              if constexpr (kIsPlain) {
                MultiplyStep<T>(sums[j][tap], a, b[2 * step], b[2 * step + 1]);
              } else {
                // Products for pixels that do not exist are dropped: a NaN or Inf of x times a
                // zero for the cotangent would be NaN.
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                  const int column = 8 * place + 4 * step + i / 2 * 2;
                  if (column >= columns) a[i] = 0;
                  if (column + 1 >= columns) a[i] &= 0xffff;
                }
                float next[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) next[i] = sums[j][tap][i];
                MultiplyStep<T>(next, a, b[2 * step], b[2 * step + 1]);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                  if (tile * kTileRows + 2 * place + i % 2 < rows) sums[j][tap][i] = next[i];
                }
              }
            }
          }
          upper = lower;
        }
      }
    };
    if (is_finite) {
      multiply(std::true_type());
    } else {
      multiply(std::false_type());
    }
  }
  __syncthreads();

  // Tiles of a warp, one for every column of taps.
  constexpr int kTileEntries = 2 * kTileRows * kTileRows;
  float* const tiles = reinterpret_cast<float*>(staged) + warp * kTaps * kTileEntries;
#pragma unroll
  for (int j = 0; j < kWarpChannels; ++j) {
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = image_row + i / 2 * kTileRows, column = 2 * place + i % 2;
        tiles[tap * kTileEntries + row * kTileRows + column] = sums[j][tap][i];
      }
    }
    __syncwarp();
    const int64_t channel = first_octet * kOctet + warp * kWarpChannels + j;
    for (int number = lane; number < kTaps * kTaps && channel < p.channels; number += kWarp) {
      const float* tile = tiles + number % kTaps * kTileEntries + number / kTaps * kTileRows;
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kTileRows; ++i) sum += tile[i * (kTileRows + 1)];
      const int64_t at = number * p.channels + channel;
      if (p.sums_are_f32) {
        static_cast<float*>(p.result)[split * p.size + at] = sum;
      } else {
        static_cast<T*>(p.result)[at] = Narrow<T>(sum);
      }
    }
    __syncwarp();
  }
}

// A block's work for a chunk other than its rows, counted in rows.
constexpr int64_t kRowsBefore = 24;

int64_t SharedBytes(const Params& p) {
  return kPlaneBytes + p.of_image.bytes() + p.of_cotangent.bytes();
}

// Removes the numbers outside of [begin, end) from 0 to `count` - 1, but always keeps one.
void Shrink(int64_t begin, int64_t end, int& first, int& count) {
  first = static_cast<int>(std::clamp<int64_t>(begin, 0, count - 1));
  count = static_cast<int>(std::clamp<int64_t>(end, first + 1, count)) - first;
}

// Cuts up the sum, by sizes alone.
Params Cut(const Call& call, int processors) {
  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  Params p{};
  p.image_rows = static_cast<int>(h.in);
  p.image_columns = static_cast<int>(w.in);
  p.rows = static_cast<int>(h.out);
  p.columns = static_cast<int>(w.out);
  p.low_row = static_cast<int>(h.low);
  p.low_column = static_cast<int>(w.low);
  p.channels = call.channels;
  p.octets = call.channels / kOctet;
  p.size = h.taps * w.taps * call.outputs;
  const int64_t groups = CeilDiv(p.octets, kOctets);
  p.groups = FastDivider64(groups);
  const auto cut = [](int64_t size, int64_t most) { return CeilDiv(size, CeilDiv(size, most)); };
  p.chunk_columns = static_cast<int>(cut(w.out, kMaxColumns));
  const int64_t column_chunks = CeilDiv(w.out, p.chunk_columns);
  p.column_chunks = FastDivider64(column_chunks);
  const int64_t max_splits = std::max<int64_t>(1, kBlocks * processors / groups);
  const auto place = [](Window& window, int64_t chunk, int64_t taps, int64_t columns,
                        int64_t column_taps) {
    window = {0, static_cast<int>(chunk + taps - 1), 0,
              static_cast<int>(CeilDiv(columns + column_taps - 1, 2))};
  };
  Params best{};
  int64_t least = 0;
  for (int64_t most = kMaxRows; most >= kTileRows; most -= kTileRows) {
    p.chunk_rows = static_cast<int>(cut(h.out, most));
    const int64_t row_chunks = CeilDiv(h.out, p.chunk_rows);
    p.row_chunks = FastDivider64(row_chunks);
    const int64_t tiles = CeilDiv(p.chunk_rows, kTileRows);
    p.items = call.images * column_chunks * row_chunks;
    place(p.of_cotangent, p.chunk_rows, 1, p.chunk_columns, 1);
    place(p.of_image, p.chunk_rows, h.taps, p.chunk_columns, w.taps);
    // Rows and columns that are zero for every chunk are not copied.
    if (row_chunks == 1) Shrink(h.low, h.low + h.in, p.of_image.row, p.of_image.rows);
    if (column_chunks == 1) {
      Shrink(w.low / 2, CeilDiv(w.low + w.in, 2), p.of_image.pair, p.of_image.pairs);
    }
    if (SharedBytes(p) > jaxops::cuda::kSharedOptInLimit) continue;
    const int64_t an_item = 2 * p.chunk_rows + h.taps + tiles * kTileRows + kRowsBefore;
    const int64_t items = CeilDiv(p.items, std::min(max_splits, p.items));
    if (least != 0 && items * an_item >= least) continue;
    least = items * an_item;
    p.splits = CeilDiv(p.items, items);
    best = p;
  }
  p = best;
  p.is_part = p.splits > 1;
  p.sums_are_f32 = p.is_part || call.result_dtype == DType::kF32;
  return p;
}

int64_t PartBytes(const Params& p) { return p.is_part ? p.splits * p.size * sizeof(float) : 0; }

template <typename T, int kTaps>
cudaError_t Run(cudaStream_t stream, const Params& p, const Call& call) {
  const int64_t blocks = p.splits * p.groups.divisor();
  const cudaError_t error =
      jaxops::cuda::Launch(&SumDiagonals<T, kTaps>, blocks, kThreads, SharedBytes(p), stream, p);
  if (error != cudaSuccess || !p.is_part) return error;
  return LaunchAddParts(stream, p.result, call.result, call.result_dtype, p.size,
                        static_cast<int>(p.splits));
}

}  // namespace

bool CanRunKernelGradDepthwise(const Call& call) {
  const auto is_plain = [](const im2col::Window& w) { return w.stride == 1 && w.dilation == 1; };
  const int64_t taps = call.dims[1].taps;
  const bool is_square = call.dims[0].taps == taps && (taps == 5 || taps == 7);
  const bool is_alone = call.groups == call.channels && call.groups == call.outputs;
  return is_alone && call.channels % kOctet == 0 && is_square && is_plain(call.dims[0]) &&
         is_plain(call.dims[1]) && (call.dtype == DType::kF16 || call.dtype == DType::kBF16);
}

int64_t KernelGradDepthwiseWorkspace(const Call& call, int processors) {
  return PartBytes(Cut(call, processors));
}

cudaError_t LaunchKernelGradDepthwise(cudaStream_t stream, const Call& call, Space workspace,
                                      int processors) {
  Params p = Cut(call, processors);
  if (workspace.bytes < PartBytes(p)) return cudaErrorInvalidValue;
  p.image = call.image;
  p.cotangent = call.cotangent;
  p.result = p.is_part ? workspace.data : call.result;
  const auto run = [&]<typename T>(T) {
    return call.dims[1].taps == 5 ? Run<T, 5>(stream, p, call) : Run<T, 7>(stream, p, call);
  };
  return call.dtype == DType::kF16 ? run(__half()) : run(__nv_bfloat16());
}

}  // namespace jaxops::conv::cuda
