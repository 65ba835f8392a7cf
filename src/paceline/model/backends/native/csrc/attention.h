// Attention of a row over its own keys, in the order of their positions.
//
//   position   0 ........ 255 | 256 ...... 511 | 512 ... shared | shared ... position
//              block 0          block 1          block 2
//              slots from the sequence's block table            | the row's own path in its tree
//
// A block gives each row and head its largest score m, l = sum of exp(s - m) and a = sum of
// exp(s - m) v; blocks are folded from left to right. Both products of a block, queries by keys and
// exponentials by values, are those of products.h: keys are the outputs of one and the inputs of the
// other, 32 at a time. Borders are positions, so nothing depends on where a chunk ends, which rows
// share the work or how blocks are spread over threads; and no row is multiplied with a value that it
// does not see, not even by zero: another row's infinity is its own.
//
// A cache of codes is read as it is: codes are exact in every product, keys' scales are multiplied
// with their scores, values' scales with their exponentials.
#pragma once
#include "kernels.h"
#include "products.h"
#include "vec.h"
#if defined(PACELINE_AMX)
#include "attention_amx.h"
#endif

namespace {

// A result over some keys: `width` sums, then l, then m.
inline void start(float* result, long width) {
  memset(result, 0, static_cast<size_t>(width + 1) * sizeof(float));
  result[width + 1] = -__builtin_inff();
}

inline float exponential_of(float x) {
  float all[16];
  store(all, exponential(set1(x)));
  return all[0];
}

// left = left and right together, with right's keys behind left's.
inline void merge(float* left, const float* right, long width) {
  float most = left[width + 1] > right[width + 1] ? left[width + 1] : right[width + 1];
  float keep = exponential_of(left[width + 1] - most), gain = exponential_of(right[width + 1] - most);
  for (long i = 0; i < width; i += 16)
    store(left + i, fma(load(right + i), set1(gain), load(left + i) * set1(keep)));
  left[width] = __builtin_fmaf(right[width], gain, left[width] * keep);
  left[width + 1] = most;
}

inline void finish(const Attention& a, const float* result, long row, long head) {
  long d = a.model->head_dim, width = round_up(d, STRIPE);
  float* out = a.out + row * a.ldo + head * d;
  for (long i = 0; i < d; i += 16) {
    V mean = load(result + i) / set1(result[width]);
    store_first(out + i, d - i, a.model->dtype == PL_BFLOAT16 ? as_bf16(mean) : mean);
  }
}

inline long first_seen(const Attention& a, const Row& row) {
  long from = a.window ? row.position - a.window + 1 : 0;
  return from > 0 ? from : 0;
}

void fold(const Attention& a, const float* partial, long row, long step_rows) {
  long width = round_up(a.model->head_dim, STRIPE), heads = a.model->heads;
  float* result = a.scratch;
  const Row& own = a.row[row];
  for (long head = 0; head < heads; head++) {
    start(result, width);
    for (long block = first_seen(a, own) / BLOCK; block <= own.position / BLOCK; block++)
      merge(result, partial + ((block * step_rows + row) * heads + head) * (width + 2), width);
    finish(a, result, row, head);
  }
}

// Lanes of numbers of 16 keys as rows of a panel.
inline void unpack(const float*, V lanes, float* to) { store(to, lanes); }
inline void unpack(const uint16_t*, V lanes, float* to) {
  uint16_t pairs[32];
  store(reinterpret_cast<float*>(pairs), lanes);
  store(to, even_of(pairs));
  store(to + PANEL, odd_of(pairs));
}
inline void unpack(const int8_t*, V lanes, float* to) {
  uint32_t codes[16];
  store(reinterpret_cast<float*>(codes), lanes);
#pragma GCC unroll 4
  for (int k = 0; k < 4; k++)
    for (int i = 0; i < 16; i++)
      to[k * PANEL + i] = static_cast<float>(static_cast<int32_t>(codes[i] << (24 - 8 * k)) >> 24);
}

// One item: its rows' query heads as rows of small products. Number: of the cache; int8_t: codes.
template <class Number>
struct Tile {
  static constexpr bool coded = sizeof(Number) == 1;
  static constexpr long each = 4 / sizeof(Number);  // numbers that are turned as one lane
  const Attention& a;
  const AttentionItem& item;
  const Row* rows;
  const Number *keys, *values;  // of the KV head
  const bool narrow;  // what goes into products is bf16
  long group, heads, d, width, entry, stride, step;  // entry: of a slot; stride: from slot to slot; step: of a result
  float *q, *scores, *results, *states, *panel;
  int32_t *slots, *own_slots;
#if defined(PACELINE_AMX)
  TiledAttention tiled;
#endif

