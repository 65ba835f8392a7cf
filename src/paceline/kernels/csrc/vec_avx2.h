// F32x16 in two registers: AVX2 with FMA. vec.h says what each function does.
#pragma once
#include <immintrin.h>

struct F32x16 {
  __m256 a, b;
};

static inline F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, F32x16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
static inline F32x16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline F32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline F32x16 fma(F32x16 x, F32x16 y, F32x16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline F32x16 operator+(F32x16 x, F32x16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline F32x16 operator-(F32x16 x, F32x16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline F32x16 operator*(F32x16 x, F32x16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline F32x16 operator/(F32x16 x, F32x16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline F32x16 max(F32x16 x, F32x16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline F32x16 min(F32x16 x, F32x16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }

static inline F32x16 nearest(F32x16 x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}

static inline __m256 exp2_of_magic(__m256 x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x), 23));
}
static inline F32x16 exp2_of_magic(F32x16 x) { return {exp2_of_magic(x.a), exp2_of_magic(x.b)}; }

static inline F32x16 zero_where_less(F32x16 x, float limit, F32x16 y) {
  __m256 l = _mm256_set1_ps(limit);
  return {_mm256_and_ps(_mm256_cmp_ps(x.a, l, _CMP_NLT_UQ), y.a),
          _mm256_and_ps(_mm256_cmp_ps(x.b, l, _CMP_NLT_UQ), y.b)};
}

static inline __m256i load_pairs(const uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

static inline F32x16 load_even(const uint16_t* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(load_pairs(p), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(load_pairs(p + 16), 16))};
}

static inline F32x16 load_odd(const uint16_t* p) {
  __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(load_pairs(p), high)),
          _mm256_castsi256_ps(_mm256_and_si256(load_pairs(p + 16), high))};
}

static inline __m256 load8(const uint16_t* p) {
  __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
static inline F32x16 load(const uint16_t* p) { return {load8(p), load8(p + 8)}; }

static inline __m256 load8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
static inline F32x16 load(const int8_t* p) { return {load8(p), load8(p + 8)}; }

static inline __m256i rounded_bits(__m256 x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}

static inline F32x16 round_to_bf16(F32x16 x) {
  __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(rounded_bits(x.a), high)),
          _mm256_castsi256_ps(_mm256_and_si256(rounded_bits(x.b), high))};
}

static inline void store(uint16_t* p, F32x16 x) {
  __m256i low = _mm256_srli_epi32(rounded_bits(x.a), 16), high = _mm256_srli_epi32(rounded_bits(x.b), 16);
  __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), both);
}

// Transposes columns first .. first + 8 of eight rows into one half (member a or b) of eight vectors.
static inline void transpose8(const float* const* rows, int first, F32x16* t, __m256 F32x16::*half) {
  __m256 r[8], a[8];
  for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(rows[i] + first);
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    t[i].*half = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    t[i + 4].*half = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
}

static inline void transpose(const float* const* rows, F32x16 t[16]) {
  for (int first = 0; first < 16; first += 8) {
    transpose8(rows, first, t + first, &F32x16::a);
    transpose8(rows + 8, first, t + first, &F32x16::b);
  }
}

static inline void transpose(F32x16 t[16]) {
  float numbers[16][16];
  const float* rows[16];
  for (int i = 0; i < 16; i++) store(numbers[i], t[i]), rows[i] = numbers[i];
  transpose(rows, t);
}

constexpr int MAX_TILE_ROWS = 6;
constexpr int MAX_ACCUMULATORS = 4;
constexpr int MAX_WIDE_ROWS = 2;
