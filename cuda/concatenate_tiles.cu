// Concatenation and splitting of narrow pieces: so many rows that they are whole packs of every
// array are brought to shared memory, and gathered there.
//
// Which bytes a word is made of is the same a number of rows further on, in a pattern, but for a
// step. A thread works it out once, and walks down the patterns of the tile. A block has one tile:
// blocks that stay for several and fetch the next one meanwhile have more of each array under way,
// and were slower by up to a tenth.
#include <cuda_pipeline_primitives.h>

#include <algorithm>

#include "common/fast_divide.h"
#include "cuda/concatenate.h"
#include "cuda/concatenate_launches.h"
#include "cuda/launch.h"
#include "cuda/numeric.cuh"

namespace jaxops::concatenate::cuda {
namespace {

using jaxops::cuda::kPackBytes;
using jaxops::cuda::kWarp;
using jaxops::cuda::Launch;

constexpr int kThreads = 128;
// For tiles that are large because rows of many pieces are long.
constexpr int kManyThreads = 512;
constexpr int64_t kSmallTileBytes = 4096;
constexpr int64_t kTileBytes = 8192;
constexpr int64_t kLargeTileBytes = 2 * kTileBytes;
constexpr int64_t kMostTileBytes = 65536 - 4 * kPackBytes;
constexpr int kFewPieces = 4;
constexpr int kWordBytes = 4;
constexpr int kFewTiles = 256;
constexpr int kTogether = 4;  // words of a thread
constexpr uint32_t kNowhere = UINT32_MAX;

struct TilePiece {
  unsigned char* data;
  uint32_t begin;  // in a row of the whole
  uint32_t size;
};

// Pieces of the rows of one array, which is the destination of all or the source of all.
template <int kPieces>
struct Tiles {
  TilePiece pieces[kPieces];  // what is not there of few begins at kNowhere
  int count;
  bool equal;
  unsigned char* whole;
  uint32_t row_bytes;
  uint32_t filled;  // bytes of a row that are of pieces
  // Of a tile, and of a pattern: powers of two.
  uint32_t rows, log_rows;
  uint32_t pattern_rows, log_pattern_rows;
  FastDivider by_row;
  FastDivider by_size;  // of the first piece
  int64_t tiles;
  int64_t all_rows;
};

// The pieces, where threads may read different ones at once: few of them are compared one by one,
// more are in shared memory. The kernel's constants hand out one address of a warp at a time, so a
// warp copies one piece after the other.
template <int kBlockThreads, int kPieces>
class PieceFinder {
 public:
  static constexpr bool kCopies = kPieces > kFewPieces;

  __device__ __forceinline__ PieceFinder(const Tiles<kPieces>& tiles, unsigned char* shared)
      : table_(tiles), copied_(reinterpret_cast<TilePiece*>(shared)) {
    if constexpr (kCopies) {
      for (int i = threadIdx.x / kWarp; i < table_.count; i += kBlockThreads / kWarp) {
        const TilePiece piece = table_.pieces[i];
        if (threadIdx.x % kWarp == 0) copied_[i] = piece;
      }
      __syncthreads();
    }
  }

  static size_t SharedBytes(const Tiles<kPieces>& tiles) {
    return kCopies ? tiles.count * sizeof(TilePiece) : 0;
  }

  // The piece that has byte `column` of the rows of the whole.
  __device__ __forceinline__ TilePiece Find(uint32_t column) const {
    if constexpr (kCopies) {
      if (table_.equal) return copied_[table_.by_size.Quotient(column)];
      int low = 0;
      for (int width = table_.count; width > 1;) {
        const int half = width / 2;
        if (copied_[low + half].begin <= column) low += half;
        width -= half;
      }
      return copied_[low];
    } else {
      TilePiece piece = table_.pieces[0];
#pragma unroll
      for (int i = 1; i < kPieces; ++i) {
        if (table_.pieces[i].begin <= column) piece = table_.pieces[i];
      }
      return piece;
    }
  }

