// How the threads of a forward work together: their barrier, how many take part, and denormal numbers.
//
// A forward is one OpenMP parallel region, in which threads synchronise at a barrier of our own. A barrier of
// OpenMP costs about as much as ours while all threads run, but a parallel region for each product would
// cost ten times that. The thread pool is torch's where this library uses the same libgomp.
#pragma once
#include <omp.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <mutex>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

class Barrier {
 public:
  // One thread of the region calls this before any of them waits.
  void reset(int threads) {
    threads_ = threads;
    spins_ = spins_before_yield(threads);
  }

  // Processors that the CPU quota of a container grants this process, which its affinity does not show.
  static inline std::atomic<int> processor_limit{INT_MAX};

  // How often one of `threads` waiting threads looks before it yields its processor. With more threads
  // than processors it yields at once: spinning would keep the threads it waits for from running.
  static int spins_before_yield(int threads) { return threads > processors() ? 0 : SPINS; }

  // Returns once all threads have called it.
  void wait() {
    unsigned phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
      if (spins < spins_)
        pause();
      else
        sched_yield();
    }
  }

 private:
  static constexpr int SPINS = 4000;
  static int processors() {
    int limit = processor_limit.load(std::memory_order_relaxed), count = omp_get_num_procs();
#if defined(__linux__)
    cpu_set_t affinity;
    if (!sched_getaffinity(0, sizeof affinity, &affinity)) count = CPU_COUNT(&affinity);
#endif
    return count < limit ? count : limit;
  }
  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");  // YIELD does nothing on most processors
#endif
  }

  int threads_ = 1, spins_ = SPINS;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> phase_{0};  // counts the times that all threads have arrived
};

inline double clock_seconds(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}
inline double wall_seconds() { return clock_seconds(CLOCK_MONOTONIC); }

// How many threads take part in the parallel regions of this process. Where another process takes a processor,
// all threads wait at barriers for the one that lost it, a whole time slice of the scheduler each time; with one
// thread less, none waits. Threads of a forward spin and never sleep, so the time by which they ran less than
// the wall clock is what other processes took.
class ActiveThreads {
 public:
  using Clock = double (*)();  // seconds
  explicit ActiveThreads(Clock clock = wall_seconds) : clock_(clock) {}

  static ActiveThreads& of_process() {
    static ActiveThreads threads;
    return threads;
  }

  // How many of the `requested` threads the next parallel region should have.
  int count(int64_t requested) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (inactive_ && clock_() - changed_at_ > retry_after_) change(inactive_ / 2, true);
    return std::max(1, static_cast<int>(requested) - inactive_);
  }

  // Reports a forward that took `wall` seconds on `threads` threads, which ran `cpu` seconds in all.
  void report(int threads, double wall, double cpu) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (threads == 1 || (wall_ += wall, cpu_ += cpu, wall_) < WINDOW) return;
    double missing = threads - cpu_ / wall_;  // processors
    bool confirmed = last_lacked_ || on_trial_;  // one window alone may be the start of a program
    last_lacked_ = missing * threads > LOSS;
    wall_ = cpu_ = 0;
    if (last_lacked_ && confirmed) {
      retry_after_ = on_trial_ ? std::min(2 * retry_after_, LONGEST) : SHORTEST;
      change(inactive_ + std::clamp(static_cast<int>(missing), 1, threads - 1), false);
    } else if (on_trial_) {
      retry_after_ = SHORTEST;
      on_trial_ = false;
    }
  }

 private:
  static constexpr double WINDOW = 0.02;                  // seconds of forwards that are judged together
  static constexpr double SHORTEST = 0.1, LONGEST = 3.2;  // seconds until more threads are tried
  // If `missing` of a processor is missing, n threads lose that share of their time. With one thread less
  // they lose 1/n of it where arithmetic is the bound, and less where memory is.
  static constexpr double LOSS = 0.8;

  void change(int inactive, bool on_trial) {
    inactive_ = inactive, on_trial_ = on_trial, last_lacked_ = false, wall_ = cpu_ = 0;
    changed_at_ = clock_();
  }

  const Clock clock_;
  std::mutex mutex_;
  int inactive_ = 0;          // threads that take no part
  bool on_trial_ = false;     // more threads take part than before, until a window shows whether that pays
  bool last_lacked_ = false;  // the last window lacked processors
  double changed_at_ = 0, retry_after_ = SHORTEST;
  double wall_ = 0, cpu_ = 0;  // seconds of this window
};

// While it lives, denormal numbers count as zero in this thread: they are slow, and the tile instructions flush
// them in any case.
class FlushToZero {
 public:
#if defined(__x86_64__)
  FlushToZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushToZero() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  FlushToZero() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" ::"r"(before_ | 1 << 24));
  }
  ~FlushToZero() { asm volatile("msr fpcr, %0" ::"r"(before_)); }

 private:
  uint64_t before_;
#else
  FlushToZero() {}
#endif
};
