// Concatenation and splitting: bytes move from sources to destinations, see common/concatenate.h.
//
// The table of pieces travels with the launch, as a parameter of the kernel, so that any number of
// arrays is one launch and a CUDA graph can keep it.
#include <algorithm>

#include "cuda/common/numeric.cuh"
#include "cuda/concatenate/families.h"
#include "cuda/concatenate/job.h"
#include "cuda/concatenate/launch.h"

namespace jaxops::concatenate::cuda {
namespace {

using jaxops::cuda::Always;
using jaxops::cuda::Family;
using jaxops::cuda::kPackBytes;

constexpr int64_t kSectorBytes = 32;  // of the memory

// Up to this many items, the launch and the first access take longer than all the rest.
constexpr int64_t kMaxSmallItems = int64_t{1} << 17;
constexpr int64_t kMaxSmallSplitItems = int64_t{1} << 16;

// Bytes of equal pieces of whole vectors that are faster by `equal` and `tiles` than by `vectors`.
int64_t MaxNarrowVectorBytes(bool splits) { return splits ? 240 : 64; }

bool PrefersSmall(const Call& call, const Device&) { return call.items() <= kMaxSmallItems; }

bool PrefersSmallSegments(const Call& call, const Device&) {
  constexpr int64_t kMaxBlocks = 1024;
  // Pieces of very different sizes leave many blocks with nothing to do.
  return call.items() <= (call.joins() ? kMaxSmallItems : kMaxSmallSplitItems) &&
         call.small_segments.blocks() <= kMaxBlocks;
}

bool PrefersSegments(const Call& call, const Device&) {
  constexpr int64_t kMinMeanBytes = 32768;
  return !HasWholeVectors(call) && call.row_bytes >= kMinMeanBytes * CountRowSegments(call);
}

bool PrefersEqual(const Call& call, const Device&) {
  constexpr int64_t kMaxEqualItems = 3 << 16;
  constexpr int64_t kMaxEqualBytes = 1 << 17;
  constexpr int64_t kMaxSplitBytes = 512;
  constexpr int64_t kMinPieces = 5;
  if (call.piece_count() < kMinPieces) return false;
  const int64_t extent = call.job.pieces[0].extent;
  if (call.items() <= (call.unit == 1 ? kMaxEqualBytes : kMaxEqualItems) &&
      (call.joins() || extent <= kMaxSplitBytes)) {
    return true;
  }
  // What neighbouring threads write of large ones is whole sectors.
  return HasWholeVectors(call) && extent <= MaxNarrowVectorBytes(!call.joins()) &&
         EqualSegmentBytes(call) % kSectorBytes == 0;
}

// Where more than half of a row is kept, a single piece is as fast by items, and items of less than
// 4 bytes are faster by tiles.
bool PrefersNarrowSplit(const Call& call, const Device&) {
  return call.unit < kPackBytes && (2 * call.row_bytes <= call.job.pieces[0].stride ||
                                    (call.piece_count() > 1 && call.unit >= 4));
}

bool PrefersTiles(const Call& call, const Device&) {
  constexpr int64_t kFewPieces = 4;
  constexpr int64_t kMinFewBytes = int64_t{1} << 20;
  constexpr int64_t kMinFewTiles = 256;
  constexpr int64_t kMinManyTiles = 8;
  constexpr int64_t kMaxFewWordsBytes = 64;  // of a piece of a split by words
  constexpr int64_t kMaxManyWordsBytes = 512;
  constexpr int64_t kLongRowBytes = int64_t{1} << 16;
  constexpr int64_t kRowsOfRest = 8;  // for each row of long ones that is left
  const TilesPlan& plan = call.tiles;
  const bool is_few = plan.count <= kFewPieces;
  const int64_t rows = call.job.rows;
  // Joins of few pieces of whole words are as fast without, and so is one piece. Of vectors only
  // narrow ones gain by tiles.
  const bool is_vectors = call.unit == kPackBytes;
  const int64_t min_pieces = call.unit < 4 ? 1 : plan.splits && !is_vectors ? 2 : kFewPieces + 1;
  if (call.piece_count() < min_pieces) return false;
  if (is_vectors && !(plan.equal && plan.size <= MaxNarrowVectorBytes(plan.splits))) return false;
  if (is_few && rows * plan.row_bytes < kMinFewBytes) return false;
  if (plan.splits) {
    // Little is read for nothing, unless the memory gives whole rows with each of several pieces.
    const bool are_given =
        call.destination_count() > 1 && call.job.pieces[0].stride <= kSectorBytes;
    if (2 * plan.filled < plan.row_bytes && !are_given) return false;
    const int64_t max_bytes = (is_few ? kMaxFewWordsBytes : kMaxManyWordsBytes) * plan.count;
    if (plan.item == 4 && (plan.filled > max_bytes || rows * plan.row_bytes < kMinFewBytes)) {
      return false;
    }
    // Without enough patterns, items are faster one by one, but for very many pieces.
    if (plan.has_few_patterns && plan.count <= kTableDestinations) return false;
  }
  // The rows after the last tile are moved item by item.
  if (plan.row_bytes > kLongRowBytes && rows % plan.rows * kRowsOfRest > rows) return false;
  return plan.tiles * plan.parts >= (is_few ? kMinFewTiles : kMinManyTiles);
}

bool PrefersJoin(const Call& call, const Device&) {
  return call.piece_count() > 1 && call.unit < kPackBytes && CountFilledPieces(call.job) > 0;
}

// More are slower where they are cut byte by byte.
bool PrefersSplit(const Call& call, const Device&) {
  return call.unit > 1 || call.destination_count() <= kTableDestinations;
}

// Patterns repeat often enough and close enough to be worth working out.
bool PrefersRows(const Call& call, const Device&) {
  constexpr int64_t kMinPatterns = 16;
  constexpr int64_t kMaxRowBytes = 65536;
  return call.job.rows / PatternRows(call.unit) >= kMinPatterns &&
         std::all_of(call.job.destinations.begin(), call.job.destinations.end(),
                     [](const Destination& d) { return d.row_bytes <= kMaxRowBytes; });
}

bool CanRunGeneral(const Call& call, const Device&) {
  return !call.joins() || call.piece_count() <= kMaxPieces;
}

// More destinations than one launch has parameters for are moved in groups. Each is a call of its
// own, which any family may take.
cudaError_t LaunchGroups(cudaStream_t stream, const Call& call, const Device& device) {
  const Job& job = call.job;
  if (call.destination_count() <= kTableDestinations) return LaunchGeneral(stream, call, device);
  Job group = job;
  for (size_t first = 0; first < job.destinations.size(); first += kTableDestinations) {
    const size_t count = std::min<size_t>(kTableDestinations, job.destinations.size() - first);
    group.destinations.clear();
    group.pieces.clear();
    for (size_t i = first; i < first + count; ++i) {
      const Destination& destination = job.destinations[i];
      if (destination.piece_count != 1) return cudaErrorInvalidValue;
      group.pieces.push_back(job.pieces[destination.first_piece]);
      group.destinations.push_back(destination);
      group.destinations.back().first_piece = static_cast<int64_t>(i - first);
    }
    const cudaError_t error = LaunchMove(stream, group);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

constexpr Family<Call> kFamilies[] = {
    // A small call waits for constants and loads: these have no branch and no division before them.
    {"small_equal", CanRunSmallEqual, PrefersSmall, LaunchSmallEqual},
    // All parameters are in the first line of constants: 63 + 65 of (256, 128) bf16 1.57 -> 1.41
    // us.
    {"small_join", CanRunSmallJoin, PrefersSmall, LaunchSmallJoin},
    // A thread needs one line of constants: small splits 5 to 14 % faster.
    {"small_segments", CanRunSmallSegments, PrefersSmallSegments, LaunchSmallSegments},
    // Copies between addresses of any alignment: 300 x 37 rows of f32 52.5 -> 44.2 us, 63 + 66
    // planes of 127 x 127 bf16 37.7 -> 32.7.
    {"segments", CanRunSegments, PrefersSegments, LaunchSegments},
    // A warp meets few arrays, and whole lines of each.
    {"equal", CanRunEqual, PrefersEqual, LaunchEqual},
    // The memory gives 32 bytes at a time: a row is read once for all parts.
    {"narrow_split", CanRunNarrowSplit, PrefersNarrowSplit, LaunchNarrowSplit},
    // Before vectors, which can do most of what tiles can. 480 pieces of 24 bytes 81 -> 18 us, RGB
    // planes 28.7 -> 25.9.
    {"tiles", CanRunTiles, PrefersTiles, LaunchTiles},
    // Addresses reach the memory in order: 64 + 192 channels of f32 131.8 -> 127.8 us.
    {"vectors", CanRunVectors, Always<Call>, LaunchVectors},
    // Items are gathered into vectors, and neighbours come from the L1 cache.
    {"join", CanRunJoin, PrefersJoin, LaunchJoin},
    // As join.
    {"split", CanRunSplit, PrefersSplit, LaunchSplit},
    // A thread finds its sources once and loops over rows: 64 arrays 90 -> 40 us.
    {"rows", CanRunRows, PrefersRows, LaunchRows},
    {"general", CanRunGeneral, Always<Call>, LaunchGroups},
};
const jaxops::cuda::Table<Call> kMove("concatenate", "move", kFamilies);

int64_t FindUnit(const Job& job) {
  uint64_t all = kPackBytes;
  for (const Destination& d : job.destinations) {
    all |= reinterpret_cast<uintptr_t>(d.data) | d.row_bytes;
  }
  for (const Piece& p : job.pieces) {
    all |= p.extent;
    if (p.size > 0) all |= reinterpret_cast<uintptr_t>(p.source) | p.stride | p.size;
  }
  return static_cast<int64_t>(all & -all);
}

}  // namespace

Call::Call(const Job& job) : job(job), unit(FindUnit(job)), row_bytes(0) {
  for (const Destination& d : job.destinations) row_bytes += d.row_bytes;
}

cudaError_t LaunchMove(cudaStream_t stream, const Job& job) {
  const Call call(job);
  return call.job.rows == 0 || call.row_bytes == 0 ? cudaSuccess : kMove.Run(stream, call);
}

}  // namespace jaxops::concatenate::cuda
