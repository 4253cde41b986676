// Concatenation and splitting: bytes move from sources to destinations, see common/concatenate.h.
//
// The table of pieces travels with the launch, as a parameter of the kernel, so that any number of
// arrays is one launch and a CUDA graph can keep it. Blocks own tiles of a destination, which
// they write whole and in order. Where all sizes and addresses are multiples of 4, 8 or 16 bytes,
// threads move units of so many bytes from where they are to where they belong (MoveUnits). Odd
// widths go through shared memory: sources are read in packs of 16 bytes wherever they begin, their
// items take their places in a tile in shared memory, and the tile leaves in packs (MoveItems).
#include <algorithm>
#include <array>
#include <numeric>

#include "common/fast_divide.h"
#include "cuda/concatenate.h"
#include "cuda/launch.h"

namespace jaxops::concatenate::cuda {
namespace {

using jaxops::cuda::CeilDiv;
using jaxops::cuda::Launch;

constexpr int kThreads = 256;
constexpr int kPackBytes = 16;
constexpr int kItemTileBytes = 16 * 1024;

struct PieceEntry {
  const unsigned char* source;
  const unsigned char* end;
  int64_t stride;
  int64_t size;
  int64_t begin;  // in the row of the destination
  // MoveItems: whether rows follow each other closely enough to be read in one go, and the
  // divisor: then of positions by stride, else of packs by those of one row.
  FastDivider divider;
  bool continuous;
  uint32_t varies;
};

struct DestinationEntry {
  unsigned char* data;
  int64_t row_bytes;
  int64_t first_block;
  int first_piece;
  int piece_count;
  bool padded;           // some piece is longer than its source
  FastDivider64 by_row;  // of what a tile counts: units or bytes
};

template <int kPieces, int kDestinations>
struct Table {
  PieceEntry pieces[kPieces];
  DestinationEntry destinations[kDestinations];
  int destination_count;
  int tiles_per_block;
  bool broadcasts;
  int row_dims;
  int64_t rows;
  FastDivider64 row_sizes[kMaxRowDims];

