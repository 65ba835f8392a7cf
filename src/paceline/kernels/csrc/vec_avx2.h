// Sixteen floats in two registers: AVX2 with FMA. See vec.h for what each function means.
#pragma once
#include <immintrin.h>

struct V {
  __m256 a, b;
};

static inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, V x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
static inline V set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline V operator+(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline V operator-(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline V operator*(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline V operator/(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline V larger(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline V smaller(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }

static inline V nearest(V x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}

static inline __m256 half_power(__m256 whole) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(whole), 23));
}
static inline V power_of(V whole) { return {half_power(whole.a), half_power(whole.b)}; }

static inline V zero_below(V x, float limit, V y) {
  __m256 l = _mm256_set1_ps(limit);
  return {_mm256_and_ps(_mm256_cmp_ps(x.a, l, _CMP_NLT_UQ), y.a),
          _mm256_and_ps(_mm256_cmp_ps(x.b, l, _CMP_NLT_UQ), y.b)};
}

static inline __m256i words(const uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

static inline V even_of(const uint16_t* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(words(p), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(words(p + 16), 16))};
}

static inline V odd_of(const uint16_t* p) {
  __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(words(p), high)),
          _mm256_castsi256_ps(_mm256_and_si256(words(p + 16), high))};
}

static inline __m256 half_load(const uint16_t* p) {
  __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
static inline V load(const uint16_t* p) { return {half_load(p), half_load(p + 8)}; }

static inline __m256 half_load(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
static inline V load(const int8_t* p) { return {half_load(p), half_load(p + 8)}; }

static inline __m256i rounded_bits(__m256 x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}

static inline V as_bf16(V x) {
  __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(rounded_bits(x.a), high)),
          _mm256_castsi256_ps(_mm256_and_si256(rounded_bits(x.b), high))};
}

static inline void store(uint16_t* p, V x) {
  __m256i low = _mm256_srli_epi32(rounded_bits(x.a), 16), high = _mm256_srli_epi32(rounded_bits(x.b), 16);
  __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), both);
}

// Lanes first .. first + 8 of eight rows as halves of eight vectors.
static inline void transpose8(const float* const* rows, int first, V* t, __m256 V::*half) {
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

static inline void transpose(const float* const* rows, V t[16]) {
  for (int first = 0; first < 16; first += 8) {
    transpose8(rows, first, t + first, &V::a);
    transpose8(rows + 8, first, t + first, &V::b);
  }
}

static inline void transpose(V t[16]) {
  float numbers[16][16];
  const float* rows[16];
  for (int i = 0; i < 16; i++) store(numbers[i], t[i]), rows[i] = numbers[i];
  transpose(rows, t);
}

constexpr int ROWS = 6;
constexpr int SUMS = 4;
constexpr int BROAD_ROWS = 2;
