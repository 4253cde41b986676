// These kernels interpolate in cells of few features, and compute the gradients.
//
// The number of features is a template argument, and a lane has a cell: the lane takes the elements
// of all rows in order, each with its weight, and sums in registers. A warp copies the features of
// its cells to shared memory, and their gradients from there, in the order of memory, by vectors
// that may span rows.
#include <cuda_pipeline.h>

#include <cstdint>
#include <cuda/ptx>

#include "cuda/trilinear/cells.cuh"
#include "cuda/trilinear/families.h"
#include "cuda/trilinear/feature_image.cuh"

namespace jaxops::trilinear::cuda {
namespace {

constexpr int kThreads = 128;

constexpr int64_t kMaxWidth = 15;

constexpr bool CanRunNarrowValues(int64_t width, int64_t item_bytes) {
  if (width % 2 != 0) return width <= kMaxWidth;
  return item_bytes == 2 && (width == 2 || width == 4);
}
constexpr bool CanRunNarrowGradients(int64_t width, int64_t item_bytes) {
  return width <= kMaxWidth && width != 8 && (item_bytes == 2 || (width != 2 && width != 4));
}
// These are the point gradients to compile. The groups family is faster for the widest rows if the
// feature gradient is wanted too, and otherwise for rows whose cells are whole vectors.
constexpr bool CanRunPlainPointGrad(int64_t width, int64_t item_bytes, bool both) {
  if (both) return width < (item_bytes == 2 ? 14 : 9);
  return item_bytes != 4 || (width != 10 && width != 14);
}

// A plain call has no derivatives, points of the features' dtype, and contiguous features of all
// cells.
bool IsPlain(const Call& call) {
  return call.order == 0 && call.point_dtype == call.dtype &&
         (call.features == nullptr || AreDense(call));
}

// Image holds the features of a warp's cells, or their gradients. The pitch between two cells is an
// odd number of vectors, so that lanes with one cell each read different banks. If bulk copies gain
// more than bank conflicts of two lanes cost, the pitch is a cell's number of vectors.
template <typename T, int kWidth, bool kPlain>
struct Image {
  static constexpr int kVectors = kCorners * kWidth / kVectorElements<T>;
  static constexpr bool kBulk = kPlain && kVectors % 4 != 0;
  static constexpr int kPitch = kBulk ? kVectors : kVectors | 1;

  Vector<T, kVectorElements<T>> vectors[kWarp * kPitch];

