// Attention's share of a forward: where each row's keys are, and which thread does what.
#include <algorithm>
#include <stdexcept>

#include "forward.h"

namespace {

constexpr long ITEMS_PER_THREAD = 6;
constexpr long FEW_ROWS = 64;  // up to so many, reading keys and values takes longer than multiplying them
constexpr long PREFETCH_BYTES = 32 << 10;  // of keys and values that a thread prefetches
#if !defined(PACELINE_PARTIAL)  // tests set less, so that rounds have few blocks
#define PACELINE_PARTIAL (8 << 20)
#endif
constexpr long PARTIAL_FLOATS = PACELINE_PARTIAL;  // partial results, at most

bool is_chain(const int32_t* parents, long nodes) {
  for (long i = 0; i < nodes; i++)
    if (parents[i] != i - 1) return false;
  return true;
}

}  // namespace

KvPrefetcher::KvPrefetcher(const Attention& a, AttentionItems items)
    : a_(a), head_bytes_(kv_head_bytes(*a.model, a.int8_kv)), item_(items.begin()), end_(items.end()) {
  skip_empty_items();
  advance(PREFETCH_BYTES / (2 * head_bytes_));
}

void KvPrefetcher::skip_empty_items() {
  while (item_ < end_ && item_->table_begin >= item_->table_end) item_++;
  if (item_ < end_) position_ = item_->table_begin, head_ = item_->kv_head;
}

void KvPrefetcher::advance(long count) {
  const long slot_bytes = a_.model->kv_heads * head_bytes_, bytes = head_bytes_, size = a_.block_size;
  while (item_ < end_ && count > 0) {
    long offset = position_ % size, slot = a_.rows[item_->first_row].block_table[position_ / size] * size + offset;
    long slots = std::min({count, size - offset, item_->table_end - position_});  // side by side in the block
    const char* key = static_cast<const char*>(a_.keys) + slot * slot_bytes + head_ * bytes;
    const char* value = static_cast<const char*>(a_.values) + slot * slot_bytes + head_ * bytes;
    for (long n = 0; n < slots; n++, key += slot_bytes, value += slot_bytes)
      for (long i = 0; i < bytes; i += 64) __builtin_prefetch(key + i, 0, 2), __builtin_prefetch(value + i, 0, 2);
    count -= slots, position_ += slots;
    if (position_ < item_->table_end) continue;
    position_ = item_->table_begin;
    if (++head_ == item_->kv_head + item_->kv_heads) item_++, skip_empty_items();
  }
}

void Forward::locate_keys() {
  for (long r = 0; r < b_.rows; r++)
    if (b_.ids[r] < 0 || b_.ids[r] >= m_.embedding_rows) throw std::out_of_range("token");
  attention_rows_.resize(b_.rows);
  tree_slots_.clear();
  tiles_.clear();
  key_blocks_ = 1;
  long most_slots = 0;
  for (long s = 0; s < b_.spans; s++) most_slots += static_cast<long>(b_.span[s].nodes) * b_.span[s].nodes;
  tree_slots_.reserve(most_slots);  // rows point into it
  for (long s = 0; s < b_.spans; s++) locate_keys(b_.span[s]);
}

// Where the keys of a span's rows are. Nodes of a chain lie in the cache in the order of their positions, as the
// context does. A row of another tree has the slots of its ancestors listed, from the root down.
void Forward::locate_keys(const pl_span& span) {
  const int32_t *parents = b_.parents + span.parents_start, *table = b_.tables + span.table_start;
  long tree = span.context + span.pending, rows = span.pending + span.nodes - span.first_new;
  bool chain = is_chain(parents, span.nodes);
  for (long r = 0; r < rows; r++) {
    AttentionRow& row = attention_rows_[span.start + r];
    row = {b_.positions[span.start + r], static_cast<int32_t>(chain ? tree + span.nodes : tree), nullptr, table, span.rope};
    if (row.position < 0 || row.position >= tree + span.nodes) throw std::out_of_range("position");
    if (m_.block == 2 && r >= span.pending) row.position = static_cast<int32_t>(tree + span.nodes - 1);  // the last that it sees
    key_blocks_ = std::max(key_blocks_, row.position / KEY_BLOCK + 1);
    if (chain || r < span.pending) {
      if (row.position >= row.table_end) throw std::out_of_range("position");  // it has no list to be found in
      continue;
    }
    size_t begin = tree_slots_.size();
    for (long node = r - span.pending + span.first_new; node >= 0; node = parents[node]) {
      long index = tree + node;
      tree_slots_.push_back(static_cast<int32_t>(table[index / b_.block_size] * b_.block_size + index % b_.block_size));
    }
    std::reverse(tree_slots_.begin() + static_cast<long>(begin), tree_slots_.end());
    row.tree_slots = tree_slots_.data() + begin;
    if (row.position - tree >= static_cast<long>(tree_slots_.size() - begin)) throw std::out_of_range("position");
  }
  long tile = std::max<long>(1, ATTENTION_HEADS / (m_.heads / m_.kv_heads));
  for (long r = 0; r < rows; r += tile) tiles_.push_back({span.start + r, span.start + std::min(r + tile, rows)});
}

