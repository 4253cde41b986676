// These kernels interpolate in cells whose rows are not whole vectors, and compute the gradients.
//
// The eight rows of a cell together are whole vectors and aligned, but a row begins and ends inside
// a vector. A block therefore keeps an image of the features of its cells in shared memory,
// contiguous as in global memory: bulk copies move the image in and out, and gradients overwrite
// the features from which they are computed.
//
// A group of neighbouring lanes, a power of two, has a cell. The lanes of a group take the columns
// of the cell in turn. A column is a Word of every row: one element, or two elements of 2 bytes.
// The group size is chosen such that the lanes of a warp read different banks: 4 or 8 lanes for odd
// rows, and more if the image of a block would be too large.
//
// If a row has an odd number of elements of 2 bytes, every other row begins inside a Word. A column
// then has the Words of those rows that begin with the next element, and its part of the cotangent
// extends one element further. One lane handles the Words that two rows share.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <type_traits>

#include "cuda/trilinear/cells.cuh"
#include "cuda/trilinear/families.h"
#include "cuda/trilinear/feature_image.cuh"

namespace jaxops::trilinear::cuda {
namespace {

// These are the threads of a block, and of a block of long cells.
constexpr int kThreads = 128;
constexpr int kLongThreads = 256;
constexpr int64_t kLongCellBytes = 30 * 1024;
constexpr int64_t kMaxCellBytes = 72 * 1024;

// Registers allow at least this number of blocks of long cells per multiprocessor.
template <typename T, bool kReads>
constexpr int kBlocks = sizeof(T) == 8 && kReads ? 2 : 4;

// A block's image has at most this number of bytes, unless one cell needs more: the first for
// elements of 4 bytes, except point gradients alone; the second for all other calls.
constexpr int64_t kSmallImageBytes = 12 * 1024;
constexpr int64_t kImageBytes = 18 * 1024;

// A group begins with the number of lanes that is free of bank conflicts if that is at most the
// first, and else with the second.
constexpr int64_t kMaxConflictFreeLanes = 8;
constexpr int64_t kFewLanes = 4;

// Columns says what a column has of a row: one element of 4 or 8 bytes, a pair of elements of 2
// bytes, or a pair that is not aligned in every other row.
enum class Columns { kSingles, kPairs, kShiftedPairs };

template <typename T>
using Word = std::conditional_t<sizeof(T) == 2, uint32_t, T>;

template <typename T>
__device__ __forceinline__ uint32_t MakePair(float lower, float upper) {
  uint32_t word;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(lower, upper);
    memcpy(&word, &pair, sizeof(word));
  } else {
    const __half2 pair = __floats2half2_rn(lower, upper);
    memcpy(&word, &pair, sizeof(word));
  }
  return word;
}

// WordOf returns the index, from the first Word of the cell, of a column in the row of a corner.
template <Columns kColumns>
__device__ __forceinline__ int WordOf(int corner, int width, int column) {
  if constexpr (kColumns == Columns::kSingles) return corner * width + column;
  if constexpr (kColumns == Columns::kPairs) return corner * (width / 2) + column;
  return (corner * width + 1) / 2 + column;
}

struct GroupParams {
  Call call;
  int64_t strides[Call::kCotangent + 1];  // between cells that are not nested
  int pitch;                              // bytes between two cells in shared memory
  int lanes;                              // per group
  int tile;                               // cells per block
  int64_t image_bytes;                    // per block
};

// Cotangent is a lane's part of the cotangent of its cell, read ahead of its use.
template <typename T, Columns kColumns>
class Cotangent {
  using A = Accumulator<T>;
  static constexpr bool kShifted = kColumns == Columns::kShiftedPairs;

 public:
  // kAhead columns are read at once; a column has kElements elements.
  static constexpr int kAhead = 4;
  static constexpr int kElements = kColumns == Columns::kSingles ? 1 : kShifted ? 3 : 2;

  __device__ __forceinline__ Cotangent(const void* base, int64_t offset, int columns)
      : words_(static_cast<const Word<T>*>(base) + (sizeof(T) == 2 ? offset / 2 : offset)),
        columns_(columns),
        shift_(kShifted ? static_cast<int>(offset % 2) * 16 : 0) {}

