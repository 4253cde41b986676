// This file chooses the kernel family of a sample or of its gradients, see common/grid_sample.h.
//
// Points at random places of a volume larger than the L2 cache would fetch an entry from memory
// each time that a point touches the entry. Such points are ordered first, see
// cuda/grid_sample/order.cuh; ordering takes a small part of the time that it saves. A call with
// work space for an order orders its points.
//
// The measured gains are in docs/grid_sample.md; all were measured on an H200.
#include "cuda/common/dispatch.h"

#include <algorithm>
#include <cstdint>

#include "cuda/common/sizes.h"
#include "cuda/grid_sample/families.h"
#include "cuda/grid_sample/launch.h"

namespace jaxops::grid_sample::cuda {
namespace {

using jaxops::cuda::Always;
using jaxops::cuda::CeilDiv;
using jaxops::cuda::Family;
using jaxops::cuda::kVectorBytes;
using jaxops::cuda::kWarp;
using jaxops::cuda::SizeOf;
using jaxops::cuda::Table;

// This number of threads, or of channels of all points, keeps an H200 busy.
constexpr int64_t kManyThreads = int64_t{1} << 18;

// Warps that go through 32 points each hit the L1 cache more often if points are many and ordered,
// or if rows are loaded element by element. With a border every point reads all entries around it:
// 4194304 points, one channel, 256 x 256 x 256 in bf16 take 173 us, and 151 by warps.
bool PrefersPlainValue(const Job& job, const Device&) {
  const Geometry& geometry = job.call.geometry;
  const int64_t points = job.call.batch.size() * geometry.points;
  if (geometry.padding == Padding::kBorder && geometry.width == 1 && points > kManyThreads) {
    return false;
  }
  const bool is_f32 = job.call.dtype == DType::kF32;
  if (job.order_space != nullptr) {
    return job.vectors && job.call.dtype != DType::kF64 &&
           !(is_f32 && geometry.points > kManyThreads * 2);
  }
  return job.vectors || !is_f32 || geometry.axes != 3 || geometry.width <= 24 ||
         geometry.width >= 64 || geometry.points <= kManyThreads / 2;
}

// Up to this number of threads in all, it is faster if each thread finds the entries of its point
// itself.
bool PrefersThreadsValue(const Job& job, const Device&) {
  return job.order_space == nullptr &&
         job.call.batch.size() * job.call.geometry.points * RowThreads(job) <= kManyThreads;
}

constexpr Family<Job> kForwardFamilies[] = {
    // The kernels of the other families know every option and have 12 to 30 KB of instructions, for
    // which small calls wait: 4096 points, 16 channels, 64 x 64 in bf16 1.86 -> 1.41 us.
    {"plain", CanRunPlain, PrefersPlainValue, LaunchPlain},
    // No lane waits for another.
    {"threads", CanRunThreads, PrefersThreadsValue, LaunchThreads},
    // The entries around a point are found only once.
    {"warps", CanRunWarps, Always<Job>, LaunchWarps},
};
const Table<Job> kForward("grid_sample", "forward", kForwardFamilies);

// The warps family has fewer loads in flight, which is better for rows of one channel in a large
// volume.
bool PrefersPlainPointGrad(const Job& job, const Device&) {
  return job.call.geometry.width > 1 || IsCached(job.call);
}

// A lane has all channels of a point.
bool PrefersThreadsGrad(const Job& job, const Device&) { return RowThreads(job) == 1; }

constexpr Family<Job> kPointGradFamilies[] = {
    // 262147 points, 33 channels, 127 x 129 in f32 take 37 instead of 89 us; the reason is that of
    // values.
    {"plain", CanRunPlain, PrefersPlainPointGrad, LaunchPlain},
    {"threads", CanRunThreads, PrefersThreadsGrad, LaunchThreads},
    {"warps", CanRunWarps, Always<Job>, LaunchWarps},
};
const Table<Job> kPointGrad("grid_sample", "point_grad", kPointGradFamilies);

// The lanes of a corner have channels for at least half of them.
bool PrefersBricks(const Job& job, const Device&) {
  return 2 * job.call.geometry.width >= kWarp >> job.call.geometry.axes;
}

constexpr Family<Job> kVolumeGradFamilies[] = {
    // The sums have the order of the points: (128,128,128,16) with 2^20 random points 1353 -> 253
    // us.
    {"sorted", CanRunSorted, Always<Job>, LaunchSorted},
    // Reductions in memory bound large volumes of many points.
    {"bricks", CanRunBricks, PrefersBricks, LaunchBricks},
    {"warps", CanRunWarps, Always<Job>, LaunchWarps},
};
const Table<Job> kVolumeGrad("grid_sample", "volume_grad", kVolumeGradFamilies);

// PrefersOneKernel says whether one kernel computes both gradients faster than two. If points are
// ordered, two kernels are faster: the volume gradient uses the order, and the point gradient does
// not, so that it reads cotangents in memory order. If the volume gradient is added element by
// element, a plain point gradient of its own is faster, except for few elements and the shortest
// rows.
bool PrefersOneKernel(const Job& job, const Device& device) {
  if (job.order_space != nullptr) return false;
  const Geometry& geometry = job.call.geometry;
  const int64_t elements = job.call.batch.size() * geometry.points * geometry.width;
  return job.vectors || geometry.width <= 2 || (geometry.width <= 32 && elements <= kManyThreads) ||
         !CanRunPlain(job, device);
}

bool PrefersThreadsBoth(const Job& job, const Device& device) {
  return PrefersThreadsGrad(job, device) && PrefersOneKernel(job, device);
}

// One kernel reads the points and their entries once. Calls that match no family take two kernels.
constexpr Family<Job> kBackwardFamilies[] = {
    {"threads", CanRunThreads, PrefersThreadsBoth, LaunchThreads},
    {"warps", CanRunWarps, PrefersOneKernel, LaunchWarps},
};
const Table<Job> kBackward("grid_sample", "backward", kBackwardFamilies);

cudaError_t LaunchGradients(cudaStream_t stream, const Job& job) {
  if (job.call.dpoints == nullptr) return kVolumeGrad.Run(stream, job);
  if (job.call.dvolume == nullptr) return kPointGrad.Run(stream, job);
  const Device* device;
  JAXOPS_RETURN_IF_ERROR(DescribeCurrentDevice(&device));
  if (const Family<Job>* const family = kBackward.Choose(job, *device)) {
    return family->launch(stream, job, *device);
  }
  Job part = job;
  part.call.dpoints = nullptr;
  JAXOPS_RETURN_IF_ERROR(kVolumeGrad.Run(stream, part));
  part.call.dpoints = job.call.dpoints;
  part.call.dvolume = part.sums = part.order_space = nullptr;
  return kPointGrad.Run(stream, part);
}

bool IsAligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0;
}

// FindWorkSpace finds the parts of the work space: the sums of a volume gradient of 2-byte entries,
// and the space for an order of the points. Calls that do not order their points have nothing after
// the sums.
cudaError_t FindWorkSpace(Job* job) {
  const Call& call = job->call;
  const bool adds = call.dvolume != nullptr && !call.deterministic;
  if (!adds && call.out == nullptr) return cudaSuccess;
  int64_t used = 0;
  if (adds && SizeOf(call.dtype) == 2) {
    job->sums = call.scratch;
    used = SumsBytes(call);
    if (call.scratch_bytes < used) return cudaErrorInvalidValue;
    used = CeilDiv(used, kVectorBytes) * kVectorBytes;
  } else if (adds) {
    job->sums = call.dvolume;
  }
  const int64_t rest = call.scratch_bytes - used;
  if (rest <= 0) return cudaSuccess;
  const int64_t order_bytes = std::max(RoughOrderBytes(call), adds ? BrickOrderBytes(call) : 0);
  if (rest < order_bytes) return cudaErrorInvalidValue;
  if (order_bytes > 0) job->order_space = static_cast<unsigned char*>(call.scratch) + used;
  return cudaSuccess;
}

}  // namespace

