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
#include <type_traits>

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
constexpr int kRunThreads = 256;
// Threads of a block that has few words to move, and of one of more, so that there are not too many
// blocks. They are known when kernels are compiled, because the size of a block is a constant of
// the launch that is waited for on its own.
constexpr int kJoinThreads = 256;
constexpr int kMoreJoinThreads = 384;
template <typename Word, int kPieces>
constexpr int kAlikeThreads = kPieces * sizeof(Word) > 32 ? 64 : 128;
template <typename Word, int kPieces>
constexpr int kMoreAlikeThreads = kPieces * sizeof(Word) > 32 ? 128 : 192;
// Up to so many words.
constexpr int64_t kFewJoined = 24576;
constexpr int64_t kFewAlike = 12288;
// Up to so many words, the launch and the first access cost more than all the rest.
constexpr int64_t kSmallWords = int64_t{1} << 16;
constexpr int64_t kSmallJoinedWords = 2 * kSmallWords;
constexpr int64_t kMostRunBlocks = 1024;
constexpr int kMostAlike = 4;
constexpr int kFewRuns = 4;
constexpr int kMostRuns = 16;
// Packs of a thread that are under way together where rows are long.
constexpr int kLongPacks = 4;
// Blocks that keep a device busy: not before there are so many do threads get more work each.
constexpr int kEnoughBlocks = 512;
constexpr int kLineBytes = 128;
constexpr int kFewPatterns = 16;
constexpr int64_t kLongestRow = 65536;
constexpr int kFewPieces = 64;
constexpr int kListedPieces = 8;
// As many as fit the parameters of a kernel.
constexpr int64_t kTableDestinations = 200;
// Steps of a block: one piece of work after the other in the order of the addresses suits the
// memory best, but recipes of two sources have to be made up for, and copying the table of many
// pieces.
constexpr int kQuickSteps = 4;
constexpr int kPiecesOfStep = 16;

struct PieceEntry {
  const unsigned char* source;
  const unsigned char* end;
  int64_t stride;
  int64_t size;
  int64_t begin;   // in the row of the destination
  int64_t extent;  // there
  uint32_t varies;
};

struct DestinationEntry {
  unsigned char* data;
  int64_t first_block;
  int first_piece;
  int piece_count;
  FastDivider64 by_row;  // bytes of a row
  // MoveRows: the rows and the words that repeat, and the blocks that share them: so many beside
  // each other, with `width` words each, one below the other; and the patterns beside each other in
  // a block.
  int pattern_rows;
  int64_t patterns;
  int64_t pattern_words;
  FastDivider width;
  FastDivider blocks_beside;
  int blocks_below;
  int beside;

  JAXOPS_HOST_DEVICE int64_t row_bytes() const { return static_cast<int64_t>(by_row.divisor()); }
};

template <int kPieces, int kDestinations>
struct Table {
  static constexpr int kPieceCapacity = kPieces;
  static constexpr int kDestinationCapacity = kDestinations;

  PieceEntry pieces[kPieces];
  DestinationEntry destinations[kDestinations];
  int destination_count;
  int packs;  // of a thread at a time: MoveLong
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
  // Known when the kernel is compiled, which spares small calls a chain of constants to wait for.
  if constexpr (Table::kDestinationCapacity == 1) return table.destinations[0];
  const int found = FindLast(table.destinations, table.destination_count, blockIdx.x,
                             [](const DestinationEntry& d) { return d.first_block; });
  return table.destinations[found];
}

// The destination's pieces where threads may read different ones at once: few of them as they came
// with the launch, more from shared memory. The kernel's constants hand out one address of a warp
// at a time, so a warp copies one piece after the other.
template <typename Table>
__device__ __forceinline__ const PieceEntry* PiecesOf(const DestinationEntry& destination,
                                                      const Table& table, unsigned char* shared) {
  const PieceEntry* listed = &table.pieces[destination.first_piece];
  if constexpr (Table::kPieceCapacity <= kListedPieces) {
    return listed;
  } else {
    auto* copied = reinterpret_cast<PieceEntry*>(shared);
    for (int i = threadIdx.x / kWarp; i < destination.piece_count; i += kThreads / kWarp) {
      const PieceEntry piece = listed[i];
      if (threadIdx.x % kWarp == 0) copied[i] = piece;
    }
    __syncthreads();
    return copied;
  }
}

// --- many rows -----------------------------------------------------------------------------------

// What is read where there is nothing to read, so that no thread waits at a branch with its loads.
__device__ const uint4 kZeros = {};

// What one thread writes again and again: a word, made of words of sources. Nibble i of a selector
// is 4 + the byte of that source that becomes byte i, or i where another one brings it.
template <typename Word, int kSources>
struct Recipe {
  const unsigned char* words[kSources];
  int64_t strides[kSources];  // bytes to the same word where the pattern is met again
  uint32_t selectors[kSources];
  int count = 0;

