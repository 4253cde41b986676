// Which kernel family takes a call of the lightweight convolution.
#include "cuda/lightweight_conv/filters.cuh"
#include "cuda/lightweight_conv/launch.h"

namespace jaxops::lightweight_conv::cuda {
namespace {

cudaError_t LaunchNtc(cudaStream_t stream, const Forward& call) {
  if (call.geometry.taps > kShortTaps) return LaunchLongNtc(stream, call);
  if (TakesStepsNtc(call)) return LaunchStepsNtc(stream, call);
  return TakesShortNtc(call) ? LaunchShortNtc(stream, call) : LaunchScalarNtc(stream, call);
}

cudaError_t LaunchNct(cudaStream_t stream, const Forward& call) {
  const Geometry& g = call.geometry;
  if (SuitsSteps(call)) return LaunchSteps(stream, call);
  if (SuitsSegments(call)) return LaunchSegments(stream, call);
  if (g.dilation > 1) return LaunchDilatedNct(stream, call);
  return g.taps <= kShortTaps ? LaunchWindowNct(stream, call) : LaunchLongNct(stream, call);
}

cudaError_t LaunchNtc(cudaStream_t stream, const Backward& call, PartialSums& partials) {
  if (TakesShortNtc(call)) return LaunchShortNtc(stream, call, partials);
  return call.geometry.taps <= kShortTaps ? LaunchScalarNtc(stream, call, partials)
                                          : LaunchLongNtc(stream, call, partials);
}

cudaError_t LaunchNct(cudaStream_t stream, const Backward& call, PartialSums& partials) {
  const bool is_dilated = call.geometry.dilation > 1;
  if (SuitsSteps(call)) return LaunchSteps(stream, call, &partials.splits, partials.sums);
  if (SuitsVectors(call)) return LaunchVectors(stream, call, partials);
  if (SuitsSegments(call)) return LaunchSegments(stream, call, partials);
  if (is_dilated && HasSteps(call)) {
    return LaunchSteps(stream, call, &partials.splits, partials.sums);
  }
  return is_dilated ? LaunchDilatedNct(stream, call, partials)
                    : LaunchWindowNct(stream, call, partials);
}

// Whether the kernel that makes the filter gradient makes the input gradient too.
bool SharesKernel(const Backward& call) {
  const Geometry& g = call.geometry;
  if (g.data_format == DataFormat::kNTC) return g.taps <= kShortTaps;
  if (SuitsSteps(call) || SuitsVectors(call)) return true;
  if (SuitsSegments(call)) return MakesInputGradSegments(call);
  return g.dilation > 1 ? HasSteps(call) : MakesInputGradWindowNct(call);
}

// The input gradient as a forward convolution of g over every batch entry.
cudaError_t LaunchInputGrad(cudaStream_t stream, const Backward& call) {
  Forward forward{};
  forward.geometry = call.geometry;
  forward.geometry.padding = Mirrored(call.geometry);
  // The order of the entries does not matter, so kept and summed ones follow each other.
  const std::array<int, Forward::kOperands> operands = {Backward::kG, Backward::kWeight,
                                                        Backward::kWeight, Backward::kDx};
  if (!forward.batch.AppendFrom(call.kept, operands) ||
      !forward.batch.AppendFrom(call.summed, operands)) {
    return cudaErrorInvalidValue;
  }
  forward.dtype = call.dtype;
  forward.weight_dtype = call.weight_dtype;
  forward.bias_dtype = call.weight_dtype;
  forward.activation = Activation::kNone;
  forward.flip_taps = true;
  forward.x = call.g;
  forward.weight = call.weight;
  forward.bias = nullptr;
  forward.y = call.dx;
  return LaunchForward(stream, forward);
}

}  // namespace

cudaError_t LaunchForward(cudaStream_t stream, const Forward& call) {
  const Geometry& g = call.geometry;
  if (call.batch.size() == 0 || g.time == 0 || g.channels == 0) return cudaSuccess;
  if (!FitsKernels(g)) return cudaErrorInvalidValue;
  if (TakesMma(call)) return LaunchForwardMma(stream, call);
  return g.data_format == DataFormat::kNCT ? LaunchNct(stream, call) : LaunchNtc(stream, call);
}

cudaError_t LaunchBackward(cudaStream_t stream, const Backward& call, int64_t splits,
                           void* partials) {
  const Geometry& g = call.geometry;
  const int64_t kept = call.kept.size();
  if (kept == 0) return cudaSuccess;
  if (call.summed.size() == 0 || g.time == 0 || g.channels == 0) {
    const int64_t weights = kept * g.heads * g.taps * jaxops::cuda::SizeOf(call.weight_dtype);
    const cudaError_t error = cudaMemsetAsync(call.dweight, 0, weights, stream);
    if (error != cudaSuccess || call.dbias == nullptr) return error;
    const int64_t biases = kept * g.channels * jaxops::cuda::SizeOf(call.bias_dtype);
    return cudaMemsetAsync(call.dbias, 0, biases, stream);
  }
  if (!FitsKernels(g)) return cudaErrorInvalidValue;
  if (TakesMma(call)) {
    if (call.dx != nullptr && !MmaMakesInputGrad(call)) {
      const cudaError_t error = LaunchInputGrad(stream, call);
      if (error != cudaSuccess) return error;
    }
    return LaunchBackwardMma(stream, call, splits, partials);
  }
  if (call.dx != nullptr && !SharesKernel(call)) {
    const cudaError_t error = LaunchInputGrad(stream, call);
    if (error != cudaSuccess) return error;
  }
  PartialSums sums = {partials, splits};
  const cudaError_t error = g.data_format == DataFormat::kNCT ? LaunchNct(stream, call, sums)
                                                              : LaunchNtc(stream, call, sums);
  return error != cudaSuccess || sums.splits == 0 ? error : AddPartialSums(stream, call, sums);
}

}  // namespace jaxops::lightweight_conv::cuda
