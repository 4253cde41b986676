// This kernel moves few and small segments; the design is that of small_equal.cu, and a block has
// rows of one segment.
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

constexpr int kThreads = 256;
constexpr int kFewSegments = 4;
constexpr int kMaxSegments = 16;
constexpr int64_t kMaxGridRows = 65535;

// The wait for the constants of the launch takes longest. Constants come by lines of 64 bytes, and
// the first line has 16 bytes of other data.
//
// Segment is a piece in all rows, or zeros there. Counts and strides are in Words.
struct Segment {
  const unsigned char* from;  // null for zeros
  unsigned char* to;
  uint32_t from_stride;
  uint32_t to_stride;
  uint32_t words;  // per row
  uint32_t rows;
};

// The padding keeps each Segment within one line of constants.
template <int kSegments>
struct Segments {
  uint32_t first_line[4];
  Segment segments[kSegments];
};

// A block has some rows and columns of one segment, so that a thread needs one line of constants
// and no division.
template <typename Word, int kSegments>
__global__ void __launch_bounds__(kThreads)
    MoveRuns(const __grid_constant__ Segments<kSegments> table) {
  Segment segment = table.segments[blockIdx.x];
  // All constants are in flight before the first is needed.
  asm volatile(""
               : "+l"(segment.from), "+r"(segment.from_stride), "+r"(segment.to_stride),
                 "+r"(segment.words), "+r"(segment.rows));
  const uint32_t row = blockIdx.y * blockDim.y + threadIdx.y;
  const uint32_t column = blockIdx.z * blockDim.x + threadIdx.x;
  Word word = {};
  if (segment.from != nullptr) {
    // Threads beyond the segment read its last Word, which avoids a branch before the load.
    const uint32_t at =
        min(row, segment.rows - 1) * segment.from_stride + min(column, segment.words - 1);
    word = __ldg(reinterpret_cast<const Word*>(segment.from) + at);
  }
  if (column < segment.words && row < segment.rows) {
    reinterpret_cast<Word*>(segment.to)[row * segment.to_stride + column] = word;
  }
}

// MakePlan returns false if the grid would be too large, or there are too many segments.
bool MakePlan(const Call& call, SmallSegmentsPlan& plan) {
  const Job& job = call.job;
  plan.segments = 0;
  int64_t max_bytes = 0;
  for (const Piece& piece : job.pieces) {
    plan.segments += (piece.size > 0) + (piece.size < piece.extent);
    if (plan.segments > kMaxSegments) return false;
    max_bytes = std::max({max_bytes, piece.size, piece.extent - piece.size});
  }
  const int64_t longest = max_bytes / call.unit;
  const int64_t adjacent = CeilDiv(longest, kThreads);
  const int64_t width =
      adjacent == 1 ? longest : CeilDiv(CeilDiv(longest, adjacent), int64_t{kWarp}) * kWarp;
  const int64_t height = std::min(kThreads / width, job.rows);
  const int64_t below = CeilDiv(job.rows, height);
  if (adjacent > kMaxGridRows || below > kMaxGridRows) return false;
  plan.threads = dim3(static_cast<unsigned>(width), static_cast<unsigned>(height));
  plan.grid = dim3(plan.segments, static_cast<unsigned>(below), static_cast<unsigned>(adjacent));
  return true;
}

template <typename Word, int kSegments>
cudaError_t LaunchTable(cudaStream_t stream, const Call& call) {
  const Job& job = call.job;
  const SmallSegmentsPlan& plan = call.small_segments;
  Segments<kSegments> table = {};
  Segment* next = table.segments;
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
  MoveRuns<Word><<<plan.grid, plan.threads, 0, stream>>>(table);
  return cudaGetLastError();
}

template <typename Word>
cudaError_t LaunchWords(cudaStream_t stream, const Call& call) {
  return call.small_segments.segments <= kFewSegments
             ? LaunchTable<Word, kFewSegments>(stream, call)
             : LaunchTable<Word, kMaxSegments>(stream, call);
}

}  // namespace

bool CanRunSmallSegments(const Call& call, const Device&) {
  const Job& job = call.job;
  if (job.broadcasts || !MakePlan(call, call.small_segments)) return false;
  // Items of an array are counted with 32 bits.
  return call.items() <= UINT32_MAX &&
         std::all_of(job.pieces.begin(), job.pieces.end(),
                     [&](const Piece& p) { return job.rows * p.stride / call.unit <= UINT32_MAX; });
}

cudaError_t LaunchSmallSegments(cudaStream_t stream, const Call& call, const Device&) {
  switch (call.unit) {
    case 16:
      return LaunchWords<uint4>(stream, call);
    case 8:
      return LaunchWords<uint2>(stream, call);
    case 4:
      return LaunchWords<uint32_t>(stream, call);
    case 2:
      return LaunchWords<uint16_t>(stream, call);
    default:
      return LaunchWords<uint8_t>(stream, call);
  }
}

}  // namespace jaxops::concatenate::cuda
