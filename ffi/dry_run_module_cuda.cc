// The submodule `dry_run` of jaxops._cuda, for `jaxops.testing.kernels` and the tests.
#include "ffi/dry_run_module_cuda.h"

#include <cxxabi.h>
#include <nanobind/stl/map.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/common/dispatch.h"
#include "ffi/bind.h"
#include "ffi/call_frame.h"
#include "ffi/dry_run_cuda.h"

namespace jaxops::dry_run {
namespace {

namespace nb = nanobind;
using ffi::CallFrame;
using namespace nb::literals;

// A compute capability, the multiprocessors, and the shared memory that a block can opt in to.
using DeviceTuple = std::tuple<int, int, int, int>;
using Dims = std::tuple<unsigned, unsigned, unsigned>;
// A mangled name, "" for a memset; the grid; the threads, clusters and shared memory of a block.
using LaunchTuple = std::tuple<std::string, Dims, Dims, Dims, size_t>;

Device ToDevice(const DeviceTuple& device) {
  const auto [major, minor, processors, shared_bytes] = device;
  return {major, minor, processors, shared_bytes};
}

Dims ToDims(dim3 dims) { return {dims.x, dims.y, dims.z}; }

dim3 ToDim3(const Dims& dims) {
  const auto [x, y, z] = dims;
  return {x, y, z};
}

// Returns the message of the error that the handler returned, the first violation, and the
// launches.
std::tuple<std::string, std::string, std::vector<LaunchTuple>> Run(CallFrame& frame,
                                                                   const DeviceTuple& device) {
  Trace trace{.device = ToDevice(device), .buffers = frame.buffers()};
  std::string error;
  {
    const Scope scope(trace);
    error = frame.Call();
  }
  std::vector<LaunchTuple> launches;
  for (const Launch& launch : trace.launches) {
    launches.emplace_back(launch.kernel ? launch.kernel->mangled_name : "", ToDims(launch.grid),
                          ToDims(launch.threads), ToDims(launch.cluster), launch.dynamic_bytes);
  }
  return {error, trace.violation, launches};
}

// Returns the seconds of each of `calls` calls. Launches in them take no time and are not checked.
std::vector<double> Time(CallFrame& frame, const DeviceTuple& device, int64_t calls) {
  Trace trace{.device = ToDevice(device), .buffers = frame.buffers(), .checks = false};
  const Scope scope(trace);
  std::vector<double> seconds(calls);
  for (double& second : seconds) {
    const auto start = std::chrono::steady_clock::now();
    const std::string error = frame.Call();
    second = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (!error.empty()) throw std::runtime_error(error);
  }
  return seconds;
}

std::string Demangle(const std::string& name) {
  char* const text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, nullptr);
  const std::string demangled = text ? text : name;
  std::free(text);
  return demangled;
}

std::vector<std::string> KernelNames() {
  std::vector<std::string> names;
  for (const Kernel* const kernel : Kernels()) names.push_back(kernel->mangled_name);
  return names;
}

// The names of kernel families by operator and direction, in the order of dispatch.
std::map<std::string, std::map<std::string, std::vector<std::string>>> FamilyNames() {
  std::map<std::string, std::map<std::string, std::vector<std::string>>> names;
  for (const auto* t = jaxops::cuda::TableNames::first; t != nullptr; t = t->next) {
    for (const char* const name : t->families(*t)) {
      names[t->operator_name][t->direction].push_back(name);
    }
  }
  return names;
}

// --- single calls of the runtime, for tests of what dry runs find --------------------------------

// Calls the function in a dry run with one buffer of 1 MiB.
template <typename Function>
std::string ViolationOf(const DeviceTuple& device, const Function& function) {
  Trace trace{
      .device = ToDevice(device),
      .buffers = {{reinterpret_cast<const char*>(ffi::kFirstAddress), size_t{1} << 20, true}}};
  const Scope scope(trace);
  const bool failed = function();
  cudaGetLastError();
  if (failed == trace.violation.empty()) throw std::logic_error("an error that is not reported");
  return trace.violation;
}

std::string TryLaunch(const DeviceTuple& device, const std::string& kernel, const Dims& grid,
                      const Dims& threads, size_t dynamic_bytes, int opt_in, const Dims& cluster,
                      bool is_on_stream) {
  const void* function = nullptr;
  for (const Kernel* const k : Kernels()) {
    if (k->mangled_name == kernel) function = k->function;
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  const dim3 blocks = ToDim3(cluster);
  attribute.val.clusterDim = {blocks.x, blocks.y, blocks.z};
  cudaLaunchConfig_t config{};
  config.gridDim = ToDim3(grid);
  config.blockDim = ToDim3(threads);
  config.dynamicSmemBytes = dynamic_bytes;
  config.stream = is_on_stream ? Stream() : nullptr;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return ViolationOf(device, [&] {
    return (opt_in > 0 &&
            cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, opt_in)) ||
           cudaLaunchKernelExC(&config, function, nullptr);
  });
}

std::string TryMemset(const DeviceTuple& device, int64_t offset, size_t bytes) {
  return ViolationOf(device, [&] {
    return cudaMemsetAsync(reinterpret_cast<void*>(ffi::kFirstAddress + offset), 0, bytes,
                           Stream());
  });
}

// Encodes a tensor map of bf16.
std::string TryTensorMap(const DeviceTuple& device, int64_t offset,
                         const std::vector<uint64_t>& dims, const std::vector<uint64_t>& strides,
                         const std::vector<uint32_t>& box, const std::vector<uint32_t>& steps,
                         int swizzle_bytes) {
  CUtensorMap map;
  const auto swizzle = swizzle_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                       : swizzle_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                       : swizzle_bytes == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                             : CU_TENSOR_MAP_SWIZZLE_NONE;
  return ViolationOf(device, [&] {
    return EncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, dims.size(),
                       reinterpret_cast<void*>(ffi::kFirstAddress + offset), dims.data(),
                       strides.data(), box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
                       swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                       CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS;
  });
}

}  // namespace

