#include "cpu/focal_loss.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

#include "cpu/arrays.h"
#include "cpu/focal_loss_kernels.h"
#include "cpu/gradual_underflow.h"
#include "cpu/isa.h"

namespace jaxops::focal_loss::cpu {
namespace {

using jaxops::cpu::At;
using jaxops::cpu::CeilDiv;
using jaxops::cpu::GradualUnderflow;
using jaxops::cpu::ParallelFor;

// Logits whose targets and factors are written out at a time: they stay in the L1 cache.
constexpr int64_t kTile = 1024;

// Logits that make a task long beside what it costs to hand it to a thread.
constexpr int64_t kTask = 16 * kTile;

// Vector loads may reach this far past the end of an array.
constexpr int64_t kMaxLanes = 16;

JAXOPS_DEFINE_BEST_KERNELS();

void Run(int64_t tasks, const ParallelFor& parallel_for, const std::function<void(int64_t)>& task) {
  jaxops::cpu::RunTasks(tasks, parallel_for, [&](int64_t i) {
    const GradualUnderflow exact;
    task(i);
  });
}

// Adds up the sums of the tasks of each batch entry, in their order; A is the arithmetic type.
template <typename A, typename Call>
void StoreSums(const Call& args, const std::vector<double>& sums, int64_t splits) {
  if (args.sum == nullptr) return;
  for (int64_t i = 0; i < args.batch.size(); ++i) {
    const auto first = sums.begin() + i * splits;
    const double total = std::accumulate(first, first + splits, 0.0);
    static_cast<A*>(args.sum)[args.batch.Offset(i, Call::kSum)] = static_cast<A>(total);
  }
}

// One batch entry; A is the arithmetic type.
template <typename A>
class SigmoidEntry {
 public:
  SigmoidEntry(const Sigmoid& args, int64_t entry)
      : args_(args),
        logits_(args.batch.Offset(entry, Sigmoid::kLogits)),
        labels_(args.batch.Offset(entry, Sigmoid::kLabels)),
        elements_(args.batch.Offset(entry, Sigmoid::kElements)) {
    if (args.weight != nullptr) {
      weight_ = static_cast<const A*>(args.weight) + args.batch.Offset(entry, Sigmoid::kWeight);
    }
    if (args.classes > 0) {
      first_class_ = args.class_ids[args.batch.Offset(entry, Sigmoid::kClassIds)] - kFirstClassId;
    }
    scale_ = static_cast<const A*>(args.scale)[args.batch.Offset(entry, Sigmoid::kScale)];
    parameters_ =
        static_cast<const A*>(args.parameters) + args.batch.Offset(entry, Sigmoid::kParameters);
  }

  // Computes elements [begin, end) and returns the sum of their losses.
  double Compute(const Kernels& kernels, int64_t begin, int64_t end) const {
    A target[kTile + kMaxLanes], factor[kTile + kMaxLanes];
    double total = 0;
    for (int64_t tile = begin; tile < end; tile += kTile) {
      const int64_t tile_end = std::min(tile + kTile, end);
      const A* targets = args_.soft ? SoftTargets(kernels, tile, tile_end, target) : target;
      FillRows(tile, tile_end, target, factor);
      Elements elements = {};
      elements.dtype = args_.dtype;
      elements.power = args_.power;
      elements.gamma = parameters_[0];
      elements.negative = parameters_[1];
      elements.positive = parameters_[2];
      elements.count = tile_end - tile;
      elements.logits = At(args_.logits, logits_ + tile, args_.dtype);
      elements.soft = args_.soft;
      elements.target = targets;
      elements.factor = factor;
      elements.loss = At(args_.loss, elements_ + tile, args_.dtype);
      elements.gradient = At(args_.gradient, elements_ + tile, args_.dtype);
      double sum = 0;
      elements.sum = args_.sum == nullptr ? nullptr : &sum;
      kernels.elements(elements);
      total += sum;
    }
    return total;
  }

 private:
  const A* SoftTargets(const Kernels& kernels, int64_t begin, int64_t end, A* target) const {
    const int64_t count = end - begin;
    const void* from = At(args_.labels, labels_ + begin, args_.label_dtype);
    if (args_.label_dtype == DType::kF64) {
      std::copy_n(static_cast<const double*>(from), count, target);
    } else {
      kernels.widen({args_.label_dtype, count, from, target});
    }
    std::fill_n(target + count, kMaxLanes, A(0));
    return target;
  }

  // Writes out the factors of elements [begin, end), and the targets of hard labels. With few
  // classes much of the time goes here, hence no branch on a label.
  void FillRows(int64_t begin, int64_t end, A* target, A* factor) const {
    const int64_t size = end - begin;
    if (weight_ == nullptr) {
      std::fill_n(factor, size + kMaxLanes, scale_);
    } else {
      ForRows(begin, end, [&](int64_t row, int64_t first) {
        const A weight = scale_ * weight_[row];
        FillRow(weight, first, size, factor);
      });
      std::fill_n(factor + size, kMaxLanes, scale_);
    }
    if (args_.soft) return;
    const int32_t* labels = static_cast<const int32_t*>(args_.labels) + labels_;
    std::fill_n(target, size + kMaxLanes, A(0));
    if (args_.classes == 1) {
      // A loop without stores to where a label says, which compilers vectorise.
      const auto only_class = static_cast<int32_t>(first_class_);
      for (int64_t i = 0; i < size; ++i) target[i] = labels[begin + i] == only_class ? A(1) : A(0);
    } else {
      ForRows(begin, end, [&](int64_t row, int64_t first) {
        const int64_t position = int64_t{labels[row]} - first_class_;
        const int64_t hit = first + position;
        const bool is_here = position >= 0 && position < args_.classes && hit >= 0 && hit < size;
        target[is_here ? hit : size] = A(1);  // what follows the last target counts for nothing
      });
    }
    if (!args_.has_ignored) return;
    ForRows(begin, end, [&](int64_t row, int64_t first) {
      if (labels[row] == args_.ignored) FillRow(A(kIgnored), first, size, target);
    });
  }

