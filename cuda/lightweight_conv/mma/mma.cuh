// This header computes long filters as products of matrices on tensor cores, for the forward and
// backward kernels.
//
// 16 steps of a head's channels are the product of two matrices: 16 x 16 n taps, laid out as a
// Toeplitz matrix whose row i has the filter from column i on, and 16 n steps of a window. The
// fragments of the Toeplitz matrix depend on column - row alone, so that a lane keeps 2 n + 1
// registers for n blocks, and no shared memory. The kernel gradient reverses the roles: it is a
// product of 16 steps of one array and the window of the other, summed over channels, and each sum
// along a diagonal is the gradient of one tap.
//
// A warp owns 16 channels of one head and loops over time. In shared memory the fastest dimension
// of an array remains the fastest ("minor"): channels in NTC, steps in NCT.
//
// `mma/toeplitz.cuh` has the operands of these products. A float32 number is split into two TF32
// numbers, and a product into three TF32 products (`common/warp_matrix.cuh`).
//
// A zero of the matrix times an infinity or a NaN is NaN, so a warp that encounters one computes
// its part of the tile again, tap by tap: other sums of these steps and channels may then differ in
// the last bit.
#ifndef JAXOPS_CUDA_LIGHTWEIGHT_CONV_MMA_MMA_CUH_
#define JAXOPS_CUDA_LIGHTWEIGHT_CONV_MMA_MMA_CUH_

#include "cuda/common/async_copy.cuh"
#include "cuda/lightweight_conv/filters.cuh"
#include "cuda/lightweight_conv/mma/toeplitz.cuh"

namespace jaxops::lightweight_conv::cuda::mma {

using jaxops::cuda::CommitCopies;
using jaxops::cuda::CopyAsyncPast;
using jaxops::cuda::kVectorBytes;
using jaxops::cuda::SharedAddress;
using jaxops::cuda::StoreVector;
using jaxops::cuda::WaitCopies;

inline constexpr int kWarps = 4;
inline constexpr int kThreads = kWarps * kWarp;
// Shared memory has room for windows of this number of blocks of 16 steps in any shape of a tile.
inline constexpr int kLongWindow = 5;
// A large GPU has this number of multiprocessors.
inline constexpr int64_t kProcessors = 132;

// --- a warp's share ------------------------------------------------------------------------------

// TileShape is the shape of a block's tile, over whose channels and steps the warps are
// distributed. In NTC a row is a line of 128 bytes; in NCT, warps share time only as far as short
// sequences give each one work.
struct TileShape {
  int warp_steps;               // multiple of kEdge
  int time_bits;                // log2 of the warps along time
  int steps, channels;          // per block
  int window_steps;             // steps that a block's filters read
  int own_pitch, window_pitch;  // bytes of a row in shared memory
  int own_bytes, window_bytes;

  static TileShape Of(const Geometry& g, int element_bytes, int warp_steps, int blocks) {
    const bool is_nct = g.data_format == DataFormat::kNCT;
    TileShape shape;
    shape.warp_steps = warp_steps;
    // A float32 tile has two warps along time: in NTC a line has half as many channels, and in NCT
    // long windows of many channels would not fit shared memory.
    shape.time_bits = element_bytes == 4 && (!is_nct || blocks > kLongWindow) ? 1 : 0;
    while (is_nct && (1 << shape.time_bits) < kWarps &&
           (int64_t{warp_steps} << shape.time_bits) < g.time) {
      ++shape.time_bits;
    }
    shape.steps = warp_steps << shape.time_bits;
    shape.channels = kWarps * kEdge >> shape.time_bits;
    shape.window_steps = shape.steps + (blocks - 1) * kEdge;
    // The pitch is an odd number of 16 bytes, because steps are a multiple of 16 entries.
    shape.own_pitch = is_nct ? shape.steps * element_bytes + 16 : kLineBytes;
    shape.window_pitch = is_nct ? shape.window_steps * element_bytes + 16 : kLineBytes;
    shape.own_bytes = shape.own_pitch * (is_nct ? shape.channels : shape.steps);
    shape.window_bytes = shape.window_pitch * (is_nct ? shape.channels : shape.window_steps);
    return shape;
  }
};

// WarpPlace is the position of a warp in its block's tile.
struct WarpPlace {
  int channel, step;

