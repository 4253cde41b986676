// XLA FFI handlers that sample volumes at points on the host.
#include "cpu/grid_sample.h"
#include "ffi/grid_sample.h"
#include "ffi/handlers_cpu.h"
#include "ffi/thread_pool.h"

namespace jaxops::ffi {
namespace {

namespace xf = xla::ffi;
using grid_sample::Attributes;
using grid_sample::BindAttributes;
using grid_sample::Buffers;
using grid_sample::Call;

xf::Error Run(xf::ThreadPool& pool, const Attributes& attributes, const Buffers& buffers,
              xf::RemainingArgs directions) {
  Call call = {};
  xf::Error error = Decode(call, attributes, buffers, directions, nullptr);
  if (error.failure()) return error;
  return RunOnHost(pool, [&](const cpu::ParallelFor& parallel_for) {
    jaxops::grid_sample::cpu::Run(call, parallel_for);
  });
}

xf::Error RunSample(xf::ThreadPool pool, xf::AnyBuffer volume, xf::AnyBuffer points,
                    xf::RemainingArgs directions, xf::Result<xf::AnyBuffer> out, int64_t point_rank,
                    int32_t method, int32_t padding_mode, bool align_corners, bool deterministic) {
  const xf::AnyBuffer out_buffer = *out;
  return Run(pool, {point_rank, method, padding_mode, align_corners, deterministic},
             {&volume, &points, nullptr, &out_buffer, nullptr, nullptr}, directions);
}

xf::Error RunVolumeGrad(xf::ThreadPool pool, xf::AnyBuffer points, xf::AnyBuffer cotangent,
                        xf::RemainingArgs directions, xf::Result<xf::AnyBuffer> dvolume,
                        int64_t point_rank, int32_t method, int32_t padding_mode,
                        bool align_corners, bool deterministic) {
  const xf::AnyBuffer dvolume_buffer = *dvolume;
  return Run(pool, {point_rank, method, padding_mode, align_corners, deterministic},
             {nullptr, &points, &cotangent, nullptr, &dvolume_buffer, nullptr}, directions);
}

xf::Error RunPointGrad(xf::ThreadPool pool, xf::AnyBuffer volume, xf::AnyBuffer points,
                       xf::AnyBuffer cotangent, xf::RemainingArgs directions,
                       xf::Result<xf::AnyBuffer> dpoints, int64_t point_rank, int32_t method,
                       int32_t padding_mode, bool align_corners, bool deterministic) {
  const xf::AnyBuffer dpoints_buffer = *dpoints;
  return Run(pool, {point_rank, method, padding_mode, align_corners, deterministic},
             {&volume, &points, &cotangent, nullptr, nullptr, &dpoints_buffer}, directions);
}

xf::Error RunBackward(xf::ThreadPool pool, xf::AnyBuffer volume, xf::AnyBuffer points,
                      xf::AnyBuffer cotangent, xf::RemainingArgs directions,
                      xf::Result<xf::AnyBuffer> dvolume, xf::Result<xf::AnyBuffer> dpoints,
                      int64_t point_rank, int32_t method, int32_t padding_mode, bool align_corners,
                      bool deterministic) {
  const xf::AnyBuffer dvolume_buffer = *dvolume;
  const xf::AnyBuffer dpoints_buffer = *dpoints;
  return Run(pool, {point_rank, method, padding_mode, align_corners, deterministic},
             {&volume, &points, &cotangent, nullptr, &dvolume_buffer, &dpoints_buffer}, directions);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(GridSampleCpu, RunSample,
                              BindAttributes(xf::Ffi::Bind()
                                                 .Ctx<xf::ThreadPool>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .RemainingArgs()
                                                 .Ret<xf::AnyBuffer>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(GridSampleVolumeGradCpu, RunVolumeGrad,
                              BindAttributes(xf::Ffi::Bind()
                                                 .Ctx<xf::ThreadPool>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .RemainingArgs()
                                                 .Ret<xf::AnyBuffer>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(GridSamplePointGradCpu, RunPointGrad,
                              BindAttributes(xf::Ffi::Bind()
                                                 .Ctx<xf::ThreadPool>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .RemainingArgs()
                                                 .Ret<xf::AnyBuffer>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(GridSampleBackwardCpu, RunBackward,
                              BindAttributes(xf::Ffi::Bind()
                                                 .Ctx<xf::ThreadPool>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .RemainingArgs()
                                                 .Ret<xf::AnyBuffer>()
                                                 .Ret<xf::AnyBuffer>()));

}  // namespace jaxops::ffi
