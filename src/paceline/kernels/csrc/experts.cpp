// Mixture-of-experts layers (Mixtral, Qwen3-MoE): each row goes through the experts that its router chooses.
//
// Which experts these are, their weights and the order in which their outputs are added follow from the row's own
// router logits. For the GEMMs, rows are sorted by expert, as a row's sums do not depend on the rows beside it:
//
//   row        0        1        2         each row `chosen` times    expert       0     1        2
//   experts  2, 0     1, 2     0, 2                                   sorted row   0 1  | 2  |  3 4 5
//                                                                     row          0 2  | 1  |  0 1 2
#include <cstring>

#include "forward.h"

// Sets `sorted_row` of each choice, and begin_, the first sorted row of each expert.
void Forward::sort_by_expert(const pl_layer& l) {
  long all = b_.rows * l.chosen;
  begin_.assign(l.experts + 1, 0);
  for (long i = 0; i < all; i++) begin_[choices_[i].expert + 1]++;
  for (long e = 0; e < l.experts; e++) begin_[e + 1] += begin_[e];
  std::vector<long> next(begin_.begin(), begin_.end() - 1);
  for (long i = 0; i < all; i++) choices_[i].sorted_row = static_cast<int32_t>(next[choices_[i].expert]++);
}

// x += the weighted outputs of the chosen experts for normed_.
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
  auto multiply_all = [&](const pl_weight* weights, const Rows& x, Epilogue epilogue, Rows& y) {
    QuantisedRows quantised_x = coded(weights[0], x, b_.rows * l.chosen, thread, threads);
    for (long e = 0; e < l.experts; e++) {
      long rows = begin_[e + 1] - begin_[e];
      if (rows) multiply_coded(weights[e], x, quantised_x.from_row(begin_[e]), rows, epilogue, y, thread, threads, begin_[e]);
    }
    barrier_.wait();
  };
  multiply_all(l.expert_gate_up, sorted_, GATED, hidden_);
  multiply_all(l.expert_down, hidden_, STORE, product_);
  for (long i = share.from * l.chosen; i < share.to * l.chosen; i++)
    k_.add_scaled(x_.at(i / l.chosen), product_.at(choices_[i].sorted_row), choices_[i].weight, m_.hidden);
}
