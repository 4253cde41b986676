// Calls of the kernels that sample volumes at points, on every platform.
//
// A batch entry has a volume, whose `axes` grid dimensions are followed by channels, and points.
// w_c is the weight of one of the 2^axes entries around a point, or its derivative along `order`
// directions, see common/multilinear.h; with the nearest entry there is one, of weight 1.
//
//   out[p, f]        = sum_c w_c(p) volume[entry_c(p), f]
//   dvolume[e, f]    = sum_{p, c: entry_c(p) = e} w_c(p) cotangent[p, f]
//   dpoints[p, a]    = the derivative along axis a of sum_f out[p, f] cotangent[p, f]
#ifndef JAXOPS_COMMON_GRID_SAMPLE_H_
#define JAXOPS_COMMON_GRID_SAMPLE_H_

#include <math.h>

#include <cstdint>

#include "common/batch.h"
#include "common/host_device.h"
#include "common/multilinear.h"
#include "common/types.h"

namespace jaxops::grid_sample {

inline constexpr int kMaxAxes = 3;

// Entries of an axis, at most: this number plus one is still a 32-bit integer.
inline constexpr int64_t kMaxSize = INT32_MAX - 1;

enum class Method : int32_t { kLinear, kNearest };
enum class Padding : int32_t { kZeros, kBorder, kReflection };

struct Geometry {
  int axes;  // 2 or 3, or 1 with `pixel`
  int32_t sizes[kMaxAxes];
  int64_t width;   // channels
  int64_t points;  // of a batch entry
  Method method;
  Padding padding;
  bool align_corners;
  bool pixel;  // coordinates count entries; align_corners then tells what they are reflected about
  // Points vary fastest in points, directions and dpoints, (axes, points). CUDA kernels have no
  // such calls.
  bool points_minor;

  JAXOPS_HOST_DEVICE int64_t grid() const {
    int64_t product = 1;
    for (int a = 0; a < axes; ++a) product *= sizes[a];
    return product;
  }
};

struct Call {
  enum Operand {
    kVolume,
    kPoints,
    kCotangent,
    kGradient,  // dvolume, which does not vary along the batch dimensions that it sums
    kDirections,
    kOperands = kDirections + multilinear::kMaxDirections
  };

  Geometry geometry;
  int64_t gradients;  // entries of dvolume
  DType dtype;        // of volume, cotangent, out and dvolume; f16 and bf16 compute in f32
  DType point_dtype;  // of points, directions and dpoints; f64 only if dtype is
  int order;
  bool deterministic;
  const void* volume;  // null if neither out nor dpoints is wanted
  const void* points;
  const void* cotangent;  // null if out is wanted
  const void* directions[multilinear::kMaxDirections];
  // A call computes either out, or one or both of the others; out and dpoints are dense.
  void* out;
  void* dvolume;
  void* dpoints;
  // Work space on CUDA devices, for the sums of the volume's gradient and the order of points.
  void* scratch;
  int64_t scratch_bytes;
  // This is the last member: the others, which kernels read, are then contiguous in their
  // parameters.
  BatchMap<kOperands> batch;
};

JAXOPS_HOST_DEVICE_INLINE float Floor(float x) { return floorf(x); }
JAXOPS_HOST_DEVICE_INLINE double Floor(double x) { return floor(x); }

// Rounds halves to even.
JAXOPS_HOST_DEVICE_INLINE float Round(float x) { return rintf(x); }
JAXOPS_HOST_DEVICE_INLINE double Round(double x) { return rint(x); }

// a b + c. On GPUs its rounding is fixed here, and not the compiler's choice: all kernels must
// locate a coordinate at the same entry.
template <typename A>
JAXOPS_HOST_DEVICE_INLINE A MultiplyAdd(A a, A b, A c) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(A) == sizeof(float)) {
    return __fmaf_rn(a, b, c);
  } else {
    return __fma_rn(a, b, c);
  }
#else
  return a * b + c;
#endif
}

// The entries around a coordinate of one axis.
template <typename A>
struct Place {
  int32_t entry;  // the lower of the two around it
  bool lower;     // whether each entry is in the volume
  bool upper;
  multilinear::Axis<A> axis;
};

