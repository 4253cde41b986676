// Concatenation and splitting at the speed of a copy: a thread moves 16 bytes, or few more or less.
//
// What a copy is limited by is the order in which addresses reach the memory: it is fastest with
// one pack a thread, in blocks small enough that those which run at the same time make up a short
// stretch of each array. More work for a thread, blocks that stay, and copies by the bulk engine
// all cost a few percent, because they have more of each array under way.
//
// Whole packs (MoveWhole): threads walk along the array that all pieces are of or go to, so that no
// stretch of it is met twice. Where many pieces are equal, and narrow or little in all (MoveEqual),
// a number of rows of one piece are for neighbouring threads, so that a warp meets few arrays and
// whole lines of each; little is moved by items, which need no shared memory. Smaller items (Join,
// Cut): threads walk along destinations and gather the items of a pack one by one; neighbouring
// ones come from the L1 cache. Rows so narrow that the memory gives them whole, whatever is kept of
// them (CutNarrow), are read whole, once for all pieces. Few and long stretches (MoveStretches) are
// copies between addresses of any alignment: a thread shifts what it reads into the packs it
// writes.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "common/fast_divide.h"
#include "cuda/common/launch.h"
#include "cuda/common/numeric.cuh"
#include "cuda/concatenate/families.h"
#include "cuda/concatenate/launch.h"

namespace jaxops::concatenate::cuda {
namespace {

using jaxops::cuda::CeilDiv;
using jaxops::cuda::kPackBytes;
using jaxops::cuda::kWarp;
using jaxops::cuda::Launch;

constexpr int kThreads = 256;
// Pieces whose places are compared one by one.
constexpr int kFewPieces = 4;
constexpr int kComparedPieces = 16;
// Blocks that go round all destinations, at least.
constexpr int kRoundBlocks = 64;
constexpr int kRoundsPerPiece = 8;
// What MoveEqual moves whatever its rows are: so many words, or bytes, and where pieces are cut
// rows of so many bytes.
constexpr int64_t kEqualWords = 3 << 16;
constexpr int64_t kEqualBytes = 1 << 17;
constexpr int64_t kWideCut = 512;
// Packs that a thread reads of narrow rows, whose bytes are given whole by the memory.
constexpr int kNarrowPacks = 2;
constexpr int64_t kNarrowBytes = kSectorBytes;
constexpr int64_t kLongStretch = 32768;
// Packs of a thread of which each takes two loads.
constexpr int kStretchPacks = 2;
constexpr int64_t kMostItems = int64_t{1} << 30;

template <typename Item>
constexpr int kItems = kPackBytes / sizeof(Item);

// What is read is the last to leave the L2 cache, so that what is written goes to the memory soon
// and in order. For items of less than a word this costs more than it brings.
template <typename Item>
__device__ __forceinline__ Item Load(const void* from) {
  if constexpr (sizeof(Item) < 4) {
    return __ldg(static_cast<const Item*>(from));
  } else {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    Item item;
    if constexpr (sizeof(Item) == 16) {
      asm("ld.global.nc.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
          : "=r"(item.x), "=r"(item.y), "=r"(item.z), "=r"(item.w)
          : "l"(from), "l"(policy));
    } else if constexpr (sizeof(Item) == 8) {
      asm("ld.global.nc.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
          : "=r"(item.x), "=r"(item.y)
          : "l"(from), "l"(policy));
    } else {
      asm("ld.global.nc.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(item) : "l"(from), "l"(policy));
    }
    return item;
  }
}

// Leaves the L1 cache to what is read.
__device__ __forceinline__ void Store(void* to, uint4 pack) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(pack.x),
               "r"(pack.y), "r"(pack.z), "r"(pack.w)
               : "memory");
}

template <typename Item>
constexpr auto kItemsOf = [](int64_t bytes) { return static_cast<uint32_t>(bytes / sizeof(Item)); };

// --- whole packs ---------------------------------------------------------------------------------

struct WholePiece {
  unsigned char* column0;  // where the piece would be if it began with the row
  uint32_t begin;          // in packs, as the end of what the source fills
  uint32_t filled;
  uint32_t stride;  // in bytes
};

constexpr uint32_t kNowhere = UINT32_MAX;

// Pieces of the rows of one array, which is the destination of all or the source of all.
template <int kPieces>
struct Whole {
  WholePiece pieces[kPieces];  // what is not there begins at kNowhere
  unsigned char* whole;
  uint64_t stride;  // in bytes
  FastDivider row_packs;
  FastDivider piece_packs;  // of more than kComparedPieces, which are equal
  uint32_t packs;

