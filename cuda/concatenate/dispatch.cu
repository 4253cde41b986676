// Concatenation and splitting: bytes move from sources to destinations, see common/concatenate.h.
//
// The table of pieces travels with the launch, as a parameter of the kernel, so that any number of
// arrays is one launch and a CUDA graph can keep it. There are five ways, the last two for all that
// the others leave:
//
// Small arrays (MoveAlike, JoinWords, MoveRuns): words as large as all sizes and addresses are
// multiples of, by the shortest way from the launch to the store.
//
// Narrow pieces of bytes and of pairs of them, or very many, and words that are split
// (tiles.cu): gathered in shared memory.
//
// Few arrays, or few long stretches of any (vectors.cu): a thread 16 bytes, at the speed
// of a copy; and equal pieces of packs, or of little, and narrow rows that are read whole.
//
// Many rows (MoveRows): what a word is made of is the same in every row, or for items of 1 or 2
// bytes in every 4 or 2 rows, which are whole words of every source. A thread works it out once, as
// the source words and where their bytes go, and keeps it in registers while it walks down the
// rows. No word is searched for, none costs a division.
//
// Few rows (MoveLong): threads find the piece of each 16 bytes and shift them into place where
// source and destination are misaligned to each other.
#include <algorithm>

#include "cuda/common/numeric.cuh"
#include "cuda/concatenate/families.h"
#include "cuda/concatenate/launch.h"
#include "cuda/concatenate/vectors.cuh"

namespace jaxops::concatenate::cuda {
namespace {

// Up to so many words, the launch and the first access cost more than all the rest.
constexpr int64_t kSmallWords = int64_t{1} << 16;
constexpr int64_t kSmallJoinedWords = 2 * kSmallWords;

// The greatest of 16, 8, 4, 2 and 1 bytes that every size and address is a multiple of.
int64_t CommonUnit(const Job& job) {
  uint64_t all = kPackBytes;
  for (const Destination& d : job.destinations) {
    all |= reinterpret_cast<uintptr_t>(d.data) | d.row_bytes;
  }
  for (const Piece& p : job.pieces) all |= p.extent;
  for (const Piece& p : job.pieces) {
    if (p.size > 0) all |= reinterpret_cast<uintptr_t>(p.source) | p.stride | p.size;
  }
  return static_cast<int64_t>(all & -all);
}

// Whether there is little to move, and MoveAlike, JoinWords or MoveRuns can do it.
bool IsSmall(const Job& job, int64_t unit) {
  int64_t words = 0, reach = 0;
  for (const Destination& d : job.destinations) words += job.rows * d.row_bytes / unit;
  for (const Piece& p : job.pieces) reach = std::max(reach, job.rows * p.stride / unit);
  if (job.broadcasts || words > kSmallJoinedWords || reach > UINT32_MAX) return false;
  if (AreAlike(job, unit) || JoinsTwo(job)) return true;
  // Pieces of very different sizes leave many blocks with nothing to do.
  return (job.destinations.size() == 1 || words <= kSmallWords) && HasFewRuns(job, unit);
}

cudaError_t LaunchSmall(cudaStream_t stream, const Job& job, int64_t unit) {
  if (AreAlike(job, unit)) return LaunchAlike(stream, job, unit);
  if (JoinsTwo(job)) return LaunchJoinTwo(stream, job, unit);
  return LaunchRuns(stream, job, unit);
}

bool MovesAsPacks(const Job& job, int64_t unit) {
  const bool one = job.destinations.size() == 1;
  for (const Destination& d : job.destinations) {
    if (!one && d.piece_count != 1) return false;
    // Counts of items have 32 bits, and rounds may reach beyond the last one.
    if (reinterpret_cast<uintptr_t>(d.data) % kPackBytes != 0 ||
        job.rows * d.row_bytes / unit > kMostItems) {
      return false;
    }
  }
  for (const Piece& p : job.pieces) {
    // Nothing is multiplied by them where there is one row.
    if (job.rows > 1 && std::max(p.stride, p.extent) > UINT32_MAX) return false;
  }
  if (job.broadcasts) return false;
  if (IsWhole(job, unit)) return true;
  if (!one) return job.destinations.size() <= (unit == 1 ? kManyCuts : kMaxDestinations);
  if (job.pieces.size() == 1) return true;
  return JoinsFew(job, unit);
}

cudaError_t LaunchPacks(cudaStream_t stream, const Job& job, int64_t unit) {
  if (IsWhole(job, unit)) return LaunchWhole(stream, job);
  return job.destinations.size() == 1 && job.pieces.size() > 1 ? LaunchJoin(stream, job, unit)
                                                               : LaunchCut(stream, job, unit);
}

// Moves to as many destinations in a launch as a table has place for, where they have a piece each.
cudaError_t LaunchParts(cudaStream_t stream, const Job& job) {
  Job part = job;
  for (size_t first = 0; first < job.destinations.size(); first += kTableDestinations) {
    const size_t count = std::min<size_t>(kTableDestinations, job.destinations.size() - first);
    part.destinations.clear();
    part.pieces.clear();
    for (size_t i = first; i < first + count; ++i) {
      const Destination& destination = job.destinations[i];
      if (destination.piece_count != 1) return cudaErrorInvalidValue;
      part.pieces.push_back(job.pieces[destination.first_piece]);
      part.destinations.push_back(destination);
      part.destinations.back().first_piece = static_cast<int64_t>(i - first);
    }
    const cudaError_t error = LaunchMove(stream, part);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t LaunchMove(cudaStream_t stream, const Job& job) {
  const auto destinations = static_cast<int64_t>(job.destinations.size());
  int64_t row_bytes = 0;
  for (const Destination& d : job.destinations) row_bytes += d.row_bytes;
  if (job.rows == 0 || row_bytes == 0) return cudaSuccess;
  const int64_t unit = CommonUnit(job);
  if (IsSmall(job, unit)) return LaunchSmall(stream, job, unit);
  if (MovesAsStretches(job, unit)) return LaunchStretches(stream, job, unit);
  if (MovesAsEqual(job, unit)) return LaunchEqual(stream, job, unit);
  if (MovesAsNarrow(job, unit)) return LaunchNarrow(stream, job, unit);
  // Tiles first: packs can do most of what they can.
  if (MovesAsTiles(job, unit)) return LaunchTiles(stream, job, unit);
  if (MovesAsPacks(job, unit)) return LaunchPacks(stream, job, unit);
  if (destinations > kTableDestinations) return LaunchParts(stream, job);
  return HasManyRows(job, unit) ? LaunchRows(stream, job, unit) : LaunchLong(stream, job, unit);
}

}  // namespace jaxops::concatenate::cuda