  // The row of a source that belongs to a row of the destination.
  __device__ __forceinline__ int64_t SourceRow(int64_t row, uint32_t varies) const {
    if (!broadcasts) return row;
    uint64_t rest = row;
    int64_t source = 0;
    int64_t stride = 1;
#pragma unroll 1
    for (int d = row_dims - 1; d >= 0; --d) {
      const int64_t index = row_sizes[d].Peel(rest);
      if (varies >> d & 1) {
        source += index * stride;
        stride *= row_sizes[d].divisor();
      }
    }
    return source;
  }
};

// The last entry of `count` whose `first` is not beyond `position`.
template <typename Entry, typename First>
__device__ __forceinline__ int FindLast(const Entry* entries, int count, int64_t position,
                                        First&& first) {
  int low = 0;
  for (int width = count; width > 1;) {
    const int half = width / 2;
    if (first(entries[low + half]) <= position) low += half;
    width -= half;
  }
  return low;
}

template <typename Table>
__device__ __forceinline__ const DestinationEntry& FindDestination(const Table& table) {
  const int found = FindLast(table.destinations, table.destination_count, blockIdx.x,
                             [](const DestinationEntry& d) { return d.first_block; });
  return table.destinations[found];
}

// Copies the destination's pieces to shared memory, where threads may read different ones at once.
template <typename Table>
__device__ __forceinline__ void LoadPieces(PieceEntry* shared, const Table& table,
                                           const DestinationEntry& destination) {
  static_assert(sizeof(PieceEntry) % sizeof(uint32_t) == 0);
  const auto* from = reinterpret_cast<const uint32_t*>(&table.pieces[destination.first_piece]);
  auto* to = reinterpret_cast<uint32_t*>(shared);
  const int words = destination.piece_count * (sizeof(PieceEntry) / sizeof(uint32_t));
  for (int i = threadIdx.x; i < words; i += kThreads) to[i] = from[i];
  __syncthreads();
}

// --- sizes and addresses that are multiples of a unit --------------------------------------------

template <typename Unit>
constexpr int kUnitsPerThread = sizeof(Unit) == 16 ? 4 : 8;

template <typename Unit, typename Table>
__global__ void __launch_bounds__(kThreads) MoveUnits(const __grid_constant__ Table table) {
  constexpr int kUnits = kUnitsPerThread<Unit>;
  constexpr int kTile = kThreads * kUnits;
  extern __shared__ __align__(16) unsigned char shared[];
  auto* pieces = reinterpret_cast<PieceEntry*>(shared);
  const DestinationEntry& destination = FindDestination(table);
  LoadPieces(pieces, table, destination);
  auto* data = reinterpret_cast<Unit*>(destination.data);
  const int64_t row_units = destination.by_row.divisor();
  const int64_t total = table.rows * row_units;
  int64_t first = (blockIdx.x - destination.first_block) * table.tiles_per_block * kTile;
#pragma unroll 1
  for (int tile = 0; tile < table.tiles_per_block && first < total; ++tile, first += kTile) {
    Unit units[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      uint64_t position = first + u * kThreads + threadIdx.x;
      units[u] = Unit{};
      if (position < total) {
        const int64_t column = destination.by_row.Peel(position) * sizeof(Unit);
        const PieceEntry& piece =
            pieces[FindLast(pieces, destination.piece_count, column,
                            [](const PieceEntry& entry) { return entry.begin; })];
        const int64_t offset = column - piece.begin;
        if (offset < piece.size) {
          const int64_t row = table.SourceRow(position, piece.varies);
          units[u] = *reinterpret_cast<const Unit*>(piece.source + row * piece.stride + offset);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int64_t position = first + u * kThreads + threadIdx.x;
      if (position < total) data[position] = units[u];
    }
  }
}

// --- odd widths ----------------------------------------------------------------------------------

// Part of a flat destination in shared memory.
struct Tile {
  unsigned char* bytes;
  int64_t first, last;  // of the flat destination
  int64_t first_row, last_row;
  int64_t first_column, last_column;  // of the row that the tile begins in, and ends in

  __device__ Tile(unsigned char* shared, int64_t begin, int64_t end,
                  const DestinationEntry& destination)
      : bytes(shared), first(begin), last(end) {
    uint64_t position = begin;
    first_column = destination.by_row.Peel(position);
    first_row = position;
    position = end;
    last_column = destination.by_row.Peel(position);
    last_row = position;
  }
};

// The 16 bytes from `address` on, a multiple of 16, zero from `end` on.
__device__ __forceinline__ uint4 LoadPack(const unsigned char* address, const unsigned char* end) {
  if (address + kPackBytes <= end) return *reinterpret_cast<const uint4*>(address);
  union {
    uint4 pack = {};
    unsigned char bytes[kPackBytes];
  };
  for (int i = 0; address + i < end; ++i) bytes[i] = address[i];
  return pack;
}

// Puts those items of a pack into the tile that have a place there: the items of the source from
// `low` up to `high`, counted in bytes from the start of the pack. Item 0 is `offset` bytes into a
// row of the source and belongs at `place`; after `stride` bytes of a source's row, of which `size`
// have a place, the next row's are `skip` bytes further on.
template <typename Item>
__device__ __forceinline__ void Scatter(unsigned char* tile, uint4 pack, int low, int high,
                                        int64_t place, int offset, int stride, int size,
                                        int64_t skip) {
  constexpr int kItem = sizeof(Item);
  constexpr int kWordItems = sizeof(uint32_t) / kItem;
  const uint32_t words[4] = {pack.x, pack.y, pack.z, pack.w};
  // Modulo 2^32, which is enough: items that are put lie within the tile.
  auto at = static_cast<uint32_t>(place);
#pragma unroll
  for (int i = 0; i < kPackBytes; i += kItem) {
    const uint32_t word = words[i / 4] >> (8 * kItem * (i / kItem % kWordItems));
    if (i >= low && i < high && offset < size) {
      *reinterpret_cast<Item*>(tile + at) = static_cast<Item>(word);
    }
    offset += kItem;
    at += kItem;
    if (offset == stride) {
      offset = 0;
      at += static_cast<uint32_t>(skip);
    }
  }
}

// Reads in one go the bytes of a source that have a place in the tile, with those between its rows;
// `threads` threads share the work.
template <typename Item>
__device__ __forceinline__ void MoveContinuous(const Tile& tile, const PieceEntry& piece,
                                               int64_t row_bytes, int thread, int threads) {
  const auto in_piece = [&](int64_t column) {
    return min(max(column - piece.begin, int64_t{0}), piece.size);
  };
  const unsigned char* rows = piece.source + tile.first_row * piece.stride;
  const int64_t begin = in_piece(tile.first_column);
  const int64_t end = (tile.last_row - tile.first_row) * piece.stride + in_piece(tile.last_column);
  if (begin >= end) return;
  // Packs start at multiples of their size, the first one before `begin`.
  const auto misalignment = reinterpret_cast<uintptr_t>(rows + begin) % kPackBytes;
  const unsigned char* first_pack = rows + begin - misalignment;
  const int packs = static_cast<int>(CeilDiv(end - begin + misalignment, kPackBytes));
  const int64_t first_place = tile.first_row * row_bytes + piece.begin - tile.first;
  for (int i = thread; i < packs; i += threads) {
    const uint4 pack = LoadPack(first_pack + i * kPackBytes, piece.end);
    const int start = static_cast<int>(begin - misalignment) + i * kPackBytes;
    // Only a first pack can start before its row; its leading items are left out.
    const int row = start < 0 ? 0 : piece.divider.Quotient(start);
    const int offset = start - row * static_cast<int>(piece.stride);
    Scatter<Item>(tile.bytes, pack, static_cast<int>(begin) - start, static_cast<int>(end) - start,
                  first_place + row * row_bytes + offset, offset, static_cast<int>(piece.stride),
                  static_cast<int>(piece.size), row_bytes - piece.stride);
  }
}

// The same row by row, for sources whose rows are far apart or in another order.
template <typename Item, typename Table>
__device__ __forceinline__ void MoveRows(const Table& table, const Tile& tile,
                                         const PieceEntry& piece, int64_t row_bytes, int thread,
                                         int threads) {
  const int row_packs = piece.divider.divisor();
  const int64_t rows = tile.last_row - tile.first_row + 1;
  for (int64_t i = thread; i < rows * row_packs; i += threads) {
    const int tile_row = piece.divider.Quotient(static_cast<uint32_t>(i));
    const int pack_of_row = static_cast<int>(i) - tile_row * row_packs;
    const int64_t row = tile.first_row + tile_row;
    const int64_t row_place = row * row_bytes + piece.begin - tile.first;
    // The bytes of this row that the tile has a place for.
    const int64_t begin = max(-row_place, int64_t{0});
    const int64_t end = min(tile.last - tile.first - row_place, piece.size);
    if (begin >= end) continue;
    const unsigned char* source =
        piece.source + table.SourceRow(row, piece.varies) * piece.stride + begin;
    const auto misalignment = reinterpret_cast<uintptr_t>(source) % kPackBytes;
    const int start = pack_of_row * kPackBytes - static_cast<int>(misalignment);
    const int64_t left = end - begin;
    if (start >= left) continue;
    const uint4 pack = LoadPack(source + start, piece.end);
    Scatter<Item>(tile.bytes, pack, -start, static_cast<int>(left) - start,
                  row_place + begin + start, 0, INT32_MAX, INT32_MAX, 0);
  }
}

template <typename Item, typename Table>
__global__ void __launch_bounds__(kThreads) MoveItems(const __grid_constant__ Table table) {
  extern __shared__ __align__(16) unsigned char shared[];
  auto* pieces = reinterpret_cast<PieceEntry*>(shared + kItemTileBytes);
  const DestinationEntry& destination = FindDestination(table);
  LoadPieces(pieces, table, destination);
  // Threads of one piece at a time: about as many as it has packs in a tile.
  const int piece_packs = kItemTileBytes / kPackBytes / destination.piece_count;
  const int threads = min(max(1 << (31 - __clz(piece_packs | 1)), 1), kThreads);
  const int group = threadIdx.x / threads;
  const int thread = threadIdx.x % threads;
  const int64_t total = table.rows * destination.row_bytes;
  int64_t first = (blockIdx.x - destination.first_block) * table.tiles_per_block * kItemTileBytes;
#pragma unroll 1
  for (int i = 0; i < table.tiles_per_block && first < total; ++i, first += kItemTileBytes) {
    const int bytes = static_cast<int>(min(int64_t{kItemTileBytes}, total - first));
    const Tile tile(shared, first, first + bytes, destination);
    auto* packs = reinterpret_cast<uint4*>(shared);
    if (destination.padded) {
      for (int p = threadIdx.x; p < kItemTileBytes / kPackBytes; p += kThreads) packs[p] = uint4{};
      __syncthreads();
    }
#pragma unroll 1
    for (int p = group; p < destination.piece_count; p += kThreads / threads) {
      const PieceEntry& piece = pieces[p];
      if (piece.continuous) {
        MoveContinuous<Item>(tile, piece, destination.row_bytes, thread, threads);
      } else {
        MoveRows<Item>(table, tile, piece, destination.row_bytes, thread, threads);
      }
    }
    __syncthreads();
    unsigned char* out = destination.data + first;
    const bool aligned = reinterpret_cast<uintptr_t>(destination.data) % kPackBytes == 0;
    const int whole = aligned ? bytes / kPackBytes : 0;
    for (int p = threadIdx.x; p < whole; p += kThreads) reinterpret_cast<uint4*>(out)[p] = packs[p];
    for (int b = whole * kPackBytes + threadIdx.x; b < bytes; b += kThreads) out[b] = shared[b];
    __syncthreads();
  }
}

// --- launches ------------------------------------------------------------------------------------

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

// Rows so little apart that reading what lies between them costs less than reading each alone.
bool IsContinuous(const Piece& piece, const Job& job) {
  return !job.broadcasts && piece.stride < kItemTileBytes &&
         piece.stride <= piece.size + piece.size / 2 + kPackBytes;
}

PieceEntry MakeEntry(const Piece& piece, int64_t begin, const Job& job) {
  PieceEntry entry{};
  entry.source = static_cast<const unsigned char*>(piece.source);
  entry.end = static_cast<const unsigned char*>(piece.end);
  entry.stride = piece.stride;
  entry.size = piece.size;
  entry.begin = begin;
  entry.varies = piece.varies;
  entry.continuous = IsContinuous(piece, job);
  const int64_t most = std::min<int64_t>(piece.size, kItemTileBytes);
  entry.divider = FastDivider(entry.continuous ? std::max<int64_t>(piece.stride, 1)
                                               : CeilDiv(most, kPackBytes) + 1);
  return entry;
}

// Fills the table for tiles of `tile` things of `unit` bytes; returns the number of blocks.
template <typename Table>
int64_t Fill(Table& table, const Job& job, int64_t unit, int64_t tile) {
  table.broadcasts = job.broadcasts;
  table.row_dims = job.row_dims;
  table.rows = job.rows;
  for (int d = 0; d < job.row_dims; ++d) table.row_sizes[d] = FastDivider64(job.row_sizes[d]);
  // Blocks read the whole table of their destination: the longer it is, the more tiles a block has.
  table.tiles_per_block =
      static_cast<int>(std::clamp<int64_t>(job.pieces.size() / job.destinations.size() / 16, 1, 8));
  int64_t blocks = 0;
  int pieces = 0;
  int count = 0;
  for (const Destination& destination : job.destinations) {
    if (destination.row_bytes == 0) continue;
    DestinationEntry& entry = table.destinations[count++];
    entry.data = static_cast<unsigned char*>(destination.data);
    entry.row_bytes = destination.row_bytes;
    entry.first_block = blocks;
    entry.first_piece = pieces;
    entry.padded = false;
    entry.by_row = FastDivider64(destination.row_bytes / unit);
    int64_t begin = 0;
    for (int64_t p = 0; p < destination.piece_count; ++p) {
      const Piece& piece = job.pieces[destination.first_piece + p];
      entry.padded = entry.padded || piece.size < piece.extent;
      // Nothing would find an empty piece among those that begin where it does.
      if (piece.extent > 0) table.pieces[pieces++] = MakeEntry(piece, begin, job);
      begin += piece.extent;
    }
    entry.piece_count = pieces - entry.first_piece;
    blocks += CeilDiv(job.rows * destination.row_bytes, tile * unit * table.tiles_per_block);
  }
  table.destination_count = count;
  return blocks;
}

template <typename Unit, typename Table>
cudaError_t LaunchUnits(cudaStream_t stream, const Job& job, Table& table, size_t table_bytes) {
  const int64_t blocks = Fill(table, job, sizeof(Unit), kThreads * kUnitsPerThread<Unit>);
  return Launch(MoveUnits<Unit, Table>, blocks, kThreads, table_bytes, stream, table);
}

template <typename Item, typename Table>
cudaError_t LaunchItems(cudaStream_t stream, const Job& job, Table& table, size_t table_bytes) {
  const int64_t blocks = Fill(table, job, 1, kItemTileBytes);
  return Launch(MoveItems<Item, Table>, blocks, kThreads, kItemTileBytes + table_bytes, stream,
                table);
}

template <int kPieces, int kDestinations>
cudaError_t LaunchTable(cudaStream_t stream, const Job& job) {
  Table<kPieces, kDestinations> table;
  static_assert(sizeof(table) <= 32764, "the parameters of a kernel");
  int64_t most = 0;
  for (const Destination& d : job.destinations) most = std::max(most, d.piece_count);
  const size_t bytes = most * sizeof(PieceEntry);
  switch (CommonUnit(job)) {
    case 16:
      return LaunchUnits<uint4>(stream, job, table, bytes);
    case 8:
      return LaunchUnits<uint2>(stream, job, table, bytes);
    case 4:
      return LaunchUnits<uint32_t>(stream, job, table, bytes);
    case 2:
      return LaunchItems<uint16_t>(stream, job, table, bytes);
    default:
      return LaunchItems<unsigned char>(stream, job, table, bytes);
  }
}

}  // namespace

cudaError_t LaunchMove(cudaStream_t stream, const Job& job) {
  const auto pieces = static_cast<int64_t>(job.pieces.size());
  const auto destinations = static_cast<int64_t>(job.destinations.size());
  int64_t row_bytes = 0;
  for (const Destination& d : job.destinations) row_bytes += d.row_bytes;
  if (job.rows == 0 || row_bytes == 0) return cudaSuccess;
  if (pieces <= 8 && destinations <= 8) return LaunchTable<8, 8>(stream, job);
  if (pieces <= kMaxDestinations && destinations <= kMaxDestinations && destinations > 1) {
    return LaunchTable<kMaxDestinations, kMaxDestinations>(stream, job);
  }
  if (pieces <= 64 && destinations == 1) return LaunchTable<64, 1>(stream, job);
  if (pieces <= kMaxPieces && destinations == 1) return LaunchTable<kMaxPieces, 1>(stream, job);
  return cudaErrorInvalidValue;
}

}  // namespace jaxops::concatenate::cuda
