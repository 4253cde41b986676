// The CUDA kernels of the steps of lightweight and of dynamic convolution against their definition.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "cuda/lightweight_conv_step/launch.h"
#include "tests/kernels_on_host/arrays.h"

namespace {

using namespace host_cuda;                      // NOLINT
using namespace jaxops::lightweight_conv_step;  // NOLINT

void RunCall() {
  Step call{};
  // Blocks own whole vectors of channels if there are many blocks; long filters are read in parts.
  const bool has_vectors = Happens(3), is_long = !has_vectors && Happens(3);
  const bool has_many_filters = has_vectors && Happens(50);
  call.taps = is_long            ? Pick(900, 1500)
              : has_many_filters ? Pick(9, 40)
                                 : Pick(1, Happens(30) ? 40 : 8);
  call.dilation = Happens(70) ? 1 : Pick(1, 4);
  call.reach = (call.taps - 1) * call.dilation;
  call.heads = Pick(1, 4);
  call.channels = call.heads * (Happens(50) ? 8 * Pick(1, 3) : Pick(0, 9));
  if (has_many_filters) call.heads = call.channels = 8 * Pick(10, 34);
  call.entries = has_vectors ? 256 : Pick(0, 4);
  call.steps = Pick(0, has_vectors ? 2 : 5);
  const bool is_dynamic = Happens(50);
  call.normalize = is_dynamic && Happens(60);
  call.weight_step = is_dynamic ? call.heads * call.taps : 0;
  call.weight_entry = call.steps * call.weight_step;
  const bool has_indices = Happens(60), in_place = Happens(50);
  call.slots = has_indices ? Pick(1, has_vectors ? 300 : 6) : call.entries;
  call.dtype = PickFloat();
  call.state_dtype = Happens(60) ? call.dtype : PickFloatFor(call.dtype);
  call.weight_dtype = PickFloatFor(call.dtype);
  call.bias_dtype = PickFloatFor(call.dtype);
  call.activation = static_cast<jaxops::Activation>(Pick(0, 3));
  // A vmap over x and the state, not over the filters.
  const int64_t batch = Pick(1, 2), of_x = call.entries * call.steps * call.channels;
  const int64_t of_state = call.slots * call.reach * call.channels;
  Check(call.batch.Append(batch, {of_x, of_state, 0, 0, 0, of_x, of_state}), "batch");

  Floats x(batch * of_x, call.dtype), y(batch * of_x, call.dtype);
  Floats state(batch * of_state, call.state_dtype), moved(batch * of_state, call.state_dtype);
  const int64_t filters = is_dynamic ? call.entries * call.steps : 1;
  Floats weight(filters * call.heads * call.taps, call.weight_dtype),
      bias(call.channels, call.bias_dtype);
  for (Floats* array : {&x, &state, &weight, &bias}) array->Fill();
  std::vector<int32_t> slots(3 * call.slots);  // some of them are no slots
  std::iota(slots.begin(), slots.end(), static_cast<int32_t>(-call.slots));
  std::shuffle(slots.begin(), slots.end(), random_numbers);
  slots.resize(call.entries, -1);
  const Numbers indices(slots);
  call.x = x.data();
  call.weight = weight.data();
  call.bias = Happens(50) ? bias.data() : nullptr;
  call.indices = has_indices ? indices.data() : nullptr;
  call.y = y.data();
  Floats& to = in_place ? state : moved;
  std::vector<double> before(state.count());
  for (int64_t i = 0; i < state.count(); ++i) before[i] = state[i];
  call.state = state.data();
  call.new_state = to.data();
  Check(cuda::LaunchStep(nullptr, call) == cudaSuccess, "launch");

  const int64_t C = call.channels;
  std::vector<double> after = before;
  for (int64_t n = 0; n < batch; ++n) {
    for (int64_t e = 0; e < call.entries; ++e) {
      const int64_t slot = has_indices ? slots[e] : e;
      const bool is_slot = slot >= 0 && slot < call.slots;
      for (int64_t c = 0; c < C; ++c) {
        const auto row = [&](int64_t r) {
          if (r < call.reach) {
            return is_slot ? before[n * of_state + (slot * call.reach + r) * C + c] : 0;
          }
          return x[n * of_x + (e * call.steps + r - call.reach) * C + c];
        };
        for (int64_t s = 0; s < call.steps; ++s) {
          const int64_t filter =
              e * call.weight_entry + s * call.weight_step + c / (C / call.heads) * call.taps;
          double sum = 0, total = call.normalize ? 0 : 1;
          for (int64_t k = 0; k < call.taps; ++k) {
            double tap = weight[filter + k];
            if (call.normalize) total += tap = std::exp(tap);
            sum += tap * row(s + k * call.dilation);
          }
          sum = sum / total + (call.bias == nullptr ? 0 : bias[c]);
          CheckClose(y, n * of_x + (e * call.steps + s) * C + c, Activated(call.activation, sum),
                     4 * call.taps, "y");
        }
        for (int64_t r = 0; is_slot && r < call.reach; ++r) {
          after[n * of_state + (slot * call.reach + r) * C + c] = row(r + call.steps);
        }
      }
    }
  }
  for (int64_t i = 0; i < to.count(); ++i) CheckClose(to, i, after[i], 0, "state");
}

}  // namespace

int main() {
  for (int i = 0; i < 300; ++i) RunCall();
}
