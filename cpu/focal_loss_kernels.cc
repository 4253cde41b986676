#include "cpu/focal_loss_kernels.h"

#include <cstdint>

#include "cpu/simd.h"

namespace jaxops::focal_loss::cpu::JAXOPS_ISA {
namespace {

using namespace jaxops::cpu::JAXOPS_ISA;

template <typename A>
using Int = typename Simd<A>::Int;
template <typename A>
using Lane = decltype(Int<A>{}[0] + 0);

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

// The loss has underflowed if x is below -kFar, for every type and every gamma.
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

// Returns exp(gamma (log_high + log_low)), exact to a few roundings for a product of any size.
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
  // The remainder of an exponent of -infinity is NaN.
  return power == 0 ? power : power + power * rest;
}

// Returns `base` to the power gamma; log_high + log_low is its logarithm, which only kAny needs.
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

// Evaluates loss and slope at x = positive + (negative_high + negative_low), one of whose two parts
// is zero, with e = exp(-|x|).
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
  // The factor of an infinite softplus is zero, and zero times infinity would be NaN.
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

// Sets high + low = log(x) for 0 < x <= 1; low is about the rounding error of high.
template <typename A>
JAXOPS_ALWAYS_INLINE void LongLog(Vec<A> x, Vec<A>& high, Vec<A>& low) {
  using V = Vec<A>;
  constexpr int kLift = 64;  // scales subnormal numbers to normal ones
  const Int<A> is_tiny = x < Limits<A>::kTiny;
  V exact, rest;
  LogInParts(is_tiny ? x * A(0x1p64) : x, exact, rest);
  exact -= is_tiny ? V{} + A(kLift) * Simd<A>::kLog2High : V{};
  rest -= is_tiny ? V{} + A(kLift) * Simd<A>::kLog2Low : V{};
  high = exact + rest;
  low = rest - (high - exact);
}

// Evaluates loss and slope of a logit z with a target y between 0 and 1. `small` and `big` are
// those of y and 1 - y that weigh the less and the more probable of the two answers.
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
    LongLog<A>(sum, log_high, log_low);
    log_high = hard ? -Abs(z) : log_high;
    log_low = hard ? V{} : log_low;
  }
  const V scaled = PowerOf<A>(wrong, log_high, log_low - log1p, power, gamma);
  const V share = hard ? inverse : inverse * e / sum;
  const V finite = entropy > Limits<A>::kMax ? V{} + Limits<A>::kMax : entropy;
  const V by_entropy = inverse * (positive ? big - small * e : small * e - big);
  return {scaled * entropy, scaled * ((one - y - y) * gamma * (share * finite) + by_entropy)};
}

// --- sigmoid -------------------------------------------------------------------------------------

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
    const int64_t left = args.count - i;
    const V z = LoadUpTo(logits + i, left);
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
    sum += left < kLanes<A> ? KeepLanes<A>(loss, left) : loss;
    if (args.loss != nullptr) StoreUpTo(loss, static_cast<S*>(args.loss) + i, left);
    if (args.gradient != nullptr) StoreUpTo(slope, static_cast<S*>(args.gradient) + i, left);
  }
  if (args.sum != nullptr) {
    double total = 0;
    for (int lane = 0; lane < kLanes<A>; ++lane) total += sum[lane];
    *args.sum = total;
  }
}

// --- softmax -------------------------------------------------------------------------------------

// One row a lane: the largest logit without the label's, the sum of exponentials relative to the
// largest, and the logit of the label.
template <typename A>
struct Group {
  Vec<A> largest = {};
  Vec<A> sums = Vec<A>{} + A(1);
  Vec<A> label = {};
};

template <typename A>
JAXOPS_ALWAYS_INLINE Focal<A> EvaluateGroup(const Group<A>& group, Power power, A gamma) {
  using V = Vec<A>;
  // The difference of `largest` and `label` is lead + rest, exactly. The remainder is zero for
  // infinite logits. It is also zero for a label that leads by kFar or more: the loss has
  // underflowed there, and the remainder would be as large as the label.
  const V lead = group.largest - group.label;
  const V back = group.largest - lead;
  const V remainder = (group.largest - (lead + back)) + (back - group.label);
  const Int<A> has_remainder = (lead > A(-kFar)) & (lead <= Limits<A>::kMax);
  const V rest = has_remainder ? remainder : V{};
  const V tiny = V{} + Limits<A>::kTiny;
  const V low = rest + Log(group.sums < tiny ? tiny : group.sums);
  const V x = lead + low;
  const Int<A> leads = x >= 0;
  const V shrunk = Exp(-Abs(lead));
  const V e = leads ? (lead >= 0 ? shrunk : A(1) / shrunk) * (A(1) - rest) / group.sums
                    : shrunk * (A(1) + rest) * group.sums;
  return Evaluate<A>(e, leads, leads ? x : V{}, leads ? V{} : lead, leads ? V{} : low, power,
                     gamma);
}

