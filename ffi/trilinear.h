// Decoding shared by the CPU and the CUDA handlers of trilinear interpolation in cells.
#ifndef JAXOPS_FFI_TRILINEAR_H_
#define JAXOPS_FFI_TRILINEAR_H_

#include "common/trilinear.h"
#include "ffi/decode.h"

namespace jaxops::ffi::trilinear {

using jaxops::trilinear::Call;

// The buffers of a call; null: it has none of that name.
struct Buffers {
  const xla::ffi::AnyBuffer* features;
  const xla::ffi::AnyBuffer* points;
  const xla::ffi::AnyBuffer* cotangent;
  const xla::ffi::AnyBuffer* out;
  const xla::ffi::AnyBuffer* dfeatures;
  const xla::ffi::AnyBuffer* dpoints;
};

// Fills `call`, whose derivative is along `directions`.
xla::ffi::Error Decode(Call& call, const Buffers& buffers, xla::ffi::RemainingArgs directions);

// The handlers, given run(call) -> Error.
template <typename Run>
xla::ffi::Error Sample(Run&& run, const xla::ffi::AnyBuffer& features,
                       const xla::ffi::AnyBuffer& points, xla::ffi::RemainingArgs directions,
                       const xla::ffi::AnyBuffer& out) {
  Call call = {};
  xla::ffi::Error error =
      Decode(call, {&features, &points, nullptr, &out, nullptr, nullptr}, directions);
  return error.failure() ? error : run(call);
}

template <typename Run>
xla::ffi::Error FeatureGrad(Run&& run, const xla::ffi::AnyBuffer& points,
                            const xla::ffi::AnyBuffer& cotangent,
                            xla::ffi::RemainingArgs directions,
                            const xla::ffi::AnyBuffer& dfeatures) {
  Call call = {};
  xla::ffi::Error error =
      Decode(call, {nullptr, &points, &cotangent, nullptr, &dfeatures, nullptr}, directions);
  return error.failure() ? error : run(call);
}

template <typename Run>
xla::ffi::Error PointGrad(Run&& run, const xla::ffi::AnyBuffer& features,
                          const xla::ffi::AnyBuffer& points, const xla::ffi::AnyBuffer& cotangent,
                          xla::ffi::RemainingArgs directions, const xla::ffi::AnyBuffer& dpoints) {
  Call call = {};
  xla::ffi::Error error =
      Decode(call, {&features, &points, &cotangent, nullptr, nullptr, &dpoints}, directions);
  return error.failure() ? error : run(call);
}

template <typename Run>
xla::ffi::Error Backward(Run&& run, const xla::ffi::AnyBuffer& features,
                         const xla::ffi::AnyBuffer& points, const xla::ffi::AnyBuffer& cotangent,
                         xla::ffi::RemainingArgs directions, const xla::ffi::AnyBuffer& dfeatures,
                         const xla::ffi::AnyBuffer& dpoints) {
  Call call = {};
  xla::ffi::Error error =
      Decode(call, {&features, &points, &cotangent, nullptr, &dfeatures, &dpoints}, directions);
  return error.failure() ? error : run(call);
}

}  // namespace jaxops::ffi::trilinear

#endif  // JAXOPS_FFI_TRILINEAR_H_
