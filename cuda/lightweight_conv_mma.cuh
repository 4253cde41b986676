// Long filters as products of matrices on tensor cores: what forward and backward share.
//
// 16 steps of a head's channels are the product of 16 x 16 n taps, laid out as a Toeplitz matrix
// whose row i has the filter from column i on, and 16 n steps of a window. Its fragments depend on
// column - row alone, so that of n blocks a lane keeps 2 n + 1 registers and no shared memory.
// The filter's gradient is the other way round a product of 16 steps of one array and the window of
// the other, summed over channels; the sums along its diagonals are the gradient of one tap each.
//
// A warp owns 16 channels of one head and walks along time. In shared memory the fastest dimension
// of an array remains the fastest ("minor"): channels in NTC, steps in NCT.
//
// float32 is split into two of TF32, and a product into three of theirs (`warp_matrix.cuh`).
//
// A zero of the matrix times what is not finite is NaN, so a warp that meets it makes what it has
// of the tile again, tap by tap: other sums of these steps and channels may then end in another
// last bit.
#ifndef JAXOPS_CUDA_LIGHTWEIGHT_CONV_MMA_CUH_
#define JAXOPS_CUDA_LIGHTWEIGHT_CONV_MMA_CUH_

#include "cuda/async_copy.cuh"
#include "cuda/lightweight_conv.cuh"
#include "cuda/warp_matrix.cuh"

namespace jaxops::lightweight_conv::cuda::mma {

using jaxops::cuda::CommitCopies;
using jaxops::cuda::CopyAsyncPast;
using jaxops::cuda::kPackBytes;
using jaxops::cuda::LoadMatrices;
using jaxops::cuda::LoadTransposed;
using jaxops::cuda::MultiplyStep;
using jaxops::cuda::SharedAddress;
using jaxops::cuda::SplitEntry;
using jaxops::cuda::SplitFloat32;
using jaxops::cuda::StorePack;
using jaxops::cuda::WaitCopies;

inline constexpr int kWarps = 4;
inline constexpr int kThreads = kWarps * kWarp;
// Channels and steps of a fragment, and the channels of a warp.
inline constexpr int kEdge = 16;
inline constexpr int kLineBytes = 128;
// Blocks of 16 of a window that shared memory has room for in any shape of a tile.
inline constexpr int kLongWindow = 5;
// Of a large GPU.
inline constexpr int64_t kProcessors = 132;

// --- fragments -----------------------------------------------------------------------------------

// A 16 x 16 left operand, row m and column k, and two right ones side by side, 16 x 8 each, row k
// and column n. 16-bit entries are one product, float32 twice three.
template <typename T>
struct Left {
  uint32_t entries[4];
};
template <>
struct Left<float> {
  SplitEntry entries[2][4];
};
template <typename T>
struct Rights {
  uint32_t entries[2][2];
};
template <>
struct Rights<float> {
  SplitEntry entries[2][2][2];  // of the right operand, the half of k, and the register
};

template <typename T>
__device__ __forceinline__ void Multiply(float (&sums)[4], const Left<T>& a, const Rights<T>& b,
                                         int right) {
  if constexpr (std::is_same_v<T, float>) {
    // The small products first.
#pragma unroll
    for (int part = 0; part < 3; ++part) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t left[4], low[2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          left[i] = part == 0 ? a.entries[half][i].low : a.entries[half][i].high;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const SplitEntry& entry = b.entries[right][half][i];
          low[i] = part == 1 ? entry.low : entry.high;
        }
        MultiplyStep<T>(sums, left, low[0], low[1]);
      }
    }
  } else {
    MultiplyStep<T>(sums, a.entries, b.entries[right][0], b.entries[right][1]);
  }
}

// The same, but what float32 adds up on tensor cores, which cut off what a sum has no bits for,
// starts from zero.
template <typename T>
__device__ __forceinline__ void MultiplyAdd(float (&sums)[4], const Left<T>& a, const Rights<T>& b,
                                            int right) {
  if constexpr (std::is_same_v<T, float>) {
    float products[4] = {};
    Multiply<T>(products, a, b, right);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += products[i];
  } else {
    Multiply<T>(sums, a, b, right);
  }
}

