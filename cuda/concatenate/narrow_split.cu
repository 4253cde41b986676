// This kernel splits rows so narrow that each memory access fetches a whole row, and therefore
// reads whole rows once for all pieces.
#include <cuda_runtime_api.h>

#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/common/numeric.cuh"
#include "cuda/concatenate/families.h"
#include "cuda/concatenate/job.h"
#include "cuda/concatenate/vectors.cuh"

namespace jaxops::concatenate::cuda {
namespace {

using jaxops::cuda::CeilDiv;
using jaxops::cuda::Launch;

constexpr int kMaxNarrowPieces = 4;
// A thread reads this number of vectors of narrow rows.
constexpr int kNarrowVectors = 2;
constexpr int64_t kMaxRowBytes = 32;

// Rows have 4 to kMaxRowBytes bytes, a power of two, and pieces have the first `kept` bytes. A
// block gathers its part of each piece in shared memory.
struct Narrow {
  struct Piece {
    unsigned char* to;
    uint32_t begin;  // in shared memory
    uint32_t size;   // per row
  };
  // Column describes an item of a row in shared memory: the position for a block's first row, and
  // the distance between rows.
  struct Column {
    uint16_t begin, step;
  };

  const unsigned char* from;
  int64_t rows;
  uint32_t kept;
  int count;
  Piece pieces[kMaxNarrowPieces];
  Column columns[kMaxRowBytes];
};

// This is the number of rows of a block.
template <int kRowBytes>
constexpr int kNarrowRows = kVectorThreads * kNarrowVectors * kVectorBytes / kRowBytes;

template <typename Item, int kRowBytes>
__global__ void __launch_bounds__(kVectorThreads) CutNarrow(const __grid_constant__ Narrow table) {
  constexpr int kRowItems = kRowBytes / sizeof(Item);
  constexpr int kWordItems = 4 / sizeof(Item);
  // A thread reads a vector of several rows, or the vectors of one row, at a time.
  constexpr int kBytes = kRowBytes < kVectorBytes ? kVectorBytes : kRowBytes;
  constexpr int kTimes = kNarrowVectors * kVectorBytes / kBytes;
  constexpr int kRows = kBytes / kRowBytes;
  __shared__ uint4 shared[kVectorThreads * kNarrowVectors];
  const int64_t first = int64_t{blockIdx.x} * kNarrowRows<kRowBytes>;
  if (first + kNarrowRows<kRowBytes> > table.rows) {
    for (int64_t row = first + threadIdx.x; row < table.rows; row += kVectorThreads) {
      const unsigned char* from = table.from + row * kRowBytes;
#pragma unroll 1
      for (int p = 0; p < table.count; ++p) {
        const Narrow::Piece& piece = table.pieces[p];
#pragma unroll 1
        for (uint32_t at = 0; at < piece.size; at += sizeof(Item), from += sizeof(Item)) {
          *reinterpret_cast<Item*>(piece.to + row * piece.size + at) =
              *reinterpret_cast<const Item*>(from);
        }
      }
    }
    return;
  }

  uint4 vectors[kTimes][kBytes / kVectorBytes];
#pragma unroll
  for (int t = 0; t < kTimes; ++t) {
    const unsigned char* from =
        table.from + first * kRowBytes + (t * kVectorThreads + threadIdx.x) * kBytes;
#pragma unroll
    for (int i = 0; i < kBytes / kVectorBytes; ++i) {
      vectors[t][i] =
          i * kVectorBytes < table.kept ? Load<uint4>(from + i * kVectorBytes) : uint4{};
    }
  }
  auto* gathered = reinterpret_cast<unsigned char*>(shared);
#pragma unroll
  for (int c = 0; c < kRowItems; ++c) {
    if (c * static_cast<int>(sizeof(Item)) >= table.kept) break;
    const uint32_t step = table.columns[c].step;
    unsigned char* to = gathered + table.columns[c].begin + threadIdx.x * kRows * step;
#pragma unroll
    for (int t = 0; t < kTimes; ++t) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const int item = row * kRowItems + c;
        const uint4 vector = vectors[t][item / kItems<Item>];
        const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
        const uint32_t word = words[item / kWordItems % 4];
        *reinterpret_cast<Item*>(to + (t * kVectorThreads * kRows + row) * step) =
            static_cast<Item>(word >> item % kWordItems * 8 * sizeof(Item) % 32);
      }
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int p = 0; p < table.count; ++p) {
    const Narrow::Piece& piece = table.pieces[p];
    unsigned char* to = piece.to + first * piece.size;
#pragma unroll 1
    for (uint32_t at = threadIdx.x * kVectorBytes; at < kNarrowRows<kRowBytes> * piece.size;
         at += kVectorThreads * kVectorBytes) {
      Store(to + at, *reinterpret_cast<const uint4*>(gathered + piece.begin + at));
    }
  }
}

template <typename Item, int kRowBytes>
cudaError_t LaunchNarrow(cudaStream_t stream, const Job& job) {
  Narrow table = {};
  table.from = static_cast<const unsigned char*>(job.pieces[0].source);
  table.rows = job.rows;
  constexpr int64_t kRows = kNarrowRows<kRowBytes>;
  Narrow::Column* column = table.columns;
  for (const Destination& destination : job.destinations) {
    const auto begin = static_cast<uint32_t>(table.kept * kRows);
    const auto size = static_cast<uint32_t>(destination.row_bytes);
    if (size == 0) continue;
    table.pieces[table.count++] = {static_cast<unsigned char*>(destination.data), begin, size};
    for (uint32_t at = 0; at < size; at += sizeof(Item)) {
      *column++ = {static_cast<uint16_t>(begin + at), static_cast<uint16_t>(size)};
    }
    table.kept += size;
  }
  return Launch(CutNarrow<Item, kRowBytes>, CeilDiv(job.rows, kRows), kVectorThreads, 0, stream,
                table);
}

template <typename Item>
cudaError_t LaunchNarrow(cudaStream_t stream, const Job& job) {
  switch (job.pieces[0].stride) {
    case 4:
      return LaunchNarrow<Item, 4>(stream, job);
    case 8:
      return LaunchNarrow<Item, 8>(stream, job);
    case 16:
      return LaunchNarrow<Item, 16>(stream, job);
    default:
      return LaunchNarrow<Item, 32>(stream, job);
  }
}

}  // namespace

