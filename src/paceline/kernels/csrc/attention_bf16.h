// The two products of attention on pairs of bf16 numbers, by tile instructions or by VDPBF16PS, with a
// block's keys and values laid out at once.
//
//   scores:   A: queries, bf16 [heads, width]       B: keys by pairs of numbers, a panel for 32 keys
//   values:   A: exponentials, bf16 [heads, 256]    B: values by pairs of keys, a panel for 32 numbers
#pragma once
#include "entries.h"
#if defined(PACELINE_AMX)
#include "tiles.h"
#else
#include "products_dp.h"
#endif

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

// c [rows, ldc] += a [rows, lda] times a panel of so many inputs; `fresh`: c = instead.
#if defined(PACELINE_AMX)
struct PairProduct {
  Shaped shaped;
  template <bool fresh>
  void run(const uint16_t* panel, const uint16_t* a, long lda, long rows, long inputs, float* c, long ldc) {
    for (long r = 0; r < rows; r += 2 * TILE) {
      long some = rows - r < 2 * TILE ? rows - r : 2 * TILE;
      shaped.to(some);
      tiles<false, fresh>(panel, a + r * lda, lda, some, inputs, c + r * ldc, ldc);
    }
  }
};
#else
struct PairProduct {
  template <bool fresh>
  void run(const uint16_t* panel, const uint16_t* a, long lda, long rows, long inputs, float* c, long ldc) {
    for (long r = 0; r < rows && fresh; r++) memset(c + r * ldc, 0, PANEL * sizeof(float));
    for (long k = 0; k < inputs; k += STRIPE) dp_all_rows<false>(panel + k * PANEL, a + k, lda, rows, c, ldc);
  }
};
#endif

// As Plain of attention.h.
template <class Number>
struct Paired {
  typedef uint16_t Weight;
  static constexpr bool tiled = true;
  const Entries<Number>& e;
  uint16_t *queries, *keys, *values;
  PairProduct product;

  Paired(const Entries<Number>& e, float* memory, long heads)
      : e(e), queries(reinterpret_cast<uint16_t*>(memory)), keys(queries + heads * e.width),
        values(keys + (KEY_BLOCK + PANEL) * e.width) {}

  static void put(uint16_t* to, V weight, bool) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(weight.v));
  }

  void lay_out_keys(long place, long at, long count, long due) {
    e.turn(at, count, due, [&](V lanes, long i, long half) {
      float* to = reinterpret_cast<float*>(keys + (place * e.width + i * PANEL) + 2 * half);
      store(to, e.coded ? paired<0>(lanes) : lanes);
      if (e.coded) store(to + PANEL, paired<2>(lanes));
    });
  }

  void score(long place, long h, long count, float* to) {
    product.run<true>(keys + place * e.width, queries + h * e.width, e.width, count, e.width, to, KEY_BLOCK);
  }

  void lay_out_values(long at, long low, long high) {
    if (!e.coded && low <= 0 && high >= STRIPE && e.d == e.width) return lay_out_all(at);
    for (long j = 0; j < STRIPE; j += 2)
      for (long i = 0; i < e.width; i += 16) {
        V even = low <= j && j < high ? e.value(at + j, i) : zero();
        V odd = low <= j + 1 && j + 1 < high ? e.value(at + j + 1, i) : zero();
        uint16_t* to = values + i / PANEL * PANEL * KEY_BLOCK + (at + j) * PANEL + 2 * (i % PANEL);
        store(reinterpret_cast<float*>(to), paired(even, odd));
      }
  }

  // The same of 32 keys that are all there.
  void lay_out_all(long at) {
    alignas(64) uint16_t order[64];
    for (int i = 0; i < 64; i++) order[i] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
    const __m512i first = _mm512_load_si512(order), second = _mm512_load_si512(order + 32);
    for (long j = 0; j < STRIPE; j += 2)
      for (long i = 0; i < e.width; i += PANEL) {
        __m512i even = _mm512_loadu_si512(e.values + e.slots[at + j] * e.stride + i);
        __m512i odd = _mm512_loadu_si512(e.values + e.slots[at + j + 1] * e.stride + i);
        uint16_t* to = values + i * KEY_BLOCK + (at + j) * PANEL;
        _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, first, odd));
        _mm512_storeu_si512(to + PANEL, _mm512_permutex2var_epi16(even, second, odd));
      }
  }

  void add(const uint16_t* weights, long count, long at, long end, float* sums) {
    for (long i = 0; i < e.width; i += PANEL)
      product.run<false>(values + i * KEY_BLOCK + at * PANEL, weights + at, KEY_BLOCK, count, end - at, sums + i, e.width);
  }
};

}  // namespace
