// These functions answer the families' questions about a job.
#ifndef JAXOPS_CUDA_CONCATENATE_JOB_H_
#define JAXOPS_CUDA_CONCATENATE_JOB_H_

#include <algorithm>
#include <cstdint>

#include "common/concatenate.h"

namespace jaxops::concatenate::cuda {

// HasFullPieces says that pieces fill all rows.
inline bool HasFullPieces(const Job& job) {
  return std::all_of(job.pieces.begin(), job.pieces.end(),
                     [](const Piece& p) { return p.size == p.extent; });
}

inline bool HasEqualPieces(const Job& job) {
  return std::all_of(job.pieces.begin(), job.pieces.end(), [&](const Piece& p) {
    return p.extent == job.pieces[0].extent && p.extent > 0;
  });
}

// SplitsOneSource says whether all destinations are cut from neighbouring parts of the rows of one
// source.
inline bool SplitsOneSource(const Job& job) {
  const Piece& first = job.pieces[0];
  const auto* next = static_cast<const unsigned char*>(first.source);
  for (const Piece& p : job.pieces) {
    if (p.source != next || p.end != first.end || p.stride != first.stride) return false;
    next += p.size;
  }
  return HasFullPieces(job);
}

// CountFilledPieces returns the number of pieces before zeros fill the rest of the row; -1 if zeros
// come before a piece.
inline int CountFilledPieces(const Job& job) {
  int filled = 0;
  bool ended = false;
  for (const Piece& p : job.pieces) {
    if (p.extent == 0) continue;
    if (ended && p.size > 0) return -1;
    filled += p.size > 0;
    ended = p.size < p.extent;
  }
  return filled;
}

// HasShortStrides says whether 32 bits hold the strides by which rows are multiplied.
inline bool HasShortStrides(const Job& job) {
  return job.rows == 1 || std::all_of(job.pieces.begin(), job.pieces.end(), [](const Piece& p) {
           return std::max(p.stride, p.extent) <= UINT32_MAX;
         });
}

// WordsOf returns the number of Words in `bytes`.
template <typename Word>
uint32_t WordsOf(int64_t bytes) {
  return static_cast<uint32_t>(bytes / sizeof(Word));
}

}  // namespace jaxops::concatenate::cuda

#endif  // JAXOPS_CUDA_CONCATENATE_JOB_H_
