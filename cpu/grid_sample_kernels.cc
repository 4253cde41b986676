#include "cpu/grid_sample_kernels.h"

#include <cstdint>

#include "common/multilinear.h"
#include "cpu/rows.h"
#include "cpu/simd.h"

namespace jaxops::grid_sample::cpu::JAXOPS_ISA {
namespace {

using namespace jaxops::cpu::JAXOPS_ISA;

// Points that are located together, a multiple of every vector width.
constexpr int kBlock = 64;

// --- locating points -----------------------------------------------------------------------------

// Rounds to integers: down, or to the nearest one and halves to even.
template <bool kDown, typename V>
JAXOPS_ALWAYS_INLINE V ToIntegral(V x) {
  using A = decltype(x[0] + 0);
#if defined(__AVX2__)
  constexpr int kMode = (kDown ? _MM_FROUND_TO_NEG_INF : _MM_FROUND_TO_NEAREST_INT) | 8;
#endif
#if defined(__AVX512F__)
  if constexpr (sizeof(A) == 8) return _mm512_maskz_roundscale_pd(0xff, x, kMode);
  if constexpr (sizeof(A) == 4) return _mm512_maskz_roundscale_ps(0xffff, x, kMode);
#elif defined(__AVX2__)
  if constexpr (sizeof(A) == 8) return _mm256_round_pd(x, kMode);
  if constexpr (sizeof(A) == 4) return _mm256_round_ps(x, kMode);
#else
  using Int = typename Simd<A>::Int;
  // The sum of kWhole and a smaller number has no bits for a fraction.
  constexpr A kWhole = A(int64_t{1} << Simd<A>::kMantissaBits);
  const Int sign = BitCast<Int>(x) & BitCast<Int>(-V{});
  const V magnitude = BitCast<V>(BitCast<Int>(x) ^ sign);
  const V rounded = magnitude < kWhole ? (magnitude + kWhole) - kWhole : magnitude;
  const V nearest = BitCast<V>(BitCast<Int>(rounded) | sign);
  if constexpr (!kDown) return nearest;
  return nearest > x ? nearest - 1 : nearest;
#endif
}

// Converts numbers without a fraction to integers.
JAXOPS_ALWAYS_INLINE Simd<float>::Int ToInt(Vec<float> x) {
  return __builtin_convertvector(x, Simd<float>::Int);
}
JAXOPS_ALWAYS_INLINE Simd<double>::Int ToInt(Vec<double> x) {
  // Few CPUs convert vectors to 64-bit integers; the sum with kRounder has the integer in its low
  // bits.
  constexpr double kRounder = 3 * (int64_t{1} << (Simd<double>::kMantissaBits - 1));
  using Int = Simd<double>::Int;
  return BitCast<Int>(x + kRounder) - BitCast<Int>(Vec<double>{} + kRounder);
}

// The entries around a coordinate of an axis and their factors: Locate of common/grid_sample.h for
// vectors.
template <typename A>
struct AxisOf {
  using V = Vec<A>;
  using Int = typename Simd<A>::Int;

  int32_t size;
  int32_t begin;  // bounds of the entries that this call reads or adds to
  int32_t end;
  Padding padding;
  bool nearest;
  bool single;  // every coordinate is on the only entry
  bool pixel;   // coordinates count entries
  A last;
  A slope;
  A low;  // the coordinate -1 is at low, and reflection is about low and low + span
  A span;

  struct Found {
    Int entry;      // the lower of the two around a coordinate
    Int has_lower;  // all bits set if the entry is in the volume and in [begin, end)
    Int has_upper;
    V lower;  // the factors
    V upper;
    V slope;
  };

  AxisOf() = default;
  JAXOPS_ALWAYS_INLINE AxisOf(const Geometry& geometry, int axis)
      : size(geometry.sizes[axis]),
        begin(0),
        end(size),
        padding(geometry.padding),
        nearest(geometry.method == Method::kNearest),
        single(size == 1 &&
               ((geometry.align_corners && !geometry.pixel) || padding != Padding::kZeros)),
        pixel(geometry.pixel),
        last(static_cast<A>(size) - 1) {
    const bool align = geometry.align_corners;
    const A n = static_cast<A>(size);
    slope = single ? A(0) : SlopeOf(n, geometry);
    low = align ? A(0) : A(-0.5);
    span = align ? last : n;
  }

