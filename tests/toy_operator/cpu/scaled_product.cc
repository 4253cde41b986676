#include "cpu/scaled_product.h"

namespace jaxops::scaled_product::cpu {
namespace {

template <typename T>
void MultiplyRow(const Call& call, int64_t row) {
  const T* a = static_cast<const T*>(call.a) + call.rows.Offset(row, Call::kA);
  const T* b = static_cast<const T*>(call.b) + call.rows.Offset(row, Call::kB);
  T* out = static_cast<T*>(call.out) + call.rows.Offset(row, Call::kOut);
  for (int64_t i = 0; i < call.width; ++i) out[i] = static_cast<T>(call.scale) * a[i] * b[i];
}

}  // namespace

void RunProduct(const Call& call, const jaxops::cpu::ParallelFor& parallel_for) {
  jaxops::cpu::RunTasks(call.rows.size(), parallel_for, [&](int64_t row) {
    call.dtype == DType::kF64 ? MultiplyRow<double>(call, row) : MultiplyRow<float>(call, row);
  });
}

}  // namespace jaxops::scaled_product::cpu