  __device__ __forceinline__ void Read(int first, int lanes) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int column = first + k * lanes;
      if (column >= columns_) continue;
      read_[k][0] = words_[column];
      if constexpr (kShifted) {
        // Half of the last Word may lie behind the end of the array.
        const bool half = shift_ == 0 && column + 1 == columns_;
        read_[k][1] =
            half ? *reinterpret_cast<const uint16_t*>(words_ + column + 1) : words_[column + 1];
      }
    }
  }

  __device__ __forceinline__ void Get(int k, A (&g)[kElements]) const {
    if constexpr (kColumns == Columns::kSingles) {
      g[0] = read_[k][0];
    } else {
      const uint32_t pair =
          kShifted ? __funnelshift_r(read_[k][0], read_[k][kShifted], shift_) : read_[k][0];
      g[0] = WidenHalf<T>(pair, false);
      g[1] = WidenHalf<T>(pair, true);
      if constexpr (kShifted) g[2] = WidenHalf<T>(read_[k][1] >> shift_, false);
    }
  }

 private:
  const Word<T>* words_;
  int columns_;
  int shift_;
  Word<T> read_[kAhead][kShifted ? 2 : 1];
};

// Group is the lane group of a thread. The last groups of a block may have no cell, and then
// compute another group's cell without storing it.
struct Group : ImageCells {
  int lanes;
  int lane;
  bool real;

  __device__ __forceinline__ explicit Group(const GroupParams& params) {
    lanes = params.lanes;
    lane = static_cast<int>(threadIdx.x) & (lanes - 1);
    first = int64_t{blockIdx.x} * params.tile;
    cells = static_cast<int>(min(int64_t{params.tile}, params.call.cells.size() - first));
    pitch = params.pitch;
    const int group = static_cast<int>(threadIdx.x) / lanes;
    real = group < cells;
    own = min(group, cells - 1);
    copies = real && lane == 0;
  }

  __device__ __forceinline__ int64_t cell() const { return first + own; }
};

// ImageIn returns the begin of the image, at the same offset within a line as the features or
// gradients of the block's cells in global memory if all of those are contiguous.
template <typename T>
__device__ __forceinline__ unsigned char* ImageIn(unsigned char* shared, const void* global,
                                                  const Group& group, int64_t width) {
  return shared + PlaceInLine(static_cast<const T*>(global) + group.first * kCorners * width);
}

// kPlain says that there is no derivative, that points are of the features' dtype, and that the
// features of all cells are contiguous.
template <typename T, bool kPlain>
__device__ __forceinline__ void LoadPointOf(const GroupParams& params, int64_t cell,
                                            Coordinates<Accumulator<T>>& p) {
  if constexpr (kPlain) {
    const T* point =
        static_cast<const T*>(params.call.points) + cell * params.strides[Call::kPoints];
#pragma unroll
    for (int a = 0; a < kAxes; ++a) p[a] = Widen(point[a]);
  } else {
    LoadCoordinates<Accumulator<T>>(params.call, cell, p);
  }
}

