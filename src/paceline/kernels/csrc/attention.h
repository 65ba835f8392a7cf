// Attention of each row over the keys it sees, in the order of their positions.
//
//   position   0 ........ 255 | 256 ...... 511 | 512 ..... table_end | table_end ... position
//              block 0          block 1          block 2
//              slots from the sequence's block table                 | the row's own path in its draft tree
//
// As in FlashAttention, a block gives each row and head its largest score m, l = sum of exp(s - m) and the value sums
// a = sum of exp(s - m) v; blocks are merged from left to right. Both products of a block, queries by keys and
// exponentials by values, are those of gemm.h: keys are the outputs of the first and the inputs of the second, 32
// at a time. Block boundaries are positions, so no result depends on where a chunk ends, which rows share the work or
// how blocks are spread over threads. And no row is multiplied with a number that it does not see unless that is
// finite: zero times another row's infinity is not zero.
//
// An int8 cache is read as it is: int8 values are exact in every product. The keys' scales are multiplied with their
// scores, the values' scales with their exponentials.
#pragma once
#include "gemm.h"
#include "kernels.h"
#include "kv_block.h"
#include "vec.h"
#if defined(PACELINE_AMX) || defined(PACELINE_DPBF16)
#include "attention_bf16.h"
#endif

namespace {

// Less than every score, but finite: the m of a row that has seen no key, which changes nothing when it is merged.
constexpr float LOWEST = -3e38f;

// Results of some query heads over some keys: value sums [heads, width], l [heads], m [heads].
struct Results {
  float *sums, *l, *m;
  Results(float* memory, long heads, long width)
      : sums(memory), l(memory + heads * width), m(l + round_up(heads, 16)) {}
  float* end(long heads) const { return m + round_up(heads, 16); }
};

inline void clear(const Results& r, long heads, long width) {
  memset(r.sums, 0, static_cast<size_t>(heads * width) * sizeof(float));
  for (long h = 0; h < heads; h++) r.l[h] = 0, r.m[h] = LOWEST;
}

// left = left merged with right, whose keys come behind.
inline void merge(const Results& left, const Results& right, long heads, long width) {
  for (long first = 0; first < heads; first += 16) {
    F32x16 a = load(left.m + first), b = load(right.m + first), most = max(a, b);
    F32x16 scale_left = exp(a - most), scale_right = exp(b - most);
    store(left.m + first, most);
    store(left.l + first, fma(load(right.l + first), scale_right, load(left.l + first) * scale_left));
    float lefts[16], rights[16];
    store(lefts, scale_left);
    store(rights, scale_right);
    for (long h = 0; h < 16 && first + h < heads; h++)
      for (long i = (first + h) * width; i < (first + h + 1) * width; i += 16)
        store(left.sums + i, fma(load(right.sums + i), set1(rights[h]), load(left.sums + i) * set1(lefts[h])));
  }
}

// out = sums / l, of which `r` has those of its query head number `from`.
inline void write_output(const Attention& a, const Results& r, long from, long row, long head) {
  long d = a.model->head_dim, width = round_up(d, STRIPE);
  const float* sums = r.sums + from * width;
  F32x16 l = set1(r.l[from]);
  if (a.sinks) l = l + exp(set1(a.sinks[head] - r.m[from]));
  float* out = a.out + row * a.ldo + head * d;
  for (long i = 0; i < d; i += 16) store_partial(out + i, d - i, rounded(a.model->dtype, load(sums + i) / l));
}

// The first position that a row sees.
inline long first_visible(const Attention& a, const AttentionRow& row) {
  long from = a.window ? row.position - a.window + 1 : 0;
  return from > 0 ? from : 0;
}

// Merges one row's partial results into those of earlier blocks, and writes the output behind its last block.
void merge_partials(const Attention& a, const PartialResults& p, long row) {
  long width = round_up(a.model->head_dim, STRIPE), heads = a.model->heads;
  const AttentionRow& seen = a.rows[row];
  long first = first_visible(a, seen) / KEY_BLOCK, last = seen.position / KEY_BLOCK;
  Results all(p.merged + row * partial_result_size(*a.model), heads, width);
  if (p.first_block == 0) clear(all, heads, width);
  for (long block = first > p.first_block ? first : p.first_block; block <= last && block < p.end_block; block++)
    merge(all, Results(p.at(block, row, *a.model), heads, width), heads, width);
  if (last < p.first_block || last >= p.end_block) return;
  for (long head = 0; head < heads; head++) write_output(a, all, head, row, head);
}

// How a panel of keys is read, see gemm.h: bf16 numbers stay pairs, int8 become floats.
template <class Number>
struct KeyPanel {
  typedef F32Panel<false> Panel;
};
template <>
struct KeyPanel<uint16_t> {
  typedef Bf16Panel<false> Panel;
};

// The two products without tile instructions. A panel of 32 keys is transposed, used and overwritten by the next one;
// values are read where they lie.
template <class Number>
struct VectorProducts {
  typedef float Weight;
  typedef typename KeyPanel<Number>::Panel Keys;
  static constexpr bool WHOLE_BLOCK = false;  // packs 32 keys at a time, not those of a whole block
  const KvBlock<Number>& kv;
  float* queries;
  typename Keys::Weight* panel;
  Number* copies;         // padded copies of values: [width / 16][STRIPE, 16]
  const Number** values;  // see ValuePointers

