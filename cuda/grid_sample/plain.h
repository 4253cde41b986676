// Plain samples of volumes and their gradients by points, which have kernels of their own.
#ifndef JAXOPS_CUDA_GRID_SAMPLE_PLAIN_H_
#define JAXOPS_CUDA_GRID_SAMPLE_PLAIN_H_

#include <cuda_runtime_api.h>

#include "common/grid_sample.h"
#include "cuda/grid_sample/order.cuh"

namespace jaxops::grid_sample::cuda {

// Whether the value or the gradient by the points is plain: linear, with zeros around, without
// derivatives, the points in the arithmetic type and one after another, and all counted in 32 bits,
// the entries of an axis also exactly in the arithmetic type.
bool IsPlain(const Call& call);

// Whether it is, and is made faster by LaunchPlain than by the kernels that know every option; a
// value in an order of the points if there is one. `packs`: rows are whole packs of 16 bytes, and
// aligned.
bool IsFasterPlain(const Call& call, const RoughOrder& order, bool packs);

// Makes the one that is asked for.
cudaError_t LaunchPlain(cudaStream_t stream, const Call& call, const RoughOrder& order, bool packs);

}  // namespace jaxops::grid_sample::cuda

#endif  // JAXOPS_CUDA_GRID_SAMPLE_PLAIN_H_