  Tile(const Attention& a, const AttentionItem& item)
      : a(a), item(item), rows(a.row + item.first), narrow(a.model->dtype == PL_BFLOAT16) {
    const pl_model& m = *a.model;
    group = m.heads / m.kv_heads;
    heads = item.rows * group;
    d = m.head_dim;
    width = round_up(d, STRIPE);
    entry = entry_bytes(m, coded) / static_cast<long>(sizeof(Number));
    stride = m.kv_heads * entry;
    step = width + 16;  // l and m behind the sums
    keys = static_cast<const Number*>(a.keys) + item.kv_head * entry;
    values = static_cast<const Number*>(a.values) + item.kv_head * entry;
    q = a.scratch;
    scores = q + heads * width;
    results = scores + heads * BLOCK;
    states = results + heads * step;
    panel = states + heads * step;
    slots = reinterpret_cast<int32_t*>(panel + width * PANEL);
    own_slots = slots + BLOCK;
#if defined(PACELINE_AMX)
    tiled.memory = reinterpret_cast<uint16_t*>(own_slots + BLOCK);
#endif
  }

  int32_t slot_of(const Row& row, long position) const {
    if (position >= row.shared) return row.own[position - row.shared];
    return static_cast<int32_t>(row.table[position / a.block_size] * a.block_size + position % a.block_size);
  }

  // A key's next 64 bytes from number `i` on as lanes of `each` numbers; zeros behind its numbers.
  V lanes_of(const Number* key, long i) const {
    long bytes = (d - i) * static_cast<long>(sizeof(Number));
    if (bytes >= 64) return load(reinterpret_cast<const float*>(key + i));
    float lanes[16] = {};
    if (bytes > 0) memcpy(lanes, key + i, static_cast<size_t>(bytes));
    return load(lanes);
  }

  // Keys at slots[0 .. count) as a panel of 32 outputs; zeros for the others.
  void lay_out(const int32_t* at, long count) {
    for (long half = 0; half < PANEL; half += 16)
      for (long i = 0; i < width; i += 16 * each) {
        V t[16];
        for (long j = 0; j < 16; j++) t[j] = half + j < count ? lanes_of(keys + at[half + j] * stride, i) : zero();
        if (half < count) transpose(t);
        for (long j = 0; j < 16 && i + each * j < width; j++) unpack(keys, t[j], panel + (i + each * j) * PANEL + half);
      }
  }

  // Keys or values of one head lie far apart: the processor does not foresee them.
  void fetch(const Number* from, const int32_t* at, long count) {
    constexpr long line = 64 / sizeof(Number);
    for (long j = 0; j < count; j++)
      for (long i = 0; i < entry; i += line) __builtin_prefetch(from + at[j] * stride + i);
  }

  // Multiply 32 scores or exponentials of each head by the scales of keys or values at slots[low .. high).
  void scale(float* x, long count, const Number* from, const int32_t* at, long low, long high, bool round) const {
    float scales[PANEL] = {};
    for (long j = low > 0 ? low : 0; j < high && j < PANEL; j++) memcpy(scales + j, from + at[j] * stride + d, 4);
    for (long h = 0; h < count; h++, x += BLOCK)
      for (long half = 0; half < PANEL; half += 16) {
        V scaled = load(x + half) * load(scales + half);
        store(x + half, round ? as_bf16(scaled) : scaled);
      }
  }

  // Scores of the query heads of rows first .. last for 32 keys at slots, which begin at `at` in the block.
  void score(long first, long last, long at, const int32_t* from, long keys_there) {
    float* to = scores + first * group * BLOCK + at;
    long count = (last - first) * group;
    for (long h = 0; h < count; h++) memset(to + h * BLOCK, 0, PANEL * sizeof(float));
    bool done = false;
#if defined(PACELINE_AMX)
    done = count >= TILED_FROM && tiled.score(*this, first * group, count, from, keys_there, to);
#endif
    if (!done) {
      lay_out(from, keys_there);
      panel_product(panel, q + first * group * width, width, count, width, to, BLOCK);
    }
    if (coded) scale(to, count, keys, from, 0, keys_there, false);
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
        score(first, last, at, slots + at, end - at);
      }
      for (long r = first; r < last; r++) {  // paths in the tree, each with keys of its own
        long to = to_of(rows[r], begin);
        if (to <= shared || to <= at || at + PANEL <= shared) continue;
        long count = to - at < PANEL ? to - at : PANEL;
        for (long j = 0; j < count; j++) own_slots[j] = slot_of(rows[r], begin + at + j);
        score(r, r + 1, at, own_slots, count);
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
      if (narrow && !coded) e = as_bf16(e);
      store(s + j, e);
      total = total + e;
    }
    result[width] = sum(total);
    result[width + 1] = most;
    memset(s, 0, static_cast<size_t>(low) * sizeof(float));
    memset(s + high, 0, static_cast<size_t>(BLOCK - high) * sizeof(float));
  }