  JAXOPS_ALWAYS_INLINE Found Find(V p) const {
    const V zero = {};
    V x = single ? zero : pixel ? p : (p + 1) * slope + low;
    V along = zero + slope;
    Int inside = x == x;
    if (padding == Padding::kZeros) {
      // A does not represent every entry of such a large axis: `last` may be rounded to the number
      // of all.
      inside = (x > -1) & ((x < last + 1) | (x == last));
      x = inside ? x : zero;
      along = inside ? along : zero;
    } else {
      if (padding == Padding::kReflection && !single) {
        const V distance = x < low ? low - x : x - low;
        // An infinite coordinate is clamped.
        const Int beyond = ~((x >= 0) & (x <= last)) & (distance - distance == 0);
        const V rest = ToIntegral<true>(distance / (2 * span)) * (-2 * span) + distance;
        const Int back = rest > span;
        const V reflected = (back ? 2 * span - rest : rest) + low;
        along = (back != (x < low)) & beyond ? -along : along;
        x = beyond ? reflected : x;
      }
      const Int within = (x >= 0) & (x <= last);
      along = within ? along : zero;
      x = within ? x : x > last ? zero + last : zero;
    }
    const Int is_last = x == last;
    if (nearest) {
      const Int entry = is_last ? Int{} + (size - 1) : ToInt(ToIntegral<false>(x));
      return {entry, inside & Counts(entry), Int{}, zero + 1, zero, zero};
    }
    // The last entry belongs to the interval before it if the axis has two or more entries.
    const Int ends = size > 1 ? is_last : Int{};
    const V floor = ToIntegral<true>(x);
    const Int entry = ends ? Int{} + (size - 2) : ToInt(floor);
    const V fraction = ends ? zero + 1 : x - floor;
    return {entry, inside & Counts(entry), inside & Counts(entry + 1), 1 - fraction, fraction,
            along};
  }

  JAXOPS_ALWAYS_INLINE Int Counts(Int entry) const { return (entry >= begin) & (entry < end); }
};

// The bit set of the entries c around a point whose bit for an axis is 0 (lower) or 1 (upper).
template <int kAxes>
constexpr int CornersOf(int axis, bool upper) {
  int corners = 0;
  for (int c = 0; c < 1 << kAxes; ++c) {
    if (((c & multilinear::BitOf<kAxes>(axis)) != 0) == upper) corners |= 1 << c;
  }
  return corners;
}

// The entries around a block of points, and their weights.
template <typename A, int kAxes>
struct Stencils {
  static constexpr int kCorners = 1 << kAxes;
  static constexpr uint32_t kAll = (1u << kCorners) - 1;
  using Integer = decltype(typename Simd<A>::Int{}[0] + 0);

  int count;
  int64_t low[kBlock];      // the lowest entry; it may be outside of the volume
  Integer corners[kBlock];  // bit c is set if every axis has entry c
  Integer lost[kBlock];     // not 0 if a coordinate is NaN
  A weights[kCorners][kBlock];
  // Only derivatives with respect to points use the following.
  A lower[kAxes][kBlock];
  A upper[kAxes][kBlock];
  A slope[kAxes][kBlock];
  A terms[kCorners][kBlock];  // of derivatives along directions

