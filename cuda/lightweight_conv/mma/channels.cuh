// This header stages arrays for the kernels that multiply the filters of single channels on tensor
// cores.
//
// Where 16 channels share a filter, they are the rows of a product (`mma/mma.cuh`). Here 16 rows of
// 16 steps of one channel are: row r of part p of a tile has the steps from 256 p + 16 r on, and
// its window continues in the rows after it. In shared memory, the steps of a channel are
// neighbours in both layouts. "NTC" is transposed in registers between global and shared memory, 8
// steps of 8 channels at a time.
#ifndef JAXOPS_CUDA_LIGHTWEIGHT_CONV_MMA_CHANNELS_CUH_
#define JAXOPS_CUDA_LIGHTWEIGHT_CONV_MMA_CHANNELS_CUH_

#include "cuda/lightweight_conv/mma/mma.cuh"

namespace jaxops::lightweight_conv::cuda::mma {

inline constexpr int kChannelWarps = 8;
inline constexpr int kChannelThreads = kChannelWarps * kWarp;
inline constexpr int kPartSteps = kEdge * kEdge;
inline constexpr int kRowBytes = 2 * kEdge;
// Entries of 2 bytes in a vector, and the edge of what is transposed.
inline constexpr int kOctet = 8;

// Arrays in NCT, which are staged asynchronously, have two stages.
template <bool kNct>
inline constexpr int kStages = kNct ? 2 : 1;

// ChannelTile is the shape of a block's tile of channels. In NCT, a warp stages, computes and
// writes channels of its own.
struct ChannelTile {
  int steps;       // multiple of kPartSteps
  int octet_bits;  // log2 of channels / kOctet

  __host__ __device__ int channels() const { return kOctet << octet_bits; }
  __host__ __device__ int parts() const { return steps / kPartSteps; }
};

// Synchronize waits for the threads that share a tile's channels.
template <bool kNct>
__device__ __forceinline__ void Synchronize() {
  if constexpr (kNct) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// Swizzle returns the place of the byte `offset` of a channel: the halves of every other four rows
// are exchanged, so that the same halves of eight neighbouring rows are in different banks.
__device__ __forceinline__ uint32_t Swizzle(uint32_t offset) {
  return offset ^ (offset >> 3 & kVectorBytes);
}

__device__ __forceinline__ void StoreShared(uint32_t to, const uint4& vec) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(vec.x), "r"(vec.y),
               "r"(vec.z), "r"(vec.w)
               : "memory");
}
__device__ __forceinline__ void StoreShared(uint32_t to, uint32_t bits) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(bits) : "memory");
}
__device__ __forceinline__ uint4 LoadShared(uint32_t from) {
  uint4 vec;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(vec.x), "=r"(vec.y), "=r"(vec.z), "=r"(vec.w)
               : "r"(from)
               : "memory");
  return vec;
}

// Rows are the steps of a channel in shared memory, 16 in a row. Loads have 16 rows from `first` +
// `row` on. `first` is a multiple of 16, so that the places of lanes depend on `row` alone.
template <typename T>
class Rows {
 public:
  __device__ explicit Rows(uint32_t base) : base_(base) {}

  __device__ __forceinline__ float At(int step) const {
    uint16_t bits;
    asm volatile("ld.shared.b16 %0, [%1];" : "=h"(bits) : "r"(base_ + Swizzle(2 * step)));
    T value;
    memcpy(&value, &bits, sizeof(T));
    return Widen(value);
  }

