// Handlers of im2col and col2im.
#include "common/im2col.h"

#ifdef JAXOPS_PLATFORM_CUDA
#include "cuda/im2col/launch.h"
#else
#include "cpu/im2col.h"
#endif
#include "ffi/bind.h"
#include "ffi/decode.h"

namespace jaxops::ffi::im2col {
namespace {

namespace xf = xla::ffi;
using jaxops::im2col::Call;
using jaxops::im2col::kMaxDims;
using jaxops::im2col::Window;

// `strides`, `dilation` and `low` have one entry for each dimension of the window.
struct Col2ImAttributes {
  Integers strides, dilation, low;
  bool channels_last;
  JAXOPS_ATTRIBUTES(strides, dilation, low, channels_last);
};

struct Im2ColAttributes : Col2ImAttributes {
  bool again;  // distinguishes calls that XLA would otherwise merge into one
  JAXOPS_ATTRIBUTES(strides, dilation, low, channels_last, again);
};

// Reads the dimensions of image and patches, and the window. The window's dimensions are last,
// followed by the channels if `channels_last`; otherwise the channels precede them.
xf::Error DecodeWindow(const char* name, Call& call, const Buffer& image, const Buffer& patches,
                       const Col2ImAttributes& attributes) {
  const auto& [strides, dilation, low, channels_last] = attributes;
  const size_t count = strides.size();
  if (count < 1 || count > kMaxDims || dilation.size() != count || low.size() != count) {
    return InvalidArgument(name, ": a window has 1 to ", kMaxDims, " dimensions, got ", count,
                           " strides, ", dilation.size(), " dilations and ", low.size(),
                           " paddings");
  }
  const Dimensions in = image.dimensions();
  const Dimensions out = patches.dimensions();
  const size_t channels = channels_last ? 1 : 0;
  const auto mismatch = [&] {
    return InvalidArgument(name, ": image ", ToString(in), " does not fit patches ", ToString(out));
  };
  if (image.element_type() != patches.element_type()) return mismatch();
  if (in.size() < count + channels || out.size() != in.size() + count) return mismatch();
  const size_t leading = in.size() - count - channels;
  call.rows = 1;
  for (size_t i = 0; i < leading; ++i) {
    if (in[i] != out[i]) return mismatch();
    call.rows *= in[i];
  }
  call.channels = channels_last ? in.back() : 1;
  if (channels_last && out.back() != call.channels) return mismatch();
  const size_t outs = channels_last ? leading : leading + count;
  const size_t taps = channels_last ? leading + count : leading;
  for (size_t i = 0; i < count; ++i) {
    if (strides[i] < 1 || dilation[i] < 1) {
      return InvalidArgument(name, ": strides and dilations must be >= 1, got ", strides[i],
                             " and ", dilation[i]);
    }
    if (!IsBounded(in[leading + i]) || !IsBounded(out[outs + i], strides[i]) ||
        !IsBounded(out[taps + i], dilation[i]) || !IsBounded(low[i])) {
      return InvalidArgument(name, ": strides, dilations and paddings are out of range, got ",
                             strides[i], ", ", dilation[i], " and ", low[i]);
    }
    call.dims[kMaxDims - count + i] = {in[leading + i], out[outs + i], out[taps + i],
                                       strides[i],      dilation[i],   low[i]};
  }
  call.channels_last = channels_last;
  call.item_bytes = static_cast<int>(xf::ByteWidth(image.element_type()));
  // A complex array is passed as two images.
  if (call.item_bytes < 1 || call.item_bytes > 8) {
    return InvalidArgument(name, ": items must have 1 to 8 bytes, got ", call.item_bytes);
  }
  return xf::Error::Success();
}

xf::Error Im2Col(Context context, Buffer image, Result patches,
                 const Im2ColAttributes& attributes) {
  Call call = {};
  JAXOPS_RETURN_IF_ERROR(DecodeWindow("im2col", call, image, *patches, attributes));
  call.from = image.untyped_data();
  call.to = patches->untyped_data();
  ExpectWrites(*patches);
  return Run(context, "im2col", JAXOPS_KERNEL(im2col, Im2Col), call);
}

xf::Error Col2Im(Context context, Buffer patches, Result image,
                 const Col2ImAttributes& attributes) {
  Call call = {};
  JAXOPS_RETURN_IF_ERROR(DecodeWindow("col2im", call, *image, patches, attributes));
  JAXOPS_RETURN_IF_ERROR(SetType(call.dtype, "col2im", "patches", patches));
  call.from = patches.untyped_data();
  call.to = image->untyped_data();
  ExpectWrites(*image);
  return Run(context, "col2im", JAXOPS_KERNEL(im2col, Col2Im), call);
}

const Registration kIm2Col("jaxops_im2col", kHandler<Im2Col>);
const Registration kCol2Im("jaxops_col2im", kHandler<Col2Im>);

}  // namespace
}  // namespace jaxops::ffi::im2col