  VectorProducts(const KvBlock<Number>& kv, float* memory, long heads)
      : kv(kv), queries(memory), panel(reinterpret_cast<typename Keys::Weight*>(memory + heads * kv.width)),
        copies(reinterpret_cast<Number*>(memory + (heads + PANEL) * kv.width)),
        values(reinterpret_cast<const Number**>(memory + (heads + PANEL + STRIPE) * kv.width)) {}

  static void store_weight(float* to, F32x16 weight, bool bf16) { store(to, bf16 ? round_to_bf16(weight) : weight); }

  // Packs `count` keys from `at` on; `due`: keys to prefetch meanwhile. The first argument is the place of the panel,
  // of which there is only one here.
  void pack_keys(long, long at, long count, long due) {
    kv.transpose_keys(at, count, due, [&](F32x16 lanes, long i, long half) {
      float* to = reinterpret_cast<float*>(panel + i * PANEL + half * (Keys::VECTOR / 16));
      if (!kv.INT8) return store(to, lanes);
      for (int k = 0; k < 4; k++) store(to + k * PANEL, int8_of(lanes, k));
    });
  }

  // to [count, KEY_BLOCK] = the scores of `count` query heads from `h` on, for the 32 keys of the panel.
  void score(long, long h, long count, float* to) {
    for (long k = 0; k < count; k++) store(to + k * KEY_BLOCK, zero()), store(to + k * KEY_BLOCK + 16, zero());
    panel_product<Keys>(panel, queries + h * kv.width, kv.width, STRIPE, count, kv.width, to, KEY_BLOCK);
  }

  // Finds the values of 32 keys from `at` on, with zeros for those outside low .. high.
  void pack_values(long at, long low, long high) {
    const Number *value[STRIPE], **to = values;
    for (long j = 0; j < STRIPE; j++) value[j] = low <= j && j < high ? kv.values + kv.slots[at + j] * kv.stride : kv.values;
    for (long i = 0, width = kv.width; i < width; i += 16, to += STRIPE) {
      for (long j = 0; j < STRIPE; j++) to[j] = value[j] + i;
      for (long j = 0; j < STRIPE && (low > 0 || high < STRIPE || i + 16 > kv.d); j++) {
        bool present = low <= j && j < high;
        if (present && i + 16 <= kv.d) continue;
        Number* copy = copies + i * STRIPE + 16 * j;
        memset(copy, 0, 16 * sizeof(Number));
        if (present && i < kv.d) memcpy(copy, value[j] + i, static_cast<size_t>(kv.d - i) * sizeof(Number));
        to[j] = copy;
      }
    }
  }