  // Load returns the rows as a left operand.
  __device__ __forceinline__ Left<T> Load(int first, int row) const {
    const int lane = threadIdx.x % kWarp;
    Left<T> left;
    LoadMatrices(left.entries, Address(first, row + lane % 16, lane / 16));
    return left;
  }
  // LoadTransposedLeft returns the transposed rows as a left operand.
  __device__ __forceinline__ Left<T> LoadTransposedLeft(int first) const {
    const int lane = threadIdx.x % kWarp;
    Left<T> left;
    LoadTransposed(left.entries, Address(first, lane % 8 + lane / 16 * 8, lane / 8 % 2));
    return left;
  }
  // LoadRights returns the rows as right operands, of 8 columns each.
  __device__ __forceinline__ Rights<T> LoadRights(int first, int row) const {
    const int lane = threadIdx.x % kWarp;
    uint32_t entries[4];
    LoadTransposed(entries, Address(first, row + lane % 16, lane / 16));
    Rights<T> rights;
#pragma unroll
    for (int i = 0; i < 4; ++i) rights.entries[i / 2][i % 2] = entries[i];
    return rights;
  }

  // Store writes the sums of the 16 rows from `first` on.
  __device__ __forceinline__ void Store(int first, const Sums& sums) const {
#pragma unroll
    for (int right = 0; right < 2; ++right) {
      const uint32_t place = Swizzle(Sums::Row(0) * kRowBytes + 2 * Sums::Column(right, 0));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        StoreShared(base_ + first * kRowBytes + half * 8 * kRowBytes + place,
                    Pair(sums.values[right][2 * half], sums.values[right][2 * half + 1]));
      }
    }
  }

 private:
  __device__ __forceinline__ uint32_t Address(int first, int row, int half) const {
    return base_ + first * kRowBytes + Swizzle(row * kRowBytes + half * kVectorBytes);
  }
  __device__ __forceinline__ static uint32_t Pair(float low, float high) {
    uint32_t bits;
    if constexpr (std::is_same_v<T, __half>) {
      const __half2 pair = __floats2half2_rn(low, high);
      memcpy(&bits, &pair, sizeof(bits));
    } else {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
      memcpy(&bits, &pair, sizeof(bits));
    }
    return bits;
  }

  uint32_t base_;
};

// Octets holds 8 vectors of 8 entries of 2 bytes.
struct Octets {
  uint4 vectors[kOctet];

  __device__ __forceinline__ Octets Transposed() const {
    const auto word = [](const uint4& vec, int i) {
      return i == 0 ? vec.x : i == 1 ? vec.y : i == 2 ? vec.z : vec.w;
    };
    Octets result;
#pragma unroll
    for (int row = 0; row < kOctet; ++row) {
      const unsigned selector = row % 2 == 0 ? 0x5410 : 0x7632;
      const auto pair = [&](int i) {
        return __byte_perm(word(vectors[2 * i], row / 2), word(vectors[2 * i + 1], row / 2),
                           selector);
      };
      result.vectors[row] = make_uint4(pair(0), pair(1), pair(2), pair(3));
    }
    return result;
  }
};

// ForOctets calls visit(step, channel) for the 8 x 8 entries from there on that belong to a thread,
// of `steps` steps, a multiple of 8. Eight neighbouring lanes have neighbouring steps of the same
// channels, so that their vectors are in different banks of shared memory.
template <typename Visit>
__device__ __forceinline__ void ForOctets(int steps, const ChannelTile& tile, Visit&& visit) {
  const int octets = steps / kOctet;
  const int channel_mask = (1 << tile.octet_bits) - 1;
  for (int i = threadIdx.x;; i += kChannelThreads) {
    const int octet = (i >> (3 + tile.octet_bits)) * 8 + i % 8;
    if ((i >> (3 + tile.octet_bits)) * 8 >= octets) return;
    if (octet < octets) visit(octet * kOctet, ((i >> 3) & channel_mask) * kOctet);
  }
}

