// This kernel moves few equal and small pieces of the rows of one array with minimal latency from
// the launch to the store: items are the largest that divide all sizes and addresses.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <type_traits>

#include "cuda/common/launch.h"
#include "cuda/common/numeric.cuh"
#include "cuda/concatenate/families.h"
#include "cuda/concatenate/job.h"

namespace jaxops::concatenate::cuda {
namespace {

using jaxops::cuda::CeilDiv;
using jaxops::cuda::kVectorBytes;
using jaxops::cuda::Launch;

// A block has the first number of threads if there are few Words, and the second otherwise, so that
// blocks do not become too many. The numbers are template arguments, because reading the block size
// would wait for another constant of the launch.
template <typename Word, int kPieces>
constexpr int kAlikeThreads = kPieces * sizeof(Word) > 32 ? 64 : 128;
template <typename Word, int kPieces>
constexpr int kMoreAlikeThreads = kPieces * sizeof(Word) > 32 ? 128 : 192;
// Up to this number of Words of a piece, blocks have the lower number of threads.
constexpr int64_t kMaxFewWords = 12288;
constexpr int kMaxPieces = 4;

// The wait for the constants of the launch takes longest. Constants come by lines of 64 bytes, and
// the first line has 16 bytes of other data.
//
// Alike describes equal pieces of the rows of one array, each with contiguous rows of its own, and
// fits the first line.
template <int kPieces>
struct Alike {
  unsigned char* pieces[kPieces];
  unsigned char* whole;
  uint16_t last;        // the last Word of a piece, over all rows
  uint16_t size;        // Words of a row of a piece
  uint32_t multiplier;  // (1 + index of a Word) * multiplier >> 32 is the row
};

// A thread has the same Word of each piece, whose position in the piece is known before its row.
// Threads beyond the last Word move the last Word again, because a branch would delay the first
// access.
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
  // The error relative to 1 / size is at most 2^-32, which does not add up to a Word of a row over
  // 2^16 Words.
  table.multiplier = UINT32_MAX / size;
  const auto launch = [&](auto threads) {
    constexpr int kOfBlock = decltype(threads)::value;
    return Launch(MoveAlike<Word, kSplits, kOfBlock, kPieces>, CeilDiv(words, kOfBlock), kOfBlock,
                  0, stream, table);
  };
  return words <= kMaxFewWords
             ? launch(std::integral_constant<int, kAlikeThreads<Word, kPieces>>())
             : launch(std::integral_constant<int, kMoreAlikeThreads<Word, kPieces>>());
}

template <typename Word, bool kSplits>
cudaError_t LaunchPieces(cudaStream_t stream, const Job& job) {
  switch (job.pieces.size()) {
    case 2:
      return LaunchAlike<Word, kSplits, 2>(stream, job);
    case 3:
      return LaunchAlike<Word, kSplits, 3>(stream, job);
    default:
      return LaunchAlike<Word, kSplits, kMaxPieces>(stream, job);
  }
}

template <typename Word>
cudaError_t LaunchAlike(cudaStream_t stream, const Job& job) {
  return job.destinations.size() == 1 ? LaunchPieces<Word, false>(stream, job)
                                      : LaunchPieces<Word, true>(stream, job);
}

// The pieces must be few, equal and all of one array; counts have 16 bits.
bool HasSmallEqualPieces(const Job& job, int64_t unit) {
  const Piece& first = job.pieces[0];
  const auto pieces = static_cast<int64_t>(job.pieces.size());
  const bool joins = job.destinations.size() == 1;
  if (pieces < 2 || pieces > kMaxPieces ||
      (!joins && job.destinations.size() != job.pieces.size())) {
    return false;
  }
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

}  // namespace

bool CanRunSmallEqual(const Call& call, const Device&) {
  return !call.job.broadcasts && HasSmallEqualPieces(call.job, call.unit);
}

cudaError_t LaunchSmallEqual(cudaStream_t stream, const Call& call, const Device&) {
  const Job& job = call.job;
  // Lanes that each have another row of a piece access distant addresses of the whole array.
  if (call.unit == kVectorBytes && job.pieces[0].size == kVectorBytes &&
      HasSmallEqualPieces(job, sizeof(uint2))) {
    return LaunchAlike<uint2>(stream, job);
  }
  switch (call.unit) {
    case 16:
      return LaunchAlike<uint4>(stream, job);
    case 8:
      return LaunchAlike<uint2>(stream, job);
    case 4:
      return LaunchAlike<uint32_t>(stream, job);
    case 2:
      return LaunchAlike<uint16_t>(stream, job);
    default:
      return LaunchAlike<uint8_t>(stream, job);
  }
}

}  // namespace jaxops::concatenate::cuda