// Joins the halves of a vector, then those of the half, until one lane is left.
template <int kLanesLeft, typename V, typename F>
JAXOPS_ALWAYS_INLINE auto JoinLanes(V v, F join) {
  if constexpr (kLanesLeft == 1) {
    return v[0];
  } else {
    return JoinLanes<kLanesLeft / 2>(join(v, Shift<kLanesLeft / 2>(v, v)), join);
  }
}

template <typename A>
JAXOPS_ALWAYS_INLINE A Largest(Vec<A> v) {
  return JoinLanes<kLanes<A>>(v, [](Vec<A> a, Vec<A> b) { return a > b ? a : b; });
}

template <typename A>
JAXOPS_ALWAYS_INLINE A Sum(Vec<A> v) {
  return JoinLanes<kLanes<A>>(v, [](Vec<A> a, Vec<A> b) { return a + b; });
}

template <typename A>
JAXOPS_ALWAYS_INLINE Int<A> LaneNumbers() {
  Int<A> lane;
  for (int i = 0; i < kLanes<A>; ++i) lane[i] = i;
  return lane;
}

// The lanes of a vector are rows for at most this number of classes, and classes of one row for
// more. Lanes of classes pay for the reduction of a vector to a number and for the last, partial
// vector of a row; lanes of rows pay for a transposition. The costs are about equal at this number.
constexpr int kMaxAcross = 64;

// Groups that are evaluated in one loop. A group alone is a long chain of dependent operations; the
// chains of several groups overlap.
constexpr int kMaxGroups = 8;

// The rows of several groups. `by_class` has one group after the other, each transposed: the rows
// of a class are neighbours.
template <typename A>
struct Tile {
  static constexpr int kSize = kMaxAcross * kLanes<A>;
  alignas(kVectorBytes) A by_row[kSize];
  alignas(kVectorBytes) A by_class[kSize];
};

// Reads `count` rows. Missing rows of the last group are zero.
template <typename S, typename A>
JAXOPS_ALWAYS_INLINE void LoadTile(const S* rows, int64_t count, int64_t classes, int64_t groups,
                                   Tile<A>& tile) {
  constexpr int kRows = kLanes<A>;
  const int64_t size = count * classes;
  int64_t i = 0;
  for (; i + kLanes<A> <= size; i += kLanes<A>) Store(Load(rows + i), tile.by_row + i);
  for (; i < groups * kRows * classes; i += kLanes<A>) {
    Store(i < size ? LoadPartial(rows + i, size - i) : Vec<A>{}, tile.by_row + i);
  }
  for (int64_t g = 0; g < groups; ++g) {
    const A* from = tile.by_row + g * kRows * classes;
    A* to = tile.by_class + g * kRows * classes;
    for (int64_t c = 0; c < classes; ++c) {
      for (int r = 0; r < kRows; ++r) to[c * kRows + r] = from[r * classes + c];
    }
  }
}

// Writes `count` rows.
template <typename S, typename A>
JAXOPS_ALWAYS_INLINE void StoreTile(Tile<A>& tile, int64_t count, int64_t classes, int64_t groups,
                                    S* rows) {
  constexpr int kRows = kLanes<A>;
  for (int64_t g = 0; g < groups; ++g) {
    const A* from = tile.by_class + g * kRows * classes;
    A* to = tile.by_row + g * kRows * classes;
    for (int64_t c = 0; c < classes; ++c) {
      for (int r = 0; r < kRows; ++r) to[r * classes + c] = from[c * kRows + r];
    }
  }
  const int64_t size = count * classes;
  for (int64_t i = 0; i < size; i += kLanes<A>)
    StoreUpTo(Load(tile.by_row + i), rows + i, size - i);
}