// StageChannels copies `steps` steps of the block's channels, from step `first` on, and zeros
// outside of the array. In NCT the copy is asynchronous, and `first` is a multiple of a vector.
template <typename T, bool kNct>
__device__ __forceinline__ void StageChannels(uint32_t shared, int pitch, const T* array, int first,
                                              int steps, const ChannelTile& tile, int time,
                                              int channels, int first_channel) {
  if constexpr (kNct) {
    const int from = threadIdx.x % kWarp * kOctet;
    const bool is_inside = first >= 0 && first + steps <= time;
    for (int c = threadIdx.x / kWarp; c < tile.channels(); c += kChannelWarps) {
      const int channel = first_channel + c;
      const T* const row = array + int64_t{channel} * time + first + from;
      // A multiple of 256 steps does not change a place in 128 bytes.
      const uint32_t to = shared + c * pitch + Swizzle(2 * from);
      if (is_inside && channel < channels) {
#pragma unroll 4
        for (int step = 0; step < steps - from; step += kPartSteps) {
          CopyAsyncPast(to + 2 * step, reinterpret_cast<const char*>(row + step), true);
        }
      } else {
        for (int step = 0; step < steps - from; step += kPartSteps) {
          const bool exists = channel < channels && static_cast<unsigned>(first + from + step) <
                                                        static_cast<unsigned>(time);
          CopyAsyncPast(to + 2 * step, reinterpret_cast<const char*>(exists ? row + step : array),
                        exists);
        }
      }
    }
  } else {
    ForOctets(steps, tile, [&](int step, int c) {
      const int t = first + step;
      const bool has_channels = first_channel + c < channels;
      const T* const from = array + int64_t{t} * channels + first_channel + c;
      Octets octets;
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        const bool exists =
            has_channels && static_cast<unsigned>(t + i) < static_cast<unsigned>(time);
        const T* const address = exists ? from + int64_t{i} * channels : array;
        const uint4 vec = __ldg(reinterpret_cast<const uint4*>(address));
        octets.vectors[i] = exists ? vec : make_uint4(0, 0, 0, 0);
      }
      octets = octets.Transposed();
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        StoreShared(shared + (c + i) * pitch + Swizzle(2 * step), octets.vectors[i]);
      }
    });
  }
}

// WriteChannels writes the tile's steps from shared memory to an array, from step `first` on.
template <typename T, bool kNct>
__device__ __forceinline__ void WriteChannels(T* array, uint32_t shared, int pitch, int first,
                                              const ChannelTile& tile, int time, int channels,
                                              int first_channel) {
  if constexpr (kNct) {
    const int from = threadIdx.x % kWarp * kOctet;
    const int steps = min(tile.steps, time - first) - from;
    for (int c = threadIdx.x / kWarp; c < tile.channels(); c += kChannelWarps) {
      const int channel = first_channel + c;
      if (channel >= channels) return;
      T* const row = array + int64_t{channel} * time + first + from;
      const uint32_t at = shared + c * pitch + Swizzle(2 * from);
#pragma unroll 4
      for (int step = 0; step < steps; step += kPartSteps) {
        *reinterpret_cast<uint4*>(row + step) = LoadShared(at + 2 * step);
      }
    }
  } else {
    ForOctets(tile.steps, tile, [&](int step, int c) {
      if (first_channel + c >= channels || first + step >= time) return;
      Octets octets;
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        octets.vectors[i] = LoadShared(shared + (c + i) * pitch + Swizzle(2 * step));
      }
      octets = octets.Transposed();
      T* const to = array + int64_t{first + step} * channels + first_channel + c;
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        if (first + step + i < time) {
          *reinterpret_cast<uint4*>(to + int64_t{i} * channels) = octets.vectors[i];
        }
      }
    });
  }
}

// --- host ----------------------------------------------------------------------------------------

// CanTileChannels says whether the kernels of single channels can read the arrays of a call.
inline bool CanTileChannels(const Geometry& g, DType dtype) {
  if (g.dilation != 1 || jaxops::cuda::SizeOf(dtype) != 2) return false;
  return (g.data_format == DataFormat::kNCT ? g.time : g.channels) % kOctet == 0;
}

}  // namespace jaxops::lightweight_conv::cuda::mma

#endif  // JAXOPS_CUDA_LIGHTWEIGHT_CONV_MMA_CHANNELS_CUH_
