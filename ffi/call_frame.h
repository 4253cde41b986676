// Calls of handlers without XLA, whose buffers are addresses without memory.
#ifndef JAXOPS_FFI_CALL_FRAME_H_
#define JAXOPS_FFI_CALL_FRAME_H_

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/ffi.h"

// XLA defines this type differently; handlers never read it.
struct XLA_FFI_Error {
  std::string message;
};

namespace jaxops::ffi {

// The stream of the calls.
inline void* FrameStream() { return reinterpret_cast<void*>(uintptr_t{0x57'0000}); }

struct FrameBuffer {
  const char* data;
  size_t bytes;
  bool is_result;
};

// The functions of XLA that handlers call. None of them fails, so that none has to tell an error.
inline const XLA_FFI_Api& GetApi() {
  static const XLA_FFI_Api api = [] {
    XLA_FFI_Api made{};
    made.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    made.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                        XLA_FFI_API_MINOR};
    made.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
      return new XLA_FFI_Error{args->message};
    };
    made.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) { delete args->error; };
    made.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) -> XLA_FFI_Error* {
      args->stream = FrameStream();
      return nullptr;
    };
    return made;
  }();
  return api;
}

// The number of an XLA_FFI_DataType, and the sizes of the dimensions.
using FrameArray = std::tuple<int, std::vector<int64_t>>;
// A name, a kind ("scalar", "array" or "string"), the number of an XLA_FFI_DataType, the number of
// entries, and their bytes.
using FrameAttribute = std::tuple<std::string, std::string, int, int64_t, nanobind::bytes>;

// XLA's buffers are aligned to 128 bytes; these have no larger alignment.
inline constexpr uint64_t kAlignment = 128;
// A read or write of the host at these addresses ends the process.
inline constexpr uint64_t kFirstAddress = uint64_t{1} << 45;

// A call of a handler, which can be repeated.
class CallFrame {
 public:
  CallFrame(XLA_FFI_Handler* handler, const std::vector<FrameArray>& operands,
            const std::vector<FrameArray>& results, const std::vector<FrameAttribute>& attributes)
      : handler_(handler) {
    AddBuffers(operands_, operands, false);
    AddBuffers(results_, results, true);
    attributes_.resize(attributes.size());
    for (size_t i = 0; i < attributes.size(); ++i) AddAttribute(attributes_[i], attributes[i]);

    frame_.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame_.api = &GetApi();
    frame_.stage = XLA_FFI_ExecutionStage_EXECUTE;
    frame_.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(operands_.size()),
                   operand_types_.data(), operand_pointers_.data()};
    frame_.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(results_.size()),
                   result_types_.data(), result_pointers_.data()};
    frame_.attrs = {XLA_FFI_Attrs_STRUCT_SIZE,
                    nullptr,
                    static_cast<int64_t>(attributes_.size()),
                    attribute_types_.data(),
                    attribute_names_.data(),
                    attribute_pointers_.data()};
  }
  CallFrame(const CallFrame&) = delete;

  const std::vector<FrameBuffer>& buffers() const { return buffers_; }

  // Returns the message of an error, or an empty string.
  std::string Call() {
    XLA_FFI_Error* const error = handler_(&frame_);
    if (!error) return "";
    const std::string message = error->message;
    delete error;
    return message;
  }

 private:
  struct ArrayStorage {
    XLA_FFI_Buffer buffer{};
    std::vector<int64_t> sizes;
  };

  struct AttributeStorage {
    std::string name;
    XLA_FFI_ByteSpan name_span{};
    std::vector<uint64_t> bytes;  // aligned for every type
    XLA_FFI_Scalar scalar{};
    XLA_FFI_Array array{};
    XLA_FFI_ByteSpan string{};
  };

  void AddBuffers(std::vector<ArrayStorage>& storage, const std::vector<FrameArray>& arrays,
                  bool are_results) {
    storage.resize(arrays.size());
    for (size_t i = 0; i < arrays.size(); ++i) {
      auto& [buffer, sizes] = storage[i];
      sizes = std::get<1>(arrays[i]);
      const auto dtype = static_cast<XLA_FFI_DataType>(std::get<0>(arrays[i]));
      size_t bytes = xla::ffi::ByteWidth(static_cast<xla::ffi::DataType>(dtype));
      for (const int64_t size : sizes) bytes *= size;
      void* data = bytes ? reinterpret_cast<void*>(next_address_) : nullptr;
      next_address_ += (bytes / (2 * kAlignment) + 1) * (2 * kAlignment);
      buffer = {XLA_FFI_Buffer_STRUCT_SIZE,         nullptr,     dtype, data,
                static_cast<int64_t>(sizes.size()), sizes.data()};
      buffers_.push_back({static_cast<const char*>(data), bytes, are_results});
      if (are_results) {
        result_types_.push_back(XLA_FFI_RetType_BUFFER);
        result_pointers_.push_back(&buffer);
      } else {
        operand_types_.push_back(XLA_FFI_ArgType_BUFFER);
        operand_pointers_.push_back(&buffer);
      }
    }
  }

  void AddAttribute(AttributeStorage& storage, const FrameAttribute& attribute) {
    const auto& [name, kind, number, count, bytes] = attribute;
    storage.name = name;
    storage.name_span = {storage.name.data(), storage.name.size()};
    storage.bytes.resize(bytes.size() / sizeof(uint64_t) + 1);
    std::copy_n(bytes.c_str(), bytes.size(), reinterpret_cast<char*>(storage.bytes.data()));
    const auto dtype = static_cast<XLA_FFI_DataType>(number);
    attribute_names_.push_back(&storage.name_span);
    if (kind == "scalar") {
      storage.scalar = {dtype, storage.bytes.data()};
      attribute_types_.push_back(XLA_FFI_AttrType_SCALAR);
      attribute_pointers_.push_back(&storage.scalar);
    } else if (kind == "array") {
      storage.array = {dtype, static_cast<size_t>(count), storage.bytes.data()};
      attribute_types_.push_back(XLA_FFI_AttrType_ARRAY);
      attribute_pointers_.push_back(&storage.array);
    } else {
      storage.string = {reinterpret_cast<const char*>(storage.bytes.data()),
                        static_cast<size_t>(count)};
      attribute_types_.push_back(XLA_FFI_AttrType_STRING);
      attribute_pointers_.push_back(&storage.string);
    }
  }

  XLA_FFI_Handler* handler_;
  uint64_t next_address_ = kFirstAddress + kAlignment;
  std::vector<FrameBuffer> buffers_;
  std::vector<ArrayStorage> operands_, results_;
  std::vector<AttributeStorage> attributes_;
  std::vector<XLA_FFI_ArgType> operand_types_;
  std::vector<XLA_FFI_RetType> result_types_;
  std::vector<XLA_FFI_AttrType> attribute_types_;
  std::vector<XLA_FFI_ByteSpan*> attribute_names_;
  std::vector<void*> operand_pointers_, result_pointers_, attribute_pointers_;
  XLA_FFI_CallFrame frame_{};
};

}  // namespace jaxops::ffi

#endif  // JAXOPS_FFI_CALL_FRAME_H_
