// XLA FFI handlers of the lightweight convolution on the host.
#include "cpu/lightweight_conv.h"
#include "ffi/handlers_cpu.h"
#include "ffi/lightweight_conv.h"
#include "ffi/thread_pool.h"
#include "ffi/untouched_memory.h"

namespace jaxops::ffi {
namespace {

namespace xf = xla::ffi;
using lightweight_conv::Attributes;
using lightweight_conv::BackwardBuffers;
using lightweight_conv::BindAttributes;

xf::Error RunForward(xf::ThreadPool pool, xf::AnyBuffer x, xf::AnyBuffer weight,
                     xf::RemainingArgs bias, xf::Result<xf::AnyBuffer> y, int64_t padding,
                     int64_t dilation, int32_t data_format, int32_t activation, bool flip_taps) {
  lightweight_conv::Forward forward;
  const Attributes attributes{padding, dilation, data_format, activation, flip_taps};
  if (xf::Error error = Decode(forward, attributes, x, weight, bias, y); error.failure()) {
    return error;
  }
  ExpectWrites(*y);
  return RunOnHost(pool, [&](const cpu::ParallelFor& parallel_for) {
    jaxops::lightweight_conv::cpu::RunForward(forward, parallel_for);
  });
}

xf::Error RunSums(xf::ThreadPool pool, const BackwardBuffers& buffers,
                  const Attributes& attributes) {
  lightweight_conv::Backward backward;
  if (xf::Error error = Decode(backward, attributes, buffers); error.failure()) return error;
  if (buffers.dx != nullptr) ExpectWrites(*buffers.dx);
  return RunOnHost(pool, [&](const cpu::ParallelFor& parallel_for) {
    jaxops::lightweight_conv::cpu::RunBackward(backward, parallel_for);
  });
}

xf::Error RunFilterGrad(xf::ThreadPool pool, xf::AnyBuffer x, xf::AnyBuffer g,
                        xf::Result<xf::AnyBuffer> dweight, int64_t padding, int64_t dilation,
                        int32_t data_format, int32_t activation, bool flip_taps) {
  return RunSums(pool, {x, g, *dweight, nullptr, nullptr, nullptr},
                 {padding, dilation, data_format, activation, flip_taps});
}

xf::Error RunBackward(xf::ThreadPool pool, xf::AnyBuffer x, xf::AnyBuffer weight, xf::AnyBuffer g,
                      xf::Result<xf::AnyBuffer> dx, xf::Result<xf::AnyBuffer> dweight,
                      xf::RemainingRets rest, int64_t padding, int64_t dilation,
                      int32_t data_format, int32_t activation, bool flip_taps) {
  const Attributes attributes{padding, dilation, data_format, activation, flip_taps};
  const xf::AnyBuffer dx_buffer = *dx;
  if (rest.size() == 0) {
    return RunSums(pool, {x, g, *dweight, &weight, &dx_buffer, nullptr}, attributes);
  }
  if (rest.size() > 1) {
    return InvalidArgument("lightweight_conv gradient: more results than dx, dweight and dbias");
  }
  xf::ErrorOr<xf::Result<xf::AnyBuffer>> result = rest.get<xf::AnyBuffer>(0);
  if (!result) return result.error();
  const xf::AnyBuffer dbias = **result;
  return RunSums(pool, {x, g, *dweight, &weight, &dx_buffer, &dbias}, attributes);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(LightweightConvCpu, RunForward,
                              BindAttributes(xf::Ffi::Bind()
                                                 .Ctx<xf::ThreadPool>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .RemainingArgs()
                                                 .Ret<xf::AnyBuffer>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(LightweightConvFilterGradCpu, RunFilterGrad,
                              BindAttributes(xf::Ffi::Bind()
                                                 .Ctx<xf::ThreadPool>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .Ret<xf::AnyBuffer>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(LightweightConvBackwardCpu, RunBackward,
                              BindAttributes(xf::Ffi::Bind()
                                                 .Ctx<xf::ThreadPool>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .Ret<xf::AnyBuffer>()
                                                 .Ret<xf::AnyBuffer>()
                                                 .RemainingRets()));

}  // namespace jaxops::ffi
