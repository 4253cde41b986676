// The host kernels' ParallelFor over the thread pool that XLA lends a handler.
#ifndef JAXOPS_FFI_THREAD_POOL_H_
#define JAXOPS_FFI_THREAD_POOL_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <new>

#include "cpu/parallel_for.h"
#include "xla/ffi/api/ffi.h"

namespace jaxops::ffi {

// The calling thread works too and waits only for tasks that have begun, so that a pool whose every
// thread is inside a handler cannot deadlock: helpers that start late find nothing left to do.
inline cpu::ParallelFor ParallelForOn(xla::ffi::ThreadPool& pool) {
  return [&pool](int64_t count, const std::function<void(int64_t)>& task) {
    const int64_t helpers = std::min(pool.num_threads(), count) - 1;
    if (helpers <= 0) {
      for (int64_t i = 0; i < count; ++i) task(i);
      return;
    }
    struct State {
      std::atomic<bool> out_of_memory{false};
      std::atomic<int64_t> next{0};
      std::atomic<int64_t> done{0};
      std::mutex mutex;
      std::condition_variable all_done;
    };
    auto state = std::make_shared<State>();
    // `task` outlives every call of it: this function returns only when all have returned.
    const auto work = [state, count, &task] {
      int64_t finished = 0;
      for (int64_t i = state->next++; i < count; i = state->next++, ++finished) {
        try {
          task(i);
        } catch (const std::bad_alloc&) {  // would end the process on a thread of the pool
          state->out_of_memory = true;
        }
      }
      if (finished > 0 && (state->done += finished) == count) {
        const std::lock_guard<std::mutex> lock(state->mutex);
        state->all_done.notify_all();
      }
    };
    for (int64_t i = 0; i < helpers; ++i) pool.Schedule(std::function<void()>(work));
    work();
    std::unique_lock<std::mutex> lock(state->mutex);
    state->all_done.wait(lock, [&] { return state->done == count; });
    if (state->out_of_memory) throw std::bad_alloc();
  };
}

// Runs the host kernels of one call; running out of work space is an error, not an exception.
template <typename Kernels>
xla::ffi::Error RunOnHost(xla::ffi::ThreadPool& pool, Kernels&& kernels) {
  try {
    kernels(ParallelForOn(pool));
  } catch (const std::bad_alloc&) {
    return xla::ffi::Error(xla::ffi::ErrorCode::kResourceExhausted,
                           "out of host memory for the work space of an operator");
  }
  return xla::ffi::Error::Success();
}

}  // namespace jaxops::ffi

#endif  // JAXOPS_FFI_THREAD_POOL_H_
