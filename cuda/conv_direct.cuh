// What the kernels of direct convolution share: how they take channels and rows of an image.
//
// Of a few channels a group there is no matrix product. Neighbouring threads have neighbouring
// channels of the result, each of them the columns of a strip, of which it keeps the sums in
// registers. The kernels for the windows of most networks keep the kernel there as well and walk
// down the rows of the image, of which every entry is then read once.
#ifndef JAXOPS_CUDA_CONV_DIRECT_CUH_
#define JAXOPS_CUDA_CONV_DIRECT_CUH_

#include <algorithm>
#include <cstdint>

#include "common/fast_divide.h"
#include "cuda/conv.h"
#include "cuda/launch.h"
#include "cuda/numeric.cuh"

namespace jaxops::conv::cuda {

using jaxops::cuda::Accumulator;
using jaxops::cuda::CeilDiv;
using jaxops::cuda::kWarp;
using jaxops::cuda::LoadPack;
using jaxops::cuda::Narrow;
using jaxops::cuda::SizeOf;
using jaxops::cuda::Widen;

// The channels of the result, in packs that a thread has each, as slabs of about equally many for
// the neighbouring threads of a warp: so are other pixels for a block, which share what they read.
struct Slabs {
  FastDivider64 lanes;
  FastDivider64 slabs;
  int64_t packs;

  Slabs() = default;
  explicit Slabs(int64_t packs) : lanes(CeilDiv(packs, CeilDiv(packs, kWarp))), packs(packs) {
    slabs = FastDivider64(CeilDiv(packs, lanes.divisor()));
  }
  int64_t threads() const { return lanes.divisor() * slabs.divisor(); }
};

// A window whose taps, a square of them, and steps are known when it is compiled, and what a thread
// has of it: packs of so many channels of the result, each of so many channels of the image, of a
// strip of columns.
template <int kTaps_, int kStride_, int kFan_, int kPack_, int kColumns_>
struct Walk {
  static constexpr int kTaps = kTaps_;
  static constexpr int kStride = kStride_;
  static constexpr int kFan = kFan_;
  static constexpr int kPack = kPack_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kEntries = kFan * kPack;  // of a pixel of the image
  // The rows of windows that cover a row of the image, but for the one that begins there.
  static constexpr int kRamp = (kTaps - 1) / kStride;
  static_assert(kFan == 1 || kPack == 1);
};

// Neighbouring pixels in rows of an image, and some of their channels, as a thread reads them.
template <typename T, int kPixels, int kEntries>
class Rows {
  static_assert(kPixels <= 32);

 public:
  using Row = jaxops::cuda::Pack<T, kEntries>[kPixels];

  // `first` is the entry of row 0 and column 0 of an image of so many columns. Those are read from
  // `column` on, and of rows from `rows` on, which are not needed, none.
  __device__ Rows(const void* image, int64_t first, int column, int rows, int columns,
                  int64_t pixel)
      : image_(static_cast<const T*>(image)),
        first_(first + column * pixel),
        row_(columns * pixel),
        pixel_(pixel),
        rows_(max(rows, 0)) {
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      exist_ |= static_cast<uint32_t>(static_cast<uint32_t>(column + i) <
                                      static_cast<uint32_t>(columns))
                << i;
    }
  }

  __device__ bool Has(int row) const {
    return static_cast<uint32_t>(row) < static_cast<uint32_t>(rows_);
  }

  // Entries outside of the image are zeros.
  __device__ __forceinline__ void Load(Row& to, int row) const {
    const uint32_t exist = Has(row) ? exist_ : 0;
    const int64_t at = first_ + row * row_;
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      to[i] = {};
      if (exist >> i & 1) to[i] = LoadPack<kEntries>(image_ + (at + i * pixel_));
    }
  }

 private:
  const T* image_;
  int64_t first_, row_, pixel_;
  int rows_;
  uint32_t exist_ = 0;
};

// Stores a pack of sums in the type of the operands, or as f32.
template <typename T, int kPack>
__device__ __forceinline__ void StoreSums(void* result, int64_t index, bool is_f32,
                                          const Accumulator<T> (&sums)[kPack]) {
  const auto store = [&]<typename Out>(Out* to) {
    jaxops::cuda::Pack<Out, kPack> pack;
#pragma unroll
    for (int v = 0; v < kPack; ++v) {
      if constexpr (std::is_same_v<Out, float>) {
        pack.values[v] = static_cast<float>(sums[v]);
      } else {
        pack.values[v] = Narrow<Out>(sums[v]);
      }
    }
    *reinterpret_cast<jaxops::cuda::Pack<Out, kPack>*>(to + index) = pack;
  };
  if (is_f32) {
    store(static_cast<float*>(result));
  } else {
    store(static_cast<T*>(result));
  }
}

// The taps of windows that are the same in both directions and have no dilation, which those that
// are compiled have; 0 of others.
inline int64_t SquareTaps(const Call& call) {
  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  const bool is_square = h.taps == w.taps && h.stride == w.stride;
  return is_square && h.dilation == 1 && w.dilation == 1 ? h.taps : 0;
}

}  // namespace jaxops::conv::cuda

#endif  // JAXOPS_CUDA_CONV_DIRECT_CUH_
