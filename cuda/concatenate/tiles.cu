// This kernel concatenates and splits narrow pieces: a block fetches enough rows to shared memory
// that they are whole vectors of every array, and gathers items there. If pieces are many and
// equal, a tile has only some of them but more rows, so that the segment of each piece is long.
//
// The sources of a word repeat after a number of rows, in a pattern, except for a constant step. A
// thread computes them once as a WordMap, while the copies are in flight, and loops over the
// patterns of the tile, which pays only over several patterns. The strides in shared memory
// minimize the bank conflicts of the reads. Warps and blocks write whole sectors of global memory
// if rows allow it: sectors of two writers cost up to a tenth. A block has one tile: persistent
// blocks that prefetch the next tile have more of each array in flight, and were slower by up to a
// tenth. Bulk copies of the pieces, and tiles whose bytes are put in order in shared memory before
// the stores, were slower by as much.
// put in order in shared memory before they are written.
#include <cuda_pipeline_primitives.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <type_traits>

#include "common/fast_divide.h"
#include "cuda/common/launch.h"
#include "cuda/common/numeric.cuh"
#include "cuda/concatenate/families.h"
#include "cuda/concatenate/launch.h"

namespace jaxops::concatenate::cuda {
namespace {

using jaxops::cuda::CeilDiv;
using jaxops::cuda::kVectorBytes;
using jaxops::cuda::kWarp;
using jaxops::cuda::Launch;

constexpr int kFewThreads = 256;
constexpr int kManyThreads = 512;
constexpr int64_t kFewTileBytes = 16 * 1024;
// The first bounds a tile of whole rows of many pieces, the second a tile of parts of rows, and the
// third is the length of one piece in a part; splits have their own second and third numbers.
constexpr int64_t kRowsBytes = 24 * 1024;
constexpr int64_t kPartsBytes = 16 * 1024;
constexpr int64_t kRunBytes = 384;
constexpr int64_t kSplitPartsBytes = 12 * 1024;
constexpr int64_t kSplitRunBytes = 256;
constexpr int64_t kMaxTileBytes = 64 * 1024;
constexpr int64_t kMaxRowBytes = int64_t{1} << 24;
constexpr int64_t kSectorBytes = 32;  // of global memory
constexpr int kFewPieces = 4;
constexpr int kWordBytes = 4;
constexpr int kManyTiles = 256;  // over all multiprocessors
constexpr int kTogether = 4;     // words per thread
constexpr int kBankBytes = 128;
constexpr int64_t kMaxPatternBytes = 4096;  // of joins
// The padding separates pieces that would be in the same banks.
constexpr int64_t kFewPadding = 32;
// Fetches of single 4-byte words pay if they save this number of loads per vector, or per word of a
// join.
constexpr int64_t kLoadsOfSplit = 8;
constexpr int64_t kLoadsOfJoin = 4;
constexpr int64_t kNarrowBytes = 6;
constexpr int64_t kWideBytes = 64;
constexpr uint32_t kNowhere = UINT32_MAX;

struct alignas(16) TilePiece {
  unsigned char* data;
  uint32_t begin;  // in a row of the whole array
  uint16_t size;
  uint16_t shared;  // for joins: index of the 4-byte word where the piece's rows begin
};

// Tiles describes pieces of the rows of one array, which is the destination of all or the source of
// all. If pieces are many and equal, a tile has at most `tile_pieces` of them, so that the tile has
// more rows.
template <int kPieces>
struct Tiles {
  TilePiece pieces[kPieces];
  uint32_t begins[kFewPieces];  // if pieces are few; missing pieces begin at kNowhere
  uint32_t count;
  bool equal;
  unsigned char* whole;
  uint32_t row_bytes;
  uint32_t filled;  // bytes of a row that pieces have
  // A tile and a pattern each have a power of two of rows.
  uint32_t rows, log_rows;
  uint32_t pattern_rows, log_pattern_rows;
  // A row may be cut into parts of `tile_pieces` pieces each.
  uint32_t tile_pieces;
  bool parted;
  FastDivider parts;
  // The bytes include zeros. In joins of parts they are the bytes of threads, some of which have no
  // word.
  FastDivider part_bytes;
  // Parts of joins need this number of further pieces to end at sectors; none if they end with a
  // piece.
  uint32_t more_pieces;
  // The stride in shared memory is between rows of a split, or between pieces of a join, and keeps
  // these in different banks.
  uint32_t stride;
  FastDivider row_vectors;  // for splits of parts
  FastDivider run_vectors;  // vectors or words of a piece in a tile, for joins of equal pieces
  // Fetches move 4 bytes instead of 16: the layout of a split is then skewed, and the stride of a
  // join is any number of words.
  bool by_words;
  uint32_t fetched;  // bytes of shared memory
  int threads;
  FastDivider by_row;
  FastDivider by_size;  // bytes of the first piece
  int64_t tiles;
  int64_t all_rows;
};

// PieceFinder finds the pieces of a tile if threads may need different ones at once. The constant
// cache serves one address of a warp at a time, so PieceFinder reads the parameters as generic
// memory. Many pieces are copied to shared memory before use.
template <int kPieces>
class PieceFinder {
 public:
  static constexpr bool kCopies = kPieces > kFewPieces;