// --- shared memory -------------------------------------------------------------------------------

// What a product sums over: the steps of a window, or the channels of a head.
enum class Over { kSteps, kChannels };

// Stays zero while all that it has met is finite.
template <typename T>
class Probe {
 public:
  __device__ __forceinline__ void Meet(uint32_t pair) {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    Pair entries, seen;
    memcpy(&entries, &pair, sizeof(pair));
    memcpy(&seen, &seen_, sizeof(seen_));
    seen = __hfma2(entries, Pair{T(0.0f), T(0.0f)}, seen);
    memcpy(&seen_, &seen, sizeof(seen_));
  }
  __device__ __forceinline__ bool IsClear() const { return (seen_ & 0x7FFF7FFF) == 0; }

 private:
  uint32_t seen_ = 0;
};
template <>
class Probe<float> {
 public:
  __device__ __forceinline__ bool IsClear() const { return true; }
};

// An array's tile as a warp sees it, from its own first step and channel on. Rows of channels (NTC)
// are lines of 128 bytes, whose 16 bytes change places from row to row; those of steps (NCT) are an
// odd number of 16 bytes. Either way eight neighbouring rows have their 16 bytes in different
// banks. Steps are multiples of 8, after which places repeat.
template <typename T, bool kNct>
class Tile {
 public:
  __device__ Tile(uint32_t base, int pitch, int step, int channel)
      : base_(base +
              (kNct ? channel * pitch + step * static_cast<int>(sizeof(T)) : step * kLineBytes)),
        pitch_(pitch),
        minor_(kNct ? 0 : channel) {}

  __device__ __forceinline__ float At(int step, int channel) const {
    const uint32_t bits = kNct ? Bits(0, channel, step) : Bits(0, step, channel);
    T value;
    memcpy(&value, &bits, sizeof(T));
    return Widen(value);
  }

  // The operand whose rows are 16 channels, of a sum over steps, or 16 steps.
  template <Over kOver>
  __device__ __forceinline__ Left<T> LoadLeft(int step) const {
    constexpr bool kAlong = kNct == (kOver == Over::kSteps);  // sums run along rows of memory
    const int lane = Lane();
    Left<T> left;
    if constexpr (std::is_same_v<T, float>) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int m = Row() + i % 2 * 8, k = half * 8 + Column() + i / 2 * 4;
          left.entries[half][i] = SplitFloat32(kAlong ? Bits(step, m, k) : Bits(step, k, m));
        }
      }
    } else if constexpr (kAlong) {
      LoadMatrices(left.entries, Address(step, lane % 16, lane / 16 * 8));
    } else {
      LoadTransposed(left.entries, Address(step, lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8));
    }
    return left;
  }

  // The operands whose columns are 16 channels, of a sum over steps, or 16 steps.
  template <Over kOver>
  __device__ __forceinline__ Rights<T> LoadRights(int step) const {
    constexpr bool kAlong = kNct == (kOver == Over::kSteps);
    const int lane = Lane();
    Rights<T> rights;
    if constexpr (std::is_same_v<T, float>) {
#pragma unroll
      for (int right = 0; right < 2; ++right) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int n = right * 8 + Row(), k = half * 8 + Column() + i * 4;
            rights.entries[right][half][i] =
                SplitFloat32(kAlong ? Bits(step, n, k) : Bits(step, k, n));
          }
        }
      }
    } else {
      uint32_t entries[4];
      if constexpr (kAlong) {
        LoadMatrices(entries, Address(step, lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8));
      } else {
        LoadTransposed(entries, Address(step, lane % 16, lane / 16 * 8));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) rights.entries[i / 2][i % 2] = entries[i];
    }
    return rights;
  }

  // What a lane has of a fragment: row m or column n, and pairs of columns or k of 32 bits each.
  __device__ static int Lane() { return threadIdx.x % kWarp; }
  __device__ static int Row() { return Lane() / 4; }
  __device__ static int Column() { return Lane() % 4; }

  // What the 16 bytes of a row of channels are moved by, by an exclusive or.
  __device__ static uint32_t Swizzle(int row) { return (row << 5 & 0x60) | (row << 2 & 0x10); }

 private:
  // Of a row and an entry in it, after some steps.
  __device__ __forceinline__ uint32_t Address(int step, int major, int minor) const {
    if constexpr (kNct) {
      return base_ + major * pitch_ + (step + minor) * static_cast<uint32_t>(sizeof(T));
    } else {
      return base_ + (step + major) * kLineBytes +
             ((minor_ + minor) * static_cast<uint32_t>(sizeof(T)) ^ Swizzle(major));
    }
  }
  __device__ __forceinline__ uint32_t Bits(int step, int major, int minor) const {
    uint32_t bits;
    if constexpr (sizeof(T) == 4) {
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(bits) : "r"(Address(step, major, minor)));
    } else {
      uint16_t half;
      asm volatile("ld.shared.b16 %0, [%1];" : "=h"(half) : "r"(Address(step, major, minor)));
      bits = half;
    }
    return bits;
  }

  uint32_t base_;
  int pitch_;
  int minor_;
};

