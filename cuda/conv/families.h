// The kernel families of convolution: the calls that each can run, its workspace and its launchers.
// dispatch.cc alone chooses between them. A launcher of a call that its family cannot run returns
// cudaErrorNotSupported; one whose workspace is too small, cudaErrorInvalidValue. No size is zero.
#ifndef JAXOPS_CUDA_CONV_FAMILIES_H_
#define JAXOPS_CUDA_CONV_FAMILIES_H_

#include <cuda_runtime_api.h>

#include <algorithm>

#include "common/conv.h"
#include "cuda/conv/dispatch.h"

namespace jaxops::conv::cuda {

// Kernel gradients split the sum over pixels by sizes and a number of multiprocessors, on which
// their workspaces depend too. Every device can run every split; that of an H200 is fast there.
inline constexpr int kProcessors = 132;

// --- wgmma: 16-bit types, and f32 multiplied as TF32, on compute capability 9.0 ------------------
//
// One group; channels and outputs in multiples of 16 bytes; column strides of at most 8; fewer than
// 2^30 pixels, padding included.

cudaError_t LaunchForwardWgmma(cudaStream_t stream, const Call& call);

cudaError_t LaunchInputGradWgmma(cudaStream_t stream, const Call& call);

bool CanRunKernelGradWgmma(const Call& call, int processors = kProcessors);

int64_t KernelGradWgmmaWorkspace(const Call& call, int processors = kProcessors);

cudaError_t LaunchKernelGradWgmma(cudaStream_t stream, const Call& call, Space workspace,
                                  int processors = kProcessors);

// --- tf32x3: f32 as the sum of three products of TF32, on compute capability 9.0 -----------------
//
// One group; channels and outputs in multiples of 4. Results that are not finite are made again by
// the fma family, which leaves at once otherwise.

bool CanRunTf32x3(const Call& call, bool is_input_grad, int processors);

// Whether its estimated time is less than that of the fma family.
bool PrefersTf32x3(const Call& call, bool is_input_grad);

int64_t Tf32x3Workspace(const Call& call);

cudaError_t LaunchForwardTf32x3(cudaStream_t stream, const Call& call, void* workspace);

cudaError_t LaunchInputGradTf32x3(cudaStream_t stream, const Call& call, void* workspace);

// Whether it can run the kernel gradient and its estimated time is less than that of the fma
// family. Its plans are made within that time, so that none is known for other calls.
bool PrefersKernelGradTf32x3(const Call& call, int processors = kProcessors);

int64_t KernelGradTf32x3Workspace(const Call& call, int processors = kProcessors);

cudaError_t LaunchKernelGradTf32x3(cudaStream_t stream, const Call& call, Space workspace,
                                   int processors = kProcessors);

// --- mma: 16-bit types, and f32 multiplied as TF32, from compute capability 8.0 ------------------
//
// Any number of groups, each with channels and outputs in multiples of 16 bytes; any strides.

cudaError_t LaunchForwardMma(cudaStream_t stream, const Call& call);

cudaError_t LaunchInputGradMma(cudaStream_t stream, const Call& call);

int64_t KernelGradMmaWorkspace(const Call& call, int processors = kProcessors);

cudaError_t LaunchKernelGradMma(cudaStream_t stream, const Call& call, Space workspace,
                                int processors = kProcessors);

// --- fma: f64, and f32 that is not rounded, from compute capability 8.0 --------------------------
//
// Any groups, channels, outputs and strides. With `needed` the kernels compute nothing where that
// is 0 in the device's memory when they run.

cudaError_t LaunchForwardFma(cudaStream_t stream, const Call& call, const int* needed = nullptr);

cudaError_t LaunchInputGradFma(cudaStream_t stream, const Call& call, const int* needed = nullptr);

int64_t KernelGradFmaWorkspace(const Call& call, int processors = kProcessors);

cudaError_t LaunchKernelGradFma(cudaStream_t stream, const Call& call, Space workspace,
                                int processors = kProcessors);

// The same of f32, but only if any of the flags on the device is set, and without adding the parts
// that it leaves in the workspace; `parts` tells how many these are. A single one is the result.
cudaError_t LaunchKernelGradFmaParts(cudaStream_t stream, const Call& call, Space workspace,
                                     int processors, const int* flags, int flag_count, int* parts);

// The estimated cycles of that.
int64_t KernelGradFmaCycles(const Call& call, int processors);

// --- few channels: 16-bit types on compute capability 9.0 ----------------------------------------
//
// One group of at most kMaxFewChannels channels; windows without dilation, of which a row has at
// most kMaxFewRowEntries entries, channels counted.
inline constexpr int kMaxFewStride = 8;
static_assert(kMaxStride <= kMaxFewStride);

cudaError_t LaunchForwardFewChannels(cudaStream_t stream, const Call& call);

cudaError_t LaunchInputGradFewChannels(cudaStream_t stream, const Call& call);

int64_t KernelGradFewChannelsWorkspace(const Call& call, int processors = kProcessors);

cudaError_t LaunchKernelGradFewChannels(cudaStream_t stream, const Call& call, Space workspace,
                                        int processors = kProcessors);

// --- direct: every type, on every GPU ------------------------------------------------------------
//
// Groups too small for a matrix product, or a single channel; strides of at most 8. Sums of f32
// entries are in f32.

inline bool IsDirect(const Call& call) {
  const bool is_small = std::min(call.channels, call.outputs) < kMinFan * call.groups;
  return is_small && (call.groups > 1 || call.channels * call.outputs == 1);
}

cudaError_t LaunchForwardDirect(cudaStream_t stream, const Call& call);

cudaError_t LaunchInputGradDirect(cudaStream_t stream, const Call& call);

int64_t KernelGradDirectWorkspace(const Call& call, int processors = kProcessors);

cudaError_t LaunchKernelGradDirect(cudaStream_t stream, const Call& call, Space workspace,
                                   int processors = kProcessors);

// --- depthwise: the kernel gradient of 16-bit types by tensor cores, from compute capability 8.0 -
//
// Groups of one channel and one output, in multiples of 8; square windows of 5 or 7 taps without
// strides and dilation.

bool CanRunKernelGradDepthwise(const Call& call);

int64_t KernelGradDepthwiseWorkspace(const Call& call, int processors = kProcessors);

cudaError_t LaunchKernelGradDepthwise(cudaStream_t stream, const Call& call, Space workspace,
                                      int processors = kProcessors);

}  // namespace jaxops::conv::cuda

#endif  // JAXOPS_CUDA_CONV_FAMILIES_H_
