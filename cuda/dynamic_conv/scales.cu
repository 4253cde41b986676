// The kernel of what the softmax over the taps is made of: the maximum of each row of weights, and
// one over the sum of its exponentials.
#include <cmath>

#include "cuda/dynamic_conv/families.h"
#include "cuda/dynamic_conv/weights.cuh"

namespace jaxops::dynamic_conv::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 8;  // of a row

template <typename Call>
struct Params {
  Call call;
  int64_t rows;  // of all batch entries
  FastDivider64 rows_of_entry;
  void* scales;
};

template <typename Acc, typename Call>
__global__ void __launch_bounds__(kThreads)
    DynamicConvScales(const __grid_constant__ Params<Call> p) {
  const Call& call = p.call;
  const int64_t taps = call.geometry.taps;
  const int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kLanes;
  const int lane = threadIdx.x % kLanes;
  const bool has_row = row < p.rows;
  auto batch = static_cast<uint64_t>(has_row ? row : 0);
  const auto of_entry = static_cast<int64_t>(p.rows_of_entry.DivMod(batch));
  const int64_t offset =
      call.batch.Offset(static_cast<int64_t>(batch), Call::kWeight) + of_entry * taps;
  Acc max = -INFINITY;
  for (int64_t k = lane; k < taps; k += kLanes) {
    const Acc w = LoadAs<Acc>(call.weight, offset + k, call.weight_dtype);
    max = w > max ? w : max;
  }
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    const Acc other = __shfl_xor_sync(0xffffffff, max, distance);
    max = other > max ? other : max;
  }
  Acc sum = 0;
  for (int64_t k = lane; k < taps; k += kLanes) {
    sum += exp(LoadAs<Acc>(call.weight, offset + k, call.weight_dtype) - max);
  }
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffff, sum, distance);
  }
  if (has_row && lane == 0) {
    Acc* const scales = static_cast<Acc*>(p.scales) + 2 * row;
    scales[0] = max;
    scales[1] = Acc(1) / sum;
  }
}

}  // namespace

template <typename Call>
cudaError_t LaunchScales(cudaStream_t stream, const Call& call, void* scales) {
  const Geometry& g = call.geometry;
  const int64_t rows = call.batch.size() * g.time * g.heads;
  if (!g.normalize || call.weight == nullptr || rows == 0) return cudaSuccess;
  const Params<Call> params = {call, rows, FastDivider64(g.time * g.heads), scales};
  const auto kernel =
      call.dtype == DType::kF64 ? DynamicConvScales<double, Call> : DynamicConvScales<float, Call>;
  return jaxops::cuda::Launch(kernel, CeilDiv(rows * kLanes, kThreads), kThreads, 0, stream,
                              params);
}

template cudaError_t LaunchScales(cudaStream_t, const Forward&, void*);
template cudaError_t LaunchScales(cudaStream_t, const Backward&, void*);

}  // namespace jaxops::dynamic_conv::cuda