// Tells whether coordinates count entries. Kernels of GPUs do not take such coordinates.
JAXOPS_HOST_DEVICE_INLINE bool CountsEntries([[maybe_unused]] const Geometry& geometry) {
#if defined(__CUDA_ARCH__)
  return false;
#else
  return geometry.pixel;
#endif
}

// Returns the entries that one unit of a coordinate spans, along an axis of n entries.
template <typename A>
JAXOPS_HOST_DEVICE_INLINE A SlopeOf(A n, const Geometry& geometry) {
  if (CountsEntries(geometry)) return 1;
  return geometry.align_corners ? (n - 1) / 2 : n / 2;
}

// A NaN is located far outside; the caller checks for NaN.
template <typename A>
JAXOPS_HOST_DEVICE_INLINE Place<A> Locate(A p, int32_t size, const Geometry& geometry) {
  // Both are rounded, and may be equal, if A does not represent every entry of such a large axis.
  const A n = static_cast<A>(size);
  const A last = n - 1;
  A slope = SlopeOf(n, geometry);
  A x = MultiplyAdd(p + 1, slope, geometry.align_corners ? A(0) : A(-0.5));
  if (geometry.align_corners && size == 1) x = 0;
  if (CountsEntries(geometry)) x = p;
  if (geometry.padding == Padding::kZeros) {
    if (!(x > -1 && (x < n || x == last))) return {-2, false, false, {0, 0, 0}};
  } else {
    if (geometry.padding == Padding::kReflection && !(x >= 0 && x <= last)) {
      const A low = geometry.align_corners ? A(0) : A(-0.5);
      const A span = geometry.align_corners ? last : n;
      const A distance = x < low ? low - x : x - low;
      // An infinite coordinate is clamped.
      if (span > 0 && distance - distance == 0) {
        const A rest = MultiplyAdd(-2 * span, Floor(distance / (2 * span)), distance);
        const bool back = rest > span;
        if (back != (x < low)) slope = -slope;
        x = (back ? 2 * span - rest : rest) + low;
      }
    }
    // The derivative is zero along an axis of one entry, even if x is on that entry.
    if (!(x >= 0 && x <= last) || size == 1) {
      slope = 0;
      x = x > last ? last : A(0);
    }
  }
  if (geometry.method == Method::kNearest) {
    const int32_t nearest = x == last ? size - 1 : static_cast<int32_t>(Round(x));
    return {nearest, nearest >= 0 && nearest < size, false, {1, 0, 0}};
  }
  // The last entry belongs to the interval before it, if the axis has one.
  const bool ends = x == last && size > 1;
  const int32_t entry = ends ? size - 2 : static_cast<int32_t>(Floor(x));
  const A fraction = ends ? A(1) : x - static_cast<A>(entry);
  return {entry, entry >= 0 && entry < size, entry + 1 < size, {1 - fraction, fraction, slope}};
}

// Locate for zeros around and the two entries around a coordinate. It has no branches, so that the
// chains of several axes overlap.
template <typename A>
JAXOPS_HOST_DEVICE_INLINE Place<A> LocateInZeros(A p, int32_t size, const Geometry& geometry) {
  const A n = static_cast<A>(size);
  const A last = n - 1;
  const A slope = SlopeOf(n, geometry);
  A x = MultiplyAdd(p + 1, slope, geometry.align_corners ? A(0) : A(-0.5));
  x = geometry.align_corners && size == 1 ? A(0) : x;
  if (CountsEntries(geometry)) x = p;
  const bool near = x > -1 && (x < n || x == last);
  x = near ? x : A(0);
  const bool ends = x == last && size > 1;
  const int32_t entry = !near ? -2 : ends ? size - 2 : static_cast<int32_t>(Floor(x));
  const A fraction = !near ? A(0) : ends ? A(1) : x - static_cast<A>(entry);
  return {entry,
          entry >= 0 && entry < size,
          near && entry + 1 < size,
          {near ? 1 - fraction : A(0), fraction, near ? slope : A(0)}};
}

}  // namespace jaxops::grid_sample

#endif  // JAXOPS_COMMON_GRID_SAMPLE_H_
