// Handlers of the lightweight convolution.
#include "common/lightweight_conv.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "common/lightweight_conv_choice.h"
#ifdef JAXOPS_PLATFORM_CUDA
#include "cuda/lightweight_conv/launch.h"
#else
#include "cpu/lightweight_conv.h"
#endif
#include "ffi/bind.h"
#include "ffi/choice.h"
#include "ffi/decode.h"
#include "ffi/work_space.h"

namespace jaxops::ffi::lightweight_conv {
namespace {

namespace xf = xla::ffi;
using jaxops::lightweight_conv::Backward;
using jaxops::lightweight_conv::Forward;
using jaxops::lightweight_conv::Geometry;

constexpr char kName[] = "lightweight_conv";

// The attributes of both gradients.
struct GradAttributes {
  int64_t padding;
  int64_t dilation;
  DataFormat data_format;
  JAXOPS_ATTRIBUTES(padding, dilation, data_format);
};

struct ForwardAttributes : GradAttributes {
  Activation activation;
  bool flip_taps;
  bool has_bias;
  bool has_starts;
  bool has_state;
  bool has_slots;
  JAXOPS_ATTRIBUTES(padding, dilation, data_format, activation, flip_taps, has_bias, has_starts,
                    has_state, has_slots);
};

xf::Error Check(bool good, const char* what, const Buffer& x, const Buffer& other) {
  if (good) return xf::Error::Success();
  return InvalidArgument(kName, ": ", what, " does not fit: x is ", ToString(x.dimensions()),
                         ", got ", ToString(other.dimensions()));
}

// `weight` has a shape (..., heads, taps).
xf::Error SetGeometry(Geometry& geometry, const GradAttributes& attributes, const Buffer& x,
                      const Buffer& weight) {
  const Dimensions dims = x.dimensions();
  const Dimensions filter = weight.dimensions();
  if (dims.size() < 2 || filter.size() != dims.size()) {
    return Check(false, "rank of weight", x, weight);
  }
  geometry.data_format = attributes.data_format;
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
  // A single tap has no distance to another, and kernels have `dilation` phases.
  if (geometry.taps == 1) geometry.dilation = 1;
  return xf::Error::Success();
}

// Sets the type of a weight or a bias, or of its gradient, for sequences of type `dtype`.
xf::Error SetParameterType(DType& out, const char* what, const Buffer& buffer, DType dtype) {
  JAXOPS_RETURN_IF_ERROR(SetType(out, kName, what, buffer));
  if (out == DType::kF64 && dtype != DType::kF64) {
    return InvalidArgument(kName, ": ", what, " is f64, which x then must be too");
  }
  return xf::Error::Success();
}

// The buffers of a forward call after x and weight.
struct Optional {
  std::optional<Buffer> bias, starts, state, slots;
};

// Takes the buffers of which the attributes tell, in order.
xf::Error TakeOptional(Optional& optional, xf::RemainingArgs rest,
                       const ForwardAttributes& attributes) {
  size_t taken = 0;
  const auto take = [&](bool has, std::optional<Buffer>& buffer) {
    if (!has) return;
    if (taken < rest.size()) buffer = *rest.get<Buffer>(taken);
    ++taken;
  };
  take(attributes.has_bias, optional.bias);
  take(attributes.has_starts, optional.starts);
  take(attributes.has_state, optional.state);
  take(attributes.has_slots, optional.slots);
  if (taken != rest.size()) {
    return InvalidArgument(kName, ": expected ", taken + 2, " operands, got ", rest.size() + 2);
  }
  if (attributes.has_slots && !(attributes.has_starts && attributes.has_state &&
                                attributes.data_format == DataFormat::kNTC)) {
    return InvalidArgument(kName, ": slots need starts, a state and the layout NTC");
  }
  return xf::Error::Success();
}

// Sets the segments of a call: int32, one entry a step.
xf::Error SetSteps(const int32_t*& out, const char* what, const Buffer& buffer, size_t rank,
                   int64_t time) {
  JAXOPS_RETURN_IF_ERROR(CheckBuffer(kName, what, buffer, rank, {time}, xf::DataType::S32));
  out = static_cast<const int32_t*>(buffer.untyped_data());
  return xf::Error::Success();
}

// Sets the state of a call and its batch dimensions.
xf::Error SetState(Forward& forward, BatchOperand& operand, const Buffer& state, bool has_slots,
                   size_t rank) {
  const Geometry& g = forward.geometry;
  JAXOPS_RETURN_IF_ERROR(SetParameterType(forward.state_dtype, "state", state, forward.dtype));
  const size_t core = has_slots ? 3 : 2;
  const Dimensions dims = state.dimensions();
  forward.num_slots = has_slots && dims.size() == rank + core ? dims[rank] : 0;
  const xf::DataType type = state.element_type();
  if (has_slots) {
    JAXOPS_RETURN_IF_ERROR(
        CheckBuffer(kName, "state", state, rank, {forward.num_slots, g.padding, g.channels}, type));
  } else if (g.data_format == DataFormat::kNTC) {
    JAXOPS_RETURN_IF_ERROR(CheckBuffer(kName, "state", state, rank, {g.padding, g.channels}, type));
  } else {
    JAXOPS_RETURN_IF_ERROR(CheckBuffer(kName, "state", state, rank, {g.channels, g.padding}, type));
  }
  forward.state = state.untyped_data();
  operand = {dims, core};
  return xf::Error::Success();
}

xf::Error Convolve(Context context, Buffer x, Buffer weight, xf::RemainingArgs rest, Result y,
                   const ForwardAttributes& attributes) {
  Forward forward;
  Optional optional;
  JAXOPS_RETURN_IF_ERROR(TakeOptional(optional, rest, attributes));
  JAXOPS_RETURN_IF_ERROR(SetGeometry(forward.geometry, attributes, x, weight));
  JAXOPS_RETURN_IF_ERROR(SetType(forward.dtype, kName, "x", x));
  JAXOPS_RETURN_IF_ERROR(SetParameterType(forward.weight_dtype, "weight", weight, forward.dtype));
  forward.activation = attributes.activation;
  forward.flip_taps = attributes.flip_taps;
  forward.x = x.untyped_data();
  forward.weight = weight.untyped_data();
  forward.y = y->untyped_data();
  forward.bias = nullptr;
  forward.bias_dtype = forward.weight_dtype;
  forward.starts = nullptr;
  forward.state = nullptr;
  forward.state_dtype = forward.dtype;
  forward.slots = nullptr;
  forward.num_slots = 0;
  const size_t rank = x.dimensions().size() - 2;
  JAXOPS_RETURN_IF_ERROR(
      CheckBuffer(kName, "result", *y, rank, x.dimensions().last(2), x.element_type()));
  // The weight stands in for the batch dimensions of absent operands, whose offsets nothing reads.
  const BatchOperand absent{weight.dimensions(), 2};
  BatchOperand bias_operand = absent, starts_operand = absent, state_operand = absent,
               slots_operand = absent;
  const int64_t time = forward.geometry.time;
  if (const auto& bias = optional.bias) {
    JAXOPS_RETURN_IF_ERROR(SetParameterType(forward.bias_dtype, "bias", *bias, forward.dtype));
    JAXOPS_RETURN_IF_ERROR(
        CheckBuffer(kName, "bias", *bias, rank, {forward.geometry.channels}, bias->element_type()));
    forward.bias = bias->untyped_data();
    bias_operand = {bias->dimensions(), 1};
  }
  if (const auto& starts = optional.starts) {
    JAXOPS_RETURN_IF_ERROR(SetSteps(forward.starts, "starts", *starts, rank, time));
    starts_operand = {starts->dimensions(), 1};
  }
  if (optional.state) {
    JAXOPS_RETURN_IF_ERROR(
        SetState(forward, state_operand, *optional.state, attributes.has_slots, rank));
  }
  if (const auto& slots = optional.slots) {
    JAXOPS_RETURN_IF_ERROR(SetSteps(forward.slots, "slots", *slots, rank, time));
    slots_operand = {slots->dimensions(), 1};
  }
  JAXOPS_RETURN_IF_ERROR(SetBatch<Forward::kOperands>(
      kName, forward.batch,
      {BatchOperand{x.dimensions(), 2}, BatchOperand{weight.dimensions(), 2}, bias_operand,
       starts_operand, state_operand, slots_operand,
       BatchOperand{y->dimensions(), 2, BatchOperand::kWritten}},
      rank));
  JAXOPS_RETURN_IF_ERROR(AnswerChoice(jaxops::lightweight_conv::PrefersKernels(forward)));
  ExpectWrites(*y);
  return Run(context, kName, JAXOPS_KERNEL(lightweight_conv, Forward), forward);
}

// The buffers of a gradient, some of which are optional.
struct GradBuffers {
  Buffer x, g, dweight;
  std::optional<Buffer> starts = {}, weight = {}, dx = {}, dbias = {};
};

xf::Error RunGrad(Context context, const GradAttributes& attributes, const GradBuffers& buffers,
                  WorkSpace work_space) {
  Backward backward;
  const Buffer& x = buffers.x;
  const Buffer& g = buffers.g;
  const Buffer& dweight = buffers.dweight;
  JAXOPS_RETURN_IF_ERROR(SetGeometry(backward.geometry, attributes, x, dweight));
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
  backward.starts = nullptr;
  if (buffers.starts) {
    JAXOPS_RETURN_IF_ERROR(
        SetSteps(backward.starts, "starts", *buffers.starts, rank, backward.geometry.time));
  }
  backward.bias_dtype = backward.weight_dtype;
  if (buffers.dbias) {
    const Buffer& dbias = *buffers.dbias;
    JAXOPS_RETURN_IF_ERROR(SetParameterType(backward.bias_dtype, "bias", dbias, backward.dtype));
    JAXOPS_RETURN_IF_ERROR(CheckBuffer(kName, "dbias", dbias, rank, {backward.geometry.channels},
                                       dbias.element_type()));
    if (!std::equal(filter.begin() - rank, filter.begin(), dbias.dimensions().begin())) {
      return Check(false, "batch of dbias", x, dbias);
    }
  }
  backward.x = x.untyped_data();
  backward.g = g.untyped_data();
  backward.weight = DataOf(buffers.weight);
  backward.dx = DataOf(buffers.dx);
  backward.dweight = dweight.untyped_data();
  backward.dbias = DataOf(buffers.dbias);

  // g stands in for the batch dimensions of absent operands, whose offsets nothing reads.
  const BatchOperand own_g{g.dimensions(), 2};
  const std::array<BatchOperand, Backward::kOperands> operands = {
      BatchOperand{x.dimensions(), 2},
      buffers.weight ? BatchOperand{buffers.weight->dimensions(), 2} : own_g, own_g,
      buffers.starts ? BatchOperand{buffers.starts->dimensions(), 1} : own_g,
      buffers.dx ? BatchOperand{buffers.dx->dimensions(), 2, BatchOperand::kWritten} : own_g};
  std::array<BatchOperand, Backward::kOperands + 1> batch;
  std::copy(operands.begin(), operands.end(), batch.begin());
  batch.back() = {dweight.dimensions(), 2, BatchOperand::kSummed};
  JAXOPS_RETURN_IF_ERROR(CheckBatch(kName, batch, rank));
  // dweight has size 1 along the summed dimensions.
  const auto kept = [&](size_t dim) { return dweight.dimensions()[dim] != 1; };
  JAXOPS_RETURN_IF_ERROR(
      BuildBatchMap<Backward::kOperands>(kName, backward.kept, operands, rank, kept));
  JAXOPS_RETURN_IF_ERROR(BuildBatchMap<Backward::kOperands>(
      kName, backward.summed, operands, rank, [&](size_t dim) { return !kept(dim); }));
  JAXOPS_RETURN_IF_ERROR(AnswerChoice(jaxops::lightweight_conv::PrefersKernels(backward)));
  void* partials = nullptr;
  JAXOPS_RETURN_IF_ERROR(TakeWorkSpace(partials, kName, work_space,
                                       jaxops::lightweight_conv::WorkSpaceBytes(backward)));
  if (buffers.dx) ExpectWrites(*buffers.dx);
  return Run(context, "lightweight_conv gradient", JAXOPS_KERNEL(lightweight_conv, Backward),
             backward, jaxops::lightweight_conv::CountSplits(backward), partials);
}

xf::Error FilterGrad(Context context, Buffer x, Buffer g, std::optional<Buffer> starts,
                     Result dweight, WorkSpace work_space, const GradAttributes& attributes) {
  return RunGrad(context, attributes, {x, g, *dweight, starts}, work_space);
}

xf::Error Grad(Context context, Buffer x, Buffer weight, Buffer g, std::optional<Buffer> starts,
               Result dx, Result dweight, std::optional<Result> dbias, WorkSpace work_space,
               const GradAttributes& attributes) {
  // The last result is the work space, an array of bytes, with dbias or without.
  if (!work_space && dbias && (*dbias)->element_type() == xf::DataType::U8) {
    std::swap<std::optional<Result>>(dbias, work_space);
  }
  return RunGrad(
      context, attributes,
      {x, g, *dweight, starts, weight, *dx, dbias ? std::optional<Buffer>(**dbias) : std::nullopt},
      work_space);
}

const Registration kConvolve("jaxops_lightweight_conv", kHandler<Convolve>);
const Registration kFilterGrad("jaxops_lightweight_conv_filter_grad", kHandler<FilterGrad>);
const Registration kGrad("jaxops_lightweight_conv_backward", kHandler<Grad>);

}  // namespace
}  // namespace jaxops::ffi::lightweight_conv