  // Works out word `index` of the pattern that begins at `row`. Items as large as a word have one
  // source, and smaller ones no more than there are of them.
  __device__ __forceinline__ Recipe(int64_t index, int64_t row, const DestinationEntry& destination,
                                    const PieceEntry* pieces) {
    constexpr int kItem = sizeof(Word) / kSources;
    int64_t column = index * static_cast<int64_t>(sizeof(Word));
    if (destination.pattern_rows > 1) {
      uint64_t rows = column;
      column = destination.by_row.Peel(rows);
      row += rows;
    }
#pragma unroll
    for (int item = 0; item < kSources; ++item, column += kItem) {
      if (column >= destination.row_bytes()) {
        column -= destination.row_bytes();
        ++row;
      }
      const PieceEntry& piece =
          pieces[FindLast(pieces, destination.piece_count, column,
                          [](const PieceEntry& entry) { return entry.begin; })];
      const int64_t offset = column - piece.begin;
      if (offset >= piece.size) continue;
      const unsigned char* from = piece.source + row * piece.stride + offset;
      const auto byte = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from) % sizeof(Word));
      // Items take neighbouring bytes, so a word that is met again is the last one or a new one.
      bool known = false;
#pragma unroll
      for (int s = 0; s < kSources; ++s) {
        known = known || (s < count && words[s] == from - byte);
      }
      if (!known) ++count;
#pragma unroll
      for (int s = 0; s < kSources; ++s) {
        if (!known && s == count - 1) {
          words[s] = from - byte;
          strides[s] = piece.stride * destination.pattern_rows;
          selectors[s] = 0x3210;
        }
        if (s < count && words[s] == from - byte) {
#pragma unroll
          for (int b = item * kItem; b < (item + 1) * kItem && kSources > 1; ++b) {
            selectors[s] = (selectors[s] & ~(0xfu << 4 * b)) | (4 + byte + b - item * kItem)
                                                                   << 4 * b;
          }
        }
      }
    }
#pragma unroll
    for (int s = 0; s < kSources; ++s) {
      if (s < count) continue;
      words[s] = reinterpret_cast<const unsigned char*>(&kZeros);
      strides[s] = 0;
      selectors[s] = 0x3210;
    }
  }

  // The word that is `patterns` further on.
  __device__ __forceinline__ Word Make(int patterns) const {
    Word word = {};
#pragma unroll
    for (int s = 0; s < kSources; ++s) {
      const Word read = __ldca(reinterpret_cast<const Word*>(words[s] + patterns * strides[s]));
      if constexpr (kSources == 1) {
        word = read;
      } else {
        word = __byte_perm(word, read, selectors[s]);
      }
    }
    return word;
  }

  __device__ __forceinline__ void Advance(int64_t patterns) {
#pragma unroll
    for (int s = 0; s < kSources; ++s) words[s] += patterns * strides[s];
  }
};

// Words of a thread that are under way together. They are loaded by __ldca, because the compiler
// puts other loads each beside its store, and so one behind the other, to save registers.
template <typename Word, int kSources>
constexpr int kTogether =
    std::min<int>(kSources <= 2 ? 8 : 4, (kSources == 1 ? 32 : 64) / sizeof(Word));

template <typename Word, int kSources, typename Table>
__global__ void __launch_bounds__(kThreads) MoveRows(const __grid_constant__ Table table) {
  constexpr int kMany = kTogether<Word, kSources>;
  extern __shared__ __align__(16) unsigned char shared[];
  const DestinationEntry& destination = FindDestination(table);
  const PieceEntry* pieces = PiecesOf(destination, table, shared);
  auto block = static_cast<uint32_t>(blockIdx.x - destination.first_block);
  const auto column = static_cast<int64_t>(destination.blocks_beside.Peel(block));
  auto lane = static_cast<uint32_t>(threadIdx.x);
  const int64_t word = column * destination.width.divisor() + destination.width.Peel(lane);
  const int beside = destination.beside;
  const int64_t patterns = destination.patterns;
  // All blocks go through the rows together, each kMany times `beside` patterns in a step.
  int64_t pattern = int64_t{block} * kMany * beside + lane;
  if (lane < beside && word < destination.pattern_words && pattern < patterns) {
    Recipe<Word, kSources> recipe(word, pattern * destination.pattern_rows, destination, pieces);
    auto* to =
        reinterpret_cast<Word*>(destination.data) + pattern * destination.pattern_words + word;
    const int64_t advance = beside * destination.pattern_words;
    const int64_t stride = int64_t{destination.blocks_below} * kMany * beside;
    const int64_t whole_end = patterns - (kMany - 1) * beside;
#pragma unroll 1
    for (; pattern < whole_end; pattern += stride, to += stride * destination.pattern_words) {
      Word words[kMany];
#pragma unroll
      for (int i = 0; i < kMany; ++i) words[i] = recipe.Make(i * beside);
      recipe.Advance(stride);
#pragma unroll
      for (int i = 0; i < kMany; ++i) to[i * advance] = words[i];
    }
#pragma unroll 1
    for (; pattern < patterns; pattern += beside, to += advance) {
      *to = recipe.Make(0);
      recipe.Advance(beside);
    }
  }

  // The last rows, too few for a pattern, byte by byte.
  const int64_t end = table.rows * destination.row_bytes();
  int64_t at = patterns * destination.pattern_rows * destination.row_bytes();
  for (at += (blockIdx.x - destination.first_block) * kThreads + threadIdx.x; at < end;
       at += int64_t{destination.blocks_beside.divisor()} * destination.blocks_below * kThreads) {
    uint64_t row = at;
    const auto from_row = static_cast<int64_t>(destination.by_row.Peel(row));
    const PieceEntry& piece = pieces[FindLast(pieces, destination.piece_count, from_row,
                                              [](const PieceEntry& entry) { return entry.begin; })];
    const int64_t offset = from_row - piece.begin;
    destination.data[at] =
        offset < piece.size ? piece.source[static_cast<int64_t>(row) * piece.stride + offset] : 0;
  }
}

