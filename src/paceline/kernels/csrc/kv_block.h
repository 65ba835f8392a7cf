// The cached keys and values of one KV head at the positions of one block of attention.
//
//   a slot of the cache    head 0: d numbers [int8: and their scale, a float] | head 1: ... | ...
//   keys, transposed       vector i: number i of 16 keys, so that a query's number i is one multiply-add with it
//   values, as they lie    vector i: numbers i .. i + 16 of one value
#pragma once
#include "gemm.h"
#include "kernels.h"
#include "vec.h"

namespace {

// The int8 number k of the four in each lane, as floats.
inline F32x16 int8_of(F32x16 lanes, int k) {
  return each([=](Floats a) { return __builtin_convertvector((Ints)((Words)a << (24 - 8 * k)) >> 24, Floats); }, lanes);
}

// A panel of values that stay in the cache: [width / 16][STRIPE] pointers, each to 16 numbers.
template <class Cached>
struct ValuePointers : F32Panel<false> {
  typedef const Cached* Weight;
  static constexpr long VECTOR = STRIPE, STEP = 2;
  static F32x16 load_weights(const Weight* w, int i, int odd) { return load(w[VECTOR * i + odd]); }
  static void prefetch(const Weight*, int) {}
};

// `Number`: the type of the cache, float, uint16_t (bf16) or int8_t.
template <class Number>
struct KvBlock {
  static constexpr bool INT8 = sizeof(Number) == 1;
  static constexpr long LANE = 4 / sizeof(Number);  // numbers in 4 bytes, which are transposed as one lane
  const Attention& a;
  KvPrefetcher& prefetcher;
  const long d, width, stride;  // width: head_dim padded to STRIPE; stride: numbers from slot to slot
  const Number *keys, *values;
  int32_t slots[KEY_BLOCK];
  float key_scales[KEY_BLOCK], value_scales[KEY_BLOCK];

  KvBlock(const Attention& a, KvPrefetcher& prefetcher, long head)
      : a(a), prefetcher(prefetcher), d(a.model->head_dim), width(round_up(d, STRIPE)),
        stride(a.model->kv_heads * kv_head_bytes(*a.model, INT8) / static_cast<long>(sizeof(Number))),
        keys(static_cast<const Number*>(a.keys) + head * stride / a.model->kv_heads),
        values(static_cast<const Number*>(a.values) + head * stride / a.model->kv_heads) {}

  // Finds the slots (and scales) of the keys from .. to of the block that begins at position `begin`, as `row` sees
  // them.
  void find_slots(const AttentionRow& row, long begin, long from, long to) {
    const long size = a.block_size;
    long j = from;
    while (j < to && begin + j < row.table_end) {  // one block of the cache
      long inside = (begin + j) % size, slot = row.block_table[(begin + j) / size] * size + inside, end = j + size - inside;
      end = end < to ? end : to;
      for (end = end < row.table_end - begin ? end : row.table_end - begin; j < end; j++, slot++) slots[j] = static_cast<int32_t>(slot);
    }
    for (; j < to; j++) slots[j] = row.tree_slots[begin + j - row.table_end];
    for (j = from; j < to && INT8; j++) {
      memcpy(key_scales + j, keys + slots[j] * stride + d, sizeof(float));
      memcpy(value_scales + j, values + slots[j] * stride + d, sizeof(float));
    }
  }

  template <class T>
  void store_query(const float* q, T* to) const {
    for (long i = 0; i < width; i += 16) store(to + i, i < d ? load_partial(q + i, d - i) : zero());
  }

  // Transposes 32 keys from `at` on, with zeros behind the first `count`: calls put(lanes, i, half) with the
  // numbers i .. i + LANE of the keys half .. half + 16. In between it prefetches the next `due` keys and values.
  // All at once they would fill the line buffers and stall loads (Zen 4: a forward of one row behind 4,096 tokens
  // took a fifth longer).
  template <class Put>
  void transpose_keys(long at, long count, long due, const Put& put) const {
    long parts = PANEL / 16 * ((width + 16 * LANE - 1) / (16 * LANE));
    for (long half = 0; half < PANEL; half += 16) {
      const Number* key[16];
      for (long j = 0; j < 16; j++) key[j] = half + j < count ? keys + slots[at + half + j] * stride : keys;
      for (long i = 0; i < width; i += 16 * LANE) {
        long some = due / parts--;
        prefetcher.advance(some), due -= some;
        const float* rows[16];
        Number copies[16][16 * LANE];  // padded copies of what ends before 16 lanes do
        for (long j = 0; j < 16; j++) rows[j] = reinterpret_cast<const float*>(key[j] + i);
        for (long j = 0; j < 16 && (half + 16 > count || i + 16 * LANE > d); j++) {
          if (half + j < count && i + 16 * LANE <= d) continue;
          memset(copies[j], 0, 64);
          if (half + j < count && i < d) memcpy(copies[j], key[j] + i, static_cast<size_t>(d - i) * sizeof(Number));
          rows[j] = reinterpret_cast<const float*>(copies[j]);
        }
        transpose(rows, [&](int j, F32x16 lanes) {
          if (i + LANE * j < width) put(lanes, i + LANE * j, half);
        });
      }
    }
  }

  // Numbers i .. i + 16 of value j.
  F32x16 value(long j, long i) const { return i < d ? load_partial(values + slots[j] * stride + i, d - i) : zero(); }

  // Of an int8 cache all are: a scale that is not finite only meets exponentials of its row.
  bool finite_values(long at, long count) const {
    F32x16 nan = zero();  // 0, or NaN if a value is not finite
    for (long j = at; j < at + count && !INT8; j++)
      for (long i = 0; i < d; i += 16) nan = fma(value(j, i), zero(), nan);
    return reduce_sum(nan) == 0;
  }
};

}  // namespace
