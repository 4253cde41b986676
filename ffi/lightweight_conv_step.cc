// The handlers of the steps of the lightweight and of the dynamic convolution.
#include "common/lightweight_conv_step.h"

#include <optional>

#ifdef JAXOPS_PLATFORM_CUDA
#include "cuda/lightweight_conv_step/launch.h"
#else
#include "cpu/lightweight_conv_step.h"
#endif
#include "ffi/bind.h"
#include "ffi/decode.h"

namespace jaxops::ffi::lightweight_conv_step {
namespace {

namespace xf = xla::ffi;
using jaxops::lightweight_conv_step::Step;

constexpr char kShared[] = "lightweight_conv_step";
constexpr char kDynamic[] = "dynamic_conv_step";

struct StepAttributes {
  int64_t dilation;
  Activation activation;
  JAXOPS_ATTRIBUTES(dilation, activation);
};

struct DynamicStepAttributes {
  int64_t dilation;
  Activation activation;
  bool normalize;
  JAXOPS_ATTRIBUTES(dilation, activation, normalize);
};

bool IsIndex(const Buffer& buffer) {
  return buffer.element_type() == xf::DataType::S32 || buffer.element_type() == xf::DataType::S64;
}

// Sets the type of an operand of calls with x of type `dtype`.
xf::Error SetOtherType(DType& out, const char* name, const char* what, const Buffer& buffer,
                       DType dtype) {
  JAXOPS_RETURN_IF_ERROR(SetType(out, name, what, buffer));
  if (out == DType::kF64 && dtype != DType::kF64) {
    return InvalidArgument(name, ": ", what, " is f64, which x then must be too");
  }
  return xf::Error::Success();
}

// A weight of `filter_rank` dimensions has the heads and the taps, after the entries and the steps
// of a dynamic convolution.
xf::Error SetSizes(Step& step, const char* name, int64_t dilation, size_t filter_rank, Dimensions x,
                   Dimensions state, Dimensions weight) {
  if (x.size() < 3 || state.size() != x.size() || weight.size() + 3 != x.size() + filter_rank) {
    return InvalidArgument(name, ": ranks do not fit: x is ", ToString(x), ", state ",
                           ToString(state), ", weight ", ToString(weight));
  }
  const Dimensions rows = x.last(3), slots = state.last(3), filter = weight.last(2);
  step.entries = rows[0];
  step.steps = rows[1];
  step.channels = rows[2];
  step.slots = slots[0];
  step.reach = slots[1];
  step.heads = filter[0];
  step.taps = filter[1];
  step.dilation = dilation;
  const bool is_dynamic = filter_rank == 4;
  step.weight_step = is_dynamic ? step.heads * step.taps : 0;
  step.weight_entry = step.steps * step.weight_step;
  const Dimensions own = weight.last(filter_rank);
  if (step.heads < 1 || step.taps < 1 || step.channels % step.heads != 0 ||
      (is_dynamic && (own[0] != step.entries || own[1] != step.steps))) {
    return InvalidArgument(name, ": weight ", ToString(weight), " does not fit x ", ToString(x));
  }
  if (dilation < 1 || !IsBounded(step.taps, dilation) || step.reach != (step.taps - 1) * dilation ||
      slots[2] != step.channels) {
    return InvalidArgument(name, ": state ", ToString(state), " does not fit ", step.taps,
                           " taps with dilation ", dilation, " of x ", ToString(x));
  }
  return xf::Error::Success();
}

template <const char* kName, size_t kFilterRank, typename Attributes>
xf::Error RunStep(Context context, Buffer x, Buffer state, Buffer weight,
                  std::optional<Buffer> first, std::optional<Buffer> second, Result y,
                  Result new_state, const Attributes& attributes) {
  // The bias, the indices or both.
  const bool is_only_indices = first && !second && IsIndex(*first);
  const Buffer* const bias = first && !is_only_indices ? &*first : nullptr;
  const Buffer* const indices = is_only_indices ? &*first : second ? &*second : nullptr;
  Step step;
  JAXOPS_RETURN_IF_ERROR(SetSizes(step, kName, attributes.dilation, kFilterRank, x.dimensions(),
                                  state.dimensions(), weight.dimensions()));
  step.normalize = false;
  if constexpr (kFilterRank == 4) step.normalize = attributes.normalize;
  JAXOPS_RETURN_IF_ERROR(SetType(step.dtype, kName, "x", x));
  JAXOPS_RETURN_IF_ERROR(SetOtherType(step.state_dtype, kName, "state", state, step.dtype));
  JAXOPS_RETURN_IF_ERROR(SetOtherType(step.weight_dtype, kName, "weight", weight, step.dtype));
  step.activation = attributes.activation;
  step.x = x.untyped_data();
  step.state = state.untyped_data();
  step.weight = weight.untyped_data();
  step.y = y->untyped_data();
  step.new_state = new_state->untyped_data();
  step.bias = bias == nullptr ? nullptr : bias->untyped_data();
  step.bias_dtype = step.weight_dtype;
  step.indices = indices == nullptr ? nullptr : indices->untyped_data();
  step.has_wide_indices = false;
  const size_t rank = x.dimensions().size() - 3;
  JAXOPS_RETURN_IF_ERROR(
      CheckBuffer(kName, "y", *y, rank, x.dimensions().last(3), x.element_type()));
  JAXOPS_RETURN_IF_ERROR(CheckBuffer(kName, "new state", *new_state, rank,
                                     state.dimensions().last(3), state.element_type()));
  // The weight stands in for the batch dimensions of absent operands, whose offsets nothing reads.
  const BatchOperand own_weight{weight.dimensions(), kFilterRank};
  BatchOperand bias_operand = own_weight, indices_operand = own_weight;
  if (bias != nullptr) {
    JAXOPS_RETURN_IF_ERROR(SetOtherType(step.bias_dtype, kName, "bias", *bias, step.dtype));
    JAXOPS_RETURN_IF_ERROR(
        CheckBuffer(kName, "bias", *bias, rank, {step.channels}, bias->element_type()));
    bias_operand = {bias->dimensions(), 1};
  }
  if (indices != nullptr) {
    if (!IsIndex(*indices)) {
      return InvalidArgument(kName, ": state_indices must be s32 or s64, got type ",
                             static_cast<int>(indices->element_type()));
    }
    JAXOPS_RETURN_IF_ERROR(CheckBuffer(kName, "state_indices", *indices, rank, {step.entries},
                                       indices->element_type()));
    step.has_wide_indices = indices->element_type() == xf::DataType::S64;
    indices_operand = {indices->dimensions(), 1};
  } else if (step.slots != step.entries) {
    return InvalidArgument(kName, ": state ", ToString(state.dimensions()), " must have ",
                           step.entries, " slots without state_indices");
  }
  JAXOPS_RETURN_IF_ERROR(SetBatch<Step::kOperands>(
      kName, step.batch,
      {BatchOperand{x.dimensions(), 3}, BatchOperand{state.dimensions(), 3}, own_weight,
       bias_operand, indices_operand, BatchOperand{y->dimensions(), 3, BatchOperand::kWritten},
       BatchOperand{new_state->dimensions(), 3, BatchOperand::kWritten}},
      rank));
  return Run(context, kName, JAXOPS_KERNEL(lightweight_conv_step, Step), step);
}

const Registration kStep("jaxops_lightweight_conv_step",
                         kHandler<RunStep<kShared, 2, StepAttributes>>);
const Registration kDynamicStep("jaxops_dynamic_conv_step",
                                kHandler<RunStep<kDynamic, 4, DynamicStepAttributes>>);

}  // namespace
}  // namespace jaxops::ffi::lightweight_conv_step