// --- long rows -----------------------------------------------------------------------------------

// The aligned word at `address`, of which the bytes from `end` on are not there.
__device__ __forceinline__ uint32_t LoadWord(const unsigned char* address,
                                             const unsigned char* end) {
  if (address + 4 <= end) return __ldca(reinterpret_cast<const uint32_t*>(address));
  uint32_t word = 0;
  for (int i = 0; address + i < end; ++i) word |= uint32_t{address[i]} << 8 * i;
  return word;
}

// The 16 bytes at any `address`; those outside [low, high) are not read and come out as anything.
__device__ __forceinline__ void LoadShifted(uint32_t (&words)[4], const unsigned char* address,
                                            int low, int high, const unsigned char* end) {
  const int misalignment = reinterpret_cast<uintptr_t>(address) % 4;
  const unsigned char* first = address - misalignment;
  uint32_t loaded[5];
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    const int begin = 4 * i - misalignment;
    loaded[i] = begin + 4 > low && begin < high ? LoadWord(first + 4 * i, end) : 0;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = __funnelshift_r(loaded[i], loaded[i + 1], 8 * misalignment);
  }
}

// The bytes [low, high) of word `index` of a pack, as a mask.
__device__ __forceinline__ uint32_t ByteMask(int low, int high, int index) {
  const int begin = min(max(low - 4 * index, 0), 4);
  const int end = min(max(high - 4 * index, 0), 4);
  return static_cast<uint32_t>((uint64_t{1} << 8 * end) - (uint64_t{1} << 8 * begin));
}

// A pack of a destination: where it begins.
struct Place {
  int64_t row, column;
  const PieceEntry* piece;

  __device__ __forceinline__ Place(uint64_t position, const DestinationEntry& destination,
                                   const PieceEntry* pieces) {
    column = destination.by_row.Peel(position);
    row = position;
    Find(destination, pieces);
  }
  __device__ __forceinline__ void Find(const DestinationEntry& destination,
                                       const PieceEntry* pieces) {
    piece = pieces + FindLast(pieces, destination.piece_count, column,
                              [](const PieceEntry& entry) { return entry.begin; });
  }
  __device__ __forceinline__ int64_t offset() const { return column - piece->begin; }
};

// Gathers the bytes of a pack, of which there are `bytes`, from as many pieces as it takes.
template <typename Table>
__device__ __forceinline__ void GatherPack(uint32_t (&words)[4], Place place, int bytes,
                                           const Table& table, const DestinationEntry& destination,
                                           const PieceEntry* pieces) {
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = 0;
  for (int done = 0; done < bytes;) {
    const PieceEntry& piece = *place.piece;
    const int64_t offset = place.offset();
    const int here = static_cast<int>(min(piece.extent - offset, int64_t{bytes - done}));
    const int filled = static_cast<int>(min(max(piece.size - offset, int64_t{0}), int64_t{here}));
    if (filled > 0) {
      const int64_t row = table.SourceRow(place.row, piece.varies);
      uint32_t shifted[4];
      LoadShifted(shifted, piece.source + row * piece.stride + offset - done, done, done + filled,
                  piece.end);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t mask = ByteMask(done, done + filled, i);
        words[i] = (words[i] & ~mask) | (shifted[i] & mask);
      }
    }
    done += here;
    place.column += here;
    if (place.column == destination.row_bytes()) {
      place.column = 0;
      ++place.row;
    }
    place.Find(destination, pieces);
  }
}