// Divides attention into items. Heads lie side by side in the cache, and memory is fastest from end to end, so one
// thread does all heads of some blocks, unless there are too few blocks.
void Forward::plan_attention(long threads) {
  long tile_blocks = static_cast<long>(tiles_.size()) * key_blocks_, enough = ITEMS_PER_THREAD * threads;
  long item_heads = tile_blocks < enough ? 1 : m_.kv_heads, result_size = partial_result_size(m_);
  long item_blocks = b_.rows > FEW_ROWS ? tile_blocks * m_.kv_heads / item_heads / enough : 1;
  item_blocks = std::max<long>(1, item_blocks);
  // Partial results of long contexts with many rows need too much memory: a round takes as many blocks as fit.
  bool one_round = item_blocks >= key_blocks_;
  long fitting = PARTIAL_FLOATS / (b_.rows * result_size) - 1;
  round_blocks_ = one_round ? key_blocks_ : std::max<long>(1, std::min(key_blocks_, fitting));
  item_blocks = std::max<long>(1, item_blocks * round_blocks_ / key_blocks_);
  has_partials_ = item_blocks < key_blocks_;
  if (has_partials_) partial_results_.resize((round_blocks_ + 1) * b_.rows, result_size, false);
  for (AttentionPlan& plan : plans_) {
    plan.parts = threads;
    plan.items.clear();
    plan.borders.clear();
    for (long first = 0; first < key_blocks_; first += round_blocks_)
      plan_round(plan, first, std::min(first + round_blocks_, key_blocks_), item_blocks, item_heads);
  }
}

// Adds the items of a round, and the borders between parts of about the same cost.
void Forward::plan_round(AttentionPlan& plan, long first_block, long end_block, long item_blocks, long item_heads) {
  std::vector<long> costs;
  long total = 0;
  for (const RowRange& tile : tiles_)
    for (long block = first_block; block < end_block; block += item_blocks)
      for (long head = 0; head < m_.kv_heads; head += item_heads) {
        long end = std::min(block + item_blocks, end_block);
        AttentionItem item{tile.begin, tile.end - tile.begin, head, item_heads, block, end, 0, 0, nullptr};
        long cost = set_positions_read(plan.window, item);
        if (cost > 0) plan.items.push_back(item), costs.push_back(cost), total += cost;
      }
  long before = 0, part = 0;
  for (size_t i = 0, first = plan.items.size() - costs.size(); i < costs.size(); before += costs[i++])
    for (; part * total <= (before + costs[i] / 2) * plan.parts; part++) plan.borders.push_back(first + i);
  for (; part <= plan.parts; part++) plan.borders.push_back(plan.items.size());
}

// Sets which positions of the block table an item reads. Returns about its cost, not above 0 if its rows see none of
// its blocks.
long Forward::set_positions_read(long window, AttentionItem& item) const {
  const AttentionRow* rows = attention_rows_.data() + item.first_row;
  long lowest = rows->position, highest = lowest;
  for (long r = 0; r < item.rows; r++) {
    lowest = std::min<long>(lowest, rows[r].position);
    highest = std::max<long>(highest, rows[r].position);
  }
  item.table_begin = std::max(item.first_block * KEY_BLOCK, window ? lowest - window + 1 : 0);
  long end = std::min(item.end_block * KEY_BLOCK, highest + 1);
  item.table_end = std::min<long>(end, rows->table_end);
  return (end - item.table_begin) * item.kv_heads * (4 + item.rows);
}

void Forward::attend(const Worker& worker, long index) {
  const pl_layer& l = m_.layer[index];
  Attention a{&m_, b_.keys[index], b_.values[index], b_.int8_cache != 0, b_.block_size, l.window, l.sinks, qkv_.row(0), qkv_.stride,
              attended_.row(0), attended_.stride, attention_rows_.data(), scratch_.row(worker.index)};
  for (long first = 0; first < key_blocks_; first += round_blocks_) {
    long end = std::min(first + round_blocks_, key_blocks_);
    PartialResults partial{has_partials_ ? partial_results_.row(b_.rows) : nullptr, partial_results_.row(0), b_.rows, first, end};
    AttentionItems items = plans_[plan_of_layer_[index]].items_of(first / round_blocks_, worker);
    KvPrefetcher prefetcher(a, items);
    for (AttentionItem item : items) {
      item.partial = has_partials_ ? &partial : nullptr;
      k_.attend(a, item, prefetcher);
    }
    if (!has_partials_) return;
    barrier_.wait();
    RowRange rows = worker.share(b_.rows);
    for (long r = rows.begin; r < rows.end; r++) k_.merge_partials(a, partial, r);
    if (end < key_blocks_) barrier_.wait();
  }
}
