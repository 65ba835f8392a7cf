// Grows whole drafts in one call: what draft/trees/grow.py does with a forward for each level, without Python between
// the levels, for requests that are greedy or only sample and truncate. A tree also ends where its next level would no
// longer pay. That moves no distribution: drafts are matched, or verified by rules for which a chain may end
// depending on what was drawn so far (tests/laws).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "forward.h"
#include "noise.h"
#include "sampling.h"

namespace {

constexpr float NEVER = -INFINITY;

// A tree while it grows. Each level adds candidates below the nodes expanded last, and expands the best of them.
struct GrowingTree {
  GrowingTree(const pl_tree& wanted, long n) : params(wanted), index(n) {}
  pl_tree params;
  long index;  // in pl_growth
  // Of each candidate: its token, the log-probability of its path, the expanded node below which it stands, or -1.
  std::vector<int32_t> token, parent;
  std::vector<float> score;
  // Of each expanded node: its candidate, and its parent among the expanded nodes, or -1.
  std::vector<int32_t> candidate, node_parent;
  long level_begin = 0;              // the first candidate of the newest level
  long first_row = 0, level_rows = 1;  // rows of the nodes expanded last in their level's forward

  bool is_chain() const { return params.width == 1; }
  long expanded() const { return static_cast<long>(candidate.size()); }

  // Whether the tree has all its levels, or the nodes that it would expand are too unlikely for another forward.
  bool is_complete(long level) const {
    if (level == params.depth || params.min_level_prob <= 0) return level == params.depth;
    float chance = 0;
    for (int32_t c : best_candidates(level_begin, params.width)) chance += std::exp(params.power * score[c]);
    return chance < params.min_level_prob;
  }

  // The `count` best candidates from `begin` on, in their order. Of equals the first wins: a parent is never worse
  // than its descendants.
  std::vector<int32_t> best_candidates(long begin, long count) const {
    std::vector<int32_t> order;
    for (long c = begin; c < static_cast<long>(score.size()); c++) order.push_back(static_cast<int32_t>(c));
    auto better = [this](int32_t a, int32_t b) { return score[a] > score[b] || (score[a] == score[b] && a < b); };
    count = std::min<long>(count, static_cast<long>(order.size()));
    std::partial_sort(order.begin(), order.begin() + count, order.end(), better);
    order.resize(static_cast<size_t>(count));
    std::sort(order.begin(), order.end());
    return order;
  }

  // Adds the `count` candidates `columns`, with log-probabilities `values`, below the node expanded last but `n`.
  void add_candidates(long n, long count, const int32_t* columns, const float* values, const int64_t* ids) {
    long node = expanded() - level_rows + n;
    bool is_root = candidate.empty();
    float path = is_root ? 0.0f : score[candidate[node]];
    for (long c = 0; c < count; c++) {
      float sum = path + values[c];
      token.push_back(ids ? static_cast<int32_t>(ids[columns[c]]) : columns[c]);
      parent.push_back(is_root ? -1 : static_cast<int32_t>(node));
      score.push_back(sum == sum ? sum : NEVER);
    }
  }

