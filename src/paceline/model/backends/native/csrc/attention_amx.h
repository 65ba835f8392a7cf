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
    if (!t.narrow) return;
    for (long i = 0; i < t.heads * t.width; i += 16) store(memory + i, load(t.q + i));
  }

  // Scores of `count` query heads from `head` on for 32 keys. False if this is not for tiles.
  template <class Tile>
  bool score(const Tile& t, long head, long count, const int32_t* slots, long there, float* to) {
    if (!t.narrow || (!t.coded && t.d % 2)) return false;
    uint16_t* keys = panel(t);
    constexpr long each = Tile::coded ? 4 : 2;  // numbers of one key that are one lane
    for (long half = 0; half < PANEL; half += TILE)
      for (long i = 0; i < t.width; i += TILE * each) {
        V lanes[16];
        for (long j = 0; j < TILE; j++) {
          const auto* key = t.keys + slots[half + j < there ? half + j : 0] * t.stride;
          bool seen = half + j < there && i < t.d;
          lanes[j] = !seen ? zero() : Tile::coded ? t.four_codes(key, i)
                                                  : load_first(reinterpret_cast<const float*>(key + i), (t.d - i) / 2);
        }
        transpose(lanes);
        for (long j = 0; j < TILE && i + each * j < t.width; j++) {
          float* to = reinterpret_cast<float*>(keys + (i + each * j) * PANEL + 2 * half);
          store(to, Tile::coded ? paired(byte_of<0>(lanes[j]), byte_of<1>(lanes[j])) : lanes[j]);
          if (Tile::coded) store(to + PANEL, paired(byte_of<2>(lanes[j]), byte_of<3>(lanes[j])));
        }
      }
    for (long h = 0; h < count; h += 2 * TILE) {
      long rows = count - h < 2 * TILE ? count - h : 2 * TILE;
      shaped.to(rows);
      tiles<false>(keys, memory + (head + h) * t.width, t.width, rows, t.width, to + h * BLOCK, BLOCK);
    }
    return true;
  }

  // Numbers that are bf16 already, side by side.
  static V paired(V even, V odd) {
    __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even.v), 16);
    return {_mm512_castsi512_ps(_mm512_or_si512(low, _mm512_castps_si512(odd.v)))};
  }

  // The run's query heads by the values of its stripes.
  template <class Tile, class Run>
  bool add(const Tile& t, const Run& run) {
    if (!t.narrow) return false;
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
    const auto* value = t.values + t.slots[j] * t.stride + i;
    if (Tile::coded)
      return _mm512_srli_epi32(_mm512_castps_si512(i < t.d ? load_first(value, t.d - i).v : zero().v), 16);
    if (t.d - i >= TILE) return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(value)));
    uint16_t some[16] = {};
    if (i < t.d) memcpy(some, value, static_cast<size_t>(t.d - i) * 2);
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(some)));
  }
};

}  // namespace
