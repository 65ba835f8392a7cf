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
// share the work or how blocks are spread over threads; and no row is multiplied with a number that
// it does not see, unless that is finite: zero times another row's infinity is no zero.
//
// A cache of codes is read as it is: codes are exact in every product, keys' scales are multiplied
// with their scores, values' scales with their exponentials.
#pragma once
#include "entries.h"
#include "kernels.h"
#include "products.h"
#include "vec.h"
#if defined(PACELINE_AMX) || defined(PACELINE_DPBF16)
#include "attention_bf16.h"
#endif

namespace {

// Less than every score, but a number: what saw no key is changed by nothing and changes nothing.
constexpr float LOWEST = -3e38f;

// Some query heads' results over some keys: `width` sums of each, all heads' l, all heads' m.
struct Results {
  float *sums, *l, *m;
  Results(float* memory, long heads, long width)
      : sums(memory), l(memory + heads * width), m(l + round_up(heads, 16)) {}
  float* end(long heads) const { return m + round_up(heads, 16); }
};

inline void start(const Results& r, long heads, long width) {
  memset(r.sums, 0, static_cast<size_t>(heads * width) * sizeof(float));
  for (long h = 0; h < heads; h++) r.l[h] = 0, r.m[h] = LOWEST;
}

// left = left and right together, with right's keys behind left's.
inline void merge(const Results& left, const Results& right, long heads, long width) {
  for (long first = 0; first < heads; first += 16) {
    V a = load(left.m + first), b = load(right.m + first), most = larger(a, b);
    V keep = exponential(a - most), gain = exponential(b - most);
    store(left.m + first, most);
    store(left.l + first, fma(load(right.l + first), gain, load(left.l + first) * keep));
    float keeps[16], gains[16];
    store(keeps, keep);
    store(gains, gain);
    for (long h = 0; h < 16 && first + h < heads; h++)
      for (long i = (first + h) * width; i < (first + h + 1) * width; i += 16)
        store(left.sums + i, fma(load(right.sums + i), set1(gains[h]), load(left.sums + i) * set1(keeps[h])));
  }
}

inline void finish(const Attention& a, const float* sums, float l, long row, long head) {
  long d = a.model->head_dim;
  float* out = a.out + row * a.ldo + head * d;
  for (long i = 0; i < d; i += 16) {
    V mean = load(sums + i) / set1(l);
    store_first(out + i, d - i, a.model->dtype == PL_BFLOAT16 ? as_bf16(mean) : mean);
  }
}

inline long first_seen(const Attention& a, const AttentionRow& row) {
  long from = a.window ? row.position - a.window + 1 : 0;
  return from > 0 ? from : 0;
}

void merge_partials(const Attention& a, const PartialResults& p, long row) {
  long width = round_up(a.model->head_dim, STRIPE), heads = a.model->heads;
  const AttentionRow& own = a.rows[row];
  long first = first_seen(a, own) / KEY_BLOCK, last = own.position / KEY_BLOCK;
  Results all(p.merged + row * partial_result_size(*a.model), heads, width);
  if (p.first_block == 0) start(all, heads, width);
  for (long block = first > p.first_block ? first : p.first_block; block <= last && block < p.end_block; block++)
    merge(all, Results(p.at(block, row, *a.model), heads, width), heads, width);
  if (last < p.first_block || last >= p.end_block) return;
  for (long head = 0; head < heads; head++) finish(a, all.sums + head * width, all.l[head], row, head);
}

// The products without tile instructions: a panel of keys is laid out, used and forgotten; values are read where
// they lie.
template <class Number>
struct Plain {
  typedef float Weight;
  typedef typename KeyPanel<Number>::Kind Keys;
  static constexpr bool tiled = false;
  const Entries<Number>& e;
  float* queries;
  typename Keys::Number* panel;
  Number* copies;         // of values that are not there in full: [width / 16][STRIPE, 16]
  const Number** values;  // see ValuesThere

  Plain(const Entries<Number>& e, float* memory, long heads)
      : e(e), queries(memory), panel(reinterpret_cast<typename Keys::Number*>(memory + heads * e.width)),
        copies(reinterpret_cast<Number*>(memory + (heads + PANEL) * e.width)),
        values(reinterpret_cast<const Number**>(memory + (heads + PANEL + STRIPE) * e.width)) {}