  __device__ __forceinline__ WholePiece Find(uint32_t column) const {
    if constexpr (kPieces == 2) return column < pieces[1].begin ? pieces[0] : pieces[1];
    if constexpr (kPieces > kComparedPieces) return pieces[piece_packs.Quotient(column)];
    // All comparisons are with constants of the launch, of which none waits for another.
    int found = 0;
#pragma unroll
    for (int i = 1; i < kPieces; ++i) found += pieces[i].begin <= column;
    return pieces[found];
  }
};

template <bool kSplits, int kPieces>
__global__ void __launch_bounds__(kThreads)
    MoveWhole(const __grid_constant__ Whole<kPieces> table) {
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= table.packs) return;
  uint32_t row = index;
  const uint32_t column = table.row_packs.Peel(row);
  const WholePiece piece = table.Find(column);
  unsigned char* whole = table.whole + row * table.stride + uint64_t{column} * kPackBytes;
  unsigned char* part =
      piece.column0 + uint64_t{row} * piece.stride + uint64_t{column} * kPackBytes;
  if constexpr (kSplits) {
    Store(part, Load<uint4>(whole));
  } else {
    Store(whole, column < piece.filled ? Load<uint4>(part) : uint4{});
  }
}

// --- equal pieces of words -----------------------------------------------------------------------

// Words of one piece that are for neighbouring threads: a warp's where they are read from there, as
// few as fill lines of the cache where they are written there.
template <typename Word, bool kSplits>
constexpr int kWordsTogether = kSplits && sizeof(Word) == kPackBytes ? kWarp / 2 : kWarp;

template <int kPieces>
struct Equal {
  unsigned char* pieces[kPieces];
  unsigned char* whole;
  uint64_t stride;  // in bytes
  FastDivider together;
  FastDivider count;
  FastDivider piece_words;
  uint32_t rows;           // of all
  uint32_t rows_together;  // of a piece
};

template <typename Word, bool kSplits, int kPieces>
__global__ void __launch_bounds__(kThreads)
    MoveEqual(const __grid_constant__ Equal<kPieces> table) {
  uint32_t group = blockIdx.x * kThreads + threadIdx.x;
  const uint32_t place = table.together.Peel(group);
  const uint32_t number = table.count.Peel(group);
  uint32_t row = place;
  const uint32_t column = table.piece_words.Peel(row);
  row += group * table.rows_together;
  if (row >= table.rows) return;
  // The rows of a piece follow each other in its array.
  unsigned char* part =
      table.pieces[number] + (uint64_t{group} * table.together.divisor() + place) * sizeof(Word);
  unsigned char* whole = table.whole + row * table.stride +
                         (uint64_t{number} * table.piece_words.divisor() + column) * sizeof(Word);
  const Word word = Load<Word>(kSplits ? whole : part);
  unsigned char* to = kSplits ? part : whole;
  if constexpr (sizeof(Word) == kPackBytes) {
    Store(to, word);
  } else {
    *reinterpret_cast<Word*>(to) = word;
  }
}

// --- items ---------------------------------------------------------------------------------------

// Words of 4 bytes that smaller items make.
template <typename Item>
__device__ __forceinline__ uint32_t Word(const Item* items) {
  if constexpr (sizeof(Item) == 4) {
    return items[0];
  } else if constexpr (sizeof(Item) == 2) {
    return __byte_perm(items[0], items[1], 0x5410);
  } else {
    return __byte_perm(__byte_perm(items[0], items[1], 0x0040),
                       __byte_perm(items[2], items[3], 0x0040), 0x5410);
  }
}

// Stores items `first`, ... of `count` at `data`, a pack of them; `walk(i)` goes along the items
// from number i on.
template <typename Item, typename Walk>
__device__ __forceinline__ void StoreItems(unsigned char* data, uint32_t first, uint32_t count,
                                           Walk&& walk) {
  constexpr int kWordItems = sizeof(Item) < 4 ? 4 / sizeof(Item) : 1;
  unsigned char* to = data + uint64_t{first} * sizeof(Item);
  if constexpr (sizeof(Item) < 4) {
    // A load of small items by packs would touch as many lines as one of packs. So lanes gather
    // neighbouring words, and exchange them.
    __shared__ uint4 shared[kThreads];
    const uint32_t lane = threadIdx.x % kWarp;
    const uint32_t begin = first - lane * kItems<Item>;
    if (begin + kWarp * kItems<Item> <= count) {
      uint4* packs = shared + (threadIdx.x - lane);
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        auto items_of_word = walk(begin + (w * kWarp + lane) * kWordItems);
        Item items[kWordItems];
#pragma unroll
        for (int i = 0; i < kWordItems; ++i, items_of_word.Advance()) {
          items[i] = items_of_word.Next();
        }
        words[w] = Word(items);
      }
#pragma unroll
      for (int w = 0; w < 4; ++w) reinterpret_cast<uint32_t*>(packs)[w * kWarp + lane] = words[w];
      __syncwarp();
      Store(to, packs[lane]);
      return;
    }
  }
  if (first >= count) return;
  auto rest = walk(first);
  if constexpr (sizeof(Item) >= 4) {
    if (first + kItems<Item> <= count) {
      Item items[kItems<Item>];
#pragma unroll
      for (int i = 0; i < kItems<Item>; ++i, rest.Advance()) items[i] = rest.Next();
      if constexpr (sizeof(Item) == 16) {
        Store(to, items[0]);
      } else if constexpr (sizeof(Item) == 8) {
        Store(to, {items[0].x, items[0].y, items[1].x, items[1].y});
      } else {
        Store(to, {items[0], items[1], items[2], items[3]});
      }
      return;
    }
  }
  const uint32_t end = min(count, first + kItems<Item>);
