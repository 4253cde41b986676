#include "cpu/dynamic_conv.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "cpu/arrays.h"
#include "cpu/dynamic_conv_kernels.h"
#include "cpu/isa.h"

namespace jaxops::dynamic_conv::cpu {
namespace {

using jaxops::cpu::At;
using jaxops::cpu::CeilDiv;
using jaxops::cpu::ParallelFor;
using jaxops::cpu::RunTasks;

// Multiply-adds of a task, which take much longer than handing it to a thread.
constexpr int64_t kTaskCost = int64_t{1} << 21;

// The cost of loading, converting and storing an entry, in multiply-adds.
constexpr int64_t kEntryCost = 8;

// This bounds the panels of weights, so that they stay in the caches if any block's can.
constexpr int64_t kMaxWeights = int64_t{1} << 16;

// Channels that are computed at a time: whole cache lines of every dtype, and few enough for their
// panels to stay in the caches.
constexpr int64_t kWidth = 64;

// Entries of a level 1 cache for the rows of a step's taps.
constexpr int64_t kRowsCache = 6144;

JAXOPS_DEFINE_BEST_KERNELS();

int64_t RoundUp(int64_t n) { return CeilDiv(n, kMaxLanes) * kMaxLanes; }

// The blocks of one batch entry. A block has whole heads.
struct Blocks {
  explicit Blocks(const Geometry& g) : geometry(g) {
    const int64_t depth = std::max<int64_t>(1, g.channels / g.heads);
    // Fewer channels would read partial cache lines, fewer taps partial vectors.
    heads = std::clamp<int64_t>(std::max(kWidth / depth, CeilDiv(kMaxLanes, g.taps)), 1, g.heads);
    const int64_t reach = std::min((g.taps - 1) * g.dilation, g.time);
    steps = std::clamp<int64_t>(RoundUp(2 * reach), 256, 1024);
    steps = std::clamp<int64_t>(kMaxWeights / g.taps / kMaxLanes * kMaxLanes, kMaxLanes, steps);
    heads = std::clamp<int64_t>(kMaxWeights / (g.taps * steps), 1, heads);
    // Without steps there are no blocks, of any size.
    steps = std::clamp<int64_t>(RoundUp(g.time), 1, steps);
    over_heads = CeilDiv(g.heads, heads);
    over_time = CeilDiv(g.time, steps);
    width = std::min(kWidth, heads * depth);
  }

  // Blocks for vectors of channels: the rows that taps read at a step stay in the first cache.
  static Blocks OfRows(const Geometry& g) {
    Blocks blocks(g);
    const int64_t depth = std::max<int64_t>(1, g.channels / g.heads);
    const int64_t channels = kRowsCache / (g.taps + 1);
    blocks.heads = std::clamp<int64_t>(channels / depth, 1, g.heads);
    blocks.over_heads = CeilDiv(g.heads, blocks.heads);
    blocks.steps = std::clamp<int64_t>(RoundUp(g.time), 1, std::max<int64_t>(64, kMaxLanes));
    blocks.over_time = CeilDiv(g.time, blocks.steps);
    blocks.width = blocks.heads * depth;
    return blocks;
  }

  Block At(int64_t index) const {
    Block block;
    block.head_begin = index % over_heads * heads;
    block.head_end = std::min(geometry.heads, block.head_begin + heads);
    block.time_begin = index / over_heads * steps;
    block.time_end = std::min(geometry.time, block.time_begin + steps);
    return block;
  }

  int64_t count() const { return geometry.channels == 0 ? 0 : over_heads * over_time; }
  int64_t cost() const {
    return heads * (geometry.channels / geometry.heads) * steps * (geometry.taps + kEntryCost);
  }

  Geometry geometry;
  int64_t heads;  // of a block, as are `steps`
  int64_t steps;
  int64_t width;  // channels at a time
  int64_t over_heads;
  int64_t over_time;
};

enum class Pass { kForward, kForwardRows, kBackward };

// The scratch memory of a task, in one allocation that is aligned to cache lines.
class TaskScratch {
 public:
  TaskScratch(const Blocks& blocks, DType dtype, int64_t before, Pass pass)
      : item_(dtype == DType::kF64 ? 8 : 4) {
    const Geometry& g = blocks.geometry;
    const int64_t steps = blocks.steps, taps = blocks.heads * g.taps;
    const int64_t width = RoundUp(blocks.width);
    const int64_t reach = (g.taps - 1) * g.dilation;
    const int64_t read = std::min(steps + reach, g.time + before);
    const bool rows = pass == Pass::kForwardRows;
    scratch_.width = blocks.width;
    // An odd number of vectors between panels keeps them from competing for the same cache sets.
    scratch_.pitch = (CeilDiv(read + 3 * kMaxLanes, kMaxLanes) | 1) * kMaxLanes;
    const int64_t panels = rows ? 0 : taps * (steps + 2 * kMaxLanes);
    const int64_t window = !rows                ? width * scratch_.pitch
                           : SizeOf(dtype) == 2 ? width * read
                                                : width * std::min(read, before);
    const int64_t vectors = CeilDiv(steps * int64_t{sizeof(VectorTaps)}, item_);
    // The second loop takes what the first one has counted.
    for (int i = 0; i < 2; ++i) {
      used_ = 0;
      scratch_.tile = Take((taps + kMaxLanes) * kMaxLanes);
      scratch_.weight = Take(panels);
      scratch_.window = Take(window);
      scratch_.sums = Take(rows ? width : width * (steps + kMaxLanes));
      scratch_.ascending = {Take(steps), Take(steps), static_cast<VectorTaps*>(Take(vectors))};
      if (pass == Pass::kBackward) {
        scratch_.probabilities = Take(g.normalize ? panels : 0);
        scratch_.dweight = Take(panels);
        scratch_.cotangent = Take(window);
        scratch_.descending = {Take(steps), Take(steps), static_cast<VectorTaps*>(Take(vectors))};
      }
      if (i == 0) memory_.reset(static_cast<std::byte*>(::operator new(used_, kAlignment)));
    }
  }

