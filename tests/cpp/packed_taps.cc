// Taps of calls with segments and states, as the CUDA kernels find them, against the definition.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "cuda/lightweight_conv/packed.h"

namespace {

using namespace jaxops::lightweight_conv::cuda;  // NOLINT

constexpr int kTaps = 8;

struct Call {
  int time, taps, dilation, padding;
  bool has_starts;
  std::vector<int32_t> starts;
};

Call MakeCall(std::mt19937& random) {
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  Call call;
  call.time = 1 + below(40);
  call.taps = 1 + below(kTaps);
  call.dilation = 1 + below(random() % 2 ? 1 : 12);
  const int reach = (call.taps - 1) * call.dilation;
  call.padding = random() % 2 ? reach : below(reach + 1);
  call.has_starts = random() % 4 != 0;
  int start = random() % 2 ? 0 : -below(call.padding + 1);
  for (int t = 0; t < call.time; ++t) {
    if (t > 0 && random() % 4 == 0) start = t;
    call.starts.push_back(start);
  }
  return call;
}

void Check(bool good, const char* what, const Call& call, int t, int k) {
  if (good) return;
  std::fprintf(stderr, "wrong %s: step %d, tap %d of %d, dilation %d, padding %d, start %d\n", what,
               t, k, call.taps, call.dilation, call.padding, call.starts[t]);
  std::exit(1);
}

}  // namespace

int main() {
  std::mt19937 random(0);
  int from_states = 0, from_slots = 0, pairs_found = 0;
  for (int n = 0; n < 20000; ++n) {
    const Call call = MakeCall(random);
    const int32_t* starts = call.has_starts ? call.starts.data() : nullptr;
    for (int t = 0; t < call.time; ++t) {
      const int start = call.has_starts ? call.starts[t] : -call.padding;
      const int first_row = t - call.padding;
      const uint32_t pairs =
          FindPairs<kTaps>(starts, t, first_row, call.dilation, call.taps, call.time);
      const StateTaps state =
          FindStateTaps(t, start, call.padding, call.dilation, call.taps, false);
      const StateTaps slot = FindStateTaps(t, start, call.padding, call.dilation, call.taps, true);
      for (int k = 0; k < kTaps; ++k) {
        const int s = first_row + k * call.dilation;
        const bool is_inside = k < call.taps && s >= 0 && s < call.time;
        const bool meets = is_inside && (!call.has_starts || call.starts[s] == start);
        Check((pairs >> k & 1) == meets, "pair", call, t, k);
        pairs_found += meets;
        const auto check_state = [&](const StateTaps& found, bool reads, int row,
                                     const char* what) {
          Check((k >= found.first && k < found.end) == reads, what, call, t, k);
          if (reads) Check(found.row + k * call.dilation == row, what, call, t, k);
        };
        const bool reads_state = k < call.taps && s < 0 && s >= start;
        check_state(state, reads_state, call.padding + s, "state");
        const bool reads_slot = k < call.taps && s < start;
        check_state(slot, reads_slot, call.padding + s - start, "slot");
        from_states += reads_state;
        from_slots += reads_slot;
      }
      // Rows are inside of a state whatever the start.
      const int any = static_cast<int>(random());
      for (const bool is_of_segment : {false, true}) {
        const StateTaps found =
            FindStateTaps(t, any, call.padding, call.dilation, call.taps, is_of_segment);
        for (int k = found.first; k < found.end; ++k) {
          const int row = found.row + k * call.dilation;
          Check(k >= 0 && k < call.taps && row >= 0 && row < call.padding, "row", call, t, k);
        }
      }
    }
  }
  if (from_states < 10000 || from_slots < 10000 || pairs_found < 10000) return 1;
}