bool CanRunNarrowSplit(const Call& call, const Device&) {
  const Job& job = call.job;
  const Piece& first = job.pieces[0];
  const int64_t row_bytes = first.stride;
  const bool is_power =
      row_bytes >= 4 && row_bytes <= kMaxRowBytes && (row_bytes & (row_bytes - 1)) == 0;
  if (!is_power || job.broadcasts || call.piece_count() > kMaxNarrowPieces ||
      call.destination_count() != call.piece_count() || !SplitsOneSource(job)) {
    return false;
  }
  // The kernel reads whole rows.
  const auto* from = static_cast<const unsigned char*>(first.source);
  if (reinterpret_cast<uintptr_t>(from) % kVectorBytes != 0 ||
      from + job.rows * row_bytes > static_cast<const unsigned char*>(first.end)) {
    return false;
  }
  return std::all_of(job.destinations.begin(), job.destinations.end(), [](const Destination& d) {
    return d.piece_count == 1 &&
           (d.row_bytes == 0 || reinterpret_cast<uintptr_t>(d.data) % kVectorBytes == 0);
  });
}

cudaError_t LaunchNarrowSplit(cudaStream_t stream, const Call& call, const Device&) {
  const Job& job = call.job;
  switch (call.unit) {
    case 2:
      return LaunchNarrow<uint16_t>(stream, job);
    case 1:
      return LaunchNarrow<uint8_t>(stream, job);
    default:
      return LaunchNarrow<uint32_t>(stream, job);
  }
}

}  // namespace jaxops::concatenate::cuda
