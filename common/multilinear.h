// The algebra of interpolation along several axes, for every platform.
//
// An entry of the grid is named by one bit an axis, axis 0 being the highest bit: 0 is the lower of
// the axis's two entries, 1 the upper. The weight of an entry is the product of its factors. A
// derivative replaces the factor of some axes by its slope; `terms[m]` below is the coefficient of
// the term that has the slopes of the axes in the set m. Without derivative only the coefficient of
// the empty set is nonzero; for one direction t, the coefficient of each set {a} is t_a; and so on.
#ifndef JAXOPS_COMMON_MULTILINEAR_H_
#define JAXOPS_COMMON_MULTILINEAR_H_

#include <cstdint>

#include "common/host_device.h"

namespace jaxops::multilinear {

// A derivative has at most three directions: one along more directions than axes is zero.
inline constexpr int kMaxDirections = 3;

// The factors of an axis. Their derivatives with respect to the coordinate are -slope and slope.
template <typename A>
struct Axis {
  A lower;
  A upper;
  A slope;
};

template <int kAxes>
JAXOPS_HOST_DEVICE_INLINE constexpr int BitOf(int axis) {
  return 1 << (kAxes - 1 - axis);
}

template <int kAxes, typename A>
JAXOPS_HOST_DEVICE_INLINE void NoDerivative(A (&terms)[1 << kAxes]) {
  JAXOPS_UNROLL
  for (int m = 0; m < 1 << kAxes; ++m) terms[m] = m == 0 ? A(1) : A(0);
}

// Adds a derivative along one more direction.
template <int kAxes, typename A>
JAXOPS_HOST_DEVICE_INLINE void Differentiate(const Axis<A> (&axes)[kAxes],
                                             const A (&direction)[kAxes], A (&terms)[1 << kAxes]) {
  // The loop begins with the largest set, because a set reads sets with one axis less.
  JAXOPS_UNROLL
  for (int m = (1 << kAxes) - 1; m >= 0; --m) {
    A sum = 0;
    JAXOPS_UNROLL
    for (int a = 0; a < kAxes; ++a) {
      if (m & BitOf<kAxes>(a)) sum += terms[m ^ BitOf<kAxes>(a)] * direction[a] * axes[a].slope;
    }
    terms[m] = sum;
  }
}

// Computes the weights of the entries, without derivative.
template <int kAxes, typename A>
JAXOPS_HOST_DEVICE_INLINE void PlainWeights(const Axis<A> (&axes)[kAxes],
                                            A (&weights)[1 << kAxes]) {
  JAXOPS_UNROLL
  for (int c = 0; c < 1 << kAxes; ++c) {
    A product = 1;
    JAXOPS_UNROLL
    for (int a = 0; a < kAxes; ++a) {
      product *= c & BitOf<kAxes>(a) ? axes[a].upper : axes[a].lower;
    }
    weights[c] = product;
  }
}

// Computes the weights of the entries from terms.
template <int kAxes, typename A>
JAXOPS_HOST_DEVICE_INLINE void TermsToWeights(const Axis<A> (&axes)[kAxes],
                                              A (&terms)[1 << kAxes]) {
  JAXOPS_UNROLL
  for (int a = 0; a < kAxes; ++a) {
    JAXOPS_UNROLL
    for (int m = 0; m < 1 << kAxes; ++m) {
      if (m & BitOf<kAxes>(a)) continue;
      const A factor = terms[m];
      const A slope = terms[m | BitOf<kAxes>(a)];
      terms[m] = factor * axes[a].lower - slope;
      terms[m | BitOf<kAxes>(a)] = factor * axes[a].upper + slope;
    }
  }
}

// Replaces the values of the entries by their sums: values[m] has the slopes of the axes in the set
// m and the factors of the others.
template <int kAxes, typename A>
JAXOPS_HOST_DEVICE_INLINE void Contract(const Axis<A> (&axes)[kAxes], A (&values)[1 << kAxes]) {
  JAXOPS_UNROLL
  for (int a = 0; a < kAxes; ++a) {
    JAXOPS_UNROLL
    for (int m = 0; m < 1 << kAxes; ++m) {
      if (m & BitOf<kAxes>(a)) continue;
      const A lower = values[m];
      const A upper = values[m | BitOf<kAxes>(a)];
      values[m] = lower * axes[a].lower + upper * axes[a].upper;
      values[m | BitOf<kAxes>(a)] = upper - lower;
    }
  }
}

// Computes the point gradient of sum_c weight_c * values[c], without derivative. Overwrites values.
template <int kAxes, typename A>
JAXOPS_HOST_DEVICE_INLINE void PlainPointGradient(const Axis<A> (&axes)[kAxes],
                                                  A (&values)[1 << kAxes], A (&gradient)[kAxes]) {
  Contract<kAxes>(axes, values);
  JAXOPS_UNROLL
  for (int a = 0; a < kAxes; ++a) gradient[a] = axes[a].slope * values[BitOf<kAxes>(a)];
}

// Computes the point gradient of sum_c weight_c * values[c], whose weights have these terms.
// Overwrites values.
template <int kAxes, typename A>
JAXOPS_HOST_DEVICE_INLINE void PointGradient(const Axis<A> (&axes)[kAxes],
                                             const A (&terms)[1 << kAxes], A (&values)[1 << kAxes],
                                             A (&gradient)[kAxes]) {
  Contract<kAxes>(axes, values);
  JAXOPS_UNROLL
  for (int a = 0; a < kAxes; ++a) {
    A sum = 0;
    JAXOPS_UNROLL
    for (int m = 0; m < 1 << kAxes; ++m) {
      if (!(m & BitOf<kAxes>(a))) sum += terms[m] * values[m | BitOf<kAxes>(a)];
    }
    gradient[a] = axes[a].slope * sum;
  }
}

}  // namespace jaxops::multilinear

#endif  // JAXOPS_COMMON_MULTILINEAR_H_
