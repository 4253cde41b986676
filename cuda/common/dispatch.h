// Each operator and direction has a table, read from the top, of the kernel families for a call.
//
//   constexpr Family<Call> kFamilies[] = {
//       {"mma", CanRunMma, PrefersMma, LaunchMma},
//       {"plain", CanRunPlain, Always, LaunchPlain},
//   };
//   const Table<Call> kForward("lightweight_conv", "forward", kFamilies);
//   cudaError_t LaunchForward(cudaStream_t s, const Forward& call) { return kForward.Run(s, call);
//   }
#ifndef JAXOPS_CUDA_COMMON_DISPATCH_H_
#define JAXOPS_CUDA_COMMON_DISPATCH_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/common/device.h"
#include "cuda/common/refusal.h"

namespace jaxops::cuda {

// Describes the current device. A thread queries the attributes again only if its device changed.
inline cudaError_t DescribeCurrentDevice(const Device** described) {
  static thread_local Device device;
  int number = 0;
  cudaError_t error = cudaGetDevice(&number);
  if (error == cudaSuccess && number != device.number) {
    Device found;
    const auto get = [&](int& value, cudaDeviceAttr attribute) {
      if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, number);
    };
    get(found.major, cudaDevAttrComputeCapabilityMajor);
    get(found.minor, cudaDevAttrComputeCapabilityMinor);
    get(found.processors, cudaDevAttrMultiProcessorCount);
    get(found.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    constexpr std::string_view kCompiled = JAXOPS_CUDA_ARCHITECTURES;
    found.has_wgmma =
        found.major == 9 && found.minor == 0 && kCompiled.find("90a") != std::string_view::npos;
    if (error == cudaSuccess) {
      found.number = number;
      device = found;
    }
  }
  *described = &device;
  return error;
}

// Tests and benchmarks force a family. That family then runs all calls of its operator; a call that
// the family cannot run is an error.
class ForcedFamilies {
 public:
  static void Set(const std::string& operator_name, const std::string& family) {
    State& state = Get();
    std::lock_guard lock(state.mutex);
    if (family.empty()) {
      state.families.erase(operator_name);
    } else {
      state.families[operator_name] = family;
    }
    state.any = !state.families.empty();
  }

  // Returns the family, or "" for none.
  static std::string Find(const char* operator_name) {
    State& state = Get();
    if (!state.any.load(std::memory_order_relaxed)) return "";
    std::lock_guard lock(state.mutex);
    const auto found = state.families.find(operator_name);
    return found == state.families.end() ? "" : found->second;
  }

 private:
  struct State {
    std::atomic<bool> any = false;
    std::mutex mutex;
    std::map<std::string, std::string> families;
  };
  static State& Get() {
    static auto& state = *new State;
    return state;
  }
};

template <typename Call>
struct Family {
  const char* name;  // of the family's folder or file in cuda/<operator>/
  // Tells whether the family's kernels compute such a call correctly on such a device.
  bool (*can_run)(const Call& call, const Device& device);
  // Tells whether the family is faster than the families below, given that it can run the call.
  bool (*prefers)(const Call& call, const Device& device);
  cudaError_t (*launch)(cudaStream_t stream, const Call& call, const Device& device);
};

template <typename Call>
bool Always(const Call&, const Device&) {
  return true;
}

// All tables, for code that lists them.
struct TableNames {
  const char* operator_name;
  const char* direction;
  std::vector<const char*> (*families)(const TableNames&);
  const TableNames* next;
  static inline constinit const TableNames* first = nullptr;
};

template <typename Call>
class Table : TableNames {
 public:
  Table(const char* operator_name, const char* direction, std::span<const Family<Call>> families)
      : TableNames{operator_name, direction, &Names, first}, families_(families) {
    first = this;
  }

  // Returns the family that takes a call on a device, or null if no kernel of this module runs it
  // there.
  const Family<Call>* Choose(const Call& call, const Device& device) const {
    const std::string forced = ForcedFamilies::Find(operator_name);
    for (const Family<Call>& family : families_) {
      const bool is_wanted = forced.empty()
                                 ? family.can_run(call, device) && family.prefers(call, device)
                                 : forced == family.name && family.can_run(call, device);
      if (is_wanted) return &family;
    }
    return nullptr;
  }

  cudaError_t Run(cudaStream_t stream, const Call& call) const {
    const Device* device;
    const cudaError_t error = DescribeCurrentDevice(&device);
    if (error != cudaSuccess) return error;
    if (device->major < 8) return RefuseCall(cudaErrorNoKernelImageForDevice, "", *device);
    const Family<Call>* const family = Choose(call, *device);
    if (family) {
      const cudaError_t status = family->launch(stream, call, *device);
      return status == cudaErrorNotSupported ? RefuseCall(status, family->name, *device) : status;
    }
    const std::string forced = ForcedFamilies::Find(operator_name);
    return RefuseCall(forced.empty() ? cudaErrorNoKernelImageForDevice : cudaErrorNotSupported,
                      forced, *device);
  }

 private:
  // An empty name stands for all families.
  cudaError_t RefuseCall(cudaError_t status, const std::string& family,
                         const Device& device) const {
    const std::string subject =
        family.empty() ? "no kernel family can" : "the family " + family + " cannot";
    return Refuse(status, std::string(operator_name) + " (" + direction + "): " + subject +
                              " run this call on a GPU of compute capability " +
                              std::to_string(device.major) + "." + std::to_string(device.minor) +
                              " with code for sm " JAXOPS_CUDA_ARCHITECTURES);
  }

  static std::vector<const char*> Names(const TableNames& table) {
    std::vector<const char*> names;
    for (const Family<Call>& family : static_cast<const Table&>(table).families_) {
      names.push_back(family.name);
    }
    return names;
  }

  std::span<const Family<Call>> families_;
};

}  // namespace jaxops::cuda

#endif  // JAXOPS_CUDA_COMMON_DISPATCH_H_
