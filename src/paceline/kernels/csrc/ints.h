// I32x16, sixteen int32 sums, and U8x64, a 64-byte line of weights whose bytes 4 i .. 4 i + 3 are four inputs of
// output i.
//
// quantised.cpp is compiled once for each instruction set, with one of the sections below. Integer sums are exact, so
// they are the same in all of them. Each defines:
//
//   widen_half                 IEEE fp16 numbers, as many as a register has lanes, to floats
//   INT8_BIAS                  what unsigned 8-bit weights exceed the signed ones by when they are multiplied
//   PREFETCH_IN_BURSTS         prefetch the next panel after each span, not line by line
//   MAX_QUANTISED_ROWS         rows of a register tile with int8 activations; MAX_INT16_ROWS: with int16
//   MAX_QUANTISED_ACCUMULATORS vectors of sums of a register tile
//
// and all but NEON, which computes all sums of a span in span_sums():
//
//   dot4(s, w, x)              lane i of s plus the sum of four products w[4 i + j] (0 .. 255) * x[j] (int8). Without
//                              BYTE_DOTS w is at most 24, and a lane of s is two 16-bit sums until widen_sums()
//   dot2(s, w, x)              lane i of s plus w[2 i] * x[0] + w[2 i + 1] * x[1], all 16-bit numbers
#pragma once
#include <array>

#include "kernels.h"
#include "vec.h"

typedef Vector<Words> U8x64;

#if !defined(PACELINE_NEON)
typedef Vector<Ints> I32x16;
#endif

// E2M1 + E2M1_BIAS
static constexpr auto E2M1_UNSIGNED = [] {
  std::array<uint8_t, 16> values{};
  for (size_t code = 0; code < 16; code++) values[code] = static_cast<uint8_t>(E2M1[code] + E2M1_BIAS);
  return values;
}();

#if defined(PACELINE_AVX512)  // with VNNI
static inline __m128i e2m1_table() { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(E2M1_UNSIGNED.data())); }
static inline Words e2m1_bytes(Words a) { return (Words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(e2m1_table()), (__m512i)a); }
static inline Floats widen_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
static inline I32x16 dot4(I32x16 s, U8x64 w, int32_t x) {
  return {(Ints)_mm512_dpbusd_epi32((__m512i)s.a, (__m512i)w.a, _mm512_set1_epi32(x))};
}
static inline I32x16 dot2(I32x16 s, U8x64 w, int32_t x) {
  return {(Ints)_mm512_dpwssd_epi32((__m512i)s.a, (__m512i)w.a, _mm512_set1_epi32(x))};
}
constexpr bool BYTE_DOTS = true;
static inline I32x16 widen_sums(I32x16 s) { return s; }
constexpr int MAX_QUANTISED_ROWS = 6, MAX_QUANTISED_ACCUMULATORS = 12;

#elif defined(PACELINE_AVX2)
static inline __m128i e2m1_table() { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(E2M1_UNSIGNED.data())); }
static inline Words e2m1_bytes(Words a) { return (Words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(e2m1_table()), (__m256i)a); }
static inline Floats widen_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
// Two multiplications, then two additions: 1.51 such pairs per cycle (Zen 3), against 1.39 if each addition follows
// its multiplication. In assembly, since GCC collects the products first, for which there are no registers.
#define PACELINE_DOT_BOTH(MULTIPLY, ADD)                                                              \
  asm(MULTIPLY " %2, %4, %3\n\t" MULTIPLY " %2, %5, %2\n\t" ADD " %3, %0, %0\n\t" ADD " %2, %1, %1" \
      : "+x"(s.a), "+x"(s.b), "+x"(inputs), "=&x"(products)                                     \
      : "x"(w.a), "x"(w.b))
static inline I32x16 dot2(I32x16 s, U8x64 w, int32_t x) {
  __m256i inputs = _mm256_set1_epi32(x), products;
  PACELINE_DOT_BOTH("vpmaddwd", "vpaddd");
  return s;
}
// With 4-bit weights, pairs of products are summed in 16 bits, and what the 16 of a half end at fits: at most 16 * 15 *
// 127 without a bias, since each half starts from its own.
constexpr bool BYTE_DOTS = false;
static inline I32x16 dot4(I32x16 s, U8x64 w, int32_t x) {
  __m256i inputs = _mm256_set1_epi32(x), products;
  PACELINE_DOT_BOTH("vpmaddubsw", "vpaddw");
  return s;
}
static inline I32x16 widen_sums(I32x16 s) {
  return each<I32x16>([](Ints a) { return (Ints)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi16(1)); }, s);
}
constexpr int MAX_QUANTISED_ROWS = 6, MAX_QUANTISED_ACCUMULATORS = 4;

