#include "cpu/trilinear_kernels.h"

#include <cstdint>
#include <type_traits>

#include "common/multilinear.h"
#include "cpu/rows.h"
#include "cpu/simd.h"

namespace jaxops::trilinear::cpu::JAXOPS_ISA {
namespace {

using namespace jaxops::cpu::JAXOPS_ISA;

constexpr int kAxes = 3;
constexpr int kCorners = 8;

// Cells whose weights are computed together, a multiple of every vector width.
constexpr int kBlock = 64;

template <typename A>
struct Weights {
  A lower[kAxes][kBlock];  // the factors
  A upper[kAxes][kBlock];
  A terms[kCorners][kBlock];  // of derivatives along directions
  A of[kCorners][kBlock];

  JAXOPS_ALWAYS_INLINE void Factors(int i, multilinear::Axis<A> (&axes)[kAxes]) const {
    for (int a = 0; a < kAxes; ++a) axes[a] = {lower[a][i], upper[a][i], A(0.5)};
  }
};

// Reads points or directions of `count` cells, axis by axis.
template <typename A>
JAXOPS_ALWAYS_INLINE void ReadPoints(DType dtype, const void* points, int64_t first, int64_t stride,
                                     int count, A (&to)[kAxes][kBlock]) {
  WithStorage(dtype, points, first * stride, [&](const auto* from) {
    const auto read = [&](auto cell) {
      for (int i = 0; i < count; ++i) {
        for (int a = 0; a < kAxes; ++a) to[a][i] = LoadScalar<A>(from + cell(i) + a);
      }
    };
    if (stride == kAxes) {
      read([](int i) { return i * kAxes; });
    } else {
      read([&](int i) { return i * stride; });
    }
  });
}

// Computes the weights of the cells from `first` on.
template <typename A>
__attribute__((noinline)) void MakeWeights(const Cells& args, int64_t first, int count,
                                           Weights<A>& weights) {
  using V = Vec<A>;
  A points[kAxes][kBlock];
  ReadPoints(args.point_dtype, args.points, first, args.points_stride, count, points);
  for (int i = count; i % kLanes<A> != 0; ++i) {
    for (int a = 0; a < kAxes; ++a) points[a][i] = 0;
  }
  for (int i = 0; i < count; i += kLanes<A>) {
    V products[kCorners] = {V{} + 1};
    JAXOPS_UNROLL
    for (int a = 0; a < kAxes; ++a) {
      const V p = Load(points[a] + i);
      const V lower = (1 - p) * A(0.5), upper = (1 + p) * A(0.5);
      Store(lower, weights.lower[a] + i);
      Store(upper, weights.upper[a] + i);
      MultiplyWeights(a, lower, upper, products);
    }
    JAXOPS_UNROLL
    for (int c = 0; c < kCorners; ++c) Store(products[c], weights.of[c] + i);
  }
  if (args.order == 0) return;
  A directions[multilinear::kMaxDirections][kAxes][kBlock];
  for (int d = 0; d < args.order; ++d) {
    ReadPoints(args.point_dtype, args.directions[d], first, args.direction_strides[d], count,
               directions[d]);
  }
  for (int i = 0; i < count; ++i) {
    multilinear::Axis<A> axes[kAxes];
    weights.Factors(i, axes);
    A terms[kCorners];
    multilinear::NoDerivative<kAxes>(terms);
    for (int d = 0; d < args.order; ++d) {
      const A direction[kAxes] = {directions[d][0][i], directions[d][1][i], directions[d][2][i]};
      multilinear::Differentiate<kAxes>(axes, direction, terms);
    }
    for (int c = 0; c < kCorners; ++c) weights.terms[c][i] = terms[c];
    multilinear::TermsToWeights<kAxes>(axes, terms);
    for (int c = 0; c < kCorners; ++c) weights.of[c][i] = terms[c];
  }
}

// Calls step(f, load, store) for each vector of features, the first of which is feature f; load and
// store skip the lanes of the last vector that have no feature.
template <typename S, typename Step>
JAXOPS_ALWAYS_INLINE void Cover(int64_t width, Step step) {
  using A = Arithmetic<S>;
  int64_t f = 0;
  for (; f + kLanes<A> <= width; f += kLanes<A>) {
    step(f, [](const S* from) { return Load(from); }, [](Vec<A> v, S* to) { Store(v, to); });
  }
  if (f < width) {
    const int64_t count = width - f;
    step(
        f, [&](const S* from) { return LoadFirst(from, count); },
        [&](Vec<A> v, S* to) { StoreFirst(v, to, count); });
  }
}

// Rows of features in the arithmetic type: in the result itself, or in a buffer that is rounded as
// a whole.
template <typename S, int kSize>
struct Rows {
  using A = Arithmetic<S>;
  static constexpr bool kNarrow = sizeof(S) < sizeof(A);

