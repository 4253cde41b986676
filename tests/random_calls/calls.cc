#include "tests/random_calls/calls.h"

#include <algorithm>
#include <limits>

namespace jaxops::random_calls {
namespace {

// The bits of a number: ordinary ones are of about -4 to 4.
uint64_t FloatBits(Random& random, DType dtype, bool is_special) {
  const int exponent_bits = dtype == DType::kF64 ? 11 : dtype == DType::kF16 ? 5 : 8;
  const int mantissa_bits = static_cast<int>(8 * SizeOf(dtype)) - 1 - exponent_bits;
  const uint64_t max = (uint64_t{1} << exponent_bits) - 1;
  const uint64_t sign = random.Below(2);
  uint64_t exponent = max / 2 + random.Between(-3, 1);
  uint64_t mantissa = random.Bits() & ((uint64_t{1} << mantissa_bits) - 1);
  if (is_special) {
    switch (random.Below(8)) {
      case 0:
        exponent = max, mantissa = 0;
        break;  // infinity
      case 1:
        exponent = max, mantissa |= 1;
        break;  // NaN
      case 2:
        exponent = 0;
        break;  // denormal
      case 3:
        exponent = mantissa = 0;
        break;  // zero
      case 4:
        exponent = max - 1;
        break;  // huge
      default:
        break;
    }
  }
  return (sign << exponent_bits | exponent) << mantissa_bits | mantissa;
}

void FillFloats(Random& random, char* data, int64_t count, DType dtype, bool has_special) {
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t bits = FloatBits(random, dtype, has_special && random.OneIn(3));
    std::memcpy(data + i * SizeOf(dtype), &bits, SizeOf(dtype));  // of a little-endian machine
  }
}

std::vector<Registration>& AllRegistered() {
  static std::vector<Registration> all;
  return all;
}

}  // namespace

Registration::Registration(const char* name, MakeCall make) : name(name), make(make) {
  AllRegistered().push_back(*this);
}

const std::vector<Registration>& Registered() { return AllRegistered(); }

Arrays::Array& Arrays::New(int64_t count, int64_t item) {
  constexpr int64_t kMaxBytes = int64_t{1} << 28;
  if (count > (kMaxBytes - static_cast<int64_t>(bytes_)) / item) throw TooLarge();
  bytes_ += count * item;
  // Some arrays begin where memory does, others are only as aligned as their elements.
  const size_t offset = random_.OneIn(2) ? 0 : item * random_.Below(16);
  const size_t bytes = count * item;
  Array array{std::unique_ptr<char[]>(new char[offset + bytes]), nullptr, bytes, false, {}};
  array.data = array.memory.get() + offset;
  return arrays_.emplace_back(std::move(array));
}

void* Arrays::Floats(int64_t count, DType dtype) {
  Array& array = New(count, SizeOf(dtype));
  FillFloats(random_, array.data, count, dtype, random_.OneIn(3));
  return array.data;
}

int32_t* Arrays::Integers(int64_t count, int64_t min, int64_t max, bool has_any) {
  auto* data = reinterpret_cast<int32_t*>(New(count, sizeof(int32_t)).data);
  constexpr auto kFar = std::numeric_limits<int32_t>();
  for (int64_t i = 0; i < count; ++i) {
    data[i] = static_cast<int32_t>(random_.Between(min, max));
    if (has_any && random_.OneIn(6)) {
      data[i] = random_.Pick({kFar.min(), kFar.max(), -1, static_cast<int32_t>(max) + 1,
                              static_cast<int32_t>(random_.Bits())});
    }
  }
  return data;
}

void* Arrays::Bytes(int64_t count, int64_t item) {
  Array& array = New(count, item);
  for (size_t i = 0; i < array.bytes; ++i) array.data[i] = static_cast<char>(random_.Bits());
  return array.data;
}

void* Arrays::Result(int64_t count, int64_t item) {
  Array& array = New(count, item);
  array.is_written = true;
  return array.data;
}

void* Arrays::State(int64_t count, DType dtype) {
  Array& array = New(count, SizeOf(dtype));
  array.is_written = true;
  FillFloats(random_, array.data, count, dtype, random_.OneIn(3));
  array.first.assign(array.data, array.bytes);
  return array.data;
}

void Arrays::Reset(unsigned char content) {
  for (Array& array : arrays_) {
    if (!array.is_written) continue;
    if (array.first.empty()) {
      std::memset(array.data, content, array.bytes);
    } else {
      std::memcpy(array.data, array.first.data(), array.bytes);
    }
  }
}

std::vector<std::string> Arrays::Results() const {
  std::vector<std::string> results;
  for (const Array& array : arrays_) {
    if (array.is_written) results.emplace_back(array.data, array.bytes);
  }
  return results;
}

int32_t* AllStarts(Random& random, Arrays& arrays, int64_t entries, int64_t time) {
  int32_t* starts = arrays.Integers(entries * time, 0, 0, false);
  const int64_t mean = random.Pick<int64_t>({1, 3, 20, 1000});
  for (int64_t entry = 0; entry < entries; ++entry) {
    auto start = static_cast<int32_t>(-random.Below(20));
    for (int64_t t = 0; t < time; ++t) {
      if (random.OneIn(mean)) start = static_cast<int32_t>(t);
      starts[entry * time + t] = start;
    }
  }
  return starts;
}

}  // namespace jaxops::random_calls