  __device__ __forceinline__ unsigned char* data(uint32_t number) const {
    return copied_[number].data;
  }

  // A barrier must follow if kCopies.
  __device__ __forceinline__ PieceFinder(const Tiles<kPieces>& tiles, unsigned char* shared,
                                         uint32_t first, uint32_t count)
      : table_(tiles), copied_(reinterpret_cast<TilePiece*>(shared)), count_(count) {
    if constexpr (kCopies) {
      for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) copied_[i] = Read(first + i);
    }
  }

  // Find returns the piece with byte `column` of the tile's part of the rows of the whole array.
  __device__ __forceinline__ TilePiece Find(uint32_t column) const {
    if constexpr (!kCopies) {
      uint32_t found = 0;
#pragma unroll
      for (int i = 1; i < kPieces; ++i) found += table_.begins[i] <= column;
      return Read(found);
    } else {
      if (table_.equal) return copied_[table_.by_size.Quotient(column)];
      uint32_t low = 0;
      for (uint32_t width = count_; width > 1;) {
        const uint32_t half = width / 2;
        if (copied_[low + half].begin <= column) low += half;
        width -= half;
      }
      return copied_[low];
    }
  }

 private:
  __device__ __forceinline__ TilePiece Read(uint32_t number) const {
    uint4 words;
    asm("ld.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
        : "l"(&table_.pieces[number]));
    TilePiece piece;
    memcpy(&piece, &words, sizeof(piece));
    return piece;
  }

  const Tiles<kPieces>& table_;
  TilePiece* copied_;
  uint32_t count_;
};

// Skew returns the position of a byte in shared memory with one word of padding after every line of
// banks, which puts rows of powers of two of bytes in different banks.
JAXOPS_HOST_DEVICE inline uint32_t Skew(uint32_t at) { return at + at / kBankBytes * kWordBytes; }

// PairLoop iterates over pairs of numbers, the inner below a divisor, for the threads of a block,
// without a division for each pair.
struct PairLoop {
  uint32_t outer = threadIdx.x;
  uint32_t inner, outer_step = blockDim.x, inner_step, count;

  __device__ __forceinline__ explicit PairLoop(const FastDivider& by)
      : inner(by.DivMod(outer)), inner_step(by.DivMod(outer_step)), count(by.divisor()) {}

  __device__ __forceinline__ void Advance() {
    outer += outer_step;
    inner += inner_step;
    if (inner >= count) inner -= count, ++outer;
  }
};

// A tile has some rows, and of these the pieces from `column` on with `bytes` bytes, of which `own`
// belong to the part.
struct Tile {
  int64_t row;
  uint32_t column, own, bytes;

  // In joins, Begin and End bound the bytes of a row that the part's threads write.
  template <int kPieces>
  __device__ __forceinline__ uint32_t Begin(uint32_t row, const Tiles<kPieces>& table) const {
    return table.more_pieces == 0 || column == 0 ? 0 : ToSector(row * table.row_bytes + column);
  }
  template <int kPieces>
  __device__ __forceinline__ uint32_t End(uint32_t row, const Tiles<kPieces>& table) const {
    if (table.more_pieces == 0) return own;
    return min(own + ToSector(row * table.row_bytes + column + own), bytes);
  }

 private:
  // ToSector returns the bytes from byte `at` of the tile's rows to the next sector.
  static __device__ __forceinline__ uint32_t ToSector(uint32_t at) {
    return (0 - at) % static_cast<uint32_t>(kSectorBytes);
  }
};

// WordMap holds the positions in shared memory of the items of the word that a thread writes in
// every pattern.
template <typename Item, bool kSplits, int kBytes>
struct WordMap {
  static constexpr int kItems = kBytes / sizeof(Item);
  static constexpr int kSteps = kSplits ? 1 : kItems;

  uint32_t offsets[kItems];
  uint32_t steps[kSteps];
  unsigned char* to;
  int64_t advance;

