// Calls of the first steps of segments on every platform.
//
//   starts[t] = the last step s <= t with ids[s] != ids[s - 1], or `first` if there is none after
//   step 0
#ifndef JAXOPS_COMMON_SEGMENT_STARTS_H_
#define JAXOPS_COMMON_SEGMENT_STARTS_H_

#include <cstdint>

#include "common/batch.h"

namespace jaxops::segment_starts {

// GPUs count steps in 32 bits, also those of a tile beyond the end.
inline constexpr int64_t kMaxTime = (int64_t{1} << 30) - 1;

struct Call {
  enum Operand { kIds, kStarts, kOperands };

  int64_t time;   // at most INT32_MAX
  int32_t first;  // at most 0
  BatchMap<kOperands> batch;
  int id_bytes;  // 1, 2, 4 or 8
  const void* ids;
  int32_t* starts;
};

// Calls function(id) with a value of the unsigned type of the ids, of which only the bits matter.
template <typename Function>
auto DispatchId(int id_bytes, Function&& function) {
  switch (id_bytes) {
    case 1:
      return function(uint8_t{});
    case 2:
      return function(uint16_t{});
    case 4:
      return function(uint32_t{});
    default:
      return function(uint64_t{});
  }
}

}  // namespace jaxops::segment_starts

#endif  // JAXOPS_COMMON_SEGMENT_STARTS_H_
