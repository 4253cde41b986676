#include "ffi/focal_loss.h"

#include <algorithm>

namespace jaxops::ffi::focal_loss {
namespace {

namespace xf = xla::ffi;

constexpr char kSigmoid[] = "sigmoid_focal_loss";
constexpr char kSoftmax[] = "softmax_focal_loss";

xf::DataType Arithmetic(DType dtype) {
  return dtype == DType::kF64 ? xf::DataType::F64 : xf::DataType::F32;
}

// Sets what the logits say of the call, and how many batch dimensions there are.
template <typename Call>
xf::Error SetShape(Call& call, const char* name, int64_t rows, int32_t power,
                   const xf::AnyBuffer& logits, size_t& batch_rank) {
  const Dimensions dims = logits.dimensions();
  JAXOPS_RETURN_IF_ERROR(SetType(call.dtype, name, "logits", logits));
  if (rows < 0 || static_cast<uint64_t>(rows) >= dims.size()) {
    return InvalidArgument(name, ": logits must have more than ", rows, " dimensions, got ",
                           ToString(dims));
  }
  JAXOPS_RETURN_IF_ERROR(
      SetEnum(call.power, name, "power", power, jaxops::focal_loss::Power::kTwo));
  batch_rank = dims.size() - rows - 1;
  call.rows = 1;
  for (size_t i = batch_rank; i + 1 < dims.size(); ++i) call.rows *= dims[i];
  call.classes = dims.back();
  return xf::Error::Success();
}

// Sets the weights of rows, and where they are in the batch, if there are any.
template <typename Call>
xf::Error SetWeight(Call& call, BatchOperand& operand, const char* name,
                    const xf::RemainingArgs* weight, Dimensions rows, size_t batch_rank,
                    xf::DataType type) {
  call.weight = nullptr;
  if (!weight || weight->size() == 0) return xf::Error::Success();
  if (weight->size() > 1) return InvalidArgument(name, ": more operands than weights");
  const xf::ErrorOr<xf::AnyBuffer> buffer = weight->get<xf::AnyBuffer>(0);
  if (!buffer) return buffer.error();
  JAXOPS_RETURN_IF_ERROR(CheckBuffer(name, "weights", *buffer, batch_rank, rows, type));
  call.weight = buffer->untyped_data();
  operand = {buffer->dimensions(), rows.size()};
  return xf::Error::Success();
}

// Sets the results that are wanted, and where they are in the batch: loss or gradient, of these
// dimensions and types each, and the sum.
template <typename Call, typename Buffers>
xf::Error SetResults(Call& call, BatchOperand& result, BatchOperand& sum, const char* name,
                     const Buffers& buffers, size_t batch_rank, Dimensions loss_core,
                     xf::DataType loss_type, Dimensions gradient_core) {
  const xf::DataType type = buffers.logits.element_type();
  call.loss = call.gradient = call.sum = nullptr;
  if (buffers.loss) {
    JAXOPS_RETURN_IF_ERROR(
        CheckBuffer(name, "loss", *buffers.loss, batch_rank, loss_core, loss_type));
    call.loss = buffers.loss->untyped_data();
    result = {buffers.loss->dimensions(), loss_core.size(), BatchOperand::kWritten};
  }
  if (buffers.gradient) {
    JAXOPS_RETURN_IF_ERROR(
        CheckBuffer(name, "gradient", *buffers.gradient, batch_rank, gradient_core, type));
    call.gradient = buffers.gradient->untyped_data();
    result = {buffers.gradient->dimensions(), gradient_core.size(), BatchOperand::kWritten};
  }
  if (buffers.sum) {
    JAXOPS_RETURN_IF_ERROR(
        CheckBuffer(name, "sum", *buffers.sum, batch_rank, {}, Arithmetic(call.dtype)));
    call.sum = buffers.sum->untyped_data();
    sum = {buffers.sum->dimensions(), 0, BatchOperand::kWritten};
  }
  return xf::Error::Success();
}

Dimensions CoreOf(const xf::AnyBuffer& buffer, size_t batch_rank) {
  return buffer.dimensions().last(buffer.dimensions().size() - batch_rank);
}

struct SigmoidAttributes {
  int64_t rows;  // the number of dimensions of rows
  int32_t power;
  bool has_ignored;
  int32_t ignored;
};

template <typename T>
xf::Error Read(T& out, const xf::Dictionary& attributes, const char* name) {
  const xf::ErrorOr<T> value = attributes.get<T>(name);
  if (!value) {
    return InvalidArgument(kSigmoid, ": attribute ", name, ": ", value.error().message());
  }
  out = *value;
  return xf::Error::Success();
}

xf::Error Read(SigmoidAttributes& out, const xf::Dictionary& attributes) {
  JAXOPS_RETURN_IF_ERROR(Read(out.rows, attributes, "rows"));
  JAXOPS_RETURN_IF_ERROR(Read(out.power, attributes, "power"));
  JAXOPS_RETURN_IF_ERROR(Read(out.has_ignored, attributes, "has_ignored"));
  return Read(out.ignored, attributes, "ignored");
}

}  // namespace

xf::Error Decode(Sigmoid& call, const xf::Dictionary& dictionary, const SigmoidBuffers& buffers) {
  SigmoidAttributes attributes;
  JAXOPS_RETURN_IF_ERROR(Read(attributes, dictionary));
  size_t batch = 0;
  JAXOPS_RETURN_IF_ERROR(
      SetShape(call, kSigmoid, attributes.rows, attributes.power, buffers.logits, batch));
  const Dimensions all = CoreOf(buffers.logits, batch);
  const Dimensions rows = all.first(all.size() - 1);
  const Dimensions classes = all.last(1);
  const xf::DataType arithmetic = Arithmetic(call.dtype);

  call.soft = buffers.labels.element_type() != xf::DataType::S32;
  call.label_dtype = ToDType(buffers.labels.element_type()).value_or(call.dtype);
  const xf::DataType label_type = !call.soft                       ? xf::DataType::S32
                                  : call.label_dtype == call.dtype ? buffers.logits.element_type()
                                                                   : arithmetic;
  JAXOPS_RETURN_IF_ERROR(
      CheckBuffer(kSigmoid, "labels", buffers.labels, batch, call.soft ? all : rows, label_type));
  JAXOPS_RETURN_IF_ERROR(
      CheckBuffer(kSigmoid, "class ids", buffers.class_ids, batch, classes, xf::DataType::S32));
  JAXOPS_RETURN_IF_ERROR(CheckBuffer(kSigmoid, "scale", buffers.scale, batch, {}, arithmetic));
  JAXOPS_RETURN_IF_ERROR(
      CheckBuffer(kSigmoid, "parameters", buffers.parameters, batch, {3}, arithmetic));
  // What is not there takes the place of the scale, whose offsets it then never uses.
  BatchOperand weight{buffers.scale.dimensions(), 0}, elements = weight, sum = weight;
  JAXOPS_RETURN_IF_ERROR(
      SetWeight(call, weight, kSigmoid, &buffers.weight, rows, batch, arithmetic));
  JAXOPS_RETURN_IF_ERROR(SetResults(call, elements, sum, kSigmoid, buffers, batch, all,
                                    buffers.logits.element_type(), all));
  call.has_ignored = attributes.has_ignored && !call.soft;
  call.ignored = attributes.ignored;
  call.logits = buffers.logits.untyped_data();
  call.labels = buffers.labels.untyped_data();
  call.class_ids = static_cast<const int32_t*>(buffers.class_ids.untyped_data());
  call.scale = buffers.scale.untyped_data();
  call.parameters = buffers.parameters.untyped_data();
  return SetBatch<Sigmoid::kOperands>(
      kSigmoid, call.batch,
      {BatchOperand{buffers.logits.dimensions(), all.size()},
       BatchOperand{buffers.labels.dimensions(), call.soft ? all.size() : rows.size()},
       BatchOperand{buffers.class_ids.dimensions(), 1}, BatchOperand{buffers.scale.dimensions(), 0},
       BatchOperand{buffers.parameters.dimensions(), 1}, weight, elements, sum},
      batch);
}

xf::Error Decode(Softmax& call, const SoftmaxAttributes& attributes,
                 const SoftmaxBuffers& buffers) {
  size_t batch = 0;
  JAXOPS_RETURN_IF_ERROR(
      SetShape(call, kSoftmax, attributes.rows, attributes.power, buffers.logits, batch));
  const Dimensions all = CoreOf(buffers.logits, batch);
  const Dimensions rows = all.first(all.size() - 1);
  const xf::DataType arithmetic = Arithmetic(call.dtype);
  JAXOPS_RETURN_IF_ERROR(
      CheckBuffer(kSoftmax, "labels", buffers.labels, batch, rows, xf::DataType::S32));
  JAXOPS_RETURN_IF_ERROR(CheckBuffer(kSoftmax, "gamma", buffers.gamma, batch, {}, arithmetic));
  // What is not there takes the place of gamma, whose offsets it then never uses.
  const BatchOperand gamma{buffers.gamma.dimensions(), 0};
  BatchOperand scale = gamma, weight = gamma, result = gamma, sum = gamma;
  call.scale = nullptr;
  if (buffers.scale) {
    JAXOPS_RETURN_IF_ERROR(CheckBuffer(kSoftmax, "scale", *buffers.scale, batch, {}, arithmetic));
    call.scale = buffers.scale->untyped_data();
    scale = {buffers.scale->dimensions(), 0};
  }
  JAXOPS_RETURN_IF_ERROR(
      SetWeight(call, weight, kSoftmax, buffers.weight, rows, batch, arithmetic));
  JAXOPS_RETURN_IF_ERROR(
      SetResults(call, result, sum, kSoftmax, buffers, batch, rows, arithmetic, all));
  call.logits = buffers.logits.untyped_data();
  call.labels = static_cast<const int32_t*>(buffers.labels.untyped_data());
  call.gamma = buffers.gamma.untyped_data();
  return SetBatch<Softmax::kOperands>(
      kSoftmax, call.batch,
      {BatchOperand{buffers.logits.dimensions(), all.size()},
       BatchOperand{buffers.labels.dimensions(), rows.size()}, scale, gamma, weight, result, sum},
      batch);
}

}  // namespace jaxops::ffi::focal_loss
