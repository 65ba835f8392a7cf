// Attention of a row over its own keys, in the order of their positions.
//
//   position   0 ........ 255 | 256 ...... 511 | 512 ... shared | shared ... position
//              block 0          block 1          block 2
//              slots from the sequence's block table            | the row's own path in its tree
//
// A block gives each row and head its largest score m, l = sum of exp(s - m) and a = sum of
// exp(s - m) v; blocks are folded from left to right. Their borders are positions, so nothing
// depends on where a chunk ends, which rows share the work or how blocks are spread over threads.
#pragma once
#include "kernels.h"
#include "products.h"
#include "vec.h"

namespace {

// A result over some keys: d sums, then l, then m.
inline void start(float* result, long d) {
  memset(result, 0, static_cast<size_t>(d + 1) * sizeof(float));
  result[d + 1] = -__builtin_inff();
}

inline float exponential_of(float x) {
  float all[16];
  store(all, exponential(set1(x)));
  return all[0];
}

// left = left and right together, with right's keys behind left's.
inline void merge(float* left, const float* right, long d) {
  float most = left[d + 1] > right[d + 1] ? left[d + 1] : right[d + 1];
  float keep = exponential_of(left[d + 1] - most), gain = exponential_of(right[d + 1] - most);
  for (long i = 0; i < d; i += 16) {
    V sums = load_first(left + i, d - i) * set1(keep);
    store_first(left + i, d - i, fma(load_first(right + i, d - i), set1(gain), sums));
  }
  left[d] = __builtin_fmaf(right[d], gain, left[d] * keep);
  left[d + 1] = most;
}

inline void finish(const Attention& a, const float* result, long row, long head) {
  long d = a.model->head_dim;
  float* out = a.out + row * a.ldo + head * d;
  for (long i = 0; i < d; i += 16) {
    V mean = load_first(result + i, d - i) / set1(result[d]);
    store_first(out + i, d - i, a.model->dtype == PL_BFLOAT16 ? as_bf16(mean) : mean);
  }
}

inline long first_seen(const Attention& a, const Row& row) {
  long from = a.window ? row.position - a.window + 1 : 0;
  return from > 0 ? from : 0;
}

void fold(const Attention& a, const float* partial, long row, long step_rows) {
  long d = a.model->head_dim, heads = a.model->heads;
  float* result = a.scratch;
  const Row& own = a.row[row];
  for (long head = 0; head < heads; head++) {
    start(result, d);
    for (long block = first_seen(a, own) / BLOCK; block <= own.position / BLOCK; block++)
      merge(result, partial + ((block * step_rows + row) * heads + head) * (d + 2), d);
    finish(a, result, row, head);
  }
}

// One item: its rows' query heads as rows of small products.
template <class Number>
struct Tile {
  const Attention& a;
  const AttentionItem& item;
  const Row* rows;
  const Number *keys, *values;  // of the KV head
  long group, heads, d, width, stride, step;  // stride: from slot to slot; step: of a result
  float *q, *scores, *results, *states, *panel;
  int32_t *slots, *own_slots;

  Tile(const Attention& a, const AttentionItem& item) : a(a), item(item), rows(a.row + item.first) {
    const pl_model& m = *a.model;
    group = m.heads / m.kv_heads;
    heads = item.rows * group;
    d = m.head_dim;
    width = round_up(d, STRIPE);
    stride = m.kv_heads * d;
    step = round_up(d, 16) + 2;
    keys = static_cast<const Number*>(a.keys) + item.kv_head * d;
    values = static_cast<const Number*>(a.values) + item.kv_head * d;
    q = a.scratch;
    scores = q + heads * width;
    results = scores + heads * BLOCK;
    states = results + heads * step;
    panel = states + heads * step;
    slots = reinterpret_cast<int32_t*>(panel + width * PANEL);
    own_slots = slots + BLOCK;
  }

  int32_t slot_of(const Row& row, long position) const {
    if (position >= row.shared) return row.own[position - row.shared];
    return static_cast<int32_t>(row.table[position / a.block_size] * a.block_size + position % a.block_size);
  }

  // Keys at slots[0 .. count) as a panel of 32 outputs; zeros for the others.
  void lay_out(const int32_t* at, long count) {
    for (long half = 0; half < PANEL; half += 16)
      for (long i = 0; i < width; i += 16) {
        V t[16];
        for (long j = 0; j < 16; j++) {
          bool there = half + j < count && i < d;
          t[j] = there ? load_first(keys + at[half + j] * stride + i, d - i) : zero();
        }
        if (half < count && i < d) transpose(t);
        for (long j = 0; j < 16; j++) store(panel + (i + j) * PANEL + half, t[j]);
      }
  }