// kAligned: every size and address is a multiple of 16 bytes.
template <bool kAligned, typename Table>
__global__ void __launch_bounds__(kThreads) MoveLong(const __grid_constant__ Table table) {
  constexpr int kPacks = kLongPacks;
  extern __shared__ __align__(16) unsigned char shared[];
  const DestinationEntry& destination = FindDestination(table);
  const PieceEntry* pieces = PiecesOf(destination, table, shared);
  const int64_t total = table.rows * destination.row_bytes();
  const int64_t tile_bytes = int64_t{table.packs} * kThreads * kPackBytes;
  int64_t first = (blockIdx.x - destination.first_block) * table.tiles_per_block * tile_bytes;
#pragma unroll 1
  for (int tile = 0; tile < table.tiles_per_block && first < total; ++tile, first += tile_bytes) {
    uint32_t packs[kPacks][4];
    uint32_t left = 0;  // bit i: pack i has yet to be gathered
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int64_t position = first + (i * kThreads + threadIdx.x) * kPackBytes;
      if (i >= table.packs || position >= total) continue;
      const Place place(position, destination, pieces);
      const int64_t offset = place.offset();
      const int64_t row = table.SourceRow(place.row, place.piece->varies);
      const unsigned char* from = place.piece->source + row * place.piece->stride + offset;
      if constexpr (kAligned) {
        uint4 pack = {};
        if (offset < place.piece->size) pack = __ldca(reinterpret_cast<const uint4*>(from));
        packs[i][0] = pack.x, packs[i][1] = pack.y, packs[i][2] = pack.z, packs[i][3] = pack.w;
      } else if (offset + kPackBytes <= place.piece->size) {
        LoadShifted(packs[i], from, 0, kPackBytes, place.piece->end);
      } else {
        left |= 1u << i;
      }
    }
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int64_t position = first + (i * kThreads + threadIdx.x) * kPackBytes;
      if (i >= table.packs || position >= total) continue;
      const int bytes = static_cast<int>(min(total - position, int64_t{kPackBytes}));
      if (left >> i & 1) {
        GatherPack(packs[i], Place(position, destination, pieces), bytes, table, destination,
                   pieces);
      }
      unsigned char* to = destination.data + position;
      if (bytes == kPackBytes && reinterpret_cast<uintptr_t>(to) % kPackBytes == 0) {
        *reinterpret_cast<uint4*>(to) = uint4{packs[i][0], packs[i][1], packs[i][2], packs[i][3]};
      } else {
#pragma unroll
        for (int b = 0; b < kPackBytes; ++b) {
          if (b < bytes) to[b] = static_cast<unsigned char>(packs[i][b / 4] >> 8 * (b % 4));
        }
      }
    }
  }
}

// --- small arrays --------------------------------------------------------------------------------

// What takes longest is to wait for the constants of the launch, which come by lines of 64 bytes,
// the first with 16 bytes of others.

// Equal pieces of the rows of one array, whose own rows follow each other. All is in the first
// line.
template <int kPieces>
struct Alike {
  unsigned char* pieces[kPieces];
  unsigned char* whole;
  uint16_t last;        // word of a piece in all rows
  uint16_t size;        // words of a row of a piece
  uint32_t multiplier;  // of the number of a word, counted from 1; the upper half is its row
};

// A thread has the same word of each piece, whose place there is known before the row is. Threads
// beyond the last word move that word again, as a branch would be met before the first access.
template <typename Word, bool kSplits, int kOfBlock, int kPieces>
__global__ void __launch_bounds__(kOfBlock)
    MoveAlike(const __grid_constant__ Alike<kPieces> table) {
  const uint32_t index = min(blockIdx.x * kOfBlock + threadIdx.x, uint32_t{table.last});
  const uint32_t size = table.size;
  const uint32_t row = __umulhi(index + 1, table.multiplier);
  const uint32_t in_whole = index + row * (kPieces - 1) * size;
  Word* const whole = reinterpret_cast<Word*>(table.whole);
  Word words[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const Word* piece = reinterpret_cast<const Word*>(table.pieces[i]);
    words[i] = __ldg(kSplits ? whole + in_whole + i * size : piece + index);
  }
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    Word* piece = reinterpret_cast<Word*>(table.pieces[i]);
    *(kSplits ? piece + index : whole + in_whole + i * size) = words[i];
  }
}

// Two pieces whose rows follow each other. All is in the first line.
struct Joined {
  const unsigned char* first;
  unsigned char* to;
  int64_t difference;  // bytes, as of the places where the pieces would be if they began with a row
  FastDivider row_words;
  uint32_t last;    // word of all rows
  uint32_t filled;  // words of a row, before zeros
  uint32_t begin;   // of the second piece
};

template <typename Word, int kOfBlock>
__global__ void __launch_bounds__(kOfBlock) JoinWords(const __grid_constant__ Joined table) {
  const uint32_t index = min(blockIdx.x * kOfBlock + threadIdx.x, table.last);
  uint32_t row = index;
  const uint32_t column = table.row_words.Peel(row);
  const bool beyond = table.begin <= column;
  // Zeros are read too, as the last word before them.
  const uint32_t at =
      min(column, table.filled - 1) + row * (beyond ? table.filled - table.begin : table.begin);
  const unsigned char* from = table.first + (beyond ? table.difference : 0);
  const Word word = __ldg(reinterpret_cast<const Word*>(from) + at);
  reinterpret_cast<Word*>(table.to)[index] = column < table.filled ? word : Word{};
}

// A piece of all rows, or zeros there. Counts and strides are of words.
struct Run {
  const unsigned char* from;  // null for zeros
  unsigned char* to;
  uint32_t from_stride;
  uint32_t to_stride;
  uint32_t words;  // of a row
  uint32_t rows;
};

