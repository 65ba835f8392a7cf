// I32x16 in one register: AVX512 with VNNI. ints.h says what each function does.
#pragma once
struct I32x16 {
  __m512i v;
};
typedef __m512i U8x64;
static inline I32x16 set1_i32(int32_t x) { return {_mm512_set1_epi32(x)}; }
static inline U8x64 load_line(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline U8x64 low_nibbles(U8x64 b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
static inline U8x64 high_nibbles(U8x64 b) { return _mm512_and_si512(_mm512_srli_epi16(b, 4), _mm512_set1_epi8(15)); }
constexpr bool BYTE_DOTS = true;
static inline I32x16 widen_sums(I32x16 s) { return s; }
static inline I32x16 dot4(I32x16 s, U8x64 w, int32_t x) { return {_mm512_dpbusd_epi32(s.v, w, _mm512_set1_epi32(x))}; }
static inline U8x64 even_bytes(U8x64 b) { return _mm512_and_si512(b, _mm512_set1_epi16(255)); }
static inline U8x64 odd_bytes(U8x64 b) { return _mm512_srli_epi16(b, 8); }
static inline I32x16 dot2(I32x16 s, U8x64 w, int32_t x) { return {_mm512_dpwssd_epi32(s.v, w, _mm512_set1_epi32(x))}; }
static inline F32x16 to_float(I32x16 s) { return {_mm512_cvtepi32_ps(s.v)}; }
static inline F32x16 load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
static inline void store_i8(int8_t* p, F32x16 a, F32x16 b) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(b.v)));
}
static inline void store_i16(int16_t* p, F32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a.v)));
}
static inline I32x16 add_start(const int32_t* sums, int32_t start) {
  return {_mm512_add_epi32(_mm512_loadu_si512(sums), _mm512_set1_epi32(start))};
}
// 256 * upper + lower + start: the sums of an int16 activation from those of its bytes (quantised_amx.h).
static inline I32x16 combine_bytes(const int32_t* upper, const int32_t* lower, int32_t start) {
  __m512i high = _mm512_slli_epi32(_mm512_loadu_si512(upper), 8);
  return {_mm512_add_epi32(_mm512_add_epi32(high, _mm512_loadu_si512(lower)), _mm512_set1_epi32(start))};
}

constexpr int MAX_QUANTISED_ROWS = 6;
constexpr int MAX_QUANTISED_ACCUMULATORS = 12;
