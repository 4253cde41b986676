// The launcher of the scaled product on CUDA devices.
#ifndef JAXOPS_CUDA_SCALED_PRODUCT_LAUNCH_H_
#define JAXOPS_CUDA_SCALED_PRODUCT_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "common/scaled_product.h"

namespace jaxops::scaled_product::cuda {

cudaError_t LaunchProduct(cudaStream_t stream, const Call& call);

}  // namespace jaxops::scaled_product::cuda

#endif  // JAXOPS_CUDA_SCALED_PRODUCT_LAUNCH_H_
