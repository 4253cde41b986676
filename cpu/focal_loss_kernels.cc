#include "cpu/focal_loss_kernels.h"

#include <cstdint>

#include "cpu/simd.h"

namespace jaxops::focal_loss::cpu::JAXOPS_ISA {
namespace {

using namespace jaxops::cpu::JAXOPS_ISA;

template <typename A>
using Int = typename Simd<A>::Int;

template <typename A>
struct Limits;
template <>
struct Limits<float> {
  static constexpr float kMax = 0x1.fffffep127f;
  static constexpr float kTiny = 0x1p-126f;
  // Clears the lower half of a significand, so that the product of two is exact.
  static constexpr int32_t kHighMask = ~int32_t{0xfff};
};
template <>
struct Limits<double> {
  static constexpr double kMax = 0x1.fffffffffffffp1023;
  static constexpr double kTiny = 0x1p-1022;
  static constexpr int64_t kHighMask = ~int64_t{0x7ffffff};
};

// Where the loss has underflowed, for every type and however small gamma is.
constexpr int kFar = 2000;

template <typename V>
JAXOPS_ALWAYS_INLINE V Abs(V x) {
  return x < 0 ? -x : x;
}

template <typename A>
JAXOPS_ALWAYS_INLINE Vec<A> High(Vec<A> x) {
  return BitCast<Vec<A>>(BitCast<Int<A>>(x) & Limits<A>::kHighMask);
}

template <typename V>
JAXOPS_ALWAYS_INLINE V Sqrt(V x) {
  using A = decltype(x[0] + 0);
  for (int i = 0; i < kLanes<A>; ++i) x[i] = __builtin_sqrt(x[i]);
  return x;
}

// exp(gamma (log_high + log_low)), exact to a few roundings however long the product is.
template <typename A>
JAXOPS_ALWAYS_INLINE Vec<A> ExpOfProduct(Vec<A> gamma, Vec<A> log_high, Vec<A> log_low) {
  using V = Vec<A>;
  log_high = log_high < A(-kFar) ? V{} - A(kFar) : log_high;
  const V gamma_high = High<A>(gamma);
  const V top = High<A>(log_high);
  const V high = gamma_high * top;
  const V low = (gamma - gamma_high) * top + gamma * (log_high - top) + gamma * log_low;
  const V sum = high + low;
  const V back = sum - high;
  const V rest = (high - (sum - back)) + (low - back);
  const V power = Exp(sum);
  return power + power * rest;
}

// `base` to the power gamma; log_high + log_low is its logarithm, for exponents that need it.
template <typename A>
JAXOPS_ALWAYS_INLINE Vec<A> PowerOf(Vec<A> base, Vec<A> log_high, Vec<A> log_low, Power power,
                                    A gamma) {
  switch (power) {
    case Power::kZero:
      return Vec<A>{} + A(1);
    case Power::kHalf:
      return Sqrt(base);
    case Power::kOne:
      return base;
    case Power::kTwo:
      return base * base;
    default:
      return ExpOfProduct<A>(Vec<A>{} + gamma, log_high, log_low);
  }
}

template <typename A>
struct Focal {
  Vec<A> loss;
  Vec<A> slope;
};

// Of x = positive + (negative_high + negative_low), where one of the two parts is zero, and
// e = exp(-|x|).
template <typename A>
JAXOPS_ALWAYS_INLINE Focal<A> Evaluate(Vec<A> e, Int<A> leads, Vec<A> positive,
                                       Vec<A> negative_high, Vec<A> negative_low, Power power,
                                       A gamma) {
  using V = Vec<A>;
  const V one = V{} + A(1);
  const V inverse = one / (one + e);
  const V log1p = Log1p(e);
  const V softplus = positive + log1p;
  const V wrong = (leads ? one : e) * inverse;
  const V right = (leads ? e : one) * inverse;
  const V scaled = PowerOf<A>(wrong, negative_high, negative_low - log1p, power, gamma);
  // What multiplies an infinite softplus is zero.
  const V finite = softplus > Limits<A>::kMax ? V{} + Limits<A>::kMax : softplus;
  return {scaled * softplus, scaled * (gamma * (right * finite) + wrong)};
}

template <typename A>
JAXOPS_ALWAYS_INLINE Focal<A> EvaluateLogit(Vec<A> x, Power power, A gamma) {
  using V = Vec<A>;
  const V positive = x > 0 ? x : V{};
  const V negative = x < 0 ? x : V{};
  return Evaluate<A>(Exp(-Abs(x)), x >= 0, positive, negative, V{}, power, gamma);
}

// Logarithms lane by lane, in two parts.
JAXOPS_ALWAYS_INLINE void Log(Vec<float> x, Vec<float>& high, Vec<float>& low) {
  for (int i = 0; i < kLanes<float>; ++i) {
    const double log = __builtin_log(static_cast<double>(x[i]));
    high[i] = static_cast<float>(log);
    low[i] = static_cast<float>(log - high[i]);
  }
}
JAXOPS_ALWAYS_INLINE void Log(Vec<double> x, Vec<double>& high, Vec<double>& low) {
  for (int i = 0; i < kLanes<double>; ++i) high[i] = __builtin_log(x[i]);
  low = Vec<double>{};
}

// Of a logit z whose target y is between 0 and 1; `small` and `big` are the parts of y and 1 - y
// that weigh the less and the more probable of the two answers.
template <typename A>
JAXOPS_ALWAYS_INLINE Focal<A> EvaluateSoft(Vec<A> z, Vec<A> y, Power power, A gamma) {
  using V = Vec<A>;
  const V one = V{} + A(1);
  const V e = Exp(-Abs(z));
  const V inverse = one / (one + e);
  const V log1p = Log1p(e);
  const Int<A> positive = z >= 0;
  const V small = positive ? y : one - y;
  const V big = positive ? one - y : y;
  const Int<A> hard = big == 0;
  const V sum = small * e + big;
  const V wrong = inverse * sum;
  const V entropy = log1p + (hard ? V{} : big * Abs(z));
  V log_high{}, log_low{};
  if (power == Power::kAny) {
    Log(sum, log_high, log_low);
    log_high = hard ? -Abs(z) : log_high;
    log_low = hard ? V{} : log_low;
  }
  const V scaled = PowerOf<A>(wrong, log_high, log_low - log1p, power, gamma);
  const V share = hard ? inverse : inverse * e / sum;
  const V finite = entropy > Limits<A>::kMax ? V{} + Limits<A>::kMax : entropy;
  const V by_entropy = inverse * (positive ? big - small * e : small * e - big);
  return {scaled * entropy, scaled * ((one - y - y) * gamma * (share * finite) + by_entropy)};
}

template <typename S, bool kSoft>
void EvaluateElements(const Elements& args) {
  using A = Arithmetic<S>;
  using V = Vec<A>;
  const S* logits = static_cast<const S*>(args.logits);
  const A* targets = static_cast<const A*>(args.target);
  const A* factors = static_cast<const A*>(args.factor);
  const A gamma = static_cast<A>(args.gamma);
  const A negative = static_cast<A>(args.negative);
  const A positive = static_cast<A>(args.positive);
  V sum = {};
  for (int64_t i = 0; i < args.count; i += kLanes<A>) {
    const int64_t lanes = args.count - i < kLanes<A> ? args.count - i : kLanes<A>;
    const bool whole = lanes == kLanes<A>;
    const V z = whole ? Load(logits + i) : LoadPartial(logits + i, lanes);
    const V y = Load(targets + i);
    V factor = Load(factors + i);
    V loss, slope;
    if constexpr (kSoft) {
      const Focal<A> f = EvaluateSoft<A>(z, y, args.power, gamma);
      factor *= y * positive + (A(1) - y) * negative;
      loss = factor * f.loss;
      slope = factor * f.slope;
    } else {
      const Int<A> is_target = y > 0;
      const Focal<A> f = EvaluateLogit<A>(is_target ? -z : z, args.power, gamma);
      factor *= is_target ? V{} + positive : V{} + negative;
      loss = y < 0 ? V{} : factor * f.loss;
      slope = y < 0 ? V{} : (is_target ? -factor : factor) * f.slope;
    }
    sum += whole ? loss : KeepLanes<A>(loss, lanes);
    if (args.loss != nullptr) {
      S* to = static_cast<S*>(args.loss) + i;
      whole ? Store(loss, to) : StorePartial(loss, to, lanes);
    }
    if (args.gradient != nullptr) {
      S* to = static_cast<S*>(args.gradient) + i;
      whole ? Store(slope, to) : StorePartial(slope, to, lanes);
    }
  }
  if (args.sum != nullptr) {
    double total = 0;
    for (int lane = 0; lane < kLanes<A>; ++lane) total += sum[lane];
    *args.sum = total;
  }
}

// The logits from `i` on, without that of the label and what is beyond the row: -inf there.
template <typename S>
JAXOPS_ALWAYS_INLINE Vec<Arithmetic<S>> LoadOthers(const S* row, int64_t i, int64_t classes,
                                                   int64_t label) {
  using A = Arithmetic<S>;
  const A nothing = -__builtin_inff();
  Vec<A> z;
  if (i + kLanes<A> <= classes) {
    z = Load(row + i);
  } else {
    z = LoadPartial(row + i, classes - i);
    for (int64_t lane = classes - i; lane < kLanes<A>; ++lane) z[lane] = nothing;
  }
  if (label >= i && label < i + kLanes<A>) z[label - i] = nothing;
  return z;
}

// Stores what of a vector is inside a row.
template <typename S>
JAXOPS_ALWAYS_INLINE void StoreInside(Vec<Arithmetic<S>> v, S* row, int64_t i, int64_t classes) {
  if (i + kLanes<Arithmetic<S>> <= classes) {
    Store(v, row + i);
  } else {
    StorePartial(v, row + i, classes - i);
  }
}

template <typename S>
JAXOPS_ALWAYS_INLINE Arithmetic<S> LoadOne(const S* from) {
  return LoadPartial(from, 1)[0];
}

template <typename S>
void EvaluateRows(const Rows& args) {
  using A = Arithmetic<S>;
  using V = Vec<A>;
  const A gamma = static_cast<A>(args.gamma);
  constexpr A kMax = Limits<A>::kMax;
  // The exponentials of the gradient wait in its place where they lose nothing there.
  constexpr bool kKeep = __is_same(S, A);
  for (int64_t first = 0; first < args.rows; first += kLanes<A>) {
    const int64_t count = args.rows - first < kLanes<A> ? args.rows - first : kLanes<A>;
    // Of each row, without its label: the largest logit, and the sum of exponentials beside it. The
    // label trails the largest by lead_high + lead_low, exactly.
    A largest[kLanes<A>];
    V sums = V{} + A(1), lead_high = {}, lead_low = {};
    for (int64_t r = 0; r < count; ++r) {
      const int64_t label = args.labels[first + r];
      largest[r] = 0;
      if (label < 0 || label >= args.classes) continue;
      const S* row = static_cast<const S*>(args.logits) + (first + r) * args.classes;
      V most = V{} - kMax;
      for (int64_t i = 0; i < args.classes; i += kLanes<A>) {
        const V z = LoadOthers(row, i, args.classes, label);
        most = z > most ? z : most;
      }
      A top = most[0];
      for (int lane = 1; lane < kLanes<A>; ++lane) top = most[lane] > top ? most[lane] : top;
      top = top > kMax ? kMax : top;
      V sum = {};
      for (int64_t i = 0; i < args.classes; i += kLanes<A>) {
        const V e = Exp(LoadOthers(row, i, args.classes, label) - top);
        sum += e;
        if (kKeep && args.gradient != nullptr) {
          StoreInside(e, static_cast<S*>(args.gradient) + (first + r) * args.classes, i,
                      args.classes);
        }
      }
      A total = 0;
      for (int lane = 0; lane < kLanes<A>; ++lane) total += sum[lane];
      const A z = LoadOne(row + label);
      const A lead = top - z;
      const A back = top - lead;
      largest[r] = top;
      sums[r] = total;
      lead_high[r] = lead;
      // Infinite logits have no remainder.
      const A rest = (top - (lead + back)) + (back - z);
      lead_low[r] = lead - lead == 0 ? rest : A(0);
    }

    V log_high, log_low;
    Log(sums < Limits<A>::kTiny ? V{} + Limits<A>::kTiny : sums, log_high, log_low);
    const V low = lead_low + log_high;
    const V x = lead_high + low;
    const Int<A> leads = x >= 0;
    const V shrunk = Exp(-Abs(lead_high));
    const V e = leads ? (lead_high >= 0 ? shrunk : A(1) / shrunk) * (A(1) - lead_low) / sums
                      : shrunk * (A(1) + lead_low) * sums;
    const Focal<A> f = Evaluate<A>(e, leads, leads ? x : V{}, leads ? V{} : lead_high,
                                   leads ? V{} : low, args.power, gamma);
    for (int64_t r = 0; r < count; ++r) {
      const int64_t label = args.labels[first + r];
      const bool known = label >= 0 && label < args.classes;
      if (args.loss != nullptr) static_cast<A*>(args.loss)[first + r] = known ? f.loss[r] : A(0);
      if (args.gradient == nullptr) continue;
      S* to = static_cast<S*>(args.gradient) + (first + r) * args.classes;
      if (!known) {
        __builtin_memset(to, 0, args.classes * sizeof(S));
        continue;
      }
      const S* row = static_cast<const S*>(args.logits) + (first + r) * args.classes;
      const A slope = static_cast<const A*>(args.cotangent)[first + r] * f.slope[r];
      const A share = sums[r] == 0 ? A(0) : slope / sums[r];
      for (int64_t i = 0; i < args.classes; i += kLanes<A>) {
        V e;
        if constexpr (kKeep) {
          e = i + kLanes<A> <= args.classes ? Load(to + i) : LoadPartial(to + i, args.classes - i);
        } else {
          e = Exp(LoadOthers(row, i, args.classes, label) - largest[r]);
        }
        StoreInside(share * e, to, i, args.classes);
      }
      StorePartial(V{} - slope, to + label, 1);
    }
  }
}

template <typename S>
S StorageOf(const S*);

void RunElements(const Elements& args) {
  WithStorage(args.dtype, nullptr, 0, [&](auto storage) {
    using S = decltype(StorageOf(storage));
    args.soft ? EvaluateElements<S, true>(args) : EvaluateElements<S, false>(args);
  });
}

void RunRows(const Rows& args) {
  WithStorage(args.dtype, nullptr, 0,
              [&](auto storage) { EvaluateRows<decltype(StorageOf(storage))>(args); });
}

void RunWiden(const Widened& args) {
  WithStorage(args.dtype, args.from, 0, [&](auto from) {
    if constexpr (!__is_same(decltype(StorageOf(from)), double)) {
      Widen(from, args.count, static_cast<float*>(args.to));
    }
  });
}

}  // namespace

const Kernels kKernels = {RunElements, RunRows, RunWiden};

}  // namespace jaxops::focal_loss::cpu::JAXOPS_ISA
