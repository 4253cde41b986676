// Code that the kernels of convolution by `mma.sync` share: asynchronous copies gather the entries
// of images that the windows of some pixels touch in shared memory, and a warp computes products.
//
// As on Hopper the rows of the image come once for all taps. Here they come 16 bytes at a time, so
// that neither boxes nor strides have limits.
#ifndef JAXOPS_CUDA_CONV_MMA_MMA_CUH_
#define JAXOPS_CUDA_CONV_MMA_MMA_CUH_

#include "cuda/common/async_copy.cuh"
#include "cuda/common/warp_matrix.cuh"
#include "cuda/conv/tiles.cuh"

namespace jaxops::conv::cuda {

using jaxops::cuda::CommitCopies;
using jaxops::cuda::MultiplyStep;
using jaxops::cuda::WaitCopies;

// The maximum of shared memory for a block on every GPU from compute capability 8.0 on.
constexpr int kMmaSharedBytes = 99 * 1024;
// Rows of a stage; a table has an entry for each.
constexpr int kMaxTableRows = 512;

// Copies 16 bytes, or zeros where `exists` is false. No thread reads the copy before WaitCopies, so
// the compiler may move other accesses across it.
__device__ inline void CopyAsync(uint32_t to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(exists ? 16 : 0));
}

// Entries that are multiplied at once: a step is 32 bytes of a row.
template <typename T>
constexpr int kStepEntries = 32 / sizeof(T);
// Entries of a copy.
template <typename T>
constexpr int kCopyEntries = 16 / sizeof(T);

__device__ inline uint4 LoadShared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}

// Bytes along the sum in a row of a right operand that is not kAcross.
constexpr int kRightBytes = 128;

// The right operand in shared memory and its fragments for a warp of Tile. Rows hold kColumns
// outputs if kAcross, else entries of the sum. Columns are outputs in their order for 16-bit types.
// For float32 the neighbouring outputs of four lanes are dealt out to four blocks of columns, so
// that a lane's entries of these blocks are one access: column g of block j is output 4 g + j % 4 +
// 32 (j / 4) of the warp.
template <typename Tile>
struct Right {
  using T = typename Tile::T;
  static constexpr bool kIsFloat = std::is_same_v<T, float>;
  static constexpr int kItem = sizeof(T);
  static constexpr int kBlocks = Tile::kWarpColumns / 8;  // of 8 columns

  __device__ explicit Right(int warp_column) {
    const int lane = threadIdx.x % 32;
    if constexpr (Tile::kAcross && kIsFloat) {
      const int row = lane % 4;
      at[0] = (row * Tile::kColumns + warp_column) * kItem + (lane / 4 ^ Mix(row)) * 16;
    } else if constexpr (Tile::kAcross) {
      const int row = lane % 16;
#pragma unroll
      for (int i = 0; i < kBlocks / 2; ++i) {
        const int copy = warp_column / 8 + 2 * i + lane / 16;
        at[i] = row * Tile::kColumns * kItem + (copy ^ Mix(row)) * 16;
      }
    } else {
      const int row =
          warp_column + (kIsFloat ? lane % 8 * 4 + lane / 16 : lane % 8 + lane / 16 * 8);
      at[0] = row * kRightBytes + (lane / 8 % 2 ^ Mix(row)) * 16;
    }
  }

  __device__ void Load(uint32_t (&b)[kBlocks][2], uint32_t stage, int step) const {
    if constexpr (Tile::kAcross && kIsFloat) {
      const uint32_t from = stage + at[0] + step * 8 * Tile::kColumns * kItem;
#pragma unroll
      for (int j = 0; j < kBlocks; j += 4) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const uint4 v = LoadShared(from + j / 4 * 128 + k * 4 * Tile::kColumns * kItem);
          b[j][k] = v.x;
          b[j + 1][k] = v.y;
          b[j + 2][k] = v.z;
          b[j + 3][k] = v.w;
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < kBlocks; j += 2) {
        uint32_t v[4];
        if constexpr (Tile::kAcross) {
          LoadTransposed(v, stage + at[j / 2] + step * 16 * Tile::kColumns * kItem);
        } else {
          const int row = kIsFloat ? j % 4 + j / 4 * 32 : j * 8;
          LoadMatrices(v, stage + (at[0] ^ step * 32) + row * kRightBytes);
        }
        b[j][0] = v[0];
        b[j][1] = v[1];
        b[j + 1][0] = v[2];
        b[j + 1][1] = v[3];
      }
    }
  }

  // Returns the swizzle of a row, which an exclusive or combines with the number of 16 bytes in the
  // row, so that a load meets every bank once.
  __device__ static int Mix(int row) {
    if constexpr (Tile::kAcross && kIsFloat) return row % 4 * 2;
    if constexpr (Tile::kAcross) return Tile::kColumns == 32 ? row / 2 % 4 : row % 8;
    return kIsFloat ? row / 4 % 8 : row % 8;
  }

 private:
  uint32_t at[Tile::kAcross && !kIsFloat ? kBlocks / 2 : 1];
};

