// The only kernel of the scaled product: a block a row.
#include "cuda/common/launch.h"
#include "cuda/scaled_product/launch.h"

namespace jaxops::scaled_product::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads) ScaledProductRows(const Call call) {
  const int64_t row = blockIdx.x;
  const T* a = static_cast<const T*>(call.a) + call.rows.Offset(row, Call::kA);
  const T* b = static_cast<const T*>(call.b) + call.rows.Offset(row, Call::kB);
  T* out = static_cast<T*>(call.out) + call.rows.Offset(row, Call::kOut);
  for (int64_t i = threadIdx.x; i < call.width; i += kThreads) {
    out[i] = static_cast<T>(call.scale) * a[i] * b[i];
  }
}

}  // namespace

cudaError_t LaunchProduct(cudaStream_t stream, const Call& call) {
  if (call.rows.size() == 0) return cudaSuccess;
  const auto kernel =
      call.dtype == DType::kF64 ? ScaledProductRows<double> : ScaledProductRows<float>;
  return jaxops::cuda::Launch(kernel, call.rows.size(), kThreads, 0, stream, call);
}

}  // namespace jaxops::scaled_product::cuda
