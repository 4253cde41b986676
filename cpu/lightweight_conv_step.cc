#include "cpu/lightweight_conv_step.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "cpu/arrays.h"
#include "cpu/isa.h"
#include "cpu/lightweight_conv_step_kernels.h"

namespace jaxops::lightweight_conv_step::cpu {
namespace {

using jaxops::cpu::At;
using jaxops::cpu::CeilDiv;
using jaxops::cpu::ParallelFor;
using jaxops::cpu::RunTasks;

// Multiply-adds of a task, which take much longer than handing it to a thread.
constexpr int64_t kTaskCost = int64_t{1} << 20;

// The cost of loading, converting and storing an entry, in multiply-adds.
constexpr int64_t kEntryCost = 8;

// Bytes that a task copies.
constexpr int64_t kTaskBytes = 256 * 1024;

JAXOPS_DEFINE_BEST_KERNELS();

// Copies the state of each batch entry.
void CopySlots(const Step& call, const ParallelFor& parallel_for) {
  const int64_t bytes = call.slots * call.reach * call.channels * SizeOf(call.state_dtype);
  const int64_t pieces = CeilDiv(bytes, kTaskBytes);
  RunTasks(call.batch.size() * pieces, parallel_for, [&](int64_t task) {
    const int64_t n = task / pieces;
    const int64_t begin = task % pieces * kTaskBytes;
    const void* from = At(call.state, call.batch.Offset(n, Step::kState), call.state_dtype);
    void* to = At(call.new_state, call.batch.Offset(n, Step::kNewState), call.state_dtype);
    std::memcpy(static_cast<std::byte*>(to) + begin, static_cast<const std::byte*>(from) + begin,
                std::min(kTaskBytes, bytes - begin));
  });
}

// Cache-line aligned memory, on the stack if it is little: a step of one sequence takes a few
// microseconds.
class Memory {
 public:
  explicit Memory(int64_t bytes)
      : memory_(bytes > kOwnBytes ? ::operator new(bytes, kAlignment) : nullptr) {}
  void* get() { return memory_ == nullptr ? own_ : memory_.get(); }

 private:
  static constexpr int64_t kOwnBytes = 16 * 1024;
  static constexpr std::align_val_t kAlignment{64};

  struct Delete {
    void operator()(void* memory) const { ::operator delete(memory, kAlignment); }
  };

  alignas(64) std::byte own_[kOwnBytes];
  std::unique_ptr<void, Delete> memory_;
};

}  // namespace

void RunStep(const Step& call, const ParallelFor& parallel_for) {
  if (call.copies_slots()) CopySlots(call, parallel_for);
  const int64_t block = std::min(call.channels, kMaxBlockChannels);
  if (block == 0) return;
  // Channels vary slowest, so that entries which share filters have them packed once a task.
  const int64_t rows = call.batch.size() * call.entries;
  const int64_t units = CeilDiv(call.channels, block) * rows;
  if (units == 0) return;
  const int64_t filter_cost = call.weight_step == 0 ? 0 : call.steps * call.taps;
  const int64_t cost =
      block * (call.steps * (call.taps + kEntryCost) + call.reach * 2 + filter_cost);
  const int64_t tasks = std::min(units, CeilDiv(units * cost, kTaskCost));
  const Kernels& kernels = BestKernels();
  const bool packs = rows > 1 || !CanReadFilters(call);

  RunTasks(tasks, parallel_for, [&](int64_t task) {
    const int64_t item = call.dtype == DType::kF64 ? 8 : 4;
    const int64_t filters_of_block = call.weight_step == 0 ? 1 : call.steps;
    Memory packed(kMaxBlockChannels * (filters_of_block * call.taps + 1) * item);
    Memory normalized(call.normalize ? kMaxBlockChannels * call.taps * item : 0);
    Filters filters{call, -1, 0, nullptr, nullptr, packed.get(), normalized.get()};
    const int64_t end = (task + 1) * units / tasks;
    for (int64_t unit = task * units / tasks; unit < end; ++unit) {
      const int64_t n = unit % rows / call.entries;
      const int64_t entry = unit % call.entries;
      const int64_t begin = unit / rows * block;
      const int64_t filter = call.batch.Offset(n, Step::kWeight) + entry * call.weight_entry;
      const void* weight = At(call.weight, filter, call.weight_dtype);
      const void* bias = call.bias == nullptr
                             ? nullptr
                             : At(call.bias, call.batch.Offset(n, Step::kBias), call.bias_dtype);
      const int64_t slot = call.SlotOf(n, entry);
      const bool reads = !packs && slot >= 0;
      if (filters.channel_begin != begin || filters.weight != weight || filters.bias != bias) {
        filters.channel_begin = begin;
        filters.channel_end = std::min(begin + block, call.channels);
        filters.weight = weight;
        filters.bias = bias;
        if (!reads) kernels.pack_filters(filters);
      }
      const int64_t row = entry * call.steps * call.channels;
      // Any negative number is no slot, also one that may not be multiplied.
      const int64_t at = std::max<int64_t>(slot, 0) * call.reach * call.channels;
      const int64_t state = call.batch.Offset(n, Step::kState) + at;
      const int64_t new_state = call.batch.Offset(n, Step::kNewState) + at;
      kernels.step({call, begin, filters.channel_end, reads ? nullptr : packed.get(), weight,
                    At(call.x, call.batch.Offset(n, Step::kX) + row, call.dtype),
                    slot < 0 ? nullptr : At(call.state, state, call.state_dtype),
                    At(call.y, call.batch.Offset(n, Step::kY) + row, call.dtype),
                    slot < 0 ? nullptr : At(call.new_state, new_state, call.state_dtype)});
    }
  });
}

}  // namespace jaxops::lightweight_conv_step::cpu
