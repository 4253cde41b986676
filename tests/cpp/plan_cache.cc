// A PlanCache used by several threads at once, with more keys than it keeps.
#include "cuda/common/plan_cache.h"

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

namespace {

struct Key {
  int64_t size;
  int32_t dtype, processors;
};

struct Plan {
  int64_t square;
};

using Cache = jaxops::cuda::PlanCache<Key, Plan>;

void Check(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::exit(1);
}

void GetMany(Cache& cache, unsigned seed, int64_t keys, std::atomic<int64_t>& made) {
  std::mt19937 random(seed);
  std::vector<std::shared_ptr<const Plan>> held;
  for (int n = 0; n < 20000; ++n) {
    const Key key{static_cast<int64_t>(random() % keys), static_cast<int32_t>(random() % 2), 132};
    const auto plan = cache.Get(key, [&] {
      ++made;
      return Plan{key.size * key.size + key.dtype};
    });
    Check(plan->square == key.size * key.size + key.dtype, "the plan of another key");
    if (n % 100 == 0) held.push_back(plan);  // a plan outlives its place in the cache
  }
  for (const auto& plan : held) Check(plan->square >= 0, "a plan that was held");
}

int64_t CountMade(int64_t keys) {
  Cache cache;
  std::atomic<int64_t> made = 0;
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] { GetMany(cache, seed, keys, made); });
  }
  for (std::thread& thread : threads) thread.join();
  return made;
}

}  // namespace

int main() {
  // Threads that miss at the same time each make the plan, and one of them is kept.
  const int64_t made = CountMade(100);
  Check(made >= 200 && made <= 4 * 200, "plans that are kept are made again");
  Check(CountMade(5000) > 10000, "keys beyond those that are kept");
}
