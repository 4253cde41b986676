// The kernel families of the lightweight convolution: a file of this folder each, or a folder.
//
// CanRun... says whether a family's kernels compute a call correctly, be they fast or not.
// Launchers expect calls that can run. The geometry of a call is one that FitsKernels, and it has
// work to do.
#ifndef JAXOPS_CUDA_LIGHTWEIGHT_CONV_FAMILIES_H_
#define JAXOPS_CUDA_LIGHTWEIGHT_CONV_FAMILIES_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/lightweight_conv.h"
#include "cuda/common/dispatch.h"

namespace jaxops::lightweight_conv::cuda {

using jaxops::cuda::Device;

// A call for gradients and the space for its partial sums over time and batch: (kept, splits,
// taps + 1, channels) of the accumulation type. Launchers use at most as much of it.
struct Gradients {
  const Backward& call;
  int64_t splits;
  void* partials;
};

// Whether the kernels that make the filter gradient make the input gradient, too: MakesInputGrad.
// Families without such a function always do, but for ntc/long and nct/dilated, which never do.

// mma/: long filters on tensor cores.
bool CanRunMma(const Forward& call, const Device& device);
bool CanRunMma(const Gradients& gradients, const Device& device);
bool MakesInputGradMma(const Backward& call);
cudaError_t LaunchMma(cudaStream_t stream, const Forward& call, const Device& device);
cudaError_t LaunchMma(cudaStream_t stream, const Gradients& gradients, const Device& device);

namespace ntc {

// ntc/steps.cu: short filters of small calls.
bool CanRunSteps(const Forward& call, const Device& device);
cudaError_t LaunchSteps(cudaStream_t stream, const Forward& call, const Device& device);

// ntc/short.cu: short filters of rows that vectors divide.
bool CanRunShort(const Forward& call, const Device& device);
bool CanRunShort(const Gradients& gradients, const Device& device);
cudaError_t LaunchShort(cudaStream_t stream, const Forward& call, const Device& device);
cudaError_t LaunchShort(cudaStream_t stream, const Gradients& gradients, const Device& device);

// ntc/scalar.cu: short filters of any number of channels.
bool CanRunScalar(const Forward& call, const Device& device);
bool CanRunScalar(const Gradients& gradients, const Device& device);
cudaError_t LaunchScalar(cudaStream_t stream, const Forward& call, const Device& device);
cudaError_t LaunchScalar(cudaStream_t stream, const Gradients& gradients, const Device& device);

// ntc/long.cu: all filters.
bool CanRunLong(const Forward& call, const Device& device);
bool CanRunLong(const Gradients& gradients, const Device& device);
cudaError_t LaunchLong(cudaStream_t stream, const Forward& call, const Device& device);
cudaError_t LaunchLong(cudaStream_t stream, const Gradients& gradients, const Device& device);

}  // namespace ntc

namespace nct {

// nct/steps.cu: short filters of small calls.
bool CanRunSteps(const Forward& call, const Device& device);
bool CanRunSteps(const Gradients& gradients, const Device& device);
cudaError_t LaunchSteps(cudaStream_t stream, const Forward& call, const Device& device);
cudaError_t LaunchSteps(cudaStream_t stream, const Gradients& gradients, const Device& device);

// nct/segments.cu: rows of any length and any dilation, in tiles that fit in shared memory.
bool CanRunSegments(const Forward& call, const Device& device);
bool CanRunSegments(const Gradients& gradients, const Device& device);
bool MakesInputGradSegments(const Backward& call);
cudaError_t LaunchSegments(cudaStream_t stream, const Forward& call, const Device& device);
cudaError_t LaunchSegments(cudaStream_t stream, const Gradients& gradients, const Device& device);
// The steps that its threads have room for in the tiles of a row; more than `time` are in vain.
int64_t CountSegmentSteps(const Geometry& geometry, DType dtype);

// nct/vectors.cu: few taps that are whole vectors apart.
bool CanRunVectors(const Gradients& gradients, const Device& device);
cudaError_t LaunchVectors(cudaStream_t stream, const Gradients& gradients, const Device& device);

// nct/window.cu: no dilation; short filters, and gradients of all.
bool CanRunWindow(const Forward& call, const Device& device);
bool CanRunWindow(const Gradients& gradients, const Device& device);
bool MakesInputGradWindow(const Backward& call);
cudaError_t LaunchWindow(cudaStream_t stream, const Forward& call, const Device& device);
cudaError_t LaunchWindow(cudaStream_t stream, const Gradients& gradients, const Device& device);

// nct/long.cu: no dilation.
bool CanRunLong(const Forward& call, const Device& device);
cudaError_t LaunchLong(cudaStream_t stream, const Forward& call, const Device& device);

// nct/dilated.cu: all filters.
bool CanRunDilated(const Forward& call, const Device& device);
bool CanRunDilated(const Gradients& gradients, const Device& device);
cudaError_t LaunchDilated(cudaStream_t stream, const Forward& call, const Device& device);
cudaError_t LaunchDilated(cudaStream_t stream, const Gradients& gradients, const Device& device);

}  // namespace nct
}  // namespace jaxops::lightweight_conv::cuda

#endif  // JAXOPS_CUDA_LIGHTWEIGHT_CONV_FAMILIES_H_
