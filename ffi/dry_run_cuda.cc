// The functions between the launchers and the CUDA runtime; the header describes them.
//
// The linker resolves a call of cudaX to __wrap_cudaX here, and __real_cudaX to the runtime's
// cudaX.
#include "ffi/dry_run_cuda.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <type_traits>
#include <unordered_map>
#include <utility>

namespace jaxops::dry_run {
namespace {

constexpr int kDefaultSharedBytes = 48 * 1024;
constexpr int kRegisters = 64 * 1024;       // of a multiprocessor
constexpr int kReservedSharedBytes = 1024;  // that the system uses of each block's shared memory
constexpr unsigned kMaxClusterBlocks = 8;   // of portable clusters
// Launchers may cache properties of a device by its number, so devices of dry runs have numbers
// above those of GPUs. CUB supports device numbers up to 128.
constexpr int kFirstDevice = 64;
constexpr int kMaxDevices = 128;

struct State {
  std::mutex mutex;
  std::map<Device, int> devices;
  std::unordered_map<const void*, Kernel> kernels;
};

// The state is constructed on its first use: kernels are registered before objects of other files.
State& GetState() {
  static auto& state = *new State;
  return state;
}

thread_local Trace* trace = nullptr;
thread_local cudaError_t last_error = cudaSuccess;

// This uses no streams: their locales are state that all C++ libraries of a process share.
template <typename... Parts>
std::string Join(const Parts&... parts) {
  std::string text;
  const auto append = [&](const auto& part) {
    if constexpr (std::is_integral_v<std::decay_t<decltype(part)>>) {
      text += std::to_string(part);
    } else {
      text += part;
    }
  };
  (append(parts), ...);
  return text;
}

std::string Text(dim3 d) { return Join("(", d.x, ", ", d.y, ", ", d.z, ")"); }

std::string Name(const Device& device) { return Join(device.major, ".", device.minor); }

// Keeps the first violation.
void Report(const std::string& violation) {
  if (trace && trace->violation.empty()) trace->violation = violation;
}

// Returns an error, and keeps it for cudaGetLastError: <<<>>> drops the result of a launch.
cudaError_t Fail(cudaError_t error, const std::string& violation) {
  Report(violation);
  return last_error = error;
}

// Returns a registered kernel, or null. No kernel is registered after the module is loaded.
Kernel* Find(const void* function) {
  auto& kernels = GetState().kernels;
  const auto found = kernels.find(function);
  return found == kernels.end() ? nullptr : &found->second;
}

int64_t Product(dim3 d) { return int64_t{d.x} * d.y * d.z; }

// The hardware allocates registers to a warp in multiples of 256.
int64_t RegistersOfBlock(const Resources& resources, int64_t threads) {
  const int64_t warps = (threads + 31) / 32;
  return warps * ((resources.registers * 32 + 255) / 256 * 256);
}

// Returns whether the device runs the machine code that was read; other code may need other numbers
// of registers.
bool HasKnownRegisters(const Resources& resources) {
  return resources.registers > 0 && trace->device.major == 9 && trace->device.minor == 0;
}

// Returns a description of the first fault of a launch, or an empty string.
std::string FindFault(const Launch& launch, cudaStream_t stream) {
  const Device& device = trace->device;
  const Resources& resources = launch.kernel->resources;
  const auto& [kernel, grid, threads, cluster, dynamic_bytes] = launch;
  if (stream != Stream()) return "it is not on the stream of the call";
  if (grid.x < 1 || grid.y < 1 || grid.z < 1 || grid.x > INT32_MAX || grid.y > 65535 ||
      grid.z > 65535) {
    return "its grid is " + Text(grid);
  }
  if (threads.x > 1024 || threads.y > 1024 || threads.z > 64 || Product(threads) < 1 ||
      Product(threads) > 1024) {
    return "its blocks have " + Text(threads) + " threads";
  }
  if (Product(threads) > resources.max_threads) {
    return Join("its blocks have ", Product(threads), " threads, and its launch bounds are ",
                resources.max_threads);
  }
  if (HasKnownRegisters(resources) && RegistersOfBlock(resources, Product(threads)) > kRegisters) {
    return Join("its blocks have ", Product(threads), " threads of ", resources.registers,
                " registers");
  }
  const auto asked = trace->opted_in.find(kernel->function);
  const size_t allowed =
      asked != trace->opted_in.end() ? asked->second : kDefaultSharedBytes - resources.static_bytes;
  if (dynamic_bytes > allowed) {
    return Join("it has ", dynamic_bytes, " bytes of dynamic shared memory, and opted in to ",
                allowed);
  }
  if (dynamic_bytes + resources.static_bytes > static_cast<size_t>(device.shared_bytes)) {
    return Join("it has ", dynamic_bytes, " + ", resources.static_bytes,
                " bytes of shared memory, and blocks have at most ", device.shared_bytes);
  }
  if (Product(cluster) != 1) {
    if (device.major < 9) return "it has clusters, which a GPU of " + Name(device) + " lacks";
    if (Product(cluster) < 1 || Product(cluster) > kMaxClusterBlocks) {
      return "its clusters are " + Text(cluster);
    }
    if (grid.x % cluster.x != 0 || grid.y % cluster.y != 0 || grid.z % cluster.z != 0) {
      return "its clusters " + Text(cluster) + " do not divide its grid " + Text(grid);
    }
  }
  if (resources.needs_wgmma && (device.major != 9 || device.minor != 0)) {
    return "it is made of wgmma instructions, which a GPU of " + Name(device) + " lacks";
  }
  return "";
}

cudaError_t Record(const Kernel* kernel, dim3 grid, dim3 threads, size_t dynamic_bytes,
                   cudaStream_t stream, dim3 cluster = {1, 1, 1}) {
  if (!trace->checks) return cudaSuccess;
  if (!kernel) {
    return Fail(cudaErrorInvalidDeviceFunction, "a launch of a function that is no kernel");
  }
  const Launch& launch =
      trace->launches.emplace_back(Launch{kernel, grid, threads, cluster, dynamic_bytes});
  const std::string fault = FindFault(launch, stream);
  if (fault.empty()) return cudaSuccess;
  return Fail(cudaErrorInvalidConfiguration,
              "the launch of " + kernel->mangled_name + " is wrong: " + fault);
}

// Returns whether bytes are in a buffer of the call.
bool Contains(const void* data, uint64_t bytes, bool is_written) {
  const char* begin = static_cast<const char*>(data);
  return std::any_of(
      trace->buffers.begin(), trace->buffers.end(), [&](const ffi::FrameBuffer& buffer) {
        return begin >= buffer.data && (buffer.is_result || !is_written) && bytes <= buffer.bytes &&
               static_cast<size_t>(begin - buffer.data) <= buffer.bytes - bytes;
      });
}

int ItemBytes(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
      return 4;
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64:
      return 8;
    default:
      return 0;
  }
}

// Checks the rules of cuTensorMapEncodeTiled, and that the tensor is in a buffer of the call.
std::string FindMapFault(const CUtensorMap* map, CUtensorMapDataType type, unsigned rank,
                         const void* base, const cuuint64_t* dims, const cuuint64_t* strides,
                         const cuuint32_t* box, const cuuint32_t* steps,
                         CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle) {
  const Device& device = trace->device;
  const int item = ItemBytes(type);
  if (device.major < 9) return "a GPU of " + Name(device) + " has no tensor maps";
  if (item == 0) return Join("its data type is ", static_cast<int>(type));
  if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE) return "it is interleaved";
  if (reinterpret_cast<uintptr_t>(map) % 64 != 0) return "it is not aligned to 64 bytes";
  if (reinterpret_cast<uintptr_t>(base) % 16 != 0) return "its base is not aligned to 16 bytes";
  if (rank < 1 || rank > 5) return Join("its rank is ", rank);
  uint64_t extent = 0, box_bytes = item;
  for (unsigned i = 0; i < rank; ++i) {
    if (dims[i] < 1 || dims[i] > uint64_t{1} << 32) return Join("dimension ", i, " is ", dims[i]);
    if (i > 0 && (strides[i - 1] % 16 != 0 || strides[i - 1] >= uint64_t{1} << 40)) {
      return Join("stride ", i - 1, " is ", strides[i - 1], " bytes");
    }
    if (box[i] < 1 || box[i] > 256) return Join("its box has ", box[i], " in dimension ", i);
    if (steps[i] < 1 || steps[i] > 8) return Join("element stride ", i, " is ", steps[i]);
    extent += (dims[i] - 1) * (i > 0 ? strides[i - 1] : item);
    box_bytes *= (box[i] + steps[i] - 1) / steps[i];
  }
  const unsigned row_bytes = box[0] * item;
  const unsigned span = swizzle == CU_TENSOR_MAP_SWIZZLE_NONE   ? UINT32_MAX
                        : swizzle == CU_TENSOR_MAP_SWIZZLE_32B  ? 32
                        : swizzle == CU_TENSOR_MAP_SWIZZLE_64B  ? 64
                        : swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128
                                                                : 0;
  if (row_bytes % 16 != 0 || row_bytes > span) {
    return Join("rows of its box have ", row_bytes, " bytes, and its swizzle is number ",
                static_cast<int>(swizzle));
  }
  if (box_bytes > static_cast<uint64_t>(device.shared_bytes)) {
    return Join("its box has ", box_bytes, " bytes");
  }
  if (!Contains(base, extent + item, false)) {
    return Join("its ", extent + item, " bytes are not in a buffer of the call");
  }
  return "";
}

