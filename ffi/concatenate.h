// Decoding shared by the CPU and the CUDA handlers of concatenation and splitting.
#ifndef JAXOPS_FFI_CONCATENATE_H_
#define JAXOPS_FFI_CONCATENATE_H_

#include "common/concatenate.h"
#include "ffi/decode.h"

namespace jaxops::ffi::concatenate {

using jaxops::concatenate::Job;
using Integers = xla::ffi::Span<const int64_t>;

// Fills `job` with (array, ...) -> y. The axis is followed by `inner` dimensions. Piece i of y has
// `sizes[i]` entries along it, the first ones of array `sources[i]`, or zeros where that is -1.
xla::ffi::Error DecodeConcatenate(Job& job, xla::ffi::RemainingArgs arrays,
                                  xla::ffi::Result<xla::ffi::AnyBuffer> y, int64_t inner,
                                  Integers sizes, Integers sources);

// Fills `job` with x -> (part, ...). Part i begins with the `sizes[i]` entries of x from
// `starts[i]` on; the rest of it is zero.
xla::ffi::Error DecodeSplit(Job& job, xla::ffi::AnyBuffer x, xla::ffi::RemainingRets parts,
                            int64_t inner, Integers starts, Integers sizes);

}  // namespace jaxops::ffi::concatenate

#endif  // JAXOPS_FFI_CONCATENATE_H_
