// XLA FFI handlers of the focal losses on the host.
#include "cpu/focal_loss.h"
#include "ffi/focal_loss.h"
#include "ffi/handlers_cpu.h"
#include "ffi/thread_pool.h"
#include "ffi/untouched_memory.h"

namespace jaxops::ffi {
namespace {

namespace xf = xla::ffi;
using focal_loss::BindAttributes;
using focal_loss::BindOperands;
using focal_loss::BindRowAttributes;
using focal_loss::BindScaledRows;
using focal_loss::Decode;
using focal_loss::SigmoidBuffers;

xf::Error Run(xf::ThreadPool& pool, const xf::Dictionary& attributes,
              const SigmoidBuffers& buffers) {
  focal_loss::Sigmoid call;
  if (xf::Error error = Decode(call, attributes, buffers); error.failure()) return error;
  if (buffers.loss != nullptr) ExpectWrites(*buffers.loss);
  if (buffers.gradient != nullptr) ExpectWrites(*buffers.gradient);
  return RunOnHost(pool, [&](const cpu::ParallelFor& parallel_for) {
    jaxops::focal_loss::cpu::RunSigmoid(call, parallel_for);
  });
}

xf::Error RunLoss(xf::ThreadPool pool, xf::AnyBuffer logits, xf::AnyBuffer labels,
                  xf::AnyBuffer class_ids, xf::AnyBuffer scale, xf::AnyBuffer parameters,
                  xf::RemainingArgs weight, xf::Result<xf::AnyBuffer> loss,
                  xf::Dictionary attributes) {
  const xf::AnyBuffer buffer = *loss;
  return Run(pool, attributes,
             {logits, labels, class_ids, scale, parameters, weight, &buffer, nullptr, nullptr});
}

xf::Error RunGradient(xf::ThreadPool pool, xf::AnyBuffer logits, xf::AnyBuffer labels,
                      xf::AnyBuffer class_ids, xf::AnyBuffer scale, xf::AnyBuffer parameters,
                      xf::RemainingArgs weight, xf::Result<xf::AnyBuffer> gradient,
                      xf::Dictionary attributes) {
  const xf::AnyBuffer buffer = *gradient;
  return Run(pool, attributes,
             {logits, labels, class_ids, scale, parameters, weight, nullptr, &buffer, nullptr});
}

xf::Error RunSum(xf::ThreadPool pool, xf::AnyBuffer logits, xf::AnyBuffer labels,
                 xf::AnyBuffer class_ids, xf::AnyBuffer scale, xf::AnyBuffer parameters,
                 xf::RemainingArgs weight, xf::Result<xf::AnyBuffer> sum,
                 xf::Dictionary attributes) {
  const xf::AnyBuffer buffer = *sum;
  return Run(pool, attributes,
             {logits, labels, class_ids, scale, parameters, weight, nullptr, nullptr, &buffer});
}

xf::Error RunValueAndGradient(xf::ThreadPool pool, xf::AnyBuffer logits, xf::AnyBuffer labels,
                              xf::AnyBuffer class_ids, xf::AnyBuffer scale,
                              xf::AnyBuffer parameters, xf::RemainingArgs weight,
                              xf::Result<xf::AnyBuffer> sum, xf::Result<xf::AnyBuffer> gradient,
                              xf::Dictionary attributes) {
  const xf::AnyBuffer sum_buffer = *sum;
  const xf::AnyBuffer gradient_buffer = *gradient;
  return Run(pool, attributes,
             {logits, labels, class_ids, scale, parameters, weight, nullptr, &gradient_buffer,
              &sum_buffer});
}

xf::Error RunSoftmax(xf::ThreadPool& pool, const focal_loss::SoftmaxAttributes& attributes,
                     const focal_loss::SoftmaxBuffers& buffers) {
  focal_loss::Softmax call;
  if (xf::Error error = Decode(call, attributes, buffers); error.failure()) return error;
  if (buffers.loss != nullptr) ExpectWrites(*buffers.loss);
  if (buffers.gradient != nullptr) ExpectWrites(*buffers.gradient);
  return RunOnHost(pool, [&](const cpu::ParallelFor& parallel_for) {
    jaxops::focal_loss::cpu::RunSoftmax(call, parallel_for);
  });
}

xf::Error RunRowLoss(xf::ThreadPool pool, xf::AnyBuffer logits, xf::AnyBuffer labels,
                     xf::AnyBuffer gamma, xf::Result<xf::AnyBuffer> loss, int64_t rows,
                     int32_t power) {
  const xf::AnyBuffer buffer = *loss;
  return RunSoftmax(pool, {rows, power},
                    {logits, labels, nullptr, gamma, nullptr, &buffer, nullptr, nullptr});
}

xf::Error RunRowGradient(xf::ThreadPool pool, xf::AnyBuffer logits, xf::AnyBuffer labels,
                         xf::AnyBuffer scale, xf::AnyBuffer gamma, xf::RemainingArgs weight,
                         xf::Result<xf::AnyBuffer> gradient, int64_t rows, int32_t power) {
  const xf::AnyBuffer buffer = *gradient;
  return RunSoftmax(pool, {rows, power},
                    {logits, labels, &scale, gamma, &weight, nullptr, &buffer, nullptr});
}

xf::Error RunRowSum(xf::ThreadPool pool, xf::AnyBuffer logits, xf::AnyBuffer labels,
                    xf::AnyBuffer scale, xf::AnyBuffer gamma, xf::RemainingArgs weight,
                    xf::Result<xf::AnyBuffer> sum, int64_t rows, int32_t power) {
  const xf::AnyBuffer buffer = *sum;
  return RunSoftmax(pool, {rows, power},
                    {logits, labels, &scale, gamma, &weight, nullptr, nullptr, &buffer});
}

xf::Error RunRowValueAndGradient(xf::ThreadPool pool, xf::AnyBuffer logits, xf::AnyBuffer labels,
                                 xf::AnyBuffer scale, xf::AnyBuffer gamma, xf::RemainingArgs weight,
                                 xf::Result<xf::AnyBuffer> sum, xf::Result<xf::AnyBuffer> gradient,
                                 int64_t rows, int32_t power) {
  const xf::AnyBuffer sum_buffer = *sum;
  const xf::AnyBuffer gradient_buffer = *gradient;
  return RunSoftmax(
      pool, {rows, power},
      {logits, labels, &scale, gamma, &weight, nullptr, &gradient_buffer, &sum_buffer});
}

auto Bind() { return BindOperands(xf::Ffi::Bind().Ctx<xf::ThreadPool>()); }
auto BindRows() { return BindScaledRows(xf::Ffi::Bind().Ctx<xf::ThreadPool>()); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SigmoidFocalLossCpu, RunLoss,
                              BindAttributes(Bind().Ret<xf::AnyBuffer>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(SigmoidFocalLossGradientCpu, RunGradient,
                              BindAttributes(Bind().Ret<xf::AnyBuffer>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(SigmoidFocalLossSumCpu, RunSum,
                              BindAttributes(Bind().Ret<xf::AnyBuffer>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(SigmoidFocalLossValueAndGradientCpu, RunValueAndGradient,
                              BindAttributes(Bind().Ret<xf::AnyBuffer>().Ret<xf::AnyBuffer>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(SoftmaxFocalLossCpu, RunRowLoss,
                              BindRowAttributes(xf::Ffi::Bind()
                                                    .Ctx<xf::ThreadPool>()
                                                    .Arg<xf::AnyBuffer>()
                                                    .Arg<xf::AnyBuffer>()
                                                    .Arg<xf::AnyBuffer>()
                                                    .Ret<xf::AnyBuffer>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(SoftmaxFocalLossGradientCpu, RunRowGradient,
                              BindRowAttributes(BindRows().Ret<xf::AnyBuffer>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(SoftmaxFocalLossSumCpu, RunRowSum,
                              BindRowAttributes(BindRows().Ret<xf::AnyBuffer>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    SoftmaxFocalLossValueAndGradientCpu, RunRowValueAndGradient,
    BindRowAttributes(BindRows().Ret<xf::AnyBuffer>().Ret<xf::AnyBuffer>()));

}  // namespace jaxops::ffi
