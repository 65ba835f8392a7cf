// F32x16, sixteen floats in one, two or four registers, and functions on it that give the same bits on every
// instruction set.
//
// kernels.cpp is compiled once for each instruction set, with one of the four sections below. Each defines a register,
// Floats, and what compilers do not make of vectors by themselves:
//
//   fma(a, b, c)            a * b + c, rounded once. The compiler contracts nothing else (-ffp-contract=off)
//   max, min                the second operand if one is NaN
//   widen                   bf16 numbers (uint16_t) or int8 numbers, as many as a register has lanes, to floats
//   load_fours(rows, at)    of every fourth row, the four floats from `at` on
//   zip_low, zip_high       a0 b0 a1 b1 and a2 b2 a3 b3 of each four lanes
//
// and the largest register tile of the GEMM in gemm.h:
//
//   MAX_TILE_ROWS     rows
//   MAX_ACCUMULATORS  vectors of sums that stay in registers
//   MAX_WIDE_ROWS     rows of a tile that is two vectors (32 outputs) wide
#pragma once
#include <cstdint>
#include <cstring>
#if defined(PACELINE_AVX512) || defined(PACELINE_AVX2)
#include <immintrin.h>
#elif defined(PACELINE_NEON)
#include <arm_neon.h>
#endif

#if defined(PACELINE_AVX512)  // F, BW, VL, DQ
typedef float Floats __attribute__((vector_size(64)));
static inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
static inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
static inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
static inline Floats widen(const uint16_t* p) {
  __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
static inline Floats widen(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
static inline Floats load_fours(const float* const* rows, int at) {
  __m512 low = _mm512_insertf32x4(_mm512_castps128_ps512(_mm_loadu_ps(rows[0] + at)), _mm_loadu_ps(rows[4] + at), 1);
  return _mm512_insertf32x4(_mm512_insertf32x4(low, _mm_loadu_ps(rows[8] + at), 2), _mm_loadu_ps(rows[12] + at), 3);
}
static inline Floats zip_low(Floats a, Floats b) { return _mm512_unpacklo_ps(a, b); }
static inline Floats zip_high(Floats a, Floats b) { return _mm512_unpackhi_ps(a, b); }
constexpr int MAX_TILE_ROWS = 12, MAX_ACCUMULATORS = 24, MAX_WIDE_ROWS = 12;

#elif defined(PACELINE_AVX2)  // with FMA
typedef float Floats __attribute__((vector_size(32)));
static inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
static inline Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
static inline Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
static inline Floats widen(const uint16_t* p) {
  __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
static inline Floats widen(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
static inline Floats load_fours(const float* const* rows, int at) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[0] + at)), _mm_loadu_ps(rows[4] + at), 1);
}
static inline Floats zip_low(Floats a, Floats b) { return _mm256_unpacklo_ps(a, b); }
static inline Floats zip_high(Floats a, Floats b) { return _mm256_unpackhi_ps(a, b); }
constexpr int MAX_TILE_ROWS = 6, MAX_ACCUMULATORS = 4, MAX_WIDE_ROWS = 2;

#else
typedef float Floats __attribute__((vector_size(16)));
static inline Floats max(Floats a, Floats b) { return a > b ? a : b; }
static inline Floats min(Floats a, Floats b) { return a < b ? a : b; }
static inline Floats load_fours(const float* const* rows, int at) {
  Floats four;
  memcpy(&four, rows[0] + at, sizeof four);
  return four;
}
#if defined(PACELINE_NEON)  // of 64-bit ARM
static inline Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
static inline Floats widen(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
static inline Floats widen(const int8_t* p) {
  int32_t four;
  memcpy(&four, p, sizeof four);
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))));
}
static inline Floats zip_low(Floats a, Floats b) { return vzip1q_f32(a, b); }
static inline Floats zip_high(Floats a, Floats b) { return vzip2q_f32(a, b); }
constexpr int MAX_TILE_ROWS = 3, MAX_ACCUMULATORS = 6, MAX_WIDE_ROWS = 1;

