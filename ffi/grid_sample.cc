#include "ffi/grid_sample.h"

#include <algorithm>
#include <array>
#include <vector>

namespace jaxops::ffi::grid_sample {
namespace {

namespace xf = xla::ffi;
using jaxops::grid_sample::Geometry;
using jaxops::grid_sample::kMaxAxes;
using jaxops::grid_sample::kMaxSize;
using jaxops::grid_sample::Method;
using jaxops::grid_sample::Padding;

constexpr char kName[] = "grid_sample";

}  // namespace

xf::Error Decode(Call& call, const Attributes& attributes, const Buffers& buffers,
                 xf::RemainingArgs directions, const xf::RemainingRets* scratch) {
  const xf::AnyBuffer& points = *buffers.points;
  const xf::AnyBuffer& volume = buffers.volume ? *buffers.volume : *buffers.dvolume;
  const Dimensions point_dims = points.dimensions();
  const int64_t most = static_cast<int64_t>(point_dims.size()) - 1;
  if (attributes.point_rank < 0 || attributes.point_rank > most) {
    return InvalidArgument(kName, ": points must have ", attributes.point_rank,
                           " dimensions and one of coordinates, got ", ToString(point_dims));
  }
  const size_t point_rank = attributes.point_rank;
  const size_t rank = most - point_rank;
  Geometry& geometry = call.geometry;
  if (point_dims.back() < 2 || point_dims.back() > kMaxAxes) {
    return InvalidArgument(kName, ": points must have 2 to ", kMaxAxes, " coordinates, got ",
                           ToString(point_dims));
  }
  geometry.axes = static_cast<int>(point_dims.back());
  const size_t grid_rank = geometry.axes + 1;
  if (volume.dimensions().size() != rank + grid_rank) {
    return InvalidArgument(kName, ": volume ", ToString(volume.dimensions()),
                           " does not fit points ", ToString(point_dims));
  }
  const Dimensions grid = volume.dimensions().last(grid_rank);
  for (int a = 0; a < geometry.axes; ++a) {
    if (grid[a] > kMaxSize) {
      return InvalidArgument(kName, ": an axis has at most ", kMaxSize, " entries");
    }
    geometry.sizes[a] = static_cast<int32_t>(grid[a]);
  }
  geometry.width = grid.back();
  geometry.points = 1;
  for (size_t i = 0; i < point_rank; ++i) geometry.points *= point_dims[rank + i];
  JAXOPS_RETURN_IF_ERROR(
      SetEnum(geometry.method, kName, "method", attributes.method, Method::kNearest));
  JAXOPS_RETURN_IF_ERROR(SetEnum(geometry.padding, kName, "padding_mode", attributes.padding_mode,
                                 Padding::kReflection));
  geometry.align_corners = attributes.align_corners;
  if (directions.size() > multilinear::kMaxDirections) {
    return InvalidArgument(kName, ": at most ", multilinear::kMaxDirections, " directions, got ",
                           directions.size());
  }
  call.order = static_cast<int>(directions.size());
  const xf::DataType type = volume.element_type();
  const xf::DataType point_type = points.element_type();
  JAXOPS_RETURN_IF_ERROR(SetType(call.dtype, kName, "volume", volume));
  JAXOPS_RETURN_IF_ERROR(SetType(call.point_dtype, kName, "points", points));
  if (call.point_dtype == DType::kF64 && call.dtype != DType::kF64) {
    return InvalidArgument(kName, ": points are f64, which the volume then must be too");
  }

  // Operands and results that are not there take the place of the points, whose offsets they then
  // never use.
  std::array<BatchOperand, Call::kOperands + 2> batch;
  batch.fill({point_dims, point_rank + 1});
  const auto set = [&](size_t place, const char* what, const xf::AnyBuffer* buffer, Dimensions core,
                       xf::DataType expected, BatchOperand::Kind kind) {
    if (buffer == nullptr) return xf::Error::Success();
    batch[place] = {buffer->dimensions(), core.size(), kind};
    return CheckBuffer(kName, what, *buffer, rank, core, expected);
  };
  const Dimensions coordinates = point_dims.last(point_rank + 1);
  std::vector<int64_t> row(coordinates.begin(), coordinates.end());
  row.back() = geometry.width;
  constexpr auto kRead = BatchOperand::kRead, kWritten = BatchOperand::kWritten;
  constexpr size_t kResults = Call::kOperands;
  JAXOPS_RETURN_IF_ERROR(set(Call::kVolume, "volume", buffers.volume, grid, type, kRead));
  JAXOPS_RETURN_IF_ERROR(set(Call::kCotangent, "cotangent", buffers.cotangent, row, type, kRead));
  JAXOPS_RETURN_IF_ERROR(set(Call::kGradient, "volume's gradient", buffers.dvolume, grid, type,
                             BatchOperand::kSummed));
  JAXOPS_RETURN_IF_ERROR(set(kResults, "result", buffers.out, row, type, kWritten));
  JAXOPS_RETURN_IF_ERROR(
      set(kResults + 1, "points' gradient", buffers.dpoints, coordinates, point_type, kWritten));
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
    if (scratch->size() > 1) return InvalidArgument(kName, ": more results than a work space");
    xf::ErrorOr<xf::Result<xf::AnyBuffer>> buffer = scratch->get<xf::AnyBuffer>(0);
    if (!buffer) return buffer.error();
    const xf::AnyBuffer space = **buffer;
    call.scratch = space.untyped_data();
    call.scratch_bytes = space.size_bytes();
  }

  call.gradients = 1;
  if (buffers.dvolume) {
    for (size_t i = 0; i < rank; ++i) call.gradients *= buffers.dvolume->dimensions()[i];
  }
  for (int i = 0; i < call.order; ++i) {
    const xf::ErrorOr<xf::AnyBuffer> direction = directions.get<xf::AnyBuffer>(i);
    if (!direction) return direction.error();
    JAXOPS_RETURN_IF_ERROR(
        set(Call::kDirections + i, "direction", &*direction, coordinates, point_type, kRead));
    call.directions[i] = direction->untyped_data();
  }
  JAXOPS_RETURN_IF_ERROR(CheckBatch(kName, batch, rank));
  std::array<BatchOperand, Call::kOperands> operands;
  std::copy_n(batch.begin(), operands.size(), operands.begin());
  return BuildBatchMap<Call::kOperands>(kName, call.batch, operands, rank,
                                        [](size_t) { return true; });
}

}  // namespace jaxops::ffi::grid_sample
