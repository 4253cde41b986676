// Concatenation and splitting at the speed of a copy: a thread owns 16 bytes of a destination,
// loads the items that they are made of, and stores them together.
//
// What a copy is limited by is the order in which addresses reach the memory: it is fastest with
// one pack a thread, in blocks small enough that those which run at the same time make up a short
// stretch of each array. More work for a thread, blocks that stay, copies by the bulk engine and
// hints to the caches, which keep what is written longer than what is read, all cost a few percent.
//
// Items of less than 16 bytes are loaded one by one, because neighbouring ones come from the L1
// cache.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "common/fast_divide.h"
#include "cuda/concatenate.h"
#include "cuda/concatenate_launches.h"
#include "cuda/launch.h"
#include "cuda/numeric.cuh"

namespace jaxops::concatenate::cuda {
namespace {

using jaxops::cuda::CeilDiv;
using jaxops::cuda::kPackBytes;
using jaxops::cuda::Launch;

constexpr int kThreads = 256;
// Pieces of one destination whose places are compared one by one; more than a few whole packs go by
// themselves.
constexpr int kFewPieces = 4;
constexpr int kComparedPieces = 16;
constexpr int kRoundBlocks = 64;
constexpr int64_t kMostItems = int64_t{1} << 30;

template <typename Item>
constexpr int kItems = kPackBytes / sizeof(Item);

template <typename Item>
__device__ __forceinline__ uint4 Pack(const Item (&items)[kItems<Item>]) {
  if constexpr (sizeof(Item) == 16) {
    return items[0];
  } else if constexpr (sizeof(Item) == 8) {
    return {items[0].x, items[0].y, items[1].x, items[1].y};
  } else {
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (sizeof(Item) == 4) {
        words[w] = items[w];
      } else if constexpr (sizeof(Item) == 2) {
        words[w] = __byte_perm(items[2 * w], items[2 * w + 1], 0x5410);
      } else {
        words[w] = __byte_perm(__byte_perm(items[4 * w], items[4 * w + 1], 0x0040),
                               __byte_perm(items[4 * w + 2], items[4 * w + 3], 0x0040), 0x5410);
      }
    }
    return {words[0], words[1], words[2], words[3]};
  }
}

// Stores the next items of a walk, of which there are only so many.
template <typename Item, typename Walk>
__device__ __forceinline__ void StorePack(unsigned char* to, uint32_t left, Walk& walk) {
  if (left < kItems<Item>) {
#pragma unroll 1
    for (uint32_t i = 0; i < left; ++i, walk.Advance()) {
      reinterpret_cast<Item*>(to)[i] = walk.Load();
    }
    return;
  }
  Item items[kItems<Item>];
#pragma unroll
  for (int i = 0; i < kItems<Item>; ++i, walk.Advance()) items[i] = walk.Load();
  *reinterpret_cast<uint4*>(to) = Pack(items);
}

// --- one destination -----------------------------------------------------------------------------

struct JoinedPiece {
  const unsigned char* column0;  // where the piece would be read if it began with the row
  uint32_t begin;                // in items, as what follows
  uint32_t filled;               // where the source ends
  uint32_t end;
  uint32_t stride;  // in bytes
};

constexpr uint32_t kNowhere = UINT32_MAX;

template <int kPieces>
struct Joined {
  JoinedPiece pieces[kPieces];  // what is not there begins at kNowhere
  unsigned char* to;
  FastDivider row_items;
  uint32_t items;
};

// A walk along the items of a destination.
template <typename Item, int kPieces>
struct JoinedItems {
  const Joined<kPieces>& table;
  uint32_t row, column;
  const unsigned char* from;
  uint32_t filled, end;

  __device__ __forceinline__ JoinedItems(uint32_t index, const Joined<kPieces>& joined)
      : table(joined), row(index), column(table.row_items.Peel(row)) {
    Enter();
  }

  __device__ __forceinline__ void Enter() {
    // All comparisons are with constants of the launch, of which none waits for another.
    int found = 0;
#pragma unroll
    for (int i = 1; i < kPieces; ++i) found += table.pieces[i].begin <= column;
    const JoinedPiece& piece = table.pieces[found];
    from = piece.column0 + uint64_t{row} * piece.stride + uint64_t{column} * sizeof(Item);
    filled = piece.filled;
    end = piece.end;
  }

  __device__ __forceinline__ Item Load() const {
    return column < filled ? __ldg(reinterpret_cast<const Item*>(from)) : Item{};
  }

