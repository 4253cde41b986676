// XLA FFI handlers of the lightweight convolution on CUDA devices.
#include "cuda/lightweight_conv/launch.h"
#include "ffi/cuda_status.h"
#include "ffi/handlers_cuda.h"
#include "ffi/lightweight_conv.h"

namespace jaxops::ffi {
namespace {

namespace xf = xla::ffi;
using lightweight_conv::Attributes;
using lightweight_conv::BackwardBuffers;
using lightweight_conv::BindAttributes;

xf::Error RunForward(cudaStream_t stream, xf::AnyBuffer x, xf::AnyBuffer weight,
                     xf::RemainingArgs bias, xf::Result<xf::AnyBuffer> y, int64_t padding,
                     int64_t dilation, int32_t data_format, int32_t activation, bool flip_taps) {
  lightweight_conv::Forward forward;
  const Attributes attributes{padding, dilation, data_format, activation, flip_taps};
  if (xf::Error error = Decode(forward, attributes, x, weight, bias, y); error.failure()) {
    return error;
  }
  return ToError("lightweight_conv",
                 jaxops::lightweight_conv::cuda::LaunchForward(stream, forward));
}

xf::Error RunSums(cudaStream_t stream, const BackwardBuffers& buffers,
                  const xf::AnyBuffer& partials, const Attributes& attributes) {
  lightweight_conv::Backward backward;
  if (xf::Error error = Decode(backward, attributes, buffers); error.failure()) return error;
  const Dimensions sums = partials.dimensions();
  const xf::DataType type = backward.dtype == DType::kF64 ? xf::DataType::F64 : xf::DataType::F32;
  const auto& geometry = backward.geometry;
  if (partials.element_type() != type || sums.size() != 4 || sums[0] != backward.kept.size() ||
      sums[1] < 1 || sums[1] > INT32_MAX || sums[2] != geometry.taps + 1 ||
      sums[3] != geometry.channels) {
    return InvalidArgument("lightweight_conv gradient: partial sums must be (",
                           backward.kept.size(), ", splits, ", geometry.taps + 1, ", ",
                           geometry.channels, ") of type ", static_cast<int>(type), ", got ",
                           ToString(sums), " of type ", static_cast<int>(partials.element_type()));
  }
  const int64_t splits = sums[1];
  return ToError("lightweight_conv gradient",
                 jaxops::lightweight_conv::cuda::LaunchBackward(stream, backward, splits,
                                                                partials.untyped_data()));
}

xf::Error RunFilterGrad(cudaStream_t stream, xf::AnyBuffer x, xf::AnyBuffer g,
                        xf::Result<xf::AnyBuffer> dweight, xf::Result<xf::AnyBuffer> partials,
                        int64_t padding, int64_t dilation, int32_t data_format, int32_t activation,
                        bool flip_taps) {
  return RunSums(stream, {x, g, *dweight, nullptr, nullptr, nullptr}, *partials,
                 {padding, dilation, data_format, activation, flip_taps});
}

// The results are dx, dweight, dbias where it is wanted, and last the partial sums.
xf::Error RunBackward(cudaStream_t stream, xf::AnyBuffer x, xf::AnyBuffer weight, xf::AnyBuffer g,
                      xf::Result<xf::AnyBuffer> dx, xf::Result<xf::AnyBuffer> dweight,
                      xf::RemainingRets rest, int64_t padding, int64_t dilation,
                      int32_t data_format, int32_t activation, bool flip_taps) {
  if (rest.size() < 1 || rest.size() > 2) {
    return InvalidArgument("lightweight_conv gradient: there must be 3 or 4 results, got ",
                           rest.size() + 2);
  }
  xf::ErrorOr<xf::Result<xf::AnyBuffer>> first = rest.get<xf::AnyBuffer>(0);
  xf::ErrorOr<xf::Result<xf::AnyBuffer>> last = rest.get<xf::AnyBuffer>(rest.size() - 1);
  if (!first) return first.error();
  if (!last) return last.error();
  const xf::AnyBuffer dx_buffer = *dx;
  const xf::AnyBuffer dbias = **first;
  return RunSums(stream, {x, g, *dweight, &weight, &dx_buffer, rest.size() > 1 ? &dbias : nullptr},
                 **last, {padding, dilation, data_format, activation, flip_taps});
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(LightweightConvCuda, RunForward,
                              BindAttributes(xf::Ffi::Bind()
                                                 .Ctx<xf::PlatformStream<cudaStream_t>>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .RemainingArgs()
                                                 .Ret<xf::AnyBuffer>()),
                              {xf::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(LightweightConvFilterGradCuda, RunFilterGrad,
                              BindAttributes(xf::Ffi::Bind()
                                                 .Ctx<xf::PlatformStream<cudaStream_t>>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .Ret<xf::AnyBuffer>()
                                                 .Ret<xf::AnyBuffer>()),
                              {xf::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(LightweightConvBackwardCuda, RunBackward,
                              BindAttributes(xf::Ffi::Bind()
                                                 .Ctx<xf::PlatformStream<cudaStream_t>>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .Arg<xf::AnyBuffer>()
                                                 .Ret<xf::AnyBuffer>()
                                                 .Ret<xf::AnyBuffer>()
                                                 .RemainingRets()),
                              {xf::Traits::kCmdBufferCompatible});

}  // namespace jaxops::ffi
