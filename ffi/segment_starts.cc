// The handler of the first steps of segments.
#include "common/segment_starts.h"

#ifdef JAXOPS_PLATFORM_CUDA
#include "cuda/segment_starts/launch.h"
#else
#include "cpu/segment_starts.h"
#endif
#include "ffi/bind.h"
#include "ffi/decode.h"

namespace jaxops::ffi::segment_starts {
namespace {

namespace xf = xla::ffi;
using jaxops::segment_starts::Call;

constexpr char kName[] = "segment_starts";

struct SegmentStartsAttributes {
  int64_t first;
  JAXOPS_ATTRIBUTES(first);
};

bool IsInteger(xf::DataType type) {
  switch (type) {
    case xf::DataType::S8:
    case xf::DataType::S16:
    case xf::DataType::S32:
    case xf::DataType::S64:
    case xf::DataType::U8:
    case xf::DataType::U16:
    case xf::DataType::U32:
    case xf::DataType::U64:
      return true;
    default:
      return false;
  }
}

xf::Error RunSegmentStarts(Context context, Buffer ids, Result starts,
                           const SegmentStartsAttributes& attributes) {
  const Dimensions dims = ids.dimensions();
  if (!IsInteger(ids.element_type())) {
    return InvalidArgument(kName, ": ids must be integers of 8 to 64 bits, got type ",
                           static_cast<int>(ids.element_type()));
  }
  if (dims.size() < 1 || dims.back() > INT32_MAX) {
    return InvalidArgument(kName, ": ids must have up to ", INT32_MAX, " steps, got ",
                           ToString(dims));
  }
  if (attributes.first > 0 || attributes.first < INT32_MIN) {
    return InvalidArgument(kName, ": first must be at most 0 and of 32 bits, got ",
                           attributes.first);
  }
  const size_t rank = dims.size() - 1;
  Call call = {};
  call.time = dims.back();
  call.first = static_cast<int32_t>(attributes.first);
  call.id_bytes = static_cast<int>(xf::ByteWidth(ids.element_type()));
  call.ids = ids.untyped_data();
  call.starts = static_cast<int32_t*>(starts->untyped_data());
  JAXOPS_RETURN_IF_ERROR(
      CheckBuffer(kName, "starts", *starts, rank, {call.time}, xf::DataType::S32));
  JAXOPS_RETURN_IF_ERROR(SetBatch<Call::kOperands>(
      kName, call.batch,
      {BatchOperand{dims, 1}, BatchOperand{starts->dimensions(), 1, BatchOperand::kWritten}},
      rank));
  return Run(context, kName, JAXOPS_KERNEL(segment_starts, SegmentStarts), call);
}

const Registration kSegmentStarts("jaxops_segment_starts", kHandler<RunSegmentStarts>);

}  // namespace
}  // namespace jaxops::ffi::segment_starts