  __device__ __forceinline__ void Advance() {
    from += sizeof(Item);
    if (++column != end) return;
    if (column == table.row_items.divisor()) {
      column = 0;
      ++row;
    }
    Enter();
  }
};

// The same for two pieces that sources fill: one of them is chosen as fast as its end is seen.
template <typename Item>
struct JoinedItems<Item, 2> {
  const Joined<2>& table;
  uint32_t row, column;
  const unsigned char* rows[2];

  __device__ __forceinline__ JoinedItems(uint32_t index, const Joined<2>& joined)
      : table(joined), row(index), column(table.row_items.Peel(row)) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows[i] = table.pieces[i].column0 + uint64_t{row} * table.pieces[i].stride;
    }
  }

  __device__ __forceinline__ Item Load() const {
    const unsigned char* from = column < table.pieces[1].begin ? rows[0] : rows[1];
    return __ldg(reinterpret_cast<const Item*>(from) + column);
  }

  __device__ __forceinline__ void Advance() {
    if (++column == table.row_items.divisor()) {
      column = 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) rows[i] += table.pieces[i].stride;
    }
  }
};

template <typename Item, int kPieces>
__global__ void __launch_bounds__(kThreads) Join(const __grid_constant__ Joined<kPieces> table) {
  const uint32_t first = (blockIdx.x * kThreads + threadIdx.x) * kItems<Item>;
  if (first >= table.items) return;
  JoinedItems<Item, kPieces> walk(first, table);
  StorePack<Item>(table.to + uint64_t{first} * sizeof(Item), table.items - first, walk);
}

// --- pieces by themselves ------------------------------------------------------------------------

// A piece that is all of a destination, or of which every row is whole packs of one.
struct MovedPiece {
  const unsigned char* source;
  unsigned char* to;
  int64_t gap;         // bytes of the source from the end of a row to the next one
  uint32_t stride;     // in bytes
  uint32_t to_stride;  // in bytes
  FastDivider row_items;
  uint32_t filled;  // items of a row that the source has
  uint32_t items;
  uint32_t first_block;  // in a round
  uint32_t blocks;       // there
};

// Blocks go round the pieces, so that those of neighbouring rows run at the same time.
template <int kPieces>
struct Moved {
  MovedPiece pieces[kPieces];
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

// A walk along the items of a piece.
template <typename Item>
struct MovedItems {
  const MovedPiece& piece;
  uint32_t row, column;
  const unsigned char* from;

  __device__ __forceinline__ MovedItems(uint32_t index, const MovedPiece& moved)
      : piece(moved),
        row(index),
        column(piece.row_items.Peel(row)),
        from(piece.source + uint64_t{row} * piece.stride + uint64_t{column} * sizeof(Item)) {}

  __device__ __forceinline__ Item Load() const {
    return column < piece.filled ? __ldg(reinterpret_cast<const Item*>(from)) : Item{};
  }

