// Arrays of the calls that run on the host, and how results are compared.
#ifndef JAXOPS_TESTS_KERNELS_ON_HOST_ARRAYS_H_
#define JAXOPS_TESTS_KERNELS_ON_HOST_ARRAYS_H_

#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "common/types.h"
#include "tests/kernels_on_host/device.h"

namespace host_cuda {

using jaxops::Activation;
using jaxops::DType;
using jaxops::SizeOf;

inline std::mt19937 random_numbers(1);

// A number in [least, most].
inline int64_t Pick(int64_t least, int64_t most) {
  return least + static_cast<int64_t>(random_numbers() % (most - least + 1));
}
inline bool Happens(int percent) { return Pick(1, 100) <= percent; }

inline DType PickFloat() { return static_cast<DType>(Pick(0, 3)); }
// A type for an operand next to x: float64 only if x has it.
inline DType PickFloatFor(DType x) {
  const DType found = PickFloat();
  return found == DType::kF64 ? x : found;
}

// Memory of an exact size, aligned to 16 bytes and to no more, as JAX promises.
class Memory {
 public:
  explicit Memory(int64_t bytes) {
    base_ = static_cast<char*>(std::aligned_alloc(32, (kBefore + bytes + 31) / 32 * 32));
    __asan_poison_memory_region(base_, kBefore);
    const int64_t end = kBefore + bytes, all = (end + 31) / 32 * 32;
    __asan_poison_memory_region(base_ + end, all - end);
    std::memset(data(), 0xcb, bytes);
  }
  ~Memory() {
    __asan_unpoison_memory_region(base_, kBefore);
    std::free(base_);
  }
  Memory(const Memory&) = delete;

  void* data() const { return base_ + kBefore; }

 private:
  static constexpr int64_t kBefore = 16;
  char* base_;
};

// Random floats.
class Floats : public Memory {
 public:
  Floats(int64_t count, DType type) : Memory(count * SizeOf(type)), count_(count), type_(type) {}

  void Fill() {
    for (int64_t i = 0; i < count_; ++i) Set(i, static_cast<double>(Pick(-64, 64)) / 32);
  }
  int64_t count() const { return count_; }
  DType type() const { return type_; }

  double operator[](int64_t i) const {
    if (i < 0 || i >= count_) std::abort();
    switch (type_) {
      case DType::kF16:
        return __half2float(static_cast<const __half*>(data())[i]);
      case DType::kBF16:
        return __bfloat162float(static_cast<const __nv_bfloat16*>(data())[i]);
      case DType::kF32:
        return static_cast<const float*>(data())[i];
      case DType::kF64:
        return static_cast<const double*>(data())[i];
    }
    std::abort();
  }

  void Set(int64_t i, double value) {
    switch (type_) {
      case DType::kF16:
        static_cast<__half*>(data())[i] = __float2half_rn(static_cast<float>(value));
        return;
      case DType::kBF16:
        static_cast<__nv_bfloat16*>(data())[i] = __float2bfloat16_rn(static_cast<float>(value));
        return;
      case DType::kF32:
        static_cast<float*>(data())[i] = static_cast<float>(value);
        return;
      case DType::kF64:
        static_cast<double*>(data())[i] = value;
        return;
    }
  }

 private:
  int64_t count_;
  DType type_;
};

// Integers of an operand; null without any.
class Numbers : Memory {
 public:
  explicit Numbers(const std::vector<int32_t>& numbers)
      : Memory(static_cast<int64_t>(numbers.size()) * 4), is_empty_(numbers.empty()) {
    std::copy(numbers.begin(), numbers.end(), static_cast<int32_t*>(Memory::data()));
  }
  const int32_t* data() const {
    return is_empty_ ? nullptr : static_cast<const int32_t*>(Memory::data());
  }

 private:
  bool is_empty_;
};

inline void Check(bool good, const std::string& what) {
  if (good) return;
  std::fprintf(stderr, "wrong: %s\n", what.c_str());
  std::exit(1);
}

// Checks entry i, a sum of `terms` products of numbers up to 2.
inline void CheckClose(const Floats& got, int64_t i, double want, int64_t terms,
                       const std::string& what) {
  constexpr double kEps[] = {0x1p-10, 0x1p-7, 0x1p-23, 0x1p-52};
  const double sum = got.type() == DType::kF64 ? 0x1p-52 : 0x1p-23;
  const double bound = kEps[static_cast<int>(got.type())] * (std::abs(want) + 0x1p-10) +
                       8 * sum * static_cast<double>(terms);
  Check(std::abs(got[i] - want) <= bound, what + " " + std::to_string(i) + ": " +
                                              std::to_string(got[i]) + " for " +
                                              std::to_string(want));
}

inline double Activated(Activation activation, double z) {
  switch (activation) {
    case Activation::kNone:
      return z;
    case Activation::kRelu:
      return z < 0 ? 0 : z;
    case Activation::kSilu:
      return z / (1 + std::exp(-z));
    case Activation::kGelu:
      return z * (1 + std::tanh(std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z))) / 2;
  }
  std::abort();
}

}  // namespace host_cuda

#endif  // JAXOPS_TESTS_KERNELS_ON_HOST_ARRAYS_H_
