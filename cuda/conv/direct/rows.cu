// Direct convolution and its input gradient, for windows of 3, 5 and 7 taps.
//
// A thread has a strip of columns and loops down the rows (ConvolveRows): a row of the image adds
// to the rows of the result whose windows cover it, and the thread holds the sums of these rows.
// The input gradient without strides is the same loop with the taps mirrored. With strides of 2 a
// row of the cotangent adds to the rows of its window (InputGradRows).
#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "cuda/conv/direct/sums.cuh"

namespace jaxops::conv::cuda {
namespace {

// The rows of the result come in groups of one row or, in the input gradient with strides, of
// `stride` rows. A part is several groups, and different threads loop over different parts.
struct RowLoopParams : SumParams {
  int first_row, first_column;  // of the image, for the first of the result
  // The first group, or strip, of the input gradient may begin before the image.
  int row_shift, column_shift;
  FastDivider64 parts;
  int groups, part_groups;
  bool is_mirrored;
};

// The part of the result that a thread computes.
struct Item {
  int64_t image, channel;
  int strip, part;
  bool exists;

  template <typename W>
  __device__ Item(const RowLoopParams& p, W) {
    uint64_t left = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
    const int64_t lane = p.slabs.lanes.DivMod(left);
    strip = static_cast<int>(p.strips.DivMod(left));
    const int64_t vector = p.slabs.slabs.DivMod(left) * p.slabs.lanes.divisor() + lane;
    part = static_cast<int>(p.parts.DivMod(left));
    image = left;
    channel = vector * W::kVector;
    exists = image < p.images && vector < p.slabs.vectors;
  }
};

// The kernel's entries for a thread.
template <typename T, typename W>
struct Weights {
  Accumulator<T> of[W::kTaps][W::kTaps][W::kFan][W::kVector];
  int64_t image_channel;

  __device__ Weights(const RowLoopParams& p, int64_t channel) {
    int64_t first;
    p.channels.Find(channel, image_channel, first);
    const T* kernel = static_cast<const T*>(p.kernel) + first;
#pragma unroll
    for (int r = 0; r < W::kTaps; ++r) {
#pragma unroll
      for (int s = 0; s < W::kTaps; ++s) {
        const int number = r * W::kTaps + s;
        const int tap = p.is_mirrored ? W::kTaps * W::kTaps - 1 - number : number;
#pragma unroll
        for (int i = 0; i < W::kFan; ++i) {
          const auto vector =
              LoadVector<W::kVector>(kernel + (tap * p.channels.tap + i * p.channels.channel));
#pragma unroll
          for (int v = 0; v < W::kVector; ++v) of[r][s][i][v] = Widen(vector.values[v]);
        }
      }
    }
  }

  __device__ bool AreFinite() const {
    bool are = true;
#pragma unroll
    for (int r = 0; r < W::kTaps; ++r) {
#pragma unroll
      for (int s = 0; s < W::kTaps; ++s) {
#pragma unroll
        for (int i = 0; i < W::kFan; ++i) {
#pragma unroll
          for (int v = 0; v < W::kVector; ++v) are &= isfinite(of[r][s][i][v]);
        }
      }
    }
    return are;
  }
};

// A strip of the result, of which a thread stores row after row.
template <typename T, typename W>
class Result {
 public:
  using Sums = Accumulator<T>[W::kColumns][W::kVector];

  // `column` may be before the first column of the result.
  __device__ Result(const RowLoopParams& p, const Item& item, int row, int column)
      : is_f32_(sizeof(T) == sizeof(float) || p.result_is_f32),
        exist_(Existing<W::kColumns>(column, p.result_columns)) {
    const int bytes = is_f32_ ? sizeof(float) : sizeof(T);
    const int64_t pixels = (item.image * p.result_rows + row) * p.result_columns + column;
    at_ = static_cast<char*>(p.result) + (pixels * p.result_pixel + item.channel) * bytes;
    pixel_bytes_ = static_cast<int>(p.result_pixel * bytes);
    row_bytes_ = p.result_columns * p.result_pixel * bytes;
  }

