// The CUDA kernels of weighted sums of entries against their definition.
#include <algorithm>
#include <memory>
#include <vector>

#include "cuda/taps/launch.h"
#include "tests/kernels_on_host/arrays.h"

namespace {

using namespace host_cuda;     // NOLINT
using namespace jaxops::taps;  // NOLINT

int64_t Power(int64_t base, int exponent) {
  return exponent == 0 ? 1 : base * Power(base, exponent - 1);
}

void RunCalls() {
  Call call{};
  Geometry& g = call.geometry;
  g.axes = static_cast<int>(Pick(1, kMaxAxes));
  g.taps = static_cast<int>(Pick(1, g.axes == 1 ? kMaxCudaTaps : g.axes == 2 ? 5 : 4));
  g.combinations = static_cast<int>(Power(g.taps, g.axes));
  int64_t grid = 1;
  for (int a = 0; a < g.axes; ++a) grid *= g.sizes[a] = Happens(4) ? 0 : Pick(1, 6);
  g.width = Happens(50) ? 8 * Pick(0, 3) : Pick(1, 9);
  g.points = Pick(0, 40);
  call.dtype = PickFloat();
  const DType wide = call.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  // A vmap over the points, and half of the time over the volume.
  const int64_t batch = Pick(1, 3), size = grid * g.width;
  const bool is_shared = Happens(50);
  const int64_t of_volume = is_shared ? 0 : size, of_rows = g.points * g.width;
  const int64_t of_indices = g.points * g.axes * g.taps, of_weights = g.points * g.taps;
  Check(call.batch.Append(
            batch, {of_volume, of_indices, of_rows, of_volume, of_weights, of_weights, of_weights}),
        "batch");
  call.gradients = is_shared ? 1 : batch;

  Floats volume(call.gradients * size, call.dtype), dvolume(call.gradients * size, call.dtype);
  Floats cotangent(batch * of_rows, call.dtype), out(batch * of_rows, call.dtype);
  volume.Fill();
  cotangent.Fill();
  std::vector<int32_t> places(batch * of_indices);
  for (size_t i = 0; i < places.size(); ++i) {
    const int64_t n = g.sizes[i / g.taps % g.axes];
    places[i] =
        static_cast<int32_t>(Happens(90) ? Pick(0, std::max<int64_t>(n - 1, 0)) : Pick(-2, n + 1));
  }
  const Numbers indices(places);
  std::vector<std::unique_ptr<Floats>> weights, dweights;
  for (int a = 0; a < g.axes; ++a) {
    weights.push_back(std::make_unique<Floats>(batch * of_weights, wide));
    dweights.push_back(std::make_unique<Floats>(batch * of_weights, wide));
    weights[a]->Fill();
    call.weights[a] = weights[a]->data();
  }
  call.indices = indices.data();

  std::vector<double> want_out(out.count()), want_dvolume(dvolume.count()), terms(dvolume.count());
  std::vector<std::vector<double>> want_dweights(g.axes, std::vector<double>(batch * of_weights));
  for (int64_t p = 0; p < batch * g.points; ++p) {
    for (int c = 0; c < g.combinations; ++c) {
      int64_t entry = 0;
      bool is_inside = true;
      std::vector<int64_t> of_axis(g.axes);
      for (int a = 0, rest = c; a < g.axes; ++a, rest /= g.taps) {
        const int k = rest % g.taps;
        const int32_t at = places[(p * g.axes + a) * g.taps + k];
        is_inside = is_inside && at >= 0 && at < g.sizes[a];
        entry = entry * g.sizes[a] + at;
        of_axis[a] = p * g.taps + k;
      }
      if (!is_inside) continue;
      double weight = 1, dot = 0;
      for (int a = 0; a < g.axes; ++a) weight *= (*weights[a])[of_axis[a]];
      const int64_t begin = (is_shared ? 0 : p / g.points * size) + entry * g.width;
      for (int64_t f = 0; f < g.width; ++f) {
        const double gradient = cotangent[p * g.width + f];
        want_out[p * g.width + f] += weight * volume[begin + f];
        want_dvolume[begin + f] += weight * gradient;
        terms[begin + f] += 8;
        dot += volume[begin + f] * gradient;
      }
      for (int a = 0; a < g.axes; ++a) {
        double others = dot;
        for (int b = 0; b < g.axes; ++b) others *= b == a ? 1 : (*weights[b])[of_axis[b]];
        want_dweights[a][of_axis[a]] += others;
      }
    }
  }

  call.volume = volume.data();
  call.out = out.data();
  Check(cuda::LaunchTaps(nullptr, call) == cudaSuccess, "launch of values");
  for (int64_t i = 0; i < out.count(); ++i) {
    CheckClose(out, i, want_out[i], 8 * g.combinations, "value");
  }
  call.out = nullptr;
  call.cotangent = cotangent.data();
  for (int a = 0; a < g.axes; ++a) call.dweights[a] = dweights[a]->data();
  Check(cuda::LaunchTaps(nullptr, call) == cudaSuccess, "launch of the gradient of weights");
  for (int a = 0; a < g.axes; ++a) {
    for (int64_t i = 0; i < dweights[a]->count(); ++i) {
      CheckClose(*dweights[a], i, want_dweights[a][i], 8 * g.combinations * g.width,
                 "gradient of weights");
    }
  }
  call.volume = nullptr;
  call.dvolume = dvolume.data();
  const Memory scratch(WorkSpaceBytes(call));
  call.scratch = scratch.data();
  Check(cuda::LaunchTaps(nullptr, call) == cudaSuccess, "launch of the gradient of the volume");
  for (int64_t i = 0; i < dvolume.count(); ++i) {
    CheckClose(dvolume, i, want_dvolume[i], static_cast<int64_t>(terms[i]),
               "gradient of the volume");
  }
}

}  // namespace

int main() {
  for (int i = 0; i < 100; ++i) RunCalls();
}