#pragma unroll 1
  for (uint32_t i = first; i < end; ++i, rest.Advance()) {
    reinterpret_cast<Item*>(data)[i] = rest.Next();
  }
}

// --- one destination -----------------------------------------------------------------------------

struct JoinedPiece {
  const unsigned char* column0;  // where the piece would be read if it began with the row
  uint32_t begin;                // in items
  uint32_t stride;               // in bytes
};

template <int kPieces>
struct Joined {
  JoinedPiece pieces[kPieces];  // what is not there begins at kNowhere
  unsigned char* to;
  FastDivider row_items;
  uint32_t filled;  // items of a row, before zeros
  uint32_t items;
};

// A walk along the items of the destination.
template <typename Item, int kPieces>
struct JoinedItems {
  const Joined<kPieces>& table;
  uint32_t row, column;
  const unsigned char* rows[kPieces];

  __device__ __forceinline__ JoinedItems(uint32_t index, const Joined<kPieces>& joined)
      : table(joined), row(index), column(table.row_items.Peel(row)) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      rows[p] = table.pieces[p].column0 + uint64_t{row} * table.pieces[p].stride;
    }
  }

  __device__ __forceinline__ Item Next() const {
    const unsigned char* from = rows[0];
#pragma unroll
    for (int p = 1; p < kPieces; ++p) from = column < table.pieces[p].begin ? from : rows[p];
    return column < table.filled ? Load<Item>(from + uint64_t{column} * sizeof(Item)) : Item{};
  }

  __device__ __forceinline__ void Advance() {
    if (++column < table.row_items.divisor()) return;
    column = 0;
#pragma unroll
    for (int p = 0; p < kPieces; ++p) rows[p] += table.pieces[p].stride;
  }
};

template <typename Item, int kPieces>
__global__ void __launch_bounds__(kThreads) Join(const __grid_constant__ Joined<kPieces> table) {
  const uint32_t first = (blockIdx.x * kThreads + threadIdx.x) * kItems<Item>;
  StoreItems<Item>(table.to, first, table.items,
                   [&](uint32_t i) { return JoinedItems<Item, kPieces>(i, table); });
}

// --- destinations of a piece each ----------------------------------------------------------------

struct CutPiece {
  const unsigned char* source;
  unsigned char* to;
  int64_t gap;      // bytes of the source from the end of a row to the next one
  uint32_t stride;  // in bytes
  FastDivider row_items;
  uint32_t filled;  // items of a row that the source has
  uint32_t items;
  uint32_t first_block;  // in a round
  uint32_t blocks;       // there
};

// Blocks go round the destinations, so that those of neighbouring rows run at the same time.
template <int kPieces>
struct Cuts {
  CutPiece pieces[kPieces];
  int count;
  FastDivider round;  // blocks

  __device__ __forceinline__ int Find(uint32_t block) const {
    int low = 0;
    for (int width = count; width > 1;) {
      const int half = width / 2;
      if (pieces[low + half].first_block <= block) low += half;
      width -= half;
    }
    return low;
  }
};

// A walk along the items of a destination.
template <typename Item>
struct CutItems {
  const CutPiece& piece;
  uint32_t row, column;
  const unsigned char* from;

  __device__ __forceinline__ CutItems(uint32_t index, const CutPiece& cut)
      : piece(cut),
        row(index),
        column(piece.row_items.Peel(row)),
        from(piece.source + uint64_t{row} * piece.stride + uint64_t{column} * sizeof(Item)) {}

  __device__ __forceinline__ Item Next() const {
    return column < piece.filled ? Load<Item>(from) : Item{};
  }

  __device__ __forceinline__ void Advance() {
    from += sizeof(Item);
    if (++column < piece.row_items.divisor()) return;
    column = 0;
    from += piece.gap;
  }
};

template <typename Item, int kPieces>
__global__ void __launch_bounds__(kThreads) Cut(const __grid_constant__ Cuts<kPieces> table) {
  uint32_t round = blockIdx.x;
  const uint32_t block = table.round.Peel(round);
  const CutPiece& piece = table.pieces[table.Find(block)];
  const uint32_t own_block = round * piece.blocks + block - piece.first_block;
  const uint32_t first = (own_block * kThreads + threadIdx.x) * kItems<Item>;
  StoreItems<Item>(piece.to, first, piece.items,
                   [&](uint32_t i) { return CutItems<Item>(i, piece); });
}

// --- few pieces of narrow rows -------------------------------------------------------------------

// Rows of 4 to kNarrowBytes bytes, a power of two, of which the first `kept` are of the pieces. A
// block gathers what it has of each piece in shared memory.
struct Narrow {
  struct Piece {
    unsigned char* to;
    uint32_t begin;  // in shared memory
    uint32_t size;   // of a row
  };
  // An item of a row: where that of a block's first row goes, and how far apart those of the rows.
  struct Column {
    uint16_t begin, step;
  };

  const unsigned char* from;
  int64_t rows;
  uint32_t kept;
  int count;
  Piece pieces[kFewPieces];
  Column columns[kNarrowBytes];
};