  // Values of 32 keys as a panel of 32 inputs and the outputs from `i` on: those at slots
  // low .. high; zeros for the others.
  void lay_out_values(const int32_t* at, long low, long high, long i) {
    for (long j = 0; j < STRIPE; j++)
      for (long half = 0; half < PANEL; half += 16) {
        bool there = low <= j && j < high && i + half < d;
        V value = there ? load_first(values + at[j] * stride + i + half, d - i - half) : zero();
        store(panel + j * PANEL + half, value);
      }
  }

  void scale_values(long first, long last, long at, const int32_t* from, long low, long high) {
    if (coded) scale(scores + first * group * BLOCK + at, (last - first) * group, values, from, low, high, narrow);
  }

  // The query heads of rows first .. last by 32 values, which begin at `at` in the block.
  void add(long first, long last, long at, const int32_t* from, long low, long high) {
    for (long i = 0; i < width; i += PANEL) {
      lay_out_values(from, low, high, i);
      all_rows<Floats>(panel, scores + first * group * BLOCK + at, BLOCK, (last - first) * group,
                       results + first * group * step + i, step);
    }
  }

  // Stripes begin .. end of the block, which the rows first .. last see from end to end.
  struct Run {
    long first = 0, last = 0, begin = 0, end = 0;
  };

  void add(Run& run) {
    bool done = run.begin == run.end;
    for (long at = run.begin; at < run.end; at += STRIPE) scale_values(run.first, run.last, at, slots + at, 0, STRIPE);
#if defined(PACELINE_AMX)
    done = done || ((run.last - run.first) * group >= TILED_FROM && tiled.add(*this, run));
#endif
    for (long at = run.begin; at < run.end && !done; at += STRIPE)
      add(run.first, run.last, at, slots + at, 0, STRIPE);
    run.begin = run.end = 0;
  }

  // What one row sees of a stripe.
  void add_alone(long r, long begin, long at, const int32_t* from) {
    long low = from_of(rows[r], begin) - at, high = to_of(rows[r], begin) - at;
    if (low >= STRIPE || high <= 0) return;
    scale_values(r, r + 1, at, from, low, high);
    add(r, r + 1, at, from, low, high);
  }

  void all_values(long begin) {
    long shared = rows[0].shared - begin, before = 0;  // rows before those that have paths
    while (before < item.rows && rows[before].position < rows[0].shared) before++;
    for (long h = 0; h < heads; h++) memset(results + h * step, 0, static_cast<size_t>(width) * sizeof(float));
    Run run;
    for (long at = 0; at < BLOCK; at += STRIPE) {
      long upto = at + STRIPE <= shared ? item.rows : before, first = item.rows, last = 0;
      bool whole = true;
      for (long r = 0; r < upto; r++) {
        long from = from_of(rows[r], begin), to = to_of(rows[r], begin);
        if (to <= at || from >= at + STRIPE) continue;
        first = r < first ? r : first;
        last = r + 1;
      }
      for (long r = first; r < last; r++)
        whole = whole && from_of(rows[r], begin) <= at && to_of(rows[r], begin) >= at + STRIPE;
      bool goes_on = whole && run.first == first && run.last == last && run.end == at;
      if (!goes_on) add(run);
      if (first < last && whole) {
        if (!goes_on) run = {first, last, at, at};
        run.end = at + STRIPE;
      }
      for (long r = first; r < last && !whole; r++) add_alone(r, begin, at, slots + at);
      for (long r = before; r < item.rows && at + STRIPE > shared; r++) {
        long to = to_of(rows[r], begin) - at;
        for (long j = 0; j < STRIPE && j < to; j++) own_slots[j] = slot_of(rows[r], begin + at + j);
        add_alone(r, begin, at, own_slots);
      }
    }
    add(run);
  }

  void run() {
    for (long h = 0; h < heads; h++) {
      const float* from = a.q + (item.first + h / group) * a.ldq + (item.kv_head * group + h % group) * d;
      memcpy(q + h * width, from, static_cast<size_t>(d) * sizeof(float));
      memset(q + h * width + d, 0, static_cast<size_t>(width - d) * sizeof(float));
      start(states + h * step, width);
    }
#if defined(PACELINE_AMX)
    tiled.begin(*this);
#endif
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
    if (!item.partial) return merge(states + h * step, result, width);
    float* to = item.partial + ((block * item.step_rows + row) * a.model->heads + head) * (width + 2);
    memcpy(to, result, static_cast<size_t>(width + 2) * sizeof(float));
  }
};

void attend(const Attention& a, const AttentionItem& item) {
  if (a.coded)
    Tile<int8_t>(a, item).run();
  else if (a.model->dtype == PL_BFLOAT16)
    Tile<uint16_t>(a, item).run();
  else
    Tile<float>(a, item).run();
}

}  // namespace
