// The kernel gradient of a convolution of few channels on Hopper.
//
// A row of the matrix product is an entry of the window, a column is an output, and the sum is over
// the pixels of all images. Two neighbouring entries of the window, of two neighbouring pixels, are
// two registers of the left operand: a lane reads both pairs and takes the lower halves for one row
// and the upper halves for the other. The cotangent is the right operand as it lies in memory, from
// where bulk copies bring it. Each block sums over some of the tiles, and a second kernel adds the
// sums of the blocks, always in the same order.
#include "cuda/conv/add_parts.h"
#include "cuda/conv/few_channels/few_channels.cuh"
#include "cuda/conv/plan.h"
#include "cuda/conv/tiles.cuh"

namespace jaxops::conv::cuda {
namespace {

constexpr int kColumns = 64;  // outputs of a block
// Pairs of entries that a warpgroup sums for, and the warpgroups that the largest window needs.
constexpr int kGroupPairs = 32;
constexpr int kMaxWarpgroups = 3;
static_assert(kMaxFewTapRows * (kMaxFewRowEntries / 2) <= kMaxWarpgroups * kGroupPairs);
constexpr int kStep = 16;  // pixels of a product
// A step of the cotangent, in the 16 bytes that descriptors count.
[[maybe_unused]] constexpr int kStepUnits = kStep * kMatrixRowBytes / 16;
// Two blocks of a multiprocessor share its memory, so that the copies of one overlap with the
// products of the other.
constexpr int kBlocks = 2;
constexpr int kBytes = 111 * 1024;

// Where the windows of a step's pixels begin in a stage, and the column of the first pixel in its
// row.
struct StepEntry {
  int window, column;
};
constexpr int kMaxSteps = 64;

struct Params : Tiling {
  CUtensorMap cotangent;
  void* result;  // of each block's part, one after the other
  int outputs;
  int kernel_rows;
  int64_t size;  // entries of the result
  int parts;
  int row_pixels;          // of a tile's row, including those that fill up the last step
  int image_stage, stage;  // bytes
};

// kRagged: rows of a tile may lack pixels of their last step, or have fewer steps than others.
// kMostWarpgroups: those of a block, at most, which limits the registers of a thread.
template <typename T, int kMostWarpgroups, bool kOdd, bool kRagged>
__global__ void __launch_bounds__(128 * kMostWarpgroups, kBlocks)
    SumPixelsFew(const __grid_constant__ Params p) {
#if JAXOPS_HAS_WGMMA
  extern __shared__ char shared[];
  __shared__ StepEntry table[kMaxSteps];
  __shared__ uint64_t full[2];  // completion of the copies of the cotangent
  char* stages = shared + (1024 - SharedAddress(shared) % 1024) % 1024;
  const int lane = threadIdx.x % 32;
  const int column = blockIdx.y * kColumns;
  const auto copy = [&](int number, int buffer) {
    char* stage = stages + buffer * p.stage;
    const Tile tile = p.Find(number);
    if (threadIdx.x == 0) {
      // Copies bring zeros where no pixels or outputs exist.
      Expect(full + buffer, p.tile_rows * p.row_pixels * kMatrixRowBytes);
      const int32_t from[] = {column, tile.column, tile.row, static_cast<int32_t>(tile.image)};
      ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, stage + p.image_stage,
                                &p.cotangent, from, full + buffer);
    }
    CopyWindows(p, tile, stage);
  };
  if (threadIdx.x == 0) {
    PrefetchMap(p.cotangent);
    for (uint64_t& barrier : full) ptx::mbarrier_init(&barrier, 1);
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
  }
  copy(blockIdx.x, 0);
  CopiesCommit();

  for (int i = threadIdx.x; i < kMaxSteps; i += blockDim.x) {
    const int row = i * kStep / p.row_pixels % p.tile_rows, in_row = i * kStep % p.row_pixels;
    table[i] = {p.WindowBytes(row, in_row), in_row};
  }

