// Little of any pieces: a block has rows of one.
#include <cuda_runtime_api.h>

#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/common/numeric.cuh"
#include "cuda/concatenate/families.h"
#include "cuda/concatenate/job.h"

namespace jaxops::concatenate::cuda {
namespace {

using jaxops::cuda::CeilDiv;
using jaxops::cuda::kWarp;

constexpr int kRunThreads = 256;
constexpr int64_t kMostRunBlocks = 1024;
constexpr int kFewRuns = 4;
constexpr int kMostRuns = 16;

// What takes longest is to wait for the constants of the launch, which come by lines of 64 bytes,
// the first with 16 bytes of others.
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
cudaError_t LaunchRuns(cudaStream_t stream, const Job& job) {
  return RunBlocks(job, sizeof(Word)).runs <= kFewRuns ? LaunchRuns<Word, kFewRuns>(stream, job)
                                                       : LaunchRuns<Word, kMostRuns>(stream, job);
}

}  // namespace

bool HasFewRuns(const Job& job, int64_t unit) {
  const RunBlocks blocks(job, unit);
  return blocks.runs <= kMostRuns && blocks.blocks() <= kMostRunBlocks;
}

cudaError_t LaunchRuns(cudaStream_t stream, const Job& job, int64_t unit) {
  switch (unit) {
    case 16:
      return LaunchRuns<uint4>(stream, job);
    case 8:
      return LaunchRuns<uint2>(stream, job);
    case 4:
      return LaunchRuns<uint32_t>(stream, job);
    case 2:
      return LaunchRuns<uint16_t>(stream, job);
    default:
      return LaunchRuns<uint8_t>(stream, job);
  }
}

}  // namespace jaxops::concatenate::cuda