  __device__ __forceinline__ void Advance() {
    from += sizeof(Item);
    if (++column == piece.row_items.divisor()) {
      column = 0;
      from += piece.gap;
    }
  }
};

template <typename Item, int kPieces>
__global__ void __launch_bounds__(kThreads) Move(const __grid_constant__ Moved<kPieces> table) {
  uint32_t round = blockIdx.x;
  const uint32_t block = table.round.Peel(round);
  const MovedPiece& piece = table.pieces[table.Find(block)];
  const uint32_t own_block = round * piece.blocks + block - piece.first_block;
  const uint32_t first = (own_block * kThreads + threadIdx.x) * kItems<Item>;
  if (first >= piece.items) return;
  MovedItems<Item> walk(first, piece);
  if constexpr (sizeof(Item) == kPackBytes) {
    unsigned char* to = piece.to + uint64_t{walk.row} * piece.to_stride;
    *(reinterpret_cast<uint4*>(to) + walk.column) = walk.Load();
  } else {
    StorePack<Item>(piece.to + uint64_t{first} * sizeof(Item), piece.items - first, walk);
  }
}

// --- launches ------------------------------------------------------------------------------------

template <typename Item, int kPieces>
cudaError_t LaunchJoin(cudaStream_t stream, const Job& job) {
  const auto items = [](int64_t bytes) { return static_cast<uint32_t>(bytes / sizeof(Item)); };
  const Destination& destination = job.destinations[0];
  Joined<kPieces> table = {};
  for (JoinedPiece& piece : table.pieces) piece.begin = kNowhere;
  table.to = static_cast<unsigned char*>(destination.data);
  table.row_items = FastDivider(items(destination.row_bytes));
  table.items = items(job.rows * destination.row_bytes);
  int64_t begin = 0;
  int count = 0;
  for (int64_t p = 0; p < destination.piece_count; ++p) {
    const Piece& piece = job.pieces[destination.first_piece + p];
    if (piece.extent == 0) continue;
    table.pieces[count++] = {static_cast<const unsigned char*>(piece.source) - begin, items(begin),
                             items(begin + piece.size), items(begin + piece.extent),
                             static_cast<uint32_t>(piece.stride)};
    begin += piece.extent;
  }
  return Launch(Join<Item, kPieces>, CeilDiv(table.items, kItems<Item> * kThreads), kThreads, 0,
                stream, table);
}

template <typename Item, int kPieces>
cudaError_t LaunchMoved(cudaStream_t stream, const Job& job) {
  const auto items = [](int64_t bytes) { return static_cast<uint32_t>(bytes / sizeof(Item)); };
  const auto pieces = static_cast<int>(job.pieces.size());
  Moved<kPieces> table;
  table.count = 0;
  int64_t common = 0, all = 0;
  for (const Piece& piece : job.pieces) {
    common = std::gcd(common, piece.extent);
    all += piece.extent;
  }
  // In the proportion of their sizes, so that all come to their ends together.
  const double share = std::min(1.0 / common, std::max<double>(kRoundBlocks, 8 * pieces) / all);
  int64_t round = 0, rounds = 0;
  for (const Destination& destination : job.destinations) {
    int64_t begin = 0;
    for (int64_t p = 0; p < destination.piece_count; ++p) {
      const Piece& piece = job.pieces[destination.first_piece + p];
      if (piece.extent == 0) continue;
      MovedPiece& moved = table.pieces[table.count++];
      moved.source = static_cast<const unsigned char*>(piece.source);
      moved.to = static_cast<unsigned char*>(destination.data) + begin;
      moved.stride = static_cast<uint32_t>(piece.stride);
      moved.to_stride = static_cast<uint32_t>(destination.row_bytes);
      moved.row_items = FastDivider(items(piece.extent));
      moved.filled = items(piece.size);
      moved.items = items(job.rows * piece.extent);
      moved.gap = piece.stride - piece.extent;
      const auto blocks = std::max<int64_t>(1, std::llround(piece.extent * share));
      moved.first_block = static_cast<uint32_t>(round);
      moved.blocks = static_cast<uint32_t>(blocks);
      rounds = std::max(rounds, CeilDiv(CeilDiv(moved.items, kItems<Item> * kThreads), blocks));
      round += blocks;
      begin += piece.extent;
    }
  }
  table.round = FastDivider(round);
  return Launch(Move<Item, kPieces>, round * rounds, kThreads, 0, stream, table);
}

template <typename Item>
cudaError_t LaunchItems(cudaStream_t stream, const Job& job) {
  const size_t pieces = job.pieces.size();
  if (job.destinations.size() == 1) {
    const bool full = std::all_of(job.pieces.begin(), job.pieces.end(), [](const Piece& piece) {
      return piece.size == piece.extent && piece.size > 0;
    });
    if (pieces == 2 && full) return LaunchJoin<Item, 2>(stream, job);
    if (pieces > 1 && pieces <= kFewPieces) return LaunchJoin<Item, kFewPieces>(stream, job);
    if (pieces > 1 && sizeof(Item) < kPackBytes)
      return LaunchJoin<Item, kComparedPieces>(stream, job);
  }
  if (pieces <= 2) return LaunchMoved<Item, 2>(stream, job);
  if (pieces <= 16) return LaunchMoved<Item, 16>(stream, job);
  if (pieces <= 64) return LaunchMoved<Item, 64>(stream, job);
  return LaunchMoved<Item, kMaxPieces>(stream, job);
}

}  // namespace

bool MovesAsPacks(const Job& job, int64_t unit) {
  if (job.broadcasts || static_cast<int64_t>(job.pieces.size()) > kMaxPieces) return false;
  const bool one = job.destinations.size() == 1;
  if (one && unit < kPackBytes && job.pieces.size() > kComparedPieces) return false;
  for (const Destination& d : job.destinations) {
    if (!one && d.piece_count != 1) return false;
    if (reinterpret_cast<uintptr_t>(d.data) % kPackBytes != 0) return false;
    // Counts of items have 32 bits, and rounds may reach beyond the last one.
    if (job.rows * d.row_bytes / unit > kMostItems) return false;
    if (d.row_bytes > UINT32_MAX) return false;
  }
  return std::all_of(job.pieces.begin(), job.pieces.end(),
                     [](const Piece& piece) { return piece.stride <= UINT32_MAX; });
}

cudaError_t LaunchPacks(cudaStream_t stream, const Job& job, int64_t unit) {
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
