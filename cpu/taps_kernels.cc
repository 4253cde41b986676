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
  // Entries of indices and weights between neighbouring taps, axes and points.
  int64_t tap_stride;
  int64_t axis_stride;
  int64_t point_stride;
  int64_t weight_stride;      // between points
  int64_t strides[kMaxAxes];  // elements between neighbouring entries of the volume

  JAXOPS_ALWAYS_INLINE Finder(const Points& points, int64_t begin_, int64_t end_)
      : geometry(points.geometry),
        indices(points.indices),
        begin(begin_),
        end(end_),
        tap_stride(geometry.points_minor ? geometry.points : 1),
        axis_stride(geometry.taps * tap_stride),
        point_stride(geometry.points_minor ? 1 : geometry.axes * geometry.taps),
        weight_stride(geometry.points_minor ? 1 : geometry.taps) {
    int64_t stride = geometry.width;
    for (int a = geometry.axes - 1; a >= 0; --a) {
      weights[a] = static_cast<const A*>(points.weights[a]);
      strides[a] = stride;
      stride *= geometry.sizes[a];
    }
  }

  JAXOPS_ALWAYS_INLINE int32_t Index(int64_t p, int axis, int k) const {
    return indices[p * point_stride + axis * axis_stride + k * tap_stride];
  }

  // The place of the weight of tap k of point p, and of its gradient.
  JAXOPS_ALWAYS_INLINE int64_t PlaceOfWeight(int64_t p, int k) const {
    return p * weight_stride + k * tap_stride;
  }

  // Returns whether index k of point p is in the volume along an axis.
  JAXOPS_ALWAYS_INLINE bool IsValid(int64_t p, int axis, int k) const {
    const int32_t index = Index(p, axis, k);
    return index >= 0 && index < geometry.sizes[axis];
  }

  // Finds the combinations of axes [0, axes) of point p.
  JAXOPS_ALWAYS_INLINE void Find(int64_t p, int axes, Entries<A>& found) const {
    found.count = 1;
    found.offsets[0] = 0;
    found.weights[0] = 1;
    found.combinations[0] = 0;
    const int taps = geometry.taps;
    for (int a = 0; a < axes; ++a) {
      if (taps == kNeighbours && CombineWhole(p, a, found)) continue;
      const int64_t low = a == 0 ? begin : 0;
      const int64_t high = a == 0 ? end : geometry.sizes[a];
      int valid[kMaxCombinations + 1];
      int count = 0;
      for (int k = 0; k < taps; ++k) {
        valid[count] = k;
        const int32_t index = Index(p, a, k);
        count += index >= low && index < high;
      }
      // The last combination is first, because those of this axis take the place of earlier ones.
      for (int c = found.count - 1; c >= 0; --c) {
        const int64_t offset = found.offsets[c];
        const A weight = found.weights[c];
        const int combination = found.combinations[c] * taps;
        for (int v = count - 1; v >= 0; --v) {
          const int k = valid[v];
          const int at = c * count + v;
          found.offsets[at] = offset + Index(p, a, k) * strides[a];
          found.weights[at] = weight * weights[a][PlaceOfWeight(p, k)];
          found.combinations[at] = static_cast<uint8_t>(combination + k);
        }
      }
      found.count *= count;
    }
  }

  // Combines what is found of the axes before axis `a` with kNeighbours taps, and returns whether
  // it did: all of these taps have to be in the volume. Their number is constant, and vectors are
  // written as they are read.
  JAXOPS_ALWAYS_INLINE bool CombineWhole(int64_t p, int a, Entries<A>& found) const {
    using Offsets = Lanes<int64_t, kNeighbours>;
    using Weights = Lanes<A, kNeighbours>;
    const int64_t low = a == 0 ? begin : 0;
    const auto size = static_cast<uint64_t>(a == 0 ? end - begin : geometry.sizes[a]);
    Offsets offsets;
    Weights factors;
    bool is_whole = true;
    JAXOPS_UNROLL
    for (int k = 0; k < kNeighbours; ++k) {
      const int64_t index = Index(p, a, k);
      is_whole &= static_cast<uint64_t>(index - low) < size;
      offsets[k] = index * strides[a];
      factors[k] = weights[a][PlaceOfWeight(p, k)];
    }
    if (!is_whole) return false;
    // The last combination is first, as below.
    for (int c = found.count - 1; c >= 0; --c) {
      const Offsets shifted = found.offsets[c] + offsets;
      const Weights products = found.weights[c] * factors;
      const uint32_t combinations = found.combinations[c] * kNeighbours * 0x01010101u + 0x03020100u;
      __builtin_memcpy(found.offsets + c * kNeighbours, &shifted, sizeof(shifted));
      __builtin_memcpy(found.weights + c * kNeighbours, &products, sizeof(products));
      __builtin_memcpy(found.combinations + c * kNeighbours, &combinations, sizeof(combinations));
    }
    found.count *= kNeighbours;
    return true;
  }

  // Calls with_row(offset, weight) for each row of kNeighbours neighbours along the last axis that
  // point p reads, weighted by the other axes, and returns true; or returns false if an entry is no
  // neighbour of the others or outside of the volume. Volumes have one channel.
  template <typename WithRow>
  JAXOPS_ALWAYS_INLINE bool ForEachRow(int64_t p, WithRow with_row) const {
    if (geometry.taps != kNeighbours) return false;
    const int last = geometry.axes - 1;
    const int64_t first = Index(p, last, 0);
    bool is_row = true;
    for (int k = 1; k < kNeighbours; ++k) is_row &= Index(p, last, k) == first + k;
    // Without an axis before the last one there is one row, of offset 0 and weight 1.
    int64_t offsets[kMaxAxes - 1][kNeighbours] = {};
    A factors[kMaxAxes - 1][kNeighbours] = {{1}, {1}};
    int64_t slice = geometry.sizes[last];
    for (int a = last - 1; a >= 0; --a) {
      const int64_t low = a == 0 ? begin : 0;
      const int64_t high = a == 0 ? end : geometry.sizes[a];
      for (int k = 0; k < kNeighbours; ++k) {
        const int64_t index = Index(p, a, k);
        is_row &= index >= low && index < high;
        offsets[a][k] = index * slice;
        factors[a][k] = weights[a][PlaceOfWeight(p, k)];
      }
      slice *= geometry.sizes[a];
    }
    const int64_t low = last == 0 ? begin : 0;
    const int64_t high = last == 0 ? end : geometry.sizes[last];
    if (!is_row || first < low || first + kNeighbours > high) return false;
    const int outer = last > 1 ? kNeighbours : 1, inner = last > 0 ? kNeighbours : 1;
    // The axis before the last one is the inner one, whichever its number is.
    const int64_t* inner_offsets = offsets[last > 1 ? 1 : 0];
    const A* inner_factors = factors[last > 1 ? 1 : 0];
    for (int i = 0; i < outer; ++i) {
      const int64_t offset = first + (last > 1 ? offsets[0][i] : 0);
      const A factor = last > 1 ? factors[0][i] : A(1);
      JAXOPS_UNROLL
      for (int j = 0; j < inner; ++j) {
        with_row(offset + inner_offsets[j], factor * inner_factors[j]);
      }
    }
    return true;
  }

  // The weights of kNeighbours taps along the last axis.
  JAXOPS_ALWAYS_INLINE auto LastWeights(int64_t p) const {
    const A* from = weights[geometry.axes - 1];
    A row[kNeighbours];
    for (int k = 0; k < kNeighbours; ++k) row[k] = from[PlaceOfWeight(p, k)];
    return Row<A, kNeighbours>::Read(row);
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
      typename R::V sum = {};
      if (finder.ForEachRow(
              p, [&](int64_t offset, A weight) { sum += weight * R::Read(volume + offset); })) {
        const A total = R::Sum(sum * finder.LastWeights(p));
        StorePartial(Vec<A>{total}, out, 1);
        continue;
      }
    }
    finder.Find(p, points.geometry.axes, found);
    if constexpr (kWidth > 0) {
      using R = Row<A, kWidth>;
      using V = typename R::V;
      V sums[kNeighbours] = {};
      int i = 0;
      for (; i + kNeighbours <= found.count; i += kNeighbours) {
        JAXOPS_UNROLL
        for (int k = 0; k < kNeighbours; ++k) {
          sums[k] += found.weights[i + k] * R::Read(volume + found.offsets[i + k]);
        }
      }
      for (; i < found.count; ++i) {
        sums[0] += found.weights[i] * R::Read(volume + found.offsets[i]);
      }
      const V sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
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
  using Four = Lanes<A, kNeighbours>;
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
    finder.Find(p, geometry.axes, found);
    const auto find_dots = [&](auto dot) {
      int i = 0;
      if (taps == kNeighbours && found.count == geometry.combinations) {
        // As vectors, which are read below.
        for (; i < found.count; i += kNeighbours) {
          const Four four = {dot(i), dot(i + 1), dot(i + 2), dot(i + 3)};
          __builtin_memcpy(dots + i, &four, sizeof(four));
        }
      }
      for (; i < found.count; ++i) dots[found.combinations[i]] = dot(i);
    };
    if constexpr (kWidth > 0) {
      using R = Row<A, kWidth>;
      const auto row = R::Read(g);
      find_dots([&](int i) { return R::Sum(row * R::Read(volume + found.offsets[i])); });
    } else {
      using V = Vec<A>;
      find_dots([&](int i) {
        const S* row = volume + found.offsets[i];
        V sum = {};
        int64_t f = 0;
        for (; f + kLanes<A> <= width; f += kLanes<A>) sum += Load(row + f) * Load(g + f);
        if (f < width) sum += LoadFirst(row + f, width - f) * LoadFirst(g + f, width - f);
        return SumLanes<A>(sum);
      });
    }
    // From the last axis to the first: its gradient has the weights of the axes before it, and its
    // weights then contract the products.
    int rows = geometry.combinations;
    for (int a = geometry.axes - 1; a >= 0; --a) {
      rows /= taps;
      finder.Find(p, a, found);  // the combinations of the axes before this one
      A* to = static_cast<A*>(args.dweights[a]);
      if (taps == kNeighbours) {
        Four sum = {}, weights = {};
        for (int i = 0; i < found.count; ++i) {
          Four four;
          __builtin_memcpy(&four, dots + found.combinations[i] * kNeighbours, sizeof(four));
          sum += found.weights[i] * four;
        }
        JAXOPS_UNROLL
        for (int k = 0; k < kNeighbours; ++k) {
          const bool is_valid = finder.IsValid(p, a, k);
          const int64_t place = finder.PlaceOfWeight(p, k);
          to[place] = is_valid ? sum[k] : A(0);
          weights[k] = is_valid ? finder.weights[a][place] : A(0);
        }
        for (int r = 0; r < rows; ++r) {
          Four products;
          __builtin_memcpy(&products, dots + r * kNeighbours, sizeof(products));
          products *= weights;
          dots[r] = (products[0] + products[1]) + (products[2] + products[3]);
        }
        continue;
      }
      A weights[kMaxCombinations];
      for (int k = 0; k < taps; ++k) {
        A sum = 0;
        const bool is_valid = finder.IsValid(p, a, k);
        for (int i = 0; is_valid && i < found.count; ++i) {
          sum += found.weights[i] * dots[found.combinations[i] * taps + k];
        }
        to[finder.PlaceOfWeight(p, k)] = sum;
        weights[k] = is_valid ? finder.weights[a][finder.PlaceOfWeight(p, k)] : A(0);
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
      if (geometry.taps == kNeighbours) {
        const auto row = Row<A, 1>::Read(g) * finder.LastWeights(p);
        if (finder.ForEachRow(p, [&](int64_t offset, A weight) {
              A* to = sums + offset;
              R::Write(R::Read(to) + weight * row, to);
            })) {
          continue;
        }
      }
    }
    finder.Find(p, geometry.axes, found);
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
