// This header declares the kernel families of lightweight convolution; each is a file or a folder
// next to this header.
//
// CanRun... says whether a family's kernels compute a call correctly, whether fast or not.
// Launchers expect calls that can run. The geometry of a call is in the range of kernels, and has
// work to do. Calls of functions named ...OfSegments or ...Packed have segments or states, and
// those of others do not.
#ifndef JAXOPS_CUDA_LIGHTWEIGHT_CONV_FAMILIES_H_
#define JAXOPS_CUDA_LIGHTWEIGHT_CONV_FAMILIES_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/lightweight_conv.h"
#include "cuda/common/device.h"

namespace jaxops::lightweight_conv::cuda {

using jaxops::cuda::Device;

// Gradients is a call for gradients and the space for its partial sums over time and batch: (kept,
// splits, taps + 1, channels) of the accumulation type. Launchers use at most that space.
struct Gradients {
  const Backward& call;
  int64_t splits;
  void* partials;
};

// ComputesInputGrad says whether the kernels that compute the kernel gradient compute the input
// gradient, too. Families without such a function always do, except mma/channels, ntc/long,
// nct/dilated and packed, which never do.

// mma/ runs long filters on tensor cores.
bool CanRunMma(const Forward& call, const Device& device);
bool CanRunMma(const Gradients& gradients, const Device& device);
bool ComputesInputGradMma(const Backward& call);
cudaError_t LaunchMma(cudaStream_t stream, const Forward& call, const Device& device);
cudaError_t LaunchMma(cudaStream_t stream, const Gradients& gradients, const Device& device);
// These launch the kernels of calls with segments.
cudaError_t LaunchMmaOfSegments(cudaStream_t stream, const Forward& call, const Device& device);
cudaError_t LaunchMmaOfSegments(cudaStream_t stream, const Gradients& gradients,
                                const Device& device);

// mma/channels_forward.cu and mma/channels_backward.cu run filters of single channels on tensor
// cores, for 16-bit arrays without dilation and windows that fit shared memory. Their launcher of
// gradients does not compute the input gradient.
bool CanRunMmaChannels(const Forward& call, const Device& device);
bool CanRunMmaChannels(const Gradients& gradients, const Device& device);
cudaError_t LaunchMmaChannels(cudaStream_t stream, const Forward& call, const Device& device);
cudaError_t LaunchMmaChannels(cudaStream_t stream, const Gradients& gradients,
                              const Device& device);

// packed.cu runs all filters of calls with segments or states. Its launcher of gradients does not
// compute the input gradient.
bool CanRunPacked(const Forward& call, const Device& device);
bool CanRunPacked(const Gradients& gradients, const Device& device);
cudaError_t LaunchPacked(cudaStream_t stream, const Forward& call, const Device& device);
cudaError_t LaunchPacked(cudaStream_t stream, const Gradients& gradients, const Device& device);
// LaunchPackedHeads computes only the first steps of each sequence, whose taps read its state.
cudaError_t LaunchPackedHeads(cudaStream_t stream, const Forward& call);
// LaunchStateSteps computes only the steps that read the state of their segment. It runs causal
// calls without dilation whose heads have a multiple of four channels.
bool CanRunStateSteps(const Forward& call);
cudaError_t LaunchStateSteps(cudaStream_t stream, const Forward& call);

namespace ntc {

// ntc/steps.cu runs short filters of small calls.
bool CanRunSteps(const Forward& call, const Device& device);
cudaError_t LaunchSteps(cudaStream_t stream, const Forward& call, const Device& device);

// ntc/window.cu runs short filters, not of float64, of rows that are whole vectors of 8 bytes.
bool CanRunWindow(const Forward& call, const Device& device);
cudaError_t LaunchWindow(cudaStream_t stream, const Forward& call, const Device& device);
// These run causal filters of two to eight taps in calls with segments, or with states of sequences
// in the type of x.
bool CanRunWindowOfSegments(const Forward& call, const Device& device);
cudaError_t LaunchWindowOfSegments(cudaStream_t stream, const Forward& call, const Device& device);

// ntc/short.cu runs short filters of rows that are whole vectors: forward calls of pairs of 16-bit
// or float64 channels, and gradients.
bool CanRunShort(const Forward& call, const Device& device);
bool CanRunShort(const Gradients& gradients, const Device& device);
cudaError_t LaunchShort(cudaStream_t stream, const Forward& call, const Device& device);
cudaError_t LaunchShort(cudaStream_t stream, const Gradients& gradients, const Device& device);
// These run calls with segments or states, for rows of any type and size.
bool CanRunShortOfSegments(const Forward& call, const Device& device);
bool CanRunShortOfSegments(const Gradients& gradients, const Device& device);
cudaError_t LaunchShortOfSegments(cudaStream_t stream, const Forward& call, const Device& device);
cudaError_t LaunchShortOfSegments(cudaStream_t stream, const Gradients& gradients,
                                  const Device& device);

// ntc/scalar.cu runs short filters of any number of channels.
bool CanRunScalar(const Forward& call, const Device& device);
bool CanRunScalar(const Gradients& gradients, const Device& device);
cudaError_t LaunchScalar(cudaStream_t stream, const Forward& call, const Device& device);
cudaError_t LaunchScalar(cudaStream_t stream, const Gradients& gradients, const Device& device);

// ntc/long.cu runs all filters.
bool CanRunLong(const Forward& call, const Device& device);
bool CanRunLong(const Gradients& gradients, const Device& device);
cudaError_t LaunchLong(cudaStream_t stream, const Forward& call, const Device& device);
cudaError_t LaunchLong(cudaStream_t stream, const Gradients& gradients, const Device& device);

}  // namespace ntc

namespace nct {

// nct/steps.cu runs short filters of small calls.
bool CanRunSteps(const Forward& call, const Device& device);
bool CanRunSteps(const Gradients& gradients, const Device& device);
cudaError_t LaunchSteps(cudaStream_t stream, const Forward& call, const Device& device);
cudaError_t LaunchSteps(cudaStream_t stream, const Gradients& gradients, const Device& device);

// nct/rows.cu runs calls without dilation of up to 17 taps, 9 of float64, less the empty taps by
// which windows begin at whole vectors. Its gradients run rows of up to 256 vectors of 16 bytes; if
// rows are not whole vectors, of up to 1024 steps, 512 of float64.
bool CanRunRows(const Forward& call, const Device& device);
bool CanRunRows(const Gradients& gradients, const Device& device);
cudaError_t LaunchRows(cudaStream_t stream, const Forward& call, const Device& device);
cudaError_t LaunchRows(cudaStream_t stream, const Gradients& gradients, const Device& device);

// nct/causal.cu runs causal filters of two to eight taps, for rows of whole vectors.
bool CanRunCausal(const Forward& call, const Device& device);
bool CanRunCausal(const Gradients& gradients, const Device& device);
cudaError_t LaunchCausal(cudaStream_t stream, const Forward& call, const Device& device);
cudaError_t LaunchCausal(cudaStream_t stream, const Gradients& gradients, const Device& device);
// These run calls with segments or states.
bool CanRunCausalOfSegments(const Forward& call, const Device& device);
bool CanRunCausalOfSegments(const Gradients& gradients, const Device& device);
cudaError_t LaunchCausalOfSegments(cudaStream_t stream, const Forward& call, const Device& device);
cudaError_t LaunchCausalOfSegments(cudaStream_t stream, const Gradients& gradients,
                                   const Device& device);

// nct/segments.cu runs rows of any length and any dilation, in tiles that fit shared memory.
bool CanRunSegments(const Forward& call, const Device& device);
bool CanRunSegments(const Gradients& gradients, const Device& device);
bool ComputesInputGradSegments(const Backward& call);
cudaError_t LaunchSegments(cudaStream_t stream, const Forward& call, const Device& device);
cudaError_t LaunchSegments(cudaStream_t stream, const Gradients& gradients, const Device& device);
// CountSegmentSteps returns the steps for which threads have room in the tiles of a row; steps
// beyond `time` are idle.
int64_t CountSegmentSteps(const Geometry& geometry, DType dtype);

// nct/vectors.cu runs few taps that are whole vectors apart.
bool CanRunVectors(const Gradients& gradients, const Device& device);
cudaError_t LaunchVectors(cudaStream_t stream, const Gradients& gradients, const Device& device);

// nct/window.cu runs calls without dilation: short filters, and gradients of all filters.
bool CanRunWindow(const Forward& call, const Device& device);
bool CanRunWindow(const Gradients& gradients, const Device& device);
bool ComputesInputGradWindow(const Backward& call);
cudaError_t LaunchWindow(cudaStream_t stream, const Forward& call, const Device& device);
cudaError_t LaunchWindow(cudaStream_t stream, const Gradients& gradients, const Device& device);

// nct/long.cu runs calls without dilation.
bool CanRunLong(const Forward& call, const Device& device);
cudaError_t LaunchLong(cudaStream_t stream, const Forward& call, const Device& device);

// nct/dilated.cu runs all filters.
bool CanRunDilated(const Forward& call, const Device& device);
bool CanRunDilated(const Gradients& gradients, const Device& device);
cudaError_t LaunchDilated(cudaStream_t stream, const Forward& call, const Device& device);
cudaError_t LaunchDilated(cudaStream_t stream, const Gradients& gradients, const Device& device);

}  // namespace nct
}  // namespace jaxops::lightweight_conv::cuda

#endif  // JAXOPS_CUDA_LIGHTWEIGHT_CONV_FAMILIES_H_
