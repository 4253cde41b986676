// This header declares the kernel families of concatenation and splitting: the calls that each
// family can run, and its launcher. dispatch.cc alone chooses between them.
#ifndef JAXOPS_CUDA_CONCATENATE_FAMILIES_H_
#define JAXOPS_CUDA_CONCATENATE_FAMILIES_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/concatenate.h"
#include "cuda/common/device.h"

namespace jaxops::concatenate::cuda {

using jaxops::cuda::Device;

// Up to this number of vectors, 32 bits hold the counts.
inline constexpr int64_t kMaxItems = int64_t{1} << 30;

// One launch of `rows` or `general` has parameters for this number of destinations.
inline constexpr int64_t kTableDestinations = 200;

// SmallSegmentsPlan says how small_segments cuts a call into blocks.
struct SmallSegmentsPlan {
  int segments = 0;  // pieces and ranges of zeros in one row of all destinations
  dim3 threads, grid;

  int64_t blocks() const { return int64_t{grid.x} * grid.y * grid.z; }
};

// TilesPlan says how tiles cuts a call into blocks, and lays out shared memory.
struct TilesPlan {
  const void* whole;  // the source of all pieces if `splits`, else their destination
  bool splits;
  bool equal;         // all pieces have the same number of bytes
  int64_t item;       // bytes: 1, 2 or 4
  int64_t count;      // pieces that are not empty
  int64_t row_bytes;  // of `whole`
  int64_t filled;     // bytes of these that pieces have
  int64_t size;       // bytes of a row of the first piece
  // A tile and a pattern each have a power of two of rows.
  int64_t rows, pattern_rows;
  bool has_few_patterns;
  // A tile has `tile_pieces` of the pieces, and `part_bytes` of a row including zeros.
  bool parted;
  int64_t tile_pieces, more_pieces, part_bytes;
  uint32_t stride;  // bytes in shared memory between rows of a split, or between pieces of a join
  bool by_words;    // fetches move 4 bytes instead of 16
  int64_t fetched;  // bytes of shared memory
  int threads;
  int64_t tiles, parts;  // number of blocks, without those of the rows after the last tile
};

struct Call {
  const Job& job;
  int64_t unit;  // the greatest of 16, 8, 4, 2 and 1 bytes that divides all sizes and addresses
  int64_t row_bytes;  // of all destinations
  // CanRun… fills in the plans, for Prefers… and the launcher.
  mutable SmallSegmentsPlan small_segments;
  mutable TilesPlan tiles;

  explicit Call(const Job& job);

  bool joins() const { return job.destinations.size() == 1; }
  int64_t piece_count() const { return static_cast<int64_t>(job.pieces.size()); }
  int64_t destination_count() const { return static_cast<int64_t>(job.destinations.size()); }
  int64_t items() const { return job.rows * row_bytes / unit; }
};

// The family runs two to four equal pieces of the rows of one array, of at most 2^16 items each.
bool CanRunSmallEqual(const Call& call, const Device& device);
cudaError_t LaunchSmallEqual(cudaStream_t stream, const Call& call, const Device& device);

// The family runs joins of two pieces with contiguous rows, followed by zeros.
bool CanRunSmallJoin(const Call& call, const Device& device);
cudaError_t LaunchSmallJoin(cudaStream_t stream, const Call& call, const Device& device);

// The family runs at most 16 segments in a row of all destinations.
bool CanRunSmallSegments(const Call& call, const Device& device);
cudaError_t LaunchSmallSegments(cudaStream_t stream, const Call& call, const Device& device);

// The family runs at most 480 segments in all rows of all destinations.
int64_t CountRowSegments(const Call& call);
bool CanRunSegments(const Call& call, const Device& device);
cudaError_t LaunchSegments(cudaStream_t stream, const Call& call, const Device& device);

// The family runs equal pieces of the rows of one array, each of the whole row of its own array.
bool CanRunEqual(const Call& call, const Device& device);
cudaError_t LaunchEqual(cudaStream_t stream, const Call& call, const Device& device);
// EqualSegmentBytes returns the bytes of the smallest segments that one warp, or a part of it,
// writes in rows of vectors.
int64_t EqualSegmentBytes(const Call& call);

// The family runs at most four pieces of neighbouring bytes of rows of 4, 8, 16 or 32 bytes.
bool CanRunNarrowSplit(const Call& call, const Device& device);
cudaError_t LaunchNarrowSplit(cudaStream_t stream, const Call& call, const Device& device);

// The family runs pieces of the rows of one array, each of whole rows of its own array.
bool CanRunTiles(const Call& call, const Device& device);
cudaError_t LaunchTiles(cudaStream_t stream, const Call& call, const Device& device);

// The family runs whole vectors of one array, in at most 16 pieces or in equal pieces.
bool HasWholeVectors(const Call& call);
bool CanRunVectors(const Call& call, const Device& device);
cudaError_t LaunchVectors(cudaStream_t stream, const Call& call, const Device& device);

// The family runs one destination of at most four pieces followed by zeros, and of two if items are
// smaller than 4 bytes.
bool CanRunJoin(const Call& call, const Device& device);
cudaError_t LaunchJoin(cudaStream_t stream, const Call& call, const Device& device);

// The family runs destinations of one piece each.
bool CanRunSplit(const Call& call, const Device& device);
cudaError_t LaunchSplit(cudaStream_t stream, const Call& call, const Device& device);

// After this number of rows, vectors of 4 bytes or more begin at the beginning of a row again.
inline int64_t PatternRows(int64_t unit) { return unit < 4 ? 4 / unit : 1; }

// The family runs rows that are enough for a pattern, aligned to 4 bytes.
bool CanRunRows(const Call& call, const Device& device);
cudaError_t LaunchRows(cudaStream_t stream, const Call& call, const Device& device);

// The family runs any call of at most kTableDestinations.
cudaError_t LaunchGeneral(cudaStream_t stream, const Call& call, const Device& device);

}  // namespace jaxops::concatenate::cuda

#endif  // JAXOPS_CUDA_CONCATENATE_FAMILIES_H_
