#include "cpu/trilinear_kernels.h"

#include <cstdint>

#include "common/multilinear.h"
#include "cpu/simd.h"

namespace jaxops::trilinear::cpu::JAXOPS_ISA {
namespace {

using namespace jaxops::cpu::JAXOPS_ISA;
using multilinear::Axis;

constexpr int kAxes = 3;
constexpr int kCorners = 8;

// Cells whose points are converted at a time.
constexpr int64_t kBlock = 32;

// Features of a cell whose number is not known here: whole vectors, the last one overlapping the
// one before it.
template <typename S>
struct Many {
  using A = Arithmetic<S>;
  using V = Vec<A>;
  static constexpr int64_t kStep = kLanes<A>;

  int64_t width;

  JAXOPS_ALWAYS_INLINE static V LoadSome(const S* from, int64_t count) {
    return count >= kStep ? Load(from) : LoadPartial(from, count);
  }
  JAXOPS_ALWAYS_INLINE static void StoreSome(V v, S* to, int64_t count) {
    if (count >= kStep) {
      Store(v, to);
    } else {
      StorePartial(v, to, count);
    }
  }

  // Calls step(f, count) so that [f, f + count) cover the features.
  template <typename Step>
  JAXOPS_ALWAYS_INLINE void Cover(Step step) const {
    int64_t f = 0;
    for (; f + kStep <= width; f += kStep) step(f, kStep);
    if (f < width) {
      if (width >= kStep) {
        step(width - kStep, kStep);
      } else {
        step(0, width);
      }
    }
  }

  JAXOPS_ALWAYS_INLINE void Interpolate(const A (&weights)[kCorners], const S* features,
                                        S* out) const {
    Cover([&](int64_t f, int64_t count) {
      V sum = weights[0] * LoadSome(features + f, count);
      JAXOPS_UNROLL
      for (int c = 1; c < kCorners; ++c) {
        sum += weights[c] * LoadSome(features + c * width + f, count);
      }
      StoreSome(sum, out + f, count);
    });
  }

  JAXOPS_ALWAYS_INLINE void Spread(const A (&weights)[kCorners], const S* cotangent,
                                   S* dfeatures) const {
    Cover([&](int64_t f, int64_t count) {
      const V g = LoadSome(cotangent + f, count);
      JAXOPS_UNROLL
      for (int c = 0; c < kCorners; ++c) {
        StoreSome(weights[c] * g, dfeatures + c * width + f, count);
      }
    });
  }

  JAXOPS_ALWAYS_INLINE void Dot(const S* features, const S* cotangent, A (&dots)[kCorners]) const {
    V sums[kCorners] = {};
    int64_t f = 0;
    for (; f + kStep <= width; f += kStep) {
      const V g = Load(cotangent + f);
      JAXOPS_UNROLL
      for (int c = 0; c < kCorners; ++c) sums[c] += g * Load(features + c * width + f);
    }
    if (f < width) {
      const int64_t rest = width - f;
      const V g = LoadPartial(cotangent + f, rest);
      JAXOPS_UNROLL
      for (int c = 0; c < kCorners; ++c) {
        sums[c] += g * LoadPartial(features + c * width + f, rest);
      }
    }
    JAXOPS_UNROLL
    for (int c = 0; c < kCorners; ++c) {
      A sum = 0;
      for (int i = 0; i < kLanes<A>; ++i) sum += sums[c][i];
      dots[c] = sum;
    }
  }
};

// A few features, of a number known here: all corners are converted together.
template <typename S, int kWidth>
struct Few {
  using A = Arithmetic<S>;
  static constexpr int64_t kStep = kLanes<A>;
  static constexpr int64_t kPadded(int64_t count) { return (count + kStep - 1) / kStep * kStep; }

  template <int64_t kCount>
  JAXOPS_ALWAYS_INLINE static void Read(const S* from, A (&to)[kPadded(kCount)]) {
    JAXOPS_UNROLL
    for (int64_t i = 0; i < kCount; i += kStep) {
      Store(i + kStep <= kCount ? Load(from + i) : LoadPartial(from + i, kCount - i), to + i);
    }
  }

  template <int64_t kCount>
  JAXOPS_ALWAYS_INLINE static void Write(const A (&from)[kPadded(kCount)], S* to) {
    JAXOPS_UNROLL
    for (int64_t i = 0; i < kCount; i += kStep) {
      if (i + kStep <= kCount) {
        Store(Load(from + i), to + i);
      } else {
        StorePartial<S>(Load(from + i), to + i, kCount - i);
      }
    }
  }

  JAXOPS_ALWAYS_INLINE void Interpolate(const A (&weights)[kCorners], const S* features,
                                        S* out) const {
    A corners[kPadded(kCorners * kWidth)];
    Read<kCorners * kWidth>(features, corners);
    A sums[kPadded(kWidth)] = {};
    JAXOPS_UNROLL
    for (int c = 0; c < kCorners; ++c) {
      JAXOPS_UNROLL
      for (int f = 0; f < kWidth; ++f) sums[f] += weights[c] * corners[c * kWidth + f];
    }
    Write<kWidth>(sums, out);
  }

