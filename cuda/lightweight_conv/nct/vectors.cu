// These kernels compute the gradients of lightweight convolution in the NCT layout for few taps
// that are whole vectors apart: a thread owns a vector of steps, and each tap pairs it with a
// vector of g.
#include "cuda/common/async_copy.cuh"
#include "cuda/lightweight_conv/families.h"
#include "cuda/lightweight_conv/filters.cuh"
#include "cuda/lightweight_conv/nct/taps.cuh"

namespace jaxops::lightweight_conv::cuda::nct {
namespace {

using jaxops::cuda::CommitCopies;
using jaxops::cuda::CopyAsyncPast;
using jaxops::cuda::kSharedOptInLimit;
using jaxops::cuda::kVectorBytes;
using jaxops::cuda::SharedAddress;
using jaxops::cuda::WaitCopies;

// The kernel below has this number of taps.
constexpr int kMaxTaps = 4;

struct BackwardParams {
  Backward call;
  int time, channels, taps, mirrored, dilation;
  int beyond;      // vectors that a warp's taps reach beyond those of its lanes
  uint32_t items;  // tiles of every summed batch entry
  FastDivider tiles, splits, channel_blocks, depth;
  int row_bits;    // log2 of the threads that share a row: whole warps
  bool whole;      // a block computes a filter's whole sum, without partial sums
  void* partials;  // (kept, splits, taps + 1, channels)

  __device__ int row_threads() const { return 1 << row_bits; }
  __device__ int rows() const { return kNctThreads >> row_bits; }
};

constexpr int kStages = 4;

// VectorsNctBackward is for few taps that are whole vectors apart: a lane owns a vector of steps,
// and each tap pairs it with another vector. Each warp has a ring of its own with the steps of its
// lanes and those that their taps read.
template <typename T>
__global__ void __launch_bounds__(kNctThreads, 8)
    VectorsNctBackward(const __grid_constant__ BackwardParams p) {
  using Acc = Accumulator<T>;
  constexpr int kVector = kVectorElements<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  uint32_t block = blockIdx.x;
  const int first_channel = p.channel_blocks.DivMod(block) * p.rows();
  const uint32_t split = p.splits.DivMod(block);
  const int64_t kept = block;
  const int lane = threadIdx.x & (p.row_threads() - 1);
  const int channel = first_channel + (threadIdx.x >> p.row_bits);
  // Threads beyond the last channel stay, because the block synchronises.
  const int time = channel < p.channels ? p.time : 0;
  const int64_t row = time == 0 ? 0 : int64_t{channel} * p.time;
  const T* x = static_cast<const T*>(p.call.x) + p.call.kept.Offset(kept, Backward::kX) + row;
  const T* g = static_cast<const T*>(p.call.g) + p.call.kept.Offset(kept, Backward::kG) + row;
  T* dx = static_cast<T*>(p.call.dx) + p.call.kept.Offset(kept, Backward::kDx) + row;
  const bool wants_dx = p.call.dx != nullptr;
  const bool wants_dbias = p.call.dbias != nullptr;

  // A stage holds the vectors of x of a warp's lanes, and the vectors of g that their taps read.
  const int stage_vectors = 2 * kWarp + p.beyond;
  auto* ring =
      reinterpret_cast<Vector<T, kVector>*>(shared) + threadIdx.x / kWarp * kStages * stage_vectors;
  const int warp_lane = threadIdx.x % kWarp;
  const auto copy = [&](Vector<T, kVector>* to, const T* from, int t) {
    const bool inside = static_cast<unsigned>(t) < static_cast<unsigned>(time);
    CopyAsyncPast(SharedAddress(to), reinterpret_cast<const char*>(inside ? from + t : from),
                  inside);
  };
  uint32_t ahead = split;
  const auto fetch = [&](int stage) {
    if (ahead < p.items) {
      uint32_t summed = ahead;
      const int t = (p.tiles.DivMod(summed) * p.row_threads() + lane) * kVector;
      Vector<T, kVector>* to = ring + stage * stage_vectors + warp_lane;
      copy(to, x + p.call.summed.Offset(summed, Backward::kX), t);
      const T* g_row = g + p.call.summed.Offset(summed, Backward::kG);
      int step = t - p.mirrored;
      for (int at = warp_lane; at < kWarp + p.beyond; at += kWarp) {
        to += kWarp;
        copy(to, g_row, step);
        step += kWarp * kVector;
      }
    }
    CommitCopies();
    ahead += p.splits.divisor();
  };
  for (int stage = 0; stage < kStages - 1; ++stage) fetch(stage);

  Acc weight[kMaxTaps] = {};
  if (wants_dx && time > 0) {
    ReadTaps(
        weight, p.call.weight, p.call.weight_dtype,
        p.call.kept.Offset(kept, Backward::kWeight) + int64_t{p.depth.Quotient(channel)} * p.taps,
        0, p.taps, true);
  }
  Acc dweight[kMaxTaps][1] = {};
  Acc dbias[1][1] = {};
  int stage = 0;
#pragma unroll 1
  for (uint32_t index = split; index < p.items; index += p.splits.divisor()) {
    WaitCopies<kStages - 2>();
    __syncwarp();
    fetch((stage + kStages - 1) % kStages);
    const Vector<T, kVector>* own_vector = ring + stage * stage_vectors + warp_lane;
    stage = (stage + 1) % kStages;
    uint32_t summed = index;
    const int t = (p.tiles.DivMod(summed) * p.row_threads() + lane) * kVector;
    if (t >= time) continue;
    Acc own[kVector], sums[kVector] = {};
#pragma unroll
    for (int i = 0; i < kVector; ++i) own[i] = Widen(own_vector->values[i]);
    const Vector<T, kVector>* met = own_vector + kWarp;
    int step = t - p.mirrored;
#pragma unroll
    for (int j = 0; j < kMaxTaps; ++j) {
      if (j < p.taps) {
        const Vector<T, kVector> vec = *met;
        // A NaN in x must not reach taps with which it forms no pair.
        if (static_cast<unsigned>(step) < static_cast<unsigned>(time)) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) dweight[j][0] += own[i] * Widen(vec.values[i]);
        }
        if (wants_dx) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) sums[i] += weight[j] * Widen(vec.values[i]);
        }
        met += p.dilation / kVector;
        step += p.dilation;
      }
    }
    if (wants_dx) {
      WriteSteps<T, kVector, true>(dx + p.call.summed.Offset(summed, Backward::kDx), sums, t, time);
    }
    if (wants_dbias) {
      const Vector<T, kVector> vec = own_vector[kWarp + p.mirrored / kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) dbias[0][0] += Widen(vec.values[i]);
    }
  }
  Acc* partials = static_cast<Acc*>(p.partials) +
                  (kept * p.splits.divisor() + split) * (p.taps + 1) * p.channels;
  const auto write = [&](int tap, int row, Acc sum) {
    WriteRowSum(p, partials, kept, tap, first_channel + row, sum);
  };
  ReduceRows(dweight, p.row_bits, [&](int j, int row, Acc sum) {
    if (j < p.taps) write(p.taps - 1 - j, row, sum);
  });
  if (wants_dbias) {
    ReduceRows(dbias, p.row_bits, [&](int, int row, Acc sum) { write(p.taps, row, sum); });
  }
}