using Encode = decltype(&EncodeTiled);
// The driver's function.
std::atomic<Encode> real_encode = nullptr;

}  // namespace

std::vector<const Kernel*> Kernels() {
  std::vector<const Kernel*> kernels;
  for (const auto& [function, kernel] : GetState().kernels) kernels.push_back(&kernel);
  return kernels;
}

void SetResources(const std::string& mangled_name, const Resources& resources) {
  // Several files may register the same template.
  for (auto& [function, kernel] : GetState().kernels) {
    if (kernel.mangled_name == mangled_name) kernel.resources = resources;
  }
}

Scope::Scope(Trace& of_this_scope) {
  State& state = GetState();
  {
    std::lock_guard lock(state.mutex);
    const int next = kFirstDevice + static_cast<int>(state.devices.size());
    of_this_scope.device_number = state.devices.emplace(of_this_scope.device, next).first->second;
  }
  last_error = cudaSuccess;
  trace = &of_this_scope;
  if (of_this_scope.device_number >= kMaxDevices) Report("dry runs had too many devices before");
}

Scope::~Scope() { trace = nullptr; }

CUresult EncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base,
                     const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                     const cuuint32_t* steps, CUtensorMapInterleave interleave,
                     CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                     CUtensorMapFloatOOBfill fill) {
  if (!trace) {
    const Encode encode = real_encode;
    if (!encode) return CUDA_ERROR_NOT_SUPPORTED;
    return encode(map, type, rank, base, dims, strides, box, steps, interleave, swizzle, promotion,
                  fill);
  }
  if (!trace->checks) return CUDA_SUCCESS;
  const std::string fault =
      FindMapFault(map, type, rank, base, dims, strides, box, steps, interleave, swizzle);
  if (fault.empty()) return CUDA_SUCCESS;
  Report("a tensor map is wrong: " + fault);
  return CUDA_ERROR_INVALID_VALUE;
}

}  // namespace jaxops::dry_run

