// These kernels run plain calls of trilinear interpolation and of its gradients: no derivatives,
// points of the features' dtype, cells that are not nested, offsets of 32 bits.
//
// The latency of one thread bounds a call that does not fill the GPU: the thread waits for
// instructions and constants, which the first block of a multiprocessor has to fetch, and for one
// load after another. Threads therefore share little but sums and have little work each: blocks are
// many and small, parameters are few, and there is no code for anything that plain calls do not
// have. The same design is the fastest for large point gradients of long rows, and for large values
// of long rows and of some short ones.
#include <algorithm>
#include <cstdint>

#include "common/fast_divide.h"
#include "cuda/trilinear/cells.cuh"
#include "cuda/trilinear/families.h"

namespace jaxops::trilinear::cuda {
namespace {

// These are the parameters of a result that is written in vectors, one per thread. All of them lie
// in one line of the constant cache, in which a kernel's parameters begin 16 bytes after the start.
struct PlainParams {
  const void* from;  // features or cotangent
  const void* points;
  void* to;
  uint32_t vectors;       // vectors of the whole result
  uint32_t stride;        // between the entries of two cells in `from`
  uint32_t point_stride;  // between two points
  FastDivider row;        // vectors per row, or elements per row if vectors span rows
};

template <typename T>
__device__ __forceinline__ void LoadPlain(const void* points, uint32_t offset,
                                          Coordinates<Accumulator<T>>& p) {
  const T* point = static_cast<const T*>(points) + offset;
#pragma unroll
  for (int a = 0; a < kAxes; ++a) p[a] = Widen(point[a]);
}

// A thread has kCount values of a cell. Threads beyond the last vector compute the last vector
// again without storing it: an early return would delay the loads of all threads until its
// condition is known. The block size is a constant, because blockDim is in another line of the
// constant cache. A minimum of one block per multiprocessor leaves registers for all of a thread's
// loads.
template <typename T, int kCount, int kThreads>
__global__ void __launch_bounds__(kThreads, 1)
    InterpolatePlain(const __grid_constant__ PlainParams params) {
  using A = Accumulator<T>;
  const uint32_t own = blockIdx.x * kThreads + threadIdx.x;
  const uint32_t vector = min(own, params.vectors - 1);
  uint32_t cell = vector;
  const uint32_t f = params.row.DivMod(cell) * kCount;
  const uint32_t width = params.row.divisor() * kCount;
  const T* features = static_cast<const T*>(params.from) + (cell * params.stride + f);
  Vector<T, kCount> rows[kCorners];
#pragma unroll
  for (int c = 0; c < kCorners; ++c) rows[c] = LoadVector<kCount>(features + c * width);
  Coordinates<A> p;
  LoadPlain<T>(params.points, cell * params.point_stride, p);
  Axis<A> axes[kAxes];
  MakeAxes(p, axes);
  A weights[kCorners];
  multilinear::PlainWeights<kAxes>(axes, weights);
  Vector<T, kCount> out;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    A sum = 0;
#pragma unroll
    for (int c = 0; c < kCorners; ++c) sum += weights[c] * Widen(rows[c].values[i]);
    out.values[i] = Narrow<T>(sum);
  }
  if (own == vector) {
    *reinterpret_cast<Vector<T, kCount>*>(static_cast<T*>(params.to) + vector * kCount) = out;
  }
}

struct SharedValueParams {
  const void* features;
  const void* points;
  void* out;
  uint32_t last;          // the last cell
  uint32_t stride;        // between the features of two cells
  uint32_t point_stride;  // between two points
};

constexpr int kSharedThreads = 128;

// A lane has at least 4 bytes of a value's elements.
template <typename T>
constexpr int kWordElements = sizeof(T) == 2 ? 2 : 1;

// Rows have kWidth elements, so that a warp has whole cells. A warp loads the features of its cells
// in the order of memory and exchanges them through shared memory, because each load of one row of
// each cell would touch one line per cell.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kSharedThreads)
    InterpolateShared(const __grid_constant__ SharedValueParams params) {
  using A = Accumulator<T>;
  constexpr int kVector = kVectorElements<T>;
  constexpr int kCount = kWordElements<T>;
  constexpr int kLanes = kWidth / kCount;                // per cell
  constexpr int kCells = kWarp / kLanes;                 // per warp
  constexpr int kVectors = kCorners * kWidth / kVector;  // per cell
  constexpr int kLoads = kCells * kVectors / kWarp;
  // The pitch has one row more than a cell, and at least one vector more, which puts cells into
  // different banks.
  constexpr int kPitch = kVectors + (kWidth + kVector - 1) / kVector;
  __shared__ Vector<T, kVector> shared[kSharedThreads / kWarp][kCells * kPitch];
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t first = (blockIdx.x * kSharedThreads + threadIdx.x) / kWarp * kCells;
  const T* features = static_cast<const T*>(params.features);
  Vector<T, kVector> loaded[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const uint32_t vector = i * kWarp + lane;
    const uint32_t cell = min(first + vector / kVectors, params.last);
    loaded[i] = LoadVector<kVector>(features + cell * params.stride + vector % kVectors * kVector);
  }
  const uint32_t local = lane / kLanes;
  const uint32_t f = lane % kLanes * kCount;
  const uint32_t cell = first + local;
  Coordinates<A> p;
  LoadPlain<T>(params.points, min(cell, params.last) * params.point_stride, p);
  Axis<A> axes[kAxes];
  MakeAxes(p, axes);
  A weights[kCorners];
  multilinear::PlainWeights<kAxes>(axes, weights);
  Vector<T, kVector>* of_warp = shared[threadIdx.x / kWarp];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const uint32_t vector = i * kWarp + lane;
    of_warp[vector / kVectors * kPitch + vector % kVectors] = loaded[i];
  }
  __syncwarp();
  const T* rows = reinterpret_cast<const T*>(of_warp + local * kPitch) + f;
  A sums[kCount] = {};
#pragma unroll
  for (int c = 0; c < kCorners; ++c) {
    const auto row = LoadVector<kCount>(rows + c * kWidth);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] += weights[c] * Widen(row.values[i]);
  }
  Vector<T, kCount> out;
