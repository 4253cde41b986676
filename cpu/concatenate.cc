// Concatenation and splitting on the host: every piece of every row is one copy.
#include "cpu/concatenate.h"

#include <algorithm>
#include <cstring>

namespace jaxops::concatenate::cpu {
namespace {

// Bytes of a destination that are worth a task.
constexpr int64_t kTaskBytes = 256 * 1024;

// The row of a source that belongs to a row of the destination.
int64_t SourceRow(const Job& job, const Piece& piece, int64_t row) {
  if (!job.broadcasts) return row;
  int64_t source = 0;
  int64_t stride = 1;
  for (int d = job.row_dims - 1; d >= 0; --d) {
    const int64_t index = row % job.row_sizes[d];
    row /= job.row_sizes[d];
    if (piece.varies >> d & 1) {
      source += index * stride;
      stride *= job.row_sizes[d];
    }
  }
  return source;
}

// Copies the bytes [first, last) of a piece of one row.
void CopyPart(const Job& job, const Piece& piece, char* out, int64_t row, int64_t first,
              int64_t last) {
  const int64_t filled = std::clamp(piece.size, first, last);
  if (filled > first) {
    const auto* source = static_cast<const char*>(piece.source);
    std::memcpy(out + first, source + SourceRow(job, piece, row) * piece.stride + first,
                filled - first);
  }
  if (last > filled) std::memset(out + filled, 0, last - filled);
}

// Copies a narrow piece of many rows, of a size that the compiler knows.
template <int kSize>
void CopyColumn(const Piece& piece, char* out, int64_t row_bytes, int64_t first, int64_t last) {
  const auto* source = static_cast<const char*>(piece.source);
  for (int64_t row = first; row < last; ++row) {
    std::memcpy(out + row * row_bytes, source + row * piece.stride, kSize);
  }
}

// Copies a piece of the rows [first, last); `out` is where the piece of row 0 belongs.
void CopyRows(const Job& job, const Piece& piece, char* out, int64_t row_bytes, int64_t first,
              int64_t last) {
  if (!job.broadcasts && piece.size == piece.extent) {
    switch (piece.size) {
      case 1:
        return CopyColumn<1>(piece, out, row_bytes, first, last);
      case 2:
        return CopyColumn<2>(piece, out, row_bytes, first, last);
      case 3:
        return CopyColumn<3>(piece, out, row_bytes, first, last);
      case 4:
        return CopyColumn<4>(piece, out, row_bytes, first, last);
      case 8:
        return CopyColumn<8>(piece, out, row_bytes, first, last);
      case 12:
        return CopyColumn<12>(piece, out, row_bytes, first, last);
      case 16:
        return CopyColumn<16>(piece, out, row_bytes, first, last);
    }
  }
  for (int64_t row = first; row < last; ++row) {
    CopyPart(job, piece, out + row * row_bytes, row, 0, piece.extent);
  }
}

}  // namespace

void RunMove(const Job& job, const jaxops::cpu::ParallelFor& parallel_for) {
  for (const Destination& destination : job.destinations) {
    const int64_t row_bytes = destination.row_bytes;
    if (row_bytes == 0 || job.rows == 0) continue;
    auto* data = static_cast<char*>(destination.data);
    const Piece* pieces = &job.pieces[destination.first_piece];
    if (row_bytes < kTaskBytes) {
      const int64_t rows = std::max<int64_t>(kTaskBytes / row_bytes, 1);
      parallel_for((job.rows + rows - 1) / rows, [&](int64_t task) {
        char* out = data;
        for (int64_t p = 0; p < destination.piece_count; out += pieces[p++].extent) {
          CopyRows(job, pieces[p], out, row_bytes, task * rows,
                   std::min((task + 1) * rows, job.rows));
        }
      });
    } else {
      const int64_t parts = (row_bytes + kTaskBytes - 1) / kTaskBytes;
      parallel_for(job.rows * parts, [&](int64_t task) {
        const int64_t row = task / parts;
        const int64_t first = task % parts * kTaskBytes;
        const int64_t last = std::min(first + kTaskBytes, row_bytes);
        int64_t begin = 0;
        for (int64_t p = 0; p < destination.piece_count && begin < last; ++p) {
          const int64_t end = begin + pieces[p].extent;
          if (end > first) {
            CopyPart(job, pieces[p], data + row * row_bytes + begin, row,
                     std::max(first - begin, int64_t{0}), std::min(last, end) - begin);
          }
          begin = end;
        }
      });
    }
  }
}

}  // namespace jaxops::concatenate::cpu
