// Threads that share the tasks of one call.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace taut {

// Workers take task after task, the caller too, so that one who is held up delays nobody: a call
// returns when its tasks are done, whoever did them. Between calls workers spin for a moment (a
// layer's calls follow each other within microseconds), then sleep.
class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool &) = delete;
  Pool &operator=(const Pool &) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // body(task, worker) for every task below `tasks`, in any order; `worker` is below threads().
  template <typename Body>
  void run(int32_t tasks, const Body &body) {
    if (tasks <= 1 || workers_.empty()) {
      for (int32_t task = 0; task < tasks; ++task) body(task, 0);
      return;
    }
    start(tasks, [](const void *self, int32_t task, int worker) {
      (*static_cast<const Body *>(self))(task, worker);
    }, &body);
  }

 private:
  using Call = void (*)(const void *body, int32_t task, int worker);

  void start(int32_t tasks, Call call, const void *body);
  void work(int worker);
  void loop(int worker);
  bool waited();

  // The job. Written while no worker is active and `left_` is at most 0, read by active workers who
  // took a task.
  Call call_ = nullptr;
  const void *body_ = nullptr;
  int32_t tasks_ = 0;

  alignas(64) std::atomic<int64_t> left_{0};  // tasks not taken; below 0: how often in vain
  alignas(64) std::atomic<int32_t> active_{0};
  alignas(64) std::atomic<int32_t> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable woken_;
  std::vector<std::thread> workers_;
};

}  // namespace taut