// Writes a row of sums of float32, whose columns Right has dealt out.
template <int kColumns>
__device__ void StoreDealt(const float (&sums)[kColumns / 2], int half, float* to, int left) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < kColumns / 8; j += 4) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = 4 * j + 2 * half + i;
      const int column = 8 * j + 8 * lane + 4 * i;
      if (column < left) {
        *reinterpret_cast<float4*>(to + column) = {sums[at], sums[at + 4], sums[at + 8],
                                                   sums[at + 12]};
      }
    }
  }
}

__device__ inline void StoreShared(uint32_t address, const uint4& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w));
}

// The layout of images in memory and in a stage.
struct Gather : Layout {
  FastDivider copied;  // columns of a stage row
  int copy_step;       // columns of the image between two columns of a stage
  int in_rows, in_columns;
  int64_t in_pixel;  // entries between pixels of the image
  int channels;      // of a group

  // Decides on strips of about `width` columns of pixels.
  void CutColumns(int64_t new_rows, int64_t new_columns, int64_t new_stride_row,
                  int64_t new_stride_column, int64_t width) {
    rows = FastDivider(new_rows);
    columns = static_cast<int>(new_columns);
    stride_row = static_cast<int>(std::min<int64_t>(new_stride_row, INT32_MAX));
    stride_column = static_cast<int>(std::min<int64_t>(new_stride_column, INT32_MAX));
    strips = FastDivider(CeilDiv(columns, width));
    strip_width = FastDivider(CeilDiv(columns, strips.divisor()));
  }

  // Decides how rows lie in a stage that suits any of these groups of taps; returns false where no
  // stage can hold the rows.
  bool LayRows(const Tap* tap, const Group* group, int count) {
    const auto [row_span, column_span] = SpanOf(tap, group, count);
    // Rows and columns between those of a single tap are skipped.
    const bool one_row = row_span == 1, one_column = column_span == 1;
    row_step = one_row ? 1 : stride_row;
    image_step = one_row ? stride_row : 1;
    const int64_t column_step = one_column ? 1 : stride_column;
    copy_step = one_column ? stride_column : 1;
    const int64_t width = (strip_width.divisor() - 1) * column_step + column_span;
    if (row_span > kMaxTableRows || row_step > kMaxTableRows || width * row_bytes > 64 * 1024) {
      return false;
    }
    span = static_cast<int>(row_span);
    copied = FastDivider(width);
    column_bytes = static_cast<int>(column_step * row_bytes);
    copy_bytes = static_cast<int>(width * row_bytes);
    pitch = copy_bytes;
    return true;
  }

  // Returns the rows of a stage for `pixel_rows` rows of pixels, of at most `pixel_strips` strips.
  int64_t StageRows(int64_t pixel_rows, int64_t pixel_strips) const {
    return pixel_rows * row_step + std::max(0, span - row_step) * pixel_strips;
  }
};

// The row of an image that a row of a stage holds, and where it begins in the image for a tap at 0,
// 0.
struct StageRow {
  int row, column;
  int first_row;  // the image's first row in all images
};

__device__ inline StageRow FindRow(const Gather& p, const Rows& rows, int images, int stage_row) {
  int strip, row, offset;
  rows.Find(stage_row, &strip, &row, &offset);
  const int image = p.strips.Quotient(strip);
  strip -= image * p.strips.divisor();
  // Strips after the last belong to images that do not exist, and have no rows.
  return {image < images ? row * p.stride_row + offset * p.image_step : INT32_MIN / 2,
          static_cast<int>(strip * p.strip_width.divisor()) * p.stride_column, image * p.in_rows};
}

}  // namespace jaxops::conv::cuda

#endif  // JAXOPS_CUDA_CONV_MMA_MMA_CUH_
