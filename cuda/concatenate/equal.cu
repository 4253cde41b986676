// These kernels move many equal pieces that are narrow or small: neighbouring threads move several
// rows of one piece, so that a warp accesses few arrays, and whole lines of each. Small calls move
// single items without shared memory.
#include <cuda_runtime_api.h>

#include <algorithm>

#include "common/fast_divide.h"
#include "cuda/common/launch.h"
#include "cuda/common/numeric.cuh"
#include "cuda/concatenate/families.h"
#include "cuda/concatenate/job.h"
#include "cuda/concatenate/launch.h"
#include "cuda/concatenate/vectors.cuh"

namespace jaxops::concatenate::cuda {
namespace {

using jaxops::cuda::CeilDiv;
using jaxops::cuda::kWarp;
using jaxops::cuda::Launch;

constexpr int64_t kFewPieces = 64;

// Neighbouring threads move this number of Words of one piece: a warp's number if a piece is read,
// and the fewest that fill cache lines if a piece is written.
template <typename Word, bool kSplits>
constexpr int kWordsTogether = kSplits && sizeof(Word) == kVectorBytes ? kWarp / 2 : kWarp;

template <int kPieces>
struct Equal {
  unsigned char* pieces[kPieces];
  unsigned char* whole;
  uint64_t stride;  // in bytes
  FastDivider together;
  FastDivider count;
  FastDivider piece_words;
  uint32_t rows;           // of all arrays
  uint32_t rows_together;  // rows of a piece for neighbouring threads
};

template <typename Word, bool kSplits, int kPieces>
__global__ void __launch_bounds__(kVectorThreads)
    MoveEqual(const __grid_constant__ Equal<kPieces> table) {
  uint32_t group = blockIdx.x * kVectorThreads + threadIdx.x;
  const uint32_t place = table.together.DivMod(group);
  const uint32_t number = table.count.DivMod(group);
  uint32_t row = place;
  const uint32_t column = table.piece_words.DivMod(row);
  row += group * table.rows_together;
  if (row >= table.rows) return;
  // The rows of a piece are contiguous in its array.
  unsigned char* part =
      table.pieces[number] + (uint64_t{group} * table.together.divisor() + place) * sizeof(Word);
  unsigned char* whole = table.whole + row * table.stride +
                         (uint64_t{number} * table.piece_words.divisor() + column) * sizeof(Word);
  const Word word = Load<Word>(kSplits ? whole : part);
  unsigned char* to = kSplits ? part : whole;
  if constexpr (sizeof(Word) == kVectorBytes) {
    Store(to, word);
  } else {
    *reinterpret_cast<Word*>(to) = word;
  }
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
  return Launch(MoveEqual<Word, kSplits, kPieces>, CeilDiv(words, kVectorThreads), kVectorThreads,
                0, stream, table);
}

template <typename Word>
cudaError_t LaunchEqual(cudaStream_t stream, const Job& job) {
  const bool few = job.pieces.size() <= kFewPieces;
  if (job.destinations.size() > 1) {
    return few ? LaunchEqual<Word, true, kFewPieces>(stream, job)
               : LaunchEqual<Word, true, kMaxPieces>(stream, job);
  }
  return few ? LaunchEqual<Word, false, kFewPieces>(stream, job)
             : LaunchEqual<Word, false, kMaxPieces>(stream, job);
}

}  // namespace

int64_t EqualSegmentBytes(const Call& call) {
  const int64_t extent = call.job.pieces[0].extent;
  if (call.joins()) return extent;
  return std::max<int64_t>(1, kWordsTogether<uint4, true> * kVectorBytes / extent) * extent;
}

bool CanRunEqual(const Call& call, const Device&) {
  const Job& job = call.job;
  if (job.broadcasts || call.piece_count() > kMaxPieces || !HasEqualPieces(job) ||
      !HasFullPieces(job)) {
    return false;
  }
  // Words are counted with 32 bits, and Words of 8 bytes count as two.
  const int64_t words = call.items() * (call.unit == 8 ? 2 : 1);
  if (words > kMaxItems) return false;
  if (!call.joins()) {
    return call.destination_count() == call.piece_count() && SplitsOneSource(job);
  }
  return std::all_of(job.pieces.begin(), job.pieces.end(),
                     [](const Piece& p) { return p.stride == p.extent; });
}

cudaError_t LaunchEqual(cudaStream_t stream, const Call& call, const Device&) {
  const Job& job = call.job;
  switch (call.unit) {
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

}  // namespace jaxops::concatenate::cuda