  A wide[kNarrow ? kBlock * kSize : 1];

  JAXOPS_ALWAYS_INLINE A* For(S* to) { return kNarrow ? wide : reinterpret_cast<A*>(to); }
  JAXOPS_ALWAYS_INLINE void Finish(int count, S* to) {
    if constexpr (kNarrow) StoreRounded(wide, int64_t{count} * kSize, to);
  }
};

// Reads the features of all corners of `count` cells with one feature: the lanes of a vector are
// cells.
template <typename S, typename A>
JAXOPS_ALWAYS_INLINE void ReadCorners(const S* features, int64_t stride, int count,
                                      A (&corners)[kCorners][kBlock]) {
  const auto read = [&](auto cell) {
    for (int i = 0; i < count; ++i) {
      for (int c = 0; c < kCorners; ++c) corners[c][i] = LoadScalar<A>(features + cell(i) + c);
    }
  };
  if (stride == kCorners) {
    read([](int i) { return i * kCorners; });
  } else {
    read([&](int i) { return i * stride; });
  }
}

// Reads the features of corner c of a cell. Three features are read with a neighbour of the same
// cell, because masked loads are slower; lane 3 is then arbitrary.
template <int kWidth, typename A, typename S>
JAXOPS_ALWAYS_INLINE typename Row<A, kWidth>::V ReadCorner(const S* features, int c) {
  using R = Row<A, kWidth>;
  using V = typename R::V;
  if constexpr (kWidth == 3 && sizeof(S) == sizeof(A)) {
    if (c + 1 < kCorners) return LoadBits<V>(features + c * kWidth);
    const V shifted = LoadBits<V>(features + c * kWidth - 1);
    return V{shifted[1], shifted[2], shifted[3], 0};
  } else {
    return R::Read(features + c * kWidth);
  }
}

// Fetches the lines that come kPrefetchBytes after those of a cell: docs/trilinear.md has the gain.
constexpr int64_t kPrefetchBytes = 4096;
constexpr int64_t kLineBytes = 64;

JAXOPS_ALWAYS_INLINE void Prefetch(const void* cell, int64_t bytes) {
  // Integers: the lines may be past the end of the array.
  const uintptr_t first = reinterpret_cast<uintptr_t>(cell) + kPrefetchBytes;
  for (int64_t at = 0; at < bytes; at += kLineBytes) {
    __builtin_prefetch(reinterpret_cast<const void*>(first + at));
  }
}

// The features of a block of cells. Up to three of 2 bytes are converted to the arithmetic type
// first, as vectors of several corners. Values and point gradients of (1048576,1) bf16 took 2.1 and
// 4.4 ms on two cores of an AMD EPYC instead of 4.4 and 6.7, those of (1048576,2) 3.6 and 6.6
// instead of 5.0 and 7.9. Four features took longer in float16, eight in bf16 too.
template <typename S, int kWidth>
struct Features {
  using A = Arithmetic<S>;
  static constexpr int kCell = kCorners * kWidth;
  static constexpr bool kConverts = sizeof(S) < sizeof(A) && kWidth > 0 && kWidth <= 3;

  const std::conditional_t<kConverts, A, S>* cells = nullptr;
  int64_t stride = 0;
  A converted[kConverts ? kBlock * kCell : 1];

