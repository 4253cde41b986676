// This file chooses the kernel family of an interpolation in cells or of its gradients, see
// common/trilinear.h.
//
// Memory bounds large calls, and features are most of the memory traffic. The fastest way to move
// features depends on the bytes of a row, the features of one corner.
//
// The measured gains are in docs/trilinear.md; all were measured on an H200.
#include "cuda/common/dispatch.h"

#include <cstdint>

#include "cuda/trilinear/families.h"
#include "cuda/trilinear/launch.h"

namespace jaxops::trilinear::cuda {
namespace {

using jaxops::cuda::Always;
using jaxops::cuda::Family;
using jaxops::cuda::Table;

constexpr int64_t kLongRowBytes = 64;
constexpr int64_t kSectorBytes = 32;

// The plain kernels are the fastest up to these sizes.
constexpr int64_t kMaxSingleCells = 32 * 1024;  // rows of one element
constexpr int64_t kMaxValueBytes = 8 << 20;     // bytes of features
constexpr int64_t kMaxGradBytes = 4 << 20;      // bytes of feature gradients
constexpr int64_t kMaxSpanElements = 1 << 20;   // feature gradient elements, if vectors span rows
constexpr int64_t kMaxPointThreads = 128 * 1024;
constexpr int64_t kMaxSectorCells = 32 * 1024;  // rows of one sector, both gradients
constexpr int64_t kMaxHalvedBytes = 7 << 20;    // bytes of features, if rows are not whole sectors

bool PrefersPlainValue(const Call& call, const Device&) {
  if (call.width == 1 && call.cells.size() > kMaxSingleCells) return false;
  const int64_t bytes = call.cells.size() * kCorners * RowBytes(call);
  return bytes <= kMaxValueBytes || CanShareValues(call) || HasLongRows(call);
}

bool PrefersVectorsValue(const Call& call, const Device&) {
  return RowBytes(call) >= kLongRowBytes;
}

bool PrefersTiles(const Call& call, const Device&) { return RowBytes(call) <= 32; }

constexpr Family<Call> kForwardFamilies[] = {
    // The latency of one thread's loads and instructions bounds a small call: threads share
    // nothing, and blocks are small and many. Large values of long rows are 0.4 to 1 % faster.
    {"plain", CanRunPlain, PrefersPlainValue, LaunchPlain},
    // A thread moves a vector of each corner directly between registers and memory.
    {"vectors", CanRunVectors, PrefersVectorsValue, LaunchVectors},
    // A lane has a cell.
    {"singles", CanRunSingles, Always<Call>, LaunchSingles},
    // A warp reads rows in the order of memory.
    {"rows", CanRunRows, Always<Call>, LaunchRows},
    // A lane has a cell, and the compiler knows the number of features.
    {"narrow", CanRunNarrow, Always<Call>, LaunchNarrow},
    // A block copies the features of some cells to shared memory, where a thread sums a vector.
    {"tiles", CanRunTiles, PrefersTiles, LaunchTiles},
    // Several lanes share a cell in shared memory.
    {"columns", CanRunColumns, Always<Call>, LaunchColumns},
    // Rows are not aligned, but cells are, so bulk copies move them. This is 1 to 20 % faster than
    // elements for most odd widths.
    {"groups", CanRunGroups, Always<Call>, LaunchGroups},
    {"elements", CanRunElements, Always<Call>, LaunchElements},
};
const Table<Call> kForward("trilinear_interpolate", "forward", kForwardFamilies);

bool PrefersPlainGradients(const Call& call, const Device&) {
  const int64_t cells = call.cells.size();
  const int64_t elements = cells * kCorners * call.width;
  const int64_t bytes = cells * kCorners * RowBytes(call);
  const int64_t vector = VectorElements(call);
  if (call.width == 1 && (call.dpoints != nullptr || cells > kMaxSingleCells)) return false;
  if (call.dpoints == nullptr) {
    if (bytes > kMaxGradBytes) return false;
    return call.width % vector == 0 ||
           elements <= (call.width < 16 ? kMaxSpanElements / 2 : kMaxSpanElements);
  }
  const PlainPointPlan plan(call);
  if (plan.count == vector) {
    // Other families write both gradients faster for rows that end inside a sector of memory.
    return call.dfeatures == nullptr || RowBytes(call) % kSectorBytes == 0 ||
           bytes <= kMaxHalvedBytes;
  }
  const bool is_16_bit = SizeOf(call.dtype) == 2;
  // Rows of one sector are the fastest for any number of cells, and with their gradient for some.
  if (is_16_bit && call.width == 16) {
    return call.dfeatures == nullptr || cells <= kMaxSectorCells;
  }
  const int64_t max_cells = is_16_bit && plan.count == 1 ? 4 * 1024 : 8 * 1024;
  return cells <= max_cells && cells * plan.lanes <= kMaxPointThreads;
}

// Rows that are not whole sectors are faster by groups: two stores of half a sector cost two whole
// sectors, and groups avoid such stores. 24 features of 2 bytes are three vectors.
bool PrefersVectorsGradients(const Call& call, const Device&) {
  constexpr int64_t kMaxHalvedRowBytes = 8 * 1024;
  const int64_t row_bytes = RowBytes(call);
  if (row_bytes >= kLongRowBytes) {
    return call.dfeatures == nullptr || row_bytes % kSectorBytes == 0 ||
           row_bytes > kMaxHalvedRowBytes;
  }
  return SizeOf(call.dtype) == 2 && call.width == 24 && call.dfeatures == nullptr;
}

// The groups family is faster for larger cells.
bool PrefersImages(const Call& call, const Device&) { return kCorners * RowBytes(call) <= 256; }

constexpr Family<Call> kGradientFamilies[] = {
    // The reasons are those of values; most small point gradients are 1.5 to 5 % faster, because
    // the kernel reads fewer constants.
    {"plain", CanRunPlain, PrefersPlainGradients, LaunchPlain},
    {"vectors", CanRunVectors, PrefersVectorsGradients, LaunchVectors},
    // Neighbouring lanes exchange their stores, so that they write whole sectors: the point
    // gradient of (8388608,1) f32 147 -> 116 us, both gradients 232 -> 187.
    {"singles", CanRunSingles, Always<Call>, LaunchSingles},
    {"rows", CanRunRows, Always<Call>, LaunchRows},
    // (1000003,3) bf16 takes 19.1 instead of 21.2 us. Widths for which groups are faster are not
    // compiled.
    {"narrow", CanRunNarrow, Always<Call>, LaunchNarrow},
    // The reason is that of narrow; a lane has a corner instead of a cell.
    {"images", CanRunImages, PrefersImages, LaunchImages},
    // Both gradients of (187245,14) f32 take 45.3 instead of 52.7 us; bf16 rows of 24 to 136
    // elements that are not whole sectors are 7 to 16 % faster.
    {"groups", CanRunGroups, Always<Call>, LaunchGroups},
    // Element-wise moves of rows that are not whole vectors cost up to 1.9 times the time of the
    // memory traffic.
    {"shifts", CanRunShifts, Always<Call>, LaunchShifts},
    {"elements", CanRunElements, Always<Call>, LaunchElements},
};
const Table<Call> kGradients("trilinear_interpolate", "gradients", kGradientFamilies);

}  // namespace

cudaError_t LaunchCells(cudaStream_t stream, const Call& call) {
  if (call.cells.size() == 0) return cudaSuccess;
  if (call.width == 0) {
    if (call.dpoints == nullptr) return cudaSuccess;
    const int64_t bytes = call.cells.size() * kAxes * SizeOf(call.point_dtype);
    return cudaMemsetAsync(call.dpoints, 0, bytes, stream);
  }
  return call.out != nullptr ? kForward.Run(stream, call) : kGradients.Run(stream, call);
}

}  // namespace jaxops::trilinear::cuda
