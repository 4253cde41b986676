#include "cpu/grid_sample.h"

#include "tests/random_calls/calls.h"

namespace jaxops::random_calls {
namespace {

Call Make(Random& random, Arrays& arrays) {
  using grid_sample::Method;
  using grid_sample::Padding;
  grid_sample::Call call = {};
  Batch<grid_sample::Call::kOperands> batch(random, {});
  batch.SetVaries(grid_sample::Call::kGradient, static_cast<uint32_t>(random.Bits()));
  grid_sample::Geometry& g = call.geometry;
  g.axes = static_cast<int>(random.Between(1, 3));
  for (int a = 0; a < g.axes; ++a) {
    g.sizes[a] = static_cast<int32_t>(random.Between(random.OneIn(20) ? 0 : 1, 9));
  }
  // Many points share the sums of the volume's gradient.
  const bool has_many = random.OneIn(60);
  g.width = has_many ? random.Between(1, 4) : random.Size();
  g.points = has_many ? random.Between(20'000, 60'000) : random.Size();
  g.method = random.OneIn(4) ? Method::kNearest : Method::kLinear;
  g.padding = random.Pick({Padding::kZeros, Padding::kBorder, Padding::kReflection});
  g.align_corners = random.OneIn(2);
  g.pixel = random.OneIn(3);
  g.points_minor = random.OneIn(2);
  call.dtype = random.Float();
  call.point_dtype = random.FloatWith(call.dtype);
  call.order = static_cast<int>(random.OneIn(2) ? 0 : random.Between(0, 3));
  call.deterministic = random.OneIn(2);
  const int64_t volume = g.grid() * g.width, row = g.points * g.width, points = g.points * g.axes;
  const bool wants_out = random.OneIn(2), wants_dvolume = !wants_out && random.OneIn(2);
  const bool wants_dpoints = !wants_out && (!wants_dvolume || random.OneIn(2));
  call.points = arrays.Floats(batch.Entries(call.kPoints) * points, call.point_dtype);
  if (wants_out || wants_dpoints) {
    call.volume = arrays.Floats(batch.Entries(call.kVolume) * volume, call.dtype);
  }
  if (wants_out) {
    call.out = arrays.Result(batch.size() * row, call.dtype);
  } else {
    call.cotangent = arrays.Floats(batch.Entries(call.kCotangent) * row, call.dtype);
  }
  call.gradients = 1;
  if (wants_dvolume) {
    call.gradients = batch.Entries(call.kGradient);
    call.dvolume = arrays.Result(call.gradients * volume, call.dtype);
  }
  if (wants_dpoints) call.dpoints = arrays.Result(batch.size() * points, call.point_dtype);
  for (int i = 0; i < call.order; ++i) {
    call.directions[i] =
        arrays.Floats(batch.Entries(call.kDirections + i) * points, call.point_dtype);
  }
  call.batch = batch.Map({volume, points, row, volume, points, points, points});
  return [call](const cpu::ParallelFor& run) { grid_sample::cpu::RunSample(call, run); };
}

const Registration kRegistration("grid_sample", Make);

}  // namespace

}  // namespace jaxops::random_calls