#else  // every processor
static inline Floats fma(Floats a, Floats b, Floats c) {
  for (int i = 0; i < 4; i++) a[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return a;
}
static inline Floats widen(const uint16_t* p) {
  typedef uint32_t Four __attribute__((vector_size(16)));
  return (Floats)(Four{p[0], p[1], p[2], p[3]} << 16);
}
static inline Floats widen(const int8_t* p) {
  return Floats{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]), static_cast<float>(p[3])};
}
static inline Floats zip_low(Floats a, Floats b) { return Floats{a[0], b[0], a[1], b[1]}; }
static inline Floats zip_high(Floats a, Floats b) { return Floats{a[2], b[2], a[3], b[3]}; }
constexpr int MAX_TILE_ROWS = 2, MAX_ACCUMULATORS = 4, MAX_WIDE_ROWS = 2;
#endif
#endif

constexpr int LANES = sizeof(Floats) / sizeof(float), REGISTERS = 16 / LANES;
typedef uint32_t Words __attribute__((vector_size(sizeof(Floats))));
typedef int32_t Ints __attribute__((vector_size(sizeof(Floats))));

template <class Register, int N = REGISTERS>
struct Vector {
  Register a;
};
template <class Register>
struct Vector<Register, 2> {
  Register a, b;
};
template <class Register>
struct Vector<Register, 4> {
  Register a, b, c, d;
};
typedef Vector<Floats> F32x16;

// A vector whose register i is f(i).
template <class T = F32x16, class F>
static inline T map(F f) {
  if constexpr (REGISTERS == 1)
    return {f(0)};
  else if constexpr (REGISTERS == 2)
    return {f(0), f(1)};
  else
    return {f(0), f(1), f(2), f(3)};
}

// The vector of f of each register of x.
template <class T = F32x16, class F, class... X>
static inline T each(F f, X... x) {
  if constexpr (REGISTERS == 1)
    return {f(x.a...)};
  else if constexpr (REGISTERS == 2)
    return {f(x.a...), f(x.b...)};
  else
    return {f(x.a...), f(x.b...), f(x.c...), f(x.d...)};
}

// Register i of what lies at p, of which no alignment is asked.
template <class Register, class T>
static inline Register load_register(const T* p, int i) {
  Register r;
  memcpy(&r, reinterpret_cast<const char*>(p) + static_cast<size_t>(i) * sizeof r, sizeof r);
  return r;
}

// Stores f of each register of x, one behind the other.
template <class T, class F, class V>
static inline void store_each(T* p, F f, V x) {
  auto put = [&](int i, auto r) { memcpy(reinterpret_cast<char*>(p) + static_cast<size_t>(i) * sizeof r, &r, sizeof r); };
  put(0, f(x.a));
  if constexpr (REGISTERS > 1) put(1, f(x.b));
  if constexpr (REGISTERS > 2) put(2, f(x.c)), put(3, f(x.d));
}

static inline F32x16 load(const float* p) { return map([=](int i) { return load_register<Floats>(p, i); }); }
static inline F32x16 load(const uint16_t* p) { return map([=](int i) { return widen(p + LANES * i); }); }
static inline F32x16 load(const int8_t* p) { return map([=](int i) { return widen(p + LANES * i); }); }
static inline void store(float* p, F32x16 x) { store_each(p, [](Floats a) { return a; }, x); }
static inline F32x16 set1(float x) { return map([=](int) { return x - Floats{}; }); }
static inline F32x16 zero() { static const F32x16 x{}; return x; }  // not of a lambda: GCC 12 then keeps sums on the stack
static inline F32x16 operator+(F32x16 x, F32x16 y) { return each([](Floats a, Floats b) { return a + b; }, x, y); }
static inline F32x16 operator-(F32x16 x, F32x16 y) { return each([](Floats a, Floats b) { return a - b; }, x, y); }
static inline F32x16 operator*(F32x16 x, F32x16 y) { return each([](Floats a, Floats b) { return a * b; }, x, y); }
static inline F32x16 operator/(F32x16 x, F32x16 y) { return each([](Floats a, Floats b) { return a / b; }, x, y); }
static inline F32x16 fma(F32x16 x, F32x16 y, F32x16 z) { return each([](Floats a, Floats b, Floats c) { return fma(a, b, c); }, x, y, z); }
static inline F32x16 max(F32x16 x, F32x16 y) { return each([](Floats a, Floats b) { return max(a, b); }, x, y); }
static inline F32x16 min(F32x16 x, F32x16 y) { return each([](Floats a, Floats b) { return min(a, b); }, x, y); }
// y, but 0 where x < limit
static inline F32x16 zero_where_less(F32x16 x, float limit, F32x16 y) {
  return each([=](Floats a, Floats b) { return a < limit - Floats{} ? Floats{} : b; }, x, y);
}
// Rounded to integer, ties to even.
static inline F32x16 nearest(F32x16 x) {
  return each([](Floats a) {
    for (int i = 0; i < LANES; i++) a[i] = __builtin_rintf(a[i]);
    return a;
  }, x);
}

