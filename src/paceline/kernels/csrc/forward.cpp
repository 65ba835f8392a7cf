#include "forward.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace {

constexpr long ITEMS = 6;  // of attention, a thread
constexpr long FEW = 64;  // rows up to which reading keys and values takes longer than multiplying them
constexpr long DISTANCE = 32 << 10;  // bytes of keys and values that a thread has fetched ahead
#if !defined(PACELINE_PARTIAL)  // tests give less, for rounds of few blocks
#define PACELINE_PARTIAL (8 << 20)
#endif
constexpr long PARTIAL = PACELINE_PARTIAL;  // floats of partial results, at most, and
constexpr long KEPT = 1 << 20;              // those that stay for the next forward

bool is_chain(const int32_t* parents, long nodes) {
  for (long i = 0; i < nodes; i++)
    if (parents[i] != i - 1) return false;
  return true;
}

}  // namespace

KvPrefetcher::KvPrefetcher(const Attention& a, AttentionItems items)
    : a_(a), head_bytes_(kv_head_bytes(*a.model, a.int8_kv)), item_(items.begin()), end_(items.end()) {
  skip_empty_items();
  advance(DISTANCE / (2 * head_bytes_));
}

// The first item from this one on that reads something.
void KvPrefetcher::skip_empty_items() {
  while (item_ < end_ && item_->table_begin >= item_->table_end) item_++;
  if (item_ < end_) position_ = item_->table_begin, head_ = item_->kv_head;
}

void KvPrefetcher::advance(long count) {
  while (item_ < end_ && count > 0) {
    long size = a_.block_size, inside = position_ % size, slot = a_.rows[item_->first_row].block_table[position_ / size] * size + inside;
    long some = std::min({count, size - inside, item_->table_end - position_}), apart = a_.model->kv_heads * head_bytes_, bytes = head_bytes_;
    const char* key = static_cast<const char*>(a_.keys) + slot * apart + head_ * bytes;
    const char* value = static_cast<const char*>(a_.values) + slot * apart + head_ * bytes;
    for (long n = 0; n < some; n++, key += apart, value += apart)
      for (long i = 0; i < bytes; i += 64) __builtin_prefetch(key + i, 0, 2), __builtin_prefetch(value + i, 0, 2);
    count -= some, position_ += some;
    if (position_ < item_->table_end) continue;
    position_ = item_->table_begin;
    if (++head_ == item_->kv_head + item_->kv_heads) item_++, skip_empty_items();
  }
}

Forward::Forward(const pl_model& model) : m_(model), layers_(model.layer, model.layer + model.layers) {
  m_.layer = layers_.data();
  for (const pl_layer& l : layers_) {
    size_t n = 0;
    while (n < divisions_.size() && divisions_[n].window != l.window) n++;
    if (n == divisions_.size()) divisions_.push_back({l.window, 1, {}, {}});
    of_layer_.push_back(n);
  }
}

// Where each row's keys are.
void Forward::lay_out() {
  row_.resize(b_.rows);
  own_.clear();
  tiles_.clear();
  blocks_ = 1;
  for (long r = 0; r < b_.rows; r++)
    if (b_.ids[r] < 0 || b_.ids[r] >= m_.words) throw std::out_of_range("token");
  long most = 0;
  for (long s = 0; s < b_.spans; s++) most += static_cast<long>(b_.span[s].nodes) * b_.span[s].nodes;
  own_.reserve(most);
  long tile = std::max<long>(1, ATTENTION_HEADS / (m_.heads / m_.kv_heads));
  for (long s = 0; s < b_.spans; s++) {
    const pl_span& span = b_.span[s];
    const int32_t *parents = b_.parents + span.parents, *table = b_.tables + span.table;
    long base = span.context + span.pending, rows = span.pending + span.nodes - span.first_new;
    bool chain = is_chain(parents, span.nodes);
    for (long r = 0; r < rows; r++) {
      AttentionRow& row = row_[span.start + r];
      row.position = b_.positions[span.start + r];
      row.table_end = static_cast<int32_t>(chain ? base + span.nodes : base);
      row.block_table = table;
      row.tree_slots = nullptr;
      if (row.position < 0 || row.position >= base + span.nodes) throw std::out_of_range("position");
      blocks_ = std::max(blocks_, row.position / KEY_BLOCK + 1);
      if (chain || r < span.pending) {
        if (row.position >= row.table_end) throw std::out_of_range("position");  // there is no path to look it up in
        continue;
      }
      size_t begin = own_.size();
      for (long node = r - span.pending + span.first_new; node >= 0; node = parents[node]) {
        long index = base + node;
        own_.push_back(static_cast<int32_t>(table[index / b_.block_size] * b_.block_size + index % b_.block_size));
      }
      std::reverse(own_.begin() + static_cast<long>(begin), own_.end());
      row.tree_slots = own_.data() + begin;
      if (row.position - base >= static_cast<long>(own_.size() - begin)) throw std::out_of_range("position");
    }
    for (long r = 0; r < rows; r += tile)
      tiles_.push_back({span.start + r, std::min(tile, rows - r)});
  }
}

