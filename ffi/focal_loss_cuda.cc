// XLA FFI handlers of the focal losses on CUDA devices.
#include "cuda/focal_loss/launch.h"
#include "ffi/cuda_status.h"
#include "ffi/focal_loss.h"
#include "ffi/handlers_cuda.h"

namespace jaxops::ffi {
namespace {

namespace xf = xla::ffi;
using focal_loss::BindAttributes;
using focal_loss::BindOperands;
using focal_loss::BindRowAttributes;
using focal_loss::BindScaledRows;
using focal_loss::Decode;
using focal_loss::SigmoidBuffers;

// Space for the partial sums of a call, of which there are as many as Python found in its shapes.
struct Partials {
  int64_t splits = 0;
  void* data = nullptr;
};

xf::Error FindPartials(Partials& partials, const char* name, int64_t entries, DType dtype,
                       const xf::AnyBuffer* scratch) {
  if (!scratch) return xf::Error::Success();
  const Dimensions dims = scratch->dimensions();
  const xf::DataType type = dtype == DType::kF64 ? xf::DataType::F64 : xf::DataType::F32;
  if (scratch->element_type() != type || dims.size() != 2 || dims[0] != entries || dims[1] < 1 ||
      dims[1] > INT32_MAX) {
    return InvalidArgument(name, ": partial sums must be (", entries, ", splits) of type ",
                           static_cast<int>(type), ", got ", ToString(dims), " of type ",
                           static_cast<int>(scratch->element_type()));
  }
  partials = {dims[1], scratch->untyped_data()};
  return xf::Error::Success();
}

xf::Error Run(cudaStream_t stream, const xf::Dictionary& attributes, const SigmoidBuffers& buffers,
              const xf::AnyBuffer* scratch = nullptr) {
  constexpr char kName[] = "sigmoid_focal_loss";
  focal_loss::Sigmoid call;
  if (xf::Error error = Decode(call, attributes, buffers); error.failure()) return error;
  Partials partials;
  xf::Error error = FindPartials(partials, kName, call.batch.size(), call.dtype, scratch);
  if (error.failure()) return error;
  return ToError(
      kName, jaxops::focal_loss::cuda::LaunchSigmoid(stream, call, partials.splits, partials.data));
}

xf::Error RunLoss(cudaStream_t stream, xf::AnyBuffer logits, xf::AnyBuffer labels,
                  xf::AnyBuffer class_ids, xf::AnyBuffer scale, xf::AnyBuffer parameters,
                  xf::RemainingArgs weight, xf::Result<xf::AnyBuffer> loss,
                  xf::Dictionary attributes) {
  const xf::AnyBuffer buffer = *loss;
  return Run(stream, attributes,
             {logits, labels, class_ids, scale, parameters, weight, &buffer, nullptr, nullptr});
}

xf::Error RunGradient(cudaStream_t stream, xf::AnyBuffer logits, xf::AnyBuffer labels,
                      xf::AnyBuffer class_ids, xf::AnyBuffer scale, xf::AnyBuffer parameters,
                      xf::RemainingArgs weight, xf::Result<xf::AnyBuffer> gradient,
                      xf::Dictionary attributes) {
  const xf::AnyBuffer buffer = *gradient;
  return Run(stream, attributes,
             {logits, labels, class_ids, scale, parameters, weight, nullptr, &buffer, nullptr});
}

xf::Error RunSum(cudaStream_t stream, xf::AnyBuffer logits, xf::AnyBuffer labels,
                 xf::AnyBuffer class_ids, xf::AnyBuffer scale, xf::AnyBuffer parameters,
                 xf::RemainingArgs weight, xf::Result<xf::AnyBuffer> sum,
                 xf::Result<xf::AnyBuffer> partials, xf::Dictionary attributes) {
  const xf::AnyBuffer buffer = *sum;
  const xf::AnyBuffer scratch = *partials;
  return Run(stream, attributes,
             {logits, labels, class_ids, scale, parameters, weight, nullptr, nullptr, &buffer},
             &scratch);
}

xf::Error RunValueAndGradient(cudaStream_t stream, xf::AnyBuffer logits, xf::AnyBuffer labels,
                              xf::AnyBuffer class_ids, xf::AnyBuffer scale,
                              xf::AnyBuffer parameters, xf::RemainingArgs weight,
                              xf::Result<xf::AnyBuffer> sum, xf::Result<xf::AnyBuffer> gradient,
                              xf::Result<xf::AnyBuffer> partials, xf::Dictionary attributes) {
  const xf::AnyBuffer sum_buffer = *sum;
  const xf::AnyBuffer gradient_buffer = *gradient;
  const xf::AnyBuffer scratch = *partials;
  return Run(stream, attributes,
             {logits, labels, class_ids, scale, parameters, weight, nullptr, &gradient_buffer,
              &sum_buffer},
             &scratch);
}

xf::Error RunSoftmax(cudaStream_t stream, const focal_loss::SoftmaxAttributes& attributes,
                     const focal_loss::SoftmaxBuffers& buffers,
                     const xf::AnyBuffer* scratch = nullptr) {
  constexpr char kName[] = "softmax_focal_loss";
  focal_loss::Softmax call;
  if (xf::Error error = Decode(call, attributes, buffers); error.failure()) return error;
  Partials partials;
  xf::Error error = FindPartials(partials, kName, call.batch.size(), call.dtype, scratch);
  if (error.failure()) return error;
  return ToError(
      kName, jaxops::focal_loss::cuda::LaunchSoftmax(stream, call, partials.splits, partials.data));
}

xf::Error RunRowLoss(cudaStream_t stream, xf::AnyBuffer logits, xf::AnyBuffer labels,
                     xf::AnyBuffer gamma, xf::Result<xf::AnyBuffer> loss, int64_t rows,
                     int32_t power) {
  const xf::AnyBuffer buffer = *loss;
  return RunSoftmax(stream, {rows, power},
                    {logits, labels, nullptr, gamma, nullptr, &buffer, nullptr, nullptr});
}

xf::Error RunRowGradient(cudaStream_t stream, xf::AnyBuffer logits, xf::AnyBuffer labels,
                         xf::AnyBuffer scale, xf::AnyBuffer gamma, xf::RemainingArgs weight,
                         xf::Result<xf::AnyBuffer> gradient, int64_t rows, int32_t power) {
  const xf::AnyBuffer buffer = *gradient;
  return RunSoftmax(stream, {rows, power},
                    {logits, labels, &scale, gamma, &weight, nullptr, &buffer, nullptr});
}

xf::Error RunRowSum(cudaStream_t stream, xf::AnyBuffer logits, xf::AnyBuffer labels,
                    xf::AnyBuffer scale, xf::AnyBuffer gamma, xf::RemainingArgs weight,
                    xf::Result<xf::AnyBuffer> sum, xf::Result<xf::AnyBuffer> partials, int64_t rows,
                    int32_t power) {
  const xf::AnyBuffer buffer = *sum;
  const xf::AnyBuffer scratch = *partials;
  return RunSoftmax(stream, {rows, power},
                    {logits, labels, &scale, gamma, &weight, nullptr, nullptr, &buffer}, &scratch);
}

xf::Error RunRowValueAndGradient(cudaStream_t stream, xf::AnyBuffer logits, xf::AnyBuffer labels,
                                 xf::AnyBuffer scale, xf::AnyBuffer gamma, xf::RemainingArgs weight,
                                 xf::Result<xf::AnyBuffer> sum, xf::Result<xf::AnyBuffer> gradient,
                                 xf::Result<xf::AnyBuffer> partials, int64_t rows, int32_t power) {
  const xf::AnyBuffer sum_buffer = *sum;
  const xf::AnyBuffer gradient_buffer = *gradient;
  const xf::AnyBuffer scratch = *partials;
  return RunSoftmax(
      stream, {rows, power},
      {logits, labels, &scale, gamma, &weight, nullptr, &gradient_buffer, &sum_buffer}, &scratch);
}

auto Bind() { return BindOperands(xf::Ffi::Bind().Ctx<xf::PlatformStream<cudaStream_t>>()); }
auto BindRows() { return BindScaledRows(xf::Ffi::Bind().Ctx<xf::PlatformStream<cudaStream_t>>()); }

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
XLA_FFI_DEFINE_HANDLER_SYMBOL(SoftmaxFocalLossCuda, RunRowLoss,
                              BindRowAttributes(xf::Ffi::Bind()
                                                    .Ctx<xf::PlatformStream<cudaStream_t>>()
                                                    .Arg<xf::AnyBuffer>()
                                                    .Arg<xf::AnyBuffer>()
                                                    .Arg<xf::AnyBuffer>()
                                                    .Ret<xf::AnyBuffer>()),
                              {xf::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(SoftmaxFocalLossGradientCuda, RunRowGradient,
                              BindRowAttributes(BindRows().Ret<xf::AnyBuffer>()),
                              {xf::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    SoftmaxFocalLossSumCuda, RunRowSum,
    BindRowAttributes(BindRows().Ret<xf::AnyBuffer>().Ret<xf::AnyBuffer>()),
    {xf::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    SoftmaxFocalLossValueAndGradientCuda, RunRowValueAndGradient,
    BindRowAttributes(BindRows().Ret<xf::AnyBuffer>().Ret<xf::AnyBuffer>().Ret<xf::AnyBuffer>()),
    {xf::Traits::kCmdBufferCompatible});

}  // namespace jaxops::ffi