  JAXOPS_ALWAYS_INLINE void Read(const Cells& args, int64_t first, int count) {
    const S* from = static_cast<const S*>(args.features) + first * args.features_stride;
    if constexpr (kConverts) {
      if (args.features_stride == kCell) {
        LoadWide(from, int64_t{count} * kCell, converted);
      } else {
        for (int i = 0; i < count; ++i) {
          LoadWide(from + i * args.features_stride, kCell, converted + i * kCell);
        }
      }
      cells = converted;
      stride = kCell;
    } else {
      cells = from;
      stride = args.features_stride;
    }
  }
};

template <typename S, int kWidth>
void Interpolate(const Cells& args, int64_t first, int count, const Weights<Arithmetic<S>>& weights,
                 const Features<S, kWidth>& block) {
  using A = Arithmetic<S>;
  const auto* features = block.cells;
  S* out = static_cast<S*>(args.out) + first * args.width;
  if constexpr (kWidth == 1) {
    A corners[kCorners][kBlock];
    ReadCorners(features, block.stride, count, corners);
    Rows<S, 1> rows;
    A* to = rows.For(out);
    for (int i = 0; i < count; ++i) {
      A sum = weights.of[0][i] * corners[0][i];
      for (int c = 1; c < kCorners; ++c) sum += weights.of[c][i] * corners[c][i];
      to[i] = sum;
    }
    rows.Finish(count, out);
  } else if constexpr (kWidth > 0) {
    using R = Row<A, kWidth>;
    Rows<S, kWidth> rows;
    A* to = rows.For(out);
    for (int i = 0; i < count; ++i, features += block.stride) {
      auto sum = weights.of[0][i] * ReadCorner<kWidth, A>(features, 0);
      JAXOPS_UNROLL
      for (int c = 1; c < kCorners; ++c) {
        sum += weights.of[c][i] * ReadCorner<kWidth, A>(features, c);
      }
      if (i + 1 < count) {
        // The next cell overwrites lanes after the last feature.
        __builtin_memcpy(to + i * kWidth, &sum, sizeof(sum));
      } else {
        R::Write(sum, to + i * kWidth);
      }
    }
    rows.Finish(count, out);
  } else {
    const int64_t width = args.width;
    constexpr int kTogether = 2;  // neighbouring vectors of a row: memory is read in order
    [[maybe_unused]] const int64_t bytes = kCorners * width * static_cast<int64_t>(sizeof(S));
    for (int i = 0; i < count; ++i, features += block.stride, out += width) {
      // bfloat16 is slower with it, and other types are not measured.
      if constexpr (__is_same(S, float)) Prefetch(features, bytes);
      int64_t done = 0;
      for (; done + kTogether * kLanes<A> <= width; done += kTogether * kLanes<A>) {
        Vec<A> sums[kTogether] = {};
        JAXOPS_UNROLL
        for (int c = 0; c < kCorners; ++c) {
          JAXOPS_UNROLL
          for (int j = 0; j < kTogether; ++j) {
            sums[j] += weights.of[c][i] * Load(features + c * width + done + j * kLanes<A>);
          }
        }
        JAXOPS_UNROLL
        for (int j = 0; j < kTogether; ++j) Store(sums[j], out + done + j * kLanes<A>);
      }
      Cover<S>(width - done, [&](int64_t f, auto load, auto store) {
        Vec<A> sum = weights.of[0][i] * load(features + done + f);
        JAXOPS_UNROLL
        for (int c = 1; c < kCorners; ++c) {
          sum += weights.of[c][i] * load(features + c * width + done + f);
        }
        store(sum, out + done + f);
      });
    }
  }
}

template <typename S, int kWidth>
void Spread(const Cells& args, int64_t first, int count, const Weights<Arithmetic<S>>& weights) {
  using A = Arithmetic<S>;
  const S* g = static_cast<const S*>(args.cotangent) + first * args.cotangent_stride;
  S* dfeatures = static_cast<S*>(args.dfeatures) + first * kCorners * args.width;
  if constexpr (kWidth > 0) {
    using R = Row<A, kWidth>;
    Rows<S, kCorners * kWidth> rows;
    A* to = rows.For(dfeatures);
    for (int i = 0; i < count; ++i, g += args.cotangent_stride, to += kCorners * kWidth) {
      const auto row = R::Read(g);
      JAXOPS_UNROLL
      for (int c = 0; c < kCorners; ++c) R::Write(weights.of[c][i] * row, to + c * kWidth);
    }
    rows.Finish(count, dfeatures);
  } else {
    const int64_t width = args.width;
    for (int i = 0; i < count; ++i, g += args.cotangent_stride, dfeatures += kCorners * width) {
      Cover<S>(width, [&](int64_t f, auto load, auto store) {
        const Vec<A> row = load(g + f);
        JAXOPS_UNROLL
        for (int c = 0; c < kCorners; ++c) {
          store(weights.of[c][i] * row, dfeatures + c * width + f);
        }
      });
    }
  }
}

template <typename S, int kWidth>
void PointGradients(const Cells& args, int64_t first, int count,
                    const Weights<Arithmetic<S>>& weights, const Features<S, kWidth>& block) {
  using A = Arithmetic<S>;
  using V = Vec<A>;
  const auto* features = block.cells;
  const S* g = static_cast<const S*>(args.cotangent) + first * args.cotangent_stride;
  A dots[kCorners][kBlock] = {};
  if constexpr (kWidth == 1) {
    ReadCorners(features, block.stride, count, dots);
    for (int i = 0; i < count; ++i, g += args.cotangent_stride) {
      for (int c = 0; c < kCorners; ++c) dots[c][i] *= LoadScalar<A>(g);
    }
  } else {
    for (int i = 0; i < count; ++i, features += block.stride, g += args.cotangent_stride) {
      if constexpr (kWidth > 0) {
        using R = Row<A, kWidth>;
        const auto row = R::Read(g);
        JAXOPS_UNROLL
        for (int c = 0; c < kCorners; ++c) {
          dots[c][i] = R::Sum(row * ReadCorner<kWidth, A>(features, c));
        }
      } else {
        const int64_t width = args.width;
        V sums[kCorners] = {};
        Cover<S>(width, [&](int64_t f, auto load, auto) {
          const V row = load(g + f);
          JAXOPS_UNROLL
          for (int c = 0; c < kCorners; ++c) sums[c] += row * load(features + c * width + f);
        });
        JAXOPS_UNROLL
        for (int c = 0; c < kCorners; ++c) dots[c][i] = SumLanes<A>(sums[c]);
      }
    }
  }
  A gradients[kBlock * kAxes];
  if (args.order == 0) {
    A along[kAxes][kBlock];
    for (int i = 0; i < count; i += kLanes<A>) {
      multilinear::Axis<V> axes[kAxes];
      JAXOPS_UNROLL
      for (int a = 0; a < kAxes; ++a) {
        axes[a] = {Load(weights.lower[a] + i), Load(weights.upper[a] + i), V{} + A(0.5)};
      }
      V values[kCorners], gradient[kAxes];
      JAXOPS_UNROLL
      for (int c = 0; c < kCorners; ++c) values[c] = Load(dots[c] + i);
      multilinear::PlainPointGradient<kAxes>(axes, values, gradient);
      JAXOPS_UNROLL
      for (int a = 0; a < kAxes; ++a) Store(gradient[a], along[a] + i);
    }
    for (int i = 0; i < count; ++i) {
      for (int a = 0; a < kAxes; ++a) gradients[i * kAxes + a] = along[a][i];
    }
  } else {
    for (int i = 0; i < count; ++i) {
      multilinear::Axis<A> axes[kAxes];
      weights.Factors(i, axes);
      A terms[kCorners], values[kCorners], gradient[kAxes];
      for (int c = 0; c < kCorners; ++c) {
        terms[c] = weights.terms[c][i];
        values[c] = dots[c][i];
      }
      multilinear::PointGradient<kAxes>(axes, terms, values, gradient);
      for (int a = 0; a < kAxes; ++a) gradients[i * kAxes + a] = gradient[a];
    }
  }
  WithStorage(args.point_dtype, args.dpoints, first * kAxes, [&]<typename P>(const P* to) {
    if constexpr (sizeof(Arithmetic<P>) == sizeof(A)) {
      StoreRounded(gradients, int64_t{count} * kAxes, const_cast<P*>(to));
    } else {
      Narrow(gradients, count * kAxes, const_cast<P*>(to));
    }
  });
}

void RunCells(const Cells& args) {
  WithStorage(args.dtype, nullptr, 0, [&]<typename S>(const S*) {
    WithWidth<Arithmetic<S>>(args.width, [&]<int kWidth>(Constant<kWidth>) {
      Weights<Arithmetic<S>> weights;
      Features<S, kWidth> features;
      for (int64_t first = 0; first < args.count; first += kBlock) {
        const int64_t rest = args.count - first;
        const int count = rest < kBlock ? static_cast<int>(rest) : kBlock;
        MakeWeights(args, first, count, weights);
        if (args.features != nullptr) features.Read(args, first, count);
        if (args.out != nullptr) Interpolate<S, kWidth>(args, first, count, weights, features);
        if (args.dpoints != nullptr) {
          PointGradients<S, kWidth>(args, first, count, weights, features);
        }
        if (args.dfeatures != nullptr) Spread<S, kWidth>(args, first, count, weights);
      }
    });
  });
}

}  // namespace

const Kernels kKernels = {RunCells};

}  // namespace jaxops::trilinear::cpu::JAXOPS_ISA
