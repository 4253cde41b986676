#include "cpu/lightweight_conv.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <new>
#include <vector>

#include "cpu/arrays.h"
#include "cpu/isa.h"
#include "cpu/lightweight_conv_kernels.h"

namespace jaxops::lightweight_conv::cpu {
namespace {

using jaxops::cpu::At;
using jaxops::cpu::CeilDiv;
using jaxops::cpu::ParallelFor;
using jaxops::cpu::RunTasks;

// Multiply-adds of a task, which take much longer than handing it to a thread.
constexpr int64_t kTaskCost = int64_t{1} << 21;

// The cost of loading, converting and storing an entry, in multiply-adds.
constexpr int64_t kEntryCost = 8;

// This bounds the memory for partial sums of filters whose taps are many relative to the steps.
constexpr int64_t kMaxSplits = 128;

JAXOPS_DEFINE_BEST_KERNELS();

int64_t ArithmeticSize(DType dtype) { return dtype == DType::kF64 ? 8 : 4; }

// Vectors are along channels with NTC and along time with NCT. With one channel or one step, both
// layouts are the same memory, and the other one fills the vectors.
Geometry FillVectors(Geometry geometry) {
  if (geometry.time == 1) {
    geometry.data_format = DataFormat::kNTC;
  } else if (geometry.channels == 1) {
    geometry.data_format = DataFormat::kNCT;
  }
  return geometry;
}

// A state is not the same memory in both layouts if a sequence of one step is, nor are states of
// slots.
Geometry FillVectors(const Forward& args) {
  const bool keeps = args.state != nullptr && (args.slots != nullptr || args.geometry.channels > 1);
  return keeps ? args.geometry : FillVectors(args.geometry);
}

// The blocks of one batch entry's sequence. A block fits in the caches; it has whole rows of memory
// if these fit, because contiguous accesses are the fastest.
struct Blocks {
  explicit Blocks(const Geometry& g) : geometry(g) {
    const int64_t span = std::min(kMaxTapSpan, (g.taps - 1) * g.dilation);
    if (g.data_format == DataFormat::kNTC) {
      // Each block loads the steps around it that its taps reach.
      steps_per_block = std::clamp<int64_t>(CeilDiv(2 * span, 32) * 32, 32, 256);
      channels_per_block =
          std::clamp<int64_t>(65536 / (steps_per_block + span) / 64 * 64, 64, kMaxBlockChannels);
    } else {
      steps_per_block = 1024;
      channels_per_block =
          std::clamp<int64_t>(8192 / std::clamp<int64_t>(g.time, 1, steps_per_block), 8, 64);
    }
    over_channels = CeilDiv(g.channels, channels_per_block);
    over_time = CeilDiv(g.time, steps_per_block);
  }

  Block At(int64_t channel_index, int64_t time_index) const {
    Block block;
    block.channel_begin = channel_index * channels_per_block;
    block.channel_end = std::min(block.channel_begin + channels_per_block, geometry.channels);
    block.time_begin = time_index * steps_per_block;
    block.time_end = std::min(block.time_begin + steps_per_block, geometry.time);
    return block;
  }

  // The largest block: its channels, padded to whole vectors, and its steps.
  int64_t width() const {
    return CeilDiv(std::min(channels_per_block, geometry.channels), kMaxLanes) * kMaxLanes;
  }
  int64_t steps() const { return std::min(steps_per_block, geometry.time); }
  int64_t cost() const {
    return std::min(channels_per_block, geometry.channels) * steps() * (geometry.taps + kEntryCost);
  }

  int64_t FirstHead(int64_t channel_index) const {
    return channel_index * channels_per_block / depth();
  }
  int64_t depth() const { return geometry.channels / geometry.heads; }

  // The number of heads of which a block has channels, at most.
  int64_t heads() const { return std::min(geometry.heads, (channels_per_block - 1) / depth() + 2); }

  Geometry geometry;
  int64_t channels_per_block;
  int64_t steps_per_block;
  int64_t over_channels;
  int64_t over_time;
};

// Cache-line aligned arrays of the arithmetic type in one allocation.
class Workspace {
 public:
  Workspace(DType dtype, std::initializer_list<int64_t> counts) : size_(ArithmeticSize(dtype)) {
    int64_t total = 0;
    for (int64_t count : counts) total += Bytes(count);
    memory_.reset(static_cast<std::byte*>(::operator new(total, kAlignment)));
  }

  void* Take(int64_t count) {
    void* taken = memory_.get() + used_;
    used_ += Bytes(count);
    return taken;
  }

 private:
  static constexpr std::align_val_t kAlignment{64};

  struct Delete {
    void operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }
  };

  int64_t Bytes(int64_t count) const { return CeilDiv(count * size_, 64) * 64; }

