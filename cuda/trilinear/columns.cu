// These kernels interpolate in cells whose rows are whole vectors: a block copies the features of
// several cells to shared memory, and several lanes share a cell.
#include <cuda_pipeline.h>

#include <algorithm>
#include <cstdint>

#include "common/fast_divide.h"
#include "cuda/trilinear/cells.cuh"
#include "cuda/trilinear/families.h"

namespace jaxops::trilinear::cuda {
namespace {

constexpr int kThreads = 256;

constexpr int kBankLineBytes = 128;

// The features of a block's cells fill about this much shared memory, which leaves room for several
// blocks on a multiprocessor.
constexpr int64_t kTileBytes = 24 * 1024;

// The opt-in limit of shared memory holds one cell and the padding of its pitch.
constexpr int64_t kMaxRowBytes = (jaxops::cuda::kSharedOptInLimit - kBankLineBytes) / kCorners;

struct InterpolateColumnsParams {
  Call call;
  int lanes;           // lanes per cell, a power of two
  int pitch;           // bytes between the features of two cells in shared memory
  FastDivider pieces;  // vectors of 16 bytes in a cell's features
};

// A block copies the features of kThreads / lanes cells to shared memory by vectors of 16 bytes,
// which may span corners. A lane sums kCount elements of all corners in each iteration, and keeps
// the weights.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    InterpolateColumns(const __grid_constant__ InterpolateColumnsParams params) {
  using A = Accumulator<T>;
  constexpr int kCount = kVectorElements<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  const Call& call = params.call;
  const int width = static_cast<int>(call.width);
  const int lanes = params.lanes;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int local = static_cast<int>(threadIdx.x) / lanes;
  const int64_t first = int64_t{blockIdx.x} * (kThreads / lanes);
  const int cells = static_cast<int>(min(int64_t{kThreads / lanes}, call.cells.size() - first));
  const int pieces = cells * params.pieces.divisor();
  for (int i = threadIdx.x; i < pieces; i += kThreads) {
    uint32_t cell = i;
    const uint32_t piece = params.pieces.DivMod(cell);
    const T* from = static_cast<const T*>(call.features) +
                    call.cells.Offset(first + cell, Call::kFeatures) + piece * kCount;
    __pipeline_memcpy_async(shared + cell * params.pitch + piece * kVectorBytes, from,
                            kVectorBytes);
  }
  __pipeline_commit();
  const int64_t cell = first + min(local, cells - 1);
  Coordinates<A> p;
  LoadCoordinates<A>(call, cell, p);
  A weights[kCorners];
  MakeWeights(call, cell, p, weights);
  __pipeline_wait_prior(0);
  __syncthreads();
  if (local >= cells) return;
  for (int f = lane * kCount; f < width; f += lanes * kCount) {
    const T* column = reinterpret_cast<const T*>(shared + local * params.pitch) + f;
    A sum[kCount] = {};
#pragma unroll
    for (int c = 0; c < kCorners; ++c) {
      const auto row = LoadVector<kCount>(column + c * width);
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum[i] += weights[c] * Widen(row.values[i]);
    }
    Vector<T, kCount> out;
#pragma unroll
    for (int i = 0; i < kCount; ++i) out.values[i] = Narrow<T>(sum[i]);
    StoreVector(static_cast<T*>(call.out) + cell * width + f, out);
  }
}

// ColumnPlan chooses the lanes per cell and the pitch of cells in shared memory.
struct ColumnPlan {
  int lanes = 1;  // lanes per cell, a power of two
  // The pitch is the bytes between the features of two cells in shared memory. Modulo a line of
  // banks it equals the bytes that the lanes of a cell read at once, so that all lanes of a warp
  // read different banks.
  int pitch;

  explicit ColumnPlan(const Call& call) {
    const int64_t cell_bytes = kCorners * RowBytes(call);
    while (lanes < kThreads && cells() * cell_bytes > kTileBytes) lanes *= 2;
    const int64_t at_once = std::clamp<int64_t>(lanes * kVectorBytes, kVectorBytes, kBankLineBytes);
    pitch = static_cast<int>(
        cell_bytes + ((at_once - cell_bytes) % kBankLineBytes + kBankLineBytes) % kBankLineBytes);
  }
  int cells() const { return kThreads / lanes; }  // per block
};

template <typename T>
cudaError_t LaunchOf(cudaStream_t stream, const Call& call) {
  const ColumnPlan plan(call);
  const InterpolateColumnsParams params{call, plan.lanes, plan.pitch,
                                        FastDivider(kCorners * RowBytes(call) / kVectorBytes)};
  return Launch(InterpolateColumns<T>, CeilDiv(call.cells.size(), plan.cells()), kThreads,
                plan.cells() * plan.pitch, stream, params);
}

}  // namespace

bool CanRunColumns(const Call& call, const Device&) {
  return HasAlignedArrays(call) && call.out != nullptr && call.width % VectorElements(call) == 0 &&
         RowBytes(call) <= kMaxRowBytes;
}

cudaError_t LaunchColumns(cudaStream_t stream, const Call& call, const Device&) {
  return jaxops::cuda::DispatchFloat(call.dtype,
                                     [&]<typename T>(T) { return LaunchOf<T>(stream, call); });
}

}  // namespace jaxops::trilinear::cuda
