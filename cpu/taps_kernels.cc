#include "cpu/taps_kernels.h"

#include <cstdint>

#include "cpu/rows.h"
#include "cpu/simd.h"

namespace jaxops::taps::cpu::JAXOPS_ISA {
namespace {

using namespace jaxops::cpu::JAXOPS_ISA;

// Four neighbours along the last axis, as cubic kernels read them.
constexpr int kNeighbours = 4;

// The entries that a point reads, without those outside of the volume.
template <typename A>
struct Entries {
  int count;
  int64_t offsets[kMaxCombinations];  // in elements
  A weights[kMaxCombinations];
  uint8_t combinations[kMaxCombinations];
};

// Finds the rows that points read: combinations of all axes but the last, and the last axis.
template <typename A>
struct Finder {
  const Geometry& geometry;
  const int32_t* indices;
  const A* weights[kMaxAxes];
  int64_t begin;  // of the indices of the first axis that count
  int64_t end;

  JAXOPS_ALWAYS_INLINE Finder(const Points& points, int64_t begin_, int64_t end_)
      : geometry(points.geometry), indices(points.indices), begin(begin_), end(end_) {
    for (int a = 0; a < geometry.axes; ++a) weights[a] = static_cast<const A*>(points.weights[a]);
  }

  // Returns whether index k of point p is in the volume along an axis.
  JAXOPS_ALWAYS_INLINE bool IsValid(int64_t p, int axis, int k) const {
    const int32_t index = indices[(p * geometry.axes + axis) * geometry.taps + k];
    return index >= 0 && index < geometry.sizes[axis];
  }

  // Finds the combinations of axes [0, axes) of point p, with offsets in entries of the last of
  // these axes.
  JAXOPS_ALWAYS_INLINE void Find(int64_t p, int axes, Entries<A>& found) const {
    found.count = 1;
    found.offsets[0] = 0;
    found.weights[0] = 1;
    found.combinations[0] = 0;
    const int taps = geometry.taps;
    const int32_t* index = indices + p * geometry.axes * taps;
    for (int a = 0; a < axes; ++a) {
      const int64_t size = geometry.sizes[a];
      const int64_t low = a == 0 ? begin : 0;
      const int64_t high = a == 0 ? end : size;
      int valid[kMaxCombinations + 1];
      int count = 0;
      for (int k = 0; k < taps; ++k) {
        valid[count] = k;
        count += index[a * taps + k] >= low && index[a * taps + k] < high;
      }
      // The last combination is first, because those of this axis take the place of earlier ones.
      for (int c = found.count - 1; c >= 0; --c) {
        const int64_t offset = found.offsets[c] * size;
        const A weight = found.weights[c];
        const int combination = found.combinations[c] * taps;
        for (int v = count - 1; v >= 0; --v) {
          const int k = valid[v];
          const int at = c * count + v;
          found.offsets[at] = offset + index[a * taps + k];
          found.weights[at] = weight * weights[a][p * taps + k];
          found.combinations[at] = static_cast<uint8_t>(combination + k);
        }
      }
      found.count *= count;
    }
  }

  // Finds all entries of point p, with offsets in elements.
  JAXOPS_ALWAYS_INLINE void FindAll(int64_t p, Entries<A>& found) const {
    Find(p, geometry.axes, found);
    for (int i = 0; i < found.count; ++i) found.offsets[i] *= geometry.width;
  }

