// Plans of launches, kept under the values that they depend on.
//
// A search for a plan takes longer than the launch of its kernel, and a program launches the same
// plans again and again.
#ifndef JAXOPS_CUDA_COMMON_PLAN_CACHE_H_
#define JAXOPS_CUDA_COMMON_PLAN_CACHE_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>

namespace jaxops::cuda {

// A cache compares and hashes keys by their bytes. Any number of threads may use a cache at once.
template <typename Key, typename Plan>
class PlanCache {
  static_assert(std::has_unique_object_representations_v<Key>);

 public:
  // Returns the plan for `key`; make() returns the plan if the cache does not have it.
  template <typename Make>
  std::shared_ptr<const Plan> Get(const Key& key, Make&& make) {
    {
      std::shared_lock lock(mutex_);
      if (const auto found = plans_.find(key); found != plans_.end()) return found->second;
    }
    auto made = std::make_shared<const Plan>(std::forward<Make>(make)());
    std::unique_lock lock(mutex_);
    // A usual program has far fewer plans. A program with more computes them again.
    if (plans_.size() >= kMaxPlans) plans_.clear();
    return plans_.emplace(key, std::move(made)).first->second;
  }

 private:
  static constexpr size_t kMaxPlans = 1024;

  static std::string_view Bytes(const Key& key) {
    return {reinterpret_cast<const char*>(&key), sizeof(key)};
  }
  struct Hash {
    size_t operator()(const Key& key) const { return std::hash<std::string_view>()(Bytes(key)); }
  };
  struct Equal {
    bool operator()(const Key& a, const Key& b) const { return Bytes(a) == Bytes(b); }
  };

  std::shared_mutex mutex_;
  std::unordered_map<Key, std::shared_ptr<const Plan>, Hash, Equal> plans_;
};

// Returns the only cache of these types, which is never destroyed: calls may come until the process
// ends.
template <typename Key, typename Plan, typename Tag>
PlanCache<Key, Plan>& Plans() {
  static auto& cache = *new PlanCache<Key, Plan>;
  return cache;
}

}  // namespace jaxops::cuda

#endif  // JAXOPS_CUDA_COMMON_PLAN_CACHE_H_
