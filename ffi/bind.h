// A handler is made from a function: parameters are bound by their types, attributes by their
// names.
#ifndef JAXOPS_FFI_BIND_H_
#define JAXOPS_FFI_BIND_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "ffi/platform.h"
#include "xla/ffi/api/ffi.h"

namespace jaxops::ffi {

using Buffer = xla::ffi::AnyBuffer;
using Result = xla::ffi::Result<xla::ffi::AnyBuffer>;
using Integers = xla::ffi::Span<const int64_t>;

// The work space of a call: an optional last result on CUDA devices, absent on others.
struct WorkSpace : std::optional<Result> {
  WorkSpace(const std::optional<Result>& result = {})  // NOLINT: handlers get this type
      : std::optional<Result>(result) {}
};

// A struct of attributes ends with JAXOPS_ATTRIBUTES(its members...). Python passes exactly these
// members, under their names.
#define JAXOPS_ATTRIBUTES(...)                     \
  auto Members() { return std::tie(__VA_ARGS__); } \
  static constexpr std::string_view kMembers = #__VA_ARGS__

template <typename T>
concept Attributes = requires(T attributes) { attributes.Members(); };

// The names by which Python passes the values of an enum: an array kEnumNames<E>.
template <typename Enum>
struct EnumName {
  std::string_view name;
  Enum value;
};

template <typename Enum>
inline constexpr std::nullptr_t kEnumNames = nullptr;

// Returns whether a text is `known`. The compiler knows the size of `known`, so this calls no
// function.
inline bool IsText(const XLA_FFI_ByteSpan& text, std::string_view known) {
  return text.len == known.size() && __builtin_memcmp(text.ptr, known.data(), known.size()) == 0;
}

// Calls function(std::integral_constant<size_t, i>) for i = 0, 1, ... until a call returns true.
// Returns whether one did.
template <size_t kCount>
bool AnyOf(auto&& function) {
  return [&]<size_t... kI>(std::index_sequence<kI...>) {
    return (function(std::integral_constant<size_t, kI>()) || ...);
  }(std::make_index_sequence<kCount>());
}

template <Attributes T>
struct AttributeNames {
  static constexpr size_t kCount = std::tuple_size_v<decltype(std::declval<T&>().Members())>;

  // The names in the order of the struct.
  static constexpr std::array<std::string_view, kCount> kNames = [] {
    std::array<std::string_view, kCount> names;
    std::string_view rest = T::kMembers;
    for (std::string_view& name : names) {
      name = rest.substr(0, rest.find(','));
      rest.remove_prefix(std::min(rest.size(), name.size() + 2));
    }
    return names;
  }();

