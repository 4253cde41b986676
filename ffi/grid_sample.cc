// Handlers that sample volumes at points.
#include "common/grid_sample.h"

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "common/grid_sample_space.h"

#ifdef JAXOPS_PLATFORM_CUDA
#include "cuda/grid_sample/launch.h"
#else
#include "cpu/grid_sample.h"
#endif
#include "ffi/bind.h"
#include "ffi/decode.h"
#include "ffi/work_space.h"

namespace jaxops::ffi {

using grid_sample::Method;
using grid_sample::Padding;

template <>
inline constexpr auto kEnumNames<Method> =
    std::to_array<EnumName<Method>>({{"linear", Method::kLinear}, {"nearest", Method::kNearest}});

template <>
inline constexpr auto kEnumNames<Padding> =
    std::to_array<EnumName<Padding>>({{"zeros", Padding::kZeros},
                                      {"border", Padding::kBorder},
                                      {"reflection", Padding::kReflection}});

namespace grid_sample {
namespace {

namespace xf = xla::ffi;
using jaxops::grid_sample::Call;
using jaxops::grid_sample::Geometry;
using jaxops::grid_sample::kMaxAxes;
using jaxops::grid_sample::kMaxSize;

constexpr char kName[] = "grid_sample";

struct SampleAttributes {
  int64_t point_rank;
  Method method;
  Padding padding_mode;
  bool align_corners;
  bool pixel;
  bool deterministic;
  bool permuted;  // the dimensions of points are the fastest in memory
  JAXOPS_ATTRIBUTES(point_rank, method, padding_mode, align_corners, pixel, deterministic,
                    permuted);
};

// The buffers of a call, which has a volume or the volume's gradient.
struct Buffers {
  Buffer points;
  std::optional<Buffer> volume = {}, cotangent = {}, out = {}, dvolume = {}, dpoints = {};
};

// Runs a call whose derivative is along `directions`.
xf::Error RunSample(Context context, const SampleAttributes& attributes, const Buffers& buffers,
                    xf::RemainingArgs directions, WorkSpace work_space = {}) {
  Call call = {};
  const Buffer& points = buffers.points;
  const Buffer& volume = buffers.volume ? *buffers.volume : *buffers.dvolume;
  const Dimensions point_dims = points.dimensions();
  const int64_t most = static_cast<int64_t>(point_dims.size()) - 1;
  if (attributes.point_rank < 0 || attributes.point_rank > most) {
    return InvalidArgument(kName, ": points must have ", attributes.point_rank,
                           " dimensions and one of coordinates, got ", ToString(point_dims));
  }
  const size_t point_rank = attributes.point_rank;
  const size_t rank = most - point_rank;
  Geometry& geometry = call.geometry;
  const int64_t fewest = attributes.pixel ? 1 : 2;
  if (point_dims.back() < fewest || point_dims.back() > kMaxAxes) {
    return InvalidArgument(kName, ": points must have ", fewest, " to ", kMaxAxes,
                           " coordinates, got ", ToString(point_dims));
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
  geometry.method = attributes.method;
  geometry.padding = attributes.padding_mode;
  geometry.align_corners = attributes.align_corners;
  geometry.pixel = attributes.pixel;
  geometry.points_minor = attributes.permuted;
#ifdef JAXOPS_PLATFORM_CUDA
  if (geometry.pixel) {
    return InvalidArgument(kName, ": there are no CUDA kernels of coordinates that count entries");
  }
  if (geometry.points_minor)
    return InvalidArgument(kName, ": no CUDA kernel reads points in the fastest dimension");
#endif
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

  // The points stand in for the batch dimensions of absent operands and results, whose offsets
  // nothing reads.
  std::array<BatchOperand, Call::kOperands + 2> batch;
  batch.fill({point_dims, point_rank + 1});
  const auto set = [&](size_t place, const char* what, const std::optional<Buffer>& buffer,
                       Dimensions core, xf::DataType expected, BatchOperand::Kind kind) {
    if (!buffer) return xf::Error::Success();
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
  call.volume = DataOf(buffers.volume);
  call.points = points.untyped_data();
  call.cotangent = DataOf(buffers.cotangent);
  call.out = DataOf(buffers.out);
  call.dvolume = DataOf(buffers.dvolume);
  call.dpoints = DataOf(buffers.dpoints);
  call.gradients = 1;
  if (buffers.dvolume) {
    for (size_t i = 0; i < rank; ++i) call.gradients *= buffers.dvolume->dimensions()[i];
  }
  for (int i = 0; i < call.order; ++i) {
    const xf::ErrorOr<Buffer> direction = directions.get<Buffer>(i);
    if (!direction) return direction.error();
    JAXOPS_RETURN_IF_ERROR(
        set(Call::kDirections + i, "direction", *direction, coordinates, point_type, kRead));
    call.directions[i] = direction->untyped_data();
  }
  JAXOPS_RETURN_IF_ERROR(CheckBatch(kName, batch, rank));
  std::array<BatchOperand, Call::kOperands> operands;
  std::copy_n(batch.begin(), operands.size(), operands.begin());
  JAXOPS_RETURN_IF_ERROR(BuildBatchMap<Call::kOperands>(kName, call.batch, operands, rank,
                                                        [](size_t) { return true; }));
  call.scratch_bytes = jaxops::grid_sample::WorkSpaceBytes(call);
  JAXOPS_RETURN_IF_ERROR(TakeWorkSpace(call.scratch, kName, work_space, call.scratch_bytes));
  for (const auto* result : {&buffers.out, &buffers.dvolume, &buffers.dpoints}) {
    if (*result) ExpectWrites(**result);
  }
  return Run(context, kName, JAXOPS_KERNEL(grid_sample, Sample), call);
}

xf::Error Sample(Context context, Buffer volume, Buffer points, xf::RemainingArgs directions,
                 Result out, WorkSpace work_space, const SampleAttributes& attributes) {
  return RunSample(context, attributes, {.points = points, .volume = volume, .out = *out},
                   directions, work_space);
}

xf::Error VolumeGrad(Context context, Buffer points, Buffer cotangent, xf::RemainingArgs directions,
                     Result dvolume, WorkSpace work_space, const SampleAttributes& attributes) {
  return RunSample(context, attributes,
                   {.points = points, .cotangent = cotangent, .dvolume = *dvolume}, directions,
                   work_space);
}

xf::Error PointGrad(Context context, Buffer volume, Buffer points, Buffer cotangent,
                    xf::RemainingArgs directions, Result dpoints,
                    const SampleAttributes& attributes) {
  return RunSample(
      context, attributes,
      {.points = points, .volume = volume, .cotangent = cotangent, .dpoints = *dpoints},
      directions);
}

xf::Error Backward(Context context, Buffer volume, Buffer points, Buffer cotangent,
                   xf::RemainingArgs directions, Result dvolume, Result dpoints,
                   WorkSpace work_space, const SampleAttributes& attributes) {
  return RunSample(context, attributes,
                   {.points = points,
                    .volume = volume,
                    .cotangent = cotangent,
                    .dvolume = *dvolume,
                    .dpoints = *dpoints},
                   directions, work_space);
}

const Registration kSample("jaxops_grid_sample", kHandler<Sample>);
const Registration kVolumeGrad("jaxops_grid_sample_volume_grad", kHandler<VolumeGrad>);
const Registration kPointGrad("jaxops_grid_sample_point_grad", kHandler<PointGrad>);
const Registration kBackward("jaxops_grid_sample_backward", kHandler<Backward>);

}  // namespace
}  // namespace grid_sample
}  // namespace jaxops::ffi