  int64_t size_;
  int64_t used_ = 0;
  std::unique_ptr<std::byte, Delete> memory_;
};

int64_t WindowSize(const Blocks& blocks) {
  const Geometry& g = blocks.geometry;
  const int64_t span = std::min(kMaxTapSpan, (g.taps - 1) * g.dilation);
  return blocks.width() * (blocks.steps() + span + 3 * kMaxLanes);
}

// The scratch of segments.
int64_t MarksSize(const Blocks& blocks) {
  const Geometry& g = blocks.geometry;
  const int64_t span = std::min(kMaxTapSpan, (g.taps - 1) * g.dilation);
  return 2 * blocks.steps() + span + 4 * kMaxLanes;
}
int64_t TableSize(const Blocks& blocks) {
  const Geometry& g = blocks.geometry;
  if (g.data_format != DataFormat::kNTC) return 0;
  return blocks.steps() * std::min(g.taps, 1 + kMaxTapSpan / g.dilation);
}

int64_t SumsSize(const Blocks& blocks) { return blocks.width() * (blocks.steps() + 8 * kMaxLanes); }

int64_t PackedWeightSize(const Blocks& blocks) { return blocks.width() * blocks.geometry.taps; }

// The packed weight of a channel block, packed again only if the block or the batch entry of the
// weight changes.
class PackedWeight {
 public:
  PackedWeight(const Kernels& kernels, const PackWeight& args) : kernels_(kernels), args_(args) {}

  const void* Get(const Block& block, const void* weight) {
    if (weight != args_.weight || block.channel_begin != args_.channel_begin || !packed_) {
      args_.weight = weight;
      args_.channel_begin = block.channel_begin;
      args_.channel_end = block.channel_end;
      kernels_.pack_weight(args_);
      packed_ = true;
    }
    return args_.packed;
  }

 private:
  const Kernels& kernels_;
  PackWeight args_;
  bool packed_ = false;
};

}  // namespace

void RunForward(const Forward& args, const ParallelFor& parallel_for) {
  const Blocks blocks(FillVectors(args));
  // Time varies fastest and channels slowest, so that a task packs few weights.
  const int64_t units = blocks.over_channels * args.batch.size() * blocks.over_time;
  if (units == 0) return;
  const int64_t tasks = std::min(units, CeilDiv(units * blocks.cost(), kTaskCost));
  const Kernels& kernels = BestKernels();

  RunTasks(tasks, parallel_for, [&](int64_t task) {
    Workspace workspace(args.dtype, {WindowSize(blocks), SumsSize(blocks), PackedWeightSize(blocks),
                                     args.starts != nullptr ? MarksSize(blocks) : 0,
                                     args.starts != nullptr ? TableSize(blocks) : 0});
    Convolve convolve = {};
    convolve.geometry = blocks.geometry;
    convolve.dtype = args.dtype;
    convolve.bias_dtype = args.bias_dtype;
    convolve.activation = args.activation;
    convolve.window = workspace.Take(WindowSize(blocks));
    convolve.sums = workspace.Take(SumsSize(blocks));
    PackWeight pack = {};
    pack.geometry = blocks.geometry;
    pack.dtype = args.dtype;
    pack.weight_dtype = args.weight_dtype;
    pack.flip_taps = args.flip_taps;
    pack.packed = workspace.Take(PackedWeightSize(blocks));
    PackedWeight weight(kernels, pack);
    Segments& segments = convolve.segments;
    segments.state_dtype = args.state_dtype;
    segments.num_slots = args.num_slots;
    if (args.starts != nullptr) {
      segments.marks = workspace.Take(MarksSize(blocks));
      segments.table = workspace.Take(TableSize(blocks));
    }

    const int64_t end = (task + 1) * units / tasks;
    for (int64_t unit = task * units / tasks; unit < end; ++unit) {
      const int64_t outer = unit / blocks.over_time;
      const int64_t n = outer % args.batch.size();
      convolve.block = blocks.At(outer / args.batch.size(), unit % blocks.over_time);
      convolve.packed_weight =
          weight.Get(convolve.block,
                     At(args.weight, args.batch.Offset(n, Forward::kWeight), args.weight_dtype));
      convolve.x = At(args.x, args.batch.Offset(n, Forward::kX), args.dtype);
      convolve.y = At(args.y, args.batch.Offset(n, Forward::kY), args.dtype);
      convolve.bias = args.bias == nullptr
                          ? nullptr
                          : At(args.bias, args.batch.Offset(n, Forward::kBias), args.bias_dtype);
      const auto steps = [&](const int32_t* of_batch, Forward::Operand operand) {
        return of_batch == nullptr ? nullptr : of_batch + args.batch.Offset(n, operand);
      };
      segments.starts = steps(args.starts, Forward::kStarts);
      segments.slots = steps(args.slots, Forward::kSlots);
      segments.state = At(args.state, args.batch.Offset(n, Forward::kState), args.state_dtype);
      kernels.convolve(convolve);
    }
  });
}

