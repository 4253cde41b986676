// Handlers of trilinear interpolation in cells.
#include "common/trilinear.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <optional>

#ifdef JAXOPS_PLATFORM_CUDA
#include "cuda/trilinear/launch.h"
#else
#include "cpu/trilinear.h"
#endif
#include "ffi/bind.h"
#include "ffi/decode.h"

namespace jaxops::ffi::trilinear {
namespace {

namespace xf = xla::ffi;
using jaxops::trilinear::Call;
using jaxops::trilinear::kAxes;
using jaxops::trilinear::kCorners;

constexpr char kName[] = "trilinear_interpolate";

// The buffers of a call, which has either a result or a cotangent.
struct Buffers {
  Buffer points;
  std::optional<Buffer> features = {}, cotangent = {}, out = {}, dfeatures = {}, dpoints = {};
};

// Runs a call whose derivative is along `directions`.
xf::Error RunCells(Context context, const Buffers& buffers, xf::RemainingArgs directions) {
  Call call = {};
  const Buffer& points = buffers.points;
  // Both have the shape (..., features).
  const Buffer& row = buffers.out ? *buffers.out : *buffers.cotangent;
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
  // The points stand in for the batch dimensions of absent operands and results, whose offsets
  // nothing reads.
  std::array<BatchOperand, Call::kOperands + 3> batch;
  batch.fill({points.dimensions(), 1});
  const auto set = [&](size_t place, const char* what, const std::optional<Buffer>& buffer,
                       std::initializer_list<int64_t> core, xf::DataType expected,
                       BatchOperand::Kind kind) {
    if (!buffer) return xf::Error::Success();
    batch[place] = {buffer->dimensions(), core.size(), kind};
    return CheckBuffer(kName, what, *buffer, rank, core, expected);
  };
  constexpr auto kRead = BatchOperand::kRead, kWritten = BatchOperand::kWritten;
  constexpr size_t kResults = Call::kOperands;
  JAXOPS_RETURN_IF_ERROR(set(Call::kPoints, "points", points, {kAxes}, point_type, kRead));
  JAXOPS_RETURN_IF_ERROR(
      set(Call::kFeatures, "features", buffers.features, {kCorners, call.width}, type, kRead));
  JAXOPS_RETURN_IF_ERROR(
      set(Call::kCotangent, "cotangent", buffers.cotangent, {call.width}, type, kRead));
  JAXOPS_RETURN_IF_ERROR(set(kResults, "result", buffers.out, {call.width}, type, kWritten));
  JAXOPS_RETURN_IF_ERROR(set(kResults + 1, "features' gradient", buffers.dfeatures,
                             {kCorners, call.width}, type, kWritten));
  JAXOPS_RETURN_IF_ERROR(
      set(kResults + 2, "points' gradient", buffers.dpoints, {kAxes}, point_type, kWritten));
  call.features = DataOf(buffers.features);
  call.points = points.untyped_data();
  call.cotangent = DataOf(buffers.cotangent);
  call.out = DataOf(buffers.out);
  call.dfeatures = DataOf(buffers.dfeatures);
  call.dpoints = DataOf(buffers.dpoints);

  for (int i = 0; i < call.order; ++i) {
    const xf::ErrorOr<Buffer> direction = directions.get<Buffer>(i);
    if (!direction) return direction.error();
    JAXOPS_RETURN_IF_ERROR(
        set(Call::kDirections + i, "direction", *direction, {kAxes}, point_type, kRead));
    call.directions[i] = direction->untyped_data();
  }
  JAXOPS_RETURN_IF_ERROR(CheckBatch(kName, batch, rank));
  std::array<BatchOperand, Call::kOperands> operands;
  std::copy_n(batch.begin(), operands.size(), operands.begin());
  JAXOPS_RETURN_IF_ERROR(BuildBatchMap<Call::kOperands>(kName, call.cells, operands, rank,
                                                        [](size_t) { return true; }));
  for (const auto* result : {&buffers.out, &buffers.dfeatures, &buffers.dpoints}) {
    if (*result) ExpectWrites(**result);
  }
  return Run(context, kName, JAXOPS_KERNEL(trilinear, Cells), call);
}

xf::Error Interpolate(Context context, Buffer features, Buffer points, xf::RemainingArgs directions,
                      Result out) {
  return RunCells(context, {.points = points, .features = features, .out = *out}, directions);
}

xf::Error FeatureGrad(Context context, Buffer points, Buffer cotangent,
                      xf::RemainingArgs directions, Result dfeatures) {
  return RunCells(context, {.points = points, .cotangent = cotangent, .dfeatures = *dfeatures},
                  directions);
}

xf::Error PointGrad(Context context, Buffer features, Buffer points, Buffer cotangent,
                    xf::RemainingArgs directions, Result dpoints) {
  return RunCells(
      context,
      {.points = points, .features = features, .cotangent = cotangent, .dpoints = *dpoints},
      directions);
}

xf::Error Backward(Context context, Buffer features, Buffer points, Buffer cotangent,
                   xf::RemainingArgs directions, Result dfeatures, Result dpoints) {
  return RunCells(context,
                  {.points = points,
                   .features = features,
                   .cotangent = cotangent,
                   .dfeatures = *dfeatures,
                   .dpoints = *dpoints},
                  directions);
}

const Registration kInterpolate("jaxops_trilinear_interpolate", kHandler<Interpolate>);
const Registration kFeatureGrad("jaxops_trilinear_feature_grad", kHandler<FeatureGrad>);
const Registration kPointGrad("jaxops_trilinear_point_grad", kHandler<PointGrad>);
const Registration kBackward("jaxops_trilinear_backward", kHandler<Backward>);

}  // namespace
}  // namespace jaxops::ffi::trilinear