// How attention is divided. Heads lie side by side in the cache, and memory is quickest from end to end: one
// thread does all heads of some blocks, unless there are too few of those.
void Forward::divide(long threads) {
  long all = static_cast<long>(tiles_.size()) * blocks_, enough = ITEMS * threads, size = partial_result_size(m_);
  long heads = all < enough ? 1 : m_.kv_heads;
  long item_blocks = b_.rows > FEW ? all * m_.kv_heads / heads / enough : 1;
  item_blocks = std::max<long>(1, item_blocks);
  // As many blocks at a time as there is memory for: long contexts with many rows have too many.
  together_ = item_blocks < blocks_ ? std::max<long>(1, std::min(blocks_, PARTIAL / (b_.rows * size) - 1)) : blocks_;
  item_blocks = std::max<long>(1, item_blocks * together_ / blocks_);
  divided_ = item_blocks < blocks_;
  if (divided_) partial_.shape((together_ + 1) * b_.rows, size, false);
  for (Division& d : divisions_) {
    d.parts = threads;
    d.items.clear();
    d.borders.clear();
    for (long begin = 0; begin < blocks_; begin += together_) {
      long end = std::min(begin + together_, blocks_), all_costs = 0;
      std::vector<long> costs;
      for (const RowTile& t : tiles_)
        for (long from = begin; from < end; from += item_blocks)
          for (long head = 0; head < m_.kv_heads; head += heads) {
            AttentionItem item{t.first, t.rows, head, heads, from, std::min(from + item_blocks, end), 0, 0, nullptr};
            long cost = read_by(d.window, item);
            if (cost > 0) d.items.push_back(item), costs.push_back(cost), all_costs += cost;
          }
      long before = 0, part = 0;
      for (size_t i = 0, first = d.items.size() - costs.size(); i < costs.size(); before += costs[i++])
        for (; part * all_costs <= (before + costs[i] / 2) * threads; part++) d.borders.push_back(first + i);
      for (; part <= threads; part++) d.borders.push_back(d.items.size());
    }
  }
}

// Which positions of the block table an item reads; about its cost. Zero: its rows see none of its blocks.
long Forward::read_by(long window, AttentionItem& item) const {
  long low = row_[item.first_row].position, high = low;
  for (long r = item.first_row; r < item.first_row + item.rows; r++) {
    low = std::min<long>(low, row_[r].position);
    high = std::max<long>(high, row_[r].position);
  }
  item.table_begin = std::max(item.first_block * KEY_BLOCK, window ? low - window + 1 : 0);
  long end = std::min(item.end_block * KEY_BLOCK, high + 1), cost = (end - item.table_begin) * item.kv_heads * (4 + item.rows);
  item.table_end = std::min<long>(end, row_[item.first_row].table_end);
  return cost;
}

