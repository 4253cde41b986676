// Decoding shared by the CPU and the CUDA handlers of im2col and col2im.
#ifndef JAXOPS_FFI_IM2COL_H_
#define JAXOPS_FFI_IM2COL_H_

#include <utility>

#include "common/im2col.h"
#include "ffi/decode.h"

namespace jaxops::ffi::im2col {

using jaxops::im2col::Call;
using Integers = xla::ffi::Span<const int64_t>;

// Fills `call` with image -> patches. There is one entry of `strides`, `dilation` and `low` for
// each dimension of the window.
xla::ffi::Error DecodeIm2Col(Call& call, const xla::ffi::AnyBuffer& image,
                             const xla::ffi::AnyBuffer& patches, Integers strides,
                             Integers dilation, Integers low, bool channels_last);

// Fills `call` with patches -> image.
xla::ffi::Error DecodeCol2Im(Call& call, const xla::ffi::AnyBuffer& patches,
                             const xla::ffi::AnyBuffer& image, Integers strides, Integers dilation,
                             Integers low, bool channels_last);

// Adds what both handlers are told of the window to a binding of their buffers.
template <typename Binding>
auto BindAttributes(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Attr<Integers>("strides")
      .template Attr<Integers>("dilation")
      .template Attr<Integers>("low")
      .template Attr<bool>("channels_last");
}

}  // namespace jaxops::ffi::im2col

#endif  // JAXOPS_FFI_IM2COL_H_