  __device__ __forceinline__ auto& Of(int cell, int vector) {
    return vectors[cell * kPitch + vector];
  }
};

// kPlain says that there is no derivative, that points are of the features' dtype, and that the
// features of all cells are contiguous.
template <typename T, int kWidth, bool kPlain, bool kOut, bool kFeatures, bool kPoints>
__global__ void __launch_bounds__(kThreads) NarrowRows(const __grid_constant__ WarpParams params) {
  using A = Accumulator<T>;
  using Image = Image<T, kWidth, kPlain>;
  constexpr int kVector = kVectorElements<T>;
  constexpr int kVectors = Image::kVectors;
  constexpr bool kBulk = Image::kBulk && (kOut || kPoints);
  extern __shared__ __align__(kLineBytes) unsigned char shared[];
  [[maybe_unused]] __shared__ FeatureImage of_block;
  const Call& call = params.call;
  const WarpCells cells(call);
  if constexpr (kBulk) {
    const int64_t first = int64_t{blockIdx.x} * kThreads;
    const int count = static_cast<int>(min(int64_t{kThreads}, call.cells.size() - first));
    of_block.Fetch<true, T>(call, {first, count, kVectors * kVectorBytes}, shared);
  }
  if (!kBulk && cells.count <= 0) return;
  Image& image = reinterpret_cast<Image*>(shared)[threadIdx.x / kWarp];
  const int64_t own = cells.first + cells.own;
  if constexpr (!kBulk && (kOut || kPoints)) {
    const WarpFeatures<T> features(params, cells);
    const int last = cells.count * kVectors - 1;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int i = j * kWarp + cells.lane;
      const int cell = min(i, last) / kVectors;
      const T* from = features.Of(cell) + i % kVectors * kVector;
      if (i <= last) __pipeline_memcpy_async(&image.Of(cell, i % kVectors), from, kVectorBytes);
    }
    __pipeline_commit();
  }
  Coordinates<A> p;
  if constexpr (kPlain) {
    const T* point = static_cast<const T*>(call.points) + call.cells.Offset(own, Call::kPoints);
#pragma unroll
    for (int a = 0; a < kAxes; ++a) p[a] = Widen(point[a]);
  } else {
    LoadCoordinates<A>(call, own, p);
  }
  [[maybe_unused]] A g[kWidth];
  if constexpr (!kOut) {
    const T* cotangent =
        static_cast<const T*>(call.cotangent) + call.cells.Offset(own, Call::kCotangent);
#pragma unroll
    for (int f = 0; f < kWidth; ++f) g[f] = Widen(cotangent[f]);
  }
  [[maybe_unused]] A weights[kCorners];
  if constexpr (kOut || kFeatures) MakeWeights<kPlain>(call, own, p, weights);
  if constexpr (kBulk) {
    of_block.Await();
  } else if constexpr (kOut || kPoints) {
    __pipeline_wait_prior(0);
    __syncwarp();
  }
  [[maybe_unused]] A sums[kWidth] = {};
  [[maybe_unused]] A dots[kCorners] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    [[maybe_unused]] Vector<T, kVector> read;
    if constexpr (kOut || kPoints) read = image.Of(cells.lane, v);
    [[maybe_unused]] Vector<T, kVector> made;
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      const int c = (v * kVector + e) / kWidth;
      const int f = (v * kVector + e) % kWidth;
      if constexpr (kOut) sums[f] += weights[c] * Widen(read.values[e]);
      if constexpr (kPoints) dots[c] += Widen(read.values[e]) * g[f];
      if constexpr (kFeatures) made.values[e] = Narrow<T>(weights[c] * g[f]);
    }
    if constexpr (kFeatures) image.Of(cells.lane, v) = made;
  }
  __syncwarp();
  if constexpr (kOut) {
    // All lanes have read the features, so the values overwrite them.
    T* staged = reinterpret_cast<T*>(image.vectors);
#pragma unroll
    for (int f = 0; f < kWidth; ++f) staged[cells.lane * kWidth + f] = Narrow<T>(sums[f]);
    __syncwarp();
    T* to = static_cast<T*>(call.out) + cells.first * kWidth;
    const int count = cells.count * kWidth;
    for (int i = cells.lane * kVector; i < count; i += kWarp * kVector) {
      if (i + kVector <= count) {
        StoreVector(to + i, image.vectors[i / kVector]);
      } else {
        for (int e = i; e < count; ++e) to[e] = staged[e];
      }
    }
  }
  if constexpr (kFeatures) {
    T* to = static_cast<T*>(call.dfeatures) + cells.first * kCorners * kWidth;
    const int count = cells.count * kVectors;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int i = j * kWarp + cells.lane;
      if (i < count) StoreVector(to + i * kVector, image.Of(i / kVectors, i % kVectors));
    }
  }
  if constexpr (kPoints) {
    A gradient[kAxes];
    MakeGradient<kPlain>(call, own, p, dots, gradient);
    __syncwarp();
    StorePoints<kPlain, T>(call, cells, gradient, reinterpret_cast<A*>(image.vectors));
  }
}

// --- tiles ---------------------------------------------------------------------------------------

// The cotangent and the points of cells with at most this number of features of 2 bytes are a large
// part of the memory traffic of a point gradient. Bulk copies move them too, because a lane would
// load only 2 bytes at a time.
constexpr int kMaxTileWidth = 3;

