// Convolution on Hopper, and its gradient by the image, of 16-bit floats and of float32 that is
// multiplied as TF32.
#include "cuda/conv/wgmma/convolve.cuh"

namespace jaxops::conv::cuda {
namespace {

using namespace tiled;  // NOLINT: this is what it is made for

constexpr Shape kShapes[] = {{2, 2, 128, 100}, {3, 1, 128, 100}, {2, 1, 128, 105},
                             {4, 1, 64, 120},  {2, 1, 64, 145},  {4, 1, 32, 160}};
// Those of tiles whose sum the blocks of a cluster share.
constexpr Shape kSharedShapes[] = {{2, 1, 128, 105}, {2, 1, 64, 160}, {1, 1, 64, 290}};

template <typename T, bool kAcross>
cudaError_t LaunchShape(cudaStream_t stream, const Params& params, const Shape& shape,
                        int processors) {
  const auto is = [&](int warpgroups, int blocks, int columns) {
    return shape.warpgroups == warpgroups && shape.blocks == blocks && shape.columns == columns;
  };
  if (params.log_splits > 0) {
    if (is(2, 1, 128)) return LaunchTiles<T, 2, 1, 128, kAcross, true>(stream, params, processors);
    if (is(2, 1, 64)) return LaunchTiles<T, 2, 1, 64, kAcross, true>(stream, params, processors);
    return LaunchTiles<T, 1, 1, 64, kAcross, true>(stream, params, processors);
  }
  if (is(2, 2, 128)) return LaunchTiles<T, 2, 2, 128, kAcross>(stream, params, processors);
  if (is(3, 1, 128)) return LaunchTiles<T, 3, 1, 128, kAcross>(stream, params, processors);
  if (is(2, 1, 128)) return LaunchTiles<T, 2, 1, 128, kAcross>(stream, params, processors);
  if (is(4, 1, 64)) return LaunchTiles<T, 4, 1, 64, kAcross>(stream, params, processors);
  if (is(2, 1, 64)) return LaunchTiles<T, 2, 1, 64, kAcross>(stream, params, processors);
  return LaunchTiles<T, 4, 1, 32, kAcross>(stream, params, processors);
}

template <bool kAcross>
cudaError_t Launch(cudaStream_t stream, const Sum& sum, DType dtype, bool is_wide) {
  int processors = 0;
  cudaError_t error = Check(processors);
  if (error != cudaSuccess) return error;
  const int item = ItemBytes(dtype);
  if (sum.groups != 1 || sum.channels * item % 16 || sum.outputs * item % 16) {
    return cudaErrorNotSupported;
  }
  Params params;
  int64_t cycles;
  const Shape* shape = Decide<1>(params, cycles, sum, item, processors, kShapes, kSharedShapes);
  if (!shape) return cudaErrorNotSupported;
  params.is_wide = is_wide;

  const int block = params.row_bytes / item;
  error = MapRows(params.image_map, params, dtype, sum.image,
                  {sum.channels, sum.image_columns, sum.image_rows, sum.images});
  if (error != cudaSuccess) return error;
  if constexpr (kAcross) {
    error = Map<3>(params.kernel_map, dtype, sum.kernel, {sum.outputs, sum.channels, sum.matrices},
                   {64, block, 1}, {1, 1, 1}, 128);
  } else {
    error = Map<3>(params.kernel_map, dtype, sum.kernel, {sum.channels, sum.outputs, sum.matrices},
                   {block, shape->columns, 1}, {1, 1, 1}, params.row_bytes);
  }
  if (error != cudaSuccess) return error;
  if constexpr (!kAcross) {
    if (dtype == DType::kF32) return LaunchShape<float, false>(stream, params, *shape, processors);
  }
  return dtype == DType::kF16
             ? LaunchShape<__half, kAcross>(stream, params, *shape, processors)
             : LaunchShape<__nv_bfloat16, kAcross>(stream, params, *shape, processors);
}

}  // namespace

cudaError_t LaunchForward(cudaStream_t stream, const Call& call) {
  const bool is_wide = call.result_dtype == DType::kF32;
  return LaunchForwardSum(call, [&](const Sum& sum) {
    return call.dtype == DType::kF32 ? Launch<false>(stream, sum, call.dtype, is_wide)
                                     : Launch<true>(stream, sum, call.dtype, is_wide);
  });
}

cudaError_t LaunchInputGrad(cudaStream_t stream, const Call& call) {
  return LaunchInputGradSums(call, [&](const Sum& sum) {
    return Launch<false>(stream, sum, call.dtype, call.result_dtype == DType::kF32);
  });
}

}  // namespace jaxops::conv::cuda