// Of a block.
template <int kRowBytes>
constexpr int kNarrowRows = kThreads * kNarrowPacks * kPackBytes / kRowBytes;

template <typename Item, int kRowBytes>
__global__ void __launch_bounds__(kThreads) CutNarrow(const __grid_constant__ Narrow table) {
  constexpr int kRowItems = kRowBytes / sizeof(Item);
  constexpr int kWordItems = 4 / sizeof(Item);
  // What a thread reads at a time: a pack of several rows, or the packs of one.
  constexpr int kBytes = kRowBytes < kPackBytes ? kPackBytes : kRowBytes;
  constexpr int kTimes = kNarrowPacks * kPackBytes / kBytes;
  constexpr int kRows = kBytes / kRowBytes;
  __shared__ uint4 shared[kThreads * kNarrowPacks];
  const int64_t first = int64_t{blockIdx.x} * kNarrowRows<kRowBytes>;
  if (first + kNarrowRows<kRowBytes> > table.rows) {
    for (int64_t row = first + threadIdx.x; row < table.rows; row += kThreads) {
      const unsigned char* from = table.from + row * kRowBytes;
#pragma unroll 1
      for (int p = 0; p < table.count; ++p) {
        const Narrow::Piece& piece = table.pieces[p];
#pragma unroll 1
        for (uint32_t at = 0; at < piece.size; at += sizeof(Item), from += sizeof(Item)) {
          *reinterpret_cast<Item*>(piece.to + row * piece.size + at) =
              *reinterpret_cast<const Item*>(from);
        }
      }
    }
    return;
  }

  uint4 packs[kTimes][kBytes / kPackBytes];
#pragma unroll
  for (int t = 0; t < kTimes; ++t) {
    const unsigned char* from =
        table.from + first * kRowBytes + (t * kThreads + threadIdx.x) * kBytes;
#pragma unroll
    for (int i = 0; i < kBytes / kPackBytes; ++i) {
      packs[t][i] = i * kPackBytes < table.kept ? Load<uint4>(from + i * kPackBytes) : uint4{};
    }
  }
  auto* gathered = reinterpret_cast<unsigned char*>(shared);
#pragma unroll
  for (int c = 0; c < kRowItems; ++c) {
    if (c * static_cast<int>(sizeof(Item)) >= table.kept) break;
    const uint32_t step = table.columns[c].step;
    unsigned char* to = gathered + table.columns[c].begin + threadIdx.x * kRows * step;
#pragma unroll
    for (int t = 0; t < kTimes; ++t) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const int item = row * kRowItems + c;
        const uint4 pack = packs[t][item / kItems<Item>];
        const uint32_t words[4] = {pack.x, pack.y, pack.z, pack.w};
        const uint32_t word = words[item / kWordItems % 4];
        *reinterpret_cast<Item*>(to + (t * kThreads * kRows + row) * step) =
            static_cast<Item>(word >> item % kWordItems * 8 * sizeof(Item) % 32);
      }
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int p = 0; p < table.count; ++p) {
    const Narrow::Piece& piece = table.pieces[p];
    unsigned char* to = piece.to + first * piece.size;
#pragma unroll 1
    for (uint32_t at = threadIdx.x * kPackBytes; at < kNarrowRows<kRowBytes> * piece.size;
         at += kThreads * kPackBytes) {
      Store(to + at, *reinterpret_cast<const uint4*>(gathered + piece.begin + at));
    }
  }
}

// --- long stretches ------------------------------------------------------------------------------

struct Stretch {
  const unsigned char* from;  // null for zeros
  unsigned char* to;
  int64_t bytes;
  uint32_t first_block;
};

// Copies of any lengths between any addresses, one after the other.
template <int kStretches>
struct Stretches {
  Stretch stretches[kStretches];
  int count;
  bool equal;
  FastDivider blocks;  // of each, where all have as many

  __device__ __forceinline__ int Find(uint32_t block) const {
    if (equal) return blocks.Quotient(block);
    int low = 0;
    for (int width = count; width > 1;) {
      const int half = width / 2;
      if (stretches[low + half].first_block <= block) low += half;
      width -= half;
    }
    return low;
  }
};

// The 16 bytes of `low` and `high`, one after the other, that begin at byte `first` of 16.
__device__ __forceinline__ uint4 Shift(uint4 low, uint4 high, uint32_t first) {
  uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) words[i] = first & 8 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) words[i] = first & 4 ? words[i + 1] : words[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = __funnelshift_r(words[i], words[i + 1], 8 * (first & 3));
  return {words[0], words[1], words[2], words[3]};
}

// A thread makes each pack of the two that its bytes are in. Of these the second is the next
// thread's first, and comes from the L1 cache. At the ends of a stretch, where not all of both is
// of it, a thread moves items.
template <typename Item, int kStretches>
__global__ void __launch_bounds__(kThreads)
    MoveStretches(const __grid_constant__ Stretches<kStretches> table) {
  const Stretch& stretch = table.stretches[table.Find(blockIdx.x)];
  const int64_t bytes = stretch.bytes;
  const uint32_t head = reinterpret_cast<uintptr_t>(stretch.to) % kPackBytes;
  const int64_t first =
      int64_t{blockIdx.x - stretch.first_block} * (kThreads * kPackBytes * kStretchPacks) +
      threadIdx.x * kPackBytes - head;
  const unsigned char* from = stretch.from + first;
  const auto shift = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from) % kPackBytes);
  uint4 low[kStretchPacks], high[kStretchPacks];
