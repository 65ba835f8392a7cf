// One parallel region for a whole forward: threads meet at barriers of our own.
//
// A barrier of OpenMP's costs about as much as ours while all threads run, but a region for each
// product would cost ten times that. The pool is torch's where the library is the same libgomp.
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

class Team {
 public:
  void start(int threads) {
    size_ = threads;
    patience_ = patience(threads);
  }

  // Of whose time a container gives to the process; how many it may run on does not tell.
  static inline std::atomic<int> allowed{INT_MAX};

  // How often one of so many looks before it lets others run. Where they are more than processors,
  // who waits keeps another from arriving.
  static int patience(int threads) { return threads > processors() ? 0 : kPatience; }

  // Everybody waits for everybody.
  void meet() {
    unsigned round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++) {
      if (spins < patience_)
        pause();
      else
        sched_yield();
    }
  }

 private:
  static constexpr int kPatience = 4000;
  static int processors() {
    int most = allowed.load(std::memory_order_relaxed), count = omp_get_num_procs();
#if defined(__linux__)
    cpu_set_t mine;
    if (!sched_getaffinity(0, sizeof mine, &mine)) count = CPU_COUNT(&mine);
#endif
    return count < most ? count : most;
  }
  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");  // YIELD does nothing on most processors
#endif
  }

  int size_ = 1, patience_ = kPatience;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> round_{0};
};

// Seconds by a clock of the system.
inline double seconds(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// How many threads take part in this process's parallel regions. Where another process takes a
// processor, all threads wait at barriers for the one that lost it, a whole slice of the scheduler's
// at a time: with a thread less nobody waits. Threads of a forward spin and never sleep, so what they
// ran less than the clock is what others took.
class Crew {
 public:
  static Crew& ours() {
    static Crew crew;
    return crew;
  }

  // Of so many wanted ones.
  int size(int64_t wanted) {
    std::lock_guard<std::mutex> alone(busy_);
    if (away_ && seconds(CLOCK_MONOTONIC) - since_ > hold_) change(away_ / 2, true);
    return std::max(1, static_cast<int>(wanted) - away_);
  }

  // A forward on so many threads took `elapsed` seconds, of which they ran `used` together.
  void observe(int threads, double elapsed, double used) {
    std::lock_guard<std::mutex> alone(busy_);
    if (threads == 1 || (elapsed_ += elapsed, used_ += used, elapsed_) < WINDOW) return;
    double missing = threads - used_ / elapsed_;
    bool again = missed_ || trial_;  // one window may be a program's start
    missed_ = missing * threads > LOSS;
    elapsed_ = used_ = 0;
    if (missed_ && again) {
      hold_ = trial_ ? std::min(2 * hold_, LONGEST) : SHORTEST;
      change(std::min(threads - 1, away_ + std::max(1, static_cast<int>(missing))), false);
    } else if (trial_) {
      hold_ = SHORTEST;
      trial_ = false;
    }
  }

 private:
  // Seconds. Of a missing processor n threads lose that part of their time; without one thread they
  // lose 1/n of it where they multiply, less where memory is the bound.
  static constexpr double WINDOW = 0.02, SHORTEST = 0.1, LONGEST = 3.2, LOSS = 0.8;

  void change(int away, bool trial) {
    away_ = away, trial_ = trial, missed_ = false, elapsed_ = used_ = 0;
    since_ = seconds(CLOCK_MONOTONIC);
  }

  std::mutex busy_;
  int away_ = 0;                         // threads that take no part
  bool trial_ = false, missed_ = false;  // whether more of them take part for a try; the last window
  double since_ = 0, hold_ = SHORTEST;   // until more are tried
  double elapsed_ = 0, used_ = 0;
};

// Numbers too small for a normal float count as zero in this thread: they are slow, and the tile
// instructions know none.
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
