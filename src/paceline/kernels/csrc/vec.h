// F32x16, a vector of sixteen floats, and functions on it that give the same bits on every instruction set.
//
// kernels.cpp is compiled once for each instruction set. Each compilation includes one of the vec_*.h below, which
// all define:
//
//   load, store           16 floats, or 16 bf16 numbers (uint16_t; store rounds to nearest even)
//   load                  16 int8 numbers, converted to float
//   load_even, load_odd   of 16 pairs of bf16 numbers (32 in a row), the first or the second of each pair
//   fma(a, b, c)          a * b + c, rounded once. The compiler contracts nothing else (-ffp-contract=off)
//   max, min              the second operand if one is NaN
//   nearest               round to integer, ties to even
//   exp2_of_magic         2^n of MAGIC + n, for integers -127 < n < 128
//   zero_where_less(x, limit, y)  y, but 0 where x < limit
//   round_to_bf16         round to nearest even, result as floats
//   transpose             16 x 16
//
// and the largest register tile of the GEMM in gemm.h:
//
//   MAX_TILE_ROWS     rows
//   MAX_ACCUMULATORS  vectors of sums that stay in registers
//   MAX_WIDE_ROWS     rows of a tile that is two vectors (32 outputs) wide
#pragma once
#include <cstdint>
#include <cstring>

// Adding MAGIC rounds a small float to an integer n: floats of this size have no fraction bits. The low mantissa
// bits then hold 127 + n, which is the exponent of 2^n once they are shifted left by 23.
constexpr float MAGIC = 12582912.0f + 127.0f;

static inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

static inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// The bits of x rounded to bf16 in the upper 16 bits.
static inline uint32_t bf16_bits(float x) { return bits_of(x) + 0x7fff + ((bits_of(x) >> 16) & 1); }
static inline float round_to_bf16(float x) { return float_of(bf16_bits(x) & 0xffff0000u); }

#if defined(PACELINE_AVX512)
#include "vec_avx512.h"
#elif defined(PACELINE_AVX2)
#include "vec_avx2.h"
#elif defined(PACELINE_NEON)
#include "vec_neon.h"
#else
#include "vec_portable.h"
#endif

#if !defined(PACELINE_AVX2)  // which transposes while it loads
static inline void transpose(const float* const* rows, F32x16 t[16]) {
  for (int i = 0; i < 16; i++) t[i] = load(rows[i]);
  transpose(t);
}
#endif

// The first n of 16 numbers, the rest zeros. Memory behind them is not read or written.
template <class T>
static inline F32x16 load_partial(const T* p, long n) {
  if (n >= 16) return load(p);
  T all[16] = {};
  memcpy(all, p, static_cast<size_t>(n) * sizeof(T));
  return load(all);
}

template <class T>
static inline void store_partial(T* p, long n, F32x16 a) {
  if (n >= 16) return store(p, a);
  T all[16];
  store(all, a);
  memcpy(p, all, static_cast<size_t>(n) * sizeof(T));
}

// The sum of all lanes, added as a tree: lanes 8 apart, then 4, 2 and 1.
static inline float reduce_sum(F32x16 a) {
  float t[16];
  store(t, a);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) t[i] = t[i] + t[i + width];
  return t[0];
}

static inline float reduce_max(F32x16 a) {
  float t[16];
  store(t, a);
  float best = t[0];
  for (int i = 1; i < 16; i++) best = t[i] > best ? t[i] : best;
  return best;
}

// e^x within 2 ulp; 0 below -87, e^88 above 88. NaN stays NaN.
static inline F32x16 exp(F32x16 x) {
  F32x16 y = min(set1(88.0f), max(set1(-87.0f), x));
  F32x16 magic = y * set1(1.44269504f) + set1(MAGIC), n = magic - set1(MAGIC);
  F32x16 r = fma(n, set1(-0.693359375f), y);  // minus n ln 2, in two parts
  r = fma(n, set1(2.12194440e-4f), r);
  F32x16 p = set1(1.9875691500e-4f);  // the polynomial of Cephes' expf
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r + set1(1.0f));
  return zero_where_less(x, -87.0f, p * exp2_of_magic(magic));
}

// e^x for x <= 0 where the result is rounded to bf16: relative error 3e-6, exact at 0. 0 below -87.
static inline F32x16 fast_exp(F32x16 x) {
  F32x16 y = max(set1(-126.0f), x * set1(1.44269504f));
  F32x16 magic = y + set1(MAGIC), f = y - (magic - set1(MAGIC));
  F32x16 p = fma(set1(9.582849219e-3f), f, set1(5.590643361e-2f));  // minimax polynomial of 2^f, -1/2 .. 1/2
  p = fma(p, f, set1(2.402409911e-1f));
  p = fma(p, f, set1(6.931241751e-1f));
  p = fma(p, f, set1(1.0f));
  return zero_where_less(x, -87.0f, p * exp2_of_magic(magic));
}

static inline F32x16 tanh(F32x16 x) { return set1(1.0f) - set1(2.0f) / (exp(x + x) + set1(1.0f)); }

static inline F32x16 softcap(F32x16 x, float cap) { return set1(cap) * tanh(x / set1(cap)); }

enum Activation { SILU = 0, GELU_TANH = 1 };

static inline F32x16 activate(F32x16 x, int kind) {
  if (kind == SILU) return x / (set1(1.0f) + exp(zero() - x));
  F32x16 cube = x * x * x;
  F32x16 inner = set1(0.79788456f) * fma(cube, set1(0.044715f), x);
  return set1(0.5f) * x * (set1(1.0f) + tanh(inner));
}
