// Calls of the kernels that sum the entries of a volume at given indices with given weights.
//
// A batch entry has a volume, whose `axes` grid dimensions are followed by channels. A point has
// `taps` indices and as many weights along each axis, and reads the entries of all combinations:
//
//   out[p, f]     = sum_k prod_a w_a[p, k_a] volume[i_0[p, k_0], i_1[p, k_1], ..., f]
//   dvolume, dw_a = the gradients of sum_{p, f} out[p, f] cotangent[p, f]
//
// A combination with an index outside of the volume contributes nothing.
#ifndef JAXOPS_COMMON_TAPS_H_
#define JAXOPS_COMMON_TAPS_H_

#include <cstdint>

#include "common/batch.h"
#include "common/types.h"

namespace jaxops::taps {

inline constexpr int kMaxAxes = 3;

// Combinations of a point, at most.
inline constexpr int kMaxCombinations = 64;

// Taps of an axis, at most, for which there are CUDA kernels.
inline constexpr int kMaxCudaTaps = 8;

struct Geometry {
  int axes;  // 1 to 3
  int taps;  // of an axis; taps^axes is at most kMaxCombinations
  int combinations;
  // Points vary fastest in indices, (axes, taps, points), and weights, (taps, points). CUDA kernels
  // have no such calls.
  bool points_minor;
  int64_t sizes[kMaxAxes];
  int64_t width;   // channels
  int64_t points;  // of a batch entry
};

struct Call {
  enum Operand {
    kVolume,
    kIndices,
    kCotangent,
    kGradient,  // dvolume, which does not vary along the batch dimensions that it sums
    kWeights,
    kOperands = kWeights + kMaxAxes
  };

  Geometry geometry;
  int64_t gradients;   // entries of dvolume
  DType dtype;         // of volume, cotangent, out and dvolume; weights are of its arithmetic type
  const void* volume;  // null if dvolume is wanted
  const int32_t* indices;         // (points, axes, taps)
  const void* cotangent;          // null if out is wanted
  const void* weights[kMaxAxes];  // (points, taps) each
  // A call computes out, dvolume, or dweights; out and dweights are dense.
  void* out;
  void* dvolume;
  void* dweights[kMaxAxes];
  void* scratch;  // the work space, WorkSpaceBytes of it on CUDA devices
  BatchMap<kOperands> batch;

  // The elements of dvolume.
  int64_t gradient_size() const {
    int64_t size = gradients * geometry.width;
    for (int a = 0; a < geometry.axes; ++a) size *= geometry.sizes[a];
    return size;
  }
};

// CUDA kernels add to 2-byte entries of dvolume in f32.
inline int64_t WorkSpaceBytes(const Call& call) {
  return call.dvolume == nullptr || SizeOf(call.dtype) > 2 ? 0 : 4 * call.gradient_size();
}

// PrefersKernels says whether a GPU is to run kernels, and not XLA's gathers and scatters:
// docs/grid_sample.md has times. Tables are those of one axis, such as hash grids have.
inline bool PrefersKernels(const Call& call) {
  const Geometry& g = call.geometry;
  const bool is_long = g.combinations >= 8;
  if (call.dvolume != nullptr) return is_long || g.width > 1 || SizeOf(call.dtype) == 2;
  if (g.axes == 1) return is_long;
  return call.out == nullptr && g.combinations == kMaxCombinations;
}

}  // namespace jaxops::taps

#endif  // JAXOPS_COMMON_TAPS_H_