  const Scratch& get() const { return scratch_; }

 private:
  static constexpr std::align_val_t kAlignment{64};

  struct Delete {
    void operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }
  };

  void* Take(int64_t count) {
    void* taken = memory_ ? memory_.get() + used_ : nullptr;
    used_ += CeilDiv(count * item_, 64) * 64;
    return taken;
  }

  int64_t item_;
  int64_t used_ = 0;
  std::unique_ptr<std::byte, Delete> memory_;
  Scratch scratch_ = {};
};

// Calls run(block index, batch entry, scratch) for all blocks of all batch entries. A task has
// neighbouring ones: heads vary fastest, so that it reads whole rows.
template <typename F>
void RunBlocks(const Blocks& blocks, int64_t entries, int64_t cost, DType dtype, int64_t before,
               Pass pass, const ParallelFor& parallel_for, F run) {
  const int64_t units = blocks.count() * entries;
  if (units == 0) return;
  const int64_t tasks = std::min(units, CeilDiv(units * cost, kTaskCost));
  RunTasks(tasks, parallel_for, [&](int64_t task) {
    const TaskScratch scratch(blocks, dtype, before, pass);
    const int64_t end = (task + 1) * units / tasks;
    for (int64_t unit = task * units / tasks; unit < end; ++unit) {
      run(blocks.At(unit % blocks.count()), unit / blocks.count(), scratch.get());
    }
  });
}

const int32_t* AtStarts(const int32_t* starts, int64_t offset) {
  return starts == nullptr ? nullptr : starts + offset;
}

}  // namespace

void RunForward(const Forward& args, const ParallelFor& parallel_for) {
  const Kernels& kernels = BestKernels();
  const Geometry& g = args.geometry;
  const int64_t lanes = args.dtype == DType::kF64 ? kernels.lanes / 2 : kernels.lanes;
  const bool rows = g.data_format == DataFormat::kNTC && g.channels / g.heads % lanes == 0;
  const Blocks blocks = rows ? Blocks::OfRows(g) : Blocks(g);
  RunBlocks(blocks, args.batch.size(), blocks.cost(), args.dtype,
            args.state == nullptr ? 0 : g.padding, rows ? Pass::kForwardRows : Pass::kForward,
            parallel_for, [&](const Block& block, int64_t n, const Scratch& scratch) {
              Forward entry = args;
              const auto offset = [&](Forward::Operand i) { return args.batch.Offset(n, i); };
              entry.x = At(args.x, offset(Forward::kX), args.dtype);
              entry.weight = At(args.weight, offset(Forward::kWeight), args.weight_dtype);
              entry.bias = At(args.bias, offset(Forward::kBias), args.bias_dtype);
              entry.starts = AtStarts(args.starts, offset(Forward::kStarts));
              entry.state = At(args.state, offset(Forward::kState), args.state_dtype);
              entry.y = At(args.y, offset(Forward::kY), args.dtype);
              (rows ? kernels.forward_rows : kernels.forward)({&entry, block, scratch});
            });
}

void RunBackward(const Backward& args, const ParallelFor& parallel_for) {
  const Geometry& g = args.geometry;
  const int64_t entries = args.batch.size();
  if (g.channels == 0 && args.dweight != nullptr) {
    // The sum over no channels. Zero has the same bits in every dtype.
    const int64_t size = entries * g.time * g.heads * g.taps * SizeOf(args.dweight_dtype);
    std::fill_n(static_cast<std::byte*>(args.dweight), size, std::byte{0});
  }
  const Kernels& kernels = BestKernels();
  const Blocks blocks(g);
  const int64_t cost = blocks.cost() * (args.dx != nullptr && args.dweight != nullptr ? 2 : 1);
  RunBlocks(blocks, entries, cost, args.dtype, 0, Pass::kBackward, parallel_for,
            [&](const Block& block, int64_t n, const Scratch& scratch) {
              Backward entry = args;
              const auto offset = [&](Backward::Operand i) { return args.batch.Offset(n, i); };
              entry.x = At(args.x, offset(Backward::kX), args.dtype);
              entry.weight = At(args.weight, offset(Backward::kWeight), args.weight_dtype);
              entry.g = At(args.g, offset(Backward::kG), args.dtype);
              entry.starts = AtStarts(args.starts, offset(Backward::kStarts));
              entry.dx = At(args.dx, offset(Backward::kDx), args.dtype);
              entry.dweight = At(args.dweight, offset(Backward::kDWeight), args.dweight_dtype);
              kernels.backward({&entry, block, scratch});
            });
}

}  // namespace jaxops::dynamic_conv::cpu
