// Handlers of weighted sums of the entries of a volume.
#include "common/taps.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#ifdef JAXOPS_PLATFORM_CUDA
#include "cuda/taps/launch.h"
#else
#include "cpu/taps.h"
#endif
#include "ffi/bind.h"
#include "ffi/choice.h"
#include "ffi/decode.h"
#include "ffi/work_space.h"

namespace jaxops::ffi::taps {
namespace {

namespace xf = xla::ffi;
using jaxops::taps::Call;
using jaxops::taps::Geometry;
using jaxops::taps::kMaxAxes;
using jaxops::taps::kMaxCombinations;

constexpr char kName[] = "taps";

// The dimensions of points, which follow the batch dimensions of indices and weights, and whether
// they are the fastest in memory.
struct TapsAttributes {
  int64_t point_rank;
  bool permuted;
  JAXOPS_ATTRIBUTES(point_rank, permuted);
};

// The buffers of a call, which has a volume or the volume's gradient.
struct Buffers {
  Buffer indices;
  std::optional<Buffer> volume = {}, cotangent = {}, out = {}, dvolume = {};
  xf::RemainingRets* dweights = nullptr;
};

xf::Error RunTaps(Context context, const TapsAttributes& attributes, const Buffers& buffers,
                  xf::RemainingArgs weights, WorkSpace work_space = {}) {
  Call call = {};
  const Buffer& volume = buffers.volume ? *buffers.volume : *buffers.dvolume;
  const Dimensions index_dims = buffers.indices.dimensions();
  const int64_t most = static_cast<int64_t>(index_dims.size()) - 2;
  if (attributes.point_rank < 0 || attributes.point_rank > most) {
    return InvalidArgument(kName, ": indices must have ", attributes.point_rank,
                           " dimensions and those of axes and taps, got ", ToString(index_dims));
  }
  const size_t point_rank = attributes.point_rank;
  const size_t rank = most - point_rank;
  const int64_t axes = index_dims[index_dims.size() - 2], taps = index_dims.back();
  if (axes < 1 || axes > kMaxAxes || taps < 1 || taps > kMaxCombinations) {
    return InvalidArgument(kName, ": indices must have 1 to ", kMaxAxes, " axes of 1 to ",
                           kMaxCombinations, " taps, got ", ToString(index_dims));
  }
  Geometry& geometry = call.geometry;
  geometry.axes = static_cast<int>(axes);
  geometry.taps = static_cast<int>(taps);
  int64_t combinations = 1;
  for (int a = 0; a < axes; ++a) combinations *= taps;
  if (combinations > kMaxCombinations) {
    return InvalidArgument(kName, ": at most ", kMaxCombinations, " entries a point, got ",
                           combinations);
  }
  geometry.combinations = static_cast<int>(combinations);
  const size_t grid_rank = axes + 1;
  if (volume.dimensions().size() != rank + grid_rank) {
    return InvalidArgument(kName, ": volume ", ToString(volume.dimensions()),
                           " does not fit indices ", ToString(index_dims));
  }
  if (weights.size() != static_cast<size_t>(axes) ||
      (buffers.dweights != nullptr && buffers.dweights->size() != weights.size())) {
    return InvalidArgument(kName, ": weights must be one array for each of ", axes, " axes, got ",
                           weights.size());
  }
  const Dimensions grid = volume.dimensions().last(grid_rank);
  std::copy_n(grid.begin(), axes, geometry.sizes);
  geometry.width = grid.back();
  geometry.points_minor = attributes.permuted;
#ifdef JAXOPS_PLATFORM_CUDA
  if (geometry.points_minor)
    return InvalidArgument(kName, ": no CUDA kernel reads points in the fastest dimension");
#endif
  geometry.points = 1;
  for (size_t i = 0; i < point_rank; ++i) geometry.points *= index_dims[rank + i];
  JAXOPS_RETURN_IF_ERROR(SetType(call.dtype, kName, "volume", volume));
  const xf::DataType type = volume.element_type();
  const xf::DataType weight_type = ArithmeticType(call.dtype);

  // The indices stand in for the batch dimensions of absent operands and results, whose offsets
  // nothing reads.
  std::array<BatchOperand, Call::kOperands> operands;
  operands.fill({index_dims, point_rank + 2});
  std::vector<BatchOperand> results;
  const auto check = [&](const char* what, const Buffer& buffer, Dimensions core,
                         xf::DataType expected) {
    return CheckBuffer(kName, what, buffer, rank, core, expected);
  };
  const auto set = [&](size_t place, const char* what, const std::optional<Buffer>& buffer,
                       Dimensions core, xf::DataType expected, BatchOperand::Kind kind) {
    if (!buffer) return xf::Error::Success();
    operands[place] = {buffer->dimensions(), core.size(), kind};
    return check(what, *buffer, core, expected);
  };
  const Dimensions all_indices = index_dims.last(point_rank + 2);
  std::vector<int64_t> row(all_indices.begin(), all_indices.end() - 1);
  std::vector<int64_t> weight(row);
  row.back() = geometry.width;
  weight.back() = taps;
  constexpr auto kRead = BatchOperand::kRead, kWritten = BatchOperand::kWritten;
  JAXOPS_RETURN_IF_ERROR(check("indices", buffers.indices, all_indices, xf::DataType::S32));
  JAXOPS_RETURN_IF_ERROR(set(Call::kVolume, "volume", buffers.volume, grid, type, kRead));
  JAXOPS_RETURN_IF_ERROR(set(Call::kCotangent, "cotangent", buffers.cotangent, row, type, kRead));
  JAXOPS_RETURN_IF_ERROR(set(Call::kGradient, "volume's gradient", buffers.dvolume, grid, type,
                             BatchOperand::kSummed));
  if (buffers.out) {
    JAXOPS_RETURN_IF_ERROR(check("result", *buffers.out, row, type));
    results.push_back({buffers.out->dimensions(), row.size(), kWritten});
  }
  for (int a = 0; a < axes; ++a) {
    const xf::ErrorOr<Buffer> operand = weights.get<Buffer>(a);
    if (!operand) return operand.error();
    JAXOPS_RETURN_IF_ERROR(
        set(Call::kWeights + a, "weights", *operand, weight, weight_type, kRead));
    call.weights[a] = operand->untyped_data();
    if (buffers.dweights == nullptr) continue;
    xf::ErrorOr<Result> result = buffers.dweights->get<Buffer>(a);
    if (!result) return result.error();
    const Buffer& gradient = **result;
    JAXOPS_RETURN_IF_ERROR(check("weights' gradient", gradient, weight, weight_type));
    results.push_back({gradient.dimensions(), weight.size(), kWritten});
    call.dweights[a] = gradient.untyped_data();
  }
  results.insert(results.end(), operands.begin(), operands.end());
  JAXOPS_RETURN_IF_ERROR(CheckBatch(kName, results, rank));
  JAXOPS_RETURN_IF_ERROR(BuildBatchMap<Call::kOperands>(kName, call.batch, operands, rank,
                                                        [](size_t) { return true; }));
  call.volume = DataOf(buffers.volume);
  call.indices = static_cast<const int32_t*>(buffers.indices.untyped_data());
  call.cotangent = DataOf(buffers.cotangent);
  call.out = DataOf(buffers.out);
  call.dvolume = DataOf(buffers.dvolume);
  call.gradients = 1;
  if (buffers.dvolume) {
    for (size_t i = 0; i < rank; ++i) call.gradients *= buffers.dvolume->dimensions()[i];
  }
  JAXOPS_RETURN_IF_ERROR(AnswerChoice(PrefersKernels(call)));
  JAXOPS_RETURN_IF_ERROR(TakeWorkSpace(call.scratch, kName, work_space, WorkSpaceBytes(call)));
  return Run(context, kName, JAXOPS_KERNEL(taps, Taps), call);
}

xf::Error Sample(Context context, Buffer volume, Buffer indices, xf::RemainingArgs weights,
                 Result out, const TapsAttributes& attributes) {
  return RunTaps(context, attributes, {.indices = indices, .volume = volume, .out = *out}, weights);
}

xf::Error VolumeGrad(Context context, Buffer indices, Buffer cotangent, xf::RemainingArgs weights,
                     Result dvolume, WorkSpace work_space, const TapsAttributes& attributes) {
  return RunTaps(context, attributes,
                 {.indices = indices, .cotangent = cotangent, .dvolume = *dvolume}, weights,
                 work_space);
}

xf::Error WeightGrad(Context context, Buffer volume, Buffer indices, Buffer cotangent,
                     xf::RemainingArgs weights, xf::RemainingRets dweights,
                     const TapsAttributes& attributes) {
  return RunTaps(
      context, attributes,
      {.indices = indices, .volume = volume, .cotangent = cotangent, .dweights = &dweights},
      weights);
}

const Registration kSample("jaxops_taps", kHandler<Sample>);
const Registration kVolumeGrad("jaxops_taps_volume_grad", kHandler<VolumeGrad>);
const Registration kWeightGrad("jaxops_taps_weight_grad", kHandler<WeightGrad>);

}  // namespace
}  // namespace jaxops::ffi::taps