// The kernel computes the feature gradient if kFeatures and the point gradient if kPoints.
template <typename T, Columns kColumns, bool kPlain, bool kFeatures, bool kPoints>
__global__ void __launch_bounds__(kLongThreads, kBlocks<T, kPoints>)
    BackwardGroups(const __grid_constant__ GroupParams params) {
  using A = Accumulator<T>;
  using Cotangent = Cotangent<T, kColumns>;
  extern __shared__ __align__(kLineBytes) unsigned char shared[];
  __shared__ A sums[kPoints ? kLongThreads / kWarp : 1][kAxes];
  __shared__ FeatureImage image;
  const Call& call = params.call;
  const int width = static_cast<int>(call.width);
  const int columns = kColumns == Columns::kSingles ? width : width / 2;
  const Group group(params);
  const int lane = group.lane;
  const int lanes = group.lanes;
  unsigned char* memory =
      ImageIn<T>(shared, kPoints ? call.features : call.dfeatures, group, call.width);
  if constexpr (kPoints) image.Fetch<kPlain, T>(call, group, memory);
  const int64_t cell = group.cell();
  Coordinates<A> p;
  LoadPointOf<T, kPlain>(params, cell, p);
  const int64_t offset =
      kPlain ? cell * params.strides[Call::kCotangent] : call.cells.Offset(cell, Call::kCotangent);
  Cotangent cotangent(call.cotangent, offset, columns);
  cotangent.Read(lane, lanes);
  [[maybe_unused]] T ends[2];  // the first and the last element of the row
  const bool joins = kColumns == Columns::kShiftedPairs && lane == lanes - 1;
  if constexpr (kColumns == Columns::kShiftedPairs) {
    const T* row = static_cast<const T*>(call.cotangent) + offset;
    if (joins) ends[0] = row[0];
    if (joins) ends[1] = row[width - 1];
  }
  [[maybe_unused]] A weights[kCorners];
  if constexpr (kFeatures) MakeWeights<kPlain>(call, cell, p, weights);
  if constexpr (kPoints) image.Await();
  auto* words = reinterpret_cast<Word<T>*>(memory + group.own * params.pitch);
  [[maybe_unused]] A dots[kCorners] = {};
  if (group.real) {
    for (int first = lane;;) {
#pragma unroll
      for (int k = 0; k < Cotangent::kAhead; ++k) {
        const int column = first + k * lanes;
        if (column >= columns) continue;
        A g[Cotangent::kElements];
        cotangent.Get(k, g);
#pragma unroll
        for (int c = 0; c < kCorners; ++c) {
          Word<T>& word = words[WordOf<kColumns>(c, width, column)];
          if constexpr (kColumns == Columns::kSingles) {
            if constexpr (kPoints) dots[c] += word * g[0];
            if constexpr (kFeatures) word = weights[c] * g[0];
          } else {
            const int begin = kColumns == Columns::kShiftedPairs ? c % 2 : 0;
            if constexpr (kPoints) {
              dots[c] += WidenHalf<T>(word, false) * g[begin];
              dots[c] += WidenHalf<T>(word, true) * g[begin + 1];
            }
            if constexpr (kFeatures) {
              word = MakePair<T>(weights[c] * g[begin], weights[c] * g[begin + 1]);
            }
          }
        }
      }
      first += Cotangent::kAhead * lanes;
      if (first >= columns) break;
      cotangent.Read(first, lanes);
    }
    if constexpr (kColumns == Columns::kShiftedPairs) {
      if (joins) {
        const A head = Widen(ends[0]);
        const A tail = Widen(ends[1]);
#pragma unroll
        for (int c = 0; c < kCorners; c += 2) {
          uint32_t& word = words[c / 2 * width + columns];
          if constexpr (kPoints) {
            dots[c] += WidenHalf<T>(word, false) * tail;
            dots[c + 1] += WidenHalf<T>(word, true) * head;
          }
          if constexpr (kFeatures) word = MakePair<T>(weights[c] * tail, weights[c + 1] * head);
        }
      }
    }
  }
  if constexpr (kFeatures) image.Store<T>(call, group, memory);
  if constexpr (kPoints) {
    A gradient[kAxes];
    MakeGradient<kPlain>(call, cell, p, dots, gradient);
    multilinear::cuda::SumOverLanes(gradient, min(lanes, kWarp));
    if (lanes > kWarp) {
      const int warp = static_cast<int>(threadIdx.x) / kWarp;
      if (threadIdx.x % kWarp == 0) {
#pragma unroll
        for (int a = 0; a < kAxes; ++a) sums[warp][a] = gradient[a];
      }
      __syncthreads();
      if (lane < kAxes) {
        for (int other = 1; other < lanes / kWarp; ++other) {
#pragma unroll
          for (int a = 0; a < kAxes; ++a) gradient[a] += sums[warp + other][a];
        }
      }
    }
    if (group.real && lane < kAxes) {
      const A value = lane == 0 ? gradient[0] : lane == 1 ? gradient[1] : gradient[2];
      if constexpr (kPlain) {
        static_cast<T*>(call.dpoints)[cell * kAxes + lane] = Narrow<T>(value);
      } else {
        jaxops::cuda::StoreAs(call.dpoints, cell * kAxes + lane, call.point_dtype, value);
      }
    }
  }
  if constexpr (kFeatures) image.AwaitStore();
}