void Forward::run(const Kernels& kernels, const QuantisedKernels& quantised, const pl_batch& batch) {
  std::lock_guard<std::mutex> alone(busy_);
  k_ = kernels;
  quantised_ = &quantised;
  b_ = batch;
  long threads = ActiveThreads::of_process().count(b_.threads), hidden = m_.hidden, inner = m_.heads * m_.head_dim;
  x_.shape(b_.rows, hidden);
  if (m_.fuse.data) {
    given_.shape(b_.fused ? 0 : b_.rows, m_.fuse.inputs);
    joined_.shape(b_.rows, 2 * hidden);
  }
  normed_.shape(b_.rows, hidden);
  qkv_.shape(b_.rows, inner + 2 * m_.kv_heads * m_.head_dim);
  attended_.shape(b_.rows, inner);
  long most = 1, experts = 0;  // of the layers
  for (const pl_layer& l : layers_) most = std::max<long>(most, l.chosen), experts = std::max<long>(experts, l.experts);
  hidden_.shape(b_.rows * most, m_.ffn);
  product_.shape(b_.rows * most, hidden);
  if (experts) {
    routed_.shape(b_.rows, experts);
    sorted_.shape(b_.rows * most, hidden);
    choices_.resize(b_.rows * most);
  }
  last_.shape(b_.logit_rows, hidden);
  if (!b_.logits) {
    logits_.resize(static_cast<size_t>(b_.logit_rows * m_.head.outputs * (m_.dtype == PL_BFLOAT16 ? 2 : 4)));
    b_.logits = logits_.data();
  }
  long widest = std::max({hidden, inner, static_cast<long>(m_.ffn)});
  if (m_.fuse.data) widest = std::max({widest, 2 * hidden, static_cast<long>(m_.fuse.inputs)});
  codes_.shape(std::max<long>(b_.rows * most, b_.logit_rows), widest);
  for (long r = 0; r < b_.runs; r++)
    for (long n = 0; n <= 4 * m_.layers; n++) widest = std::max<long>(widest, b_.run[r].pair[n].b.inputs);
  scratch_.shape(threads, std::max(attention_scratch(m_), gemm_scratch(b_.rows * most, widest)));
  make_room();
  lay_out();
  divide(threads);
  double began = wall_seconds(), cpu = 0;  // seconds; cpu: of all threads
#pragma omp parallel num_threads(static_cast<int>(threads)) reduction(+ : cpu)
  {
    double before = clock_seconds(CLOCK_THREAD_CPUTIME_ID);
#pragma omp single
    barrier_.reset(omp_get_num_threads());
    FlushToZero flush;
    work(omp_get_thread_num(), omp_get_num_threads());
    cpu = clock_seconds(CLOCK_THREAD_CPUTIME_ID) - before;
  }
  ActiveThreads::of_process().report(static_cast<int>(threads), wall_seconds() - began, cpu);
  partial_.keep(KEPT);
}

void Forward::work(int thread, int threads) {
  begin(thread, threads);
  for (long index = 0; index < m_.layers; index++) {
    keep_features(index, thread, threads);
    if (!b_.skipped || !b_.skipped[index]) layer(index, thread, threads);
  }
  keep_features(m_.layers, thread, threads);
  logits(thread, threads);
}

// The residual stream: embeddings, or what an EAGLE head makes of them and of hidden states (as
// draft/heads/eagle_head.py). joined_ is [embedding, hidden state] of each row.
void Forward::begin(int thread, int threads) {
  Share share(b_.rows, thread, threads);
  if (!m_.fuse.data) {
    for (long r = share.from; r < share.to; r++) k_.embed(m_, b_.ids[r], x_.at(r));
    return;
  }
  bool third = m_.hidden_norm.weight, features = third && !b_.fused;
  long hidden = m_.hidden, width = features ? m_.fuse.inputs : hidden;
  for (long r = share.from; r < share.to; r++) {
    const char* from = static_cast<const char*>(b_.hidden) + r * width * (m_.dtype == PL_BFLOAT16 ? 2 : 4);
    k_.load_row(m_.dtype, from, width, features ? given_.at(r) : third ? x_.at(r) : joined_.at(r) + hidden);
    k_.embed(m_, b_.ids[r], joined_.at(r));
  }
  if (!third || features) {
    barrier_.wait();
    multiply(m_.fuse, features ? given_ : joined_, b_.rows, STORE, x_, thread, threads);
    barrier_.wait();
  }
  if (!third) return;
  for (long r = share.from; r < share.to; r++) {
    float *embedding = joined_.at(r), *state = embedding + hidden;
    k_.rms_norm(m_, m_.layer[0].attention_norm, embedding, embedding, hidden);
    k_.rms_norm(m_, m_.hidden_norm, x_.at(r), state, hidden);
    if (m_.residual_normed) std::memcpy(x_.at(r), state, static_cast<size_t>(hidden) * sizeof(float));
  }
}

