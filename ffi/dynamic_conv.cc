// Handlers of the dynamic convolution.
#include "common/dynamic_conv.h"

#include <array>
#include <optional>

#ifdef JAXOPS_PLATFORM_CUDA
#include "cuda/dynamic_conv/launch.h"
#else
#include "cpu/dynamic_conv.h"
#endif
#include "ffi/bind.h"
#include "ffi/choice.h"
#include "ffi/decode.h"
#include "ffi/work_space.h"

namespace jaxops::ffi::dynamic_conv {
namespace {

namespace xf = xla::ffi;
using jaxops::dynamic_conv::Backward;
using jaxops::dynamic_conv::Forward;
using jaxops::dynamic_conv::Geometry;

constexpr char kName[] = "dynamic_conv";

// The attributes of all gradients.
struct GradAttributes {
  int64_t padding;
  int64_t dilation;
  DataFormat data_format;
  bool normalize;
  bool has_starts;
  JAXOPS_ATTRIBUTES(padding, dilation, data_format, normalize, has_starts);
};

struct ForwardAttributes : GradAttributes {
  Activation activation;
  bool has_bias;
  bool has_state;
  JAXOPS_ATTRIBUTES(padding, dilation, data_format, normalize, has_starts, activation, has_bias,
                    has_state);
};

// `x` is any sequence of the call and `weight` its filters or their gradient.
xf::Error SetGeometry(Geometry& geometry, const GradAttributes& attributes, const Buffer& x,
                      const Buffer& weight) {
  const Dimensions dims = x.dimensions();
  const Dimensions filter = weight.dimensions();
  const bool ntc = attributes.data_format == DataFormat::kNTC;
  bool good = dims.size() >= 2 && filter.size() == dims.size() + 1;
  if (good) {
    geometry.data_format = attributes.data_format;
    geometry.normalize = attributes.normalize;
    geometry.time = dims[dims.size() - (ntc ? 2 : 1)];
    geometry.channels = dims[dims.size() - (ntc ? 1 : 2)];
    geometry.heads = filter[filter.size() - 2];
    geometry.taps = filter[filter.size() - 1];
    geometry.padding = attributes.padding;
    geometry.dilation = attributes.dilation;
    good = geometry.heads >= 1 && geometry.taps >= 1 && geometry.channels % geometry.heads == 0 &&
           filter[filter.size() - 3] == geometry.time;
  }
  if (!good) {
    return InvalidArgument(kName, ": weight does not fit: x is ", ToString(dims), ", got ",
                           ToString(filter));
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
  return xf::Error::Success();
}

// Sets the type of an operand or result other than the sequences, which are of type `dtype`.
xf::Error SetParameterType(DType& out, const char* what, const Buffer& buffer, DType dtype) {
  JAXOPS_RETURN_IF_ERROR(SetType(out, kName, what, buffer));
  if (out == DType::kF64 && dtype != DType::kF64) {
    return InvalidArgument(kName, ": ", what, " is f64, which x then must be too");
  }
  return xf::Error::Success();
}

// Takes the starts of segments from the operands.
xf::Error SetStarts(const int32_t*& starts, BatchOperand& operand, const Buffer& buffer,
                    size_t rank, int64_t time) {
  JAXOPS_RETURN_IF_ERROR(CheckBuffer(kName, "starts", buffer, rank, {time}, xf::DataType::S32));
  starts = static_cast<const int32_t*>(buffer.untyped_data());
  operand = {buffer.dimensions(), 1};
  return xf::Error::Success();
}

xf::Error Convolve(Context context, Buffer x, Buffer weight, xf::RemainingArgs rest, Result y,
                   WorkSpace work_space, const ForwardAttributes& attributes) {
  Forward forward = {};
  Geometry& geometry = forward.geometry;
  JAXOPS_RETURN_IF_ERROR(SetGeometry(geometry, attributes, x, weight));
  JAXOPS_RETURN_IF_ERROR(SetType(forward.dtype, kName, "x", x));
  JAXOPS_RETURN_IF_ERROR(SetParameterType(forward.weight_dtype, "weight", weight, forward.dtype));
  forward.activation = attributes.activation;
  forward.x = x.untyped_data();
  forward.weight = weight.untyped_data();
  forward.y = y->untyped_data();
  forward.bias_dtype = forward.state_dtype = forward.weight_dtype;
  const size_t rank = x.dimensions().size() - 2;
  JAXOPS_RETURN_IF_ERROR(
      CheckBuffer(kName, "result", *y, rank, x.dimensions().last(2), x.element_type()));
  const size_t expected = attributes.has_bias + attributes.has_starts + attributes.has_state;
  if (rest.size() != expected) {
    return InvalidArgument(kName, ": expected ", expected + 2, " operands, got ", rest.size() + 2);
  }
  // x stands in for the batch dimensions of absent operands, whose offsets nothing reads.
  const BatchOperand own_x{x.dimensions(), 2};
  BatchOperand bias_operand = own_x, starts_operand = own_x, state_operand = own_x;
  size_t index = 0;
  if (attributes.has_bias) {
    const xf::ErrorOr<Buffer> bias = rest.get<Buffer>(index++);
    if (!bias) return bias.error();
    JAXOPS_RETURN_IF_ERROR(SetParameterType(forward.bias_dtype, "bias", *bias, forward.dtype));
    JAXOPS_RETURN_IF_ERROR(
        CheckBuffer(kName, "bias", *bias, rank, {geometry.channels}, bias->element_type()));
    forward.bias = bias->untyped_data();
    bias_operand = {bias->dimensions(), 1};
  }
  if (attributes.has_starts) {
    const xf::ErrorOr<Buffer> starts = rest.get<Buffer>(index++);
    if (!starts) return starts.error();
    JAXOPS_RETURN_IF_ERROR(SetStarts(forward.starts, starts_operand, *starts, rank, geometry.time));
  }
  if (attributes.has_state) {
    const xf::ErrorOr<Buffer> state = rest.get<Buffer>(index++);
    if (!state) return state.error();
    JAXOPS_RETURN_IF_ERROR(SetParameterType(forward.state_dtype, "state", *state, forward.dtype));
    std::array<int64_t, 2> core = {geometry.padding, geometry.channels};
    if (geometry.data_format == DataFormat::kNCT) core = {geometry.channels, geometry.padding};
    JAXOPS_RETURN_IF_ERROR(
        CheckBuffer(kName, "state", *state, rank, {core[0], core[1]}, state->element_type()));
    forward.state = state->untyped_data();
    state_operand = {state->dimensions(), 2};
  }
  JAXOPS_RETURN_IF_ERROR(SetBatch<Forward::kOperands>(
      kName, forward.batch,
      {own_x, BatchOperand{weight.dimensions(), 3}, bias_operand, starts_operand, state_operand,
       BatchOperand{y->dimensions(), 2, BatchOperand::kWritten}},
      rank));
  JAXOPS_RETURN_IF_ERROR(AnswerChoice(jaxops::dynamic_conv::PrefersKernels(forward)));
  void* scales = nullptr;
  JAXOPS_RETURN_IF_ERROR(
      TakeWorkSpace(scales, kName, work_space, jaxops::dynamic_conv::WorkSpaceBytes(forward)));
  ExpectWrites(*y);
  return Run(context, kName, JAXOPS_KERNEL(dynamic_conv, Forward), forward, scales);
}

// The buffers of a gradient, some of which are optional.
struct GradBuffers {
  Buffer g;
  std::optional<Buffer> x = {}, weight = {}, dx = {}, dweight = {};
};

xf::Error RunGrad(Context context, const GradAttributes& attributes, const GradBuffers& buffers,
                  xf::RemainingArgs rest, WorkSpace work_space) {
  Backward backward = {};
  const Buffer& g = buffers.g;
  const Buffer& filters = buffers.weight ? *buffers.weight : *buffers.dweight;
  JAXOPS_RETURN_IF_ERROR(SetGeometry(backward.geometry, attributes, g, filters));
  JAXOPS_RETURN_IF_ERROR(SetType(backward.dtype, kName, "g", g));
  JAXOPS_RETURN_IF_ERROR(
      SetParameterType(backward.weight_dtype, "weight", filters, backward.dtype));
  const size_t rank = g.dimensions().size() - 2;
  const Dimensions step = g.dimensions().last(2);
  const xf::DataType type = g.element_type();
  if (buffers.x) JAXOPS_RETURN_IF_ERROR(CheckBuffer(kName, "x", *buffers.x, rank, step, type));
  if (buffers.dx) JAXOPS_RETURN_IF_ERROR(CheckBuffer(kName, "dx", *buffers.dx, rank, step, type));
  backward.dweight_dtype = backward.weight_dtype;
  if (buffers.dweight) {
    const Buffer& dweight = *buffers.dweight;
    JAXOPS_RETURN_IF_ERROR(
        SetParameterType(backward.dweight_dtype, "dweight", dweight, backward.dtype));
    JAXOPS_RETURN_IF_ERROR(CheckBuffer(kName, "dweight", dweight, rank,
                                       filters.dimensions().last(3), dweight.element_type()));
  }
  if (attributes.normalize && !buffers.weight) {
    return InvalidArgument(kName, ": the gradient of normalized weights needs these");
  }
  if (rest.size() != (attributes.has_starts ? 1 : 0)) {
    return InvalidArgument(kName, ": ", rest.size(), " operands follow, with has_starts ",
                           attributes.has_starts);
  }
  backward.x = DataOf(buffers.x);
  backward.weight = DataOf(buffers.weight);
  backward.g = g.untyped_data();
  backward.dx = DataOf(buffers.dx);
  backward.dweight = DataOf(buffers.dweight);

  // g stands in for the batch dimensions of absent operands, whose offsets nothing reads.
  const BatchOperand own_g{g.dimensions(), 2};
  BatchOperand starts_operand = own_g;
  if (attributes.has_starts) {
    const xf::ErrorOr<Buffer> starts = rest.get<Buffer>(0);
    if (!starts) return starts.error();
    JAXOPS_RETURN_IF_ERROR(
        SetStarts(backward.starts, starts_operand, *starts, rank, backward.geometry.time));
  }
  const auto operand = [&](const std::optional<Buffer>& buffer, size_t core,
                           BatchOperand::Kind kind) {
    return buffer ? BatchOperand{buffer->dimensions(), core, kind} : own_g;
  };
  JAXOPS_RETURN_IF_ERROR(SetBatch<Backward::kOperands>(
      kName, backward.batch,
      {operand(buffers.x, 2, BatchOperand::kRead), operand(buffers.weight, 3, BatchOperand::kRead),
       own_g, starts_operand, operand(buffers.dx, 2, BatchOperand::kWritten),
       operand(buffers.dweight, 3, BatchOperand::kWritten)},
      rank));
  JAXOPS_RETURN_IF_ERROR(AnswerChoice(jaxops::dynamic_conv::PrefersKernels(backward)));
  void* scales = nullptr;
  JAXOPS_RETURN_IF_ERROR(
      TakeWorkSpace(scales, kName, work_space, jaxops::dynamic_conv::WorkSpaceBytes(backward)));
  if (buffers.dx) ExpectWrites(*buffers.dx);
  if (buffers.dweight) ExpectWrites(*buffers.dweight);
  return Run(context, "dynamic_conv gradient", JAXOPS_KERNEL(dynamic_conv, Backward), backward,
             scales);
}

xf::Error InputGrad(Context context, Buffer g, Buffer weight, xf::RemainingArgs starts, Result dx,
                    WorkSpace work_space, const GradAttributes& attributes) {
  return RunGrad(context, attributes, {.g = g, .weight = weight, .dx = *dx}, starts, work_space);
}

xf::Error WeightGrad(Context context, Buffer x, Buffer g, xf::RemainingArgs starts, Result dweight,
                     WorkSpace work_space, const GradAttributes& attributes) {
  return RunGrad(context, attributes, {.g = g, .x = x, .dweight = *dweight}, starts, work_space);
}

xf::Error Grad(Context context, Buffer x, Buffer weight, Buffer g, xf::RemainingArgs starts,
               Result dx, Result dweight, WorkSpace work_space, const GradAttributes& attributes) {
  return RunGrad(context, attributes,
                 {.g = g, .x = x, .weight = weight, .dx = *dx, .dweight = *dweight}, starts,
                 work_space);
}

const Registration kConvolve("jaxops_dynamic_conv", kHandler<Convolve>);
const Registration kInputGrad("jaxops_dynamic_conv_input_grad", kHandler<InputGrad>);
const Registration kWeightGrad("jaxops_dynamic_conv_weight_grad", kHandler<WeightGrad>);
const Registration kGrad("jaxops_dynamic_conv_backward", kHandler<Grad>);

}  // namespace
}  // namespace jaxops::ffi::dynamic_conv
