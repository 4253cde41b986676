// The threads of kernels as fibers, and the few functions of the CUDA runtime that launchers call.
#include "tests/kernels_on_host/device.h"

#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <vector>

namespace host_cuda {
namespace {

constexpr size_t kStackBytes = 128 << 10;

// The lanes of a mask.
struct Group {
  uint32_t arrived = 0;
  // A lane may enter an exchange while others still read the previous one.
  uint64_t values[2][kWarp] = {};
  int64_t exchanges = 0;
};

struct Warp {
  uint32_t alive = 0;
  std::map<uint32_t, Group> groups;  // by mask
};

struct Copy {
  void* to;
  const void* from;
  size_t bytes, zeros;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack = std::make_unique<char[]>(kStackBytes);
  void* fake_stack = nullptr;
  uint3 index;
  bool is_done;
  std::deque<std::vector<Copy>> copies;  // groups in flight, and at last one that has not ended
};

struct Block {
  std::vector<Warp> warps;
  int alive = 0, waiting = 0;
  int64_t barriers = 0;
  int64_t progress = 0;  // what fibers waited for, and ends of fibers
  const std::function<void()>* thread = nullptr;
  void* shared = nullptr;
};

Block block;
std::vector<std::unique_ptr<Fiber>> fibers;
Fiber* current;
ucontext_t scheduler;
const void* scheduler_stack;
size_t scheduler_stack_bytes;

void Fail(const char* what) {
  std::fprintf(stderr, "block %u, thread %u: %s\n", blockIdx.x, threadIdx.x, what);
  std::abort();
}

int NumberOf(const Fiber& fiber) {
  return static_cast<int>(fiber.index.x +
                          blockDim.x * (fiber.index.y + blockDim.y * fiber.index.z));
}

// Lets the other fibers run.
void Yield() {
  Fiber& fiber = *current;
  __sanitizer_start_switch_fiber(fiber.is_done ? nullptr : &fiber.fake_stack, scheduler_stack,
                                 scheduler_stack_bytes);
  swapcontext(&fiber.context, &scheduler);
  __sanitizer_finish_switch_fiber(fiber.fake_stack, nullptr, nullptr);
}

void ReleaseBlock() {
  if (block.waiting < block.alive) return;
  block.waiting = 0;
  ++block.barriers;
  ++block.progress;
}

void ReleaseGroup(Group& group, uint32_t awaited) {
  if ((group.arrived & awaited) != awaited) return;
  group.arrived = 0;
  ++group.exchanges;
  ++block.progress;
}

void CompleteCopies(size_t left) {
  auto& copies = current->copies;
  for (; copies.size() > left; copies.pop_front()) {
    for (const Copy& copy : copies.front()) {
      std::memcpy(copy.to, copy.from, copy.bytes - copy.zeros);
      std::memset(static_cast<char*>(copy.to) + copy.bytes - copy.zeros, 0, copy.zeros);
    }
  }
}

void RunFiber() {
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
  (*block.thread)();
  Fiber& fiber = *current;
  CompleteCopies(0);
  fiber.is_done = true;
  Warp& warp = block.warps[NumberOf(fiber) / kWarp];
  warp.alive &= ~(1u << NumberOf(fiber) % kWarp);
  --block.alive;
  ++block.progress;
  if (block.waiting > 0) ReleaseBlock();
  for (auto& [mask, group] : warp.groups) {
    if (group.arrived != 0) ReleaseGroup(group, warp.alive & mask);
  }
  Yield();
}

void Continue(Fiber& fiber) {
  current = &fiber;
  threadIdx = fiber.index;
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, fiber.stack.get(), kStackBytes);
  swapcontext(&scheduler, &fiber.context);
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}

void RunBlock(int threads, std::mt19937& random) {
  block.alive = threads;
  block.waiting = 0;
  block.warps.assign((threads + kWarp - 1) / kWarp, Warp());
  while (fibers.size() < static_cast<size_t>(threads)) {
    fibers.push_back(std::make_unique<Fiber>());
  }
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = *fibers[i];
    const auto n = static_cast<unsigned>(i);
    fiber.index = {n % blockDim.x, n / blockDim.x % blockDim.y, n / blockDim.x / blockDim.y};
    fiber.is_done = false;
    fiber.copies.assign(1, {});
    fiber.fake_stack = nullptr;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, RunFiber, 0);
    block.warps[i / kWarp].alive |= 1u << i % kWarp;
  }
  while (block.alive > 0) {
    // No order of threads may matter.
    const bool is_forward = random() % 2 == 0;
    const int64_t before = block.progress;
    for (int i = 0; i < threads; ++i) {
      Fiber& fiber = *fibers[is_forward ? i : threads - 1 - i];
      if (!fiber.is_done) Continue(fiber);
    }
    if (block.progress == before) Fail("all threads wait for others");
  }
}

}  // namespace

void RunGrid(dim3 grid, dim3 block_size, size_t shared_bytes, const std::function<void()>& thread) {
  static std::mt19937 random(0);
  gridDim = grid;
  blockDim = block_size;
  block.thread = &thread;
  const auto threads = static_cast<int>(block_size.x * block_size.y * block_size.z);
  for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
      for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
        block.shared = std::malloc(shared_bytes);
        std::memset(block.shared, 0xcb, shared_bytes);
        RunBlock(threads, random);
        std::free(block.shared);
      }
    }
  }
}

void* Shared() { return block.shared; }

void WaitForBlock() {
  const int64_t barrier = block.barriers;
  ++block.waiting;
  ReleaseBlock();
  while (block.barriers == barrier) Yield();
}

const uint64_t* Exchange(uint32_t mask, uint64_t value) {
  const int number = NumberOf(*current);
  Warp& warp = block.warps[number / kWarp];
  if ((mask >> number % kWarp & 1) == 0) Fail("its mask does not have the thread itself");
  Group& group = warp.groups[mask];
  const int64_t exchange = group.exchanges;
  uint64_t* values = group.values[exchange % 2];
  values[number % kWarp] = value;
  group.arrived |= 1u << number % kWarp;
  ReleaseGroup(group, warp.alive & mask);
  while (group.exchanges == exchange) Yield();
  return values;
}

void StartCopy(void* to, const void* from, size_t bytes, size_t zeros) {
  const auto is_aligned = [&](const void* p) { return reinterpret_cast<size_t>(p) % bytes == 0; };
  if ((bytes != 4 && bytes != 8 && bytes != 16) || zeros > bytes) Fail("no size of a copy");
  if (!is_aligned(to) || !is_aligned(from)) Fail("a copy is not aligned");
  current->copies.back().push_back({to, from, bytes, zeros});
}

void EndCopyGroup() { current->copies.emplace_back(); }

void WaitForCopies(size_t left) { CompleteCopies(left + 1); }

}  // namespace host_cuda

// --- the runtime ---------------------------------------------------------------------------------

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = 8;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
    case cudaDevAttrClusterLaunch:
      *value = 0;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = 4;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 163 << 10;
      return cudaSuccess;
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
