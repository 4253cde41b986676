// Channels in the number that the kernels of convolution on Hopper take.
//
// The pixels of a block of `stride` become channels of one pixel, and zeros follow until there are
// as many as wanted. A thread writes 8 channels, by one access, and reads them one by one: those of
// neighbouring threads are neighbours, so that lines of the cache are read once.
#include "common/fast_divide.h"
#include "cuda/conv.h"
#include "cuda/launch.h"

namespace jaxops::conv::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnit = 8;

struct Params {
  const uint16_t* from;
  uint4* to;
  int64_t units;
  FastDivider64 units_of_pixel, columns, rows;
  FastDivider channels, block_columns;
  int block;  // channels of a block
  int64_t in_rows, in_columns;
  int64_t stride_row, stride_column, low_row, low_column;
};

__global__ void __launch_bounds__(kThreads) Deepen(const Params p) {
  const int64_t unit = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (unit >= p.units) return;
  uint64_t image = unit;
  const int first = static_cast<int>(p.units_of_pixel.Peel(image)) * kUnit;
  const int64_t column = p.columns.Peel(image) * p.stride_column - p.low_column;
  const int64_t row = p.rows.Peel(image) * p.stride_row - p.low_row;
  uint32_t v[kUnit];
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    uint32_t entry = first + i;
    const uint32_t channel = p.channels.Peel(entry);
    uint32_t block_row = entry;
    const uint32_t block_column = p.block_columns.Peel(block_row);
    const int64_t h = row + block_row, w = column + block_column;
    const bool exists =
        first + i < p.block && h >= 0 && h < p.in_rows && w >= 0 && w < p.in_columns;
    const int64_t pixel = (static_cast<int64_t>(image) * p.in_rows + h) * p.in_columns + w;
    v[i] = exists ? p.from[pixel * p.channels.divisor() + channel] : 0;
  }
  p.to[unit] = {v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16};
}

}  // namespace

cudaError_t LaunchDeepen(cudaStream_t stream, const Call& call) {
  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  if (call.outputs % kUnit) return cudaErrorNotSupported;
  Params p{};
  p.from = static_cast<const uint16_t*>(call.image);
  p.to = static_cast<uint4*>(call.result);
  p.units = call.images * h.out * w.out * (call.outputs / kUnit);
  if (p.units == 0) return cudaSuccess;
  p.units_of_pixel = FastDivider64(call.outputs / kUnit);
  p.columns = FastDivider64(w.out);
  p.rows = FastDivider64(h.out);
  p.channels = FastDivider(call.channels);
  p.block_columns = FastDivider(w.stride);
  p.block = static_cast<int>(h.stride * w.stride * call.channels);
  p.in_rows = h.in;
  p.in_columns = w.in;
  p.stride_row = h.stride;
  p.stride_column = w.stride;
  p.low_row = h.low;
  p.low_column = w.low;
  return jaxops::cuda::Launch(Deepen, jaxops::cuda::CeilDiv(p.units, kThreads), kThreads, 0, stream,
                              p);
}

}  // namespace jaxops::conv::cuda
