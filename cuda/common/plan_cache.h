// Plans of launches, kept by what they depend on.
//
// A plan that is found by a search takes longer to make than its kernel takes to launch, and a
// program launches the same ones again and again.
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

// Keys are compared and hashed by their bytes. Any number of threads may use one.
template <typename Key, typename Plan>
class PlanCache {
  static_assert(std::has_unique_object_representations_v<Key>);

 public:
  // The plan for `key`, which make() returns if it is not kept.
  template <typename Make>
  std::shared_ptr<const Plan> Get(const Key& key, Make&& make) {
    {
      std::shared_lock lock(mutex_);
      if (const auto found = plans_.find(key); found != plans_.end()) return found->second;
    }
    auto made = std::make_shared<const Plan>(std::forward<Make>(make)());
    std::unique_lock lock(mutex_);
    // A program has far fewer, and one that has more makes them again.
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

// The only one of these types, which is never destroyed: calls may come until the process ends.
template <typename Key, typename Plan, typename Tag>
PlanCache<Key, Plan>& Plans() {
  static auto& cache = *new PlanCache<Key, Plan>;
  return cache;
}

}  // namespace jaxops::cuda

#endif  // JAXOPS_CUDA_COMMON_PLAN_CACHE_H_
