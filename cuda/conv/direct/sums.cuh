// Code that the direct kernels of the forward product and of the input gradient share.
#ifndef JAXOPS_CUDA_CONV_DIRECT_SUMS_CUH_
#define JAXOPS_CUDA_CONV_DIRECT_SUMS_CUH_

#include <algorithm>
#include <cstdint>
#include <optional>

#include "cuda/conv/direct/direct.cuh"
#include "cuda/conv/results.cuh"

namespace jaxops::conv::cuda {

// The channels of image and kernel that a channel of the result sums over. The strides are the
// kernel's.
struct Channels {
  FastDivider64 result_fan;  // of a group
  int64_t image_fan;
  int64_t tap, group, member, channel;

  Channels() = default;
  Channels(const Call& call, bool is_grad) {
    const int64_t fan_in = call.channels / call.groups, fan_out = call.outputs / call.groups;
    result_fan = FastDivider64(is_grad ? fan_in : fan_out);
    image_fan = is_grad ? fan_out : fan_in;
    tap = fan_in * call.outputs;
    group = fan_out;
    member = is_grad ? call.outputs : 1;
    channel = is_grad ? 1 : call.outputs;
  }

  // Finds the first channel of the image and the first entry of the kernel for a channel of the
  // result.
  __device__ __forceinline__ void Find(uint64_t of_result, int64_t& of_image,
                                       int64_t& of_kernel) const {
    const int64_t in_group = result_fan.DivMod(of_result);
    of_image = of_result * image_fan;
    of_kernel = of_result * group + in_group * member;
  }
};

// Parameters of the kernels of sums: of the forward product and the input gradient.
struct SumParams {
  const void* image;
  const void* kernel;
  void* result;
  int image_rows, image_columns, result_rows, result_columns;
  int64_t image_pixel, result_pixel;  // entries between pixels, which are channels
  int64_t images;
  Channels channels;
  Slabs slabs;
  FastDivider64 strips;
  bool result_is_f32;
  Epilogue epilogue;
};

// Tells whether channels are groups of their own, so that neighbouring channels can form a vector.
inline bool CanPairChannels(const SumParams& p, const Call& call) {
  return p.channels.image_fan == 1 && p.channels.result_fan.divisor() == 1 &&
         call.channels % 2 == 0;
}

constexpr int kThreads = 128;

// The cost of a thread before its loop, in rows.
constexpr int64_t kRowsBefore = 3;
// CutRows tries up to this many more and fewer parts.
constexpr int64_t kTrials = 8;

// Cuts `groups` of rows into parts that take the least time, if `threads` threads loop over each
// part, with a step for every group and `ramp` more steps. Threads wait for memory most of the
// time: all blocks that are resident at once take as long as one block.
inline int CutRows(int64_t groups, int64_t threads, int64_t ramp, int64_t resident) {
  const int64_t at_a_time = resident * kProcessors;
  const int64_t middle = at_a_time * kThreads / threads;
  const int64_t first = std::clamp<int64_t>(middle - kTrials, 1, groups);
  int64_t best = groups, least = INT64_MAX;
  for (int64_t parts = first; parts <= std::min(groups, first + 2 * kTrials); ++parts) {
    const int64_t part = CeilDiv(groups, parts);
    const int64_t blocks = CeilDiv(threads * CeilDiv(groups, part), kThreads);
    const int64_t cost = CeilDiv(blocks, at_a_time) * (part + ramp + kRowsBefore);
    if (cost < least) {
      least = cost;
      best = part;
    }
  }
  return static_cast<int>(best);
}

// Launches a kernel that loops over rows, if there is one for such windows and groups.
std::optional<cudaError_t> LaunchRowLoops(cudaStream_t stream, const SumParams& p, const Call& call,
                                          bool is_grad);

// Launches a kernel on tensor cores, if there is one for such windows and groups.
std::optional<cudaError_t> LaunchGroups(cudaStream_t stream, const SumParams& p, const Call& call,
                                        bool is_grad);

}  // namespace jaxops::conv::cuda

#endif  // JAXOPS_CUDA_CONV_DIRECT_SUMS_CUH_
