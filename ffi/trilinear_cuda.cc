// XLA FFI handlers of trilinear interpolation in cells on CUDA devices.
#include "cuda/trilinear/launch.h"
#include "ffi/cuda_status.h"
#include "ffi/handlers_cuda.h"
#include "ffi/trilinear.h"

namespace jaxops::ffi {
namespace {

namespace xf = xla::ffi;
using trilinear::Call;

auto On(cudaStream_t stream) {
  return [stream](const Call& call) {
    return ToError("trilinear_interpolate", jaxops::trilinear::cuda::LaunchCells(stream, call));
  };
}

xf::Error RunInterpolate(cudaStream_t stream, xf::AnyBuffer features, xf::AnyBuffer points,
                         xf::RemainingArgs directions, xf::Result<xf::AnyBuffer> out) {
  return trilinear::Sample(On(stream), features, points, directions, *out);
}

xf::Error RunFeatureGrad(cudaStream_t stream, xf::AnyBuffer points, xf::AnyBuffer cotangent,
                         xf::RemainingArgs directions, xf::Result<xf::AnyBuffer> dfeatures) {
  return trilinear::FeatureGrad(On(stream), points, cotangent, directions, *dfeatures);
}

xf::Error RunPointGrad(cudaStream_t stream, xf::AnyBuffer features, xf::AnyBuffer points,
                       xf::AnyBuffer cotangent, xf::RemainingArgs directions,
                       xf::Result<xf::AnyBuffer> dpoints) {
  return trilinear::PointGrad(On(stream), features, points, cotangent, directions, *dpoints);
}

xf::Error RunBackward(cudaStream_t stream, xf::AnyBuffer features, xf::AnyBuffer points,
                      xf::AnyBuffer cotangent, xf::RemainingArgs directions,
                      xf::Result<xf::AnyBuffer> dfeatures, xf::Result<xf::AnyBuffer> dpoints) {
  return trilinear::Backward(On(stream), features, points, cotangent, directions, *dfeatures,
                             *dpoints);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TrilinearInterpolateCuda, RunInterpolate,
                              xf::Ffi::Bind()
                                  .Ctx<xf::PlatformStream<cudaStream_t>>()
                                  .Arg<xf::AnyBuffer>()
                                  .Arg<xf::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xf::AnyBuffer>(),
                              {xf::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(TrilinearFeatureGradCuda, RunFeatureGrad,
                              xf::Ffi::Bind()
                                  .Ctx<xf::PlatformStream<cudaStream_t>>()
                                  .Arg<xf::AnyBuffer>()
                                  .Arg<xf::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xf::AnyBuffer>(),
                              {xf::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(TrilinearPointGradCuda, RunPointGrad,
                              xf::Ffi::Bind()
                                  .Ctx<xf::PlatformStream<cudaStream_t>>()
                                  .Arg<xf::AnyBuffer>()
                                  .Arg<xf::AnyBuffer>()
                                  .Arg<xf::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xf::AnyBuffer>(),
                              {xf::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(TrilinearBackwardCuda, RunBackward,
                              xf::Ffi::Bind()
                                  .Ctx<xf::PlatformStream<cudaStream_t>>()
                                  .Arg<xf::AnyBuffer>()
                                  .Arg<xf::AnyBuffer>()
                                  .Arg<xf::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xf::AnyBuffer>()
                                  .Ret<xf::AnyBuffer>(),
                              {xf::Traits::kCmdBufferCompatible});

}  // namespace jaxops::ffi