  static void put(float* to, V weight, bool narrow) { store(to, narrow ? as_bf16(weight) : weight); }

  // `count` keys as a panel of 32 outputs, in this place of it if there are several; `due`: see Entries.
  void lay_out_keys(long, long at, long count, long due) {
    e.turn(at, count, due, [&](V lanes, long i, long half) { lay_out(e.keys, lanes, panel + i * PANEL + half * (Keys::STEP / 16)); });
  }

  // Of `count` query heads, by the panel.
  void score(long, long h, long count, float* to) {
    for (long k = 0; k < count; k++) store(to + k * KEY_BLOCK, zero()), store(to + k * KEY_BLOCK + 16, zero());
    panel_product<Keys>(panel, queries + h * e.width, e.width, count, e.width, to, KEY_BLOCK);
  }

  // Values of 32 keys, of which low .. high are there.
  void lay_out_values(long at, long low, long high) {
    const Number *value[STRIPE], **to = values;
    for (long j = 0; j < STRIPE; j++) value[j] = low <= j && j < high ? e.values + e.slots[at + j] * e.stride : e.values;
    for (long i = 0, width = e.width; i < width; i += 16, to += STRIPE) {
      for (long j = 0; j < STRIPE; j++) to[j] = value[j] + i;
      for (long j = 0; j < STRIPE && (low > 0 || high < STRIPE || i + 16 > e.d); j++) {
        bool there = low <= j && j < high;
        if (there && i + 16 <= e.d) continue;
        Number* copy = copies + i * STRIPE + 16 * j;
        memset(copy, 0, 16 * sizeof(Number));
        if (there && i < e.d) memcpy(copy, value[j] + i, static_cast<size_t>(e.d - i) * sizeof(Number));
        to[j] = copy;
      }
    }
  }

  // sums += the weights of `count` query heads times the values of at .. end.
  void add(const float* weights, long count, long at, long, float* sums) {
    for (long i = 0; i < e.width; i += PANEL)
      all_rows<ValuesThere<Number>>(values + i / 16 * STRIPE, weights + at, KEY_BLOCK, count, sums + i, e.width);
  }
};

// One KV head of an item: its rows' query heads as rows of small products.
template <class Number, template <class> class Products>
struct Tile {
  typedef typename Products<Number>::Weight Weight;
  static constexpr bool coded = sizeof(Number) == 1, tiled = Products<Number>::tiled;
  const Attention& a;
  const AttentionItem& item;
  const AttentionRow* rows;
  const bool narrow;  // what goes into products is bf16
  const long group, heads, width, together;  // together: rows whose scores are there at a time,
  long first = 0, last = 0;                  // which are these
  Entries<Number> entries;
  Results all, block;  // over all blocks, over this one
  float* scores;       // [together * group, BLOCK]
  Weight* weights;     // their exponentials
  Products<Number> products;
  // Of the block as offsets: keys that somebody sees and that all see; where paths begin.
  long begin = 0, low = 0, high = 0, all_low = 0, all_high = 0, shared = 0;
  long from[ATTENTION_HEADS], to[ATTENTION_HEADS];  // keys that each row sees; nothing: from >= to

  Tile(const Attention& a, const AttentionItem& item, KvPrefetcher& prefetcher)
      : a(a), item(item), rows(a.rows + item.first_row), narrow(a.model->dtype == PL_BFLOAT16),
        group(a.model->heads / a.model->kv_heads), heads(item.rows * group), width(round_up(a.model->head_dim, STRIPE)),
        together(!tiled ? item.rows : group < PANEL ? PANEL / group : 1), entries(a, prefetcher, item.kv_head),
        all(a.scratch, heads, width), block(all.end(heads), heads, width), scores(block.end(heads)),
        weights(reinterpret_cast<Weight*>(scores + (tiled ? together * group * KEY_BLOCK : 0))),
        products(entries, scores + together * group * KEY_BLOCK * 3 / 2, heads) {}

