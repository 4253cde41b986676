// Convolution in true float32 on Hopper, and its input gradient, with three products of TF32 for
// each product, see `tf32x3.cuh`. Entries of the image are split in registers right before the
// tensor cores read them. Entries of the kernel, which every tile reads, are split before, into a
// workspace: the flag, the high parts and the low parts.
#include "cuda/conv/wgmma/convolve.cuh"

namespace jaxops::conv::cuda {
namespace {

using namespace tiled;  // NOLINT: the file instantiates its templates

constexpr Shape kShapes[] = {
    {2, 1, 128, 105}, {2, 2, 64, 112}, {3, 1, 64, 122}, {2, 1, 64, 130}, {4, 1, 32, 162}};
// The shapes of tiles whose sum the blocks of a cluster share.
constexpr Shape kSharedShapes[] = {{2, 1, 64, 160}, {1, 1, 64, 260}};

// Cycles without the products: kSplitCycles to split the kernel, with kSplitPerCycle bytes in a
// cycle, and kSumCycles for every sum to begin and to launch multiply-adds that return at once.
// Measured on an H200.
constexpr int64_t kSplitCycles = 3600, kSplitPerCycle = 600, kSumCycles = 4600;

// Multiply-adds take sums of fewer entries, because they round such sums less.
constexpr int64_t kMinDepth = 64;

// The y of a grid that splits kernels counts 32 channels.
constexpr int64_t kMaxChannels = 32 * 65535;
constexpr int kSplitThreads = 256;

__device__ void StoreSplitEntries(const uint4& entries, uint4* high, uint4* low) {
  const SplitEntry x = SplitFloat32(entries.x), y = SplitFloat32(entries.y);
  const SplitEntry z = SplitFloat32(entries.z), w = SplitFloat32(entries.w);
  *high = {x.high, y.high, z.high, w.high};
  *low = {x.low, y.low, z.low, w.low};
}

// Splits the kernel's entries in their order in memory, four times `count`, and clears the flag.
__global__ void __launch_bounds__(kSplitThreads)
    SplitEntries(const uint4* __restrict__ kernel, uint4* __restrict__ high,
                 uint4* __restrict__ low, int* flag, int64_t count) {
  const int64_t at = int64_t{blockIdx.x} * kSplitThreads + threadIdx.x;
  if (at == 0) *flag = 0;
  if (at < count) StoreSplitEntries(kernel[at], high + at, low + at);
}

// Splits matrices (rows, columns) and stores them as (columns, rows), by tiles of 32 x 32.
__global__ void __launch_bounds__(kSplitThreads)
    SplitTransposed(const uint4* __restrict__ kernel, uint4* __restrict__ high,
                    uint4* __restrict__ low, int* flag, int rows, int columns) {
  __shared__ uint32_t tile[32][33];
  if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x == 0) *flag = 0;
  const int64_t matrix = blockIdx.z * int64_t{rows} * columns / 4;
  const int slow = threadIdx.x / 8, fast = threadIdx.x % 8 * 4;
  const int row = blockIdx.y * 32 + slow, column = blockIdx.x * 32 + fast;
  if (row < rows && column < columns) {
    const uint4 entries = kernel[matrix + (int64_t{row} * columns + column) / 4];
    tile[slow][fast] = entries.x;
    tile[slow][fast + 1] = entries.y;
    tile[slow][fast + 2] = entries.z;
    tile[slow][fast + 3] = entries.w;
  }
  __syncthreads();
  const int to_row = blockIdx.x * 32 + slow, to_column = blockIdx.y * 32 + fast;
  if (to_row < columns && to_column < rows) {
    const int64_t at = matrix + (int64_t{to_row} * rows + to_column) / 4;
    StoreSplitEntries(
        {tile[fast][slow], tile[fast + 1][slow], tile[fast + 2][slow], tile[fast + 3][slow]},
        high + at, low + at);
  }
}

// Tells whether these kernels take a call.
bool IsSplit(const Call& call) {
  return call.dtype == DType::kF32 && call.groups == 1 && !IsDirect(call) &&
         call.channels % 4 == 0 && call.outputs % 4 == 0 && call.channels <= kMaxChannels &&
         std::min(call.channels, call.outputs) >= kMinFan;
}

int64_t Entries(const Call& call) {
  return call.dims[0].taps * call.dims[1].taps * call.channels * call.outputs;
}

// The contents of the workspace.
struct Workspace {
  int* flag;
  uint4 *high, *low;

