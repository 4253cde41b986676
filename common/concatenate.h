// Concatenation and splitting, both described as one job: rows of bytes composed of segments of
// other rows.
//
// An array is treated as (rows, row): rows are the dimensions before the axis, and a row is
// everything from the axis on. A concatenation composes one destination from many sources, a split
// many from one; padding is bytes of a segment that no source fills.
#ifndef JAXOPS_COMMON_CONCATENATE_H_
#define JAXOPS_COMMON_CONCATENATE_H_

#include <cstdint>
#include <vector>

namespace jaxops::concatenate {

// More alternations of batched and broadcast dimensions than nested vmaps produce in practice.
inline constexpr int kMaxRowDims = 8;

// One call on CUDA devices has at most this number of pieces of one destination, or of destinations
// of one piece each; more are several calls, for which lowering asks by `ffi/limits.h`.
inline constexpr int64_t kMaxPieces = 480;
inline constexpr int64_t kMaxDestinations = 480;

// A segment of every row of a destination: `size` bytes of a source, then zeros up to `extent`.
struct Piece {
  const void* source;   // address of the segment in row 0; arbitrary if size is 0
  const void* end;      // of the array that contains the source
  int64_t stride;       // bytes between neighbouring rows of the source
  int64_t size;         // bytes
  int64_t extent;       // bytes
  uint32_t varies = 0;  // bit d: the source has an entry for each of row dimension d, not only one
};

// An array whose rows are made of pieces[first_piece], ... in order.
struct Destination {
  void* data;
  int64_t row_bytes;
  int64_t first_piece;
  int64_t piece_count;
};

struct Job {
  // The rows of every destination, as dimensions that some sources may not vary along.
  int row_dims = 0;
  int64_t row_sizes[kMaxRowDims];
  int64_t rows = 1;         // their product
  bool broadcasts = false;  // some segment does not vary along some dimension
  std::vector<Destination> destinations;
  std::vector<Piece> pieces;
};

}  // namespace jaxops::concatenate

#endif  // JAXOPS_COMMON_CONCATENATE_H_
