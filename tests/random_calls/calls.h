// Random calls of the CPU kernels, whose arrays are exactly as large as a call says, so that a
// sanitizer sees any access beyond them. `main.cc` makes a call twice, with tasks in another order
// and with other memory under its results: both must have the same bits.
#ifndef JAXOPS_TESTS_RANDOM_CALLS_CALLS_H_
#define JAXOPS_TESTS_RANDOM_CALLS_CALLS_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "common/batch.h"
#include "common/types.h"
#include "cpu/parallel_for.h"

namespace jaxops::random_calls {

// Numbers that a text alone decides, with every library.
class Random {
 public:
  explicit Random(const std::string& text) {
    uint64_t hash = 0xcbf29ce484222325;
    for (const unsigned char c : text) hash = (hash ^ c) * 0x100000001b3;
    engine_.seed(hash);
  }

  uint64_t Bits() { return engine_(); }
  int64_t Below(int64_t end) { return static_cast<int64_t>(Bits() % static_cast<uint64_t>(end)); }
  int64_t Between(int64_t first, int64_t last) { return first + Below(last - first + 1); }
  bool OneIn(int64_t n) { return Below(n) == 0; }

  template <typename T>
  T Pick(std::initializer_list<T> choices) {
    return choices.begin()[Below(static_cast<int64_t>(choices.size()))];
  }

  // Usually a small number; sometimes `min`, or one that fills several vectors.
  int64_t Size(int64_t min = 0) {
    if (OneIn(12)) return min;
    return OneIn(8) ? Between(min, 150) : Between(min, 9);
  }

  DType Float() { return Pick({DType::kF16, DType::kBF16, DType::kF32, DType::kF64}); }

  // A dtype of an operand next to others of `dtype`: only those of f64 may be f64.
  DType FloatWith(DType dtype) { return Pick({dtype, DType::kF32, DType::kF16, DType::kBF16}); }

  Activation AnyActivation() {
    return Pick({Activation::kNone, Activation::kRelu, Activation::kSilu, Activation::kGelu});
  }

 private:
  std::mt19937_64 engine_;
};

inline DType ArithmeticOf(DType dtype) { return dtype == DType::kF64 ? dtype : DType::kF32; }

// Thrown for a call of more memory than a test should take, which is counted and not made.
struct TooLarge {};

// The arrays of a call. An array without elements has an address from which nothing may be read.
class Arrays {
 public:
  explicit Arrays(Random& random) : random_(random) {}

  // Floating numbers: ordinary ones, or with infinities, NaN and denormal numbers in between.
  void* Floats(int64_t count, DType dtype);
  // Integers in [min, max], and a few of any bits if `has_any`.
  int32_t* Integers(int64_t count, int64_t min, int64_t max, bool has_any = true);
  void* Bytes(int64_t count, int64_t item);

  // An array that the call writes whole.
  void* Result(int64_t count, int64_t item);
  void* Result(int64_t count, DType dtype) { return Result(count, SizeOf(dtype)); }
  // An array of floating numbers that the call reads and writes.
  void* State(int64_t count, DType dtype);

  // Fills results with `content`, and gives states their first contents again.
  void Reset(unsigned char content);
  std::vector<std::string> Results() const;

 private:
  struct Array {
    std::unique_ptr<char[]> memory;
    char* data;
    size_t bytes;
    bool is_written;
    std::string first;  // of a state
  };

  Array& New(int64_t count, int64_t item);

  Random& random_;
  std::vector<Array> arrays_;
  size_t bytes_ = 0;
};

// One call in 30 is large, so that several tasks share it where a task is small.
inline bool IsLarge(Random& random) { return random.OneIn(30); }

// The entries of a large call, each of these elements.
inline int64_t LargeCount(Random& random, int64_t elements) {
  const int64_t max = (int64_t{1} << 20) / std::max<int64_t>(elements, 1);
  return std::min<int64_t>(random.Between(max / 2, max), 20'000) + 1;
}

// Leading dimensions of a call. Operands vary along all or some of them, and have one entry along
// the others; results of a call vary along all.
template <int kOperands>
class Batch {
 public:
  Batch(Random& random, std::initializer_list<int> results) {
    for (int64_t rank = random.Below(4); rank > 0; --rank) {
      sizes_.push_back(random.OneIn(10) ? random.Below(2) : random.Between(1, 3));
    }
    const bool varies_all = random.OneIn(2);
    for (uint32_t& dims : varies_) {
      dims = varies_all ? ~uint32_t{0} : static_cast<uint32_t>(random.Bits());
    }
    for (const int result : results) varies_[result] = ~uint32_t{0};
  }

  size_t rank() const { return sizes_.size(); }
  int64_t size() const { return Entries(~uint32_t{0}); }
  int64_t Entries(int operand) const { return Entries(varies_[operand]); }

  // Entries along the dimensions of these bits.
  int64_t Entries(uint32_t dims) const {
    int64_t entries = 1;
    for (size_t d = 0; d < rank(); ++d) entries *= dims >> d & 1 ? sizes_[d] : 1;
    return entries;
  }

  // Adds a dimension to large calls; `elements` has those of an entry.
  void Enlarge(Random& random, int64_t elements) {
    if (IsLarge(random) && size() * elements > 0) {
      sizes_.push_back(LargeCount(random, size() * elements));
    }
  }

  // An operand that varies along these dimensions only.
  void SetVaries(int operand, uint32_t dims) { varies_[operand] = dims; }

  // The map of the dimensions of these bits. An entry of operand i has elements[i] elements.
  BatchMap<kOperands> Map(const std::array<int64_t, kOperands>& elements,
                          uint32_t dims = ~uint32_t{0}) const {
    std::vector<std::array<int64_t, kOperands>> strides(rank());
    for (int i = 0; i < kOperands; ++i) {
      int64_t stride = elements[i];
      for (size_t d = rank(); d-- > 0;) {
        const bool varies = varies_[i] >> d & 1;
        strides[d][i] = varies ? stride : 0;
        if (varies) stride *= sizes_[d];
      }
    }
    BatchMap<kOperands> map;
    for (size_t d = 0; d < rank(); ++d) {
      if (dims >> d & 1) map.Append(sizes_[d], strides[d]);
    }
    return map;
  }

 private:
  std::vector<int64_t> sizes_;
  std::array<uint32_t, kOperands> varies_;
};

// A call that has its arrays.
using Call = std::function<void(const cpu::ParallelFor&)>;
using MakeCall = Call (*)(Random&, Arrays&);

// For every entry and step, the first step of its segment.
int32_t* AllStarts(Random& random, Arrays& arrays, int64_t entries, int64_t time);

// An operator that the program knows: `const Registration kName("name", Make);` at namespace scope.
struct Registration {
  const char* name;
  MakeCall make;

  Registration(const char* name, MakeCall make);
};
const std::vector<Registration>& Registered();

}  // namespace jaxops::random_calls

#endif  // JAXOPS_TESTS_RANDOM_CALLS_CALLS_H_