#pragma unroll
  for (int m = 0; m < kStretchPacks; ++m) {
    const int64_t at = first + m * kThreads * kPackBytes;
    const int64_t read = at - shift;
    const bool whole = stretch.from != nullptr && read >= 0 && read + 2 * kPackBytes <= bytes;
    low[m] = whole ? Load<uint4>(stretch.from + read) : uint4{};
    high[m] = whole && shift != 0 ? Load<uint4>(stretch.from + read + kPackBytes) : uint4{};
  }
#pragma unroll
  for (int m = 0; m < kStretchPacks; ++m) {
    const int64_t at = first + m * kThreads * kPackBytes;
    const int64_t read = at - shift;
    const bool zeros = stretch.from == nullptr;
    if (zeros ? at >= 0 && at + kPackBytes <= bytes : read >= 0 && read + 2 * kPackBytes <= bytes) {
      Store(stretch.to + at, Shift(low[m], high[m], shift));
      continue;
    }
    Item items[kItems<Item>];
#pragma unroll
    for (int i = 0; i < kItems<Item>; ++i) {
      const int64_t item = at + i * static_cast<int>(sizeof(Item));
      const bool there = item >= 0 && item < bytes;
      items[i] = there && !zeros ? *reinterpret_cast<const Item*>(stretch.from + item) : Item{};
    }
#pragma unroll
    for (int i = 0; i < kItems<Item>; ++i) {
      const int64_t item = at + i * static_cast<int>(sizeof(Item));
      if (item >= 0 && item < bytes) *reinterpret_cast<Item*>(stretch.to + item) = items[i];
    }
  }
}

// --- launches ------------------------------------------------------------------------------------

bool AreFull(const Job& job) {
  return std::all_of(job.pieces.begin(), job.pieces.end(),
                     [](const Piece& p) { return p.size == p.extent; });
}

bool AreEqual(const Job& job) {
  return std::all_of(job.pieces.begin(), job.pieces.end(), [&](const Piece& p) {
    return p.extent == job.pieces[0].extent && p.extent > 0;
  });
}

// Whether all destinations are cut from neighbouring parts of the rows of one source.
bool SplitsOne(const Job& job) {
  const Piece& first = job.pieces[0];
  const auto* next = static_cast<const unsigned char*>(first.source);
  for (const Piece& p : job.pieces) {
    if (p.source != next || p.end != first.end || p.stride != first.stride) return false;
    next += p.size;
  }
  return AreFull(job);
}

// How many pieces before zeros fill the rest of the row; -1 where zeros come before a source.
int FilledPieces(const Job& job) {
  int filled = 0;
  bool ended = false;
  for (const Piece& p : job.pieces) {
    if (p.extent == 0) continue;
    if (ended && p.size > 0) return -1;
    filled += p.size > 0;
    ended = p.size < p.extent;
  }
  return filled;
}

template <bool kSplits, int kPieces>
cudaError_t LaunchWhole(cudaStream_t stream, const Job& job) {
  Whole<kPieces> table = {};
  for (WholePiece& piece : table.pieces) piece.begin = kNowhere;
  int64_t begin = 0;
  int count = 0;
  for (const Destination& destination : job.destinations) {
    for (int64_t p = 0; p < destination.piece_count; ++p) {
      const Piece& piece = job.pieces[destination.first_piece + p];
      if (piece.extent == 0) continue;
      const void* part = kSplits ? destination.data : piece.source;
      table.pieces[count++] = {
          const_cast<unsigned char*>(static_cast<const unsigned char*>(part)) - begin,
          kItemsOf<uint4>(begin), kItemsOf<uint4>(begin + piece.size),
          static_cast<uint32_t>(kSplits ? piece.extent : piece.stride)};
      begin += piece.extent;
    }
  }
  const void* whole = kSplits ? job.pieces[0].source : job.destinations[0].data;
  table.whole = const_cast<unsigned char*>(static_cast<const unsigned char*>(whole));
  table.stride = kSplits ? job.pieces[0].stride : begin;
  table.row_packs = FastDivider(kItemsOf<uint4>(begin));
  table.piece_packs = FastDivider(kItemsOf<uint4>(std::max<int64_t>(job.pieces[0].extent, 16)));
  table.packs = kItemsOf<uint4>(job.rows * begin);
  return Launch(MoveWhole<kSplits, kPieces>, CeilDiv(table.packs, kThreads), kThreads, 0, stream,
                table);
}

