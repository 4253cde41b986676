// The Python module jaxops._cpu.
#include <nanobind/ndarray.h>

#include "common/fast_divide.h"
#include "ffi/handlers_cpu.h"
#include "ffi/module.h"

namespace jaxops::ffi {
namespace {

nanobind::dict Registrations() {
  nanobind::dict handlers;
  handlers["jaxops_concatenate"] = Encapsulate<ConcatenateCpu>();
  handlers["jaxops_split"] = Encapsulate<SplitCpu>();
  handlers["jaxops_grid_sample"] = Encapsulate<GridSampleCpu>();
  handlers["jaxops_grid_sample_volume_grad"] = Encapsulate<GridSampleVolumeGradCpu>();
  handlers["jaxops_grid_sample_point_grad"] = Encapsulate<GridSamplePointGradCpu>();
  handlers["jaxops_grid_sample_backward"] = Encapsulate<GridSampleBackwardCpu>();
  handlers["jaxops_im2col"] = Encapsulate<Im2ColCpu>();
  handlers["jaxops_col2im"] = Encapsulate<Col2ImCpu>();
  handlers["jaxops_lightweight_conv"] = Encapsulate<LightweightConvCpu>();
  handlers["jaxops_lightweight_conv_filter_grad"] = Encapsulate<LightweightConvFilterGradCpu>();
  handlers["jaxops_lightweight_conv_backward"] = Encapsulate<LightweightConvBackwardCpu>();
  handlers["jaxops_sigmoid_focal_loss"] = Encapsulate<SigmoidFocalLossCpu>();
  handlers["jaxops_sigmoid_focal_loss_gradient"] = Encapsulate<SigmoidFocalLossGradientCpu>();
  handlers["jaxops_sigmoid_focal_loss_sum"] = Encapsulate<SigmoidFocalLossSumCpu>();
  handlers["jaxops_sigmoid_focal_loss_value_and_gradient"] =
      Encapsulate<SigmoidFocalLossValueAndGradientCpu>();
  handlers["jaxops_softmax_focal_loss"] = Encapsulate<SoftmaxFocalLossCpu>();
  handlers["jaxops_softmax_focal_loss_gradient"] = Encapsulate<SoftmaxFocalLossGradientCpu>();
  handlers["jaxops_softmax_focal_loss_sum"] = Encapsulate<SoftmaxFocalLossSumCpu>();
  handlers["jaxops_softmax_focal_loss_value_and_gradient"] =
      Encapsulate<SoftmaxFocalLossValueAndGradientCpu>();
  handlers["jaxops_trilinear_interpolate"] = Encapsulate<TrilinearInterpolateCpu>();
  handlers["jaxops_trilinear_feature_grad"] = Encapsulate<TrilinearFeatureGradCpu>();
  handlers["jaxops_trilinear_point_grad"] = Encapsulate<TrilinearPointGradCpu>();
  handlers["jaxops_trilinear_backward"] = Encapsulate<TrilinearBackwardCpu>();
  return handlers;
}

// Lets the tests hold the division that kernels index with against the plain operator.
template <typename UInt>
void DivideInPlace(nanobind::ndarray<UInt, nanobind::shape<-1>, nanobind::c_contig> numbers,
                   int64_t divisor) {
  const FastDividerOf<UInt> divider(divisor);
  for (size_t i = 0; i < numbers.size(); ++i) numbers(i) = divider.Quotient(numbers(i));
}

}  // namespace

NB_MODULE(_cpu, module) {
  DescribeBuild(module, "C++ for " JAXOPS_CPU_ISAS);
  module.attr("CPU_ONLY") = JAXOPS_CPU_ONLY;
  module.def("registrations", &Registrations);
  // A converted array would be a copy, whose quotients nobody sees.
  const auto numbers = nanobind::arg("numbers").noconvert();
  module.def("divide_in_place", &DivideInPlace<uint32_t>, numbers, nanobind::arg("divisor"));
  module.def("divide_in_place", &DivideInPlace<uint64_t>, numbers, nanobind::arg("divisor"));
}

}  // namespace jaxops::ffi
