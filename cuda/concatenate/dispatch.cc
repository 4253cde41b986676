// This file chooses the kernel family of a concatenation or a split, which both move bytes from
// sources to destinations, see common/concatenate.h.
//
// The table of pieces is a parameter of the kernel, so that any number of arrays takes one launch,
// which a CUDA graph can capture.
#include "cuda/common/dispatch.h"

#include <algorithm>

#include "cuda/common/sizes.h"
#include "cuda/concatenate/families.h"
#include "cuda/concatenate/job.h"
#include "cuda/concatenate/launch.h"

namespace jaxops::concatenate::cuda {
namespace {

using jaxops::cuda::Always;
using jaxops::cuda::Family;
using jaxops::cuda::kVectorBytes;

constexpr int64_t kSectorBytes = 32;  // of global memory

// Up to this number of items, the launch and the first access take longer than everything else.
constexpr int64_t kMaxSmallItems = int64_t{1} << 17;
constexpr int64_t kMaxSmallSplitItems = int64_t{1} << 16;

// Equal pieces of whole vectors up to this number of bytes are faster by `equal` and `tiles` than
// by `vectors`.
int64_t MaxNarrowVectorBytes(bool splits) { return splits ? 240 : 64; }

bool PrefersSmall(const Call& call, const Device&) { return call.items() <= kMaxSmallItems; }

bool PrefersSmallSegments(const Call& call, const Device&) {
  constexpr int64_t kMaxBlocks = 1024;
  // Pieces of very different sizes leave many blocks without work.
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
  // Neighbouring threads must write whole sectors of large pieces.
  return HasWholeVectors(call) && extent <= MaxNarrowVectorBytes(!call.joins()) &&
         EqualSegmentBytes(call) % kSectorBytes == 0;
}

// If more than half of a row is kept, tiles are as fast: 1 + 3 of (2^22, 4) f32 take 31.9 us, and
// took 33.3 here, 1 + 2 + 5 of (2^20, 8) 16.5 and 17.3.
bool PrefersNarrowSplit(const Call& call, const Device&) {
  return call.unit < kVectorBytes && 2 * call.row_bytes <= call.job.pieces[0].stride;
}

bool PrefersTiles(const Call& call, const Device&) {
  constexpr int64_t kFewPieces = 4;
  constexpr int64_t kMinFewBytes = int64_t{1} << 20;
  constexpr int64_t kMinFewPairBytes = int64_t{1} << 22;  // of joins of 2-byte items
  constexpr int64_t kMinFewTiles = 256;
  constexpr int64_t kMinManyTiles = 8;
  constexpr int64_t kMaxFewWordsBytes = 64;  // per piece of a split into 4-byte items
  constexpr int64_t kMaxManyWordsBytes = 512;
  constexpr int64_t kLongRowBytes = int64_t{1} << 16;
  constexpr int64_t kRowsOfRest = 8;  // for each long row after the last tile
  const TilesPlan& plan = call.tiles;
  const bool is_few = plan.count <= kFewPieces;
  const int64_t rows = call.job.rows;
  // Joins of few pieces of 4-byte items are as fast without tiles, and so is one piece. Tiles speed
  // up only narrow pieces of whole vectors.
  const bool is_vectors = call.unit == kVectorBytes;
  const int64_t min_pieces = call.unit < 4 ? 1 : plan.splits && !is_vectors ? 2 : kFewPieces + 1;
  if (call.piece_count() < min_pieces) return false;
  if (is_vectors && !(plan.equal && plan.size <= MaxNarrowVectorBytes(plan.splits))) return false;
  const bool is_join_of_pairs = !plan.splits && call.unit == 2;
  if (is_few && rows * plan.row_bytes < (is_join_of_pairs ? kMinFewPairBytes : kMinFewBytes)) {
    return false;
  }
  if (plan.splits) {
    // Tiles should read few bytes in vain, unless every piece would fetch whole rows anyway,
    // because a row fits a sector.
    const bool are_given =
        call.destination_count() > 1 && call.job.pieces[0].stride <= kSectorBytes;
    if (2 * plan.filled < plan.row_bytes && !are_given) return false;
    const int64_t max_bytes = (is_few ? kMaxFewWordsBytes : kMaxManyWordsBytes) * plan.count;
    if (plan.item == 4 && (plan.filled > max_bytes || rows * plan.row_bytes < kMinFewBytes)) {
      return false;
    }
    // Without enough patterns, items are faster one by one, except for very many pieces.
    if (plan.has_few_patterns && plan.count <= kTableDestinations) return false;
  }
  // The rows after the last tile move item by item.
  if (plan.row_bytes > kLongRowBytes && rows % plan.rows * kRowsOfRest > rows) return false;
  return plan.tiles * plan.parts >= (is_few ? kMinFewTiles : kMinManyTiles);
}

bool PrefersJoin(const Call& call, const Device&) {
  return call.piece_count() > 1 && call.unit < kVectorBytes && CountFilledPieces(call.job) > 0;
}

// More destinations are slower if items have one byte.
bool PrefersSplit(const Call& call, const Device&) {
  return call.unit > 1 || call.destination_count() <= kTableDestinations;
}

// Patterns must repeat often enough, and close enough, to be worth their setup: 8 of 400 arrays of
// 131 and 5 bf16 took 11.4 us where general took 33.7, 8 of 20 such arrays 2.9 and 3.9.
bool PrefersRows(const Call& call, const Device&) {
  constexpr int64_t kMinPatterns = 8;
  constexpr int64_t kMaxRowBytes = 65536;
  return call.job.rows / PatternRows(call.unit) >= kMinPatterns &&
         std::all_of(call.job.destinations.begin(), call.job.destinations.end(),
                     [](const Destination& d) { return d.row_bytes <= kMaxRowBytes; });
}

bool CanRunGeneral(const Call& call, const Device&) {
  return !call.joins() || call.piece_count() <= kMaxPieces;
}

// If destinations exceed the parameters of one launch, they move in groups. Each group is a call of
// its own, which any family may run.
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
    // The latency of constants and loads bounds a small call: these kernels have no branch and no
    // division before the loads.
    {"small_equal", CanRunSmallEqual, PrefersSmall, LaunchSmallEqual},
    // All parameters lie in the first line of constants: 63 + 65 of (256, 128) bf16 1.57 -> 1.41
    // us.
    {"small_join", CanRunSmallJoin, PrefersSmall, LaunchSmallJoin},
    // A thread needs one line of constants: small splits are 5 to 14 % faster.
    {"small_segments", CanRunSmallSegments, PrefersSmallSegments, LaunchSmallSegments},
    // These are copies between addresses of any alignment: 300 x 37 rows of f32 52.5 -> 44.2 us, 63
    // + 66 planes of 127 x 127 bf16 37.7 -> 32.7.
    {"segments", CanRunSegments, PrefersSegments, LaunchSegments},
    // A warp accesses few arrays, and whole lines of each.
    {"equal", CanRunEqual, PrefersEqual, LaunchEqual},
    // Memory accesses have at least 32 bytes, so a row is read once for all pieces: the first byte
    // of (2^22, 4) uint8 4.32 -> 3.62 us.
    {"narrow_split", CanRunNarrowSplit, PrefersNarrowSplit, LaunchNarrowSplit},
    // Tiles come before vectors, which can run most of the same calls. 480 pieces of 24 bytes 81 ->
    // 18 us, RGB planes 28.7 -> 25.9.
    {"tiles", CanRunTiles, PrefersTiles, LaunchTiles},
    // Accesses reach memory in address order: 64 + 192 channels of f32 131.8 -> 127.8 us.
    {"vectors", CanRunVectors, Always<Call>, LaunchVectors},
    // Items are gathered into vectors, and neighbouring items come from the L1 cache.
    {"join", CanRunJoin, PrefersJoin, LaunchJoin},
    // The reason is that of join.
    {"split", CanRunSplit, PrefersSplit, LaunchSplit},
    // A thread finds its sources once and loops over rows: 64 arrays 90 -> 40 us.
    {"rows", CanRunRows, PrefersRows, LaunchRows},
    {"general", CanRunGeneral, Always<Call>, LaunchGroups},
};
const jaxops::cuda::Table<Call> kMove("concatenate", "move", kFamilies);

int64_t FindUnit(const Job& job) {
  uint64_t all = kVectorBytes;
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