namespace dry_run = jaxops::dry_run;
using dry_run::trace;

// JAXOPS_WRAP(result, cudaX, parameters) begins the definition of __wrap_cudaX.
#define JAXOPS_WRAP(result, name, ...) \
  result __real_##name(__VA_ARGS__);   \
  result __wrap_##name(__VA_ARGS__)

extern "C" {

// --- calls that the compiler generates for kernels and <<<>>> ------------------------------------

JAXOPS_WRAP(void, __cudaRegisterFunction, void** module, const char* function,
            char* device_function, const char* name, int thread_limit, uint3* thread, uint3* block,
            dim3* threads, dim3* grid, int* warp_size) {
  auto& kernel = dry_run::GetState().kernels[function];
  kernel.function = function;
  kernel.mangled_name = name;
  __real___cudaRegisterFunction(module, function, device_function, name, thread_limit, thread,
                                block, threads, grid, warp_size);
}

#ifdef JAXOPS_LAUNCHES_HANDLES
// <<<>>> asks for the handle of a kernel once and keeps it, in a dry run or not. The handle is
// ours, and gets the runtime's handle at the first launch of the kernel.
JAXOPS_WRAP(cudaError_t, __cudaGetKernel, cudaKernel_t* handle, const void* function) {
  *handle = reinterpret_cast<cudaKernel_t>(dry_run::Find(function));
  return *handle ? cudaSuccess : cudaErrorInvalidDeviceFunction;
}

JAXOPS_WRAP(cudaError_t, __cudaLaunchKernel, cudaKernel_t handle, dim3 grid, dim3 threads,
            void** arguments, size_t dynamic_bytes, cudaStream_t stream) {
  auto* const kernel = reinterpret_cast<dry_run::Kernel*>(handle);
  if (trace) return dry_run::Record(kernel, grid, threads, dynamic_bytes, stream);
  if (!kernel) return cudaErrorInvalidDeviceFunction;
  std::atomic_ref<cudaKernel_t> of_runtime(kernel->handle);
  cudaKernel_t found = of_runtime.load(std::memory_order_acquire);
  if (!found) {
    const cudaError_t error = __real___cudaGetKernel(&found, kernel->function);
    if (error != cudaSuccess) return error;
    of_runtime.store(found, std::memory_order_release);
  }
  return __real___cudaLaunchKernel(found, grid, threads, arguments, dynamic_bytes, stream);
}
#endif

// --- the runtime ---------------------------------------------------------------------------------

JAXOPS_WRAP(cudaError_t, cudaLaunchKernel, const void* function, dim3 grid, dim3 threads,
            void** arguments, size_t dynamic_bytes, cudaStream_t stream) {
  if (!trace) {
    return __real_cudaLaunchKernel(function, grid, threads, arguments, dynamic_bytes, stream);
  }
  return dry_run::Record(dry_run::Find(function), grid, threads, dynamic_bytes, stream);
}

JAXOPS_WRAP(cudaError_t, cudaLaunchKernelExC, const cudaLaunchConfig_t* config,
            const void* function, void** arguments) {
  if (!trace) return __real_cudaLaunchKernelExC(config, function, arguments);
  dim3 cluster = {1, 1, 1};
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id != cudaLaunchAttributeClusterDimension) {
      return dry_run::Fail(
          cudaErrorInvalidValue,
          dry_run::Join("dry runs do not know launch attribute ", static_cast<int>(attribute.id)));
    }
    cluster = {attribute.val.clusterDim.x, attribute.val.clusterDim.y, attribute.val.clusterDim.z};
  }
  return dry_run::Record(dry_run::Find(function), config->gridDim, config->blockDim,
                         config->dynamicSmemBytes, config->stream, cluster);
}