#pragma unroll
  for (int i = 0; i < kCount; ++i) out.values[i] = Narrow<T>(sums[i]);
  if (cell <= params.last) {
    *reinterpret_cast<Vector<T, kCount>*>(static_cast<T*>(params.out) + cell * kWidth + f) = out;
  }
}

template <typename A>
__device__ __forceinline__ A WeightOf(const Axis<A> (&axes)[kAxes], uint32_t corner) {
  A product = 1;
#pragma unroll
  for (int a = 0; a < kAxes; ++a) {
    product *= corner & multilinear::BitOf<kAxes>(a) ? axes[a].upper : axes[a].lower;
  }
  return product;
}

constexpr int kGradThreads = 256;

// A thread has a vector of a cell's feature gradient; kSpans says that vectors may span rows.
template <typename T, bool kSpans>
__global__ void __launch_bounds__(kGradThreads)
    FeatureGradPlain(const __grid_constant__ PlainParams params) {
  using A = Accumulator<T>;
  constexpr int kVector = kVectorElements<T>;
  const uint32_t vector = blockIdx.x * kGradThreads + threadIdx.x;
  if (vector >= params.vectors) return;
  uint32_t row = kSpans ? vector * kVector : vector;
  uint32_t f = params.row.DivMod(row) * (kSpans ? 1 : kVector);
  const uint32_t cell = row / kCorners;
  Coordinates<A> p;
  LoadPlain<T>(params.points, cell * params.point_stride, p);
  const T* cotangent = static_cast<const T*>(params.from) + cell * params.stride;
  Vector<T, kVector> g;
  uint32_t rows[kVector];
  if constexpr (kSpans) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      g.values[i] = cotangent[f];
      rows[i] = row;
      if (++f == params.row.divisor()) {
        f = 0;
        ++row;
      }
    }
  } else {
    g = LoadVector<kVector>(cotangent + f);
  }
  Axis<A> axes[kAxes];
  MakeAxes(p, axes);
  Vector<T, kVector> out;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const A weight = WeightOf(axes, (kSpans ? rows[i] : row) % kCorners);
    out.values[i] = Narrow<T>(weight * Widen(g.values[i]));
  }
  StoreVector(static_cast<T*>(params.to) + vector * kVector, out);
}

// The results do not fit the first line of constants, and are last because they are needed last.
struct PointParams {
  const void* features;
  const void* points;
  const void* cotangent;
  uint32_t lanes;  // lanes per cell, a power of two
  uint32_t cells, width;
  uint32_t strides[Call::kCotangent + 1];  // between the entries of two cells
  void* dfeatures;
  void* dpoints;
};

constexpr uint32_t kMaxLanes = 512;
constexpr uint32_t kMinThreads = 64;

