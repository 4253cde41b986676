// The CUDA kernels of im2col and col2im against their definition.
#include <vector>

#include "cuda/im2col/launch.h"
#include "tests/kernels_on_host/arrays.h"

namespace {

using namespace host_cuda;       // NOLINT
using namespace jaxops::im2col;  // NOLINT

Call MakeCall(DType dtype) {
  Call call{};
  call.channels_last = Happens(60);
  call.rows = Pick(0, 3);
  call.channels = call.channels_last ? Pick(1, 2) * (Happens(50) ? 8 : Pick(1, 5)) : 1;
  call.dtype = dtype;
  call.item_bytes = static_cast<int>(SizeOf(dtype));
  for (int d = static_cast<int>(Pick(0, kMaxDims - 1)); d < kMaxDims; ++d) {
    Window& w = call.dims[d];
    w = {Pick(0, 7), 0, Pick(1, 3), Pick(1, 3), Pick(1, 3), Pick(-1, 3)};
    if (Happens(90)) w.in = std::max<int64_t>(w.in, 1);
    const int64_t begins = w.in + w.low + Pick(0, 3) - (w.taps - 1) * w.dilation;
    w.out = begins < 1 ? 0 : (begins - 1) / w.stride + 1;
  }
  return call;
}

// Calls visit(image, patches) for each entry of the patches, whose entry of the image may be -1.
template <typename Visit>
void ForEachEntry(const Call& call, Visit visit) {
  const Window &a = call.dims[0], &b = call.dims[1], &c = call.dims[2];
  const int64_t outs = a.out * b.out * c.out, taps = call.taps();
  for (int64_t row = 0; row < call.rows; ++row) {
    for (int64_t out = 0; out < outs; ++out) {
      for (int64_t tap = 0; tap < taps; ++tap) {
        int64_t entry = 0, rest_out = out, rest_tap = tap, size = 1;
        bool is_inside = true;
        for (const Window* w : {&c, &b, &a}) {
          const int64_t at =
              rest_out % w->out * w->stride + rest_tap % w->taps * w->dilation - w->low;
          is_inside = is_inside && at >= 0 && at < w->in;
          entry += at * size;
          size *= w->in;
          rest_out /= w->out;
          rest_tap /= w->taps;
        }
        const int64_t patch =
            call.channels_last ? (row * outs + out) * taps + tap : (row * taps + tap) * outs + out;
        for (int64_t i = 0; i < call.channels; ++i) {
          visit(is_inside ? (row * size + entry) * call.channels + i : -1,
                patch * call.channels + i);
        }
      }
    }
  }
}

void RunCalls() {
  const DType dtype = PickFloat();
  Call call = MakeCall(dtype);
  Floats image(call.image_size(), dtype), patches(call.patches_size(), dtype);
  image.Fill();
  call.from = image.data();
  call.to = patches.data();
  Check(cuda::LaunchIm2Col(nullptr, call) == cudaSuccess, "launch");
  ForEachEntry(call, [&](int64_t entry, int64_t patch) {
    Check(patches[patch] == (entry < 0 ? 0 : image[entry]), "im2col");
  });

  patches.Fill();
  Floats sums(call.image_size(), dtype);
  call.from = patches.data();
  call.to = sums.data();
  Check(cuda::LaunchCol2Im(nullptr, call) == cudaSuccess, "launch");
  std::vector<double> want(sums.count());
  ForEachEntry(call, [&](int64_t entry, int64_t patch) {
    if (entry >= 0) want[entry] += patches[patch];
  });
  for (int64_t i = 0; i < sums.count(); ++i) CheckClose(sums, i, want[i], call.taps(), "col2im");
}

}  // namespace

int main() {
  for (int i = 0; i < 200; ++i) RunCalls();
}
