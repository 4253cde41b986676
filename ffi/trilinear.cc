#include "ffi/trilinear.h"

#include <algorithm>
#include <array>
#include <initializer_list>

namespace jaxops::ffi::trilinear {
namespace {

namespace xf = xla::ffi;
using jaxops::trilinear::kAxes;
using jaxops::trilinear::kCorners;

constexpr char kName[] = "trilinear_interpolate";

}  // namespace

xf::Error Decode(Call& call, const Buffers& buffers, xf::RemainingArgs directions) {
  const xf::AnyBuffer& points = *buffers.points;
  // Whatever there is of the shape (..., features).
  const xf::AnyBuffer& row = buffers.out ? *buffers.out : *buffers.cotangent;
  if (points.dimensions().size() == 0 || row.dimensions().size() == 0) {
    return InvalidArgument(kName, ": points and results must have a dimension");
  }
  const size_t rank = points.dimensions().size() - 1;
  call.width = row.dimensions().back();
  const xf::DataType type = row.element_type();
  const xf::DataType point_type = points.element_type();
  JAXOPS_RETURN_IF_ERROR(SetType(call.dtype, kName, "features", row));
  JAXOPS_RETURN_IF_ERROR(SetType(call.point_dtype, kName, "points", points));
  if (call.point_dtype == DType::kF64 && call.dtype != DType::kF64) {
    return InvalidArgument(kName, ": points are f64, which features then must be too");
  }
  if (directions.size() > multilinear::kMaxDirections) {
    return InvalidArgument(kName, ": at most ", multilinear::kMaxDirections, " directions, got ",
                           directions.size());
  }
  call.order = static_cast<int>(directions.size());
  // Operands and results that are not there take the place of the points, whose offsets they then
  // never use.
  std::array<BatchOperand, Call::kOperands + 3> batch;
  batch.fill({points.dimensions(), 1});
  const auto set = [&](size_t place, const char* what, const xf::AnyBuffer* buffer,
                       std::initializer_list<int64_t> core, xf::DataType expected,
                       BatchOperand::Kind kind) {
    if (buffer == nullptr) return xf::Error::Success();
    batch[place] = {buffer->dimensions(), core.size(), kind};
    return CheckBuffer(kName, what, *buffer, rank, core, expected);
  };
  constexpr auto kRead = BatchOperand::kRead, kWritten = BatchOperand::kWritten;
  constexpr size_t kResults = Call::kOperands;
  JAXOPS_RETURN_IF_ERROR(set(Call::kPoints, "points", &points, {kAxes}, point_type, kRead));
  JAXOPS_RETURN_IF_ERROR(
      set(Call::kFeatures, "features", buffers.features, {kCorners, call.width}, type, kRead));
  JAXOPS_RETURN_IF_ERROR(
      set(Call::kCotangent, "cotangent", buffers.cotangent, {call.width}, type, kRead));
  JAXOPS_RETURN_IF_ERROR(set(kResults, "result", buffers.out, {call.width}, type, kWritten));
  JAXOPS_RETURN_IF_ERROR(set(kResults + 1, "features' gradient", buffers.dfeatures,
                             {kCorners, call.width}, type, kWritten));
  JAXOPS_RETURN_IF_ERROR(
      set(kResults + 2, "points' gradient", buffers.dpoints, {kAxes}, point_type, kWritten));
  const auto data = [](const xf::AnyBuffer* buffer) {
    return buffer == nullptr ? nullptr : buffer->untyped_data();
  };
  call.features = data(buffers.features);
  call.points = points.untyped_data();
  call.cotangent = data(buffers.cotangent);
  call.out = data(buffers.out);
  call.dfeatures = data(buffers.dfeatures);
  call.dpoints = data(buffers.dpoints);

  for (int i = 0; i < call.order; ++i) {
    const xf::ErrorOr<xf::AnyBuffer> direction = directions.get<xf::AnyBuffer>(i);
    if (!direction) return direction.error();
    JAXOPS_RETURN_IF_ERROR(
        set(Call::kDirections + i, "direction", &*direction, {kAxes}, point_type, kRead));
    call.directions[i] = direction->untyped_data();
  }
  JAXOPS_RETURN_IF_ERROR(CheckBatch(kName, batch, rank));
  std::array<BatchOperand, Call::kOperands> operands;
  std::copy_n(batch.begin(), operands.size(), operands.begin());
  return BuildBatchMap<Call::kOperands>(kName, call.cells, operands, rank,
                                        [](size_t) { return true; });
}

}  // namespace jaxops::ffi::trilinear
