// XLA FFI handlers that sample volumes at points on CUDA devices.
#include "cuda/grid_sample/launch.h"
#include "ffi/cuda_status.h"
#include "ffi/grid_sample.h"
#include "ffi/handlers_cuda.h"

namespace jaxops::ffi {
namespace {

namespace xf = xla::ffi;
using grid_sample::Attributes;
using grid_sample::BindAttributes;
using grid_sample::Buffers;
using grid_sample::Call;

xf::Error Run(cudaStream_t stream, const Attributes& attributes, const Buffers& buffers,
              xf::RemainingArgs directions, const xf::RemainingRets* scratch = nullptr) {
  Call call = {};
  xf::Error error = Decode(call, attributes, buffers, directions, scratch);
  if (error.failure()) return error;
  return ToError("grid_sample", jaxops::grid_sample::cuda::LaunchSample(stream, call));
}

xf::Error RunSample(cudaStream_t stream, xf::AnyBuffer volume, xf::AnyBuffer points,
                    xf::RemainingArgs directions, xf::Result<xf::AnyBuffer> out,
                    xf::RemainingRets scratch, int64_t point_rank, int32_t method,
                    int32_t padding_mode, bool align_corners, bool deterministic) {
  const xf::AnyBuffer out_buffer = *out;
  return Run(stream, {point_rank, method, padding_mode, align_corners, deterministic},
             {&volume, &points, nullptr, &out_buffer, nullptr, nullptr}, directions, &scratch);
}

xf::Error RunVolumeGrad(cudaStream_t stream, xf::AnyBuffer points, xf::AnyBuffer cotangent,
                        xf::RemainingArgs directions, xf::Result<xf::AnyBuffer> dvolume,
                        xf::RemainingRets scratch, int64_t point_rank, int32_t method,
                        int32_t padding_mode, bool align_corners, bool deterministic) {
  const xf::AnyBuffer dvolume_buffer = *dvolume;
  return Run(stream, {point_rank, method, padding_mode, align_corners, deterministic},
             {nullptr, &points, &cotangent, nullptr, &dvolume_buffer, nullptr}, directions,
             &scratch);
}

xf::Error RunPointGrad(cudaStream_t stream, xf::AnyBuffer volume, xf::AnyBuffer points,
                       xf::AnyBuffer cotangent, xf::RemainingArgs directions,
                       xf::Result<xf::AnyBuffer> dpoints, int64_t point_rank, int32_t method,
                       int32_t padding_mode, bool align_corners, bool deterministic) {
  const xf::AnyBuffer dpoints_buffer = *dpoints;
  return Run(stream, {point_rank, method, padding_mode, align_corners, deterministic},
             {&volume, &points, &cotangent, nullptr, nullptr, &dpoints_buffer}, directions);
}

xf::Error RunBackward(cudaStream_t stream, xf::AnyBuffer volume, xf::AnyBuffer points,
                      xf::AnyBuffer cotangent, xf::RemainingArgs directions,
                      xf::Result<xf::AnyBuffer> dvolume, xf::Result<xf::AnyBuffer> dpoints,
                      xf::RemainingRets scratch, int64_t point_rank, int32_t method,
                      int32_t padding_mode, bool align_corners, bool deterministic) {
  const xf::AnyBuffer dvolume_buffer = *dvolume;
  const xf::AnyBuffer dpoints_buffer = *dpoints;
  return Run(stream, {point_rank, method, padding_mode, align_corners, deterministic},
             {&volume, &points, &cotangent, nullptr, &dvolume_buffer, &dpoints_buffer}, directions,
             &scratch);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(GridSampleCuda, RunSample,
                              BindAttributes(xf::Ffi::Bind()
                                                 .Ctx<xf::PlatformStream<cudaStream_t>>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .RemainingArgs()
                                                 .Ret<xf::AnyBuffer>()
                                                 .RemainingRets()),
                              {xf::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(GridSampleVolumeGradCuda, RunVolumeGrad,
                              BindAttributes(xf::Ffi::Bind()
                                                 .Ctx<xf::PlatformStream<cudaStream_t>>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .RemainingArgs()
                                                 .Ret<xf::AnyBuffer>()
                                                 .RemainingRets()),
                              {xf::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(GridSamplePointGradCuda, RunPointGrad,
                              BindAttributes(xf::Ffi::Bind()
                                                 .Ctx<xf::PlatformStream<cudaStream_t>>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .RemainingArgs()
                                                 .Ret<xf::AnyBuffer>()),
                              {xf::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(GridSampleBackwardCuda, RunBackward,
                              BindAttributes(xf::Ffi::Bind()
                                                 .Ctx<xf::PlatformStream<cudaStream_t>>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .RemainingArgs()
                                                 .Ret<xf::AnyBuffer>()
                                                 .Ret<xf::AnyBuffer>()
                                                 .RemainingRets()),
                              {xf::Traits::kCmdBufferCompatible});

}  // namespace jaxops::ffi
