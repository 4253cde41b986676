// Decoding shared by the CPU and the CUDA handlers of the focal losses.
#ifndef JAXOPS_FFI_FOCAL_LOSS_H_
#define JAXOPS_FFI_FOCAL_LOSS_H_

#include <utility>

#include "common/focal_loss.h"
#include "ffi/decode.h"

namespace jaxops::ffi::focal_loss {

using jaxops::focal_loss::Sigmoid;
using jaxops::focal_loss::Softmax;

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

// Adds four operands and then optional ones to a handler's binding: those of a softmax whose
// results are scaled, in the order of `SoftmaxBuffers`.
template <typename Binding>
auto BindScaledRows(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Arg<xla::ffi::AnyBuffer>()
      .template Arg<xla::ffi::AnyBuffer>()
      .template Arg<xla::ffi::AnyBuffer>()
      .template Arg<xla::ffi::AnyBuffer>()
      .RemainingArgs();
}

// One more, in the order of `SigmoidBuffers`.
template <typename Binding>
auto BindOperands(Binding&& binding) {
  return BindScaledRows(std::forward<Binding>(binding).template Arg<xla::ffi::AnyBuffer>());
}

// Adds all attributes, after operands and results. They are looked up by their names, because a
// program that was exported before there was one of them is told what to do about it.
template <typename Binding>
auto BindAttributes(Binding&& binding) {
  return std::forward<Binding>(binding).Attrs();
}

xla::ffi::Error Decode(Sigmoid& call, const xla::ffi::Dictionary& attributes,
                       const SigmoidBuffers& buffers);

struct SoftmaxAttributes {
  int64_t rows;  // the number of dimensions of rows
  int32_t power;
};

struct SoftmaxBuffers {
  xla::ffi::AnyBuffer logits;
  xla::ffi::AnyBuffer labels;
  const xla::ffi::AnyBuffer* scale;  // null: results are not scaled
  xla::ffi::AnyBuffer gamma;
  const xla::ffi::RemainingArgs* weight;  // null: there are none
  const xla::ffi::AnyBuffer* loss;        // of loss and gradient, one at the most
  const xla::ffi::AnyBuffer* gradient;
  const xla::ffi::AnyBuffer* sum;
};

// Adds the attributes, in the order of `SoftmaxAttributes`, after operands and results.
template <typename Binding>
auto BindRowAttributes(Binding&& binding) {
  return std::forward<Binding>(binding).template Attr<int64_t>("rows").template Attr<int32_t>(
      "power");
}

xla::ffi::Error Decode(Softmax& call, const SoftmaxAttributes& attributes,
                       const SoftmaxBuffers& buffers);

}  // namespace jaxops::ffi::focal_loss

#endif  // JAXOPS_FFI_FOCAL_LOSS_H_