  // This lane has one pair of entries. Sums for pairs after the last are not used.
  const int pair = threadIdx.x / 32 * 8 + lane / 4;
  const int kernel_row = pair / p.row_pairs;
  const bool has_pair = kernel_row < p.kernel_rows;
  const int pair_bytes = has_pair ? kernel_row * p.pitch + pair % p.row_pairs * 4 : 0;
  const int pixel_bytes = 2 * p.pixel_entries;
  const int lane_bytes = pair_bytes + lane % 4 * 2 * pixel_bytes;
  const int pixel_at[4] = {0, pixel_bytes, 8 * pixel_bytes, 9 * pixel_bytes};

  float sums[kColumns / 2] = {};
  int buffer = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (int number = blockIdx.x; number < p.tiles; number += gridDim.x) {
    const int next = number + gridDim.x;
    if (next < p.tiles) copy(next, buffer ^ 1);
    CopiesCommit();
    CopiesWait<1>();
    __syncthreads();
    Wait(full + buffer, parity);

    const Tile tile = p.Find(number);
    const uint32_t stage = SharedAddress(stages) + buffer * p.stage;
    const uint64_t b = At(MatrixDescriptor(0, 1024, kMatrixRowBytes), stage + p.image_stage);
    const auto load = [&](const StepEntry& step, uint32_t (&to)[4]) {
      uint32_t pairs[4];
      const uint32_t window = stage + lane_bytes + step.window;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // A NaN may be next to the last pixel, and the cotangent's zeros would not hide it.
        const int pixel = step.column + lane % 4 * 2 + i % 2 + i / 2 * 8;
        const bool exists = !kRagged || pixel < tile.columns;
        pairs[i] = exists ? LoadPair<kOdd>(window + pixel_at[i]) : 0;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        to[2 * i] = __byte_perm(pairs[2 * i], pairs[2 * i + 1], 0x5410);
        to[2 * i + 1] = __byte_perm(pairs[2 * i], pairs[2 * i + 1], 0x7632);
      }
    };
    const int steps = tile.rows * p.row_pixels / kStep;
    int step = 0;
#pragma unroll 1
    for (; step + 1 < steps; step += 2) {
      uint32_t fragments[2][4];
      load(table[step], fragments[0]);
      load(table[step + 1], fragments[1]);
      const uint64_t b_step = b + step * kStepUnits;
      ProductsBegin();
      Multiply<T, kColumns, true>(sums, fragments[0], b_step, 1);
      Multiply<T, kColumns, true>(sums, fragments[1], b_step + kStepUnits, 1);
      ProductsCommit();
      ProductsWait<0>();
    }
    if (step < steps) {
      uint32_t fragments[4];
      load(table[step], fragments);
      ProductsBegin();
      Multiply<T, kColumns, true>(sums, fragments, b + step * kStepUnits, 1);
      ProductsCommit();
      ProductsWait<0>();
    }
    __syncthreads();
    parity ^= buffer;
    buffer ^= 1;
  }

  if (!has_pair) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int entry = pair % p.row_pairs * 2 - p.lead + half;
    if (entry < 0 || entry >= p.row_entries) continue;
    float* to = static_cast<float*>(p.result) + blockIdx.x * p.size +
                int64_t{kernel_row * p.row_entries + entry} * p.outputs;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const int output = column + 8 * j + lane % 4 * 2;
      if (output < p.outputs) {
        *reinterpret_cast<float2*>(to + output) = {sums[4 * j + 2 * half],
                                                   sums[4 * j + 2 * half + 1]};
      }
    }
  }
#endif
}

// --- plans and launches on the host --------------------------------------------------------------