  // Keys or values of one head lie far apart: the processor does not foresee them.
  void fetch(const Number* from, const int32_t* at, long count) {
    constexpr long line = 64 / sizeof(Number);
    for (long j = 0; j < count; j++)
      for (long i = 0; i < d; i += line) __builtin_prefetch(from + at[j] * stride + i);
  }

  // Scores of the query heads of rows first .. last for 32 keys, which begin at `at` in the block.
  void score(long first, long last, long at) {
    float* to = scores + first * group * BLOCK + at;
    long count = (last - first) * group;
    for (long h = 0; h < count; h++) memset(to + h * BLOCK, 0, PANEL * sizeof(float));
    panel_product(panel, q + first * group * width, width, count, width, to, BLOCK);
  }

  // What a row sees of the block that begins at `begin`, as offsets; nothing: from >= to.
  long from_of(const Row& row, long begin) const {
    long from = first_seen(a, row) - begin;
    return from > 0 ? from : 0;
  }
  long to_of(const Row& row, long begin) const {
    long to = row.position + 1 - begin;
    return to < BLOCK ? to : BLOCK;
  }

  void all_scores(long begin) {
    long shared = rows[0].shared - begin;  // the same for all rows of a sequence
    long known = 0;
    for (long r = 0; r < item.rows; r++) known = to_of(rows[r], begin) > known ? to_of(rows[r], begin) : known;
    known = known < shared ? known : shared;
    for (long j = 0; j < known; j++) slots[j] = slot_of(rows[0], begin + j);
    for (long at = 0; at < BLOCK; at += PANEL) {
      long first = item.rows, last = 0, end = 0;
      for (long r = 0; r < item.rows; r++) {
        if (to_of(rows[r], begin) <= at || from_of(rows[r], begin) >= at + PANEL) continue;
        first = r < first ? r : first;
        last = r + 1;
        end = to_of(rows[r], begin) > end ? to_of(rows[r], begin) : end;
      }
      if (first >= last) continue;
      if (at < shared) {
        end = end < shared ? end : shared;
        fetch(values, slots + at, (end < at + PANEL ? end : at + PANEL) - at);
        long next = at + PANEL;
        if (next < known) fetch(keys, slots + next, known < next + PANEL ? known - next : PANEL);
        lay_out(slots + at, end - at);
        score(first, last, at);
      }
      for (long r = first; r < last; r++) {  // paths in the tree, each with keys of its own
        long to = to_of(rows[r], begin);
        if (to <= shared || to <= at || at + PANEL <= shared) continue;
        long count = to - at < PANEL ? to - at : PANEL;
        for (long j = 0; j < count; j++) own_slots[j] = slot_of(rows[r], begin + at + j);
        lay_out(own_slots, count);
        score(r, r + 1, at);
      }
    }
  }

  // Scores to exp(s - m), and l and m of the block.
  void weigh(const Row& row, float* s, float* result, long begin) {
    long from = from_of(row, begin), to = to_of(row, begin);
    long low = from / 16 * 16, high = round_up(to, 16);
    if (a.model->attention_cap > 0)
      for (long j = low; j < high; j += 16) store(s + j, capped(load(s + j), a.model->attention_cap));
    for (long j = low; j < from; j++) s[j] = -__builtin_inff();
    for (long j = to; j < high; j++) s[j] = -__builtin_inff();
    V best = load(s + low);
    for (long j = low + 16; j < high; j += 16) best = larger(load(s + j), best);
    float most = largest(best);
    V total = zero();
    for (long j = low; j < high; j += 16) {
      V e = exponential(load(s + j) - set1(most));
      store(s + j, e);
      total = total + e;
    }
    result[d] = sum(total);
    result[d + 1] = most;
  }

  // sums [R, 16 W] += weights times the values at slots from .. to, key after key.
  template <int R, int W>
  void add(const int32_t* at, long from, long to, const float* weight, float* sums, long i) {
    V t[R][W];
    for (int r = 0; r < R; r++)
      for (int w = 0; w < W; w++) t[r][w] = load(sums + r * step + i + 16 * w);
    for (long j = from; j < to; j++) {
      const Number* value = values + at[j] * stride + i;
      V x[W];
      for (int w = 0; w < W; w++) x[w] = load(value + 16 * w);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        V p = set1(weight[r * BLOCK + j]);
        for (int w = 0; w < W; w++) t[r][w] = fma(x[w], p, t[r][w]);
      }
    }
    for (int r = 0; r < R; r++)
      for (int w = 0; w < W; w++) store(sums + r * step + i + 16 * w, t[r][w]);
  }

  void add_last(const int32_t* at, long from, long to, const float* weight, float* sums, long i) {
    V t = load_first(sums + i, d - i);
    for (long j = from; j < to; j++) t = fma(load_first(values + at[j] * stride + i, d - i), set1(weight[j]), t);
    store_first(sums + i, d - i, t);
  }

