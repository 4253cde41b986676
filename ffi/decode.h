// What every handler does first: read types and batch dimensions off the buffers it was given.
#ifndef JAXOPS_FFI_DECODE_H_
#define JAXOPS_FFI_DECODE_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "common/batch.h"
#include "common/types.h"
#include "xla/ffi/api/ffi.h"

namespace jaxops::ffi {

using Dimensions = xla::ffi::Span<const int64_t>;

// Strings and integers one after the other. No streams: their locales are state that all C++
// libraries of a process share, whatever they were compiled with.
template <typename... Parts>
xla::ffi::Error InvalidArgument(const Parts&... parts) {
  std::string message;
  const auto append = [&](const auto& part) {
    if constexpr (std::is_integral_v<std::decay_t<decltype(part)>>) {
      message += std::to_string(part);
    } else {
      message += part;
    }
  };
  (append(parts), ...);
  return xla::ffi::Error::InvalidArgument(std::move(message));
}

inline std::string ToString(Dimensions dims) {
  std::string text = "(";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + ")";
}

inline std::optional<DType> ToDType(xla::ffi::DataType type) {
  switch (type) {
    case xla::ffi::DataType::F16:
      return DType::kF16;
    case xla::ffi::DataType::BF16:
      return DType::kBF16;
    case xla::ffi::DataType::F32:
      return DType::kF32;
    case xla::ffi::DataType::F64:
      return DType::kF64;
    default:
      return std::nullopt;
  }
}

#define JAXOPS_RETURN_IF_ERROR(expression) \
  if (xla::ffi::Error error = (expression); error.failure()) return error

// Reads the type of a floating buffer; an error names the operator and its argument.
inline xla::ffi::Error SetType(DType& out, const char* operator_name, const char* argument,
                               const xla::ffi::AnyBuffer& buffer) {
  const std::optional<DType> dtype = ToDType(buffer.element_type());
  if (!dtype) {
    return InvalidArgument(operator_name, ": ", argument,
                           " must be f16, bf16, f32 or f64, got type ",
                           static_cast<int>(buffer.element_type()));
  }
  out = *dtype;
  return xla::ffi::Error::Success();
}

// One operand of a BatchMap: its dimensions, of which the last `core` belong to the operator.
struct BatchOperand {
  Dimensions dims;
  size_t core;

  int64_t CoreSize() const {
    int64_t size = 1;
    for (size_t i = dims.size() - core; i < dims.size(); ++i) size *= dims[i];
    return size;
  }
  // Elements between entries of batch dimension `dim`; 0 where the operand does not vary.
  int64_t Stride(size_t dim) const {
    if (dims[dim] == 1) return 0;
    int64_t stride = CoreSize();
    for (size_t i = dim + 1; i < dims.size() - core; ++i) stride *= dims[i];
    return stride;
  }
};

// Builds a map over those batch dimensions of `sizes` that `include` selects. Returns false when
// the operands alternate between batched and not more often than the map can hold.
template <int kOperands, typename Include>
bool BuildBatchMap(BatchMap<kOperands>& map, const std::array<BatchOperand, kOperands>& operands,
                   size_t rank, Include&& include) {
  for (size_t dim = 0; dim < rank; ++dim) {
    if (!include(dim)) continue;
    int64_t size = 1;
    std::array<int64_t, kOperands> strides;
    for (int i = 0; i < kOperands; ++i) {
      strides[i] = operands[i].Stride(dim);
      if (operands[i].dims[dim] != 1) size = operands[i].dims[dim];
    }
    if (!map.Append(size, strides)) return false;
  }
  return true;
}

}  // namespace jaxops::ffi

#endif  // JAXOPS_FFI_DECODE_H_
