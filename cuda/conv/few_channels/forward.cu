// Convolution of images of few channels on Hopper: the first layer of a network.
//
// A row of the matrix product is a pixel, a column is an output, and the sum is over the pairs of
// entries of the pixel's window, row after row: 7 x 7 taps of RGB have 77 pairs, of 80 that are
// multiplied. The kernel stays in shared memory in that order for the lifetime of a block.
#include "cuda/conv/few_channels/few_channels.cuh"
#include "cuda/conv/plan.h"

namespace jaxops::conv::cuda {
namespace {

constexpr int kForwardWarpgroups = 2;
constexpr int kForwardThreads = 128 * kForwardWarpgroups;
// Rows of a warpgroup's product.
constexpr int kForwardRows = 128;
// Two blocks of a multiprocessor share its memory, so that the copies of one overlap with the
// products of the other.
constexpr int kForwardBlocks = 2;
constexpr int kForwardBytes = 112 * 1024;

struct ForwardParams : Tiling {
  const void* kernel;
  void* result;
  int outputs;
  int kernel_rows;
  int steps;  // of 8 pairs; even
  bool is_wide;
  Epilogue epilogue;
};

// The addresses of a lane's pairs of a step, and masks of their bits. The table has an entry for
// one further step, because the loop reads an entry ahead.
using PairTable = int4;

template <int kColumns>
__device__ void FillForward(const ForwardParams& p, int column, char* matrix, PairTable* table) {
  for (int i = threadIdx.x; i < p.steps * 16 * kUnit; i += kForwardThreads) {
    const int row = i / kUnit, unit = i % kUnit;
    const int kernel_row = row / 2 / p.row_pairs;
    const int entry = row / 2 % p.row_pairs * 2 - p.lead + row % 2;
    const int output = column + unit * kUnit;
    uint4 v = {0, 0, 0, 0};
    if (kernel_row < p.kernel_rows && entry >= 0 && entry < p.row_entries && output < p.outputs) {
      const int64_t at = int64_t{kernel_row * p.row_entries + entry} * p.outputs + output;
      v = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.kernel) + at);
    }
    *reinterpret_cast<uint4*>(matrix + SwizzledUnit(row, unit)) = v;
  }
  for (int i = threadIdx.x; i < (p.steps + 1) * 4; i += kForwardThreads) {
    int at[2], mask[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int pair = i / 4 * 8 + 4 * k + i % 4;
      const int row = pair / p.row_pairs, in_row = pair % p.row_pairs;
      const bool exists = row < p.kernel_rows;
      const int entry = 2 * in_row - p.lead;
      at[k] = exists ? row * p.pitch + 4 * in_row : 0;
      mask[k] =
          (exists && entry >= 0 ? 0xFFFF : 0) | (exists && entry + 1 < p.row_entries ? ~0xFFFF : 0);
    }
    table[i] = {at[0], mask[0], at[1], mask[1]};
  }
}

template <typename T, int kColumns, bool kOdd>
__global__ void __launch_bounds__(kForwardThreads, kForwardBlocks)
    ConvolveFew(const __grid_constant__ ForwardParams p) {
#if JAXOPS_HAS_WGMMA
  extern __shared__ char shared[];
  char* matrix = shared + (1024 - SharedAddress(shared) % 1024) % 1024;
  auto* table = reinterpret_cast<PairTable*>(matrix + p.steps * 16 * kMatrixRowBytes);
  char* stages = reinterpret_cast<char*>(table + (p.steps + 1) * 4);
  const int stage_bytes = p.stage_bytes();
  const int column = blockIdx.y * kColumns;
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 % 4 * 16;

  CopyWindows(p, p.Find(blockIdx.x), stages);
  CopiesCommit();
  FillForward<kColumns>(p, column, matrix, table);
  const uint64_t b = At(MatrixDescriptor(0, 1024, kMatrixRowBytes), SharedAddress(matrix));
  const PairTable* lane_table = table + lane % 4;

  int buffer = 0;
  for (int number = blockIdx.x; number < p.tiles; number += gridDim.x, buffer ^= 1) {
    const int next = number + gridDim.x;
    if (next < p.tiles) CopyWindows(p, p.Find(next), stages + (buffer ^ 1) * stage_bytes);
    CopiesCommit();
    CopiesWait<1>();
    __syncthreads();

    const Tile tile = p.Find(number);
    const uint32_t stage = SharedAddress(stages) + buffer * stage_bytes;
    const int pixels = tile.rows * static_cast<int>(p.tile_columns.divisor());
#pragma unroll 1
    for (int begin = warpgroup * kForwardRows; begin < pixels;
         begin += kForwardWarpgroups * kForwardRows) {
      // A lane has, of 16 rows, row lane / 4 and the eighth row after it; twice, 64 rows apart.
      uint32_t window[2][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t row = min(begin + warp_row + 64 * (i / 2) + 8 * (i % 2) + lane / 4, pixels - 1);
        const int in_row = p.tile_columns.DivMod(row);
        window[i / 2][i % 2] = stage + p.WindowBytes(row, in_row);
      }
      float sums[2][kColumns / 2];
      uint32_t fragments[2][2][4];
      PairTable next = lane_table[0];
#pragma unroll 1
      for (int step = 0; step < p.steps; step += 2) {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          const PairTable at = next;
          next = lane_table[(step + s + 1) * 4];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            fragments[s][i][0] = LoadPair<kOdd>(window[i][0] + at.x) & at.y;
            fragments[s][i][1] = LoadPair<kOdd>(window[i][1] + at.x) & at.y;
            fragments[s][i][2] = LoadPair<kOdd>(window[i][0] + at.z) & at.w;
            fragments[s][i][3] = LoadPair<kOdd>(window[i][1] + at.z) & at.w;
          }
          const uint64_t b_step = b + (step + s) * (16 * kMatrixRowBytes / 16);
          ProductsBegin();
          Multiply<T, kColumns, true>(sums[0], fragments[s][0], b_step, step + s);
          Multiply<T, kColumns, true>(sums[1], fragments[s][1], b_step, step + s);
          ProductsCommit();
          ProductsWait<1>();
        }
      }
      ProductsWait<0>();

      const int left = p.outputs - column;
      Finish<kColumns>(p.epilogue, sums[0], column, left);
      Finish<kColumns>(p.epilogue, sums[1], column, left);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t row = begin + warp_row + 64 * (i / 2) + 8 * (i % 2) + lane / 4;
        const bool is_in_tile = row < pixels;
        const int in_row = p.tile_columns.DivMod(row);
        const bool exists = is_in_tile && in_row < tile.columns;
        const int64_t pixel =
            (tile.image * p.out_rows + tile.row + row) * p.out_columns + tile.column + in_row;
        const int64_t offset = pixel * p.outputs + column;
        if (p.is_wide) {
          StoreRow<kColumns>(sums[i / 2], i % 2,
                             exists ? static_cast<float*>(p.result) + offset : nullptr, left);
        } else {
          StoreRow<T, kColumns>(sums[i / 2], i % 2,
                                exists ? static_cast<T*>(p.result) + offset : nullptr, left);
        }
      }
    }
    __syncthreads();
  }
