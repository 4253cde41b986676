// Division by a run-time constant as a multiplication and a shift (Granlund and Montgomery 1994,
// "Division by Invariant Integers using Multiplication"), because every thread decodes its index.
#ifndef JAXOPS_CUDA_FAST_DIVIDE_H_
#define JAXOPS_CUDA_FAST_DIVIDE_H_

#include <cstdint>

namespace jaxops::cuda {

// Exact for dividends and divisors in [0, 2^31) and [1, 2^31).
class FastDivider {
 public:
  FastDivider() = default;
  explicit FastDivider(int64_t divisor) : divisor_(static_cast<uint32_t>(divisor)) {
    while ((uint64_t{1} << shift_) < divisor_) ++shift_;
    // 2^32 * 2^shift / divisor rounded up is 2^32 plus this.
    multiplier_ = static_cast<uint32_t>(
        (uint64_t{1} << 32) * ((uint64_t{1} << shift_) - divisor_) / divisor_ + 1);
  }

  __host__ __device__ uint32_t divisor() const { return divisor_; }

  __device__ uint32_t Quotient(uint32_t n) const {
    return (__umulhi(n, multiplier_) + n) >> shift_;
  }

  // Replaces n by n / divisor and returns n % divisor.
  __device__ uint32_t Peel(uint32_t& n) const {
    const uint32_t quotient = Quotient(n);
    const uint32_t remainder = n - quotient * divisor_;
    n = quotient;
    return remainder;
  }

 private:
  uint32_t divisor_ = 1;
  uint32_t multiplier_ = 1;
  uint32_t shift_ = 0;
};

}  // namespace jaxops::cuda

#endif  // JAXOPS_CUDA_FAST_DIVIDE_H_
