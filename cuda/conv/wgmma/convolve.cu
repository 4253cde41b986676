// Convolution on Hopper, and its input gradient, for 16-bit floats and for float32 that is
// multiplied as TF32.
#include <algorithm>
#include <span>
#include <vector>

#include "cuda/conv/wgmma/convolve.cuh"

namespace jaxops::conv::cuda {
namespace {

using namespace tiled;  // NOLINT: the file instantiates its templates

constexpr Shape kShapes[] = {{2, 2, 128, 100}, {3, 1, 128, 100}, {2, 1, 128, 105},
                             {4, 1, 64, 120},  {2, 1, 64, 145},  {4, 1, 32, 160}};
// The shapes of tiles whose sum the blocks of a cluster share.
constexpr Shape kSharedShapes[] = {{2, 1, 128, 105}, {2, 1, 64, 160}, {1, 1, 64, 290}};

template <typename T, bool kAcross>
cudaError_t LaunchShape(cudaStream_t stream, const Params<kSums<T, kAcross>>& params, int sums,
                        const Shape& shape, int processors) {
  const auto is = [&](int warpgroups, int blocks, int columns) {
    return shape.warpgroups == warpgroups && shape.blocks == blocks && shape.columns == columns;
  };
  if (params.common.log_splits > 0) {
    if (is(2, 1, 128))
      return LaunchTiles<T, 2, 1, 128, kAcross, true>(stream, params, sums, processors);
    if (is(2, 1, 64))
      return LaunchTiles<T, 2, 1, 64, kAcross, true>(stream, params, sums, processors);
    return LaunchTiles<T, 1, 1, 64, kAcross, true>(stream, params, sums, processors);
  }
  if (is(2, 2, 128)) return LaunchTiles<T, 2, 2, 128, kAcross>(stream, params, sums, processors);
  if (is(3, 1, 128)) return LaunchTiles<T, 3, 1, 128, kAcross>(stream, params, sums, processors);
  if (is(2, 1, 128)) return LaunchTiles<T, 2, 1, 128, kAcross>(stream, params, sums, processors);
  if (is(4, 1, 64)) return LaunchTiles<T, 4, 1, 64, kAcross>(stream, params, sums, processors);
  if (is(2, 1, 64)) return LaunchTiles<T, 2, 1, 64, kAcross>(stream, params, sums, processors);
  return LaunchTiles<T, 4, 1, 32, kAcross>(stream, params, sums, processors);
}

struct ForwardPlans;
struct InputGradPlans;

// Launches sums of a call, of which `number` is the first one's number.
template <bool kAcross, typename Plans, int kCount>
cudaError_t Launch(cudaStream_t stream, const Call& call, std::span<const Sum* const> sums,
                   int number) {
  int processors = 0;
  cudaError_t error = jaxops::cuda::CountProcessors(&processors);
  if (error != cudaSuccess) return error;
  const DType dtype = call.dtype;
  const int item = ItemBytes(dtype);
  const Sum& first = *sums[0];
  if (first.groups != 1 || first.channels * item % 16 || first.outputs * item % 16) {
    return cudaErrorNotSupported;
  }
  const auto plan = KeptPlan<Plans>(PlanKey(call, processors, number), [&] {
    return MakePlan<1, kCount>(sums, item, processors, kShapes, kSharedShapes);
  });
  const Shape* const shape = plan->shape;
  if (!shape) return cudaErrorNotSupported;
  Params<kCount> params = plan->params;
  Common& common = params.common;
  common.epilogue = first.epilogue;
  common.is_wide = call.result_dtype == DType::kF32;
  for (size_t i = 0; i < sums.size(); ++i) {
    const Sum& sum = *sums[i];
    SumParams& p = params.sum[i];
    p.result = sum.result;
    error = MapRows(p.image_map, p, dtype, sum.image,
                    {sum.channels, sum.image_columns, sum.image_rows, sum.images});
    if (error != cudaSuccess) return error;
  }
  const int block = params.sum[0].row_bytes / item;
  if constexpr (kAcross) {
    error = Map<3>(common.kernel_map, dtype, first.kernel,
                   {first.outputs, first.channels, first.matrices}, {64, block, 1}, {1, 1, 1}, 128);
  } else {
    error = Map<3>(common.kernel_map, dtype, first.kernel,
                   {first.channels, first.outputs, first.matrices}, {block, shape->columns, 1},
                   {1, 1, 1}, params.sum[0].row_bytes);
  }
  if (error != cudaSuccess) return error;
  const int count = plan->sums;
  if constexpr (!kAcross) {
    if (dtype == DType::kF32) {
      return LaunchShape<float, false>(stream, params, count, *shape, processors);
    }
  }
  return dtype == DType::kF16
             ? LaunchShape<__half, kAcross>(stream, params, count, *shape, processors)
             : LaunchShape<__nv_bfloat16, kAcross>(stream, params, count, *shape, processors);
}

}  // namespace

cudaError_t LaunchForwardWgmma(cudaStream_t stream, const Call& call) {
  return LaunchForwardSum(call, [&](const Sum& sum) {
    const Sum* const sums[] = {&sum};
    return call.dtype == DType::kF32 ? Launch<false, ForwardPlans, kMaxSums>(stream, call, sums, 0)
                                     : Launch<true, ForwardPlans, 1>(stream, call, sums, 0);
  });
}

cudaError_t LaunchInputGradWgmma(cudaStream_t stream, const Call& call) {
  std::vector<Sum> sums;
  cudaError_t error = LaunchInputGradSums(call, [&](const Sum& sum) {
    sums.push_back(sum);
    return cudaSuccess;
  });
  std::vector<const Sum*> order;
  for (const Sum& sum : sums) order.push_back(&sum);
  // Blocks begin in the order of sums, and the last ones to begin should take the least time.
  std::stable_sort(order.begin(), order.end(),
                   [](const Sum* a, const Sum* b) { return a->taps > b->taps; });
  for (size_t i = 0; i < order.size() && error == cudaSuccess; i += kMaxSums) {
    const size_t count = std::min<size_t>(kMaxSums, order.size() - i);
    error = Launch<false, InputGradPlans, kMaxSums>(
        stream, call, std::span(order).subspan(i, count), static_cast<int>(i));
  }
  return error;
}

}  // namespace jaxops::conv::cuda
