// The first step of every handler: it reads types and batch dimensions from its buffers.
#ifndef JAXOPS_FFI_DECODE_H_
#define JAXOPS_FFI_DECODE_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#include "common/batch.h"
#include "common/types.h"
#include "ffi/bind.h"
#include "xla/ffi/api/ffi.h"

namespace jaxops::ffi {

using Dimensions = xla::ffi::Span<const int64_t>;

template <>
inline constexpr auto kEnumNames<Activation> =
    std::to_array<EnumName<Activation>>({{"none", Activation::kNone},
                                         {"relu", Activation::kRelu},
                                         {"silu", Activation::kSilu},
                                         {"gelu", Activation::kGelu}});

template <>
inline constexpr auto kEnumNames<DataFormat> =
    std::to_array<EnumName<DataFormat>>({{"NTC", DataFormat::kNTC}, {"NCT", DataFormat::kNCT}});

// Joins strings and integers. This uses no streams: their locales are state that all C++ libraries
// of a process share, whatever they were compiled with.
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

// Returns the type of the sums and scalars of a call.
inline xla::ffi::DataType ArithmeticType(DType dtype) {
  return dtype == DType::kF64 ? xla::ffi::DataType::F64 : xla::ffi::DataType::F32;
}

// Returns the memory of an optional buffer, or null.
inline void* DataOf(const std::optional<Buffer>& buffer) {
  return buffer ? buffer->untyped_data() : nullptr;
}

// Checks that a buffer ends with the dimensions `core` after `batch_rank` others and is of `type`.
inline xla::ffi::Error CheckBuffer(const char* operator_name, const char* what,
                                   const xla::ffi::AnyBuffer& buffer, size_t batch_rank,
                                   Dimensions core, xla::ffi::DataType type) {
  const Dimensions dims = buffer.dimensions();
  if (dims.size() != batch_rank + core.size() ||
      !std::equal(core.begin(), core.end(), dims.begin() + batch_rank)) {
    return InvalidArgument(operator_name, ": ", what, " must have ", batch_rank,
                           " batch dimensions and then ", ToString(core), ", got ", ToString(dims));
  }
  if (buffer.element_type() != type) {
    return InvalidArgument(operator_name, ": ", what, " must have type ", static_cast<int>(type),
                           ", got ", static_cast<int>(buffer.element_type()));
  }
  return xla::ffi::Error::Success();
}

inline xla::ffi::Error CheckBuffer(const char* operator_name, const char* what,
                                   const xla::ffi::AnyBuffer& buffer, size_t batch_rank,
                                   std::initializer_list<int64_t> core, xla::ffi::DataType type) {
  return CheckBuffer(operator_name, what, buffer, batch_rank, Dimensions(core.begin(), core.size()),
                     type);
}

// Returns whether a * b is below the bound of numbers from attributes and sizes. The bound is low
// enough for sums of a few such numbers.
inline bool IsBounded(int64_t a, int64_t b = 1) {
  int64_t product;
  constexpr int64_t kLimit = int64_t{1} << 60;
  return !__builtin_mul_overflow(a, b, &product) && -kLimit <= product && product <= kLimit;
}

// A buffer whose dimensions except for the last `core` are batch dimensions.
struct BatchOperand {
  enum Kind {
    kRead,     // an operand: its batch dimensions have the size of the batch or 1
    kWritten,  // a result: they have the size of the batch
    kSummed,   // a result that is summed over those of size 1
  };

  Dimensions dims;
  size_t core;
  Kind kind = kRead;

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

// Checks that buffers have `rank` batch dimensions each, which fit those of the operands.
inline xla::ffi::Error CheckBatch(const char* operator_name, std::span<const BatchOperand> buffers,
                                  size_t rank) {
  for (const BatchOperand& buffer : buffers) {
    if (buffer.dims.size() != rank + buffer.core) {
      return InvalidArgument(operator_name, ": ", ToString(buffer.dims), " must have ", rank,
                             " batch dimensions and ", buffer.core, " more");
    }
  }
  int64_t entries = 1;
  for (size_t dim = 0; dim < rank; ++dim) {
    int64_t size = 1;
    for (const BatchOperand& buffer : buffers) {
      if (buffer.kind == BatchOperand::kRead && buffer.dims[dim] != 1) size = buffer.dims[dim];
    }
    for (const BatchOperand& buffer : buffers) {
      const int64_t got = buffer.dims[dim];
      if (got == size || (got == 1 && buffer.kind != BatchOperand::kWritten)) continue;
      return InvalidArgument(operator_name, ": batch dimension ", dim, " of ",
                             ToString(buffer.dims), " must be ", size);
    }
    if (size == 0) continue;
    if (!IsBounded(entries, size)) {
      return InvalidArgument(operator_name, ": a batch has too many entries");
    }
    entries *= size;
  }
  return xla::ffi::Error::Success();
}

// Builds a map over the batch dimensions that `include` selects, of operands that CheckBatch has
// accepted. Returns an error if the dimensions alternate between batched and broadcast more often
// than the map can hold.
template <int kOperands, typename Include>
xla::ffi::Error BuildBatchMap(const char* operator_name, BatchMap<kOperands>& map,
                              const std::array<BatchOperand, kOperands>& operands, size_t rank,
                              Include&& include) {
  for (size_t dim = 0; dim < rank; ++dim) {
    if (!include(dim)) continue;
    int64_t size = 1;
    std::array<int64_t, kOperands> strides;
    for (int i = 0; i < kOperands; ++i) {
      strides[i] = operands[i].Stride(dim);
      if (operands[i].dims[dim] != 1) size = operands[i].dims[dim];
    }
    if (!map.Append(size, strides)) {
      return InvalidArgument(operator_name, ": more than ", kMaxBatchDims,
                             " alternations of batched and unbatched dimensions in nested vmaps");
    }
  }
  return xla::ffi::Error::Success();
}

// Checks and maps the batch of operands if the call has no others.
template <int kOperands>
xla::ffi::Error SetBatch(const char* operator_name, BatchMap<kOperands>& map,
                         const std::array<BatchOperand, kOperands>& operands, size_t rank) {
  JAXOPS_RETURN_IF_ERROR(CheckBatch(operator_name, operands, rank));
  return BuildBatchMap<kOperands>(operator_name, map, operands, rank, [](size_t) { return true; });
}

}  // namespace jaxops::ffi

#endif  // JAXOPS_FFI_DECODE_H_
