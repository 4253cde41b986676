// Launchers of convolution on CUDA devices.
#ifndef JAXOPS_CUDA_CONV_LAUNCH_H_
#define JAXOPS_CUDA_CONV_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <algorithm>

#include "common/conv.h"

namespace jaxops::conv::cuda {

// All but those named Mma, Fma or Direct need a GPU of compute capability 9.0 and code for it,
// which the caller checks, one group of channels, and outputs in multiples of 16 bytes. Nothing is
// of size zero. What cannot be cut into tiles is cudaErrorNotSupported.
//
// These have channels in multiples of 16 bytes, steps from column to column of the image of at most
// 8, at most kMaxTaps taps, and fewer than 2^30 pixels, also of padding.
inline constexpr int kMaxTaps = 128;

cudaError_t LaunchForward(cudaStream_t stream, const Call& call);

cudaError_t LaunchInputGrad(cudaStream_t stream, const Call& call);

// The kernel gradient splits the sum over pixels by sizes and a number of processors, which its
// workspace of so many bytes depends on: both must be given the same one. Any is correct, the
// device's own is fast. Of f32 what cannot be cut into tiles goes to LaunchKernelGradMma, whose
// workspace is needed as well. A workspace that is too small is cudaErrorInvalidValue.
inline constexpr int kProcessors = 132;

// Memory of the device that a launcher may write.
struct Space {
  void* data;
  int64_t bytes;
};

int64_t KernelGradWorkspace(const Call& call, int processors = kProcessors);

cudaError_t LaunchKernelGrad(cudaStream_t stream, const Call& call, Space workspace,
                             int processors = kProcessors);

// These multiply f32 on tensor cores, as the sum of several products of TF32, with a workspace.
// What is not their own, or has none, goes to those named Fma, whose results are no more exact.
// Whether they are faster is an estimate.
bool IsFasterSplit(const Call& call, bool is_input_grad);

int64_t SplitWorkspace(const Call& call);

cudaError_t LaunchForwardSplit(cudaStream_t stream, const Call& call, void* workspace);

cudaError_t LaunchInputGradSplit(cudaStream_t stream, const Call& call, void* workspace);

// These need compute capability 8.0 and take several groups, of which each has channels and outputs
// in multiples of 16 bytes, and steps of any size. All three take f32, multiplied as TF32.
cudaError_t LaunchForwardMma(cudaStream_t stream, const Call& call);

cudaError_t LaunchInputGradMma(cudaStream_t stream, const Call& call);

int64_t KernelGradMmaWorkspace(const Call& call, int processors = kProcessors);

cudaError_t LaunchKernelGradMma(cudaStream_t stream, const Call& call, Space workspace,
                                int processors = kProcessors);

// Those of f64, and of f32 that is not multiplied as TF32, also need compute capability 8.0. They
// take groups, channels and outputs in any number, and steps of any size.
// With `needed` they compute nothing where that is 0 in the device's memory when they run.
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

// This one, for Hopper, multiplies f32 on tensor cores, as the sum of several products. What is not
// its own, or not faster there, goes to LaunchKernelGradFma.
bool IsFasterKernelGradSplit(const Call& call, int processors = kProcessors);

int64_t KernelGradSplitWorkspace(const Call& call, int processors = kProcessors);

cudaError_t LaunchKernelGradSplit(cudaStream_t stream, const Call& call, Space workspace,
                                  int processors = kProcessors);

// Those of few channels for Hopper, in any number up to kMostFewChannels, and of windows without
// dilation, of which a row has at most kMostFewRowEntries entries, channels counted.
inline constexpr int kMostFewChannels = 7;
inline constexpr int kMostFewTapRows = 8;
inline constexpr int kMostFewRowEntries = 24;
inline constexpr int kMostFewOutputs = 512;
inline constexpr int kMostFewStride = 8;

cudaError_t LaunchForwardFew(cudaStream_t stream, const Call& call);

cudaError_t LaunchInputGradFew(cudaStream_t stream, const Call& call);

int64_t KernelGradFewWorkspace(const Call& call, int processors = kProcessors);

cudaError_t LaunchKernelGradFew(cudaStream_t stream, const Call& call, Space workspace,
                                int processors = kProcessors);

// These, for every GPU, have groups of any few channels and outputs, f64 as well, steps of at most
// 8, and sums of f32 entries in f32.
inline constexpr int kLeastFan = 8;

// Whether a convolution is theirs: groups too small for a matrix product, or a single channel.
inline bool IsDirect(const Call& call) {
  const bool is_small = std::min(call.channels, call.outputs) < kLeastFan * call.groups;
  return is_small && (call.groups > 1 || call.channels * call.outputs == 1);
}

cudaError_t LaunchForwardDirect(cudaStream_t stream, const Call& call);

cudaError_t LaunchInputGradDirect(cudaStream_t stream, const Call& call);

int64_t KernelGradDirectWorkspace(const Call& call, int processors = kProcessors);

cudaError_t LaunchKernelGradDirect(cudaStream_t stream, const Call& call, Space workspace,
                                   int processors = kProcessors);

}  // namespace jaxops::conv::cuda

#endif  // JAXOPS_CUDA_CONV_LAUNCH_H_
