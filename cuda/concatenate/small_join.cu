// This kernel joins two small arrays; the design is that of small_equal.cu.
#include <cuda_runtime_api.h>

#include <type_traits>

#include "common/fast_divide.h"
#include "cuda/common/launch.h"
#include "cuda/concatenate/families.h"
#include "cuda/concatenate/job.h"

namespace jaxops::concatenate::cuda {
namespace {

using jaxops::cuda::CeilDiv;
using jaxops::cuda::Launch;

// A block has the first number of threads if there are few Words, and the second otherwise, so that
// blocks do not become too many. The numbers are template arguments, because reading the block size
// would wait for another constant of the launch.
constexpr int kJoinThreads = 256;
constexpr int kMoreJoinThreads = 384;
// Up to this number of Words, blocks have the lower number of threads.
constexpr int64_t kMaxFewWords = 24576;

// The wait for the constants of the launch takes longest. Constants come by lines of 64 bytes, and
// the first line has 16 bytes of other data.
//
// Joined describes two pieces with contiguous rows, and fits the first line.
struct Joined {
  const unsigned char* first;
  unsigned char* to;
  int64_t difference;  // bytes between column 0 of the two pieces, if both began with the row
  FastDivider row_words;
  uint32_t last;    // the last Word of all rows
  uint32_t filled;  // Words of a row before zeros
  uint32_t begin;   // begin of the second piece
};

template <typename Word, int kOfBlock>
__global__ void __launch_bounds__(kOfBlock) JoinWords(const __grid_constant__ Joined table) {
  const uint32_t index = min(blockIdx.x * kOfBlock + threadIdx.x, table.last);
  uint32_t row = index;
  const uint32_t column = table.row_words.DivMod(row);
  const bool beyond = table.begin <= column;
  // Words in the zeros read the last Word before the zeros, so that no load waits for a branch.
  const uint32_t at =
      min(column, table.filled - 1) + row * (beyond ? table.filled - table.begin : table.begin);
  const unsigned char* from = table.first + (beyond ? table.difference : 0);
  const Word word = __ldg(reinterpret_cast<const Word*>(from) + at);
  reinterpret_cast<Word*>(table.to)[index] = column < table.filled ? word : Word{};
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
  return words <= kMaxFewWords ? launch(std::integral_constant<int, kJoinThreads>())
                               : launch(std::integral_constant<int, kMoreJoinThreads>());
}

}  // namespace

bool CanRunSmallJoin(const Call& call, const Device&) {
  if (call.job.broadcasts || !call.joins() || call.items() > INT32_MAX) return false;
  int sources = 0;
  bool ended = false;
  for (const Piece& piece : call.job.pieces) {
    if (piece.size > 0 && (ended || piece.stride != piece.size || ++sources > 2)) return false;
    ended = ended || piece.size < piece.extent;
  }
  return sources == 2;
}

cudaError_t LaunchSmallJoin(cudaStream_t stream, const Call& call, const Device&) {
  const Job& job = call.job;
  switch (call.unit) {
    case 16:
      return LaunchJoin<uint4>(stream, job);
    case 8:
      return LaunchJoin<uint2>(stream, job);
    case 4:
      return LaunchJoin<uint32_t>(stream, job);
    case 2:
      return LaunchJoin<uint16_t>(stream, job);
    default:
      return LaunchJoin<uint8_t>(stream, job);
  }
}

}  // namespace jaxops::concatenate::cuda
