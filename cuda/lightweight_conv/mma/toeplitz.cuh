// This header has the operands of the products on tensor cores: a window in shared memory, and taps
// as a Toeplitz matrix in registers. `mma/mma.cuh` describes their use.
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

inline constexpr int kLineBytes = 128;

// --- fragments -----------------------------------------------------------------------------------

// Left is a 16 x 16 left operand, row m and column k, and Rights are two right operands of 16 x 8
// each, row k and column n. 16-bit entries take one product, and float32 entries two times three.
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
  SplitEntry entries[2][2][2];  // indices: the right operand, the half of k, and the register
};

template <typename T>
__device__ __forceinline__ void Multiply(float (&sums)[4], const Left<T>& a, const Rights<T>& b,
                                         int right) {
  if constexpr (std::is_same_v<T, float>) {
    // The small products come first, to round less.
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

// MultiplyAdd adds the product to the sums. Tensor cores truncate the sums of float32 products, so
// these start from zero and are added afterwards.
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

// Over says whether a product sums over the steps of a window or the channels of a head.
enum class Over { kSteps, kChannels };

// Probe stays zero while all entries are finite.
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

// Tile is an array's tile as a warp sees it, from the warp's first step and channel on. Rows of
// channels (NTC) are lines of 128 bytes with a different permutation of their 16-byte vectors; rows
// of steps (NCT) have an odd number of 16 bytes. In both layouts, eight neighbouring rows have
// corresponding vectors in different banks. Steps are multiples of 8, after which the permutation
// repeats.
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

  // LoadLeft loads the operand whose rows are 16 channels if the sum is over steps, and 16 steps
  // otherwise.
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

  // LoadRights loads the operands whose columns are 16 channels if the sum is over steps, and 16
  // steps otherwise.
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

  // A lane has row m or column n of a fragment, and 32-bit pairs of columns or of k.
  __device__ static int Lane() { return threadIdx.x % kWarp; }
  __device__ static int Row() { return Lane() / 4; }
  __device__ static int Column() { return Lane() % 4; }

  // Swizzle is the exclusive-or mask for the byte offsets of a row of channels.
  __device__ static uint32_t Swizzle(int row) { return (row << 5 & 0x60) | (row << 2 & 0x10); }

 private:
  // Address is that of entry `minor` of row `major`, `step` steps further on.
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

// Toeplitz holds the taps as a Toeplitz matrix of kBlocks blocks of 16 columns: entry (row, column)
// is tap column - row - shift, zero outside the filter. A float32 filter with bfloat16 entries is
// the sum of three bfloat16 matrices, which hold all bits of the filter.
template <typename T, typename W, int kBlocks>
class Toeplitz {
 public:
  static constexpr int kTerms = std::is_same_v<T, W> ? 1 : 3;

  // tap(k) is tap k of the filter, 0 <= k < taps.
  template <typename Tap>
  __device__ __forceinline__ void Read(int taps, int shift, Tap&& tap) {
    ReadPadded(shift, [&](int k) {
      return static_cast<unsigned>(k) < static_cast<unsigned>(taps) ? tap(k) : 0.0f;
    });
  }

  // read(k) is tap k of the filter, or zero.
  template <typename Tap>
  __device__ __forceinline__ void ReadPadded(int shift, Tap&& read) {
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
          Vector<T, 2> pair;
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

  // IsFinite says whether all terms of this lane's taps are finite, which those of an infinity are
  // not.
  __device__ __forceinline__ bool IsFinite() const { return is_finite_; }

  // AsLeft returns block `block` of the matrix, whose 16 rows are two halves of 8 that differ by a
  // shift.
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
  // AsRights returns the transposed block: its column n is row n of the matrix.
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

// MultiplyTaps adds to `sums` the product of a block of a window and the taps, in the layout's
// order.
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

// A window is the left operand in NCT, and the right operands in NTC, of a sum over its steps.
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
