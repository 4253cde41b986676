#include "cpu/conv.h"

#include "tests/random_calls/calls.h"
#include "tests/random_calls/window.h"

namespace jaxops::random_calls {
namespace {

enum class Direction { kForward, kInputGrad, kKernelGrad };

Call Make(Random& random, Arrays& arrays) {
  using conv::cpu::Calls;
  const auto direction =
      random.Pick({Direction::kForward, Direction::kInputGrad, Direction::kKernelGrad});
  conv::cpu::Call sizes = {};
  SetWindow(random, sizes.dims);
  sizes.groups = random.OneIn(2) ? 1 : random.Between(1, 20);
  const auto of_group = [&](int64_t least) {
    return sizes.groups == 1 ? random.Size(least) : random.Between(least, 9);
  };
  const int64_t channels = of_group(0), outputs = of_group(1);
  sizes.groups = channels == 0 ? 1 : sizes.groups;
  sizes.channels = sizes.groups * channels;
  sizes.outputs = sizes.groups * outputs;
  sizes.dtype = random.Float();
  sizes.result_dtype = random.OneIn(3) ? ArithmeticOf(sizes.dtype) : sizes.dtype;
  int64_t image = sizes.channels, of_result = sizes.outputs;
  for (const auto& dim : sizes.dims) {
    image *= dim.in;
    of_result *= dim.out;
  }
  const int64_t kernel = sizes.taps() * channels * sizes.outputs;
  const int64_t result = direction == Direction::kForward     ? of_result
                         : direction == Direction::kInputGrad ? image
                                                              : kernel;
  // The handler makes no call without results.
  Calls calls(result == 0 ? 0 : random.Between(1, 3), sizes);
  for (conv::cpu::Call& call : calls) {
    const int64_t images = random.Between(direction == Direction::kKernelGrad ? 0 : 1, 3);
    for (int64_t i = 0; i < images; ++i) {
      const bool has_g = direction == Direction::kInputGrad;
      call.images.push_back(arrays.Floats(has_g ? of_result : image, sizes.dtype));
      if (direction == Direction::kKernelGrad) {
        call.cotangents.push_back(arrays.Floats(of_result, sizes.dtype));
      } else {
        call.results.push_back(arrays.Result(result, sizes.result_dtype));
      }
    }
    if (direction == Direction::kKernelGrad) {
      call.results = {arrays.Result(result, sizes.result_dtype)};
    } else {
      call.kernel = arrays.Floats(kernel, sizes.dtype);
    }
    if (direction == Direction::kForward && random.OneIn(2)) {
      call.bias = arrays.Floats(sizes.outputs, ArithmeticOf(sizes.dtype));
    }
  }
  if (direction == Direction::kForward) {
    const Activation activation = random.AnyActivation();
    for (conv::cpu::Call& call : calls) call.activation = activation;
  }
  return [=](const cpu::ParallelFor& run) {
    if (calls.empty()) return;
    switch (direction) {
      case Direction::kForward:
        return conv::cpu::RunForward(calls, run);
      case Direction::kInputGrad:
        return conv::cpu::RunInputGrad(calls, run);
      case Direction::kKernelGrad:
        return conv::cpu::RunKernelGrad(calls, run);
    }
  };
}

const Registration kRegistration("conv", Make);

}  // namespace

}  // namespace jaxops::random_calls
