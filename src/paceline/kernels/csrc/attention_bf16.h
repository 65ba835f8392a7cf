// The two products of attention on pairs of bf16 numbers, by AMX tiles or VDPBF16PS. The keys and values of a whole
// block are packed once and used by all rows of the item.
//
//   scores:   A: queries, bf16 [heads, width]       B: keys by pairs of numbers, a panel for each 32 keys
//   values:   A: exponentials, bf16 [heads, 256]    B: values by pairs of keys, a panel for each 32 numbers
#pragma once
#include "kv_block.h"
#if defined(PACELINE_AMX)
#include "amx_tiles.h"
#else
#include "gemm_bf16_dot.h"
#endif

namespace {

// Pairs of bf16 numbers, from 16 even and 16 odd ones that are floats already rounded.
inline F32x16 interleave_bf16(F32x16 even, F32x16 odd) {
  return each([](Floats a, Floats b) { return (Floats)((Words)a >> 16 | (Words)b); }, even, odd);
}

// c [rows, ldc] += a [rows, lda] times a panel; OVERWRITE: c = instead.
struct PairGemm {
#if defined(PACELINE_AMX)
  TileConfig config;
  template <bool OVERWRITE>
  void run(const uint16_t* panel, const uint16_t* a, long lda, long rows, long inputs, float* c, long ldc) {
    for (long r = 0; r < rows; r += 2 * TILE) {
      long count = rows - r < 2 * TILE ? rows - r : 2 * TILE;
      config.set_rows(count);
      tile_product<false, OVERWRITE>(panel, a + r * lda, lda, count, inputs, c + r * ldc, ldc);
    }
  }
#else
  template <bool OVERWRITE>
  void run(const uint16_t* panel, const uint16_t* a, long lda, long rows, long inputs, float* c, long ldc) {
    for (long r = 0; r < rows && OVERWRITE; r++) memset(c + r * ldc, 0, PANEL * sizeof(float));
    panel_product<DotPanel<false>>(panel, a, lda, STRIPE, rows, inputs, c, ldc);
  }
#endif
};

// Has the functions of VectorProducts (attention.h).
template <class Number>
struct PairProducts {
  typedef uint16_t Weight;
  static constexpr bool WHOLE_BLOCK = true;
  const KvBlock<Number>& kv;
  uint16_t *queries, *keys, *values;
  PairGemm gemm;

  PairProducts(const KvBlock<Number>& kv, float* memory, long heads)
      : kv(kv), queries(reinterpret_cast<uint16_t*>(memory)), keys(queries + heads * kv.width),
        values(keys + (KEY_BLOCK + PANEL) * kv.width) {}

  static void store_weight(uint16_t* to, F32x16 weight, bool) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(weight.a));
  }

  // `place`: which keys of the block the panel is for, or KEY_BLOCK, a panel beside those of the block.
  void pack_keys(long place, long at, long count, long due) {
    kv.transpose_keys(at, count, due, [&](F32x16 lanes, long i, long half) {
      float* to = reinterpret_cast<float*>(keys + (place * kv.width + i * PANEL) + 2 * half);
      store(to, kv.INT8 ? interleave_bf16(int8_of(lanes, 0), int8_of(lanes, 1)) : lanes);
      if (kv.INT8) store(to + PANEL, interleave_bf16(int8_of(lanes, 2), int8_of(lanes, 3)));
    });
  }

  void score(long place, long h, long count, float* to) {
    gemm.run<true>(keys + place * kv.width, queries + h * kv.width, kv.width, count, kv.width, to, KEY_BLOCK);
  }

  void pack_values(long at, long low, long high) {
    if (!kv.INT8 && low <= 0 && high >= STRIPE && kv.d == kv.width) return pack_full_values(at);
    for (long j = 0; j < STRIPE; j += 2)
      for (long i = 0; i < kv.width; i += 16) {
        F32x16 even = low <= j && j < high ? kv.value(at + j, i) : zero();
        F32x16 odd = low <= j + 1 && j + 1 < high ? kv.value(at + j + 1, i) : zero();
        uint16_t* to = values + i / PANEL * PANEL * KEY_BLOCK + (at + j) * PANEL + 2 * (i % PANEL);
        store(reinterpret_cast<float*>(to), interleave_bf16(even, odd));
      }
  }

  // The same for bf16 values of 32 keys that are all present.
  void pack_full_values(long at) {
    alignas(64) uint16_t order[64];
    for (int i = 0; i < 64; i++) order[i] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
    const __m512i first = _mm512_load_si512(order), second = _mm512_load_si512(order + 32);
    for (long j = 0; j < STRIPE; j += 2)
      for (long i = 0; i < kv.width; i += PANEL) {
        __m512i even = _mm512_loadu_si512(kv.values + kv.slots[at + j] * kv.stride + i);
        __m512i odd = _mm512_loadu_si512(kv.values + kv.slots[at + j + 1] * kv.stride + i);
        uint16_t* to = values + i * KEY_BLOCK + (at + j) * PANEL;
        _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, first, odd));
        _mm512_storeu_si512(to + PANEL, _mm512_permutex2var_epi16(even, second, odd));
      }
  }

  void add_values(const uint16_t* weights, long count, long at, long end, float* sums) {
    for (long i = 0; i < kv.width; i += PANEL)
      gemm.run<false>(values + i * KEY_BLOCK + at * PANEL, weights + at, KEY_BLOCK, count, end - at, sums + i, kv.width);
  }
};

}  // namespace
