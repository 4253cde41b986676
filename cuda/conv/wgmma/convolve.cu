// Convolution on Hopper, and its input gradient, for 16-bit floats and for float32 that is
// multiplied as TF32.
#include "cuda/conv/wgmma/convolve.cuh"

namespace jaxops::conv::cuda {
namespace {

using namespace tiled;  // NOLINT: the file instantiates its templates

constexpr Shape kShapes[] = {{2, 2, 128, 100}, {3, 1, 128, 100}, {2, 1, 128, 105},
                             {4, 1, 64, 120},  {2, 1, 64, 145},  {4, 1, 32, 160}};
// The shapes of tiles whose sum the blocks of a cluster share.
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

struct ForwardPlans;
struct InputGradPlans;

template <bool kAcross, typename Plans>
cudaError_t Launch(cudaStream_t stream, const Call& call, const Sum& sum) {
  int processors = 0;
  cudaError_t error = jaxops::cuda::CountProcessors(&processors);
  if (error != cudaSuccess) return error;
  const DType dtype = call.dtype;
  const int item = ItemBytes(dtype);
  if (sum.groups != 1 || sum.channels * item % 16 || sum.outputs * item % 16) {
    return cudaErrorNotSupported;
  }
  const auto plan = KeptPlan<Plans>(PlanKey(call, processors, sum.number), [&] {
    return MakePlan<1>(sum, item, processors, kShapes, kSharedShapes);
  });
  const Shape* const shape = plan->shape;
  if (!shape) return cudaErrorNotSupported;
  Params params = plan->params;
  params.result = sum.result;
  params.epilogue = sum.epilogue;
  params.is_wide = call.result_dtype == DType::kF32;

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

cudaError_t LaunchForwardWgmma(cudaStream_t stream, const Call& call) {
  return LaunchForwardSum(call, [&](const Sum& sum) {
    return call.dtype == DType::kF32 ? Launch<false, ForwardPlans>(stream, call, sum)
                                     : Launch<true, ForwardPlans>(stream, call, sum);
  });
}

cudaError_t LaunchInputGradWgmma(cudaStream_t stream, const Call& call) {
  return LaunchInputGradSums(
      call, [&](const Sum& sum) { return Launch<false, InputGradPlans>(stream, call, sum); });
}

}  // namespace jaxops::conv::cuda
