// A vector of sixteen floats, V, whatever the instruction set has, and functions made of it.
//
// kernels.cpp is compiled once for each instruction set, and each compilation sees one of the
// headers below. They offer the same functions with the same results, bit for bit:
//
//   load, store        16 floats; of uint16_t: 16 bf16 numbers, rounded to nearest even
//   load               of int8_t: 16 whole numbers
//   even_of, odd_of    16 pairs of bf16 numbers: the first of each, the second of each, as floats
//   fma(a, b, c)       a * b + c, rounded once. Nothing else is ever contracted (-ffp-contract=off)
//   larger, smaller    the second where one is NaN
//   nearest            to integers, ties to even
//   power_of           2^n of WHOLE + n, -127 < n < 128
//   zero_below         y, but 0 where x < limit
//   as_bf16            rounded to bf16, still floats
//   transpose          16 x 16
//   ROWS, SUMS         of a product's register tile: rows at most, vectors of sums that registers hold
//   BROAD_ROWS         rows of a register tile of two vectors at most
#pragma once
#include <cstdint>
#include <cstring>

// What makes a whole number of a sum: a float of this size has no places behind the point. Its last
// bits are those of 127 + n.
constexpr float WHOLE = 12582912.0f + 127.0f;

#if defined(PACELINE_AVX512)
#include "vec_avx512.h"
#elif defined(PACELINE_AVX2)
#include "vec_avx2.h"
#elif defined(PACELINE_NEON)
#include "vec_neon.h"
#else
#include "vec_portable.h"
#endif

#if !defined(PACELINE_AVX2)
// The same of rows in memory.
static inline void transpose(const float* const* rows, V t[16]) {
  for (int i = 0; i < 16; i++) t[i] = load(rows[i]);
  transpose(t);
}
#endif

// The first n of 16 numbers, zeros behind them. Numbers beyond are not touched.
template <class T>
static inline V load_first(const T* p, long n) {
  if (n >= 16) return load(p);
  T all[16] = {};
  memcpy(all, p, static_cast<size_t>(n) * sizeof(T));
  return load(all);
}

template <class T>
static inline void store_first(T* p, long n, V a) {
  if (n >= 16) return store(p, a);
  T all[16];
  store(all, a);
  memcpy(p, all, static_cast<size_t>(n) * sizeof(T));
}

// Lanes are added as a tree: 8 apart, then 4, 2 and 1.
static inline float sum(V a) {
  float t[16];
  store(t, a);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) t[i] = t[i] + t[i + width];
  return t[0];
}

static inline float largest(V a) {
  float t[16];
  store(t, a);
  float best = t[0];
  for (int i = 1; i < 16; i++) best = t[i] > best ? t[i] : best;
  return best;
}

// e^x to 2 units in the last place; 0 below -87, e^88 above 88. NaN stays NaN.
static inline V exponential(V x) {
  V y = smaller(set1(88.0f), larger(set1(-87.0f), x));
  V whole = y * set1(1.44269504f) + set1(WHOLE), n = whole - set1(WHOLE);
  V r = fma(n, set1(-0.693359375f), y);  // ln 2 in two parts
  r = fma(n, set1(2.12194440e-4f), r);
  V p = set1(1.9875691500e-4f);  // Cephes' polynomial
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r + set1(1.0f));
  return zero_below(x, -87.0f, p * power_of(whole));
}

// e^x of x <= 0 for what is rounded to bf16: off by 3e-6 of itself, and by nothing at 0. 0 below -87.
static inline V coarse_exponential(V x) {
  V y = larger(set1(-126.0f), x * set1(1.44269504f));
  V whole = y + set1(WHOLE), f = y - (whole - set1(WHOLE));
  V p = fma(set1(9.582849219e-3f), f, set1(5.590643361e-2f));  // 2^f, least error for -1/2 .. 1/2
  p = fma(p, f, set1(2.402409911e-1f));
  p = fma(p, f, set1(6.931241751e-1f));
  p = fma(p, f, set1(1.0f));
  return zero_below(x, -87.0f, p * power_of(whole));
}

static inline V tangent(V x) {  // tanh
  return set1(1.0f) - set1(2.0f) / (exponential(x + x) + set1(1.0f));
}

static inline V capped(V x, float cap) { return set1(cap) * tangent(x / set1(cap)); }

enum Activation { SILU = 0, GELU_TANH = 1 };

static inline V activated(V x, int kind) {
  if (kind == SILU) return x / (set1(1.0f) + exponential(zero() - x));
  V cube = x * x * x;
  V inner = set1(0.79788456f) * fma(cube, set1(0.044715f), x);
  return set1(0.5f) * x * (set1(1.0f) + tangent(inner));
}

static inline float as_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
  memcpy(&x, &bits, 4);
  return x;
}
