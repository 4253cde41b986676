#include "cuda/common/dispatch.h"

#include <algorithm>

#include "cuda/conv/dispatch.h"
#include "cuda/conv/families.h"

namespace jaxops::conv::cuda {
namespace {

bool HasTwoBytes(DType dtype) { return dtype == DType::kF16 || dtype == DType::kBF16; }

bool HasFewChannels(const Call& call) {
  return HasTwoBytes(call.dtype) && call.groups == 1 && !IsDirect(call) &&
         call.channels <= kMaxFewChannels;
}

// Tells whether products are not rounded to TF32.
bool IsExact(const Call& call) {
  return call.dtype == DType::kF64 || (call.dtype == DType::kF32 && !call.tf32);
}

using jaxops::cuda::Always;
using jaxops::cuda::Device;
using jaxops::cuda::Family;
using jaxops::cuda::Table;

// A call with its workspace. A forward product or an input gradient may have none.
struct Task {
  const Call& call;
  Direction direction;
  Space workspace;
};

bool CanRunDirect(const Task& task, const Device&) { return IsDirect(task.call); }

bool CanRunDepthwise(const Task& task, const Device&) {
  return IsDirect(task.call) && CanRunKernelGradDepthwise(task.call);
}

bool CanRunSplit(const Task& task, const Device& device) {
  const Call& call = task.call;
  if (IsDirect(call) || !IsExact(call) || call.dtype != DType::kF32 || !device.has_wgmma) {
    return false;
  }
  if (task.direction == Direction::kKernelGrad) return true;
  return task.workspace.data != nullptr &&
         CanRunTf32x3(call, task.direction == Direction::kInputGrad, device.processors);
}

// A forward product or an input gradient has a workspace only where this family is preferred.
bool PrefersSplit(const Task& task, const Device&) {
  return task.direction != Direction::kKernelGrad || PrefersKernelGradTf32x3(task.call);
}

bool CanRunFma(const Task& task, const Device&) {
  return !IsDirect(task.call) && IsExact(task.call);
}

bool CanRunFewChannels(const Task& task, const Device& device) {
  return HasFewChannels(task.call) && device.has_wgmma;
}

bool CanRunMma(const Task& task, const Device&) {
  return !IsDirect(task.call) && !IsExact(task.call) && !HasFewChannels(task.call);
}

bool CanRunWgmma(const Task& task, const Device& device) {
  if (!CanRunMma(task, device) || !device.has_wgmma || task.call.groups > 1) return false;
  const bool may_have_no_plan =
      task.direction == Direction::kKernelGrad && task.call.dtype == DType::kF32;
  return !may_have_no_plan || CanRunKernelGradWgmma(task.call);
}

template <auto kLaunch>
cudaError_t Launch(cudaStream_t stream, const Task& task, const Device&) {
  return kLaunch(stream, task.call);
}

// Launches families whose flags, null here, tell whether there is anything to compute.
template <auto kLaunch>
cudaError_t LaunchAll(cudaStream_t stream, const Task& task, const Device&) {
  return kLaunch(stream, task.call, nullptr);
}

template <auto kLaunch>
cudaError_t LaunchSplit(cudaStream_t stream, const Task& task, const Device&) {
  if (task.workspace.bytes < Tf32x3Workspace(task.call)) return cudaErrorInvalidValue;
  return kLaunch(stream, task.call, task.workspace.data);
}

template <auto kLaunch>
cudaError_t LaunchGrad(cudaStream_t stream, const Task& task, const Device&) {
  return kLaunch(stream, task.call, task.workspace, kProcessors);
}

// docs/conv2d.md has the reasons, and the measured gain of each family.

constexpr Family<Task> kForward[] = {
    {"direct", CanRunDirect, Always, Launch<LaunchForwardDirect>},
    {"tf32x3", CanRunSplit, PrefersSplit, LaunchSplit<LaunchForwardTf32x3>},
    {"fma", CanRunFma, Always, LaunchAll<LaunchForwardFma>},
    {"few_channels", CanRunFewChannels, Always, Launch<LaunchForwardFewChannels>},
    {"wgmma", CanRunWgmma, Always, Launch<LaunchForwardWgmma>},
    {"mma", CanRunMma, Always, Launch<LaunchForwardMma>},
};

constexpr Family<Task> kInputGrad[] = {
    {"direct", CanRunDirect, Always, Launch<LaunchInputGradDirect>},
    {"tf32x3", CanRunSplit, PrefersSplit, LaunchSplit<LaunchInputGradTf32x3>},
    {"fma", CanRunFma, Always, LaunchAll<LaunchInputGradFma>},
    {"few_channels", CanRunFewChannels, Always, Launch<LaunchInputGradFewChannels>},
    {"wgmma", CanRunWgmma, Always, Launch<LaunchInputGradWgmma>},
    {"mma", CanRunMma, Always, Launch<LaunchInputGradMma>},
};

constexpr Family<Task> kKernelGrad[] = {
    {"depthwise", CanRunDepthwise, Always, LaunchGrad<LaunchKernelGradDepthwise>},
    {"direct", CanRunDirect, Always, LaunchGrad<LaunchKernelGradDirect>},
    {"tf32x3", CanRunSplit, PrefersSplit, LaunchGrad<LaunchKernelGradTf32x3>},
    {"fma", CanRunFma, Always, LaunchGrad<LaunchKernelGradFma>},
    {"few_channels", CanRunFewChannels, Always, LaunchGrad<LaunchKernelGradFewChannels>},
    {"wgmma", CanRunWgmma, Always, LaunchGrad<LaunchKernelGradWgmma>},
    {"mma", CanRunMma, Always, LaunchGrad<LaunchKernelGradMma>},
};

const Table<Task> kTables[] = {{"conv", "forward", kForward},
                               {"conv", "input gradient", kInputGrad},
                               {"conv", "kernel gradient", kKernelGrad}};

}  // namespace

int64_t SumWorkspace(const Call& call, Direction direction) {
  if (call.dtype != DType::kF32 || call.tf32) return 0;
  return PrefersTf32x3(call, direction == Direction::kInputGrad) ? Tf32x3Workspace(call) : 0;
}

int64_t KernelGradWorkspace(const Call& call) {
  if (IsDirect(call)) {
    const int64_t bytes = KernelGradDirectWorkspace(call);
    return CanRunKernelGradDepthwise(call) ? std::max(bytes, KernelGradDepthwiseWorkspace(call))
                                           : bytes;
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
  return kTables[static_cast<int>(direction)].Run(stream, {call, direction, workspace});
}

}  // namespace jaxops::conv::cuda