// Reduces a group, and replaces its logits by their exponentials, and the labels' logits by 0.
template <typename A>
JAXOPS_ALWAYS_INLINE Group<A> Reduce(A* entries, int64_t classes, Int<A> label) {
  using V = Vec<A>;
  Group<A> group;
  V most = V{} - Limits<A>::kMax;
  A* const end = entries + classes * kLanes<A>;
  Int<A> c = {};
  for (A* entry = entries; entry < end; entry += kLanes<A>, c += 1) {
    const V z = Load(entry);
    const V other = label == c ? V{} - __builtin_inff() : z;
    group.label = label == c ? z : group.label;
    most = other > most ? other : most;
    Store(other, entry);
  }
  group.largest = most > Limits<A>::kMax ? V{} + Limits<A>::kMax : most;
  group.sums = V{};
  for (A* entry = entries; entry < end; entry += kLanes<A>) {
    const V e = Exp(Load(entry) - group.largest);
    group.sums += e;
    Store(e, entry);
  }
  return group;
}

template <typename S>
void EvaluateAcross(const Rows& args) {
  using A = Arithmetic<S>;
  using V = Vec<A>;
  constexpr int kRows = kLanes<A>;
  const int64_t classes = args.classes;
  const int64_t size = classes * kRows;
  const int64_t fit = classes == 0 ? kMaxGroups : kMaxAcross / classes;
  const int64_t batch_rows = (fit < kMaxGroups ? fit : kMaxGroups) * kRows;
  Tile<A> tile;
  Group<A> batch[kMaxGroups];
  Int<A> labels[kMaxGroups];
  for (int64_t first = 0; first < args.rows; first += batch_rows) {
    const int64_t rest = args.rows - first;
    const int64_t count = rest < batch_rows ? rest : batch_rows;
    const int64_t groups = (count + kRows - 1) / kRows;
    LoadTile(static_cast<const S*>(args.logits) + first * classes, count, classes, groups, tile);
    for (int64_t r = 0; r < groups * kRows; ++r) {
      labels[r / kRows][r % kRows] = r < count ? args.labels[first + r] : -1;
    }
    for (int64_t g = 0; g < groups; ++g) {
      batch[g] = Reduce(tile.by_class + g * size, classes, labels[g]);
    }
    V slopes[kMaxGroups];
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t row = first + g * kRows;
      const Focal<A> f = EvaluateGroup<A>(batch[g], args.power, static_cast<A>(args.gamma));
      const Int<A> known = (labels[g] >= 0) & (labels[g] < static_cast<Lane<A>>(classes));
      const V factor = LoadUpTo(static_cast<const A*>(args.factor) + row, args.rows - row);
      if (args.loss != nullptr) {
        const V loss = known ? factor * f.loss : V{};
        StoreUpTo(loss, static_cast<A*>(args.loss) + row, args.rows - row);
      }
      slopes[g] = factor * f.slope;
    }
    if (args.gradient == nullptr) continue;
    for (int64_t g = 0; g < groups; ++g) {
      const Int<A> known = (labels[g] >= 0) & (labels[g] < static_cast<Lane<A>>(classes));
      const V share = batch[g].sums == 0 ? V{} : slopes[g] / batch[g].sums;
      A* entry = tile.by_class + g * size;
      Int<A> c = {};
      for (const A* end = entry + size; entry < end; entry += kRows, c += 1) {
        const V gradient = labels[g] == c ? -slopes[g] : share * Load(entry);
        Store(known ? gradient : V{}, entry);
      }
    }
    StoreTile(tile, count, classes, groups, static_cast<S*>(args.gradient) + first * classes);
  }
}

// Loads the logits from `i` on, with -inf for that of the label.
template <typename S>
JAXOPS_ALWAYS_INLINE Vec<Arithmetic<S>> LoadOthers(const S* row, int64_t i, int64_t label) {
  using A = Arithmetic<S>;
  const Vec<A> z = Load(row + i);
  const int64_t place = label - i;
  if (place < 0 || place >= kLanes<A>) return z;
  return LaneNumbers<A>() == static_cast<Lane<A>>(place) ? Vec<A>{} - __builtin_inff() : z;
}

// The classes whose exponentials are added up before they are added to those of other blocks.
template <typename A>
constexpr int64_t kSumBlock = 128 * kLanes<A>;