// Decides everything but addresses, from sizes and the number of processors alone.
bool Plan(Params& p, const Call& call, int processors) {
  if (!CanRunFewChannels(call) || call.outputs % kUnit) return false;
  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  p.outputs = static_cast<int>(call.outputs);
  p.kernel_rows = static_cast<int>(h.taps);
  p.size = h.taps * w.taps * call.channels * call.outputs;
  const int adjacent = static_cast<int>(CeilDiv(call.outputs, kColumns));
  const int blocks = std::max(1, kBlocks * processors / adjacent);

  // The chosen tiles finish first, in estimated cycles of products and of copies.
  constexpr int kMaxColumns = 128, kMaxRows = 8;
  constexpr int64_t kStepCycles = 110, kUnitCycles = 2, kTileCycles = 1000;
  Params cut = p;
  int64_t least = INT64_MAX;
  for (int columns = kMaxColumns; columns >= kStep; columns /= 2) {
    for (int rows = 1; rows <= kMaxRows; ++rows) {
      // Strips are whole steps, so that the pixels that fill up a step are after the end of a row,
      // where copies bring zeros: a cotangent there could be infinite.
      cut.Cut(call, columns, rows, kStep);
      cut.row_pixels = static_cast<int>(CeilDiv(cut.tile_columns.divisor(), kStep) * kStep);
      const int64_t steps = int64_t{cut.tile_rows} * cut.row_pixels / kStep;
      cut.image_stage = static_cast<int>(CeilDiv(cut.stage_bytes(), 1024) * 1024);
      cut.stage = cut.image_stage + static_cast<int>(steps * kStep * kMatrixRowBytes);
      const bool fits = steps <= kMaxSteps && 1024 + 2 * cut.stage <= kBytes;
      if (!fits || cut.tiles == INT32_MAX) break;
      const int64_t cycles =
          steps * kStepCycles + cut.stage / kUnitBytes * kUnitCycles + kTileCycles;
      const int64_t cost = CeilDiv(cut.tiles, blocks) * cycles;
      if (cost < least) {
        least = cost;
        p = cut;
      }
    }
  }
  p.parts = std::min(p.tiles, blocks);
  return least < INT64_MAX;
}

auto PlanOf(const Call& call, int processors) {
  return KeptParams<Params>(PlanKey(call, processors),
                            [&](Params& p) { return Plan(p, call, processors); });
}

int64_t PartBytes(const Params& p) { return p.parts * p.size * 4; }

template <typename T, int kMostWarpgroups>
cudaError_t Launch(cudaStream_t stream, const Params& p, int warpgroups) {
  const bool is_ragged = p.out_columns != static_cast<int>(p.strips.divisor()) * p.row_pixels;
  auto* kernel = is_ragged    ? p.HasOdd() ? &SumPixelsFew<T, kMostWarpgroups, true, true>
                                           : &SumPixelsFew<T, kMostWarpgroups, false, true>
                 : p.HasOdd() ? &SumPixelsFew<T, kMostWarpgroups, true, false>
                              : &SumPixelsFew<T, kMostWarpgroups, false, false>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  const dim3 grid(p.parts, static_cast<unsigned>(CeilDiv(p.outputs, kColumns)));
  kernel<<<grid, 128 * warpgroups, 1024 + 2 * p.stage, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

int64_t KernelGradFewChannelsWorkspace(const Call& call, int processors) {
  const auto plan = PlanOf(call, processors);
  return plan->has_value() ? PartBytes(**plan) : 0;
}

cudaError_t LaunchKernelGradFewChannels(cudaStream_t stream, const Call& call, Space workspace,
                                        int processors) {
  const auto plan = PlanOf(call, processors);
  if (!plan->has_value()) return cudaErrorNotSupported;
  Params p = **plan;
  if (workspace.bytes < PartBytes(p)) return cudaErrorInvalidValue;
  p.images = static_cast<const uint16_t*>(call.image);
  p.result = workspace.data;
  cudaError_t error = Map<4>(
      p.cotangent, call.dtype, call.cotangent, {p.outputs, p.out_columns, p.out_rows, call.images},
      {kColumns, p.row_pixels, p.tile_rows, 1}, {1, 1, 1, 1}, kMatrixRowBytes);
  if (error != cudaSuccess) return error;
  error = DispatchShort(call.dtype, [&](auto type) {
    using T = decltype(type);
    const int warpgroups = static_cast<int>(CeilDiv(p.kernel_rows * p.row_pairs, kGroupPairs));
    return warpgroups <= 2 ? Launch<T, 2>(stream, p, warpgroups)
                           : Launch<T, kMaxWarpgroups>(stream, p, warpgroups);
  });
  if (error != cudaSuccess) return error;
  return LaunchAddParts(stream, workspace.data, call.result, call.result_dtype, p.size, p.parts);
}

}  // namespace jaxops::conv::cuda
