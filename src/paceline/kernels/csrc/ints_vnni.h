// Sixteen sums in one register: AVX512 with VNNI. See ints.h for what each function means.
#pragma once
struct I {
  __m512i v;
};
typedef __m512i B;
static inline I whole(int32_t x) { return {_mm512_set1_epi32(x)}; }
static inline B line(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline B low(B b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
static inline B high(B b) { return _mm512_and_si512(_mm512_srli_epi16(b, 4), _mm512_set1_epi8(15)); }
constexpr bool BYTE_DOTS = true;
static inline I joined(I s) { return s; }
static inline I dot(I s, B w, int32_t x) { return {_mm512_dpbusd_epi32(s.v, w, _mm512_set1_epi32(x))}; }
static inline B evens(B b) { return _mm512_and_si512(b, _mm512_set1_epi16(255)); }
static inline B odds(B b) { return _mm512_srli_epi16(b, 8); }
static inline I dot_wide(I s, B w, int32_t x) { return {_mm512_dpwssd_epi32(s.v, w, _mm512_set1_epi32(x))}; }
static inline V floats(I s) { return {_mm512_cvtepi32_ps(s.v)}; }
static inline V from_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
static inline void store_bytes(int8_t* p, V a, V b) {  // 32 whole numbers
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(b.v)));
}
static inline void store_words(int16_t* p, V a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a.v)));
}
static inline I of_sums(const int32_t* sums, int32_t start) {
  return {_mm512_add_epi32(_mm512_loadu_si512(sums), _mm512_set1_epi32(start))};
}
// 256 upper + lower + start, of sums of upper and of lower bytes.
static inline I of_bytes(const int32_t* upper, const int32_t* lower, int32_t start) {
  __m512i high = _mm512_slli_epi32(_mm512_loadu_si512(upper), 8);
  return {_mm512_add_epi32(_mm512_add_epi32(high, _mm512_loadu_si512(lower)), _mm512_set1_epi32(start))};
}

constexpr int QUANTISED_ROWS = 6;   // rows of a register tile
constexpr int QUANTISED_SUMS = 12;  // vectors of sums that it has
