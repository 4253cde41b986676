// Decoding shared by the CPU and the CUDA handlers of the lightweight convolution.
#ifndef JAXOPS_FFI_LIGHTWEIGHT_CONV_H_
#define JAXOPS_FFI_LIGHTWEIGHT_CONV_H_

#include <utility>

#include "common/lightweight_conv.h"
#include "ffi/decode.h"

namespace jaxops::ffi::lightweight_conv {

using jaxops::lightweight_conv::Backward;
using jaxops::lightweight_conv::Forward;
using jaxops::lightweight_conv::Geometry;

struct Attributes {
  int64_t padding;
  int64_t dilation;
  int32_t data_format;
  int32_t activation;
  bool flip_taps;
};

// Adds the attributes, in the order of `Attributes`, to a handler's binding.
template <typename Binding>
auto BindAttributes(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Attr<int64_t>("padding")
      .template Attr<int64_t>("dilation")
      .template Attr<int32_t>("data_format")
      .template Attr<int32_t>("activation")
      .template Attr<bool>("flip_taps");
}

// Fills `forward` from (x, weight[, bias]) -> y.
xla::ffi::Error Decode(Forward& forward, const Attributes& attributes, xla::ffi::AnyBuffer x,
                       xla::ffi::AnyBuffer weight, xla::ffi::RemainingArgs bias,
                       xla::ffi::Result<xla::ffi::AnyBuffer> y);

// Fills `backward` from x, g and whichever of the others are wanted (null: not wanted).
struct BackwardBuffers {
  xla::ffi::AnyBuffer x;
  xla::ffi::AnyBuffer g;
  xla::ffi::AnyBuffer dweight;
  const xla::ffi::AnyBuffer* weight;
  const xla::ffi::AnyBuffer* dx;
  const xla::ffi::AnyBuffer* dbias;
};
xla::ffi::Error Decode(Backward& backward, const Attributes& attributes,
                       const BackwardBuffers& buffers);

}  // namespace jaxops::ffi::lightweight_conv

#endif  // JAXOPS_FFI_LIGHTWEIGHT_CONV_H_