  // sums [count, width] += weights [count, KEY_BLOCK] times the packed values from `at` on.
  void add_values(const float* weights, long count, long at, long, float* sums) {
    for (long i = 0; i < kv.width; i += PANEL)
      stripe_rows<ValuePointers<Number>>(values + i / 16 * STRIPE, weights + at, KEY_BLOCK, count, sums + i, kv.width);
  }
};

// One KV head of an item. Its rows' query heads (rows x heads of the group) are the rows of both products.
//
//   for each block of keys
//     for `rows_at_once` rows at a time     score() -> softmax() -> add_values()
//     merge into `all`, or store as a partial result
template <class Number, template <class> class Products>
struct AttentionTile {
  typedef typename Products<Number>::Weight Weight;
  static constexpr bool INT8 = sizeof(Number) == 1, WHOLE_BLOCK = Products<Number>::WHOLE_BLOCK;
  const Attention& a;
  const AttentionItem& item;
  const AttentionRow* rows;
  const bool bf16;
  const long group, heads, width, rows_at_once;
  long first = 0, last = 0;  // the rows whose scores are in memory
  KvBlock<Number> kv;
  Results all, block;  // over all blocks so far; over this one
  float* scores;       // [rows_at_once * group, KEY_BLOCK]
  Weight* weights;     // their exponentials
  Products<Number> products;
  // Of the block, as offsets: keys that some row sees, keys that all rows see, where the tree paths begin.
  long begin = 0, low = 0, high = 0, all_low = 0, all_high = 0, table_end = 0;
  long from[ATTENTION_HEADS], to[ATTENTION_HEADS];  // keys that each row sees; none if from >= to

  AttentionTile(const Attention& a, const AttentionItem& item, KvPrefetcher& prefetcher)
      : a(a), item(item), rows(a.rows + item.first_row), bf16(a.model->dtype == PL_BFLOAT16),
        group(a.model->heads / a.model->kv_heads), heads(item.rows * group), width(round_up(a.model->head_dim, STRIPE)),
        rows_at_once(!WHOLE_BLOCK ? item.rows : group < PANEL ? PANEL / group : 1), kv(a, prefetcher, item.kv_head),
        all(a.scratch, heads, width), block(all.end(heads), heads, width), scores(block.end(heads)),
        weights(reinterpret_cast<Weight*>(scores + (WHOLE_BLOCK ? rows_at_once * group * KEY_BLOCK : 0))),
        products(kv, scores + rows_at_once * group * KEY_BLOCK * 3 / 2, heads) {}

  // Finds which keys of the block the rows see. Returns whether there are any.
  bool find_visible_keys() {
    low = all_high = KEY_BLOCK, high = all_low = 0;
    table_end = rows[0].table_end - begin;  // the same for all rows of a sequence
    for (long r = 0; r < item.rows; r++) {
      long f = first_visible(a, rows[r]) - begin, t = rows[r].position + 1 - begin;
      from[r] = f = f > 0 ? f : 0;
      to[r] = t = t < KEY_BLOCK ? t : KEY_BLOCK;
      all_low = f > all_low ? f : all_low;
      all_high = t < all_high ? t : all_high;
      if (f >= t) continue;
      low = f < low ? f : low;
      high = t > high ? t : high;
    }
    low = low / STRIPE * STRIPE;
    kv.find_slots(rows[0], begin, low, high < table_end ? high : table_end);
    return low < high;
  }

  // Finds the slots of the row's tree path in the block. Returns whether it has any there.
  bool find_path_slots(long r) {
    if (rows[r].position < rows[r].table_end || from[r] >= to[r] || to[r] <= table_end) return false;
    kv.find_slots(rows[r], begin, table_end > 0 ? table_end : 0, to[r]);
    return true;
  }

