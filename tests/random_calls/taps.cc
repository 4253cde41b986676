#include "cpu/taps.h"

#include "tests/random_calls/calls.h"

namespace jaxops::random_calls {
namespace {

Call Make(Random& random, Arrays& arrays) {
  taps::Call call = {};
  Batch<taps::Call::kOperands> batch(random, {});
  batch.SetVaries(taps::Call::kGradient, static_cast<uint32_t>(random.Bits()));
  taps::Geometry& g = call.geometry;
  g.axes = static_cast<int>(random.Between(1, taps::kMaxAxes));
  g.taps = static_cast<int>(random.Between(1, g.axes == 1 ? 64 : g.axes == 2 ? 8 : 4));
  g.combinations = 1;
  g.points_minor = random.OneIn(2);
  int64_t volume = g.width = random.Size();
  for (int a = 0; a < g.axes; ++a) {
    g.combinations *= g.taps;
    g.sizes[a] = random.Between(random.OneIn(20) ? 0 : 1, 9);
    volume *= g.sizes[a];
  }
  g.points = random.OneIn(60)  ? random.Between(4'000, 20'000)
             : random.OneIn(3) ? random.Size()
                               : random.Between(0, 9);
  call.dtype = random.Float();
  const DType arithmetic = ArithmeticOf(call.dtype);
  const int64_t row = g.points * g.width, weights = g.points * g.taps;
  call.indices = arrays.Integers(batch.Entries(call.kIndices) * weights * g.axes, 0, 8);
  for (int a = 0; a < g.axes; ++a) {
    call.weights[a] = arrays.Floats(batch.Entries(call.kWeights + a) * weights, arithmetic);
  }
  const int64_t wanted = random.Below(3);
  if (wanted != 1) call.volume = arrays.Floats(batch.Entries(call.kVolume) * volume, call.dtype);
  if (wanted != 0) {
    call.cotangent = arrays.Floats(batch.Entries(call.kCotangent) * row, call.dtype);
  }
  call.gradients = 1;
  if (wanted == 0) call.out = arrays.Result(batch.size() * row, call.dtype);
  if (wanted == 1) {
    call.gradients = batch.Entries(call.kGradient);
    call.dvolume = arrays.Result(call.gradients * volume, call.dtype);
  }
  if (wanted == 2) {
    for (int a = 0; a < g.axes; ++a) {
      call.dweights[a] = arrays.Result(batch.size() * weights, arithmetic);
    }
  }
  call.batch = batch.Map({volume, weights * g.axes, row, volume, weights, weights, weights});
  return [call](const cpu::ParallelFor& run) { taps::cpu::RunTaps(call, run); };
}

const Registration kRegistration("taps", Make);

}  // namespace

}  // namespace jaxops::random_calls
