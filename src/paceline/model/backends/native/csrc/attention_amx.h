// The two products of attention by tile instructions, for what several query heads share.
//
//   scores:   A: queries, bf16 [heads, width]       B: keys by pairs of numbers, a panel of 32 keys
//   values:   A: exponentials, bf16 [heads, 256]    B: pairs of keys' values, a panel of 32 numbers
#pragma once
#include "products.h"
#include "tiles.h"

namespace {

struct TiledAttention {
  uint16_t* memory = nullptr;  // queries, exponentials, then a panel
  Shaped shaped;

  template <class Tile>
  uint16_t* exponentials(const Tile& t) const {
    return memory + t.heads * t.width;
  }
  template <class Tile>
  uint16_t* panel(const Tile& t) const {
    return exponentials(t) + t.heads * BLOCK;
  }

  template <class Tile>
  void begin(const Tile& t) {
    if (sizeof(*t.keys) != 2) return;
    for (long i = 0; i < t.heads * t.width; i += 16) store(memory + i, load(t.q + i));
  }

  // Scores of `count` query heads from `head` on for 32 keys. False if this is not for tiles.
  template <class Tile>
  bool score(const Tile& t, long head, long count, const int32_t* slots, long there, float* to) {
    if (sizeof(*t.keys) != 2 || t.d % 2) return false;
    uint16_t* keys = panel(t);
    for (long half = 0; half < PANEL; half += TILE)
      for (long i = 0; i < t.width; i += STRIPE) {
        V pairs[16];  // two numbers of one key are one lane
        for (long j = 0; j < TILE; j++) {
          const void* key = t.keys + slots[half + j < there ? half + j : 0] * t.stride + i;
          bool seen = half + j < there && i < t.d;
          pairs[j] = seen ? load_first(static_cast<const float*>(key), (t.d - i) / 2) : zero();
        }
        transpose(pairs);
        for (long j = 0; j < TILE; j++) store(reinterpret_cast<float*>(keys + (i + 2 * j) * PANEL + 2 * half), pairs[j]);
      }
    for (long h = 0; h < count; h += 2 * TILE) {
      long rows = count - h < 2 * TILE ? count - h : 2 * TILE;
      shaped.to(rows);
      tiles<false>(keys, memory + (head + h) * t.width, t.width, rows, t.width, to + h * BLOCK, BLOCK);
    }
    return true;
  }

  // The run's query heads by the values of its stripes.
  template <class Tile, class Run>
  bool add(const Tile& t, const Run& run) {
    if (sizeof(*t.values) != 2) return false;
    long head = run.first * t.group, count = (run.last - run.first) * t.group, inputs = run.end - run.begin;
    uint16_t *a = exponentials(t), *values = panel(t);
    for (long h = 0; h < count; h++)
      for (long j = 0; j < inputs; j += 16)
        store(a + h * BLOCK + j, load(t.scores + (head + h) * BLOCK + run.begin + j));
    for (long i = 0; i < t.width; i += PANEL) {
      for (long j = 0; j < inputs; j += 2)
        for (long half = 0; half < PANEL; half += TILE) interleave(t, run.begin + j, i + half, values + j * PANEL + 2 * half);
      for (long h = 0; h < count; h += 2 * TILE) {
        long rows = count - h < 2 * TILE ? count - h : 2 * TILE;
        shaped.to(rows);
        tiles<false>(values, a + h * BLOCK, BLOCK, rows, inputs, t.results + (head + h) * t.step + i, t.step);
      }
    }
    return true;
  }

  // 16 numbers from `i` on of the values of two keys, side by side.
  template <class Tile>
  static void interleave(const Tile& t, long j, long i, uint16_t* to) {
    __m512i even = widened(t, j, i), odd = widened(t, j + 1, i);
    _mm512_storeu_si512(to, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
  }

  template <class Tile>
  static __m512i widened(const Tile& t, long j, long i) {
    const void* value = t.values + t.slots[j] * t.stride + i;
    if (t.d - i >= TILE) return _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(value)));
    uint16_t some[16] = {};
    if (i < t.d) memcpy(some, value, static_cast<size_t>(t.d - i) * 2);
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(some)));
  }
};

}  // namespace
