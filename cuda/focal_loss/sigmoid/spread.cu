// This kernel computes the sigmoid focal loss, elementwise and without weights, for calls that
// memory bounds.
#include "cuda/focal_loss/sigmoid/elements.cuh"

namespace jaxops::focal_loss::cuda {
namespace {

constexpr int kBlockThreads = 128;
// A thread has this number of vectors, for millions and for hundreds of millions of elements.
constexpr int kFewVectors = 2;
constexpr int kManyVectors = 4;

// SpreadElements is for class labels without weights: f32 results without a sum, in one batch entry
// of many elements. Memory bounds them, and is the fastest if the vectors that a warp reads
// together are neighbours: the vectors of a thread are apart, and all in flight before the first is
// used.
template <int kVectors, Rows kRows, Want kWant, int kPower>
__global__ void __launch_bounds__(kBlockThreads)
    SpreadElements(const __grid_constant__ FewParams p) {
  constexpr bool kSlope = kWant == Want::kGradient;
  constexpr int kCount = kVectorElements<float>;
  constexpr uint32_t kStride = kBlockThreads * kCount;
  constexpr auto power = static_cast<Power>(kPower);
  const float* logits = static_cast<const float*>(p.logits);
  float* elements = static_cast<float*>(p.elements);
  const uint32_t begin = blockIdx.x * (kVectors * kStride) + threadIdx.x * kCount;
  Vector<float, kCount> vectors[kVectors];
  // The labels are those of the row in which a vector begins and of the next row, or of each
  // element.
  Vector<int32_t, kRows == Rows::kEach ? kCount : 2> rows[kVectors];
  uint32_t positions[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const uint32_t at = begin + i * kStride;
    if (at >= p.size) break;
    vectors[i] = LoadVector<kCount>(logits + at);
    if constexpr (kRows == Rows::kEach) {
      rows[i] = LoadVector<kCount>(p.labels + at);
    } else {
      uint32_t row = at;
      positions[i] = p.classes.DivMod(row);
      rows[i].values[0] = p.labels[row];
      if constexpr (kRows == Rows::kTwo) {
        const bool one = positions[i] + kCount <= p.classes.divisor();
        rows[i].values[1] = p.labels[row + (one ? 0 : 1)];
      }
    }
  }
  const auto* parameters = static_cast<const float*>(p.parameters);
  const float scale = *static_cast<const float*>(p.scale);
  const float gamma = parameters[0];
  const float negative = scale * parameters[1];
  const float positive = scale * parameters[2];
  const auto first_class = static_cast<uint32_t>(p.class_ids[0] - kFirstClassId);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const uint32_t at = begin + i * kStride;
    if (at >= p.size) break;
    float z[kCount], loss[kCount], slope[kCount], factor[kCount];
    WidenVector(z, vectors[i]);
    if constexpr (kRows == Rows::kEach) {
      bool target[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        target[k] = static_cast<uint32_t>(rows[i].values[k]) == first_class;
        factor[k] = target[k] ? positive : negative;
      }
      EvaluateHard<kSlope, true>(loss, slope, z, target, factor, power, gamma);
      StoreAll<float, kCount>(elements + at, kSlope ? slope : loss);
    } else {
      const uint32_t boundary =
          kRows == Rows::kOne ? kCount : min(p.classes.divisor() - positions[i], uint32_t{kCount});
      // These are the positions of targets in the vector, if they are less than its size.
      const uint32_t first = rows[i].values[0] - first_class - positions[i];
      const uint32_t second = kRows == Rows::kTwo ? rows[i].values[1] - first_class : kCount;
      const bool in_first = first < boundary;
      const bool in_second = kRows == Rows::kTwo && second < kCount - boundary;
      const bool any = __any_sync(__activemask(), in_first || in_second);
      float of_target[2];
      if (any) {
        const auto evaluate = [&](uint32_t k) {
          const float its_z[1] = {logits[at + k]};
          const float factors[1] = {positive};
          const bool is_target[1] = {true};
          float its_loss[1], its_slope[1];
          EvaluateHard<kSlope, true>(its_loss, its_slope, its_z, is_target, factors, power, gamma);
          return kSlope ? its_slope[0] : its_loss[0];
        };
        if (in_first) of_target[0] = evaluate(first);
        if (in_second) of_target[1] = evaluate(boundary + second);
      }
      const bool none[kCount] = {};
#pragma unroll
      for (int k = 0; k < kCount; ++k) factor[k] = negative;
      EvaluateHard<kSlope, false>(loss, slope, z, none, factor, power, gamma);
      StoreAll<float, kCount>(elements + at, kSlope ? slope : loss);
      if (any) {
        if (in_first) elements[at + first] = of_target[0];
        if (in_second) elements[at + boundary + second] = of_target[1];
      }
    }
  }
}

struct Plan {
  int vectors;  // per thread
  Rows rows;    // of a vector

  explicit Plan(const SigmoidCall& call)
      : vectors(call.size() >= kManyElements ? kManyVectors : kFewVectors),
        rows(call.loss.classes == 1                            ? Rows::kEach
             : call.loss.classes % kVectorElements<float> == 0 ? Rows::kOne
                                                               : Rows::kTwo) {}
};

template <int kVectors, Rows kRows>
cudaError_t Launch(cudaStream_t stream, const SigmoidCall& call) {
  constexpr int64_t kPerBlock = kVectors * kBlockThreads * kVectorElements<float>;
  return DispatchPower(call.loss.power, [&](auto power) {
    if constexpr (power.value == static_cast<int>(Power::kAny)) {
      return cudaErrorInvalidValue;
    } else {
      return DispatchBool(call.loss.gradient != nullptr, [&](auto gradient) {
        constexpr Want kWanted = gradient.value ? Want::kGradient : Want::kLoss;
        return jaxops::cuda::Launch(SpreadElements<kVectors, kRows, kWanted, power.value>,
                                    CeilDiv(call.size(), kPerBlock), kBlockThreads, 0, stream,
                                    FewParams(call.loss, kPerBlock));
      });
    }
  });
}

template <Rows kRows>
cudaError_t Launch(cudaStream_t stream, const SigmoidCall& call, const Plan& plan) {
  return plan.vectors == kFewVectors ? Launch<kFewVectors, kRows>(stream, call)
                                     : Launch<kManyVectors, kRows>(stream, call);
}

}  // namespace

bool CanRunSpreadElements(const SigmoidCall& call, const Device&) {
  constexpr int kCount = kVectorElements<float>;
  const Sigmoid& loss = call.loss;
  return IsUnweighted(loss) && loss.dtype == DType::kF32 && loss.sum == nullptr &&
         call.entries() == 1 && loss.power != Power::kAny && call.size() % kCount == 0 &&
         (loss.classes >= kCount || loss.classes == 1) && call.size() <= INT32_MAX;
}

cudaError_t LaunchSpreadElements(cudaStream_t stream, const SigmoidCall& call, const Device&) {
  const Plan plan(call);
  switch (plan.rows) {
    case Rows::kOne:
      return Launch<Rows::kOne>(stream, call, plan);
    case Rows::kTwo:
      return Launch<Rows::kTwo>(stream, call, plan);
    default:
      return Launch<Rows::kEach>(stream, call, plan);
  }
}

}  // namespace jaxops::focal_loss::cuda
