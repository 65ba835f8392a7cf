// Drafts grown to their end in one call: for requests that only sample and truncate what
// draft/trees/grow.py does, a forward a level, without a word of Python between the levels. And where the next level
// no longer pays, a tree ends: drafts are matched, or verified by rules for which a chain may end by
// what was drawn so far (tests/laws), so that where they end moves no distribution.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "draws.h"
#include "forward.h"
#include "noise.h"

namespace {

constexpr float NEVER = -INFINITY;

// One tree: candidates, of which some are expanded, level by level.
struct Tree {
  Tree(const pl_tree& wanted, long n) : want(wanted), index(n) {}
  pl_tree want;
  long index;  // among all
  std::vector<int32_t> token, below;  // of each candidate; the expanded node that it stands below, or -1
  std::vector<float> score;           // log-probability of its path
  std::vector<int32_t> place, parent;  // of each expanded node: its candidate, and its parent's number
  long row = 0, rows = 1;              // of its newest expanded nodes, in the level's forward

  bool chain() const { return want.width == 1; }
  // What comes next costs a pass, which pays behind nodes that are likely enough; `from`: the level's first.
  bool ends(long level, long from) const {
    if (level == want.depth || want.stop <= 0) return level == want.depth;
    float chance = 0;
    for (int32_t c : best(from, want.width)) chance += std::exp(want.power * score[c]);
    return chance < want.stop;
  }

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

  void finish(const pl_growth& g) const {
    std::vector<int32_t> node(token.size(), -1), slot(token.size(), -1);
    for (long e = 0; e < expanded(); e++) slot[place[e]] = static_cast<int32_t>(e);
    int32_t count = 0;
    for (int32_t c : best(0, want.nodes)) {
      if (score[c] == NEVER || (score[c] < want.least && count && !chain())) continue;
      long at = index * g.most + count;
      g.tokens[at] = token[c];
      g.parents[at] = below[c] < 0 ? -1 : node[place[below[c]]];
      g.slots[at] = slot[c];
      g.scores[at] = score[c];
      node[c] = count++;
    }
    g.counts[index] = count;
  }
};

// The `count` likeliest tokens of a sampled request's row and their log-probabilities, after truncation;
// with a seed those of winning the race that the verifier will run. Drawn: one, and its distribution into q.
void sample(const Kernels& k, const pl_tree& want, const pl_growth& g, const LogitRow& row, int64_t position, long count,
            int32_t* places, float* values, float* q) {
  Law law;
  std::fill(places, places + count, 0);
  std::fill(values, values + count, NEVER);
  if (!law_of(k, row, {want.sharpness, want.top_p, want.min_p, want.top_k}, &law, nullptr)) return;
  uint64_t key = splitmix(want.seed ^ static_cast<uint64_t>(position));
  if (want.sampled == 2) return raced(k, row, law, key, g.ids, count, places, values);
  if (want.sampled == 1) {
    k.top_k(row.dtype, row.x, row.width, count, 0.0f, places, values);
    for (long n = 0; n < count; n++) values[n] = static_cast<float>(std::log(chance(law, row, places[n])));
    return;
  }
  std::vector<float> narrow(g.ids ? static_cast<size_t>(row.width) : 0);
  float* into = g.ids ? narrow.data() : q;
  places[0] = static_cast<int32_t>(drawn(k, row, law, 1.0, nullptr, 0, static_cast<double>(splitmix(key) >> 11) * 0x1p-53, into));
  values[0] = static_cast<float>(std::log(chance(law, row, places[0])));
  for (long c = 0; g.ids && c < row.width; c++) q[g.ids[c]] = into[c];
}

// The candidates below each tree's newest nodes, from the logits after them.
void add_candidates(const Kernels& k, const pl_model& m, const pl_growth& g, const std::vector<Tree*>& trees,
                    const char* logits, long stride, long level) {
  long width = 1;
  std::vector<const Tree*> of;  // each row
  for (const Tree* t : trees) {
    width = std::max<long>(width, t->want.width);
    of.insert(of.end(), static_cast<size_t>(t->rows), t);
  }
  width = std::min<long>(width, g.columns);
  long rows = static_cast<long>(of.size()), bytes = stride * (m.dtype == PL_BFLOAT16 ? 2 : 4);
  std::vector<int32_t> places(static_cast<size_t>(rows * width));
  std::vector<float> values(places.size());
#pragma omp parallel for schedule(static) num_threads(ActiveThreads::of_process().count(g.threads))
  for (long r = 0; r < rows; r++) {
    const pl_tree& want = of[r]->want;
    int32_t* place = &places[r * width];
    float* value = &values[r * width];
    const char* row = logits + r * bytes;
    long count = std::min<long>(want.width, width);
    if (want.sampled) {
      float* q = g.q ? g.q + ((of[r]->index) * g.most + level - 1) * g.q_width : nullptr;
      sample(k, want, g, {m.dtype, row, g.columns}, want.position + level - 1, count, place, value, q);
      continue;
    }
    // A chain has no choice: what it scores says where it ends.
    bool scored = count > 1 || want.stop > 0;
    float mass = k.top_k(m.dtype, row, g.columns, count, scored ? want.sharpness : 0.0f, place, value), first = value[0];
    for (long c = 0; c < count; c++) value[c] = want.sharpness * (value[c] - first) - std::log(mass);
  }
  for (Tree* t : trees) {
    long first = t->expanded() - t->rows;
    bool root = t->place.empty();
    for (long r = 0; r < t->rows; r++) {
      float above = root ? 0.0f : t->score[t->place[first + r]];
      const int32_t* at = &places[(t->row + r) * width];
      const float* value = &values[(t->row + r) * width];
      for (long c = 0; c < std::min<long>(t->want.width, width); c++) {
        float score = above + value[c];
        t->token.push_back(g.ids ? static_cast<int32_t>(g.ids[at[c]]) : at[c]);
        t->below.push_back(root ? -1 : static_cast<int32_t>(first + r));
        t->score.push_back(score == score ? score : NEVER);
      }
    }
  }
}

}  // namespace

