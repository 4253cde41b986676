// This header turns a batch of results without a sum into one entry of as many rows.
#ifndef JAXOPS_CUDA_FOCAL_LOSS_AS_ONE_ENTRY_H_
#define JAXOPS_CUDA_FOCAL_LOSS_AS_ONE_ENTRY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace jaxops::focal_loss::cuda {

// An operand that the call does not have may have any stride.
inline constexpr int64_t kAnyStride = -1;

// AsOneEntry returns the call with all entries' rows in one entry, if the batch is one dimension
// along which every operand has this stride, in elements.
template <typename Call>
std::optional<Call> AsOneEntry(const Call& call,
                               const std::array<int64_t, Call::kOperands>& strides) {
  if (call.sum != nullptr || call.batch.rank() != 1) return std::nullopt;
  for (size_t i = 0; i < strides.size(); ++i) {
    if (strides[i] != kAnyStride && call.batch.stride(0, static_cast<int>(i)) != strides[i]) {
      return std::nullopt;
    }
  }
  Call flat = call;
  flat.rows *= call.batch.size();
  flat.batch = {};
  return flat;
}

}  // namespace jaxops::focal_loss::cuda

#endif  // JAXOPS_CUDA_FOCAL_LOSS_AS_ONE_ENTRY_H_
