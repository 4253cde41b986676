// Keys by which plans of convolutions are kept.
#ifndef JAXOPS_CUDA_CONV_PLAN_H_
#define JAXOPS_CUDA_CONV_PLAN_H_

#include <algorithm>
#include <cstdint>
#include <optional>

#include "common/conv.h"
#include "cuda/common/plan_cache.h"

namespace jaxops::conv::cuda {

// All of a call but its addresses, and the device's number of multiprocessors.
struct PlanKey {
  im2col::Window dims[kDims];
  int64_t images, channels, outputs, groups;
  int32_t dtype, result_dtype, tf32, processors;
  int64_t sum;  // of several that a call is cut into, the number

  PlanKey(const Call& call, int processors, int sum = 0)
      : images(call.images),
        channels(call.channels),
        outputs(call.outputs),
        groups(call.groups),
        dtype(static_cast<int32_t>(call.dtype)),
        result_dtype(static_cast<int32_t>(call.result_dtype)),
        tf32(call.tf32),
        processors(processors),
        sum(sum) {
    std::copy_n(call.dims, kDims, dims);
  }
};

// The plan that make() returns for a call, made once. Tag tells plans of one type apart.
template <typename Tag, typename Make>
auto KeptPlan(const PlanKey& key, Make&& make) {
  using Plan = decltype(make());
  return jaxops::cuda::Plans<PlanKey, Plan, Tag>().Get(key, make);
}

// The parameters that fill_in(params) makes for a call, made once; none where it returns false.
template <typename Params, typename FillIn>
auto KeptParams(const PlanKey& key, FillIn&& fill_in) {
  return KeptPlan<Params>(key, [&]() -> std::optional<Params> {
    Params params{};
    return fill_in(params) ? std::optional(params) : std::nullopt;
  });
}

}  // namespace jaxops::conv::cuda

#endif  // JAXOPS_CUDA_CONV_PLAN_H_
