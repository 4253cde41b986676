#include "ffi/lightweight_conv.h"

#include <algorithm>
#include <array>

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
  JAXOPS_RETURN_IF_ERROR(SetEnum(geometry.data_format, kName, "data_format", attributes.data_format,
                                 DataFormat::kNCT));
  const bool ntc = geometry.data_format == DataFormat::kNTC;
  geometry.time = dims[dims.size() - (ntc ? 2 : 1)];
  geometry.channels = dims[dims.size() - (ntc ? 1 : 2)];
  geometry.heads = filter[filter.size() - 2];
  geometry.taps = filter[filter.size() - 1];
  geometry.padding = attributes.padding;
  geometry.dilation = attributes.dilation;
  if (geometry.heads < 1 || geometry.taps < 1 || geometry.channels % geometry.heads != 0) {
    return Check(false, "weight", x, weight);
  }
  if (geometry.dilation < 1 || !IsBounded(geometry.taps, geometry.dilation) ||
      !IsBounded(geometry.time)) {
    return InvalidArgument(kName, ": dilation ", geometry.dilation, " is out of range");
  }
  const int64_t reach = (geometry.taps - 1) * geometry.dilation;
  if (geometry.padding < 0 || geometry.padding > reach) {
    return InvalidArgument(kName, ": padding ", geometry.padding, " must be in [0, ", reach,
                           "] with ", geometry.taps, " taps and dilation ", geometry.dilation);
  }
  // A single tap has no distance to another, and kernels go through as many phases.
  if (geometry.taps == 1) geometry.dilation = 1;
  return xf::Error::Success();
}

// The type of a weight or a bias, or of a gradient, of sequences of type `dtype`.
xf::Error SetParameterType(DType& out, const char* what, const xf::AnyBuffer& buffer, DType dtype) {
  JAXOPS_RETURN_IF_ERROR(SetType(out, kName, what, buffer));
  if (out == DType::kF64 && dtype != DType::kF64) {
    return InvalidArgument(kName, ": ", what, " is f64, which x then must be too");
  }
  return xf::Error::Success();
}

}  // namespace

xf::Error Decode(Forward& forward, const Attributes& attributes, xf::AnyBuffer x,
                 xf::AnyBuffer weight, xf::RemainingArgs bias, xf::Result<xf::AnyBuffer> y) {
  JAXOPS_RETURN_IF_ERROR(SetGeometry(forward.geometry, attributes, x, weight));
  JAXOPS_RETURN_IF_ERROR(SetType(forward.dtype, kName, "x", x));
  JAXOPS_RETURN_IF_ERROR(SetParameterType(forward.weight_dtype, "weight", weight, forward.dtype));
  JAXOPS_RETURN_IF_ERROR(
      SetEnum(forward.activation, kName, "activation", attributes.activation, Activation::kGelu));
  forward.flip_taps = attributes.flip_taps;
  forward.x = x.untyped_data();
  forward.weight = weight.untyped_data();
  forward.y = y->untyped_data();
  forward.bias = nullptr;
  forward.bias_dtype = forward.weight_dtype;
  const size_t rank = x.dimensions().size() - 2;
  JAXOPS_RETURN_IF_ERROR(
      CheckBuffer(kName, "result", *y, rank, x.dimensions().last(2), x.element_type()));
  // Without bias, weight stands in for its batch dimensions: nothing reads the offset.
  BatchOperand bias_operand{weight.dimensions(), 2};
  if (bias.size() > 1) return InvalidArgument(kName, ": more operands than x, weight and bias");
  if (bias.size() == 1) {
    const xf::ErrorOr<xf::AnyBuffer> buffer = bias.get<xf::AnyBuffer>(0);
    if (!buffer) return buffer.error();
    JAXOPS_RETURN_IF_ERROR(SetParameterType(forward.bias_dtype, "bias", *buffer, forward.dtype));
    JAXOPS_RETURN_IF_ERROR(CheckBuffer(kName, "bias", *buffer, rank, {forward.geometry.channels},
                                       buffer->element_type()));
    forward.bias = buffer->untyped_data();
    bias_operand = {buffer->dimensions(), 1};
  }
  return SetBatch<Forward::kOperands>(
      kName, forward.batch,
      {BatchOperand{x.dimensions(), 2}, BatchOperand{weight.dimensions(), 2}, bias_operand,
       BatchOperand{y->dimensions(), 2, BatchOperand::kWritten}},
      rank);
}