template <typename Word, bool kSplits, int kPieces>
cudaError_t LaunchEqual(cudaStream_t stream, const Job& job) {
  Equal<kPieces> table = {};
  const int64_t extent = job.pieces[0].extent;
  const auto count = static_cast<int64_t>(job.pieces.size());
  for (int64_t p = 0; p < count; ++p) {
    const void* part = kSplits ? job.destinations[p].data : job.pieces[p].source;
    table.pieces[p] = const_cast<unsigned char*>(static_cast<const unsigned char*>(part));
  }
  const void* whole = kSplits ? job.pieces[0].source : job.destinations[0].data;
  table.whole = const_cast<unsigned char*>(static_cast<const unsigned char*>(whole));
  table.stride = kSplits ? job.pieces[0].stride : count * extent;
  const int64_t piece_words = extent / static_cast<int64_t>(sizeof(Word));
  const int64_t rows = std::max<int64_t>(1, kWordsTogether<Word, kSplits> / piece_words);
  table.together = FastDivider(rows * piece_words);
  table.count = FastDivider(count);
  table.piece_words = FastDivider(piece_words);
  table.rows = static_cast<uint32_t>(job.rows);
  table.rows_together = static_cast<uint32_t>(rows);
  const int64_t words = CeilDiv(job.rows, rows) * rows * count * piece_words;
  return Launch(MoveEqual<Word, kSplits, kPieces>, CeilDiv(words, kThreads), kThreads, 0, stream,
                table);
}

template <typename Word>
cudaError_t LaunchEqual(cudaStream_t stream, const Job& job) {
  const bool few = job.pieces.size() <= 64;
  if (job.destinations.size() > 1) {
    return few ? LaunchEqual<Word, true, 64>(stream, job)
               : LaunchEqual<Word, true, kMaxPieces>(stream, job);
  }
  return few ? LaunchEqual<Word, false, 64>(stream, job)
             : LaunchEqual<Word, false, kMaxPieces>(stream, job);
}

template <bool kSplits>
cudaError_t LaunchWholeOf(cudaStream_t stream, const Job& job) {
  const size_t pieces = job.pieces.size();
  if (pieces <= 2) return LaunchWhole<kSplits, 2>(stream, job);
  if (pieces <= kFewPieces) return LaunchWhole<kSplits, kFewPieces>(stream, job);
  if (!AreEqual(job)) return LaunchWhole<kSplits, kComparedPieces>(stream, job);
  return pieces <= 64 ? LaunchWhole<kSplits, 64>(stream, job)
                      : LaunchWhole<kSplits, kMaxPieces>(stream, job);
}

template <typename Item, int kPieces>
cudaError_t LaunchJoin(cudaStream_t stream, const Job& job) {
  const Destination& destination = job.destinations[0];
  Joined<kPieces> table = {};
  for (JoinedPiece& piece : table.pieces) piece.begin = kNowhere;
  table.to = static_cast<unsigned char*>(destination.data);
  table.row_items = FastDivider(kItemsOf<Item>(destination.row_bytes));
  table.items = kItemsOf<Item>(job.rows * destination.row_bytes);
  int64_t begin = 0;
  int count = 0;
  for (const Piece& piece : job.pieces) {
    if (piece.size == 0) continue;
    table.pieces[count++] = {static_cast<const unsigned char*>(piece.source) - begin,
                             kItemsOf<Item>(begin), static_cast<uint32_t>(piece.stride)};
    begin += piece.size;
  }
  table.filled = kItemsOf<Item>(begin);
  return Launch(Join<Item, kPieces>, CeilDiv(table.items, kItems<Item> * kThreads), kThreads, 0,
                stream, table);
}

template <typename Item, int kPieces>
cudaError_t LaunchCut(cudaStream_t stream, const Job& job) {
  Cuts<kPieces> table;
  table.count = 0;
  int64_t common = 0, all = 0;
  for (const Piece& piece : job.pieces) {
    common = std::gcd(common, piece.extent);
    all += piece.extent;
  }
  // In the proportion of their sizes, so that all come to their ends together.
  const double most = std::max<double>(kRoundBlocks, kRoundsPerPiece * job.pieces.size());
  const double share = std::min(1.0 / common, most / all);
  int64_t round = 0, rounds = 0;
  for (const Destination& destination : job.destinations) {
    const Piece& piece = job.pieces[destination.first_piece];
    if (destination.row_bytes == 0) continue;
    const int64_t items = job.rows * piece.extent / sizeof(Item);
    const int64_t all_blocks = CeilDiv(items, kItems<Item> * kThreads);
    // A single row is one destination after the other.
    const int64_t blocks =
        job.rows == 1 ? all_blocks : std::max<int64_t>(1, std::llround(piece.extent * share));
    table.pieces[table.count++] = {static_cast<const unsigned char*>(piece.source),
                                   static_cast<unsigned char*>(destination.data),
                                   piece.stride - piece.extent,
                                   static_cast<uint32_t>(piece.stride),
                                   FastDivider(kItemsOf<Item>(piece.extent)),
                                   kItemsOf<Item>(piece.size),
                                   static_cast<uint32_t>(items),
                                   static_cast<uint32_t>(round),
                                   static_cast<uint32_t>(blocks)};
    rounds = std::max(rounds, CeilDiv(all_blocks, blocks));
    round += blocks;
  }
  table.round = FastDivider(round);
  return Launch(Cut<Item, kPieces>, round * rounds, kThreads, 0, stream, table);
}

