#include "cpu/concatenate.h"

#include "tests/random_calls/calls.h"

namespace jaxops::random_calls {
namespace {

using concatenate::Job;

// Some arrays do not vary along some dimensions of the rows.
void AddJoin(Random& random, Arrays& arrays, Job& job, int64_t item) {
  // Rows of many equal pieces and long rows are copied in ways of their own.
  const bool has_many = random.OneIn(20);
  const int64_t count = has_many ? random.Between(32, 80) : random.Between(0, 6);
  const int64_t own_size = has_many && random.OneIn(2) ? random.Between(1, 8) : -1;
  int64_t row_bytes = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t size = own_size >= 0       ? own_size
                         : random.OneIn(200) ? random.Between(100'000, 400'000)
                                             : random.Size();
    const int64_t extent = item * size;
    row_bytes += extent;
    if (extent == 0 || random.OneIn(has_many ? 100 : 8)) {
      job.pieces.push_back({nullptr, nullptr, 0, 0, extent, 0});
      continue;
    }
    const auto varies = random.OneIn(2) ? ~uint32_t{0} : static_cast<uint32_t>(random.Bits());
    int64_t rows = 1;
    for (int d = 0; d < job.row_dims; ++d) {
      if (varies >> d & 1) {
        rows *= job.row_sizes[d];
      } else {
        job.broadcasts = true;
      }
    }
    const int64_t stride = extent + (random.OneIn(3) ? item * random.Below(5) : 0);
    char* const source = static_cast<char*>(arrays.Bytes(rows * stride / item, item));
    job.pieces.push_back({source, source + rows * stride, stride, extent, extent,
                          varies & ((uint32_t{1} << job.row_dims) - 1)});
  }
  job.destinations = {{arrays.Result(job.rows * row_bytes / item, item), row_bytes, 0, count}};
}

void AddSplit(Random& random, Arrays& arrays, Job& job, int64_t item) {
  job.row_dims = 0;
  const int64_t entries = random.Size();
  char* const whole = static_cast<char*>(arrays.Bytes(job.rows * entries, item));
  const char* const end = whole + job.rows * entries * item;
  for (int64_t i = 0, count = random.Between(0, 6); i < count; ++i) {
    const int64_t start = random.Between(0, entries), size = random.Between(0, entries - start);
    const int64_t extent = size + (random.OneIn(3) ? random.Below(5) : 0);
    void* const part = arrays.Result(job.rows * extent, item);
    const char* const source = end == whole ? static_cast<char*>(part) : whole + start * item;
    job.destinations.push_back({part, extent * item, i, 1});
    job.pieces.push_back({source, end, entries * item, size * item, extent * item, 0});
  }
}

Call Make(Random& random, Arrays& arrays) {
  Job job;
  for (int64_t d = random.Below(4); d > 0; --d) {
    job.row_sizes[job.row_dims] = random.OneIn(4) ? random.Size() : random.Between(1, 4);
    job.rows *= job.row_sizes[job.row_dims++];
  }
  if (IsLarge(random) && job.rows > 0) {
    job.row_sizes[job.row_dims] = LargeCount(random, 40 * job.rows);
    job.rows *= job.row_sizes[job.row_dims++];
  }
  const int64_t item = random.Pick<int64_t>({1, 2, 4, 8});
  (random.OneIn(2) ? AddJoin : AddSplit)(random, arrays, job, item);
  return [job](const cpu::ParallelFor& run) { concatenate::cpu::RunMove(job, run); };
}

const Registration kRegistration("concatenate", Make);

}  // namespace

}  // namespace jaxops::random_calls