// One lane sums all corners of a value, in the same order as the kernels of vectors and of plain
// calls. For shifted rows, the lane reads both Words over which a pair extends.
template <typename T, Columns kColumns, bool kPlain>
__global__ void __launch_bounds__(kLongThreads, kBlocks<T, true>)
    InterpolateGroups(const __grid_constant__ GroupParams params) {
  using A = Accumulator<T>;
  constexpr int kVector = kVectorElements<T>;
  constexpr bool kShifted = kColumns == Columns::kShiftedPairs;
  extern __shared__ __align__(kLineBytes) unsigned char shared[];
  __shared__ FeatureImage image;
  const Call& call = params.call;
  const int width = static_cast<int>(call.width);
  const int columns = kColumns == Columns::kSingles ? width : width / 2;
  const Group group(params);
  unsigned char* memory = ImageIn<T>(shared, call.features, group, call.width);
  image.Fetch<kPlain, T>(call, group, memory);
  const int64_t cell = group.cell();
  Coordinates<A> p;
  LoadPointOf<T, kPlain>(params, cell, p);
  A weights[kCorners];
  MakeWeights<kPlain>(call, cell, p, weights);
  image.Await();
  T* staged = reinterpret_cast<T*>(shared + params.image_bytes);
  // Values have the same offset within a vector as in global memory.
  const int skipped = static_cast<int>(group.first * width % kVector);
  if (group.real) {
    const auto* words = reinterpret_cast<const Word<T>*>(memory + group.own * params.pitch);
    T* to = staged + skipped + group.own * width;
#pragma unroll 4
    for (int column = group.lane; column < columns; column += group.lanes) {
      A sum[kColumns == Columns::kSingles ? 1 : 2] = {};
#pragma unroll
      for (int c = 0; c < kCorners; ++c) {
        if constexpr (kColumns == Columns::kSingles) {
          sum[0] += weights[c] * words[c * width + column];
        } else {
          const uint32_t* at = words + c * width / 2 + column;
          const bool inside = kShifted && c % 2 != 0;
          sum[0] += weights[c] * WidenHalf<T>(at[0], inside);
          sum[1] += weights[c] * WidenHalf<T>(at[inside], !inside);
        }
      }
      if constexpr (kColumns == Columns::kSingles) {
        to[column] = sum[0];
      } else if constexpr (kShifted) {
        to[2 * column] = Narrow<T>(sum[0]);
        to[2 * column + 1] = Narrow<T>(sum[1]);
      } else {
        reinterpret_cast<uint32_t*>(to)[column] = MakePair<T>(sum[0], sum[1]);
      }
    }
    if constexpr (kShifted) {
      if (group.lane == group.lanes - 1) {
        A sum = 0;
#pragma unroll
        for (int c = 0; c < kCorners; ++c) {
          sum += weights[c] * WidenHalf<T>(words[c * width / 2 + columns], c % 2 != 0);
        }
        to[width - 1] = Narrow<T>(sum);
      }
    }
  }
  __syncthreads();
  T* to = static_cast<T*>(call.out) + group.first * width - skipped;
  const int end = skipped + group.cells * width;
  for (int i = threadIdx.x * kVector; i < end; i += blockDim.x * kVector) {
    if (i >= skipped && i + kVector <= end) {
      StoreVector(to + i, LoadVector<kVector>(staged + i));
    } else {
      for (int e = max(i, skipped); e < min(i + kVector, end); ++e) to[e] = staged[e];
    }
  }
}

// ConflictFreeLanes returns the number of lanes per group at which the groups of a warp read
// different banks at the same time; `pitch` is the bytes between two cells.
int64_t ConflictFreeLanes(int64_t pitch, int64_t word_bytes) {
  return std::gcd(pitch / word_bytes, kLineBytes / word_bytes);
}