JAXOPS_WRAP(cudaError_t, cudaFuncSetAttribute, const void* function, cudaFuncAttribute attribute,
            int value) {
  if (!trace) return __real_cudaFuncSetAttribute(function, attribute, value);
  if (!trace->checks) return cudaSuccess;
  const dry_run::Kernel* const kernel = dry_run::Find(function);
  if (!kernel || attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) {
    return dry_run::Fail(
        cudaErrorInvalidValue,
        dry_run::Join("dry runs do not know kernel attribute ", static_cast<int>(attribute)));
  }
  const int static_bytes = kernel->resources.static_bytes;
  if (value < 0 || value + static_bytes > trace->device.shared_bytes) {
    return dry_run::Fail(cudaErrorInvalidValue,
                         dry_run::Join(kernel->mangled_name, " opts in to ", value, " + ",
                                       static_bytes, " bytes of shared memory, and blocks have at ",
                                       "most ", trace->device.shared_bytes));
  }
  trace->opted_in[function] = value;
  return cudaSuccess;
}

JAXOPS_WRAP(cudaError_t, cudaFuncGetAttributes, cudaFuncAttributes* attributes,
            const void* function) {
  if (!trace) return __real_cudaFuncGetAttributes(attributes, function);
  const dry_run::Kernel* const kernel = dry_run::Find(function);
  if (!kernel) return dry_run::Fail(cudaErrorInvalidDeviceFunction, "attributes of no kernel");
  *attributes = {};
  attributes->maxThreadsPerBlock = kernel->resources.max_threads;
  attributes->numRegs = kernel->resources.registers;
  attributes->sharedSizeBytes = kernel->resources.static_bytes;
  // CUB refuses versions other than those of its compilation, on every device.
  attributes->ptxVersion = attributes->binaryVersion = 90;
  return cudaSuccess;
}

JAXOPS_WRAP(cudaError_t, cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, int* blocks,
            const void* function, int threads, size_t dynamic_bytes, unsigned flags) {
  if (!trace) {
    return __real_cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads,
                                                                         dynamic_bytes, flags);
  }
  const dry_run::Kernel* const kernel = dry_run::Find(function);
  if (!kernel) return dry_run::Fail(cudaErrorInvalidDeviceFunction, "occupancy of no kernel");
  const dry_run::Resources& resources = kernel->resources;
  int resident = 0;
  cudaDeviceGetAttribute(&resident, cudaDevAttrMaxThreadsPerMultiProcessor, 0);
  *blocks = std::min(32, resident / threads);
  if (resources.registers > 0) {
    *blocks =
        std::min<int>(*blocks, dry_run::kRegisters / dry_run::RegistersOfBlock(resources, threads));
  }
  const size_t shared = dynamic_bytes + resources.static_bytes + dry_run::kReservedSharedBytes;
  const size_t all = trace->device.shared_bytes + dry_run::kReservedSharedBytes;
  *blocks = std::min<int>(*blocks, all / shared);
  return cudaSuccess;
}

