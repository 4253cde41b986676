// XLA FFI handlers of convolution on the host.
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/conv.h"
#include "ffi/bind.h"
#include "ffi/decode.h"

namespace jaxops::ffi::conv {
namespace {

namespace xf = xla::ffi;
using jaxops::conv::cpu::Call;
using jaxops::conv::cpu::Calls;
using jaxops::im2col::kMaxDims;

constexpr char kName[] = "conv";

// There is an entry for each of the one to three dimensions.
struct ConvAttributes {
  Integers strides, dilation, low;
  JAXOPS_ATTRIBUTES(strides, dilation, low);
};

struct ForwardAttributes : ConvAttributes {
  Activation activation;
  JAXOPS_ATTRIBUTES(strides, dilation, low, activation);
};

// Images are (batch..., rows, in..., channels), kernels (batch..., taps..., channels of a group,
// outputs) and results (batch..., rows, out..., outputs).
struct Arrays {
  Dimensions in, taps, out;
};

// Fills `call` from these sizes, and `rank` with the number of batch dimensions.
xf::Error Decode(Call& call, size_t& rank, const Arrays& arrays, const ConvAttributes& attributes) {
  const auto& [in, taps, out] = arrays;
  const auto& [strides, dilation, low] = attributes;
  const size_t count = strides.size();
  const auto mismatch = [&] {
    return InvalidArgument("conv: images ", ToString(in), ", kernel ", ToString(taps),
                           " and results ", ToString(out), " do not fit");
  };
  if (count < 1 || count > kMaxDims || dilation.size() != count || low.size() != count ||
      in.size() < count + 2 || out.size() != in.size() || taps.size() != in.size()) {
    return mismatch();
  }
  rank = in.size() - count - 2;
  if (in[rank] != out[rank]) return mismatch();
  for (size_t i = 0; i < count; ++i) {
    if (strides[i] < 1 || dilation[i] < 1) {
      return InvalidArgument("conv: strides and dilations must be >= 1, got ", strides[i], " and ",
                             dilation[i]);
    }
    const int64_t of_in = in[rank + 1 + i], of_out = out[rank + 1 + i], of_taps = taps[rank + i];
    if (!IsBounded(of_in) || !IsBounded(of_out, strides[i]) || !IsBounded(of_taps, dilation[i]) ||
        !IsBounded(low[i])) {
      return InvalidArgument("conv: strides, dilations and paddings are out of range, got ",
                             strides[i], ", ", dilation[i], " and ", low[i]);
    }
    call.dims[kMaxDims - count + i] = {of_in, of_out, of_taps, strides[i], dilation[i], low[i]};
  }
  call.channels = in.back();
  call.outputs = out.back();
  const int64_t fan_in = taps[rank + count];
  call.groups = fan_in > 0 ? call.channels / fan_in : 1;
  if (call.groups < 1 || call.groups * fan_in != call.channels || call.outputs % call.groups != 0 ||
      taps.back() != call.outputs) {
    return mismatch();
  }
  return xf::Error::Success();
}

// Reads the type of both operands and the type of the result.
xf::Error DecodeTypes(Call& call, const Buffer& a, const Buffer& b, const Buffer& result) {
  JAXOPS_RETURN_IF_ERROR(SetType(call.dtype, kName, "images", a));
  JAXOPS_RETURN_IF_ERROR(SetType(call.result_dtype, kName, "result", result));
  const bool has_sums = result.element_type() == ArithmeticType(call.dtype);
  if (a.element_type() != b.element_type() || (call.result_dtype != call.dtype && !has_sums)) {
    return InvalidArgument(
        "conv: operands must be of one type, and the result of that or, of 16 bits, f32");
  }
  return xf::Error::Success();
}

template <typename T>
T* At(T* base, int64_t offset, DType dtype) {
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  return static_cast<Byte*>(base) + offset * SizeOf(dtype);
}

// Calls f(offsets) with the offset of each operand for every entry of a batch.
template <size_t kOperands, typename F>
void ForEachEntry(const std::array<BatchOperand, kOperands>& operands, size_t rank, F f) {
  std::array<int64_t, kOperands> offsets = {};
  const auto loop = [&](auto&& self, size_t dim) -> void {
    if (dim == rank) return f(offsets);
    int64_t size = 1;
    for (const BatchOperand& operand : operands) {
      if (operand.dims[dim] != 1) size = operand.dims[dim];
    }
    const std::array<int64_t, kOperands> begin = offsets;
    for (int64_t i = 0; i < size; ++i) {
      self(self, dim + 1);
      for (size_t n = 0; n < kOperands; ++n) offsets[n] += operands[n].Stride(dim);
    }
    offsets = begin;
  };
  loop(loop, 0);
}

// The forward product or the input gradient: `images` with their kernels become `result`.
xf::Error Convolve(Context context, const Call& sizes, size_t rank, const Buffer& images,
                   const Buffer& kernel, const std::optional<Buffer>& bias, Result& result,
                   void (*run)(const Calls&, const cpu::ParallelFor&)) {
  const size_t core = images.dimensions().size() - rank;
  if (bias) {
    JAXOPS_RETURN_IF_ERROR(
        CheckBuffer(kName, "bias", *bias, rank, {sizes.outputs}, ArithmeticType(sizes.dtype)));
  }
  // The kernel stands in for the batch dimensions of an absent bias.
  const std::array<BatchOperand, 4> operands = {
      BatchOperand{images.dimensions(), core}, BatchOperand{kernel.dimensions(), core},
      bias ? BatchOperand{bias->dimensions(), 1} : BatchOperand{kernel.dimensions(), core},
      BatchOperand{result->dimensions(), core, BatchOperand::kWritten}};
  JAXOPS_RETURN_IF_ERROR(CheckBatch(kName, operands, rank));
  ExpectWrites(*result);
  if (result->element_count() == 0) return xf::Error::Success();
  const int64_t rows = images.dimensions()[rank];
  const int64_t image = operands[0].CoreSize() / rows, of_result = operands[3].CoreSize() / rows;
  // Entries with the same kernel and bias are images of one call.
  Calls calls;
  std::map<std::pair<int64_t, int64_t>, size_t> numbers;
  ForEachEntry(operands, rank, [&](const std::array<int64_t, 4>& offsets) {
    const auto [found, is_new] = numbers.try_emplace({offsets[1], offsets[2]}, calls.size());
    if (is_new) {
      calls.push_back(sizes);
      calls.back().kernel = At(kernel.untyped_data(), offsets[1], sizes.dtype);
      if (bias) {
        const DType wide = sizes.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
        calls.back().bias = At(bias->untyped_data(), offsets[2], wide);
      }
    }
    Call& call = calls[found->second];
    for (int64_t row = 0; row < rows; ++row) {
      call.images.push_back(At(images.untyped_data(), offsets[0] + row * image, sizes.dtype));
      call.results.push_back(
          At(result->untyped_data(), offsets[3] + row * of_result, sizes.result_dtype));
    }
  });
  return Run(context, kName, run, calls);
}

xf::Error Forward(Context context, Buffer x, Buffer kernel, std::optional<Buffer> bias, Result y,
                  const ForwardAttributes& attributes) {
  Call call = {};
  size_t rank;
  JAXOPS_RETURN_IF_ERROR(
      Decode(call, rank, {x.dimensions(), kernel.dimensions(), y->dimensions()}, attributes));
  JAXOPS_RETURN_IF_ERROR(DecodeTypes(call, x, kernel, *y));
  call.activation = attributes.activation;
  return Convolve(context, call, rank, x, kernel, bias, y, JAXOPS_KERNEL(conv, Forward));
}

xf::Error InputGrad(Context context, Buffer g, Buffer kernel, Result dx,
                    const ConvAttributes& attributes) {
  Call call = {};
  size_t rank;
  JAXOPS_RETURN_IF_ERROR(
      Decode(call, rank, {dx->dimensions(), kernel.dimensions(), g.dimensions()}, attributes));
  JAXOPS_RETURN_IF_ERROR(DecodeTypes(call, g, kernel, *dx));
  return Convolve(context, call, rank, g, kernel, std::nullopt, dx, JAXOPS_KERNEL(conv, InputGrad));
}

// Sums over the batch dimensions along which the result has size 1.
xf::Error KernelGrad(Context context, Buffer x, Buffer g, Result dkernel,
                     const ConvAttributes& attributes) {
  Call sizes = {};
  size_t rank;
  JAXOPS_RETURN_IF_ERROR(
      Decode(sizes, rank, {x.dimensions(), dkernel->dimensions(), g.dimensions()}, attributes));
  JAXOPS_RETURN_IF_ERROR(DecodeTypes(sizes, x, g, *dkernel));
  const size_t core = x.dimensions().size() - rank;
  const std::array<BatchOperand, 3> operands = {
      BatchOperand{x.dimensions(), core}, BatchOperand{g.dimensions(), core},
      BatchOperand{dkernel->dimensions(), core, BatchOperand::kSummed}};
  JAXOPS_RETURN_IF_ERROR(CheckBatch(kName, operands, rank));
  ExpectWrites(*dkernel);
  const int64_t size = dkernel->element_count();
  if (size == 0) return xf::Error::Success();
  const int64_t of_kernel = operands[2].CoreSize();
  Calls calls(size / of_kernel, sizes);
  for (size_t i = 0; i < calls.size(); ++i) {
    calls[i].results = {At(dkernel->untyped_data(), i * of_kernel, sizes.result_dtype)};
  }
  const int64_t rows = x.dimensions()[rank];
  ForEachEntry(operands, rank, [&](const std::array<int64_t, 3>& offsets) {
    Call& call = calls[offsets[2] / of_kernel];
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t image = operands[0].CoreSize() / rows,
                    cotangent = operands[1].CoreSize() / rows;
      call.images.push_back(At(x.untyped_data(), offsets[0] + row * image, sizes.dtype));
      call.cotangents.push_back(At(g.untyped_data(), offsets[1] + row * cotangent, sizes.dtype));
    }
  });
  return Run(context, kName, JAXOPS_KERNEL(conv, KernelGrad), calls);
}

const Registration kForward("jaxops_conv", kHandler<Forward>);
const Registration kInputGrad("jaxops_conv_input_grad", kHandler<InputGrad>);
const Registration kKernelGrad("jaxops_conv_kernel_grad", kHandler<KernelGrad>);

}  // namespace
}  // namespace jaxops::ffi::conv