  // Calls f(row, first) for every row that has some of the elements [begin, end), with the place of
  // its first element among them, which may be before them.
  template <typename F>
  void ForRows(int64_t begin, int64_t end, F f) const {
    int64_t row = begin / args_.classes;
    for (int64_t first = row * args_.classes - begin; first < end - begin; ++row) {
      f(row, first);
      first += args_.classes;
    }
  }

  // Writes a value to the entries of a row, as far as these are among the first `size`.
  void FillRow(A value, int64_t first, int64_t size, A* entries) const {
    const int64_t to = std::min(first + args_.classes, size);
    for (int64_t i = std::max<int64_t>(first, 0); i < to; ++i) entries[i] = value;
  }

  const Sigmoid& args_;
  int64_t logits_;
  int64_t labels_;
  int64_t elements_;
  const A* weight_ = nullptr;
  int64_t first_class_ = 0;
  A scale_;
  const A* parameters_;
};

template <typename A>
void RunSigmoidAs(const Sigmoid& args, const ParallelFor& parallel_for) {
  const int64_t entries = args.batch.size();
  const int64_t size = args.rows * args.classes;
  const int64_t splits = CeilDiv(size, kTask);
  std::vector<double> sums(args.sum == nullptr ? 0 : entries * splits);
  Run(entries * splits, parallel_for, [&](int64_t task) {
    const int64_t begin = task % splits * kTask;
    const SigmoidEntry<A> entry(args, task / splits);
    const double sum = entry.Compute(BestKernels(), begin, std::min(size, begin + kTask));
    if (args.sum != nullptr) sums[task] = sum;
  });
  StoreSums<A>(args, sums, splits);
}

// A is the arithmetic type.
template <typename A>
void RunSoftmaxAs(const Softmax& args, const ParallelFor& parallel_for) {
  const Kernels& kernels = BestKernels();
  const int64_t entries = args.batch.size();
  const int64_t task_rows =
      std::max<int64_t>(kMaxLanes, kTask / std::max<int64_t>(1, args.classes));
  const int64_t splits = CeilDiv(args.rows, task_rows);
  std::vector<double> sums(args.sum == nullptr ? 0 : entries * splits);
  Run(entries * splits, parallel_for, [&](int64_t task) {
    const int64_t entry = task / splits;
    const int64_t begin = task % splits * task_rows;
    const auto at = [&](const void* base, Softmax::Operand operand, int64_t element = 0) {
      return static_cast<const A*>(base) + args.batch.Offset(entry, operand) + element;
    };
    Rows rows = {};
    rows.dtype = args.dtype;
    rows.power = args.power;
    rows.gamma = *at(args.gamma, Softmax::kGamma);
    rows.rows = std::min(task_rows, args.rows - begin);
    rows.classes = args.classes;
    const int64_t logits = args.batch.Offset(entry, Softmax::kLogits) + begin * args.classes;
    rows.logits = At(args.logits, logits, args.dtype);
    rows.labels = args.labels + args.batch.Offset(entry, Softmax::kLabels) + begin;
    std::vector<A> factor(rows.rows,
                          args.scale == nullptr ? A(1) : *at(args.scale, Softmax::kScale));
    if (args.weight != nullptr) {
      const A* weight = at(args.weight, Softmax::kWeight, begin);
      for (int64_t row = 0; row < rows.rows; ++row) factor[row] *= weight[row];
    }
    rows.factor = factor.data();
    const int64_t result = args.batch.Offset(entry, Softmax::kResult);
    rows.gradient = At(args.gradient, result + begin * args.classes, args.dtype);
    std::vector<A> losses(args.sum == nullptr ? 0 : rows.rows);
    if (args.sum != nullptr) {
      rows.loss = losses.data();
    } else if (args.loss != nullptr) {
      rows.loss = static_cast<A*>(args.loss) + result + begin;
    }
    kernels.rows(rows);
    if (args.sum != nullptr) sums[task] = std::accumulate(losses.begin(), losses.end(), 0.0);
  });
  StoreSums<A>(args, sums, splits);
}

}  // namespace

void RunSigmoid(const Sigmoid& args, const ParallelFor& parallel_for) {
  if (args.dtype == DType::kF64) {
    RunSigmoidAs<double>(args, parallel_for);
  } else {
    RunSigmoidAs<float>(args, parallel_for);
  }
}

void RunSoftmax(const Softmax& args, const ParallelFor& parallel_for) {
  if (args.dtype == DType::kF64) {
    RunSoftmaxAs<double>(args, parallel_for);
  } else {
    RunSoftmaxAs<float>(args, parallel_for);
  }
}

}  // namespace jaxops::focal_loss::cpu
