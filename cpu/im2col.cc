// Patches of images, and images of patches, on the host.
//
// With channels last, the channels of neighbouring taps are contiguous in the image and in the
// patch. A patch then consists of segments of `taps * channels` entries (taps of the last
// dimension), or of `channels` if that dimension is dilated. With channels first, a segment is the
// entries at one tap of a line of patches. col2im sums the same segments.
#include "cpu/im2col.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/arrays.h"
#include "cpu/im2col_kernels.h"
#include "cpu/isa.h"

namespace jaxops::im2col::cpu {
namespace {

using jaxops::cpu::CeilDiv;
using jaxops::cpu::ParallelFor;
using jaxops::cpu::RunTasks;

// Bytes of patches of a task, which takes much longer than handing it to a thread.
constexpr int64_t kTaskBytes = 128 * 1024;

JAXOPS_DEFINE_BEST_KERNELS();

bool IsInside(const Window& window, int64_t in) { return 0 <= in && in < window.in; }

int64_t EntryOf(const Window& window, int64_t out, int64_t tap) {
  return out * window.stride + tap * window.dilation - window.low;
}

// Copies the patches of one line, which is a row, out0 and out1.
void MakePatchesChannelsLast(const Call& call, int64_t line) {
  const auto& [d0, d1, d2] = call.dims;
  const int64_t out1 = line % d1.out;
  const int64_t out0 = line / d1.out % d0.out;
  const int64_t row = line / d1.out / d0.out;
  const int64_t entry = call.channels * call.item_bytes;
  const int64_t run = d2.taps * entry;
  const char* image = static_cast<const char*>(call.from) + row * d0.in * d1.in * d2.in * entry;
  char* to = static_cast<char*>(call.to) + line * d2.out * call.taps() * entry;
  for (int64_t out2 = 0; out2 < d2.out; ++out2) {
    const int64_t first = EntryOf(d2, out2, 0);
    const int64_t low = std::clamp<int64_t>(-first, 0, d2.taps);
    const int64_t high = std::clamp<int64_t>(d2.in - first, low, d2.taps);
    for (int64_t tap0 = 0; tap0 < d0.taps; ++tap0) {
      const int64_t in0 = EntryOf(d0, out0, tap0);
      for (int64_t tap1 = 0; tap1 < d1.taps; ++tap1, to += run) {
        const int64_t in1 = EntryOf(d1, out1, tap1);
        if (!IsInside(d0, in0) || !IsInside(d1, in1)) {
          std::memset(to, 0, run);
          continue;
        }
        const char* from = image + (in0 * d1.in + in1) * d2.in * entry;
        if (d2.dilation == 1) {
          if (low > 0) std::memset(to, 0, low * entry);
          std::memcpy(to + low * entry, from + (first + low) * entry, (high - low) * entry);
          if (high < d2.taps) std::memset(to + high * entry, 0, (d2.taps - high) * entry);
          continue;
        }
        for (int64_t tap2 = 0; tap2 < d2.taps; ++tap2) {
          const int64_t in2 = first + tap2 * d2.dilation;
          if (IsInside(d2, in2)) {
            std::memcpy(to + tap2 * entry, from + in2 * entry, entry);
          } else {
            std::memset(to + tap2 * entry, 0, entry);
          }
        }
      }
    }
  }
}

// Sets to[i] = from[i * stride], for items of `kBytes`.
template <int kBytes>
void Gather(const char* from, int64_t stride, int64_t count, char* to) {
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * kBytes, from + i * stride * kBytes, kBytes);
  }
}

void Gather(const char* from, int64_t stride, int64_t count, int item_bytes, char* to) {
  if (stride == 1) {
    std::memcpy(to, from, count * item_bytes);
    return;
  }
  switch (item_bytes) {
    case 1:
      return Gather<1>(from, stride, count, to);
    case 2:
      return Gather<2>(from, stride, count, to);
    case 4:
      return Gather<4>(from, stride, count, to);
    case 8:
      return Gather<8>(from, stride, count, to);
    default:
      return Gather<16>(from, stride, count, to);
  }
}