namespace {

// Partial sums of the kernel and bias gradients, by kept batch entry, channel block and split.
class Partials {
 public:
  Partials(const Blocks& blocks, int64_t kept, int64_t splits, DType dtype)
      : blocks_(blocks),
        splits_(splits),
        bytes_(ArithmeticSize(dtype)),
        dweight_size_(blocks.heads() * blocks.geometry.taps),
        size_(dweight_size_ + blocks.channels_per_block),
        memory_(new std::byte[kept * blocks.over_channels * splits * size_ * bytes_]) {}

  void* DWeight(int64_t kept, int64_t channel_index, int64_t split) const {
    return memory_.get() +
           ((kept * blocks_.over_channels + channel_index) * splits_ + split) * size_ * bytes_;
  }
  void* DBias(int64_t kept, int64_t channel_index, int64_t split) const {
    return static_cast<std::byte*>(DWeight(kept, channel_index, split)) + dweight_size_ * bytes_;
  }
  int64_t splits() const { return splits_; }

 private:
  const Blocks& blocks_;
  int64_t splits_;
  int64_t bytes_;
  int64_t dweight_size_;
  int64_t size_;
  std::unique_ptr<std::byte[]> memory_;
};

template <typename A>
void AddTo(std::vector<A>& sums, const void* terms, int64_t begin) {
  const A* from = static_cast<const A*>(terms) + begin;
  for (size_t i = 0; i < sums.size(); ++i) sums[i] += from[i];
}

// Adds the partial sums of one head and stores its rows of dweight and dbias.
template <typename A>
void CombineHead(const Backward& args, const Blocks& blocks, const Partials& partials,
                 const Kernels& kernels, int64_t kept, int64_t head) {
  const Geometry& g = blocks.geometry;
  const int64_t begin = head * blocks.depth();
  const int64_t end = begin + blocks.depth();
  std::vector<A> dweight(g.taps);
  for (int64_t channel = begin; channel < end;) {
    const int64_t index = channel / blocks.channels_per_block;
    const int64_t offset = channel % blocks.channels_per_block;
    const int64_t next = std::min(end, channel - offset + blocks.channels_per_block);
    std::vector<A> dbias(next - channel);
    for (int64_t split = 0; split < partials.splits(); ++split) {
      AddTo(dweight, partials.DWeight(kept, index, split),
            (head - blocks.FirstHead(index)) * g.taps);
      AddTo(dbias, partials.DBias(kept, index, split), offset);
    }
    if (args.dbias != nullptr) {
      kernels.store_sums({args.dtype, args.bias_dtype, next - channel, kept * g.channels + channel,
                          dbias.data(), args.dbias});
    }
    channel = next;
  }
  kernels.store_sums({args.dtype, args.weight_dtype, g.taps, (kept * g.heads + head) * g.taps,
                      dweight.data(), args.dweight});
}

// Zero has the same bits in every dtype.
void StoreZeros(void* to, int64_t count, DType dtype) {
  if (to == nullptr) return;
  std::fill_n(static_cast<std::byte*>(to), count * SizeOf(dtype), std::byte{0});
}

}  // namespace