  // The index of each name among the attributes of a call frame, which are sorted.
  static constexpr std::array<size_t, kCount> kPlaces = [] {
    std::array<size_t, kCount> places = {};
    for (size_t i = 0; i < kCount; ++i) {
      for (std::string_view other : kNames) places[i] += other < kNames[i];
    }
    return places;
  }();
};

// Returns the binding with one more parameter, of type T.
template <typename T, typename Binding>
auto BindParameter(Binding&& binding) {
  if constexpr (std::is_same_v<T, Buffer>) {
    return std::move(binding).template Arg<Buffer>();
  } else if constexpr (std::is_same_v<T, std::optional<Buffer>>) {
    return std::move(binding).template OptionalArg<Buffer>();
  } else if constexpr (std::is_same_v<T, xla::ffi::RemainingArgs>) {
    return std::move(binding).RemainingArgs();
  } else if constexpr (std::is_same_v<T, Result>) {
    return std::move(binding).template Ret<Buffer>();
  } else if constexpr (std::is_same_v<T, std::optional<Result>> || std::is_same_v<T, WorkSpace>) {
    return std::move(binding).template OptionalRet<Buffer>();
  } else if constexpr (std::is_same_v<T, xla::ffi::RemainingRets>) {
    return std::move(binding).RemainingRets();
  } else if constexpr (Attributes<T>) {
    return std::move(binding).template Attrs<T>();
  } else {
    static_assert(std::is_same_v<T, Context>, "no parameter of a handler is of such a type");
    return std::move(binding).template Ctx<ContextTag>();
  }
}

template <typename First, typename... Rest, typename Binding>
auto BindParameters(Binding&& binding) {
  if constexpr (sizeof...(Rest) == 0) {
    return BindParameter<First>(std::move(binding));
  } else {
    return BindParameters<Rest...>(BindParameter<First>(std::move(binding)));
  }
}

// Tells whether one of the parameters has type T.
template <typename T, typename... Parameters>
inline constexpr bool kHas = (std::is_same_v<T, std::remove_cvref_t<Parameters>> || ...);

// Turns an exception into an error: the callers of a handler are C, and no exception may reach
// them. This function allocates nothing.
inline XLA_FFI_Error* MakeError(const XLA_FFI_CallFrame* frame, XLA_FFI_Error_Code code,
                                const char* message) {
  XLA_FFI_Error_Create_Args args{};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = message;
  args.errc = code;
  return frame->api->XLA_FFI_Error_Create(&args);
}

// Calls a function as a handler. XLA does not check for buffers after the optional ones, nor for
// attributes if the handler has none, so this does. It checks for too few buffers as well: the
// error that XLA's headers make of these ended the process with jaxlib 0.11.2 on one machine. A
// frame with an extension may ask for no call, and has no buffers then.
template <auto kFunction>
struct Caller;

template <typename... Parameters, xla::ffi::Error (*kFunction)(Parameters...)>
struct Caller<kFunction> {
  template <typename... Types>
  static constexpr int64_t kCount = (kHas<Parameters, Types...> + ...);

  static constexpr int64_t kMinArgs = kCount<Buffer>, kMinRets = kCount<Result>;
  static constexpr int64_t kMaxArgs = kHas<xla::ffi::RemainingArgs, Parameters...>
                                          ? INT64_MAX
                                          : kCount<Buffer, std::optional<Buffer>>;
  static constexpr int64_t kMaxRets =
      kHas<xla::ffi::RemainingRets, Parameters...>
          ? INT64_MAX
          : kCount<Result, std::optional<Result>> + (kHasWorkSpace ? kCount<WorkSpace> : 0);

  static XLA_FFI_Error* Call(XLA_FFI_CallFrame* frame) {
    static auto* const handler =
        BindParameters<std::remove_cvref_t<Parameters>...>(xla::ffi::Ffi::Bind())
            .To(xla::ffi::Ffi::Wrapper<kFunction>(), kTraits)
            .release();
    if (frame->args.size > kMaxArgs || frame->rets.size > kMaxRets) {
      return MakeError(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                       "jaxops: more operands or results than a handler takes");
    }
    if (frame->extension_start == nullptr &&
        (frame->args.size < kMinArgs || frame->rets.size < kMinRets)) {
      return MakeError(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                       "jaxops: fewer operands or results than a handler takes");
    }
    if (!(Attributes<std::remove_cvref_t<Parameters>> || ...) && frame->attrs.size > 0) {
      return MakeError(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                       "jaxops: attributes of a handler that has none");
    }
    return handler->Call(frame);
  }
};

// Returns whether the bytes of an array are countable even without its dimensions of size 0: then
// no product of sizes overflows in a handler.
inline bool IsCountable(const XLA_FFI_Buffer& buffer) {
  const xla::ffi::AnyBuffer array(&buffer);
  int64_t bytes = 16;  // of the largest items
  for (const int64_t size : array.dimensions()) {
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes)) return false;
  }
  return true;
}

inline bool AreCountable(const XLA_FFI_CallFrame* frame) {
  for (int64_t i = 0; i < frame->args.size; ++i) {
    if (!IsCountable(*static_cast<const XLA_FFI_Buffer*>(frame->args.args[i]))) return false;
  }
  for (int64_t i = 0; i < frame->rets.size; ++i) {
    if (!IsCountable(*static_cast<const XLA_FFI_Buffer*>(frame->rets.rets[i]))) return false;
  }
  return true;
}