// Copies the entries of all patches at one tap of a row.
void MakePatchesChannelsFirst(const Call& call, int64_t row_and_tap) {
  const auto& [d0, d1, d2] = call.dims;
  const int64_t tap2 = row_and_tap % d2.taps;
  const int64_t tap1 = row_and_tap / d2.taps % d1.taps;
  const int64_t tap0 = row_and_tap / d2.taps / d1.taps % d0.taps;
  const int64_t row = row_and_tap / call.taps();
  const int item = call.item_bytes;
  const char* image = static_cast<const char*>(call.from) + row * d0.in * d1.in * d2.in * item;
  char* to = static_cast<char*>(call.to) + row_and_tap * d0.out * d1.out * d2.out * item;
  const int64_t first = EntryOf(d2, 0, tap2);
  const int64_t low = std::clamp<int64_t>(first < 0 ? CeilDiv(-first, d2.stride) : 0, 0, d2.out);
  const int64_t high =
      std::clamp<int64_t>(first < d2.in ? CeilDiv(d2.in - first, d2.stride) : 0, low, d2.out);
  for (int64_t out0 = 0; out0 < d0.out; ++out0) {
    const int64_t in0 = EntryOf(d0, out0, tap0);
    for (int64_t out1 = 0; out1 < d1.out; ++out1, to += d2.out * item) {
      const int64_t in1 = EntryOf(d1, out1, tap1);
      if (!IsInside(d0, in0) || !IsInside(d1, in1)) {
        std::memset(to, 0, d2.out * item);
        continue;
      }
      std::memset(to, 0, low * item);
      if (low < high) {
        const int64_t from = (in0 * d1.in + in1) * d2.in + first + low * d2.stride;
        Gather(image + from * item, d2.stride, high - low, item, to + low * item);
      }
      std::memset(to + high * item, 0, (d2.out - high) * item);
    }
  }
}

// Divides `units` of `unit_bytes` each into tasks of about the same size for the threads.
template <typename MakeUnits>
void Share(int64_t units, int64_t unit_bytes, const ParallelFor& parallel_for, MakeUnits&& make) {
  const int64_t per_task = std::max<int64_t>(1, kTaskBytes / std::max<int64_t>(1, unit_bytes));
  RunTasks(CeilDiv(units, per_task), parallel_for,
           [&](int64_t task) { make(task * per_task, std::min(units, (task + 1) * per_task)); });
}

}  // namespace

void RunIm2Col(const Call& call, const ParallelFor& parallel_for) {
  if (call.patches_size() == 0) return;
  const int64_t units = call.channels_last ? call.rows * call.dims[0].out * call.dims[1].out
                                           : call.rows * call.taps();
  const int64_t unit_bytes = call.patches_size() / units * call.item_bytes;
  Share(units, unit_bytes, parallel_for, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      if (call.channels_last) {
        MakePatchesChannelsLast(call, unit);
      } else {
        MakePatchesChannelsFirst(call, unit);
      }
    }
  });
}

void RunCol2Im(const Call& call, const ParallelFor& parallel_for) {
  if (call.image_size() == 0) return;
  const Kernels& kernels = BestKernels();
  const int64_t lines = call.rows * call.dims[0].in * call.dims[1].in;
  const int64_t line_bytes = (call.image_size() + call.patches_size()) / lines * call.item_bytes;
  const bool is_half = call.dtype == DType::kF16 || call.dtype == DType::kBF16;
  const int64_t buffer = is_half ? call.dims[2].in * call.channels : 0;
  Share(lines, line_bytes, parallel_for, [&](int64_t begin, int64_t end) {
    std::vector<float> sums(buffer);
    kernels.col2im(call, begin, end, sums.data());
  });
}

}  // namespace jaxops::im2col::cpu
