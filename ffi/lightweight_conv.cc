#include "ffi/lightweight_conv.h"

#include <algorithm>

namespace jaxops::ffi::lightweight_conv {
namespace {

namespace xf = xla::ffi;

constexpr char kName[] = "lightweight_conv";

xf::Error Check(bool good, const char* what, const xf::AnyBuffer& x, const xf::AnyBuffer& other) {
  if (good) return xf::Error::Success();
  return InvalidArgument(kName, ": ", what, " does not fit: x is ", ToString(x.dimensions()),
                         ", got ", ToString(other.dimensions()));
}

// `weight` is anything shaped (..., heads, taps).
xf::Error SetGeometry(Geometry& geometry, const Attributes& attributes, const xf::AnyBuffer& x,
                      const xf::AnyBuffer& weight) {
  const Dimensions dims = x.dimensions();
  const Dimensions filter = weight.dimensions();
  if (dims.size() < 2 || filter.size() != dims.size()) {
    return Check(false, "rank of weight", x, weight);
  }
  const bool ntc = attributes.data_format == static_cast<int32_t>(DataFormat::kNTC);
  geometry.data_format = ntc ? DataFormat::kNTC : DataFormat::kNCT;
  geometry.time = dims[dims.size() - (ntc ? 2 : 1)];
  geometry.channels = dims[dims.size() - (ntc ? 1 : 2)];
  geometry.heads = filter[filter.size() - 2];
  geometry.taps = filter[filter.size() - 1];
  geometry.padding = attributes.padding;
  geometry.dilation = attributes.dilation;
  if (geometry.heads < 1 || geometry.taps < 1 || geometry.channels % geometry.heads != 0) {
    return Check(false, "weight", x, weight);
  }
  const int64_t reach = (geometry.taps - 1) * geometry.dilation;
  if (geometry.dilation < 1 || geometry.padding < 0 || geometry.padding > reach) {
    return InvalidArgument(kName, ": padding ", geometry.padding, " must be in [0, ", reach,
                           "] with ", geometry.taps, " taps and dilation ", geometry.dilation);
  }
  return xf::Error::Success();
}

xf::Error TooManyBatchDims() {
  return InvalidArgument(kName, ": more than ", kMaxBatchDims,
                         " alternations of batched and unbatched dimensions in nested vmaps");
}

}  // namespace

xf::Error Decode(Forward& forward, const Attributes& attributes, xf::AnyBuffer x,
                 xf::AnyBuffer weight, xf::RemainingArgs bias, xf::Result<xf::AnyBuffer> y) {
  JAXOPS_RETURN_IF_ERROR(SetGeometry(forward.geometry, attributes, x, weight));
  JAXOPS_RETURN_IF_ERROR(SetType(forward.dtype, kName, "x", x));
  JAXOPS_RETURN_IF_ERROR(SetType(forward.weight_dtype, kName, "weight", weight));
  forward.activation = static_cast<Activation>(attributes.activation);
  forward.flip_taps = attributes.flip_taps;
  forward.x = x.untyped_data();
  forward.weight = weight.untyped_data();
  forward.y = y->untyped_data();
  forward.bias = nullptr;
  forward.bias_dtype = forward.weight_dtype;
  // Without bias, weight stands in for its batch dimensions: nothing reads the offset.
  BatchOperand bias_operand{weight.dimensions(), 2};
  if (bias.size() > 0) {
    const xf::ErrorOr<xf::AnyBuffer> buffer = bias.get<xf::AnyBuffer>(0);
    if (!buffer) return buffer.error();
    JAXOPS_RETURN_IF_ERROR(SetType(forward.bias_dtype, kName, "bias", *buffer));
    JAXOPS_RETURN_IF_ERROR(Check(buffer->dimensions().size() + 1 == x.dimensions().size() &&
                                     buffer->dimensions().back() == forward.geometry.channels,
                                 "bias", x, *buffer));
    forward.bias = buffer->untyped_data();
    bias_operand = {buffer->dimensions(), 1};
  }
  const bool fits = BuildBatchMap<Forward::kOperands>(
      forward.batch,
      {BatchOperand{x.dimensions(), 2}, BatchOperand{weight.dimensions(), 2}, bias_operand,
       BatchOperand{y->dimensions(), 2}},
      x.dimensions().size() - 2, [](size_t) { return true; });
  return fits ? xf::Error::Success() : TooManyBatchDims();
}

xf::Error Decode(Backward& backward, const Attributes& attributes, const BackwardBuffers& buffers) {
  const xf::AnyBuffer& x = buffers.x;
  const xf::AnyBuffer& g = buffers.g;
  const xf::AnyBuffer& dweight = buffers.dweight;
  JAXOPS_RETURN_IF_ERROR(SetGeometry(backward.geometry, attributes, x, dweight));
  JAXOPS_RETURN_IF_ERROR(Check(
      g.dimensions().size() == x.dimensions().size() &&
          std::equal(x.dimensions().end() - 2, x.dimensions().end(), g.dimensions().end() - 2),
      "g", x, g));
  JAXOPS_RETURN_IF_ERROR(Check(g.element_type() == x.element_type(), "dtype of g", x, g));
  JAXOPS_RETURN_IF_ERROR(SetType(backward.dtype, kName, "x", x));
  JAXOPS_RETURN_IF_ERROR(SetType(backward.weight_dtype, kName, "weight", dweight));
  backward.bias_dtype = backward.weight_dtype;
  if (buffers.dbias) {
    JAXOPS_RETURN_IF_ERROR(SetType(backward.bias_dtype, kName, "bias", *buffers.dbias));
  }
  backward.x = x.untyped_data();
  backward.g = g.untyped_data();
  backward.weight = buffers.weight ? buffers.weight->untyped_data() : nullptr;
  backward.dx = buffers.dx ? buffers.dx->untyped_data() : nullptr;
  backward.dweight = dweight.untyped_data();
  backward.dbias = buffers.dbias ? buffers.dbias->untyped_data() : nullptr;

  // Operands that are not there take the place of g, whose offsets they then never use.
  const std::array<BatchOperand, Backward::kOperands> operands = {
      BatchOperand{x.dimensions(), 2},
      BatchOperand{buffers.weight ? buffers.weight->dimensions() : g.dimensions(), 2},
      BatchOperand{g.dimensions(), 2},
      BatchOperand{buffers.dx ? buffers.dx->dimensions() : g.dimensions(), 2}};
  const size_t rank = x.dimensions().size() - 2;
  // dweight has size 1 along the summed dimensions.
  const auto kept = [&](size_t dim) { return dweight.dimensions()[dim] != 1; };
  const bool fits = BuildBatchMap<Backward::kOperands>(backward.kept, operands, rank, kept) &&
                    BuildBatchMap<Backward::kOperands>(backward.summed, operands, rank,
                                                       [&](size_t dim) { return !kept(dim); });
  return fits ? xf::Error::Success() : TooManyBatchDims();
}

}  // namespace jaxops::ffi::lightweight_conv
