// XLA FFI handlers of convolution on CUDA devices.
#include "ffi/conv_cuda.h"

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/conv/dispatch.h"
#include "ffi/bind.h"
#include "ffi/cuda_status.h"
#include "ffi/decode.h"
#include "ffi/work_space.h"

namespace jaxops::ffi {
namespace {

namespace xf = xla::ffi;
namespace cu = jaxops::conv::cuda;
using conv::Call;
using conv::kDims;
using cu::Direction;

// There is an entry of `strides`, `dilation` and `low` for each of the one or two dimensions.
struct ConvAttributes {
  Integers strides, dilation, low;
  bool tf32;
  JAXOPS_ATTRIBUTES(strides, dilation, low, tf32);
};

struct ForwardAttributes : ConvAttributes {
  Activation activation;
  JAXOPS_ATTRIBUTES(strides, dilation, low, tf32, activation);
};

// Fills `call` from the sizes of images (rows..., in..., channels), kernel (taps..., channels of a
// group, outputs) and results (rows..., out..., outputs).
xf::Error Decode(Call& call, Dimensions in, Dimensions taps, Dimensions out,
                 const ConvAttributes& attributes) {
  const auto& [strides, dilation, low, tf32] = attributes;
  call.tf32 = tf32;
  const size_t count = strides.size();
  const auto mismatch = [&] {
    return InvalidArgument("conv: images ", ToString(in), ", kernel ", ToString(taps),
                           " and results ", ToString(out), " do not fit");
  };
  if (count < 1 || count > kDims || dilation.size() != count || low.size() != count ||
      in.size() < count + 1 || out.size() != in.size() || taps.size() != count + 2) {
    return mismatch();
  }
  const size_t leading = in.size() - count - 1;
  call.images = 1;
  for (size_t i = 0; i < leading; ++i) {
    if (in[i] != out[i]) return mismatch();
    call.images *= in[i];
  }
  for (size_t i = 0; i < count; ++i) {
    if (strides[i] < 1 || dilation[i] < 1) {
      return InvalidArgument("conv: strides and dilations must be >= 1, got ", strides[i], " and ",
                             dilation[i]);
    }
    call.dims[kDims - count + i] = {in[leading + i], out[leading + i], taps[i],
                                    strides[i],      dilation[i],      low[i]};
  }
  call.channels = in.back();
  call.outputs = out.back();
  const int64_t fan_in = taps[count];
  call.groups = fan_in > 0 ? call.channels / fan_in : 1;
  if (call.groups < 1 || call.groups * fan_in != call.channels || call.outputs % call.groups != 0 ||
      taps[count + 1] != call.outputs) {
    return mismatch();
  }
  return xf::Error::Success();
}

bool HasTwoBytes(DType dtype) { return dtype == DType::kF16 || dtype == DType::kBF16; }

// Reads the type of both operands and the type of the result.
xf::Error DecodeTypes(Call& call, const Buffer& a, const Buffer& b, const Buffer& result) {
  JAXOPS_RETURN_IF_ERROR(SetType(call.dtype, "conv", "images", a));
  JAXOPS_RETURN_IF_ERROR(SetType(call.result_dtype, "conv", "result", result));
  const bool fits = call.result_dtype == call.dtype ||
                    (call.result_dtype == DType::kF32 && HasTwoBytes(call.dtype));
  if (!fits || a.element_type() != b.element_type()) {
    return InvalidArgument(
        "conv: operands must be of one type, and the result of that or, of 16 bits, f32");
  }
  return xf::Error::Success();
}

// Launches a call; an error says why the launch failed.
xf::Error Run(const char* operation, cudaStream_t stream, const Call& call, Direction direction,
              cu::Space workspace) {
  const cudaError_t status = cu::Launch(stream, call, direction, workspace);
  if (status == cudaErrorNoKernelImageForDevice) {
    return xf::Error(xf::ErrorCode::kFailedPrecondition,
                     ToError(operation, status).message() +
                         ". This program was compiled for another kind of GPU. Compile or export "
                         "it where it is to run.");
  }
  if (status == cudaErrorInvalidValue && direction == Direction::kKernelGrad &&
      workspace.bytes < cu::KernelGradWorkspace(call)) {
    return InvalidArgument(operation, ": the workspace must have ", cu::KernelGradWorkspace(call),
                           " bytes, got ", workspace.bytes);
  }
  return ToError(operation, status);
}

// The bias has the type of the sums.
xf::Error DecodeEpilogue(Call& call, const std::optional<Buffer>& bias, Activation activation) {
  call.epilogue.activation = activation;
  if (!bias) return xf::Error::Success();
  DType dtype = DType::kF32;
  JAXOPS_RETURN_IF_ERROR(SetType(dtype, "conv", "bias", *bias));
  const Dimensions dims = bias->dimensions();
  const DType wanted = call.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  if (dims.size() != 1 || dims[0] != call.outputs || dtype != wanted) {
    return InvalidArgument("conv: the bias must be f32, or f64 with f64 operands, of shape (",
                           call.outputs, "), got ", ToString(dims));
  }
  call.epilogue.bias = bias->untyped_data();
  return xf::Error::Success();
}

// Takes the work space of a product, if the call has one. A product of unrounded f32 without work
// space is computed by multiply-adds.
xf::Error TakeProductSpace(cu::Space& workspace, const Call& call, Direction direction,
                           WorkSpace given) {
  if (!given && !work_space_answer) return xf::Error::Success();
  workspace.bytes = cu::SumWorkspace(call, direction);
  return TakeWorkSpace(workspace.data, "conv", given, workspace.bytes);
}

xf::Error RunForward(Context stream, Buffer x, Buffer kernel, std::optional<Buffer> bias, Result y,
                     WorkSpace result, const ForwardAttributes& attributes) {
  Call call = {};
  JAXOPS_RETURN_IF_ERROR(
      Decode(call, x.dimensions(), kernel.dimensions(), y->dimensions(), attributes));
  JAXOPS_RETURN_IF_ERROR(DecodeTypes(call, x, kernel, *y));
  JAXOPS_RETURN_IF_ERROR(DecodeEpilogue(call, bias, attributes.activation));
  call.image = x.untyped_data();
  call.kernel = kernel.untyped_data();
  call.result = y->untyped_data();
  cu::Space workspace;
  JAXOPS_RETURN_IF_ERROR(TakeProductSpace(workspace, call, Direction::kForward, result));
  return Run("conv", stream, call, Direction::kForward, workspace);
}

xf::Error RunInputGrad(Context stream, Buffer g, Buffer kernel, Result dx, WorkSpace result,
                       const ConvAttributes& attributes) {
  Call call = {};
  JAXOPS_RETURN_IF_ERROR(
      Decode(call, dx->dimensions(), kernel.dimensions(), g.dimensions(), attributes));
  JAXOPS_RETURN_IF_ERROR(DecodeTypes(call, g, kernel, *dx));
  call.image = g.untyped_data();
  call.kernel = kernel.untyped_data();
  call.result = dx->untyped_data();
  cu::Space workspace;
  JAXOPS_RETURN_IF_ERROR(TakeProductSpace(workspace, call, Direction::kInputGrad, result));
  return Run("conv input gradient", stream, call, Direction::kInputGrad, workspace);
}

xf::Error RunKernelGrad(Context stream, Buffer x, Buffer g, Result dkernel, WorkSpace given,
                        const ConvAttributes& attributes) {
  Call call = {};
  JAXOPS_RETURN_IF_ERROR(
      Decode(call, x.dimensions(), dkernel->dimensions(), g.dimensions(), attributes));
  JAXOPS_RETURN_IF_ERROR(DecodeTypes(call, x, g, *dkernel));
  call.image = x.untyped_data();
  call.cotangent = g.untyped_data();
  call.result = dkernel->untyped_data();
  cu::Space workspace;
  if (work_space_answer) {
    return TakeWorkSpace(workspace.data, "conv", given, cu::KernelGradWorkspace(call));
  }
  // The launcher checks the size: a plan has to be made to know it.
  if (given) {
    workspace = {(*given)->untyped_data(), static_cast<int64_t>((*given)->size_bytes())};
  }
  return Run("conv kernel gradient", stream, call, Direction::kKernelGrad, workspace);
}

// Throws if the sizes do not fit together. The dtype is f32.
Call DecodeSizes(const std::vector<int64_t>& in, const std::vector<int64_t>& taps,
                 const std::vector<int64_t>& out, const std::vector<int64_t>& strides,
                 const std::vector<int64_t>& dilation, const std::vector<int64_t>& low) {
  const auto span = [](const std::vector<int64_t>& v) { return Integers(v.data(), v.size()); };
  Call call = {};
  call.dtype = DType::kF32;
  const xf::Error error = Decode(call, span(in), span(taps), span(out),
                                 {span(strides), span(dilation), span(low), /*tf32=*/false});
  if (error.failure()) throw std::invalid_argument(error.message());
  return call;
}

const Registration kForward("jaxops_conv", kHandler<RunForward>);
const Registration kInputGrad("jaxops_conv_input_grad", kHandler<RunInputGrad>);
const Registration kKernelGrad("jaxops_conv_kernel_grad", kHandler<RunKernelGrad>);

}  // namespace

bool ConvIsKernelGradSplit(const std::vector<int64_t>& in, const std::vector<int64_t>& taps,
                           const std::vector<int64_t>& out, const std::vector<int64_t>& strides,
                           const std::vector<int64_t>& dilation, const std::vector<int64_t>& low) {
  return cu::IsKernelGradTf32x3(DecodeSizes(in, taps, out, strides, dilation, low));
}

}  // namespace jaxops::ffi