// The threads of a block follow from the lanes, because blockDim is in another line of constants.
JAXOPS_HOST_DEVICE constexpr uint32_t PointThreads(uint32_t lanes) {
  return lanes < kMinThreads ? kMinThreads : lanes;
}

// The kernel computes the point gradient, and the feature gradient if kFeatures. A minimum of one
// block per multiprocessor leaves registers for all of a thread's loads.
template <typename T, int kCount, bool kFeatures>
__global__ void __launch_bounds__(kMaxLanes, 1)
    BackwardPlain(const __grid_constant__ PointParams params) {
  using A = Accumulator<T>;
  __shared__ A sums[kMaxLanes / kWarp][kAxes];
  const uint32_t lanes = params.lanes;
  const uint32_t lane = threadIdx.x & (lanes - 1);
  uint32_t cell = (blockIdx.x * PointThreads(lanes) + threadIdx.x) / lanes;
  // Lanes without a cell sum along with those of the last cell, because the shuffles need whole
  // warps.
  const bool real = cell < params.cells;
  if (!real) cell = params.cells - 1;
  Coordinates<A> p;
  LoadPlain<T>(params.points, cell * params.strides[Call::kPoints], p);
  const T* features =
      static_cast<const T*>(params.features) + cell * params.strides[Call::kFeatures];
  const T* cotangent =
      static_cast<const T*>(params.cotangent) + cell * params.strides[Call::kCotangent];
  [[maybe_unused]] T* to = nullptr;
  if constexpr (kFeatures) {
    to = static_cast<T*>(params.dfeatures) + cell * (kCorners * params.width);
  }
  Axis<A> axes[kAxes];
  A dots[kCorners] = {};
#pragma unroll 1
  for (uint32_t f = lane * kCount; f < params.width; f += lanes * kCount) {
    const auto g = LoadVector<kCount>(cotangent + f);
    Vector<T, kCount> rows[kCorners];
#pragma unroll
    for (int c = 0; c < kCorners; ++c)
      rows[c] = LoadVector<kCount>(features + c * params.width + f);
    if constexpr (kFeatures) {
      MakeAxes(p, axes);
      A weights[kCorners];
      multilinear::PlainWeights<kAxes>(axes, weights);
#pragma unroll
      for (int c = 0; c < kCorners; ++c) {
        Vector<T, kCount> out;
#pragma unroll
        for (int i = 0; i < kCount; ++i) out.values[i] = Narrow<T>(weights[c] * Widen(g.values[i]));
        if (real) {
          *reinterpret_cast<Vector<T, kCount>*>(to + c * params.width + f) = out;
        }
      }
    }
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) dots[c] += Widen(rows[c].values[i]) * Widen(g.values[i]);
    }
  }
  MakeAxes(p, axes);
  A gradient[kAxes];
  multilinear::PlainPointGradient<kAxes>(axes, dots, gradient);
  multilinear::cuda::SumOverLanes(gradient, min(static_cast<int>(lanes), kWarp));
  T* dpoint = static_cast<T*>(params.dpoints) + cell * kAxes;
  if (lanes <= kWarp) {
    if (real && lane == 0) {
#pragma unroll
      for (int a = 0; a < kAxes; ++a) dpoint[a] = Narrow<T>(gradient[a]);
    }
    return;
  }
  // The whole block has one cell here.
  if (threadIdx.x % kWarp == 0) {
#pragma unroll
    for (int a = 0; a < kAxes; ++a) sums[threadIdx.x / kWarp][a] = gradient[a];
  }
  __syncthreads();
  if (threadIdx.x < kAxes) {
    A sum = 0;
#pragma unroll
    for (uint32_t warp = 0; warp < kMaxLanes / kWarp; ++warp) {
      if (warp < lanes / kWarp) sum += sums[warp][threadIdx.x];
    }
    dpoint[threadIdx.x] = Narrow<T>(sum);
  }
}

uint32_t StrideOf(const Call& call, Call::Operand operand) {
  return call.cells.rank() == 0 ? 0 : static_cast<uint32_t>(call.cells.stride(0, operand));
}

template <typename T, int kCount, int kThreads>
cudaError_t LaunchValuesOf(cudaStream_t stream, const Call& call) {
  const int64_t vectors = call.cells.size() * call.width / kCount;
  const PlainParams params{call.features,
                           call.points,
                           call.out,
                           static_cast<uint32_t>(vectors),
                           StrideOf(call, Call::kFeatures),
                           StrideOf(call, Call::kPoints),
                           FastDivider(call.width / kCount)};
  return Launch(InterpolatePlain<T, kCount, kThreads>, CeilDiv(vectors, kThreads), kThreads, 0,
                stream, params);
}

