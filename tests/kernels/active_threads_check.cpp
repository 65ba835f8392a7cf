// How ActiveThreads (threads.h) reacts to processors that come and go, on a clock that only this program moves.
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "threads.h"

namespace {

constexpr int REQUESTED = 4;
constexpr double WINDOW = 0.02;  // seconds

double now = 100;

void expect(bool holds, const char* what, double value) {
  if (holds) return;
  printf("not so at %.2f s: %s (%g)\n", now, what, value);
  exit(1);
}

// A window of forwards on as many threads as are active, while other processes leave `processors` to this one.
int run_window(ActiveThreads& active, double processors) {
  int threads = active.count(REQUESTED);
  double running = processors < threads ? processors : threads;
  now += WINDOW;
  active.report(threads, WINDOW, WINDOW * running);
  return active.count(REQUESTED);
}

// Runs windows until `threads` are active, or fails after `limit` seconds; returns the seconds it took.
double seconds_until(ActiveThreads& active, int threads, double processors, double limit) {
  double began = now;
  while (run_window(active, processors) != threads)
    expect(now - began < limit, "as many threads should be active", threads);
  return now - began;
}

bool about(double seconds, double wanted) { return seconds > wanted - 1e-9 && seconds < wanted + 2.5 * WINDOW; }

void one_window_changes_nothing(ActiveThreads& active) {
  for (int n = 0; n < 9; n++) {
    expect(run_window(active, REQUESTED - n % 2) == REQUESTED, "a single window without a processor", n);
    expect(run_window(active, REQUESTED) == REQUESTED, "a window with all processors", n);
  }
}

// One processor is taken: a thread leaves, and trials of one more come ever later while they fail.
void failing_trials_come_later(ActiveThreads& active) {
  expect(about(seconds_until(active, REQUESTED - 1, REQUESTED - 1, 1), 2 * WINDOW - 1e-9), "a thread leaves", 2);
  for (double wait : {0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 3.2, 3.2}) {
    double before_trial = seconds_until(active, REQUESTED, REQUESTED - 1, 5);
    expect(about(before_trial, wait), "a trial comes after", before_trial);
    expect(run_window(active, REQUESTED - 1) == REQUESTED - 1, "a trial fails in one window", wait);
  }
}

// The processor is free again: the next trial succeeds, and the next absence is tried after 0.1 s again.
void a_trial_succeeds(ActiveThreads& active) {
  expect(seconds_until(active, REQUESTED, REQUESTED, 5) > 3, "the last wait still counts", 3.2);
  for (int n = 0; n < 500; n++) expect(run_window(active, REQUESTED) == REQUESTED, "all threads stay", n);
  seconds_until(active, REQUESTED - 1, REQUESTED - 1, 1);
  expect(about(seconds_until(active, REQUESTED, REQUESTED, 5), 0.1), "the first wait is the shortest again", 0.1);
  for (int n = 0; n < 500; n++) expect(run_window(active, REQUESTED) == REQUESTED, "all threads stay", n);
}

// Three of four are taken: at least one thread stays, and half of the others come back in each trial.
void threads_return_by_halves(ActiveThreads& active) {
  seconds_until(active, 1, 0.5, 1);
  now += 0.15;  // one thread reports nothing
  expect(active.count(REQUESTED) == 3, "half of three are tried", active.count(REQUESTED));
  expect(run_window(active, REQUESTED) == 3, "they stay", 3);
  expect(about(seconds_until(active, REQUESTED, REQUESTED, 1), 0.1 - WINDOW), "the last one returns", 0.1);
  expect(active.count(1) == 1, "one thread is asked for", active.count(1));
}

// Processors are taken one after another: a thread leaves for each, and the first never does.
void threads_leave_one_by_one(ActiveThreads& active) {
  for (int left : {3, 2, 1}) expect(seconds_until(active, left, left, 1) < 0.1, "as many threads as processors", left);
  for (int left : {3, 4}) {
    now += 0.15;  // one thread reports nothing
    seconds_until(active, left, REQUESTED, 1);
  }
}

}  // namespace

int main() {
  ActiveThreads active([] { return now; });
  one_window_changes_nothing(active);
  failing_trials_come_later(active);
  a_trial_succeeds(active);
  threads_leave_one_by_one(active);
  threads_return_by_halves(active);
  printf("threads leave and return\n");
}