  // Writes the best nodes of the tree.
  void write_to(const pl_growth& g) const {
    std::vector<int32_t> node(token.size(), -1), slot(token.size(), -1);
    for (long e = 0; e < expanded(); e++) slot[candidate[e]] = static_cast<int32_t>(e);
    int32_t count = 0;
    for (int32_t c : best_candidates(0, params.nodes)) {
      if (score[c] == NEVER || (score[c] < params.min_node_score && count && !is_chain())) continue;
      long at = index * g.max_nodes + count;
      g.tokens[at] = token[c];
      g.parents[at] = parent[c] < 0 ? -1 : node[candidate[parent[c]]];
      g.slots[at] = slot[c];
      g.scores[at] = score[c];
      node[c] = count++;
    }
    g.counts[index] = count;
  }
};

// The `count` candidates of a sampled request after a row, and their log-probabilities, after truncation. With a seed
// these are the tokens that are likeliest to win the Gumbel-max of the verifier. A drawn draft has one, and its
// distribution goes to q.
void sample_candidates(const Kernels& k, const pl_tree& tree, const pl_growth& g, const LogitRow& row, int64_t position,
                       long count, int32_t* columns, float* values, float* q) {
  Distribution p;
  std::fill(columns, columns + count, 0);
  std::fill(values, values + count, NEVER);
  SamplingParams params{tree.inverse_temperature, tree.top_p, tree.min_p, tree.top_k};
  if (!compute_distribution(k, row, params, tree.sampling != 2, &p, nullptr)) return;
  uint64_t key = splitmix(tree.seed ^ static_cast<uint64_t>(position));
  if (tree.sampling == 2) return gumbel_top(k, row, p, key, g.hashes, g.ids, count, columns, values);
  if (tree.sampling == 1) {
    k.top_k(row.dtype, row.data, row.width, count, 0.0f, columns, values);
    for (long n = 0; n < count; n++) values[n] = static_cast<float>(std::log(probability(p, row, columns[n])));
    return;
  }
  std::vector<float> by_column(g.ids ? static_cast<size_t>(row.width) : 0);
  float* probabilities = g.ids ? by_column.data() : q;
  double uniform = static_cast<double>(splitmix(key) >> 11) * 0x1p-53;
  columns[0] = static_cast<int32_t>(sample_residual(k, row, p, {}, uniform, probabilities));
  values[0] = static_cast<float>(std::log(probability(p, row, columns[0])));
  for (long c = 0; g.ids && c < row.width; c++) q[g.ids[c]] = probabilities[c];
}

// Adds candidates below each tree's nodes expanded last, from the logits after them.
void add_level(const Kernels& k, int64_t dtype, const pl_growth& g, const std::vector<GrowingTree*>& trees,
               const char* logits, long stride, long level) {
  long width = 1;
  std::vector<const GrowingTree*> tree_of;  // each row
  for (const GrowingTree* t : trees) {
    width = std::max<long>(width, t->params.width);
    tree_of.insert(tree_of.end(), static_cast<size_t>(t->level_rows), t);
  }
  width = std::min<long>(width, g.columns);
  long rows = static_cast<long>(tree_of.size()), bytes = stride * dtype_bytes(dtype);
  std::vector<int32_t> columns(static_cast<size_t>(rows * width));
  std::vector<float> values(columns.size());
#pragma omp parallel for schedule(static) num_threads(ActiveThreads::of_process().count(g.threads))
  for (long r = 0; r < rows; r++) {
    const pl_tree& tree = tree_of[r]->params;
    int32_t* column = &columns[r * width];
    float* value = &values[r * width];
    const char* row = logits + r * bytes;
    long count = std::min<long>(tree.width, width);
    if (tree.sampling) {
      float* q = g.q ? g.q + (tree_of[r]->index * g.max_nodes + level - 1) * g.q_width : nullptr;
      sample_candidates(k, tree, g, {dtype, row, g.columns}, tree.position + level - 1, count, column, value, q);
      continue;
    }
    // A chain has no choice: its scores only say where it ends.
    float inverse_temperature = count > 1 || tree.min_level_prob > 0 ? tree.inverse_temperature : 0.0f;
    float mass = k.top_k(dtype, row, g.columns, count, inverse_temperature, column, value), largest = value[0];
    for (long c = 0; c < count; c++) value[c] = tree.inverse_temperature * (value[c] - largest) - std::log(mass);
  }
  for (GrowingTree* t : trees) {
    t->level_begin = static_cast<long>(t->token.size());
    for (long n = 0; n < t->level_rows; n++) {
      long r = (t->first_row + n) * width;
      t->add_candidates(n, std::min<long>(t->params.width, width), &columns[r], &values[r], g.ids);
    }
  }
}

// The forward over the nodes that a level expands, one row for each.
struct LevelBatch {
  std::vector<int32_t> ids, positions, slots, wanted, parents, source_rows;
  std::vector<pl_span> spans;
  std::vector<pl_adapter_rows> runs;

