// Division by a run-time constant as a multiplication and a shift (Granlund and Montgomery 1994,
// "Division by Invariant Integers using Multiplication"), because every thread decodes its index.
#ifndef JAXOPS_COMMON_FAST_DIVIDE_H_
#define JAXOPS_COMMON_FAST_DIVIDE_H_

#include <bit>
#include <cstdint>
#include <type_traits>

#include "common/host_device.h"

namespace jaxops {

// Exact for dividends in [0, 2^(bits - 1)) and divisors in [1, 2^(bits - 1)), with the 32 or 64
// bits of UInt.
template <typename UInt>
class FastDividerOf {
  static constexpr int kBits = 8 * sizeof(UInt);

 public:
  FastDividerOf() = default;
  explicit FastDividerOf(int64_t divisor) : divisor_(static_cast<UInt>(divisor)) {
    // Launchers make many dividers: 32-bit products need only 64-bit arithmetic.
    using Wide = std::conditional_t<kBits == 32, uint64_t, unsigned __int128>;
    shift_ = std::bit_width(divisor_ - 1);
    // The multiplier is the rounded-up 2^bits * 2^shift / divisor minus 2^bits.
    multiplier_ =
        static_cast<UInt>((Wide{1} << kBits) * ((Wide{1} << shift_) - divisor_) / divisor_ + 1);
  }

  JAXOPS_HOST_DEVICE UInt divisor() const { return divisor_; }

  JAXOPS_HOST_DEVICE UInt Quotient(UInt n) const { return (HighProduct(n) + n) >> shift_; }

  // Replaces n by n / divisor and returns n % divisor.
  JAXOPS_HOST_DEVICE UInt DivMod(UInt& n) const {
    const UInt quotient = Quotient(n);
    const UInt remainder = n - quotient * divisor_;
    n = quotient;
    return remainder;
  }

 private:
  // The upper half of n * multiplier.
  JAXOPS_HOST_DEVICE UInt HighProduct(UInt n) const {
    if constexpr (kBits == 32) {
      return static_cast<uint32_t>((uint64_t{n} * multiplier_) >> 32);
    } else {
#if defined(__CUDA_ARCH__)
      return __umul64hi(n, multiplier_);
#else
      return static_cast<uint64_t>((static_cast<unsigned __int128>(n) * multiplier_) >> 64);
#endif
    }
  }

  UInt divisor_ = 1;
  UInt multiplier_ = 1;
  uint32_t shift_ = 0;
};

using FastDivider = FastDividerOf<uint32_t>;
using FastDivider64 = FastDividerOf<uint64_t>;

}  // namespace jaxops

#endif  // JAXOPS_COMMON_FAST_DIVIDE_H_
