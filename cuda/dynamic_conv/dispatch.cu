// The kernels of dynamic convolution: one family, in which a thread owns an element of y or dx, and
// a warp the taps of a step and head in the gradient of the weights.
#include "cuda/common/activation.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/numeric.cuh"
#include "cuda/dynamic_conv/launch.h"

namespace jaxops::dynamic_conv::cuda {
namespace {

using jaxops::cuda::Accumulator;
using jaxops::cuda::CeilDiv;
using jaxops::cuda::DispatchFloat;
using jaxops::cuda::Narrow;
using jaxops::cuda::StoreAs;
using jaxops::cuda::Widen;

constexpr int kThreads = 256;
constexpr int kWarp = 32;

template <typename Call>
struct Params {
  Call call;
  void* scales;
};

template <typename Acc>
__device__ __forceinline__ Acc LoadAs(const void* base, int64_t index, DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return Acc(Widen(static_cast<const __half*>(base)[index]));
    case DType::kBF16:
      return Acc(Widen(static_cast<const __nv_bfloat16*>(base)[index]));
    case DType::kF64:
      return Acc(static_cast<const double*>(base)[index]);
    case DType::kF32:
      break;
  }
  return Acc(static_cast<const float*>(base)[index]);
}

// The weights of one batch entry, normalized where the call says so.
template <typename Acc>
struct Weights {
  const void* data;
  DType dtype;
  const Acc* scales;  // of the batch entry; null: not normalized

  // `row` is step * heads + head.
  __device__ __forceinline__ Acc At(int64_t row, int64_t taps, int64_t tap) const {
    const Acc w = LoadAs<Acc>(data, row * taps + tap, dtype);
    return scales == nullptr ? w : exp(w - scales[2 * row]) * scales[2 * row + 1];
  }
};

template <typename Acc, typename Call>
__device__ __forceinline__ Weights<Acc> WeightsOf(const Params<Call>& p, int64_t batch) {
  const Call& call = p.call;
  const Geometry& g = call.geometry;
  const Acc* scales = static_cast<const Acc*>(p.scales);
  const char* data = static_cast<const char*>(call.weight);
  return {data == nullptr ? nullptr
                          : data + call.batch.Offset(batch, Call::kWeight) *
                                       jaxops::cuda::SizeOf(call.weight_dtype),
          call.weight_dtype, g.normalize ? scales + 2 * batch * g.time * g.heads : nullptr};
}

// The maximum of each row of weights, and one over the sum of its exponentials: a thread a row.
template <typename Acc, typename Call>
__global__ void __launch_bounds__(kThreads)
    DynamicConvScales(const __grid_constant__ Params<Call> p) {
  const Geometry& g = p.call.geometry;
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t rows = g.time * g.heads;
  if (index >= p.call.batch.size() * rows) return;
  Weights<Acc> weights = WeightsOf<Acc>(p, index / rows);
  weights.scales = nullptr;
  const int64_t row = index % rows;
  Acc max = weights.At(row, g.taps, 0);
  for (int64_t k = 1; k < g.taps; ++k) {
    const Acc w = weights.At(row, g.taps, k);
    max = w > max ? w : max;
  }
  Acc sum = 0;
  for (int64_t k = 0; k < g.taps; ++k) sum += exp(weights.At(row, g.taps, k) - max);
  Acc* scales = static_cast<Acc*>(p.scales) + 2 * index;
  scales[0] = max;
  scales[1] = Acc(1) / sum;
}

// The place of an element in a sequence.
struct Element {
  int64_t batch, step, channel;

