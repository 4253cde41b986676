#include "cpu/focal_loss.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <type_traits>
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

// Logits whose targets and factors are written to buffers at a time: these stay in the L1 cache.
constexpr int64_t kTile = 1024;

// Logits of a task, which takes much longer than handing it to a thread.
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

// Adds the sums of the tasks of each batch entry, in task order; A is the arithmetic type.
template <typename A, typename Call>
void StoreSums(const Call& args, const std::vector<double>& sums, int64_t splits) {
  if (args.sum == nullptr) return;
  const GradualUnderflow exact;
  for (int64_t i = 0; i < args.batch.size(); ++i) {
    const auto first = sums.begin() + i * splits;
    const double total = std::accumulate(first, first + splits, 0.0);
    static_cast<A*>(args.sum)[args.batch.Offset(i, Call::kSum)] = static_cast<A>(total);
  }
}

// One batch entry of a sigmoid loss; A is the arithmetic type.
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
    constexpr DType kArithmetic = std::is_same_v<A, double> ? DType::kF64 : DType::kF32;
    const DType dtype = args_.target_type == TargetType::kLogits ? args_.dtype : kArithmetic;
    if (args_.target_type == TargetType::kBool) {
      const auto* from = static_cast<const uint8_t*>(args_.labels) + labels_ + begin;
      std::transform(from, from + count, target, [](uint8_t y) { return y != 0 ? A(1) : A(0); });
    } else if (dtype == DType::kF64) {
      std::copy_n(static_cast<const double*>(args_.labels) + labels_ + begin, count, target);
    } else {
      kernels.widen({dtype, count, At(args_.labels, labels_ + begin, dtype), target});
    }
    std::fill_n(target + count, kMaxLanes, A(0));
    return target;
  }

  // Writes the factors of elements [begin, end), and the targets of hard labels. With few classes
  // much of the time is spent here, so no loop branches on a label.
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
      // Compilers vectorise this loop, which has no stores to addresses that labels choose.
      const auto only_class = static_cast<int32_t>(first_class_);
      for (int64_t i = 0; i < size; ++i) target[i] = labels[begin + i] == only_class ? A(1) : A(0);
    } else {
      ForRows(begin, end, [&](int64_t row, int64_t first) {
        const int64_t position = int64_t{labels[row]} - first_class_;
        const int64_t hit = first + position;
        const bool is_here = position >= 0 && position < args_.classes && hit >= 0 && hit < size;
        target[is_here ? hit : size] = A(1);  // nothing reads entries after the last target
      });
    }
    if (!args_.has_ignored) return;
    ForRows(begin, end, [&](int64_t row, int64_t first) {
      if (labels[row] == args_.ignored) FillRow(A(kIgnored), first, size, target);
    });
  }

  // Calls f(row, first) for every row that intersects the elements [begin, end); `first` is the
  // index of its first element relative to `begin`, and may be negative.
  template <typename F>
  void ForRows(int64_t begin, int64_t end, F f) const {
    int64_t row = begin / args_.classes;
    for (int64_t first = row * args_.classes - begin; first < end - begin; ++row) {
      f(row, first);
      first += args_.classes;
    }
  }

  // Writes a value to those entries of a row that are in [0, size).
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

// Returns the batch entries of a task: several if an entry is smaller than a task, 1 if `splits`
// tasks share an entry.
int64_t EntriesPerTask(int64_t splits, int64_t task_size, int64_t entry_size) {
  return splits == 1 ? std::max<int64_t>(1, task_size / entry_size) : 1;
}

template <typename A>
void RunSigmoidAs(const Sigmoid& args, const ParallelFor& parallel_for) {
  const int64_t entries = args.batch.size();
  const int64_t size = args.rows * args.classes;
  const int64_t splits = CeilDiv(size, kTask);
  const int64_t task_entries = EntriesPerTask(splits, kTask, size);
  std::vector<double> sums(args.sum == nullptr ? 0 : entries * splits);
  Run(CeilDiv(entries, task_entries) * splits, parallel_for, [&](int64_t task) {
    const int64_t begin = task % splits * kTask;
    const int64_t first = task / splits * task_entries;
    for (int64_t i = first; i < std::min(entries, first + task_entries); ++i) {
      const SigmoidEntry<A> entry(args, i);
      const double sum = entry.Compute(BestKernels(), begin, std::min(size, begin + kTask));
      if (args.sum != nullptr) sums[i * splits + task % splits] = sum;
    }
  });
  StoreSums<A>(args, sums, splits);
}

