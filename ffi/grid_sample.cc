#include "ffi/grid_sample.h"

#include <array>

namespace jaxops::ffi::grid_sample {
namespace {

namespace xf = xla::ffi;
using jaxops::grid_sample::Geometry;
using jaxops::grid_sample::kMaxAxes;
using jaxops::grid_sample::kMaxSize;
using jaxops::grid_sample::Method;
using jaxops::grid_sample::Padding;

constexpr char kName[] = "grid_sample";

xf::Error Misfit(const char* what, const xf::AnyBuffer& points, const xf::AnyBuffer& other) {
  return InvalidArgument(kName, ": ", what, " does not fit: points are ",
                         ToString(points.dimensions()), ", got ", ToString(other.dimensions()));
}

// Whether two buffers agree in their dimensions from `begin` on, but for so many at the end.
bool Agree(const xf::AnyBuffer& a, const xf::AnyBuffer& b, size_t begin, size_t without) {
  if (a.dimensions().size() != b.dimensions().size()) return false;
  for (size_t i = begin; i + without < a.dimensions().size(); ++i) {
    if (a.dimensions()[i] != b.dimensions()[i]) return false;
  }
  return true;
}

}  // namespace

xf::Error Decode(Call& call, const Attributes& attributes, const Buffers& buffers,
                 xf::RemainingArgs directions, const xf::RemainingRets* scratch) {
  const xf::AnyBuffer& points = *buffers.points;
  // Whatever there is of the shapes (..., points, channels) and (..., grid, channels).
  const xf::AnyBuffer& row = buffers.out ? *buffers.out : *buffers.cotangent;
  const xf::AnyBuffer& volume = buffers.volume ? *buffers.volume : *buffers.dvolume;
  const size_t point_rank = attributes.point_rank;
  if (points.dimensions().size() < point_rank + 1) {
    return InvalidArgument(kName, ": points must have ", attributes.point_rank,
                           " dimensions and one of coordinates, got ",
                           ToString(points.dimensions()));
  }
  const size_t rank = points.dimensions().size() - 1 - point_rank;
  Geometry& geometry = call.geometry;
  geometry.axes = static_cast<int>(points.dimensions().back());
  if (geometry.axes < 2 || geometry.axes > kMaxAxes) return Misfit("points", points, points);
  if (volume.dimensions().size() != rank + geometry.axes + 1) {
    return Misfit("volume", points, volume);
  }
  for (int a = 0; a < geometry.axes; ++a) {
    const int64_t size = volume.dimensions()[rank + a];
    if (size > kMaxSize)
      return InvalidArgument(kName, ": an axis has at most ", kMaxSize, " entries");
    geometry.sizes[a] = static_cast<int32_t>(size);
  }
  geometry.width = volume.dimensions().back();
  geometry.points = 1;
  for (size_t i = 0; i < point_rank; ++i) geometry.points *= points.dimensions()[rank + i];
  geometry.method = static_cast<Method>(attributes.method);
  geometry.padding = static_cast<Padding>(attributes.padding_mode);
  geometry.align_corners = attributes.align_corners;
  if (!Agree(points, row, rank, 1) || row.dimensions().back() != geometry.width) {
    return Misfit("the value or its cotangent", points, row);
  }
  if (buffers.dvolume && !Agree(volume, *buffers.dvolume, rank, 0)) {
    return Misfit("the gradient by volume", points, *buffers.dvolume);
  }
  if (buffers.dpoints && !Agree(points, *buffers.dpoints, rank, 0)) {
    return Misfit("the gradient by points", points, *buffers.dpoints);
  }
  call.order = static_cast<int>(directions.size());
  if (call.order > multilinear::kMaxDirections) {
    return InvalidArgument(kName, ": at most ", multilinear::kMaxDirections, " directions, got ",
                           call.order);
  }
  JAXOPS_RETURN_IF_ERROR(SetType(call.dtype, kName, "volume", volume));
  JAXOPS_RETURN_IF_ERROR(SetType(call.point_dtype, kName, "points", points));
  call.deterministic = attributes.deterministic;
  const auto data = [](const xf::AnyBuffer* buffer) {
    return buffer == nullptr ? nullptr : buffer->untyped_data();
  };
  call.volume = data(buffers.volume);
  call.points = points.untyped_data();
  call.cotangent = data(buffers.cotangent);
  call.out = data(buffers.out);
  call.dvolume = data(buffers.dvolume);
  call.dpoints = data(buffers.dpoints);
  if (scratch != nullptr && scratch->size() > 0) {
    xf::ErrorOr<xf::Result<xf::AnyBuffer>> buffer = scratch->get<xf::AnyBuffer>(0);
    if (!buffer) return buffer.error();
    const xf::AnyBuffer space = **buffer;
    call.scratch = space.untyped_data();
    call.scratch_bytes = space.size_bytes();
  }

  // Operands that are not there take the place of the points, whose offsets they then never use.
  std::array<BatchOperand, Call::kOperands> operands;
  operands.fill({points.dimensions(), point_rank + 1});
  const size_t grid_rank = geometry.axes + 1;
  if (buffers.volume) operands[Call::kVolume] = {buffers.volume->dimensions(), grid_rank};
  if (buffers.cotangent) {
    operands[Call::kCotangent] = {buffers.cotangent->dimensions(), point_rank + 1};
  }
  call.gradients = 1;
  if (buffers.dvolume) {
    operands[Call::kGradient] = {buffers.dvolume->dimensions(), grid_rank};
    for (size_t i = 0; i < rank; ++i) call.gradients *= buffers.dvolume->dimensions()[i];
  }
  for (int i = 0; i < call.order; ++i) {
    const xf::ErrorOr<xf::AnyBuffer> direction = directions.get<xf::AnyBuffer>(i);
    if (!direction) return direction.error();
    if (!Agree(points, *direction, rank, 0) || direction->element_type() != points.element_type()) {
      return Misfit("a direction", points, *direction);
    }
    call.directions[i] = direction->untyped_data();
    operands[Call::kDirections + i] = {direction->dimensions(), point_rank + 1};
  }
  const bool held =
      BuildBatchMap<Call::kOperands>(call.batch, operands, rank, [](size_t) { return true; });
  if (!held) {
    return InvalidArgument(kName, ": more than ", kMaxBatchDims,
                           " alternations of batched and unbatched dimensions in nested vmaps");
  }
  return xf::Error::Success();
}

}  // namespace jaxops::ffi::grid_sample