template <typename T, typename Operand>
__device__ __forceinline__ void Meet(Probe<T>& probe, const Operand& operand) {
  if constexpr (sizeof(T) == 2) {
    uint32_t pairs[4];
    memcpy(pairs, operand.entries, sizeof(pairs));
#pragma unroll
    for (int i = 0; i < 4; ++i) probe.Meet(pairs[i]);
  }
}

// The taps as a Toeplitz matrix of kBlocks blocks of 16 columns: entry (row, column) is tap
// column - row - shift, zero outside the filter. Filters of float32 of bfloat16 entries are the sum
// of three matrices of bfloat16, which hold all of their bits.
template <typename T, typename W, int kBlocks>
class Toeplitz {
 public:
  static constexpr int kTerms = std::is_same_v<T, W> ? 1 : 3;

  // tap(k) is tap k of the filter, 0 <= k < taps.
  template <typename Tap>
  __device__ __forceinline__ void Read(int taps, int shift, Tap&& tap) {
    const auto read = [&](int k) {
      return static_cast<unsigned>(k) < static_cast<unsigned>(taps) ? tap(k) : 0.0f;
    };
    const int row = Lane::Row() + shift, column = Lane::Column();
    is_finite_ = true;
#pragma unroll
    for (int i = 0; i <= 2 * kBlocks; ++i) {
      const int first = 8 * (i - 1) - row;
      if constexpr (std::is_same_v<T, float>) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          entries_[0][i][half] = SplitFloat32(__float_as_uint(read(first + column + half * 4)));
        }
      } else {
        float taps[2] = {read(first + 2 * column), read(first + 2 * column + 1)};
#pragma unroll
        for (int term = 0; term < kTerms; ++term) {
          Pack<T, 2> pair;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            pair.values[e] = Narrow<T>(taps[e]);
            taps[e] -= Widen(pair.values[e]);
            if (kTerms > 1) is_finite_ &= fabsf(taps[e]) <= FLT_MAX;
          }
          memcpy(&entries_[term][i], &pair, sizeof(pair));
        }
      }
    }
  }

  // Whether all terms of this lane's taps are, of which those of an infinity are not.
  __device__ __forceinline__ bool IsFinite() const { return is_finite_; }

  // Block `block` of the matrix: 16 rows along its diagonals are 8 and 8 that differ by a shift.
  __device__ __forceinline__ Left<T> AsLeft(int block, int term) const {
    Left<T> left;
    if constexpr (std::is_same_v<T, float>) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          left.entries[half][i] = entries_[term][2 * block + half + 1 - i % 2][i / 2];
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) left.entries[i] = entries_[term][2 * block + 1 - i % 2 + i / 2];
    }
    return left;
  }
  // The transposed block: column n of it is row n of the matrix.
  __device__ __forceinline__ Rights<T> AsRights(int block, int term) const {
    Rights<T> rights;
#pragma unroll
    for (int right = 0; right < 2; ++right) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (std::is_same_v<T, float>) {
          rights.entries[right][0][i] = entries_[term][2 * block + 1 - right][i];
          rights.entries[right][1][i] = entries_[term][2 * block + 2 - right][i];
        } else {
          rights.entries[right][i] = entries_[term][2 * block + 1 - right + i];
        }
      }
    }
    return rights;
  }

 private:
  using Lane = Tile<T, false>;
  using Entry = std::conditional_t<std::is_same_v<T, float>, SplitEntry[2], uint32_t>;
  Entry entries_[kTerms][2 * kBlocks + 1];
  bool is_finite_;
};

