// XLA FFI handlers of concatenation and splitting on the host.
#include "cpu/concatenate.h"
#include "ffi/concatenate.h"
#include "ffi/handlers_cpu.h"
#include "ffi/thread_pool.h"
#include "ffi/untouched_memory.h"

namespace jaxops::ffi {
namespace {

namespace xf = xla::ffi;
using concatenate::Integers;
using concatenate::Job;

xf::Error Run(xf::ThreadPool& pool, const Job& job) {
  for (const auto& destination : job.destinations) {
    ExpectWrites(destination.data, job.rows * destination.row_bytes);
  }
  return RunOnHost(pool, [&](const cpu::ParallelFor& parallel_for) {
    jaxops::concatenate::cpu::RunMove(job, parallel_for);
  });
}

xf::Error RunConcatenate(xf::ThreadPool pool, xf::RemainingArgs arrays, xf::Result<xf::AnyBuffer> y,
                         int64_t inner, Integers sizes, Integers sources) {
  Job job;
  xf::Error error = concatenate::DecodeConcatenate(job, arrays, y, inner, sizes, sources);
  return error.failure() ? error : Run(pool, job);
}

xf::Error RunSplit(xf::ThreadPool pool, xf::AnyBuffer x, xf::RemainingRets parts, int64_t inner,
                   Integers starts, Integers sizes) {
  Job job;
  xf::Error error = concatenate::DecodeSplit(job, x, parts, inner, starts, sizes);
  return error.failure() ? error : Run(pool, job);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ConcatenateCpu, RunConcatenate,
                              xf::Ffi::Bind()
                                  .Ctx<xf::ThreadPool>()
                                  .RemainingArgs()
                                  .Ret<xf::AnyBuffer>()
                                  .Attr<int64_t>("inner")
                                  .Attr<Integers>("sizes")
                                  .Attr<Integers>("sources"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(SplitCpu, RunSplit,
                              xf::Ffi::Bind()
                                  .Ctx<xf::ThreadPool>()
                                  .Arg<xf::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<int64_t>("inner")
                                  .Attr<Integers>("starts")
                                  .Attr<Integers>("sizes"));

}  // namespace jaxops::ffi