template <XLA_FFI_Handler* kHandler>
XLA_FFI_Error* Guard(XLA_FFI_CallFrame* frame) noexcept {
  try {
    if (!AreCountable(frame)) {
      return MakeError(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                       "jaxops: the sizes of an array are too large");
    }
    return kHandler(frame);
  } catch (const std::bad_alloc&) {
    return MakeError(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED,
                     "jaxops: out of host memory for the work space of an operator");
  } catch (const std::exception& exception) {
    return MakeError(frame, XLA_FFI_Error_Code_INTERNAL, exception.what());
  } catch (...) {
    return MakeError(frame, XLA_FFI_Error_Code_INTERNAL, "jaxops: an unknown exception");
  }
}

// Defines the handler that calls a function.
template <auto kFunction>
inline constexpr XLA_FFI_Handler* kHandler = &Guard<&Caller<kFunction>::Call>;

// A handler that is registered under a name in XLA; `module.h` lists all of them.
struct Registration {
  Registration(const char* name, XLA_FFI_Handler* handler)
      : name(name), handler(handler), next(std::exchange(first, this)) {}

  const char* name;
  XLA_FFI_Handler* handler;
  const Registration* next;
  static inline constinit const Registration* first = nullptr;
};

// Returns the handler that is registered under a name. Throws if none is.
inline XLA_FFI_Handler* FindHandler(const std::string& name) {
  for (const Registration* r = Registration::first; r != nullptr; r = r->next) {
    if (name == r->name) return r->handler;
  }
  throw std::invalid_argument("jaxops: no handler is registered under " + name);
}

}  // namespace jaxops::ffi

namespace xla::ffi {

template <jaxops::ffi::Attributes T>
struct AttrDecoding<T> {
  using Type = T;

  static std::optional<T> Decode(XLA_FFI_AttrType, void* dictionary, DiagnosticEngine& diagnostic) {
    using Names = jaxops::ffi::AttributeNames<T>;
    const auto& attributes = *static_cast<const XLA_FFI_Attrs*>(dictionary);
    const auto is_other = [&](auto i) {
      return !jaxops::ffi::IsText(*attributes.names[Names::kPlaces[i]], Names::kNames[i]);
    };
    if (attributes.size != Names::kCount || jaxops::ffi::AnyOf<Names::kCount>(is_other)) {
      return diagnostic.Emit("Attributes must be ") << T::kMembers;
    }
    std::optional<T> decoded(std::in_place);
    const auto is_wrong = [&](auto i) {
      auto& member = std::get<i>(decoded->Members());
      constexpr size_t kPlace = Names::kPlaces[i];
      const auto value = AttrDecoding<std::remove_reference_t<decltype(member)>>::Decode(
          attributes.types[kPlace], attributes.attrs[kPlace], diagnostic);
      if (!value) diagnostic.Emit(" of attribute ") << Names::kNames[i];
      if (value) member = *value;
      return !value;
    };
    if (jaxops::ffi::AnyOf<Names::kCount>(is_wrong)) decoded.reset();
    return decoded;
  }
};

template <typename Enum>
  requires std::is_enum_v<Enum>
struct AttrDecoding<Enum> {
  using Type = Enum;

  static std::optional<Enum> Decode(XLA_FFI_AttrType type, void* attribute,
                                    DiagnosticEngine& diagnostic) {
    if (type != XLA_FFI_AttrType_STRING) {
      return diagnostic.Emit("Wrong attribute type: expected string but got ") << type;
    }
    const auto& name = *static_cast<const XLA_FFI_ByteSpan*>(attribute);
    constexpr const auto& kNames = jaxops::ffi::kEnumNames<Enum>;
    Enum value = {};
    const auto is_name = [&](auto i) {
      value = kNames[i].value;
      return jaxops::ffi::IsText(name, kNames[i].name);
    };
    if (jaxops::ffi::AnyOf<kNames.size()>(is_name)) return value;
    return diagnostic.Emit("Unknown name ") << std::string_view(name.ptr, name.len);
  }
};

}  // namespace xla::ffi

#endif  // JAXOPS_FFI_BIND_H_
