// Code that the kernels of convolution of few channels on Hopper share.
//
// The entries that a window covers in a row of an image, its columns and their channels, are
// neighbours in memory. Rows come to shared memory as they are. A register of a product's left
// operand is two neighbouring entries, read from wherever the window begins: patches are never
// stored. Where every other window begins within a pair, a register takes two reads and a shift.
//
// A window's row counts in pairs. Where windows begin or end within a pair, the other half of the
// pair is never multiplied, because it may be NaN.
#ifndef JAXOPS_CUDA_CONV_FEW_CHANNELS_FEW_CHANNELS_CUH_
#define JAXOPS_CUDA_CONV_FEW_CHANNELS_FEW_CHANNELS_CUH_

#include <algorithm>

#include "common/fast_divide.h"
#include "cuda/common/hopper.cuh"
#include "cuda/common/launch.h"
#include "cuda/conv/families.h"
#include "cuda/conv/results.cuh"

namespace jaxops::conv::cuda {

using jaxops::cuda::CeilDiv;
using jaxops::cuda::CountProcessors;
using namespace jaxops::cuda::hopper;  // NOLINT: these kernels consist of its instructions

// A unit is 16 bytes, the width of a copy, and 8 entries of 2 bytes.
constexpr int kUnit = 8;
constexpr int kUnitBytes = 16;
// Bytes of a row of a matrix in shared memory that products read: 64 entries.
constexpr int kMatrixRowBytes = 128;

// A tile's pixels: some rows of a strip of columns of one image.
struct Tile {
  int64_t image;
  int row, column;
  int rows, columns;  // fewer at the ends of an image
};

// How pixels are cut into tiles, and the rows of the image that the windows of a tile touch.
struct Tiling {
  const uint16_t* images;
  int64_t in_rows, in_entries;  // of an image; entries of a row
  int64_t entries;              // of all images
  int out_rows, out_columns;
  int stride, low;      // of rows
  int pixel_entries;    // between the windows of neighbouring pixels
  int64_t low_entries;  // before a row's first
  int tile_rows;
  FastDivider tile_columns;
  FastDivider strips, row_tiles;  // of an image
  int tiles;
  int stage_rows, pitch;  // of a tile: rows, bytes of one
  FastDivider units;      // of a row
  int shift;              // entries of a row in a stage before the first window
  bool is_aligned;        // units of a stage are units of the image
  // A window's row: its entries, the entries of its first pair before the window, and its pairs.
  int row_entries, lead, row_pairs;

  __device__ Tile Find(int number) const {
    uint32_t rest = number;
    Tile tile;
    tile.column = strips.DivMod(rest) * tile_columns.divisor();
    tile.row = row_tiles.DivMod(rest) * tile_rows;
    tile.image = rest;
    tile.rows = min(tile_rows, out_rows - tile.row);
    tile.columns = min(static_cast<int>(tile_columns.divisor()), out_columns - tile.column);
    return tile;
  }

  // Returns the distance from the beginning of a stage to the first pair of the window of a pixel
  // of the tile.
  __device__ int WindowBytes(int row, int column) const {
    return row * stride * pitch + 2 * (shift - lead + column * pixel_entries);
  }

  JAXOPS_HOST_DEVICE int stage_bytes() const { return stage_rows * pitch; }

  // Tells whether every other window begins within a pair.
  bool HasOdd() const { return pixel_entries % 2 != 0; }

  // Decides on tiles of at most `max_columns` columns and of `rows` rows. All strips but the last
  // of an image have a multiple of `multiple` columns; `max_columns` must be such a multiple.
  void Cut(const Call& call, int64_t max_columns, int rows, int64_t multiple = 1) {
    const im2col::Window& h = call.dims[0];
    const im2col::Window& w = call.dims[1];
    in_rows = h.in;
    in_entries = w.in * call.channels;
    entries = call.images * in_rows * in_entries;
    out_rows = static_cast<int>(h.out);
    out_columns = static_cast<int>(w.out);
    stride = static_cast<int>(h.stride);
    low = static_cast<int>(h.low);
    pixel_entries = static_cast<int>(w.stride * call.channels);
    low_entries = w.low * call.channels;
    const int64_t strip_count = CeilDiv(w.out, max_columns);
    const int64_t even = CeilDiv(w.out, strip_count);
    const int64_t width = strip_count > 1 ? CeilDiv(even, multiple) * multiple : even;
    tile_columns = FastDivider(width);
    tile_rows = static_cast<int>(std::min<int64_t>(rows, h.out));
    strips = FastDivider(CeilDiv(w.out, width));
    row_tiles = FastDivider(CeilDiv(h.out, tile_rows));
    const int64_t count = call.images * strips.divisor() * row_tiles.divisor();
    tiles = static_cast<int>(std::min<int64_t>(count, INT32_MAX));
    // Strips begin at whole units where their windows do.
    const int64_t first = -low_entries;
    shift = static_cast<int>((first % kUnit + kUnit) % kUnit);
    row_entries = static_cast<int>(w.taps * call.channels);
    // All windows may begin within a pair where that needs no further pair.
    is_aligned = in_entries % kUnit == 0 && (shift % 2 == 0 || HasOdd() || row_entries % 2 != 0) &&
                 (strips.divisor() == 1 || width * pixel_entries % kUnit == 0);
    if (!is_aligned) shift = 0;
    lead = HasOdd() ? 0 : shift % 2;
    row_pairs = static_cast<int>(CeilDiv(lead + row_entries, 2));
    stage_rows = static_cast<int>((tile_rows - 1) * h.stride + h.taps);
    const int64_t row = shift + (width - 1) * pixel_entries + row_entries;
    // The row has one further entry, because reads take pairs.
    units = FastDivider(CeilDiv(row + 1, kUnit));
    pitch = static_cast<int>(units.divisor()) * kUnitBytes;
  }
};

__device__ inline void CopyAsync(uint32_t to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(exists ? kUnitBytes : 0)
               : "memory");
}
__device__ inline void CopiesCommit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kGroups groups of copies are in flight, and makes the other copies visible to
// products.
template <int kGroups>
__device__ inline void CopiesWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
  ptx::fence_proxy_async(ptx::space_shared);
}