  template <int R>
  void add_rows(const int32_t* at, long from, long to, long head) {
    if (from >= to) return;
    const float* weight = scores + head * BLOCK;
    float* sums = results + head * step;
    long i = 0;
    for (; i + 16 * ATTEND_WIDE <= d; i += 16 * ATTEND_WIDE) add<R, ATTEND_WIDE>(at, from, to, weight, sums, i);
    for (; i + 16 <= d; i += 16) add<R, 1>(at, from, to, weight, sums, i);
    if (i < d)
      for (long r = 0; r < R; r++) add_last(at, from, to, weight + r * BLOCK, sums + r * step, i);
  }

  template <int R>
  void add_tile(const int32_t* at, long from, long to, long head, long count) {
    if (count == R) return add_rows<R>(at, from, to, head);
    if constexpr (R > 1) add_tile<R - 1>(at, from, to, head, count);
  }

  // The same for `count` query heads, which may see different keys: what all of them see is summed
  // together, what lies before and behind it one by one.
  void add_common(long begin, long head, long count, long shared) {
    long from = 0, to = BLOCK;
    for (long h = head; h < head + count; h++) {
      long f = from_of(rows[h / group], begin), t = to_of(rows[h / group], begin);
      from = f > from ? f : from;
      to = t < to ? t : to;
    }
    to = to < shared ? to : shared;
    bool together = from < to;
    for (long h = head; h < head + count; h++) {
      long f = from_of(rows[h / group], begin), t = to_of(rows[h / group], begin);
      t = t < shared ? t : shared;
      add_rows<1>(slots, f, together ? from : t, h);
    }
    if (!together) return;
    add_tile<ATTEND_ROWS>(slots, from, to, head, count);
    for (long h = head; h < head + count; h++) {
      long t = to_of(rows[h / group], begin);
      add_rows<1>(slots, to, t < shared ? t : shared, h);
    }
  }

  void all_values(long begin) {
    long shared = rows[0].shared - begin;
    for (long h = 0; h < heads; h++) memset(results + h * step, 0, static_cast<size_t>(d) * sizeof(float));
    for (long h = 0; h < heads; h += ATTEND_ROWS) {
      long count = heads - h < ATTEND_ROWS ? heads - h : ATTEND_ROWS;
      add_common(begin, h, count, shared);
    }
    for (long r = 0; r < item.rows; r++) {
      long from = from_of(rows[r], begin), to = to_of(rows[r], begin);
      from = from > shared ? from : shared;
      if (from >= to) continue;
      for (long j = from; j < to; j++) own_slots[j] = slot_of(rows[r], begin + j);
      for (long h = 0; h < group; h += ATTEND_ROWS)
        add_tile<ATTEND_ROWS>(own_slots, from, to, r * group + h, group - h < ATTEND_ROWS ? group - h : ATTEND_ROWS);
    }
  }

  void run() {
    for (long h = 0; h < heads; h++) {
      const float* from = a.q + (item.first + h / group) * a.ldq + (item.kv_head * group + h % group) * d;
      memcpy(q + h * width, from, static_cast<size_t>(d) * sizeof(float));
      memset(q + h * width + d, 0, static_cast<size_t>(width - d) * sizeof(float));
      start(states + h * step, d);
    }
    for (long block = item.from; block < item.to; block++) {
      long begin = block * BLOCK;
      all_scores(begin);
      for (long h = 0; h < heads; h++) {
        const Row& row = rows[h / group];
        if (from_of(row, begin) < to_of(row, begin)) weigh(row, scores + h * BLOCK, results + h * step, begin);
      }
      all_values(begin);
      for (long h = 0; h < heads; h++) keep(h, block);
    }
    for (long h = 0; h < heads && !item.partial; h++)
      finish(a, states + h * step, item.first + h / group, item.kv_head * group + h % group);
  }

  void keep(long h, long block) {
    long row = item.first + h / group, head = item.kv_head * group + h % group;
    if (from_of(rows[h / group], block * BLOCK) >= to_of(rows[h / group], block * BLOCK)) return;
    const float* result = results + h * step;
    if (!item.partial) return merge(states + h * step, result, d);
    float* to = item.partial + ((block * item.step_rows + row) * a.model->heads + head) * (d + 2);
    memcpy(to, result, static_cast<size_t>(d + 2) * sizeof(float));
  }
};

void attend(const Attention& a, const AttentionItem& item) {
  if (a.model->dtype == PL_BFLOAT16)
    Tile<uint16_t>(a, item).run();
  else
    Tile<float>(a, item).run();
}

}  // namespace