template <typename Item>
cudaError_t LaunchItems(cudaStream_t stream, const Job& job) {
  const size_t pieces = job.pieces.size();
  if (job.destinations.size() == 1 && pieces > 1) {
    if (FilledPieces(job) <= 2) return LaunchJoin<Item, 2>(stream, job);
    if constexpr (sizeof(Item) >= 4) return LaunchJoin<Item, kFewPieces>(stream, job);
  }
  if (pieces <= 2) return LaunchCut<Item, 2>(stream, job);
  if (pieces <= 16) return LaunchCut<Item, 16>(stream, job);
  if (pieces <= kManyCuts) return LaunchCut<Item, kManyCuts>(stream, job);
  return LaunchCut<Item, kMaxDestinations>(stream, job);
}

template <typename Item, int kRowBytes>
cudaError_t LaunchNarrow(cudaStream_t stream, const Job& job) {
  Narrow table = {};
  table.from = static_cast<const unsigned char*>(job.pieces[0].source);
  table.rows = job.rows;
  constexpr int64_t kRows = kNarrowRows<kRowBytes>;
  Narrow::Column* column = table.columns;
  for (const Destination& destination : job.destinations) {
    const auto begin = static_cast<uint32_t>(table.kept * kRows);
    const auto size = static_cast<uint32_t>(destination.row_bytes);
    if (size == 0) continue;
    table.pieces[table.count++] = {static_cast<unsigned char*>(destination.data), begin, size};
    for (uint32_t at = 0; at < size; at += sizeof(Item)) {
      *column++ = {static_cast<uint16_t>(begin + at), static_cast<uint16_t>(size)};
    }
    table.kept += size;
  }
  return Launch(CutNarrow<Item, kRowBytes>, CeilDiv(job.rows, kRows), kThreads, 0, stream, table);
}

template <typename Item>
cudaError_t LaunchNarrow(cudaStream_t stream, const Job& job) {
  switch (job.pieces[0].stride) {
    case 4:
      return LaunchNarrow<Item, 4>(stream, job);
    case 8:
      return LaunchNarrow<Item, 8>(stream, job);
    case 16:
      return LaunchNarrow<Item, 16>(stream, job);
    default:
      return LaunchNarrow<Item, 32>(stream, job);
  }
}

template <typename Item, int kStretches>
cudaError_t LaunchStretchesOf(cudaStream_t stream, const std::vector<Stretch>& stretches) {
  Stretches<kStretches> table = {};
  int64_t blocks = 0, first = 0;
  table.equal = true;
  for (Stretch stretch : stretches) {
    // As many whatever the address.
    const int64_t of_it =
        CeilDiv(stretch.bytes + kPackBytes - 1, int64_t{kThreads} * kPackBytes * kStretchPacks);
    if (table.count == 0) first = of_it;
    table.equal = table.equal && of_it == first;
    stretch.first_block = static_cast<uint32_t>(blocks);
    table.stretches[table.count++] = stretch;
    blocks += of_it;
  }
  table.blocks = FastDivider(first);
  return Launch(MoveStretches<Item, kStretches>, blocks, kThreads, 0, stream, table);
}

template <typename Item>
cudaError_t LaunchStretches(cudaStream_t stream, const std::vector<Stretch>& stretches) {
  return stretches.size() <= 64 ? LaunchStretchesOf<Item, 64>(stream, stretches)
                                : LaunchStretchesOf<Item, kMaxDestinations>(stream, stretches);
}

// The rows of all pieces as stretches, if these are few and long; else none.
std::vector<Stretch> FindStretches(const Job& job) {
  std::vector<Stretch> stretches;
  int64_t row_bytes = 0, bytes = 0;
  for (const Destination& d : job.destinations) row_bytes += d.row_bytes;
  if (job.broadcasts || job.rows > kMaxDestinations || row_bytes < kLongStretch) return {};
  for (const Destination& destination : job.destinations) {
    auto* to = static_cast<unsigned char*>(destination.data);
    for (int64_t row = 0; row < job.rows; ++row) {
      for (int64_t p = 0; p < destination.piece_count; ++p) {
        const Piece& piece = job.pieces[destination.first_piece + p];
        if (piece.size > 0) {
          stretches.push_back({static_cast<const unsigned char*>(piece.source) + row * piece.stride,
                               to, piece.size, 0});
        }
        if (piece.size < piece.extent) {
          stretches.push_back({nullptr, to + piece.size, piece.extent - piece.size, 0});
        }
        to += piece.extent;
        bytes += piece.extent;
        if (static_cast<int64_t>(stretches.size()) > kMaxDestinations) return {};
      }
    }
  }
  if (bytes < kLongStretch * static_cast<int64_t>(stretches.size())) return {};
  return stretches;
}

// Whether Join can do it.
bool JoinsFew(const Job& job, int64_t unit) {
  const int filled = FilledPieces(job);
  return unit < kPackBytes && filled > 0 && filled <= (unit < 4 ? 2 : kFewPieces);
}

