#include "cpu/grid_sample_kernels.h"

#include <cstdint>

#include "common/multilinear.h"
#include "cpu/simd.h"

namespace jaxops::grid_sample::cpu::JAXOPS_ISA {
namespace {

using namespace jaxops::cpu::JAXOPS_ISA;

// Points that are converted at a time.
constexpr int64_t kBlock = 32;

// So few channels are taken one by one where they need no conversion.
constexpr int kFewChannels = 4;

template <int kValue>
struct Constant {};

#if defined(__AVX2__)
// All bits of the first `count` lanes.
template <typename A>
JAXOPS_ALWAYS_INLINE __m256i FirstLanes(int64_t count) {
  if constexpr (sizeof(A) == 8) {
    return _mm256_cmpgt_epi64(_mm256_set1_epi64x(count), _mm256_setr_epi64x(0, 1, 2, 3));
  } else {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
}
#endif

// The first `count` lanes, or all.
template <typename S>
JAXOPS_ALWAYS_INLINE Vec<Arithmetic<S>> LoadSome(const S* from, int64_t count) {
  if (count >= kLanes<Arithmetic<S>>) return Load(from);
#if defined(__AVX512F__)
  const uint32_t mask = (1u << count) - 1;
  if constexpr (sizeof(S) == 8) {
    return _mm512_maskz_loadu_pd(mask, from);
  } else if constexpr (sizeof(S) == 4) {
    return _mm512_maskz_loadu_ps(mask, from);
  } else {
    const __m256i lanes = _mm256_maskz_loadu_epi16(mask, from);
    return Load(reinterpret_cast<const S*>(&lanes));
  }
#else
#if defined(__AVX2__)
  if constexpr (sizeof(S) == 8) return _mm256_maskload_pd(from, FirstLanes<double>(count));
  if constexpr (sizeof(S) == 4) return _mm256_maskload_ps(from, FirstLanes<float>(count));
#endif
  return LoadPartial(from, count);
#endif
}

template <typename S>
JAXOPS_ALWAYS_INLINE void StoreSome(Vec<Arithmetic<S>> v, S* to, int64_t count) {
  if (count >= kLanes<Arithmetic<S>>) return Store(v, to);
#if defined(__AVX512F__)
  const uint32_t mask = (1u << count) - 1;
  if constexpr (sizeof(S) == 8) {
    _mm512_mask_storeu_pd(to, mask, v);
  } else if constexpr (sizeof(S) == 4) {
    _mm512_mask_storeu_ps(to, mask, v);
  } else {
    __m256i lanes;
    Store(v, reinterpret_cast<S*>(&lanes));
    _mm256_mask_storeu_epi16(to, mask, lanes);
  }
#else
#if defined(__AVX2__)
  if constexpr (sizeof(S) == 8) return _mm256_maskstore_pd(to, FirstLanes<double>(count), v);
  if constexpr (sizeof(S) == 4) return _mm256_maskstore_ps(to, FirstLanes<float>(count), v);
#endif
  StorePartial(v, to, count);
#endif
}

// The entries around a point that are there, and their weights.
template <typename A, int kAxes>
struct Stencil {
  static constexpr int kCorners = 1 << kAxes;

  multilinear::Axis<A> axes[kAxes];
  A terms[kCorners];  // what the point gradient is made with; later the weights
  int64_t entries[kCorners];
  bool there[kCorners];
  bool lost = false;  // a coordinate is not a number

  JAXOPS_ALWAYS_INLINE Stencil(const Geometry& geometry, const A* point) {
    int64_t low = 0;
    int64_t strides[kAxes];
    bool lower[kAxes], upper[kAxes];
    int64_t stride = 1;
    for (int a = kAxes - 1; a >= 0; --a) {
      const Place<A> place = Locate(point[a], geometry.sizes[a], geometry);
      lost = lost || point[a] != point[a];
      axes[a] = place.axis;
      lower[a] = place.lower;
      upper[a] = place.upper;
      low += place.entry * stride;
      strides[a] = stride;
      stride *= geometry.sizes[a];
    }
    JAXOPS_UNROLL
    for (int c = 0; c < kCorners; ++c) {
      entries[c] = low;
      there[c] = true;
      JAXOPS_UNROLL
      for (int a = 0; a < kAxes; ++a) {
        const bool up = c & multilinear::BitOf<kAxes>(a);
        entries[c] += up ? strides[a] : 0;
        there[c] = there[c] && (up ? upper[a] : lower[a]);
      }
    }
  }

  // `directions` are those of this point.
  JAXOPS_ALWAYS_INLINE void MakeTerms(int order, const A* const* directions) {
    multilinear::NoDerivative<kAxes>(terms);
    for (int d = 0; d < order; ++d) {
      A direction[kAxes];
      for (int a = 0; a < kAxes; ++a) direction[a] = directions[d][a];
      multilinear::Differentiate<kAxes>(axes, direction, terms);
    }
  }

  JAXOPS_ALWAYS_INLINE void MakeWeights(int order) {
    if (order == 0) {
      multilinear::PlainWeights<kAxes>(axes, terms);
    } else {
      multilinear::TermsToWeights<kAxes>(axes, terms);
    }
  }
};

// Calls with_point(index, stencil) for every point, the terms of its stencil made, where
// `wanted(point)` says so.
template <typename A, int kAxes, typename Wanted, typename WithPoint>
JAXOPS_ALWAYS_INLINE void ForEachPoint(const Points& args, Wanted wanted, WithPoint with_point) {
  A points[kBlock * kAxes], directions[multilinear::kMaxDirections][kBlock * kAxes];
  for (int64_t first = 0; first < args.count; first += kBlock) {
    const int64_t count = args.count - first < kBlock ? args.count - first : kBlock;
    const auto read = [&](const void* from, A* to) {
      WithStorage(args.point_dtype, from, first * kAxes,
                  [&](auto source) { Widen(source, count * kAxes, to); });
    };
    read(args.points, points);
    for (int d = 0; d < args.order; ++d) read(args.directions[d], directions[d]);
    for (int64_t i = 0; i < count; ++i) {
      if (!wanted(points + i * kAxes)) continue;
      Stencil<A, kAxes> stencil(args.geometry, points + i * kAxes);
      const A* along[multilinear::kMaxDirections];
      for (int d = 0; d < args.order; ++d) along[d] = directions[d] + i * kAxes;
      stencil.MakeTerms(args.order, along);
      with_point(first + i, stencil);
    }
  }
}

// kWidth is the number of channels where they are few and of the arithmetic type, otherwise 0.
template <typename S, int kAxes, int kWidth>
void EvaluateGather(const Gather& args) {
  using A = Arithmetic<S>;
  using V = Vec<A>;
  constexpr int kCorners = 1 << kAxes;
  constexpr int64_t kStep = kLanes<A>;
  const Geometry& geometry = args.points.geometry;
  const int64_t width = kWidth > 0 ? kWidth : geometry.width;
  const auto* volume = static_cast<const S*>(args.volume);
  const bool lost_is_nan = geometry.method == Method::kLinear;
  const auto any = [](const A*) { return true; };

  if (args.out != nullptr) {
    ForEachPoint<A, kAxes>(args.points, any, [&](int64_t p, Stencil<A, kAxes>& stencil) {
      S* out = static_cast<S*>(args.out) + p * width;
      const S* rows[kCorners];
      A weights[kCorners];
      int count = 0;
      stencil.MakeWeights(args.points.order);
      for (int c = 0; c < kCorners && !stencil.lost; ++c) {
        if (!stencil.there[c]) continue;
        rows[count] = volume + stencil.entries[c] * width;
        weights[count++] = stencil.terms[c];
      }
      const A start = stencil.lost && lost_is_nan ? A(__builtin_nan("")) : A(0);
      if constexpr (kWidth > 0) {
        A sums[kWidth];
        for (A& sum : sums) sum = start;
        for (int c = 0; c < count; ++c) {
          for (int f = 0; f < kWidth; ++f) sums[f] += weights[c] * rows[c][f];
        }
        for (int f = 0; f < kWidth; ++f) out[f] = sums[f];
      } else {
        for (int64_t f = 0; f < width; f += kStep) {
          V sum = V{} + start;
          for (int c = 0; c < count; ++c) sum += weights[c] * LoadSome(rows[c] + f, width - f);
          StoreSome(sum, out + f, width - f);
        }
      }
    });
    return;
  }

  const auto* cotangent = static_cast<const S*>(args.points.cotangent);
  ForEachPoint<A, kAxes>(args.points, any, [&](int64_t p, Stencil<A, kAxes>& stencil) {
    const S* g = cotangent + p * width;
    A dots[kCorners];
    for (int c = 0; c < kCorners; ++c) {
      dots[c] = 0;
      if (!stencil.there[c] || stencil.lost) continue;
      const S* row = volume + stencil.entries[c] * width;
      if constexpr (kWidth > 0) {
        for (int f = 0; f < kWidth; ++f) dots[c] += row[f] * g[f];
      } else {
        V sum = {};
        for (int64_t f = 0; f < width; f += kStep) {
          sum += LoadSome(row + f, width - f) * LoadSome(g + f, width - f);
        }
        for (int i = 0; i < kStep; ++i) dots[c] += sum[i];
      }
    }
    A gradient[kAxes];
    multilinear::PointGradient<kAxes>(stencil.axes, stencil.terms, dots, gradient);
    for (int a = 0; a < kAxes; ++a) {
      if (stencil.lost) gradient[a] = lost_is_nan ? A(__builtin_nan("")) : A(0);
    }
    WithStorage(args.points.point_dtype, args.dpoints, p * kAxes,
                [&]<typename P>(const P* to) { Narrow(gradient, kAxes, const_cast<P*>(to)); });
  });
}

template <typename S, int kAxes, int kWidth>
void EvaluateScatter(const Scatter& args) {
  using A = Arithmetic<S>;
  constexpr int kCorners = 1 << kAxes;
  constexpr int64_t kStep = kLanes<A>;
  const Geometry& geometry = args.points.geometry;
  const int64_t width = kWidth > 0 ? kWidth : geometry.width;
  int64_t slice = 1;  // entries of one index of the first axis
  for (int a = 1; a < kAxes; ++a) slice *= geometry.sizes[a];
  const int64_t first = args.begin * slice;
  const int64_t last = args.end * slice;
  A* sums = static_cast<A*>(args.sums) - first * width;
  const auto* cotangent = static_cast<const S*>(args.points.cotangent);
  const auto in_slab = [&](const A* point) {
    const Place<A> place = Locate(point[0], geometry.sizes[0], geometry);
    return place.entry + 1 >= args.begin && place.entry < args.end;
  };
  ForEachPoint<A, kAxes>(args.points, in_slab, [&](int64_t p, Stencil<A, kAxes>& stencil) {
    if (stencil.lost) return;
    stencil.MakeWeights(args.points.order);
    const S* g = cotangent + p * width;
    for (int c = 0; c < kCorners; ++c) {
      if (!stencil.there[c]) continue;
      if (stencil.entries[c] < first || stencil.entries[c] >= last) continue;
      A* sum = sums + stencil.entries[c] * width;
      const A weight = stencil.terms[c];
      if constexpr (kWidth > 0) {
        for (int f = 0; f < kWidth; ++f) sum[f] += weight * g[f];
      } else {
        for (int64_t f = 0; f < width; f += kStep) {
          const int64_t rest = width - f;
          StoreSome(LoadSome(sum + f, rest) + weight * LoadSome(g + f, rest), sum + f, rest);
        }
      }
    }
  });
}

// Calls run with a pointer of the storage type, the number of axes, and few channels or 0.
template <typename Run>
void Dispatch(const Points& points, Run run) {
  WithStorage(points.dtype, nullptr, 0, [&]<typename S>(const S* storage) {
    const auto with_axes = [&](auto width) {
      if (points.geometry.axes == 3) {
        run(storage, Constant<3>(), width);
      } else {
        run(storage, Constant<2>(), width);
      }
    };
    if constexpr (sizeof(S) == sizeof(Arithmetic<S>)) {
      switch (points.geometry.width) {
        case 1:
          return with_axes(Constant<1>());
        case 2:
          return with_axes(Constant<2>());
        case 3:
          return with_axes(Constant<3>());
        case kFewChannels:
          return with_axes(Constant<kFewChannels>());
        default:
          break;
      }
    }
    with_axes(Constant<0>());
  });
}

void RunGather(const Gather& args) {
  Dispatch(args.points,
           [&]<typename S, int kAxes, int kWidth>(const S*, Constant<kAxes>, Constant<kWidth>) {
             EvaluateGather<S, kAxes, kWidth>(args);
           });
}

void RunScatter(const Scatter& args) {
  Dispatch(args.points,
           [&]<typename S, int kAxes, int kWidth>(const S*, Constant<kAxes>, Constant<kWidth>) {
             EvaluateScatter<S, kAxes, kWidth>(args);
           });
}

void RunStoreSums(const StoreSums& args) {
  WithStorage(args.dtype, args.to, 0, [&]<typename S>(const S* to) {
    Narrow(static_cast<const Arithmetic<S>*>(args.sums), args.count, const_cast<S*>(to));
  });
}

}  // namespace

const Kernels kKernels = {RunGather, RunScatter, RunStoreSums};

}  // namespace jaxops::grid_sample::cpu::JAXOPS_ISA