  __device__ explicit WarpPlace(const TileShape& shape) {
    const int warp = threadIdx.x / kWarp;
    channel = (warp >> shape.time_bits) * kEdge;
    step = (warp & ((1 << shape.time_bits) - 1)) * shape.warp_steps;
  }
};

// Stage copies a tile of `steps` steps of the block's channels from an array, where step i is time
// step first + i * stride, and zeros outside the array. A vector is inside or outside as a whole,
// because in NCT the first step is a multiple of a vector. Tiles that are entirely inside, as
// nearly all are, skip the checks.
template <typename T, bool kNct>
__device__ __forceinline__ void Stage(uint32_t shared, int pitch, const T* array, int first,
                                      int stride, int steps, const TileShape& shape, int time,
                                      int channels, int first_channel) {
  constexpr int kVector = kVectorElements<T>;
  constexpr int kLanes = kLineBytes / kVectorBytes;  // lanes per line
  constexpr int kRows = kThreads / kLanes;
  const int lane = threadIdx.x % kLanes, row = threadIdx.x / kLanes;
  const bool inside = first >= 0 && first + (steps - 1) * stride < time &&
                      first_channel + shape.channels <= channels;
  if constexpr (kNct) {
    const int vecs = steps / kVector;
    for (int r = row; r < shape.channels; r += kRows) {
      const int channel = first_channel + r;
      const T* from = array + int64_t{channel} * time + first + lane * kVector;
      uint32_t to = shared + r * pitch + lane * kVectorBytes;
      if (inside) {
#pragma unroll 4
        for (int vec = lane; vec < vecs; vec += kLanes) {
          CopyAsyncPast(to, reinterpret_cast<const char*>(from), true);
          from += kLanes * kVector;
          to += kLineBytes;
        }
      } else {
        for (int vec = lane; vec < vecs; vec += kLanes) {
          const int t = first + vec * kVector;
          const bool exists =
              channel < channels && static_cast<unsigned>(t) < static_cast<unsigned>(time);
          CopyAsyncPast(to, reinterpret_cast<const char*>(exists ? from : array), exists);
          from += kLanes * kVector;
          to += kLineBytes;
        }
      }
    }
  } else {
    const int channel = first_channel + lane * kVector;
    const T* from = array + int64_t{first + row * stride} * channels + channel;
    const int64_t advance = int64_t{kRows} * stride * channels;
    uint32_t to = shared + row * kLineBytes + (lane * kVectorBytes ^ Tile<T, kNct>::Swizzle(row));
    if (inside) {
#pragma unroll 4
      for (int r = row; r < steps; r += kRows) {
        CopyAsyncPast(to, reinterpret_cast<const char*>(from), true);
        from += advance;
        to += kRows * kLineBytes;
      }
    } else {
      for (int r = row; r < steps; r += kRows) {
        const int t = first + r * stride;
        const bool exists =
            channel < channels && static_cast<unsigned>(t) < static_cast<unsigned>(time);
        CopyAsyncPast(to, reinterpret_cast<const char*>(exists ? from : array), exists);
        from += advance;
        to += kRows * kLineBytes;
      }
    }
  }
}

// Item is a tile of one phase of one batch entry.
struct Item {
  int first_step, phase;
  int64_t entry;

  template <typename Params>
  __device__ Item(const Params& p, uint32_t index) {
    first_step = p.tiles.DivMod(index) * p.shape.steps;
    phase = p.phases.DivMod(index);
    entry = index;
  }
};

// AreFinite says whether all sums are finite; it may return false if they are very large.
template <int kParts>
__device__ __forceinline__ bool AreFinite(const float (&sums)[kParts][4]) {
  float total = 0;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < 4; ++i) total += sums[part][i];
  }
  return fabsf(total) <= FLT_MAX;
}

// Sums holds 16 steps of a warp's channels in the layout of the accumulators. In NTC the rows are
// steps and the columns channels, in NCT vice versa.
struct Sums {
  float values[2][4] = {};

  __device__ static int Row(int i) { return Tile<float, false>::Row() + i / 2 * 8; }
  __device__ static int Column(int right, int i) {
    return right * 8 + Tile<float, false>::Column() * 2 + i % 2;
  }

  // AddTaps computes the sums tap by tap, from only the steps that each tap reads.
  template <typename T, bool kNct, typename Segments, typename Tap>
  __device__ __forceinline__ void AddTaps(const Tile<T, kNct>& window, int own, int taps, int lead,
                                          const Segments& segments, Tap&& tap) {
#pragma unroll
    for (int right = 0; right < 2; ++right) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = Row(i), column = Column(right, i);
        const int step = own + (kNct ? column : row);
        float sum = 0;
        for (int k = 0; k < taps; ++k) {
          if (segments.IsPair(step, step + lead + k)) {
            sum += tap(k) * window.At(step + lead + k, kNct ? row : column);
          }
        }
        values[right][i] = sum;
      }
    }
  }
};