void RunBackward(const Backward& args, const ParallelFor& parallel_for) {
  const Blocks blocks(FillVectors(args.geometry));
  const Geometry& g = blocks.geometry;
  const int64_t kept = args.kept.size();
  const int64_t units = args.summed.size() * blocks.over_time;
  if (kept * units * blocks.over_channels == 0) {
    StoreZeros(args.dweight, kept * g.heads * g.taps, args.weight_dtype);
    StoreZeros(args.dbias, kept * g.channels, args.bias_dtype);
    return;
  }
  const bool want_dx = args.dx != nullptr;
  const int64_t unit_cost = blocks.cost() * (want_dx ? 2 : 1);
  // The number of splits depends on the shapes alone, and so does the order of every sum.
  const int64_t splits = std::min({units, kMaxSplits, CeilDiv(units * unit_cost, kTaskCost)});
  const int64_t groups = kept * blocks.over_channels * splits;
  const int64_t groups_per_task =
      std::max<int64_t>(1, kTaskCost / (CeilDiv(units, splits) * unit_cost));
  const Partials partials(blocks, kept, splits, args.dtype);
  const Kernels& kernels = BestKernels();

  const int64_t dweight_size =
      g.taps * (g.data_format == DataFormat::kNTC ? blocks.width() : blocks.heads() * kMaxLanes);
  const int64_t dbias_size = blocks.width() * kMaxLanes;

  RunTasks(CeilDiv(groups, groups_per_task), parallel_for, [&](int64_t task) {
    Workspace workspace(
        args.dtype, {WindowSize(blocks), SumsSize(blocks), want_dx ? PackedWeightSize(blocks) : 0,
                     dweight_size, dbias_size, args.starts != nullptr ? MarksSize(blocks) : 0,
                     args.starts != nullptr ? TableSize(blocks) : 0});
    FilterGrad filter_grad = {};
    filter_grad.geometry = g;
    filter_grad.dtype = args.dtype;
    filter_grad.window = workspace.Take(WindowSize(blocks));
    filter_grad.cotangent = workspace.Take(SumsSize(blocks));
    // The input gradient is the convolution of g with the mirrored filter.
    Convolve convolve = {};
    convolve.geometry = g;
    convolve.geometry.padding = (g.taps - 1) * g.dilation - g.padding;
    convolve.dtype = args.dtype;
    convolve.activation = Activation::kNone;
    convolve.window = filter_grad.window;
    convolve.sums = filter_grad.cotangent;
    PackWeight pack = {};
    pack.geometry = g;
    pack.dtype = args.dtype;
    pack.weight_dtype = args.weight_dtype;
    pack.flip_taps = true;
    pack.packed = workspace.Take(want_dx ? PackedWeightSize(blocks) : 0);
    PackedWeight weight(kernels, pack);
    filter_grad.dweight = workspace.Take(dweight_size);
    filter_grad.dbias = workspace.Take(dbias_size);
    Segments segments = {};
    if (args.starts != nullptr) {
      segments.marks = workspace.Take(MarksSize(blocks));
      segments.table = workspace.Take(TableSize(blocks));
    }

    const int64_t end = std::min(groups, (task + 1) * groups_per_task);
    for (int64_t group = task * groups_per_task; group < end; ++group) {
      const int64_t split = group % splits;
      const int64_t channel_index = group / splits % blocks.over_channels;
      const int64_t i = group / splits / blocks.over_channels;
      std::fill_n(static_cast<std::byte*>(filter_grad.dweight),
                  dweight_size * ArithmeticSize(args.dtype), std::byte{0});
      std::fill_n(static_cast<std::byte*>(filter_grad.dbias),
                  dbias_size * ArithmeticSize(args.dtype), std::byte{0});

      const int64_t unit_end = (split + 1) * units / splits;
      for (int64_t unit = split * units / splits; unit < unit_end; ++unit) {
        const int64_t j = unit / blocks.over_time;
        const auto offset = [&](Backward::Operand operand) {
          return args.kept.Offset(i, operand) + args.summed.Offset(j, operand);
        };
        filter_grad.block = blocks.At(channel_index, unit % blocks.over_time);
        filter_grad.x = At(args.x, offset(Backward::kX), args.dtype);
        filter_grad.g = At(args.g, offset(Backward::kG), args.dtype);
        if (args.starts != nullptr) segments.starts = args.starts + offset(Backward::kStarts);
        filter_grad.segments = segments;
        kernels.filter_grad(filter_grad);
        if (want_dx) {
          convolve.block = filter_grad.block;
          convolve.segments = segments;
          convolve.x = filter_grad.g;
          convolve.y = At(args.dx, offset(Backward::kDx), args.dtype);
          convolve.packed_weight = weight.Get(
              convolve.block, At(args.weight, offset(Backward::kWeight), args.weight_dtype));
          kernels.convolve(convolve);
        }
      }
      const Block block = blocks.At(channel_index, 0);
      kernels.reduce_lanes({g, args.dtype, block.channel_begin, block.channel_end,
                            filter_grad.dweight, filter_grad.dbias,
                            partials.DWeight(i, channel_index, split),
                            partials.DBias(i, channel_index, split)});
    }
  });

  const int64_t rows = kept * g.heads;
  const int64_t row_cost = splits * (g.taps + blocks.depth());
  const int64_t row_tasks = std::min(rows, CeilDiv(rows * row_cost, kTaskCost));
  RunTasks(row_tasks, parallel_for, [&](int64_t task) {
    const int64_t end = (task + 1) * rows / row_tasks;
    for (int64_t row = task * rows / row_tasks; row < end; ++row) {
      if (args.dtype == DType::kF64) {
        CombineHead<double>(args, blocks, partials, kernels, row / g.heads, row % g.heads);
      } else {
        CombineHead<float>(args, blocks, partials, kernels, row / g.heads, row % g.heads);
      }
    }
  });
}

}  // namespace jaxops::lightweight_conv::cpu
