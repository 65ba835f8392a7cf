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
static inline I dot(I s, B w, int32_t x) { return {_mm512_dpbusd_epi32(s.v, w, _mm512_set1_epi32(x))}; }
static inline V floats(I s) { return {_mm512_cvtepi32_ps(s.v)}; }
static inline V from_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
static inline void store_bytes(int8_t* p, V a, V b) {  // 32 whole numbers
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(b.v)));
}

constexpr int QUANTISED_ROWS = 6;  // rows of a register tile
