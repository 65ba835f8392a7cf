// One parallel region for a whole forward: threads meet at barriers of our own.
//
// A barrier of OpenMP's costs about as much as ours while all threads run, but a region for each
// product would cost ten times that. The pool is torch's where the library is the same libgomp.
#pragma once
#include <omp.h>
#include <sched.h>

#include <atomic>
#include <climits>
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