struct TileParams {
  const void* features;
  const void* points;
  const void* cotangent;
  void* dpoints;
  int64_t cells;
};

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    PointGradTile(const __grid_constant__ TileParams params) {
  using A = Accumulator<T>;
  constexpr int kVector = kVectorElements<T>;
  constexpr int kWarpElements = kWarp * kAxes;
  __shared__ __align__(kLineBytes) T features[kThreads * kCorners * kWidth];
  __shared__ __align__(kLineBytes) T cotangent[kThreads * kWidth];
  __shared__ __align__(kLineBytes) T points[kThreads * kAxes];
  const int64_t first = int64_t{blockIdx.x} * kThreads;
  const int count = static_cast<int>(min(int64_t{kThreads}, params.cells - first));
  const T* from_features = static_cast<const T*>(params.features) + first * kCorners * kWidth;
  const T* from_cotangent = static_cast<const T*>(params.cotangent) + first * kWidth;
  const T* from_points = static_cast<const T*>(params.points) + first * kAxes;
  const int thread = static_cast<int>(threadIdx.x);
  bool whole = false;
#if __CUDA_ARCH__ >= 900
  __shared__ uint64_t arrived;
  whole = count == kThreads;
  if (whole) {
    if (thread == 0) {
      ptx::mbarrier_init(&arrived, 1);
      ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    }
    // FeatureImage::Fetch says why.
    __syncwarp();
    if (thread == 0) {
      ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &arrived,
                                     sizeof(features) + sizeof(cotangent) + sizeof(points));
      ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, features, from_features,
                         sizeof(features), &arrived);
      ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, cotangent, from_cotangent,
                         sizeof(cotangent), &arrived);
      ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, points, from_points, sizeof(points),
                         &arrived);
    }
    __syncthreads();
    while (!ptx::mbarrier_try_wait_parity(&arrived, 0)) {
    }
  }
#endif
  if (!whole) {
    const auto copy = [&](T* to, const T* from, int each) {
      for (int i = thread; i < count * each; i += kThreads) to[i] = from[i];
    };
    copy(features, from_features, kCorners * kWidth);
    copy(cotangent, from_cotangent, kWidth);
    copy(points, from_points, kAxes);
    __syncthreads();
  }
  T* own = points + thread * kAxes;
  if (thread < count) {
    Coordinates<A> p;
#pragma unroll
    for (int a = 0; a < kAxes; ++a) p[a] = Widen(own[a]);
    A g[kWidth];
#pragma unroll
    for (int f = 0; f < kWidth; ++f) g[f] = Widen(cotangent[thread * kWidth + f]);
    A dots[kCorners] = {};
#pragma unroll
    for (int i = 0; i < kCorners * kWidth; i += kVector) {
      const auto vec = LoadVector<kVector>(features + thread * kCorners * kWidth + i);
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        dots[(i + e) / kWidth] += Widen(vec.values[e]) * g[(i + e) % kWidth];
      }
    }
    Axis<A> axes[kAxes];
    MakeAxes(p, axes);
    A gradient[kAxes];
    multilinear::PlainPointGradient<kAxes>(axes, dots, gradient);
#pragma unroll
    for (int a = 0; a < kAxes; ++a) own[a] = Narrow<T>(gradient[a]);
  }
  __syncwarp();
  T* to = static_cast<T*>(params.dpoints) + first * kAxes;
  const int begin = thread / kWarp * kWarpElements;
  const int end = min(begin + kWarpElements, count * kAxes);
  const int lane = thread % kWarp;
  for (int i = begin + lane * kVector; i < end; i += kWarp * kVector) {
    if (i + kVector <= end) {
      StoreVector(to + i, LoadVector<kVector>(points + i));
    } else {
      for (int e = i; e < end; ++e) to[e] = points[e];
    }
  }
}

// CanRunPointGradTile says whether a plain call can use tiles: it wants only the point gradient,
// and its operands are dense.
template <int kWidth>
bool CanRunPointGradTile(const Call& call, const Device& device) {
  if (call.dpoints == nullptr || call.dfeatures != nullptr || call.cells.rank() > 1) return false;
  const auto is_dense = [&](Call::Operand operand, int64_t width) {
    return call.cells.rank() == 0 || call.cells.stride(0, operand) == width;
  };
  const auto is_aligned = [](const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0;
  };
  return is_dense(Call::kFeatures, kCorners * kWidth) && is_dense(Call::kCotangent, kWidth) &&
         is_dense(Call::kPoints, kAxes) && is_aligned(call.points) && is_aligned(call.dpoints) &&
         device.has_clusters();  // and therefore bulk copies
}

