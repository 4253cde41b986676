// Offsets of a BatchMap against sums of index times stride, for random dimensions.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "common/batch.h"

namespace {

constexpr int kOperands = 3;
using Map = jaxops::BatchMap<kOperands>;

void Check(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::exit(1);
}

struct Dimension {
  int64_t size;
  std::array<int64_t, kOperands> strides;
};

// Dense operands that vary along random ones of the dimensions, and have stride 0 along others.
std::vector<Dimension> MakeDimensions(std::mt19937& random) {
  std::vector<Dimension> dims(random() % 7);
  for (Dimension& dim : dims) dim.size = random() % 4;
  for (int i = 0; i < kOperands; ++i) {
    int64_t stride = 1 + random() % 5;
    for (size_t d = dims.size(); d-- > 0;) {
      const bool varies = random() % 3 != 0;
      dims[d].strides[i] = varies && dims[d].size != 1 ? stride : 0;
      if (varies) stride *= dims[d].size;
    }
  }
  return dims;
}

int64_t Expected(const std::vector<Dimension>& dims, int64_t index, int operand) {
  int64_t offset = 0;
  for (size_t d = dims.size(); d-- > 0;) {
    offset += index % dims[d].size * dims[d].strides[operand];
    index /= dims[d].size;
  }
  return offset;
}

void CheckMap(const Map& map, const std::vector<Dimension>& dims) {
  int64_t size = 1;
  for (const Dimension& dim : dims) size *= dim.size;
  Check(map.size() == size, "size");
  for (int64_t index = 0; index < size; ++index) {
    const Map::Offsets all = map.AllOffsets(static_cast<uint32_t>(index));
    for (int i = 0; i < kOperands; ++i) {
      Check(map.Offset(index, i) == Expected(dims, index, i), "Offset");
      Check(all[i] == Expected(dims, index, i), "AllOffsets");
    }
  }
}

}  // namespace

int main() {
  std::mt19937 random(0);
  int merged = 0;
  for (int n = 0; n < 20000; ++n) {
    const std::vector<Dimension> dims = MakeDimensions(random);
    Map map;
    for (const Dimension& dim : dims) Check(map.Append(dim.size, dim.strides), "Append");
    CheckMap(map, dims);
    merged += map.rank() < static_cast<int>(dims.size());
    // The same map from two.
    Map first, second, joined;
    const size_t cut = dims.empty() ? 0 : random() % dims.size();
    for (size_t d = 0; d < dims.size(); ++d) {
      (d < cut ? first : second).Append(dims[d].size, dims[d].strides);
    }
    Check(joined.AppendFrom(first, {0, 1, 2}) && joined.AppendFrom(second, {0, 1, 2}),
          "AppendFrom");
    CheckMap(joined, dims);
  }
  Check(merged > 1000, "dimensions that are contiguous in every operand are merged");
  Map full;
  for (int d = 0; d < jaxops::kMaxBatchDims; ++d) {
    Check(full.Append(2, {d % 2, (d + 1) % 2, 0}), "Append of a map with room");
  }
  Check(!full.Append(2, {7, 0, 0}), "Append of a full map");
}