// NoSegments is for calls without segments: all steps are of one.
struct NoSegments {
  __device__ static constexpr bool AreOne(int, int) { return true; }
  __device__ static constexpr bool IsPair(int, int) { return true; }
};

// Segments tells which entries of a warp's window are of the segment of a step. The warp's steps
// and the entries are counted as in its tile, `dilation` time steps apart.
class Segments {
 public:
  // `step_time` and `entry_time` are the times of the warp's step 0 and of its entry 0.
  __device__ Segments(const int32_t* starts, int step_time, int entry_time, int dilation, int time)
      : starts_(starts),
        step_time_(step_time),
        entry_time_(entry_time),
        dilation_(dilation),
        time_(time) {}

  // AreOne says whether 16 steps from `own` on, the first of which exists, and `blocks` blocks of
  // entries from `own` on are of one segment. Starts do not decrease, so the ends are enough.
  __device__ __forceinline__ bool AreOne(int own, int blocks) const {
    const int step = step_time_ + own * dilation_, entry = entry_time_ + own * dilation_;
    const int first = max(0, min(step, entry));
    const int last = max(step + (kEdge - 1) * dilation_, entry + (blocks * kEdge - 1) * dilation_);
    return starts_[first] == starts_[min(last, time_ - 1)];
  }

  __device__ __forceinline__ bool IsPair(int step, int entry) const {
    return OfStep(step) == OfEntry(entry);
  }

  // AddProducts computes the sums of 16 steps whose windows have several segments: one product for
  // each segment, of a window that is zero elsewhere.
  template <typename T, typename W, bool kNct, int kBlocks>
  __device__ __forceinline__ void AddProducts(Sums& sums, const Toeplitz<T, W, kBlocks>& filter,
                                              const Tile<T, kNct>& window, int own) const {
    const int of_lane = threadIdx.x % kWarp < kEdge ? OfStep(own + threadIdx.x % kWarp) : kNone;
    int start = kNone;
#pragma unroll 1
    while (true) {
      start = __reduce_min_sync(0xffffffff, of_lane > start ? of_lane : INT_MAX);
      if (start == INT_MAX) return;
      Sums of_segment;
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        WindowOperand<T, kNct> operand = LoadWindow(window, own + j * kEdge);
        Keep<T>(operand, own + j * kEdge, start);
        MultiplyTaps<T, W, kNct>(of_segment.values, filter, j, operand);
      }
#pragma unroll
      for (int right = 0; right < 2; ++right) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int step = own + (kNct ? Sums::Column(right, i) : Sums::Row(i));
          if (OfStep(step) == start) sums.values[right][i] = of_segment.values[right][i];
        }
      }
    }
  }

 private:
  static constexpr int kNone = INT_MIN;  // the start of steps outside of the sequence

  __device__ __forceinline__ int StartAt(int t) const {
    return static_cast<unsigned>(t) < static_cast<unsigned>(time_) ? starts_[t] : kNone;
  }
  __device__ __forceinline__ int OfStep(int step) const {
    return StartAt(step_time_ + step * dilation_);
  }
  __device__ __forceinline__ int OfEntry(int entry) const {
    return StartAt(entry_time_ + entry * dilation_);
  }

  // Keep clears the entries of a block, from `entry` on, that are not of the segment `start`.
  template <typename T, typename Operand>
  __device__ __forceinline__ void Keep(Operand& operand, int entry, int start) const {
    constexpr bool kIsLeft = std::is_same_v<Operand, Left<T>>;
    const int column = Tile<T, false>::Column();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (OfEntry(entry + half * 8 + column + i * 4) == start) continue;
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            if constexpr (kIsLeft) {
              operand.entries[half][2 * i + j] = {};
            } else {
              operand.entries[j][half][i] = {};
            }
          }
        }
      } else {
        const int first = entry + half * 8 + column * 2;
        const uint32_t mask = (OfEntry(first) == start ? 0x0000FFFFu : 0u) |
                              (OfEntry(first + 1) == start ? 0xFFFF0000u : 0u);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if constexpr (kIsLeft) {
            operand.entries[2 * half + j] &= mask;
          } else {
            operand.entries[j][half] &= mask;
          }
        }
      }
    }
  }

  const int32_t* starts_;  // of the batch entry
  int step_time_, entry_time_, dilation_, time_;
};

