// Code that the kernels of direct convolution share: how threads take channels and rows of an
// image.
//
// Groups of few channels do not make a matrix product. Neighbouring threads have neighbouring
// channels of the result, and each thread has the columns of a strip, whose sums are in registers.
// The kernels for the windows of most networks keep the kernel in registers as well and loop over
// the rows of the image, of which every entry is then read once.
#ifndef JAXOPS_CUDA_CONV_DIRECT_DIRECT_CUH_
#define JAXOPS_CUDA_CONV_DIRECT_DIRECT_CUH_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/fast_divide.h"
#include "cuda/common/launch.h"
#include "cuda/common/numeric.cuh"
#include "cuda/conv/families.h"

namespace jaxops::conv::cuda {

using jaxops::cuda::Accumulator;
using jaxops::cuda::CeilDiv;
using jaxops::cuda::kWarp;
using jaxops::cuda::LoadVector;
using jaxops::cuda::Narrow;
using jaxops::cuda::StoreVector;
using jaxops::cuda::Widen;

// Slabs of the result's channels. A channel vector belongs to one thread, and the slabs have about
// the same number of vectors for the neighbouring threads of a warp. A block then has several
// pixels, whose threads share reads.
struct Slabs {
  FastDivider64 lanes;
  FastDivider64 slabs;
  int64_t vectors;

  Slabs() = default;
  explicit Slabs(int64_t vectors)
      : lanes(CeilDiv(vectors, CeilDiv(vectors, kWarp))), vectors(vectors) {
    slabs = FastDivider64(CeilDiv(vectors, lanes.divisor()));
  }
  int64_t threads() const { return lanes.divisor() * slabs.divisor(); }
};

// A square window whose taps and strides are compile-time constants, and the share of a thread:
// kVector channels of the result, each of kFan channels of the image, in a strip of columns.
template <int kTaps_, int kStride_, int kFan_, int kVector_, int kColumns_>
struct RowLoop {
  static constexpr int kTaps = kTaps_;
  static constexpr int kStride = kStride_;
  static constexpr int kFan = kFan_;
  static constexpr int kVector = kVector_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kEntries = kFan * kVector;  // of a pixel of the image
  // The rows of windows that cover a row of the image, except the row of windows that begins there.
  static constexpr int kRamp = (kTaps - 1) / kStride;
  static_assert(kFan == 1 || kVector == 1);
};

// `kEntries` neighbouring entries as they are in memory, in one access.
template <typename T, int kEntries>
struct Raw {
  static constexpr int kBytes = kEntries * sizeof(T);
  static_assert(kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes == 16);
  using Word = std::conditional_t<
      kBytes == 2, uint16_t,
      std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 8, uint2, uint4>>>;

  Word word;

  __device__ __forceinline__ void Load(const char* address) {
    word = *reinterpret_cast<const Word*>(address);
  }

  __device__ __forceinline__ void WidenTo(Accumulator<T> (&to)[kEntries]) const {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      // Without this branch the compiler takes pairs apart first.
      if constexpr (kEntries == 1) {
        to[0] = __uint_as_float(uint32_t{word} << 16);
      } else {
        uint32_t pairs[kEntries / 2];
        memcpy(pairs, &word, kBytes);
#pragma unroll
        for (int i = 0; i < kEntries / 2; ++i) {
          to[2 * i] = __uint_as_float(pairs[i] << 16);
          to[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
        }
      }
    } else {
      T entries[kEntries];
      memcpy(entries, &word, kBytes);
#pragma unroll
      for (int i = 0; i < kEntries; ++i) to[i] = Widen(entries[i]);
    }
  }
};

// Returns, as bits, which of `kCount` numbers from `first` on are in [0, size).
template <int kCount>
__device__ __forceinline__ uint32_t Existing(int first, int size) {
  static_assert(kCount < 32);
  uint32_t exist = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (static_cast<uint32_t>(first + i) < static_cast<uint32_t>(size)) exist |= 1u << i;
  }
  return exist;
}

// Tells whether pixels of a thread are so close in memory that 32 bits hold their distance in
// bytes.
inline bool AreNear(int64_t pixel) { return pixel * sizeof(double) <= INT32_MAX; }

// Neighbouring pixels of an image, and some of their channels, which a thread reads row by row.
template <typename T, int kPixels, int kEntries>
class Rows {
 public:
  struct Row {
    Raw<T, kEntries> pixels[kPixels];

    __device__ __forceinline__ void WidenTo(Accumulator<T> (&to)[kPixels][kEntries]) const {
#pragma unroll
      for (int i = 0; i < kPixels; ++i) pixels[i].WidenTo(to[i]);
    }
  };

  // `first` is the entry of row 0 and column 0 of an image of `columns` columns. The thread reads
  // columns from `column` on and rows from `row` on. Rows from `end` on are not needed.
  __device__ Rows(const void* image, int64_t first, int row, int end, int column, int columns,
                  int64_t pixel)
      : at_(static_cast<const char*>(image) +
            (first + (int64_t{row} * columns + column) * pixel) * int64_t{sizeof(T)}),
        row_bytes_(columns * pixel * int64_t{sizeof(T)}),
        pixel_bytes_(static_cast<int>(pixel * sizeof(T))),
        row_(row),
        end_(max(end, 0)),
        exist_(Existing<kPixels>(column, columns)) {}

  // Loads the next row, with zeros outside of the image. Returns whether the row is in the image.
  __device__ __forceinline__ bool LoadNext(Row& to) {
    const bool exists = static_cast<uint32_t>(row_) < static_cast<uint32_t>(end_);
    if (exists && exist_ == (1u << kPixels) - 1) {
#pragma unroll
      for (int i = 0; i < kPixels; ++i) to.pixels[i].Load(at_ + int64_t{i} * pixel_bytes_);
    } else {
#pragma unroll
      for (int i = 0; i < kPixels; ++i) {
        to.pixels[i] = {};
        if (exists && (exist_ >> i & 1)) to.pixels[i].Load(at_ + int64_t{i} * pixel_bytes_);
      }
    }
    ++row_;
    at_ += row_bytes_;
    return exists;
  }

 private:
  const char* at_;  // of the next row
  int64_t row_bytes_;
  int pixel_bytes_, row_, end_;
  uint32_t exist_;
};

// Stores a vector of sums in the type of the operands, or as f32.
template <typename T, int kVector>
__device__ __forceinline__ void StoreSums(void* result, int64_t index, bool is_f32,
                                          const Accumulator<T> (&sums)[kVector]) {
  const auto store = [&]<typename Out>(Out* to) {
    jaxops::cuda::Vector<Out, kVector> vector;
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      if constexpr (std::is_same_v<Out, float>) {
        vector.values[v] = static_cast<float>(sums[v]);
      } else {
        vector.values[v] = Narrow<Out>(sums[v]);
      }
    }
    *reinterpret_cast<jaxops::cuda::Vector<Out, kVector>*>(to + index) = vector;
  };
  if (is_f32) {
    store(static_cast<float*>(result));
  } else {
    store(static_cast<T*>(result));
  }
}

// Returns the taps of square windows without dilation, which the compiled windows are; 0 for
// others.
inline int64_t SquareTaps(const Call& call) {
  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  const bool is_square = h.taps == w.taps && h.stride == w.stride;
  return is_square && h.dilation == 1 && w.dilation == 1 ? h.taps : 0;
}

}  // namespace jaxops::conv::cuda

#endif  // JAXOPS_CUDA_CONV_DIRECT_DIRECT_CUH_
