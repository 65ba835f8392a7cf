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
// Two products, then two sums: 1.51 of these pairs a cycle (Zen 3), where one after the other 1.39. GCC adds up products
// first, for which there are no registers.
#define PACELINE_TWICE(MULTIPLY, ADD)                                                                     \
  asm(MULTIPLY " %2, %4, %3\n\t" MULTIPLY " %2, %5, %2\n\t" ADD " %3, %0, %0\n\t" ADD " %2, %1, %1" \
      : "+x"(s.a), "+x"(s.b), "+x"(inputs), "=&x"(other)                                                  \
      : "x"(w.a), "x"(w.b))
static inline I dot_wide(I s, B w, int32_t x) {
  __m256i inputs = _mm256_set1_epi32(x), other;
  PACELINE_TWICE("vpmaddwd", "vpaddd");
  return s;
}
// Beside weights of four bits pairs of products are summed in 16 bits, from the start on in the lower ones: of the 32
// inputs of a span the lower sum is at most 2 * 16 * 8 * 127 in the end, the upper one 16 * 15 * 127.
constexpr bool BYTE_DOTS = false;
static inline I dot(I s, B w, int32_t x) {
  __m256i inputs = _mm256_set1_epi32(x), other;
  PACELINE_TWICE("vpmaddubsw", "vpaddw");
  return s;
}
static inline I joined(I s) {
  __m256i one = _mm256_set1_epi16(1);
  return {_mm256_madd_epi16(s.a, one), _mm256_madd_epi16(s.b, one)};
}
static inline V floats(I s) { return {_mm256_cvtepi32_ps(s.a), _mm256_cvtepi32_ps(s.b)}; }
static inline V from_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
static inline __m256i as_words(V x) {  // 0-3, 8-11, 4-7, 12-15
  return _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
}
static inline void store_bytes(int8_t* p, V a, V b) {  // 32 whole numbers
  __m256i bytes = _mm256_packs_epi16(as_words(a), as_words(b)), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(bytes, order));
}
static inline void store_words(int16_t* p, V a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(as_words(a), 0xd8));
}

constexpr bool BURSTS = false;
constexpr int QUANTISED_ROWS = 6;
constexpr int QUANTISED_SUMS = 4;
