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
  const auto size_of_group = [&](int64_t min) {
    return sizes.groups == 1 ? random.Size(min) : random.Between(min, 9);
  };
  const int64_t channels = size_of_group(0);
  const int64_t outputs = size_of_group(direction == Direction::kInputGrad ? 0 : 1);
  sizes.groups = channels == 0 ? 1 : sizes.groups;
  sizes.channels = sizes.groups * channels;
  sizes.outputs = sizes.groups * outputs;
  sizes.dtype = random.Float();
  sizes.result_dtype = random.OneIn(3) ? ArithmeticOf(sizes.dtype) : sizes.dtype;
  int64_t image = sizes.channels, output_image = sizes.outputs;
  for (const auto& dim : sizes.dims) {
    image *= dim.in;
    output_image *= dim.out;
  }
  const int64_t kernel = sizes.taps() * channels * sizes.outputs;
  const int64_t result = direction == Direction::kForward     ? output_image
                         : direction == Direction::kInputGrad ? image
                                                              : kernel;
  // The handler makes no call without results.
  const bool has_many = result * sizes.dims[2].taps < 2000 && random.OneIn(20);
  Calls calls(result == 0 ? 0 : has_many ? random.Between(60, 80) : random.Between(1, 3), sizes);
  for (conv::cpu::Call& call : calls) {
    const int64_t images = random.Between(direction == Direction::kKernelGrad ? 0 : 1, 3);
    for (int64_t i = 0; i < images; ++i) {
      const bool has_g = direction == Direction::kInputGrad;
      call.images.push_back(arrays.Floats(has_g ? output_image : image, sizes.dtype));
      if (direction == Direction::kKernelGrad) {
        call.cotangents.push_back(arrays.Floats(output_image, sizes.dtype));
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
