// Direct convolution of groups of four channels and outputs, and its input gradient, on tensor
// cores, for windows of 3 taps without strides.
//
// The product of 16 channels with a kernel that is zero between channels of different groups takes
// less time than the products of each group on CUDA cores. A warp has 16 channels of a strip of
// pixels and loops over the rows as the threads of direct/rows.cu do. The order of the sums over
// channels gives a lane, for each pixel, the channels of one group in the image and in the result.
//
// An entry that is not finite would make sums of other groups NaN: where there is such an entry,
// the groups are multiplied separately.
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>

#include "cuda/common/warp_matrix.cuh"
#include "cuda/conv/direct/sums.cuh"

namespace jaxops::conv::cuda {
namespace {

using jaxops::cuda::MultiplyStep;

constexpr int kTaps = 3;
constexpr int kRamp = kTaps - 1;
constexpr int kFan = 4;
constexpr int kChannels = 16;
constexpr int kPixels = 16;  // pixels of a strip
constexpr int kBlocks = 4;   // blocks of a multiprocessor

struct Params : SumParams {
  int first_row, first_column;  // of the image, for the first of the result
  FastDivider64 vectors, parts;
  int part_rows;
  bool is_mirrored;
};

template <typename T>
using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

// Returns seen + 0 * entries, which remains zero if all entries are finite.
template <typename T>
__device__ __forceinline__ Pair<T> See(Pair<T> seen, uint32_t entries) {
  Pair<T> of, zeros;
  memcpy(&of, &entries, sizeof(of));
  memset(&zeros, 0, sizeof(zeros));
  return __hfma2(of, zeros, seen);
}

// A lane's part of a row of the image: the channels of a group for two pixels and the pixels after
// them.
struct Row {
  uint2 pixels[kTaps][2];
};

template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocks)
    ConvolveGroups(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % kWarp, quad = lane / 4, place = lane % 4;
  uint64_t left = uint64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
  const int64_t vector = p.vectors.DivMod(left);
  const int strip = static_cast<int>(p.strips.DivMod(left));
  const int begin = static_cast<int>(p.parts.DivMod(left)) * p.part_rows;
  const int64_t image = left;
  if (image >= p.images) return;
  const int rows = min(p.part_rows, p.result_rows - begin);
  const int64_t channel = vector * kChannels + place * kFan;

  // Column n of product j is output 4 (n / 2) + 2 j + n % 2.
  uint32_t weights[kTaps * kTaps][2][2] = {};
  if (quad / 2 == place) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      int64_t image_channel, first;
      p.channels.Find(channel + 2 * j + quad % 2, image_channel, first);
      const uint16_t* kernel = static_cast<const uint16_t*>(p.kernel) + first;
#pragma unroll
      for (int number = 0; number < kTaps * kTaps; ++number) {
        const int tap = p.is_mirrored ? kTaps * kTaps - 1 - number : number;
        const uint16_t* of_tap = kernel + tap * p.channels.tap;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t low = of_tap[2 * i * p.channels.channel];
          const uint32_t high = of_tap[(2 * i + 1) * p.channels.channel];
          weights[number][j][i] = low | high << 16;
        }
      }
    }
  }

  const int column = strip * kPixels + quad;  // of the first pixel of the result
  const int64_t image_pixel = p.image_pixel * int64_t{sizeof(T)};
  int row = begin + p.first_row;
  const char* at =
      static_cast<const char*>(p.image) + channel * int64_t{sizeof(T)} +
      ((image * p.image_rows + row) * p.image_columns + column + p.first_column) * image_pixel;
  uint32_t exist = 0;
#pragma unroll
  for (int i = 0; i < 2 * kTaps; ++i) {
    const int of_image = column + p.first_column + i / 2 + i % 2 * (kPixels / 2);
    if (static_cast<uint32_t>(of_image) < static_cast<uint32_t>(p.image_columns)) exist |= 1u << i;
  }
  const int end_row = min(p.image_rows, row + rows + kRamp);
  const auto load = [&](Row& to) {
    const bool exists = static_cast<uint32_t>(row) < static_cast<uint32_t>(max(end_row, 0));
#pragma unroll
    for (int s = 0; s < kTaps; ++s) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        to.pixels[s][i] = {};
        if (exists && (exist >> (2 * s + i) & 1)) {
          to.pixels[s][i] =
              *reinterpret_cast<const uint2*>(at + (s + i * (kPixels / 2)) * image_pixel);
        }
      }
    }
    ++row;
    at += p.image_columns * image_pixel;
  };

  // sums[m] are for the row of the result whose window began m steps ago.
  float sums[kTaps][2][4] = {};
  Row next;
  load(next);
  int64_t result =
      ((image * p.result_rows + begin) * p.result_columns + column) * p.result_pixel + channel;
