// The CUDA kernels of lightweight convolution with segments and states against their definition.
//
// Rows of NaN are in some calls: they reach the results whose taps read them, and no others.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "cuda/lightweight_conv/families.h"
#include "cuda/segment_starts/launch.h"
#include "tests/kernels_on_host/arrays.h"

namespace {

using namespace host_cuda;                 // NOLINT
using namespace jaxops::lightweight_conv;  // NOLINT
namespace families = cuda;                 // of lightweight_conv
namespace segment_starts = jaxops::segment_starts;

// The calls of each family.
std::map<std::string, int> calls;

// Which of the two batch dimensions an operand varies along.
enum class Own { kNone, kInner, kAll };

Own PickOwn() { return static_cast<Own>(Pick(0, 2)); }

struct Batch {
  int64_t outer, inner;

  int64_t size() const { return outer * inner; }
  int64_t Count(Own own) const {
    return own == Own::kNone ? 1 : own == Own::kInner ? inner : size();
  }
  // The entry of an operand for batch entry n.
  int64_t Entry(Own own, int64_t n) const {
    return own == Own::kNone ? 0 : own == Own::kInner ? n % inner : n;
  }
  // The strides of an operand whose entries have `size` elements.
  int64_t OuterStride(Own own, int64_t size) const { return own == Own::kAll ? inner * size : 0; }
  int64_t InnerStride(Own own, int64_t size) const { return own == Own::kNone ? 0 : size; }
};

int64_t Place(const Geometry& g, int64_t time, int64_t t, int64_t c) {
  return g.data_format == jaxops::DataFormat::kNTC ? t * g.channels + c : c * time + t;
}

Geometry MakeGeometry(DType dtype, const Batch& batch) {
  Geometry g{};
  g.taps = Happens(92) ? Pick(1, 8) : Pick(9, 40);  // only packed.cu has more than 8
  g.dilation = Happens(75) ? 1 : Pick(2, 4);
  const int64_t reach = (g.taps - 1) * g.dilation;
  g.padding = Happens(70) ? reach : Pick(0, reach);
  g.data_format = static_cast<jaxops::DataFormat>(Happens(35));
  g.heads = Pick(1, 3);
  g.channels = g.heads * Pick(1, 6);
  g.time = Pick(1, 90);
  const int64_t vector = 16 / jaxops::SizeOf(dtype);
  if (g.data_format == jaxops::DataFormat::kNCT) {
    if (Happens(30)) g.heads = g.channels;
    if (Happens(85)) {  // rows that nct/causal runs, some of several parts
      g.taps = Pick(2, 8);
      g.dilation = 1;
      g.padding = g.taps - 1;
      g.time = vector * Pick(1, Happens(15) ? 70 : 12);
    }
  } else if (Happens(25)) {  // more channels than a warp has
    g.channels = g.heads * Pick(43, 90);
    g.time = Pick(1, 40);
  } else if (Happens(50)) {  // whole vectors
    g.channels = g.heads * vector * Pick(1, 4);
  } else if (Happens(20)) {
    g.heads = g.channels;
  }
  if (Happens(10) && g.channels % 4 == 0) g.heads = g.channels;
  // The definition is slow.
  const int64_t most = std::max<int64_t>(1, 16000 / (g.channels * batch.size()));
  if (g.time > most) g.time = most > vector ? most / vector * vector : most;
  return g;
}

// The starts of sequences, the first of which is `first()`.
template <typename First>
std::vector<int32_t> MakeStarts(int64_t sequences, int64_t time, First&& first) {
  constexpr int kPercent[] = {0, 3, 10, 25, 100};
  std::vector<int32_t> starts;
  for (int64_t n = 0; n < sequences; ++n) {
    const int percent = kPercent[Pick(0, 4)];
    int64_t start = first();
    for (int64_t t = 0; t < time; ++t) {
      if (t > 0 && Happens(percent)) start = t;
      starts.push_back(static_cast<int32_t>(start));
    }
  }
  return starts;
}

// Makes a row of channels NaN.
void SpoilRow(Floats& array, const Geometry& g, int64_t time) {
  if (time == 0) return;
  const int64_t entry = Pick(0, array.count() / (time * g.channels) - 1), t = Pick(0, time - 1);
  for (int64_t c = 0; c < g.channels; ++c) {
    array.Set(entry * time * g.channels + Place(g, time, t, c), NAN);
  }
}

std::vector<double> Values(const Floats& array) {
  std::vector<double> values(array.count());
  for (int64_t i = 0; i < array.count(); ++i) values[i] = array[i];
  return values;
}

std::string Describe(const std::string& family, const Geometry& g, const Batch& batch,
                     DType dtype) {
  const auto text = [](int64_t n) { return std::to_string(n) + " "; };
  return family + " (type " + text(static_cast<int>(dtype)) + "batch " + text(batch.outer) +
         text(batch.inner) + "time " + text(g.time) + "channels " + text(g.channels) + "heads " +
         text(g.heads) + "taps " + text(g.taps) + "padding " + text(g.padding) + "dilation " +
         text(g.dilation) + "format " + std::to_string(static_cast<int>(g.data_format)) + ") ";
}

void CheckAll(const Floats& got, const std::vector<double>& want, int64_t terms,
              const std::string& what) {
  for (int64_t i = 0; i < got.count(); ++i) {
    if (std::isnan(want[i])) {
      Check(std::isnan(got[i]), what + std::to_string(i) + " is not NaN");
    } else {
      CheckClose(got, i, want[i], terms, what);
    }
  }
}

// --- forward -------------------------------------------------------------------------------------

void RunForwardCall() {
  const Batch batch{Happens(70) ? 1 : 2, Pick(1, 3)};
  Forward call{};
  call.dtype = PickFloat();
  const Geometry g = call.geometry = MakeGeometry(call.dtype, batch);
  const bool is_ntc = g.data_format == jaxops::DataFormat::kNTC;
  const bool has_slots = is_ntc && Happens(45);
  const bool has_state = has_slots || Happens(60);
  const bool has_starts = has_slots || !has_state || Happens(75);
  call.weight_dtype = PickFloatFor(call.dtype);
  call.bias_dtype = PickFloatFor(call.dtype);
  call.state_dtype = Happens(50) ? call.dtype : PickFloatFor(call.dtype);
  call.activation = static_cast<jaxops::Activation>(Pick(0, 3));
  call.flip_taps = Happens(50);
  call.num_slots = has_slots ? Pick(1, 4) : 0;

  const Own weight_own = PickOwn(), bias_own = PickOwn(), state_own = PickOwn();
  const Own starts_own = PickOwn();  // that of slots, too: segments have slots
  const int64_t rows = g.time * g.channels, filters = g.heads * g.taps;
  const int64_t state_rows = (has_slots ? call.num_slots : 1) * g.padding * g.channels;
  const auto outer = [&](Own own, int64_t size) { return batch.OuterStride(own, size); };
  const auto inner = [&](Own own, int64_t size) { return batch.InnerStride(own, size); };
  const auto append = [&](int64_t size, const auto& stride) {
    return call.batch.Append(
        size, {stride(Own::kAll, rows), stride(weight_own, filters), stride(bias_own, g.channels),
               stride(starts_own, g.time), stride(state_own, state_rows),
               stride(starts_own, g.time), stride(Own::kAll, rows)});
  };
  Check(append(batch.outer, outer) && append(batch.inner, inner), "batch");
  Floats x(batch.size() * rows, call.dtype);
  Floats weight(batch.Count(weight_own) * filters, call.weight_dtype);
  Floats bias(batch.Count(bias_own) * g.channels, call.bias_dtype);
  Floats state(batch.Count(state_own) * state_rows, call.state_dtype);
  for (Floats* array : {&x, &weight, &bias, &state}) array->Fill();
  if (Happens(30)) SpoilRow(x, g, g.time);
  if (Happens(30) && has_state) SpoilRow(state, g, g.padding);
  std::vector<int32_t> starts, slots;
  if (has_starts) {
    starts = MakeStarts(batch.Count(starts_own), g.time, [&] {
      // The steps before the first segment are those of its slot.
      if (has_slots) return Happens(70) ? 0 : -Pick(0, g.padding + 2);
      return Happens(70) ? (has_state ? -g.padding : 0) : -Pick(0, g.padding + 2);
    });
  }
  for (size_t i = 0; has_slots && i < starts.size(); ++i) {
    const bool is_same = i % g.time > 0 && starts[i] == starts[i - 1];
    slots.push_back(is_same ? slots.back() : static_cast<int32_t>(Pick(-1, call.num_slots)));
  }
  const Numbers starts_array(starts), slots_array(slots);
  call.x = x.data();
  call.weight = weight.data();
  call.bias = Happens(50) ? bias.data() : nullptr;
  call.starts = starts_array.data();
  call.slots = slots_array.data();
  call.state = has_state ? state.data() : nullptr;

  const std::vector<double> xs = Values(x), weights = Values(weight), biases = Values(bias),
                            states = Values(state);
  std::vector<double> want(batch.size() * rows);
  for (int64_t n = 0; n < batch.size(); ++n) {
    const int64_t of_starts = batch.Entry(starts_own, n) * g.time;
    const auto start = [&](int64_t t) {
      return has_starts ? int64_t{starts[of_starts + t]} : -g.padding;
    };
    for (int64_t t = 0; t < g.time; ++t) {
      for (int64_t c = 0; c < g.channels; ++c) {
        double sum = call.bias == nullptr ? 0 : biases[batch.Entry(bias_own, n) * g.channels + c];
        for (int64_t k = 0; k < g.taps; ++k) {
          const int64_t s = t + k * g.dilation - g.padding;
          const double tap =
              weights[batch.Entry(weight_own, n) * filters + c / (g.channels / g.heads) * g.taps +
                      (call.flip_taps ? g.taps - 1 - k : k)];
          const int64_t of_state = batch.Entry(state_own, n) * state_rows;
          if (s >= 0 && s < g.time && start(s) == start(t)) {
            sum += tap * xs[n * rows + Place(g, g.time, s, c)];
          } else if (has_slots && s < start(t)) {
            const int64_t slot = slots[of_starts + t], row = g.padding + s - start(t);
            if (slot < 0 || slot >= call.num_slots) continue;
            sum += tap * states[of_state + (slot * g.padding + row) * g.channels + c];
          } else if (!has_slots && has_state && s < 0 && s >= start(t)) {
            sum += tap * states[of_state + Place(g, g.padding, s + g.padding, c)];
          }
        }
        want[n * rows + Place(g, g.time, t, c)] = Activated(call.activation, sum);
      }
    }
  }

  const auto run = [&](const std::string& family, auto can_run, auto launch) {
    const families::Device device{};
    if (!can_run(call, device)) return;
    ++calls[family];
    const Floats y(batch.size() * rows, call.dtype);
    call.y = y.data();
    const std::string what = Describe(family, g, batch, call.dtype);
    Check(launch(nullptr, call, device) == cudaSuccess, what);
    CheckAll(y, want, 8 * g.taps, what + "y ");
  };
  using CanRun = bool (*)(const Forward&, const families::Device&);
  using Launch = cudaError_t (*)(cudaStream_t, const Forward&, const families::Device&);
  run("ntc/window", CanRun{families::ntc::CanRunWindowOfSegments},
      Launch{families::ntc::LaunchWindowOfSegments});
  run(has_slots ? "ntc/short of slots" : "ntc/short", CanRun{families::ntc::CanRunShortOfSegments},
      Launch{families::ntc::LaunchShortOfSegments});
  run("nct/causal", CanRun{families::nct::CanRunCausalOfSegments},
      Launch{families::nct::LaunchCausalOfSegments});
  run("packed", CanRun{families::CanRunPacked}, Launch{families::LaunchPacked});
  if (!has_state || (has_slots && !families::CanRunStateSteps(call))) return;
  run(has_slots ? "steps of slots" : "steps of states", CanRun{families::CanRunPacked},
      [](cudaStream_t stream, const Forward& whole, const families::Device& device) {
        Forward stateless = whole;
        stateless.state = nullptr;
        stateless.slots = nullptr;
        const cudaError_t error = families::LaunchPacked(stream, stateless, device);
        if (error != cudaSuccess) return error;
        return whole.slots == nullptr ? families::LaunchPackedHeads(stream, whole)
                                      : families::LaunchStateSteps(stream, whole);
      });
}

// --- backward ------------------------------------------------------------------------------------

void RunBackwardCall() {
  const Batch batch{Pick(1, 2), Pick(1, 3)};  // kept and summed entries
  Backward call{};
  call.dtype = PickFloat();
  const Geometry g = call.geometry = MakeGeometry(call.dtype, batch);
  call.weight_dtype = PickFloatFor(call.dtype);
  call.bias_dtype = PickFloatFor(call.dtype);
  const bool wants_dx = Happens(75), wants_dbias = Happens(60);
  const Own starts_own = PickOwn();
  const int64_t rows = g.time * g.channels, filters = g.heads * g.taps;
  const int64_t kept_rows = batch.inner * rows;
  Check(call.kept.Append(batch.outer, {kept_rows, filters, kept_rows,
                                       batch.OuterStride(starts_own, g.time), kept_rows}) &&
            call.summed.Append(batch.inner,
                               {rows, 0, rows, batch.InnerStride(starts_own, g.time), rows}),
        "batch");

  Floats x(batch.size() * rows, call.dtype), cotangent(batch.size() * rows, call.dtype);
  Floats weight(batch.outer * filters, call.weight_dtype);
  for (Floats* array : {&x, &weight, &cotangent}) array->Fill();
  if (Happens(20)) SpoilRow(x, g, g.time);
  if (Happens(20)) SpoilRow(cotangent, g, g.time);
  const std::vector<int32_t> starts = MakeStarts(batch.Count(starts_own), g.time, [&] {
    return Happens(60) ? int64_t{0} : -Pick(0, g.padding + 2);
  });
  const Numbers starts_array(starts);
  call.x = x.data();
  call.weight = wants_dx ? weight.data() : nullptr;
  call.g = cotangent.data();
  call.starts = starts_array.data();

  const std::vector<double> xs = Values(x), weights = Values(weight), gs = Values(cotangent);
  std::vector<double> dx_want(xs.size()), dweight_want(weights.size()),
      dbias_want(batch.outer * g.channels);
  for (int64_t n = 0; n < batch.size(); ++n) {
    const int32_t* own_starts = starts.data() + batch.Entry(starts_own, n) * g.time;
    const int64_t kept = n / batch.inner;
    for (int64_t t = 0; t < g.time; ++t) {
      for (int64_t c = 0; c < g.channels; ++c) {
        const double own_g = gs[n * rows + Place(g, g.time, t, c)];
        dbias_want[kept * g.channels + c] += own_g;
        for (int64_t k = 0; k < g.taps; ++k) {
          const int64_t s = t + k * g.dilation - g.padding;
          if (s < 0 || s >= g.time || own_starts[s] != own_starts[t]) continue;
          const int64_t tap = kept * filters + c / (g.channels / g.heads) * g.taps + k;
          const int64_t at = n * rows + Place(g, g.time, s, c);
          dx_want[at] += weights[tap] * own_g;
          dweight_want[tap] += xs[at] * own_g;
        }
      }
    }
  }

  const auto run = [&](const std::string& family, auto can_run, auto launch) {
    const families::Device device{};
    const Memory partials(WorkSpaceBytes(call));
    const families::Gradients gradients{call, CountSplits(call), partials.data()};
    if (!can_run(gradients, device)) return;
    ++calls[family + " gradients"];
    const Floats dx(x.count(), call.dtype), dweight(weight.count(), call.weight_dtype);
    const Floats dbias(batch.outer * g.channels, call.bias_dtype);
    call.dx = wants_dx ? dx.data() : nullptr;
    call.dweight = dweight.data();
    call.dbias = wants_dbias ? dbias.data() : nullptr;
    const std::string what = Describe(family, g, batch, call.dtype);
    Check(launch(nullptr, gradients, device) == cudaSuccess, what);
    const int64_t terms = batch.inner * g.time;
    if (wants_dx) CheckAll(dx, dx_want, 8 * g.taps, what + "dx ");
    CheckAll(dweight, dweight_want, terms * g.channels / g.heads, what + "dweight ");
    if (wants_dbias) CheckAll(dbias, dbias_want, terms, what + "dbias ");
  };
  using CanRun = bool (*)(const families::Gradients&, const families::Device&);
  using Launch = cudaError_t (*)(cudaStream_t, const families::Gradients&, const families::Device&);
  run("ntc/short", CanRun{families::ntc::CanRunShortOfSegments},
      Launch{families::ntc::LaunchShortOfSegments});
  run("nct/causal", CanRun{families::nct::CanRunCausalOfSegments},
      Launch{families::nct::LaunchCausalOfSegments});
  if (!wants_dx) {
    run("packed", CanRun{families::CanRunPacked}, Launch{families::LaunchPacked});
  }
}

// --- starts --------------------------------------------------------------------------------------

void RunStartsCall(int64_t time) {
  segment_starts::Call call{};
  call.time = time;
  call.first = static_cast<int32_t>(-Pick(0, 3));
  call.id_bytes = 1 << Pick(0, 3);
  const int64_t rows = Pick(1, 3);
  Check(call.batch.Append(rows, {time, time}), "batch");
  const Memory ids(rows * time * call.id_bytes), starts(rows * time * 4);
  const int percent = Happens(30) ? 0 : static_cast<int>(Pick(1, 60));
  auto* const bytes = static_cast<char*>(ids.data());
  std::vector<int32_t> want;
  for (int64_t n = 0; n < rows; ++n) {
    // The ids of neighbouring segments differ in one bit, which may be any.
    uint64_t id = random_numbers();
    int32_t start = call.first;
    for (int64_t t = 0; t < time; ++t) {
      if (t > 0 && (percent == 0 ? Pick(1, 1500) == 1 : Happens(percent))) {
        id ^= uint64_t{1} << Pick(0, 8 * call.id_bytes - 1);
        start = static_cast<int32_t>(t);
      }
      std::memcpy(bytes + (n * time + t) * call.id_bytes, &id, call.id_bytes);
      want.push_back(start);
    }
  }
  call.ids = ids.data();
  call.starts = static_cast<int32_t*>(starts.data());
  ++calls["segment_starts"];
  Check(segment_starts::cuda::LaunchSegmentStarts(nullptr, call) == cudaSuccess, "segment_starts");
  for (size_t i = 0; i < want.size(); ++i) {
    Check(call.starts[i] == want[i], "segment_starts of " + std::to_string(time) + " steps, " +
                                         std::to_string(i) + ": " + std::to_string(call.starts[i]) +
                                         " for " + std::to_string(want[i]));
  }
}

}  // namespace

int main() {
  for (int i = 0; i < 500; ++i) RunForwardCall();
  for (int i = 0; i < 400; ++i) RunBackwardCall();
  for (int i = 0; i < 60; ++i) RunStartsCall(Pick(1, 300));
  for (const int64_t time : {2047, 2048, 2049, 4100, 8192, 8193, 8200, 20000, 20481}) {
    RunStartsCall(time);
  }
  // A family that runs hardly any call is not checked.
  constexpr int kLeastCalls = 20;
  bool are_enough = true;
  for (const char* family : {"ntc/window", "ntc/short", "ntc/short of slots", "ntc/short gradients",
                             "nct/causal", "nct/causal gradients", "packed", "packed gradients",
                             "steps of states", "steps of slots", "segment_starts"}) {
    std::fprintf(stderr, "%s: %d calls\n", family, calls[family]);
    are_enough = are_enough && calls[family] >= kLeastCalls;
  }
  return are_enough ? 0 : 1;
}
