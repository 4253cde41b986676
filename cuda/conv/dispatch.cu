#include <algorithm>
#include <string_view>

#include "cuda/conv/dispatch.h"
#include "cuda/conv/families.h"

namespace jaxops::conv::cuda {
namespace {

bool HasTwoBytes(DType dtype) { return dtype == DType::kF16 || dtype == DType::kBF16; }

bool HasFewChannels(const Call& call) {
  return HasTwoBytes(call.dtype) && call.groups == 1 && !IsDirect(call) &&
         call.channels <= kMostFewChannels;
}

// Whether products are not rounded to TF32.
bool IsExact(const Call& call) {
  return call.dtype == DType::kF64 || (call.dtype == DType::kF32 && !call.tf32);
}

cudaError_t LaunchForward(cudaStream_t stream, const Call& call, Family family, void* workspace) {
  switch (family) {
    case Family::kWgmma:
      return LaunchForwardWgmma(stream, call);
    case Family::kTf32x3:
      return LaunchForwardTf32x3(stream, call, workspace);
    case Family::kMma:
      return LaunchForwardMma(stream, call);
    case Family::kFma:
      return LaunchForwardFma(stream, call);
    case Family::kFewChannels:
      return LaunchForwardFewChannels(stream, call);
    case Family::kDirect:
      return LaunchForwardDirect(stream, call);
    case Family::kDepthwise:
      break;
  }
  return cudaErrorNotSupported;
}

cudaError_t LaunchInputGrad(cudaStream_t stream, const Call& call, Family family, void* workspace) {
  switch (family) {
    case Family::kWgmma:
      return LaunchInputGradWgmma(stream, call);
    case Family::kTf32x3:
      return LaunchInputGradTf32x3(stream, call, workspace);
    case Family::kMma:
      return LaunchInputGradMma(stream, call);
    case Family::kFma:
      return LaunchInputGradFma(stream, call);
    case Family::kFewChannels:
      return LaunchInputGradFewChannels(stream, call);
    case Family::kDirect:
      return LaunchInputGradDirect(stream, call);
    case Family::kDepthwise:
      break;
  }
  return cudaErrorNotSupported;
}

cudaError_t LaunchKernelGrad(cudaStream_t stream, const Call& call, Family family,
                             Space workspace) {
  switch (family) {
    case Family::kWgmma:
      return LaunchKernelGradWgmma(stream, call, workspace);
    case Family::kTf32x3:
      return LaunchKernelGradTf32x3(stream, call, workspace);
    case Family::kMma:
      return LaunchKernelGradMma(stream, call, workspace);
    case Family::kFma:
      return LaunchKernelGradFma(stream, call, workspace);
    case Family::kFewChannels:
      return LaunchKernelGradFewChannels(stream, call, workspace);
    case Family::kDirect:
      return LaunchKernelGradDirect(stream, call, workspace);
    case Family::kDepthwise:
      return LaunchKernelGradDepthwise(stream, call, workspace);
  }
  return cudaErrorNotSupported;
}

}  // namespace

const char* ToString(Family family) {
  switch (family) {
    case Family::kWgmma:
      return "wgmma";
    case Family::kTf32x3:
      return "tf32x3";
    case Family::kMma:
      return "mma";
    case Family::kFma:
      return "fma";
    case Family::kFewChannels:
      return "few_channels";
    case Family::kDirect:
      return "direct";
    case Family::kDepthwise:
      return "depthwise";
  }
  return "";
}

cudaError_t DescribeCurrent(Device& device) {
  int number = 0;
  cudaError_t error = cudaGetDevice(&number);
  const auto get = [&](int& value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, number);
  };
  get(device.major, cudaDevAttrComputeCapabilityMajor);
  get(device.minor, cudaDevAttrComputeCapabilityMinor);
  get(device.processors, cudaDevAttrMultiProcessorCount);
  constexpr std::string_view kCompiled = JAXOPS_CUDA_ARCHITECTURES;
  device.has_wgmma = error == cudaSuccess && device.major == 9 && device.minor == 0 &&
                     kCompiled.find("90a") != std::string_view::npos;
  return error;
}

// Condition                                              Family
//
// groups of few channels, or a single channel            direct, or depthwise where it can run
// f64, and f32 that is not rounded                       tf32x3 where it has a plan, else fma
// 16-bit types of few channels                           few_channels
// one group on capability 9.0                            wgmma; a kernel gradient of f32 without a
//                                                        plan there, mma
// others                                                 mma
std::optional<Family> Choose(const Call& call, Direction direction, const Device& device,
                             bool has_workspace) {
  if (device.major < 8) return std::nullopt;
  const bool is_kernel_grad = direction == Direction::kKernelGrad;
  if (IsDirect(call)) {
    return is_kernel_grad && CanRunKernelGradDepthwise(call) ? Family::kDepthwise : Family::kDirect;
  }
  if (IsExact(call)) {
    const bool splits =
        device.has_wgmma && call.dtype == DType::kF32 &&
        (is_kernel_grad ? PrefersKernelGradTf32x3(call)
                        : has_workspace && CanRunTf32x3(call, direction == Direction::kInputGrad,
                                                        device.processors));
    return splits ? Family::kTf32x3 : Family::kFma;
  }
  if (HasFewChannels(call)) {
    return device.has_wgmma ? std::optional(Family::kFewChannels) : std::nullopt;
  }
  if (!device.has_wgmma || call.groups > 1) return Family::kMma;
  const bool may_be_mma = is_kernel_grad && call.dtype == DType::kF32;
  return may_be_mma && !CanRunKernelGradWgmma(call) ? Family::kMma : Family::kWgmma;
}

int64_t SumWorkspace(const Call& call, Direction direction) {
  return PrefersTf32x3(call, direction == Direction::kInputGrad) ? Tf32x3Workspace(call) : 0;
}

int64_t KernelGradWorkspace(const Call& call) {
  if (IsDirect(call)) {
    return CanRunKernelGradDepthwise(call) ? KernelGradDepthwiseWorkspace(call)
                                           : KernelGradDirectWorkspace(call);
  }
  if (IsExact(call)) {
    const int64_t bytes = KernelGradFmaWorkspace(call);
    return call.dtype == DType::kF32 ? std::max(bytes, KernelGradTf32x3Workspace(call)) : bytes;
  }
  if (HasFewChannels(call)) return KernelGradFewChannelsWorkspace(call);
  return std::max(KernelGradMmaWorkspace(call), KernelGradWgmmaWorkspace(call));
}

bool IsKernelGradTf32x3(const Call& call) { return PrefersKernelGradTf32x3(call); }

cudaError_t Launch(cudaStream_t stream, const Call& call, Direction direction, Space workspace) {
  Device device;
  const cudaError_t error = DescribeCurrent(device);
  if (error != cudaSuccess) return error;
  const std::optional<Family> family = Choose(call, direction, device, workspace.data != nullptr);
  if (!family) return cudaErrorNoKernelImageForDevice;
  switch (direction) {
    case Direction::kForward:
    case Direction::kInputGrad: {
      if (*family == Family::kTf32x3 && workspace.bytes < Tf32x3Workspace(call)) {
        return cudaErrorInvalidValue;
      }
      const auto launch = direction == Direction::kForward ? LaunchForward : LaunchInputGrad;
      return launch(stream, call, *family, workspace.data);
    }
    case Direction::kKernelGrad:
      return LaunchKernelGrad(stream, call, *family, workspace);
  }
  return cudaErrorNotSupported;
}

}  // namespace jaxops::conv::cuda