 private:
  const Tiles<kPieces>& table_;
  TilePiece* copied_;
};

template <typename Item, bool kSplits, int kBlockThreads, int kPieces>
__global__ void __launch_bounds__(kBlockThreads)
    MoveTiles(const __grid_constant__ Tiles<kPieces> table) {
  constexpr int kItems = kWordBytes / sizeof(Item);
  extern __shared__ __align__(16) unsigned char shared[];
  // In a tile, as in a pattern, all rows of a piece are before those of the next.
  const uint32_t fetched = table.rows * (kSplits ? table.row_bytes : table.filled);
  const uint32_t zeros = fetched;  // where a word of them is
  const PieceFinder<kBlockThreads, kPieces> finder(table, shared + fetched + kPackBytes);
  const int64_t first_row = int64_t{blockIdx.x} * table.rows;
  unsigned char* whole = table.whole + first_row * table.row_bytes;

  if (blockIdx.x == table.tiles) {
    // The rows after the last tile, item by item.
    const auto rest = static_cast<uint32_t>(table.all_rows - first_row) * table.row_bytes;
    for (uint32_t at = threadIdx.x * sizeof(Item); at < rest; at += kBlockThreads * sizeof(Item)) {
      uint32_t row = at;
      const uint32_t column = table.by_row.Peel(row);
      auto* of_whole = reinterpret_cast<Item*>(whole + at);
      if (column >= table.filled) {
        if constexpr (!kSplits) *of_whole = 0;
        continue;
      }
      const TilePiece piece = finder.Find(column);
      auto* of_piece = reinterpret_cast<Item*>(piece.data + (first_row + row) * piece.size +
                                               column - piece.begin);
      if constexpr (kSplits) {
        *of_piece = *of_whole;
      } else {
        *of_whole = *of_piece;
      }
    }
    return;
  }

  for (uint32_t at = threadIdx.x * kPackBytes; at < fetched; at += kBlockThreads * kPackBytes) {
    const unsigned char* from = whole + at;
    if constexpr (!kSplits) {
      const TilePiece piece = finder.Find(at >> table.log_rows);
      from = piece.data + first_row * piece.size + (at - table.rows * piece.begin);
    }
    __pipeline_memcpy_async(shared + at, from, kPackBytes);
  }
  __pipeline_commit();
  if (threadIdx.x == 0) *reinterpret_cast<uint32_t*>(shared + zeros) = 0;
  __pipeline_wait_prior(0);
  __syncthreads();

  const uint32_t patterns = table.rows >> table.log_pattern_rows;
  const uint32_t pattern_bytes = table.pattern_rows * (kSplits ? table.filled : table.row_bytes);
  for (uint32_t at = threadIdx.x * kWordBytes; at < pattern_bytes;
       at += kBlockThreads * kWordBytes) {
    uint32_t offsets[kItems], steps[kItems];
    unsigned char* to = whole + at;
    uint32_t advance = pattern_bytes;
    if constexpr (kSplits) {
      const TilePiece piece = finder.Find(at >> table.log_pattern_rows);
      const uint32_t inside = at - piece.begin * table.pattern_rows;
      to = piece.data + first_row * piece.size + inside;
      advance = table.pattern_rows * piece.size;
      uint32_t row = table.equal ? table.by_size.Quotient(inside) : inside / piece.size;
      uint32_t column = inside - row * piece.size;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        offsets[i] = row * table.row_bytes + piece.begin + column;
        steps[i] = table.pattern_rows * table.row_bytes;
        column += sizeof(Item);
        if (column == piece.size) column = 0, ++row;
      }
    } else {
      uint32_t row = at;
      uint32_t column = table.by_row.Peel(row);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        offsets[i] = zeros;
        steps[i] = 0;
        if (column < table.filled) {
          const TilePiece piece = finder.Find(column);
          offsets[i] = piece.begin * table.rows + row * piece.size + column - piece.begin;
          steps[i] = table.pattern_rows * piece.size;
        }
        column += sizeof(Item);
        if (column == table.row_bytes) column = 0, ++row;
      }
    }
    for (uint32_t pattern = 0; pattern < patterns; pattern += kTogether) {
      uint32_t words[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        uint32_t items[kItems];
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          items[i] = *reinterpret_cast<const Item*>(shared + offsets[i]);
          offsets[i] += steps[i];
        }
        if constexpr (kItems == 1) {
          words[j] = items[0];
        } else if constexpr (kItems == 2) {
          words[j] = __byte_perm(items[0], items[1], 0x5410);
        } else {
          words[j] = __byte_perm(__byte_perm(items[0], items[1], 0x0040),
                                 __byte_perm(items[2], items[3], 0x0040), 0x5410);
        }
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j, to += advance) {
        *reinterpret_cast<uint32_t*>(to) = words[j];
      }
    }
  }
}