// The rows of a softmax's task: some rows of one batch entry, or all rows of several. A is the
// arithmetic type.
template <typename A>
class SoftmaxTask {
 public:
  // The task has rows [begin, begin + rows) of batch entries, at most `entries` of them.
  SoftmaxTask(const Softmax& args, int64_t begin, int64_t rows, int64_t entries)
      : args_(args), begin_(begin), rows_(rows), factor_(entries * rows) {
    if (args.sum != nullptr) losses_.resize(entries * rows);
  }

  // Computes entries [first, last); sums[i * stride] becomes the sum of entry i.
  void Compute(int64_t first, int64_t last, double* sums, int64_t stride) {
    while (first < last) {
      int64_t end = first + 1;
      while (end < last && Follows(end)) ++end;
      ComputeTogether(first, end);
      if (args_.sum != nullptr) {
        for (auto loss = losses_.begin(); first < end; ++first, loss += rows_) {
          sums[first * stride] = std::accumulate(loss, loss + rows_, 0.0);
        }
      }
      first = end;
    }
  }

 private:
  const A* ArrayOf(const void* base, Softmax::Operand operand, int64_t entry) const {
    return static_cast<const A*>(base) + args_.batch.Offset(entry, operand);
  }
  A Gamma(int64_t entry) const { return *ArrayOf(args_.gamma, Softmax::kGamma, entry); }

  // Returns whether the rows of an entry directly follow those of the entry before, with the same
  // exponent.
  bool Follows(int64_t entry) const {
    const auto step = [&](Softmax::Operand operand) {
      return args_.batch.Offset(entry, operand) - args_.batch.Offset(entry - 1, operand);
    };
    const int64_t size = rows_ * args_.classes;
    return step(Softmax::kLogits) == size && step(Softmax::kLabels) == rows_ &&
           (args_.gradient == nullptr || step(Softmax::kResult) == size) &&
           (args_.loss == nullptr || step(Softmax::kResult) == rows_) &&
           Gamma(entry) == Gamma(entry - 1);
  }

  // Computes entries that directly follow each other.
  void ComputeTogether(int64_t first, int64_t last) {
    A* factor = factor_.data();
    for (int64_t entry = first; entry < last; ++entry, factor += rows_) {
      const A scale = args_.scale == nullptr ? A(1) : *ArrayOf(args_.scale, Softmax::kScale, entry);
      std::fill_n(factor, rows_, scale);
      if (args_.weight == nullptr) continue;
      const A* weight = ArrayOf(args_.weight, Softmax::kWeight, entry) + begin_;
      for (int64_t row = 0; row < rows_; ++row) factor[row] *= weight[row];
    }
    Rows rows = {};
    rows.dtype = args_.dtype;
    rows.power = args_.power;
    rows.gamma = Gamma(first);
    rows.rows = (last - first) * rows_;
    rows.classes = args_.classes;
    const int64_t skipped = begin_ * args_.classes;
    const int64_t logits = args_.batch.Offset(first, Softmax::kLogits) + skipped;
    rows.logits = At(args_.logits, logits, args_.dtype);
    rows.labels = args_.labels + args_.batch.Offset(first, Softmax::kLabels) + begin_;
    rows.factor = factor_.data();
    const int64_t result = args_.batch.Offset(first, Softmax::kResult);
    rows.gradient = At(args_.gradient, result + skipped, args_.dtype);
    if (args_.sum != nullptr) {
      rows.loss = losses_.data();
    } else if (args_.loss != nullptr) {
      rows.loss = static_cast<A*>(args_.loss) + result + begin_;
    }
    BestKernels().rows(rows);
  }

  const Softmax& args_;
  int64_t begin_;
  int64_t rows_;
  std::vector<A> factor_;
  std::vector<A> losses_;  // used if only their sum is wanted
};

template <typename A>
void RunSoftmaxAs(const Softmax& args, const ParallelFor& parallel_for) {
  const int64_t entries = args.batch.size();
  const int64_t task_rows =
      std::max<int64_t>(kMaxLanes, kTask / std::max<int64_t>(1, args.classes));
  const int64_t splits = CeilDiv(args.rows, task_rows);
  const int64_t task_entries = EntriesPerTask(splits, task_rows, args.rows);
  std::vector<double> sums(args.sum == nullptr ? 0 : entries * splits);
  Run(CeilDiv(entries, task_entries) * splits, parallel_for, [&](int64_t task) {
    const int64_t split = task % splits;
    const int64_t begin = split * task_rows;
    const int64_t first = task / splits * task_entries;
    const int64_t last = std::min(entries, first + task_entries);
    SoftmaxTask<A> rows(args, begin, std::min(task_rows, args.rows - begin), last - first);
    rows.Compute(first, last, args.sum == nullptr ? nullptr : &sums[split], splits);
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