  JAXOPS_ALWAYS_INLINE void Spread(const A (&weights)[kCorners], const S* cotangent,
                                   S* dfeatures) const {
    A g[kPadded(kWidth)];
    Read<kWidth>(cotangent, g);
    A corners[kPadded(kCorners * kWidth)] = {};
    JAXOPS_UNROLL
    for (int c = 0; c < kCorners; ++c) {
      JAXOPS_UNROLL
      for (int f = 0; f < kWidth; ++f) corners[c * kWidth + f] = weights[c] * g[f];
    }
    Write<kCorners * kWidth>(corners, dfeatures);
  }

  JAXOPS_ALWAYS_INLINE void Dot(const S* features, const S* cotangent, A (&dots)[kCorners]) const {
    A corners[kPadded(kCorners * kWidth)];
    Read<kCorners * kWidth>(features, corners);
    A g[kPadded(kWidth)];
    Read<kWidth>(cotangent, g);
    JAXOPS_UNROLL
    for (int c = 0; c < kCorners; ++c) {
      dots[c] = 0;
      JAXOPS_UNROLL
      for (int f = 0; f < kWidth; ++f) dots[c] += corners[c * kWidth + f] * g[f];
    }
  }
};

// Points or directions of `count` cells in the arithmetic type.
template <typename A>
void ReadPoints(DType dtype, const void* points, int64_t first, int64_t stride, int64_t count,
                A* to) {
  WithStorage(dtype, points, first * stride, [&](auto from) {
    if (stride == kAxes) {
      Widen(from, count * kAxes, to);
    } else {
      for (int64_t i = 0; i < count; ++i) Widen(from + i * stride, kAxes, to + i * kAxes);
    }
  });
}

template <typename S, typename Features>
void Evaluate(const Cells& args, const Features& inner) {
  using A = Arithmetic<S>;
  const auto* features = static_cast<const S*>(args.features);
  const auto* cotangent = static_cast<const S*>(args.cotangent);
  auto* out = static_cast<S*>(args.out);
  auto* dfeatures = static_cast<S*>(args.dfeatures);
  A points[kBlock * kAxes], directions[multilinear::kMaxDirections][kBlock * kAxes];
  A gradients[kBlock * kAxes];
  for (int64_t first = 0; first < args.count; first += kBlock) {
    const int64_t count = args.count - first < kBlock ? args.count - first : kBlock;
    ReadPoints(args.point_dtype, args.points, first, args.points_stride, count, points);
    for (int d = 0; d < args.order; ++d) {
      ReadPoints(args.point_dtype, args.directions[d], first, args.direction_strides[d], count,
                 directions[d]);
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t cell = first + i;
      Axis<A> axes[kAxes];
      for (int a = 0; a < kAxes; ++a) {
        const A p = points[i * kAxes + a];
        axes[a] = {(1 - p) / 2, (1 + p) / 2, A(0.5)};
      }
      A terms[kCorners];
      multilinear::NoDerivative<kAxes>(terms);
      for (int d = 0; d < args.order; ++d) {
        const A* t = directions[d] + i * kAxes;
        const A direction[kAxes] = {t[0], t[1], t[2]};
        multilinear::Differentiate<kAxes>(axes, direction, terms);
      }
      if (args.dpoints != nullptr) {
        A dots[kCorners], gradient[kAxes];
        inner.Dot(features + cell * args.features_stride, cotangent + cell * args.cotangent_stride,
                  dots);
        multilinear::PointGradient<kAxes>(axes, terms, dots, gradient);
        for (int a = 0; a < kAxes; ++a) gradients[i * kAxes + a] = gradient[a];
      }
      if (args.order == 0) {
        multilinear::PlainWeights<kAxes>(axes, terms);
      } else {
        multilinear::TermsToWeights<kAxes>(axes, terms);
      }
      if (out != nullptr) {
        inner.Interpolate(terms, features + cell * args.features_stride, out + cell * args.width);
      } else if (dfeatures != nullptr) {
        inner.Spread(terms, cotangent + cell * args.cotangent_stride,
                     dfeatures + cell * kCorners * args.width);
      }
    }
    if (args.dpoints != nullptr) {
      WithStorage(args.point_dtype, args.dpoints, first * kAxes, [&]<typename P>(const P* to) {
        Narrow(gradients, count * kAxes, const_cast<P*>(to));
      });
    }
  }
}

void RunCells(const Cells& args) {
  WithStorage(args.dtype, nullptr, 0, [&]<typename S>(const S*) {
    switch (args.width) {
      case 1:
        return Evaluate<S>(args, Few<S, 1>());
      case 2:
        return Evaluate<S>(args, Few<S, 2>());
      case 3:
        return Evaluate<S>(args, Few<S, 3>());
      case 4:
        return Evaluate<S>(args, Few<S, 4>());
      case 8:
        return Evaluate<S>(args, Few<S, 8>());
      default:
        return Evaluate<S>(args, Many<S>{args.width});
    }
  });
}

}  // namespace

const Kernels kKernels = {RunCells};

}  // namespace jaxops::trilinear::cpu::JAXOPS_ISA
