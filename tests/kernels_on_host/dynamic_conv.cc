// The CUDA kernels of dynamic convolution against their definition.
#include <vector>

#include "cuda/dynamic_conv/launch.h"
#include "tests/kernels_on_host/arrays.h"

namespace {

using namespace host_cuda;             // NOLINT
using namespace jaxops::dynamic_conv;  // NOLINT

struct Case {
  Geometry g;
  int64_t batch;
  DType dtype, weight_dtype;
  std::vector<int32_t> starts;  // of all batch entries; none without segments

  int64_t Place(int64_t n, int64_t time, int64_t t, int64_t c) const {
    return n * time * g.channels +
           (g.data_format == jaxops::DataFormat::kNTC ? t * g.channels + c : c * time + t);
  }
  int64_t Start(int64_t n, int64_t t) const {
    return starts.empty() ? -g.padding : starts[n * g.time + t];
  }
  int64_t Row(int64_t n, int64_t t, int64_t c) const {
    return (n * g.time + t) * g.heads + c / (g.channels / g.heads);
  }
  // The weights, or their softmax.
  std::vector<double> Filters(const Floats& weight) const {
    std::vector<double> p(weight.count());
    for (int64_t i = 0; i < weight.count(); ++i) p[i] = weight[i];
    for (int64_t i = 0; g.normalize && i < weight.count(); i += g.taps) {
      double sum = 0;
      for (int64_t k = 0; k < g.taps; ++k) sum += p[i + k] = std::exp(p[i + k]);
      for (int64_t k = 0; k < g.taps; ++k) p[i + k] /= sum;
    }
    return p;
  }
};

Case MakeCase(bool has_state) {
  Case made;
  Geometry& g = made.g;
  g.taps = Happens(90) ? Pick(1, 9) : Pick(60, 140);  // kernels cut long filters
  g.dilation = Happens(70) ? 1 : Pick(1, 4);
  g.padding = Happens(60) ? (g.taps - 1) * g.dilation : Pick(0, (g.taps - 1) * g.dilation);
  g.heads = Pick(1, 3);
  g.channels = g.heads * Pick(1, Happens(20) ? 70 : 5);
  g.time = Pick(0, 20);
  g.data_format = static_cast<jaxops::DataFormat>(Pick(0, 1));
  g.normalize = Happens(50);
  made.batch = Pick(1, 3);
  made.dtype = PickFloat();
  if (Happens(40)) {  // short filters of whole vectors of channels
    g.taps = Pick(1, 8);
    g.dilation = 1;
    g.padding = Happens(60) ? g.taps - 1 : Pick(0, g.taps - 1);
    g.channels = g.heads * (16 / jaxops::SizeOf(made.dtype)) << Pick(0, 4);
    g.time = Pick(0, Happens(20) ? 90 : 20);
    g.data_format = jaxops::DataFormat::kNTC;
  }
  made.weight_dtype = PickFloatFor(made.dtype);
  if (Happens(50)) {
    for (int64_t n = 0; n < made.batch; ++n) {
      int64_t start = has_state ? -g.padding : 0;
      for (int64_t t = 0; t < g.time; ++t) {
        if (t > 0 && Happens(25)) start = t;
        made.starts.push_back(static_cast<int32_t>(start));
      }
    }
  }
  return made;
}

void RunForwardCall() {
  const bool has_state = Happens(50);
  const Case made = MakeCase(has_state);
  const Geometry& g = made.g;
  Forward call{};
  call.geometry = g;
  call.dtype = made.dtype;
  call.weight_dtype = made.weight_dtype;
  call.bias_dtype = PickFloatFor(made.dtype);
  call.state_dtype = PickFloatFor(made.dtype);
  call.activation = static_cast<jaxops::Activation>(Pick(0, 3));
  const int64_t rows = g.time * g.channels, state_rows = g.padding * g.channels;
  Check(
      call.batch.Append(made.batch, {rows, g.time * g.heads * g.taps, 0, g.time, state_rows, rows}),
      "batch");
  Floats x(made.batch * rows, call.dtype), y(made.batch * rows, call.dtype);
  Floats weight(made.batch * g.time * g.heads * g.taps, call.weight_dtype);
  Floats bias(g.channels, call.bias_dtype), state(made.batch * state_rows, call.state_dtype);
  for (Floats* array : {&x, &weight, &bias, &state}) array->Fill();
  const Numbers starts(made.starts);
  const Memory scales(WorkSpaceBytes(call));
  call.x = x.data();
  call.weight = weight.data();
  call.bias = Happens(50) ? bias.data() : nullptr;
  call.starts = starts.data();
  call.state = has_state ? state.data() : nullptr;
  call.y = y.data();
  Check(cuda::LaunchForward(nullptr, call, scales.data()) == cudaSuccess, "launch");

  const std::vector<double> p = made.Filters(weight);
  for (int64_t n = 0; n < made.batch; ++n) {
    for (int64_t t = 0; t < g.time; ++t) {
      for (int64_t c = 0; c < g.channels; ++c) {
        double sum = call.bias == nullptr ? 0 : bias[c];
        for (int64_t k = 0; k < g.taps; ++k) {
          const int64_t s = t + k * g.dilation - g.padding;
          const double filter = p[made.Row(n, t, c) * g.taps + k];
          if (s >= 0 && s < g.time && made.Start(n, s) == made.Start(n, t)) {
            sum += filter * x[made.Place(n, g.time, s, c)];
          } else if (s < 0 && has_state && s >= made.Start(n, t)) {
            sum += filter * state[made.Place(n, g.padding, s + g.padding, c)];
          }
        }
        CheckClose(y, made.Place(n, g.time, t, c), Activated(call.activation, sum), 8 * g.taps,
                   "y");
      }
    }
  }
}

void RunBackwardCall() {
  const Case made = MakeCase(false);
  const Geometry& g = made.g;
  Backward call{};
  call.geometry = g;
  call.dtype = made.dtype;
  call.weight_dtype = call.dweight_dtype = made.weight_dtype;
  const int64_t rows = g.time * g.channels, filters = g.time * g.heads * g.taps;
  Check(call.batch.Append(made.batch, {rows, filters, rows, g.time, rows, filters}), "batch");
  Floats x(made.batch * rows, call.dtype), cotangent(made.batch * rows, call.dtype);
  Floats weight(made.batch * filters, call.weight_dtype);
  Floats dx(made.batch * rows, call.dtype), dweight(made.batch * filters, call.dweight_dtype);
  for (Floats* array : {&x, &weight, &cotangent}) array->Fill();
  const Numbers starts(made.starts);
  const Memory scales(WorkSpaceBytes(call));
  const int wanted = static_cast<int>(Pick(1, 3));
  call.x = wanted & 2 ? x.data() : nullptr;
  call.weight = wanted & 1 || g.normalize ? weight.data() : nullptr;
  call.g = cotangent.data();
  call.starts = starts.data();
  call.dx = wanted & 1 ? dx.data() : nullptr;
  call.dweight = wanted & 2 ? dweight.data() : nullptr;
  Check(cuda::LaunchBackward(nullptr, call, scales.data()) == cudaSuccess, "launch");

  const std::vector<double> p = made.Filters(weight);
  std::vector<double> want(x.count()), dp(weight.count());
  for (int64_t n = 0; n < made.batch; ++n) {
    for (int64_t t = 0; t < g.time; ++t) {
      for (int64_t c = 0; c < g.channels; ++c) {
        for (int64_t k = 0; k < g.taps; ++k) {
          const int64_t s = t + k * g.dilation - g.padding;
          if (s < 0 || s >= g.time || made.Start(n, s) != made.Start(n, t)) continue;
          const int64_t tap = made.Row(n, t, c) * g.taps + k, at = made.Place(n, g.time, s, c);
          want[at] += p[tap] * cotangent[made.Place(n, g.time, t, c)];
          dp[tap] += x[at] * cotangent[made.Place(n, g.time, t, c)];
        }
      }
    }
  }
  for (int64_t i = 0; call.dx != nullptr && i < dx.count(); ++i) {
    CheckClose(dx, i, want[i], 8 * g.taps, "dx");
  }
  for (int64_t i = 0; call.dweight != nullptr && i < dweight.count(); i += g.taps) {
    double dot = 0;
    for (int64_t k = 0; g.normalize && k < g.taps; ++k) dot += p[i + k] * dp[i + k];
    for (int64_t k = 0; k < g.taps; ++k) {
      const double slope = g.normalize ? p[i + k] * (dp[i + k] - dot) : dp[i + k];
      CheckClose(dweight, i + k, slope, 16 * g.channels * g.taps, "dweight");
    }
  }
}

}  // namespace

int main() {
  for (int i = 0; i < 150; ++i) {
    RunForwardCall();
    RunBackwardCall();
  }
}
