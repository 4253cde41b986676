// Decoding shared by the CPU and the CUDA handlers of the focal losses.
#ifndef JAXOPS_FFI_FOCAL_LOSS_H_
#define JAXOPS_FFI_FOCAL_LOSS_H_

#include <utility>

#include "common/focal_loss.h"
#include "ffi/decode.h"

namespace jaxops::ffi::focal_loss {

using jaxops::focal_loss::Sigmoid;
using jaxops::focal_loss::Softmax;

struct SigmoidAttributes {
  int64_t rows;  // the number of dimensions of rows
  int32_t power;
  bool has_ignored;
  int32_t ignored;
};

struct SigmoidBuffers {
  xla::ffi::AnyBuffer logits;
  xla::ffi::AnyBuffer labels;
  xla::ffi::AnyBuffer class_ids;
  xla::ffi::AnyBuffer scale;
  xla::ffi::AnyBuffer parameters;
  xla::ffi::RemainingArgs weight;
  const xla::ffi::AnyBuffer* loss;
  const xla::ffi::AnyBuffer* gradient;
  const xla::ffi::AnyBuffer* sum;
};

// Adds the operands, in the order of `SigmoidBuffers`, to a handler's binding.
template <typename Binding>
auto BindOperands(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Arg<xla::ffi::AnyBuffer>()
      .template Arg<xla::ffi::AnyBuffer>()
      .template Arg<xla::ffi::AnyBuffer>()
      .template Arg<xla::ffi::AnyBuffer>()
      .template Arg<xla::ffi::AnyBuffer>()
      .RemainingArgs();
}

// Adds the attributes, in the order of `SigmoidAttributes`, after operands and results.
template <typename Binding>
auto BindAttributes(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Attr<int64_t>("rows")
      .template Attr<int32_t>("power")
      .template Attr<bool>("has_ignored")
      .template Attr<int32_t>("ignored");
}

xla::ffi::Error Decode(Sigmoid& call, const SigmoidAttributes& attributes,
                       const SigmoidBuffers& buffers);

// `cotangent` is null where the result is the loss.
xla::ffi::Error Decode(Softmax& call, int64_t rows, int32_t power, xla::ffi::AnyBuffer logits,
                       xla::ffi::AnyBuffer labels, xla::ffi::AnyBuffer gamma,
                       const xla::ffi::AnyBuffer* cotangent, xla::ffi::AnyBuffer result);

}  // namespace jaxops::ffi::focal_loss

#endif  // JAXOPS_FFI_FOCAL_LOSS_H_
