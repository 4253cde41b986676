// XLA FFI handlers of concatenation and splitting on CUDA devices.
#include "cuda/concatenate/launch.h"
#include "ffi/concatenate.h"
#include "ffi/cuda_status.h"
#include "ffi/handlers_cuda.h"

namespace jaxops::ffi {
namespace {

namespace xf = xla::ffi;
using concatenate::Integers;
using concatenate::Job;

xf::Error Run(cudaStream_t stream, const Job& job) {
  return ToError("concatenate", jaxops::concatenate::cuda::LaunchMove(stream, job));
}

xf::Error RunConcatenate(cudaStream_t stream, xf::RemainingArgs arrays, xf::Result<xf::AnyBuffer> y,
                         int64_t inner, Integers sizes, Integers sources) {
  Job job;
  xf::Error error = concatenate::DecodeConcatenate(job, arrays, y, inner, sizes, sources);
  return error.failure() ? error : Run(stream, job);
}

xf::Error RunSplit(cudaStream_t stream, xf::AnyBuffer x, xf::RemainingRets parts, int64_t inner,
                   Integers starts, Integers sizes) {
  Job job;
  xf::Error error = concatenate::DecodeSplit(job, x, parts, inner, starts, sizes);
  return error.failure() ? error : Run(stream, job);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ConcatenateCuda, RunConcatenate,
                              xf::Ffi::Bind()
                                  .Ctx<xf::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .Ret<xf::AnyBuffer>()
                                  .Attr<int64_t>("inner")
                                  .Attr<Integers>("sizes")
                                  .Attr<Integers>("sources"),
                              {xf::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(SplitCuda, RunSplit,
                              xf::Ffi::Bind()
                                  .Ctx<xf::PlatformStream<cudaStream_t>>()
                                  .Arg<xf::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<int64_t>("inner")
                                  .Attr<Integers>("starts")
                                  .Attr<Integers>("sizes"),
                              {xf::Traits::kCmdBufferCompatible});

}  // namespace jaxops::ffi
