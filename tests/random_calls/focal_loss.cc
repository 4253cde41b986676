#include "cpu/focal_loss.h"

#include "tests/random_calls/calls.h"

namespace jaxops::random_calls {
namespace {

using focal_loss::Power;
using focal_loss::Sigmoid;
using focal_loss::Softmax;
using focal_loss::TargetType;

Power AnyPower(Random& random) {
  return random.Pick({Power::kAny, Power::kZero, Power::kHalf, Power::kOne, Power::kTwo});
}

// The results of the handlers.
struct Wanted {
  bool loss, gradient, sum;
};

Wanted AnyResults(Random& random) {
  return random.Pick<Wanted>(
      {{true, false, false}, {false, true, false}, {false, false, true}, {false, true, true}});
}

Call MakeSigmoid(Random& random, Arrays& arrays) {
  Sigmoid call = {};
  const Batch<Sigmoid::kOperands> batch(random, {Sigmoid::kElements, Sigmoid::kSum});
  const auto count = [&](Sigmoid::Operand operand, int64_t elements) {
    return batch.Entries(operand) * elements;
  };
  call.classes = random.Size();
  call.rows = IsLarge(random) ? LargeCount(random, 27 * call.classes) : random.Size();
  call.dtype = random.Float();
  call.power = AnyPower(random);
  call.soft = random.OneIn(2);
  const DType arithmetic = ArithmeticOf(call.dtype);
  call.target_type = random.Pick({TargetType::kLogits, TargetType::kArithmetic, TargetType::kBool});
  call.has_ignored = !call.soft && random.OneIn(2);
  call.ignored = static_cast<int32_t>(random.Between(-1, 2));
  const int64_t size = call.rows * call.classes;
  call.logits = arrays.Floats(count(Sigmoid::kLogits, size), call.dtype);
  // The classes of a part of all logits.
  const int64_t first = random.OneIn(2) ? 0 : random.Between(0, 100);
  if (call.soft) {
    const int64_t labels = count(Sigmoid::kLabels, size);
    call.labels = call.target_type == TargetType::kBool
                      ? arrays.Bytes(labels, 1)
                      : arrays.Floats(labels, call.target_type == TargetType::kLogits ? call.dtype
                                                                                      : arithmetic);
  } else {
    call.labels =
        arrays.Integers(count(Sigmoid::kLabels, call.rows), first - 1, first + call.classes);
  }
  const int64_t lists = batch.Entries(Sigmoid::kClassIds);
  int32_t* const ids = arrays.Integers(lists * call.classes, 0, 0, false);
  for (int64_t i = 0; i < lists * call.classes; ++i) {
    ids[i] = static_cast<int32_t>(focal_loss::kFirstClassId + first + i % call.classes);
  }
  call.class_ids = ids;
  call.scale = arrays.Floats(count(Sigmoid::kScale, 1), arithmetic);
  call.parameters = arrays.Floats(count(Sigmoid::kParameters, 3), arithmetic);
  if (random.OneIn(2)) {
    call.weight = arrays.Floats(count(Sigmoid::kWeight, call.rows), arithmetic);
  }
  const Wanted wanted = AnyResults(random);
  if (wanted.loss) call.loss = arrays.Result(batch.size() * size, call.dtype);
  if (wanted.gradient) call.gradient = arrays.Result(batch.size() * size, call.dtype);
  if (wanted.sum) call.sum = arrays.Result(batch.size(), arithmetic);
  call.batch =
      batch.Map({size, call.soft ? size : call.rows, call.classes, 1, 3, call.rows, size, 1});
  return [call](const cpu::ParallelFor& run) { focal_loss::cpu::RunSigmoid(call, run); };
}

Call MakeSoftmax(Random& random, Arrays& arrays) {
  Softmax call = {};
  const Batch<Softmax::kOperands> batch(random, {Softmax::kResult, Softmax::kSum});
  const auto count = [&](Softmax::Operand operand, int64_t elements) {
    return batch.Entries(operand) * elements;
  };
  call.classes = random.Size();
  call.rows = IsLarge(random) ? LargeCount(random, 27 * call.classes) : random.Size();
  call.dtype = random.Float();
  call.power = AnyPower(random);
  const DType arithmetic = ArithmeticOf(call.dtype);
  const int64_t size = call.rows * call.classes;
  const Wanted wanted = AnyResults(random);
  call.logits = arrays.Floats(count(Softmax::kLogits, size), call.dtype);
  call.labels = arrays.Integers(count(Softmax::kLabels, call.rows), 0, call.classes);
  call.gamma = arrays.Floats(count(Softmax::kGamma, 1), arithmetic);
  if (!wanted.loss || random.OneIn(2)) {
    call.scale = arrays.Floats(count(Softmax::kScale, 1), arithmetic);
  }
  if (random.OneIn(2)) {
    call.weight = arrays.Floats(count(Softmax::kWeight, call.rows), arithmetic);
  }
  if (wanted.loss) call.loss = arrays.Result(batch.size() * call.rows, arithmetic);
  if (wanted.gradient) call.gradient = arrays.Result(batch.size() * size, call.dtype);
  if (wanted.sum) call.sum = arrays.Result(batch.size(), arithmetic);
  call.batch = batch.Map({size, call.rows, 1, 1, call.rows, wanted.loss ? call.rows : size, 1});
  return [call](const cpu::ParallelFor& run) { focal_loss::cpu::RunSoftmax(call, run); };
}

Call Make(Random& random, Arrays& arrays) {
  return (random.OneIn(2) ? MakeSigmoid : MakeSoftmax)(random, arrays);
}

const Registration kRegistration("focal_loss", Make);

}  // namespace

}  // namespace jaxops::random_calls
