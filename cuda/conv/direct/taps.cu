// Direct convolution of small groups of channels, and its input gradient.
//
// Both are sums over taps and the channels of a group, of an image that is x or the cotangent, and
// each is one launch. Calls without a kernel in direct/groups.cu and direct/rows.cu, and f64, are
// summed tap by tap.
#include <algorithm>
#include <cstdint>

#include "cuda/conv/direct/sums.cuh"

namespace jaxops::conv::cuda {
namespace {

// One dimension of a sum. Results are numbered cells of each remainder by `result_step`. Entry t of
// the sum for a cell is entry cell * image_step + begin + t * entry_step of the image times tap
// first_tap + t * tap_step, where the remainder has its own `begin`, `first_tap` and number of
// taps.
struct Steps {
  int image_step, entry_step, tap_step;
  FastDivider64 result_step;
  struct {
    int begin, first_tap, taps;
  } of[kMaxStride];

  Steps() = default;
  Steps(const im2col::Window& w, bool is_grad) {
    const int dilation = static_cast<int>(w.dilation), taps = static_cast<int>(w.taps);
    const int low = static_cast<int>(w.low), stride = static_cast<int>(w.stride);
    if (!is_grad) {
      image_step = stride;
      entry_step = dilation;
      tap_step = 1;
      result_step = FastDivider64(1);
      of[0] = {-low, 0, taps};
      return;
    }
    // Taps that are a multiple of this apart meet the same remainder.
    image_step = 1;
    tap_step = 1;
    while (tap_step * dilation % stride != 0) ++tap_step;
    entry_step = -(tap_step * dilation / stride);
    result_step = FastDivider64(stride);
    for (int r = 0; r < stride; ++r) {
      of[r] = {0, 0, 0};
      for (int t = 0; t < std::min(taps, tap_step); ++t) {
        if ((r + low - t * dilation) % stride != 0) continue;
        of[r] = {(r + low - t * dilation) / stride, t,
                 static_cast<int>(CeilDiv(taps - t, tap_step))};
        break;
      }
    }
  }
};

struct TapsParams : SumParams {
  Steps rows, columns;
  FastDivider64 row_divider;  // rows of the result
  int kernel_columns;
};

constexpr int kStripColumns = 4;

template <typename T, int kVector>
__device__ __forceinline__ void Load(Accumulator<T> (&to)[kVector], const T* address) {
  Raw<T, kVector> raw;
  raw.Load(reinterpret_cast<const char*>(address));
  raw.WidenTo(to);
}

template <typename T, int kVector>
__global__ void __launch_bounds__(kThreads) SumTaps(const __grid_constant__ TapsParams p) {
  using Acc = Accumulator<T>;
  uint64_t left = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t lane = p.slabs.lanes.DivMod(left);
  const int column_rest = static_cast<int>(p.columns.result_step.DivMod(left));
  const int first_cell = static_cast<int>(p.strips.DivMod(left)) * kStripColumns;
  const int64_t vector = p.slabs.slabs.DivMod(left) * p.slabs.lanes.divisor() + lane;
  const int row = static_cast<int>(p.row_divider.DivMod(left));
  const int64_t image = left;
  const int column_step = static_cast<int>(p.columns.result_step.divisor());
  const int first_column = first_cell * column_step + column_rest;
  if (image >= p.images || vector >= p.slabs.vectors || first_column >= p.result_columns) return;
  const int64_t channel = vector * kVector;
  int64_t image_channel, of_kernel;
  p.channels.Find(channel, image_channel, of_kernel);
  uint64_t row_cell = row;
  const int row_rest = static_cast<int>(p.rows.result_step.DivMod(row_cell));

  const auto& of_row = p.rows.of[row_rest];
  const auto& of_column = p.columns.of[column_rest];
  const T* pixels = static_cast<const T*>(p.image);
  const T* kernel = static_cast<const T*>(p.kernel) + of_kernel;
  // Vectors have channels that are groups of their own.
  const int64_t fan = kVector > 1 ? 1 : p.channels.image_fan;
  const int64_t apart = p.columns.image_step * p.image_pixel;
  Acc sums[kStripColumns][kVector] = {};
  for (int r = 0; r < of_row.taps; ++r) {
    const int image_row =
        static_cast<int>(row_cell) * p.rows.image_step + of_row.begin + r * p.rows.entry_step;
    const bool has_row = static_cast<uint32_t>(image_row) < static_cast<uint32_t>(p.image_rows);
    const int tap_row = (of_row.first_tap + r * p.rows.tap_step) * p.kernel_columns;
    const int64_t of_image_row =
        (image * p.image_rows + image_row) * p.image_columns * p.image_pixel + image_channel;
    for (int s = 0; s < of_column.taps; ++s) {
      const int column =
          first_cell * p.columns.image_step + of_column.begin + s * p.columns.entry_step;
      const int64_t tap = tap_row + of_column.first_tap + s * p.columns.tap_step;
      int64_t at = of_image_row + column * p.image_pixel;
      int64_t of_tap = tap * p.channels.tap;
      for (int64_t i = 0; i < fan; ++i, ++at, of_tap += p.channels.channel) {
        Acc weight[kVector];
        Load(weight, kernel + of_tap);
#pragma unroll
        for (int c = 0; c < kStripColumns; ++c) {
          Acc x[kVector] = {};
          if (has_row && static_cast<uint32_t>(column + c * p.columns.image_step) <
                             static_cast<uint32_t>(p.image_columns)) {
            Load(x, pixels + (at + c * apart));
          }
#pragma unroll
          for (int v = 0; v < kVector; ++v) sums[c][v] += weight[v] * x[v];
        }
      }
    }
  }
  Finish(p.epilogue, channel, kVector, sums);
  const int64_t at = (image * p.result_rows + row) * p.result_columns * p.result_pixel + channel;
#pragma unroll
  for (int c = 0; c < kStripColumns; ++c) {
    const int column = first_column + c * column_step;
    if (column < p.result_columns) {
      StoreSums<T>(p.result, at + column * p.result_pixel, p.result_is_f32, sums[c]);
    }
  }
}

template <typename T, int kVector>
cudaError_t LaunchTaps(cudaStream_t stream, const SumParams& common, const Call& call,
                       bool is_grad) {
  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  if (std::max(h.stride, w.stride) > kMaxStride) return cudaErrorNotSupported;
  TapsParams p{};
  static_cast<SumParams&>(p) = common;
  p.rows = Steps(h, is_grad);
  p.columns = Steps(w, is_grad);
  p.row_divider = FastDivider64(p.result_rows);
  p.kernel_columns = static_cast<int>(w.taps);
  p.slabs = Slabs(p.result_pixel / kVector);
  const int64_t column_step = p.columns.result_step.divisor();
  p.strips = FastDivider64(CeilDiv(CeilDiv(p.result_columns, column_step), kStripColumns));
  const int64_t threads =
      p.images * p.result_rows * column_step * p.strips.divisor() * p.slabs.threads();
  return jaxops::cuda::Launch(&SumTaps<T, kVector>, CeilDiv(threads, kThreads), kThreads, 0, stream,
                              p);
}

cudaError_t LaunchSum(cudaStream_t stream, const Call& call, bool is_grad) {
  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  if (h.taps * w.taps > kMaxTaps) return cudaErrorNotSupported;
  SumParams p{};
  p.image = call.image;
  p.kernel = call.kernel;
  p.result = call.result;
  p.image_rows = static_cast<int>(is_grad ? h.out : h.in);
  p.image_columns = static_cast<int>(is_grad ? w.out : w.in);
  p.result_rows = static_cast<int>(is_grad ? h.in : h.out);
  p.result_columns = static_cast<int>(is_grad ? w.in : w.out);
  p.image_pixel = is_grad ? call.outputs : call.channels;
  p.result_pixel = is_grad ? call.channels : call.outputs;
  p.images = call.images;
  p.channels = Channels(call, is_grad);
  p.result_is_f32 = call.result_dtype == DType::kF32;
  p.epilogue = call.epilogue;
  if (const auto launched = LaunchGroups(stream, p, call, is_grad)) return *launched;
  if (const auto looped = LaunchRowLoops(stream, p, call, is_grad)) return *looped;
  return jaxops::cuda::DispatchFloat(call.dtype, [&]<typename T>(T) {
    return CanPairChannels(p, call) ? LaunchTaps<T, 2>(stream, p, call, is_grad)
                                    : LaunchTaps<T, 1>(stream, p, call, is_grad);
  });
}

}  // namespace

cudaError_t LaunchForwardDirect(cudaStream_t stream, const Call& call) {
  return LaunchSum(stream, call, false);
}

cudaError_t LaunchInputGradDirect(cudaStream_t stream, const Call& call) {
  return LaunchSum(stream, call, true);
}

}  // namespace jaxops::conv::cuda
