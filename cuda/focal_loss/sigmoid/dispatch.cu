// The sigmoid focal loss: one pass over the logits for a sum, the gradient, or both.
//
// Few rows have a target. Where neighbours share rows, they are all evaluated as if they were none,
// for which fewer instructions do, and targets apart, by warps that have any (Hard). A call of few
// elements is over before that would pay (FewElements). Elementwise results without weights need
// not even be looked up in rows: a block puts targets in their places when it is done with the rest
// (TargetsLast). Those of f32 of the usual kinds are bound by memory instead (SpreadElements).
//
// Long sums without weights are bound by instructions rather than memory. Where blocks can have
// their shared memory filled for them, they wait for no logits and look up no rows (StreamedSum).
#include "cuda/focal_loss/sigmoid/elements.cuh"

namespace jaxops::focal_loss::cuda {
namespace {

// Blocks of a sum at the most: they fill the largest devices twice.
constexpr int64_t kSumBlocks = 2112;

}  // namespace

cudaError_t LaunchSigmoid(cudaStream_t stream, const Sigmoid& call, int64_t splits,
                          void* partials) {
  const int64_t entries = call.batch.size();
  const int64_t size = call.rows * call.classes;
  if (entries == 0) return cudaSuccess;
  if (size == 0) {
    const size_t bytes = entries * (call.dtype == DType::kF64 ? sizeof(double) : sizeof(float));
    return call.sum == nullptr ? cudaSuccess : cudaMemsetAsync(call.sum, 0, bytes, stream);
  }
  const bool hard = !call.soft;
  if (hard && call.dtype != DType::kF64) {
    if (AreFew(call)) return LaunchFew(stream, call);
    if (AreTargetsLast(call)) return LaunchTargetsLast(stream, call);
    if (call.dtype == DType::kF32 && AreSpread(call)) return LaunchSpread(stream, call);
  }
  return DispatchFloat(call.dtype, [&](auto logit) {
    using T = decltype(logit);
    const int count = hard ? kInRow<T> : kPackElements<T>;
    const int short_count = hard ? kShortRows : kPackElements<T>;
    const bool many = call.classes >= count;
    const bool one_row = hard && call.classes % count == 0;
    const bool each = hard && call.classes == 1;
    const bool aligned = entries == 1 || size % count == 0;
    const int64_t stride = kThreads * (!aligned ? 1 : many || each ? count : short_count);
    const bool streamed = Streams(call, aligned);
    // Enough work a thread to make up for what a block costs, once there are blocks for the whole
    // device.
    const auto fill = [&](int64_t elements, int64_t most) {
      return CeilDiv(size, stride * std::clamp<int64_t>(elements / (stride * 1024), 1, most));
    };
    if (call.sum == nullptr) {
      // Memory is kept busier to the end by short blocks, which cost instructions.
      const bool by_memory = sizeof(T) == sizeof(float) && many && call.power != Power::kAny;
      const bool by_instructions = sizeof(T) < sizeof(float) && entries * size >= kManyElements;
      splits = fill(entries * size, by_memory ? 2 : by_instructions ? 8 : 4);
    } else if (streamed) {
      // As many as the 132 multiprocessors of an H100 or H200 run at a time.
      splits = std::min<int64_t>(splits, 132 * kStreamingBlocks<T>);
    } else if (sizeof(T) == sizeof(double) ||
               (call.gradient != nullptr && one_row && sizeof(T) == sizeof(float))) {
      // Bound by memory, or by instructions of which a block has many: short ones end more evenly.
      // The order of additions must not depend on how many entries there are.
      splits = std::min(splits, fill(size, 4));
    } else {
      splits = std::min(splits, kSumBlocks);
    }
    // Of a tile, blocks share accesses alone.
    const int64_t unit = streamed ? count : stride;
    const int64_t per_block = CeilDiv(CeilDiv(size, splits), unit) * unit;
    const int64_t blocks = entries * splits;
    if (per_block + call.classes > INT32_MAX) return cudaErrorInvalidValue;
    const bool clustered = splits == 1 || (splits <= kClusterBlocks && jaxops::cuda::HasClusters());
    const Params params{call,
                        size,
                        per_block,
                        FastDivider(splits),
                        FastDivider(call.classes),
                        FastDivider64(call.classes),
                        clustered ? nullptr : partials};
    const cudaError_t error = streamed ? LaunchStreamed(stream, params, blocks)
                              : hard   ? LaunchHard(stream, params, blocks, aligned)
                                       : LaunchSoft(stream, params, blocks, aligned);
    if (error != cudaSuccess || call.sum == nullptr || clustered) return error;
    return CombineSums<Accumulator<T>>(stream, call, splits, partials);
  });
}

}  // namespace jaxops::focal_loss::cuda