void Growth::run(Forward& forward, const Kernels& k, const QuantisedKernels& quantised, const pl_growth& g) {
  std::lock_guard<std::mutex> alone(busy_);
  const pl_model& m = forward.model();
  long size = m.dtype == PL_BFLOAT16 ? 2 : 4, state = m.hidden * size;
  std::vector<Tree> all;
  for (long n = 0; n < g.trees; n++) all.emplace_back(g.tree[n], n);
  std::vector<Tree*> trees;
  for (Tree& tree : all) tree.row = static_cast<long>(trees.size()), trees.push_back(&tree);
  if (g.first) forward.run(k, quantised, *g.first);
  const char* logits = static_cast<const char*>(g.logits);
  if (g.outputs) outputs_.assign(static_cast<const char*>(g.outputs), static_cast<const char*>(g.outputs) + g.trees * state);
  for (long level = 1;; level++) {
    std::vector<long> before;
    for (Tree* t : trees) before.push_back(static_cast<long>(t->token.size()));
    add_candidates(k, m, g, trees, logits, level == 1 ? g.stride : g.columns, level);
    std::vector<int32_t> ids, positions, slots, wanted, parents;
    std::vector<pl_span> spans;
    std::vector<pl_run> runs;
    std::vector<Tree*> further;
    hidden_.clear();
    for (size_t n = 0; n < trees.size(); n++) {
      Tree* t = trees[n];
      if (t->ends(level, before[n])) continue;
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
      if (const pl_pair* pair = t->want.pair) {
        if (runs.empty() || runs.back().pair != pair || runs.back().first + runs.back().rows < t->row)
          runs.push_back({t->row, 0, t->row, 0, pair});
        runs.back().rows = runs.back().logit_rows = t->row + t->rows - runs.back().first;
      }
      while (wanted.size() < ids.size()) wanted.push_back(static_cast<int32_t>(wanted.size()));
      further.push_back(t);
    }
    if (further.empty()) break;
    long rows = static_cast<long>(ids.size());
    logits_.resize(static_cast<size_t>(rows * g.columns * size));
    if (g.outputs) outputs_.resize(static_cast<size_t>(rows * state));
    pl_batch batch{};
    batch.rows = batch.logit_rows = rows, batch.spans = static_cast<int64_t>(spans.size());
    batch.block_size = g.block_size, batch.threads = g.threads;
    batch.ids = ids.data(), batch.positions = positions.data(), batch.slots = slots.data();
    batch.span = spans.data(), batch.tables = g.tables, batch.parents = parents.data(), batch.wanted = wanted.data();
    batch.logits = logits_.data(), batch.columns = g.columns, batch.skipped = g.skipped;
    batch.keys = g.keys, batch.values = g.values, batch.coded = g.coded, batch.rope = g.rope;
    batch.runs = static_cast<int64_t>(runs.size()), batch.run = runs.data();
    if (g.outputs) batch.hidden = hidden_.data(), batch.fused = 1, batch.outputs = outputs_.data();
    forward.run(k, quantised, batch);
    logits = logits_.data();
    trees = further;
  }
  for (const Tree& tree : all) tree.finish(g);
}
