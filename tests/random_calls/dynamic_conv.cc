#include "cpu/dynamic_conv.h"

#include "tests/random_calls/calls.h"

namespace jaxops::random_calls {
namespace {

using dynamic_conv::Backward;
using dynamic_conv::Forward;
using dynamic_conv::Geometry;

Geometry AnyGeometry(Random& random) {
  Geometry g;
  g.time = random.OneIn(40) ? random.Between(250, 1300) : random.Size();
  g.heads = random.Between(1, g.time > 200 ? 2 : 9);
  g.channels = g.heads * random.Between(random.OneIn(8) ? 0 : 1, random.OneIn(4) ? 40 : 3);
  g.taps = random.OneIn(6) ? random.Between(1, 40) : random.Between(1, 9);
  g.dilation = random.OneIn(2) ? 1 : random.Between(1, 5);
  g.padding = random.Between(0, (g.taps - 1) * g.dilation);
  g.data_format = random.Pick({DataFormat::kNTC, DataFormat::kNCT});
  g.normalize = random.OneIn(2);
  return g;
}

Call MakeForward(Random& random, Arrays& arrays) {
  Forward call = {};
  const Geometry g = call.geometry = AnyGeometry(random);
  Batch<Forward::kOperands> batch(random, {Forward::kY});
  batch.Enlarge(random, g.time * (g.heads * g.taps + g.channels));
  call.dtype = random.Float();
  call.weight_dtype = random.FloatWith(call.dtype);
  call.bias_dtype = random.FloatWith(call.dtype);
  call.state_dtype = random.FloatWith(call.dtype);
  call.activation = random.AnyActivation();
  const int64_t size = g.time * g.channels, filters = g.time * g.heads * g.taps;
  const int64_t state = g.padding * g.channels;
  call.x = arrays.Floats(batch.Entries(Forward::kX) * size, call.dtype);
  call.weight = arrays.Floats(batch.Entries(Forward::kWeight) * filters, call.weight_dtype);
  if (random.OneIn(2)) {
    call.bias = arrays.Floats(batch.Entries(Forward::kBias) * g.channels, call.bias_dtype);
  }
  if (random.OneIn(2)) {
    call.starts = AllStarts(random, arrays, batch.Entries(Forward::kStarts), g.time);
  }
  if (random.OneIn(2)) {
    call.state = arrays.Floats(batch.Entries(Forward::kState) * state, call.state_dtype);
  }
  call.y = arrays.Result(batch.size() * size, call.dtype);
  call.batch = batch.Map({size, filters, g.channels, g.time, state, size});
  return [call](const cpu::ParallelFor& run) { dynamic_conv::cpu::RunForward(call, run); };
}

Call MakeBackward(Random& random, Arrays& arrays) {
  Backward call = {};
  const Geometry g = call.geometry = AnyGeometry(random);
  Batch<Backward::kOperands> batch(random, {Backward::kDx, Backward::kDWeight});
  batch.Enlarge(random, g.time * (g.heads * g.taps + g.channels));
  call.dtype = random.Float();
  call.weight_dtype = random.FloatWith(call.dtype);
  call.dweight_dtype = random.FloatWith(call.dtype);
  const int64_t size = g.time * g.channels, filters = g.time * g.heads * g.taps;
  const bool wants_dx = random.OneIn(2), wants_dweight = !wants_dx || random.OneIn(2);
  call.g = arrays.Floats(batch.Entries(Backward::kG) * size, call.dtype);
  if (wants_dweight) {
    call.x = arrays.Floats(batch.Entries(Backward::kX) * size, call.dtype);
    call.dweight = arrays.Result(batch.size() * filters, call.dweight_dtype);
  }
  if (wants_dx || g.normalize) {
    call.weight = arrays.Floats(batch.Entries(Backward::kWeight) * filters, call.weight_dtype);
  }
  if (wants_dx) call.dx = arrays.Result(batch.size() * size, call.dtype);
  if (random.OneIn(2)) {
    call.starts = AllStarts(random, arrays, batch.Entries(Backward::kStarts), g.time);
  }
  call.batch = batch.Map({size, filters, size, g.time, size, filters});
  return [call](const cpu::ParallelFor& run) { dynamic_conv::cpu::RunBackward(call, run); };
}

Call Make(Random& random, Arrays& arrays) {
  return (random.OneIn(2) ? MakeForward : MakeBackward)(random, arrays);
}

const Registration kRegistration("dynamic_conv", Make);

}  // namespace

}  // namespace jaxops::random_calls
