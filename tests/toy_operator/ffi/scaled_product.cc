// The handler of the scaled product.
#include "common/scaled_product.h"

#ifdef JAXOPS_PLATFORM_CUDA
#include "cuda/scaled_product/launch.h"
#else
#include "cpu/scaled_product.h"
#endif
#include "ffi/bind.h"
#include "ffi/decode.h"

namespace jaxops::ffi::scaled_product {
namespace {

using jaxops::scaled_product::Call;

constexpr char kName[] = "scaled_product";

struct ProductAttributes {
  double scale;
  JAXOPS_ATTRIBUTES(scale);
};

xla::ffi::Error Product(Context context, const ProductAttributes& attributes, Buffer a, Buffer b,
                        Result out) {
  if (a.dimensions().size() == 0) return InvalidArgument(kName, ": a must have a dimension");
  Call call = {};
  call.width = a.dimensions().back();
  call.scale = attributes.scale;
  JAXOPS_RETURN_IF_ERROR(SetType(call.dtype, kName, "a", a));
  if (call.dtype != DType::kF32 && call.dtype != DType::kF64) {
    return InvalidArgument(kName, ": a must be f32 or f64");
  }
  const size_t rank = a.dimensions().size() - 1;
  JAXOPS_RETURN_IF_ERROR(CheckBuffer(kName, "b", b, rank, {call.width}, a.element_type()));
  JAXOPS_RETURN_IF_ERROR(CheckBuffer(kName, "out", *out, rank, {call.width}, a.element_type()));
  JAXOPS_RETURN_IF_ERROR(SetBatch<Call::kOperands>(
      kName, call.rows,
      {{{a.dimensions(), 1}, {b.dimensions(), 1}, {out->dimensions(), 1, BatchOperand::kWritten}}},
      rank));
  call.a = a.untyped_data();
  call.b = b.untyped_data();
  call.out = out->untyped_data();
  return Run(context, kName, JAXOPS_KERNEL(scaled_product, Product), call);
}

const Registration kProduct("jaxops_scaled_product", kHandler<Product>);

}  // namespace
}  // namespace jaxops::ffi::scaled_product
