// Mixture-of-experts layers (Mixtral, Qwen3-MoE): the router sends each row through a few experts.
//
// Which experts these are, and in which order their outputs are added, follows from the row's own router logits. For the
// products the rows lie sorted by expert, and a row's sums do not depend on the rows beside it:
//
//   row        0        1        2         each row `chosen` times    expert       0     1        2
//   experts  2, 0     1, 2     0, 2                                   sorted_row   0 1  | 2  |  3 4 5
//                                                                     row          0 2  | 1  |  0 1 2
#include <cstring>

#include "forward.h"

// Gives each choice of an expert its sorted row.
void Forward::sort_by_expert(const pl_layer& l) {
  long choices = b_.rows * l.experts_per_row;
  expert_begin_.assign(l.experts + 1, 0);
  for (long i = 0; i < choices; i++) expert_begin_[expert_choices_[i].expert + 1]++;
  for (long e = 0; e < l.experts; e++) expert_begin_[e + 1] += expert_begin_[e];
  std::vector<long> next(expert_begin_.begin(), expert_begin_.end() - 1);
  for (long i = 0; i < choices; i++) expert_choices_[i].sorted_row = static_cast<int32_t>(next[expert_choices_[i].expert]++);
}

// residual += the weighted outputs of each row's experts for normed_.
void Forward::run_experts(const Worker& worker, const pl_layer& l) {
  RowRange rows = worker.share(b_.rows), choices{rows.begin * l.experts_per_row, rows.end * l.experts_per_row};
  multiply(worker, l.router, normed_, b_.rows, STORE, router_logits_);
  barrier_.wait();
  for (long r = rows.begin; r < rows.end; r++)
    k_.choose_experts(router_logits_.row(r), l.experts, l.experts_per_row, &expert_choices_[r * l.experts_per_row]);
  barrier_.wait();
  if (worker.index == 0) sort_by_expert(l);
  barrier_.wait();
  for (long i = choices.begin; i < choices.end; i++) {
    float* sorted = sorted_rows_.row(expert_choices_[i].sorted_row);
    std::memcpy(sorted, normed_.row(i / l.experts_per_row), static_cast<size_t>(m_.hidden) * sizeof(float));
  }
  barrier_.wait();
  auto multiply_all = [&](const pl_weight* of_expert, const RowBuffer& x, Epilogue epilogue, RowBuffer& y) {
    QuantisedRows quantised_x = quantise_rows(worker, of_expert[0], x, b_.rows * l.experts_per_row);
    for (long e = 0; e < l.experts; e++) {
      long first = expert_begin_[e], count = expert_begin_[e + 1] - first;
      if (count) multiply_quantised(worker, of_expert[e], x, quantised_x.from_row(first), count, epilogue, y, first, nullptr);
    }
    barrier_.wait();
  };
  multiply_all(l.expert_gate_up, sorted_rows_, GATED, mlp_hidden_);
  multiply_all(l.expert_down, mlp_hidden_, STORE, projected_);
  for (long i = choices.begin; i < choices.end; i++) {
    const ExpertChoice& choice = expert_choices_[i];
    k_.add_scaled(residual_.row(i / l.experts_per_row), projected_.row(choice.sorted_row), choice.weight, m_.hidden);
  }
}