// A thread's share of rows is always the same, so that a step from row to row needs no meeting.
void Forward::layer(long index, int thread, int threads) {
  const pl_layer& l = m_.layer[index];
  const Rows& in = m_.hidden_norm.weight && !index ? joined_ : normed_;
  if (&in == &normed_) normalise(l.attention_norm, x_, normed_, thread, threads);
  barrier_.wait();
  multiply(l.qkv, in, b_.rows, STORE, qkv_, thread, threads, 0, adapt(4 * index, in, thread, threads));
  barrier_.wait();
  long bytes = m_.kv_heads * kv_head_bytes(m_, b_.coded);
  Share share(b_.rows, thread, threads);
  for (long r = share.from; r < share.to; r++) {
    const float* rope = b_.rope[l.rope] + b_.positions[r] * m_.head_dim;
    char *keys = static_cast<char*>(b_.keys[index]), *values = static_cast<char*>(b_.values[index]);
    k_.rope_and_write_kv(m_, l, rope, qkv_.at(r), keys + b_.slots[r] * bytes, values + b_.slots[r] * bytes, b_.coded);
  }
  barrier_.wait();
  attention(index, thread, threads);
  barrier_.wait();
  add_product(l.out, attended_, l.attention_after, 4 * index + 1, thread, threads);
  normalise(l.mlp_norm, x_, normed_, thread, threads);
  barrier_.wait();
  if (l.experts) return experts(l, thread, threads);
  multiply(l.gate_up, normed_, b_.rows, GATED, hidden_, thread, threads, 0, adapt(4 * index + 2, normed_, thread, threads));
  barrier_.wait();
  add_product(l.down, hidden_, l.mlp_after, 4 * index + 3, thread, threads);
}

void Forward::attention(long index, int thread, int threads) {
  const pl_layer& l = m_.layer[index];
  Attention a{&m_,     b_.keys[index], b_.values[index], b_.coded != 0, b_.block_size, l.window, qkv_.at(0),
              qkv_.ld, attended_.at(0), attended_.ld,    row_.data(),   scratch_.at(thread)};
  for (long begin = 0; begin < blocks_; begin += together_) {
    long end = std::min(begin + together_, blocks_), round = begin / together_;
    PartialResults partial{divided_ ? partial_.at(b_.rows) : nullptr, partial_.at(0), b_.rows, begin, end};
    AttentionItems items = divisions_[of_layer_[index]].of(round, thread, threads);
    KvPrefetcher prefetcher(a, items);
    for (AttentionItem item : items) {
      item.partial = divided_ ? &partial : nullptr;
      k_.attend(a, item, prefetcher);
    }
    if (!divided_) return;
    barrier_.wait();
    Share share(b_.rows, thread, threads);
    for (long r = share.from; r < share.to; r++) k_.merge_partials(a, partial, r);
    if (end < blocks_) barrier_.wait();
  }
}

// x += the product, by the model's scale, or its norm.
void Forward::add_product(const pl_weight& w, const Rows& x, const pl_norm& after, long pair, int thread, int threads) {
  const float* const* added = adapt(pair, x, thread, threads);
  bool at_once = !after.weight && !m_.residual_scale;
  multiply(w, x, b_.rows, at_once ? ADD : STORE, at_once ? x_ : product_, thread, threads, 0, added);
  barrier_.wait();
  if (at_once) return;
  Share share(b_.rows, thread, threads);
  for (long r = share.from; r < share.to; r++) {
    if (after.weight) k_.add_rms_norm(m_, after, x_.at(r), product_.at(r));
    else k_.add_scaled(x_.at(r), product_.at(r), m_.residual_scale, m_.hidden);
  }
}

void Forward::normalise(const pl_norm& norm, const Rows& x, Rows& y, int thread, int threads) {
  Share share(b_.rows, thread, threads);
  for (long r = share.from; r < share.to; r++) k_.rms_norm(m_, norm, x.at(r), y.at(r), m_.hidden);
}

// Rows first .. first + rows.
void Forward::multiply(const pl_weight& w, const Rows& x, long rows, Epilogue epilogue, Rows& y, int thread, int threads,
                       long first, const float* const* added) {
  multiply_coded(w, x, coded(w, x, rows, thread, threads), rows, epilogue, y, thread, threads, first, added);
}

// `codes` are of the row `first` and those behind it.
void Forward::multiply_coded(const pl_weight& w, const Rows& x, const QuantisedRows& codes, long rows, Epilogue epilogue,
                             Rows& y, int thread, int threads, long first, const float* const* added) {
  Gemm p{&w,   m_.dtype, x.at(first), rows, x.ld, epilogue, y.at(first), y.ld, static_cast<int>(m_.activation), 0.0f,
            quantised_, codes, added};
  k_.gemm(p, thread, threads, scratch_.at(thread));
}

