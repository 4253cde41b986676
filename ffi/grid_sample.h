// Decoding shared by the CPU and the CUDA handlers that sample volumes at points.
#ifndef JAXOPS_FFI_GRID_SAMPLE_H_
#define JAXOPS_FFI_GRID_SAMPLE_H_

#include <utility>

#include "common/grid_sample.h"
#include "ffi/decode.h"

namespace jaxops::ffi::grid_sample {

using jaxops::grid_sample::Call;

struct Attributes {
  int64_t point_rank;
  int32_t method;
  int32_t padding_mode;
  bool align_corners;
  bool deterministic;
};

// Adds the attributes, in the order of `Attributes`, to a handler's binding.
template <typename Binding>
auto BindAttributes(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Attr<int64_t>("point_rank")
      .template Attr<int32_t>("method")
      .template Attr<int32_t>("padding_mode")
      .template Attr<bool>("align_corners")
      .template Attr<bool>("deterministic");
}

// The buffers of a call; null: it has none of that name.
struct Buffers {
  const xla::ffi::AnyBuffer* volume;
  const xla::ffi::AnyBuffer* points;
  const xla::ffi::AnyBuffer* cotangent;
  const xla::ffi::AnyBuffer* out;
  const xla::ffi::AnyBuffer* dvolume;
  const xla::ffi::AnyBuffer* dpoints;
};

// Fills `call`, whose derivative is along `directions`, and whose work space is the one of
// `scratch` if there is one.
xla::ffi::Error Decode(Call& call, const Attributes& attributes, const Buffers& buffers,
                       xla::ffi::RemainingArgs directions, const xla::ffi::RemainingRets* scratch);

}  // namespace jaxops::ffi::grid_sample

#endif  // JAXOPS_FFI_GRID_SAMPLE_H_