  // The memory order of the layout.
  __device__ __forceinline__ Element(const Geometry& g, int64_t index) {
    const int64_t size = g.time * g.channels;
    batch = index / size;
    const int64_t rest = index - batch * size;
    const bool ntc = g.data_format == DataFormat::kNTC;
    const int64_t inner = ntc ? g.channels : g.time;
    const int64_t outer = rest / inner;
    step = ntc ? outer : rest - outer * inner;
    channel = ntc ? rest - outer * inner : outer;
  }
};

// Where step and channel are in a sequence of `time` steps.
__device__ __forceinline__ int64_t Place(const Geometry& g, int64_t time, int64_t step,
                                         int64_t channel) {
  return g.data_format == DataFormat::kNTC ? step * g.channels + channel : channel * time + step;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    DynamicConvForward(const __grid_constant__ Params<Forward> p) {
  using Acc = Accumulator<T>;
  const Forward& call = p.call;
  const Geometry& g = call.geometry;
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= call.batch.size() * g.time * g.channels) return;
  const Element at(g, index);
  const auto weights = WeightsOf<Acc>(p, at.batch);
  const T* x = static_cast<const T*>(call.x) + call.batch.Offset(at.batch, Forward::kX);
  const int32_t* starts = call.starts == nullptr
                              ? nullptr
                              : call.starts + call.batch.Offset(at.batch, Forward::kStarts);
  const int64_t state = call.batch.Offset(at.batch, Forward::kState);
  const int64_t start = starts == nullptr ? -g.padding : starts[at.step];
  const int64_t row = at.step * g.heads + at.channel / (g.channels / g.heads);
  Acc sum[1] = {0};
  for (int64_t k = 0; k < g.taps; ++k) {
    const int64_t s = at.step + k * g.dilation - g.padding;
    if (s >= g.time) break;
    Acc value;
    if (s >= 0) {
      if (starts != nullptr && starts[s] != start) continue;
      value = Widen(x[Place(g, g.time, s, at.channel)]);
    } else {
      if (call.state == nullptr || s < start) continue;
      value = LoadAs<Acc>(call.state, state + Place(g, g.padding, s + g.padding, at.channel),
                          call.state_dtype);
    }
    sum[0] = fma(weights.At(row, g.taps, k), value, sum[0]);
  }
  if (call.bias != nullptr) {
    sum[0] += LoadAs<Acc>(call.bias, call.batch.Offset(at.batch, Forward::kBias) + at.channel,
                          call.bias_dtype);
  }
  jaxops::cuda::Activate(sum, call.activation);
  T* y = static_cast<T*>(call.y) + call.batch.Offset(at.batch, Forward::kY);
  y[Place(g, g.time, at.step, at.channel)] = Narrow<T>(sum[0]);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    DynamicConvInputGrad(const __grid_constant__ Params<Backward> p) {
  using Acc = Accumulator<T>;
  const Backward& call = p.call;
  const Geometry& g = call.geometry;
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= call.batch.size() * g.time * g.channels) return;
  const Element at(g, index);
  const auto weights = WeightsOf<Acc>(p, at.batch);
  const T* cotangent = static_cast<const T*>(call.g) + call.batch.Offset(at.batch, Backward::kG);
  const int32_t* starts = call.starts == nullptr
                              ? nullptr
                              : call.starts + call.batch.Offset(at.batch, Backward::kStarts);
  const int64_t head = at.channel / (g.channels / g.heads);
  Acc sum = 0;
  for (int64_t k = 0; k < g.taps; ++k) {
    const int64_t t = at.step + g.padding - k * g.dilation;
    if (t < 0) break;
    if (t >= g.time || (starts != nullptr && starts[t] != starts[at.step])) continue;
    sum = fma(weights.At(t * g.heads + head, g.taps, k),
              Acc(Widen(cotangent[Place(g, g.time, t, at.channel)])), sum);
  }
  T* dx = static_cast<T*>(call.dx) + call.batch.Offset(at.batch, Backward::kDx);
  dx[Place(g, g.time, at.step, at.channel)] = Narrow<T>(sum);
}

// A warp has one step and head. The cotangent of a softmax needs a sum over the taps first: the
// products are then computed twice.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    DynamicConvWeightGrad(const __grid_constant__ Params<Backward> p) {
  using Acc = Accumulator<T>;
  const Backward& call = p.call;
  const Geometry& g = call.geometry;
  const int64_t index = int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
  const int64_t rows = g.time * g.heads;
  if (index >= call.batch.size() * rows) return;
  const int lane = threadIdx.x % kWarp;
  const int64_t batch = index / rows;
  const int64_t row = index - batch * rows;
  const int64_t step = row / g.heads;
  const int64_t depth = g.channels / g.heads;
  const int64_t begin = (row - step * g.heads) * depth;
  const T* x = static_cast<const T*>(call.x) + call.batch.Offset(batch, Backward::kX);
  const T* cotangent = static_cast<const T*>(call.g) + call.batch.Offset(batch, Backward::kG);
  const int32_t* starts =
      call.starts == nullptr ? nullptr : call.starts + call.batch.Offset(batch, Backward::kStarts);
  const auto weights = WeightsOf<Acc>(p, batch);
  const int64_t offset = call.batch.Offset(batch, Backward::kDWeight) + row * g.taps;

