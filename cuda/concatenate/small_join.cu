// Two arrays joined, and little of them: as small_equal.cu.
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

// Threads of a block that has few words to move, and of one of more, so that there are not too many
// blocks. They are known when kernels are compiled, because the size of a block is a constant of
// the launch that is waited for on its own.
constexpr int kJoinThreads = 256;
constexpr int kMoreJoinThreads = 384;
// Up to this many words, blocks have the lower number of threads.
constexpr int64_t kMaxFewWords = 24576;

// What takes longest is to wait for the constants of the launch, which come by lines of 64 bytes,
// the first with 16 bytes of others.
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