  __device__ __forceinline__ void StoreNext(bool exists, const Sums& sums) {
    if (exists && is_f32_) StoreAs<float>(sums);
    if (sizeof(T) != sizeof(float) && exists && !is_f32_) StoreAs<T>(sums);
    at_ += row_bytes_;
  }

 private:
  template <typename Out>
  __device__ __forceinline__ void StoreAs(const Sums& sums) {
    const auto store = [&](int c) {
      jaxops::cuda::Vector<Out, W::kVector> vector;
#pragma unroll
      for (int v = 0; v < W::kVector; ++v) vector.values[v] = Narrow<Out>(sums[c][v]);
      StoreVector(reinterpret_cast<Out*>(at_ + int64_t{c} * pixel_bytes_), vector);
    };
    if (exist_ == (1u << W::kColumns) - 1) {
#pragma unroll
      for (int c = 0; c < W::kColumns; ++c) store(c);
    } else {
#pragma unroll
      for (int c = 0; c < W::kColumns; ++c) {
        if (exist_ >> c & 1) store(c);
      }
    }
  }

  char* at_;  // of the next row
  int64_t row_bytes_;
  int pixel_bytes_;
  bool is_f32_;
  uint32_t exist_;
};

// Blocks of a multiprocessor, as many as the registers for the kernel and sums allow.
template <typename W>
constexpr int kLoopBlocks = W::kTaps == 7 ? 3 : 4;

template <typename T, typename W>
__global__ void __launch_bounds__(kThreads, kLoopBlocks<W>)
    ConvolveRows(const __grid_constant__ RowLoopParams p) {
  using Acc = Accumulator<T>;
  constexpr int kPixels = (W::kColumns - 1) * W::kStride + W::kTaps;
  // Large windows skip the products for rows of other parts, and products with zeros.
  constexpr bool kSkips = W::kTaps > 3;
  const Item item(p, W());
  if (!item.exists) return;
  const Weights<T, W> weights(p, item.channel);
  const bool needs_zeros = kSkips && !weights.AreFinite();
  const int column = item.strip * W::kColumns;
  const int begin = item.part * p.part_groups;
  const int rows = min(p.part_groups, p.groups - begin);
  const int first_row = begin * W::kStride + p.first_row;
  Rows<T, kPixels, W::kEntries> image(
      p.image, item.image * p.image_rows * p.image_columns * p.image_pixel + weights.image_channel,
      first_row, min(p.image_rows, first_row + (rows - 1) * W::kStride + W::kTaps),
      column * W::kStride + p.first_column, p.image_columns, p.image_pixel);
  Result<T, W> result(p, item, begin, column);

  // sums[m] are for the row of the result whose window began m steps ago.
  Acc sums[W::kRamp + 1][W::kColumns][W::kVector] = {};
  typename Rows<T, kPixels, W::kEntries>::Row next;
  bool next_exists = image.LoadNext(next);
  // Does a step of the loop: one row of the result begins, and one is complete. Products are added
  // for the rows of the result that `is_needed` selects.
  const auto loop = [&](int step, auto is_needed) {
#pragma unroll
    for (int phase = 0; phase < W::kStride; ++phase) {
      Acc x[kPixels][W::kEntries];
      next.WidenTo(x);
      const bool exists = next_exists;
      next_exists = image.LoadNext(next);
#pragma unroll
      for (int m = W::kRamp; m >= 0; --m) {
        if (phase == 0) {
#pragma unroll
          for (int c = 0; c < W::kColumns; ++c) {
#pragma unroll
            for (int v = 0; v < W::kVector; ++v) sums[m][c][v] = m > 0 ? sums[m - 1][c][v] : Acc{0};
          }
        }
        const int r = m * W::kStride + phase;
        if (r >= W::kTaps || !is_needed(m, exists)) continue;
#pragma unroll
        for (int s = 0; s < W::kTaps; ++s) {
#pragma unroll
          for (int i = 0; i < W::kFan; ++i) {
#pragma unroll
            for (int c = 0; c < W::kColumns; ++c) {
#pragma unroll
              for (int v = 0; v < W::kVector; ++v) {
                sums[m][c][v] += weights.of[r][s][i][v] * x[c * W::kStride + s][i + v];
              }
            }
          }
        }
      }
    }
    if (step >= W::kRamp) {
      Finish(p.epilogue, item.channel, W::kVector, sums[W::kRamp]);
      result.StoreNext(true, sums[W::kRamp]);
    }
  };
  const auto all = [](int, bool) { return true; };
  for (int step = 0; step < rows + W::kRamp; ++step) {
    if constexpr (!kSkips) {
      loop(step, all);
    } else {
      // Steps that need all rows have a loop of their own.
      for (; step >= W::kRamp && step < rows && (next_exists || needs_zeros); ++step) {
        loop(step, all);
      }
      loop(step, [&](int m, bool exists) {
        return (exists || needs_zeros) && m <= step && step - m < rows;
      });
    }
  }
}

template <typename T, typename W>
__global__ void __launch_bounds__(kThreads, kLoopBlocks<W>)
    InputGradRows(const __grid_constant__ RowLoopParams p) {
  using Acc = Accumulator<T>;
  static_assert(W::kColumns % W::kStride == 0);
  constexpr int kPixels = W::kColumns / W::kStride + W::kRamp;
  const Item item(p, W());
  if (!item.exists) return;
  const Weights<T, W> weights(p, item.channel);
  const int column = item.strip * W::kColumns;
  const int begin = item.part * p.part_groups;
  const int groups = min(p.part_groups, p.groups - begin);
  const int first_row = begin + p.first_row;
  Rows<T, kPixels, W::kEntries> image(
      p.image, item.image * p.image_rows * p.image_columns * p.image_pixel + weights.image_channel,
      first_row, min(p.image_rows, first_row + groups + W::kRamp),
      column / W::kStride + p.first_column, p.image_columns, p.image_pixel);
  int row = begin * W::kStride + p.row_shift;
  Result<T, W> result(p, item, row, column + p.column_shift);

  // sums[r] are for the row of the result that has tap r of the next row of the cotangent.
  Acc sums[W::kTaps][W::kColumns][W::kVector] = {};
  typename Rows<T, kPixels, W::kEntries>::Row next;
  image.LoadNext(next);
  for (int step = 0; step < groups + W::kRamp; ++step) {
    Acc g[kPixels][W::kEntries];
    next.WidenTo(g);
    image.LoadNext(next);
#pragma unroll
    for (int r = 0; r < W::kTaps; ++r) {
#pragma unroll
      for (int c = 0; c < W::kColumns; ++c) {
#pragma unroll
        for (int s = c % W::kStride; s < W::kTaps; s += W::kStride) {
#pragma unroll
          for (int i = 0; i < W::kFan; ++i) {
#pragma unroll
            for (int v = 0; v < W::kVector; ++v) {
              sums[r][c][v] += weights.of[r][s][i][v] * g[(c - s) / W::kStride + W::kRamp][i + v];
            }
          }
        }
      }
    }
    if (step >= W::kRamp) {
#pragma unroll
      for (int r = 0; r < W::kStride; ++r, ++row) {
        result.StoreNext(static_cast<uint32_t>(row) < static_cast<uint32_t>(p.result_rows),
                         sums[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < W::kTaps; ++r) {
#pragma unroll
      for (int c = 0; c < W::kColumns; ++c) {
#pragma unroll
        for (int v = 0; v < W::kVector; ++v) {
          sums[r][c][v] = r + W::kStride < W::kTaps ? sums[r + W::kStride][c][v] : Acc{0};
        }
      }
    }
  }
}

template <typename T, typename W, bool kOfCotangents>
cudaError_t LaunchRowLoop(cudaStream_t stream, const SumParams& common, const Call& call,
                          bool is_grad) {
  RowLoopParams p{};
  static_cast<SumParams&>(p) = common;
  const auto place = [&](const im2col::Window& dim, int& first, int& shift) {
    const int64_t low = dim.low;
    if constexpr (kOfCotangents) {
      const int64_t before = low >= 0 ? low / W::kStride : -CeilDiv(-low, W::kStride);
      first = static_cast<int>(before - W::kRamp);
      shift = static_cast<int>(before * W::kStride - low);
    } else {
      first = static_cast<int>(is_grad ? low - (W::kTaps - 1) : -low);
    }
  };
  place(call.dims[0], p.first_row, p.row_shift);
  place(call.dims[1], p.first_column, p.column_shift);
  p.is_mirrored = is_grad && !kOfCotangents;
  p.slabs = Slabs(p.result_pixel / W::kVector);
  p.strips = FastDivider64(CeilDiv(p.result_columns - p.column_shift, W::kColumns));
  p.groups = static_cast<int>(CeilDiv(p.result_rows - p.row_shift, kOfCotangents ? W::kStride : 1));

  const int64_t threads = p.images * p.strips.divisor() * p.slabs.threads();
  p.part_groups = CutRows(p.groups, threads, W::kRamp, kLoopBlocks<W>);
  p.parts = FastDivider64(CeilDiv(p.groups, p.part_groups));
  const int64_t blocks = CeilDiv(threads * p.parts.divisor(), kThreads);
  if constexpr (kOfCotangents) {
    return jaxops::cuda::Launch(&InputGradRows<T, W>, blocks, kThreads, 0, stream, p);
  } else {
    return jaxops::cuda::Launch(&ConvolveRows<T, W>, blocks, kThreads, 0, stream, p);
  }
}

template <typename T>
std::optional<cudaError_t> LaunchRowLoopsOf(cudaStream_t stream, const SumParams& p,
                                            const Call& call, bool is_grad) {
  const int64_t taps = SquareTaps(call), stride = call.dims[1].stride;
  const int64_t fan = p.channels.image_fan;
  if (stride > 2 || !AreNear(std::max(call.channels, call.outputs))) return std::nullopt;
  const auto loop = [&]<typename W>(W) {
    return LaunchRowLoop<T, W, false>(stream, p, call, is_grad);
  };
  // Pairs of 16-bit entries are as wide as one of f32.
  constexpr int kPair = sizeof(T) == 2 ? 2 : 1;
  const auto with_stride =
      [&]<int kTaps, int kFan, int kVector>(RowLoop<kTaps, 1, kFan, kVector, 1>) {
        constexpr int kColumns = kFan > 1 ? 4 : 8;
        if (stride == 1) return loop(RowLoop<kTaps, 1, kFan, kVector, kColumns>());
        if (!is_grad) return loop(RowLoop<kTaps, 2, kFan, kVector, kColumns / 2>());
        return LaunchRowLoop<T, RowLoop<kTaps, 2, kFan, kVector, kColumns>, true>(stream, p, call,
                                                                                  true);
      };
  if (taps == 3) {
    if (fan == 4) return with_stride(RowLoop<3, 1, 4, 1, 1>());
    if (CanPairChannels(p, call)) return with_stride(RowLoop<3, 1, 1, kPair, 1>());
    if (fan == 1) return with_stride(RowLoop<3, 1, 1, 1, 1>());
  }
  if (taps == 5 && fan == 1) return with_stride(RowLoop<5, 1, 1, 1, 1>());
  if (taps == 7 && stride == 1 && fan == 1) return loop(RowLoop<7, 1, 1, 1, 8>());
  return std::nullopt;
}

}  // namespace

std::optional<cudaError_t> LaunchRowLoops(cudaStream_t stream, const SumParams& p, const Call& call,
                                          bool is_grad) {
  return jaxops::cuda::DispatchFloat(call.dtype, [&]<typename T>(T) -> std::optional<cudaError_t> {
    // Float64 needs too many registers.
    if constexpr (std::is_same_v<T, double>) {
      return std::nullopt;
    } else {
      return LaunchRowLoopsOf<T>(stream, p, call, is_grad);
    }
  });
}

}  // namespace jaxops::conv::cuda
