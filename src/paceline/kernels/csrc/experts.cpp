// Layers of experts (Mixtral): each row goes through the few that its router likes best.
//
// Which these are and in what order they are added follows from the row's own router logits. For
// the products rows lie sorted by expert, where a row's sums do not depend on those beside it:
//
//   row        0        1        2         each row `chosen` times    expert   0     1        2
//   experts  2, 0     1, 2     0, 2                                   place   0 1  | 2  |  3 4 5
//                                                                     row     0 2  | 1  |  0 1 2
#include <cstring>

#include "forward.h"

// A place for each choice.
void Forward::sort_by_expert(const pl_layer& l) {
  long all = b_.rows * l.chosen;
  begin_.assign(l.experts + 1, 0);
  for (long i = 0; i < all; i++) begin_[choices_[i].expert + 1]++;
  for (long e = 0; e < l.experts; e++) begin_[e + 1] += begin_[e];
  std::vector<long> next(begin_.begin(), begin_.end() - 1);
  for (long i = 0; i < all; i++) choices_[i].sorted_row = static_cast<int32_t>(next[choices_[i].expert]++);
}

// x += the experts' outputs for normed_, by weight.
void Forward::experts(const pl_layer& l, int thread, int threads) {
  Share share(b_.rows, thread, threads);
  multiply(l.router, normed_, b_.rows, STORE, routed_, thread, threads);
  barrier_.wait();
  for (long r = share.from; r < share.to; r++) k_.choose_experts(routed_.at(r), l.experts, l.chosen, &choices_[r * l.chosen]);
  barrier_.wait();
  if (thread == 0) sort_by_expert(l);
  barrier_.wait();
  for (long i = share.from * l.chosen; i < share.to * l.chosen; i++)
    std::memcpy(sorted_.at(choices_[i].sorted_row), normed_.at(i / l.chosen), static_cast<size_t>(m_.hidden) * sizeof(float));
  barrier_.wait();
  auto every = [&](const pl_weight* of_expert, const Rows& x, Epilogue epilogue, Rows& y) {
    QuantisedRows codes = coded(of_expert[0], x, b_.rows * l.chosen, thread, threads);
    for (long e = 0; e < l.experts; e++) {
      long rows = begin_[e + 1] - begin_[e];
      if (rows) multiply_coded(of_expert[e], x, codes.from_row(begin_[e]), rows, epilogue, y, thread, threads, begin_[e]);
    }
    barrier_.wait();
  };
  every(l.expert_gate_up, sorted_, GATED, hidden_);
  every(l.expert_down, hidden_, STORE, product_);
  for (long i = share.from * l.chosen; i < share.to * l.chosen; i++)
    k_.add_scaled(x_.at(i / l.chosen), product_.at(choices_[i].sorted_row), choices_[i].weight, m_.hidden);
}
