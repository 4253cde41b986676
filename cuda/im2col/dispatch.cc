// This file chooses the kernels of im2col and col2im, see common/im2col.h.
#include "cuda/common/dispatch.h"

#include "cuda/common/sizes.h"
#include "cuda/im2col/families.h"
#include "cuda/im2col/launch.h"

namespace jaxops::im2col::cuda {
namespace {

using jaxops::cuda::Always;
using jaxops::cuda::Device;
using jaxops::cuda::Family;
using jaxops::cuda::Table;

// Up to this number of bytes of patches, items take between 0.67 and 1.05 of the time of vectors.
constexpr int64_t kMaxItemsBytes = 8 << 20;

bool PrefersVectors(const Call& call, const Device&) {
  return call.patches_size() * call.item_bytes > kMaxItemsBytes;
}

constexpr Family<Call> kIm2ColFamilies[] = {
    // Vectors of 16 bytes need few divisions: (32,64,56,56,3) f32 takes 66.8 instead of 77.7 µs on
    // an H200.
    {"vectors", CanRunVectors, PrefersVectors, LaunchVectors},
    // A thread waits for fewer loads: (1,16,32,32,3) f32 1.73 -> 1.31 µs.
    {"items", Always<Call>, Always<Call>, LaunchItems},
};
const Table<Call> kIm2Col("im2col", "im2col", kIm2ColFamilies);

constexpr Family<Call> kCol2ImFamilies[] = {
    {"sum", Always<Call>, Always<Call>, LaunchSum},
};
const Table<Call> kCol2Im("col2im", "col2im", kCol2ImFamilies);

}  // namespace

cudaError_t LaunchIm2Col(cudaStream_t stream, const Call& call) {
  if (call.patches_size() == 0) return cudaSuccess;
  // An image without entries has nothing but padding, and no sizes to divide by.
  if (call.image_size() == 0) {
    return cudaMemsetAsync(call.to, 0, call.patches_size() * call.item_bytes, stream);
  }
  return kIm2Col.Run(stream, call);
}

cudaError_t LaunchCol2Im(cudaStream_t stream, const Call& call) {
  if (call.image_size() == 0) return cudaSuccess;
  // Without patches or taps all sums are zero, and there are no sizes to divide by.
  if (call.patches_size() == 0) {
    return cudaMemsetAsync(call.to, 0, call.image_size() * jaxops::cuda::SizeOf(call.dtype),
                           stream);
  }
  return kCol2Im.Run(stream, call);
}

}  // namespace jaxops::im2col::cuda