#endif
}

// Returns the bytes of shared memory of a block.
int ForwardBytes(const ForwardParams& p) {
  return 1024 + p.steps * 16 * kMatrixRowBytes +
         (p.steps + 1) * 4 * static_cast<int>(sizeof(PairTable)) + 2 * p.stage_bytes();
}

template <typename T, int kColumns>
cudaError_t LaunchForwardFewChannels(cudaStream_t stream, const ForwardParams& p, int bytes,
                                     int processors) {
  auto* kernel = p.HasOdd() ? &ConvolveFew<T, kColumns, true> : &ConvolveFew<T, kColumns, false>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kForwardBytes);
  if (error != cudaSuccess) return error;
  const unsigned adjacent = static_cast<unsigned>(CeilDiv(p.outputs, kColumns));
  const unsigned blocks = std::max(1u, kForwardBlocks * processors / adjacent);
  const dim3 grid(std::min<unsigned>(p.tiles, blocks), adjacent);
  kernel<<<grid, kForwardThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

// Decides everything but addresses; returns false where no tile fits.
bool Plan(ForwardParams& p, const Call& call, int processors) {
  p.outputs = static_cast<int>(call.outputs);
  p.kernel_rows = static_cast<int>(call.dims[0].taps);
  p.is_wide = call.result_dtype == DType::kF32;

  // The chosen tiles finish first, in estimated cycles of products and of copies.
  constexpr int kMaxColumns = 256, kMaxRows = 16;
  constexpr int64_t kStepCycles = 80, kBlockCycles = 700, kUnitCycles = 3, kTileCycles = 2000;
  ForwardParams best{};
  int64_t least = INT64_MAX;
  for (int columns = kMaxColumns; columns >= 16; columns /= 2) {
    for (int rows = 1; rows <= kMaxRows; ++rows) {
      p.Cut(call, columns, rows);
      p.steps = static_cast<int>(CeilDiv(p.kernel_rows * p.row_pairs, 16) * 2);
      if (ForwardBytes(p) > kForwardBytes || p.tiles == INT32_MAX) break;
      const int64_t blocks =
          CeilDiv(p.tile_rows * p.tile_columns.divisor(), kForwardRows * kForwardWarpgroups) *
          kForwardWarpgroups;
      const int64_t cycles = blocks * (p.steps * kStepCycles + kBlockCycles) +
                             p.stage_bytes() / kUnitBytes * kUnitCycles + kTileCycles;
      const int64_t cost = CeilDiv(p.tiles, kForwardBlocks * processors) * cycles;
      if (cost < least) {
        least = cost;
        best = p;
      }
    }
  }
  p = best;
  return least != INT64_MAX;
}

}  // namespace

cudaError_t LaunchForwardFewChannels(cudaStream_t stream, const Call& call) {
  if (!CanRunFewChannels(call) || call.outputs % kUnit) return cudaErrorNotSupported;
  int processors = 0;
  const cudaError_t error = CountProcessors(&processors);
  if (error != cudaSuccess) return error;
  const auto plan = KeptParams<ForwardParams>(
      PlanKey(call, processors), [&](ForwardParams& p) { return Plan(p, call, processors); });
  if (!plan->has_value()) return cudaErrorNotSupported;
  ForwardParams p = **plan;
  p.kernel = call.kernel;
  p.result = call.result;
  p.epilogue = call.epilogue;
  p.images = static_cast<const uint16_t*>(call.image);
  return DispatchShort(call.dtype, [&](auto type) {
    using T = decltype(type);
    return call.outputs <= 32
               ? LaunchForwardFewChannels<T, 32>(stream, p, ForwardBytes(p), processors)
               : LaunchForwardFewChannels<T, 64>(stream, p, ForwardBytes(p), processors);
  });
}

}  // namespace jaxops::conv::cuda
