// The host kernels' ParallelFor over the thread pool that XLA lends a handler.
#ifndef JAXOPS_FFI_THREAD_POOL_H_
#define JAXOPS_FFI_THREAD_POOL_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

#include "cpu/parallel_for.h"
#include "xla/ffi/api/ffi.h"

namespace jaxops::ffi {

// The calling thread works too, and waits only for tasks that have begun. A pool whose every thread
// is inside a handler thus cannot deadlock: helpers that start late find no task.
inline cpu::ParallelFor ParallelForOn(xla::ffi::ThreadPool& pool) {
  const auto run = [&pool](int64_t count, const std::function<void(int64_t)>& task) {
    const int64_t helpers = std::min(pool.num_threads(), count) - 1;
    if (helpers <= 0) {
      for (int64_t i = 0; i < count; ++i) task(i);
      return;
    }
    struct State {
      std::atomic<int64_t> next{0};
      std::atomic<int64_t> done{0};
      std::mutex mutex;
      std::condition_variable all_done;
      std::exception_ptr exception;  // the first one that a task threw
    };
    auto state = std::make_shared<State>();
    // `task` outlives all its calls: nothing throws after this line, and this function returns
    // after all calls have returned. Helpers that start later find no task.
    const auto work = [state, count, &task]() noexcept {
      int64_t finished = 0;
      for (int64_t i = state->next++; i < count; i = state->next++, ++finished) {
        try {
          task(i);
        } catch (...) {  // an exception would end the process on a thread of the pool
          const std::lock_guard<std::mutex> lock(state->mutex);
          if (!state->exception) state->exception = std::current_exception();
        }
      }
      if (finished > 0 && (state->done += finished) == count) {
        const std::lock_guard<std::mutex> lock(state->mutex);
        state->all_done.notify_all();
      }
    };
    try {
      for (int64_t i = 0; i < helpers; ++i) pool.Schedule(std::function<void()>(work));
    } catch (...) {
      // Without memory for another helper, the existing helpers run its tasks.
    }
    work();
    std::unique_lock<std::mutex> lock(state->mutex);
    state->all_done.wait(lock, [&] { return state->done == count; });
    if (state->exception) std::rethrow_exception(state->exception);
  };
  return {std::max<int64_t>(1, pool.num_threads()), run};
}

}  // namespace jaxops::ffi

#endif  // JAXOPS_FFI_THREAD_POOL_H_