// sums += the product of what a window has of a block and the taps, in the order of the layout.
template <typename T, typename W, bool kNct, int kBlocks, typename Operand>
__device__ __forceinline__ void MultiplyTaps(float (&sums)[2][4],
                                             const Toeplitz<T, W, kBlocks>& filter, int block,
                                             const Operand& operand) {
#pragma unroll
  for (int term = Toeplitz<T, W, kBlocks>::kTerms - 1; term >= 0; --term) {
#pragma unroll
    for (int right = 0; right < 2; ++right) {
      if constexpr (kNct) {
        MultiplyAdd<T>(sums[right], operand, filter.AsRights(block, term), right);
      } else {
        MultiplyAdd<T>(sums[right], filter.AsLeft(block, term), operand, right);
      }
    }
  }
}

// What the window of a sum over its steps is to a product.
template <typename T, bool kNct>
using WindowOperand = std::conditional_t<kNct, Left<T>, Rights<T>>;

template <typename T, bool kNct>
__device__ __forceinline__ WindowOperand<T, kNct> LoadWindow(const Tile<T, kNct>& window,
                                                             int step) {
  if constexpr (kNct) {
    return window.template LoadLeft<Over::kSteps>(step);
  } else {
    return window.template LoadRights<Over::kSteps>(step);
  }
}

// --- a warp's share ------------------------------------------------------------------------------

// The shape of a block's tile: its warps are dealt out over channels and time. In NTC a row is a
// line of 128 bytes; in NCT short sequences leave none without work.
struct TileShape {
  int warp_steps;               // multiple of kEdge
  int time_bits;                // log2 of the warps one after the other in time
  int steps, channels;          // of a block
  int window_steps;             // what a block's filters reach
  int own_pitch, window_pitch;  // bytes of a row in shared memory
  int own_bytes, window_bytes;

  template <typename T, bool kNct>
  static TileShape Of(int64_t time, int warp_steps, int blocks) {
    TileShape shape;
    shape.warp_steps = warp_steps;
    // Two in float32: in NTC it has half as many channels in a line, and in NCT long windows of
    // many channels would not fit shared memory.
    shape.time_bits = sizeof(T) == 4 && (!kNct || blocks > kLongWindow) ? 1 : 0;
    while (kNct && (1 << shape.time_bits) < kWarps &&
           (int64_t{warp_steps} << shape.time_bits) < time) {
      ++shape.time_bits;
    }
    shape.steps = warp_steps << shape.time_bits;
    shape.channels = kWarps * kEdge >> shape.time_bits;
    shape.window_steps = shape.steps + (blocks - 1) * kEdge;
    // An odd number of 16 bytes: steps are a multiple of 16 entries.
    const int size = static_cast<int>(sizeof(T));
    shape.own_pitch = kNct ? shape.steps * size + 16 : kLineBytes;
    shape.window_pitch = kNct ? shape.window_steps * size + 16 : kLineBytes;
    shape.own_bytes = shape.own_pitch * (kNct ? shape.channels : shape.steps);
    shape.window_bytes = shape.window_pitch * (kNct ? shape.channels : shape.window_steps);
    return shape;
  }
};

// Where a warp is in its block's tile.
struct WarpPlace {
  int channel, step;

  __device__ explicit WarpPlace(const TileShape& shape) {
    const int warp = threadIdx.x / kWarp;
    channel = (warp >> shape.time_bits) * kEdge;
    step = (warp & ((1 << shape.time_bits) - 1)) * shape.warp_steps;
  }
};

