// Handlers of the focal losses.
#include "common/focal_loss.h"

#include <array>
#include <optional>

#ifdef JAXOPS_PLATFORM_CUDA
#include "cuda/focal_loss/launch.h"
#else
#include "cpu/focal_loss.h"
#endif
#include "ffi/bind.h"
#include "ffi/decode.h"
#include "ffi/work_space.h"

namespace jaxops::ffi {

using focal_loss::Power;

template <>
inline constexpr auto kEnumNames<Power> = std::to_array<EnumName<Power>>({{"any", Power::kAny},
                                                                          {"0", Power::kZero},
                                                                          {"0.5", Power::kHalf},
                                                                          {"1", Power::kOne},
                                                                          {"2", Power::kTwo}});

namespace focal_loss {
namespace {

namespace xf = xla::ffi;
using jaxops::focal_loss::Sigmoid;
using jaxops::focal_loss::Softmax;
using jaxops::focal_loss::TargetType;

constexpr char kSigmoid[] = "sigmoid_focal_loss";
constexpr char kSoftmax[] = "softmax_focal_loss";

struct SigmoidAttributes {
  int64_t rows;  // the number of dimensions of rows
  Power power;
  bool has_ignored;
  int32_t ignored;
  JAXOPS_ATTRIBUTES(rows, power, has_ignored, ignored);
};

struct SoftmaxAttributes {
  int64_t rows;  // the number of dimensions of rows
  Power power;
  JAXOPS_ATTRIBUTES(rows, power);
};

// The results of a call that are wanted: at most one of loss and gradient.
struct Results {
  std::optional<Buffer> loss = {}, gradient = {}, sum = {};
};

// Sets the members of a call that follow from the logits, and the number of batch dimensions.
template <typename Call>
xf::Error SetShape(Call& call, const char* name, int64_t rows, Power power, const Buffer& logits,
                   size_t& batch_rank) {
  const Dimensions dims = logits.dimensions();
  JAXOPS_RETURN_IF_ERROR(SetType(call.dtype, name, "logits", logits));
  if (rows < 0 || static_cast<uint64_t>(rows) >= dims.size()) {
    return InvalidArgument(name, ": logits must have more than ", rows, " dimensions, got ",
                           ToString(dims));
  }
  call.power = power;
  batch_rank = dims.size() - rows - 1;
  call.rows = 1;
  for (size_t i = batch_rank; i + 1 < dims.size(); ++i) call.rows *= dims[i];
  call.classes = dims.back();
  return xf::Error::Success();
}

// Sets the weights of rows and their batch strides, if the call has weights.
template <typename Call>
xf::Error SetWeight(Call& call, BatchOperand& operand, const char* name,
                    const std::optional<Buffer>& weight, Dimensions rows, size_t batch_rank,
                    xf::DataType type) {
  call.weight = DataOf(weight);
  if (!weight) return xf::Error::Success();
  operand = {weight->dimensions(), rows.size()};
  return CheckBuffer(name, "weights", *weight, batch_rank, rows, type);
}

// Sets the wanted results and their batch strides: loss or gradient, each with its dimensions and
// type, and the sum.
template <typename Call>
xf::Error SetResults(Call& call, BatchOperand& result, BatchOperand& sum, const char* name,
                     const Results& results, size_t batch_rank, Dimensions loss_core,
                     xf::DataType loss_type, Dimensions gradient_core, xf::DataType type) {
  call.loss = DataOf(results.loss);
  call.gradient = DataOf(results.gradient);
  call.sum = DataOf(results.sum);
  if (results.loss) {
    JAXOPS_RETURN_IF_ERROR(
        CheckBuffer(name, "loss", *results.loss, batch_rank, loss_core, loss_type));
    result = {results.loss->dimensions(), loss_core.size(), BatchOperand::kWritten};
    ExpectWrites(*results.loss);
  }
  if (results.gradient) {
    JAXOPS_RETURN_IF_ERROR(
        CheckBuffer(name, "gradient", *results.gradient, batch_rank, gradient_core, type));
    result = {results.gradient->dimensions(), gradient_core.size(), BatchOperand::kWritten};
    ExpectWrites(*results.gradient);
  }
  if (results.sum) {
    JAXOPS_RETURN_IF_ERROR(
        CheckBuffer(name, "sum", *results.sum, batch_rank, {}, ArithmeticType(call.dtype)));
    sum = {results.sum->dimensions(), 0, BatchOperand::kWritten};
  }
  return xf::Error::Success();
}

Dimensions CoreOf(const Buffer& buffer, size_t batch_rank) {
  return buffer.dimensions().last(buffer.dimensions().size() - batch_rank);
}

struct SigmoidOperands {
  Buffer logits, labels, class_ids, scale, parameters;
  std::optional<Buffer> weight;
};

xf::Error RunSigmoid(Context context, const SigmoidAttributes& attributes,
                     const SigmoidOperands& buffers, const Results& results, WorkSpace work_space) {
  Sigmoid call;
  size_t batch = 0;
  JAXOPS_RETURN_IF_ERROR(
      SetShape(call, kSigmoid, attributes.rows, attributes.power, buffers.logits, batch));
  const Dimensions all = CoreOf(buffers.logits, batch);
  const Dimensions rows = all.first(all.size() - 1);
  const Dimensions classes = all.last(1);
  const xf::DataType arithmetic = ArithmeticType(call.dtype);

  xf::DataType label_type = buffers.labels.element_type();
  call.soft = label_type != xf::DataType::S32;
  call.target_type = label_type == xf::DataType::PRED ? TargetType::kBool
                     : label_type == arithmetic       ? TargetType::kArithmetic
                                                      : TargetType::kLogits;
  if (call.soft && call.target_type == TargetType::kLogits)
    label_type = buffers.logits.element_type();
  JAXOPS_RETURN_IF_ERROR(
      CheckBuffer(kSigmoid, "labels", buffers.labels, batch, call.soft ? all : rows, label_type));
  JAXOPS_RETURN_IF_ERROR(
      CheckBuffer(kSigmoid, "class ids", buffers.class_ids, batch, classes, xf::DataType::S32));
  JAXOPS_RETURN_IF_ERROR(CheckBuffer(kSigmoid, "scale", buffers.scale, batch, {}, arithmetic));
  JAXOPS_RETURN_IF_ERROR(
      CheckBuffer(kSigmoid, "parameters", buffers.parameters, batch, {3}, arithmetic));
  // The scale stands in for the batch dimensions of absent buffers, whose offsets nothing reads.
  BatchOperand weight{buffers.scale.dimensions(), 0}, elements = weight, sum = weight;
  JAXOPS_RETURN_IF_ERROR(
      SetWeight(call, weight, kSigmoid, buffers.weight, rows, batch, arithmetic));
  JAXOPS_RETURN_IF_ERROR(SetResults(call, elements, sum, kSigmoid, results, batch, all,
                                    buffers.logits.element_type(), all,
                                    buffers.logits.element_type()));
  call.has_ignored = attributes.has_ignored && !call.soft;
  call.ignored = attributes.ignored;
  call.logits = buffers.logits.untyped_data();
  call.labels = buffers.labels.untyped_data();
  call.class_ids = static_cast<const int32_t*>(buffers.class_ids.untyped_data());
  call.scale = buffers.scale.untyped_data();
  call.parameters = buffers.parameters.untyped_data();
  JAXOPS_RETURN_IF_ERROR(SetBatch<Sigmoid::kOperands>(
      kSigmoid, call.batch,
      {BatchOperand{buffers.logits.dimensions(), all.size()},
       BatchOperand{buffers.labels.dimensions(), call.soft ? all.size() : rows.size()},
       BatchOperand{buffers.class_ids.dimensions(), 1}, BatchOperand{buffers.scale.dimensions(), 0},
       BatchOperand{buffers.parameters.dimensions(), 1}, weight, elements, sum},
      batch));
  void* partials = nullptr;
  JAXOPS_RETURN_IF_ERROR(
      TakeWorkSpace(partials, kSigmoid, work_space, jaxops::focal_loss::WorkSpaceBytes(call)));
  return Run(context, kSigmoid, JAXOPS_KERNEL(focal_loss, Sigmoid), call,
             jaxops::focal_loss::CountSplits(call), partials);
}

struct SoftmaxOperands {
  Buffer logits, labels, gamma;
  std::optional<Buffer> scale = {}, weight = {};
};

xf::Error RunSoftmax(Context context, const SoftmaxAttributes& attributes,
                     const SoftmaxOperands& buffers, const Results& results, WorkSpace work_space) {
  Softmax call;
  size_t batch = 0;
  JAXOPS_RETURN_IF_ERROR(
      SetShape(call, kSoftmax, attributes.rows, attributes.power, buffers.logits, batch));
  const Dimensions all = CoreOf(buffers.logits, batch);
  const Dimensions rows = all.first(all.size() - 1);
  const xf::DataType arithmetic = ArithmeticType(call.dtype);
  JAXOPS_RETURN_IF_ERROR(
      CheckBuffer(kSoftmax, "labels", buffers.labels, batch, rows, xf::DataType::S32));
  JAXOPS_RETURN_IF_ERROR(CheckBuffer(kSoftmax, "gamma", buffers.gamma, batch, {}, arithmetic));
  // Gamma stands in for the batch dimensions of absent buffers, whose offsets nothing reads.
  const BatchOperand gamma{buffers.gamma.dimensions(), 0};
  BatchOperand scale = gamma, weight = gamma, result = gamma, sum = gamma;
  call.scale = DataOf(buffers.scale);
  if (buffers.scale) {
    JAXOPS_RETURN_IF_ERROR(CheckBuffer(kSoftmax, "scale", *buffers.scale, batch, {}, arithmetic));
    scale = {buffers.scale->dimensions(), 0};
  }
  JAXOPS_RETURN_IF_ERROR(
      SetWeight(call, weight, kSoftmax, buffers.weight, rows, batch, arithmetic));
  JAXOPS_RETURN_IF_ERROR(SetResults(call, result, sum, kSoftmax, results, batch, rows, arithmetic,
                                    all, buffers.logits.element_type()));
  call.logits = buffers.logits.untyped_data();
  call.labels = static_cast<const int32_t*>(buffers.labels.untyped_data());
  call.gamma = buffers.gamma.untyped_data();
  JAXOPS_RETURN_IF_ERROR(SetBatch<Softmax::kOperands>(
      kSoftmax, call.batch,
      {BatchOperand{buffers.logits.dimensions(), all.size()},
       BatchOperand{buffers.labels.dimensions(), rows.size()}, scale, gamma, weight, result, sum},
      batch));
  void* partials = nullptr;
  JAXOPS_RETURN_IF_ERROR(
      TakeWorkSpace(partials, kSoftmax, work_space, jaxops::focal_loss::WorkSpaceBytes(call)));
  return Run(context, kSoftmax, JAXOPS_KERNEL(focal_loss, Softmax), call,
             jaxops::focal_loss::CountSplits(call), partials);
}

template <auto>
using ResultFor = Result;

// The handlers; kWanted are the members of Results that they compute.
template <std::optional<Buffer> Results::*... kWanted>
xf::Error SigmoidLoss(Context context, Buffer logits, Buffer labels, Buffer class_ids, Buffer scale,
                      Buffer parameters, std::optional<Buffer> weight, ResultFor<kWanted>... wanted,
                      WorkSpace work_space, const SigmoidAttributes& attributes) {
  Results results;
  ((results.*kWanted = *wanted), ...);
  return RunSigmoid(context, attributes, {logits, labels, class_ids, scale, parameters, weight},
                    results, work_space);
}

template <std::optional<Buffer> Results::*... kWanted>
xf::Error SoftmaxLoss(Context context, Buffer logits, Buffer labels, Buffer scale, Buffer gamma,
                      std::optional<Buffer> weight, ResultFor<kWanted>... wanted,
                      WorkSpace work_space, const SoftmaxAttributes& attributes) {
  Results results;
  ((results.*kWanted = *wanted), ...);
  return RunSoftmax(context, attributes, {logits, labels, gamma, scale, weight}, results,
                    work_space);
}

xf::Error SoftmaxLossOfRows(Context context, Buffer logits, Buffer labels, Buffer gamma,
                            Result loss, const SoftmaxAttributes& attributes) {
  return RunSoftmax(context, attributes, {logits, labels, gamma}, {.loss = *loss}, {});
}

constexpr auto kLoss = &Results::loss, kGradient = &Results::gradient, kSum = &Results::sum;

const Registration kSigmoidLoss("jaxops_sigmoid_focal_loss", kHandler<SigmoidLoss<kLoss>>);
const Registration kSigmoidGradient("jaxops_sigmoid_focal_loss_gradient",
                                    kHandler<SigmoidLoss<kGradient>>);
const Registration kSigmoidSum("jaxops_sigmoid_focal_loss_sum", kHandler<SigmoidLoss<kSum>>);
const Registration kSigmoidBoth("jaxops_sigmoid_focal_loss_value_and_gradient",
                                kHandler<SigmoidLoss<kSum, kGradient>>);
const Registration kSoftmaxLoss("jaxops_softmax_focal_loss", kHandler<SoftmaxLossOfRows>);
const Registration kSoftmaxGradient("jaxops_softmax_focal_loss_gradient",
                                    kHandler<SoftmaxLoss<kGradient>>);
const Registration kSoftmaxSum("jaxops_softmax_focal_loss_sum", kHandler<SoftmaxLoss<kSum>>);
const Registration kSoftmaxBoth("jaxops_softmax_focal_loss_value_and_gradient",
                                kHandler<SoftmaxLoss<kSum, kGradient>>);

}  // namespace
}  // namespace focal_loss
}  // namespace jaxops::ffi