cudaError_t LaunchSample(cudaStream_t stream, const Call& call) {
  const Geometry& geometry = call.geometry;
  const int64_t points = call.batch.size() * geometry.points;
  // A warp counts the channels of its 32 points in 32 bits.
  if (geometry.width >= int64_t{1} << 26) return cudaErrorInvalidValue;
  if (geometry.width == 0) {
    if (call.dpoints == nullptr || points == 0) return cudaSuccess;
    return cudaMemsetAsync(call.dpoints, 0, points * geometry.axes * SizeOf(call.point_dtype),
                           stream);
  }
  Job job{call};
  if (call.gradients * geometry.grid() == 0) job.call.dvolume = nullptr;
  if (points == 0) job.call.out = job.call.dpoints = nullptr;
  const bool aligned = IsAligned(call.volume) && IsAligned(call.cotangent) && IsAligned(call.out) &&
                       IsAligned(job.call.dvolume) && IsAligned(call.scratch);
  job.vectors = aligned && geometry.width * SizeOf(call.dtype) % kVectorBytes == 0;
  JAXOPS_RETURN_IF_ERROR(FindWorkSpace(&job));
  if (job.call.out != nullptr) return kForward.Run(stream, job);
  if (job.call.dvolume == nullptr && job.call.dpoints == nullptr) return cudaSuccess;
  const bool is_zero = points == 0 && job.sums != nullptr;
  JAXOPS_RETURN_IF_ERROR(is_zero ? ClearSums(stream, job) : LaunchGradients(stream, job));
  return job.sums == nullptr ? cudaSuccess : RoundSums(stream, job);
}

}  // namespace jaxops::grid_sample::cuda
