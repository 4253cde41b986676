// Dry runs: handlers choose and launch kernels for a described device, and nothing runs on a GPU.
//
// The linker puts functions of `dry_run_cuda.cc` between the launchers and the CUDA runtime (its
// option --wrap, see `cuda/CMakeLists.txt`). In a thread without a dry run they call the runtime.
// In a dry run they record every launch, and check it as the runtime, the driver and the device
// would. They call none of these, so a machine without a GPU can do a dry run. A dry run thus tells
// which kernels a call launches from the code that chooses them, without a second description of
// it.
#ifndef JAXOPS_FFI_DRY_RUN_CUDA_H_
#define JAXOPS_FFI_DRY_RUN_CUDA_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ffi/call_frame.h"

namespace jaxops::dry_run {

struct Device {
  int major;
  int minor;
  int processors;    // multiprocessors
  int shared_bytes;  // shared memory that a block can opt in to

  auto operator<=>(const Device&) const = default;
};

// Properties of a kernel that its machine code states.
struct Resources {
  int registers = 0;     // per thread; 0: unknown
  int static_bytes = 0;  // shared memory
  int max_threads = 1024;
  bool needs_wgmma = false;  // the kernel has code for GPUs of 9.0 only, and is empty elsewhere
};

struct Kernel {
  const void* function;
  std::string mangled_name;
  Resources resources;
  cudaKernel_t handle = nullptr;  // the runtime's handle
};

// All kernels of the module.
std::vector<const Kernel*> Kernels();
// Ignores kernels that are not in the module.
void SetResources(const std::string& mangled_name, const Resources& resources);

struct Launch {
  const Kernel* kernel;  // null: a memset
  dim3 grid;
  dim3 threads;
  dim3 cluster;
  size_t dynamic_bytes;
};

// A dry run of one call on one thread.
struct Trace {
  Device device;
  int device_number = 0;
  std::vector<ffi::FrameBuffer> buffers = {};
  bool checks = true;  // if false, launches are neither checked nor recorded

  std::vector<Launch> launches = {};
  std::string violation = {};  // the first one
  // The dynamic shared memory that kernels opted in to.
  std::map<const void*, int> opted_in = {};
};

// A thread that has a scope is in a dry run.
class Scope {
 public:
  explicit Scope(Trace& trace);
  ~Scope();
  Scope(const Scope&) = delete;
};

// The stream that launches of dry runs must use.
inline cudaStream_t Stream() { return static_cast<cudaStream_t>(ffi::FrameStream()); }

// The function that launchers get for cuTensorMapEncodeTiled.
CUresult EncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base,
                     const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                     const cuuint32_t* steps, CUtensorMapInterleave interleave,
                     CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                     CUtensorMapFloatOOBfill fill);

}  // namespace jaxops::dry_run

#endif  // JAXOPS_FFI_DRY_RUN_CUDA_H_