#elif defined(PACELINE_NEON)
static inline Floats widen_half(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
#include "ints_neon.h"

#else
static inline Words e2m1_bytes(Words a) {
  Words values{};
  for (int j = 0; j < 32; j += 8)
    for (size_t i = 0; i < sizeof a / 4; i++) values[i] |= static_cast<uint32_t>(E2M1_UNSIGNED[a[i] >> j & 15]) << j;
  return values;
}
static inline Floats widen_half(const uint16_t* p) {
  Words half{p[0], p[1], p[2], p[3]}, sign = (half & 0x8000) << 16, rest = half & 0x7fff;
  Floats small = __builtin_convertvector((Ints)rest, Floats) * 0x1p-24f;  // subnormal, exact
  // Infinities are refused when weights are packed.
  return (Floats)(sign | (rest < 0x0400 ? (Words)small : (rest + 0x1c000) << 13));
}
static inline I32x16 dot4(I32x16 s, U8x64 w, int32_t x) {
  for (int j = 0; j < 32; j += 8)
    s = each<I32x16>([=](Ints sum, Words four) { return sum + (Ints)(four >> j & 255) * static_cast<int8_t>(x >> j); }, s, w);
  return s;
}
static inline I32x16 dot2(I32x16 s, U8x64 w, int32_t x) {
  for (int j = 0; j < 32; j += 16)
    s = each<I32x16>([=](Ints sum, Words two) { return sum + (Ints)(two >> j & 65535) * static_cast<int16_t>(x >> j); }, s, w);
  return s;
}
constexpr bool BYTE_DOTS = true;
static inline I32x16 widen_sums(I32x16 s) { return s; }
constexpr int MAX_QUANTISED_ROWS = 2, MAX_QUANTISED_ACCUMULATORS = 4;
#endif

#if defined(PACELINE_AVX2)
constexpr bool PREFETCH_IN_BURSTS = false;
#else
constexpr bool PREFETCH_IN_BURSTS = true;
#endif
#if !defined(PACELINE_NEON)
constexpr bool INT16_AS_BYTES = false;
constexpr int32_t INT8_BIAS = 128;
constexpr int MAX_INT16_ROWS = MAX_QUANTISED_ROWS;
#endif

static inline U8x64 load_line(const uint8_t* p) { return map<U8x64>([=](int i) { return load_register<Words>(p, i); }); }
// The lower and the upper four bits of each byte.
static inline U8x64 low_nibbles(U8x64 x) { return each<U8x64>([](Words a) { return a & 0x0f0f0f0f; }, x); }
static inline U8x64 high_nibbles(U8x64 x) { return each<U8x64>([](Words a) { return a >> 4 & 0x0f0f0f0f; }, x); }
#if !defined(PACELINE_NEON)
// The unsigned values of 4-bit floats, one in each byte.
static inline U8x64 e2m1_values(U8x64 x) {
  return each<U8x64>([](Words a) { return e2m1_bytes(a); }, x);
}
#endif
// Bytes 0 and 2, or 1 and 3, of each four, as 16-bit numbers.
typedef uint16_t Pairs __attribute__((vector_size(sizeof(Words))));
static inline U8x64 even_bytes(U8x64 x) { return each<U8x64>([](Words a) { return a & 0x00ff00ff; }, x); }
static inline U8x64 odd_bytes(U8x64 x) { return each<U8x64>([](Words a) { return (Words)((Pairs)a >> 8); }, x); }

#if !defined(PACELINE_NEON)
static inline I32x16 set1_i32(int32_t x) { return map<I32x16>([=](int) { return x - Ints{}; }); }
// Rounded to nearest, exact below 2^24.
static inline F32x16 to_float(I32x16 x) { return each([](Ints a) { return __builtin_convertvector(a, Floats); }, x); }
#endif
static inline F32x16 load_half(const uint16_t* p) { return map([=](int i) { return widen_half(p + LANES * i); }); }
// Floats that are whole numbers.
static inline void store(int16_t* p, F32x16 x) {
  typedef int16_t Shorts __attribute__((vector_size(sizeof(Floats) / 2)));
  store_each(p, [](Floats a) { return __builtin_convertvector(__builtin_convertvector(a, Ints), Shorts); }, x);
}
static inline void store(int8_t* p, F32x16 x) {
  typedef int8_t Bytes __attribute__((vector_size(sizeof(Floats) / 4)));
  store_each(p, [](Floats a) { return __builtin_convertvector(__builtin_convertvector(a, Ints), Bytes); }, x);
}