// Evaluates rows that have at least one vector of classes. The last vector of a row ends with the
// row and overlaps the vector before.
template <typename S>
void EvaluateAlong(const Rows& args) {
  using A = Arithmetic<S>;
  using V = Vec<A>;
  constexpr int kRows = kLanes<A>;
  // The exponentials are kept in the memory of the gradient if its type does not round them.
  constexpr bool kKeep = __is_same(S, A);
  const int64_t last = args.classes - kLanes<A>;
  for (int64_t first = 0; first < args.rows; first += kRows) {
    const int64_t count = args.rows - first < kRows ? args.rows - first : kRows;
    A largest[kRows], sums[kRows], label_logits[kRows];
    for (int64_t r = 0; r < kRows; ++r) {
      largest[r] = label_logits[r] = 0;
      sums[r] = 1;
      const int64_t label = r < count ? args.labels[first + r] : -1;
      if (label < 0 || label >= args.classes) continue;
      const int64_t offset = (first + r) * args.classes;
      const S* row = static_cast<const S*>(args.logits) + offset;
      V most = V{} - Limits<A>::kMax;
      const auto meet = [&](V z) { most = z > most ? z : most; };
      for (int64_t i = 0; i < last; i += kLanes<A>) meet(LoadOthers(row, i, label));
      meet(LoadOthers(row, last, label));
      const A top = Largest<A>(most);
      largest[r] = top > Limits<A>::kMax ? Limits<A>::kMax : top;

      V sum = {};
      const auto exponentials = [&](int64_t i) {
        const V e = Exp(LoadOthers(row, i, label) - largest[r]);
        if constexpr (kKeep) {
          if (args.gradient != nullptr) Store(e, static_cast<S*>(args.gradient) + offset + i);
        }
        return e;
      };
      // Sums of blocks first: one sum of all was off by 7e-5 of itself for 300000 classes in
      // float32.
      int64_t i = 0;
      while (i < last) {
        const int64_t end = last - i < kSumBlock<A> ? last : i + kSumBlock<A>;
        V part = {};
        for (; i < end; i += kLanes<A>) part += exponentials(i);
        sum += part;
      }
      const Int<A> is_new = LaneNumbers<A>() >= static_cast<Lane<A>>(i - last);
      sum += is_new ? exponentials(last) : V{};
      sums[r] = Sum<A>(sum);
      label_logits[r] = LoadPartial(row + label, 1)[0];
    }

    const Group<A> group = {Load(largest), Load(sums), Load(label_logits)};
    const Focal<A> f = EvaluateGroup<A>(group, args.power, static_cast<A>(args.gamma));
    for (int64_t r = 0; r < count; ++r) {
      const int64_t label = args.labels[first + r];
      const bool known = label >= 0 && label < args.classes;
      const A factor = static_cast<const A*>(args.factor)[first + r];
      if (args.loss != nullptr) {
        static_cast<A*>(args.loss)[first + r] = known ? factor * f.loss[r] : A(0);
      }
      if (args.gradient == nullptr) continue;
      const int64_t offset = (first + r) * args.classes;
      S* to = static_cast<S*>(args.gradient) + offset;
      if (!known) {
        __builtin_memset(to, 0, args.classes * sizeof(S));
        continue;
      }
      const S* row = static_cast<const S*>(args.logits) + offset;
      const A slope = factor * f.slope[r];
      const A share = sums[r] == 0 ? A(0) : slope / sums[r];
      const auto gradients = [&](int64_t i) {
        if constexpr (kKeep) return share * Load(to + i);
        return share * Exp(LoadOthers(row, i, label) - largest[r]);
      };
      const V end = gradients(last);  // before the vectors that it overlaps are overwritten
      for (int64_t i = 0; i < last; i += kLanes<A>) Store(gradients(i), to + i);
      Store(end, to + last);
      StorePartial(V{} - slope, to + label, 1);
    }
  }
}

// --- by dtype ------------------------------------------------------------------------------------

template <typename S>
S StorageOf(const S*);

void RunElements(const Elements& args) {
  WithStorage(args.dtype, nullptr, 0, [&](auto storage) {
    using S = decltype(StorageOf(storage));
    args.soft ? EvaluateElements<S, true>(args) : EvaluateElements<S, false>(args);
  });
}

void RunRows(const Rows& args) {
  WithStorage(args.dtype, nullptr, 0, [&](auto storage) {
    using S = decltype(StorageOf(storage));
    args.classes <= kMaxAcross ? EvaluateAcross<S>(args) : EvaluateAlong<S>(args);
  });
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
