// Sixteen sums in two registers: AVX2. See ints.h for what each function means.
#pragma once
struct I {
  __m256i a, b;
};
struct B {
  __m256i a, b;
};
static inline I whole(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline __m256i half_line(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
static inline B line(const uint8_t* p) { return {half_line(p), half_line(p + 32)}; }
static inline __m256i nibbles(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
static inline B low(B b) { return {nibbles(b.a), nibbles(b.b)}; }
static inline B high(B b) { return {nibbles(_mm256_srli_epi16(b.a, 4)), nibbles(_mm256_srli_epi16(b.b, 4))}; }
static inline __m256i half_evens(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi16(255)); }
static inline B evens(B b) { return {half_evens(b.a), half_evens(b.b)}; }
static inline B odds(B b) { return {_mm256_srli_epi16(b.a, 8), _mm256_srli_epi16(b.b, 8)}; }
static inline __m256i half_dot(__m256i s, __m256i w, __m256i x) { return _mm256_add_epi32(s, _mm256_madd_epi16(w, x)); }
static inline I dot_wide(I s, B w, int32_t x) {
  __m256i two = _mm256_set1_epi32(x);
  return {half_dot(s.a, w.a, two), half_dot(s.b, w.b, two)};
}
// Pairs of products of eight bits overflow sixteen, so even and odd bytes go through madd apart.
static inline I dot(I s, B w, int32_t x) {
  __m256i four = _mm256_set1_epi32(x), even = _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8);
  __m256i odd = _mm256_srai_epi16(four, 8);
  B first = evens(w), second = odds(w);
  return {half_dot(half_dot(s.a, first.a, even), second.a, odd), half_dot(half_dot(s.b, first.b, even), second.b, odd)};
}
static inline V floats(I s) { return {_mm256_cvtepi32_ps(s.a), _mm256_cvtepi32_ps(s.b)}; }
static inline V from_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
static inline void store_bytes(int8_t* p, V a, V b) {  // 32 whole numbers
  float t[32];
  store(t, a);
  store(t + 16, b);
  for (int i = 0; i < 32; i++) p[i] = static_cast<int8_t>(t[i]);
}
static inline void store_words(int16_t* p, V a) {
  float t[16];
  store(t, a);
  for (int i = 0; i < 16; i++) p[i] = static_cast<int16_t>(t[i]);
}

constexpr int QUANTISED_ROWS = 2;