  JAXOPS_ALWAYS_INLINE uint32_t At(int i) const { return static_cast<uint32_t>(corners[i]); }
};

// Calls with_corner(c) for every c in a set.
template <typename WithCorner>
JAXOPS_ALWAYS_INLINE void ForEachCorner(uint32_t corners, WithCorner with_corner) {
  for (; corners != 0; corners &= corners - 1) with_corner(__builtin_ctz(corners));
}

// Reads points or directions [first, first + count), axis by axis.
template <typename A, int kAxes>
__attribute__((noinline)) void ReadPoints(const Points& args, const void* points, int64_t first,
                                          int count, A (&to)[kAxes][kBlock]) {
  WithStorage(args.point_dtype, points, 0, [&]<typename P>(const P* from) {
    if (args.geometry.points_minor) {
      for (int a = 0; a < kAxes; ++a, from += args.geometry.points) {
        if (args.chosen == nullptr) {
          Widen(from + first, count, to[a]);
        } else {
          for (int i = 0; i < count; ++i) {
            to[a][i] = LoadScalar<A>(from + args.chosen[first + i]);
          }
        }
      }
      return;
    }
    P gathered[kBlock * kAxes];
    const P* next = from + first * kAxes;
    if (args.chosen != nullptr) {
      for (int i = 0; i < count; ++i) {
        __builtin_memcpy(gathered + i * kAxes, from + args.chosen[first + i] * kAxes,
                         kAxes * sizeof(P));
      }
      next = gathered;
    }
    for (int i = 0; i < count; ++i) {
      for (int a = 0; a < kAxes; ++a) to[a][i] = LoadScalar<A>(next + i * kAxes + a);
    }
  });
}

// Volumes of fewer entries have indices that vectors of 32-bit integers hold, those around the
// volume included.
constexpr int64_t kGrid32 = int64_t{1} << 30;

// Locates the points from `first` on, at most a block, with what derivatives use or without it.
template <typename A, int kAxes, bool kDerivatives>
__attribute__((noinline)) void Find(const Points& args, const AxisOf<A> (&axes)[kAxes],
                                    int64_t first, Stencils<A, kAxes>& found) {
  using V = Vec<A>;
  using Int = typename Simd<A>::Int;
  constexpr int kCorners = 1 << kAxes;
  const int64_t rest = args.count - first;
  const int count = rest < kBlock ? static_cast<int>(rest) : kBlock;
  found.count = count;
  A points[kAxes][kBlock];
  typename Stencils<A, kAxes>::Integer entries[kAxes][kBlock];
  ReadPoints(args, args.points, first, count, points);
  for (int i = count; i % kLanes<A> != 0; ++i) {
    for (int a = 0; a < kAxes; ++a) points[a][i] = 0;
  }
  const bool is_small = sizeof(A) == 8 || args.geometry.grid() < kGrid32;
  const int weighted = axes[0].nearest ? 1 : kCorners;
  for (int i = 0; i < count; i += kLanes<A>) {
    Int corners = Int{} + Stencils<A, kAxes>::kAll;
    Int lost = {};
    Int low = {};
    V weights[kCorners] = {V{} + 1};
    JAXOPS_UNROLL
    for (int a = 0; a < kAxes; ++a) {
      const V p = Load(points[a] + i);
      const auto at = axes[a].Find(p);
      lost |= p != p;
      corners &=
          (at.has_lower & CornersOf<kAxes>(a, false)) | (at.has_upper & CornersOf<kAxes>(a, true));
      MultiplyWeights(a, at.lower, at.upper, weights);
      if constexpr (kDerivatives) {
        Store(at.lower, found.lower[a] + i);
        Store(at.upper, found.upper[a] + i);
        Store(at.slope, found.slope[a] + i);
      }
      if (is_small) {
        low = low * axes[a].size + at.entry;
      } else {
        __builtin_memcpy(entries[a] + i, &at.entry, sizeof(Int));
      }
    }
    if (is_small) __builtin_memcpy(entries[0] + i, &low, sizeof(Int));
    corners &= ~lost;
    __builtin_memcpy(found.corners + i, &corners, sizeof(Int));
    __builtin_memcpy(found.lost + i, &lost, sizeof(Int));
    for (int c = 0; c < weighted; ++c) Store(weights[c], found.weights[c] + i);
  }
  for (int i = 0; i < count; ++i) found.low[i] = entries[0][i];
  for (int a = 1; a < kAxes && !is_small; ++a) {
    for (int i = 0; i < count; ++i) found.low[i] = found.low[i] * axes[a].size + entries[a][i];
  }
  if constexpr (!kDerivatives) return;
  if (args.order == 0) return;
  A directions[multilinear::kMaxDirections][kAxes][kBlock];
  for (int d = 0; d < args.order; ++d) {
    ReadPoints(args, args.directions[d], first, count, directions[d]);
  }
  for (int i = 0; i < count; ++i) {
    multilinear::Axis<A> factors[kAxes];
    for (int a = 0; a < kAxes; ++a) {
      factors[a] = {found.lower[a][i], found.upper[a][i], found.slope[a][i]};
    }
    A terms[kCorners];
    multilinear::NoDerivative<kAxes>(terms);
    for (int d = 0; d < args.order; ++d) {
      A direction[kAxes];
      for (int a = 0; a < kAxes; ++a) direction[a] = directions[d][a][i];
      multilinear::Differentiate<kAxes>(factors, direction, terms);
    }
    for (int c = 0; c < kCorners; ++c) found.terms[c][i] = terms[c];
    multilinear::TermsToWeights<kAxes>(factors, terms);
    for (int c = 0; c < kCorners; ++c) found.weights[c][i] = terms[c];
  }
}

// Locates points with their weights, which may be derivatives.
template <typename A, int kAxes>
JAXOPS_ALWAYS_INLINE void FindWeights(const Points& args, const AxisOf<A> (&axes)[kAxes],
                                      int64_t first, Stencils<A, kAxes>& found) {
  if (args.order == 0) {
    Find<A, kAxes, false>(args, axes, first, found);
  } else {
    Find<A, kAxes, true>(args, axes, first, found);
  }
}

// The rows of a volume's channels around points.
template <typename S, int kAxes>
struct Grid {
  static constexpr int kCorners = 1 << kAxes;

