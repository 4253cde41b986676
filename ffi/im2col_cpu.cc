// XLA FFI handlers of im2col and col2im on the host.
#include "cpu/im2col.h"
#include "ffi/handlers_cpu.h"
#include "ffi/im2col.h"
#include "ffi/thread_pool.h"
#include "ffi/untouched_memory.h"

namespace jaxops::ffi {
namespace {

namespace xf = xla::ffi;
using im2col::Call;
using im2col::Integers;

// The last attribute tells XLA apart what it would otherwise compute once.
xf::Error RunIm2Col(xf::ThreadPool pool, xf::AnyBuffer image, xf::Result<xf::AnyBuffer> patches,
                    Integers strides, Integers dilation, Integers low, bool channels_last, bool) {
  Call call = {};
  JAXOPS_RETURN_IF_ERROR(
      im2col::DecodeIm2Col(call, image, *patches, strides, dilation, low, channels_last));
  ExpectWrites(*patches);
  return RunOnHost(pool, [&](const cpu::ParallelFor& parallel_for) {
    jaxops::im2col::cpu::RunIm2Col(call, parallel_for);
  });
}

xf::Error RunCol2Im(xf::ThreadPool pool, xf::AnyBuffer patches, xf::Result<xf::AnyBuffer> image,
                    Integers strides, Integers dilation, Integers low, bool channels_last) {
  Call call = {};
  JAXOPS_RETURN_IF_ERROR(
      im2col::DecodeCol2Im(call, patches, *image, strides, dilation, low, channels_last));
  ExpectWrites(*image);
  return RunOnHost(pool, [&](const cpu::ParallelFor& parallel_for) {
    jaxops::im2col::cpu::RunCol2Im(call, parallel_for);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    Im2ColCpu, RunIm2Col,
    im2col::BindAttributes(
        xf::Ffi::Bind().Ctx<xf::ThreadPool>().Arg<xf::AnyBuffer>().Ret<xf::AnyBuffer>())
        .Attr<bool>("again"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    Col2ImCpu, RunCol2Im,
    im2col::BindAttributes(
        xf::Ffi::Bind().Ctx<xf::ThreadPool>().Arg<xf::AnyBuffer>().Ret<xf::AnyBuffer>()));

}  // namespace jaxops::ffi
