#include "ffi/trilinear.h"

#include <array>

namespace jaxops::ffi::trilinear {
namespace {

namespace xf = xla::ffi;
using jaxops::trilinear::kAxes;
using jaxops::trilinear::kCorners;

constexpr char kName[] = "trilinear_interpolate";

// Whether a buffer has so many batch dimensions, and the core dimensions after them.
bool Fits(const xf::AnyBuffer* buffer, size_t rank, std::initializer_list<int64_t> core) {
  if (buffer == nullptr) return true;
  const Dimensions dims = buffer->dimensions();
  if (dims.size() != rank + core.size()) return false;
  size_t i = rank;
  for (int64_t n : core) {
    if (dims[i++] != n) return false;
  }
  return true;
}

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
  call.order = static_cast<int>(directions.size());
  if (call.order > multilinear::kMaxDirections) {
    return InvalidArgument(kName, ": at most ", multilinear::kMaxDirections, " directions, got ",
                           call.order);
  }
  const bool fits = Fits(buffers.features, rank, {kCorners, call.width}) &&
                    Fits(&points, rank, {kAxes}) && Fits(&row, rank, {call.width}) &&
                    Fits(buffers.dfeatures, rank, {kCorners, call.width}) &&
                    Fits(buffers.dpoints, rank, {kAxes});
  if (!fits) {
    return InvalidArgument(
        kName, ": shapes do not fit: points are ", ToString(points.dimensions()), ", got ",
        ToString(row.dimensions()),
        buffers.features ? " and " + ToString(buffers.features->dimensions()) : std::string());
  }
  JAXOPS_RETURN_IF_ERROR(SetType(call.dtype, kName, "features", row));
  JAXOPS_RETURN_IF_ERROR(SetType(call.point_dtype, kName, "points", points));
  const auto data = [](const xf::AnyBuffer* buffer) {
    return buffer == nullptr ? nullptr : buffer->untyped_data();
  };
  call.features = data(buffers.features);
  call.points = points.untyped_data();
  call.cotangent = data(buffers.cotangent);
  call.out = data(buffers.out);
  call.dfeatures = data(buffers.dfeatures);
  call.dpoints = data(buffers.dpoints);

  // Operands that are not there take the place of the points, whose offsets they then never use.
  std::array<BatchOperand, Call::kOperands> operands;
  operands.fill({points.dimensions(), 1});
  if (buffers.features) operands[Call::kFeatures] = {buffers.features->dimensions(), 2};
  if (buffers.cotangent) operands[Call::kCotangent] = {buffers.cotangent->dimensions(), 1};
  for (int i = 0; i < call.order; ++i) {
    const xf::ErrorOr<xf::AnyBuffer> direction = directions.get<xf::AnyBuffer>(i);
    if (!direction) return direction.error();
    if (!Fits(&*direction, rank, {kAxes}) || direction->element_type() != points.element_type()) {
      return InvalidArgument(kName, ": a direction must be like points, ",
                             ToString(points.dimensions()), ", got ",
                             ToString(direction->dimensions()));
    }
    call.directions[i] = direction->untyped_data();
    operands[Call::kDirections + i] = {direction->dimensions(), 1};
  }
  const bool held =
      BuildBatchMap<Call::kOperands>(call.cells, operands, rank, [](size_t) { return true; });
  if (!held) {
    return InvalidArgument(kName, ": more than ", kMaxBatchDims,
                           " alternations of batched and unbatched dimensions in nested vmaps");
  }
  return xf::Error::Success();
}

}  // namespace jaxops::ffi::trilinear