// GroupPlan chooses the layout of a block's cells in shared memory and the lanes per group.
struct GroupPlan {
  int threads;  // per block
  int lanes;    // per group
  int tile;     // cells per block
  int pitch;    // bytes between two cells in shared memory
  int64_t image_bytes;
  int64_t shared_bytes;  // the image, and values before they are stored

  explicit GroupPlan(const Call& call) {
    const int64_t item_bytes = SizeOf(call.dtype);
    const int64_t word_bytes = std::max<int64_t>(item_bytes, sizeof(uint32_t));
    const int64_t cell_bytes = kCorners * RowBytes(call);
    const int64_t max_image_bytes =
        item_bytes == 4 && (call.dfeatures != nullptr || call.out != nullptr) ? kSmallImageBytes
                                                                              : kImageBytes;
    threads = cell_bytes < kLongCellBytes ? kThreads : kLongThreads;
    // One copy of all cells is faster than one copy per cell with padding between cells, and
    // padding is faster than groups in which many lanes have no column.
    const int64_t columns = cell_bytes / (kCorners * word_bytes);
    const int64_t wanted = ConflictFreeLanes(cell_bytes, word_bytes);
    lanes = static_cast<int>(wanted <= kMaxConflictFreeLanes && 2 * wanted <= columns ? wanted
                                                                                      : kFewLanes);
    while (lanes < threads && threads / lanes * cell_bytes > max_image_bytes) lanes *= 2;
    tile = threads / lanes;
    pitch = static_cast<int>(cell_bytes);
    // Bank conflicts of four lanes cost less than several copies.
    if (4 * lanes < wanted) {
      while (ConflictFreeLanes(pitch, word_bytes) != lanes) pitch += kVectorBytes;
    }
    image_bytes = tile * pitch + kLineBytes;
    shared_bytes = image_bytes;
    if (call.out != nullptr) {
      shared_bytes += (CeilDiv(tile * call.width, VectorElements(call)) + 1) * kVectorBytes;
    }
  }
};

template <typename T, Columns kColumns, bool kPlain>
cudaError_t LaunchOfKind(cudaStream_t stream, const Call& call) {
  const GroupPlan plan(call);
  GroupParams params{call};
  for (const auto operand : {Call::kFeatures, Call::kPoints, Call::kCotangent}) {
    params.strides[operand] = call.cells.rank() == 1 ? call.cells.stride(0, operand) : 0;
  }
  params.pitch = plan.pitch;
  params.lanes = plan.lanes;
  params.tile = plan.tile;
  params.image_bytes = plan.image_bytes;
  const auto kernel = call.out != nullptr         ? InterpolateGroups<T, kColumns, kPlain>
                      : call.dpoints == nullptr   ? BackwardGroups<T, kColumns, kPlain, true, false>
                      : call.dfeatures == nullptr ? BackwardGroups<T, kColumns, kPlain, false, true>
                                                  : BackwardGroups<T, kColumns, kPlain, true, true>;
  return Launch(kernel, CeilDiv(call.cells.size(), plan.tile), plan.threads, plan.shared_bytes,
                stream, params);
}

template <typename T, Columns kColumns>
cudaError_t LaunchOf(cudaStream_t stream, const Call& call) {
  const bool plain = call.order == 0 && call.point_dtype == call.dtype &&
                     (call.features == nullptr ? call.cells.rank() <= 1 : AreDense(call));
  return plain ? LaunchOfKind<T, kColumns, true>(stream, call)
               : LaunchOfKind<T, kColumns, false>(stream, call);
}

}  // namespace

bool CanRunGroups(const Call& call, const Device&) {
  return HasAlignedArrays(call) && kCorners * RowBytes(call) <= kMaxCellBytes;
}

cudaError_t LaunchGroups(cudaStream_t stream, const Call& call, const Device&) {
  return jaxops::cuda::DispatchFloat(call.dtype, [&]<typename T>(T) {
    if constexpr (sizeof(T) == 2) {
      return call.width % 2 != 0 ? LaunchOf<T, Columns::kShiftedPairs>(stream, call)
                                 : LaunchOf<T, Columns::kPairs>(stream, call);
    } else {
      return LaunchOf<T, Columns::kSingles>(stream, call);
    }
  });
}

}  // namespace jaxops::trilinear::cuda