  // What the rows see of the block. False: nothing.
  bool look() {
    low = all_high = KEY_BLOCK, high = all_low = 0;
    shared = rows[0].table_end - begin;  // the same for all rows of a sequence
    for (long r = 0; r < item.rows; r++) {
      long f = first_seen(a, rows[r]) - begin, t = rows[r].position + 1 - begin;
      from[r] = f = f > 0 ? f : 0;
      to[r] = t = t < KEY_BLOCK ? t : KEY_BLOCK;
      all_low = f > all_low ? f : all_low;
      all_high = t < all_high ? t : all_high;
      if (f >= t) continue;
      low = f < low ? f : low;
      high = t > high ? t : high;
    }
    low = low / STRIPE * STRIPE;
    entries.look_up(rows[0], begin, low, high < shared ? high : shared);
    return low < high;
  }

  // Entries of the row's own path in the block. False: it has none.
  bool look_up_path(long r) {
    if (rows[r].position < rows[r].table_end || from[r] >= to[r] || to[r] <= shared) return false;
    entries.look_up(rows[r], begin, shared > 0 ? shared : 0, to[r]);
    return true;
  }

  long first_of_paths() const { return shared > low ? shared / STRIPE * STRIPE : low; }

  void score() {
    long known = high < shared ? high : shared;
    for (long at = low; at < known; at += PANEL) {
      long count = at + PANEL < known ? PANEL : known - at;
      if (first == 0) products.lay_out_keys(at, at, count, count);
      products.score(at, first * group, (last - first) * group, scores + at);
    }
    for (long r = first; r < last; r++) {  // paths in the tree, each with keys of its own
      if (!look_up_path(r)) continue;
      for (long at = first_of_paths(); at < to[r]; at += PANEL) {
        products.lay_out_keys(KEY_BLOCK, at, to[r] - at < PANEL ? to[r] - at : PANEL, 0);
        products.score(KEY_BLOCK, r * group, group, scores + (r - first) * group * KEY_BLOCK + at);
      }
    }
  }

  // The largest scores of a query head, lane by lane; what it does not see is less than all.
  V best(long h) {
    const long r = h / group, begin = from[r] / 16 * 16, end = round_up(to[r], 16);
    float* s = scores + (h - first * group) * KEY_BLOCK;
    if (from[r] >= to[r]) return set1(LOWEST);
    if (coded) look_up_path(r);
    for (long j = begin; j < end && (coded || a.model->attention_cap > 0); j += 16) {
      V x = coded ? load(s + j) * load(entries.key_scales + j) : load(s + j);
      store(s + j, a.model->attention_cap > 0 ? capped(x, a.model->attention_cap) : x);
    }
    for (long j = begin; j < from[r]; j++) s[j] = -__builtin_inff();
    for (long j = to[r]; j < end; j++) s[j] = -__builtin_inff();
    V most = load(s + begin);
    for (long j = begin + 16; j < end; j += 16) most = larger(load(s + j), most);
    return most;
  }

  // Its scores to exponentials; their sums, lane by lane.
  void weigh(long h, float* sums) {
    const long r = h / group, begin = from[r] / 16 * 16, end = round_up(to[r], 16), known = round_up(high, STRIPE);
    float* s = scores + (h - first * group) * KEY_BLOCK;
    Weight* w = weights + (h - first * group) * KEY_BLOCK;
    V most = set1(block.m[h]), total = zero();
    bool none = from[r] >= to[r];
    memset(w + low, 0, static_cast<size_t>((none ? known : begin) - low) * sizeof(Weight));
    if (none) return store(sums, total);
    if (coded) look_up_path(r);
    for (long j = begin; j < end; j += 16) {
      V x = load(s + j) - most, e = narrow ? coarse_exponential(x) : exponential(x);
      total = total + e;
      products.put(w + j, coded ? e * load(entries.value_scales + j) : e, narrow);
    }
    for (long j = begin; j < from[r]; j++) w[j] = 0;  // a scale of what is not seen may be anything
    memset(w + to[r], 0, static_cast<size_t>(known - to[r]) * sizeof(Weight));
    store(sums, total);
  }

  // m and l of all query heads, 16 at a time.
  void weigh() {
    for (long h = first * group; h < last * group; h += 16) {
      long count = last * group - h < 16 ? last * group - h : 16;
      V each[16];
      for (long k = 0; k < 16; k++) each[k] = k < count ? best(h + k) : zero();
      transpose(each);
      for (long k = 1; k < 16; k++) each[0] = larger(each[k], each[0]);
      store_first(block.m + h, count, each[0]);
      float sums[16 * 16] = {};
      for (long k = 0; k < count; k++) weigh(h + k, sums + 16 * k);
      for (long k = 0; k < 16; k++) each[k] = load(sums + 16 * k);
      transpose(each);
      for (long lanes = 8; lanes; lanes /= 2)  // as a tree
        for (long k = 0; k < lanes; k++) each[k] = each[k] + each[k + lanes];
      store_first(block.l + h, count, each[0]);
    }
  }

