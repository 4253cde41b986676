#include "cpu/trilinear.h"

#include "tests/random_calls/calls.h"

namespace jaxops::random_calls {
namespace {

Call Make(Random& random, Arrays& arrays) {
  trilinear::Call call = {};
  call.width = random.Size();
  Batch<trilinear::Call::kOperands> batch(random, {});
  batch.Enlarge(random, trilinear::kCorners * call.width);
  call.dtype = random.Float();
  call.point_dtype = random.FloatWith(call.dtype);
  call.order = static_cast<int>(random.OneIn(2) ? 0 : random.Between(0, 3));
  const int64_t features = trilinear::kCorners * call.width;
  const bool wants_out = random.OneIn(2), wants_dfeatures = !wants_out && random.OneIn(2);
  const bool wants_dpoints = !wants_out && (!wants_dfeatures || random.OneIn(2));
  const auto read = [&](int operand, int64_t elements, DType dtype) {
    return arrays.Floats(batch.Entries(operand) * elements, dtype);
  };
  call.points = read(call.kPoints, trilinear::kAxes, call.point_dtype);
  if (wants_out || wants_dpoints) call.features = read(call.kFeatures, features, call.dtype);
  if (wants_out) {
    call.out = arrays.Result(batch.size() * call.width, call.dtype);
  } else {
    call.cotangent = read(call.kCotangent, call.width, call.dtype);
  }
  if (wants_dfeatures) call.dfeatures = arrays.Result(batch.size() * features, call.dtype);
  if (wants_dpoints) {
    call.dpoints = arrays.Result(batch.size() * trilinear::kAxes, call.point_dtype);
  }
  for (int i = 0; i < call.order; ++i) {
    call.directions[i] = read(call.kDirections + i, trilinear::kAxes, call.point_dtype);
  }
  call.cells = batch.Map({features, 3, call.width, 3, 3, 3});
  return [call](const cpu::ParallelFor& run) { trilinear::cpu::RunCells(call, run); };
}

const Registration kRegistration("trilinear", Make);

}  // namespace

}  // namespace jaxops::random_calls