// Copies a tile of `steps` steps, of which step i is time step first + i * stride, and the block's
// channels from an array; zeros where it has none. What packs hold is inside or outside as a whole:
// in NCT the first step is a multiple of a pack. Tiles that are all inside, as nearly all are, skip
// the checks.
template <typename T, bool kNct>
__device__ __forceinline__ void Stage(uint32_t shared, int pitch, const T* array, int first,
                                      int stride, int steps, const TileShape& shape, int time,
                                      int channels, int first_channel) {
  constexpr int kPack = kPackElements<T>;
  constexpr int kLanes = kLineBytes / kPackBytes;  // side by side, on whole lines
  constexpr int kRows = kThreads / kLanes;
  const int lane = threadIdx.x % kLanes, row = threadIdx.x / kLanes;
  const bool inside = first >= 0 && first + (steps - 1) * stride < time &&
                      first_channel + shape.channels <= channels;
  if constexpr (kNct) {
    const int packs = steps / kPack;
    for (int r = row; r < shape.channels; r += kRows) {
      const int channel = first_channel + r;
      const T* from = array + int64_t{channel} * time + first + lane * kPack;
      uint32_t to = shared + r * pitch + lane * kPackBytes;
      if (inside) {
#pragma unroll 4
        for (int pack = lane; pack < packs; pack += kLanes) {
          CopyAsyncPast(to, reinterpret_cast<const char*>(from), true);
          from += kLanes * kPack;
          to += kLineBytes;
        }
      } else {
        for (int pack = lane; pack < packs; pack += kLanes) {
          const int t = first + pack * kPack;
          const bool exists =
              channel < channels && static_cast<unsigned>(t) < static_cast<unsigned>(time);
          CopyAsyncPast(to, reinterpret_cast<const char*>(exists ? from : array), exists);
          from += kLanes * kPack;
          to += kLineBytes;
        }
      }
    }
  } else {
    const int channel = first_channel + lane * kPack;
    const T* from = array + int64_t{first + row * stride} * channels + channel;
    const int64_t advance = int64_t{kRows} * stride * channels;
    uint32_t to = shared + row * kLineBytes + (lane * kPackBytes ^ Tile<T, kNct>::Swizzle(row));
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

// A tile of one phase of one batch entry.
struct Item {
  int first_step, phase;
  int64_t entry;

  template <typename Params>
  __device__ Item(const Params& p, uint32_t index) {
    first_step = p.tiles.Peel(index) * p.shape.steps;
    phase = p.phases.Peel(index);
    entry = index;
  }
};

// Whether all sums are finite; it may deny that where they are very large.
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

// Sums of 16 steps of a warp's channels, in the places where products leave them. In NTC the rows
// are steps and the columns channels, in NCT the other way round.
struct Sums {
  float values[2][4] = {};

  __device__ static int Row(int i) { return Tile<float, false>::Row() + i / 2 * 8; }
  __device__ static int Column(int right, int i) {
    return right * 8 + Tile<float, false>::Column() * 2 + i % 2;
  }

  // Makes them tap by tap, of what is really in reach of each.
  template <typename T, bool kNct, typename Tap>
  __device__ __forceinline__ void AddTaps(const Tile<T, kNct>& window, int own, int taps, int lead,
                                          Tap&& tap) {
#pragma unroll
    for (int right = 0; right < 2; ++right) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = Row(i), column = Column(right, i);
        float sum = 0;
        for (int k = 0; k < taps; ++k) {
          sum += tap(k) * window.At(own + lead + k + (kNct ? column : row), kNct ? row : column);
        }
        values[right][i] = sum;
      }
    }
  }
};

// Where a warp writes its sums: those of 16 steps and then those of the next. Neighbouring lanes
// exchange what leaves 8 bytes to each.
template <typename T, bool kNct>
class Output {
 public:
  // The steps of a phase from `step` on, of which there are `steps`, of the array of a batch entry.
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