// --- choice of the kernel ------------------------------------------------------------------------

template <typename T, int kWidth, bool kPlain>
cudaError_t LaunchKernel(void (*kernel)(WarpParams), cudaStream_t stream, const Call& call) {
  const int64_t bytes = kThreads / kWarp * static_cast<int64_t>(sizeof(Image<T, kWidth, kPlain>));
  return Launch(kernel, CeilDiv(call.cells.size(), kThreads), kThreads, bytes, stream,
                ParamsOfWarps(call));
}

template <typename T, int kWidth, bool kPlain>
cudaError_t LaunchGradients(cudaStream_t stream, const Call& call, const Device& device) {
  if constexpr (kPlain && sizeof(T) == 2 && kWidth <= kMaxTileWidth) {
    if (CanRunPointGradTile<kWidth>(call, device)) {
      return Launch(
          PointGradTile<T, kWidth>, CeilDiv(call.cells.size(), kThreads), kThreads, 0, stream,
          TileParams{call.features, call.points, call.cotangent, call.dpoints, call.cells.size()});
    }
  }
  void (*kernel)(WarpParams) = nullptr;
  if (call.dpoints == nullptr) {
    kernel = NarrowRows<T, kWidth, kPlain, false, true, false>;
  } else if (call.dfeatures == nullptr) {
    if constexpr (!kPlain || CanRunPlainPointGrad(kWidth, sizeof(T), false)) {
      kernel = NarrowRows<T, kWidth, kPlain, false, false, true>;
    }
  } else if constexpr (!kPlain || CanRunPlainPointGrad(kWidth, sizeof(T), true)) {
    kernel = NarrowRows<T, kWidth, kPlain, false, true, true>;
  }
  if (kernel == nullptr) return cudaErrorInvalidValue;
  return LaunchKernel<T, kWidth, kPlain>(kernel, stream, call);
}

template <typename T, int kWidth, bool kPlain>
cudaError_t LaunchValues(cudaStream_t stream, const Call& call) {
  return LaunchKernel<T, kWidth, kPlain>(NarrowRows<T, kWidth, kPlain, true, false, false>, stream,
                                         call);
}

template <typename T, int kWidth = 2>
cudaError_t LaunchOf(cudaStream_t stream, const Call& call, const Device& device) {
  if constexpr (kWidth <= kMaxWidth) {
    if (call.width != kWidth) return LaunchOf<T, kWidth + 1>(stream, call, device);
    if (call.out != nullptr) {
      if constexpr (CanRunNarrowValues(kWidth, sizeof(T))) {
        return IsPlain(call) ? LaunchValues<T, kWidth, true>(stream, call)
                             : LaunchValues<T, kWidth, false>(stream, call);
      }
    } else if constexpr (CanRunNarrowGradients(kWidth, sizeof(T))) {
      return IsPlain(call) ? LaunchGradients<T, kWidth, true>(stream, call, device)
                           : LaunchGradients<T, kWidth, false>(stream, call, device);
    }
  }
  return cudaErrorInvalidValue;
}

}  // namespace

bool CanRunNarrow(const Call& call, const Device&) {
  const int64_t item_bytes = SizeOf(call.dtype);
  if (!HasAlignedArrays(call) || item_bytes > 4 || call.width < 2) return false;
  if (call.out != nullptr) return CanRunNarrowValues(call.width, item_bytes);
  const bool both = call.dfeatures != nullptr;
  const bool is_built = call.dpoints == nullptr || !IsPlain(call) ||
                        CanRunPlainPointGrad(call.width, item_bytes, both);
  return CanRunNarrowGradients(call.width, item_bytes) && is_built;
}

cudaError_t LaunchNarrow(cudaStream_t stream, const Call& call, const Device& device) {
  return jaxops::cuda::DispatchFloat(call.dtype, [&]<typename T>(T) {
    if constexpr (sizeof(T) == sizeof(double)) {
      return cudaErrorInvalidValue;
    } else {
      return LaunchOf<T>(stream, call, device);
    }
  });
}

}  // namespace jaxops::trilinear::cuda
