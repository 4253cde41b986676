// Code that the kernels of convolution on Hopper share: images are cut into strips of pixels, and
// copies bring the rows that the windows of some pixels touch to shared memory.
#ifndef JAXOPS_CUDA_CONV_TILES_CUH_
#define JAXOPS_CUDA_CONV_TILES_CUH_

#include <cuda.h>

#include <algorithm>

#include "common/fast_divide.h"
#include "cuda/common/hopper.cuh"
#include "cuda/common/launch.h"
#include "cuda/conv/families.h"
#include "cuda/conv/results.cuh"
#include "cuda/conv/sum.h"

namespace jaxops::conv::cuda {

using jaxops::cuda::CeilDiv;
using namespace jaxops::cuda::hopper;  // NOLINT: these kernels consist of its instructions

constexpr int kMaxStages = 8;
// Pixels of a row that are next to each other in a stage: a row of an image is cut into strips.
constexpr int kMaxStripWidth = 64;
constexpr int kMaxBox = 256;  // entries of a dimension of a bulk copy
static_assert(kMaxStride <= 8, "bulk copies skip at most 7 entries between two");

// Neighbouring taps that find all their entries in one stage.
struct Group {
  int32_t row, column;  // of the image, the minimum over the taps for the pixel at 0, 0
  int16_t begin, end;
};

// The maximum of rows and columns that the taps of a group span.
struct Span {
  int64_t rows = 1, columns = 1;
};

inline Span SpanOf(const Tap* tap, const Group* group, int groups) {
  Span span;
  for (int g = 0; g < groups; ++g) {
    for (int t = group[g].begin; t < group[g].end; ++t) {
      span.rows = std::max(span.rows, tap[t].row - group[g].row + 1);
      span.columns = std::max(span.columns, tap[t].column - group[g].column + 1);
    }
  }
  return span;
}

// The taps that a group may have: any, those of a row, or one.
enum class Grouping { kAll, kRow, kTap };

// The position of one side, producer or consumer, in a ring of stages.
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void Advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

__device__ inline void Expect(uint64_t* barrier, int bytes) {
  ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, barrier,
                                 bytes);
}

// How pixels are cut up, and how the rows of an image that their windows touch lie in a stage.
struct Layout {
  // Pixels are counted by the strips of all images, the rows of a strip and the columns of a row.
  FastDivider strips, rows, strip_width;
  int columns;  // number of pixels
  int stride_row, stride_column;
  int row_bytes;  // of a block of channels of one entry
  // A stage has `span` rows for the first row of pixels and `row_step` rows for each further row of
  // pixels. These rows are `image_step` rows of the image apart.
  int row_step, span, image_step, column_bytes, pitch, copy_bytes;

  // Decides on strips no wider than a copy that skips the columns between.
  void CutColumns(int64_t new_rows, int64_t new_columns, int64_t new_stride_row,
                  int64_t new_stride_column) {
    rows = FastDivider(new_rows);
    columns = static_cast<int>(new_columns);
    stride_row = static_cast<int>(new_stride_row);
    // A single column has no neighbours.
    stride_column = columns > 1 ? static_cast<int>(new_stride_column) : 1;
    const int64_t widest = std::min<int64_t>(kMaxStripWidth, (kMaxBox - 1) / stride_column + 1);
    strips = FastDivider(CeilDiv(columns, widest));
    strip_width = FastDivider(CeilDiv(columns, strips.divisor()));
  }

  // Decides how rows lie in a stage that suits any of these groups; returns false where no copy can
  // bring the rows.
  bool LayRows(const Tap* tap, const Group* group, int groups) {
    const auto [row_span, column_span] = SpanOf(tap, group, groups);
    // Rows and columns between those of a single tap are skipped.
    const bool one_row = row_span == 1, one_column = column_span == 1;
    row_step = one_row ? 1 : stride_row;
    image_step = one_row ? stride_row : 1;
    const int column_step = one_column ? 1 : stride_column;
    const int64_t neighbours = strip_width.divisor() - 1;
    const int64_t copied = neighbours * column_step + column_span;
    // No stage holds 512 rows, and the bound keeps later products of rows from overflowing.
    if (neighbours * stride_column + column_span > kMaxBox) return false;
    if (one_column && stride_column > kMaxStride) return false;
    if (row_span > 512 || row_step > 512) return false;
    span = static_cast<int>(row_span);
    column_bytes = column_step * row_bytes;
    copy_bytes = static_cast<int>(copied * row_bytes);
    pitch = static_cast<int>(CeilDiv(copy_bytes, 128) * 128);
    return true;
  }