// Of 16 pairs of bf16 numbers (32 in a row), the first or the second of each pair.
static inline F32x16 load_even(const uint16_t* p) {
  return map([=](int i) { return (Floats)(load_register<Words>(p, i) << 16); });
}
static inline F32x16 load_odd(const uint16_t* p) {
  return map([=](int i) { return (Floats)(load_register<Words>(p, i) & 0xffff0000u); });
}

// The bits of x (a float's, or a register's) rounded to bf16, ties to even, in the upper 16 bits.
template <class Bits>
static inline Bits bf16_bits(Bits x) {
  return x + 0x7fff + (x >> 16 & 1);
}
static inline F32x16 round_to_bf16(F32x16 x) {
  return each([](Floats a) { return (Floats)(bf16_bits((Words)a) & 0xffff0000u); }, x);
}
static inline void store(uint16_t* p, F32x16 x) {
  typedef uint16_t Halves __attribute__((vector_size(sizeof(Floats) / 2)));
  store_each(p, [](Floats a) { return __builtin_convertvector(bf16_bits((Words)a) >> 16, Halves); }, x);
}

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
static inline float round_to_bf16(float x) { return float_of(bf16_bits(bits_of(x)) & 0xffff0000u); }

// put(j, column j) of 16 rows. In each four lanes of the registers, 4 x 4 numbers are transposed.
template <class Put>
static inline void transpose(const float* const* rows, const Put& put) {
  for (int column = 0; column < 16; column += 4) {
    F32x16 r[4];
    for (int k = 0; k < 4; k++) r[k] = map([=](int i) { return load_fours(rows + LANES * i + k, column); });
    F32x16 even = each(zip_low, r[0], r[2]), odd = each(zip_low, r[1], r[3]);
    put(column, each(zip_low, even, odd));
    put(column + 1, each(zip_high, even, odd));
    even = each(zip_high, r[0], r[2]), odd = each(zip_high, r[1], r[3]);
    put(column + 2, each(zip_low, even, odd));
    put(column + 3, each(zip_high, even, odd));
  }
}
static inline void transpose(F32x16 t[16]) {
  float numbers[16][16];
  const float* rows[16];
  for (int i = 0; i < 16; i++) store(numbers[i], t[i]), rows[i] = numbers[i];
  transpose(rows, [=](int j, F32x16 x) { t[j] = x; });
}

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

// Adding MAGIC rounds a small float to an integer n: floats of this size have no fraction bits. The low mantissa
// bits then hold 127 + n, which is the exponent of 2^n once they are shifted left by 23 (-127 < n < 128).
constexpr float MAGIC = 12582912.0f + 127.0f;
static inline F32x16 exp2_of_magic(F32x16 x) { return each([](Floats a) { return (Floats)((Words)a << 23); }, x); }

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

enum Activation { SILU = 0, GELU_TANH = 1, CLAMPED_SILU = 2 };

static inline F32x16 activate(F32x16 x, int kind) {
  if (kind == SILU) return x / (set1(1.0f) + exp(zero() - x));
  F32x16 cube = x * x * x;
  F32x16 inner = set1(0.79788456f) * fma(cube, set1(0.044715f), x);
  return set1(0.5f) * x * (set1(1.0f) + tanh(inner));
}

// The output of an MLP's gate and what it gates.
static inline F32x16 gated(F32x16 gate, F32x16 up, int kind) {
  if (kind != CLAMPED_SILU) return activate(gate, kind) * up;
  const F32x16 limit = set1(7.0f), alpha = set1(1.702f);  // GPT-OSS
  return activate(alpha * min(gate, limit), SILU) / alpha * (max(zero() - limit, min(up, limit)) + set1(1.0f));
}
