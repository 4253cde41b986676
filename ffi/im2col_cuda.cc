// XLA FFI handlers of im2col and col2im on CUDA devices.
#include "cuda/im2col/launch.h"
#include "ffi/cuda_status.h"
#include "ffi/handlers_cuda.h"
#include "ffi/im2col.h"

namespace jaxops::ffi {
namespace {

namespace xf = xla::ffi;
using im2col::Call;
using im2col::Integers;

// The last attribute tells XLA apart what it would otherwise compute once.
xf::Error RunIm2Col(cudaStream_t stream, xf::AnyBuffer image, xf::Result<xf::AnyBuffer> patches,
                    Integers strides, Integers dilation, Integers low, bool channels_last, bool) {
  Call call = {};
  JAXOPS_RETURN_IF_ERROR(
      im2col::DecodeIm2Col(call, image, *patches, strides, dilation, low, channels_last));
  return ToError("im2col", jaxops::im2col::cuda::LaunchIm2Col(stream, call));
}

xf::Error RunCol2Im(cudaStream_t stream, xf::AnyBuffer patches, xf::Result<xf::AnyBuffer> image,
                    Integers strides, Integers dilation, Integers low, bool channels_last) {
  Call call = {};
  JAXOPS_RETURN_IF_ERROR(
      im2col::DecodeCol2Im(call, patches, *image, strides, dilation, low, channels_last));
  return ToError("col2im", jaxops::im2col::cuda::LaunchCol2Im(stream, call));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Im2ColCuda, RunIm2Col,
                              im2col::BindAttributes(xf::Ffi::Bind()
                                                         .Ctx<xf::PlatformStream<cudaStream_t>>()
                                                         .Arg<xf::AnyBuffer>()
                                                         .Ret<xf::AnyBuffer>())
                                  .Attr<bool>("again"),
                              {xf::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(Col2ImCuda, RunCol2Im,
                              im2col::BindAttributes(xf::Ffi::Bind()
                                                         .Ctx<xf::PlatformStream<cudaStream_t>>()
                                                         .Arg<xf::AnyBuffer>()
                                                         .Ret<xf::AnyBuffer>()),
                              {xf::Traits::kCmdBufferCompatible});

}  // namespace jaxops::ffi
