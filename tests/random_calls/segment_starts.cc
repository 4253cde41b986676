#include "cpu/segment_starts.h"

#include "tests/random_calls/calls.h"

namespace jaxops::random_calls {
namespace {

Call Make(Random& random, Arrays& arrays) {
  segment_starts::Call call = {};
  Batch<segment_starts::Call::kOperands> batch(random, {segment_starts::Call::kStarts});
  call.time = IsLarge(random) ? random.Between(10'000, 300'000) : random.Size();
  call.first = static_cast<int32_t>(-random.Below(9));
  call.id_bytes = random.Pick({1, 2, 4, 8});
  call.ids = arrays.Bytes(batch.Entries(segment_starts::Call::kIds) * call.time, call.id_bytes);
  call.starts = static_cast<int32_t*>(arrays.Result(batch.size() * call.time, sizeof(int32_t)));
  call.batch = batch.Map({call.time, call.time});
  return [call](const cpu::ParallelFor& run) { segment_starts::cpu::RunSegmentStarts(call, run); };
}

const Registration kRegistration("segment_starts", Make);

}  // namespace
}  // namespace jaxops::random_calls