  // Expands the best candidates of the tree's newest level.
  void expand(GrowingTree& t, const pl_growth& g, long level) {
    const int32_t* table = g.tables + t.params.table_start;
    long first = t.expanded(), source = t.first_row - (first - t.level_rows);
    for (int32_t c : t.best_candidates(t.level_begin, t.params.width)) {
      long index = t.params.cached + t.expanded();
      wanted.push_back(static_cast<int32_t>(ids.size()));
      ids.push_back(t.token[c]);
      positions.push_back(static_cast<int32_t>(t.params.cached + level - 1));
      slots.push_back(static_cast<int32_t>(table[index / g.block_size] * g.block_size + index % g.block_size));
      source_rows.push_back(static_cast<int32_t>(level == 1 ? t.first_row : source + t.parent[c]));
      t.candidate.push_back(c);
      t.node_parent.push_back(t.parent[c]);
    }
    t.level_rows = t.expanded() - first, t.first_row = static_cast<long>(ids.size()) - t.level_rows;
    spans.push_back({static_cast<int32_t>(t.first_row), t.params.cached, 0, static_cast<int32_t>(t.expanded()),
                     static_cast<int32_t>(first), t.params.table_start, static_cast<int32_t>(parents.size()), t.params.rope});
    parents.insert(parents.end(), t.node_parent.begin(), t.node_parent.end());
    if (t.params.pair) add_adapter(t);
  }

  // Neighbouring rows with one adapter are one run.
  void add_adapter(const GrowingTree& t) {
    const pl_lora* pair = t.params.pair;
    if (runs.empty() || runs.back().pair != pair || runs.back().first + runs.back().rows < t.first_row)
      runs.push_back({t.first_row, 0, t.first_row, 0, pair});
    runs.back().rows = runs.back().logit_rows = t.first_row + t.level_rows - runs.back().first;
  }

  pl_batch batch(const pl_growth& g, void* logits) const {
    pl_batch b{};
    b.rows = b.logit_rows = static_cast<int64_t>(ids.size()), b.spans = static_cast<int64_t>(spans.size());
    b.block_size = g.block_size, b.threads = g.threads;
    b.ids = ids.data(), b.positions = positions.data(), b.slots = slots.data();
    b.span = spans.data(), b.tables = g.tables, b.parents = parents.data(), b.logit_row_indices = wanted.data();
    b.logits = logits, b.columns = g.columns, b.skipped = g.skipped;
    b.keys = g.keys, b.values = g.values, b.int8_cache = g.int8_cache, b.rope = g.rope, b.query_scale = g.query_scale;
    b.runs = static_cast<int64_t>(runs.size()), b.run = runs.data();
    return b;
  }
};

}  // namespace

void Growth::run(Forward& forward, const Kernels& k, const QuantisedKernels& quantised, const pl_growth& g) {
  std::lock_guard<std::mutex> lock(mutex_);
  const pl_model& m = forward.model();
  long size = dtype_bytes(m.dtype), state = m.hidden * size;  // bytes; state: of a hidden state
  std::vector<GrowingTree> all;
  for (long n = 0; n < g.trees; n++) all.emplace_back(g.tree[n], n);
  std::vector<GrowingTree*> trees;  // those that still grow
  for (GrowingTree& tree : all) tree.first_row = static_cast<long>(trees.size()), trees.push_back(&tree);
  if (g.first) forward.run(k, quantised, *g.first);
  const char *logits = static_cast<const char*>(g.logits), *outputs = static_cast<const char*>(g.outputs);
  if (outputs) outputs_.assign(outputs, outputs + g.trees * state);
  for (long level = 1; !trees.empty(); level++) {
    add_level(k, m.dtype, g, trees, logits, level == 1 ? g.stride : g.columns, level);
    LevelBatch next;
    trees.erase(std::remove_if(trees.begin(), trees.end(), [&](auto* t) { return t->is_complete(level); }), trees.end());
    for (GrowingTree* t : trees) next.expand(*t, g, level);
    if (trees.empty()) break;
    size_t rows = next.ids.size();
    logits_.resize(rows * static_cast<size_t>(g.columns * size));
    pl_batch batch = next.batch(g, logits_.data());
    if (outputs) {  // each node starts from its parent's output
      hidden_.clear();
      for (long row : next.source_rows)
        hidden_.insert(hidden_.end(), outputs_.data() + row * state, outputs_.data() + (row + 1) * state);
      outputs_.resize(rows * static_cast<size_t>(state));
      batch.hidden = hidden_.data(), batch.fused = 1, batch.outputs = outputs_.data();
    }
    forward.run(k, quantised, batch);
    logits = logits_.data();
  }
  for (const GrowingTree& tree : all) tree.write_to(g);
}