// Copies the rows that a tile's windows touch, with zeros around images, with all threads of a
// block. Where units of images are not units of stages, the threads wait for their reads.
__device__ inline void CopyWindows(const Tiling& p, const Tile& tile, char* stage) {
  const int units = p.stage_rows * static_cast<int>(p.units.divisor());
  const int64_t first = int64_t{tile.column} * p.pixel_entries - p.low_entries - p.shift;
#pragma unroll 4
  for (int i = threadIdx.x; i < units; i += blockDim.x) {
    uint32_t row = i;
    const int64_t entry = first + static_cast<int>(p.units.DivMod(row)) * kUnit;
    const int64_t in_row = int64_t{tile.row} * p.stride - p.low + row;
    char* to = stage + i * kUnitBytes;
    const bool has_row = in_row >= 0 && in_row < p.in_rows;
    const int64_t at = (tile.image * p.in_rows + in_row) * p.in_entries + entry;
    if (p.is_aligned) {
      const bool exists = has_row && entry >= 0 && entry < p.in_entries;
      CopyAsync(SharedAddress(to), p.images + (exists ? at : 0), exists);
      continue;
    }
    uint32_t v[kUnit / 2] = {};
    if (has_row && entry >= 0 && entry + kUnit <= p.in_entries && at + kUnit < p.entries) {
      const uint32_t odd = at & 1;
      const auto* words = reinterpret_cast<const uint32_t*>(p.images + (at - odd));
      uint32_t loaded[kUnit / 2 + 1];
#pragma unroll
      for (int k = 0; k <= kUnit / 2; ++k) loaded[k] = k < kUnit / 2 || odd ? words[k] : 0;
#pragma unroll
      for (int k = 0; k < kUnit / 2; ++k) {
        v[k] = __funnelshift_r(loaded[k], loaded[k + 1], 16 * odd);
      }
    } else if (has_row) {
#pragma unroll
      for (int k = 0; k < kUnit; ++k) {
        const bool exists = entry + k >= 0 && entry + k < p.in_entries;
        v[k / 2] |= (exists ? uint32_t{p.images[at + k]} : 0) << 16 * (k % 2);
      }
    }
    *reinterpret_cast<uint4*>(to) = {v[0], v[1], v[2], v[3]};
  }
}

// Loads the pair of entries at an address of shared memory, a multiple of 4 unless kOdd.
template <bool kOdd>
__device__ __forceinline__ uint32_t LoadPair(uint32_t address) {
  const auto load = [](uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
  };
  if constexpr (!kOdd) {
    return load(address);
  } else {
    const uint32_t word = address & ~3u;
    return __funnelshift_r(load(word), load(word + 4), 8 * (address & 2));
  }
}

// Returns where these 8 columns of a row of a matrix are in shared memory.
__device__ __forceinline__ uint32_t SwizzledUnit(uint32_t row, uint32_t unit) {
  return row * kMatrixRowBytes + ((unit ^ (row % 8)) * kUnitBytes);
}

// Tells whether the kernels for few channels take a convolution.
inline bool CanRunFewChannels(const Call& call) {
  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  return call.channels <= kMaxFewChannels && h.dilation == 1 && w.dilation == 1 &&
         h.taps <= kMaxFewTapRows && w.taps * call.channels <= kMaxFewRowEntries &&
         call.outputs <= kMaxFewOutputs && h.stride <= kMaxFewStride && w.stride <= kMaxFewStride;
}

// Calls `function` with the type of a call's operands.
template <typename Function>
cudaError_t DispatchShort(DType dtype, Function&& function) {
  return dtype == DType::kF16 ? function(__half{}) : function(__nv_bfloat16{});
}

}  // namespace jaxops::conv::cuda

#endif  // JAXOPS_CUDA_CONV_FEW_CHANNELS_FEW_CHANNELS_CUH_