  // The constructor computes the word at byte `at` of a pattern.
  template <int kPieces>
  __device__ __forceinline__ WordMap(uint32_t at, const Tiles<kPieces>& table,
                                     const PieceFinder<kPieces>& finder, const Tile& tile) {
    if constexpr (kSplits) {
      const TilePiece piece = finder.Find(at >> table.log_pattern_rows);
      const uint32_t begin = piece.begin - tile.column;
      const uint32_t inside = at - begin * table.pattern_rows;
      to = piece.data + tile.row * piece.size + inside;
      advance = table.pattern_rows * piece.size;
      const uint32_t step = table.pattern_rows * table.stride;
      steps[0] = table.by_words ? Skew(step) : step;
      uint32_t row = table.equal ? table.by_size.Quotient(inside) : inside / piece.size;
      uint32_t column = inside - row * piece.size;
      // row_begin returns the begin of the piece's row: parts of rows are fetched by the vectors
      // that contain them.
      const auto row_begin = [&] {
        const uint32_t place =
            table.parted ? (row * table.row_bytes + tile.column) % kVectorBytes : 0;
        return row * table.stride + place + begin;
      };
      uint32_t offset = row_begin() + column;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        offsets[i] = table.by_words ? Skew(offset) : offset;
        column += sizeof(Item);
        offset += sizeof(Item);
        if (column == piece.size) {
          column = 0;
          ++row;
          offset = row_begin();
        }
      }
    } else {
      uint32_t row = at;
      uint32_t column = table.part_bytes.DivMod(row);
      if (table.parted) column += tile.Begin(row, table);
      to = table.whole + (tile.row + row) * table.row_bytes + tile.column + column;
      advance = table.pattern_rows * table.row_bytes;
      if (table.equal) {
        const uint32_t size = table.by_size.divisor();
        uint32_t inside = column;
        uint32_t piece = 0;
        if (size < table.filled) {
          piece = column;
          inside = table.by_size.DivMod(piece);
        }
        uint32_t offset = piece * table.stride + row * size + inside;
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const bool there = column < tile.bytes;
          offsets[i] = there ? offset : table.fetched;
          steps[i] = there ? table.pattern_rows * size : 0;
          column += sizeof(Item);
          offset += sizeof(Item);
          inside += sizeof(Item);
          if (inside == size) {
            inside = 0;
            offset += table.stride - size;
          }
          if (column == table.row_bytes) {
            column = inside = 0;
            ++row;
            offset = row * size;
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          offsets[i] = table.fetched;
          steps[i] = 0;
          if (column < tile.bytes) {
            const TilePiece piece = finder.Find(column);
            offsets[i] = piece.shared * kWordBytes + row * piece.size + column - piece.begin;
            steps[i] = table.pattern_rows * piece.size;
          }
          column += sizeof(Item);
          if (column == table.row_bytes) column = 0, ++row;
        }
      }
    }
  }

  // Next returns four bytes of the next word, from item `first` on.
  __device__ __forceinline__ uint32_t Next(const unsigned char* shared, int first) {
    constexpr int kWordItems = kWordBytes / sizeof(Item);
    uint32_t items[kWordItems];
#pragma unroll
    for (int i = 0; i < kWordItems; ++i) {
      items[i] = *reinterpret_cast<const Item*>(shared + offsets[first + i]);
      offsets[first + i] += steps[(first + i) % kSteps];
    }
    if constexpr (kWordItems == 1) {
      return items[0];
    } else if constexpr (kWordItems == 2) {
      return __byte_perm(items[0], items[1], 0x5410);
    } else {
      return __byte_perm(__byte_perm(items[0], items[1], 0x0040),
                         __byte_perm(items[2], items[3], 0x0040), 0x5410);
    }
  }

  __device__ __forceinline__ void Write(uint32_t patterns, const unsigned char* shared) {
    if constexpr (kBytes == kVectorBytes) {
#pragma unroll 1
      for (uint32_t pattern = 0; pattern < patterns; ++pattern, to += advance) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = Next(shared, i * kItems / 4);
        *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
      }
    } else {
#pragma unroll 1
      for (uint32_t pattern = 0; pattern < patterns; pattern += kTogether) {
        uint32_t words[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) words[i] = Next(shared, 0);
#pragma unroll
        for (int i = 0; i < kTogether; ++i, to += advance) {
          *reinterpret_cast<uint32_t*>(to) = words[i];
        }
      }
    }
  }
};

