// What the cache has of one KV head at the positions of a block of attention.
#pragma once
#include "kernels.h"
#include "products.h"
#include "vec.h"

namespace {

// Lanes of numbers of 16 keys as rows of a panel: pairs of bf16 numbers stay pairs.
inline void lay_out(const float*, V lanes, float* to) { store(to, lanes); }
inline void lay_out(const uint16_t*, V lanes, uint16_t* to) { store(reinterpret_cast<float*>(to), lanes); }
inline void lay_out(const int8_t*, V lanes, float* to) {
  uint32_t codes[16];
  store(reinterpret_cast<float*>(codes), lanes);
#pragma GCC unroll 4
  for (int k = 0; k < 4; k++)
    for (int i = 0; i < 16; i++)
      to[k * PANEL + i] = static_cast<float>(static_cast<int32_t>(codes[i] << (24 - 8 * k)) >> 24);
}

// What such a panel is multiplied as.
template <class Number>
struct KeyPanel {
  typedef Floats Kind;
};
template <>
struct KeyPanel<uint16_t> {
  typedef Bf16Weights<false> Kind;
};

// Values as they lie in the cache, by pointers: [width / 16][STRIPE], each to sixteen numbers.
template <class Cached>
struct ValuesThere {
  typedef const Cached* Number;
  static constexpr long STEP = STRIPE, PAIR = 2;
  static V weights(const Number* pair, int i, int odd) { return load(pair[STEP * i + odd]); }
  static void ahead(const Number*, int) {}
};

inline bool finite(const uint16_t* x, long count) {
  uint16_t strange = 0;
  for (long i = 0; i < count; i++) strange |= (x[i] & 0x7f80) == 0x7f80;
  return !strange;
}
inline bool finite(const float* x, long count) {
  uint32_t strange = 0;
  for (long i = 0; i < count; i++) strange |= !(x[i] - x[i] == 0);
  return !strange;
}
inline bool finite(const int8_t*, long) { return true; }  // a scale that is not is for exponentials, row by row

// Number: of the cache; int8_t: codes.
template <class Number>
struct Entries {
  static constexpr bool coded = sizeof(Number) == 1;
  static constexpr long each = 4 / sizeof(Number);  // numbers that are turned as one lane
  const Attention& a;
  KvPrefetcher& prefetcher;
  const long d, width, stride;  // stride: from slot to slot
  const Number *keys, *values;
  int32_t slots[KEY_BLOCK];
  float key_scales[KEY_BLOCK], value_scales[KEY_BLOCK];

  Entries(const Attention& a, KvPrefetcher& prefetcher, long head)
      : a(a), prefetcher(prefetcher), d(a.model->head_dim), width(round_up(d, STRIPE)),
        stride(a.model->kv_heads * kv_head_bytes(*a.model, coded) / static_cast<long>(sizeof(Number))),
        keys(static_cast<const Number*>(a.keys) + head * stride / a.model->kv_heads),
        values(static_cast<const Number*>(a.values) + head * stride / a.model->kv_heads) {}

  // The row's keys and values at from .. to of the block that begins at `begin`.
  void look_up(const AttentionRow& row, long begin, long from, long to) {
    const long size = a.block_size;
    long j = from;
    while (j < to && begin + j < row.table_end) {  // a block of the cache
      long inside = (begin + j) % size, slot = row.block_table[(begin + j) / size] * size + inside, end = j + size - inside;
      end = end < to ? end : to;
      for (end = end < row.table_end - begin ? end : row.table_end - begin; j < end; j++, slot++) slots[j] = static_cast<int32_t>(slot);
    }
    for (; j < to; j++) slots[j] = row.tree_slots[begin + j - row.table_end];
    for (j = from; j < to && coded; j++) {
      memcpy(key_scales + j, keys + slots[j] * stride + d, sizeof(float));
      memcpy(value_scales + j, values + slots[j] * stride + d, sizeof(float));
    }
  }

  template <class T>
  void lay_out_query(const float* q, T* to) const {
    for (long i = 0; i < width; i += 16) store(to + i, i < d ? load_first(q + i, d - i) : zero());
  }

  // 32 keys from `at` on, number by number; zeros behind the first `count`. put(lanes, i, half): of
  // keys half .. half + 16, the numbers from `i` on as lanes of `each` numbers. Between them `due` keys and
  // values are fetched ahead: at once they would fill the line buffers, and loads wait (Zen 4: a forward of one
  // row behind 4,096 tokens took a fifth longer).
  template <class Put>
  void turn(long at, long count, long due, const Put& put) const {
    long parts = PANEL / 16 * ((width + 16 * each - 1) / (16 * each));
    for (long half = 0; half < PANEL; half += 16) {
      const Number* key[16];
      for (long j = 0; j < 16; j++) key[j] = half + j < count ? keys + slots[at + half + j] * stride : keys;
      for (long i = 0; i < width; i += 16 * each) {
        long some = due / parts--;
        prefetcher.advance(some), due -= some;
        const float* rows[16];
        Number copies[16][16 * each];  // of what is not there in full
        for (long j = 0; j < 16; j++) rows[j] = reinterpret_cast<const float*>(key[j] + i);
        for (long j = 0; j < 16 && (half + 16 > count || i + 16 * each > d); j++) {
          if (half + j < count && i + 16 * each <= d) continue;
          memset(copies[j], 0, 64);
          if (half + j < count && i < d) memcpy(copies[j], key[j] + i, static_cast<size_t>(d - i) * sizeof(Number));
          rows[j] = reinterpret_cast<const float*>(copies[j]);
        }
        V t[16];
        transpose(rows, t);
        for (long j = 0; j < 16 && i + each * j < width; j++) put(t[j], i + each * j, half);
      }
    }
  }

  // 16 numbers of a value from `i` on.
  V value(long j, long i) const { return i < d ? load_first(values + slots[j] * stride + i, d - i) : zero(); }

  bool finite_values(long at, long count) const {
    bool all = true;
    for (long j = at; j < at + count; j++) all = all && finite(values + slots[j] * stride, d);
    return all;
  }
};

}  // namespace