bool IsAligned(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

uint32_t Log(int64_t power) {
  uint32_t log = 0;
  while (int64_t{1} << log < power) ++log;
  return log;
}

// Whether one array is cut, if only to leave the rest of its rows out.
bool Splits(const Job& job) {
  return job.destinations.size() > 1 ||
         (job.pieces.size() == 1 && job.pieces[0].stride != job.pieces[0].size);
}

// Fills in what does not depend on the items. False where the arrays are not made of whole rows, or
// there are too few of them.
template <int kPieces>
bool Plan(Tiles<kPieces>& table, const Job& job, int64_t unit) {
  const bool splits = Splits(job);
  const Piece& first = job.pieces[0];
  if (job.broadcasts) return false;
  const void* whole = splits ? first.source : job.destinations[0].data;
  const int64_t row_bytes = splits ? first.stride : job.destinations[0].row_bytes;
  table.whole = static_cast<unsigned char*>(const_cast<void*>(whole));
  if (!IsAligned(whole, kPackBytes) || row_bytes > kMostTileBytes) return false;
  // Whole rows are read, which may begin with what other launches cut.
  if (splits && table.whole + job.rows * row_bytes > first.end) return false;

  std::fill_n(table.pieces, kPieces, TilePiece{nullptr, kNowhere, 0});
  table.count = 0;
  table.equal = true;
  int64_t filled = 0;
  bool ended = false;
  for (const Destination& destination : job.destinations) {
    if (splits && destination.piece_count != 1) return false;
    for (int64_t p = 0; p < destination.piece_count; ++p) {
      const Piece& piece = job.pieces[destination.first_piece + p];
      if (piece.extent == 0) continue;
      if (!splits && piece.size == 0) {
        ended = true;
        continue;
      }
      const auto* part =
          static_cast<const unsigned char*>(splits ? destination.data : piece.source);
      // Parts of a row follow each other, and rows too.
      const bool follows = splits
                               ? piece.stride == row_bytes && piece.source == table.whole + filled
                               : piece.stride == piece.size;
      if (ended || table.count == kPieces || piece.size != piece.extent || !follows ||
          !IsAligned(part, kPackBytes)) {
        return false;
      }
      table.equal = table.equal && piece.size == first.size;
      table.pieces[table.count++] = {const_cast<unsigned char*>(part),
                                     static_cast<uint32_t>(filled),
                                     static_cast<uint32_t>(piece.size)};
      filled += piece.size;
    }
  }
  // Little is read for nothing.
  if (table.count == 0 || 2 * filled < row_bytes) return false;

  // Rows that are whole packs of every array.
  int64_t rows = kPackBytes / unit;
  const bool few = table.count <= kFewPieces;
  if (row_bytes > (few ? kLargeTileBytes : kMostTileBytes) / rows) return false;
  // Of more pieces it takes a thread longer to find its place, and it has more patterns for it.
  const int64_t most = !few                            ? kLargeTileBytes
                       : table.count <= 2 && unit == 2 ? kSmallTileBytes
                                                       : kTileBytes;
  while (2 * rows * row_bytes <= most) rows *= 2;
  if (job.rows / rows < kFewTiles) return false;
  // Threads have a word of the pattern each, if they can, and several patterns.
  int64_t pattern_rows = kWordBytes / unit;
  while (2 * kTogether * pattern_rows <= rows && row_bytes * pattern_rows < kThreads * kWordBytes) {
    pattern_rows *= 2;
  }
  table.row_bytes = static_cast<uint32_t>(row_bytes);
  table.filled = static_cast<uint32_t>(filled);
  table.rows = static_cast<uint32_t>(rows);
  table.log_rows = Log(rows);
  table.pattern_rows = static_cast<uint32_t>(pattern_rows);
  table.log_pattern_rows = Log(pattern_rows);
  table.by_row = FastDivider(row_bytes);
  table.by_size = FastDivider(table.pieces[0].size);
  table.tiles = job.rows / rows;
  table.all_rows = job.rows;
  return true;
}

template <typename Item, bool kSplits, int kBlockThreads, int kPieces>
cudaError_t LaunchBlocks(cudaStream_t stream, const Tiles<kPieces>& table) {
  const size_t bytes = table.rows * (kSplits ? table.row_bytes : table.filled) + kPackBytes +
                       PieceFinder<kBlockThreads, kPieces>::SharedBytes(table);
  return Launch(MoveTiles<Item, kSplits, kBlockThreads, kPieces>,
                table.tiles + (table.all_rows > table.tiles * table.rows), kBlockThreads, bytes,
                stream, table);
}

template <int kBlockThreads, bool kSplits, int kPieces>
cudaError_t LaunchUnit(cudaStream_t stream, const Tiles<kPieces>& table, int64_t unit) {
  switch (unit) {
    case 4:
      return LaunchBlocks<uint32_t, kSplits, kBlockThreads>(stream, table);
    case 2:
      return LaunchBlocks<uint16_t, kSplits, kBlockThreads>(stream, table);
    default:
      return LaunchBlocks<uint8_t, kSplits, kBlockThreads>(stream, table);
  }
}

template <int kPieces>
cudaError_t LaunchTable(cudaStream_t stream, const Tiles<kPieces>& table, int64_t unit,
                        bool splits) {
  if constexpr (kPieces <= kFewPieces) {
    return splits ? LaunchUnit<kThreads, true>(stream, table, unit)
                  : LaunchUnit<kThreads, false>(stream, table, unit);
  } else if (table.rows * table.row_bytes <= kLargeTileBytes) {
    return splits ? LaunchUnit<2 * kThreads, true>(stream, table, unit)
                  : LaunchUnit<2 * kThreads, false>(stream, table, unit);
  } else {
    return splits ? LaunchUnit<kManyThreads, true>(stream, table, unit)
                  : LaunchUnit<kManyThreads, false>(stream, table, unit);
  }
}

}  // namespace

bool MovesAsTiles(const Job& job, int64_t unit) {
  // Few pieces of whole words are as fast without, and what is cut of many goes to memory in bits.
  const bool words = unit == kWordBytes && job.pieces.size() > kFewPieces && !Splits(job);
  Tiles<kMaxPieces> table;
  return (unit < kWordBytes || words) && Plan(table, job, unit);
}

cudaError_t LaunchTiles(cudaStream_t stream, const Job& job, int64_t unit) {
  Tiles<kFewPieces> few;
  if (Plan(few, job, unit)) return LaunchTable(stream, few, unit, Splits(job));
  Tiles<kMaxPieces> many;
  if (!Plan(many, job, unit)) return cudaErrorInvalidValue;
  return LaunchTable(stream, many, unit, Splits(job));
}

}  // namespace jaxops::concatenate::cuda