bool IsWhole(const Job& job, int64_t unit) {
  const size_t pieces = job.pieces.size();
  int64_t row_bytes = 0;
  for (const Destination& d : job.destinations) row_bytes += d.row_bytes;
  if (job.rows * row_bytes / kPackBytes > kMostItems) return false;
  return unit == kPackBytes && (job.destinations.size() == 1 || SplitsOne(job)) &&
         (pieces <= kComparedPieces || (pieces <= kMaxPieces && AreEqual(job)));
}

}  // namespace

bool MovesAsEqual(const Job& job, int64_t unit) {
  const auto count = static_cast<int64_t>(job.pieces.size());
  const bool splits = job.destinations.size() > 1;
  if (job.broadcasts || count <= kFewPieces || count > kMaxPieces || !AreEqual(job) ||
      !AreFull(job)) {
    return false;
  }
  const int64_t extent = job.pieces[0].extent;
  if (splits) {
    const auto destinations = static_cast<int64_t>(job.destinations.size());
    if (destinations != count || !SplitsOne(job)) return false;
  } else {
    for (const Piece& p : job.pieces) {
      if (p.stride != extent) return false;
    }
  }
  const int64_t words = job.rows * count * extent / unit;
  if (words <= (unit == 1 ? kEqualBytes : kEqualWords) && !(splits && extent > kWideCut)) {
    return true;
  }
  // What neighbouring threads write of large ones is whole sectors.
  const int64_t rows =
      splits ? std::max<int64_t>(1, kWordsTogether<uint4, true> * kPackBytes / extent) : 1;
  return IsWhole(job, unit) && extent <= (splits ? kLongestCut : kLongestJoined) &&
         rows * extent % kSectorBytes == 0;
}

cudaError_t LaunchEqual(cudaStream_t stream, const Job& job, int64_t unit) {
  switch (unit) {
    case 16:
      return LaunchEqual<uint4>(stream, job);
    case 2:
      return LaunchEqual<uint16_t>(stream, job);
    case 1:
      return LaunchEqual<uint8_t>(stream, job);
    default:
      return LaunchEqual<uint32_t>(stream, job);
  }
}

bool MovesAsStretches(const Job& job, int64_t unit) {
  return !IsWhole(job, unit) && !FindStretches(job).empty();
}

cudaError_t LaunchStretches(cudaStream_t stream, const Job& job, int64_t unit) {
  const std::vector<Stretch> stretches = FindStretches(job);
  switch (unit) {
    case 16:
    case 8:
      return LaunchStretches<uint2>(stream, stretches);
    case 4:
      return LaunchStretches<uint32_t>(stream, stretches);
    case 2:
      return LaunchStretches<uint16_t>(stream, stretches);
    default:
      return LaunchStretches<uint8_t>(stream, stretches);
  }
}

bool MovesAsNarrow(const Job& job, int64_t unit) {
  const Piece& first = job.pieces[0];
  const int64_t row_bytes = first.stride;
  const size_t pieces = job.pieces.size();
  const bool power =
      row_bytes >= 4 && row_bytes <= kNarrowBytes && (row_bytes & (row_bytes - 1)) == 0;
  if (!power || unit == kPackBytes || job.broadcasts || pieces > kFewPieces ||
      job.destinations.size() != pieces || !SplitsOne(job)) {
    return false;
  }
  const auto* from = static_cast<const unsigned char*>(first.source);
  if (reinterpret_cast<uintptr_t>(from) % kPackBytes != 0 ||
      from + job.rows * row_bytes > static_cast<const unsigned char*>(first.end)) {
    return false;
  }
  int64_t kept = 0;
  for (const Destination& destination : job.destinations) {
    if (destination.piece_count != 1) return false;
    if (destination.row_bytes == 0) continue;
    if (reinterpret_cast<uintptr_t>(destination.data) % kPackBytes != 0) return false;
    kept += destination.row_bytes;
  }
  // Where more is kept, a single piece is as fast item by item, and small items are in tiles.
  return kept > 0 && (2 * kept <= row_bytes || (pieces > 1 && unit >= 4));
}

cudaError_t LaunchNarrow(cudaStream_t stream, const Job& job, int64_t unit) {
  switch (unit) {
    case 8:
    case 4:
      return LaunchNarrow<uint32_t>(stream, job);
    case 2:
      return LaunchNarrow<uint16_t>(stream, job);
    default:
      return LaunchNarrow<uint8_t>(stream, job);
  }
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
  if (!one) return std::ssize(job.destinations) <= (unit == 1 ? kManyCuts : kMaxDestinations);
  if (job.pieces.size() == 1) return true;
  return JoinsFew(job, unit);
}

cudaError_t LaunchPacks(cudaStream_t stream, const Job& job, int64_t unit) {
  if (IsWhole(job, unit)) {
    return job.destinations.size() == 1 ? LaunchWholeOf<false>(stream, job)
                                        : LaunchWholeOf<true>(stream, job);
  }
  switch (unit) {
    case 16:
      return LaunchItems<uint4>(stream, job);
    case 8:
      return LaunchItems<uint2>(stream, job);
    case 4:
      return LaunchItems<uint32_t>(stream, job);
    case 2:
      return LaunchItems<uint16_t>(stream, job);
    default:
      return LaunchItems<uint8_t>(stream, job);
  }
}

}  // namespace jaxops::concatenate::cuda
