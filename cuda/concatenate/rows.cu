// This kernel moves many rows. The sources of a Word are the same in every row, or for items of 1
// or 2 bytes in every 4 or 2 rows, which are whole Words of every source. A thread computes the
// source Words and the order of their bytes once as a WordMap, and keeps it in registers while
// looping over the rows, without searches and divisions for each Word.
#include <cuda_runtime_api.h>

#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/common/numeric.cuh"
#include "cuda/concatenate/families.h"
#include "cuda/concatenate/launch.h"
#include "cuda/concatenate/table.cuh"

namespace jaxops::concatenate::cuda {
namespace {

using jaxops::cuda::CeilDiv;
using jaxops::cuda::Launch;

constexpr int kLineBytes = 128;
constexpr int kManyPatterns = 16;
constexpr int kFewPieces = 64;
// This is the number of steps of a block. One step per block in address order is the fastest for
// memory, but a WordMap of two sources, or a copy of a table of many pieces, is worth its setup
// only over several steps.
constexpr int kQuickSteps = 4;
constexpr int kPiecesOfStep = 16;

// Missing sources read these zeros, so that no thread's loads wait for a branch.
__device__ const uint4 kZeros = {};

// WordMap describes the Word that a thread writes in every pattern, from Words of sources. Nibble i
// of a selector is 4 + the byte of the source that becomes byte i, or i if another source supplies
// byte i.
template <typename Word, int kSources>
struct WordMap {
  const unsigned char* words[kSources];
  int64_t strides[kSources];  // bytes to the same Word in the next pattern
  uint32_t selectors[kSources];
  int count = 0;