// These are the minimum and the maximum elements of a row for InterpolateShared.
constexpr int kMinSharedWidth = 2;
template <typename T>
constexpr int kMaxSharedWidth = sizeof(T) == 2 ? 32 : 32 / sizeof(T);

template <typename T, int kWidth = kMinSharedWidth>
cudaError_t LaunchSharedValues(cudaStream_t stream, const Call& call) {
  if constexpr (kWidth < kMaxSharedWidth<T>) {
    if (call.width != kWidth) return LaunchSharedValues<T, 2 * kWidth>(stream, call);
  }
  const SharedValueParams params{call.features,
                                 call.points,
                                 call.out,
                                 static_cast<uint32_t>(call.cells.size() - 1),
                                 StrideOf(call, Call::kFeatures),
                                 StrideOf(call, Call::kPoints)};
  return Launch(InterpolateShared<T, kWidth>,
                CeilDiv(call.cells.size() * (kWidth / kWordElements<T>), kSharedThreads),
                kSharedThreads, 0, stream, params);
}

// ValuePlan chooses the fastest kernel for a number of values, as measured on an H200: a thread has
// several values if enough threads remain; otherwise blocks become larger rather than more
// numerous.
constexpr int64_t kMinLongThreads = 7 * 1024;
constexpr int64_t kManyLongThreads = 32 * 1024;
constexpr int64_t kMaxBlocks = 96;

struct ValuePlan {
  bool shares = false;  // warps load whole cells, by InterpolateShared
  int count = 1;        // values per thread
  int threads = 256;    // per block

  explicit ValuePlan(const Call& call) {
    const int64_t values = call.cells.size() * call.width;
    const bool has_long_rows = HasLongRows(call);
    const int long_count = call.dtype == DType::kF64 ? 2 : 4;
    if (has_long_rows && values > kManyLongThreads * long_count) {
      count = long_count;
      threads = 128;
    } else if (CanShareValues(call)) {
      shares = true;
    } else if (has_long_rows && values >= kMinLongThreads * long_count) {
      count = long_count;
      threads = 64;
    } else if (SizeOf(call.dtype) == 2 && call.width % 2 == 0) {
      count = 2;
      threads = 128;
    } else if (values <= kMaxBlocks * 128) {
      threads = values <= kMaxBlocks * 64 ? 64 : 128;
    }
  }
};

template <typename T>
cudaError_t LaunchValues(cudaStream_t stream, const Call& call) {
  constexpr int kLongCount = sizeof(T) == 8 ? 2 : 4;
  const ValuePlan plan(call);
  if (plan.shares) return LaunchSharedValues<T>(stream, call);
  if (plan.count == kLongCount) {
    return plan.threads == 128 ? LaunchValuesOf<T, kLongCount, 128>(stream, call)
                               : LaunchValuesOf<T, kLongCount, 64>(stream, call);
  }
  if constexpr (sizeof(T) == 2) {
    if (plan.count == 2) return LaunchValuesOf<T, 2, 128>(stream, call);
  }
  return plan.threads == 64    ? LaunchValuesOf<T, 1, 64>(stream, call)
         : plan.threads == 128 ? LaunchValuesOf<T, 1, 128>(stream, call)
                               : LaunchValuesOf<T, 1, 256>(stream, call);
}

template <typename T>
cudaError_t LaunchFeatureGrad(cudaStream_t stream, const Call& call) {
  constexpr int kVector = kVectorElements<T>;
  const bool spans = call.width % kVector != 0;
  const int64_t vectors = call.cells.size() * kCorners * call.width / kVector;
  const PlainParams params{call.cotangent,
                           call.points,
                           call.dfeatures,
                           static_cast<uint32_t>(vectors),
                           StrideOf(call, Call::kCotangent),
                           StrideOf(call, Call::kPoints),
                           FastDivider(spans ? call.width : call.width / kVector)};
  return Launch(spans ? FeatureGradPlain<T, true> : FeatureGradPlain<T, false>,
                CeilDiv(vectors, kGradThreads), kGradThreads, 0, stream, params);
}