  long first_path_stripe() const { return table_end > low ? table_end / STRIPE * STRIPE : low; }

  // Scores of the rows first .. last, and the products of their queries with the keys of the block.
  void score() {
    long end = high < table_end ? high : table_end;
    for (long at = low; at < end; at += PANEL) {
      long count = at + PANEL < end ? PANEL : end - at;
      if (first == 0) products.pack_keys(at, at, count, count);
      products.score(at, first * group, (last - first) * group, scores + at);
    }
    for (long r = first; r < last; r++) {  // tree paths: each row has keys of its own
      if (!find_path_slots(r)) continue;
      for (long at = first_path_stripe(); at < to[r]; at += PANEL) {
        products.pack_keys(KEY_BLOCK, at, to[r] - at < PANEL ? to[r] - at : PANEL, 0);
        products.score(KEY_BLOCK, r * group, group, scores + (r - first) * group * KEY_BLOCK + at);
      }
    }
  }

  // Scales, caps and masks the scores of a query head. Returns their maximum, lane by lane.
  F32x16 mask_scores(long h) {
    const long r = h / group, start = from[r] / 16 * 16, end = round_up(to[r], 16);
    float* s = scores + (h - first * group) * KEY_BLOCK;
    if (from[r] >= to[r]) return set1(LOWEST);
    if (INT8) find_path_slots(r);
    for (long j = start; j < end && (INT8 || a.model->attention_cap > 0); j += 16) {
      F32x16 x = INT8 ? load(s + j) * load(kv.key_scales + j) : load(s + j);
      store(s + j, a.model->attention_cap > 0 ? softcap(x, a.model->attention_cap) : x);
    }
    for (long j = start; j < from[r]; j++) s[j] = -__builtin_inff();
    for (long j = to[r]; j < end; j++) s[j] = -__builtin_inff();
    F32x16 most = load(s + start);
    for (long j = start + 16; j < end; j += 16) most = max(load(s + j), most);
    return most;
  }

  // Turns the scores of a query head into exponentials. `sums`: their sums, lane by lane.
  void exponentials(long h, float* sums) {
    const long r = h / group, start = from[r] / 16 * 16, end = round_up(to[r], 16), block_end = round_up(high, STRIPE);
    float* s = scores + (h - first * group) * KEY_BLOCK;
    Weight* w = weights + (h - first * group) * KEY_BLOCK;
    F32x16 most = set1(block.m[h]), total = zero();
    bool none = from[r] >= to[r];
    memset(w + low, 0, static_cast<size_t>((none ? block_end : start) - low) * sizeof(Weight));
    if (none) return store(sums, total);
    if (INT8) find_path_slots(r);
    for (long j = start; j < end; j += 16) {
      F32x16 x = load(s + j) - most, e = bf16 ? fast_exp(x) : exp(x);
      total = total + e;
      products.store_weight(w + j, INT8 ? e * load(kv.value_scales + j) : e, bf16);
    }
    for (long j = start; j < from[r]; j++) w[j] = 0;  // the scale of a key that the row does not see may be anything
    memset(w + to[r], 0, static_cast<size_t>(block_end - to[r]) * sizeof(Weight));
    store(sums, total);
  }

  // Exponentials, m and l of the rows first .. last: 16 query heads at a time, reduced together by a transposition.
  void softmax() {
    for (long h = first * group; h < last * group; h += 16) {
      long count = last * group - h < 16 ? last * group - h : 16;
      F32x16 lanes[16];
      for (long k = 0; k < 16; k++) lanes[k] = k < count ? mask_scores(h + k) : zero();
      transpose(lanes);
      for (long k = 1; k < 16; k++) lanes[0] = max(lanes[k], lanes[0]);
      store_partial(block.m + h, count, lanes[0]);
      float sums[16 * 16] = {};
      for (long k = 0; k < count; k++) exponentials(h + k, sums + 16 * k);
      for (long k = 0; k < 16; k++) lanes[k] = load(sums + 16 * k);
      transpose(lanes);
      for (long step = 8; step; step /= 2)  // in the order of reduce_sum()
        for (long k = 0; k < step; k++) lanes[k] = lanes[k] + lanes[k + step];
      store_partial(block.l + h, count, lanes[0]);
    }
  }

