// Drafts grown to their end in one call: for greedy requests what draft/trees/grow.py does, a
// forward a level, without a word of Python between the levels.
#include <algorithm>
#include <cmath>

#include "forward.h"

namespace {

constexpr float NEVER = -INFINITY;

// One tree: candidates, of which some are expanded, level by level.
struct Tree {
  explicit Tree(const pl_tree& wanted) : want(wanted) {}
  pl_tree want;
  std::vector<int32_t> token, below;  // of each candidate; the expanded node that it stands below, or -1
  std::vector<float> score;           // log-probability of its path
  std::vector<int32_t> place, parent;  // of each expanded node: its candidate, and its parent's number
  long row = 0, rows = 1;              // of its newest expanded nodes, in the level's forward

  long expanded() const { return static_cast<long>(place.size()); }

  // The `count` best of the candidates from `from` on, in their order. Of equals the first: a parent
  // is never worse than what stands below it.
  std::vector<int32_t> best(long from, long count) const {
    std::vector<int32_t> order;
    for (long c = from; c < static_cast<long>(score.size()); c++) order.push_back(static_cast<int32_t>(c));
    auto better = [this](int32_t a, int32_t b) { return score[a] > score[b] || (score[a] == score[b] && a < b); };
    count = std::min<long>(count, static_cast<long>(order.size()));
    std::partial_sort(order.begin(), order.begin() + count, order.end(), better);
    order.resize(static_cast<size_t>(count));
    std::sort(order.begin(), order.end());
    return order;
  }

  void finish(const pl_growth& g, long index) const {
    std::vector<int32_t> node(token.size(), -1), slot(token.size(), -1);
    for (long e = 0; e < expanded(); e++) slot[place[e]] = static_cast<int32_t>(e);
    int32_t count = 0;
    for (int32_t c : best(0, want.nodes)) {
      if (score[c] == NEVER) continue;
      long at = index * g.most + count;
      g.tokens[at] = token[c];
      g.parents[at] = below[c] < 0 ? -1 : node[place[below[c]]];
      g.slots[at] = slot[c];
      node[c] = count++;
    }
    g.counts[index] = count;
  }
};

// The candidates below each tree's newest nodes, from the logits after them.
void add_candidates(const Kernels& k, const pl_model& m, const pl_growth& g, const std::vector<Tree*>& trees,
                    const char* logits, long stride) {
  long width = 1, rows = 0;
  for (const Tree* t : trees) width = std::max<long>(width, t->want.width), rows += t->rows;
  width = std::min<long>(width, g.columns);
  std::vector<int32_t> places(static_cast<size_t>(rows * width));
  std::vector<float> values(places.size()), sums(static_cast<size_t>(rows));
  long bytes = stride * (m.dtype == PL_BFLOAT16 ? 2 : 4);
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(g.threads))
  for (long r = 0; r < rows; r++)
    sums[r] = k.likeliest(m.dtype, logits + r * bytes, g.columns, width, g.sharpness, &places[r * width], &values[r * width]);
  for (Tree* t : trees) {
    long first = t->expanded() - t->rows;
    bool root = t->place.empty();
    for (long r = 0; r < t->rows; r++) {
      float above = root ? 0.0f : t->score[t->place[first + r]], mass = std::log(sums[t->row + r]);
      const int32_t* at = &places[(t->row + r) * width];
      const float* value = &values[(t->row + r) * width];
      for (long c = 0; c < std::min<long>(t->want.width, width); c++) {
        // A chain has no choice, so that what it scores does not matter.
        float score = t->want.width == 1 ? 0.0f : above + g.sharpness * (value[c] - value[0]) - mass;
        t->token.push_back(g.ids ? static_cast<int32_t>(g.ids[at[c]]) : at[c]);
        t->below.push_back(root ? -1 : static_cast<int32_t>(first + r));
        t->score.push_back(score == score ? score : NEVER);
      }
    }
  }
}

}  // namespace

void Growth::run(Forward& forward, const Kernels& k, const Quantised& quantised, const pl_growth& g) {
  std::lock_guard<std::mutex> alone(busy_);
  const pl_model& m = forward.model();
  long size = m.dtype == PL_BFLOAT16 ? 2 : 4, state = m.hidden * size;
  std::vector<Tree> all(g.tree, g.tree + g.trees);
  std::vector<Tree*> trees;
  for (Tree& tree : all) tree.row = static_cast<long>(trees.size()), trees.push_back(&tree);
  const char* logits = static_cast<const char*>(g.logits);
  if (g.outputs) outputs_.assign(static_cast<const char*>(g.outputs), static_cast<const char*>(g.outputs) + g.trees * state);
  for (long level = 1;; level++) {
    std::vector<long> before;
    for (Tree* t : trees) before.push_back(static_cast<long>(t->token.size()));
    add_candidates(k, m, g, trees, logits, level == 1 ? g.stride : m.vocab);
    std::vector<int32_t> ids, positions, slots, wanted, parents;
    std::vector<pl_span> spans;
    std::vector<Tree*> further;
    hidden_.clear();
    for (size_t n = 0; n < trees.size(); n++) {
      Tree* t = trees[n];
      if (t->want.depth == level) continue;
      long first = t->expanded(), above = first - t->rows, row = t->row;
      const int32_t* table = g.tables + t->want.table;
      for (int32_t c : t->best(before[n], t->want.width)) {
        long index = t->want.base + t->expanded();
        ids.push_back(t->token[c]);
        positions.push_back(static_cast<int32_t>(t->want.base + level - 1));
        slots.push_back(static_cast<int32_t>(table[index / g.block_size] * g.block_size + index % g.block_size));
        if (g.outputs) {
          const char* from = outputs_.data() + (row + (level == 1 ? 0 : t->below[c] - above)) * state;
          hidden_.insert(hidden_.end(), from, from + state);
        }
        t->place.push_back(c);
        t->parent.push_back(t->below[c]);
      }
      t->row = static_cast<long>(wanted.size()), t->rows = t->expanded() - first;
      spans.push_back({static_cast<int32_t>(t->row), t->want.base, 0, static_cast<int32_t>(t->expanded()),
                       static_cast<int32_t>(first), t->want.table, static_cast<int32_t>(parents.size())});
      parents.insert(parents.end(), t->parent.begin(), t->parent.end());
      while (wanted.size() < ids.size()) wanted.push_back(static_cast<int32_t>(wanted.size()));
      further.push_back(t);
    }
    if (further.empty()) break;
    long rows = static_cast<long>(ids.size());
    logits_.resize(static_cast<size_t>(rows * m.vocab * size));
    if (g.outputs) outputs_.resize(static_cast<size_t>(rows * state));
    pl_batch batch{};
    batch.rows = batch.logit_rows = rows, batch.spans = static_cast<int64_t>(spans.size());
    batch.block_size = g.block_size, batch.threads = g.threads;
    batch.ids = ids.data(), batch.positions = positions.data(), batch.slots = slots.data();
    batch.span = spans.data(), batch.tables = g.tables, batch.parents = parents.data(), batch.wanted = wanted.data();
    batch.logits = logits_.data(), batch.keys = g.keys, batch.values = g.values, batch.coded = g.coded, batch.rope = g.rope;
    if (g.outputs) batch.hidden = hidden_.data(), batch.fused = 1, batch.outputs = outputs_.data();
    forward.run(k, quantised, batch);
    logits = logits_.data();
    trees = further;
  }
  for (long n = 0; n < g.trees; n++) all[n].finish(g, n);
}