  // Rows r .. end by the values of the stripes from .. to.
  void add(long r, long end, long from, long to) {
    if (from < to)
      products.add(weights + (r - first) * group * KEY_BLOCK, (end - r) * group, from, to, block.sums + r * group * width);
  }

  // What one row sees of a stripe.
  void add_alone(long r, long at) {
    long before = from[r] - at, after = to[r] - at;
    if (before >= STRIPE || after <= 0 || from[r] >= to[r]) return;
    look_up_path(r);
    products.lay_out_values(at, before, after);
    add(r, r + 1, at, at + STRIPE);
  }

  void add() {
    memset(block.sums + first * group * width, 0, static_cast<size_t>((last - first) * group * width) * sizeof(float));
    long at = low, added = low, end = high > shared ? first_of_paths() : high;
    for (; at < end; at += STRIPE) {
      long count = end - at < STRIPE ? end - at : STRIPE;
      bool mixes = (all_low <= at && at + count <= all_high) || entries.finite_values(at, count);
      if (mixes && (!tiled || first == 0)) products.lay_out_values(at, 0, count);
      if (mixes && tiled && at + STRIPE < end) continue;  // tiles take many at once
      add(first, last, added, mixes ? at + STRIPE : at);
      added = at + STRIPE;
      for (long r = first; r < last && !mixes; r++) add_alone(r, at);
    }
    for (; at < high; at += STRIPE)
      for (long r = first; r < last; r++) add_alone(r, at);
  }

  void run() {
    for (long h = 0; h < heads; h++)
      entries.lay_out_query(a.q + (item.first_row + h / group) * a.ldq + (item.kv_head * group + h % group) * entries.d,
                            products.queries + h * width);
    start(all, heads, width);
    for (long number = item.first_block; number < item.end_block; number++) {
      begin = number * KEY_BLOCK;
      if (!look()) continue;
      for (first = 0; first < item.rows; first = last) {
        last = first + together < item.rows ? first + together : item.rows;
        score();
        weigh();
        add();
      }
      if (item.partial)
        keep(number);
      else
        merge(all, block, heads, width);
    }
    for (long h = 0; h < heads && !item.partial; h++)
      finish(a, all.sums + h * width, all.l[h], item.first_row + h / group, item.kv_head * group + h % group);
  }

  void keep(long number) {
    for (long r = 0; r < item.rows; r++) {
      Results to(item.partial->at(number, item.first_row + r, *a.model), a.model->heads, width);
      long head = item.kv_head * group;
      memcpy(to.sums + head * width, block.sums + r * group * width, static_cast<size_t>(group * width) * sizeof(float));
      memcpy(to.l + head, block.l + r * group, static_cast<size_t>(group) * sizeof(float));
      memcpy(to.m + head, block.m + r * group, static_cast<size_t>(group) * sizeof(float));
    }
  }
};

template <class Number, template <class> class Products>
void attend_by(const Attention& a, const AttentionItem& item, KvPrefetcher& prefetcher) {
  for (AttentionItem one = item; one.kv_head < item.kv_head + item.kv_heads; one.kv_head++)
    Tile<Number, Products>(a, one, prefetcher).run();
}

void attend(const Attention& a, const AttentionItem& item, KvPrefetcher& prefetcher) {
#if defined(PACELINE_AMX) || defined(PACELINE_DPBF16)
  if (a.model->dtype == PL_BFLOAT16)
    return a.int8_kv ? attend_by<int8_t, Paired>(a, item, prefetcher) : attend_by<uint16_t, Paired>(a, item, prefetcher);
#endif
  if (a.int8_kv) return attend_by<int8_t, Plain>(a, item, prefetcher);
  if (a.model->dtype == PL_BFLOAT16) return attend_by<uint16_t, Plain>(a, item, prefetcher);
  attend_by<float, Plain>(a, item, prefetcher);
}

}  // namespace