  const auto correlate = [&](int64_t k) {
    const int64_t s = step + k * g.dilation - g.padding;
    Acc sum = 0;
    if (s >= 0 && s < g.time && (starts == nullptr || starts[s] == starts[step])) {
      for (int64_t c = begin + lane; c < begin + depth; c += kWarp) {
        sum = fma(Acc(Widen(cotangent[Place(g, g.time, step, c)])),
                  Acc(Widen(x[Place(g, g.time, s, c)])), sum);
      }
    }
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, distance);
    }
    return sum;
  };

  Acc dot = 0;
  if (g.normalize) {
    for (int64_t k = 0; k < g.taps; ++k) dot += weights.At(row, g.taps, k) * correlate(k);
  }
  for (int64_t k = 0; k < g.taps; ++k) {
    Acc value = correlate(k);
    if (g.normalize) value = weights.At(row, g.taps, k) * (value - dot);
    if (lane == 0) StoreAs(call.dweight, offset + k, call.dweight_dtype, value);
  }
}

template <typename Call>
cudaError_t LaunchScales(cudaStream_t stream, const Params<Call>& params) {
  const Geometry& g = params.call.geometry;
  const int64_t rows = params.call.batch.size() * g.time * g.heads;
  if (!g.normalize || params.call.weight == nullptr) return cudaSuccess;
  const auto kernel = params.call.dtype == DType::kF64 ? DynamicConvScales<double, Call>
                                                       : DynamicConvScales<float, Call>;
  return jaxops::cuda::Launch(kernel, CeilDiv(rows, kThreads), kThreads, 0, stream, params);
}

}  // namespace

cudaError_t LaunchForward(cudaStream_t stream, const Forward& call, void* scales) {
  const Geometry& g = call.geometry;
  const int64_t elements = call.batch.size() * g.time * g.channels;
  if (elements == 0) return cudaSuccess;
  const Params<Forward> params = {call, scales};
  const cudaError_t error = LaunchScales(stream, params);
  if (error != cudaSuccess) return error;
  return DispatchFloat(call.dtype, [&](auto type) {
    return jaxops::cuda::Launch(DynamicConvForward<decltype(type)>, CeilDiv(elements, kThreads),
                                kThreads, 0, stream, params);
  });
}

cudaError_t LaunchBackward(cudaStream_t stream, const Backward& call, void* scales) {
  const Geometry& g = call.geometry;
  const int64_t rows = call.batch.size() * g.time * g.heads;
  if (rows == 0) return cudaSuccess;
  const Params<Backward> params = {call, scales};
  cudaError_t error = LaunchScales(stream, params);
  if (error == cudaSuccess && call.dx != nullptr && g.channels > 0) {
    const int64_t blocks = CeilDiv(call.batch.size() * g.time * g.channels, kThreads);
    error = DispatchFloat(call.dtype, [&](auto type) {
      return jaxops::cuda::Launch(DynamicConvInputGrad<decltype(type)>, blocks, kThreads, 0, stream,
                                  params);
    });
  }
  if (error == cudaSuccess && call.dweight != nullptr) {
    error = DispatchFloat(call.dtype, [&](auto type) {
      return jaxops::cuda::Launch(DynamicConvWeightGrad<decltype(type)>,
                                  CeilDiv(rows, kThreads / kWarp), kThreads, 0, stream, params);
    });
  }
  return error;
}

}  // namespace jaxops::dynamic_conv::cuda
