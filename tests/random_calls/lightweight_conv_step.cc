#include "cpu/lightweight_conv_step.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "tests/random_calls/calls.h"

namespace jaxops::random_calls {
namespace {

using lightweight_conv_step::Step;

// Different slots, and numbers that are none, which may repeat.
template <typename Index>
void SetIndices(Random& random, Index* indices, int64_t entries, int64_t slots) {
  std::vector<int64_t> order(slots);
  std::iota(order.begin(), order.end(), 0);
  for (int64_t i = slots - 1; i > 0; --i) std::swap(order[i], order[random.Below(i + 1)]);
  constexpr auto kFar = std::numeric_limits<Index>();
  for (int64_t i = 0; i < entries; ++i) {
    const auto none = random.Pick({kFar.min(), kFar.max(), Index(-1), static_cast<Index>(slots)});
    indices[i] = i < slots && !random.OneIn(5) ? static_cast<Index>(order[i]) : none;
  }
}

Call Make(Random& random, Arrays& arrays) {
  Step call = {};
  Batch<Step::kOperands> batch(random, {Step::kY, Step::kNewState});
  call.entries = random.Size();
  call.steps = random.Between(0, 5);
  call.heads = random.Size(1);
  call.channels = call.heads * random.Between(random.OneIn(8) ? 0 : 1, random.OneIn(4) ? 40 : 3);
  call.taps = random.Between(1, random.OneIn(8) ? 40 : 6);
  call.dilation = random.OneIn(2) ? 1 : random.Between(1, 4);
  call.reach = (call.taps - 1) * call.dilation;
  call.dtype = random.Float();
  call.state_dtype = random.FloatWith(call.dtype);
  call.weight_dtype = random.FloatWith(call.dtype);
  call.bias_dtype = random.FloatWith(call.dtype);
  call.activation = random.AnyActivation();
  const bool is_dynamic = random.OneIn(2);
  call.normalize = is_dynamic && random.OneIn(2);
  const int64_t filter = call.heads * call.taps;
  call.weight_step = is_dynamic ? filter : 0;
  call.weight_entry = call.steps * call.weight_step;
  const int64_t filters = is_dynamic ? call.entries * call.steps * filter : filter;
  const bool has_indices = random.OneIn(2);
  call.slots = has_indices ? random.Size() : call.entries;
  const int64_t size = call.entries * call.steps * call.channels;
  const int64_t state = call.slots * call.reach * call.channels;
  const bool is_in_place = random.OneIn(2);
  if (is_in_place) batch.SetVaries(Step::kState, ~uint32_t{0});
  call.x = arrays.Floats(batch.Entries(Step::kX) * size, call.dtype);
  if (is_in_place) {
    call.state = call.new_state = arrays.State(batch.size() * state, call.state_dtype);
  } else {
    call.state = arrays.Floats(batch.Entries(Step::kState) * state, call.state_dtype);
    call.new_state = arrays.Result(batch.size() * state, call.state_dtype);
  }
  call.weight = arrays.Floats(batch.Entries(Step::kWeight) * filters, call.weight_dtype);
  if (random.OneIn(2)) {
    call.bias = arrays.Floats(batch.Entries(Step::kBias) * call.channels, call.bias_dtype);
  }
  if (has_indices) {
    call.has_wide_indices = random.OneIn(2);
    const int64_t lists = batch.Entries(Step::kIndices);
    char* const indices =
        static_cast<char*>(arrays.Bytes(lists * call.entries, call.has_wide_indices ? 8 : 4));
    for (int64_t i = 0; i < lists; ++i) {
      if (call.has_wide_indices) {
        SetIndices(random, reinterpret_cast<int64_t*>(indices) + i * call.entries, call.entries,
                   call.slots);
      } else {
        SetIndices(random, reinterpret_cast<int32_t*>(indices) + i * call.entries, call.entries,
                   call.slots);
      }
    }
    call.indices = indices;
  }
  call.y = arrays.Result(batch.size() * size, call.dtype);
  call.batch = batch.Map({size, state, filters, call.channels, call.entries, size, state});
  return [call](const cpu::ParallelFor& run) { lightweight_conv_step::cpu::RunStep(call, run); };
}

const Registration kRegistration("lightweight_conv_step", Make);

}  // namespace

}  // namespace jaxops::random_calls