xf::Error Decode(Backward& backward, const Attributes& attributes, const BackwardBuffers& buffers) {
  const xf::AnyBuffer& x = buffers.x;
  const xf::AnyBuffer& g = buffers.g;
  const xf::AnyBuffer& dweight = buffers.dweight;
  JAXOPS_RETURN_IF_ERROR(SetGeometry(backward.geometry, attributes, x, dweight));
  if (attributes.flip_taps || attributes.activation != static_cast<int32_t>(Activation::kNone)) {
    return InvalidArgument(kName, ": gradients have neither flipped taps nor an activation");
  }
  JAXOPS_RETURN_IF_ERROR(SetType(backward.dtype, kName, "x", x));
  JAXOPS_RETURN_IF_ERROR(
      SetParameterType(backward.weight_dtype, "weight", dweight, backward.dtype));
  const size_t rank = x.dimensions().size() - 2;
  const Dimensions step = x.dimensions().last(2);
  const Dimensions filter = dweight.dimensions().last(2);
  const xf::DataType type = x.element_type();
  JAXOPS_RETURN_IF_ERROR(CheckBuffer(kName, "g", g, rank, step, type));
  if (buffers.weight) {
    JAXOPS_RETURN_IF_ERROR(
        CheckBuffer(kName, "weight", *buffers.weight, rank, filter, dweight.element_type()));
  }
  if (buffers.dx) JAXOPS_RETURN_IF_ERROR(CheckBuffer(kName, "dx", *buffers.dx, rank, step, type));
  backward.bias_dtype = backward.weight_dtype;
  if (buffers.dbias) {
    const xf::AnyBuffer& dbias = *buffers.dbias;
    JAXOPS_RETURN_IF_ERROR(SetParameterType(backward.bias_dtype, "bias", dbias, backward.dtype));
    JAXOPS_RETURN_IF_ERROR(CheckBuffer(kName, "dbias", dbias, rank, {backward.geometry.channels},
                                       dbias.element_type()));
    if (!std::equal(filter.begin() - rank, filter.begin(), dbias.dimensions().begin())) {
      return Check(false, "batch of dbias", x, dbias);
    }
  }
  backward.x = x.untyped_data();
  backward.g = g.untyped_data();
  backward.weight = buffers.weight ? buffers.weight->untyped_data() : nullptr;
  backward.dx = buffers.dx ? buffers.dx->untyped_data() : nullptr;
  backward.dweight = dweight.untyped_data();
  backward.dbias = buffers.dbias ? buffers.dbias->untyped_data() : nullptr;

  // Operands that are not there take the place of g, whose offsets they then never use.
  const BatchOperand own_g{g.dimensions(), 2};
  const std::array<BatchOperand, Backward::kOperands> operands = {
      BatchOperand{x.dimensions(), 2},
      buffers.weight ? BatchOperand{buffers.weight->dimensions(), 2} : own_g, own_g,
      buffers.dx ? BatchOperand{buffers.dx->dimensions(), 2, BatchOperand::kWritten} : own_g};
  std::array<BatchOperand, Backward::kOperands + 1> batch;
  std::copy(operands.begin(), operands.end(), batch.begin());
  batch.back() = {dweight.dimensions(), 2, BatchOperand::kSummed};
  JAXOPS_RETURN_IF_ERROR(CheckBatch(kName, batch, rank));
  // dweight has size 1 along the summed dimensions.
  const auto kept = [&](size_t dim) { return dweight.dimensions()[dim] != 1; };
  JAXOPS_RETURN_IF_ERROR(
      BuildBatchMap<Backward::kOperands>(kName, backward.kept, operands, rank, kept));
  return BuildBatchMap<Backward::kOperands>(kName, backward.summed, operands, rank,
                                            [&](size_t dim) { return !kept(dim); });
}

}  // namespace jaxops::ffi::lightweight_conv