  // Returns the bytes of a stage for `pixel_rows` rows of pixels, of at most `pixel_strips` strips.
  int64_t StageBytes(int64_t pixel_rows, int64_t pixel_strips) const {
    const int64_t count = pixel_rows * row_step + std::max(0, span - row_step) * pixel_strips;
    return CeilDiv(count * pitch, 1024) * 1024;
  }

  // Returns the distance from the entry of a group's lowest row and column to the entry of a tap,
  // in a stage.
  int TapBytes(const Tap& tap, const Group& group) const {
    return static_cast<int>((tap.row - group.row) * pitch +
                            (tap.column - group.column) * row_bytes);
  }
};

// Where the rows for some rows of pixels are in a stage: for each strip that these pixels touch,
// the rows of the image that their windows touch. Strips after the last belong to images that do
// not exist.
struct Rows {
  int first_strip, first_row;
  int first_count;  // stage rows of the first strip
  int strip_count;  // of a strip from its first row to its last
  int count;        // of all strips

  JAXOPS_HOST_DEVICE Rows(const Layout& p, int first, int last) {
    first_strip = p.rows.Quotient(first);
    const int last_strip = p.rows.Quotient(last);
    const int rows = p.rows.divisor();
    first_row = first - first_strip * rows;
    const int last_row = last - last_strip * rows;
    const auto rows_of = [&](int pixel_rows) { return (pixel_rows - 1) * p.row_step + p.span; };
    strip_count = rows_of(rows);
    if (first_strip == last_strip) {
      count = first_count = rows_of(last_row - first_row + 1);
    } else {
      first_count = rows_of(rows - first_row);
      count = first_count + (last_strip - first_strip - 1) * strip_count + rows_of(last_row + 1);
    }
  }

  // Returns the stage row where the windows of a row of pixels begin.
  JAXOPS_HOST_DEVICE int Of(const Layout& p, int strip, int row) const {
    return strip == first_strip
               ? (row - first_row) * p.row_step
               : first_count + (strip - first_strip - 1) * strip_count + row * p.row_step;
  }

  // Finds the strip and row of pixels, and the row of their windows, that a stage row is copied
  // for.
  JAXOPS_HOST_DEVICE void Find(int stage_row, int* strip, int* row, int* offset) const {
    *strip = first_strip;
    *row = first_row;
    *offset = stage_row;
    if (stage_row >= first_count) {
      *strip += 1 + (stage_row - first_count) / strip_count;
      *row = 0;
      *offset = (stage_row - first_count) % strip_count;
    }
  }
};

// Copies the rows of a stage, for a block of channels from `channel` on, with all lanes of a warp.
__device__ inline void CopyRows(const Layout& p, const CUtensorMap& map, const Rows& rows,
                                const Group& group, int channel, char* stage, uint64_t* full) {
  for (int i = threadIdx.x % 32; i < rows.count; i += 32) {
    int strip, row, offset;
    rows.Find(i, &strip, &row, &offset);
    const int image = p.strips.Quotient(strip);
    strip -= image * p.strips.divisor();
    const int column = strip * p.strip_width.divisor();
    const int32_t at[4] = {channel, column * p.stride_column + group.column,
                           row * p.stride_row + group.row + offset * p.image_step, image};
    ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, stage + i * p.pitch, &map, at,
                              full);
  }
}