// Output writes a warp's sums, 16 steps per call. Neighbouring lanes exchange values so that each
// stores 8 bytes.
template <typename T, bool kNct>
class Output {
 public:
  // `array` belongs to a batch entry; the warp writes the steps of a phase from `step` on, up to
  // `steps`.
  __device__ Output(T* array, int step, int channel, int phase, int dilation, int steps, int time,
                    int channels)
      : left_(steps - step - (kNct ? LaneColumn() : Sums::Row(0))) {
    const int row = Sums::Row(0);
    if constexpr (kNct) {
      first_ = array + int64_t{channel + row} * time + step + LaneColumn();
      eight_rows_ = int64_t{8} * time;
    } else {
      first_ = array + int64_t{phase + (step + row) * dilation} * channels + channel + LaneColumn();
      eight_rows_ = int64_t{8} * dilation * channels;
    }
  }

  // Steps beyond the last are not written: in NCT, a vector is inside or outside as a whole.
  __device__ __forceinline__ void Write(const Sums& sums) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      T* const to = first_ + half * eight_rows_;
      if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int right = 0; right < 2; ++right) {
          const Vector<T, 2> vec = {sums.values[right][2 * half], sums.values[right][2 * half + 1]};
          if (left_ > 8 * (kNct ? right : half)) StoreVector(to + 8 * right, vec);
        }
      } else {
        uint32_t words[2];
#pragma unroll
        for (int right = 0; right < 2; ++right) {
          const Vector<T, 2> pair = {Narrow<T>(sums.values[right][2 * half]),
                                     Narrow<T>(sums.values[right][2 * half + 1])};
          memcpy(&words[right], &pair, sizeof(pair));
        }
        const bool odd = threadIdx.x & 1;
        const uint32_t got = __shfl_xor_sync(0xffffffff, odd ? words[0] : words[1], 1);
        const uint2 both = odd ? make_uint2(got, words[1]) : make_uint2(words[0], got);
        Vector<T, 4> vec;
        memcpy(&vec, &both, sizeof(vec));
        if (left_ > (kNct ? 0 : 8 * half)) StoreVector(to, vec);
      }
    }
    first_ += kNct ? int64_t{kEdge} : 2 * eight_rows_;
    left_ -= kEdge;
  }

 private:
  // LaneColumn is the first column that a lane writes: odd lanes write columns of the second
  // product.
  __device__ static int LaneColumn() {
    const int column = Sums::Column(0, 0);
    return sizeof(T) == 4 ? column : threadIdx.x & 1 ? column + 6 : column;
  }

  T* first_;
  int64_t eight_rows_;
  int left_;  // remaining steps from this lane's first one on
};

// --- host ----------------------------------------------------------------------------------------

// RoundBlocks rounds up to a number of blocks for which a kernel exists, at most `max`.
inline int RoundBlocks(int64_t blocks, int max) {
  if (blocks <= 2) return 2;
  if (max > 3 && blocks <= 3) return 3;
  if (max > 3 && blocks <= 5) return 5;
  return max;
}

// Dispatch calls function(element, weight, is_nct, blocks) with a number of blocks that RoundBlocks
// returned.
template <int kMax, typename Function>
cudaError_t Dispatch(DataFormat data_format, int blocks, DType dtype, DType weight_dtype,
                     Function&& function) {
  return DispatchBool(data_format == DataFormat::kNCT, [&](auto is_nct) {
    const auto with_types = [&](auto element, auto weight) {
      if (blocks == 2) return function(element, weight, is_nct, std::integral_constant<int, 2>{});
      if constexpr (kMax > 3) {
        if (blocks == 3) return function(element, weight, is_nct, std::integral_constant<int, 3>{});
        if (blocks == 5) return function(element, weight, is_nct, std::integral_constant<int, 5>{});
      }
      return function(element, weight, is_nct, std::integral_constant<int, kMax>{});
    };
    switch (dtype) {
      case DType::kF16:
        return with_types(__half{}, __half{});
      case DType::kBF16:
        if (weight_dtype == DType::kF32) return with_types(__nv_bfloat16{}, float{});
        return with_types(__nv_bfloat16{}, __nv_bfloat16{});
      case DType::kF32:
        return with_types(float{}, float{});
      default:
        return cudaErrorInvalidValue;
    }
  });
}

}  // namespace jaxops::lightweight_conv::cuda::mma

#endif  // JAXOPS_CUDA_LIGHTWEIGHT_CONV_MMA_MMA_CUH_
