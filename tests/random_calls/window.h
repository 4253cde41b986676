// Random windows of one to three dimensions.
#ifndef JAXOPS_TESTS_RANDOM_CALLS_WINDOW_H_
#define JAXOPS_TESTS_RANDOM_CALLS_WINDOW_H_

#include "common/im2col.h"
#include "tests/random_calls/calls.h"

namespace jaxops::random_calls {

// Some taps of some windows are outside of the image, and some entries of it are in no window.
inline void SetWindow(Random& random, im2col::Window (&dims)[im2col::kMaxDims]) {
  const int64_t rank = random.Between(1, im2col::kMaxDims);
  const int64_t max = rank == 1 ? 40 : rank == 2 ? 9 : 5;
  for (int64_t d = im2col::kMaxDims - rank; d < im2col::kMaxDims; ++d) {
    im2col::Window& dim = dims[d];
    dim.in = random.Between(random.OneIn(8) ? 0 : 1, max);
    dim.taps = random.Between(random.OneIn(12) ? 0 : 1, 4);
    dim.stride = random.OneIn(2) ? 1 : random.Between(1, 4);
    dim.dilation = random.OneIn(2) ? 1 : random.Between(1, 3);
    dim.low = random.OneIn(2) ? 0 : random.Between(-3, 4);
    dim.out = random.Between(random.OneIn(8) ? 0 : 1, max);
  }
}

}  // namespace jaxops::random_calls

#endif  // JAXOPS_TESTS_RANDOM_CALLS_WINDOW_H_