  // The constructor finds the sources of Word `index` of the pattern that begins at `row`. Items as
  // large as a Word have one source, and smaller items have at most one source each.
  __device__ __forceinline__ WordMap(int64_t index, int64_t row,
                                     const DestinationEntry& destination,
                                     const PieceEntry* pieces) {
    constexpr int kItem = sizeof(Word) / kSources;
    int64_t column = index * static_cast<int64_t>(sizeof(Word));
    if (destination.pattern_rows > 1) {
      uint64_t rows = column;
      column = destination.by_row.DivMod(rows);
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
      // Items have neighbouring bytes, so a source Word is either the last one again or a new one.
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

  // Make returns the Word of the pattern `patterns` further on.
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

// A thread has this number of Words in flight. Their loads use __ldca, because the compiler would
// move other loads next to their stores to save registers, and thus serialize them.
template <typename Word, int kSources>
constexpr int kTogether =
    std::min<int>(kSources <= 2 ? 8 : 4, (kSources == 1 ? 32 : 64) / sizeof(Word));

template <typename Word, int kSources, typename Table>
__global__ void __launch_bounds__(kTableThreads) MoveRows(const __grid_constant__ Table table) {
  constexpr int kMany = kTogether<Word, kSources>;
  extern __shared__ __align__(16) unsigned char shared[];
  const DestinationEntry& destination = FindDestination(table);
  const PieceEntry* pieces = PiecesOf(destination, table, shared);
  auto block = static_cast<uint32_t>(blockIdx.x - destination.first_block);
  const auto column = static_cast<int64_t>(destination.blocks_adjacent.DivMod(block));
  auto lane = static_cast<uint32_t>(threadIdx.x);
  const int64_t word = column * destination.width.divisor() + destination.width.DivMod(lane);
  const int adjacent = destination.adjacent;
  const int64_t patterns = destination.patterns;
  // All blocks go through the rows together: each step of a block has kMany times `adjacent`
  // patterns.
  int64_t pattern = int64_t{block} * kMany * adjacent + lane;
  if (lane < adjacent && word < destination.pattern_words && pattern < patterns) {
    WordMap<Word, kSources> word_map(word, pattern * destination.pattern_rows, destination, pieces);
    auto* to =
        reinterpret_cast<Word*>(destination.data) + pattern * destination.pattern_words + word;
    const int64_t advance = adjacent * destination.pattern_words;
    const int64_t stride = int64_t{destination.blocks_below} * kMany * adjacent;
    const int64_t whole_end = patterns - (kMany - 1) * adjacent;
#pragma unroll 1
    for (; pattern < whole_end; pattern += stride, to += stride * destination.pattern_words) {
      Word words[kMany];
#pragma unroll
      for (int i = 0; i < kMany; ++i) words[i] = word_map.Make(i * adjacent);
      word_map.Advance(stride);
#pragma unroll
      for (int i = 0; i < kMany; ++i) to[i * advance] = words[i];
    }
#pragma unroll 1
    for (; pattern < patterns; pattern += adjacent, to += advance) {
      *to = word_map.Make(0);
      word_map.Advance(adjacent);
    }
  }

  // The last rows are too few for a pattern, and move byte by byte.
  const int64_t end = table.rows * destination.row_bytes();
  int64_t at = patterns * destination.pattern_rows * destination.row_bytes();
  for (at += (blockIdx.x - destination.first_block) * kTableThreads + threadIdx.x; at < end;
       at +=
       int64_t{destination.blocks_adjacent.divisor()} * destination.blocks_below * kTableThreads) {
    uint64_t row = at;
    const auto from_row = static_cast<int64_t>(destination.by_row.DivMod(row));
    const PieceEntry& piece = pieces[FindLast(pieces, destination.piece_count, from_row,
                                              [](const PieceEntry& entry) { return entry.begin; })];
    const int64_t offset = from_row - piece.begin;
    destination.data[at] =
        offset < piece.size ? piece.source[static_cast<int64_t>(row) * piece.stride + offset] : 0;
  }
}

template <typename Word, int kSources, typename Table>
cudaError_t LaunchTable(cudaStream_t stream, const Job& job, int processors, Table& table,
                        size_t table_bytes) {
  constexpr int kMany = kTogether<Word, kSources>;
  int64_t row_bytes = 0;
  for (const Destination& d : job.destinations) row_bytes += d.row_bytes;
  int of_processor = 0;
  const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &of_processor, MoveRows<Word, kSources, Table>, kTableThreads, table_bytes);
  if (error != cudaSuccess) return error;
  const int64_t resident = int64_t{processors} * of_processor;
  const int64_t blocks = Fill(table, job, [&](DestinationEntry& entry) {
    int64_t rows = PatternRows(sizeof(Word) / kSources);
    // Patterns that are whole cache lines let warps write whole lines. Words of four items do not
    // gain by it.
    while (kSources <= 2 && entry.row_bytes() * rows % kLineBytes != 0 &&
           job.rows / (2 * rows) >= kManyPatterns) {
      rows *= 2;
    }
    const int64_t patterns = job.rows / rows;
    entry.pattern_rows = static_cast<int>(rows);
    entry.patterns = patterns;
    entry.pattern_words = entry.row_bytes() * rows / sizeof(Word);
    const int64_t blocks_adjacent = CeilDiv(entry.pattern_words, kTableThreads);
    const int64_t width = blocks_adjacent == 1
                              ? entry.pattern_words
                              : CeilDiv(CeilDiv(entry.pattern_words, blocks_adjacent), 32) * 32;
    entry.blocks_adjacent = FastDivider(blocks_adjacent);
    entry.width = FastDivider(width);
    entry.adjacent = static_cast<int>(kTableThreads / width);
    // If word maps are quick to compute, blocks are many and short, which is the fastest for the
    // device; otherwise blocks are as many as run at once, so that destinations that share a source
    // read it at the same time.
    const double share = static_cast<double>(entry.row_bytes()) / row_bytes;
    const int64_t steps = CeilDiv(patterns, int64_t{kMany} * entry.adjacent);
    const bool quick = entry.piece_count <= (kSources == 1   ? kFewPieces
                                             : kSources == 2 ? kListedPieces
                                                             : 0);
    const int64_t max_steps =
        kSources == 1 ? CeilDiv(entry.piece_count, kPiecesOfStep) : kQuickSteps;
    const int64_t quick_steps =
        std::clamp<int64_t>(steps * blocks_adjacent / kEnoughBlocks, 1, max_steps);
    const int64_t below = quick ? CeilDiv(steps, quick_steps)
                                : static_cast<int64_t>(share * resident) / blocks_adjacent;
    entry.blocks_below = static_cast<int>(std::clamp<int64_t>(below, 1, steps));
    return blocks_adjacent * entry.blocks_below;
  });
  return Launch(MoveRows<Word, kSources, Table>, blocks, kTableThreads, table_bytes, stream, table);
}

}  // namespace

bool CanRunRows(const Call& call, const Device&) {
  const Job& job = call.job;
  if (job.broadcasts || job.rows < PatternRows(call.unit)) return false;
  if (call.joins() ? call.piece_count() > kMaxPieces : call.piece_count() > kTableDestinations) {
    return false;
  }
  return call.destination_count() <= kTableDestinations &&
         std::all_of(job.destinations.begin(), job.destinations.end(), [](const Destination& d) {
           // Neighbouring blocks are counted with 32 bits.
           return reinterpret_cast<uintptr_t>(d.data) % sizeof(uint32_t) == 0 &&
                  d.row_bytes <= INT32_MAX;
         });
}

cudaError_t LaunchRows(cudaStream_t stream, const Call& call, const Device& device) {
  const Job& job = call.job;
  const int processors = device.processors;
  return WithTable(job, [&](auto& table, size_t bytes) {
    switch (call.unit) {
      case 16:
        return LaunchTable<uint4, 1>(stream, job, processors, table, bytes);
      case 8:
        return LaunchTable<uint2, 1>(stream, job, processors, table, bytes);
      case 4:
        return LaunchTable<uint32_t, 1>(stream, job, processors, table, bytes);
      case 2:
        return LaunchTable<uint32_t, 2>(stream, job, processors, table, bytes);
      default:
        return LaunchTable<uint32_t, 4>(stream, job, processors, table, bytes);
    }
  });
}

}  // namespace jaxops::concatenate::cuda
