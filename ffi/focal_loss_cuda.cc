// XLA FFI handlers of the focal losses on CUDA devices.
#include "cuda/focal_loss.h"
#include "ffi/cuda_status.h"
#include "ffi/focal_loss.h"
#include "ffi/handlers_cuda.h"

namespace jaxops::ffi {
namespace {

namespace xf = xla::ffi;
using focal_loss::BindAttributes;
using focal_loss::BindOperands;
using focal_loss::Decode;
using focal_loss::SigmoidBuffers;

xf::Error Run(cudaStream_t stream, const focal_loss::SigmoidAttributes& attributes,
              const SigmoidBuffers& buffers, const xf::AnyBuffer* scratch = nullptr) {
  focal_loss::Sigmoid call;
  if (xf::Error error = Decode(call, attributes, buffers); error.failure()) return error;
  int64_t splits = 0;
  void* partials = nullptr;
  if (scratch) {
    const Dimensions dims = scratch->dimensions();
    if (dims.size() != 2 || dims[0] != call.batch.size() || dims[1] < 1) {
      return InvalidArgument("sigmoid_focal_loss: partial sums must be (", call.batch.size(),
                             ", splits), got ", ToString(dims));
    }
    splits = dims[1];
    partials = scratch->untyped_data();
  }
  return ToError("sigmoid_focal_loss",
                 jaxops::focal_loss::cuda::LaunchSigmoid(stream, call, splits, partials));
}

xf::Error RunLoss(cudaStream_t stream, xf::AnyBuffer logits, xf::AnyBuffer labels,
                  xf::AnyBuffer class_ids, xf::AnyBuffer scale, xf::AnyBuffer parameters,
                  xf::RemainingArgs weight, xf::Result<xf::AnyBuffer> loss, int64_t rows,
                  int32_t power, bool has_ignored, int32_t ignored) {
  const xf::AnyBuffer buffer = *loss;
  return Run(stream, {rows, power, has_ignored, ignored},
             {logits, labels, class_ids, scale, parameters, weight, &buffer, nullptr, nullptr});
}

xf::Error RunGradient(cudaStream_t stream, xf::AnyBuffer logits, xf::AnyBuffer labels,
                      xf::AnyBuffer class_ids, xf::AnyBuffer scale, xf::AnyBuffer parameters,
                      xf::RemainingArgs weight, xf::Result<xf::AnyBuffer> gradient, int64_t rows,
                      int32_t power, bool has_ignored, int32_t ignored) {
  const xf::AnyBuffer buffer = *gradient;
  return Run(stream, {rows, power, has_ignored, ignored},
             {logits, labels, class_ids, scale, parameters, weight, nullptr, &buffer, nullptr});
}

xf::Error RunSum(cudaStream_t stream, xf::AnyBuffer logits, xf::AnyBuffer labels,
                 xf::AnyBuffer class_ids, xf::AnyBuffer scale, xf::AnyBuffer parameters,
                 xf::RemainingArgs weight, xf::Result<xf::AnyBuffer> sum,
                 xf::Result<xf::AnyBuffer> partials, int64_t rows, int32_t power, bool has_ignored,
                 int32_t ignored) {
  const xf::AnyBuffer buffer = *sum;
  const xf::AnyBuffer scratch = *partials;
  return Run(stream, {rows, power, has_ignored, ignored},
             {logits, labels, class_ids, scale, parameters, weight, nullptr, nullptr, &buffer},
             &scratch);
}

xf::Error RunValueAndGradient(cudaStream_t stream, xf::AnyBuffer logits, xf::AnyBuffer labels,
                              xf::AnyBuffer class_ids, xf::AnyBuffer scale,
                              xf::AnyBuffer parameters, xf::RemainingArgs weight,
                              xf::Result<xf::AnyBuffer> sum, xf::Result<xf::AnyBuffer> gradient,
                              xf::Result<xf::AnyBuffer> partials, int64_t rows, int32_t power,
                              bool has_ignored, int32_t ignored) {
  const xf::AnyBuffer sum_buffer = *sum;
  const xf::AnyBuffer gradient_buffer = *gradient;
  const xf::AnyBuffer scratch = *partials;
  return Run(stream, {rows, power, has_ignored, ignored},
             {logits, labels, class_ids, scale, parameters, weight, nullptr, &gradient_buffer,
              &sum_buffer},
             &scratch);
}

xf::Error RunSoftmax(cudaStream_t stream, int64_t rows, int32_t power, xf::AnyBuffer logits,
                     xf::AnyBuffer labels, xf::AnyBuffer gamma, const xf::AnyBuffer* cotangent,
                     xf::AnyBuffer result) {
  focal_loss::Softmax call;
  xf::Error error = Decode(call, rows, power, logits, labels, gamma, cotangent, result);
  if (error.failure()) return error;
  return ToError("softmax_focal_loss", jaxops::focal_loss::cuda::LaunchSoftmax(stream, call));
}

xf::Error RunRowLoss(cudaStream_t stream, xf::AnyBuffer logits, xf::AnyBuffer labels,
                     xf::AnyBuffer gamma, xf::Result<xf::AnyBuffer> loss, int64_t rows,
                     int32_t power) {
  return RunSoftmax(stream, rows, power, logits, labels, gamma, nullptr, *loss);
}

xf::Error RunRowGradient(cudaStream_t stream, xf::AnyBuffer logits, xf::AnyBuffer labels,
                         xf::AnyBuffer gamma, xf::AnyBuffer cotangent,
                         xf::Result<xf::AnyBuffer> gradient, int64_t rows, int32_t power) {
  return RunSoftmax(stream, rows, power, logits, labels, gamma, &cotangent, *gradient);
}

auto Bind() { return BindOperands(xf::Ffi::Bind().Ctx<xf::PlatformStream<cudaStream_t>>()); }
auto BindRows() {
  return xf::Ffi::Bind()
      .Ctx<xf::PlatformStream<cudaStream_t>>()
      .Arg<xf::AnyBuffer>()
      .Arg<xf::AnyBuffer>()
      .Arg<xf::AnyBuffer>();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SigmoidFocalLossCuda, RunLoss,
                              BindAttributes(Bind().Ret<xf::AnyBuffer>()),
                              {xf::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(SigmoidFocalLossGradientCuda, RunGradient,
                              BindAttributes(Bind().Ret<xf::AnyBuffer>()),
                              {xf::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(SigmoidFocalLossSumCuda, RunSum,
                              BindAttributes(Bind().Ret<xf::AnyBuffer>().Ret<xf::AnyBuffer>()),
                              {xf::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    SigmoidFocalLossValueAndGradientCuda, RunValueAndGradient,
    BindAttributes(Bind().Ret<xf::AnyBuffer>().Ret<xf::AnyBuffer>().Ret<xf::AnyBuffer>()),
    {xf::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    SoftmaxFocalLossCuda, RunRowLoss,
    BindRows().Ret<xf::AnyBuffer>().Attr<int64_t>("rows").Attr<int32_t>("power"),
    {xf::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    SoftmaxFocalLossGradientCuda, RunRowGradient,
    BindRows().Arg<xf::AnyBuffer>().Ret<xf::AnyBuffer>().Attr<int64_t>("rows").Attr<int32_t>(
        "power"),
    {xf::Traits::kCmdBufferCompatible});

}  // namespace jaxops::ffi
