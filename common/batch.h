// Leading batch dimensions of a set of operands that broadcast against each other.
#ifndef JAXOPS_COMMON_BATCH_H_
#define JAXOPS_COMMON_BATCH_H_

#include <array>
#include <cstdint>

#include "common/host_device.h"

namespace jaxops {

// The maximum exceeds the alternations of batched and broadcast dimensions of nested vmaps in
// practice.
inline constexpr int kMaxBatchDims = 8;

// Maps a flat batch index to the element offset of each of `kOperands` operands. An operand that
// does not vary along a dimension has stride 0 there. Dimensions that are contiguous
// in every operand are merged, so that the usual case costs no division at all.
template <int kOperands>
class BatchMap {
 public:
  // Appends the next (faster varying) dimension. Strides are in elements. Returns false when the
  // map is full.
  bool Append(int64_t size, const std::array<int64_t, kOperands>& strides) {
    size_ *= size;
    if (size == 1) return true;
    if (rank_ > 0) {
      bool mergeable = true;
      for (int i = 0; i < kOperands; ++i) {
        mergeable = mergeable && strides_[rank_ - 1][i] == strides[i] * size;
      }
      if (mergeable) {
        sizes_[rank_ - 1] *= size;
        for (int i = 0; i < kOperands; ++i) strides_[rank_ - 1][i] = strides[i];
        return true;
      }
    }
    if (rank_ == kMaxBatchDims) return false;
    sizes_[rank_] = size;
    for (int i = 0; i < kOperands; ++i) strides_[rank_][i] = strides[i];
    ++rank_;
    return true;
  }

  // Appends the dimensions of another map; operand i here has the strides of `operands[i]` there.
  template <int kOthers>
  bool AppendFrom(const BatchMap<kOthers>& other, const std::array<int, kOperands>& operands) {
    bool fits = true;
    for (int d = 0; d < other.rank(); ++d) {
      std::array<int64_t, kOperands> strides;
      for (int i = 0; i < kOperands; ++i) strides[i] = other.stride(d, operands[i]);
      fits = fits && Append(other.size(d), strides);
    }
    if (other.size() == 0) size_ = 0;
    return fits;
  }

  int rank() const { return rank_; }
  int64_t size(int dim) const { return sizes_[dim]; }
  int64_t stride(int dim, int operand) const { return strides_[dim][operand]; }

  // Number of batch entries: the product of all dimensions.
  JAXOPS_HOST_DEVICE int64_t size() const { return size_; }

  // The element offsets of all operands for the flat batch index `index`, for kernels that need
  // several offsets and have less than 2^32 entries: each dimension costs one 32-bit division, and
  // the slowest one none.
  struct Offsets {
    JAXOPS_HOST_DEVICE int64_t operator[](int operand) const { return of[operand]; }
    int64_t of[kOperands] = {};
  };
  JAXOPS_HOST_DEVICE Offsets AllOffsets(uint32_t index) const {
    Offsets offsets;
#if defined(__CUDACC__)
#pragma unroll 1
#endif
    for (int d = rank_ - 1; d >= 0; --d) {
      const auto size = static_cast<uint32_t>(sizes_[d]);
      const uint32_t quotient = d == 0 ? 0 : index / size;
      const uint32_t position = index - quotient * size;
      for (int i = 0; i < kOperands; ++i) offsets.of[i] += position * strides_[d][i];
      index = quotient;
    }
    return offsets;
  }

  // Element offset of `operand` for the flat batch index `index`.
  JAXOPS_HOST_DEVICE int64_t Offset(int64_t index, int operand) const {
    return rank_ <= 1 ? index * strides_[0][operand] : NestedOffset(index, operand);
  }

 private:
  // This loop is not unrolled, because nested vmaps are too rare to enlarge every kernel by their
  // divisions. It is not a call either, which would keep live values in a few registers.
  JAXOPS_HOST_DEVICE int64_t NestedOffset(int64_t index, int operand) const {
    int64_t offset = 0;
#if defined(__CUDACC__)
#pragma unroll 1
#endif
    for (int d = rank_ - 1; d > 0; --d) {
      const int64_t quotient = index / sizes_[d];
      offset += (index - quotient * sizes_[d]) * strides_[d][operand];
      index = quotient;
    }
    return offset + index * strides_[0][operand];
  }

  int rank_ = 0;
  int64_t size_ = 1;
  int64_t sizes_[kMaxBatchDims] = {};
  int64_t strides_[kMaxBatchDims][kOperands] = {};
};

}  // namespace jaxops

#endif  // JAXOPS_COMMON_BATCH_H_
