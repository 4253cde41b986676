// Which kernels sample volumes at points and make the gradients, see common/grid_sample.h.
//
// Points at random places of a volume larger than the L2 would fetch entries from memory as often
// as they are met. They are then taken in an order, see cuda/grid_sample/order.cuh; what that takes
// is a small part of what it saves.
#include <algorithm>
#include <cstdint>

#include "cuda/common/launch.h"
#include "cuda/common/multilinear.cuh"
#include "cuda/grid_sample/families.h"
#include "cuda/grid_sample/launch.h"

#define JAXOPS_RETURN_IF_ERROR(expression) \
  if (const cudaError_t error = (expression); error != cudaSuccess) return error

namespace jaxops::grid_sample::cuda {
namespace {

using jaxops::cuda::CeilDiv;
using jaxops::cuda::kPackBytes;
using jaxops::cuda::SizeOf;

// Up to so many threads in all, each looks at its point itself; of more it pays to tell each other.
// Measured on an H200.
constexpr int64_t kMostFew = int64_t{1} << 18;

constexpr int64_t kManyThreads = int64_t{1} << 18;

bool IsFasterPlain(const Call& call, const RoughOrder& order, bool packs) {
  if (!IsPlain(call)) return false;
  const Geometry& geometry = call.geometry;
  const bool single = call.dtype == DType::kF32;
  // Kernels whose warps go through 32 points each find more in the L1, where points are many and in
  // an order, or where rows are loaded element by element. They also have less under way, which
  // suits gradients of one channel in a large volume.
  if (order.points != nullptr) {
    return packs && call.dtype != DType::kF64 && !(single && geometry.points > kManyThreads * 2);
  }
  if (call.dpoints != nullptr) return geometry.width > 1 || IsCached(call);
  const bool middle = geometry.width > 24 && geometry.width < 64;
  return !(single && !packs && geometry.axes == 3 && middle && geometry.points > kManyThreads / 2);
}

cudaError_t Launch(cudaStream_t stream, const Job& job) {
  const Call& call = job.call;
  const bool adds = job.sums != nullptr;
  if (!adds && IsFasterPlain(call, job.order, job.vectors)) return LaunchPlain(stream, job);
  const int64_t count = job.vectors ? kPackBytes / SizeOf(call.dtype) : 1;
  const int64_t row_threads = call.geometry.width / count;
  const int64_t threads = call.batch.size() * call.geometry.points * row_threads;
  if (call.out != nullptr && job.order.points == nullptr && threads <= kMostFew) {
    return LaunchThreads(stream, job);
  }
  if (call.dpoints != nullptr && multilinear::cuda::LanesFor(row_threads) == 1) {
    return LaunchThreads(stream, job);
  }
  return LaunchWarps(stream, job);
}

bool IsAligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kPackBytes == 0;
}

// Whether the gradients by the volume and by the points are faster by two kernels than by one. A
// plain one by the points is, where the one by the volume is added element by element, but for few
// elements and the shortest rows. Measured on an H200.
bool IsFasterApart(const Call& call, bool packs) {
  const int64_t width = call.geometry.width;
  const int64_t elements = call.batch.size() * call.geometry.points * width;
  return !packs && width > 2 && (width > 32 || elements > int64_t{1} << 18) && IsPlain(call);
}

cudaError_t LaunchAll(cudaStream_t stream, const Call& call) {
  const bool adds = call.dvolume != nullptr && !call.deterministic;
  const bool rounds = SizeOf(call.dtype) < static_cast<int64_t>(sizeof(float));
  const int64_t sums_bytes = adds && rounds ? SumsBytes(call) : 0;
  if (call.scratch_bytes < sums_bytes) return cudaErrorInvalidValue;
  const int64_t order_offset = CeilDiv(sums_bytes, kPackBytes) * kPackBytes;
  const bool any = call.batch.size() * call.geometry.points > 0;
  void* order_space = static_cast<unsigned char*>(call.scratch) + order_offset;
  const int64_t order_bytes = call.scratch_bytes - order_offset;
  const bool aligned = IsAligned(call.volume) && IsAligned(call.cotangent) && IsAligned(call.out) &&
                       IsAligned(call.dvolume) && IsAligned(call.scratch);
  Job job{call, aligned && call.geometry.width * SizeOf(call.dtype) % kPackBytes == 0};
  if (adds) job.sums = rounds ? call.scratch : call.dvolume;
  bool added = !adds;
  if (adds && any && HasBricks(call)) {
    BrickOrder order;
    JAXOPS_RETURN_IF_ERROR(OrderByBricks(stream, call, order_space, order_bytes, &order));
    if (order.points != nullptr) {
      JAXOPS_RETURN_IF_ERROR(LaunchBricks(stream, job, order));
      added = true;
    }
  }
  if (!added) JAXOPS_RETURN_IF_ERROR(ClearSums(stream, job));
  if (any && (call.out != nullptr || !added)) {
    JAXOPS_RETURN_IF_ERROR(OrderRoughly(stream, call, order_space, order_bytes, &job.order));
    // The gradient by points takes them as they come, so that cotangents are read in their order.
    Job first = job;
    if (call.dpoints != nullptr &&
        (job.order.points != nullptr || IsFasterApart(call, job.vectors))) {
      first.call.dpoints = nullptr;
      added = true;
    }
    JAXOPS_RETURN_IF_ERROR(Launch(stream, first));
  }
  if (any && call.dpoints != nullptr && added) {
    Job rest{call, job.vectors};
    rest.call.dvolume = nullptr;
    JAXOPS_RETURN_IF_ERROR(Launch(stream, rest));
  }
  return RoundSums(stream, job);
}

}  // namespace

cudaError_t LaunchSample(cudaStream_t stream, const Call& call) {
  const int64_t points = call.batch.size() * call.geometry.points;
  // A warp counts the channels of its 32 points in 32 bits.
  if (call.geometry.width >= int64_t{1} << 26) return cudaErrorInvalidValue;
  if (call.geometry.width == 0) {
    if (call.dpoints == nullptr || points == 0) return cudaSuccess;
    const int64_t bytes = points * call.geometry.axes * jaxops::cuda::SizeOf(call.point_dtype);
    return cudaMemsetAsync(call.dpoints, 0, bytes, stream);
  }
  Call rest = call;
  if (call.dvolume != nullptr && call.gradients * call.geometry.grid() == 0) {
    rest.dvolume = nullptr;
  }
  if (rest.dvolume != nullptr && rest.deterministic) {
    const cudaError_t error = LaunchSorted(stream, rest);
    if (error != cudaSuccess) return error;
  }
  return LaunchAll(stream, rest);
}

}  // namespace jaxops::grid_sample::cuda
