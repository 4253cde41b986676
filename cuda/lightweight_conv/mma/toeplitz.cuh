// The operands of products on tensor cores: a window in shared memory, and taps as a Toeplitz
// matrix in registers. `mma/mma.cuh` says what they are for.
#ifndef JAXOPS_CUDA_LIGHTWEIGHT_CONV_MMA_TOEPLITZ_CUH_
#define JAXOPS_CUDA_LIGHTWEIGHT_CONV_MMA_TOEPLITZ_CUH_

#include "cuda/common/warp_matrix.cuh"
#include "cuda/lightweight_conv/filters.cuh"

namespace jaxops::lightweight_conv::cuda::mma {

using jaxops::cuda::LoadMatrices;
using jaxops::cuda::LoadTransposed;
using jaxops::cuda::MultiplyStep;
using jaxops::cuda::SplitEntry;
using jaxops::cuda::SplitFloat32;

// Channels and steps of a fragment, and the channels of a warp.
inline constexpr int kEdge = 16;
inline constexpr int kLineBytes = 128;

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

}  // namespace jaxops::lightweight_conv::cuda::mma

#endif  // JAXOPS_CUDA_LIGHTWEIGHT_CONV_MMA_TOEPLITZ_CUH_
