// The Python module jaxops._cuda.
#include <nanobind/stl/vector.h>

#include "ffi/conv_cuda.h"
#include "ffi/handlers_cuda.h"
#include "ffi/module.h"

namespace jaxops::ffi {
namespace {

nanobind::dict Registrations() {
  nanobind::dict handlers;
  handlers["jaxops_concatenate"] = Encapsulate<ConcatenateCuda>();
  handlers["jaxops_split"] = Encapsulate<SplitCuda>();
  handlers["jaxops_conv"] = Encapsulate<ConvCuda>();
  handlers["jaxops_conv_input_grad"] = Encapsulate<ConvInputGradCuda>();
  handlers["jaxops_conv_kernel_grad"] = Encapsulate<ConvKernelGradCuda>();
  handlers["jaxops_grid_sample"] = Encapsulate<GridSampleCuda>();
  handlers["jaxops_grid_sample_volume_grad"] = Encapsulate<GridSampleVolumeGradCuda>();
  handlers["jaxops_grid_sample_point_grad"] = Encapsulate<GridSamplePointGradCuda>();
  handlers["jaxops_grid_sample_backward"] = Encapsulate<GridSampleBackwardCuda>();
  handlers["jaxops_im2col"] = Encapsulate<Im2ColCuda>();
  handlers["jaxops_col2im"] = Encapsulate<Col2ImCuda>();
  handlers["jaxops_lightweight_conv"] = Encapsulate<LightweightConvCuda>();
  handlers["jaxops_lightweight_conv_filter_grad"] = Encapsulate<LightweightConvFilterGradCuda>();
  handlers["jaxops_lightweight_conv_backward"] = Encapsulate<LightweightConvBackwardCuda>();
  handlers["jaxops_sigmoid_focal_loss"] = Encapsulate<SigmoidFocalLossCuda>();
  handlers["jaxops_sigmoid_focal_loss_gradient"] = Encapsulate<SigmoidFocalLossGradientCuda>();
  handlers["jaxops_sigmoid_focal_loss_sum"] = Encapsulate<SigmoidFocalLossSumCuda>();
  handlers["jaxops_sigmoid_focal_loss_value_and_gradient"] =
      Encapsulate<SigmoidFocalLossValueAndGradientCuda>();
  handlers["jaxops_softmax_focal_loss"] = Encapsulate<SoftmaxFocalLossCuda>();
  handlers["jaxops_softmax_focal_loss_gradient"] = Encapsulate<SoftmaxFocalLossGradientCuda>();
  handlers["jaxops_softmax_focal_loss_sum"] = Encapsulate<SoftmaxFocalLossSumCuda>();
  handlers["jaxops_softmax_focal_loss_value_and_gradient"] =
      Encapsulate<SoftmaxFocalLossValueAndGradientCuda>();
  handlers["jaxops_trilinear_interpolate"] = Encapsulate<TrilinearInterpolateCuda>();
  handlers["jaxops_trilinear_feature_grad"] = Encapsulate<TrilinearFeatureGradCuda>();
  handlers["jaxops_trilinear_point_grad"] = Encapsulate<TrilinearPointGradCuda>();
  handlers["jaxops_trilinear_backward"] = Encapsulate<TrilinearBackwardCuda>();
  return handlers;
}

}  // namespace

NB_MODULE(_cuda, module) {
  DescribeBuild(module, "CUDA " JAXOPS_NVCC_VERSION " for sm " JAXOPS_CUDA_ARCHITECTURES);
  module.attr("ARCHITECTURES") = JAXOPS_CUDA_ARCHITECTURES;
  module.def("registrations", &Registrations);
  module.def("conv_split_workspace", &ConvSplitWorkspace);
  module.def("conv_is_kernel_grad_split", &ConvIsKernelGradSplit);
  module.def("conv_kernel_grad_workspace", &ConvKernelGradWorkspace);
}

}  // namespace jaxops::ffi
