#include "cpu/lightweight_conv.h"

#include "tests/random_calls/calls.h"

namespace jaxops::random_calls {
namespace {

using lightweight_conv::Backward;
using lightweight_conv::Forward;
using lightweight_conv::Geometry;

Geometry AnyGeometry(Random& random) {
  Geometry g;
  const bool is_long = random.OneIn(40);
  g.time = is_long ? random.Between(400, 2600) : random.Size();
  g.heads = is_long ? random.Between(1, 4) : random.Size(1);
  g.channels = g.heads * random.Between(random.OneIn(8) ? 0 : 1, random.OneIn(4) ? 40 : 3);
  g.taps = random.OneIn(6) ? random.Between(1, is_long ? 600 : 70) : random.Between(1, 9);
  g.dilation = random.OneIn(2) ? 1 : random.Between(1, 8);
  g.padding = random.Between(0, (g.taps - 1) * g.dilation);
  g.data_format = random.Pick({DataFormat::kNTC, DataFormat::kNCT});
  return g;
}

// The slots of the segments of `starts`: one number for all steps of a segment.
const int32_t* Slots(Arrays& arrays, const int32_t* starts, int64_t entries, int64_t time,
                     int64_t slots) {
  int32_t* const found = arrays.Integers(entries * time, 0, slots);
  for (int64_t i = 0; i < entries; ++i) {
    for (int64_t t = 1; t < time; ++t) {
      const int64_t at = i * time + t;
      if (starts[at] == starts[at - 1]) found[at] = found[at - 1];
    }
  }
  return found;
}

Call MakeForward(Random& random, Arrays& arrays) {
  Forward call = {};
  const Geometry g = call.geometry = AnyGeometry(random);
  Batch<Forward::kOperands> batch(random, {Forward::kY});
  batch.Enlarge(random, g.time * g.channels);
  call.dtype = random.Float();
  call.weight_dtype = random.FloatWith(call.dtype);
  call.bias_dtype = random.FloatWith(call.dtype);
  call.state_dtype = random.FloatWith(call.dtype);
  call.activation = random.AnyActivation();
  call.flip_taps = random.OneIn(3);
  const int64_t size = g.time * g.channels, state = g.padding * g.channels;
  call.x = arrays.Floats(batch.Entries(Forward::kX) * size, call.dtype);
  call.weight =
      arrays.Floats(batch.Entries(Forward::kWeight) * g.heads * g.taps, call.weight_dtype);
  if (random.OneIn(2)) {
    call.bias = arrays.Floats(batch.Entries(Forward::kBias) * g.channels, call.bias_dtype);
  }
  // Slots belong to segments, and vary along the same dimensions here.
  Batch<Forward::kOperands> all = batch;
  if (random.OneIn(2)) {
    call.starts = AllStarts(random, arrays, batch.Entries(Forward::kStarts), g.time);
  }
  call.num_slots = 1;
  if (call.starts != nullptr && g.data_format == DataFormat::kNTC && random.OneIn(2)) {
    const int64_t entries = batch.size();
    all.SetVaries(Forward::kStarts, ~uint32_t{0});
    all.SetVaries(Forward::kSlots, ~uint32_t{0});
    call.starts = AllStarts(random, arrays, entries, g.time);
    call.num_slots = random.Between(0, 4);
    call.slots = Slots(arrays, call.starts, entries, g.time, call.num_slots);
  }
  if (call.slots != nullptr || random.OneIn(2)) {
    call.state =
        arrays.Floats(all.Entries(Forward::kState) * call.num_slots * state, call.state_dtype);
  }
  call.y = arrays.Result(all.size() * size, call.dtype);
  call.batch =
      all.Map({size, g.heads * g.taps, g.channels, g.time, call.num_slots * state, g.time, size});
  return [call](const cpu::ParallelFor& run) { lightweight_conv::cpu::RunForward(call, run); };
}

Call MakeBackward(Random& random, Arrays& arrays) {
  Backward call = {};
  const Geometry g = call.geometry = AnyGeometry(random);
  Batch<Backward::kOperands> batch(random, {Backward::kDx});
  batch.Enlarge(random, g.time * g.channels);
  // Filters vary along the dimensions that their gradient keeps, at most.
  const auto kept = static_cast<uint32_t>(random.Bits());
  batch.SetVaries(Backward::kWeight, kept & static_cast<uint32_t>(random.Bits()));
  call.dtype = random.Float();
  call.weight_dtype = random.FloatWith(call.dtype);
  call.bias_dtype = random.FloatWith(call.dtype);
  const int64_t size = g.time * g.channels, filters = g.heads * g.taps;
  call.x = arrays.Floats(batch.Entries(Backward::kX) * size, call.dtype);
  call.g = arrays.Floats(batch.Entries(Backward::kG) * size, call.dtype);
  if (random.OneIn(2)) {
    call.starts = AllStarts(random, arrays, batch.Entries(Backward::kStarts), g.time);
  }
  if (random.OneIn(2)) {
    call.weight = arrays.Floats(batch.Entries(Backward::kWeight) * filters, call.weight_dtype);
    call.dx = arrays.Result(batch.size() * size, call.dtype);
  }
  call.kept = batch.Map({size, filters, size, g.time, size}, kept);
  call.summed = batch.Map({size, filters, size, g.time, size}, ~kept);
  call.dweight = arrays.Result(call.kept.size() * filters, call.weight_dtype);
  if (random.OneIn(2)) {
    call.dbias = arrays.Result(call.kept.size() * g.channels, call.bias_dtype);
  }
  return [call](const cpu::ParallelFor& run) { lightweight_conv::cpu::RunBackward(call, run); };
}

Call Make(Random& random, Arrays& arrays) {
  return (random.OneIn(2) ? MakeForward : MakeBackward)(random, arrays);
}

const Registration kRegistration("lightweight_conv", Make);

}  // namespace

}  // namespace jaxops::random_calls
