// The two products of attention by tile instructions, with a block's keys and values laid out at once.
//
//   scores:   A: queries, bf16 [heads, width]       B: keys by pairs of numbers, a panel for 32 keys
//   values:   A: exponentials, bf16 [heads, 256]    B: values by pairs of keys, a panel for 32 numbers
#pragma once
#include "entries.h"
#include "tiles.h"

namespace {

// Numbers that are bf16 already, side by side.
inline V paired(V even, V odd) {
  __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even.v), 16);
  return {_mm512_castsi512_ps(_mm512_or_si512(low, _mm512_castps_si512(odd.v)))};
}

// Codes k and k + 1 of each lane.
template <int k>
inline V paired(V lanes) {
  __m512i codes = _mm512_castps_si512(lanes.v);
  return paired(V{_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(codes, 24 - 8 * k), 24))},
                V{_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(codes, 16 - 8 * k), 24))});
}

// As Plain of attention.h.
template <class Number>
struct Tiled {
  typedef uint16_t Weight;
  static constexpr bool tiled = true;
  const Entries<Number>& e;
  uint16_t *queries, *keys, *values;
  Shaped shaped;

  Tiled(const Entries<Number>& e, float* memory, long heads)
      : e(e), queries(reinterpret_cast<uint16_t*>(memory)), keys(queries + heads * e.width),
        values(keys + (BLOCK + PANEL) * e.width) {}

  static void put(uint16_t* to, V weight, bool) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(weight.v));
  }

  void lay_out_keys(long place, long at, long count) {
    e.turn(at, count, [&](V lanes, long i, long half) {
      float* to = reinterpret_cast<float*>(keys + (place * e.width + i * PANEL) + 2 * half);
      store(to, e.coded ? paired<0>(lanes) : lanes);
      if (e.coded) store(to + PANEL, paired<2>(lanes));
    });
  }

  void score(long place, long h, long count, float* to) {
    for (long k = 0; k < count; k += 2 * TILE) {
      long rows = count - k < 2 * TILE ? count - k : 2 * TILE;
      shaped.to(rows);
      tiles<false, true>(keys + place * e.width, queries + (h + k) * e.width, e.width, rows, e.width, to + k * BLOCK, BLOCK);
    }
  }

  void lay_out_values(long at, long low, long high) {
    for (long j = 0; j < STRIPE; j += 2)
      for (long i = 0; i < e.width; i += 16) {
        V even = low <= j && j < high ? e.value(at + j, i) : zero();
        V odd = low <= j + 1 && j + 1 < high ? e.value(at + j + 1, i) : zero();
        uint16_t* to = values + i / PANEL * PANEL * BLOCK + (at + j) * PANEL + 2 * (i % PANEL);
        store(reinterpret_cast<float*>(to), paired(even, odd));
      }
  }

  void add(const uint16_t* weights, long count, long at, long end, float* sums) {
    for (long k = 0; k < count; k += 2 * TILE) {
      long rows = count - k < 2 * TILE ? count - k : 2 * TILE;
      shaped.to(rows);
      for (long i = 0; i < e.width; i += PANEL)
        tiles<false>(values + i * BLOCK + at * PANEL, weights + k * BLOCK + at, BLOCK, rows, end - at,
                     sums + k * e.width + i, e.width);
    }
  }
};

}  // namespace
