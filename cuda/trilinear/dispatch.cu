// Which kernels interpolate in cells and make the gradients, see common/trilinear.h.
//
// Large calls are bound by memory, and features are most of that. How they move depends on the
// bytes of a row, which is what a corner has.
//
// The measured gains are in docs/trilinear.md; all were measured on an H200.
#include <cstdint>

#include "cuda/common/dispatch.h"
#include "cuda/trilinear/families.h"
#include "cuda/trilinear/launch.h"

namespace jaxops::trilinear::cuda {
namespace {

using jaxops::cuda::Always;
using jaxops::cuda::Family;
using jaxops::cuda::Table;

constexpr int64_t kLongRowBytes = 64;
constexpr int64_t kSectorBytes = 32;

// Up to these sizes the plain kernels are the fastest.
constexpr int64_t kMaxSingleCells = 32 * 1024;  // of rows of one element
constexpr int64_t kMaxValueBytes = 8 << 20;     // of features
constexpr int64_t kMaxGradBytes = 4 << 20;      // of feature gradients
constexpr int64_t kMaxSpanElements = 1 << 20;   // of these, where vectors span rows
constexpr int64_t kMaxPointThreads = 128 * 1024;
constexpr int64_t kMaxHalvedBytes = 48 << 20;  // of features of rows that are not whole sectors

bool PrefersPlainValue(const Call& call, const Device&) {
  if (call.width == 1 && call.cells.size() > kMaxSingleCells) return false;
  const int64_t bytes = call.cells.size() * kCorners * RowBytes(call);
  return bytes <= kMaxValueBytes || HasSharedValues(call) || HasLongRows(call);
}

bool PrefersVectorsValue(const Call& call, const Device&) {
  return RowBytes(call) >= kLongRowBytes;
}

bool PrefersTiles(const Call& call, const Device&) { return RowBytes(call) <= 32; }

constexpr Family<Call> kForwardFamilies[] = {
    // A small call waits for one thread's loads and instructions: threads share nothing, and blocks
    // are small and many. Large values of long rows are 0.4 to 1 % faster.
    {"plain", CanRunPlain, PrefersPlainValue, LaunchPlain},
    // A vector of each corner moves straight between registers and memory.
    {"vectors", CanRunVectors, PrefersVectorsValue, LaunchVectors},
    // A lane has a cell.
    {"singles", CanRunSingles, Always<Call>, LaunchSingles},
    // Rows move in the order of memory.
    {"rows", CanRunRows, Always<Call>, LaunchRows},
    // A lane has a cell, and the compiler knows the number of features.
    {"narrow", CanRunNarrow, Always<Call>, LaunchNarrow},
    // A block copies the features of some cells to shared memory, where a thread sums a vector.
    {"tiles", CanRunTiles, PrefersTiles, LaunchTiles},
    // Lanes share a cell of shared memory.
    {"columns", CanRunColumns, Always<Call>, LaunchColumns},
    // A row is not aligned, but a cell is: bulk copies bring it. 1 to 20 % faster than elements for
    // most odd widths.
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
    // Both gradients of rows that end inside a sector of memory are written faster otherwise.
    return call.dfeatures == nullptr || RowBytes(call) % kSectorBytes == 0 ||
           bytes <= kMaxHalvedBytes;
  }
  const bool is_16_bit = SizeOf(call.dtype) == 2;
  // Rows of one sector, however many cells there are.
  if (is_16_bit && call.width == 16 && call.dfeatures == nullptr) return true;
  const int64_t max_cells = is_16_bit && plan.count == 1 ? 4 * 1024 : 8 * 1024;
  return cells <= max_cells && cells * plan.lanes <= kMaxPointThreads;
}

// But for rows that are not whole sectors: two stores of half a sector cost two whole ones, which
// groups do not have. 24 features of 2 bytes are three vectors.
bool PrefersVectorsGradients(const Call& call, const Device&) {
  constexpr int64_t kMaxHalvedRowBytes = 8 * 1024;
  const int64_t row_bytes = RowBytes(call);
  if (row_bytes >= kLongRowBytes) {
    return call.dfeatures == nullptr || row_bytes % kSectorBytes == 0 ||
           row_bytes > kMaxHalvedRowBytes;
  }
  return SizeOf(call.dtype) == 2 && call.width == 24 && call.dfeatures == nullptr;
}

// In larger cells, groups are faster.
bool PrefersImages(const Call& call, const Device&) { return kCorners * RowBytes(call) <= 256; }

constexpr Family<Call> kGradientFamilies[] = {
    // As for values; most small point gradients are 1.5 to 5 % faster by fewer constants.
    {"plain", CanRunPlain, PrefersPlainGradients, LaunchPlain},
    {"vectors", CanRunVectors, PrefersVectorsGradients, LaunchVectors},
    // Neighbours exchange their stores, so that they write whole sectors: the point gradient of
    // (8388608,1) f32 147 -> 116 us, both gradients 232 -> 187.
    {"singles", CanRunSingles, Always<Call>, LaunchSingles},
    {"rows", CanRunRows, Always<Call>, LaunchRows},
    // (1000003,3) bf16 21.2 -> 19.1 us. Widths for which groups are faster are not built.
    {"narrow", CanRunNarrow, Always<Call>, LaunchNarrow},
    // As narrow, with a corner a lane.
    {"images", CanRunImages, PrefersImages, LaunchImages},
    // Both gradients of (187245,14) f32 52.7 -> 45.3 us; bf16 rows of 24 to 136 elements that are
    // not whole sectors 7 to 16 % faster.
    {"groups", CanRunGroups, Always<Call>, LaunchGroups},
    // Rows that vectors do not divide cost up to 1.9 times the memory's time when moved by
    // elements.
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
