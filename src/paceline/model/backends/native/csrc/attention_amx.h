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
    if (!t.narrow) return false;
    uint16_t* keys = panel(t);
    for (long half = 0; half < PANEL; half += TILE)
      for (long i = 0; i < t.width; i += TILE * t.each) {
        V lanes[16];
        for (long j = 0; j < TILE; j++)
          lanes[j] = half + j < there ? t.lanes_of(t.keys + slots[half + j] * t.stride, i) : zero();
        transpose(lanes);
        for (long j = 0; j < TILE && i + t.each * j < t.width; j++) {
          float* to = reinterpret_cast<float*>(keys + (i + t.each * j) * PANEL + 2 * half);
          store(to, Tile::coded ? paired<0>(lanes[j]) : lanes[j]);
          if (Tile::coded) store(to + PANEL, paired<2>(lanes[j]));
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
  static V joined(__m512 even, __m512 odd) {
    __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
    return {_mm512_castsi512_ps(_mm512_or_si512(low, _mm512_castps_si512(odd)))};
  }

  // Codes k and k + 1 of each lane.
  template <int k>
  static V paired(V lanes) {
    __m512i codes = _mm512_castps_si512(lanes.v);
    return joined(_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(codes, 24 - 8 * k), 24)),
                  _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(codes, 16 - 8 * k), 24)));
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
    const auto *even = t.values + t.slots[j] * t.stride + i, *odd = t.values + t.slots[j + 1] * t.stride + i;
    V both = i < t.d ? joined(load_first(even, t.d - i).v, load_first(odd, t.d - i).v) : zero();
    store(reinterpret_cast<float*>(to), both);
  }
};

}  // namespace
