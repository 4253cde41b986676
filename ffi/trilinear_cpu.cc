// XLA FFI handlers of trilinear interpolation in cells on the host.
#include "cpu/trilinear.h"
#include "ffi/handlers_cpu.h"
#include "ffi/thread_pool.h"
#include "ffi/trilinear.h"

namespace jaxops::ffi {
namespace {

namespace xf = xla::ffi;
using trilinear::Call;

auto On(xf::ThreadPool& pool) {
  return [&pool](const Call& call) {
    return RunOnHost(pool, [&](const cpu::ParallelFor& parallel_for) {
      jaxops::trilinear::cpu::Run(call, parallel_for);
    });
  };
}

xf::Error RunInterpolate(xf::ThreadPool pool, xf::AnyBuffer features, xf::AnyBuffer points,
                         xf::RemainingArgs directions, xf::Result<xf::AnyBuffer> out) {
  return trilinear::Sample(On(pool), features, points, directions, *out);
}

xf::Error RunFeatureGrad(xf::ThreadPool pool, xf::AnyBuffer points, xf::AnyBuffer cotangent,
                         xf::RemainingArgs directions, xf::Result<xf::AnyBuffer> dfeatures) {
  return trilinear::FeatureGrad(On(pool), points, cotangent, directions, *dfeatures);
}

xf::Error RunPointGrad(xf::ThreadPool pool, xf::AnyBuffer features, xf::AnyBuffer points,
                       xf::AnyBuffer cotangent, xf::RemainingArgs directions,
                       xf::Result<xf::AnyBuffer> dpoints) {
  return trilinear::PointGrad(On(pool), features, points, cotangent, directions, *dpoints);
}

xf::Error RunBackward(xf::ThreadPool pool, xf::AnyBuffer features, xf::AnyBuffer points,
                      xf::AnyBuffer cotangent, xf::RemainingArgs directions,
                      xf::Result<xf::AnyBuffer> dfeatures, xf::Result<xf::AnyBuffer> dpoints) {
  return trilinear::Backward(On(pool), features, points, cotangent, directions, *dfeatures,
                             *dpoints);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TrilinearInterpolateCpu, RunInterpolate,
                              xf::Ffi::Bind()
                                  .Ctx<xf::ThreadPool>()
                                  .Arg<xf::AnyBuffer>()
                                  .Arg<xf::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xf::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(TrilinearFeatureGradCpu, RunFeatureGrad,
                              xf::Ffi::Bind()
                                  .Ctx<xf::ThreadPool>()
                                  .Arg<xf::AnyBuffer>()
                                  .Arg<xf::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xf::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(TrilinearPointGradCpu, RunPointGrad,
                              xf::Ffi::Bind()
                                  .Ctx<xf::ThreadPool>()
                                  .Arg<xf::AnyBuffer>()
                                  .Arg<xf::AnyBuffer>()
                                  .Arg<xf::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xf::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(TrilinearBackwardCpu, RunBackward,
                              xf::Ffi::Bind()
                                  .Ctx<xf::ThreadPool>()
                                  .Arg<xf::AnyBuffer>()
                                  .Arg<xf::AnyBuffer>()
                                  .Arg<xf::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xf::AnyBuffer>()
                                  .Ret<xf::AnyBuffer>());

}  // namespace jaxops::ffi
