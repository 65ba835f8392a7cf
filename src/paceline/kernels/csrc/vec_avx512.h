// F32x16 in one register: AVX512 (F, BW, VL, DQ). vec.h says what each function does.
#pragma once
#include <immintrin.h>

struct F32x16 {
  __m512 v;
};

static inline F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, F32x16 a) { _mm512_storeu_ps(p, a.v); }
static inline F32x16 set1(float x) { return {_mm512_set1_ps(x)}; }
static inline F32x16 zero() { return {_mm512_setzero_ps()}; }
static inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline F32x16 operator+(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline F32x16 operator-(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline F32x16 operator*(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline F32x16 operator/(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline F32x16 nearest(F32x16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

static inline F32x16 exp2_of_magic(F32x16 x) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x.v), 23))};
}

static inline F32x16 zero_where_less(F32x16 x, float limit, F32x16 y) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_NLT_UQ), y.v)};
}

static inline F32x16 load_even(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}

static inline F32x16 load_odd(const uint16_t* p) {
  __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), high))};
}

static inline F32x16 load(const uint16_t* p) {
  __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}

static inline F32x16 load(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}

static inline __m512i rounded_bits(F32x16 a) {
  __m512i bits = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
}

static inline F32x16 round_to_bf16(F32x16 a) {
  __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm512_castsi512_ps(_mm512_and_si512(rounded_bits(a), high))};
}

static inline void store(uint16_t* p, F32x16 a) {
  __m256i half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bits(a), 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
}

[[gnu::always_inline]] static inline void transpose(F32x16 t[16]) {  // t stays in registers
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(t[i].v, t[i + 1].v);
    a[i + 1] = _mm512_unpackhi_ps(t[i].v, t[i + 1].v);
  }
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    a[i] = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88);
    a[i + 4] = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
    a[i + 8] = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = {_mm512_shuffle_f32x4(a[i], a[i + 8], 0x88)};
    t[i + 8] = {_mm512_shuffle_f32x4(a[i], a[i + 8], 0xdd)};
    t[i + 4] = {_mm512_shuffle_f32x4(a[i + 4], a[i + 12], 0x88)};
    t[i + 12] = {_mm512_shuffle_f32x4(a[i + 4], a[i + 12], 0xdd)};
  }
}

constexpr int MAX_TILE_ROWS = 12;
constexpr int MAX_ACCUMULATORS = 24;
constexpr int MAX_WIDE_ROWS = 12;