  // Returns whether point p reads kNeighbours neighbours along the last axis, and finds the rows
  // that begin with the first of these. Volumes have one channel.
  JAXOPS_ALWAYS_INLINE bool FindNeighbours(int64_t p, Entries<A>& found) const {
    const int last = geometry.axes - 1;
    if (geometry.taps != kNeighbours) return false;
    const int32_t* index = indices + (p * geometry.axes + last) * kNeighbours;
    const int64_t low = last == 0 ? begin : 0;
    const int64_t high = last == 0 ? end : geometry.sizes[last];
    if (index[0] < low || index[0] + int64_t{kNeighbours} > high) return false;
    for (int k = 1; k < kNeighbours; ++k) {
      if (index[k] != index[0] + k) return false;
    }
    Find(p, last, found);
    for (int i = 0; i < found.count; ++i) {
      found.offsets[i] = found.offsets[i] * geometry.sizes[last] + index[0];
    }
    return true;
  }
};

// Vectors of channels that are summed at the same time: a sum waits for the addition before it.
constexpr int kVectors = 4;

// kWidth is the number of channels if a kernel for that number exists, otherwise 0.
template <typename S, int kWidth>
void EvaluateValues(const Values& args) {
  using A = Arithmetic<S>;
  const Points& points = args.points;
  const int64_t width = kWidth > 0 ? kWidth : points.geometry.width;
  const Finder<A> finder(points, 0, points.geometry.sizes[0]);
  const auto* volume = static_cast<const S*>(args.volume);
  S* out = static_cast<S*>(args.out);
  Entries<A> found;
  for (int64_t p = 0; p < points.count; ++p, out += width) {
    if constexpr (kWidth == 1 && kNeighbours <= kLanes<A>) {
      using R = Row<A, kNeighbours>;
      if (finder.FindNeighbours(p, found)) {
        typename R::V sum = {};
        for (int i = 0; i < found.count; ++i) {
          sum += found.weights[i] * R::Read(volume + found.offsets[i]);
        }
        const A* last = finder.weights[points.geometry.axes - 1] + p * kNeighbours;
        const A total = R::Sum(sum * R::Read(last));
        StorePartial(Vec<A>{total}, out, 1);
        continue;
      }
    }
    finder.FindAll(p, found);
    if constexpr (kWidth > 0) {
      using R = Row<A, kWidth>;
      using V = typename R::V;
      V sum = V{};
      for (int i = 0; i < found.count; ++i) {
        sum += found.weights[i] * R::Read(volume + found.offsets[i]);
      }
      if constexpr (sizeof(S) == sizeof(A)) {
        R::Write(sum, out);
      } else {
        A wide[kLanes<A>] = {};
        R::Write(sum, wide);
        StorePartial(Load(wide), out, kWidth);
      }
    } else {
      using V = Vec<A>;
      int64_t f = 0;
      for (; f + kVectors * kLanes<A> <= width; f += kVectors * kLanes<A>) {
        V sums[kVectors] = {};
        for (int i = 0; i < found.count; ++i) {
          const S* from = volume + found.offsets[i] + f;
          JAXOPS_UNROLL
          for (int v = 0; v < kVectors; ++v) {
            sums[v] += found.weights[i] * Load(from + v * kLanes<A>);
          }
        }
        JAXOPS_UNROLL
        for (int v = 0; v < kVectors; ++v) Store(sums[v], out + f + v * kLanes<A>);
      }
      for (; f + kLanes<A> <= width; f += kLanes<A>) {
        V sum = {};
        for (int i = 0; i < found.count; ++i) {
          sum += found.weights[i] * Load(volume + found.offsets[i] + f);
        }
        Store(sum, out + f);
      }
      if (f < width) {
        V sum = {};
        for (int i = 0; i < found.count; ++i) {
          sum += found.weights[i] * LoadFirst(volume + found.offsets[i] + f, width - f);
        }
        StoreFirst(sum, out + f, width - f);
      }
    }
  }
}

template <typename S, int kWidth>
void EvaluateWeightGradients(const WeightGradients& args) {
  using A = Arithmetic<S>;
  const Points& points = args.points;
  const Geometry& geometry = points.geometry;
  const int taps = geometry.taps;
  const int64_t width = kWidth > 0 ? kWidth : geometry.width;
  const Finder<A> finder(points, 0, geometry.sizes[0]);
  const auto* volume = static_cast<const S*>(args.volume);
  const auto* g = static_cast<const S*>(args.cotangent);
  Entries<A> found;
  for (int64_t p = 0; p < points.count; ++p, g += width) {
    A dots[kMaxCombinations] = {};
    finder.FindAll(p, found);
    if constexpr (kWidth > 0) {
      using R = Row<A, kWidth>;
      const auto row = R::Read(g);
      for (int i = 0; i < found.count; ++i) {
        dots[found.combinations[i]] = R::Sum(row * R::Read(volume + found.offsets[i]));
      }
    } else {
      using V = Vec<A>;
      for (int i = 0; i < found.count; ++i) {
        const S* row = volume + found.offsets[i];
        V sum = {};
        int64_t f = 0;
        for (; f + kLanes<A> <= width; f += kLanes<A>) sum += Load(row + f) * Load(g + f);
        if (f < width) sum += LoadFirst(row + f, width - f) * LoadFirst(g + f, width - f);
        dots[found.combinations[i]] = SumLanes<A>(sum);
      }
    }
    // From the last axis to the first: its gradient has the weights of the axes before it, and its
    // weights then contract the products.
    int rows = geometry.combinations;
    for (int a = geometry.axes - 1; a >= 0; --a) {
      rows /= taps;
      finder.Find(p, a, found);  // the combinations of the axes before this one
      A* to = static_cast<A*>(args.dweights[a]) + p * taps;
      A weights[kMaxCombinations];
      for (int k = 0; k < taps; ++k) {
        A sum = 0;
        const bool is_valid = finder.IsValid(p, a, k);
        for (int i = 0; is_valid && i < found.count; ++i) {
          sum += found.weights[i] * dots[found.combinations[i] * taps + k];
        }
        to[k] = sum;
        weights[k] = is_valid ? finder.weights[a][p * taps + k] : A(0);
      }
      for (int r = 0; r < rows; ++r) {
        A sum = 0;
        for (int k = 0; k < taps; ++k) sum += weights[k] * dots[r * taps + k];
        dots[r] = sum;
      }
    }
  }
}

template <typename S, int kWidth>
void EvaluateScatter(const Scatter& args) {
  using A = Arithmetic<S>;
  const Points& points = args.points;
  const Geometry& geometry = points.geometry;
  const int64_t width = kWidth > 0 ? kWidth : geometry.width;
  const Finder<A> finder(points, args.begin, args.end);
  int64_t slice = width;  // elements of one index of the first axis
  for (int a = 1; a < geometry.axes; ++a) slice *= geometry.sizes[a];
  A* sums = static_cast<A*>(args.sums) - args.begin * slice;
  const auto* g = static_cast<const S*>(args.cotangent);
  Entries<A> found;
  for (int64_t p = 0; p < points.count; ++p, g += width) {
    if constexpr (kWidth == 1 && kNeighbours <= kLanes<A>) {
      using R = Row<A, kNeighbours>;
      if (finder.FindNeighbours(p, found)) {
        const A* last = finder.weights[geometry.axes - 1] + p * kNeighbours;
        const auto row = Row<A, 1>::Read(g) * R::Read(last);
        for (int i = 0; i < found.count; ++i) {
          A* to = sums + found.offsets[i];
          R::Write(R::Read(to) + found.weights[i] * row, to);
        }
        continue;
      }
    }
    finder.FindAll(p, found);
    if constexpr (kWidth > 0) {
      using R = Row<A, kWidth>;
      const auto row = R::Read(g);
      for (int i = 0; i < found.count; ++i) {
        A* to = sums + found.offsets[i];
        R::Write(R::Read(to) + found.weights[i] * row, to);
      }
    } else {
      for (int i = 0; i < found.count; ++i) {
        A* to = sums + found.offsets[i];
        const A weight = found.weights[i];
        int64_t f = 0;
        for (; f + kLanes<A> <= width; f += kLanes<A>) {
          Store(Load(to + f) + weight * Load(g + f), to + f);
        }
        if (f < width) {
          const int64_t count = width - f;
          StoreFirst(LoadFirst(to + f, count) + weight * LoadFirst(g + f, count), to + f, count);
        }
      }
    }
  }
}

// Calls run with a pointer of the storage type, and the number of channels if a kernel for that
// number exists, otherwise 0.
template <typename Run>
void Dispatch(const Points& points, Run run) {
  WithStorage(points.dtype, nullptr, 0, [&]<typename S>(const S* storage) {
    WithWidth<Arithmetic<S>>(points.geometry.width, [&](auto width) { run(storage, width); });
  });
}

void RunValues(const Values& args) {
  Dispatch(args.points, [&]<typename S, int kWidth>(const S*, Constant<kWidth>) {
    EvaluateValues<S, kWidth>(args);
  });
}

void RunWeightGradients(const WeightGradients& args) {
  Dispatch(args.points, [&]<typename S, int kWidth>(const S*, Constant<kWidth>) {
    EvaluateWeightGradients<S, kWidth>(args);
  });
}

void RunScatter(const Scatter& args) {
  Dispatch(args.points, [&]<typename S, int kWidth>(const S*, Constant<kWidth>) {
    EvaluateScatter<S, kWidth>(args);
  });
}

void RunStoreSums(const StoreSums& args) {
  WithStorage(args.dtype, args.to, 0, [&]<typename S>(const S* to) {
    StoreRounded(static_cast<const Arithmetic<S>*>(args.sums), args.count, const_cast<S*>(to));
  });
}

}  // namespace

const Kernels kKernels = {RunValues, RunWeightGradients, RunScatter, RunStoreSums};

}  // namespace jaxops::taps::cpu::JAXOPS_ISA