  Workspace(const Call& call, void* data) {
    char* const bytes = static_cast<char*>(data);
    flag = reinterpret_cast<int*>(bytes);
    high = reinterpret_cast<uint4*>(bytes + kFlagBytes);
    low = high + Entries(call) / 4;
  }
};

cudaError_t Split(cudaStream_t stream, const Call& call, const Workspace& workspace,
                  bool transposed) {
  const uint4* kernel = static_cast<const uint4*>(call.kernel);
  if (transposed) {
    const dim3 grid(static_cast<unsigned>(CeilDiv(call.outputs, 32)),
                    static_cast<unsigned>(CeilDiv(call.channels, 32)),
                    static_cast<unsigned>(call.dims[0].taps * call.dims[1].taps));
    SplitTransposed<<<grid, kSplitThreads, 0, stream>>>(
        kernel, workspace.high, workspace.low, workspace.flag, static_cast<int>(call.channels),
        static_cast<int>(call.outputs));
  } else {
    const int64_t count = Entries(call) / 4;
    SplitEntries<<<static_cast<unsigned>(CeilDiv(count, kSplitThreads)), kSplitThreads, 0,
                   stream>>>(kernel, workspace.high, workspace.low, workspace.flag, count);
  }
  return cudaGetLastError();
}

cudaError_t LaunchShape(cudaStream_t stream, const Params<1>& params, const Shape& shape,
                        int processors) {
  const auto is = [&](int warpgroups, int blocks, int columns) {
    return shape.warpgroups == warpgroups && shape.blocks == blocks && shape.columns == columns;
  };
  if (params.common.log_splits > 0) {
    return is(2, 1, 64)
               ? LaunchTiles<FloatPair, 2, 1, 64, false, true>(stream, params, 1, processors)
               : LaunchTiles<FloatPair, 1, 1, 64, false, true>(stream, params, 1, processors);
  }
  if (is(2, 1, 128)) return LaunchTiles<FloatPair, 2, 1, 128, false>(stream, params, 1, processors);
  if (is(2, 2, 64)) return LaunchTiles<FloatPair, 2, 2, 64, false>(stream, params, 1, processors);
  if (is(3, 1, 64)) return LaunchTiles<FloatPair, 3, 1, 64, false>(stream, params, 1, processors);
  if (is(2, 1, 64)) return LaunchTiles<FloatPair, 2, 1, 64, false>(stream, params, 1, processors);
  return LaunchTiles<FloatPair, 4, 1, 32, false>(stream, params, 1, processors);
}

struct ForwardPlans;
struct InputGradPlans;

auto PlanOf(const Call& call, const Sum& sum, bool is_input_grad, int processors) {
  const PlanKey key(call, processors, sum.number);
  const auto make = [&] {
    const Sum* const sums[] = {&sum};
    return MakePlan<2, 1>(sums, sizeof(float), processors, kShapes, kSharedShapes);
  };
  return is_input_grad ? KeptPlan<InputGradPlans>(key, make) : KeptPlan<ForwardPlans>(key, make);
}

cudaError_t Launch(cudaStream_t stream, const Call& call, const Sum& sum, bool is_input_grad,
                   const Workspace& workspace) {
  int processors = 0;
  cudaError_t error = jaxops::cuda::CountProcessors(&processors);
  if (error != cudaSuccess) return error;
  const auto plan = PlanOf(call, sum, is_input_grad, processors);
  const Shape* const shape = plan->shape;
  if (!shape) return cudaErrorNotSupported;
  Params<1> params = plan->params;
  Common& common = params.common;
  SumParams& p = params.sum[0];
  p.result = sum.result;
  common.epilogue = sum.epilogue;
  common.is_wide = true;
  common.low_matrices = sum.matrices;
  common.flag = workspace.flag;
  const int block = p.row_bytes / static_cast<int>(sizeof(float));
  error = MapRows(p.image_map, p, DType::kF32, sum.image,
                  {sum.channels, sum.image_columns, sum.image_rows, sum.images});
  if (error != cudaSuccess) return error;
  error = Map<3>(common.kernel_map, DType::kF32, workspace.high,
                 {sum.channels, sum.outputs, 2 * sum.matrices}, {block, shape->columns, 1},
                 {1, 1, 1}, p.row_bytes);
  if (error != cudaSuccess) return error;
  return LaunchShape(stream, params, *shape, processors);
}

}  // namespace

bool PrefersTf32x3(const Call& call, bool is_input_grad) {
  if (!IsSplit(call)) return false;
  const int64_t bytes = Entries(call) * static_cast<int64_t>(sizeof(float));
  int64_t split = kSplitCycles + bytes / kSplitPerCycle, fma = 0;
  const auto add = [&](const Sum& sum) {
    if (sum.taps > 0 && sum.taps * sum.channels < kMinDepth) return cudaErrorNotSupported;
    const auto plan = PlanOf(call, sum, is_input_grad, kProcessors);
    if (!plan->shape) return cudaErrorNotSupported;
    split += plan->cycles + kSumCycles;
    fma += FmaCycles(sum, is_input_grad, kProcessors);
    return cudaSuccess;
  };
  const cudaError_t error =
      is_input_grad ? LaunchInputGradSums(call, add) : LaunchForwardSum(call, add);
  return error == cudaSuccess && split < fma;
}

int64_t Tf32x3Workspace(const Call& call) {
  return kFlagBytes + 2 * Entries(call) * static_cast<int64_t>(sizeof(float));
}

bool CanRunTf32x3(const Call& call, bool is_input_grad, int processors) {
  if (!IsSplit(call)) return false;
  const auto has_plan = [&](const Sum& sum) {
    return PlanOf(call, sum, is_input_grad, processors)->shape ? cudaSuccess
                                                               : cudaErrorNotSupported;
  };
  return cudaSuccess ==
         (is_input_grad ? LaunchInputGradSums(call, has_plan) : LaunchForwardSum(call, has_plan));
}

// Both launchers split the kernel, launch the sums, and then launch the kernel that computes the
// result again if it is not finite.
cudaError_t LaunchForwardTf32x3(cudaStream_t stream, const Call& call, void* data) {
  const Workspace workspace(call, data);
  cudaError_t error = Split(stream, call, workspace, true);
  if (error != cudaSuccess) return error;
  error = LaunchForwardSum(
      call, [&](const Sum& sum) { return Launch(stream, call, sum, false, workspace); });
  return error == cudaSuccess ? LaunchForwardFma(stream, call, workspace.flag) : error;
}

cudaError_t LaunchInputGradTf32x3(cudaStream_t stream, const Call& call, void* data) {
  const Workspace workspace(call, data);
  cudaError_t error = Split(stream, call, workspace, false);
  if (error != cudaSuccess) return error;
  error = LaunchInputGradSums(
      call, [&](const Sum& sum) { return Launch(stream, call, sum, true, workspace); });
  return error == cudaSuccess ? LaunchInputGradFma(stream, call, workspace.flag) : error;
}

}  // namespace jaxops::conv::cuda