void DefineDryRun(nanobind::module_& parent) {
  nb::module_ module = parent.def_submodule("dry_run");
#ifdef JAXOPS_SANITIZED
  module.attr("IS_SANITIZED") = true;
#else
  module.attr("IS_SANITIZED") = false;
#endif
  nb::class_<CallFrame>(module, "CallFrame")
      .def("__init__", [](CallFrame* frame, const std::string& target,
                          const std::vector<ffi::FrameArray>& operands,
                          const std::vector<ffi::FrameArray>& results,
                          const std::vector<ffi::FrameAttribute>& attributes) {
        new (frame) CallFrame(ffi::FindHandler(target), operands, results, attributes);
      });
  module.def("run", &Run);
  module.def("time", &Time);
  module.def("kernel_names", &KernelNames);
  module.def("demangle", &Demangle);
  module.def("family_names", &FamilyNames);
  module.def("force_family", &jaxops::cuda::ForcedFamilies::Set, "operator_name"_a, "family"_a);
  module.def("set_resources", [](const std::string& name, int registers, int static_bytes,
                                 int max_threads, bool needs_wgmma) {
    SetResources(name, {registers, static_bytes, max_threads, needs_wgmma});
  });
  module.def("try_launch", &TryLaunch, "device"_a, "kernel"_a, "grid"_a, "threads"_a,
             "dynamic_bytes"_a, "opt_in"_a, "cluster"_a, "is_on_stream"_a);
  module.def("try_memset", &TryMemset);
  module.def("try_tensor_map", &TryTensorMap, "device"_a, "offset"_a, "dims"_a, "strides"_a,
             "box"_a, "steps"_a, "swizzle_bytes"_a);
}

}  // namespace jaxops::dry_run