template <typename Item, bool kSplits, int kBytes, int kMaxThreads, int kPieces>
__global__ void __launch_bounds__(kMaxThreads)
    MoveTiles(const __grid_constant__ Tiles<kPieces> table) {
  extern __shared__ __align__(16) unsigned char shared[];
  // The table of pieces follows the fetched bytes and a word of zeros.
  unsigned char* const copied = shared + table.fetched + kVectorBytes;
  uint32_t tile_row = blockIdx.x;
  uint32_t part = 0;
  if constexpr (kPieces > kFewPieces) part = table.parts.DivMod(tile_row);

  if (tile_row >= table.tiles) {
    // The rows after the last tile move item by item.
    const PieceFinder<kPieces> finder(table, copied, 0, table.count);
    if (finder.kCopies) __syncthreads();
    const int64_t first_row = table.tiles * table.rows;
    const int64_t rest = (table.all_rows - first_row) * table.row_bytes;
    const int64_t block = blockIdx.x - table.tiles * table.parts.divisor();
    const int64_t place = (block * blockDim.x + threadIdx.x) * static_cast<int64_t>(sizeof(Item));
    if (place >= rest) return;
    auto row = static_cast<uint32_t>(place);
    const uint32_t column = table.by_row.DivMod(row);
    auto* of_whole = reinterpret_cast<Item*>(table.whole + first_row * table.row_bytes + place);
    if (column >= table.filled) {
      if constexpr (!kSplits) *of_whole = 0;
      return;
    }
    const TilePiece piece = finder.Find(column);
    auto* of_piece =
        reinterpret_cast<Item*>(piece.data + (first_row + row) * piece.size + column - piece.begin);
    if constexpr (kSplits) {
      *of_piece = *of_whole;
    } else {
      *of_whole = *of_piece;
    }
    return;
  }

  // In a tile, as in a pattern, all rows of a piece come before those of the next piece.
  const uint32_t first_piece = part * table.tile_pieces;
  const uint32_t own = min(table.tile_pieces, table.count - first_piece);
  const uint32_t pieces = min(own + table.more_pieces, table.count - first_piece);
  const uint32_t size = table.by_size.divisor();
  const Tile tile = {int64_t{tile_row} * table.rows, first_piece * size,
                     table.parted ? own * size : table.filled,
                     table.parted ? pieces * size : table.filled};
  const PieceFinder<kPieces> finder(table, copied, first_piece, pieces);
  if (threadIdx.x == 0) *reinterpret_cast<uint32_t*>(shared + table.fetched) = 0;
  if constexpr (kSplits) {
    const unsigned char* whole = table.whole + tile.row * table.row_bytes;
    if (table.parted) {
      for (PairLoop loop(table.row_vectors); loop.outer < table.rows; loop.Advance()) {
        const uint32_t begin = loop.outer * table.row_bytes + tile.column;
        const uint32_t place = loop.inner * kVectorBytes;
        const uint32_t at = begin / kVectorBytes * kVectorBytes + place;
        if (at < begin + tile.bytes) {
          __pipeline_memcpy_async(shared + loop.outer * table.stride + place, whole + at,
                                  kVectorBytes);
        }
      }
    } else if (table.by_words) {
      for (uint32_t at = threadIdx.x * kWordBytes; at < table.rows * table.row_bytes;
           at += blockDim.x * kWordBytes) {
        __pipeline_memcpy_async(shared + Skew(at), whole + at, kWordBytes);
      }
    } else {
      const uint32_t padding = table.stride - table.row_bytes;
      for (uint32_t at = threadIdx.x * kVectorBytes; at < table.rows * table.row_bytes;
           at += blockDim.x * kVectorBytes) {
        const uint32_t skipped = padding == 0 ? 0 : table.by_row.Quotient(at) * padding;
        __pipeline_memcpy_async(shared + at + skipped, whole + at, kVectorBytes);
      }
    }
    __pipeline_commit();
    if (finder.kCopies) __syncthreads();
  } else {
    if constexpr (!finder.kCopies) {
#pragma unroll 1
      for (uint32_t p = 0; p < table.count; ++p) {
        const TilePiece& piece = table.pieces[p];
        const unsigned char* from = piece.data + tile.row * piece.size;
        for (uint32_t at = threadIdx.x * kVectorBytes; at < table.rows * piece.size;
             at += blockDim.x * kVectorBytes) {
          __pipeline_memcpy_async(shared + piece.shared * kWordBytes + at, from + at, kVectorBytes);
        }
      }
    } else {
      __syncthreads();
      const auto fetch = [&](auto width) {
        constexpr uint32_t bytes = decltype(width)::value;
        if (table.equal && size < kWideBytes) {
          for (PairLoop loop(table.run_vectors); loop.outer < pieces; loop.Advance()) {
            const uint32_t at = loop.inner * bytes;
            __pipeline_memcpy_async(shared + loop.outer * table.stride + at,
                                    finder.data(loop.outer) + tile.row * size + at, bytes);
          }
          return;
        }
        for (uint32_t at = threadIdx.x * bytes; at < table.rows * tile.bytes;
             at += blockDim.x * bytes) {
          const TilePiece piece = finder.Find(at >> table.log_rows);
          const uint32_t inside = at - table.rows * (piece.begin - tile.column);
          __pipeline_memcpy_async(shared + piece.shared * kWordBytes + inside,
                                  piece.data + tile.row * piece.size + inside, bytes);
        }
      };
      if (table.by_words) {
        fetch(std::integral_constant<uint32_t, kWordBytes>());
      } else {
        fetch(std::integral_constant<uint32_t, kVectorBytes>());
      }
    }
    __pipeline_commit();
  }

  const uint32_t patterns = table.rows >> table.log_pattern_rows;
  const uint32_t pattern_bytes =
      table.pattern_rows * (kSplits ? tile.bytes : table.part_bytes.divisor());
  const uint32_t step = blockDim.x * kBytes;
  for (uint32_t at = threadIdx.x * kBytes, first = 0; first < pattern_bytes;
       at += step, first += step) {
    bool there = at < pattern_bytes;
    WordMap<Item, kSplits, kBytes> word_map(there ? at : 0, table, finder, tile);
    if (first == 0) {
      __pipeline_wait_prior(0);
      __syncthreads();
    }
    if (!kSplits && table.parted) {
      uint32_t row = at;
      const uint32_t column = table.part_bytes.DivMod(row);
      there = there && column + tile.Begin(row, table) < tile.End(row, table);
    }
    if (there) word_map.Write(patterns, shared);
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

// Lanes holds the addresses in shared memory at which the lanes of a warp read their first items: a
// number of strides plus a number of bytes.
struct Lanes {
  uint32_t strides[kWarp];
  uint32_t bytes[kWarp];
};

// Conflicts returns the maximum number of lanes that access different words of one bank.
int Conflicts(const Lanes& lanes, uint32_t stride, bool skewed) {
  uint32_t last[kWarp] = {};  // the last word of each bank that a lane accessed
  int count[kWarp] = {};
  int most = 0;
  for (int lane = 0; lane < kWarp; ++lane) {
    const uint32_t at = lanes.strides[lane] * stride + lanes.bytes[lane];
    const uint32_t word = (skewed ? Skew(at) : at) / kWordBytes;
    const uint32_t bank = word % kWarp;
    // Lanes that share a word are neighbours.
    if (count[bank] == 0 || last[bank] != word) most = std::max(most, ++count[bank]);
    last[bank] = word;
  }
  return most;
}

// ChooseStride chooses the stride from `least` on, in steps of `step` bytes, with the fewest bank
// conflicts, and returns their number. Among equals it is the first one after an odd number of
// vectors, which is the fastest for the other items.
int ChooseStride(uint32_t& stride, const Lanes& lanes, int64_t least, int64_t step) {
  const int64_t odd = least % (2 * kVectorBytes) == 0 ? kVectorBytes : 0;
  int fewest = kWarp + 1;
  for (int64_t i = 0; i < kBankBytes && fewest > 1; i += step) {
    const auto tried = static_cast<uint32_t>(least + (odd + i) % kBankBytes);
    const int found = Conflicts(lanes, tried, false);
    if (found < fewest) {
      fewest = found;
      stride = tried;
    }
  }
  return fewest;
}

// CountRowVectors returns the vectors of a row of a part for any alignment.
int64_t CountRowVectors(const TilesPlan& plan) {
  return CeilDiv(plan.part_bytes + kVectorBytes - plan.item, kVectorBytes);
}

// CountBlocks counts the blocks of a call, including those of the rows after the last tile.
int64_t CountBlocks(const TilesPlan& plan, int64_t all_rows) {
  const int64_t rest = (all_rows - plan.tiles * plan.rows) * plan.row_bytes;
  return plan.tiles * plan.parts + CeilDiv(rest, plan.threads * plan.item);
}

// FindLanes returns the positions at which the lanes of a warp read their first items.
Lanes FindLanes(const TilesPlan& plan, int64_t word) {
  Lanes lanes;
  const int64_t run = plan.pattern_rows * plan.size;
  for (int lane = 0; lane < kWarp; ++lane) {
    const int64_t at = lane * word;
    const int64_t of_stride = plan.splits ? at % run : at;
    lanes.strides[lane] = static_cast<uint32_t>(of_stride / plan.size);
    lanes.bytes[lane] =
        static_cast<uint32_t>(of_stride % plan.size + (plan.splits ? at / run * plan.size : 0));
  }
  return lanes;
}

// VisitPieces calls visit(array, size) for the pieces that are not empty, in order. It returns
// false if the arrays do not consist of whole rows.
template <typename Visit>
bool VisitPieces(const Job& job, const TilesPlan& plan, Visit&& visit) {
  const auto* whole = static_cast<const unsigned char*>(plan.whole);
  int64_t filled = 0;
  bool ended = false;
  for (const Destination& destination : job.destinations) {
    if (plan.splits && destination.piece_count != 1) return false;
    for (int64_t p = 0; p < destination.piece_count; ++p) {
      const Piece& piece = job.pieces[destination.first_piece + p];
      if (piece.extent == 0) continue;
      if (!plan.splits && piece.size == 0) {
        ended = true;
        continue;
      }
      // Parts of a row must be contiguous, and so must rows.
      const bool follows = plan.splits
                               ? piece.stride == plan.row_bytes && piece.source == whole + filled
                               : piece.stride == piece.size;
      if (ended || piece.size > UINT16_MAX || piece.size != piece.extent || !follows) return false;
      if (!visit(plan.splits ? destination.data : piece.source, piece.size)) return false;
      filled += piece.size;
    }
  }
  return true;
}

// PlanFew chooses the rows of a tile and of a pattern for at most kFewPieces pieces.
void PlanFew(TilesPlan& plan, int64_t all_rows) {
  const int64_t vector_rows = kVectorBytes / plan.item;
  const int64_t max_words = plan.splits ? 64 : 128;
  // Rows of mostly zeros cost little to write, and as much setup as others.
  const int64_t patterns = plan.item == 1 && 2 * plan.filled < plan.row_bytes ? 16 : 8;
  while (2 * plan.pattern_rows * plan.part_bytes <= max_words * kWordBytes) plan.pattern_rows *= 2;
  while (plan.rows < patterns * plan.pattern_rows && plan.rows * plan.row_bytes <= kFewTileBytes) {
    plan.rows *= 2;
  }
  while (plan.rows > vector_rows && all_rows / plan.rows < 4 * kManyTiles) plan.rows /= 2;
  while (plan.rows < kTogether * plan.pattern_rows) plan.pattern_rows /= 2;
}

// PlanMany chooses the rows and the parts of a tile for more pieces.
void PlanMany(TilesPlan& plan, int64_t all_rows, int64_t word) {
  const bool splits = plan.splits;
  const int64_t size = plan.size, row_bytes = plan.row_bytes, item = plan.item;
  const int64_t vector_rows = kVectorBytes / item;
  int64_t rows = vector_rows;
  if (plan.equal && (splits || (plan.filled == row_bytes && row_bytes % kWordBytes == 0))) {
    // A part has enough rows for a long segment of each piece, and then the number of pieces that
    // fits. Parts of joins are whole words.
    const int64_t run = !splits              ? kRunBytes
                        : item == kWordBytes ? 2 * kSplitRunBytes
                                             : kSplitRunBytes;
    while (rows * size < run) rows *= 2;
    // Splits of wide pieces may have any number of pieces in a part, because a tile has few rows;
    // parts of joins are whole sectors if rows are.
    int64_t multiple = kWordBytes;
    if (size > kSectorBytes && splits) {
      multiple = 1;
    } else if (size > kSectorBytes && row_bytes % kSectorBytes == 0) {
      const int64_t whole = std::lcm(multiple, kSectorBytes / std::gcd(kSectorBytes, size));
      if (whole * rows * size <= kPartsBytes) multiple = whole;
    }
    const auto pieces_of_part = [&] {
      // Very narrow pieces need larger parts than others, and moderately wide pieces smaller parts.
      const int64_t bytes = splits                                        ? kSplitPartsBytes
                            : size < kNarrowBytes                         ? 2 * kPartsBytes
                            : size >= kWideBytes && size < 2 * kWideBytes ? kPartsBytes / 2
                                                                          : kPartsBytes;
      const int64_t most = std::max<int64_t>(1, bytes / (rows * size));
      return CeilDiv(CeilDiv(plan.count, CeilDiv(plan.count, most)), multiple) * multiple;
    };
    plan.parted = pieces_of_part() < plan.count;
    if (plan.parted) {
      while (splits && rows < kTogether * plan.pattern_rows && 2 * rows * size <= kRowsBytes) {
        rows *= 2;
      }
      plan.has_few_patterns = splits && rows < kTogether * plan.pattern_rows;
      plan.tile_pieces = pieces_of_part();
      plan.part_bytes = plan.tile_pieces * size;
      if (!splits) plan.pattern_rows = 1;
    } else {
      rows = vector_rows;
    }
  }
  if (!plan.parted) {
    while (2 * rows * row_bytes <= kRowsBytes) rows *= 2;
  }
  // Small calls have small tiles, so that all multiprocessors have some.
  const int64_t parts = CeilDiv(plan.count, plan.tile_pieces);
  while (rows > vector_rows && all_rows / rows * parts < kManyTiles) rows /= 2;
  // Splits into single bytes need more patterns, because a thread has a longer setup before the
  // first word.
  const int64_t patterns = splits && item > 1 ? 2 : kTogether;
  const int64_t max_words = splits ? 512 : 256;
  while (2 * patterns * plan.pattern_rows <= rows &&
         2 * plan.pattern_rows * plan.part_bytes <= max_words * word) {
    plan.pattern_rows *= 2;
  }
  // A pattern, and a part of a join, is made of whole sectors if enough patterns remain and few
  // more pieces are needed. Bytes of unequal pieces take too long a setup.
  const int64_t sector_rows = kSectorBytes / std::gcd(kSectorBytes, row_bytes);
  if (!splits && (plan.equal || item > 1) && 2 * kTogether * sector_rows <= rows &&
      sector_rows * plan.part_bytes <= kMaxPatternBytes) {
    plan.pattern_rows = std::max(plan.pattern_rows, sector_rows);
    if (plan.parted && size <= kSectorBytes) {
      plan.more_pieces = CeilDiv(kSectorBytes - kWordBytes, size);
      plan.part_bytes =
          CeilDiv(plan.part_bytes + kSectorBytes - kWordBytes, kSectorBytes) * kSectorBytes;
    }
  }
  plan.rows = rows;
}

// PlanSharedMemory lays out the pieces in shared memory.
void PlanSharedMemory(TilesPlan& plan, bool few, int64_t word) {
  const int64_t rows = plan.rows, size = plan.size;
  plan.by_words = false;
  if (plan.splits) {
    plan.stride =
        static_cast<uint32_t>(plan.parted ? CountRowVectors(plan) * kVectorBytes : plan.row_bytes);
    if (!few && plan.stride % kVectorBytes == 0) {
      if (plan.equal && plan.item > 1) {
        ChooseStride(plan.stride, FindLanes(plan, word), plan.stride, kVectorBytes);
      } else if (plan.stride % (2 * kVectorBytes) == 0) {
        plan.stride += kVectorBytes;
      }
    }
    if (!few && plan.equal && !plan.parted &&
        plan.pattern_rows * plan.row_bytes % kBankBytes == 0) {
      const Lanes lanes = FindLanes(plan, word);
      const int now = Conflicts(lanes, plan.stride, false);
      const int skewed = Conflicts(lanes, static_cast<uint32_t>(plan.row_bytes), true);
      plan.by_words = (now - skewed) * (kVectorBytes / plan.item) > kLoadsOfSplit;
      if (plan.by_words) plan.stride = static_cast<uint32_t>(plan.row_bytes);
    }
    plan.fetched = rows * plan.stride;
    if (plan.by_words) plan.fetched += plan.fetched / kBankBytes * kVectorBytes;
  } else {
    plan.stride = static_cast<uint32_t>(rows * size);
    if (few) {
      plan.stride += kFewPadding;
    } else if (plan.equal) {
      const Lanes lanes = FindLanes(plan, word);
      // Fetches by words of few pieces cost more than the bank conflicts of the reads.
      const bool many = plan.count > kWarp;
      const int now = ChooseStride(plan.stride, lanes, rows * size, kVectorBytes);
      uint32_t stride = 0;
      const int words = ChooseStride(stride, lanes, rows * size, kWordBytes);
      plan.by_words = many && (now - words) * (kWordBytes / plan.item) > kLoadsOfJoin;
      if (plan.by_words) plan.stride = stride;
    }
    const int64_t fetched = plan.equal
                                ? (plan.tile_pieces + plan.more_pieces) * int64_t{plan.stride}
                                : rows * plan.filled;
    plan.fetched = CeilDiv(fetched, kVectorBytes) * kVectorBytes;
  }
}

// MakePlan returns false if the arrays do not consist of whole rows, or tiles do not fit.
bool MakePlan(const Call& call, TilesPlan& plan) {
  const Job& job = call.job;
  if (job.broadcasts) return false;
  const Piece& first = job.pieces[0];
  // A call that leaves out the rest of the rows of its only array counts as a split.
  plan.splits = !call.joins() || (job.pieces.size() == 1 && first.stride != first.size);
  plan.whole = plan.splits ? first.source : job.destinations[0].data;
  plan.row_bytes = plan.splits ? first.stride : job.destinations[0].row_bytes;
  if (!IsAligned(plan.whole, kVectorBytes) || plan.row_bytes > kMaxRowBytes) return false;
  // A split reads whole rows, whose beginnings other launches may have cut.
  const auto* whole = static_cast<const unsigned char*>(plan.whole);
  if (plan.splits && whole + job.rows * plan.row_bytes > first.end) return false;

  plan.count = plan.filled = plan.size = 0;
  plan.equal = true;
  const bool has_rows = VisitPieces(job, plan, [&](const void* part, int64_t size) {
    if (plan.count++ == 0) plan.size = size;
    plan.equal = plan.equal && size == first.size;
    plan.filled += size;
    return plan.count <= kMaxPieces && IsAligned(part, kVectorBytes);
  });
  if (!has_rows || plan.count == 0) return false;

  // A tile has at least the rows that are whole vectors of every array, and a pattern whole words.
  const bool few = plan.count <= kFewPieces;
  const int64_t word = few || !plan.splits ? kWordBytes : kVectorBytes;
  plan.item = std::min<int64_t>(call.unit, kWordBytes);
  plan.rows = kVectorBytes / plan.item;
  plan.pattern_rows = word / plan.item;
  plan.part_bytes = plan.splits ? plan.filled : plan.row_bytes;
  plan.tile_pieces = plan.count;
  plan.more_pieces = 0;
  plan.parted = plan.has_few_patterns = false;
  if (few) {
    PlanFew(plan, job.rows);
  } else {
    PlanMany(plan, job.rows, word);
  }
  PlanSharedMemory(plan, few, word);
  // Bytes of a tile's rows are counted with 32 bits.
  if (plan.fetched > kMaxTileBytes || plan.rows * plan.row_bytes > INT32_MAX) return false;
  plan.parts = CeilDiv(plan.count, plan.tile_pieces);
  plan.tiles = job.rows / plan.rows;
  const int64_t words = plan.pattern_rows * plan.part_bytes / word;
  const int64_t max_threads = few ? kFewThreads : kManyThreads;
  plan.threads =
      static_cast<int>(CeilDiv(CeilDiv(words, CeilDiv(words, max_threads)), kWarp) * kWarp);
  return CountBlocks(plan, job.rows) <= INT32_MAX;
}

template <int kPieces>
Tiles<kPieces> MakeTable(const Job& job, const TilesPlan& plan) {
  Tiles<kPieces> table;
  table.whole = static_cast<unsigned char*>(const_cast<void*>(plan.whole));
  std::fill_n(table.begins, kFewPieces, kNowhere);
  uint32_t begin = 0;
  int64_t in_tile = 0;
  table.count = 0;
  VisitPieces(job, plan, [&](const void* part, int64_t size) {
    const uint32_t i = table.count++;
    const int64_t shared = plan.splits  ? 0
                           : plan.equal ? in_tile * plan.stride
                                        : plan.rows * int64_t{begin};
    if (++in_tile == plan.tile_pieces) in_tile = 0;
    if (i < kFewPieces) table.begins[i] = begin;
    table.pieces[i] = {static_cast<unsigned char*>(const_cast<void*>(part)), begin,
                       static_cast<uint16_t>(size), static_cast<uint16_t>(shared / kWordBytes)};
    begin += static_cast<uint32_t>(size);
    return true;
  });
  table.equal = plan.equal;
  table.row_bytes = static_cast<uint32_t>(plan.row_bytes);
  table.filled = static_cast<uint32_t>(plan.filled);
  table.rows = static_cast<uint32_t>(plan.rows);
  table.log_rows = Log(plan.rows);
  table.pattern_rows = static_cast<uint32_t>(plan.pattern_rows);
  table.log_pattern_rows = Log(plan.pattern_rows);
  table.tile_pieces = static_cast<uint32_t>(plan.tile_pieces);
  table.parted = plan.parted;
  table.parts = FastDivider(plan.parts);
  table.part_bytes = FastDivider(plan.part_bytes);
  table.more_pieces = static_cast<uint32_t>(plan.more_pieces);
  table.stride = plan.stride;
  if (plan.splits) {
    table.row_vectors = FastDivider(CountRowVectors(plan));
  } else {
    const int64_t run = plan.rows * plan.size;
    table.run_vectors = FastDivider(run / (plan.by_words ? kWordBytes : kVectorBytes));
  }
  table.by_words = plan.by_words;
  table.fetched = static_cast<uint32_t>(plan.fetched);
  table.by_row = FastDivider(plan.row_bytes);
  table.by_size = FastDivider(plan.size);
  table.tiles = plan.tiles;
  table.all_rows = job.rows;
  return table;
}

template <typename Item, bool kSplits, int kPieces>
cudaError_t LaunchBlocks(cudaStream_t stream, const Call& call) {
  constexpr int kBytes = kPieces <= kFewPieces || !kSplits ? kWordBytes : kVectorBytes;
  constexpr int kThreads = kPieces <= kFewPieces ? kFewThreads : kManyThreads;
  const TilesPlan& plan = call.tiles;
  const size_t bytes = plan.fetched + kVectorBytes +
                       (PieceFinder<kPieces>::kCopies ? plan.count * sizeof(TilePiece) : 0);
  return Launch(MoveTiles<Item, kSplits, kBytes, kThreads, kPieces>,
                CountBlocks(plan, call.job.rows), plan.threads, bytes, stream,
                MakeTable<kPieces>(call.job, plan));
}

template <bool kSplits, int kPieces>
cudaError_t LaunchItems(cudaStream_t stream, const Call& call) {
  switch (call.tiles.item) {
    case 4:
      return LaunchBlocks<uint32_t, kSplits, kPieces>(stream, call);
    case 2:
      return LaunchBlocks<uint16_t, kSplits, kPieces>(stream, call);
    default:
      return LaunchBlocks<uint8_t, kSplits, kPieces>(stream, call);
  }
}

template <int kPieces>
cudaError_t LaunchPieces(cudaStream_t stream, const Call& call) {
  return call.tiles.splits ? LaunchItems<true, kPieces>(stream, call)
                           : LaunchItems<false, kPieces>(stream, call);
}

}  // namespace

bool CanRunTiles(const Call& call, const Device&) { return MakePlan(call, call.tiles); }

cudaError_t LaunchTiles(cudaStream_t stream, const Call& call, const Device&) {
  return call.tiles.count <= kFewPieces ? LaunchPieces<kFewPieces>(stream, call)
                                        : LaunchPieces<kMaxPieces>(stream, call);
}

}  // namespace jaxops::concatenate::cuda