// None is in two lines of constants.
template <int kRuns>
struct Runs {
  uint32_t first_line[4];
  Run runs[kRuns];
};

// A block has some rows and columns of one piece, so that all that a thread has to know comes with
// one line, and nothing is divided.
template <typename Word, int kRuns>
__global__ void __launch_bounds__(kRunThreads) MoveRuns(const __grid_constant__ Runs<kRuns> table) {
  Run run = table.runs[blockIdx.x];
  // All are on their way before the first is needed.
  asm volatile(""
               : "+l"(run.from), "+r"(run.from_stride), "+r"(run.to_stride), "+r"(run.words),
                 "+r"(run.rows));
  const uint32_t row = blockIdx.y * blockDim.y + threadIdx.y;
  const uint32_t column = blockIdx.z * blockDim.x + threadIdx.x;
  Word word = {};
  if (run.from != nullptr) {
    // Without a branch before the load threads beyond the piece read its last word.
    const uint32_t at = min(row, run.rows - 1) * run.from_stride + min(column, run.words - 1);
    word = __ldg(reinterpret_cast<const Word*>(run.from) + at);
  }
  if (column < run.words && row < run.rows) {
    reinterpret_cast<Word*>(run.to)[row * run.to_stride + column] = word;
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

// Rows after which words of 4 bytes or more begin at the beginning of a row again.
int64_t PatternRows(int64_t unit) { return unit < 4 ? 4 / unit : 1; }

// Whether patterns repeat often enough and close enough to be worth working out, and MoveRows can:
// one source row follows the other, and words can be written as such.
bool HasManyRows(const Job& job, int64_t unit) {
  uintptr_t addresses = 0;
  int64_t longest = 0;
  for (const Destination& d : job.destinations) {
    addresses |= reinterpret_cast<uintptr_t>(d.data);
    longest = std::max(longest, d.row_bytes);
  }
  return !job.broadcasts && job.rows / PatternRows(unit) >= kFewPatterns &&
         longest <= kLongestRow && addresses % sizeof(uint32_t) == 0;
}

// Fills in what both kernels need; `blocks(entry)` completes an entry with the number of its
// blocks.
template <typename Table, typename Blocks>
int64_t Fill(Table& table, const Job& job, Blocks&& blocks) {
  table.broadcasts = job.broadcasts;
  table.row_dims = job.row_dims;
  table.rows = job.rows;
  for (int d = 0; d < job.row_dims; ++d) table.row_sizes[d] = FastDivider64(job.row_sizes[d]);
  int64_t all_blocks = 0;
  int pieces = 0;
  int count = 0;
  for (const Destination& destination : job.destinations) {
    if (destination.row_bytes == 0) continue;
    DestinationEntry& entry = table.destinations[count++];
    entry.data = static_cast<unsigned char*>(destination.data);
    entry.by_row = FastDivider64(destination.row_bytes);
    entry.first_block = all_blocks;
    entry.first_piece = pieces;
    int64_t begin = 0;
    for (int64_t p = 0; p < destination.piece_count; ++p) {
      const Piece& piece = job.pieces[destination.first_piece + p];
      // Nothing would find an empty piece among those that begin where it does.
      if (piece.extent > 0) {
        table.pieces[pieces++] = {static_cast<const unsigned char*>(piece.source),
                                  static_cast<const unsigned char*>(piece.end),
                                  piece.stride,
                                  piece.size,
                                  begin,
                                  piece.extent,
                                  piece.varies};
      }
      begin += piece.extent;
    }
    entry.piece_count = pieces - entry.first_piece;
    all_blocks += blocks(entry);
  }
  table.destination_count = count;
  return all_blocks;
}

// How many blocks of a kernel run at the same time on the present device.
template <typename Params>
cudaError_t ResidentBlocks(void (*kernel)(Params), size_t bytes, int64_t* blocks) {
  int device, processors, of_processor;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_processor, kernel, kThreads, bytes);
  *blocks = int64_t{processors} * of_processor;
  return error;
}

template <typename Word, int kSources, typename Table>
cudaError_t LaunchRows(cudaStream_t stream, const Job& job, Table& table, size_t table_bytes) {
  constexpr int kMany = kTogether<Word, kSources>;
  int64_t row_bytes = 0;
  for (const Destination& d : job.destinations) row_bytes += d.row_bytes;
  int64_t resident = 0;
  const cudaError_t error = ResidentBlocks(MoveRows<Word, kSources, Table>, table_bytes, &resident);
  if (error != cudaSuccess) return error;
  const int64_t blocks = Fill(table, job, [&](DestinationEntry& entry) {
    int64_t rows = PatternRows(sizeof(Word) / kSources);
    // Warps write whole lines of the cache where a pattern is a number of them. Words of four items
    // do not gain by it.
    while (kSources <= 2 && entry.row_bytes() * rows % kLineBytes != 0 &&
           job.rows / (2 * rows) >= kFewPatterns) {
      rows *= 2;
    }
    const int64_t patterns = job.rows / rows;
    entry.pattern_rows = static_cast<int>(rows);
    entry.patterns = patterns;
    entry.pattern_words = entry.row_bytes() * rows / sizeof(Word);
    const int64_t blocks_beside = CeilDiv(entry.pattern_words, kThreads);
    const int64_t width = blocks_beside == 1
                              ? entry.pattern_words
                              : CeilDiv(CeilDiv(entry.pattern_words, blocks_beside), 32) * 32;
    entry.blocks_beside = FastDivider(blocks_beside);
    entry.width = FastDivider(width);
    entry.beside = static_cast<int>(kThreads / width);
    // Where recipes are found quickly, blocks are many and short, which the device likes best;
    // otherwise as many as run at once, so that destinations that share a source read it together.
    const double share = static_cast<double>(entry.row_bytes()) / row_bytes;
    const int64_t steps = CeilDiv(patterns, int64_t{kMany} * entry.beside);
    const bool quick = entry.piece_count <= (kSources == 1   ? kFewPieces
                                             : kSources == 2 ? kListedPieces
                                                             : 0);
    const int64_t most_steps =
        kSources == 1 ? CeilDiv(entry.piece_count, kPiecesOfStep) : kQuickSteps;
    const int64_t quick_steps =
        std::clamp<int64_t>(steps * blocks_beside / kEnoughBlocks, 1, most_steps);
    const int64_t below = quick ? CeilDiv(steps, quick_steps)
                                : static_cast<int64_t>(share * resident) / blocks_beside;
    entry.blocks_below = static_cast<int>(std::clamp<int64_t>(below, 1, steps));
    return blocks_beside * entry.blocks_below;
  });
  return Launch(MoveRows<Word, kSources, Table>, blocks, kThreads, table_bytes, stream, table);
}

template <bool kAligned, typename Table>
cudaError_t LaunchLong(cudaStream_t stream, const Job& job, Table& table, size_t table_bytes) {
  int64_t total = 0;
  for (const Destination& d : job.destinations) total += job.rows * d.row_bytes;
  const int64_t pack_row = int64_t{kThreads} * kPackBytes;
  table.packs =
      static_cast<int>(std::clamp<int64_t>(total / (pack_row * kEnoughBlocks), 1, kLongPacks));
  // Blocks read all pieces of their destination: the more there are, the more tiles a block has.
  table.tiles_per_block =
      static_cast<int>(std::clamp<int64_t>(job.pieces.size() / job.destinations.size() / 16, 1, 8));
  const int64_t blocks = Fill(table, job, [&](DestinationEntry& entry) {
    return CeilDiv(job.rows * entry.row_bytes(), table.packs * pack_row * table.tiles_per_block);
  });
  return Launch(MoveLong<kAligned, Table>, blocks, kThreads, table_bytes, stream, table);
}

template <typename Word>
uint32_t WordsOf(int64_t bytes) {
  return static_cast<uint32_t>(bytes / sizeof(Word));
}

// Whether MoveAlike can do it: a few equal pieces of one array, and nothing but them.
bool AreAlike(const Job& job, int64_t unit) {
  const Piece& first = job.pieces[0];
  const auto pieces = static_cast<int64_t>(job.pieces.size());
  const bool joins = job.destinations.size() == 1;
  if (pieces < 2 || pieces > kMostAlike || (!joins && job.destinations.size() != job.pieces.size()))
    return false;
  const auto* next = static_cast<const unsigned char*>(first.source);
  for (const Piece& piece : job.pieces) {
    if (piece.size != first.size || piece.extent != first.size) return false;
    if (piece.stride != (joins ? first.size : pieces * first.size)) return false;
    if (!joins && piece.source != next) return false;
    next += piece.size;
  }
  for (const Destination& destination : job.destinations) {
    if (!joins && destination.piece_count != 1) return false;
  }
  const int64_t size = first.size / unit;
  return size > 0 && size <= UINT16_MAX && job.rows * size - 1 <= UINT16_MAX;
}

template <typename Word, bool kSplits, int kPieces>
cudaError_t LaunchAlike(cudaStream_t stream, const Job& job) {
  Alike<kPieces> table = {};
  for (int i = 0; i < kPieces; ++i) {
    const void* piece = kSplits ? job.destinations[i].data : job.pieces[i].source;
    table.pieces[i] = static_cast<unsigned char*>(const_cast<void*>(piece));
  }
  const void* whole = kSplits ? job.pieces[0].source : job.destinations[0].data;
  table.whole = static_cast<unsigned char*>(const_cast<void*>(whole));
  const uint32_t size = WordsOf<Word>(job.pieces[0].size);
  const int64_t words = job.rows * size;
  table.last = static_cast<uint16_t>(words - 1);
  table.size = static_cast<uint16_t>(size);
  // Less than 1 / size by at most 2^-32, which 2^16 words do not add up to a word of a row.
  table.multiplier = UINT32_MAX / size;
  const auto launch = [&](auto threads) {
    constexpr int kOfBlock = decltype(threads)::value;
    return Launch(MoveAlike<Word, kSplits, kOfBlock, kPieces>, CeilDiv(words, kOfBlock), kOfBlock,
                  0, stream, table);
  };
  return words <= kFewAlike
             ? launch(std::integral_constant<int, kAlikeThreads<Word, kPieces>>())
             : launch(std::integral_constant<int, kMoreAlikeThreads<Word, kPieces>>());
}

template <typename Word, bool kSplits>
cudaError_t LaunchAlikeOf(cudaStream_t stream, const Job& job) {
  switch (job.pieces.size()) {
    case 2:
      return LaunchAlike<Word, kSplits, 2>(stream, job);
    case 3:
      return LaunchAlike<Word, kSplits, 3>(stream, job);
    default:
      return LaunchAlike<Word, kSplits, kMostAlike>(stream, job);
  }
}

template <typename Word>
cudaError_t LaunchAlike(cudaStream_t stream, const Job& job) {
  return job.destinations.size() == 1 ? LaunchAlikeOf<Word, false>(stream, job)
                                      : LaunchAlikeOf<Word, true>(stream, job);
}

// Whether JoinWords can do it: two pieces, whose rows follow each other, before zeros.
bool JoinsTwo(const Job& job) {
  int sources = 0;
  bool ended = false;
  for (const Piece& piece : job.pieces) {
    if (piece.size > 0 && (ended || piece.stride != piece.size)) return false;
    sources += piece.size > 0;
    ended = ended || piece.size < piece.extent;
  }
  return job.destinations.size() == 1 && sources == 2;
}

template <typename Word>
cudaError_t LaunchJoin(cudaStream_t stream, const Job& job) {
  const Destination& destination = job.destinations[0];
  Joined table = {};
  table.to = static_cast<unsigned char*>(destination.data);
  table.row_words = FastDivider(WordsOf<Word>(destination.row_bytes));
  const int64_t words = WordsOf<Word>(job.rows * destination.row_bytes);
  table.last = static_cast<uint32_t>(words - 1);
  int64_t begin = 0;
  for (const Piece& piece : job.pieces) {
    if (piece.size == 0) continue;
    const unsigned char* from = static_cast<const unsigned char*>(piece.source) - begin;
    if (begin == 0) {
      table.first = from;
    } else {
      table.difference = from - table.first;
      table.begin = WordsOf<Word>(begin);
    }
    begin += piece.size;
  }
  table.filled = WordsOf<Word>(begin);
  const auto launch = [&](auto threads) {
    constexpr int kOfBlock = decltype(threads)::value;
    return Launch(JoinWords<Word, kOfBlock>, CeilDiv(words, kOfBlock), kOfBlock, 0, stream, table);
  };
  return words <= kFewJoined ? launch(std::integral_constant<int, kJoinThreads>())
                             : launch(std::integral_constant<int, kMoreJoinThreads>());
}

// How many runs there are, the words of the longest, and how they are cut into blocks.
struct RunBlocks {
  int runs = 0;
  int64_t longest = 0;
  dim3 threads, grid;

  RunBlocks(const Job& job, int64_t unit) {
    for (const Piece& piece : job.pieces) {
      runs += (piece.size > 0) + (piece.size < piece.extent);
      longest = std::max({longest, piece.size / unit, (piece.extent - piece.size) / unit});
    }
    const int64_t beside = CeilDiv(longest, kRunThreads);
    const int64_t width =
        beside == 1 ? longest : CeilDiv(CeilDiv(longest, beside), int64_t{kWarp}) * kWarp;
    const int64_t height = std::min(kRunThreads / width, job.rows);
    threads = dim3(static_cast<unsigned>(width), static_cast<unsigned>(height));
    grid =
        dim3(runs, static_cast<unsigned>(CeilDiv(job.rows, height)), static_cast<unsigned>(beside));
  }
  int64_t blocks() const { return int64_t{grid.x} * grid.y * grid.z; }
};

template <typename Word, int kRuns>
cudaError_t LaunchRuns(cudaStream_t stream, const Job& job) {
  const RunBlocks blocks(job, sizeof(Word));
  Runs<kRuns> table = {};
  Run* next = table.runs;
  for (const Destination& destination : job.destinations) {
    auto* to = static_cast<unsigned char*>(destination.data);
    const auto add = [&](const void* from, int64_t stride, int64_t bytes) {
      if (bytes == 0) return;
      next->from = static_cast<const unsigned char*>(from);
      next->to = to;
      next->from_stride = WordsOf<Word>(stride);
      next->to_stride = WordsOf<Word>(destination.row_bytes);
      next->words = WordsOf<Word>(bytes);
      next->rows = static_cast<uint32_t>(job.rows);
      ++next;
      to += bytes;
    };
    for (int64_t p = 0; p < destination.piece_count; ++p) {
      const Piece& piece = job.pieces[destination.first_piece + p];
      add(piece.source, piece.stride, piece.size);
      add(nullptr, 0, piece.extent - piece.size);
    }
  }
  MoveRuns<Word><<<blocks.grid, blocks.threads, 0, stream>>>(table);
  return cudaGetLastError();
}

template <typename Word>
cudaError_t LaunchWords(cudaStream_t stream, const Job& job) {
  if (AreAlike(job, sizeof(Word))) {
    if constexpr (sizeof(Word) == kPackBytes) {
      // Lanes that have each a row of a piece are far apart in the whole.
      if (job.pieces[0].size == kPackBytes && AreAlike(job, sizeof(uint2))) {
        return LaunchAlike<uint2>(stream, job);
      }
    }
    return LaunchAlike<Word>(stream, job);
  }
  if (JoinsTwo(job)) return LaunchJoin<Word>(stream, job);
  return RunBlocks(job, sizeof(Word)).runs <= kFewRuns ? LaunchRuns<Word, kFewRuns>(stream, job)
                                                       : LaunchRuns<Word, kMostRuns>(stream, job);
}

// Whether there is little to move, and MoveAlike, JoinWords or MoveRuns can do it.
bool IsSmall(const Job& job, int64_t unit) {
  int64_t words = 0, reach = 0;
  for (const Destination& d : job.destinations) words += job.rows * d.row_bytes / unit;
  for (const Piece& p : job.pieces) reach = std::max(reach, job.rows * p.stride / unit);
  if (job.broadcasts || words > kSmallJoinedWords || reach > UINT32_MAX) return false;
  if (AreAlike(job, unit) || JoinsTwo(job)) return true;
  const RunBlocks blocks(job, unit);
  // Pieces of very different sizes leave many blocks with nothing to do.
  return (job.destinations.size() == 1 || words <= kSmallWords) && blocks.runs <= kMostRuns &&
         blocks.blocks() <= kMostRunBlocks;
}

template <int kPieces, int kDestinations>
cudaError_t LaunchTable(cudaStream_t stream, const Job& job) {
  Table<kPieces, kDestinations> table;
  static_assert(sizeof(table) <= 32764, "the parameters of a kernel");
  int64_t most = 0;
  for (const Destination& d : job.destinations) most = std::max(most, d.piece_count);
  const size_t bytes = kPieces <= kListedPieces ? 0 : most * sizeof(PieceEntry);
  const int64_t unit = CommonUnit(job);
  if (!HasManyRows(job, unit)) {
    return unit == kPackBytes ? LaunchLong<true>(stream, job, table, bytes)
                              : LaunchLong<false>(stream, job, table, bytes);
  }
  switch (unit) {
    case 16:
      return LaunchRows<uint4, 1>(stream, job, table, bytes);
    case 8:
      return LaunchRows<uint2, 1>(stream, job, table, bytes);
    case 4:
      return LaunchRows<uint32_t, 1>(stream, job, table, bytes);
    case 2:
      return LaunchRows<uint32_t, 2>(stream, job, table, bytes);
    default:
      return LaunchRows<uint32_t, 4>(stream, job, table, bytes);
  }
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
  const auto pieces = static_cast<int64_t>(job.pieces.size());
  const auto destinations = static_cast<int64_t>(job.destinations.size());
  int64_t row_bytes = 0;
  for (const Destination& d : job.destinations) row_bytes += d.row_bytes;
  if (job.rows == 0 || row_bytes == 0) return cudaSuccess;
  const int64_t unit = CommonUnit(job);
  if (IsSmall(job, unit)) {
    switch (unit) {
      case 16:
        return LaunchWords<uint4>(stream, job);
      case 8:
        return LaunchWords<uint2>(stream, job);
      case 4:
        return LaunchWords<uint32_t>(stream, job);
      case 2:
        return LaunchWords<uint16_t>(stream, job);
      default:
        return LaunchWords<uint8_t>(stream, job);
    }
  }
  if (MovesAsStretches(job, unit)) return LaunchStretches(stream, job, unit);
  if (MovesAsEqual(job, unit)) return LaunchEqual(stream, job, unit);
  if (MovesAsNarrow(job, unit)) return LaunchNarrow(stream, job, unit);
  // Tiles first: packs can do most of what they can.
  if (MovesAsTiles(job, unit)) return LaunchTiles(stream, job, unit);
  if (MovesAsPacks(job, unit)) return LaunchPacks(stream, job, unit);
  if (pieces <= kListedPieces && destinations <= 8)
    return LaunchTable<kListedPieces, 8>(stream, job);
  if (destinations > kTableDestinations) return LaunchParts(stream, job);
  if (pieces <= kTableDestinations && destinations > 1) {
    return LaunchTable<kTableDestinations, kTableDestinations>(stream, job);
  }
  if (pieces <= 64 && destinations == 1) return LaunchTable<64, 1>(stream, job);
  if (pieces <= kMaxPieces && destinations == 1) return LaunchTable<kMaxPieces, 1>(stream, job);
  return cudaErrorInvalidValue;
}

}  // namespace jaxops::concatenate::cuda