  int64_t width;
  int64_t offsets[kCorners];  // of the entries around a point from the lowest, in elements

  JAXOPS_ALWAYS_INLINE Grid(const Geometry& geometry, int64_t width_) : width(width_) {
    for (int c = 0; c < kCorners; ++c) {
      offsets[c] = 0;
      for (int a = 0; a < kAxes; ++a) {
        offsets[c] = offsets[c] * geometry.sizes[a] + (c & multilinear::BitOf<kAxes>(a) ? 1 : 0);
      }
      offsets[c] *= width;
    }
  }
};

// --- kernels -------------------------------------------------------------------------------------

// kWidth is the number of channels if a kernel for that number exists, otherwise 0.
template <typename S, int kAxes, int kWidth>
void EvaluateValues(const Gather& args) {
  using A = Arithmetic<S>;
  using Block = Stencils<A, kAxes>;
  constexpr int kCorners = 1 << kAxes;
  constexpr bool kNarrow = sizeof(S) < sizeof(A);
  const Geometry& geometry = args.points.geometry;
  const int64_t width = kWidth > 0 ? kWidth : geometry.width;
  AxisOf<A> axes[kAxes];
  for (int a = 0; a < kAxes; ++a) axes[a] = AxisOf<A>(geometry, a);
  const Grid<S, kAxes> grid(geometry, width);
  const auto* volume = static_cast<const S*>(args.volume);
  const A lost = geometry.method == Method::kLinear ? A(__builtin_nan("")) : A(0);
  const bool is_nearest = args.points.order == 0 && geometry.method == Method::kNearest;
  Block block;
  for (int64_t first = 0; first < args.points.count; first += kBlock) {
    FindWeights(args.points, axes, first, block);
    S* out = static_cast<S*>(args.out) + first * width;
    if constexpr (kWidth > 0) {
      using R = Row<A, kWidth>;
      using V = typename R::V;
      A wide[kNarrow ? kBlock * kWidth : 1];
      A* to = kNarrow ? wide : reinterpret_cast<A*>(out);
      for (int i = 0; i < block.count; ++i) {
        const S* base = volume + block.low[i] * kWidth;
        V sum;
        if (is_nearest) {
          sum = V{} + (block.At(i) != 0 ? R::Read(base) : V{});
        } else if (block.At(i) == Block::kAll) {
          sum = block.weights[0][i] * R::Read(base);
          JAXOPS_UNROLL
          for (int c = 1; c < kCorners; ++c) {
            sum += block.weights[c][i] * R::Read(base + grid.offsets[c]);
          }
        } else {
          sum = V{} + (block.lost[i] ? lost : A(0));
          ForEachCorner(block.At(i), [&](int c) {
            sum += block.weights[c][i] * R::Read(base + grid.offsets[c]);
          });
        }
        R::Write(sum, to + i * kWidth);
      }
      if constexpr (kNarrow) StoreRounded(wide, block.count * kWidth, out);
    } else {
      using V = Vec<A>;
      for (int i = 0; i < block.count; ++i, out += width) {
        const S* base = volume + block.low[i] * width;
        const auto evaluate = [&](auto add_up) {
          int64_t f = 0;
          for (; f + kLanes<A> <= width; f += kLanes<A>) {
            Store(add_up([&](int c) { return Load(base + grid.offsets[c] + f); }), out + f);
          }
          if (f < width) {
            const int64_t count = width - f;
            const V sum =
                add_up([&](int c) { return LoadFirst(base + grid.offsets[c] + f, count); });
            StoreFirst(sum, out + f, count);
          }
        };
        if (block.At(i) == Block::kAll) {
          evaluate([&](auto read) {
            V sum = block.weights[0][i] * read(0);
            JAXOPS_UNROLL
            for (int c = 1; c < kCorners; ++c) sum += block.weights[c][i] * read(c);
            return sum;
          });
        } else {
          evaluate([&](auto read) {
            V sum = V{} + (block.lost[i] ? lost : A(0));
            ForEachCorner(block.At(i), [&](int c) { sum += block.weights[c][i] * read(c); });
            return sum;
          });
        }
      }
    }
  }
}

// Writes the gradients with respect to the points of a block, of the products of the cotangent and
// the entries around each point. It is a function of its own, which the instances for all widths
// share, and overwrites the products.
template <typename A, int kAxes>
__attribute__((noinline)) void WritePointGradients(const Gather& args, int64_t first,
                                                   const Stencils<A, kAxes>& block,
                                                   A (&products)[kBlock][1 << kAxes]) {
  constexpr int kCorners = 1 << kAxes;
  const bool is_linear = args.points.geometry.method == Method::kLinear;
  const A lost = is_linear ? A(__builtin_nan("")) : A(0);
  const Geometry& geometry = args.points.geometry;
  const bool is_minor = geometry.points_minor;
  const int64_t point_stride = is_minor ? 1 : kAxes, axis_stride = is_minor ? kBlock : 1;
  A gradients[kBlock * kAxes];
  for (int i = 0; i < block.count; ++i) {
    multilinear::Axis<A> factors[kAxes];
    for (int a = 0; a < kAxes; ++a) {
      factors[a] = {block.lower[a][i], block.upper[a][i], block.slope[a][i]};
    }
    A gradient[kAxes];
    if (args.points.order == 0) {
      multilinear::PlainPointGradient<kAxes>(factors, products[i], gradient);
    } else {
      A terms[kCorners];
      for (int c = 0; c < kCorners; ++c) terms[c] = block.terms[c][i];
      multilinear::PointGradient<kAxes>(factors, terms, products[i], gradient);
    }
    for (int a = 0; a < kAxes; ++a) {
      gradients[i * point_stride + a * axis_stride] = block.lost[i] ? lost : gradient[a];
    }
  }
  const auto store = [&](const A* from, int64_t count, int64_t begin) {
    WithStorage(args.points.point_dtype, args.dpoints, begin, [&]<typename P>(const P* to) {
      if constexpr (sizeof(Arithmetic<P>) == sizeof(A)) {
        StoreRounded(from, count, const_cast<P*>(to));
      } else {
        Narrow(from, count, const_cast<P*>(to));
      }
    });
  };
  if (is_minor) {
    for (int a = 0; a < kAxes; ++a) {
      store(gradients + a * kBlock, block.count, a * geometry.points + first);
    }
  } else {
    store(gradients, int64_t{block.count} * kAxes, first * kAxes);
  }
}

template <typename S, int kAxes, int kWidth>
void EvaluatePointGradients(const Gather& args) {
  using A = Arithmetic<S>;
  using Block = Stencils<A, kAxes>;
  constexpr int kCorners = 1 << kAxes;
  const Geometry& geometry = args.points.geometry;
  const int64_t width = kWidth > 0 ? kWidth : geometry.width;
  AxisOf<A> axes[kAxes];
  for (int a = 0; a < kAxes; ++a) axes[a] = AxisOf<A>(geometry, a);
  const Grid<S, kAxes> grid(geometry, width);
  const auto* volume = static_cast<const S*>(args.volume);
  Block block;
  for (int64_t first = 0; first < args.points.count; first += kBlock) {
    Find<A, kAxes, true>(args.points, axes, first, block);
    const S* g = static_cast<const S*>(args.points.cotangent) + first * width;
    A products[kBlock][kCorners];
    for (int i = 0; i < block.count; ++i, g += width) {
      const S* base = volume + block.low[i] * width;
      A(&dots)[kCorners] = products[i];
      for (A& dot : dots) dot = 0;
      if constexpr (kWidth > 0) {
        using R = Row<A, kWidth>;
        const auto row = R::Read(g);
        ForEachCorner(block.At(i),
                      [&](int c) { dots[c] = R::Sum(row * R::Read(base + grid.offsets[c])); });
      } else {
        using V = Vec<A>;
        ForEachCorner(block.At(i), [&](int c) {
          const S* row = base + grid.offsets[c];
          V sum = {};
          int64_t f = 0;
          for (; f + kLanes<A> <= width; f += kLanes<A>) sum += Load(row + f) * Load(g + f);
          if (f < width) sum += LoadFirst(row + f, width - f) * LoadFirst(g + f, width - f);
          dots[c] = SumLanes<A>(sum);
        });
      }
    }
    WritePointGradients(args, first, block, products);
  }
}

// Rows of a scatter are prefetched this number of points ahead: hardware cannot predict their
// addresses.
constexpr int kAhead = 16;

template <typename S, int kAxes, int kWidth>
void EvaluateScatter(const Scatter& args) {
  using A = Arithmetic<S>;
  using Block = Stencils<A, kAxes>;
  constexpr int kCorners = 1 << kAxes;
  const Geometry& geometry = args.points.geometry;
  const int64_t width = kWidth > 0 ? kWidth : geometry.width;
  AxisOf<A> axes[kAxes];
  for (int a = 0; a < kAxes; ++a) axes[a] = AxisOf<A>(geometry, a);
  axes[0].begin = args.begin;
  axes[0].end = args.end;
  const Grid<S, kAxes> grid(geometry, width);
  int64_t slice = width;  // elements of one index of the first axis
  for (int a = 1; a < kAxes; ++a) slice *= geometry.sizes[a];
  A* sums = static_cast<A*>(args.sums) - args.begin * slice;
  const auto* cotangent = static_cast<const S*>(args.points.cotangent);
  Block block;
  for (int64_t first = 0; first < args.points.count; first += kBlock) {
    FindWeights(args.points, axes, first, block);
    for (int i = 0; i < block.count; ++i) {
      if (args.points.chosen != nullptr && first + i + kAhead < args.points.count) {
        __builtin_prefetch(cotangent + args.points.chosen[first + i + kAhead] * width);
      }
      const uint32_t corners = block.At(i);
      A* base = sums + block.low[i] * width;
      const int64_t p = args.points.chosen ? args.points.chosen[first + i] : first + i;
      const S* g = cotangent + p * width;
      if constexpr (kWidth > 0) {
        using R = Row<A, kWidth>;
        const typename R::V row = R::Read(g);
        const auto add = [&](int c) {
          A* to = base + grid.offsets[c];
          R::Write(R::Read(to) + block.weights[c][i] * row, to);
        };
        if (corners == Block::kAll) {
          JAXOPS_UNROLL
          for (int c = 0; c < kCorners; ++c) add(c);
        } else {
          ForEachCorner(corners, add);
        }
      } else {
        const auto add = [&](int c) {
          A* to = base + grid.offsets[c];
          const A weight = block.weights[c][i];
          int64_t f = 0;
          for (; f + kLanes<A> <= width; f += kLanes<A>) {
            Store(Load(to + f) + weight * Load(g + f), to + f);
          }
          if (f < width) {
            const int64_t count = width - f;
            StoreFirst(LoadFirst(to + f, count) + weight * LoadFirst(g + f, count), to + f, count);
          }
        };
        ForEachCorner(corners, add);
      }
    }
  }
}

// The slabs that points add to, from their indices along the first axis.
template <typename A, int kAxes>
void EvaluateBins(const Bins& args) {
  using Int = typename Simd<A>::Int;
  const Points& points = args.points;
  const AxisOf<A> axis(points.geometry, 0);
  const int32_t none = args.slabs;
  uint8_t slabs[2][kMaxChunk];  // slab of the lower and of the upper entry
  uint32_t counts[kMaxSlabs + 1] = {};
  for (int64_t first = 0; first < points.count; first += kBlock) {
    const int64_t rest = points.count - first;
    const int count = rest < kBlock ? static_cast<int>(rest) : kBlock;
    A coordinates[kAxes][kBlock];
    decltype(Int{}[0] + 0) found[2][kBlock];
    ReadPoints(points, points.points, first, count, coordinates);
    for (int i = count; i % kLanes<A> != 0; ++i) coordinates[0][i] = 0;
    for (int i = 0; i < count; i += kLanes<A>) {
      const auto at = axis.Find(Load(coordinates[0] + i));
      const Int lower = at.has_lower ? at.entry >> args.shift : Int{} + none;
      const Int upper = at.has_upper ? (at.entry + 1) >> args.shift : Int{} + none;
      __builtin_memcpy(found[0] + i, &lower, sizeof(Int));
      __builtin_memcpy(found[1] + i, &upper, sizeof(Int));
    }
    for (int i = 0; i < count; ++i) {
      const int lower = found[0][i], upper = found[1][i];
      slabs[0][first + i] = lower;
      slabs[1][first + i] = upper;
      ++counts[lower];
      if (upper != lower) ++counts[upper];
    }
  }
  uint32_t next[kMaxSlabs + 1];
  uint32_t total = 0;
  for (int s = 0; s <= args.slabs; ++s) {
    args.starts[s] = next[s] = total;
    total += counts[s];
  }
  for (int64_t i = 0; i < points.count; ++i) {
    const int lower = slabs[0][i], upper = slabs[1][i];
    args.lists[next[lower]++] = i;
    if (upper != lower) args.lists[next[upper]++] = i;
  }
}

// Calls run with a pointer of the storage type, the number of axes, and the number of channels if a
// kernel for that number exists, otherwise 0.
template <typename Run>
void Dispatch(const Points& points, Run run) {
  const int axes = points.geometry.axes;
  WithStorage(points.dtype, nullptr, 0, [&]<typename S>(const S* storage) {
    if (axes == 1) {  // `map_coordinates` alone has such calls, of one channel
      if (points.geometry.width == 1) {
        run(storage, Constant<1>(), Constant<1>());
      } else {
        run(storage, Constant<1>(), Constant<0>());
      }
      return;
    }
    WithWidth<Arithmetic<S>>(points.geometry.width, [&](auto width) {
      if (axes == 3) {
        run(storage, Constant<3>(), width);
      } else {
        run(storage, Constant<2>(), width);
      }
    });
  });
}

void RunGather(const Gather& args) {
  Dispatch(args.points,
           [&]<typename S, int kAxes, int kWidth>(const S*, Constant<kAxes>, Constant<kWidth>) {
             if (args.out != nullptr) {
               EvaluateValues<S, kAxes, kWidth>(args);
             } else {
               EvaluatePointGradients<S, kAxes, kWidth>(args);
             }
           });
}

void RunBins(const Bins& args) {
  const auto with_axes = [&]<int kAxes>(Constant<kAxes>) {
    if (args.points.dtype == DType::kF64) {
      EvaluateBins<double, kAxes>(args);
    } else {
      EvaluateBins<float, kAxes>(args);
    }
  };
  switch (args.points.geometry.axes) {
    case 1:
      return with_axes(Constant<1>());
    case 2:
      return with_axes(Constant<2>());
    default:
      return with_axes(Constant<3>());
  }
}

void RunScatter(const Scatter& args) {
  Dispatch(args.points,
           [&]<typename S, int kAxes, int kWidth>(const S*, Constant<kAxes>, Constant<kWidth>) {
             EvaluateScatter<S, kAxes, kWidth>(args);
           });
}

void RunStoreSums(const StoreSums& args) {
  WithStorage(args.dtype, args.to, 0, [&]<typename S>(const S* to) {
    StoreRounded(static_cast<const Arithmetic<S>*>(args.sums), args.count, const_cast<S*>(to));
  });
}

}  // namespace

const Kernels kKernels = {RunGather, RunBins, RunScatter, RunStoreSums};

}  // namespace jaxops::grid_sample::cpu::JAXOPS_ISA