struct Plan {
  int row_bits = 5;
  int64_t beyond;  // vectors that a warp's taps reach beyond those of its lanes
  int64_t tiles, channel_blocks;
  int64_t splits;  // blocks that share the sum of one set of channels
  int64_t items;   // tiles of every summed batch entry
  bool whole;      // a block computes a filter's whole sum, without partial sums
  int64_t shared_bytes;
  int64_t blocks;  // blocks of the grid

  bool CanLaunch() const {
    return shared_bytes <= kSharedOptInLimit && items <= INT32_MAX && blocks <= kMaxBlocks;
  }
};

template <typename T>
Plan MakePlan(const Gradients& gradients) {
  const Backward& call = gradients.call;
  const Geometry& g = call.geometry;
  constexpr int kVector = kVectorElements<T>;
  Plan plan;
  while ((kNctThreads >> plan.row_bits) > 1 && (kVector << plan.row_bits) < g.time) ++plan.row_bits;
  plan.beyond = (g.taps - 1) * g.dilation / kVector;
  plan.tiles = CeilDiv(g.time, kVector << plan.row_bits);
  plan.channel_blocks = CeilDiv(g.channels, kNctThreads >> plan.row_bits);
  plan.items = call.summed.size() * plan.tiles;
  const int64_t blocks = call.kept.size() * plan.channel_blocks;
  plan.splits = blocks >= kBusyBlocks ? 1 : std::min(gradients.splits, plan.items);
  plan.whole = plan.splits == 1 && g.channels == g.heads;
  plan.shared_bytes = kNctThreads / kWarp * kStages * (2 * kWarp + plan.beyond) * kVectorBytes;
  plan.blocks = blocks * plan.splits;
  return plan;
}

}  // namespace

bool CanRunVectors(const Gradients& gradients, const Device&) {
  const Backward& call = gradients.call;
  const Geometry& g = call.geometry;
  return g.data_format == DataFormat::kNCT && g.taps <= kMaxTaps &&
         RowsAligned(g.time, call.dtype, 16) && RowsAligned(g.dilation, call.dtype, 16) &&
         RowsAligned(g.padding, call.dtype, 16) && DispatchFloat(call.dtype, [&](auto element) {
           return MakePlan<decltype(element)>(gradients).CanLaunch();
         });
}

cudaError_t LaunchVectors(cudaStream_t stream, const Gradients& gradients, const Device&) {
  const Backward& call = gradients.call;
  const Geometry& g = call.geometry;
  return DispatchFloat(call.dtype, [&](auto element) {
    using T = decltype(element);
    const Plan plan = MakePlan<T>(gradients);
    const BackwardParams p{.call = call,
                           .time = static_cast<int>(g.time),
                           .channels = static_cast<int>(g.channels),
                           .taps = static_cast<int>(g.taps),
                           .mirrored = static_cast<int>(Mirrored(g)),
                           .dilation = static_cast<int>(g.dilation),
                           .beyond = static_cast<int>(plan.beyond),
                           .items = static_cast<uint32_t>(plan.items),
                           .tiles = FastDivider(plan.tiles),
                           .splits = FastDivider(plan.splits),
                           .channel_blocks = FastDivider(plan.channel_blocks),
                           .depth = FastDivider(g.channels / g.heads),
                           .row_bits = plan.row_bits,
                           .whole = plan.whole,
                           .partials = gradients.partials};
    const cudaError_t error =
        Launch(VectorsNctBackward<T>, plan.blocks, kNctThreads, plan.shared_bytes, stream, p);
    if (error != cudaSuccess || plan.whole) return error;
    return AddPartialSums(stream, call, {gradients.partials, plan.splits});
  });
}

}  // namespace jaxops::lightweight_conv::cuda::nct