JAXOPS_WRAP(cudaError_t, cudaMemsetAsync, void* data, int value, size_t bytes,
            cudaStream_t stream) {
  if (!trace) return __real_cudaMemsetAsync(data, value, bytes, stream);
  if (!trace->checks) return cudaSuccess;
  trace->launches.push_back({nullptr, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, 0});
  if (stream != dry_run::Stream()) {
    return dry_run::Fail(cudaErrorInvalidValue, "a memset is not on the stream of the call");
  }
  if (bytes > 0 && !dry_run::Contains(data, bytes, true)) {
    return dry_run::Fail(
        cudaErrorInvalidValue,
        dry_run::Join("a memset of ", bytes, " bytes is not in a result of the call"));
  }
  return cudaSuccess;
}

// The launchers keep the function that they get, so it is ours in a dry run or not.
JAXOPS_WRAP(cudaError_t, cudaGetDriverEntryPointByVersion, const char* name, void** function,
            unsigned version, unsigned long long flags, cudaDriverEntryPointQueryResult* result) {
  if (std::strcmp(name, "cuTensorMapEncodeTiled") != 0) {
    return __real_cudaGetDriverEntryPointByVersion(name, function, version, flags, result);
  }
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status;
  if (__real_cudaGetDriverEntryPointByVersion(name, &found, version, flags, &status) ==
          cudaSuccess &&
      status == cudaDriverEntryPointSuccess) {
    dry_run::real_encode = reinterpret_cast<dry_run::Encode>(found);
  }
  *function = reinterpret_cast<void*>(&dry_run::EncodeTiled);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

JAXOPS_WRAP(cudaError_t, cudaGetDevice, int* device) {
  if (!trace) return __real_cudaGetDevice(device);
  *device = trace->device_number;
  return cudaSuccess;
}

JAXOPS_WRAP(cudaError_t, cudaSetDevice, int device) {
  if (!trace) return __real_cudaSetDevice(device);
  if (device == trace->device_number) return cudaSuccess;
  return dry_run::Fail(cudaErrorInvalidDevice, "a call changed the current device");
}

// CUB asks for the count once, in a dry run or not, and refuses devices beyond it.
JAXOPS_WRAP(cudaError_t, cudaGetDeviceCount, int* count) {
  const cudaError_t error = trace ? cudaSuccess : __real_cudaGetDeviceCount(count);
  if (error == cudaSuccess) *count = dry_run::kMaxDevices;
  return error;
}

JAXOPS_WRAP(cudaError_t, cudaDeviceGetAttribute, int* value, cudaDeviceAttr attribute, int number) {
  if (!trace) return __real_cudaDeviceGetAttribute(value, attribute, number);
  const dry_run::Device& device = trace->device;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = device.major;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = device.minor;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = device.processors;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = device.shared_bytes;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = device.shared_bytes + dry_run::kReservedSharedBytes;
      return cudaSuccess;
    case cudaDevAttrClusterLaunch:
      *value = device.major >= 9;
      return cudaSuccess;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = device.shared_bytes > 100 * 1024 ? 2048 : 1536;
      return cudaSuccess;
    default:
      return dry_run::Fail(
          cudaErrorInvalidValue,
          dry_run::Join("dry runs do not know device attribute ", static_cast<int>(attribute)));
  }
}

JAXOPS_WRAP(cudaError_t, cudaGetLastError) {
  return trace ? std::exchange(dry_run::last_error, cudaSuccess) : __real_cudaGetLastError();
}

JAXOPS_WRAP(cudaError_t, cudaPeekAtLastError) {
  return trace ? dry_run::last_error : __real_cudaPeekAtLastError();
}

#ifdef JAXOPS_SANITIZED
// UBSan calls it after every report.
__attribute__((visibility("default"))) void __ubsan_on_report() {
  dry_run::Report("undefined behaviour, which is described on stderr");
}
#endif

}  // extern "C"
