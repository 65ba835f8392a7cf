// What the cache has of one KV head at the positions of a block of attention.
#pragma once
#include "kernels.h"
#include "vec.h"

namespace {

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
  const long d, width, stride;  // stride: from slot to slot
  const Number *keys, *values;
  int32_t slots[BLOCK];
  float key_scales[BLOCK], value_scales[BLOCK];

  Entries(const Attention& a, long head)
      : a(a), d(a.model->head_dim), width(round_up(d, STRIPE)),
        stride(a.model->kv_heads * entry_bytes(*a.model, coded) / static_cast<long>(sizeof(Number))),
        keys(static_cast<const Number*>(a.keys) + head * stride / a.model->kv_heads),
        values(static_cast<const Number*>(a.values) + head * stride / a.model->kv_heads) {}

  // The row's keys and values at from .. to of the block that begins at `begin`.
  void look_up(const Row& row, long begin, long from, long to) {
    long slot = 0, left = 0;  // of a block of the cache
    for (long j = from; j < to; j++, slot++, left--) {
      long position = begin + j;
      if (position < row.shared && left <= 0) {
        left = a.block_size - position % a.block_size;
        slot = (row.table[position / a.block_size] + 1) * a.block_size - left;
      }
      slots[j] = static_cast<int32_t>(position < row.shared ? slot : row.own[position - row.shared]);
      if (!coded) continue;
      memcpy(key_scales + j, keys + slots[j] * stride + d, sizeof(float));
      memcpy(value_scales + j, values + slots[j] * stride + d, sizeof(float));
    }
  }

  template <class T>
  void lay_out_query(const float* q, T* to) const {
    for (long i = 0; i < width; i += 16) store(to + i, i < d ? load_first(q + i, d - i) : zero());
  }

  // A key's next 64 bytes from number `i` on as lanes of `each` numbers; zeros behind its numbers.
  V lanes_of(const Number* key, long i) const {
    long bytes = (d - i) * static_cast<long>(sizeof(Number));
    if (bytes >= 64) return load(reinterpret_cast<const float*>(key + i));
    float lanes[16] = {};
    if (bytes > 0) memcpy(lanes, key + i, static_cast<size_t>(bytes));
    return load(lanes);
  }

  // 32 keys from `at` on, number by number; zeros behind the first `count`. put(lanes, i, half): of
  // keys half .. half + 16, the numbers from `i` on as lanes.
  template <class Put>
  void turn(long at, long count, const Put& put) const {
    for (long half = 0; half < PANEL; half += 16)
      for (long i = 0; i < width; i += 16 * each) {
        V t[16];
        for (long j = 0; j < 16; j++)
          t[j] = half + j < count ? lanes_of(keys + slots[at + half + j] * stride, i) : zero();
        transpose(t);
        for (long j = 0; j < 16 && i + each * j < width; j++) put(t[j], i + each * j, half);
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
