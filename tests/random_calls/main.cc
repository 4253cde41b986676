// Makes random calls of all operators of the CPU:
//
//   random_calls [--cases N] [--seed TEXT] [--operator NAME] [--first N]
//
// A call is decided by the seed, its operator and its number, which are printed if it fails.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "tests/random_calls/calls.h"

// Defined by sanitizers alone.
extern "C" [[gnu::weak]] void __sanitizer_set_death_callback(void (*)());

namespace jaxops::random_calls {
namespace {

// The text that a signal handler prints: the arguments that make the current call again.
char current[256];

void PrintCurrent() {
  [[maybe_unused]] const auto written = write(STDERR_FILENO, current, std::strlen(current));
}

void OnSignal(int number) {
  PrintCurrent();
  std::signal(number, SIG_DFL);
  std::raise(number);
}

// Runs of several tasks; a call of one does not ask for threads.
long parallel_runs = 0;

void RunInOrder(int64_t count, const std::function<void(int64_t)>& task) {
  ++parallel_runs;
  for (int64_t i = 0; i < count; ++i) task(i);
}

void RunBackwards(int64_t count, const std::function<void(int64_t)>& task) {
  for (int64_t i = count; i-- > 0;) task(i);
}

void RunInThreads(int64_t count, const std::function<void(int64_t)>& task) {
  std::atomic<int64_t> next = 0;
  const auto take = [&] {
    for (int64_t i; (i = next++) < count;) task(i);
  };
  std::thread others[] = {std::thread(take), std::thread(take)};
  take();
  for (std::thread& other : others) other.join();
}

long too_large = 0;

// Returns whether both runs of a call have the same results.
bool IsReproducible(const std::string& seed, MakeCall make) try {
  Random random(seed);
  Arrays arrays(random);
  const Call call = make(random, arrays);
  arrays.Reset(0x5a);
  call({1, RunInOrder});
  const std::vector<std::string> first = arrays.Results();
  arrays.Reset(0xa5);
  call({3, random.OneIn(4) ? RunBackwards : RunInThreads});
  const std::vector<std::string> second = arrays.Results();
  for (size_t i = 0; i < first.size(); ++i) {
    if (first[i] == second[i]) continue;
    const auto [a, b] = std::mismatch(first[i].begin(), first[i].end(), second[i].begin());
    std::fprintf(stderr, "result %zu differs at byte %td of %zu: %02x and %02x\n", i,
                 a - first[i].begin(), first[i].size(), static_cast<unsigned char>(*a),
                 static_cast<unsigned char>(*b));
  }
  return first == second;
} catch (const TooLarge&) {
  ++too_large;
  return true;
}

int Main(int argc, char** argv) {
  long cases = 100, first = 0;
  std::string seed = "0", only;
  for (int i = 1; i < argc; i += 2) {
    const std::string option = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : nullptr;
    if (value != nullptr && option == "--cases") {
      cases = std::atol(value);
    } else if (value != nullptr && option == "--first") {
      first = std::atol(value);
    } else if (value != nullptr && option == "--seed") {
      seed = value;
    } else if (value != nullptr && option == "--operator") {
      only = value;
    } else {
      std::fprintf(stderr, "%s [--cases N] [--seed TEXT] [--operator NAME] [--first N]\n", argv[0]);
      return 2;
    }
  }
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(PrintCurrent);
  for (const int number : {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGTRAP}) {
    std::signal(number, OnSignal);
  }
  long made = 0;
  std::vector<Registration> operators = Registered();
  std::sort(operators.begin(), operators.end(),
            [](const auto& a, const auto& b) { return std::strcmp(a.name, b.name) < 0; });
  for (const auto& [name, make] : operators) {
    if (!only.empty() && only != name) continue;
    parallel_runs = 0;
    for (long number = first; number < first + cases; ++number, ++made) {
      std::snprintf(current, sizeof current,
                    "random_calls: in --operator %s --first %ld --cases 1 --seed %s\n", name,
                    number, seed.c_str());
      if (!IsReproducible(seed + "/" + name + "/" + std::to_string(number), make)) {
        PrintCurrent();
        return 1;
      }
    }
    std::printf("%s: %ld calls, %ld runs of several tasks\n", name, cases, parallel_runs);
    if (cases >= 1000 && parallel_runs == 0) {
      std::fprintf(stderr, "random_calls: no call of %s had several tasks\n", name);
      return 1;
    }
  }
  std::printf("%ld calls with --seed %s, %ld of them too large\n", made, seed.c_str(), too_large);
  return made > 0 ? 0 : 2;
}

}  // namespace
}  // namespace jaxops::random_calls

int main(int argc, char** argv) { return jaxops::random_calls::Main(argc, argv); }