  // What is beyond the last step is left out: in NCT packs are inside or outside as a whole.
  __device__ __forceinline__ void Write(const Sums& sums) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      T* const to = first_ + half * eight_rows_;
      if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int right = 0; right < 2; ++right) {
          const Pack<T, 2> pack = {sums.values[right][2 * half], sums.values[right][2 * half + 1]};
          if (left_ > 8 * (kNct ? right : half)) StorePack(to + 8 * right, pack);
        }
      } else {
        uint32_t words[2];
#pragma unroll
        for (int right = 0; right < 2; ++right) {
          const Pack<T, 2> pair = {Narrow<T>(sums.values[right][2 * half]),
                                   Narrow<T>(sums.values[right][2 * half + 1])};
          memcpy(&words[right], &pair, sizeof(pair));
        }
        const bool odd = threadIdx.x & 1;
        const uint32_t got = __shfl_xor_sync(0xffffffff, odd ? words[0] : words[1], 1);
        const uint2 both = odd ? make_uint2(got, words[1]) : make_uint2(words[0], got);
        Pack<T, 4> pack;
        memcpy(&pack, &both, sizeof(pack));
        if (left_ > (kNct ? 0 : 8 * half)) StorePack(to, pack);
      }
    }
    first_ += kNct ? int64_t{kEdge} : 2 * eight_rows_;
    left_ -= kEdge;
  }

 private:
  // The first column that a lane writes: odd ones have what belongs to the second product.
  __device__ static int LaneColumn() {
    const int column = Sums::Column(0, 0);
    return sizeof(T) == 4 ? column : threadIdx.x & 1 ? column + 6 : column;
  }

  T* first_;
  int64_t eight_rows_;
  int left_;  // steps from this lane's first one on
};

// --- host ----------------------------------------------------------------------------------------

// Steps that windows begin before those that their filters need, so that rows of steps begin at
// whole packs: 8 entries, whatever their size.
inline int WindowLead(const Geometry& g, int64_t padding) {
  return g.data_format == DataFormat::kNCT ? static_cast<int>((8 - padding % 8) % 8) : 0;
}

// Blocks of 16 that the taps of 16 steps spread over.
inline int64_t TapBlocks(const Geometry& g, int64_t padding) {
  return CeilDiv(g.taps + kEdge - 1 + WindowLead(g, padding), kEdge);
}

// Whether filters are long, their heads of whole fragments, and rows of whole packs.
inline bool Takes(const Geometry& g, DType dtype) {
  const bool is_nct = g.data_format == DataFormat::kNCT;
  return g.taps > kShortTaps && dtype != DType::kF64 && g.channels / g.heads % kEdge == 0 &&
         (!is_nct || (g.dilation == 1 && RowsAligned(g.time, dtype, kPackBytes)));
}

// Whether there are matrices of filters of this type: f16 cannot hold the small parts of float32.
inline bool HasMatrix(DType dtype, DType weight_dtype) {
  return weight_dtype == dtype || (dtype == DType::kBF16 && weight_dtype == DType::kF32);
}

// Calls function(element, weight, is_nct, blocks) with the least number of blocks there are kernels
// for, or with kMost.
template <int kMost, typename Function>
cudaError_t Dispatch(const Geometry& g, int64_t padding, DType dtype, DType weight_dtype,
                     Function&& function) {
  const int64_t blocks = TapBlocks(g, padding);
  return DispatchBool(g.data_format == DataFormat::kNCT, [&](auto is_nct) {
    const auto of_types = [&](auto element, auto weight) {
      if (blocks <= 2) return function(element, weight, is_nct, std::integral_constant<int, 2>{});
      if constexpr (kMost > 3) {
        if (blocks <= 3) return function(element, weight, is_nct, std::integral_constant<int, 3>{});
        if (blocks <= 5) return function(element, weight, is_nct, std::integral_constant<int, 5>{});
      }
      return function(element, weight, is_nct, std::integral_constant<int, kMost>{});
    };
    switch (dtype) {
      case DType::kF16:
        return of_types(__half{}, __half{});
      case DType::kBF16:
        if (weight_dtype == DType::kF32) return of_types(__nv_bfloat16{}, float{});
        return of_types(__nv_bfloat16{}, __nv_bfloat16{});
      case DType::kF32:
        return of_types(float{}, float{});
      default:
        return cudaErrorInvalidValue;
    }
  });
}

}  // namespace jaxops::lightweight_conv::cuda::mma

#endif  // JAXOPS_CUDA_LIGHTWEIGHT_CONV_MMA_CUH_
