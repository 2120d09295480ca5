#include "pool.h"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace taut {

namespace {

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

constexpr auto kSpin = std::chrono::microseconds(60);
constexpr int kPauses = 64;  // between two looks at the clock

}  // namespace

Pool::Pool(int threads) {
  for (int worker = 1; worker < threads; ++worker) {
    workers_.emplace_back([this, worker] { loop(worker); });
  }
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  woken_.notify_all();
  for (std::thread &worker : workers_) worker.join();
}

void Pool::start(int32_t tasks, Call call, const void *body) {
  call_ = call;
  body_ = body;
  tasks_ = tasks;
  left_.store(tasks);  // publishes the job
  if (sleepers_.load() > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    woken_.notify_all();
  }
  work(0);
  for (int spins = 0; active_.load() != 0; ++spins) {
    if (spins < 4096) pause(); else std::this_thread::yield();  // a worker may have lost its core
  }
}

void Pool::work(int worker) {
  for (;;) {
    const int64_t left = left_.fetch_sub(1);
    if (left <= 0) return;
    call_(body_, static_cast<int32_t>(tasks_ - left), worker);
  }
}

void Pool::loop(int worker) {
  while (waited()) {
    // While this is counted the job isn't overwritten; a task taken is of the job in place.
    active_.fetch_add(1);
    work(worker);
    active_.fetch_sub(1);
  }
}

bool Pool::waited() {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kPauses; ++i) {
      if (left_.load(std::memory_order_relaxed) > 0) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  std::unique_lock<std::mutex> lock(mutex_);
  sleepers_.fetch_add(1);
  woken_.wait(lock, [this] { return stop_ || left_.load() > 0; });
  sleepers_.fetch_sub(1);
  return !stop_;
}

}  // namespace taut