// For what adapters add.
void Forward::make_room() {
  long low = 0, width = 0, head = 0;
  for (long r = 0; r < b_.runs; r++) {
    const pl_pair* pair = b_.run[r].pair;
    for (long n = 0; n <= 4 * m_.layers; n++) low = std::max<long>(low, pair[n].a.outputs);
    for (long n = 0; n < 4 * m_.layers; n++) width = std::max<long>(width, pair[n].b.outputs);
    head = std::max<long>(head, pair[4 * m_.layers].b.outputs);
  }
  low_.shape(low ? std::max(b_.rows, b_.logit_rows) : 0, low);
  added_.shape(width ? b_.rows : 0, width, false);
  added_logits_.shape(head ? b_.logit_rows : 0, head, false);
  adapted_.resize(b_.runs ? std::max(b_.rows, b_.logit_rows) : 0);
}

// What adapters add to a product of x, for each row; NULL if nothing. All threads have read what the
// product before this one was given.
const float* const* Forward::adapt(long pair, const Rows& x, int thread, int threads) {
  bool head = pair == 4 * m_.layers, any = false;
  for (long r = 0; r < b_.runs; r++) any |= b_.run[r].pair[pair].a.data != nullptr;
  if (!any) return nullptr;
  Rows& y = head ? added_logits_ : added_;
  if (thread == 0) std::fill(adapted_.begin(), adapted_.end(), nullptr);
  for (bool second : {false, true}) {
    for (long r = 0; r < b_.runs; r++) {
      const pl_run& run = b_.run[r];
      const pl_pair& of = run.pair[pair];
      long first = head ? run.first_logits : run.first, rows = head ? run.logit_rows : run.rows;
      if (!of.a.data) continue;
      if (second) multiply(of.b, low_, rows, STORE, y, thread, threads, first);
      else multiply(of.a, x, rows, ROUND, low_, thread, threads, first);
      for (long row = first; thread == 0 && row < first + rows; row++) adapted_[row] = y.at(row);
    }
    barrier_.wait();
  }
  return adapted_.data();
}

// What quantised weights are multiplied with; nothing for others. Each thread codes its share.
QuantisedRows Forward::coded(const pl_weight& w, const Rows& x, long rows, int thread, int threads) {
  if (!w.bits) return {};
  QuantisedRows codes = codes_.of(w);
  Share share(rows, thread, threads);
  for (long r = share.from; r < share.to; r++) quantised_->quantise_row(x.at(r), codes, r);
  barrier_.wait();
  return codes;
}

// The input of a layer, or what the head sees.
void Forward::keep_features(long layer, int thread, int threads) {
  for (long f = 0; f < b_.features; f++) {
    if (b_.feature_layers[f] != layer) continue;
    long bytes = m_.hidden * (m_.dtype == PL_BFLOAT16 ? 2 : 4);
    Share share(b_.rows, thread, threads);
    for (long r = share.from; r < share.to; r++) {
      const float* x = x_.at(r);
      if (layer == m_.layers) k_.rms_norm(m_, m_.final_norm, x, normed_.at(r), m_.hidden), x = normed_.at(r);
      k_.store_row(m_.dtype, x, m_.hidden, static_cast<char*>(b_.feature[f]) + r * bytes);
    }
  }
}

void Forward::logits(int thread, int threads) {
  barrier_.wait();
  Share share(b_.logit_rows, thread, threads);
  long bytes = m_.hidden * (m_.dtype == PL_BFLOAT16 ? 2 : 4);
  for (long r = share.from; r < share.to; r++) {
    const float* x = x_.at(b_.wanted ? b_.wanted[r] : r);
    k_.rms_norm(m_, m_.head_norm.weight ? m_.head_norm : m_.final_norm, x, last_.at(r), m_.hidden);
    if (b_.outputs) k_.store_row(m_.dtype, x, m_.hidden, static_cast<char*>(b_.outputs) + r * bytes);
  }
  barrier_.wait();
  const float* const* added = adapt(4 * m_.layers, last_, thread, threads);
  QuantisedRows codes = coded(m_.head, last_, b_.logit_rows, thread, threads);
  pl_weight head = m_.head;
  if (b_.columns) head.outputs = b_.columns;
  Gemm p{&head, m_.dtype, last_.at(0), b_.logit_rows, last_.ld, LOGITS, b_.logits, head.outputs, 0, m_.logit_cap,
            quantised_, codes, added};
  k_.gemm(p, thread, threads, scratch_.at(thread));
  if (!b_.greedy) return;
  barrier_.wait();
  long line = head.outputs * (m_.dtype == PL_BFLOAT16 ? 2 : 4);
  for (long r = share.from; r < share.to; r++)
    b_.greedy[r] = k_.argmax(m_.dtype, static_cast<const char*>(b_.logits) + r * line, head.outputs);
}
