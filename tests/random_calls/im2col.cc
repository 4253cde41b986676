#include "cpu/im2col.h"

#include "tests/random_calls/calls.h"
#include "tests/random_calls/window.h"

namespace jaxops::random_calls {
namespace {

Call Make(Random& random, Arrays& arrays) {
  im2col::Call call = {};
  SetWindow(random, call.dims);
  call.rows = 1;
  call.channels_last = random.OneIn(2);
  call.channels = call.channels_last ? random.Size() : 1;
  call.rows = IsLarge(random) ? LargeCount(random, call.patches_size() + call.image_size())
                              : random.Between(0, 5);
  if (random.OneIn(2)) {
    call.item_bytes = random.Pick({1, 2, 4, 8});
    call.from = arrays.Bytes(call.image_size(), call.item_bytes);
    call.to = arrays.Result(call.patches_size(), call.item_bytes);
    return [call](const cpu::ParallelFor& run) { im2col::cpu::RunIm2Col(call, run); };
  }
  call.dtype = random.Float();
  call.item_bytes = static_cast<int>(SizeOf(call.dtype));
  call.from = arrays.Floats(call.patches_size(), call.dtype);
  call.to = arrays.Result(call.image_size(), call.dtype);
  return [call](const cpu::ParallelFor& run) { im2col::cpu::RunCol2Im(call, run); };
}

const Registration kRegistration("im2col", Make);

}  // namespace

}  // namespace jaxops::random_calls