// Returns the operand of a product for an entry. For float32 the operand is the nearest TF32, ties
// away from zero, rounded in place, because the registers of a product in flight may not be
// written.
template <typename T>
__device__ inline uint32_t Operand(uint32_t entry) {
  if constexpr (std::is_same_v<T, float>) {
    uint32_t rounded;
    asm volatile("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(entry)));
    return rounded;
  } else {
    return entry;
  }
}

// --- plans and launches on the host --------------------------------------------------------------

// Returns the channels that a copy brings.
inline int ChannelBlock(int64_t channels) { return channels <= 16 ? 16 : channels <= 32 ? 32 : 64; }

// Cuts taps into groups of at most `most` taps and returns the number of groups. The taps are
// ordered by rows, the slower index.
inline int FillGroups(Group* group, const Tap* tap, int taps, Grouping grouping,
                      int64_t most = kMaxTaps) {
  int groups = 0;
  for (int t = 0; t < taps; ++t) {
    const bool joins = t > 0 && t - group[groups - 1].begin < most &&
                       (grouping == Grouping::kAll ||
                        (grouping == Grouping::kRow && tap[t].row == tap[t - 1].row));
    if (!joins) group[groups++] = {INT32_MAX, INT32_MAX, static_cast<int16_t>(t), 0};
    Group& last = group[groups - 1];
    last.end = static_cast<int16_t>(t + 1);
    last.row = static_cast<int32_t>(std::min<int64_t>(last.row, tap[t].row));
    last.column = static_cast<int32_t>(std::min<int64_t>(last.column, tap[t].column));
  }
  return groups;
}

// Returns the maximum number of segments of `size` that `count` neighbours touch. With `aligned`
// the first neighbour is at a multiple of `count`.
inline int Touched(int count, int size, bool aligned) {
  if (aligned && size % count == 0) return 1;
  if (aligned && count % size == 0) return count / size;
  return (count - 2 + size) / size + 1;
}

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

// Returns the driver's function, found at run time because the module does not link to the driver.
inline Encode EncodeTiled() {
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess
               ? reinterpret_cast<Encode>(function)
               : nullptr;
  }();
  return encode;
}

inline int ItemBytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

// Maps rows of entries, the fastest dimension first, whose neighbours in the other dimensions are
// `pitches` entries apart. `steps` skips entries of the box.
template <int kRank>
cudaError_t Map(CUtensorMap& map, DType dtype, const void* data, const int64_t (&sizes)[kRank],
                const int64_t (&box)[kRank], const int64_t (&steps)[kRank], int row_bytes,
                const int64_t (&pitches)[kRank - 1]) {
  const Encode encode = EncodeTiled();
  if (!encode) return cudaErrorNotSupported;
  cuuint64_t dims[kRank], strides[kRank];
  cuuint32_t boxes[kRank], traversal[kRank];
  for (int i = 0; i < kRank; ++i) {
    dims[i] = sizes[i];
    if (i + 1 < kRank) strides[i] = pitches[i] * ItemBytes(dtype);
    boxes[i] = static_cast<cuuint32_t>(box[i]);
    traversal[i] = static_cast<cuuint32_t>(steps[i]);
  }
  const CUresult result =
      encode(&map,
             dtype == DType::kF32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
             : dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                    : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
             kRank, const_cast<void*>(data), dims, strides, boxes, traversal,
             CU_TENSOR_MAP_INTERLEAVE_NONE,
             row_bytes > 128    ? CU_TENSOR_MAP_SWIZZLE_NONE
             : row_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B
             : row_bytes == 64  ? CU_TENSOR_MAP_SWIZZLE_64B
                                : CU_TENSOR_MAP_SWIZZLE_32B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Maps rows that are one after the other.
template <int kRank>
cudaError_t Map(CUtensorMap& map, DType dtype, const void* data, const int64_t (&sizes)[kRank],
                const int64_t (&box)[kRank], const int64_t (&steps)[kRank], int row_bytes) {
  int64_t pitches[kRank - 1];
  for (int i = 0; i < kRank - 1; ++i) pitches[i] = sizes[i] * (i > 0 ? pitches[i - 1] : 1);
  return Map<kRank>(map, dtype, data, sizes, box, steps, row_bytes, pitches);
}

// Makes the map for CopyRows, of images whose sizes come fastest first.
inline cudaError_t MapRows(CUtensorMap& map, const Layout& p, DType dtype, const void* images,
                           const int64_t (&sizes)[4]) {
  const int64_t step = p.column_bytes == p.row_bytes ? p.stride_column : 1;
  return Map<4>(map, dtype, images, sizes,
                {p.row_bytes / ItemBytes(dtype), (p.copy_bytes / p.row_bytes - 1) * step + 1, 1, 1},
                {1, step, 1, 1}, p.row_bytes);
}

}  // namespace jaxops::conv::cuda

#endif  // JAXOPS_CUDA_CONV_TILES_CUH_
