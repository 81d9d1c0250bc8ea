// Work distribution for the CPU kernels. The thread pool is the caller's (torch's own): a kernel asks it to
// run one worker per thread and each worker takes the next task from a shared counter, so that unequal
// tasks balance.
#pragma once
#include <atomic>
#include <cstdint>

namespace fastattn {

struct Parallel {
  int threads;
  // Calls body(context, worker) for each worker in [0, workers), on at most `threads` threads, and
  // waits for all of them.
  void (*run)(int workers, void (*body)(void* context, int worker), void* context);

  // As many of the threads as are worth waking for this much arithmetic: a second one costs some
  // microseconds, in which the first does about a million operations, and much more on a busy machine.
  static constexpr double kWorth = 2e6;
  Parallel worth(double operations) const {
    const double most = 1 + operations / kWorth;
    return {most < threads ? int(most) : threads, run};
  }
};

// f(task, worker) for every task in [0, tasks), in ascending order per worker.
// Which worker gets a task is not repeatable; what a task computes must not depend on it.
template <class F>
static inline void for_each_task(const Parallel& parallel, int64_t tasks, F&& f) {
  int workers = tasks < parallel.threads ? int(tasks) : parallel.threads;
  if (workers <= 1) {
    for (int64_t task = 0; task < tasks; ++task) f(task, 0);
    return;
  }
  struct Context {
    F& f;
    std::atomic<int64_t> next;
    int64_t tasks;
  } context{f, {0}, tasks};
  parallel.run(
      workers,
      [](void* opaque, int worker) {
        auto& c = *static_cast<Context*>(opaque);
        for (int64_t task; (task = c.next.fetch_add(1, std::memory_order_relaxed)) < c.tasks;)
          c.f(task, worker);
      },
      &context);
}

}  // namespace fastattn