  // Adds the values at start .. end, by their weights, to the sums of the rows r .. row_end.
  void add_values(long r, long row_end, long start, long end) {
    if (start < end)
      products.add_values(weights + (r - first) * group * KEY_BLOCK, (row_end - r) * group, start, end, block.sums + r * group * width);
  }

  // Adds those values of a stripe that one row sees.
  void add_values_alone(long r, long at) {
    long before = from[r] - at, after = to[r] - at;
    if (before >= STRIPE || after <= 0 || from[r] >= to[r]) return;
    find_path_slots(r);
    products.pack_values(at, before, after);
    add_values(r, r + 1, at, at + STRIPE);
  }

  // Value sums of the rows first .. last. A stripe is added for all rows together if they all see it whole or its
  // values are finite: then weights of 0 make what a row does not see vanish.
  void add_values() {
    memset(block.sums + first * group * width, 0, static_cast<size_t>((last - first) * group * width) * sizeof(float));
    long at = low, added = low, end = high > table_end ? first_path_stripe() : high;
    for (; at < end; at += STRIPE) {
      long count = end - at < STRIPE ? end - at : STRIPE;
      bool together = (all_low <= at && at + count <= all_high) || kv.finite_values(at, count);
      if (together && (!WHOLE_BLOCK || first == 0)) products.pack_values(at, 0, count);
      if (together && WHOLE_BLOCK && at + STRIPE < end) continue;  // to be added with the next ones
      add_values(first, last, added, together ? at + STRIPE : at);
      added = at + STRIPE;
      for (long r = first; r < last && !together; r++) add_values_alone(r, at);
    }
    for (; at < high; at += STRIPE)
      for (long r = first; r < last; r++) add_values_alone(r, at);
  }

  void run() {
    for (long h = 0; h < heads; h++)
      kv.store_query(a.q + (item.first_row + h / group) * a.ldq + (item.kv_head * group + h % group) * kv.d,
                     products.queries + h * width);
    clear(all, heads, width);
    for (long number = item.first_block; number < item.end_block; number++) {
      begin = number * KEY_BLOCK;
      if (!find_visible_keys()) continue;
      for (first = 0; first < item.rows; first = last) {
        last = first + rows_at_once < item.rows ? first + rows_at_once : item.rows;
        score();
        softmax();
        add_values();
      }
      if (item.partial)
        store_partials(number);
      else
        merge(all, block, heads, width);
    }
    for (long h = 0; h < heads && !item.partial; h++)
      write_output(a, all, h, item.first_row + h / group, item.kv_head * group + h % group);
  }

  void store_partials(long number) {
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
void attend_with(const Attention& a, const AttentionItem& item, KvPrefetcher& prefetcher) {
  for (AttentionItem one = item; one.kv_head < item.kv_head + item.kv_heads; one.kv_head++)
    AttentionTile<Number, Products>(a, one, prefetcher).run();
}

void attend(const Attention& a, const AttentionItem& item, KvPrefetcher& prefetcher) {
#if defined(PACELINE_AMX) || defined(PACELINE_DPBF16)
  if (a.model->dtype == PL_BFLOAT16)
    return a.int8_kv ? attend_with<int8_t, PairProducts>(a, item, prefetcher) : attend_with<uint16_t, PairProducts>(a, item, prefetcher);
#endif
  if (a.int8_kv) return attend_with<int8_t, VectorProducts>(a, item, prefetcher);
  if (a.model->dtype == PL_BFLOAT16) return attend_with<uint16_t, VectorProducts>(a, item, prefetcher);
  attend_with<float, VectorProducts>(a, item, prefetcher);
}

}  // namespace
