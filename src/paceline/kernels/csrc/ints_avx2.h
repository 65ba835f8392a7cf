// I32x16 in two registers: AVX2. ints.h says what each function does.
#pragma once
struct I32x16 {
  __m256i a, b;
};
struct U8x64 {
  __m256i a, b;
};
static inline I32x16 set1_i32(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline __m256i load32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
static inline U8x64 load_line(const uint8_t* p) { return {load32(p), load32(p + 32)}; }
static inline __m256i nibbles(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
static inline U8x64 low_nibbles(U8x64 b) { return {nibbles(b.a), nibbles(b.b)}; }
static inline U8x64 high_nibbles(U8x64 b) { return {nibbles(_mm256_srli_epi16(b.a, 4)), nibbles(_mm256_srli_epi16(b.b, 4))}; }
static inline __m256i even_bytes32(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi16(255)); }
static inline U8x64 even_bytes(U8x64 b) { return {even_bytes32(b.a), even_bytes32(b.b)}; }
static inline U8x64 odd_bytes(U8x64 b) { return {_mm256_srli_epi16(b.a, 8), _mm256_srli_epi16(b.b, 8)}; }
// Two multiplications, then two additions: 1.51 such pairs per cycle (Zen 3), against 1.39 if each addition follows
// its multiplication. In assembly, since GCC collects the products first, for which there are no registers.
#define PACELINE_DOT_BOTH(MULTIPLY, ADD)                                                              \
  asm(MULTIPLY " %2, %4, %3\n\t" MULTIPLY " %2, %5, %2\n\t" ADD " %3, %0, %0\n\t" ADD " %2, %1, %1" \
      : "+x"(s.a), "+x"(s.b), "+x"(inputs), "=&x"(products)                                           \
      : "x"(w.a), "x"(w.b))
static inline I32x16 dot2(I32x16 s, U8x64 w, int32_t x) {
  __m256i inputs = _mm256_set1_epi32(x), products;
  PACELINE_DOT_BOTH("vpmaddwd", "vpaddd");
  return s;
}
// With 4-bit weights, pairs of products are summed in 16 bits and do not overflow over the 32 inputs of a span: the
// lower half of a lane, which holds the start as well, ends at 2 * 16 * 8 * 127 at most, the upper half at 16 * 15
// * 127.
constexpr bool BYTE_DOTS = false;
static inline I32x16 dot4(I32x16 s, U8x64 w, int32_t x) {
  __m256i inputs = _mm256_set1_epi32(x), products;
  PACELINE_DOT_BOTH("vpmaddubsw", "vpaddw");
  return s;
}
static inline I32x16 widen_sums(I32x16 s) {
  __m256i one = _mm256_set1_epi16(1);
  return {_mm256_madd_epi16(s.a, one), _mm256_madd_epi16(s.b, one)};
}
static inline F32x16 to_float(I32x16 s) { return {_mm256_cvtepi32_ps(s.a), _mm256_cvtepi32_ps(s.b)}; }
static inline F32x16 load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
static inline __m256i to_i16(F32x16 x) {  // in the order 0-3, 8-11, 4-7, 12-15
  return _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
}
static inline void store_i8(int8_t* p, F32x16 a, F32x16 b) {
  __m256i bytes = _mm256_packs_epi16(to_i16(a), to_i16(b)), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(bytes, order));
}
static inline void store_i16(int16_t* p, F32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(to_i16(a), 0xd8));
}

constexpr bool PREFETCH_IN_BURSTS = false;
constexpr int MAX_QUANTISED_ROWS = 6;
constexpr int MAX_QUANTISED_ACCUMULATORS = 4;