#pragma unroll 1
  for (int step = 0; step < rows + kRamp; ++step) {
    const Row now = next;
    load(next);
#pragma unroll
    for (int m = kTaps - 1; m >= 0; --m) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[m][i / 4][i % 4] = m > 0 ? sums[m - 1][i / 4][i % 4] : 0.f;
    }
    Pair<T> seen;
    memset(&seen, 0, sizeof(seen));
#pragma unroll
    for (int s = 0; s < kTaps; s += kTaps - 1) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        seen = See<T>(See<T>(seen, now.pixels[s][i].x), now.pixels[s][i].y);
      }
    }
    uint32_t bits;
    memcpy(&bits, &seen, sizeof(bits));
    const bool is_finite = !__any_sync(~0u, (bits & 0x7fff7fff) != 0);
#pragma unroll
    for (int m = 0; m < kTaps; ++m) {
#pragma unroll
      for (int s = 0; s < kTaps; ++s) {
        const auto& of = now.pixels[s];
        const uint32_t a[] = {of[0].x, of[1].x, of[0].y, of[1].y};
        const auto& of_tap = weights[m * kTaps + s];
        if (is_finite) {
#pragma unroll
          for (int j = 0; j < 2; ++j) MultiplyStep<T>(sums[m][j], a, of_tap[j][0], of_tap[j][1]);
        } else {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float before[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) before[i] = sums[m][j][i];
#pragma unroll
            for (int group = 0; group < kChannels / kFan; ++group) {
              uint32_t apart[4];
              float after[4];
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                apart[i] = place == group ? a[i] : 0;
                after[i] = before[i];
              }
              MultiplyStep<T>(after, apart, of_tap[j][0], of_tap[j][1]);
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                if (place == group) sums[m][j][i] = after[i];
              }
            }
          }
        }
      }
    }
    if (step < kRamp) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto& of = sums[kRamp];
      float done[1][kFan] = {{of[0][2 * i], of[0][2 * i + 1], of[1][2 * i], of[1][2 * i + 1]}};
      Finish(p.epilogue, channel, kFan, done);
      if (column + i * (kPixels / 2) < p.result_columns) {
        StoreSums<T>(p.result, result + i * (kPixels / 2) * p.result_pixel, p.result_is_f32,
                     done[0]);
      }
    }
    result += p.result_columns * p.result_pixel;
  }
}

template <typename T>
cudaError_t Run(cudaStream_t stream, const SumParams& common, const Call& call, bool is_grad) {
  Params p{};
  static_cast<SumParams&>(p) = common;
  const auto place = [&](const im2col::Window& w) {
    return static_cast<int>(is_grad ? w.low - (kTaps - 1) : -w.low);
  };
  p.first_row = place(call.dims[0]);
  p.first_column = place(call.dims[1]);
  p.is_mirrored = is_grad;
  const int64_t vectors = p.result_pixel / kChannels;
  p.vectors = FastDivider64(vectors);
  p.strips = FastDivider64(CeilDiv(p.result_columns, kPixels));
  const int64_t threads = p.images * p.strips.divisor() * vectors * kWarp;
  p.part_rows = CutRows(p.result_rows, threads, kRamp, kBlocks);
  p.parts = FastDivider64(CeilDiv(p.result_rows, p.part_rows));
  return jaxops::cuda::Launch(&ConvolveGroups<T>, CeilDiv(threads * p.parts.divisor(), kThreads),
                              kThreads, 0, stream, p);
}

}  // namespace

std::optional<cudaError_t> LaunchGroups(cudaStream_t stream, const SumParams& p, const Call& call,
                                        bool is_grad) {
  const bool are_fours = p.channels.image_fan == kFan && p.channels.result_fan.divisor() == kFan;
  if (!are_fours || call.channels % kChannels != 0) return std::nullopt;
  if (SquareTaps(call) != kTaps || call.dims[1].stride != 1) return std::nullopt;
  if (call.dtype == DType::kF16) return Run<__half>(stream, p, call, is_grad);
  if (call.dtype == DType::kBF16) return Run<__nv_bfloat16>(stream, p, call, is_grad);
  return std::nullopt;
}

}  // namespace jaxops::conv::cuda