// PointLanes returns the number of lanes that share a cell whose rows have `vectors` vectors;
// `whole` says that these have 16 bytes. Calls that would not fill the GPU otherwise have one lane
// per vector.
uint32_t PointLanes(const Call& call, int64_t vectors, bool whole) {
  constexpr int64_t kFilled = 64 * 1024;
  const auto gains = [&](uint32_t lanes) {
    if (lanes < kWarp || lanes * call.cells.size() < kFilled) return true;
    if (call.dfeatures != nullptr) {
      if (!whole) return true;
      // A block of kMaxLanes lanes leaves no room for another block on the multiprocessor, which
      // then idles when that block waits for memory, unless the lanes have several vectors each.
      if (lanes == kMaxLanes / 2) return vectors >= 2 * kMaxLanes;
      // Few lanes with one more iteration are better than many lanes without a vector, above all
      // for types other than float32, whose lanes need many registers.
      return (jaxops::cuda::SizeOf(call.dtype) == 4 ? 5 : 7) * lanes <= 4 * vectors;
    }
    // A lane has one and a half to three vectors: with fewer, blocks mostly start and end, and with
    // more, the last blocks take long.
    return whole && lanes < kMaxLanes / 2 && 3 * lanes <= vectors;
  };
  uint32_t lanes = 1;
  while (lanes < kMaxLanes && lanes < vectors && gains(lanes)) lanes *= 2;
  return lanes;
}

template <typename T, int kCount>
cudaError_t LaunchPoints(cudaStream_t stream, const Call& call, int64_t lanes) {
  PointParams params{call.features,
                     call.points,
                     call.cotangent,
                     static_cast<uint32_t>(lanes),
                     static_cast<uint32_t>(call.cells.size()),
                     static_cast<uint32_t>(call.width),
                     {},
                     call.dfeatures,
                     call.dpoints};
  for (const auto operand : {Call::kFeatures, Call::kPoints, Call::kCotangent}) {
    params.strides[operand] = StrideOf(call, operand);
  }
  const int threads = static_cast<int>(PointThreads(params.lanes));
  const auto kernel =
      call.dfeatures != nullptr ? BackwardPlain<T, kCount, true> : BackwardPlain<T, kCount, false>;
  return Launch(kernel, CeilDiv(call.cells.size() * params.lanes, threads), threads, 0, stream,
                params);
}

template <typename T>
cudaError_t LaunchOf(cudaStream_t stream, const Call& call) {
  constexpr int kVector = kVectorElements<T>;
  if (call.out != nullptr) return LaunchValues<T>(stream, call);
  if (call.dpoints == nullptr) return LaunchFeatureGrad<T>(stream, call);
  const PlainPointPlan plan(call);
  if (plan.count == kVector) return LaunchPoints<T, kVector>(stream, call, plan.lanes);
  if constexpr (kVector > 2) {
    if (plan.count > 1) return LaunchPoints<T, kVector / 2>(stream, call, plan.lanes);
  }
  return LaunchPoints<T, 1>(stream, call, plan.lanes);
}

}  // namespace

bool CanShareValues(const Call& call) {
  const int64_t width = call.width;
  const int64_t max_width = SizeOf(call.dtype) == 2 ? 32 : 32 / SizeOf(call.dtype);
  return width >= kMinSharedWidth && width <= max_width && (width & (width - 1)) == 0;
}

bool HasLongRows(const Call& call) {
  return call.width % (call.dtype == DType::kF64 ? 2 : 4) == 0 && RowBytes(call) >= 64;
}

PlainPointPlan::PlainPointPlan(const Call& call) {
  constexpr int64_t kMinVectorRowBytes = 48;
  const int vector = static_cast<int>(VectorElements(call));
  if (call.width % vector == 0 && RowBytes(call) >= kMinVectorRowBytes) {
    count = vector;
  } else {
    count = call.width % (vector / 2) == 0 ? vector / 2 : 1;
  }
  lanes = PointLanes(call, CeilDiv(call.width, count), count == vector);
}

bool CanRunPlain(const Call& call, const Device&) {
  return HasAlignedArrays(call) && call.order == 0 && call.point_dtype == call.dtype &&
         call.cells.rank() <= 1 && call.cells.size() <= INT32_MAX / (kCorners * call.width);
}

cudaError_t LaunchPlain(cudaStream_t stream, const Call& call, const Device&) {
  return jaxops::cuda::DispatchFloat(call.dtype,
                                     [&]<typename T>(T) { return LaunchOf<T>(stream, call); });
}

}  // namespace jaxops::trilinear::cuda
